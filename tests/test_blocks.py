"""Blocks of rows: whatever the ranks take, each byte is in one block, and every rank's parts of the blocks make up its slice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Parts
from headrace._blocks import Cutout, blocks_of, choose_blocked, packed, stretches_of
from headrace._header import TensorInfo


def picked(array: np.ndarray[Any, Any], index: Any) -> np.ndarray[Any, Any]:
    """What an index takes, Parts included."""
    selectors = index if isinstance(index, tuple) else (index,)
    for dim, selector in enumerate(selectors):
        if isinstance(selector, Parts):
            array = np.concatenate([array.take(range(a, b), dim) for a, b in selector.stretches] or [array.take([], dim)], dim)
        elif selector is not Ellipsis:
            array = array[(slice(None),) * dim + (selector,)]
    return array


def assembled(array: np.ndarray[Any, Any], index: Any, most: int) -> tuple[np.ndarray[Any, Any], int]:
    """The slice, put together from blocks; and how many elements were read."""
    stretches = stretches_of(array.shape, index)
    assert stretches is not None
    result = np.full(picked(array, index).shape, -1, dtype=array.dtype)
    flat, out, read = array.reshape(-1), result.reshape(-1), 0
    for offset, count, cutouts in blocks_of(array.shape, stretches, most):
        assert offset == read
        for cutout in cutouts:
            take(flat[offset : offset + count], out, cutout)
        read += count
    return result, read


def take(block: np.ndarray[Any, Any], out: np.ndarray[Any, Any], cutout: Cutout) -> None:
    """Copy a cutout element by element, as its strides say."""
    for at in np.ndindex(*cutout.shape):
        source = cutout.source + sum(i * s for i, s in zip(at, cutout.source_strides, strict=True))
        target = cutout.target + sum(i * s for i, s in zip(at, cutout.target_strides, strict=True))
        assert out[target] == -1
        out[target] = block[source]


@st.composite
def selectors(draw: st.DrawFn, size: int) -> Any:
    """A stretch, several of them, or all of a dimension."""
    cuts = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
    kind = draw(st.sampled_from(["all", "slice", "parts"]))
    if kind == "all":
        return slice(None)
    return slice(cuts[0], cuts[-1]) if kind == "slice" else Parts(list(zip(cuts[::2], cuts[1::2], strict=False)))


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """A shape, and an index into it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    return shape, tuple(draw(selectors(size)) for size in shape)


@given(slices(), st.integers(1, 200))
def test_parts_of_the_blocks_make_up_the_slice_and_every_element_is_read_once(
    case: tuple[tuple[int, ...], tuple[Any, ...]], most: int
) -> None:
    shape, index = case
    array = np.arange(np.prod(shape)).reshape(shape)
    result, read = assembled(array, index, most)
    assert result.tolist() == picked(array, index).tolist()
    assert read == array.size


@given(slices(), st.integers(1, 200))
def test_a_blocks_part_is_the_next_stretch_of_the_slice(case: tuple[tuple[int, ...], tuple[Any, ...]], most: int) -> None:
    shape, index = case
    array = np.arange(np.prod(shape))
    stretches = stretches_of(shape, index)
    assert stretches is not None
    wanted = picked(array.reshape(shape), index).reshape(-1)
    found, placed = list[int](), np.full(wanted.shape, -1)
    for offset, count, cutouts in blocks_of(shape, stretches, most):
        packing = packed(cutouts, "I64")
        part = np.full(packing.elements, -1)
        for cutout in packing.cutouts:
            take(array[offset : offset + count], part, cutout)
        assert packing.first == len(found) or not packing.elements
        found += part.tolist()
        take(part, placed, packing.unpack())
    assert found == placed.tolist() == wanted.tolist()


@given(slices(), st.integers(1, 200))
def test_no_block_is_longer_than_wanted_and_all_ranks_have_the_same(
    case: tuple[tuple[int, ...], tuple[Any, ...]], most: int
) -> None:
    shape, index = case
    ours, whole = stretches_of(shape, index), stretches_of(shape, ...)
    assert ours is not None
    assert whole is not None
    mine = [(offset, count) for offset, count, _ in blocks_of(shape, ours, most)]
    assert mine == [(offset, count) for offset, count, _ in blocks_of(shape, whole, most)]
    assert all(count <= most for _, count in mine)


def info(*shape: int, dtype: str = "BF16") -> TensorInfo:
    """A tensor called w."""
    return TensorInfo("w", dtype, shape, int(np.prod(shape)) * 2, "f", 0)


@pytest.mark.parametrize(
    ("indices", "blocked"),
    [
        ([slice(0, 4), slice(4, 8)], False),  # rows
        ([slice(0, 3), slice(3, 8)], False),
        ([(slice(None), slice(0, 4)), (slice(None), slice(4, 8))], True),  # columns
        ([slice(0, 4), slice(0, 4)], False),  # the same heads: no more than there is
        ([slice(0, 8), slice(0, 4)], True),
        ([Parts([(0, 2), (4, 6)]), Parts([(2, 4), (6, 8)])], True),  # a fused projection: parts lie apart
        ([slice(0, 4), None], True),  # one takes it whole
        ([slice(0, 4), slice(None, None, 2)], False),  # steps are each rank's own affair
        ([slice(0, 4), 3], False),
    ],
)
def test_what_the_ranks_together_would_read_more_of_than_there_is_is_read_in_blocks(indices: list[Any], blocked: bool) -> None:
    each = [{} if index is None else {"w": index} for index in indices]
    assert choose_blocked({"w": info(8, 8)}, each) == (frozenset("w") if blocked else frozenset())


def test_elements_narrower_than_a_byte_are_not_read_in_blocks() -> None:
    each = [{"w": (slice(None), slice(0, 8))}] * 2
    assert choose_blocked({"w": info(8, 8, dtype="F4")}, each) == frozenset()
