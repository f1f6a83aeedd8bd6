"""Whatever else fsspec knows: sftp://, smb://, github://, memory://, zip://inside::outside, and packages that register with it.

The adapter for schemes that no other one takes. fsspec promises neither that calls may be made side by side nor that two reads
see the same bytes. So calls are made one at a time where the filesystem is not known to take more (`_takes_many`), and a version
is what its listing tells of a file (`_MARKS`), asked for again after every range; where it tells nothing but the size, only a
file that became shorter is noticed. Bytes are read into place where the filesystem's files can do that, and else copied once.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol
from urllib.parse import unquote

from headrace.errors import (
    OptionError,
    SourceChangedError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
    SourceTimeoutError,
    TruncatedError,
)
from headrace.sources.http import Traffic, public_url
from headrace.sources.objects import leads_out

# What a filesystem's `info` may tell that is another one for other bytes, in lower case and without '_' and '-'. Not the time of
# the last access, and not urls, which may be signed anew for every listing.
_MARKS: Final = frozenset(
    {"checksum", "contentmd5", "crc", "crc32c", "created", "digest", "etag", "generation", "hash", "ino", "lastmodified", "md5"}
    | {"md5hash", "modified", "modify", "mtime", "oid", "sha", "sha1", "sha256", "updated", "version", "versionid"}
)
_NEAR: Final = frozenset({"file", "local", "memory"})  # protocols of this machine: nothing there is a round trip
_MISSING: Final = "urls of this scheme are read by fsspec, which is not installed: pip install headrace[fsspec]"


class Filesystem(Protocol):
    """As much of fsspec's AbstractFileSystem as is used here."""

    @property
    def protocol(self) -> str | tuple[str, ...]: ...

    def info(self, path: str) -> Mapping[str, Any]: ...

    def ls(self, path: str, detail: bool = ...) -> list[Mapping[str, Any]]: ...

    def find(self, path: str, *, detail: bool = ...) -> Mapping[str, Mapping[str, Any]]: ...

    def open(self, path: str, mode: str = ...) -> Any: ...

    def cat_file(self, path: str, start: int | None = ..., end: int | None = ...) -> bytes: ...

    def invalidate_cache(self, path: str | None = ...) -> None: ...


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


def knows_scheme(scheme: str) -> bool:
    """Whether fsspec is installed and has, or has heard of, a filesystem for a scheme."""
    try:
        return scheme in _module("fsspec").available_protocols()
    except ImportError:
        return False


def shown_chain(url: str) -> str:
    """The url as it may be shown: without passwords and the values of queries in any of its links.

    >>> shown_chain("zip://m::sftp://me:pw@host/m.zip")
    'zip://m::sftp://host/m.zip'
    """
    return "::".join(public_url(link) for link in re.sub(r"://[^/]*@", "://", url).split("::"))


