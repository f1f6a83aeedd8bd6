"""The child process that tries a library out: `python -m headrace.sources.gds._probe TASK`.

It opens the library, registers a file, reads an aligned stretch and an unaligned tail into device memory, and compares every byte
with what the file holds; then it says which way the reads took. What it finds is written to a file, a JSON object a line, so that
the parent also knows how far a child came that hangs or dies. It imports no torch: device memory comes from the runtime library.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from headrace.sources.gds._library import CallError, Library, register

PAGE: Final = 4096
_MOST: Final = 1 << 20
_TAIL: Final = PAGE + 905
_FILL: Final = 0xA5
_DEVICE_TO_HOST: Final = 2


class RefusedError(Exception):
    """Why the library is not to be used."""


class _Memory:
    """Device memory of the runtime library."""

    def __init__(self, path: str, prefix: str, device: int, nbytes: int) -> None:
        self._library, self._prefix, self.nbytes = ctypes.CDLL(path), prefix, nbytes
        address = ctypes.c_void_p()
        self._call("SetDevice", ctypes.c_int(device))
        self._call("Malloc", ctypes.byref(address), ctypes.c_size_t(nbytes))
        self.address = address.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, self._prefix + name)(*arguments)
        if code:
            raise RefusedError(f"the GPU cannot be used: {self._prefix}{name} gave error {code}")

    def clear(self) -> None:
        """Fill it, so that a read that did nothing is seen."""
        self._call("Memset", ctypes.c_void_p(self.address), ctypes.c_int(_FILL), ctypes.c_size_t(self.nbytes))
        self._call("DeviceSynchronize")

    def bytes_at(self, position: int, nbytes: int) -> bytes:
        """What lies there."""
        found = ctypes.create_string_buffer(nbytes)
        self._call(
            "Memcpy", found, ctypes.c_void_p(self.address + position), ctypes.c_size_t(nbytes), ctypes.c_int(_DEVICE_TO_HOST)
        )
        return found.raw


def try_out(task: dict[str, Any], say: Callable[..., None]) -> None:
    """Try the first library that can be loaded. Raises `RefusedError`, `CallError`, OSError."""
    descriptor = int(task["descriptor"])
    say(step="loading the GPU's runtime")
    memory = _Memory(task["runtime"], task["prefix"], task["device"], _MOST + 2 * PAGE)
    say(step="loading it")
    library = _first(task["libraries"], task["prefix"])
    say(library=library.path, name=library.name, step="opening it")
    before = [_identity(number) for number in (0, descriptor)]
    library.open()
    if [_identity(number) for number in (0, descriptor)] != before:
        raise RefusedError("opening it closes descriptors that are not its own")
    say(step="registering the file")
    handle = register(library, lambda flags: os.open(f"/proc/self/fd/{descriptor}", flags))
    say(step="reading")
    size = os.fstat(descriptor).st_size
    aligned = min(_MOST, size // PAGE * PAGE)
    start = library.routes()
    for offset in sorted({0, (size - aligned) // PAGE * PAGE}):
        _compare(library, memory, (handle.value, descriptor), offset, aligned, 0)
    end = library.routes()
    say(step="reading an unaligned tail")
    tail = min(size, _TAIL)
    _compare(library, memory, (handle.value, descriptor), size - tail, tail, 3)
    del handle
    routes = end.since(start) if start is not None and end is not None else None
    say(usable=True, routes=routes, max_nbytes=library.max_io_nbytes())


def _first(paths: Sequence[str], prefix: str) -> Library:
    why = "no library was found"
    for path in paths:
        try:
            return Library(path, prefix)
        except (OSError, AttributeError) as exc:
            if "/" in path or why.startswith("no "):
                why = f"no library was found: {exc}"
    raise RefusedError(why)


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _compare(library: Library, memory: _Memory, files: tuple[int, int], offset: int, nbytes: int, position: int) -> None:
    handle, plain = files
    memory.clear()
    done = 0
    while done < nbytes:
        count = library.read(handle, memory.address + position + done, nbytes - done, offset + done)
        if not count:
            raise RefusedError(f"a read of {nbytes:,} bytes ended after {done:,}")
        done += count
    expected = bytearray(nbytes)
    at = 0
    while at < nbytes and (count := os.preadv(plain, [memoryview(expected)[at:]], offset + at)):
        at += count
    around = bytes([_FILL]) * position, bytes([_FILL]) * PAGE
    if memory.bytes_at(0, position + nbytes + PAGE) != around[0] + expected + around[1]:
        raise RefusedError(f"it reads wrong bytes, and says nothing of it ({nbytes:,} bytes at {offset:,})")


def main(text: str) -> None:
    """Carry out a task, JSON as `_verdict` writes it."""
    task = json.loads(text)
    with open(task["report"], "a", buffering=1, encoding="utf-8") as report:

        def say(**facts: object) -> None:
            report.write(json.dumps(facts) + "\n")

        try:
            try_out(task, say)
        except (RefusedError, CallError, OSError, AttributeError) as exc:
            say(refused=str(exc))


if __name__ == "__main__":
    main(sys.argv[1])
