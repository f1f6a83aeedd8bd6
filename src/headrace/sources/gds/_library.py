"""libcufile and libhipfile through ctypes. Their interfaces are laid out alike; names, and what a code is called, differ.

Signatures and layouts are those of cufile.h 1.20 and of hipFile's header. A read answers with a count of bytes, with -1 and
errno, or with minus a code. What a version lacks (statistics, limits) is asked for and done without.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

MAX_IO_NBYTES: Final = 16 << 20  # cuFile's own default (max_direct_io_size_kb), for versions that do not tell theirs

_SONAMES: Final = {"cuda": ("libcufile.so.0", "libcufile.so"), "hip": ("libhipfile.so.0", "libhipfile.so")}
_SYSTEM_FOLDERS: Final = {
    "cuda": ("usr/local/cuda*/targets/*/lib", "usr/local/cuda*/lib64", "usr/lib/*-linux-gnu"),
    "hip": ("opt/rocm*/lib",),
}

# CUfileOpError and hipFileOpError; 5021 and 5032 are not used.
_CODES: Final = {
    5001: "DRIVER_NOT_INITIALIZED",
    5002: "DRIVER_INVALID_PROPS",
    5003: "DRIVER_UNSUPPORTED_LIMIT",
    5004: "DRIVER_VERSION_MISMATCH",
    5005: "DRIVER_VERSION_READ_ERROR",
    5006: "DRIVER_CLOSING",
    5007: "PLATFORM_NOT_SUPPORTED",
    5008: "IO_NOT_SUPPORTED",
    5009: "DEVICE_NOT_SUPPORTED",
    5010: "NVFS_DRIVER_ERROR",
    5011: "CUDA_DRIVER_ERROR",
    5012: "CUDA_POINTER_INVALID",
    5013: "CUDA_MEMORY_TYPE_INVALID",
    5014: "CUDA_POINTER_RANGE_ERROR",
    5015: "CUDA_CONTEXT_MISMATCH",
    5016: "INVALID_MAPPING_SIZE",
    5017: "INVALID_MAPPING_RANGE",
    5018: "INVALID_FILE_TYPE",
    5019: "INVALID_FILE_OPEN_FLAG",
    5020: "DIO_NOT_SET",
    5022: "INVALID_VALUE",
    5023: "MEMORY_ALREADY_REGISTERED",
    5024: "MEMORY_NOT_REGISTERED",
    5025: "PERMISSION_DENIED",
    5026: "DRIVER_ALREADY_OPEN",
    5027: "HANDLE_NOT_REGISTERED",
    5028: "HANDLE_ALREADY_REGISTERED",
    5029: "DEVICE_NOT_FOUND",
    5030: "INTERNAL_ERROR",
    5031: "GETNEWFD_FAILED",
    5033: "NVFS_SETUP_ERROR",
    5034: "IO_DISABLED",
    5035: "BATCH_SUBMIT_FAILED",
    5036: "GPU_MEMORY_PINNING_FAILED",
    5037: "BATCH_FULL",
    5038: "ASYNC_NOT_SUPPORTED",
    5039: "IO_MAX_ERROR",
}
_HIP_CODES: Final = _CODES | {
    5010: "DRIVER_ERROR",
    5011: "HIP_DRIVER_ERROR",
    5012: "HIP_POINTER_INVALID",
    5013: "HIP_MEMORY_TYPE_INVALID",
    5014: "HIP_POINTER_RANGE_ERROR",
    5015: "HIP_CONTEXT_MISMATCH",
    5033: "DRIVER_SETUP_ERROR",
}
_HINTS: Final = {
    5001: "its driver is not loaded",
    5004: "its driver and the library are of different versions",
    5007: "this platform has no direct storage",
    5008: "this filesystem has no direct storage",
    5009: "this GPU has no direct storage",
    5027: "it does not know the disk below the file; in a container, /run/udev has to be mounted",
    5033: "its kernel driver is not set up",
    5034: "its configuration switches it off",
    5036: "the GPU's window for other devices (BAR) is used up",
}
_DRIVER_CODES: Final = (5011,)  # say more in the second number
_DIO_NOT_SET: Final = 5020
_ALREADY_OPEN: Final = 5026


class _Status(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int), ("driver", ctypes.c_int))
    code: int
    driver: int


class _Target(ctypes.Union):
    _fields_ = (("fd", ctypes.c_int), ("handle", ctypes.c_void_p))


class _Description(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("target", _Target), ("operations", ctypes.c_void_p))


_OPAQUE_FD: Final = 1


class _GpuStats(ctypes.Structure):
    _fields_ = (("uuid", ctypes.c_char * 16), ("words", ctypes.c_uint64 * 29))
    words: Sequence[int]


class _StatsLevel3(ctypes.Structure):
    """64 words of level 1, two histograms of 32 words, then the GPUs."""

    _fields_ = (("levels", ctypes.c_uint64 * 128), ("gpus", ctypes.c_uint32), ("each", _GpuStats * 16))
    gpus: int
    each: Sequence[_GpuStats]


_P2P, _NVFS, _POSIX = 5, 6, 7  # words of a GPU; hipFile counts its fast path as nvfs, and its fallback as posix
_MAX_IO_AT: Final = 16  # bytes into the properties: two unsigned, the polling threshold, then this, in KiB


class Routes(NamedTuple):
    """How many reads of this process took which way."""

    p2p: int
    nvfs: int
    posix: int

    def since(self, before: Routes) -> Routes:
        """Those after `before`."""
        return Routes(*(now - then for now, then in zip(self, before, strict=True)))

    def __str__(self) -> str:
        return f"p2p {self.p2p:,}, nvfs {self.nvfs:,}, through the host {self.posix:,}"


class CallError(Exception):
    """A call of the library's failed.

    Attributes:
        code: its code, or an errno where `is_errno`.
    """

    def __init__(self, message: str, *, code: int, is_errno: bool = False) -> None:
        super().__init__(message)
        self.code, self.is_errno = code, is_errno


def find_libraries(
    prefix: str, *, root: Path = Path("/"), maps: Path = Path("/proc/self/maps"), folders: Iterable[str] | None = None
) -> tuple[str, ...]:
    """Paths, and at last bare names, by which the library may be had, the best first.

    Args:
        prefix: of the runtime's functions: "cuda" or "hip".
        root, maps, folders: where to look: the system, what this process has mapped, where packages are installed.
    """
    names = _SONAMES[prefix]
    places = [*_mapped(maps, names[-1])]
    for folder in sys.path if folders is None else folders:
        if folder and Path(folder, "nvidia").is_dir():
            places += _below(Path(folder, "nvidia"), "*/lib", names)
    for pattern in _SYSTEM_FOLDERS[prefix]:
        places += _below(root, pattern, names)
    return tuple(dict.fromkeys([*places, *names]))


def _mapped(maps: Path, stem: str) -> list[str]:
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return sorted({path for path in paths if Path(path).name.startswith(stem)})


def _below(folder: Path, pattern: str, names: Sequence[str]) -> Iterator[str]:
    for found in sorted(folder.glob(pattern)):
        yield from (str(found / name) for name in names if (found / name).exists())


class Library:
    """One of the two libraries, loaded and not opened.

    Args:
        path: the library, or its bare name.
        prefix: of the runtime's functions, "cuda" or "hip".

    Raises:
        OSError: it cannot be loaded. AttributeError: it is another library.
    """

    def __init__(self, path: str, prefix: str) -> None:
        self.path, self.prefix = path, prefix
        self.kind = "cuFile" if prefix == "cuda" else "hipFile"
        self._codes = _CODES if prefix == "cuda" else _HIP_CODES
        self._library = ctypes.CDLL(path, use_errno=True)
        pointer, size, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        self._open = self._function("DriverOpen", _Status)
        self._read = self._function("Read", ctypes.c_ssize_t, pointer, pointer, size, offset, offset)
        self._register = self._function("HandleRegister", _Status, ctypes.POINTER(pointer), ctypes.POINTER(_Description))
        self._deregister = self._function("HandleDeregister", None, pointer)
        self.counts_routes = False

    def _function(self, name: str, result: Any, *arguments: Any) -> Any:
        found = getattr(self._library, self.kind + name)
        found.restype, found.argtypes = result, arguments
        return found

    @property
    def name(self) -> str:
        """'cuFile 1.20'."""
        return f"{self.kind} {version}" if (version := self._version()) else self.kind

    def _version(self) -> str:
        numbers = [ctypes.c_int() for _ in range(1 if self.kind == "cuFile" else 3)]
        pointers = [ctypes.POINTER(ctypes.c_int)] * len(numbers)
        try:
            status = self._function("GetVersion", _Status, *pointers)(*map(ctypes.byref, numbers))
        except AttributeError:
            return ""
        if status.code:
            return ""
        if len(numbers) == 1:
            return f"{numbers[0].value // 1000}.{numbers[0].value % 1000 // 10}"
        return ".".join(str(number.value) for number in numbers)

    def open(self) -> None:
        """Open the driver, and have it count which way reads take. May never return."""
        status = self._open()
        if status.code != _ALREADY_OPEN:
            self._check(status, "DriverOpen")
        try:
            levels = (self._function("SetStatsLevel", _Status, ctypes.c_int)(3), self._function("StatsStart", _Status)())
        except AttributeError:  # an earlier version
            return
        self.counts_routes = not any(level.code for level in levels)

    def register(self, descriptor: int) -> int:
        """The handle of an open file. The descriptor has to stay open until `deregister`, and has one handle only."""
        handle = ctypes.c_void_p()
        description = _Description(_OPAQUE_FD, _Target(fd=descriptor), None)
        self._check(self._register(ctypes.byref(handle), ctypes.byref(description)), "HandleRegister")
        return handle.value or 0

    def deregister(self, handle: int) -> None:
        """Undo `register`; no read may be under way."""
        self._deregister(handle)

    def read(self, handle: int, pointer: int, nbytes: int, offset: int) -> int:
        """Read once, without the GIL: how many bytes came, 0 at the end of the file. May never return."""
        count: int = self._read(handle, pointer, nbytes, offset, 0)
        if count >= 0:
            return count
        if count == -1:
            number = ctypes.get_errno()
            raise CallError(f"{self.kind}Read: {os.strerror(number)} (errno {number})", code=number, is_errno=True)
        self._check(_Status(-count, 0), "Read")
        return 0

    def max_io_nbytes(self) -> int:
        """The longest request that it carries out in one piece."""
        properties = ctypes.create_string_buffer(4096)  # much more than any version fills in
        try:
            status = self._function("DriverGetProperties", _Status, ctypes.c_char_p)(properties)
        except AttributeError:
            return MAX_IO_NBYTES
        nbytes: int = ctypes.c_uint64.from_buffer(properties, _MAX_IO_AT).value << 10
        return nbytes if not status.code and 64 << 10 <= nbytes <= 1 << 30 else MAX_IO_NBYTES

    def routes(self) -> Routes | None:
        """Which way the reads of this process took so far; None where the library does not tell."""
        found = _StatsLevel3()
        try:
            status = self._function("GetStatsL3", _Status, ctypes.POINTER(_StatsLevel3))(ctypes.byref(found))
        except AttributeError:
            return None
        if not self.counts_routes or status.code or found.gpus > len(found.each):
            return None
        rows = [found.each[index].words for index in range(found.gpus)]
        return Routes(*(sum(row[word] for row in rows) for word in (_P2P, _NVFS, _POSIX)))

    def _check(self, status: _Status, call: str) -> None:
        code = status.code
        if not code:
            return
        text = f"{self.kind}{call}: {self._codes.get(code, 'unknown error')} ({code})"
        if code in _DRIVER_CODES:
            text += f", error {status.driver} of the GPU's driver"
        hint = _HINTS.get(code)
        raise CallError(f"{text}: {hint}" if hint else text, code=code)


class Handle:
    """A registered file: a descriptor of its own, which nobody else uses, and the handle of it.

    Both end with the last reference, so not while a read is under way, and the handle before the descriptor.
    """

    __slots__ = ("_fd", "_library", "_pid", "value")

    def __init__(self, library: Library, fd: int) -> None:
        self._library, self._fd, self._pid = library, fd, os.getpid()
        self.value = 0
        self.value = library.register(fd)

    def __del__(self, _close: Callable[[int], None] = os.close, _pid: Callable[[], int] = os.getpid) -> None:
        if self.value and self._pid == _pid():  # in a forked child the handle is the parent's
            self._library.deregister(self.value)
        _close(self._fd)


def register(library: Library, reopen: Callable[[int], int]) -> Handle:
    """Register a file that `reopen` opens with the flags it is given.

    Since CUDA 12.2 the library itself opens it once more with O_DIRECT, and earlier ones refuse what was opened without: opened
    with it at once, the later ones could not read what is not aligned.
    """
    try:
        return Handle(library, reopen(os.O_RDONLY))
    except CallError as exc:
        if exc.code != _DIO_NOT_SET:
            raise
    return Handle(library, reopen(os.O_RDONLY | os.O_DIRECT))
