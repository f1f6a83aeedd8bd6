"""Files and folders of a filesystem, and the versions that it tells of them."""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from headrace.errors import OptionError, SourceChangedError, SourceError, SourceNotFoundError, TruncatedError
from headrace.sources.fsspec._calls import Calls, Filesystem, module
from headrace.sources.fsspec._chain import own_form, secrets_of, shown_chain, split_chain
from headrace.sources.fsspec._errors import Words
from headrace.sources.http import Traffic
from headrace.sources.objects import leads_out

# What a filesystem's `info` may tell that is another one for other bytes, in lower case and without '_' and '-'. Not the time of
# the last access, and not urls, which may be signed anew for every listing.
_MARKS: Final = frozenset(
    {"checksum", "contentmd5", "crc", "crc32c", "created", "digest", "etag", "generation", "hash", "ino", "lastmodified", "md5"}
    | {"md5hash", "modified", "modify", "mtime", "oid", "sha", "sha1", "sha256", "updated", "version", "versionid"}
)
_MISSING: Final = "urls of this scheme are read by fsspec, which is not installed: pip install headrace[fsspec]"


@dataclass(frozen=True, slots=True)
class FsspecVersion:
    """What a filesystem tells of a file that is another one for other bytes.

    Attributes:
        nbytes: its size.
        marks: names and values, sorted; none where the filesystem tells only the size.
    """

    nbytes: int
    marks: tuple[tuple[str, str], ...]

    @property
    def tells_apart(self) -> bool:
        """Whether two versions of the same size can be told apart."""
        return bool(self.marks)


class FsspecFolder:
    """A folder of any filesystem that fsspec knows.

    Args:
        url: as fsspec takes it, chained with '::' or not; with `filesystem` a path in it.
        options: what fsspec calls storage options: host, user, token, or a dictionary for each protocol of a chain.
        filesystem: one that is open already. Calls of others to it are not kept apart from those made here.

    Raises:
        OptionError: fsspec, or what it needs for this scheme, is not installed; or it cannot use the url or the options.
        SourceError: the filesystem cannot be reached.

    Example:
        >>> FsspecFolder("memory://models/minilm").url  # doctest: +SKIP
        'memory://models/minilm'
    """

    def __init__(self, url: str, *, options: Mapping[str, Any] | None = None, filesystem: Filesystem | None = None) -> None:
        first, _, rest = shown_chain(url).partition("::")
        self.url = first if first.endswith("://") else first.rstrip("/")
        self._words = Words(f" (in {rest})" if rest else "", secrets_of(url, options))
        if filesystem is None:
            filesystem, path = self._connect(url, dict(options or {}))
        else:
            path = str(getattr(type(filesystem), "_strip_protocol", str)(url))
        self._calls = Calls(filesystem)
        self._path = path.rstrip("/")

    def __repr__(self) -> str:
        return f"FsspecFolder({self.url!r})"

    def names(self) -> list[str]:
        """Names of the files directly inside, sorted. Raises `SourceNotFoundError` where there is no such folder."""
        with self._words.explained("list", self.url):
            entries = self._calls.listed(self._path)
        names = [name for entry in entries if (name := self._name_of(entry)) and "/" not in name]
        if not names and any(type_of(entry) == "file" and _bare(entry["name"]) == _bare(self._path) for entry in entries):
            raise SourceNotFoundError(f"cannot list {self.url}: it is a file", url=self.url, status=errno.ENOTDIR)
        return sorted(names)

    def walk(self) -> list[str]:
        """Paths of all files in it and below it, sorted. Raises as `names`."""
        with self._words.explained("list", self.url):
            entries = self._calls.found(self._path)
        return sorted(name for entry in entries if (name := self._name_of(entry))) or self.names()

    def open(self, name: str) -> FsspecSource:
        """Open a file, which may lie in a folder below. Raises `SourceNotFoundError` where there is none of this name."""
        url = f"{self.url}{'' if self.url.endswith('://') else '/'}{name}"
        if leads_out(name):
            raise SourceNotFoundError(f"cannot open {url}: it is no name of a file inside the folder", url=url)
        path = f"{self._path}/{name}" if self._path else name
        with self._words.explained("open", url):
            info = self._calls.info(path)
        version = version_of(info, url)
        kind = FsspecSource if self._calls.near else RemoteFsspecSource
        return kind(self._calls, path, url=url, version=version, words=self._words)

    def _connect(self, url: str, options: dict[str, Any]) -> tuple[Filesystem, str]:
        """The filesystem and the path in it. Nobody else is given this filesystem, so nobody else calls it meanwhile."""
        try:
            core = module("fsspec.core")
        except ImportError as exc:
            raise OptionError(f"{shown_chain(url)}: {_MISSING}", option="url") from exc
        try:
            found: tuple[Filesystem, str] = core.url_to_fs(url, skip_instance_cache=True, **options)
        except (ImportError, TypeError, ValueError) as exc:  # before anything was reached
            own = own_form(url) if isinstance(exc, ImportError) else None
            hint = f"; headrace has a source of its own for this store: write {own}" if own is not None else ""
            raise OptionError(f"fsspec cannot open {shown_chain(url)}: {self._words.of(exc)}{hint}", option="url") from None
        except Exception as exc:  # noqa: BLE001 - whatever a filesystem of anybody's raises
            raise self._words.error(exc, "open", self.url) from self._words.cause(exc)
        return found

    def _name_of(self, entry: Mapping[str, Any]) -> str:
        """The path of a file below the folder, relative; '' for folders and for what lies elsewhere."""
        inside, full = f"{_bare(self._path)}/", _bare(entry["name"])
        is_inside = type_of(entry) in ("file", "link") and (inside == "/" or full.startswith(inside))
        return full.removeprefix(inside) if is_inside else ""


