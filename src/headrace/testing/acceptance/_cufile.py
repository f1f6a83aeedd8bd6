"""The probe of direct storage: cuFile or hipFile on a file of this machine, into device memory, bytes compared.

To be run in a process with a time limit: opening the library can hang for ever, or succeed with nothing behind it.
"""

from __future__ import annotations

import ctypes
import glob
import os
import site
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace.testing.acceptance._runtime import Runtime

NBYTES = 64 << 20
READS = ((0, NBYTES), (4096, 1 << 20), (13, 1_000_001))  # the whole file; aligned; unaligned
_pointer, _size, _offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64


class Status(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int), ("cuda", ctypes.c_int))


class Target(ctypes.Union):
    _fields_ = (("fd", ctypes.c_int), ("handle", _pointer))


class Description(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("target", Target), ("operations", _pointer))


class GpuStats(ctypes.Structure):
    _fields_ = (("uuid", ctypes.c_char * 16), ("words", ctypes.c_uint64 * 29))


class StatsLevel3(ctypes.Structure):
    """CUfileStatsLevel3_t of cuFile 1.20: two levels of 64 words each, then the GPUs."""

    _fields_ = (("levels", ctypes.c_uint64 * 128), ("gpus", ctypes.c_uint32), ("each", GpuStats * 16))


class Library:
    """libcufile or libhipfile through ctypes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path, use_errno=True)
        self._prefix = "hipFile" if hasattr(self._library, "hipFileRead") and "hipfile" in path else "cuFile"
        self.read = self.function("Read", ctypes.c_ssize_t, _pointer, _pointer, _size, _offset, _offset)

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        found = getattr(self._library, self._prefix + name)
        found.restype, found.argtypes = result, arguments
        return found

    def open(self) -> str:
        return _words(self.function("DriverOpen", Status)())

    def register(self, descriptor: int) -> tuple[str, int | None]:
        handle = _pointer()
        function = self.function("HandleRegister", Status, ctypes.POINTER(_pointer), ctypes.POINTER(Description))
        status = function(ctypes.byref(handle), ctypes.byref(Description(1, Target(fd=descriptor), None)))
        return _words(status), handle.value

    def deregister(self, handle: int) -> None:
        self.function("HandleDeregister", None, _pointer)(handle)

    def routes(self) -> str:
        """How many reads took which way, as far as the library tells."""
        found = StatsLevel3()
        try:
            status = self.function("GetStatsL3", Status, ctypes.POINTER(StatsLevel3))(ctypes.byref(found))
        except AttributeError:
            return "not told by this version"
        if status.code:
            return f"not told: {_words(status)}"
        rows = [found.each[index].words for index in range(min(found.gpus, 16))]
        return ", ".join(f"{name} {sum(row[place] for row in rows)}" for name, place in (("p2p", 5), ("nvfs", 6), ("posix", 7)))

    def count(self) -> None:
        """Ask for the statistics that tell the route."""
        for name, arguments in (("SetStatsLevel", (3,)), ("StatsStart", ())):
            if hasattr(self._library, self._prefix + name):
                self.function(name, Status, *(ctypes.c_int for _ in arguments))(*arguments)


def _words(status: Status) -> str:
    return f"{status.code}" + (f" (driver {status.cuda})" if status.cuda else "")


def find_library() -> str | None:
    """The first library that can be loaded, in wheels and on the system's path."""
    folders = {*site.getsitepackages(), *(folder for folder in sys.path if folder.endswith("-packages"))}
    wheels = [path for folder in folders for path in sorted(glob.glob(f"{folder}/nvidia/**/libcufile.so.0", recursive=True))]
    for candidate in (*wheels, "libcufile.so.0", "libhipfile.so", "libhipfile.so.0"):
        try:
            ctypes.CDLL(candidate)
        except OSError:
            continue
        return candidate
    return None


def direct_storage(runtime: Runtime, folder: Path, path: str | None = None) -> dict[str, object]:
    """cuFile or hipFile: what opens, what is read, whether the bytes are right, and by which route."""
    path = path or find_library()
    if path is None:
        return {"library": "none found"}
    library = Library(path)
    had_stdin = Path("/proc/self/fd/0").exists()
    start = time.perf_counter()
    answers: dict[str, object] = {"library": path, "open": library.open()}
    answers["open, seconds"] = round(time.perf_counter() - start, 2)
    answers["descriptor 0 is still there"] = Path("/proc/self/fd/0").exists() or not had_stdin
    library.count()
    for place, where in (("disk", folder), ("shm", Path("/dev/shm"))):
        if where.is_dir():
            answers |= {f"{place}: {question}": answer for question, answer in _read_file(runtime, library, where).items()}
    answers["routes"] = library.routes()
    return answers


def _read_file(runtime: Runtime, library: Library, folder: Path) -> dict[str, object]:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        data = os.urandom(NBYTES)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        descriptor = os.open(file.name, os.O_RDONLY)
        code, handle = library.register(descriptor)
        answers: dict[str, object] = {"register": code}
        if handle:
            for offset, nbytes in READS:
                answers[f"{nbytes} bytes at {offset}"] = _read(runtime, library, handle, offset, data[offset : offset + nbytes])
            library.deregister(handle)
        os.close(descriptor)
    return answers


def _read(runtime: Runtime, library: Library, handle: int, offset: int, expected: bytes) -> str:
    target = runtime.made("Malloc", len(expected))
    start = time.perf_counter()
    count = library.read(handle, target, len(expected), offset, 0)
    took = time.perf_counter() - start
    found = runtime.fetched(target, len(expected)) if count > 0 else b""
    runtime.code("Free", target)
    if count != len(expected):
        return f"{count}" + (f", errno {ctypes.get_errno()}" if count == -1 else "")
    return f"{'equal' if found == expected else 'WRONG BYTES'}, {count / took / 1e9:.2f} GB/s"
