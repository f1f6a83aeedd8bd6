"""The page cache before a measurement: filled by plain reads, or emptied, and looked at.

It is filled by sequential 4 MiB reads only: FADV_WILLNEED leaves it in small folios, and every later read is three times slower.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence

_CHUNK_NBYTES = 4 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def fill(files: Iterable[str]) -> None:
    """Read the files once, so that they are cached."""
    buffer = memoryview(bytearray(_CHUNK_NBYTES))
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            while os.readv(fd, [buffer]):
                pass
        finally:
            os.close(fd)


def evict(files: Iterable[str]) -> None:
    """Drop the files from the page cache. A hypervisor may still hold them."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident_share(files: Sequence[str]) -> float:
    """How much of the files is cached, from 0 to 1. Asks mincore, which answers to the owner of a file."""
    pages = present = 0
    for file in files:
        flags = _page_flags(file)
        pages += len(flags)
        present += sum(flags.count(value) for value in range(1, 256, 2))
    return present / pages if pages else 1.0


def _page_flags(file: str) -> bytes:
    nbytes = os.path.getsize(file)
    if not nbytes:
        return b""
    fd = os.open(file, os.O_RDONLY)
    try:
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap {file}")
    flags = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
    try:
        if _libc.mincore(address, nbytes, flags):
            raise OSError(ctypes.get_errno(), f"mincore {file}")
    finally:
        _libc.munmap(address, nbytes)
    return flags.raw
