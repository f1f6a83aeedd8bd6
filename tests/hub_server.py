"""A small Hugging Face hub on loopback: the API of trees and revisions, `resolve` with a redirect to a second server, and tokens.

`Hub` serves the repositories it is given; LFS files (those that end in .safetensors) are sent by its `cdn`, another server on
another port, under urls that are signed and end with `expire()`. Small files come from the hub itself, by a redirect to a path of
its own. Every request of both is kept, so that a test can say what went where.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from http_servers import Fault, Seen, Server

Reply = tuple[int, Mapping[str, str], bytes]


def commit_of(files: Mapping[str, bytes]) -> str:
    """What a commit of these files is called."""
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


@dataclass
class Repo:
    """A repository.

    Attributes:
        files: those of the branch main, by path.
        history: files of older commits, by commit.
        refs: commits of tags and other branches.
        access: 'public', 'private' or 'gated'.
        moves_to: another repository that it was renamed to.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    access: str = "public"
    moves_to: str | None = None

    @property
    def commit(self) -> str:
        return commit_of(self.files)

    def push(self, files: Mapping[str, bytes]) -> str:
        """Commit these files to main; returns what the commit before is called."""
        before = self.commit
        self.history[before], self.files = self.files, dict(files)
        return before

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """(commit, files) of a revision."""
        commit = self.commit if revision == "main" else self.refs.get(revision, revision)
        files = self.files if commit == self.commit else self.history.get(commit)
        return (commit, files) if files is not None else None


