"""A filesystem as several threads may call it: one at a time where it is not known to take more, and into place where it can."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Mapping
from typing import Any, Final, Protocol

_NEAR: Final = frozenset({"file", "local", "memory"})  # protocols of this machine: nothing there is a round trip
_KNOWN: Final = frozenset({"fsspec.implementations.memory", "fsspec.implementations.local"})


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


def knows_scheme(scheme: str) -> bool:
    """Whether fsspec is installed and has, or has heard of, a filesystem for a scheme."""
    try:
        return scheme in module("fsspec").available_protocols()
    except ImportError:
        return False


class Calls:
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
        """What lies directly in a folder; where the path is a file's, that file."""
        with self._turn:
            self._fs.invalidate_cache(path)
            return list(self._fs.ls(path, detail=True))

    def found(self, path: str) -> list[Mapping[str, Any]]:
        """The files in a folder and in those below it; none where there is no such folder."""
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


def _protocols(filesystem: Filesystem) -> set[str]:
    return {filesystem.protocol} if isinstance(filesystem.protocol, str) else set(filesystem.protocol)


def _hands_out_bytes(filesystem: object) -> bool:
    """Whether it has a way of its own to a range. fsspec's usual one opens the file, and then we can read into place as well."""
    cat_file = getattr(type(filesystem), "cat_file", None)
    usual = getattr(module("fsspec").AbstractFileSystem, "cat_file", None)
    return bool(getattr(type(filesystem), "async_impl", False)) or cat_file is not usual


def _unbuffered(file: Any) -> Any:
    """An open file that asks for what is read, and not for blocks of 5 MiB ahead, as fsspec's own do."""
    if isinstance(file, module("fsspec.spec").AbstractBufferedFile):
        file.cache = module("fsspec.caching").caches["none"](file.blocksize, file._fetch_range, file.size)
    return file


def module(name: str) -> Any:
    """A module of fsspec's, which has no types. Raises ImportError."""
    return importlib.import_module(name)
