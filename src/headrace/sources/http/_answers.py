"""PURE: whether an answer is what was asked for.

Status, range, length, encoding and version are all compared before a byte of the body is taken, and what does not fit is never
written as if it were right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from headrace.sources.http._failures import Failure, Headers, Kind, StoreError


@dataclass(frozen=True, slots=True)
class Version:
    """What tells one state of an object from another, as far as the server says it."""

    nbytes: int
    etag: str | None = None
    generation: str | None = None
    version_id: str | None = None
    modified: str | None = None

    @classmethod
    def of(cls, headers: Headers, nbytes: int) -> Version:
        """The version that an answer's head tells of."""
        return cls(
            nbytes,
            etag=headers.get("etag"),
            generation=headers.get("x-goog-generation"),
            version_id=headers.get("x-amz-version-id"),
            modified=headers.get("last-modified"),
        )

    @property
    def tells_apart(self) -> bool:
        """Whether the server says anything but the size, which versions may have in common."""
        return bool(self.etag or self.generation or self.version_id or self.modified)

    @property
    def precondition(self) -> dict[str, str]:
        """Headers that make the server refuse (412) if it has another version: If-Match, which takes strong ETags only."""
        return {"If-Match": self.etag} if self.etag and not self.etag.startswith("W/") else {}

    def difference(self, found: Version) -> str:
        """What tells `found` from this one, in words; empty if nothing does.

        An answer that no longer tells its ETag or generation counts as another version. Last-Modified is compared only where
        there is nothing better: it differs between the machines of some stores.
        """
        pairs = [
            ("size", str(self.nbytes), str(found.nbytes)),
            ("ETag", _opaque(self.etag), _opaque(found.etag)),
            ("generation", self.generation, found.generation),
            ("version", self.version_id, found.version_id),
        ]
        if not (self.etag or self.generation or self.version_id):
            pairs.append(("Last-Modified", self.modified, found.modified))
        return ", ".join(f"{name} {before} -> {now or 'none'}" for name, before, now in pairs if before and before != now)


def _opaque(etag: str | None) -> str | None:
    """An ETag without quotes and weakness: proxies weaken what they pass on, and rclone quotes in some answers only."""
    return etag.removeprefix("W/").strip('"') if etag else etag


@dataclass(frozen=True, slots=True)
class Asked:
    """A range from `start` to `end` (exclusive) of an object; `version` is None while it is being opened."""

    start: int
    end: int
    version: Version | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """An answer whose body may be taken: after `skip` bytes come `nbytes` bytes, those from the range's start on.

    Attributes:
        skip: bytes of the body before the range, where the server sent the whole object.
        nbytes: bytes of the body that belong to the range; fewer than were asked for where the server sends less.
        version: of the object.
    """

    nbytes: int
    version: Version
    skip: int = 0


# So much is received and thrown away, to find the range in a whole object: what small files have in all, or a header.
_SKIP_NBYTES: Final = 1 << 20

_CONTENT_RANGE: Final = re.compile(r"bytes[ \t]+(?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)", re.IGNORECASE | re.ASCII)


def parse_content_range(text: str) -> tuple[int, int, int | None] | None:
    """(start, end, total) of a Content-Range, end exclusive (RFC 9110, 14.4); total None where it is not told.

    (0, 0, total) for 'bytes */total', which says that a range lies outside. None for what cannot be right.
    """
    match = _CONTENT_RANGE.fullmatch(text.strip())
    if match is None:
        return None
    total = None if match[3] == "*" else int(match[3])
    if match[1] is None:
        return (0, 0, total) if total is not None else None
    start, end = int(match[1]), int(match[2]) + 1
    return (start, end, total) if start < end and (total is None or end <= total) else None


def check_answer(status: int, headers: Headers, asked: Asked) -> Accepted:
    """Judge the head of an answer to a ranged GET.

    Raises:
        Failure: 'encoding', 'range', 'changed' or 'protocol'; nothing of the body may be used.
    """
    empty = _empty_object(status, headers, asked)
    if empty is not None:
        return empty
    if status not in (200, 206):
        raise Failure("protocol", f"the server answered {status} to a GET of a range", status=status)
    coding = ", ".join(headers.get_all("content-encoding"))
    if coding.lower() not in ("", "identity"):
        raise Failure("encoding", f"the server sent it with Content-Encoding {coding!r}", status=status)
    length = _single_length(headers, status)
    told = headers.get_all("content-range")
    if not told and status == 200:
        return _whole_object(headers, asked, length)
    return _part(headers, asked, length, told, status)


