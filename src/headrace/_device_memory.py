"""Memory of a device for the tensors of a load, and the tensors that are made of it.

A span has one stretch for all of its tensors. Where that cannot be had each tensor gets memory of its own, and one that still
finds none is assembled in the host's. Which of these to try, and when, is for whoever waits for memory to say (`_pipeline`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace._cast import copy_out
from headrace._dtypes import DTYPES
from headrace._plan import MIB, Copy, Plan, Span
from headrace._routes import leaves_headroom
from headrace._staging import PAGE
from headrace.devices.base import Destination, Device, DeviceBuffer, HostTarget
from headrace.errors import DeviceMemoryError


@dataclass(slots=True)
class Part:
    """A stretch of a span's bytes, as they are read, and the memory that they go to.

    Attributes:
        first, last: rows of the tensors that lie in it.
        start, end: in the span.
        address: of the device memory; None where it is assembled on the host.
        raw: that memory, unless it is the caller's. `made`: what a conversion fills.
        shift: bytes of `raw` in front of the part, so that its pages are pages of the file.
        host: memory on the host, with the tensor over it where it needs no conversion.
    """

    first: int
    last: int
    start: int
    end: int
    address: int | None = None
    raw: DeviceBuffer | None = None
    made: DeviceBuffer | None = None
    shift: int = 0
    host: memoryview | None = None
    tensor: Any = None


@dataclass(slots=True)
class SpanMemory:
    """Where the bytes of one span go.

    Attributes:
        parts: in order. `starts`: where each begins.
        own: {row: memory of its own} for tensors that are moved there.
        nbytes: of device memory.
        event: done when everything that was queued for the span is.
        fence: done when all that may still use the memory is; None where only what is queued later writes to it.
        tensors: made already, where given ones were filled from them.
    """

    parts: list[Part]
    starts: list[int]
    own: dict[int, DeviceBuffer] = field(default_factory=dict)
    nbytes: int = 0
    event: Any = None
    fence: Any = None
    tensors: list[Any] | None = None

    @property
    def spills(self) -> bool:
        """Whether some tensors have to do with the host's memory."""
        return any(part.host is not None for part in self.parts)

    def buffers(self) -> list[DeviceBuffer]:
        """The memory that tensors are made of."""
        found = [part.made or part.raw for part in self.parts]
        return [buffer for buffer in (*found, *self.own.values()) if buffer is not None]


