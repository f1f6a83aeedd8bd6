"""A checkpoint that is kept in host memory, for loads again and again: what is held, and who uses it now.

Two ways. Files on tmpfs are held where they lie, page-locked there if there is a device to copy to; nothing is held twice. All
else is read once, into private memory at the offsets that it has in the files, and page-locked after that. What is page-locked
for a device is where copies to that device come from; every other load reads from the memory as from any source.

Memory outlasts its loads: each borrows it for as long as it runs, and `close` refuses while one does. Where nobody can be told
so (the holder was collected, or left by an error) the memory goes with the last load. How it is filled is `_hold`'s.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from headrace._checkpoint import Checkpoint
from headrace._header import Header
from headrace._plan import SourceAbilities
from headrace._staging import PAGE, Region, round_up
from headrace.devices.base import Device
from headrace.errors import DeviceError, StreamError
from headrace.sources.base import ByteSource

_GAP_NBYTES = SourceAbilities("memory").gap_nbytes  # a load reads such gaps along, and copies them to a device
_THREADS = 8

Ranges = list[tuple[int, int]]


class Held(Checkpoint):
    """A checkpoint in host memory, as `headrace.hold` makes it: `stream`, `load`, `read` and `plan` take it as they take any.

    Its tensors are those that were asked for. Thread-safe. A load from it may still run while others begin and end.

    Attributes:
        in_place: whether the files are held where they lie, so that they must not be changed meanwhile.
        device: name of the device that it is page-locked for; None: for none.
        pinned: whether it is page-locked. `how`: the way it is held in words, and why it is not page-locked where it should be.
        held_nbytes: private memory that it takes; 0 in place.

    Example:
        >>> with headrace.hold("models/minilm") as held:
        ...     first, second = headrace.load(held), headrace.load(held, dtype="bfloat16")
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        chosen: Sequence[Sequence[int] | None],
        sources: Sequence[ByteSource],
        memory: Memory,
        *,
        in_place: bool,
        how: str,
    ) -> None:
        rows = [None if part is None else list(part) for part in chosen]
        super().__init__(checkpoint.url, sources, checkpoint.headers, rows, checkpoint.options)
        self.unverified, self.names_of_shards = checkpoint.unverified, checkpoint.names_of_shards
        self.in_place, self.how, self.pinned = in_place, how, bool(memory.views)
        self.device = memory.device.name if memory.device is not None else None
        self.held_nbytes = memory.nbytes
        self._memory = memory
        self._finalizer = weakref.finalize(self, memory.abandon)

    def locked_for(self, device: object) -> frozenset[int]:
        """Shards that copies to a device, or to one of this name, are made from directly."""
        mine = self._memory.device
        if mine is None or (device is not mine and device != mine.name and device != mine.name.partition(":")[0]):
            return frozenset()
        return frozenset(self._memory.views)

    def lend(self, device: Device | None = None) -> Loan:
        """Keep the memory for one load, until the loan is closed or collected; with what is page-locked for the device.

        Raises:
            StreamError: it was closed.
        """
        views = self._memory.views if device is not None and device is self._memory.device else {}
        return Loan(self._memory, views, self.url)

    def close(self) -> None:
        """Give the memory back and close the files. May be called twice.

        Raises:
            StreamError: a load from it has not ended; nothing is given back then.
        """
        self._memory.close(self.url)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:  # the error may hold a stream that did not end, and is what counts
            self._memory.abandon()