def _empty_object(status: int, headers: Headers, asked: Asked) -> Accepted | None:
    """An object without bytes has no range that could be satisfied: 416 with 'bytes */0' is how some stores open one."""
    if status != 416 or asked.version is not None or parse_content_range(headers.get("content-range") or "") != (0, 0, 0):
        return None
    return Accepted(0, Version.of(headers, 0))


def _single_length(headers: Headers, status: int) -> int | None:
    lengths = {text.strip() for text in headers.get_all("content-length")}
    if not lengths or headers.get("transfer-encoding") is not None:
        return None
    text = lengths.pop()
    if lengths or not re.fullmatch(r"[0-9]{1,18}", text):
        raise Failure("protocol", "the server's Content-Length is no number", status=status)
    return int(text)


def _whole_object(headers: Headers, asked: Asked, length: int | None) -> Accepted:
    if length is None:
        raise Failure("range", "the server sent the whole object and not its size", status=200)
    version = Version.of(headers, length)
    _check_version(asked, version, 200)
    if asked.start > min(length, _SKIP_NBYTES):
        raise Failure("range", f"the server sent the whole object in answer to bytes {asked.start}-{asked.end - 1}", status=200)
    return Accepted(min(asked.end, length) - asked.start, version, skip=asked.start)


def _part(headers: Headers, asked: Asked, length: int | None, told: list[str], status: int) -> Accepted:
    wanted = f"bytes {asked.start}-{asked.end - 1}"
    found = parse_content_range(told[0]) if len(told) == 1 else None
    if found is None or found[0] == found[1]:
        raise Failure("range", f"the server answered {wanted} with Content-Range {', '.join(told) or 'missing'}", status=status)
    start, end, total = found
    if total is None:
        if asked.version is None:
            raise Failure("range", "the server does not tell the size of the object", status=status)
        total = asked.version.nbytes
    version = Version.of(headers, total)
    _check_version(asked, version, status)
    if start != asked.start or end > min(asked.end, total):
        raise Failure("range", f"the server answered {wanted} with {told[0]}", status=status)
    if length is not None and length != end - start:
        raise Failure("range", f"the server announced {length} bytes as {told[0]}", status=status)
    return Accepted(end - start, version)


def _check_version(asked: Asked, found: Version, status: int) -> None:
    changed = asked.version.difference(found) if asked.version is not None else ""
    if changed:
        raise Failure("changed", f"it was replaced while it was read ({changed})", status=status)


_STATUS_KINDS: Final[dict[int, Kind]] = {
    401: "unauthorized", 403: "denied", 404: "missing", 407: "proxy", 408: "unavailable", 410: "missing", 412: "changed",
    416: "unsatisfiable", 429: "throttled", 500: "unavailable", 502: "unavailable", 503: "throttled", 504: "unavailable",
    509: "throttled", 520: "unavailable", 521: "unavailable", 522: "unavailable", 523: "unavailable", 524: "unavailable",
}  # fmt: skip


def kind_of_status(status: int) -> Kind:
    """What a status other than success means; 520 to 524 are Cloudflare's, which stands before some stores."""
    return _STATUS_KINDS.get(status, "redirect" if 300 <= status < 400 else "status")


def refusal(status: int, headers: Headers, store: StoreError, asked: Asked | None, wait_s: float | None) -> Failure:
    """The failure of an answer that is no success. 416 for bytes that the object had when it was opened: it has changed."""
    kind = kind_of_status(status)
    message = f"the {'proxy' if status == 407 else 'server'} answered {status}"
    if kind == "unsatisfiable" and asked is not None and asked.version is not None:
        told = parse_content_range(headers.get("content-range") or "")
        if told is not None and told[2] is not None and told[2] != asked.version.nbytes:
            kind, message = "changed", f"it was replaced while it was read (size {asked.version.nbytes} -> {told[2]})"
    if kind == "changed" and status == 412:
        message = "it was replaced while it was read (the server answered 412)"
    return Failure(kind, message, status=status, store=store, wait_s=wait_s)
