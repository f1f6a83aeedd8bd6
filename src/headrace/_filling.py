"""One read: bytes from a source to where they stay.

In place where that is possible. By way of a slot, a small buffer of the reader's own that stays in cache, where bytes are
converted or thinned out, where small tensors have memory of their own, and where a direct read does not fit the
destination's address. For a device with memory of its own, everything goes into the slots of a ring (`SlotFiller`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

from headrace._addresses import move
from headrace._cast import copy_out
from headrace._dtypes import DTYPES
from headrace._plan import CHUNK_NBYTES, Plan, Read, Span
from headrace._staging import PAGE, Lease, Region
from headrace.sources.base import AlignedSource, ByteSource, aligned_source, read_into_each


class SpanMemory(NamedTuple):
    """Where a span's bytes land.

    Attributes:
        lease: the pool's memory; None where it is the caller's.
        views: the one stretch of the span, or one per tensor where small tensors have memory of their own.
    """

    lease: Lease | None
    views: list[memoryview]


class Hops(NamedTuple):
    """Which way the bytes of a read came: how many past the page cache, how many over a slot, how many from another rank."""

    direct_nbytes: int = 0
    copied_nbytes: int = 0
    received_nbytes: int = 0


IN_PLACE = Hops()


class Filler:
    """Carries out reads, one at a time; every reader has its own."""

    def __init__(self, plan: Plan, sources: Sequence[ByteSource]) -> None:
        self._plan, self._sources = plan, sources
        self._slot: Region | None = None

    def close(self) -> None:
        """Let go of the slot."""
        self._slot = None

    def fill(self, read: Read, memory: SpanMemory) -> Hops:
        """Read and, where need be, copy. Raises what the source raises; the memory may then be half filled."""
        source, span = self._sources[read.shard], self._plan.spans[read.span]
        if memory.lease is not None and memory.lease.fresh:
            memory.lease.populate(read.position, read.position + landing_nbytes(read))
        if read.pieces > 1:
            return self._fill_pieces(read, source, memory.views[0])
        if read.copy is not None or len(memory.views) > 1:
            data, direct = self._read_to_slot(read, source, self._room)
            self._out_of_slot(read, span, data, memory)
            return Hops(direct, read.nbytes)
        return self._fill_in_place(read, span, source, memory.views[0])

    def fill_together(self, reads: Sequence[Read], memories: Sequence[SpanMemory]) -> list[Hops]:
        """Carry out reads that go on in one file where the one before ends, by one request. Raises as `fill`."""
        for read, memory in zip(reads, memories, strict=True):
            if memory.lease is not None and memory.lease.fresh:
                memory.lease.populate(read.position, read.position + landing_nbytes(read))
        slotted = [read.copy is not None or len(memory.views) > 1 for read, memory in zip(reads, memories, strict=True)]
        slot = self._room(sum(compress((read.nbytes for read in reads), slotted))) if any(slotted) else memoryview(b"")
        views = []
        for read, memory, by_slot in zip(reads, memories, slotted, strict=True):
            if by_slot:
                views.append(slot[: read.nbytes])
                slot = slot[read.nbytes :]
            else:
                views.append(memory.views[0][read.position : read.position + read.nbytes])
        read_into_each(self._sources[reads[0].shard], reads[0].offset, views)
        for read, memory, view in compress(zip(reads, memories, views, strict=True), slotted):
            self._out_of_slot(read, self._plan.spans[read.span], view, memory)
        return [Hops(0, read.nbytes) if by_slot else IN_PLACE for read, by_slot in zip(reads, slotted, strict=True)]

    def _fill_in_place(self, read: Read, span: Span, source: ByteSource, view: memoryview) -> Hops:
        aligned = aligned_source(source)
        if aligned is None or not aligned.prefers_direct(read.offset, read.nbytes):
            source.read_into(read.offset, view[read.position : read.position + read.nbytes])
            return IN_PLACE
        if span.offset is None or aligned.block_nbytes > PAGE:
            data, direct = self._read_to_slot(read, source, self._room)
            move(view[read.position : read.position + read.nbytes], data)
            return Hops(direct, read.nbytes)
        # The memory is congruent with the file: whole blocks are read, and their surplus falls into the span's lead and tail.
        lead, nbytes = _whole_blocks(read, aligned)
        aligned.read_direct_into(read.offset - lead, view[read.position - lead : read.position - lead + nbytes])
        return Hops(read.nbytes)

    def _read_to_slot(self, read: Read, source: ByteSource, room: Callable[[int], memoryview | None]) -> tuple[memoryview, int]:
        """(the bytes, how many of them came past the page cache). `room` gives memory, or None for more than there is."""
        fits = read.copy is None or read.offset % DTYPES[read.copy.source].itemsize == 0  # else elements would be misaligned
        aligned = aligned_source(source) if fits else None
        if aligned is not None and aligned.prefers_direct(read.offset, read.nbytes):
            lead, nbytes = _whole_blocks(read, aligned)
            if (blocks := room(nbytes)) is not None:
                aligned.read_direct_into(read.offset - lead, blocks)
                return blocks[lead : lead + read.nbytes], read.nbytes
        view = room(read.nbytes)
        assert view is not None, "no read is longer than a slot"
        source.read_into(read.offset, view)
        return view, 0

    def _fill_pieces(self, read: Read, source: ByteSource, memory: memoryview) -> Hops:
        piece = read.nbytes // read.pieces
        in_place = read.copy is None
        view = memory[read.position : read.position + read.nbytes] if in_place else self._room(read.nbytes)
        for k in range(read.pieces):
            source.read_into(read.offset + k * read.stride, view[k * piece : (k + 1) * piece])
        if read.copy is not None:
            copy_out(view, memory, read.position, read.copy)
        return Hops(0, 0 if in_place else read.nbytes)

    def _out_of_slot(self, read: Read, span: Span, data: memoryview, memory: SpanMemory) -> None:
        if read.copy is not None:
            copy_out(data, memory.views[0], read.position, read.copy)
            return
        for view, at in zip(memory.views, self._plan.tensors.positions[span.first : span.last], strict=True):
            view[:] = data[at : at + view.nbytes]

    def _room(self, nbytes: int) -> memoryview:
        """The slot, made when it is first needed."""
        if self._slot is None or self._slot.nbytes < nbytes:
            self._slot = Region(nbytes)
            self._slot.populate(0, nbytes)
        return self._slot.view[:nbytes]


class SlotFiller(Filler):
    """Carries out reads into slots of a ring, in the form in which their bytes go on to a device."""

    def fill_slot(self, read: Read, slot: memoryview) -> tuple[memoryview, Hops]:
        """Read and, where need be, convert or thin out: (the part of the slot that holds the result, which way it came).

        A slot is much longer than what stays in cache. So what is converted is read and converted a piece at a time.
        """
        source = self._sources[read.shard]
        if read.pieces > 1:
            hops = self._fill_pieces(read._replace(position=0), source, slot)
            return slot[: landing_nbytes(read)], hops
        if read.copy is None:
            data, direct = self._read_to_slot(read, source, lambda nbytes: slot[:nbytes] if nbytes <= slot.nbytes else None)
            return data, Hops(direct) if direct else IN_PLACE
        direct, at = 0, 0
        for part in _parts(read):
            data, past_cache = self._read_to_slot(part, source, self._room)
            copy_out(data, slot, at, read.copy)
            direct += past_cache
            at += landing_nbytes(part)
        return slot[:at], Hops(direct, read.nbytes)


def _parts(read: Read) -> Iterator[Read]:
    """A read that is converted element by element in pieces of a chunk; others as they are."""
    if read.copy is None or read.copy.shape is not None:
        yield read
        return
    for at in range(0, read.nbytes, CHUNK_NBYTES):
        yield read._replace(offset=read.offset + at, nbytes=min(CHUNK_NBYTES, read.nbytes - at))


def _whole_blocks(read: Read, source: AlignedSource) -> tuple[int, int]:
    """(bytes in front of the read, bytes in all) that make it begin and end at a block."""
    block = source.block_nbytes
    lead = read.offset % block
    return lead, -(-(lead + read.nbytes) // block) * block


def landing_nbytes(read: Read) -> int:
    """Bytes of memory that a read fills."""
    if read.copy is None:
        return read.nbytes
    source, target = DTYPES[read.copy.source].itemsize, DTYPES[read.copy.target].itemsize
    return (math.prod(read.copy.shape) if read.copy.shape is not None else read.nbytes // source) * target
