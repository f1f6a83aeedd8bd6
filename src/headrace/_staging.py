"""Host memory: blocks that are recycled, and leases that end by themselves.

Fresh memory is the bottleneck of a load, not reading (docs/design.md, 3.2), so blocks are used again. A block is never written while
anything lives that was made of it: each lease has a `memoryview` of the block as its owner, every tensor holds that owner, and
when the last one is gone a weak reference puts itself into a queue. That is all the callback does (`SimpleQueue.put` is reentrant;
a lock could be held by the very thread that the collector interrupts). The pool never releases a view by hand.

The pool is used by one thread at a time (the reader that holds the ticket lock). It knows bytes, and nothing of tensors or files.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import queue
import weakref
from typing import TypeAlias

from headrace.errors import DeviceMemoryError

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POPULATE_STEP = 64 << 20  # a longer call would keep mmap_lock from everybody else for too long

_libc = ctypes.CDLL(None, use_errno=True)  # unlike mmap.madvise, a ctypes call lets go of the GIL
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Block:
    """A private anonymous mapping, page-aligned, on huge pages where it is large enough for them.

    Attributes:
        view: all of it, writable.
        address: of its first byte.
        fresh: whether its pages may never have been touched; `populate` is worth its while.
    """

    __slots__ = ("__weakref__", "address", "fresh", "nbytes", "view")

    def __init__(self, nbytes: int) -> None:
        size = _round_up(nbytes, PAGE)
        try:
            mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as exc:
            if exc.errno != errno.ENOMEM:
                raise
            raise DeviceMemoryError(
                f"the system refuses {size:,} bytes of memory for tensors; lower memory_limit, or raise the limit "
                "(ulimit -v, the container's memory)",
                device="cpu",
                requested=size,
            ) from exc
        self.view = memoryview(mapping)
        self.address = address_of(self.view)
        self.nbytes = size
        self.fresh = True
        huge = _huge_nbytes(nbytes, size)
        if huge:
            _libc.madvise(self.address, huge, _MADV_HUGEPAGE)

    def populate(self, start: int, end: int) -> None:
        """Fault pages in, from the thread that is about to fill them. Ten times cheaper than one fault a page.

        A kernel without MADV_POPULATE_WRITE refuses; then the pages are faulted in one by one as they are written.
        """
        begin, stop = start - start % PAGE, min(_round_up(end, PAGE), self.nbytes)
        for at in range(begin, stop, _POPULATE_STEP):
            _libc.madvise(self.address + at, min(_POPULATE_STEP, stop - at), _MADV_POPULATE_WRITE)


class Lease(weakref.ref[memoryview]):
    """A block in use. Watches its owner, and returns itself to the pool when nothing holds the owner any more.

    Attributes:
        block: the memory.
        owner: what tensors are made of; the engine drops it (`hand_over`) when it has made them.
        kept: whether the caller was found to keep it, so that it no longer counts against the limit.
    """

    __slots__ = ("block", "kept", "owner")
    block: Block
    kept: bool
    owner: memoryview | None
    __hash__ = object.__hash__  # a reference's own hash is its referent's, and writable memory has none
    __eq__ = object.__eq__

    def hand_over(self) -> memoryview:
        """The owner, for the caller's tensors alone from here on."""
        owner = self.owner
        assert owner is not None
        self.owner = None
        return owner


_Returned: TypeAlias = "queue.SimpleQueue[weakref.ref[memoryview] | None]"