class DeviceMemory:
    """What the spans of one load get, of one device.

    Args:
        plan: the load. `device`: where the tensors go. `host`: makes tensors of what finds no room there.
        destinations: {tensor name: memory that the caller gave for it}.
        apart: whether every tensor gets memory of its own in the end.
        lends: whether it has to be known when a tensor is gone.
        bounced: shards that a library reads by way of host memory; of these a large tensor stays on the device only where it
            leaves room there.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        host: HostTarget,
        destinations: Mapping[str, Destination],
        *,
        apart: bool,
        lends: bool,
        bounced: Collection[int],
    ) -> None:
        self._plan, self._device, self._host, self._destinations = plan, device, host, destinations
        self._apart, self._bounced = apart, bounced
        # A borrowed tensor with all of its memory would share the buffer's storage, and not seem gone while that is known here.
        self._more = 1 if lends else 0
        self._headroom = _Headroom(device)

    def has_room(self, nbytes: int) -> bool:
        """Whether the device keeps room beside an allocation."""
        return self._headroom.is_left(nbytes)

    def given(self, span: Span) -> SpanMemory:
        """The caller's own, for a span of tensors that are given."""
        tensors = self._plan.tensors
        parts = []
        for row in range(span.first, span.last):
            name, start = tensors.names[row], tensors.positions[row]
            if tensors.nbytes[row]:
                parts.append(Part(row, row + 1, start, start + tensors.nbytes[row], self._destinations[name].address))
        return SpanMemory(parts, [part.start for part in parts])

    def allocate(self, span: Span) -> SpanMemory:
        """One stretch for all tensors of a span. Raises `DeviceMemoryError`."""
        part = self._on_device(Part(span.first, span.last, 0, span.nbytes), span)
        moved = range(span.first, span.last) if self._apart and span.last - span.first > 1 else span.misaligned
        sizes = self._plan.tensors.nbytes
        own = {row: self._device.allocate(sizes[row] + self._more) for row in moved if sizes[row]}
        return SpanMemory([part], [0], own, span.nbytes + span.cast_nbytes + sum(sizes[row] for row in own))

    def _on_device(self, part: Part, span: Span, *, apart: bool = False) -> Part:
        nbytes = part.end - part.start
        self._check_headroom(span, nbytes)
        # Its pages are to be pages of the file, unless that misplaces a tensor that nothing moves afterwards.
        is_image = span.offset is not None and not (apart and part.first in span.misaligned)
        part.raw = self._device.allocate(nbytes + PAGE if is_image else nbytes + self._more)
        part.shift = (part.start - part.raw.address) % PAGE if is_image else 0
        part.address = part.raw.address + part.shift
        # Of what others take columns of, this rank may take nothing.
        if span.cast is not None and any(self._plan.tensors.nbytes[part.first : part.last]):
            made_nbytes = nbytes // DTYPES[span.cast[0]].itemsize * DTYPES[span.cast[1]].itemsize
            part.made = self._device.allocate(made_nbytes + self._more)
        return part

    def _check_headroom(self, span: Span, nbytes: int) -> None:
        """Raise `DeviceMemoryError` for a tensor that is not to be kept on the device although there may be room for it."""
        if span.shard not in self._bounced or nbytes <= self._plan.limits.span_nbytes:
            return
        free = self._device.free_nbytes()
        if not leaves_headroom(nbytes, free):
            message = f"{nbytes:,} bytes would leave too little of the {free:,} that are free"
            raise DeviceMemoryError(message, device=self._device.name, requested=nbytes, free=free)

    def allocate_apart(self, span: Span) -> SpanMemory:
        """Memory for each tensor by itself; on the host for those for which there is none on the device."""
        source = DTYPES[span.cast[0]].itemsize if span.cast is not None else 1
        target = DTYPES[span.cast[1]].itemsize if span.cast is not None else 1
        tensors, parts, nbytes = self._plan.tensors, [], 0
        for row in range(span.first, span.last):
            start, size = tensors.positions[row] // target * source, tensors.nbytes[row] // target * source
            if not size:
                continue
            part = Part(row, row + 1, start, start + size)
            try:
                parts.append(self._on_device(part, span, apart=True))
                nbytes += size + (tensors.nbytes[row] if span.cast is not None else 0)
            except DeviceMemoryError:
                parts.append(self._on_host(part, row, span))
        return SpanMemory(parts, [part.start for part in parts], {}, nbytes)

    def _on_host(self, part: Part, row: int, span: Span) -> Part:
        tensors = self._plan.tensors
        nbytes = part.end - part.start
        part.raw = part.made = part.address = None
        part.shift = 0
        if span.cast is None:
            part.tensor, part.host = self._host.allocate(tensors.dtypes[row], tensors.shapes[row], nbytes)
        else:
            _, part.host = self._host.allocate("U8", (nbytes,), nbytes)
        return part

    def convert(self, part: Part, span: Span) -> None:
        """Queue the conversion of a part whose bytes are there, if there is one."""
        if span.cast is None:
            return
        tensors, (source, target) = self._plan.tensors, span.cast
        if part.host is not None:
            part.tensor, made = self._host.allocate(target, tensors.shapes[part.first], tensors.nbytes[part.first])
            copy_out(part.host, made, 0, Copy(source, target))
        elif part.raw is not None and part.made is not None:
            counts = [nbytes // DTYPES[target].itemsize for nbytes in tensors.nbytes[part.first : part.last]]
            self._device.convert(part.raw, part.made, span.cast, counts)
            part.raw = None  # what is allocated in its place is written behind the conversion

    def move_apart(self, memory: SpanMemory) -> None:
        """Queue the moves to tensors with memory of their own."""
        tensors = self._plan.tensors
        for row, buffer in memory.own.items():
            whole = memory.parts[0].made or memory.parts[0].raw
            assert whole is not None
            source = whole.address + memory.parts[0].shift + tensors.positions[row]
            self._device.move_async(buffer.address, source, tensors.nbytes[row])

    def make(self, memory: SpanMemory, span: Span, begin: int, end: int) -> list[Any]:
        """The tensors of rows `begin` to `end`; None for those that are given."""
        if span.given:
            return [None] * (end - begin)
        if len(memory.parts) == 1 and not memory.own and memory.parts[0].last - memory.parts[0].first == span.last - span.first:
            part = memory.parts[0]
            if part.host is None:
                return self._wrap(part.made or part.raw, begin, end, part.shift)
        by_row = {part.first: part for part in memory.parts} if len(memory.parts) > 1 or not memory.own else {}
        return [self._make_one(memory, by_row.get(row), row) for row in range(begin, end)]

    def _make_one(self, memory: SpanMemory, part: Part | None, row: int) -> Any:
        if part is not None and part.host is not None:
            return part.tensor
        if row in memory.own:
            return self._wrap_alone(memory.own[row], row)
        if part is not None:
            return self._wrap_alone(part.made or part.raw, row, part.shift)
        if not memory.parts:
            return self._wrap(None, row, row + 1)[0]
        whole = memory.parts[0]
        return self._wrap(whole.made or whole.raw, row, row + 1, whole.shift)[0]

    def _wrap(self, buffer: DeviceBuffer | None, begin: int, end: int, shift: int = 0) -> list[Any]:
        tensors, rows = self._plan.tensors, slice(begin, end)
        positions = [shift + position for position in tensors.positions[rows]] if shift else tensors.positions[rows]
        return self._device.wrap(buffer, tensors.dtypes[rows], tensors.shapes[rows], positions, tensors.nbytes[rows])

    def _wrap_alone(self, buffer: DeviceBuffer | None, row: int, shift: int = 0) -> Any:
        tensors = self._plan.tensors
        return self._device.wrap(buffer, [tensors.dtypes[row]], [tensors.shapes[row]], [shift], [tensors.nbytes[row]])[0]


class _Headroom:
    """Whether enough device memory is free. The driver is asked only where the last answer may no longer hold."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free_nbytes = 0

    def is_left(self, nbytes: int) -> bool:
        """Whether max(256 MiB, a quarter of it) would be left after an allocation."""
        if not leaves_headroom(nbytes, self._free_nbytes - max(256 * MIB, nbytes // 4)):
            self._free_nbytes = self._device.free_nbytes()
        if not leaves_headroom(nbytes, self._free_nbytes):
            return False
        self._free_nbytes -= nbytes
        return True