def open_fsspec(url: str, *, options: Mapping[str, Any] | None = None) -> FsspecSource:
    """Open one file by its url. Arguments and errors as for `FsspecFolder` and its `open`."""
    folder, name = split_chain(url)
    return FsspecFolder(folder, options=options).open(name)


class FsspecSource:
    """A file of a filesystem. Made by `FsspecFolder.open`.

    Attributes:
        url: the folder's and the name.
        nbytes, version: as its `info` told when it was opened.
    """

    def __init__(self, calls: Calls, path: str, *, url: str, version: FsspecVersion, words: Words) -> None:
        self.url, self.nbytes, self.version = url, version.nbytes, version
        self._calls: Calls | None = calls
        self._path, self._words = path, words

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the bytes from `offset` on. See `ByteSource.read_into`."""
        self.read_into_each(offset, [buffer])

    def read_into_each(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, one after another, with the bytes from `offset` on, by one call. Raises as `read_into`."""
        calls, nbytes = self._calls, sum(map(len, buffers))
        if calls is None or offset < 0 or offset + nbytes > self.nbytes:
            raise self._refuse_range(offset, nbytes)
        if not nbytes:
            return
        with self._words.explained("read", self.url, offset, nbytes):
            got = calls.read_into_each(self._path, offset, buffers)
        if got < nbytes:
            raise self._error(TruncatedError, f"only {got} came, although its size is {self.nbytes}", offset, nbytes)
        if got > nbytes:
            raise self._error(SourceError, f"{got} came; what serves it does not know ranges", offset, nbytes, errno.EIO)

    def check_unchanged(self) -> None:
        """Ask the filesystem again, and compare. See `ByteSource.check_unchanged`.

        Does nothing where the filesystem tells no more of a file than its size.
        """
        calls = self._calls
        if calls is None:
            raise self._refuse_range(None, None)
        if not self.version.tells_apart:
            return
        try:
            with self._words.explained("check", self.url):
                now = version_of(calls.info(self._path), self.url)
        except SourceNotFoundError as exc:
            raise SourceChangedError(f"{self.url} vanished while it was read; open it again", url=self.url) from exc
        if now != self.version:
            changed = ", ".join(sorted({name for name, _ in set(now.marks) ^ set(self.version.marks)})) or "nbytes"
            raise SourceChangedError(
                f"{self.url} is not the file that was opened: {changed} differs; open it again", url=self.url
            )

    def close(self) -> None:
        """Let go of the filesystem; reads that are under way in other threads finish first. May be called twice."""
        self._calls = None

    def _refuse_range(self, offset: int | None, nbytes: int | None) -> SourceError:
        if self._calls is None:
            return self._error(SourceError, "it was closed", offset, nbytes, errno.EBADF)
        if offset is None or offset < 0:
            return self._error(SourceError, "the offset is negative", offset, nbytes, errno.EINVAL)
        return self._error(TruncatedError, f"it has {self.nbytes} bytes", offset, nbytes)

    def _error(
        self, kind: type[SourceError], why: str, offset: int | None, nbytes: int | None, status: int | None = None
    ) -> SourceError:
        message = f"cannot read {nbytes} bytes at {offset} of {self.url}: {why}"
        return kind(message, url=self.url, offset=offset, nbytes=nbytes, status=status)


class RemoteFsspecSource(FsspecSource):
    """A file of a filesystem whose calls may be round trips. Made by `FsspecFolder.open`."""

    def __init__(self, calls: Calls, path: str, *, url: str, version: FsspecVersion, words: Words) -> None:
        super().__init__(calls, path, url=url, version=version, words=words)
        self._lock = threading.Lock()
        self._traffic = Traffic(requests=1)

    @property
    def traffic(self) -> Traffic:
        """What the filesystem was asked for; it may have made more requests of that than one, or none."""
        return self._traffic

    def read_into_each(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """As `FsspecSource.read_into_each`, and counted."""
        nbytes = sum(map(len, buffers))
        self._count(requests=1, asked_nbytes=nbytes)
        try:
            super().read_into_each(offset, buffers)
        except SourceError:
            self._count(failed=1)
            raise
        self._count(received_nbytes=nbytes)

    def check_unchanged(self) -> None:
        """As `FsspecSource.check_unchanged`, and counted."""
        self._count(requests=1 if self.version.tells_apart else 0)
        super().check_unchanged()

    def _count(self, **more: int) -> None:
        with self._lock:
            self._traffic = replace(self._traffic, **{name: getattr(self._traffic, name) + by for name, by in more.items()})


def version_of(info: Mapping[str, Any], url: str) -> FsspecVersion:
    if type_of(info) == "directory":
        raise SourceNotFoundError(f"cannot open {url}: it is a folder, and no file", url=url, status=errno.EISDIR)
    nbytes = info.get("size")
    if type(nbytes) is not int:
        raise SourceError(f"cannot open {url}: the filesystem does not tell its size, and so no range can be asked for", url=url)
    told = {re.sub("[-_]", "", str(name)).lower(): value for name, value in info.items()}
    return FsspecVersion(nbytes, tuple(sorted((name, str(value)) for name, value in told.items() if name in _MARKS and value)))


def type_of(entry: Mapping[str, Any]) -> object:
    return entry.get("type", "file")


def _bare(path: str) -> str:
    """A path as it can be compared: some filesystems begin with a slash what others do not, and folders may end with one."""
    return str(path).strip("/")
