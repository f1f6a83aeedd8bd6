"""Plans, carried out here by a few lines of numpy over bytes in memory: each wanted byte lands where it must, within limits."""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace._dtypes import DTYPES
from headrace._header import Header
from headrace._plan import (
    CHUNK_NBYTES,
    KIB,
    LARGE_NBYTES,
    MIB,
    PAGE,
    SMALL_NBYTES,
    Copy,
    Limits,
    Plan,
    Read,
    SourceAbilities,
    Span,
    counted,
    format_nbytes,
)
from headrace._planner import make_plan
from headrace._routes import choose_route, pieces_from, read_unit
from headrace.errors import OptionError

Bytes = npt.NDArray[np.uint8]
Index = Any

FILE_BYTES = np.frombuffer(np.random.default_rng(20).bytes(16 * MIB), dtype=np.uint8)
WIDE = sorted(name for name, dtype in DTYPES.items() if dtype.bits >= 8)


# ---- requests: headers, and what is wanted of them


def make_header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], *, data_offset: int = 64, url: str = "m.safetensors"
) -> Header:
    """A header of (name, dtype, shape) tensors that follow on each other."""
    sizes = [math.prod(shape) * DTYPES[dtype].bits // 8 for _, dtype, shape in tensors]
    ends = list(accumulate(sizes, initial=data_offset))
    return Header(
        url=url,
        nbytes=ends[-1],
        data_offset=data_offset,
        metadata=None,
        names=[name for name, _, _ in tensors],
        dtypes=[dtype for _, dtype, _ in tensors],
        shapes=[tuple(shape) for _, _, shape in tensors],
        starts=ends[:-1],
        ends=ends[1:],
        aligned=all(start % DTYPES[dtype].itemsize == 0 for start, (_, dtype, _) in zip(ends, tensors, strict=False)),
    )


@dataclass(frozen=True)
class Request:
    """The arguments of `make_plan`."""

    headers: list[Header]
    chosen: list[list[int] | None]
    abilities: list[SourceAbilities]
    limits: Limits
    casts: list[dict[int, str]]
    slices: dict[str, Index]
    given: frozenset[str] | None

    def plan(self) -> Plan:
        return make_plan(
            self.headers,
            self.chosen,
            self.abilities,
            self.limits,
            casts=self.casts,
            slices=self.slices,
            given=self.given,
        )

    def rows(self, shard: int) -> Sequence[int]:
        rows = self.chosen[shard]
        return range(len(self.headers[shard].names)) if rows is None else rows

    def file(self, shard: int) -> Bytes:
        return FILE_BYTES[shard : shard + self.headers[shard].nbytes]


def request(tensors: Sequence[tuple[str, str, Sequence[int]]], **changes: Any) -> Request:
    """All tensors of one cached file, nothing special asked; `changes` says what is different."""
    header = make_header(tensors, data_offset=changes.pop("data_offset", 64))
    defaults = {
        "headers": [header],
        "chosen": [None],
        "abilities": [SourceAbilities("file", cached=True)],
        "limits": Limits(4, 64 * MIB),
        "casts": [{}],
        "slices": {},
        "given": None,
    }
    return Request(**{**defaults, **changes})


# ---- a plan carried out


def convert(elements: npt.NDArray[Any], source: str, target: str) -> npt.NDArray[Any]:
    """Stands in for a dtype conversion, a function of one element: its value is torch's affair, where it goes is the plan's."""
    if source == target:
        return elements
    mixed = elements.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(64 - DTYPES[target].bits)
    return mixed.astype(unsigned(target))


def unsigned(dtype: str) -> npt.DTypeLike:
    return np.dtype(f"u{DTYPES[dtype].itemsize}")


def expected_tensor(request: Request, shard: int, row: int) -> Bytes:
    """The bytes that must be handed out: the whole tensor out of the file, sliced by numpy, converted."""
    header = request.headers[shard]
    dtype = header.dtypes[row]
    raw = request.file(shard)[header.starts[row] : header.ends[row]]
    target = request.casts[shard].get(row, dtype)
    shape = list(header.shapes[row])
    index = request.slices.get(header.names[row])
    if index is not None and DTYPES[dtype].bits < 8:
        shape[-1] = shape[-1] * DTYPES[dtype].bits // 8
    elements = raw.view(unsigned(dtype))
    if index is not None:
        elements = elements.reshape(shape)[index]
    return convert(np.ascontiguousarray(elements).reshape(-1), dtype, target).view(np.uint8)


class Memory:
    """A span's memory, and how often each of its bytes was written."""

    def __init__(self, nbytes: int) -> None:
        self.data: Bytes = np.zeros(nbytes, np.uint8)
        self.writes: Bytes = np.zeros(nbytes, np.uint8)

    def write(self, position: int, data: Bytes) -> None:
        assert 0 <= position <= position + len(data) <= len(self.data), "written outside the span's memory"
        self.data[position : position + len(data)] = data
        self.writes[position : position + len(data)] += 1


def read_file(read: Read, file: Bytes, seen: Bytes) -> Bytes:
    """A read's bytes; `seen` counts how often each byte of the file was read."""
    assert read.nbytes > 0
    assert read.nbytes % read.pieces == 0
    piece, parts = read.nbytes // read.pieces, []
    for k in range(read.pieces):
        begin = read.offset + k * read.stride
        assert 0 <= begin <= begin + piece <= len(file), "read past the end of the file"
        seen[begin : begin + piece] += 1
        parts.append(file[begin : begin + piece])
    return np.concatenate(parts)


def copied(data: Bytes, copy: Copy | None) -> Bytes:
    if copy is None:
        return data
    elements = data.view(unsigned(copy.source))
    if copy.shape is not None:
        strides = [stride * elements.itemsize for stride in copy.strides]
        reach = sum((size - 1) * stride for size, stride in zip(copy.shape, copy.strides, strict=True))
        assert reach < len(elements), "copied from outside the slot"
        elements = np.lib.stride_tricks.as_strided(elements, copy.shape, strides)
        elements = np.flip(elements, copy.flip) if copy.flip else elements
    return convert(np.ascontiguousarray(elements).reshape(-1), copy.source, copy.target).view(np.uint8)


def carry_out(request: Request, plan: Plan) -> tuple[list[Memory], list[Bytes]]:
    """Every span's memory after all reads, and how often every byte of every file was read."""
    memories = [Memory(span.nbytes) for span in plan.spans]
    seen: list[Bytes] = [np.zeros(header.nbytes, np.uint8) for header in request.headers]
    for read in plan.reads:
        data = read_file(read, request.file(read.shard), seen[read.shard])
        memories[read.span].write(read.position, copied(data, read.copy))
    return memories, seen


def check_bytes(request: Request) -> Plan:
    """Carry the request's plan out and compare every tensor with what must be handed out."""
    plan = request.plan()
    memories, _ = carry_out(request, plan)
    wanted = [(shard, row) for shard in range(len(request.headers)) for row in request.rows(shard)]
    assert plan.tensors.names == [request.headers[shard].names[row] for shard, row in wanted]
    for span, memory in zip(plan.spans, memories, strict=True):
        for i in range(span.first, span.last):
            shard, row = wanted[i]
            assert (span.shard, plan.tensors.rows[i]) == (shard, row)
            at, nbytes = plan.tensors.positions[i], plan.tensors.nbytes[i]
            assert memory.data[at : at + nbytes].tobytes() == expected_tensor(request, shard, row).tobytes()
            assert (memory.writes[at : at + nbytes] == 1).all()
    return plan


# ---- random requests

tiny_shapes = st.lists(st.integers(0, 6), max_size=3)
table_shapes = st.tuples(st.integers(1, 40), st.integers(1, 5000))
near_small = st.integers(SMALL_NBYTES - 9, SMALL_NBYTES + 9).map(lambda n: [n])
long_shapes = st.sampled_from([[700, 1001], [2, 400_000], [1_300_001]])


@st.composite
def entries(draw: st.DrawFn) -> tuple[str, list[int]]:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = list(draw(st.one_of(tiny_shapes, tiny_shapes, table_shapes, near_small, long_shapes)))
    itemsize = DTYPES[dtype].itemsize
    if shape and math.prod(shape) > 50_000:
        shape[-1] = shape[-1] // itemsize
    while math.prod(shape) * DTYPES[dtype].bits % 8:  # the format wants whole bytes
        shape = [*shape[:-1], shape[-1] + 1] if shape else [2]
    return dtype, shape


@st.composite
def indices(draw: st.DrawFn, shape: Sequence[int], *, packed: bool) -> Index:
    """An index that fits `shape`; the last dimension of packed elements stays whole."""
    whole = shape[:-1] if packed else shape
    count = draw(st.integers(0, len(whole)))
    parts: list[Any] = []
    for size in whole[:count]:
        bounds = st.none() | st.integers(-size - 2, size + 2)
        step = draw(st.sampled_from([None, 1, 1, -1, 2, 3, -2, 7, -5]))
        cut = slice(draw(bounds), draw(bounds), step)
        parts.append(draw(st.integers(-size, size - 1)) if size and draw(st.booleans()) else cut)
    if draw(st.booleans()):
        parts.append(...)
    return parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)


