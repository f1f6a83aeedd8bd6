"""PURE: tensors of which the ranks of a group take columns, or parts that overlap: blocks of whole rows that one rank reads.

Each rank reading its own columns would read nearly everything, since short pieces cost more than what lies between them. So such
a tensor is divided into blocks of about a chunk, contiguous in the file and the same for all ranks; whoever owns one reads it,
and every rank takes its part out of it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product
from typing import NamedTuple, TypeAlias

from headrace._dtypes import DTYPES
from headrace._header import TensorInfo
from headrace._plan import Plan, Read
from headrace._slices import Index, Parts

_Stretches: TypeAlias = list[tuple[int, int]]


class Cutout(NamedTuple):
    """A part of a block, and where it goes; everything is counted in elements.

    Attributes:
        shape: of the part.
        source, source_strides: where it lies in the block.
        target, target_strides: where it goes in the tensor's memory.
    """

    shape: tuple[int, ...]
    source: int
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]


class Packing(NamedTuple):
    """A rank's part of a block, without what lies between: one stretch of its slice. Counted in elements.

    Attributes:
        cutouts: what is taken out of the block, and where it stands in the stretch.
        first: where the stretch begins in the slice. `elements`: how many they are.
        dtype: that they are sent in.
    """

    cutouts: list[Cutout]
    first: int
    elements: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return self.elements * DTYPES[self.dtype].itemsize

    @property
    def position(self) -> int:
        """The first byte of the slice that they are, where the slice has the dtype that they are sent in."""
        return self.first * DTYPES[self.dtype].itemsize

    def unpack(self) -> Cutout:
        """The stretch, to its place in the tensor's memory."""
        return Cutout((self.elements,), 0, (1,), self.first, (1,))


class _Block(NamedTuple):
    """Indices `begin` to `end` of a dimension, at fixed indices of those before it and with all of those behind it."""

    at: tuple[int, ...]
    begin: int
    end: int
    offset: int  # of its first element
    elements: int


class Blocks(NamedTuple):
    """How a plan's blocks are taken apart.

    Attributes:
        names: of the tensors that are read so.
        cutouts: by (span, position) of a read.
        rows: of each such span, the tensor in it. `sources`: its dtype in the file.
        blocks: by (span, position). `shapes`: of each such span, the tensor's shape in the file.
        stretches: of each such span, what each rank takes. `sent_as`: the dtype in which that is sent to each.
    """

    names: frozenset[str]
    cutouts: Mapping[tuple[int, int], list[Cutout]]
    rows: Mapping[int, int]
    sources: Mapping[int, str]
    blocks: Mapping[tuple[int, int], _Block]
    shapes: Mapping[int, Sequence[int]]
    stretches: Mapping[int, Sequence[Sequence[_Stretches]]]
    sent_as: Mapping[int, Sequence[str]]

    def packings(self, read: Read) -> list[Packing]:
        """Of each rank, its part of the block that a read is."""
        return [self.packing(read, rank) for rank in range(len(self.stretches[read.span]))]

    def packing(self, read: Read, rank: int) -> Packing:
        """A rank's part of the block that a read is."""
        span, block = read.span, self.blocks[read.span, read.position]
        return packed(cutouts_of(block, self.shapes[span], self.stretches[span][rank]), self.sent_as[span][rank])

    def taken_nbytes(self, read: Read, ranks: Iterable[int]) -> int:
        """Bytes that ranks take out of the block that a read is, in the dtype of the file."""
        return sum(self.packing(read, rank).elements for rank in ranks) * DTYPES[self.sources[read.span]].itemsize


NO_BLOCKS = Blocks(frozenset(), {}, {}, {}, {}, {}, {}, {})


def choose_blocked(infos: Mapping[str, TensorInfo], slices: Sequence[Mapping[str, Index]]) -> frozenset[str]:
    """Which tensors are read in blocks: those of which the ranks together would read more than there is.

    Args:
        infos: of the tensors that any rank takes a slice of.
        slices: of each rank; a tensor that it lacks the rank takes whole.
    """
    known: dict[str, bool] = {}

    def is_blocked(info: TensorInfo) -> bool:
        indices = [each.get(info.name, ...) for each in slices]
        key = repr((info.shape, info.dtype, indices))
        if key not in known:
            known[key] = _reads_more(info, indices)
        return known[key]

    return frozenset(name for name, info in infos.items() if is_blocked(info))


