"""Host memory: regions that are recycled piece by piece, and leases that end by themselves.

Fresh memory is the bottleneck of a load, not reading (docs/design.md, 3.2), so memory is used again, whatever the sizes:
a lease takes the smallest free stretch that fits, one that was touched before if there is one. A stretch is never written
while anything lives that was made of it: each lease has an object as its owner, every tensor holds that owner, and
when the last one is gone a weak reference puts itself into a queue. That is all the callback does (`SimpleQueue.put` is
reentrant; a lock could be held by the very thread that the collector interrupts). The pool never releases a view by hand.

What is free beyond the limit, or when the stream ends, goes back to the system page by page: who keeps one tensor keeps
its pages only. The pool is used by one thread at a time (the reader that holds the ticket lock). It knows bytes, and
nothing of tensors or files.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import queue
import weakref
from dataclasses import dataclass
from typing import TypeAlias

from headrace._addresses import Owner, address_of, owner_of
from headrace.errors import DeviceMemoryError

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_STEP = 64 << 20  # a longer call would keep mmap_lock from everybody else for too long
_REGION_NBYTES = 64 << 20  # address space taken at a time; memory only where it is touched
_LARGE = 1 << 20  # leases below it have regions of their own, so that they do not chop up the large ones'

_libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, a ctypes call lets go of the GIL
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Region:
    """A private anonymous mapping, page-aligned, on huge pages where it is for large leases.

    Attributes:
        view: all of it, writable.
        address: of its first byte.
        nbytes: a multiple of the page size.
        free: stretches that no lease covers, in order of offset, none adjacent to another of its kind.
    """

    __slots__ = ("__weakref__", "address", "free", "large", "nbytes", "view")

    def __init__(self, nbytes: int, *, large: bool = True) -> None:
        self.nbytes = round_up(nbytes, PAGE)
        self.view = memoryview(_map(self.nbytes))
        self.address = address_of(self.view)
        self.large = large
        self.free = [Stretch(0, self.nbytes, touched=False)]
        if large and self.nbytes >= HUGE:
            _libc.madvise(self.address, self.nbytes, _MADV_HUGEPAGE)

    def populate(self, start: int, end: int) -> None:
        """Fault pages in, from the thread that is about to fill them. Ten times cheaper than one fault a page.

        A kernel without MADV_POPULATE_WRITE refuses; then the pages are faulted in one by one as they are written.
        """
        self._advise(start - start % PAGE, min(round_up(end, PAGE), self.nbytes), _MADV_POPULATE_WRITE)

    def give_back(self, start: int, end: int) -> None:
        """Return the memory of a stretch to the system; its address stays."""
        self._advise(start, end, _MADV_DONTNEED)

    def insert(self, stretch: Stretch) -> None:
        """Free a stretch, and make one of neighbours of the same kind."""
        merged: list[Stretch] = []
        for piece in sorted([*self.free, stretch], key=lambda piece: piece.start):
            if merged and merged[-1].end == piece.start and merged[-1].touched == piece.touched:
                merged[-1].end = piece.end
            else:
                merged.append(piece)
        self.free = merged

    def _advise(self, start: int, end: int, advice: int) -> None:
        for at in range(start, end, _STEP):
            _libc.madvise(self.address + at, min(_STEP, end - at), advice)


@dataclass(slots=True)
class Stretch:
    """Bytes `start` to `end` (exclusive) of a region. `touched`: some of them may hold memory already."""

    start: int
    end: int
    touched: bool

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class Lease(weakref.ref["ctypes.Array[ctypes.c_char]"]):
    """Memory in use. Watches its owner, and returns itself to the pool when nothing holds the owner any more.

    Attributes:
        region, start, size: where it lies.
        nbytes: what was asked for, in whole pages; the rest of `size` is never touched.
        fresh: whether its pages may never have been touched; `populate` is worth its while then.
        owner: what tensors are made of; the engine drops it (`hand_over`) when it has made them.
        kept: whether the caller was found to keep it, so that it no longer counts against the limit.
    """

    __slots__ = ("fresh", "kept", "nbytes", "owner", "region", "size", "start")
    region: Region
    start: int
    size: int
    nbytes: int
    fresh: bool
    kept: bool
    owner: Owner | None
    __hash__ = object.__hash__  # a reference's own hash is its referent's, and writable memory has none
    __eq__ = object.__eq__

    def hand_over(self) -> Owner:
        """The owner, for the caller's tensors alone from here on."""
        owner = self.owner
        assert owner is not None
        self.owner = None
        return owner

    def populate(self, start: int, end: int) -> None:
        """Fault in bytes of this lease, unless they were used before.

        Readers fill neighbouring chunks at once; a huge page is left to the one in whose chunk it begins, or two would clear it.
        """
        if not self.fresh:
            return
        begin = self.start + start
        if start >= PAGE:
            begin = round_up(begin, HUGE)
        self.region.populate(begin, min(round_up(self.start + end, HUGE), self.start + self.nbytes))