class Pool:
    """Blocks for one stream, at most `limit` bytes of them counting those the caller may still use.

    Attributes:
        limit: bytes. One block is always granted, however large.
        used_nbytes: blocks leased and not known to be kept. `kept_nbytes`: blocks the caller keeps.
        peak_nbytes: most bytes that existed at once, free blocks included.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used_nbytes = 0
        self.kept_nbytes = 0
        self.peak_nbytes = 0
        self._free: list[Block] = []  # most recently used last: it is the one that is still in cache
        self._free_nbytes = 0
        self._leases: set[Lease] = set()
        self._returned: _Returned = queue.SimpleQueue()

    def lease(self, nbytes: int, *, recycled: bool = True) -> Lease | None:
        """A block of at least `nbytes`, or None where the limit does not allow it now.

        Args:
            nbytes: at least 1.
            recycled: False for a block of exactly this size that nobody used before.

        Raises:
            DeviceMemoryError: the system refuses the memory.
        """
        self._take_back()
        size = _size_class(nbytes) if recycled else _round_up(nbytes, PAGE)
        if self.used_nbytes and self.used_nbytes + size > self.limit:
            return None
        block = (self._recycled(size) if recycled else None) or self._allocate(size)
        owner = block.view[:]
        lease = Lease(owner, self._returned.put)
        lease.block, lease.owner, lease.kept = block, owner, False
        self._leases.add(lease)
        self.used_nbytes += block.nbytes
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
                moved += lease.block.nbytes
        self.used_nbytes -= moved
        self.kept_nbytes += moved
        return moved

    def close(self) -> None:
        """Forget all blocks. Those that tensors live in stay until the last of these tensors is gone."""
        for lease in self._leases:
            lease.owner = None
        self._leases.clear()
        self._free.clear()
        self._free_nbytes = 0

    def _take_back(self) -> None:
        while True:
            try:
                item = self._returned.get_nowait()
            except queue.Empty:
                return
            self._accept(item)

    def _accept(self, item: weakref.ref[memoryview] | None) -> None:
        if not isinstance(item, Lease) or item not in self._leases:
            return
        self._leases.discard(item)
        if item.kept:
            self.kept_nbytes -= item.block.nbytes
        else:
            self.used_nbytes -= item.block.nbytes
        item.block.fresh = False
        self._free.append(item.block)
        self._free_nbytes += item.block.nbytes
        self._trim(self.limit)

    def _recycled(self, size: int) -> Block | None:
        best: int | None = None
        for i in range(len(self._free) - 1, -1, -1):
            nbytes = self._free[i].nbytes
            if nbytes == size:
                best = i
                break
            if size < nbytes <= size + size // 4 and (best is None or nbytes < self._free[best].nbytes):
                best = i
        if best is None:
            return None
        block = self._free.pop(best)
        self._free_nbytes -= block.nbytes
        return block

    def _allocate(self, size: int) -> Block:
        self._trim(max(self.limit - size, 0))
        block = Block(size)
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes + self.kept_nbytes + self._free_nbytes + block.nbytes)
        return block

    def _trim(self, most: int) -> None:
        """Give free blocks back to the system, least recently used first, until no more than `most` bytes are held."""
        while self._free and self.used_nbytes + self._free_nbytes > most:
            self._free_nbytes -= self._free.pop(0).nbytes


def address_of(view: memoryview) -> int:
    """Address of a writable view's first byte; 0 for an empty one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def view_at(address: int, nbytes: int, keep_alive: object) -> memoryview:
    """Writable bytes at an address. The view keeps `keep_alive` alive."""
    if not nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_char * nbytes).from_address(address)
    memory._keep_alive = keep_alive  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def move(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the GIL (a slice assignment would hold it). Both views are writable and of one length."""
    ctypes.memmove(address_of(target), address_of(source), source.nbytes)


def _size_class(nbytes: int) -> int:
    """Up to an eighth more than asked for, so that spans of nearly one size can use each other's blocks."""
    granule = max(PAGE, 1 << max(0, nbytes.bit_length() - 4))
    return _round_up(nbytes, granule)


def _huge_nbytes(nbytes: int, size: int) -> int:
    """How much of a block goes on huge pages: all of it unless the last one would be mostly waste."""
    if nbytes < HUGE:
        return 0
    up = _round_up(nbytes, HUGE)
    return min(up, size) if up - nbytes <= nbytes // 8 else nbytes - nbytes % HUGE


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