def _reads_more(info: TensorInfo, indices: Sequence[Index]) -> bool:
    if DTYPES[info.dtype].bits < 8 or not info.shape or not info.nbytes:
        return False
    covered = 0
    for index in indices:
        stretches = stretches_of(info.shape, index)
        if stretches is None:
            return False
        covered += _covered(info.shape, stretches)
    return covered > math.prod(info.shape)


def _covered(shape: Sequence[int], stretches: Sequence[_Stretches]) -> int:
    """Elements from the first to the last that are wanted."""
    if not all(stretches):
        return 0
    pitches = _pitches(shape)
    first = sum(of_dim[0][0] * pitch for of_dim, pitch in zip(stretches, pitches, strict=True))
    return 1 + sum((of_dim[-1][1] - 1) * pitch for of_dim, pitch in zip(stretches, pitches, strict=True)) - first


def stretches_of(shape: Sequence[int], index: Index) -> list[_Stretches] | None:
    """Which stretches of each dimension an index takes; None where it is of another kind: with integers or steps."""
    given = list(index) if isinstance(index, (tuple, list)) else [index]
    if not any(item is Ellipsis for item in given):
        given.append(Ellipsis)
    at = next(i for i, item in enumerate(given) if item is Ellipsis)
    given[at : at + 1] = [slice(None)] * (len(shape) - len(given) + 1)
    found: list[_Stretches] = []
    for size, item in zip(shape, given, strict=False):
        if isinstance(item, Parts):
            found.append(list(item.stretches))
        elif isinstance(item, slice) and item.step in (None, 1) and _is_of_numbers(item):
            start, stop, _ = item.indices(size)
            found.append([(start, stop)] if start < stop else [])
        else:
            return None
    return found if len(found) == len(shape) == len(given) else None


def _is_of_numbers(index: slice) -> bool:
    return all(bound is None or hasattr(bound, "__index__") for bound in (index.start, index.stop))


