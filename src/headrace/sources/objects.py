"""Objects of a store and the folders that their keys make: what S3, Google Cloud Storage and Azure have in common.

A store's package names, signs, lists and explains errors; what is the same for all of them stands here. Nothing here knows which
store it is.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar
from urllib.parse import quote, urlsplit

from headrace.errors import SourceChangedError, SourceError
from headrace.sources.base import ByteSource, read_into_each
from headrace.sources.http import (
    INDEX_NBYTES,
    Access,
    Headers,
    Traffic,
    UnsatisfiableError,
    Version,
    WrongAnswerError,
    fetch,
    fetch_head,
    open_http,
)
from headrace.sources.memory import MemorySource

PREFIX_NBYTES: Final = 64 << 10  # what the reader of headers asks for first


def is_endpoint(text: str) -> bool:
    """Whether it is http(s)://host[:port][/path], without user or query."""
    try:
        parts = urlsplit(text)
        is_plain = "@" not in parts.netloc and not parts.query and not parts.fragment
        return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def escape(text: str, *, safe: str = "") -> str:
    """Percent-encode all but what signatures leave as it is, beside letters and digits."""
    return quote(text, safe=f"-_.~{safe}", errors="surrogateescape")


class Explained:
    """An object, readable at any offset from several threads, whose errors are told in the store's own terms.

    Attributes:
        url: as the store's users write it.
        nbytes, version: when it was opened.
        explain: makes an error about the request one about the object.
    """

    def __init__(self, source: ByteSource, url: str, explain: Callable[[SourceError], SourceError]) -> None:
        self.url, self.nbytes = url, source.nbytes
        self.version: object = source.version
        self._source, self.explain = source, explain

    @property
    def traffic(self) -> Traffic:
        """What was asked of the network so far, the opening included."""
        found = getattr(self._source, "traffic", None)
        return found if isinstance(found, Traffic) else Traffic(requests=2, failed=1)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the bytes from `offset` on. See `ByteSource.read_into`.

        Raises:
            SourceChangedError: the object is no longer the one that was opened.
            SourceError: any other failure; the classes are those of the store's package and of `headrace.sources.http`.
        """
        self.read_into_each(offset, [buffer])

    def read_into_each(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, one after another, with the bytes from `offset` on, by one request. Raises as `read_into`."""
        try:
            read_into_each(self._source, offset, buffers)
        except SourceError as exc:
            raise self.explain(exc) from exc

    def check_unchanged(self) -> None:
        """Do nothing: every answer was compared with the version that was opened."""
        try:
            self._source.check_unchanged()
        except SourceError as exc:
            raise self.explain(exc) from exc

    def close(self) -> None:
        """End reads that are under way in other threads, with `SourceError`. May be called twice."""
        self._source.close()


def ask_checksums(source: Explained, url: str, access: Access, parse: Callable[[Headers], dict[str, str]]) -> dict[str, str]:
    """The store's checksums of a whole object, {algorithm: hexadecimal}, by one HEAD.

    Args:
        source: the open object.
        url: as it goes over the wire. `access`: for it.
        parse: finds the checksums in the answer's headers.

    Raises:
        SourceChangedError: the object is no longer the one that was opened.
        SourceError: any other failure.
    """
    try:
        headers = fetch_head(url, access=access)
    except SourceError as exc:
        raise source.explain(exc) from exc
    changed = source.version.difference(Version.of(headers, source.nbytes)) if isinstance(source.version, Version) else ""
    if changed:
        raise SourceChangedError(f"{source.url} was replaced after it was opened ({changed})", url=source.url)
    return parse(headers)


def decode_checksum(text: str, nbytes: int) -> str | None:
    """A checksum of so many bytes in base64, as stores write them, in hexadecimal; None for anything else."""
    try:
        value = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return value.hex() if len(value) == nbytes else None


def open_object(url: str, access: Access, prefix_nbytes: int) -> ByteSource:
    """Open an object with one GET of its first bytes; a second one where it turns out to be empty.

    Args:
        url: as it goes over the wire. `access`: for its bucket or container.
        prefix_nbytes: bytes to fetch now and keep.
    """
    try:
        return open_http(url, access=access, prefix_nbytes=prefix_nbytes)
    except UnsatisfiableError:
        headers, body = fetch(url, access=access, limit_nbytes=PREFIX_NBYTES)
        if body:
            raise
        empty = MemorySource(b"", url=url)
        empty.version = Version.of(headers, 0)
        return empty


