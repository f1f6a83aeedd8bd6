"""PURE: a slice of a tensor, with numpy's meaning, as byte ranges of the file and how they land in memory.

A slice becomes a list of `Cut`s. A cut is one contiguous range; or equal pieces at a constant distance, read one by one
(long pieces); or a range that covers several pieces and is thinned out on the way to memory (short pieces: a read costs
more than the bytes between). The result is always C-contiguous. Offsets are relative to the tensor's first byte, nothing
here knows files or devices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from types import EllipsisType
from typing import TypeAlias

from headrace.errors import OptionError


class Parts:
    """Several stretches of one dimension, one after another in the result: a rank's share of a fused projection, say.

    What numpy would write as concatenate([tensor[a:b], tensor[c:d]]). An index has room for one of them.

    Args:
        stretches: (start, stop) pairs from the front of the dimension on, ascending and apart from each other.

    Raises:
        ValueError: they are not.

    Example:
        >>> Parts([(0, 2), (2, 4), (8, 10)])
        Parts([(0, 4), (8, 10)])
    """

    __slots__ = ("stretches",)
    stretches: tuple[tuple[int, int], ...]

    def __init__(self, stretches: Iterable[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for start, stop in stretches:
            if not (merged[-1][1] if merged else 0) <= start <= stop:
                raise ValueError(f"stretches ascend and do not overlap, unlike ({start}, {stop}) after {merged[-1:]}")
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            elif start < stop:
                merged.append((start, stop))
        self.stretches = tuple(merged)

    def __repr__(self) -> str:
        return f"Parts({list(self.stretches)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parts) and self.stretches == other.stretches

    def __hash__(self) -> int:
        return hash(self.stretches)

    @property
    def count(self) -> int:
        """Elements in all."""
        return sum(stop - start for start, stop in self.stretches)

    @property
    def is_regular(self) -> bool:
        """Whether they are equally long, and their starts equally far apart."""
        lengths = {stop - start for start, stop in self.stretches}
        return len(lengths) <= 1 and len({after[0] - before[0] for before, after in pairwise(self.stretches)}) <= 1


Index: TypeAlias = "int | slice | Parts | EllipsisType | Sequence[int | slice | Parts | EllipsisType]"
_Selector: TypeAlias = "int | slice | Parts"


def index_text(index: object) -> str:
    """An index as numpy's users write it: [0:128, :]. What is none is shown as it is."""
    items = index if isinstance(index, (tuple, list)) else (index,)
    return f"[{', '.join(map(_item_text, items))}]"


def _item_text(item: object) -> str:
    if isinstance(item, slice):
        bounds = [item.start, item.stop, *([] if item.step is None else [item.step])]
        return ":".join("" if bound is None else repr(bound) for bound in bounds)
    return "..." if item is Ellipsis else repr(item)


@dataclass(frozen=True, slots=True)
class Cut:
    """Bytes to read for a slice, and where they go.

    Attributes:
        offset: first byte to read, from the tensor's first byte.
        nbytes: bytes to read in all.
        position: first byte of the result that they fill.
        pieces: how many equal pieces are read; `stride` bytes lie between their starts in the file, none in the result.
        stride: see `pieces`; 0 where there is one piece.
        shape, strides: where not all of the bytes are wanted, the block to copy out of them, strides counted in elements.
        flip: dimensions of `shape` that run backwards in the result.
    """

    offset: int
    nbytes: int
    position: int
    pieces: int = 1
    stride: int = 0
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    flip: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Axis:
    """One dimension: `count` elements from `start` on, every `step`-th, in file order; `backwards` in the result."""

    start: int
    step: int
    count: int
    backwards: bool
    pitch: int  # elements from one index to the next in the file

    @property
    def jump(self) -> int:
        return self.step * self.pitch