class Hub:
    """A hub and its CDN.

    Args:
        repos: by 'org/name'.
        tokens: {token: repositories that its account may read, besides public ones}.
        tls: for both servers.
        page: entries on a page of a listing.
        tells_commit: whether listings carry X-Repo-Commit.
        next_host: what stands in the links to the next page instead of the hub's own address.
        cdn_faults: how the CDN misbehaves.

    Attributes:
        server, cdn: see `Server.seen`.
        before_answer: called with each request to the hub's API, to change things meanwhile.
    """

    def __init__(
        self,
        repos: Mapping[str, Repo],
        *,
        tokens: Mapping[str, set[str]] | None = None,
        tls: ssl.SSLContext | None = None,
        page: int = 1000,
        tells_commit: bool = True,
        next_host: str | None = None,
        cdn_faults: list[Fault] | None = None,
    ) -> None:
        self.repos, self.tokens = dict(repos), dict(tokens or {})
        self.before_answer: Any = None
        self._page, self._tells_commit, self._next_host = page, tells_commit, next_host
        self._numbers = itertools.count(1)
        self._valid: set[str] = set()
        self.cdn = Server({}, cdn_faults or [], tls=tls, check=self._check_signature, host="127.0.0.1")
        self.server = Server({}, tls=tls, check=self._answer)

    @property
    def endpoint(self) -> str:
        return self.server.url_of("")

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.cdn.stop()

    def expire(self) -> None:
        """End all urls that were signed so far."""
        self._valid.clear()

    def api(self) -> list[str]:
        """Paths of the requests to the API, in order."""
        return [seen.target.partition("?")[0] for seen in self.server.seen if seen.target.startswith("/api/")]

    # ---- the hub

    def _answer(self, seen: Seen) -> Reply | None:
        path, query = urlsplit(seen.target).path, parse_qs(urlsplit(seen.target).query)
        if path.startswith("/own/"):
            return None  # from `server.files`
        if path.startswith("/api/") and self.before_answer is not None:
            self.before_answer(seen)
        parts = path.removeprefix("/api/models/").strip("/").split("/")
        verb_at = next((i for i, part in enumerate(parts) if part in ("tree", "revision", "resolve")), len(parts))
        name = "/".join(parts[:verb_at])
        if len(parts) < verb_at + 2:
            return 404, {}, b""
        refused = self._refuse(name, seen)
        if refused is not None:
            return refused
        repo = self.repos[name]
        if repo.moves_to is not None:
            return (
                307,
                {"Location": path.replace(name, repo.moves_to) + ("?" + urlsplit(seen.target).query if query else "")},
                b"",
            )
        found = repo.at(unquote(parts[verb_at + 1]))
        if found is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {parts[verb_at + 1]}")
        inside = unquote("/".join(parts[verb_at + 2 :]))
        if parts[verb_at] == "revision":
            return 200, {}, json.dumps({"id": name, "sha": found[0]}).encode()
        if parts[verb_at] == "tree":
            return self._list(path, query, *found, inside)
        return self._resolve(*found, inside)

    def _refuse(self, name: str, seen: Seen) -> Reply | None:
        token = seen.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.tokens:
            return 401, {"X-Error-Message": f"Invalid credentials in Authorization header: Bearer {token}"}, b""
        repo = self.repos.get(name)
        allowed = repo is not None and (repo.access == "public" or name in self.tokens.get(token, ()))
        if repo is None or (repo.access == "private" and not allowed):
            return _error(404 if token else 401, "RepoNotFound", "Repository not found")
        if not allowed and (repo.access == "gated"):
            message = f"Access to model {name} is restricted. You must have access to it and be authenticated to access it."
            return _error(403 if token else 401, "GatedRepo", message)
        return None

    def _list(self, path: str, query: dict[str, list[str]], commit: str, files: dict[str, bytes], inside: str) -> Reply:
        prefix = f"{inside}/" if inside else ""
        below = {name: data for name, data in files.items() if name.startswith(prefix)}
        if inside and not below:
            return _error(404, "EntryNotFound", f"{inside} does not exist on this revision")
        recursive = query.get("recursive", ["false"])[0]
        folders = sorted({prefix + name[len(prefix) :].partition("/")[0] for name in below if "/" in name[len(prefix) :]})
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": name} for name in folders]
        entries += [_entry(name, below[name]) for name in sorted(below) if recursive == "true" or "/" not in name[len(prefix) :]]
        start = int(query.get("cursor", ["0"])[0])
        headers = {"X-Repo-Commit": commit} if self._tells_commit else {}
        if start + self._page < len(entries):
            there = (self._next_host or self.endpoint) + path
            headers["Link"] = f'<{there}?recursive={recursive}&cursor={start + self._page}>; rel="next"'
        return 200, headers, json.dumps(entries[start : start + self._page]).encode()

    def _resolve(self, commit: str, files: dict[str, bytes], inside: str) -> Reply:
        data = files.get(inside)
        if data is None:
            return _error(404, "EntryNotFound", "Entry not found")
        digest = hashlib.sha256(data).hexdigest()
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest}"'}
        if not _is_lfs(inside):
            self.server.files[f"/own/{digest}"] = data
            return 307, {**headers, "Location": f"/own/{digest}"}, b""
        self.cdn.files[f"/lfs/{digest}"] = data
        signature = f"signed{next(self._numbers):04}"
        self._valid.add(signature)
        return 302, {**headers, "Location": f"{self.cdn.url_of(f'/lfs/{digest}')}?X-Signature={signature}"}, b"Found"

    # ---- its CDN

    def _check_signature(self, seen: Seen) -> Reply | None:
        signature = parse_qs(urlsplit(seen.target).query).get("X-Signature", [""])[0]
        return None if signature in self._valid else (403, {}, b"<Error><Code>AccessDenied</Code></Error>")


def _is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}
    return {**entry, "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}} if _is_lfs(name) else entry


def _error(status: int, code: str, message: str) -> Reply:
    return status, {"X-Error-Code": code, "X-Error-Message": message, "X-Request-Id": "Root=1-test"}, message.encode()


@contextlib.contextmanager
def serving(files: Mapping[str, bytes], **options: Any) -> Any:
    """A hub with one public repository, org/repo, of these files."""
    with Hub({"org/repo": Repo(dict(files))}, **options) as hub:
        yield hub
