"""Devices with memory of their own: readers fill slots of a ring, and one copy carries each chunk to the device while reading
goes on.

The reader that filled a slot queues its copy as well: a copy is one call of a few microseconds, and a thread that did nothing
else would have to be woken for each. All copies of a load go to the device's one copy stream, under one lock, so an event that
is recorded behind a copy covers it and all before it.

A span has memory on the device from its first read on. When its last copy has been queued, what is left is queued behind it:
a conversion, or the move of tensors whose address would not suit them. Then an event is recorded, and the span is ready: the
caller's stream waits for the event, the caller does not. How far the device's memory runs ahead of the caller is bounded.
Where an allocation fails and waiting for the caller cannot help, each tensor of the span gets memory of its own, and one that
still finds none is assembled on the host and handed out there. Only allocations fall back; every other error ends the load,
after the copies under way.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace._addresses import address_of, move
from headrace._device_memory import DeviceMemory, SpanMemory
from headrace._filling import IN_PLACE, Hops, SlotFiller
from headrace._inplace import Locked
from headrace._landing import Filling, Maker
from headrace._plan import Plan, Read, Span
from headrace._progress import Progress
from headrace._ring import Issue, Ring
from headrace._staging import PAGE, round_up
from headrace.devices.base import Destination, Device, DeviceBuffer, HostTarget
from headrace.errors import DeviceMemoryError, OptionError, StreamError
from headrace.sources.base import ByteSource, DirectSource

log = logging.getLogger("headrace")


class Relay(Protocol):
    """Carries out the reads that ranks do for each other; see `_relay`."""

    def attach(self, ring: Ring, issue: Issue[Read], place: Callable[[Read, int, int], None]) -> None: ...
    def takes(self, read: Read) -> bool: ...
    def fill(self, filler: SlotFiller, read: Read) -> Hops | None: ...
    def close(self) -> None: ...


class DeviceLanding:
    """Memory of a device, and the ring in host memory on the way there.

    Args:
        plan: with limits for staging.
        sources: one per shard.
        device: where the tensors go.
        host: makes tensors for what is assembled on the host.
        progress: counters; `degraded` too.
        ownership: as of `headrace.stream`.
        destinations: {tensor name: memory the caller gave for it}.
        in_place: shards that are page-locked where they lie; closed with this.
        direct: shards that a library reads straight into the device's memory.
        compat: whether it does that by way of host memory; a tensor then stays on the device only where it leaves room there.

    Attributes:
        relay: carries out what ranks read for each other, where they load together. Set before the start, closed with this.
    """

    reads_on_caller = False

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[ByteSource],
        device: Device,
        host: HostTarget,
        progress: Progress,
        *,
        ownership: str = "leased",
        destinations: Mapping[str, Destination] | None = None,
        in_place: Locked | None = None,
        direct: Mapping[int, DirectSource] | None = None,
        compat: bool = False,
    ) -> None:
        assert plan.limits.staging is not None
        self.filled: list[str] = []
        self._plan, self._sources, self._device, self._progress = plan, sources, device, progress
        self._staging = plan.limits.staging
        self._given: Mapping[str, Destination] = destinations or {}
        self._in_place = in_place
        self._views = in_place.views if in_place is not None else {}
        self._direct = direct or {}
        self._space = DeviceMemory(
            plan,
            device,
            host,
            self._given,
            apart=ownership == "copied",
            lends=ownership == "borrowed",
            bounced=self._direct if compat else (),
        )
        self._pid = os.getpid()
        self._handing = threading.RLock()  # held while an event is waited for, and while events go: a signal may close the stream
        self._lock = threading.Lock()  # the fields below
        self._closed = False
        self._ring: Ring | None = None
        self.relay: Relay | None = None
        self._memory: dict[int, SpanMemory] = {}
        self._written: set[str] = set()  # given tensors that were not handed out yet
        self._ahead_nbytes = 0  # device memory of spans that were not handed out yet
        self._no_wait = False  # nothing is under way or ready: waiting for the caller would never end
        self._returned: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._events: list[Any] = []
        self._all_events: list[Any] = []
        self._handed: _Handed | None = None
        self._lent: deque[Callable[[], bool] | None] | None = deque() if ownership == "borrowed" else None
        self._lent_count = 0
        self._degraded: set[str] = set()

    # -- the readers' side -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The caller's tensors may still be written to, or read, by what its stream has been given."""
        if self._given:
            self._device.await_caller()

    def filling(self) -> Filling:
        self._device.enter_thread()
        with self._lock:
            self._check_open()
            if self._ring is None:
                self._ring = self._new_ring()
                if self.relay is not None:
                    self.relay.attach(self._ring, self.issue, self.place)
            return _DeviceFilling(SlotFiller(self._plan, self._sources), self._ring, self, self._views)

    def _new_ring(self) -> Ring:
        """No more and no longer slots than the plan's reads can use."""
        longest = max(read.nbytes for read in self._plan.reads)
        staging, reads = self._staging, len(self._plan.reads)
        ring = Ring(
            self._device,
            slots=min(staging.slots, reads) + (self.relay is not None),  # its thread takes one as well
            slot_nbytes=min(
                staging.slot_nbytes, round_up(longest, PAGE) + 2 * PAGE if self._keeps_length() else staging.slot_nbytes
            ),
            pin=staging.pin,
            on_degraded=self._degrade,
            keep=staging.keep,
        )
        self._progress.staging_nbytes = ring.nbytes
        return ring

    def _keeps_length(self) -> bool:
        """Whether no read becomes longer in its slot."""
        return all(read.copy is None or read.copy.source == read.copy.target for read in self._plan.reads)

    def provide(self, index: int, span: Span) -> bool:
        if span.given:
            self._written.update(self._plan.tensors.names[span.first : span.last])
            self._memory[index] = self._fenced(self._space.given(span), span)
            return True
        wanted = max(1, span.nbytes) + span.cast_nbytes
        if self._ahead_nbytes and not self._no_wait and not self._may_run_ahead(wanted):
            return False
        try:
            memory = self._fenced(self._space.allocate(span), span)
        except DeviceMemoryError as exc:
            if not self._no_wait:
                return False
            memory = self._fenced(self._space.allocate_apart(span), span)
            if memory.spills:
                self._degrade(f"no room on {self._device.name}: some tensors were handed out in host memory ({exc})")
        self._no_wait = False
        self._memory[index] = memory
        with self._lock:
            self._ahead_nbytes += memory.nbytes
            self._progress.device_peak_nbytes = max(self._progress.device_peak_nbytes, self._ahead_nbytes)
        return True

    def _may_run_ahead(self, nbytes: int) -> bool:
        return self._ahead_nbytes + nbytes <= self._staging.ahead_nbytes and self._space.has_room(nbytes)

    def _fenced(self, memory: SpanMemory, span: Span) -> SpanMemory:
        """A library of direct storage knows nothing of streams: its reads wait for what was queued before."""
        if any(read.direct for read in self._plan.reads[span.first_read : span.last_read]):
            with self._lock:
                memory.fence = self._record()
        return memory

    def read_direct(self, read: Read) -> bool:
        """Have the library read straight into the device's memory. False where the bytes have to come another way: they belong
        to several tensors with memory of their own, or to one on the host."""
        memory = self._memory[read.span]
        part = memory.parts[max(0, bisect_right(memory.starts, read.position) - 1)]
        if part.address is None or read.position < part.start or read.position + read.nbytes > part.end:
            return False
        self._device.synchronize(memory.fence)
        owner = part.raw or self._given[self._plan.tensors.names[part.first]]
        address = part.address + read.position - part.start
        try:
            self._direct[read.shard].read_into_device(read.offset, address, read.nbytes, keep=owner)
        finally:
            del owner, part, memory  # an error's traceback lives on
        with self._lock:
            self._progress.gds_nbytes += read.nbytes
        return True

    def wait(self) -> None:
        self._returned.get()

    def memory_of(self, read: Read, *, touch: bool = False) -> list[memoryview]:
        del read, touch
        raise OptionError(f"group= loads to host memory only, and this load goes to {self._device.name}", option="group")

    def wake(self) -> None:
        self._returned.put(None)

    def go_on(self) -> None:
        self._no_wait = True

    def issue(self, read: Read, data: memoryview, pinned: bool) -> None:
        """Queue the copies of a read's bytes; the lock of the ring is held."""
        memory = self._memory[read.span]
        parts, source = memory.parts, address_of(data)
        start, end = read.position, read.position + data.nbytes
        i = max(0, bisect_right(memory.starts, start) - 1)
        copies = sent = 0
        while i < len(parts) and parts[i].start < end:
            part = parts[i]
            i += 1
            begin, stop = max(start, part.start), min(end, part.end)
            if begin >= stop:
                continue
            if part.host is not None:
                move(part.host[begin - part.start : stop - part.start], data[begin - start : stop - start])
                continue
            assert part.address is not None
            self._device.copy_async(part.address + begin - part.start, source + begin - start, stop - begin, pinned=pinned)
            copies += 1
            sent += stop - begin
        self._progress.device_copies += copies
        self._progress.sent_nbytes += sent

    def place(self, read: Read, address: int, nbytes: int) -> None:
        """Queue the copies of a read's bytes that are on the device already; the lock of the ring is held.

        Raises:
            DeviceMemoryError: what they belong to had to be put into host memory.
        """
        memory = self._memory[read.span]
        start, end = read.position, read.position + nbytes
        for part in memory.parts:
            begin, stop = max(start, part.start), min(end, part.end)
            if begin >= stop:
                continue
            if part.address is None:
                message = f"no room on {self._device.name} for tensors that another node has read; give a smaller memory_limit"
                raise DeviceMemoryError(message, device=self._device.name, requested=part.end - part.start, free=0)
            self._device.move_async(part.address + begin - part.start, address + begin - start, stop - begin)

    def complete(self, index: int, span: Span) -> int:
        memory = self._memory[index]
        with self._lock:
            for part in memory.parts:
                self._space.convert(part, span)
            self._space.move_apart(memory)
            self._fill_given(memory, span)
            memory.event = self._record()
            if memory.fence is not None:
                self._events.append(memory.fence)
        return 0

    def _fill_given(self, memory: SpanMemory, span: Span) -> None:
        """Those of the given tensors that no copy could go to, and a note of all that are written now."""
        given = self._given
        if not given:
            return
        names = self._plan.tensors.names[span.first : span.last]
        indirect = [i for i, name in enumerate(names) if name in given and not span.given]
        if indirect:
            memory.tensors = self._space.make(memory, span, span.first, span.last)
            for i in indirect:
                self._written.add(names[i])
                self._device.fill(given[names[i]], memory.tensors[i])
        self.filled += [name for name in names if name in given]

    def _record(self) -> Any:
        if self._events:
            event = self._events.pop()
        else:
            event = self._device.new_event()
            self._all_events.append(event)
        self._device.record(event)
        return event

    # -- the caller's side -----------------------------------------------------------------------------------------------------

    @property
    def chunk_nbytes(self) -> int:
        """Bytes that a slot of the ring holds, whatever is read."""
        return self._staging.chunk_nbytes // PAGE * PAGE

    @property
    def before_each(self) -> Callable[[], None] | None:
        return self._check_stream if self._lent is None else self._check_returned

    def take(self, index: int, span: Span) -> Maker:
        memory = self._memory.pop(index, None)
        if memory is None:  # a span of tensors without bytes; or another thread has closed the stream
            self._check_open()
            memory = SpanMemory([], [])
        buffers = memory.buffers()
        if memory.event is not None:
            self._hand_over(memory.event, buffers)
        with self._lock:
            self._ahead_nbytes -= memory.nbytes
        self._returned.put(None)
        given = self._given

        def made(begin: int, end: int) -> list[Any]:
            if memory.tensors is not None:
                tensors = memory.tensors[begin - span.first : end - span.first]
            else:
                tensors = self._space.make(memory, span, begin, end)
            if given:
                names = self._plan.tensors.names[begin:end]
                self._written.difference_update(names)
                tensors = [given[name].finish() if name in given else tensor for name, tensor in zip(names, tensors, strict=True)]
            if self._lent is not None:
                sizes = self._plan.tensors.nbytes[begin:end]
                names = self._plan.tensors.names[begin:end]
                self._lent.extend(
                    self._device.watch(tensor) if nbytes and name not in given else None
                    for name, tensor, nbytes in zip(names, tensors, sizes, strict=True)
                )
            return tensors

        return made

    def _hand_over(self, event: Any, buffers: list[DeviceBuffer]) -> None:
        if self._handed is not None:
            with self._lock:
                self._events.append(self._handed.event)
        self._handed = _Handed(event, buffers, {self._device.callers_stream()})
        self._wait_for(event, buffers)

    def _wait_for(self, event: Any, buffers: list[DeviceBuffer]) -> None:
        """Let the caller's stream wait for an event, which is gone once another thread has closed the stream."""
        with self._handing:
            self._check_open()
            self._device.hand_over(event, buffers)

    def _check_open(self) -> None:
        if self._closed:
            raise StreamError("the stream is closed")

    def _check_stream(self) -> None:
        """The caller may go on with another stream, or on another thread, in the middle of a span."""
        handed = self._handed
        if handed is not None and (stream := self._device.callers_stream()) not in handed.streams:
            handed.streams.add(stream)
            self._wait_for(handed.event, handed.buffers)

    def _check_returned(self) -> None:
        """Borrowed: a loop variable still holds the previous tensor as the next is asked for; the one before must be gone."""
        assert self._lent is not None
        self._check_stream()
        if self._lent_count > 1 and (is_gone := self._lent.popleft()) is not None and not is_gone():
            raise StreamError("a borrowed tensor was kept beyond the next step; use ownership='leased', or clone what you keep")
        self._lent_count += 1

    # -- the end ---------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._pid != os.getpid():  # device, ring and threads are the parent's
            self._memory.clear()
            return
        if self.relay is not None:
            self.relay.close()
        with self._lock:
            self._closed = True
            ring, self._ring = self._ring, None
        try:
            if ring is not None:
                self._note_ring(ring)
                ring.close()
            if self._in_place is not None:
                self._in_place.close()
            self._views = {}
        finally:
            for name in list(self._written):  # also those that were written, perhaps in part, and never handed out
                self._given[name].finish()
            self._written.clear()
            self._memory.clear()
            self._handed = None
            events, self._all_events = self._all_events, []
            for event in events:
                self._device.synchronize(event)  # given tensors are still written to until then
            with self._handing:
                self._device.destroy(events)

    def _note_ring(self, ring: Ring) -> None:
        if ring.pinned is not None or self.relay is None:
            self._progress.pinned, self._progress.pinned_how = ring.pinned, ring.how
        self._progress.peak_nbytes = max(self._progress.peak_nbytes, ring.used_nbytes)

    def _degrade(self, reason: str) -> None:
        """Say once per reason that something did not go as it should."""
        with self._lock:
            kind = reason.partition(":")[0]
            if kind in self._degraded:
                return
            self._degraded.add(kind)
            self._progress.degraded.append(reason)
        log.warning("%s", reason)


