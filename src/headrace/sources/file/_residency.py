"""Which ranges of a file the page cache holds: three ways to ask the kernel, best first, and answers that are kept.

Asking must not fill the cache: WILLNEED and FADV_RANDOM leave pages in small folios, and every later read is 3-4x slower
(measured, ext4, kernel 6.18). Where the kernel does not say, a range counts as cached, and is read the usual way.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import resource
from typing import Final

_RANGE_NBYTES: Final = 64 << 20
# From this share on, a partly cached range is read buffered. Filling holes is slow; direct into huge pages against buffered in
# GB/s, 4 MiB reads: none cached 1.6 : 1.2, half 1.7 : 0.5, three quarters 1.5 : 1.1-1.9, all 1.7 : 5.3 (2 shared vCPUs, virtio
# disk, ext4, kernel 6.18, 2026-11-29). Even near 0.8, and higher on faster disks. CPU: 0.03 against 0.2-0.9 s/GiB.
_CACHED_SHARE: Final = 0.8
# The kernel looks at each page: 0.35 to 0.5 ms for 64 MiB of cached pages, a thirtieth of the time in which a reader copies them
# (2 shared vCPUs, kernel 6.18, 2026-11-30). Of samples it takes 0.04 ms, and they are believed where all of them agree.
_SAMPLES: Final = 8
_SAMPLE_NBYTES: Final = 64 << 10
_PROBES: Final = 64
_NR_CACHESTAT: Final = {"x86_64": 451, "aarch64": 451}

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p  # the default, int, cuts addresses
_libc.syscall.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
_Range, _Found = ctypes.c_uint64 * 2, ctypes.c_uint64 * 5


class Residency:
    """Which ranges of one file are in the page cache: asked once per 64 MiB, so that reading it does not sway the answer."""

    def __init__(self, nbytes: int, *, cachestat: bool, mincore: bool) -> None:
        self._nbytes = nbytes
        self._ask_cachestat = cachestat
        self._ask_mincore = mincore
        self._sampled = False
        self._sample: float | None = None
        self._ranges: dict[int, bool] = {}  # setdefault: when two threads ask at once, both get the first answer

    def known(self, offset: int, nbytes: int) -> bool | None:
        """What `mostly_cached` answered of the range that this lies in; None where it lies in several, or nobody asked."""
        index = offset // _RANGE_NBYTES
        return self._ranges.get(index) if offset + nbytes <= (index + 1) * _RANGE_NBYTES else None

    def mostly_cached(self, fd: int, offset: int, nbytes: int) -> bool:
        """Whether at least half of the 64 MiB ranges that this one touches count as cached."""
        first, last = offset // _RANGE_NBYTES, (offset + max(nbytes, 1) - 1) // _RANGE_NBYTES
        return 2 * sum(self._is_cached(fd, index) for index in range(first, last + 1)) >= last + 1 - first

    def known_cached(self, fd: int) -> bool:
        """Whether all ranges count as cached because the kernel says so, and not because it does not say."""
        ranges = range(-(-self._nbytes // _RANGE_NBYTES))
        return self._ask_cachestat and all(self._is_cached(fd, index) for index in ranges) and self._ask_cachestat

    def _is_cached(self, fd: int, index: int) -> bool:
        known = self._ranges.get(index)
        if known is None:
            start = index * _RANGE_NBYTES
            share = self._share(fd, start, min(_RANGE_NBYTES, self._nbytes - start))
            known = self._ranges.setdefault(index, share >= _CACHED_SHARE)
        return known

    def _share(self, fd: int, start: int, nbytes: int) -> float:
        if nbytes <= 0:
            return 1.0
        share = _range_share(fd, start, nbytes) if self._ask_cachestat else None
        if share is not None:
            return share
        self._ask_cachestat = False  # ENOSYS before kernel 6.5, EPERM under seccomp: the next range would get the same answer
        share = self._sampled_share(fd)
        if share is None and self._ask_mincore:
            share = _mincore_share(fd, start, nbytes)
        return 1.0 if share is None else share

    def _sampled_share(self, fd: int) -> float | None:
        """Of the whole file, by one-page reads that must not wait; once per file, because they pull in what they miss."""
        if not self._sampled:
            self._sample = _nowait_share(fd, self._nbytes)
            self._sampled = True
        return self._sample


def _range_share(fd: int, start: int, nbytes: int) -> float | None:
    """By cachestat; of samples only, where all or nothing of each is cached."""
    step = nbytes // _SAMPLES
    if step >= 4 * _SAMPLE_NBYTES:
        # Each at another place of its eighth, so that what comes back at equal distances is not met every time.
        places = (start + i * step + i * (step - _SAMPLE_NBYTES) // _SAMPLES for i in range(_SAMPLES))
        shares = {_cachestat_share(fd, place - place % mmap.PAGESIZE, _SAMPLE_NBYTES) for place in places}
        if shares in ({0.0}, {1.0}):
            return shares.pop()
    return _cachestat_share(fd, start, nbytes)


def _cachestat_share(fd: int, offset: int, nbytes: int) -> float | None:
    number = _cachestat_number()
    if number is None:
        return None
    wanted = _Range(offset, nbytes)  # struct cachestat_range {off, len}
    found = _Found()  # struct cachestat {nr_cache, nr_dirty, nr_writeback, nr_evicted, nr_recently_evicted}
    failed = _libc.syscall(number, fd, wanted, found, 0)
    return None if failed else found[0] / math.ceil(nbytes / mmap.PAGESIZE)


@functools.cache
def _cachestat_number() -> int | None:
    return _NR_CACHESTAT.get(os.uname().machine)


def _nowait_share(fd: int, nbytes: int) -> float | None:
    pages = math.ceil(nbytes / mmap.PAGESIZE)
    probes = min(_PROBES, pages)
    page = bytearray(mmap.PAGESIZE)
    cached = 0
    for probe in range(probes):
        read_before = _blocks_read()
        try:
            found = os.preadv(fd, [page], probe * pages // probes * mmap.PAGESIZE, os.RWF_NOWAIT) > 0
        except BlockingIOError:  # EAGAIN: it would have to wait for the disk
            continue
        except OSError:  # ENOTSUP on overlayfs and others
            return None
        # Newer kernels read a page that is missed all the same, and on a busy virtual machine it is there before the call returns
        # (up to 64 of 64 probes of a cold file, kernel 6.18).
        cached += found and _blocks_read() == read_before
    return cached / probes if probes else None


def _blocks_read() -> int:
    """What this thread has made the kernel read from disks so far; always 0 where it does not count that."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock


def _mincore_share(fd: int, offset: int, nbytes: int) -> float | None:
    """For the file's owner only: to others the kernel reports every page as cached (can_do_mincore, since 5.2)."""
    length = ctypes.c_size_t(nbytes)
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(offset))
    if address is None or address == ctypes.c_void_p(-1).value:
        return None
    pages = (ctypes.c_ubyte * math.ceil(nbytes / mmap.PAGESIZE))()
    try:
        failed = _libc.mincore(ctypes.c_void_p(address), length, pages)
    finally:
        _libc.munmap(ctypes.c_void_p(address), length)
    return None if failed else sum(page & 1 for page in bytes(pages)) / len(pages)


def cached_share(fd: int, nbytes: int) -> float | None:
    """Which part of an open file's first bytes is in the page cache, by cachestat; None where the kernel does not have it."""
    return _cachestat_share(fd, 0, nbytes) if nbytes else 0.0
