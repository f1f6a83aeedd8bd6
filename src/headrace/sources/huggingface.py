"""Model repositories of the Hugging Face hub: hf://org/repo@revision/path.

The first listing of a branch or tag pins its commit, and everything is read at that commit, so that all files belong together.
Files are asked for at the hub, which sends us on to its CDN with a url that is signed for a while; when that has expired, the
byte engine asks the hub again. The token goes to the hub only. A listing also tells size and SHA-256 of each file: a size that
differs is an error at once, the digest is there for whoever verifies.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from headrace._environment import HUB_ENDPOINT
from headrace.errors import OptionError, SourceError
from headrace.sources.http import (
    INDEX_NBYTES,
    PREFIX_NBYTES,
    Access,
    Headers,
    HttpError,
    HttpNotFoundError,
    HttpPermissionError,
    HttpSource,
    Kind,
    StoreError,
    Traffic,
    WrongAnswerError,
    fetch,
    open_http,
    parse_error_headers,
    public_url,
)


class GatedRepoError(HttpPermissionError):
    """The repository's owner asks for terms to be accepted, which the account has not, or there is no token."""


class RepoNotFoundError(HttpNotFoundError):
    """There is no such repository; the hub says the same of private ones to those who may not see them."""


class RevisionNotFoundError(HttpNotFoundError):
    """The repository has no such branch, tag or commit."""


class EntryNotFoundError(HttpNotFoundError):
    """The repository has no such file or folder at this revision."""


@dataclass(frozen=True, slots=True)
class HubPath:
    """What an hf:// url names."""

    repo: str
    revision: str
    path: str

    @classmethod
    def parse(cls, url: str) -> HubPath:
        """Take apart 'hf://org/repo[@revision][/path]'; repositories of old have no org.

        A revision with slashes is written percent-encoded, but for refs/pr/N and refs/convert/NAME.

        Raises:
            OptionError: it is no such url, or one of a data set, a space or a bucket.

        >>> HubPath.parse("hf://org/repo@refs/pr/7/sub")
        HubPath(repo='org/repo', revision='refs/pr/7', path='sub')
        """
        scheme, _, rest = url.partition("://")
        kind = rest.partition("/")[0]
        if kind in ("datasets", "spaces", "buckets"):
            raise OptionError(f"{_shown(url)}: only repositories of models can be opened, not {kind}", option="url")
        match = _URL.fullmatch(rest) if scheme.lower() == "hf" else None
        path = (match["path"] or "").strip("/") if match is not None else ".."
        revision = unquote(match["revision"] or "main") if match is not None else ".."
        if match is None or not _is_inside(path or "x") or not _is_inside(revision) or not revision.isprintable():
            raise OptionError(f"{_shown(url)} is not of the form hf://org/repo@revision/path", option="url")
        return cls(match["repo"], revision, path)