_Returned: TypeAlias = "queue.SimpleQueue[weakref.ref[Owner] | None]"


class Pool:
    """The memory of one stream.

    Args:
        limit: bytes that may be leased at once, those that the caller is known to keep aside. One lease is always granted.
        expected_nbytes: bytes of all leases to come, if they are fewer than a region: no more address space is taken then.

    Attributes:
        used_nbytes: leased and not known to be kept. `kept_nbytes`: kept by the caller.
        peak_nbytes: most bytes that were leased, kept or free but touched at once.
    """

    def __init__(self, limit: int, expected_nbytes: int = _REGION_NBYTES) -> None:
        self.limit = limit
        self._region_nbytes = min(_REGION_NBYTES, limit, expected_nbytes)
        self._most = limit + limit // 8  # leases are carved up to an eighth larger than what is touched of them
        self.used_nbytes = 0
        self.kept_nbytes = 0
        self.peak_nbytes = 0
        self._regions: list[Region] = []
        self._touched_nbytes = 0  # free, and holding memory
        self._leases: set[Lease] = set()
        self._returned: _Returned = queue.SimpleQueue()

    def lease(self, nbytes: int) -> Lease | None:
        """At least `nbytes` (at least 1) of memory, or None where the limit does not allow it now.

        Raises:
            DeviceMemoryError: the system refuses the memory.
        """
        self._take_back()
        large = nbytes >= _LARGE
        size, nbytes = _size_class(nbytes), round_up(nbytes, PAGE)
        if self.used_nbytes and self.used_nbytes + nbytes > self.limit:
            return None
        region, stretch = self._find(size, large) or self._map(size, large)
        lease = self._carve(region, stretch, size, nbytes)
        self._leases.add(lease)
        self.used_nbytes += nbytes
        self._trim(max(self._most, self.used_nbytes))
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes + self.kept_nbytes + self._touched_nbytes)
        return lease

    def wait(self) -> None:
        """Sleep until a lease comes back or `wake` is called."""
        self._accept(self._returned.get())

    def wake(self) -> None:
        """End a `wait`, from any thread."""
        self._returned.put(None)

    def count_as_kept(self) -> int:
        """Take what the caller holds off the limit, and say how many bytes that were.

        For the moment when nothing is being read, nothing is ready and the caller waits: what it still holds then it keeps, and
        waiting for it would never end.
        """
        self._take_back()
        moved = 0
        for lease in self._leases:
            if lease.owner is None and not lease.kept:
                lease.kept = True
                moved += lease.nbytes
        self.used_nbytes -= moved
        self.kept_nbytes += moved
        return moved

    def close(self) -> None:
        """Forget all memory, and give back what no tensor lives in now; what tensors live in goes back as each one goes."""
        for lease in self._leases:
            lease.owner = None  # what was never handed out comes back now, unless a reader is still at it
        self._take_back()
        for lease in self._leases:
            if (owner := lease()) is not None:
                weakref.finalize(owner, lease.region.give_back, lease.start, lease.start + lease.size).atexit = False
                del owner
        for region in self._regions:
            for stretch in region.free:
                # A huge page may reach from what is kept into what was never leased. A region that is all free is unmapped.
                if stretch.nbytes < region.nbytes:
                    region.give_back(stretch.start, stretch.end)
        self._leases.clear()
        self._regions.clear()

    def _take_back(self) -> None:
        while True:
            try:
                item = self._returned.get_nowait()
            except queue.Empty:
                return
            self._accept(item)

    def _accept(self, item: weakref.ref[Owner] | None) -> None:
        if not isinstance(item, Lease) or item not in self._leases:
            return
        self._leases.discard(item)
        if item.kept:
            self.kept_nbytes -= item.nbytes
        else:
            self.used_nbytes -= item.nbytes
        self._touched_nbytes += item.size
        item.region.insert(Stretch(item.start, item.start + item.size, touched=True))
        self._trim(self._most)

    def _find(self, size: int, large: bool) -> tuple[Region, Stretch] | None:
        """The smallest free stretch that fits, memory that was touched before any that was not."""
        fitting = [
            (not stretch.touched, stretch.nbytes, i, stretch.start)
            for i, region in enumerate(self._regions)
            if region.large == large
            for stretch in region.free
            if stretch.nbytes >= size
        ]
        if not fitting:
            return None
        _, _, i, start = min(fitting)
        return self._regions[i], next(stretch for stretch in self._regions[i].free if stretch.start == start)

    def _map(self, size: int, large: bool) -> tuple[Region, Stretch]:
        most = self._region_nbytes if large else min(self._region_nbytes, _REGION_NBYTES // 16)
        region = Region(max(size, most), large=large)
        self._regions.append(region)
        return region, region.free[0]

    def _carve(self, region: Region, stretch: Stretch, size: int, nbytes: int) -> Lease:
        start, touched = stretch.start, stretch.touched
        stretch.start += size
        if not stretch.nbytes:
            region.free.remove(stretch)
        if touched:
            self._touched_nbytes -= size
        owner = owner_of(region.view, start, nbytes)
        lease = Lease(owner, self._returned.put)
        lease.region, lease.start, lease.size, lease.nbytes = region, start, size, nbytes
        lease.owner, lease.kept, lease.fresh = owner, False, not touched
        return lease

    def _trim(self, most: int) -> None:
        """Give free memory back to the system until no more than `most` bytes are held: just enough, from the largest stretch.

        Not more than enough, since touching it anew costs several times what reading into it does.
        """
        while self._touched_nbytes and (excess := self.used_nbytes + self._touched_nbytes - most) > 0:
            region, stretch = max(
                ((region, stretch) for region in self._regions for stretch in region.free if stretch.touched),
                key=lambda pair: pair[1].nbytes,
            )
            nbytes = min(stretch.nbytes, round_up(excess, HUGE))
            self._touched_nbytes -= nbytes
            if nbytes == region.nbytes:
                self._regions.remove(region)
            else:
                self._hollow(region, stretch, nbytes)

    def _hollow(self, region: Region, stretch: Stretch, nbytes: int) -> None:
        """Give the last `nbytes` of a stretch back. Its address space stays free."""
        region.give_back(stretch.end - nbytes, stretch.end)
        stretch.end -= nbytes
        if not stretch.nbytes:
            region.free.remove(stretch)
        region.insert(Stretch(stretch.end, stretch.end + nbytes, touched=False))


def round_up(nbytes: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-nbytes // unit) * unit


def _size_class(nbytes: int) -> int:
    """Up to an eighth more than asked for, so that spans of nearly one size fit into each other's place."""
    return round_up(nbytes, max(PAGE, 1 << max(0, nbytes.bit_length() - 4)))


def _map(nbytes: int) -> mmap.mmap:
    """Private anonymous memory. `mmap(-1, n)` alone would be shared: shmem, no huge pages, visible to forked children."""
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        if exc.errno != errno.ENOMEM:
            raise
        raise DeviceMemoryError(
            f"the system refuses {nbytes:,} bytes of memory for tensors; lower memory_limit, or raise the limit "
            "(ulimit -v, the container's memory)",
            device="cpu",
            requested=nbytes,
        ) from exc