def split_chain(url: str) -> tuple[str, str]:
    """All of a url but the last part of its first path, and that part: the folder and the name of a file.

    >>> split_chain("zip://m/a.safetensors::https://host/m.zip")
    ('zip://m::https://host/m.zip', 'a.safetensors')
    >>> split_chain("memory://a.safetensors")
    ('memory://', 'a.safetensors')
    """
    links = url.split("::")
    first = next((index for index, link in enumerate(links) if "://" in link), 0)
    scheme, mark, path = links[first].partition("://")
    folder, _, name = path.rpartition("/")
    return "::".join([*links[:first], f"{scheme}{mark}{folder}", *links[first + 1 :]]), name


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
        self._words = _Words(f" (in {rest})" if rest else "", _secrets(url, options))
        if filesystem is None:
            filesystem, path = self._connect(url, dict(options or {}))
        else:
            path = str(getattr(type(filesystem), "_strip_protocol", str)(url))
        self._calls = _Calls(filesystem)
        self._path = path.rstrip("/")

    def __repr__(self) -> str:
        return f"FsspecFolder({self.url!r})"

    def names(self) -> list[str]:
        """Names of the files directly inside, sorted. Raises `SourceNotFoundError` where there is no such folder."""
        with self._words.explained("list", self.url):
            entries = self._calls.listed(self._path)
        names = [name for entry in entries if (name := self._name_of(entry)) and "/" not in name]
        if not names and any(_type_of(entry) == "file" and _bare(entry["name"]) == _bare(self._path) for entry in entries):
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
        version = _version_of(info, url)
        kind = FsspecSource if self._calls.near else RemoteFsspecSource
        return kind(self._calls, path, url=url, version=version, words=self._words)

    def _connect(self, url: str, options: dict[str, Any]) -> tuple[Filesystem, str]:
        """The filesystem and the path in it. Nobody else is given this filesystem, so nobody else calls it meanwhile."""
        try:
            core = _module("fsspec.core")
        except ImportError as exc:
            raise OptionError(f"{shown_chain(url)}: {_MISSING}", option="url") from exc
        try:
            found: tuple[Filesystem, str] = core.url_to_fs(url, skip_instance_cache=True, **options)
        except (ImportError, TypeError, ValueError) as exc:  # before anything was reached
            raise OptionError(f"fsspec cannot open {shown_chain(url)}: {self._words.of(exc)}", option="url") from None
        except Exception as exc:  # noqa: BLE001 - whatever a filesystem of anybody's raises
            raise self._words.error(exc, "open", self.url) from self._words.cause(exc)
        return found

    def _name_of(self, entry: Mapping[str, Any]) -> str:
        """The path of a file below the folder, relative; '' for folders and for what lies elsewhere."""
        inside, full = f"{_bare(self._path)}/", _bare(entry["name"])
        is_inside = _type_of(entry) in ("file", "link") and (inside == "/" or full.startswith(inside))
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

    def __init__(self, calls: _Calls, path: str, *, url: str, version: FsspecVersion, words: _Words) -> None:
        self.url, self.nbytes, self.version = url, version.nbytes, version
        self._calls: _Calls | None = calls
        self._path, self._words = path, words

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the bytes from `offset` on. See `ByteSource.read_into`."""
        calls, nbytes = self._calls, len(buffer)
        if calls is None or offset < 0 or offset + nbytes > self.nbytes:
            raise self._refuse_range(offset, nbytes)
        if not nbytes:
            return
        with self._words.explained("read", self.url, offset, nbytes):
            got = calls.read_into(self._path, offset, buffer)
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
                now = _version_of(calls.info(self._path), self.url)
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

    def __init__(self, calls: _Calls, path: str, *, url: str, version: FsspecVersion, words: _Words) -> None:
        super().__init__(calls, path, url=url, version=version, words=words)
        self._lock = threading.Lock()
        self._traffic = Traffic(requests=1)

    @property
    def traffic(self) -> Traffic:
        """What the filesystem was asked for; it may have made more requests of that than one, or none."""
        return self._traffic

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """As `FsspecSource.read_into`, and counted."""
        self._count(requests=1, asked_nbytes=len(buffer))
        try:
            super().read_into(offset, buffer)
        except SourceError:
            self._count(failed=1)
            raise
        self._count(received_nbytes=len(buffer))

    def check_unchanged(self) -> None:
        """As `FsspecSource.check_unchanged`, and counted."""
        self._count(requests=1 if self.version.tells_apart else 0)
        super().check_unchanged()

    def _count(self, **more: int) -> None:
        with self._lock:
            self._traffic = replace(self._traffic, **{name: getattr(self._traffic, name) + by for name, by in more.items()})


class _Calls:
    """A filesystem as it may be called by several threads.

    Attributes:
        near: whether it is of this machine.
    """

    def __init__(self, filesystem: Filesystem) -> None:
        self._fs = filesystem
        self._turn: contextlib.AbstractContextManager[object]
        self._turn = contextlib.nullcontext() if _takes_many(filesystem) else threading.Lock()
        self.near = not _NEAR.isdisjoint(_protocols(filesystem))
        self._hands_out_bytes = _hands_out_bytes(filesystem)

    def info(self, path: str) -> Mapping[str, Any]:
        """What the filesystem tells of a file now, whatever it has told before."""
        with self._turn:
            self._fs.invalidate_cache(path)
            return self._fs.info(path)

    def listed(self, path: str) -> list[Mapping[str, Any]]:
        with self._turn:
            self._fs.invalidate_cache(path)
            return list(self._fs.ls(path, detail=True))

    def found(self, path: str) -> list[Mapping[str, Any]]:
        with self._turn:
            self._fs.invalidate_cache(path)
            return list(self._fs.find(path, detail=True).values())

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Fill the buffer as far as there are bytes; how many there were, more than the buffer holds included."""
        with self._turn:
            if self._hands_out_bytes:
                data = self._fs.cat_file(path, start=offset, end=offset + len(buffer))
                if len(data) <= len(buffer):
                    buffer[: len(data)] = data
                return len(data)
            with _unbuffered(self._fs.open(path, "rb")) as file:
                file.seek(offset)
                done = 0
                while done < len(buffer) and (got := file.readinto(buffer[done:])):
                    done += got
                return done


def _takes_many(filesystem: object) -> bool:
    """Whether several threads may call it at once.

    Asynchronous filesystems do their work on one thread of their own. Those of memory and local files keep nothing between two
    calls. Of all others fsspec says nothing, and some share one connection (ftp) or one open file (archives).
    """
    inner = getattr(filesystem, "fs", None) or getattr(filesystem, "sync_fs", None)  # a folder of another one, a wrapper
    if inner is not None and inner is not filesystem and not _takes_many(inner):
        return False
    return bool(getattr(type(filesystem), "async_impl", False)) or type(filesystem).__module__ in _KNOWN


