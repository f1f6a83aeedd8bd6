"""Page-locked memory of a ring: made ready piece by piece, undone in order, or left for the next load.

Registrations end before the mapping does, and after the last copy, in whatever way the load ends; the interpreter's end is one of
them. Where it cannot be known that the copies are done, the memory is never unmapped. Slots, readers and who waits for whom are
the ring's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
from collections.abc import Sequence
from typing import Any

from headrace._staging import Region
from headrace.devices.base import Device
from headrace.errors import DeviceError, StreamError

_MADV_DONTFORK = 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Ladder:
    """How memory is page-locked, and what was refused on the way there.

    Attributes:
        how: in words. `is_degraded`: whether that is worth a warning, and `said`: whether it was given.
        allocator_works: whether the device's allocator may still be asked.
    """

    def __init__(self) -> None:
        self.how = "page-locked: registered with the driver"
        self.allocator_works = True
        self.is_degraded = self.said = False
        self._most: int | None = None  # slots registered at once; 0: not at all
        self._why = ""

    def step(self, slots: int) -> int | None:
        """How many slots to register at once; None: do not try."""
        if self._most == 0:
            return None
        return slots if self._most is None else min(slots, self._most)

    def refused(self, slots: int, error: Exception) -> None:
        """The driver did not register so many at once."""
        self._why = str(error)
        self._most = slots // 2 if self._most is None else min(self._most, slots // 2)
        if self._most:
            self.how = f"page-locked in smaller pieces: {self._why}"
        else:
            self.is_degraded = True
            self.how = f"page-locked by the device's allocator, not registered: {self._why}"

    def allocator_refused(self, error: Exception) -> None:
        """The device's allocator has none either."""
        self.allocator_works = False
        self.how = f"not page-locked, copies are slower: {self._why}; {error}"


class PinnedMemory:
    """The mapping, and what has to be undone before it goes. Held by the ring's finalizer, so it knows nothing of the ring.

    Attributes:
        owners: memory of the device's allocator that stands in for parts that were refused. `events`: of the copies out of it.
        closed: nothing may be queued or registered any more; changes under `lock`.
        untracked: copies may be under way whose end no event tells of. `outside`: so there are, and nothing is wrong.
        ready_slots: how many slots a load before has page-locked.
    """

    def __init__(self, device: Device, region: Region) -> None:
        self.device, self.region = device, region
        self.lock, self.closed, self.untracked, self.outside = threading.Lock(), False, False, False
        self._pinning = threading.Lock()
        self.ready_slots = 0
        self.owners: list[object] = []
        self.events: list[Any] = []
        self._pins: list[int] = []
        self._pid = os.getpid()
        # A page that a forked child shares would be copied when the parent writes to it, and the device go on with the old one.
        _libc.madvise(region.address, region.nbytes, _MADV_DONTFORK)

    def address_of(self, position: int) -> int:
        """Of a byte of the region."""
        return self.region.address + position

    def pin(self, address: int, nbytes: int) -> None:
        """Register a part of it. Raises `PinningError`."""
        with self._pinning:
            if self.closed:
                raise StreamError("the stream is closed")
            self.device.pin(address, nbytes)
            self._pins.append(address)

    @property
    def is_ours(self) -> bool:
        """Not in a forked child: device and registrations are the parent's."""
        return self._pid == os.getpid()

    def rest(self) -> bool:
        """Wait for all copies, and keep nothing but the registered memory. False where it cannot be known that they are done."""
        if not self.is_ours or self.untracked or self.owners:
            return False
        events, self.events = self.events, []
        drained = self._drain(events)
        with contextlib.suppress(DeviceError):
            self.device.destroy(events)
        self.untracked = not drained
        self.outside = False
        return drained

    def wake(self) -> None:
        """For the next load."""
        self.closed = False

    def _drain(self, events: Sequence[Any]) -> bool:
        try:
            for event in events:
                self.device.synchronize(event)
            if self.untracked or self.outside:
                self.device.drain()
        except DeviceError:
            return False
        return True

    def release(self) -> None:
        """Undo all of it, but in a forked child."""
        if not self.is_ours:
            return
        with self.lock:
            self.closed = True
        with self._pinning:
            pins, self._pins = self._pins, []
        events, self.events = self.events, []
        drained = self._drain(events)
        for address in pins:
            try:
                self.device.unpin(address)
            except DeviceError:
                drained = False
        if not drained:
            # The device may still read it, or takes the next mapping at this place for registered: it must never be unmapped.
            for memory in (self.region, *self.owners):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        self.owners.clear()
        with contextlib.suppress(DeviceError):
            self.device.destroy(events)


class Shelf:
    """Memory that loads have left, page-locked: one ring for a device, in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Device, tuple[int, PinnedMemory]] = {}

    def take(self, device: Device, slot_nbytes: int, slots: int) -> PinnedMemory | None:
        """What was left for rings of such slots, if it is long enough. Copies may not pass from one registration into another, so
        slots of another length would not do."""
        with self._lock:
            kept_nbytes, memory = self._kept.get(device, (0, None))
            if memory is None or kept_nbytes != slot_nbytes or memory.region.nbytes < slots * slot_nbytes or not memory.is_ours:
                return None
            del self._kept[device]
        memory.wake()
        return memory

    def put(self, memory: PinnedMemory, slot_nbytes: int, ready_slots: int) -> bool:
        """Keep a ring's memory in place of what was kept for its device. False where it has to be released."""
        if not memory.rest():
            return False
        memory.ready_slots = ready_slots
        with self._lock:
            if not self._kept:
                atexit.register(self.clear)
            _, before = self._kept.get(memory.device, (0, None))
            self._kept[memory.device] = (slot_nbytes, memory)
        if before is not None:
            before.release()
        return True

    def clear(self) -> None:
        """Release all of it."""
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
        atexit.unregister(self.clear)
        for _, memory in kept:
            memory.release()


shelf = Shelf()


def release_kept() -> None:
    """Give back the page-locked memory that loads with `keep` have left in this process."""
    shelf.clear()
