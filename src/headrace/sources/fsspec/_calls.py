"""A filesystem as several threads may call it: one at a time where it is not known to take more, and into place where it can."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Mapping, Sequence
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

    def read_into_each(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the buffers, one after another, by one call; how many bytes there were, more than they hold included."""
        nbytes = sum(map(len, buffers))
        with self._turn:
            if self._hands_out_bytes:
                data = self._fs.cat_file(path, start=offset, end=offset + nbytes)
                if len(data) <= nbytes:
                    _scatter(memoryview(data), buffers)
                return len(data)
            with self._fs.open(path, "rb") as file:
                fetches = _unbuffer(file)
                file.seek(offset)
                if not fetches or len(buffers) == 1:
                    return _fill(file, buffers)
                whole = memoryview(bytearray(nbytes))
                done = _fill(file, [whole])
        _scatter(whole[:done], buffers)
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


def _unbuffer(file: Any) -> bool:
    """Have an open file of fsspec's own ask for what is read, and not for blocks of 5 MiB ahead. Whether it is one of them."""
    if not isinstance(file, module("fsspec.spec").AbstractBufferedFile):
        return False
    file.cache = module("fsspec.caching").caches["none"](file.blocksize, file._fetch_range, file.size)
    return True


def _fill(file: Any, buffers: Sequence[memoryview]) -> int:
    """Read on into the buffers as far as there are bytes. Returns how many there were."""
    total = 0
    for buffer in buffers:
        done = 0
        while done < len(buffer) and (got := file.readinto(buffer[done:])):
            done += got
        total += done
        if done < len(buffer):
            break
    return total


def _scatter(data: memoryview, buffers: Sequence[memoryview]) -> None:
    """Copy bytes to where they belong, as far as they go."""
    for buffer in buffers:
        part, data = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(part)] = part


def module(name: str) -> Any:
    """A module of fsspec's, which has no types. Raises ImportError."""
    return importlib.import_module(name)