def cut_slice(
    shape: Sequence[int], index: Index, *, bits: int, slot_nbytes: int, pieces_from_nbytes: float
) -> tuple[list[Cut], tuple[int, ...]]:
    """The cuts for `tensor[index]`, and the shape of the result.

    Args:
        shape: the tensor's shape.
        index: integers, slices with any step but 0, at most one `Parts` and at most one Ellipsis.
        bits: width of an element. Sub-byte elements can only be cut where whole bytes end.
        slot_nbytes: the longest range that may be thinned out at once.
        pieces_from_nbytes: pieces of this length or longer are read one by one.

    Raises:
        IndexError: too many indices, or an integer out of range.
        TypeError, ValueError: an index that is no basic slice, a step of 0, or a cut inside a byte.
    """
    selectors = _expand(index, len(shape))
    if bits < 8:
        return _cut_packed(shape, selectors, bits=bits, slot_nbytes=slot_nbytes, pieces_from_nbytes=pieces_from_nbytes)
    axes, result = _axes(shape, selectors)
    itemsize = bits // 8
    for dim, selector in enumerate(selectors):
        if isinstance(selector, Parts) and not selector.is_regular:
            rows = _part_by_part(shape, selectors, dim)
            cuts = _one_after_another(shape, rows, bits=bits, slot_nbytes=slot_nbytes, pieces_from_nbytes=pieces_from_nbytes)
            return list(cuts), result
    return list(_cut(axes, 0, 0, itemsize, max(1, slot_nbytes // itemsize), pieces_from_nbytes / itemsize)), result


def slice_shape(shape: Sequence[int], index: Index) -> tuple[int, ...]:
    """The shape of `tensor[index]`. Raises as `cut_slice`."""
    return _axes(shape, _expand(index, len(shape)))[1]


def misfit(name: str, shape: Sequence[int], index: object, error: Exception) -> OptionError:
    """For an index that `cut_slice` refused."""
    shown = f"{name!r} of shape {list(shape)}"
    return OptionError(f"slice {index_text(index)} does not fit tensor {shown}: {error}", option="slices")


def _part_by_part(shape: Sequence[int], selectors: list[_Selector], dim: int) -> Iterator[list[_Selector]]:
    """The index with irregular parts at `dim` as indices without, in the order in which their results follow each other."""
    parts = selectors[dim]
    assert isinstance(parts, Parts)
    outer = [
        range(s, s + 1) if isinstance(s, int) else range(*s.indices(n))
        for s, n in zip(_plain(selectors[:dim]), shape, strict=False)
    ]
    for at in product(*outer):
        for start, stop in parts.stretches:
            yield [*at, slice(start, stop), *selectors[dim + 1 :]]


def _one_after_another(
    shape: Sequence[int], rows: Iterable[list[_Selector]], *, bits: int, slot_nbytes: int, pieces_from_nbytes: float
) -> Iterator[Cut]:
    position = 0
    for row in rows:
        cuts, result = cut_slice(shape, row, bits=bits, slot_nbytes=slot_nbytes, pieces_from_nbytes=pieces_from_nbytes)
        for cut in cuts:
            yield replace(cut, position=position + cut.position)
        position += math.prod(result) * bits // 8


def _plain(selectors: list[_Selector]) -> list[int | slice]:
    return [selector for selector in selectors if not isinstance(selector, Parts)]


def _cut_packed(
    shape: Sequence[int], selectors: list[_Selector], *, bits: int, slot_nbytes: int, pieces_from_nbytes: float
) -> tuple[list[Cut], tuple[int, ...]]:
    """Elements narrower than a byte: keep the last dimension whole and slice rows of bytes."""
    if all(selector in (slice(None), slice(0, size), slice(0, size, 1)) for size, selector in zip(shape, selectors, strict=True)):
        return [Cut(0, math.prod(shape) * bits // 8, 0)] if math.prod(shape) else [], tuple(shape)
    if not shape or shape[-1] * bits % 8 or selectors[-1] not in (slice(None), slice(0, shape[-1]), slice(0, shape[-1], 1)):
        raise ValueError(f"elements of {bits} bits can only be cut along dimensions before the last, in rows of whole bytes")
    rows = [*shape[:-1], shape[-1] * bits // 8]
    cuts, result = cut_slice(
        rows, [*selectors[:-1], slice(None)], bits=8, slot_nbytes=slot_nbytes, pieces_from_nbytes=pieces_from_nbytes
    )
    return cuts, (*result[:-1], shape[-1])


def _expand(index: Index, ndim: int) -> list[_Selector]:
    """One selector per dimension: Ellipsis and missing trailing dimensions written out."""
    given = list(index) if isinstance(index, (tuple, list)) else [index]
    dots = sum(item is Ellipsis for item in given)
    if dots > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if len(given) - dots > ndim:
        raise IndexError(f"too many indices: the tensor has {ndim} dimensions, {len(given) - dots} were indexed")
    if not dots:
        given.append(Ellipsis)
    at = next(i for i, item in enumerate(given) if item is Ellipsis)
    filler: list[_Selector] = [slice(None)] * (ndim - len(given) + 1)
    if sum(isinstance(item, Parts) for item in given) > 1:
        raise IndexError("an index can only have parts in one dimension")
    return [_selector(item) for item in (*given[:at], *filler, *given[at + 1 :])]


def _selector(item: object) -> _Selector:
    if isinstance(item, (slice, Parts)):
        return item
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise TypeError(f"a slice is made of integers, slices and '...', not {item!r}")
    return operator.index(item)


def _axes(shape: Sequence[int], selectors: list[_Selector]) -> tuple[list[_Axis], tuple[int, ...]]:
    axes, result, pitch = [], [], math.prod(shape)
    for dim, (size, selector) in enumerate(zip(shape, selectors, strict=True)):
        pitch = pitch // size if size else 0
        if isinstance(selector, int):
            at = selector + size if selector < 0 else selector
            if not 0 <= at < size:
                raise IndexError(f"index {selector} is out of range for dimension {dim} of size {size}")
            axes.append(_Axis(at, 1, 1, False, pitch))
            continue
        if isinstance(selector, Parts):
            axes += _part_axes(selector, dim, size, pitch)
            result.append(selector.count)
            continue
        start, stop, step = selector.indices(size)
        count = len(range(start, stop, step))
        first = start if step > 0 else start + (count - 1) * step
        axes.append(_Axis(first, abs(step), count, step < 0 and count > 1, pitch))
        result.append(count)
    return axes, tuple(result)


def _part_axes(parts: Parts, dim: int, size: int, pitch: int) -> list[_Axis]:
    """Two axes for one dimension: from part to part, and within a part. Only their product counts where parts are irregular."""
    if not parts.stretches:
        return [_Axis(0, 1, 0, False, pitch)]
    (start, stop), last = parts.stretches[0], parts.stretches[-1][1]
    if last > size:
        raise IndexError(f"{parts} reaches beyond dimension {dim} of size {size}")
    step = parts.stretches[1][0] - start if len(parts.stretches) > 1 else 1
    return [_Axis(start, step, len(parts.stretches), False, pitch), _Axis(0, 1, stop - start, False, pitch)]


def _cut(axes: list[_Axis], source: int, target: int, itemsize: int, room: int, pieces_from: float) -> Iterator[Cut]:
    """Cuts for the block that `axes` span. `source`, `target`, `room` and `pieces_from` count elements."""
    source += sum(axis.start * axis.pitch for axis in axes)
    if all(axis.count for axis in axes):
        flat = [_Axis(0, axis.step, axis.count, axis.backwards, axis.pitch) for axis in axes if axis.count > 1]
        yield from _block(flat, source, target, itemsize, room, pieces_from)


def _block(axes: list[_Axis], source: int, target: int, itemsize: int, room: int, pieces_from: float) -> Iterator[Cut]:
    wanted, covered = _extent(axes)
    if wanted == covered and not any(axis.backwards for axis in axes):
        yield Cut(source * itemsize, wanted * itemsize, target * itemsize)
        return
    inner = axes[1:]
    piece, inner_covered = _extent(inner)
    run = _run_length(axes)
    if run < pieces_from and covered <= room:
        yield _thinned(axes, source, target, itemsize, covered)
    elif run >= pieces_from and run == piece and not axes[0].backwards:
        first = axes[0]
        yield Cut(source * itemsize, wanted * itemsize, target * itemsize, first.count, first.jump * itemsize)
    else:
        step = 1 if run >= pieces_from or inner_covered > room else 1 + (room - inner_covered) // axes[0].jump
        yield from _rows(axes, source, target, itemsize, room, pieces_from, step)


def _rows(axes: list[_Axis], source: int, target: int, itemsize: int, room: int, pieces_from: float, step: int) -> Iterator[Cut]:
    """The block in groups of `step` rows of its first dimension."""
    first, inner = axes[0], axes[1:]
    row = _extent(inner)[0]
    for begin in range(0, first.count, step):
        end = min(begin + step, first.count)
        at = target + (first.count - end if first.backwards else begin) * row
        group = [_Axis(0, first.step, end - begin, first.backwards, first.pitch)] if end - begin > 1 else []
        yield from _block(group + inner, source + begin * first.jump, at, itemsize, room, pieces_from)


def _thinned(axes: list[_Axis], source: int, target: int, itemsize: int, covered: int) -> Cut:
    return Cut(
        source * itemsize,
        covered * itemsize,
        target * itemsize,
        shape=tuple(axis.count for axis in axes),
        strides=tuple(axis.jump for axis in axes),
        flip=tuple(dim for dim, axis in enumerate(axes) if axis.backwards),
    )


def _extent(axes: list[_Axis]) -> tuple[int, int]:
    """(elements wanted, elements from the first wanted one to the last)"""
    return math.prod(axis.count for axis in axes), 1 + sum((axis.count - 1) * axis.jump for axis in axes)


def _run_length(axes: list[_Axis]) -> int:
    """Elements that lie one after another in the file and in the result."""
    run = 1
    for axis in reversed(axes):
        if axis.jump != run or axis.backwards:
            return run
        run *= axis.count
    return run