def about_object(
    error: SourceError, *, kind: type[SourceError] | None, hint: str, url: str, base: str, listing: bool, **place: str | None
) -> SourceError:
    """The engine's error as one of a store's, about an object, or a prefix that was listed.

    Args:
        error: the engine's.
        kind: the store's class; None: the engine's own.
        hint: what to try, in place of what the engine says.
        url: as the store's users write it. `base`: on the wire; its host is shown beside the url.
        listing: whether a prefix was listed and no object read.
        place: further fields of the store's errors, the bucket and the key.
    """
    said, parts = getattr(error, "hint", ""), urlsplit(base)
    message, where = str(error), f"{url} ({parts.scheme}://{parts.netloc})"
    message = message.removesuffix(f". {said}") if said else message
    message = message.replace(error.url, where) if error.url else f"cannot ask for {where}: {message}"
    message = message.replace("cannot fetch", "cannot list", 1) if listing else message
    message = f"{message}. {hint}" if hint else message
    built = (kind or type(error))(
        message, url=url, offset=error.offset, nbytes=error.nbytes, status=error.status, attempts=error.attempts
    )
    kept = {name: getattr(error, name, None) for name in ("code", "request_id")}
    vars(built).update(kept, hint=hint, **place)
    return built


class _Named(Protocol):
    """An object on a page of a listing."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


_E = TypeVar("_E", bound=_Named)


@dataclass(frozen=True, slots=True)
class Page(Generic[_E]):
    """One answer of a listing, which may be empty although others follow.

    Attributes:
        entries: the objects.
        has_folders: whether there are folders below the prefix.
        token: of the next page; None: there is none.
    """

    entries: tuple[_E, ...]
    has_folders: bool
    token: str | None

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is under the prefix."""
        return not self.entries and not self.has_folders


def is_marker(entry: _Named) -> bool:
    """Whether it stands for a folder and is no file: what consoles ('a/'), Hadoop ('a_$folder$') and the like leave behind."""
    return not entry.name or (entry.nbytes == 0 and entry.name.endswith(("/", "_$folder$")))


class KeyFolder(ABC, Generic[_E]):
    """The objects whose keys begin with a prefix and a slash: 'm' is 'm/...', and never 'm2/...'.

    A store's folder says how pages are had, which entries are markers of folders, and what is told where there is nothing.
    """

    url: str
    _prefix: str

    def names(self) -> list[str]:
        """Names of the objects directly under the prefix, sorted; without markers of folders.

        Raises:
            SourceNotFoundError, SourcePermissionError: there is nothing there, or it may not be listed; the store's own classes.
        """
        return [entry.name for entry in self.list_keys(recursive=False)]

    def walk(self) -> list[str]:
        """Names of all objects under the prefix, those in folders below included. Raises as `names`."""
        return [entry.name for entry in self.list_keys()]

    def list_keys(self, *, recursive: bool = True) -> list[_E]:
        """The objects under the prefix, sorted by name, without markers of folders; at any depth where it is recursive.

        Raises:
            As `names`.
        """
        pages = list(self._pages(recursive))
        if self._prefix and all(page.is_empty for page in pages):
            raise self._no_such_prefix()
        found = {entry.name: entry for page in pages for entry in page.entries if not self._is_marker(entry)}
        return [found[name] for name in sorted(found) if recursive or "/" not in name]

    def _page_of(self, body: bytes, token: str, parse: Callable[..., Page[_E]], *, store: str) -> Page[_E]:
        """A page that is one, and not the one before."""
        try:
            page = parse(body, prefix=self._prefix)
            if page.token == token:
                raise ValueError("it names itself as the next one")
        except ValueError as exc:
            reason = f"the answer is no page of a listing: {exc}. Check that the endpoint is one of {store}"
            raise WrongAnswerError(f"cannot list {self.url}: {reason}", url=self.url) from exc
        return page

    @abstractmethod
    def _pages(self, recursive: bool) -> Iterator[Page[_E]]: ...

    @abstractmethod
    def _is_marker(self, entry: _E) -> bool: ...

    @abstractmethod
    def _no_such_prefix(self) -> SourceError: ...


def prefix_nbytes_of(name: str) -> int:
    """Bytes of a file to ask for at once: an index in one request, of shards what most headers fit into."""
    return INDEX_NBYTES if name.endswith(".index.json") else PREFIX_NBYTES


def leads_out(name: str) -> bool:
    """Whether a name is no name of a file inside of a folder."""
    return any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name
