"""Slices are numpy's, to the byte, however they are cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace._slices import Cut, Parts, cut_slice, index_text, slice_shape

Bytes = npt.NDArray[np.uint8]
Index = Any

PIECES_NEVER, PIECES_ALWAYS = math.inf, 0.0


def numbered(shape: Sequence[int], itemsize: int) -> npt.NDArray[Any]:
    """A tensor of bytes that differ from their neighbours, elements of `itemsize` bytes as its last dimension."""
    nbytes = math.prod(shape) * itemsize
    return (np.arange(nbytes, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8).reshape(*shape, itemsize)


def assemble(cuts: Sequence[Cut], data: Bytes, itemsize: int, nbytes: int) -> tuple[Bytes, int]:
    """The result that the cuts make out of a tensor's bytes, each of its bytes written once; and how many bytes were read."""
    result, writes = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    for cut in cuts:
        piece = cut.nbytes // cut.pieces
        assert piece * cut.pieces == cut.nbytes > 0
        starts = [cut.offset + k * cut.stride for k in range(cut.pieces)]
        assert starts[0] >= 0
        assert starts[-1] + piece <= len(data)
        read = np.concatenate([data[start : start + piece] for start in starts])
        if cut.shape is not None:
            assert sum((n - 1) * s for n, s in zip(cut.shape, cut.strides, strict=True)) < len(read) // itemsize
            strides = [itemsize * stride for stride in cut.strides]
            read = np.lib.stride_tricks.as_strided(read, (*cut.shape, itemsize), (*strides, 1))
            read = np.ascontiguousarray(np.flip(read, cut.flip) if cut.flip else read).reshape(-1)
        assert cut.position + len(read) <= nbytes
        result[cut.position : cut.position + len(read)] = read
        writes[cut.position : cut.position + len(read)] += 1
    assert (writes == 1).all()
    return result, sum(cut.nbytes for cut in cuts)


def check(shape: Sequence[int], index: Index, *, bits: int, slot_nbytes: int, pieces_from_nbytes: float) -> list[Cut]:
    """Cut, assemble, and compare with numpy."""
    itemsize = bits // 8
    tensor = numbered(shape, itemsize)
    cuts, result_shape = cut_slice(shape, index, bits=bits, slot_nbytes=slot_nbytes, pieces_from_nbytes=pieces_from_nbytes)
    whole = index if isinstance(index, (tuple, list)) else (index,)
    expected = tensor[(*whole, slice(None))] if any(item is Ellipsis for item in whole) else tensor[tuple(whole)]
    assert (*result_shape, itemsize) == expected.shape
    assert slice_shape(shape, index) == result_shape
    found, read_nbytes = assemble(cuts, tensor.reshape(-1), itemsize, expected.size)
    assert found.tobytes() == expected.tobytes()
    assert read_nbytes >= expected.size
    assert all(cut.nbytes <= max(slot_nbytes, itemsize) for cut in cuts if cut.shape is not None)
    return cuts


# ---- exact against numpy

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=4)
steps = st.sampled_from([None, 1, 2, 3, 8, -1, -2, -3, -8])
strategies = {
    "slot_nbytes": st.sampled_from([1, 8, 40, 200, 1 << 20]),
    "pieces_from_nbytes": st.sampled_from([PIECES_ALWAYS, 1.0, 8.0, 24.0, 100.0, PIECES_NEVER]),
}


@st.composite
def shapes_and_indices(draw: st.DrawFn) -> tuple[list[int], Index]:
    shape = draw(shapes)
    used = draw(st.integers(0, len(shape)))
    dots = draw(st.integers(0, used)) if draw(st.booleans()) else None
    sizes = shape[:used] if dots is None else shape[:dots] + shape[len(shape) - (used - dots) :]
    index: list[Any] = []
    for size in sizes:
        bounds = st.none() | st.integers(-size - 3, size + 3)
        cut = st.builds(slice, bounds, bounds, steps)
        index.append(draw(cut | st.integers(-size, size - 1) if size else cut))
    if dots is not None:
        index.insert(dots, ...)
    if len(index) == 1 and draw(st.booleans()):
        return shape, index[0]
    return shape, tuple(index)


@given(shapes_and_indices(), st.sampled_from([8, 16, 32, 64]), st.fixed_dictionaries(strategies))
@settings(max_examples=examples(500))
def test_every_index_has_numpys_meaning_under_every_strategy(
    wanted: tuple[list[int], Index], bits: int, strategy: dict[str, Any]
) -> None:
    shape, index = wanted
    check(shape, index, bits=bits, **strategy)