@dataclass(slots=True)
class _Handed:
    """The span whose tensors are handed out, and the streams that may use them."""

    event: Any
    buffers: list[DeviceBuffer]
    streams: set[Any]


class _DeviceFilling:
    """Fills slots and sends them off."""

    def __init__(self, filler: SlotFiller, ring: Ring, landing: DeviceLanding, in_place: Mapping[int, memoryview]) -> None:
        self._filler, self._ring, self._landing, self._in_place = filler, ring, landing, in_place

    def close(self) -> None:
        self._filler.close()
        del self._ring, self._landing, self._in_place

    def fill(self, read: Read) -> Hops | None:
        relay = self._landing.relay
        if relay is not None and relay.takes(read):
            return relay.fill(self._filler, read)
        file = self._in_place.get(read.shard)
        if file is not None and read.copy is None and read.pieces == 1:
            self._ring.send_outside(self._landing.issue, read, file[read.offset : read.offset + read.nbytes])
            return IN_PLACE
        if read.direct:
            return self._fill_direct(read)
        return self._fill_by_ring(read)

    def _fill_direct(self, read: Read) -> Hops:
        if self._landing.read_direct(read):
            return Hops(direct_nbytes=read.nbytes)
        step, direct = self._landing.chunk_nbytes, 0
        for at in range(0, read.nbytes, step):  # it may be longer than a slot
            nbytes = min(step, read.nbytes - at)
            part = read._replace(offset=read.offset + at, position=read.position + at, nbytes=nbytes)
            direct += self._fill_by_ring(part).direct_nbytes
        return Hops(direct)

    def _fill_by_ring(self, read: Read) -> Hops:
        ring = self._ring
        slot = ring.take()
        try:
            data, hops = self._filler.fill_slot(read, slot.view)
            data = ring.settle(slot, data)
        except BaseException:
            ring.put_back(slot)
            raise
        ring.send(slot, self._landing.issue, read, data)
        return hops