abilities_of_sources = st.builds(
    SourceAbilities,
    st.sampled_from(["file", "memory", "network"]),
    chunk_nbytes=st.sampled_from([PAGE, 3 * PAGE, 64 * KIB, MIB, CHUNK_NBYTES, 16 * MIB]),
    gap_nbytes=st.sampled_from([0, 1, 100, 32 * KIB, MIB]),
    cached=st.sampled_from([True, False, None]),
)
limits_of_loads = st.builds(Limits, st.integers(1, 16), st.sampled_from([0, 1, MIB, 3 * MIB, 64 * MIB, 1 << 40]))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    headers, chosen, casts, slices, names = [], [], [], {}, []
    for shard in range(draw(st.integers(1, 3))):
        found = draw(st.lists(entries(), max_size=9))
        header = make_header(
            [(f"{shard}.{i}", dtype, shape) for i, (dtype, shape) in enumerate(found)],
            data_offset=draw(st.sampled_from([8, 64, 4096, 10_000, 9, 10, 12, 4095])),
            url=f"{shard}.safetensors",
        )
        rows = [row for row in range(len(found)) if draw(st.booleans())] if draw(st.booleans()) else None
        targets = {}
        for row, (dtype, shape) in enumerate(found):
            bits = DTYPES[dtype].bits
            if bits >= 8 and draw(st.integers(0, 3)) == 0:
                targets[row] = draw(st.sampled_from([name for name in WIDE if name != dtype]))
            sliceable = bits >= 8 or (shape and shape[-1] * bits % 8 == 0)
            if sliceable and draw(st.integers(0, 3)) == 0:
                slices[header.names[row]] = draw(indices(shape, packed=bits < 8))
        headers.append(header)
        chosen.append(rows)
        casts.append(targets)
        names += header.names
    if draw(st.booleans()):
        casts, slices = [{} for _ in headers], {}
    given = frozenset(name for name in names if draw(st.booleans())) if draw(st.booleans()) else None
    abilities = [draw(abilities_of_sources) for _ in headers]
    return Request(headers, chosen, abilities, draw(limits_of_loads), casts, slices, given)