class Memory:
    """What is held, whoever holds it. It knows nothing of `Held`, whose finalizer has it.

    Args:
        release: gives everything back; called once.
        views: {shard: its bytes in page-locked memory}.
        device: that it is page-locked for.
        nbytes: of private memory.
    """

    def __init__(
        self,
        release: Callable[[], None],
        *,
        views: Mapping[int, memoryview] | None = None,
        device: Device | None = None,
        nbytes: int = 0,
    ) -> None:
        self.views = dict(views or {})
        self.device, self.nbytes = device, nbytes
        self._release: Callable[[], None] | None = release
        self._lock = threading.RLock()  # the collector may end a loan on the thread that has it
        self._loans: set[object] = set()
        self._closed = False

    def borrow(self, loan: object, url: str) -> None:
        with self._lock:
            if self._closed:
                raise StreamError(f"{url} is held no more: it was closed; hold it again")
            self._loans.add(loan)

    def give_back(self, loan: object) -> None:
        with self._lock:
            self._loans.discard(loan)
            self._end_if_unused()

    def close(self, url: str) -> None:
        with self._lock:
            if self._loans and not self._closed:
                raise StreamError(f"{url}: {len(self._loans)} load(s) from it did not end; finish or close them first")
            self._closed = True
            self._end_if_unused()

    def abandon(self) -> None:
        with self._lock:
            self._closed = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if not self._closed or self._loans:
            return
        release, self._release = self._release, None
        self.views = {}
        if release is not None:
            release()


class Loan:
    """The memory for one load; see `_inplace.Locked`. What is borrowed comes back when it is closed or nothing refers to it."""

    def __init__(self, memory: Memory, views: Mapping[int, memoryview], url: str) -> None:
        token = object()
        self.views = views
        memory.borrow(token, url)
        self._finalizer = weakref.finalize(self, memory.give_back, token)

    def close(self) -> None:
        self.views = {}
        self._finalizer()


class Image:
    """A part of each shard in private memory, every byte at the offset that it has in the file.

    Args:
        headers: one per shard.
        chosen: rows per shard; None for all.

    Attributes:
        ranges: per shard (start, end) of what it holds: the header, the tensors, and the gaps that loads read along.
        views: per shard, as long as the file; beyond the ranges there are no bytes, and no memory.
        nbytes: of all ranges.
    """

    def __init__(self, headers: Sequence[Header], chosen: Sequence[Sequence[int] | None]) -> None:
        self.ranges = [_ranges(header, rows) for header, rows in zip(headers, chosen, strict=True)]
        self.nbytes = sum(end - start for ranges in self.ranges for start, end in ranges)
        self._regions = [Region(header.nbytes) for header in headers]
        self.views = [region.view[: header.nbytes] for region, header in zip(self._regions, headers, strict=True)]
        self._pid = os.getpid()
        self._pins: list[int] = []
        self._device: Device | None = None

    def pin(self, device: Device) -> None:
        """Page-lock all of it, or nothing. Raises `PinningError`, or another `DeviceError`."""
        self._device = device
        try:
            with ThreadPoolExecutor(_THREADS, "headrace-hold") as pool:
                list(pool.map(self._pin, *zip(*self._pages(), strict=True)))
        except BaseException:
            self.unpin()
            raise

    def _pages(self) -> list[tuple[int, int]]:
        """(address, bytes) of the pages that the ranges lie in; ranges are further apart than a page."""
        found = []
        for region, ranges in zip(self._regions, self.ranges, strict=True):
            for start, end in ranges:
                first = start - start % PAGE
                found.append((region.address + first, round_up(end, PAGE) - first))
        return found

    def _pin(self, address: int, nbytes: int) -> None:
        assert self._device is not None
        self._device.enter_thread()
        self._device.pin(address, nbytes)
        self._pins.append(address)

    def unpin(self) -> None:
        """End page-locking; no copy may be under way. The memory itself goes when nothing refers to it."""
        if self._pid != os.getpid():  # what is page-locked is the parent's
            return
        pins, self._pins = self._pins, []
        for address in pins:
            assert self._device is not None
            try:
                self._device.unpin(address)
            except DeviceError:  # the device may still read it: it must never be unmapped
                for region in self._regions:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(region))


def _ranges(header: Header, rows: Sequence[int] | None) -> Ranges:
    """What of a file is held: whole stretches, so that whatever a load reads along is there."""
    if rows is None:
        return [(0, header.nbytes)]
    found: Ranges = [(0, header.data_offset)]
    for row in rows:
        start, end = header.starts[row], header.ends[row]
        if start == end:
            continue
        if start - found[-1][1] <= max(_GAP_NBYTES, 2 * PAGE):
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found
