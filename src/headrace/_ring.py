"""A ring of page-locked slots: the host memory that every byte passes through on its way to a device.

One private mapping of exactly the size that is needed. Its memory is made when it is wanted and not before: a few threads fault
pages in, segment after segment, and register each as soon as it is there, while readers already fill the first slots; a
reader looks for the registration only when it has read. Segments grow from one slot to 256 MiB, so that the first copy waits
for a small one.

Where registration is refused the ring goes down a ladder: smaller segments, memory of the device's own allocator, memory that is
not page-locked. That is said once, and the load goes on, unless page-locked memory was demanded.

A load may leave its ring, page-locked, for the next one to the same device (`keep`): making it anew takes tens of milliseconds.
One is kept for a device, until `release_kept` or the interpreter's end.

A slot is free when the event of its last copy is done. The slot that was freed last is filled first: it is still in cache, and
slots that nobody needs never get memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from headrace._addresses import move, view_at
from headrace._interpreter import join
from headrace._machine import available_cpus
from headrace._pinned import Ladder, PinnedMemory, shelf
from headrace._reasons import reason_after
from headrace._staging import PAGE, Region, round_up
from headrace.devices.base import Device
from headrace.errors import DeviceError, PinningError

_T = TypeVar("_T")

Issue = Callable[[_T, memoryview, bool], None]  # what, bytes, whether they are page-locked

SEGMENT_NBYTES = 256 << 20  # some drivers refuse more at once, or take very long
_THREADS = 4


class Slot:
    """A stretch of the ring.

    Attributes:
        view: its memory. Another memory, once the device's allocator had to provide it.
        index: its number.
        event: done when the copies out of it are.
        pinned: whether it is page-locked.
    """

    __slots__ = ("event", "index", "owner", "pinned", "replacement", "segment", "view")

    def __init__(self, index: int, view: memoryview, segment: Segment, event: Any) -> None:
        self.index, self.view, self.segment, self.event = index, view, segment, event
        self.pinned = False
        self.owner: object = None
        self.replacement: memoryview | None = None


class Segment:
    """Slots that are registered together.

    Attributes:
        first, last: their numbers, end exclusive.
        settled: set when it is known whether they are page-locked.
        unpopulated: slots whose memory is not there yet.
    """

    __slots__ = ("first", "last", "settled", "unpopulated")

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.settled = threading.Event()
        self.unpopulated = last - first


class Ring:
    """The slots of one load.

    Args:
        device: that the copies go to.
        slots, slot_nbytes: how many, and how long each.
        pin: 'off', 'auto' or 'require'.
        on_degraded: called once, with the reason, where memory could not be registered.
        keep: take the memory that a load before has left, and leave it for the next one.

    Attributes:
        nbytes: of all slots.
        pinned: whether all slots that were used are page-locked; None where none was used yet.
        how: in words how the memory is page-locked, or why it is not.
    """

    def __init__(
        self,
        device: Device,
        *,
        slots: int,
        slot_nbytes: int,
        pin: str,
        on_degraded: Callable[[str], None],
        keep: bool = False,
    ) -> None:
        self._device, self._pin, self._on_degraded = device, pin, on_degraded
        self._slot_nbytes = round_up(slot_nbytes, PAGE)
        self.nbytes = slots * self._slot_nbytes
        self.how = "" if pin != "off" else "not page-locked: pin='off'"
        self.pinned: bool | None = None
        self._ladder, self._climbing = Ladder(), threading.Lock()
        self._error: BaseException | None = None
        self._broken: BaseException | None = None  # why nothing is copied any more; this may be reported before the error itself
        self._work = threading.Condition()  # which slots need memory
        self._keep = keep and pin != "off"
        kept = shelf.take(device, self._slot_nbytes, slots) if self._keep else None
        self._memory = kept or PinnedMemory(device, Region(self.nbytes))
        self._lock = self._memory.lock  # slots, and the order of copies and events on the stream
        ready = min(slots, self._memory.ready_slots)
        self._wanted = self._populating = ready
        if ready:
            self._ladder.how += ", by a load before"
            self.how = self._ladder.how
        self._segments = _segments(slots, self._slot_nbytes, ready)
        try:
            self._slots = self._make_slots()
        except BaseException:
            self._memory.release()  # the events that were made before one could not be
            raise
        self._free = self._slots[::-1]
        self._flying: deque[Slot] = deque()
        self._threads: list[threading.Thread] = []
        # The threads hold the ring, so it is not collected before it is closed; but the interpreter may end.
        self._finalizer = weakref.finalize(self, self._memory.release)
        if pin != "off":
            self._start_threads()

    def _make_slots(self) -> list[Slot]:
        view, nbytes = self._memory.region.view, self._slot_nbytes
        owners = [segment for segment in self._segments for _ in range(segment.first, segment.last)]
        slots = []
        for index, segment in enumerate(owners):
            event = self._device.new_event()
            self._memory.events.append(event)
            slots.append(Slot(index, view[index * nbytes : (index + 1) * nbytes], segment, event))
            slots[-1].pinned = segment.settled.is_set()
        return slots

    # -- slots -----------------------------------------------------------------------------------------------------------------

    def take(self) -> Slot:
        """A slot to fill, the most recently freed one. Waits for the oldest copy where none is free.

        There is always a copy to wait for, as there are no more readers than slots.
        """
        with self._lock:
            self._check_open()
            while self._flying and self._device.is_done(self._flying[0].event):
                self._free.append(self._flying.popleft())
            slot = self._free.pop() if self._free else None
            oldest = self._flying.popleft() if slot is None else None
        if oldest is not None:
            try:
                self._device.synchronize(oldest.event)
            except BaseException:
                with self._lock:
                    self._flying.appendleft(oldest)  # closing waits for it once more
                raise
            slot = oldest
        assert slot is not None
        self._want(slot)
        return slot

    def settle(self, slot: Slot, data: memoryview) -> memoryview:
        """Wait until it is known whether the slot is page-locked; the bytes then are where a copy may take them from.

        Raises:
            PinningError: it is not, and that was demanded.
        """
        if self._pin != "off":
            if not slot.segment.settled.is_set():  # waiting takes a lock, set or not
                slot.segment.settled.wait()
            if self._error is not None:
                raise self._error
            if slot.replacement is not None:
                target = slot.replacement[: data.nbytes]
                move(target, data)
                slot.view, slot.replacement, data = slot.replacement, None, target
        if self.pinned is not slot.pinned:
            self.pinned = slot.pinned and self.pinned is None
        return data

    def send(self, slot: Slot, issue: Issue[_T], what: _T, data: memoryview) -> None:
        """Queue the copies out of a slot, by `issue(what, data, slot.pinned)`. It is taken again when they are done.

        Raises:
            StreamError: the ring was closed meanwhile. The error of another one's copies: they could not be queued.
        """
        with self._lock:
            self._check_open()
            self._flying.append(slot)  # before anything is queued: whatever fails now, closing waits
            try:
                issue(what, data, slot.pinned)  # no closure: it would keep the memory as long as an error's traceback
                self._device.record(slot.event)
            except BaseException as exc:
                self._memory.untracked = True  # a copy may be under way that no event tells of
                self._broken = reason_after(exc)
                raise

    def send_outside(self, issue: Issue[_T], what: _T, data: memoryview) -> None:
        """Queue copies out of page-locked memory that is not the ring's; closing the ring waits for them."""
        with self._lock:
            self._check_open()
            self._memory.outside = True
            issue(what, data, True)

    def put_back(self, slot: Slot) -> None:
        """Give a slot back that nothing was copied out of."""
        with self._lock:
            self._free.append(slot)

    def _check_open(self) -> None:
        if self._memory.closed or self._memory.untracked:
            raise reason_after(self._broken)

    @property
    def used_nbytes(self) -> int:
        """Of the slots that have, or get, memory."""
        return self._wanted * self._slot_nbytes

    # -- memory, on threads of its own -----------------------------------------------------------------------------------------

    def _want(self, slot: Slot) -> None:
        """Have a slot's segment made ready, and the one behind it."""
        if slot.index < self._wanted:
            return
        segment = self._segments.index(slot.segment)
        behind = self._segments[min(segment + 1, len(self._segments) - 1)]
        with self._work:
            self._wanted = max(self._wanted, behind.last)
            self._work.notify_all()

    def _start_threads(self) -> None:
        for i in range(min(_THREADS, len(self._slots) - self._populating, available_cpus())):
            thread = threading.Thread(target=self._prepare, name=f"headrace-pin-{i}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _prepare(self) -> None:
        """A thread that makes slots ready, one after another, until all of them are or the ring is closed."""
        try:
            self._device.enter_thread()
            self._device.keep_near()
        except DeviceError as exc:
            self._error = exc
        while (slot := self._next_unpopulated()) is not None:
            self._make_ready(slot)

    def _next_unpopulated(self) -> Slot | None:
        with self._work:
            while True:
                if self._memory.closed or self._populating == len(self._slots):
                    return None
                if self._populating < self._wanted:
                    self._populating += 1
                    return self._slots[self._populating - 1]
                self._work.wait()

    def _make_ready(self, slot: Slot) -> None:
        start = slot.index * self._slot_nbytes
        self._memory.region.populate(start, start + self._slot_nbytes)
        with self._work:
            slot.segment.unpopulated -= 1
            if slot.segment.unpopulated:
                return
        try:
            with self._climbing:
                self._pin_slots(slot.segment.first, slot.segment.last)
        except BaseException as exc:  # noqa: BLE001 - raised where a reader waits for the segment
            exc.__cause__ = exc.__context__ = None  # their frames, and its own, hold the ring
            self._error = exc.with_traceback(None)
        finally:
            slot.segment.settled.set()

    def _pin_slots(self, first: int, last: int) -> None:
        """Go down the ladder as far as need be. What failed once is not tried again."""
        step = self._ladder.step(last - first)
        if step is None:
            for index in range(first, last):
                self._replace(self._slots[index])
            return
        for begin in range(first, last, step):
            end = min(begin + step, last)
            address, nbytes = self._memory.address_of(begin * self._slot_nbytes), (end - begin) * self._slot_nbytes
            try:
                self._memory.pin(address, nbytes)
            except PinningError as exc:
                self._ladder.refused(end - begin, exc)
                self._pin_slots(begin, end)
                continue
            for index in range(begin, end):
                self._slots[index].pinned = True
            self._say(self._ladder.how)

    def _replace(self, slot: Slot) -> None:
        """Memory of the device's own allocator, or else leave the slot as it is."""
        if self._ladder.allocator_works:
            try:
                address, owner = self._device.allocate_pinned(self._slot_nbytes)
            except PinningError as exc:
                self._ladder.allocator_refused(exc)
            else:
                slot.owner = owner
                self._memory.owners.append(owner)
                slot.replacement = view_at(address, self._slot_nbytes, owner)
                slot.pinned = True
        if not slot.pinned and self._pin == "require":
            raise PinningError(f"pin='require': {self._ladder.how}", device=self._device.name)
        self._say(self._ladder.how)

    def _say(self, how: str) -> None:
        if how == self.how:
            return
        first = self._ladder.is_degraded and not self._ladder.said
        self.how = how
        if first:
            self._ladder.said = True
            self._on_degraded(f"staging memory for {self._device.name}: {how}")

    # -- the end ---------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the copies under way, end the registrations and give the memory back. May be called twice.

        A reader that its source still holds finds the ring closed when it comes back.
        """
        with self._lock:
            self._memory.closed = True  # no copy is queued from here on
        with self._work:
            self._work.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                join(thread)
        if not self._finalizer.alive:
            return
        ready = self._ready_slots() if self._keep else 0
        for segment in self._segments:
            segment.settled.set()
        if not ready or not shelf.put(self._memory, self._slot_nbytes, ready):
            self._finalizer()
        self._finalizer.detach()

    def _ready_slots(self) -> int:
        """How many slots, from the first on, are page-locked where they were made."""
        ready = 0
        for slot in self._slots:
            if not slot.pinned or slot.owner is not None or not slot.segment.settled.is_set():
                break
            ready += 1
        return ready


def _segments(slots: int, slot_nbytes: int, ready: int) -> list[Segment]:
    """1, 1, 2, 4, ... slots, up to `SEGMENT_NBYTES`, behind those that are ready."""
    most = max(1, SEGMENT_NBYTES // slot_nbytes)
    found: list[Segment] = []
    if ready:
        found.append(Segment(0, ready))
        found[0].unpopulated = 0
        found[0].settled.set()
    at = ready
    while at < slots:
        last = min(slots, at + min(most, max(1, at)))
        found.append(Segment(at, last))
        at = last
    return found