# ---- what holds for every plan


@given(requests())
@settings(max_examples=examples(100))
def test_every_wanted_byte_lands_once_and_where_its_tensor_is(request: Request) -> None:
    check_bytes(request)


@pytest.mark.parametrize("index", [slice(None, None, -1), (slice(None, None, 2),), (..., slice(5, 19_990)), slice(1, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["F16", "F32", "F64"])
@pytest.mark.parametrize("data_offset", [8, 9, 4095])
def test_long_pieces_of_slices_are_cut_within_elements_where_nothing_is_converted(
    data_offset: int, dtype: str, index: Index
) -> None:
    header = make_header([("w", dtype, [4, 20_000])], data_offset=data_offset, url="model.safetensors")
    ability = SourceAbilities("file", chunk_nbytes=3 * PAGE, gap_nbytes=0)
    check_bytes(Request([header], [None], [ability], Limits(1, MIB), [{}], {"w": index}, None))


@given(requests())
@settings(max_examples=examples(40))
def test_no_byte_is_read_or_written_twice_and_the_surplus_is_exact(request: Request) -> None:
    plan = request.plan()
    memories, seen = carry_out(request, plan)
    assert all((counts <= 1).all() for counts in seen)
    assert all((memory.writes <= 1).all() for memory in memories)
    assert plan.read_nbytes == sum(int(counts.sum()) for counts in seen) == sum(read.nbytes for read in plan.reads)
    wanted = sum(
        math.prod(shape) * DTYPES[dtype].bits // 8 for shape, dtype in zip(plan.tensors.shapes, plan.tensors.sources, strict=True)
    )
    assert plan.wanted_nbytes == wanted
    assert plan.surplus_nbytes == plan.read_nbytes - wanted >= 0


@given(requests())
@settings(max_examples=examples(40))
def test_tables_describe_what_is_handed_out(request: Request) -> None:
    plan = request.plan()
    tensors = plan.tensors
    shards = [span.shard for span in plan.spans for _ in range(span.first, span.last)]
    for i, (shard, row) in enumerate(zip(shards, tensors.rows, strict=True)):
        header = request.headers[shard]
        assert tensors.sources[i] == header.dtypes[row]
        assert tensors.dtypes[i] == request.casts[shard].get(row, header.dtypes[row])
        index = request.slices.get(tensors.names[i])
        shape = header.shapes[row] if index is None else np.broadcast_to(np.uint8(), header.shapes[row])[index].shape
        assert list(tensors.shapes[i]) == list(shape)
        assert tensors.nbytes[i] == math.prod(shape) * DTYPES[tensors.dtypes[i]].bits // 8
    assert plan.memory_nbytes == sum(tensors.nbytes)


@given(requests())
@settings(max_examples=examples(40))
def test_spans_divide_the_tensors_and_reads_fill_the_spans_in_order(request: Request) -> None:
    plan = request.plan()
    at = at_read = 0
    for index, span in enumerate(plan.spans):
        assert (span.first, span.first_read) == (at, at_read)
        assert span.last > span.first
        for read in plan.reads[span.first_read : span.last_read]:
            assert (read.span, read.shard) == (index, span.shard)
        ends = [position + nbytes for position, nbytes in rows_of(plan, span)]
        assert max(ends) <= span.nbytes
        at, at_read = span.last, span.last_read
    assert (at, at_read) == (len(plan.tensors), len(plan.reads))
    assert [span.shard for span in plan.spans] == sorted(span.shard for span in plan.spans)


@given(requests())
@settings(max_examples=examples(40))
def test_no_read_is_longer_than_the_chunk(request: Request) -> None:
    plan = request.plan()
    for read in plan.reads:
        span = plan.spans[read.span]
        scattered = span.given and span.last - span.first > 1  # one read into a slot for all of them, as long as a span may be
        ability = request.abilities[read.shard]
        longest = ability.chunk_nbytes * (2 if span.nbytes >= LARGE_NBYTES and read.copy is None else 1)
        if ability.kind == "network":
            longest = longest * 9 // 8 + 1  # rather than one request more for the rest
        assert read.nbytes <= (max(longest, request.limits.span_nbytes) if scattered else longest)


@given(requests())
@settings(max_examples=examples(40))
def test_memory_of_a_span_is_the_limits_or_that_of_its_only_tensor(request: Request) -> None:
    plan = request.plan()
    for span in plan.spans:
        used = span.nbytes - span.lead
        assert 0 <= span.lead < PAGE
        if span.last - span.first > 1:
            assert used <= request.limits.span_nbytes
        else:
            assert used == plan.tensors.nbytes[span.first]


@given(requests())
@settings(max_examples=examples(40))
def test_small_tensors_share_no_memory_with_large_ones(request: Request) -> None:
    plan = request.plan()
    for span in plan.spans:
        if not span.given:
            rows = [(plan.tensors.nbytes[i], file_nbytes(request, plan, span.shard, i)) for i in range(span.first, span.last)]
            small = any(max(sizes) < SMALL_NBYTES for sizes in rows)
            large = any(min(sizes) >= SMALL_NBYTES for sizes in rows)
            assert not (small and large)


@given(requests())
@settings(max_examples=examples(100))
def test_addresses_suit_their_dtypes_where_memory_begins_on_a_page(request: Request) -> None:
    plan = request.plan()
    for span in plan.spans:
        scattered = span.given and span.last - span.first > 1
        for i in range(span.first, span.last):
            itemsize = DTYPES[plan.tensors.dtypes[i]].itemsize
            assert scattered or not plan.tensors.nbytes[i] or plan.tensors.positions[i] % itemsize == 0


@given(requests())
@settings(max_examples=examples(40))
def test_memory_that_is_an_image_of_the_file_is_congruent_with_it(request: Request) -> None:
    plan = request.plan()
    for span in plan.spans:
        if span.offset is None:
            continue
        assert span.offset % PAGE == span.lead
        for read in plan.reads[span.first_read : span.last_read]:
            assert read.copy is None
            assert read.pieces == 1
            assert read.position - span.lead == read.offset - span.offset
            assert read.position % PAGE == read.offset % PAGE


@given(requests())
@settings(max_examples=examples(40))
def test_memory_that_is_given_is_exactly_the_tensors(request: Request) -> None:
    plan = request.plan()
    for span in plan.spans:
        own = [request.given is not None and name in request.given for name in plan.tensors.names[span.first : span.last]]
        assert own == [span.given] * len(own)
        if span.given:
            assert (span.offset, span.lead) == (None, 0)
        if span.given and len(own) == 1:
            assert (plan.tensors.positions[span.first], span.nbytes) == (0, plan.tensors.nbytes[span.first])


@given(requests())
@settings(max_examples=examples(40))
def test_a_plan_explains_itself_without_reading(request: Request) -> None:
    plan = request.plan()
    text = str(plan)
    assert text.startswith(f"{counted(len(plan.tensors), 'tensor')}, ")
    assert f"reads    {counted(sum(not read.joined for read in plan.reads), 'request')} for " in text
    assert ("surplus" in text) == bool(plan.surplus_nbytes)
    for _, route, reason in plan.routes:
        assert f"{route}: {reason}" in text


def rows_of(plan: Plan, span: Span) -> list[tuple[int, int]]:
    rows = slice(span.first, span.last)
    return list(zip(plan.tensors.positions[rows], plan.tensors.nbytes[rows], strict=True))


def file_nbytes(request: Request, plan: Plan, shard: int, i: int) -> int:
    header, row = request.headers[shard], plan.tensors.rows[i]
    return header.ends[row] - header.starts[row]


# ---- rules, one by one


def small(count: int, *, nbytes: int = 1000) -> list[tuple[str, str, list[int]]]:
    return [(f"t{i}", "U8", [nbytes]) for i in range(count)]


def test_neighbours_share_one_span_and_one_read() -> None:
    plan = request(small(100)).plan()
    assert (len(plan.spans), len(plan.reads)) == (1, 1)
    assert (plan.reads[0].offset, plan.reads[0].nbytes) == (64, 100_000)


@pytest.mark.parametrize(
    ("chosen", "gap", "reads"),
    [
        ([0, 2], 1000, [(64, 3000)]),
        ([0, 2], 999, [(64, 1000), (2064, 1000)]),
        ([0, 3], 1000, [(64, 1000), (3064, 1000)]),
        ([0, 1], 0, [(64, 2000)]),
        ([5], 1 << 20, [(5064, 1000)]),
        ([], 1 << 20, []),
    ],
)
def test_gap_larger_than_the_limit_is_not_read(chosen: list[int], gap: int, reads: list[tuple[int, int]]) -> None:
    ability = SourceAbilities("file", gap_nbytes=gap, cached=True)
    plan = request(small(9), chosen=[chosen], abilities=[ability]).plan()
    assert [(read.offset, read.nbytes) for read in plan.reads] == reads
    assert plan.surplus_nbytes == sum(nbytes for _, nbytes in reads) - 1000 * len(chosen)


@pytest.mark.parametrize(
    ("memory_limit", "expected"),
    [
        (-1, SMALL_NBYTES),
        (0, SMALL_NBYTES),
        (MIB, SMALL_NBYTES),
        (4 * MIB, MIB),
        (16 * MIB, CHUNK_NBYTES - PAGE),
        (1 << 50, CHUNK_NBYTES - PAGE),
    ],
)
def test_tensors_share_a_quarter_of_the_limit_between_a_small_one_and_a_chunk(memory_limit: int, expected: int) -> None:
    assert Limits(1, memory_limit).span_nbytes == expected


def test_a_tensor_larger_than_a_chunk_is_one_span_of_many_reads_that_end_on_pages() -> None:
    plan = request([("a", "U8", [10 * MIB])], data_offset=100, limits=Limits(2, 0)).plan()
    assert [(span.nbytes, span.offset, span.lead) for span in plan.spans] == [(100 + 10 * MIB, 100, 100)]
    assert all(read.offset % PAGE == 0 for read in plan.reads[1:])
    assert [read.nbytes for read in plan.reads] == [CHUNK_NBYTES - 100, CHUNK_NBYTES, 2 * MIB + 100]


def test_a_small_tensor_between_large_ones_has_memory_of_its_own() -> None:
    plan = request([("a", "U8", [MIB]), ("norm", "F32", [64]), ("b", "U8", [MIB])]).plan()
    assert [(span.first, span.last) for span in plan.spans] == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("target", ["BF16", "F64"])
def test_a_small_tensor_that_is_cast_has_memory_of_its_own(target: str) -> None:
    tensors = [("a", "F32", [MIB // 4]), ("norm", "F32", [64]), ("b", "F32", [MIB // 4])]
    plan = request(tensors, casts=[dict.fromkeys(range(3), target)]).plan()
    assert [(span.first, span.last) for span in plan.spans] == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize(("source", "target", "times"), [("F32", "F64", 2), ("U8", "F64", 8), ("F8_E4M3", "F32", 4)])
def test_tensors_that_widen_share_no_more_memory_than_the_limit(source: str, target: str, times: int) -> None:
    tensors = [(f"t{i}", source, [40_000]) for i in range(40)]
    limits = Limits(2, 4 * MIB)
    plan = request(tensors, casts=[dict.fromkeys(range(40), target)], limits=limits).plan()
    assert max(span.nbytes for span in plan.spans) <= limits.span_nbytes
    assert plan.memory_nbytes == times * plan.wanted_nbytes


def test_a_tensor_behind_one_of_narrow_elements_stays_aligned_in_a_file_that_is_not() -> None:
    plan = request([("a", "U8", [4]), ("b", "F32", [8])], data_offset=65).plan()
    assert [position % 4 for position in plan.tensors.positions[1:]] == [0]


def test_tensors_at_odd_offsets_get_memory_that_suits_them() -> None:
    plan = request([("a", "F32", [8]), ("b", "F32", [8])], data_offset=65).plan()
    assert [(span.offset, span.lead) for span in plan.spans] == [(None, 0)]
    assert plan.tensors.positions == [0, 32]


def test_a_tensor_of_exactly_the_small_size_is_large() -> None:
    tensors = [("a", "U8", [SMALL_NBYTES - 1]), ("b", "U8", [SMALL_NBYTES]), ("c", "U8", [SMALL_NBYTES - 1])]
    assert [(span.first, span.last) for span in request(tensors).plan().spans] == [(0, 1), (1, 2), (2, 3)]


def test_tensors_without_bytes_need_no_read() -> None:
    plan = request([("a", "F32", [0]), ("b", "U8", [4, 0])]).plan()
    assert (len(plan.tensors), len(plan.spans), plan.reads) == (2, 1, [])


def test_small_tensors_with_memory_of_their_own_are_read_together() -> None:
    plan = request(small(50), given=frozenset(f"t{i}" for i in range(50))).plan()
    assert (len(plan.spans), len(plan.reads)) == (1, 1)
    assert plan.spans[0].given


def test_one_cast_of_a_run_is_one_copy() -> None:
    plan = request([(f"t{i}", "F32", [64]) for i in range(50)], casts=[dict.fromkeys(range(50), "BF16")]).plan()
    assert [read.copy for read in plan.reads] == [Copy("F32", "BF16")]


def test_neighbours_of_other_dtypes_are_not_cast_together() -> None:
    tensors = [("a", "F32", [64]), ("b", "F16", [64]), ("c", "F32", [64])]
    plan = request(tensors, casts=[{0: "BF16", 1: "BF16"}]).plan()
    assert [(read.copy.source, read.copy.target) if read.copy else None for read in plan.reads] == [
        ("F32", "BF16"),
        ("F16", "BF16"),
        None,
    ]


def test_a_row_slice_is_read_into_place_and_nothing_else_is() -> None:
    plan = request([("a", "F32", [1000, 100])], slices={"a": slice(100, 200)}).plan()
    assert [(read.offset, read.nbytes, read.copy) for read in plan.reads] == [(64 + 40_000, 40_000, None)]
    assert plan.surplus_nbytes == 0


def test_short_columns_are_read_with_what_lies_between() -> None:
    plan = request([("a", "U8", [100, 1000])], slices={"a": (slice(None), slice(0, 500))}).plan()
    assert [read.nbytes for read in plan.reads] == [99 * 1000 + 500]
    assert plan.surplus_nbytes == 99 * 500


def test_long_columns_are_read_one_by_one_without_surplus() -> None:
    plan = request([("a", "U8", [10, 20_000])], slices={"a": (slice(None), slice(0, 10_000))}).plan()
    assert [(read.pieces, read.stride, read.nbytes) for read in plan.reads] == [(10, 20_000, 100_000)]
    assert plan.surplus_nbytes == 0


@pytest.mark.parametrize(
    "index", [5, (0, 0, 0), slice(None, None, 0), (slice(None), 9), "text", 1.5, (..., ...), None, True], ids=repr
)
def test_a_slice_that_does_not_fit_names_the_option(index: Index) -> None:
    with pytest.raises(OptionError) as caught:
        request([("a", "F32", [4, 4])], slices={"a": index}).plan()
    assert caught.value.option == "slices"


@pytest.mark.parametrize("target", ["BF16", "F64"])
@pytest.mark.parametrize(
    "index", [(slice(None), slice(0, 3000)), (slice(None, None, 2), slice(5, 4000)), (slice(None), 1)], ids=str
)
@pytest.mark.parametrize("chunk_nbytes", [PAGE, 8 * PAGE, CHUNK_NBYTES])
def test_columns_that_are_cast_land_where_their_elements_belong(chunk_nbytes: int, index: Index, target: str) -> None:
    ability = SourceAbilities("file", chunk_nbytes=chunk_nbytes, cached=True)
    tensors = [("a", "F32", [60, 5000])]
    check_bytes(request(tensors, abilities=[ability], slices={"a": index}, casts=[{0: target}]))


def test_tensors_that_are_cast_are_not_read_with_what_lies_between() -> None:
    tensors = [("a", "F32", [64]), ("b", "F32", [4]), ("c", "F32", [64])]
    plan = check_bytes(request(tensors, chosen=[[0, 2]], casts=[{0: "BF16", 2: "BF16"}]))
    assert plan.surplus_nbytes == 0


def test_slices_of_tensors_that_are_not_chosen_are_ignored() -> None:
    plan = request(small(3), chosen=[[0]], slices={"t2": 10**9}).plan()
    assert plan.tensors.names == ["t0"]


@pytest.mark.parametrize(
    ("kind", "cached", "columns", "expected"),
    [
        ("memory", None, 1, 8 * KIB),
        ("file", True, 64, 8 * KIB),
        ("file", False, 4, 12 * KIB),
        ("file", False, 8, 32 * KIB),
        ("file", None, 16, 128 * KIB),
        ("file", False, 17, math.inf),
        ("file", False, 64, math.inf),
        ("network", None, 1, CHUNK_NBYTES),
    ],
)
def test_pieces_are_read_one_by_one_where_it_was_measured_to_pay(
    kind: str, cached: bool | None, columns: int, expected: float
) -> None:
    ability = SourceAbilities(kind, cached=cached)
    assert pieces_from(ability, (10, 64), (slice(None), slice(0, columns))) == expected


# ---- routes and words


@pytest.mark.parametrize(
    ("ability", "count", "route"),
    [
        (SourceAbilities("file", cached=True), 0, "none"),
        (SourceAbilities("file", cached=True), 1, "straight"),
        (SourceAbilities("file", cached=False), 1, "straight"),
        (SourceAbilities("memory"), 1, "straight"),
        (SourceAbilities("network"), 1, "straight"),
        (SourceAbilities("file", cached=True, mapped=True), 1, "mapped"),
    ],
)
def test_route_of_a_shard(ability: SourceAbilities, count: int, route: str) -> None:
    found, reason = choose_route(ability, count)
    assert found == route
    assert reason


def test_cached_and_cold_files_are_told_apart_in_the_reason() -> None:
    assert choose_route(SourceAbilities("file", cached=True), 1) != choose_route(SourceAbilities("file", cached=False), 1)


def test_shards_without_wanted_tensors_are_neither_read_nor_counted() -> None:
    headers = [make_header([(f"{i}", "U8", [8])], url=f"models/{i}.safetensors") for i in range(3)]
    plan = make_plan(headers, [[], None, []], [SourceAbilities("file", cached=True)] * 3, Limits(2, MIB))
    assert [route.route for route in plan.routes] == ["none", "straight", "none"]
    assert {read.shard for read in plan.reads} == {1}
    assert "in 1 of 3 shards" in str(plan)


def test_the_repr_of_a_plan_is_its_size_and_not_its_tables() -> None:
    header = make_header([("w", "F32", [64])])
    plan = make_plan([header], [None], [SourceAbilities("file", cached=True)], Limits(2, MIB))
    assert repr(plan) == "<Plan: 1 tensor, 256 B in 1 of 1 shard>"


def test_explanation_names_casts_and_what_was_left_alone() -> None:
    header = make_header([("w", "F32", [64]), ("scale", "F32", [1])])
    plan = make_plan(
        [header],
        [None],
        [SourceAbilities("file", cached=True)],
        Limits(3, MIB),
        casts=[{0: "BF16"}],
        left_alone=[("scale", "its name matches '*scale*'")],
    )
    text = str(plan)
    assert "casts    1 tensor," in text
    assert "scale (its name matches '*scale*')" in text
    assert "3 at a time" in text
    assert "m.safetensors" in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1536, "1.5 KiB"),
        (90_900_000, "86.7 MiB"),
        (3.74 * (1 << 30), "3.74 GiB"),
        (1 << 40, "1 TiB"),
        (5000 << 40, "5e+03 TiB"),
    ],
)
def test_sizes_have_three_digits(nbytes: float, text: str) -> None:
    assert format_nbytes(nbytes) == text


# ---- scale


def test_a_plan_of_232_000_tensors_makes_no_object_for_a_tensor() -> None:
    count, nbytes = 232_000, 4 * KIB
    ends = list(range(64 + nbytes, 64 + (count + 1) * nbytes, nbytes))
    header = Header(
        url="m.safetensors",
        nbytes=ends[-1],
        data_offset=64,
        metadata=None,
        names=[f"layers.{i}.weight" for i in range(count)],
        dtypes=["F32"] * count,
        shapes=[(nbytes // 4,)] * count,
        starts=[end - nbytes for end in ends],
        ends=ends,
        aligned=True,
    )
    tracked = len(gc.get_objects())
    plan = make_plan([header], [None], [SourceAbilities("file", cached=True)], Limits(8, 512 * MIB))
    added = len(gc.get_objects()) - tracked
    per_span = Limits(8, 512 * MIB).span_nbytes // nbytes
    assert len(plan.spans) == len(plan.reads) == -(-count // per_span)
    assert added < 10 * len(plan.spans)
    assert all(map(lambda a, b: a is b, plan.tensors.shapes, header.shapes))
    assert all(map(lambda a, b: a is b, plan.tensors.names, header.names))


@given(st.integers(1, 200 * MIB), st.sampled_from([64 * KIB, MIB, 8 * MIB]))
def test_requests_to_a_store_are_equally_long_and_as_few_as_can_be(nbytes: int, chunk: int) -> None:
    length, unit = read_unit(SourceAbilities("network", chunk_nbytes=chunk), nbytes)
    count = -(-nbytes // length)
    longest = chunk * (2 if nbytes >= LARGE_NBYTES else 1) * 9 / 8
    assert unit == 0
    assert length <= longest + 1
    assert (count - 1) * longest < nbytes
    assert nbytes - (count - 1) * length > length - count - 1


# ---- one request for several spans


def alternating(count: int, *, large: int = MIB, small: int = 4 * KIB) -> list[tuple[str, str, list[int]]]:
    """Large and small tensors in turn, as weights and norms lie in most files."""
    return [(f"{i}", "U8", [small if i % 2 else large]) for i in range(count)]


NETWORK = SourceAbilities("network", chunk_nbytes=8 * MIB, gap_nbytes=MIB)


def test_neighbours_over_a_network_share_a_request_and_no_memory() -> None:
    plan = request(alternating(80), abilities=[NETWORK], limits=Limits(4, 64 * MIB)).plan()
    assert len(plan.spans) == len(plan.reads) == 80
    assert plan.requests == 5  # eight tensors of 1 MiB each, and eight small ones
    assert "5 requests" in str(plan)


def test_requests_are_not_so_long_that_readers_have_none() -> None:
    plan = request(alternating(80), abilities=[NETWORK], limits=Limits(16, 64 * MIB)).plan()
    assert 16 <= plan.requests <= 20


def test_requests_are_not_so_long_that_memory_has_no_room_for_one_of_each_reader() -> None:
    plan = request(alternating(80), abilities=[NETWORK], limits=Limits(4, 10 * MIB)).plan()
    assert 16 <= plan.requests <= 24  # of two tensors of 1 MiB


@pytest.mark.parametrize(
    "ability",
    [SourceAbilities("file", cached=True), SourceAbilities("memory"), replace(NETWORK, block_nbytes=16 * MIB)],
)
def test_only_what_is_far_away_and_not_verified_in_blocks_is_joined(ability: SourceAbilities) -> None:
    plan = request(alternating(8), abilities=[ability]).plan()
    assert plan.requests == len(plan.reads)


def test_what_lies_apart_in_the_file_is_not_joined() -> None:
    plan = request(alternating(8), abilities=[NETWORK], chosen=[[0, 3, 6]]).plan()
    assert plan.requests == len(plan.reads) == 3


@given(requests())
@settings(max_examples=examples(60))
def test_joined_reads_are_one_range_that_is_no_longer_than_a_request(request: Request) -> None:
    plan = request.plan()
    length = 0
    for before, read in zip([None, *plan.reads], plan.reads, strict=False):
        length = length + read.nbytes if read.joined else read.nbytes
        if read.joined:
            assert before is not None
            assert (read.shard, read.offset) == (before.shard, before.offset + before.nbytes)
            assert read.pieces == before.pieces == 1
            assert length <= request.abilities[read.shard].chunk_nbytes * 9 / 8
            assert request.abilities[read.shard].kind == "network"