_KNOWN: Final = frozenset({"fsspec.implementations.memory", "fsspec.implementations.local"})


def _protocols(filesystem: Filesystem) -> set[str]:
    return {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)


def _hands_out_bytes(filesystem: object) -> bool:
    """Whether it has a way of its own to a range. fsspec's usual one opens the file, and then we can read into place as well."""
    cat_file = getattr(type(filesystem), "cat_file", None)
    usual = getattr(_module("fsspec").AbstractFileSystem, "cat_file", None)
    return bool(getattr(type(filesystem), "async_impl", False)) or cat_file is not usual


def _unbuffered(file: Any) -> Any:
    """An open file that asks for what is read, and not for blocks of 5 MiB ahead, as fsspec's own do."""
    if isinstance(file, _module("fsspec.spec").AbstractBufferedFile):
        file.cache = _module("fsspec.caching").caches["none"](file.blocksize, file._fetch_range, file.size)
    return file


def _version_of(info: Mapping[str, Any], url: str) -> FsspecVersion:
    if _type_of(info) == "directory":
        raise SourceNotFoundError(f"cannot open {url}: it is a folder, and no file", url=url, status=errno.EISDIR)
    nbytes = info.get("size")
    if type(nbytes) is not int:
        raise SourceError(f"cannot open {url}: the filesystem does not tell its size, and so no range can be asked for", url=url)
    told = {re.sub("[-_]", "", str(name)).lower(): value for name, value in info.items()}
    return FsspecVersion(nbytes, tuple(sorted((name, str(value)) for name, value in told.items() if name in _MARKS and value)))


def _type_of(entry: Mapping[str, Any]) -> object:
    return entry.get("type", "file")


def _bare(path: str) -> str:
    """A path as it can be compared: some filesystems begin with a slash what others do not, and folders may end with one."""
    return str(path).strip("/")


def _module(name: str) -> Any:
    return importlib.import_module(name)


# ---- what went wrong


class _Words:
    """Makes errors of whatever a filesystem raises, and shows no secret.

    Args:
        where: what a url lies in, to be added to messages.
        secrets: strings that are not shown.
    """

    def __init__(self, where: str, secrets: frozenset[str]) -> None:
        self._where, self._secrets = where, secrets

    def of(self, exc: BaseException) -> str:
        """What an exception says, without secrets."""
        text = re.sub(r"://[^/\s]*@", "://", str(exc))
        text = re.sub(r"(://[^\s?'\"]*)\?[^\s'\")]*", r"\1?...", text)
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "...")
        return text or type(exc).__name__

    def cause(self, exc: Exception) -> Exception | None:
        """The exception, unless it has a secret in it, which a traceback would show."""
        return exc if self.of(exc) in (str(exc), type(exc).__name__) else None

    def error(self, exc: Exception, doing: str, url: str, offset: int | None = None, nbytes: int | None = None) -> SourceError:
        """An exception of the filesystem as one of ours."""
        status = next((code for name in ("status", "errno") if type(code := getattr(exc, name, None)) is int), None)
        what = f"{nbytes} bytes at {offset} of {url}" if nbytes is not None else url
        message = f"cannot {doing} {what}{self._where}: {type(exc).__name__}: {self.of(exc)}"
        return _kind_of(exc, status)(message, url=url, offset=offset, nbytes=nbytes, status=status)

    @contextlib.contextmanager
    def explained(self, doing: str, url: str, offset: int | None = None, nbytes: int | None = None) -> Iterator[None]:
        """What is raised inside, as a `SourceError`."""
        try:
            yield
        except SourceError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever a filesystem of anybody's raises
            raise self.error(exc, doing, url, offset, nbytes) from self.cause(exc)


def _kind_of(exc: Exception, status: int | None) -> type[SourceError]:
    from asyncio import TimeoutError as AsyncTimeoutError  # another one than the built-in before Python 3.11

    if isinstance(exc, (FileNotFoundError, NotADirectoryError)):
        return SourceNotFoundError
    if isinstance(exc, PermissionError) or (not isinstance(exc, OSError) and status in (401, 403)):
        return SourcePermissionError
    if isinstance(exc, (TimeoutError, AsyncTimeoutError)):
        return SourceTimeoutError
    return SourceError


def _secrets(url: str, options: Mapping[str, Any] | None) -> frozenset[str]:
    """Strings that no message shows: logins and queries in the url, and all options but where the host is."""
    logins = re.findall(r"://([^/]*)@", url)
    pairs = [pair for link in url.split("::") for pair in link.partition("?")[2].split("&")]
    parts = {part for login in logins for part in (login, *login.split(":", 1)[1:])} | {pair.partition("=")[2] for pair in pairs}
    return frozenset(text for text in {*parts, *map(unquote, parts), *_strings(options or {})} if len(text) > 2)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in ("host", "protocol", "target_protocol"):
                yield from _strings(inner)
