"""PURE: from headers and a selection to a plan.

A shard's wanted tensors are cut into runs of one kind (whole and small, whole and large, cast alike, sliced), runs into
spans that share memory, spans into reads. Nothing here reads, allocates or knows torch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import sub
from typing import NamedTuple, TypeVar

from headrace._dtypes import DTYPES
from headrace._header import Header
from headrace._plan import (
    ALIGNED_NBYTES,
    ALIGNMENT,
    DIRECT_NBYTES,
    MIB,
    PAGE,
    SLOT_SLACK_NBYTES,
    SMALL_NBYTES,
    STAGED_CHUNK_NBYTES,
    Copy,
    Limits,
    Plan,
    Read,
    Route,
    SourceAbilities,
    Span,
    Tensors,
)
from headrace._routes import cast_on_device, choose_route, pieces_from, read_unit
from headrace._slices import Cut, Index, cut_slice, misfit

_T = TypeVar("_T")

# Out of these torch makes other payloads of NaNs with vector code than with scalar code, which it takes for what is left at a
# tensor's end (F16 to F32 from 8 elements on and F64 to BF16 from 16, torch 2.13 on AVX2, 2026-11-30): neighbours in one run
# would change the bits of a tensor that leaves a rest.
_UNEVEN_NANS, _VECTOR_ELEMENTS = ("F16", "F64"), 64


def make_plan(
    headers: Sequence[Header],
    chosen: Sequence[Sequence[int] | None],
    abilities: Sequence[SourceAbilities],
    limits: Limits,
    *,
    casts: Sequence[Mapping[int, str]] | None = None,
    slices: Mapping[str, Index] | None = None,
    given: frozenset[str] | None = None,
    left_alone: Sequence[tuple[str, str]] = (),
    device: str = "cpu",
    joins: bool = True,
) -> Plan:
    """Plan the load of the chosen rows.

    Args:
        headers: one per shard.
        chosen: rows per shard, in file order; None for all of them.
        abilities: one per shard.
        limits: resolved limits.
        casts: per shard {row: dtype}; see `_selection.choose_casts`.
        slices: {tensor name: index}; tensors that are not chosen are ignored.
        given: names of tensors whose memory the caller provides; None for none of them.
        left_alone: passed on to the plan.
        device: where the tensors go; `limits.staging` says that it has memory of its own.
        joins: whether one request may fill the memory of several spans.

    Raises:
        OptionError: a slice that does not fit its tensor.
    """
    draft = _Draft(limits, slices or {}, given)
    for shard, (header, rows, ability) in enumerate(zip(headers, chosen, abilities, strict=True)):
        draft.add_shard(shard, header, rows, ability, casts[shard] if casts else {})
    if joins and limits.staging is None:
        draft.reads = join_reads(draft.reads, abilities, limits)
    routes = tuple(
        Route(header.url, *choose_route(ability, len(header.names if rows is None else rows), device))
        for header, rows, ability in zip(headers, chosen, abilities, strict=True)
    )
    read_nbytes = sum(read.nbytes for read in draft.reads)
    return Plan(
        draft.tensors,
        draft.spans,
        draft.reads,
        routes,
        limits,
        wanted_nbytes=draft.wanted_nbytes,
        read_nbytes=read_nbytes,
        mapped_nbytes=draft.mapped_nbytes,
        left_alone=tuple(left_alone),
        device=device,
    )


class _Run(NamedTuple):
    """What tensors must have in common to share a span."""

    kind: str  # 'straight', 'cast' or 'slice'
    source: str = ""
    target: str = ""
    given: bool = False
    size: str = ""  # 'small' or 'large', in memory
    serial: int = -1  # keeps tensors that share nothing apart


class _Draft:
    """The tables while they grow, a shard at a time."""

    def __init__(self, limits: Limits, slices: Mapping[str, Index], given: frozenset[str] | None) -> None:
        self.limits, self.slices, self.given = limits, slices, given
        self.tensors, self.spans, self.reads = Tensors(), list[Span](), list[Read]()
        self.wanted_nbytes = self.mapped_nbytes = 0

    def add_shard(
        self, shard: int, header: Header, rows: Sequence[int] | None, ability: SourceAbilities, casts: Mapping[int, str]
    ) -> None:
        planner = _ShardPlanner(self, shard, header, rows, ability, casts)
        plain = not casts and self.given is None and not (self.slices and any(name in self.slices for name in planner.names))
        for run, first, last in planner.size_runs() if plain else planner.keyed_runs():
            planner.add_run(run, first, last)


class _ShardPlanner:
    """One shard: its wanted tensors as columns, cut into runs, spans and reads."""

    def __init__(
        self,
        draft: _Draft,
        shard: int,
        header: Header,
        rows: Sequence[int] | None,
        ability: SourceAbilities,
        casts: Mapping[int, str],
    ) -> None:
        self.draft, self.shard, self.ability, self.casts = draft, shard, ability, casts
        self.aligned = header.aligned
        self.staging = draft.limits.staging
        self.contiguous = rows is None
        self.rows: Sequence[int] = range(len(header.names)) if rows is None else rows
        self.names = _chosen(header.names, rows)
        self.dtypes = _chosen(header.dtypes, rows)
        self.shapes = _chosen(header.shapes, rows)
        self.starts = _chosen(header.starts, rows)
        self.ends = _chosen(header.ends, rows)
        self.sizes = list(map(sub, self.ends, self.starts))

    # -- runs: neighbours of one kind ------------------------------------------------------------------------------------------

    def size_runs(self) -> Iterator[tuple[_Run, int, int]]:
        """Runs of small and of large tensors. The common case, and the only one that has to be quick per tensor.

        On a device small and large ones share memory: a checkpoint of quantized experts has a scale beside each weight, and a
        copy for each of them would cost more than what a caller holds on to who keeps only scales.
        """
        if self.staging is not None:
            if self.sizes:
                yield _Run("straight"), 0, len(self.sizes)
            return
        large = [i for i, nbytes in enumerate(self.sizes) if nbytes >= SMALL_NBYTES]
        at = 0
        for _, group in groupby(enumerate(large), key=lambda pair: pair[1] - pair[0]):
            members = [i for _, i in group]
            first, last = members[0], members[-1] + 1
            if first > at:
                yield _Run("straight"), at, first
            yield _Run("straight"), first, last
            at = last
        if at < len(self.sizes):
            yield _Run("straight"), at, len(self.sizes)

    def keyed_runs(self) -> Iterator[tuple[_Run, int, int]]:
        """Runs where casts, slices or given memory make neighbours differ."""
        for run, group in groupby(range(len(self.names)), key=self._key):
            members = list(group)
            yield run, members[0], members[-1] + 1

    def _key(self, i: int) -> _Run:
        name, given = self.names[i], self.draft.given
        own = given is not None and name in given
        target = self.casts.get(self.rows[i], self.dtypes[i])
        if name in self.draft.slices:
            return _Run("slice", self.dtypes[i], target, own, serial=i)
        if self.staging is not None and target == self.dtypes[i]:
            large = own and self.ability.direct_nbytes > 0 and self.sizes[i] >= DIRECT_NBYTES  # one request, one tensor
            return _Run("straight", given=own, serial=i if large else -1)
        widening = DTYPES[target].itemsize / DTYPES[self.dtypes[i]].itemsize
        size = "small" if self.sizes[i] * widening < SMALL_NBYTES and self.staging is None else "large"
        if target != self.dtypes[i]:
            on_device = self._is_cast_on_device(_Run("cast", self.dtypes[i], target))
            alone = own or (self.dtypes[i] in _UNEVEN_NANS and self._leaves_a_rest(i) and not on_device)
            return _Run("cast", self.dtypes[i], target, own, size, i if alone else -1)
        return _Run("straight", given=own, size=size, serial=i if own and size == "large" else -1)

    def _leaves_a_rest(self, i: int) -> bool:
        return bool(self.sizes[i] // DTYPES[self.dtypes[i]].itemsize % _VECTOR_ELEMENTS)

    def add_run(self, run: _Run, first: int, last: int) -> None:
        if run.kind == "slice":
            self._add_slice(run, first)
            return
        if self.ability.mapped and run.kind == "straight" and not run.given and self._is_aligned(first, last):
            self._add_mapped(first, last)
            return
        gap, most = self.ability.gap_nbytes, self.draft.limits.span_nbytes
        if run.kind == "cast":  # what is converted leaves no gap, and what widens needs its room in memory
            wide, narrow = DTYPES[run.source].itemsize, DTYPES[run.target].itemsize
            gap, most = 0, min(most, most * wide // narrow)
        aligned = self.aligned or run.kind == "cast" or self.staging is not None
        for begin, end in self._split(first, last, gap, most, aligned=aligned):
            if run.kind == "cast":
                self._add_cast(run, begin, end)
            elif run.given and (end - begin == 1 or self.staging is not None):
                self._add_image(begin, end, given=True)
            elif run.given:
                self._add_scatter(begin, end)
            else:
                self._add_image(begin, end, given=False)

    def _split(self, first: int, last: int, gap: int, most: int, *, aligned: bool) -> Iterator[tuple[int, int]]:
        """Stretches of a run that fit one span: near enough in the file, short enough, every address aligned."""
        for begin, end in self._neighbours(first, last, gap):
            while begin < end:
                stop = min(end, max(begin + 1, bisect_right(self.ends, self.starts[begin] + most, begin, end)))
                if not aligned:
                    stop = self._aligned_until(begin, stop)
                yield begin, stop
                begin = stop

    def _neighbours(self, first: int, last: int, gap: int) -> Iterator[tuple[int, int]]:
        begin = first
        if not self.contiguous:
            for i in range(first + 1, last):
                if not 0 <= self.starts[i] - self.ends[i - 1] <= gap:
                    yield begin, i
                    begin = i
        yield begin, last

    def _aligned_until(self, begin: int, end: int) -> int:
        """The end of the tensors that are aligned once the first one is."""
        origin = self.starts[begin]
        for i in range(begin + 1, end):
            if (self.starts[i] - origin) % DTYPES[self.dtypes[i]].itemsize:
                return i
        return end

    def _is_aligned(self, first: int, last: int) -> bool:
        """Whether every tensor lies at a multiple of its element's width, counted from the start of the file."""
        return self.aligned or not any(self.starts[i] % DTYPES[self.dtypes[i]].itemsize for i in range(first, last))

    # -- spans -----------------------------------------------------------------------------------------------------------------

    def _add_image(self, first: int, last: int, *, given: bool) -> None:
        """Straight: memory is an image of the file. Addresses and file offsets agree modulo a page unless that would misalign."""
        start, end = self.starts[first], max(self.starts[first], self.ends[last - 1])
        congruent = not given and self._is_congruent(first, last)
        lead = start % PAGE if congruent else 0
        positions = [at - start + lead for at in self.starts[first:last]]
        self._record(first, last, self.sizes[first:last], positions)
        self._close_span(
            first,
            last,
            self._image_reads(start, end, lead),
            nbytes=lead + end - start,
            offset=start if congruent else None,
            lead=lead,
            given=given,
            misaligned=self._misaligned(first, positions) if self.staging is not None and not given else (),
        )

    def _is_congruent(self, first: int, last: int) -> bool:
        """Whether memory is laid out so that addresses and file offsets agree modulo a page.

        On the host where tensors lie well then. On a device for libraries of direct storage, which take pages of the file to
        pages of its memory and all else by a detour; tensors that do not lie well are copied once more, at the device's own
        speed.
        """
        return self._is_aligned(first, last) if self.staging is None else self.ability.direct_nbytes > 0

    def _misaligned(self, first: int, positions: Sequence[int]) -> tuple[int, ...]:
        """Which tensors of a span, counted from its first, lie where they should not on a device.

        An element lies at a multiple of its width, and what is worth a vector load at a multiple of 16.
        """
        if not any(position % ALIGNMENT for position in positions):
            return ()
        found = []
        for i, position in enumerate(positions):
            row = first + i
            unit = ALIGNMENT if self.sizes[row] >= ALIGNED_NBYTES else DTYPES[self.dtypes[row]].itemsize
            if position % unit and self.sizes[row]:
                found.append(i)
        return tuple(found)

    def _add_mapped(self, first: int, last: int) -> None:
        """Views of the file where it lies. The span's memory is the whole mapping."""
        self._record(first, last, self.sizes[first:last], self.starts[first:last])
        self.draft.mapped_nbytes += sum(self.sizes[first:last])
        self._close_span(first, last, [], nbytes=0, offset=None, given=False, mapped=True)

    def _image_reads(
        self, start: int, end: int, position: int, copy: Copy | None = None, itemsizes: tuple[int, int] = (1, 1)
    ) -> Iterator[Read]:
        """Chunks of a contiguous range. Inner boundaries are page boundaries of the file, for direct reads into place; what is
        copied is cut at multiples of the chunk's length instead, where torch's vector code goes on without a remainder."""
        wide, narrow = itemsizes
        if self.ability.direct_nbytes and copy is None and end // PAGE * PAGE - -(-start // PAGE) * PAGE >= DIRECT_NBYTES:
            yield from self._direct_reads(start, end, position)
            return
        chunk, unit, tail = self._read_unit(end - start, copy, wide, narrow)
        at = start
        while at < end:
            stop = min(end, at + chunk) if end - at > chunk + tail else end
            if stop < end and unit:
                stop -= stop % unit
            yield Read(self.shard, at, stop - at, len(self.draft.spans), position + (at - start) // wide * narrow, copy=copy)
            at = stop

    def _direct_reads(self, start: int, end: int, position: int) -> Iterator[Read]:
        """Whole pages for the library, and what lies in front of and behind them for the ring."""
        chunk = max(PAGE, min(self.ability.direct_nbytes, STAGED_CHUNK_NBYTES) // PAGE * PAGE)
        first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
        cuts = [start, *range(first, last, chunk), last, end]
        for at, stop in pairwise(cuts):
            if stop > at:
                direct = at % PAGE == stop % PAGE == 0
                yield Read(self.shard, at, stop - at, len(self.draft.spans), position + at - start, direct=direct)

    def _read_unit(self, nbytes: int, copy: Copy | None, wide: int, narrow: int) -> tuple[int, int, int]:
        """(length of a read, what its inner boundaries are multiples of, bytes that the last one may be longer)"""
        if self.staging is None:
            chunk, unit = read_unit(self.ability, nbytes) if copy is None else (self.ability.chunk_nbytes, 0)
            return chunk, unit, 0
        chunk = self.staging.chunk_nbytes if self.ability.kind != "network" else self._thin_chunk()
        if copy is not None:  # what is converted fills the slot
            return max(PAGE, chunk * wide // narrow // PAGE * PAGE), 0, 0
        if 0 < (block := self.ability.block_nbytes) <= chunk:
            return chunk // block * block, block, 0
        return chunk, PAGE, SLOT_SLACK_NBYTES // 2

    def _thin_chunk(self, widening: int = 1) -> int:
        """The most that is read at once where a part of it is copied on, and becomes that many times longer."""
        if self.staging is None:
            return self.ability.chunk_nbytes
        return min(self.ability.chunk_nbytes, self.staging.chunk_nbytes) // widening

    def _is_cast_on_device(self, run: _Run) -> bool:
        if self.staging is None or run.source == run.target:
            return False
        return self.ability.in_place or cast_on_device(run.source, run.target, self.staging.cast_at)

    def _add_cast(self, run: _Run, first: int, last: int) -> None:
        """One copy converts a whole run: the elements follow each other in the file and in memory alike."""
        wide, narrow = DTYPES[run.source].itemsize, DTYPES[run.target].itemsize
        start, end = self.starts[first], self.ends[last - 1]
        sizes = [nbytes // wide * narrow for nbytes in self.sizes[first:last]]
        positions = [(at - start) // wide * narrow for at in self.starts[first:last]]
        self._record(first, last, sizes, positions, target=run.target)
        if self._is_cast_on_device(run):
            reads, cast = self._image_reads(start, end, 0), (run.source, run.target)
            self._close_span(first, last, reads, nbytes=end - start, offset=None, given=False, cast=cast)
            return
        reads = self._image_reads(start, end, 0, Copy(run.source, run.target), (wide, narrow))
        self._close_span(first, last, reads, nbytes=sum(sizes), offset=None, given=run.given)

    def _add_scatter(self, first: int, last: int) -> None:
        """Small tensors with memory of their own: one read into a slot, then a copy to each."""
        start, end = self.starts[first], self.ends[last - 1]
        self._record(first, last, self.sizes[first:last], [at - start for at in self.starts[first:last]])
        reads = [Read(self.shard, start, end - start, len(self.draft.spans), 0)] if end > start else []
        self._close_span(first, last, reads, nbytes=end - start, offset=None, given=True)

    def _add_slice(self, run: _Run, i: int) -> None:
        dtype, target = DTYPES[run.source], DTYPES[run.target]
        cast = (run.source, run.target) if self._is_cast_on_device(run) else None
        widening = max(1, target.itemsize // dtype.itemsize) if cast is None else 1
        index = self.draft.slices[self.names[i]]
        try:
            cuts, shape = cut_slice(
                self.shapes[i],
                index,
                bits=dtype.bits,
                slot_nbytes=self._thin_chunk(widening),
                pieces_from_nbytes=pieces_from(self.ability, self.shapes[i], index),
            )
        except (IndexError, TypeError, ValueError) as exc:
            raise misfit(self.names[i], self.shapes[i], index, exc) from exc
        wanted = math.prod(shape) * dtype.bits // 8
        if len(cuts) == 1 and cuts[0].pieces == 1 and cuts[0].shape is None and run.source == run.target:
            self._add_row_slice(i, cuts[0], shape, given=run.given)
            return
        nbytes = math.prod(shape) * target.bits // 8
        self._record(i, i + 1, [nbytes], [0], target=run.target, shape=shape, wanted=wanted)
        host = run if cast is None else run._replace(target=run.source)
        reads = [read for cut in cuts for read in self._cut_reads(cut, self.starts[i], host)]
        size = nbytes if cast is None else wanted
        self._close_span(i, i + 1, reads, nbytes=size, offset=None, given=run.given, cast=cast)

    def _add_row_slice(self, i: int, cut: Cut, shape: tuple[int, ...], *, given: bool) -> None:
        """A contiguous slice is a smaller tensor."""
        start = self.starts[i] + cut.offset
        congruent = not given and self.staging is None and start % DTYPES[self.dtypes[i]].itemsize == 0
        lead = start % PAGE if congruent else 0
        self._record(i, i + 1, [cut.nbytes], [lead], shape=shape, wanted=cut.nbytes)
        reads = self._image_reads(start, start + cut.nbytes, lead)
        self._close_span(i, i + 1, reads, nbytes=lead + cut.nbytes, offset=start if congruent else None, lead=lead, given=given)

    def _cut_reads(self, cut: Cut, start: int, run: _Run) -> Iterator[Read]:
        span, wide, narrow = len(self.draft.spans), DTYPES[run.source].itemsize, DTYPES[run.target].itemsize
        offset, position = start + cut.offset, cut.position // wide * narrow
        if cut.shape is not None:
            copy = Copy(run.source, run.target, cut.shape, cut.strides, cut.flip)
            yield Read(self.shard, offset, cut.nbytes, span, position, copy=copy)
            return
        convert = Copy(run.source, run.target) if run.source != run.target else None
        piece, chunk = cut.nbytes // cut.pieces, self._thin_chunk(max(1, narrow // wide))
        itemsizes = (wide, narrow) if convert is not None else (1, 1)  # what is not converted may be cut within an element
        if cut.pieces == 1 or piece > chunk:
            for k in range(cut.pieces):
                begin, at = offset + k * cut.stride, position + k * piece // wide * narrow
                yield from self._image_reads(begin, begin + piece, at, convert, itemsizes)
            return
        group = chunk // piece
        for k in range(0, cut.pieces, group):
            count = min(group, cut.pieces - k)
            at = position + k * piece // wide * narrow
            yield Read(self.shard, offset + k * cut.stride, count * piece, span, at, count, cut.stride, convert)

    # -- tables ----------------------------------------------------------------------------------------------------------------

    def _record(
        self,
        first: int,
        last: int,
        sizes: list[int],
        positions: list[int],
        *,
        target: str | None = None,
        shape: tuple[int, ...] | None = None,
        wanted: int | None = None,
    ) -> None:
        tensors = self.draft.tensors
        tensors.names.extend(self.names[first:last])
        tensors.sources.extend(self.dtypes[first:last])
        tensors.dtypes.extend(self.dtypes[first:last] if target is None else [target] * (last - first))
        tensors.shapes.extend(self.shapes[first:last] if shape is None else [shape])
        tensors.positions.extend(positions)
        tensors.nbytes.extend(sizes)
        tensors.rows.extend(self.rows[first:last])
        self.draft.wanted_nbytes += sum(self.sizes[first:last]) if wanted is None else wanted

    def _close_span(
        self,
        first: int,
        last: int,
        reads: Iterator[Read] | list[Read],
        *,
        nbytes: int,
        offset: int | None,
        lead: int = 0,
        given: bool,
        mapped: bool = False,
        cast: tuple[str, str] | None = None,
        misaligned: tuple[int, ...] = (),
    ) -> None:
        draft = self.draft
        first_read, count = len(draft.reads), len(draft.tensors)
        draft.reads += reads
        begin = count - (last - first)
        rows = tuple(begin + i for i in misaligned)
        draft.spans.append(
            Span(self.shard, begin, count, first_read, len(draft.reads), nbytes, offset, lead, given, mapped, cast, rows)
        )


def join_reads(reads: list[Read], abilities: Sequence[SourceAbilities], limits: Limits) -> list[Read]:
    """Which reads come with the request of the one before them: neighbours in a file behind a network that fit one request.

    Small tensors live apart from large ones, so that a file in which they alternate is many spans, and over a network each would
    cost a round trip. A request is not longer than lets every reader have one, of the bytes and of the memory that there is: few
    long ones leave connections idle.
    """
    nbytes = sum(read.nbytes for read in reads if abilities[read.shard].kind == "network")
    share = max(MIB, min(nbytes, limits.memory_limit) // limits.concurrency)
    joined, length = list(reads), 0
    for i, read in enumerate(reads):
        before, ability = reads[i - 1], abilities[read.shard]
        most = min(share, ability.chunk_nbytes * 9 // 8)
        if (
            i
            and _follows(read, before)
            and ability.kind == "network"
            and not ability.block_nbytes
            and length + read.nbytes <= most
        ):
            joined[i] = read._replace(joined=True)
            length += read.nbytes
        else:
            length = read.nbytes
    return joined


def _follows(read: Read, before: Read) -> bool:
    """Whether two reads are one range of one file."""
    return read.shard == before.shard and read.offset == before.offset + before.nbytes and read.pieces == before.pieces == 1


def _chosen(column: list[_T], rows: Sequence[int] | None) -> list[_T]:
    return column if rows is None else [column[row] for row in rows]