@given(shapes_and_indices(), st.fixed_dictionaries(strategies))
@settings(max_examples=examples(200))
def test_no_byte_is_read_twice(wanted: tuple[list[int], Index], strategy: dict[str, Any]) -> None:
    shape, index = wanted
    cuts, _ = cut_slice(shape, index, bits=16, **strategy)
    ranges = [
        (cut.offset + k * cut.stride, cut.offset + k * cut.stride + cut.nbytes // cut.pieces)
        for cut in cuts
        for k in range(cut.pieces)
    ]
    ranges.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


INDICES: list[tuple[list[int], Index]] = [
    ([], ()),
    ([], ...),
    ([5], 0),
    ([5], -1),
    ([5], -5),
    ([5], slice(None)),
    ([5], slice(None, None, -1)),
    ([5], slice(3, 1)),
    ([5], slice(-100, 100)),
    ([5], slice(4, None, -2)),
    ([5], slice(1, 2, -1)),
    ([5], np.int64(3)),
    ([0], slice(None)),
    ([0, 4], slice(None, None, -1)),
    ([4, 0], 2),
    ([4, 6], [1, slice(None)]),
    ([4, 6], (..., 2)),
    ([4, 6], (1, ...)),
    ([4, 6], (..., 1, 2)),
    ([4, 6], (slice(1, 3), slice(None, None, 5))),
    ([4, 6], (slice(None, None, -1), slice(None, None, -1))),
    ([4, 6], (slice(None), slice(5, None, -3))),
    ([3, 4, 5], (slice(None), 1)),
    ([3, 4, 5], (2, ..., slice(1, 4))),
    ([3, 4, 5], (slice(None), slice(None), -1)),
    ([3, 1, 5], (slice(None, None, -1), slice(None, None, -1), slice(2, 4))),
    ([2, 3, 4, 5], (slice(None), slice(0, 2), slice(1, 3), slice(None, None, 2))),
    ([2, 3, 4, 5], (slice(1, None), slice(None, None, 2), ..., 0)),
]


@pytest.mark.parametrize("pieces_from_nbytes", [PIECES_ALWAYS, 16.0, PIECES_NEVER])
@pytest.mark.parametrize("slot_nbytes", [1, 64, 1 << 20])
@pytest.mark.parametrize(("shape", "index"), INDICES, ids=str)
def test_index_of_the_table_has_numpys_meaning(
    shape: list[int], index: Index, slot_nbytes: int, pieces_from_nbytes: float
) -> None:
    check(shape, index, bits=16, slot_nbytes=slot_nbytes, pieces_from_nbytes=pieces_from_nbytes)


# ---- which strategy

MANY = 1 << 20


def cuts_of(shape: list[int], index: Index, **changes: Any) -> list[Cut]:
    strategy = {"slot_nbytes": MANY, "pieces_from_nbytes": 100.0, **changes}
    return check(shape, index, bits=8, **strategy)


@pytest.mark.parametrize("index", [(), ..., slice(None), slice(2, 5), 3, (3, slice(10, 20)), (slice(4, 5), slice(0, 7))], ids=str)
def test_what_is_contiguous_is_one_range_without_surplus(index: Index) -> None:
    cuts = cuts_of([10, 100], index)
    assert [(cut.pieces, cut.shape) for cut in cuts] == [(1, None)]
    assert cuts[0].nbytes == np.zeros((10, 100), np.uint8)[index].size


def test_dimensions_of_one_element_do_not_break_a_range() -> None:
    assert len(cuts_of([1, 10, 1, 50], (slice(None, None, -1), slice(2, 6), slice(None, None, -1)))) == 1


def test_nothing_wanted_is_nothing_read() -> None:
    assert cuts_of([10, 100], slice(5, 5)) == []
    assert cuts_of([0, 100], ()) == []


def test_long_pieces_are_read_one_by_one() -> None:
    assert cuts_of([10, 1000], (slice(None), slice(0, 100))) == [Cut(0, 1000, 0, pieces=10, stride=1000)]


def test_short_pieces_are_read_together_and_thinned_out() -> None:
    assert cuts_of([10, 1000], (slice(None), slice(0, 99))) == [Cut(0, 9099, 0, shape=(10, 99), strides=(1000, 1))]


def test_thinning_is_done_in_groups_of_rows_that_fit_a_slot() -> None:
    cuts = cuts_of([10, 1000], (slice(None), slice(0, 99)), slot_nbytes=3500)
    assert [(cut.offset, cut.shape) for cut in cuts] == [(0, (4, 99)), (4000, (4, 99)), (8000, (2, 99))]


def test_reversed_rows_that_are_long_are_read_one_by_one_last_first() -> None:
    cuts = cuts_of([3, 200], slice(None, None, -1))
    assert [(cut.offset, cut.position) for cut in cuts] == [(0, 400), (200, 200), (400, 0)]


def test_reversed_short_pieces_are_flipped_in_the_slot() -> None:
    assert cuts_of([40], slice(None, None, -1)) == [Cut(0, 40, 0, shape=(40,), strides=(1,), flip=(0,))]


def test_pieces_are_long_or_short_in_bytes_and_not_in_elements() -> None:
    cuts, _ = cut_slice([10, 1000], (slice(None), slice(0, 25)), bits=32, slot_nbytes=MANY, pieces_from_nbytes=100.0)
    assert [cut.pieces for cut in cuts] == [10]


# ---- elements narrower than a byte


@pytest.mark.parametrize(
    ("bits", "shape", "index", "expected"),
    [
        (4, [6, 8], slice(1, 3), (2, 8)),
        (4, [6, 8], 2, (8,)),
        (4, [6, 8], (slice(None, None, -2), slice(None)), (3, 8)),
        (4, [6, 8], (..., slice(0, 8)), (6, 8)),
        (4, [6, 8], (1, slice(0, 8, 1)), (8,)),
        (4, [2, 3, 4], (slice(None), 1), (2, 4)),
        (6, [5, 4], slice(3, None), (2, 4)),
        (6, [5, 8], (slice(4, 0, -3),), (2, 8)),
        (6, [0, 4], slice(None), (0, 4)),
    ],
)
def test_narrow_elements_are_cut_in_rows_of_whole_bytes(
    bits: int, shape: list[int], index: Index, expected: tuple[int, ...]
) -> None:
    row_nbytes = shape[-1] * bits // 8
    rows = numbered([*shape[:-1], row_nbytes], 1)[..., 0]
    whole = [item for item in (index if isinstance(index, tuple) else (index,)) if item is not Ellipsis][: len(shape) - 1]
    outer = rows if isinstance(index, tuple) and index[0] is Ellipsis else rows[tuple(whole)]
    cuts, result = cut_slice(shape, index, bits=bits, slot_nbytes=MANY, pieces_from_nbytes=PIECES_NEVER)
    found, _ = assemble(cuts, rows.reshape(-1), 1, outer.size)
    assert result == expected == slice_shape(shape, index)
    assert found.tobytes() == outer.tobytes()


@pytest.mark.parametrize(
    ("bits", "shape", "index"),
    [
        (4, [6, 8], (slice(None), slice(0, 4))),
        (4, [6, 8], (..., 0)),
        (4, [8], 0),
        (4, [8], slice(0, 4)),
        (4, [6, 8], (slice(None), slice(None, None, -1))),
        (4, [2, 3], 0),
        (6, [2, 2], 0),
        (6, [4], slice(0, 2)),
    ],
)
def test_a_cut_inside_a_row_of_narrow_elements_is_refused(bits: int, shape: list[int], index: Index) -> None:
    with pytest.raises(ValueError, match="rows of whole bytes"):
        cut_slice(shape, index, bits=bits, slot_nbytes=MANY, pieces_from_nbytes=PIECES_NEVER)


@pytest.mark.parametrize(("bits", "shape"), [(4, [2, 3]), (4, [6]), (6, [4]), (6, [2, 2]), (4, [6, 8])])
@pytest.mark.parametrize("index", [(), ..., slice(None)], ids=str)
def test_a_whole_tensor_of_narrow_elements_is_one_range(bits: int, shape: list[int], index: Index) -> None:
    cuts, result = cut_slice(shape, index, bits=bits, slot_nbytes=MANY, pieces_from_nbytes=PIECES_NEVER)
    assert cuts == [Cut(0, math.prod(shape) * bits // 8, 0)]
    assert result == tuple(shape)


# ---- what is no index


@pytest.mark.parametrize(
    ("shape", "index", "error"),
    [
        ([5], 5, IndexError),
        ([5], -6, IndexError),
        ([0], 0, IndexError),
        ([], 0, IndexError),
        ([5], (0, 0), IndexError),
        ([5, 5], (0, 0, ..., 0), IndexError),
        ([5, 5], (..., ...), IndexError),
        ([5], slice(None, None, 0), ValueError),
        ([5], 1.0, TypeError),
        ([5], True, TypeError),
        ([5], None, TypeError),
        ([5], "0", TypeError),
        ([5], slice(0, 2.5), TypeError),
        ([5], ([0, 1],), TypeError),
        ([5], np.array([True] * 5), TypeError),
    ],
    ids=str,
)
def test_what_is_no_basic_index_is_refused(shape: list[int], index: Index, error: type[Exception]) -> None:
    with pytest.raises(error):
        cut_slice(shape, index, bits=32, slot_nbytes=MANY, pieces_from_nbytes=PIECES_NEVER)
    with pytest.raises(error):
        slice_shape(shape, index)


# ---- parts: several stretches of one dimension


@st.composite
def shapes_and_parts(draw: st.DrawFn) -> tuple[list[int], int, list[tuple[int, int]], list[Any]]:
    """A shape, a dimension, stretches of it, and basic indices for the dimensions around it."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    edges = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=6)))
    stretches = list(zip(edges[::2], edges[1::2], strict=False))
    around: list[Any] = [
        draw(st.one_of(st.integers(-size, size - 1), st.builds(slice, st.integers(-9, 9) | st.none(), st.none(), steps)))
        for size in shape
    ]
    return shape, dim, stretches, around


def joined(tensor: npt.NDArray[Any], dim: int, stretches: Sequence[tuple[int, int]], around: Sequence[Any]) -> npt.NDArray[Any]:
    """What numpy makes of it: the stretches concatenated, then the indices around them."""
    whole = np.concatenate([tensor.take(range(a, b), axis=dim) for a, b in [(0, 0), *stretches]], axis=dim)
    return whole[tuple(slice(None) if d == dim else item for d, item in enumerate(around))]


@given(shapes_and_parts(), st.fixed_dictionaries(strategies), st.sampled_from([8, 16, 32]))
@settings(max_examples=examples(400))
def test_parts_are_stretches_one_after_another(
    wanted: tuple[list[int], int, list[tuple[int, int]], list[Any]], strategy: dict[str, Any], bits: int
) -> None:
    shape, dim, stretches, around = wanted
    index = [Parts(stretches) if d == dim else item for d, item in enumerate(around)]
    tensor = numbered(shape, bits // 8)
    expected = joined(tensor, dim, stretches, around)
    cuts, result_shape = cut_slice(shape, index, bits=bits, **strategy)
    assert (*result_shape, bits // 8) == expected.shape
    assert slice_shape(shape, index) == result_shape
    assert assemble(cuts, tensor.reshape(-1), bits // 8, expected.size)[0].tobytes() == expected.tobytes()


def test_equal_parts_of_every_row_take_one_cut_and_not_one_a_row() -> None:
    cuts, shape = cut_slice(
        [64, 32], (slice(None), Parts([(0, 8), (16, 24)])), bits=16, slot_nbytes=1 << 20, pieces_from_nbytes=1e9
    )
    assert shape == (64, 16)
    assert len(cuts) == 1


def test_parts_that_touch_are_one() -> None:
    assert Parts([(0, 2), (2, 4), (5, 5), (8, 9)]) == Parts([(0, 4), (8, 9)])


@pytest.mark.parametrize("stretches", [[(2, 1)], [(-1, 2)], [(0, 3), (2, 5)], [(4, 5), (0, 1)]])
def test_parts_that_overlap_or_run_backwards_are_refused(stretches: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        Parts(stretches)


@pytest.mark.parametrize("index", [Parts([(0, 5)]), (Parts([(0, 1)]), Parts([(0, 1)]))])
def test_parts_beyond_the_tensor_or_in_two_dimensions_are_refused(index: Index) -> None:
    with pytest.raises(IndexError):
        cut_slice([4, 4], index, bits=8, slot_nbytes=8, pieces_from_nbytes=0)


def test_rows_of_narrow_elements_are_taken_in_parts() -> None:
    cuts, shape = cut_slice([6, 4], Parts([(0, 1), (3, 5)]), bits=4, slot_nbytes=1 << 20, pieces_from_nbytes=1e9)
    assert shape == (3, 4)
    assert [(cut.offset, cut.nbytes, cut.position) for cut in cuts] == [(0, 2, 0), (6, 4, 2)]


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (3, "[3]"),
        ((slice(None), slice(0, 128), slice(None, None, -2)), "[:, 0:128, ::-2]"),
        ((..., Parts([(0, 2)])), "[..., Parts([(0, 2)])]"),
        ("text", "['text']"),
        (None, "[None]"),
    ],
)
def test_an_index_is_shown_as_it_is_written(index: object, text: str) -> None:
    assert index_text(index) == text