_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_URL: Final = re.compile(
    rf"(?P<repo>{_NAME}/{_NAME}|{_NAME}(?=@|/?$))(@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_PAGES: Final = 10_000  # of 1,000 files


def _shown(url: str) -> str:
    """The url, unless someone has put a password where none belongs."""
    return "hf://..." if ":" in url.partition("://")[2].partition("@")[0] else url


def _is_inside(name: str) -> bool:
    return not re.search("[\0\ud800-\udfff]", name) and not any(part in ("", ".", "..") for part in name.split("/"))


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it.

    Attributes:
        nbytes: its size.
        sha256: its digest in hexadecimal; None for small files that are no LFS objects.
    """

    nbytes: int
    sha256: str | None


class HubSource:
    """A file of a repository. Made by `HubFolder.open`.

    Attributes:
        url: hf://..., as the folder was opened.
        nbytes, version: as of the file that the CDN sends.
        sha256: the hub's digest of the file; None where it has none.
    """

    def __init__(self, source: HttpSource, *, url: str, file: HubFile, hub: _Hub) -> None:
        self.url = url
        self.nbytes = source.nbytes
        self.version = source.version
        self.sha256 = file.sha256
        self._source = source
        self._hub = hub

    @property
    def traffic(self) -> Traffic:
        """What was asked of the network so far."""
        return self._source.traffic

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the bytes from `offset` on. See `ByteSource.read_into`."""
        self.read_into_each(offset, [buffer])

    def read_into_each(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, one after another, with the bytes from `offset` on, by one request."""
        try:
            self._source.read_into_each(offset, buffers)
        except SourceError as exc:
            raise self._hub.explain(exc, self.url) from exc

    def check_unchanged(self) -> None:
        """Do nothing: the commit is pinned, and every answer was compared with the version that was opened."""
        try:
            self._source.check_unchanged()
        except SourceError as exc:
            raise self._hub.explain(exc, self.url) from exc

    def close(self) -> None:
        """End reads that are under way, and let go of connections. May be called twice."""
        self._source.close()


class HubFolder:
    """A folder of a model repository, pinned to one commit by the first look at it.

    Args:
        url: hf://org/repo@revision/path; without revision that of the branch main.
        token: of an account, for gated and private repositories. The environment is not looked at: `HubSettings` does.
        endpoint: of the hub, or of a mirror.
        access: trust, proxies and patience.

    Raises:
        OptionError: the url, the token or the endpoint cannot be used.

    Example:
        >>> HubFolder("hf://org/repo@v1").url
        'hf://org/repo@v1'
    """

    def __init__(self, url: str, *, token: str | None = None, endpoint: str = HUB_ENDPOINT, access: Access | None = None) -> None:
        where = HubPath.parse(url)
        self.url = url.rstrip("/")
        self._path = where.path
        self._hub = _Hub(where, token=token, endpoint=endpoint, access=access if access is not None else Access())
        self._folders: dict[str, dict[str, HubFile]] = {}
        self._below: dict[str, HubFile] | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"HubFolder({self.url!r})"

    @property
    def commit(self) -> str | None:
        """The commit that is read; None before the first look, where a branch or tag was given."""
        return self._hub.commit

    def names(self) -> list[str]:
        """Files directly inside, sorted.

        Raises:
            GatedRepoError, RepoNotFoundError, RevisionNotFoundError, EntryNotFoundError: what the hub says.
            SourceError: any other failure.
        """
        return sorted(self._files(""))

    def walk(self) -> list[str]:
        """Files in it and in all folders below, sorted; one listing tells of all. Raises as `names`."""
        with self._lock:
            if self._below is None:
                self._below = self._hub.list(self._path, self.url, recursive=True)
                for folder in {name.rpartition("/")[0] for name in self._below}:
                    inside = f"{folder}/" if folder else ""
                    files = {name[len(inside) :]: file for name, file in self._below.items() if name.startswith(inside)}
                    self._folders.setdefault(folder, {name: file for name, file in files.items() if "/" not in name})
            return sorted(self._below)

    def sha256(self, name: str) -> str | None:
        """The hub's SHA-256 of a file in hexadecimal; None for files that are no LFS objects. Raises as `open`."""
        return self._file(name).sha256

    def nbytes(self, name: str) -> int:
        """The size of a file. Raises as `open`."""
        return self._file(name).nbytes

    def open(self, name: str) -> HubSource:
        """Open a file, which may lie in a folder below. Raises as `names`, and `EntryNotFoundError`."""
        file, url = self._file(name), f"{self.url}/{name}"
        source = self._hub.open(_joined(self._path, name), url)
        if source.nbytes != file.nbytes:
            source.close()
            message = f"cannot open {url}: the hub lists {file.nbytes} bytes, and {source.nbytes} were sent"
            raise WrongAnswerError(message, url=url)
        return HubSource(source, url=url, file=file, hub=self._hub)

    def _file(self, name: str) -> HubFile:
        folder, _, base = name.rpartition("/")
        file = self._files(folder).get(base) if _is_inside(name) else None
        if file is None:
            url = f"{self.url}/{name}"
            reason = f"there is no such file at commit {self.commit}; check its name, or the revision"
            raise EntryNotFoundError(f"cannot open {url}: {reason}", url=url)
        return file

    def _files(self, folder: str) -> dict[str, HubFile]:
        with self._lock:
            if folder not in self._folders:
                self._folders[folder] = self._hub.list(_joined(self._path, folder), _joined(self.url, folder))
            return self._folders[folder]


def open_hub(url: str, *, token: str | None = None, endpoint: str = HUB_ENDPOINT, access: Access | None = None) -> HubSource:
    """Open one file, hf://org/repo@revision/path/name. Arguments and errors as for `HubFolder` and its `open`."""
    folder, _, name = url.rpartition("/")
    return HubFolder(folder, token=token, endpoint=endpoint, access=access).open(name)


def _joined(folder: str, name: str) -> str:
    return "/".join(filter(None, (folder, name)))


class _Hub:
    """A repository on a hub: its addresses, what it lists, and what its errors mean.

    Attributes:
        commit: what the revision stood for when it was first looked at.
    """

    def __init__(self, where: HubPath, *, token: str | None, endpoint: str, access: Access) -> None:
        self._repo, self._revision = where.repo, where.revision
        self._endpoint = _checked_endpoint(endpoint)
        self._has_token = token is not None
        login = {"Authorization": f"Bearer {_checked_token(token)}"} if token is not None else {}
        self._access = replace(
            access,
            headers={**access.headers, **login},
            parse_error=_parse_error,
            allow_redirect=access.allow_redirect or _follow,
        )
        self.commit = self._revision if _COMMIT.fullmatch(self._revision) else None

    def open(self, path: str, url: str) -> HttpSource:
        """Open a file at the pinned commit; `url` names it in errors."""
        with self._explained(url):
            address = f"{self._endpoint}/{self._repo}/resolve/{self.commit}/{quote(path)}"
            prefix_nbytes = INDEX_NBYTES if path.endswith(".index.json") else PREFIX_NBYTES
            return open_http(address, access=self._access, prefix_nbytes=prefix_nbytes)

    def list(self, path: str, url: str, *, recursive: bool = False) -> dict[str, HubFile]:
        """Files directly in a folder, or in it and below it. The first listing pins the commit."""
        if self.commit is None:
            files, self.commit = self._list_at(self._revision, path, url, recursive)
            if self.commit is not None:
                return files
            self.commit = self._ask_commit(url)
        return self._list_at(self.commit, path, url, recursive)[0]

    def _list_at(self, revision: str, path: str, url: str, recursive: bool) -> tuple[dict[str, HubFile], str | None]:
        """(files, the commit they were listed at); None where the hub does not tell, or it moved between two pages."""
        address = f"{self._endpoint}/api/models/{self._repo}/tree/{quote(revision, safe='')}"
        address += f"/{quote(path)}" if path else ""
        files: dict[str, HubFile] = {}
        commits: set[str | None] = set()
        query: str | None = f"recursive={str(recursive).lower()}"
        asked: set[str | None] = set()
        while query not in asked and len(asked) < _PAGES:
            asked.add(query)
            with self._explained(url):
                headers, body = fetch(f"{address}?{query}", access=self._access)
            files |= _parse_page(body, path, url, recursive)
            commits.add(_commit_of(headers))
            query = _next_query(headers)
            if query is None:
                return files, commits.pop() if len(commits) == 1 else None
        raise WrongAnswerError(f"cannot list {url}: the hub's listing does not end", url=url)

    def _ask_commit(self, url: str) -> str:
        address = f"{self._endpoint}/api/models/{self._repo}/revision/{quote(self._revision, safe='')}"
        with self._explained(url):
            _, body = fetch(address, access=self._access)
        found = _parse_json(body, url)
        commit = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise WrongAnswerError(f"cannot open {url}: the hub does not tell the commit of {self._revision}", url=url)
        return commit

    @contextmanager
    def _explained(self, url: str) -> Iterator[None]:
        try:
            yield
        except SourceError as exc:
            raise self.explain(exc, url) from exc

    def explain(self, error: SourceError, url: str) -> SourceError:
        """The error in terms of hf:// and of the hub: its class by the hub's code, and what to do about it."""
        code, status = getattr(error, "code", None), error.status
        kind = _CODES[code].error if code in _CODES else type(error)
        hint, old_hint = self._hint(code, status), getattr(error, "hint", "")
        message = str(error).replace(error.url, f"{url} ({error.url.partition('?')[0]})") if error.url else f"{url}: {error}"
        if hint:
            message = message.removesuffix(f". {old_hint}") + f". {hint}"
        explained = kind(message, url=url, offset=error.offset, nbytes=error.nbytes, status=status, attempts=error.attempts)
        if isinstance(explained, HttpError):
            explained.code, explained.request_id = code, getattr(error, "request_id", None)
            explained.hint = hint or old_hint
        return explained

    def _hint(self, code: str | None, status: int | None) -> str:
        if code in _CODES:
            with_token, without = _CODES[code].with_token, _CODES[code].without
        elif status == 401:
            with_token, without = "The token may be expired or revoked: set HF_TOKEN to a valid one", "Set HF_TOKEN"
        else:
            return ""
        page = public_url(f"{self._endpoint}/{self._repo}")
        return (with_token if self._has_token else without).format(page=page, revision=self._revision)


# ---- what the hub says


@dataclass(frozen=True, slots=True)
class _Meaning:
    kind: Kind
    error: type[HttpError]
    with_token: str
    without: str


_SPELLING: Final = "Check the name, and that the file is at revision {revision}"
_REVISION: Final = "{page} has no revision {revision}; check branch, tag or commit"
_CODES: Final[dict[str | None, _Meaning]] = {
    "GatedRepo": _Meaning(
        "denied",
        GatedRepoError,
        "Accept the terms at {page} with the token's account, and let a fine-grained token read gated repositories",
        "Accept the terms at {page}, and set HF_TOKEN to a token of that account",
    ),
    "RepoNotFound": _Meaning(
        "missing",
        RepoNotFoundError,
        "Check the name; if it is private, set HF_TOKEN to a token that may read it",
        "Check the name; if it is private or gated, set HF_TOKEN",
    ),
    "RevisionNotFound": _Meaning("missing", RevisionNotFoundError, _REVISION, _REVISION),
    "EntryNotFound": _Meaning("missing", EntryNotFoundError, _SPELLING, _SPELLING),
}


def _parse_error(status: int, headers: Headers, body: bytes) -> StoreError:
    """The hub says what is wrong in headers; its CDN does not, and a url that has expired there is for the engine to renew."""
    store, message = parse_error_headers(status, headers, body), headers.get("x-error-message")
    meaning = _CODES.get(headers.get("x-error-code"))
    if meaning is not None:
        return replace(store, message=message, kind=meaning.kind, action="fail")
    return replace(store, message=message, action="fail" if status == 401 and message else None)


def _follow(_old: str, _new: str, _headers: Headers) -> bool:
    return True


def _commit_of(headers: Headers) -> str | None:
    commit = headers.get("x-repo-commit")
    return commit if commit and _COMMIT.fullmatch(commit) else None


def _next_query(headers: Headers) -> str | None:
    """The query of the next page. Its host and path are not used: the token is for ours, and a mirror may pass on another's."""
    for link in headers.get_all("link"):
        match = re.search(r'<([^>]*)>[^,<]*;\s*rel="?next"?', link)
        if match is not None:
            return urlsplit(match[1]).query or None
    return None


def _parse_page(body: bytes, path: str, url: str, recursive: bool) -> dict[str, HubFile]:
    entries = _parse_json(body, url)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise WrongAnswerError(f"cannot list {url}: the hub's answer is no listing", url=url)
    prefix = f"{path}/" if path else ""
    files: dict[str, HubFile] = {}
    for entry in entries:
        name, size, lfs = entry.get("path"), entry.get("size"), entry.get("lfs")
        if entry.get("type") != "file" or not isinstance(name, str) or type(size) is not int:
            continue
        name = name.removeprefix(prefix) if name.startswith(prefix) else ""
        if name and (recursive or "/" not in name):
            digest = lfs.get("oid") if isinstance(lfs, dict) else None
            known = isinstance(digest, str) and _SHA256.fullmatch(digest)
            files[name] = HubFile(size, digest if known else None)
    return files


def _parse_json(body: bytes, url: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise WrongAnswerError(
            f"cannot list {url}: the hub's answer is no JSON; check the endpoint (HF_ENDPOINT)", url=url
        ) from exc


def _checked_endpoint(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.fragment
    except ValueError:
        valid = False
    if not valid:
        raise OptionError(f"the hub's endpoint is https://host, not {public_url(endpoint)}", option="endpoint")
    return endpoint.rstrip("/")


def _checked_token(token: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]+", token.strip()):
        raise OptionError("the hub's token is empty or has characters that no token has (it is not shown)", option="token")
    return token.strip()