def in_blocks(
    plan: Plan,
    infos: Mapping[str, TensorInfo],
    slices: Mapping[str, Index],
    chunk_nbytes: Sequence[int],
    ranks: Sequence[Mapping[str, Index]],
    sent_as: Sequence[Mapping[str, str]],
) -> tuple[Plan, Blocks]:
    """A plan that reads some tensors in blocks, the same ones on every rank whatever its slices are.

    Args:
        plan: in which each of these tensors has a span of its own.
        infos: which tensors.
        slices: of this rank.
        chunk_nbytes: by shard, about how much is read at once.
        ranks: the slices of every rank; a tensor that they lack the rank takes whole.
        sent_as: of every rank, the dtypes in which it is sent its parts; see `dtypes_to_send`.
    """
    if not infos:
        return plan, NO_BLOCKS
    reads: list[Read] = []
    spans = []
    cutouts: dict[tuple[int, int], list[Cutout]] = {}
    rows: dict[int, int] = {}
    blocks: dict[tuple[int, int], _Block] = {}
    shapes: dict[int, Sequence[int]] = {}
    of_ranks: dict[int, Sequence[Sequence[_Stretches]]] = {}
    sources: dict[int, str] = {}
    sent: dict[int, Sequence[str]] = {}
    for number, span in enumerate(plan.spans):
        name, first_read = plan.tensors.names[span.first], len(reads)
        if name not in infos:
            reads += plan.reads[span.first_read : span.last_read]
            spans.append(replace(span, first_read=first_read, last_read=len(reads)))
            continue
        info, itemsize = infos[name], DTYPES[infos[name].dtype].itemsize
        stretches = _chosen_stretches(info.shape, slices[name])
        for block in _divided(info.shape, chunk_nbytes[span.shard] // itemsize):
            position = block.offset * itemsize
            reads.append(Read(span.shard, info.offset + position, block.elements * itemsize, number, position))
            cutouts[number, position] = cutouts_of(block, info.shape, stretches)
            blocks[number, position] = block
        rows[number], shapes[number], sources[number] = span.first, info.shape, info.dtype
        sent[number] = [each[name] for each in sent_as]
        of_ranks[number] = [_chosen_stretches(info.shape, each.get(name, ...)) for each in ranks]
        # A rank that gets nothing of it takes part as well.
        spans.append(replace(span, first_read=first_read, last_read=len(reads), nbytes=max(1, span.nbytes), offset=None))
    read_nbytes = sum(read.nbytes for read in reads)
    found = Blocks(frozenset(infos), cutouts, rows, sources, blocks, shapes, of_ranks, sent)
    return replace(plan, spans=spans, reads=reads, read_nbytes=read_nbytes), found


def dtypes_to_send(plan: Plan, names: Container[str]) -> dict[str, str]:
    """In which dtype this rank is to be sent its parts of tensors that are read in blocks.

    Bytes that come from device to device have to have the dtype of the memory that they go to. To host memory whatever is
    narrower is sent, and what is to be wider is converted where it arrives.
    """
    tensors, found = plan.tensors, dict[str, str]()
    for span in plan.spans:
        if (name := tensors.names[span.first]) not in names:
            continue
        source, target = tensors.sources[span.first], tensors.dtypes[span.first]
        if plan.limits.staging is not None:
            found[name] = target if span.cast is None else source
        else:
            found[name] = target if DTYPES[target].itemsize < DTYPES[source].itemsize else source
    return found


def _chosen_stretches(shape: Sequence[int], index: Index) -> list[_Stretches]:
    stretches = stretches_of(shape, index)
    assert stretches is not None, "chosen by the same function"
    return stretches


def blocks_of(shape: Sequence[int], stretches: Sequence[_Stretches], most: int) -> Iterator[tuple[int, int, list[Cutout]]]:
    """(first element, how many, what is taken out) of each block of a tensor, in order.

    Args:
        shape: of the tensor, of one dimension at least.
        stretches: what is wanted of each dimension.
        most: elements in a block.
    """
    for block in _divided(shape, most):
        yield block.offset, block.elements, cutouts_of(block, shape, stretches)


def _divided(shape: Sequence[int], most: int) -> Iterator[_Block]:
    pitches = _pitches(shape)
    dim = next((d for d, pitch in enumerate(pitches) if pitch <= most), len(shape) - 1)
    pitch, step = pitches[dim], max(1, most // pitches[dim])
    for at in product(*map(range, shape[:dim])):
        base = sum(i * p for i, p in zip(at, pitches, strict=False))
        for begin in range(0, shape[dim], step):
            end = min(begin + step, shape[dim])
            yield _Block(at, begin, end, base + begin * pitch, (end - begin) * pitch)


def cutouts_of(block: _Block, shape: Sequence[int], stretches: Sequence[_Stretches]) -> list[Cutout]:
    """What is taken out of one block; together it is one stretch of the result."""
    result = [sum(stop - start for start, stop in of_dim) for of_dim in stretches]
    return list(_cutouts(block, _pitches(shape), stretches, _pitches(result)))


def packed(cutouts: Sequence[Cutout], dtype: str) -> Packing:
    """The elements of a block's cutouts, as they lie in the slice."""
    found = [cutout for cutout in cutouts if all(cutout.shape)]
    first = min((cutout.target for cutout in found), default=0)
    moved = [cutout._replace(target=cutout.target - first) for cutout in found]
    return Packing(moved, first, sum(math.prod(cutout.shape) for cutout in moved), dtype)


def _cutouts(
    block: _Block, pitches: Sequence[int], stretches: Sequence[_Stretches], result_pitches: Sequence[int]
) -> Iterator[Cutout]:
    dim = len(block.at)
    target = 0
    for i, of_dim, pitch in zip(block.at, stretches, result_pitches, strict=False):
        place = next((begin + i - start for start, stop, begin in _placed(of_dim) if start <= i < stop), None)
        if place is None:
            return
        target += place * pitch
    within = [
        (max(start, block.begin), min(stop, block.end), begin + max(start, block.begin) - start)
        for start, stop, begin in _placed(stretches[dim])
        if start < block.end and stop > block.begin
    ]
    for pieces in product(within, *(list(_placed(of_dim)) for of_dim in stretches[dim + 1 :])):
        origin = (block.begin, *[0] * (len(pieces) - 1))
        yield Cutout(
            tuple(stop - start for start, stop, _ in pieces),
            sum((start - o) * p for (start, _, _), o, p in zip(pieces, origin, pitches[dim:], strict=True)),
            tuple(pitches[dim:]),
            target + sum(begin * p for (_, _, begin), p in zip(pieces, result_pitches[dim:], strict=True)),
            tuple(result_pitches[dim:]),
        )


def _placed(stretches: _Stretches) -> Iterator[tuple[int, int, int]]:
    """(start, stop, where it begins in the result) of each stretch."""
    begins = accumulate((stop - start for start, stop in stretches), initial=0)
    return ((start, stop, begin) for (start, stop), begin in zip(stretches, begins, strict=False))


def _pitches(shape: Sequence[int]) -> list[int]:
    """Elements from one index of a dimension to the next."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
