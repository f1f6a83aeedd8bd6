"""One request for several places: neighbouring spans over a network, each with memory of its own."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import examples, rest_slow
from checkpoints import KIB, MIB, Contents, bytes_of, random_entry, serialize, value_of, wrong
from http_servers import Fault, Server, fault
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace.errors import SourceError
from headrace.sources.base import read_into_each
from headrace.sources.http import Access, HttpSource, Policy, open_http
from headrace.sources.memory import MemorySource
from headrace.testing.sources import pattern

BRISK = Policy(attempts=4, backoff_s=0.0, stall_timeout_s=10.0, connect_timeout_s=10.0, hedge_after_s=None)
DATA = pattern(MIB + 7)
PREFIX = 4 * KIB


@contextlib.contextmanager
def opened(*faults: Fault, policy: Policy = BRISK) -> Iterator[tuple[Server, HttpSource]]:
    with Server(DATA, list(faults)) as server:
        source = open_http(server.url, access=Access(policy=policy), prefix_nbytes=PREFIX)
        with contextlib.closing(source):
            yield server, source


def read_each(source: Any, offset: int, *sizes: int) -> list[bytes]:
    buffers = [bytearray(size) for size in sizes]
    read_into_each(source, offset, [memoryview(buffer) for buffer in buffers])
    return [bytes(buffer) for buffer in buffers]


def expected(offset: int, *sizes: int) -> list[bytes]:
    found = []
    for size in sizes:
        found.append(DATA[offset : offset + size])
        offset += size
    return found


# ---- the source


def test_several_places_take_one_request() -> None:
    with opened() as (server, source):
        sizes = (10_000, 0, 1, 300_000, 77)
        assert read_each(source, PREFIX + 5, *sizes) == expected(PREFIX + 5, *sizes)
        assert [(seen.start, seen.end) for seen in server.seen[1:]] == [(PREFIX + 5, PREFIX + 5 + sum(sizes))]


@given(st.integers(0, 2 * PREFIX), st.lists(st.integers(0, 3 * PREFIX), max_size=6))
@settings(max_examples=examples(25))
def test_what_came_with_the_opening_is_not_asked_for_again(offset: int, sizes: list[int]) -> None:
    with opened() as (server, source):
        assert read_each(source, offset, *sizes) == expected(offset, *sizes)
        end = offset + sum(sizes)
        assert [(seen.start, seen.end) for seen in server.seen[1:]] == (
            [(max(offset, PREFIX), end)] if end > PREFIX and sizes else []
        )


def test_a_failure_half_way_goes_on_at_the_byte_in_the_right_place() -> None:
    with opened(fault("short", after=150_000, min_start=PREFIX, times=1)) as (server, source):
        sizes = (100_000, 100_000, 100_000)
        assert read_each(source, PREFIX, *sizes) == expected(PREFIX, *sizes)
        assert server.seen[-1].start == PREFIX + 150_000


def test_a_second_request_for_a_slow_range_fills_all_places() -> None:
    slow = fault("stall", after=150_000, min_start=PREFIX + 500_000, times=1)
    with opened(slow, policy=replace(BRISK, hedge_after_s=0.05)) as (_, source):
        for turn in range(5):
            read_each(source, PREFIX + turn * 90_000, 90_000)
        sizes = (100_000, 100_000, 100_000)
        assert read_each(source, PREFIX + 500_000, *sizes) == expected(PREFIX + 500_000, *sizes)
        assert (source.traffic.hedges, source.traffic.failed) == (1, 0)


def test_places_beyond_the_end_are_refused() -> None:
    with opened() as (server, source):
        with pytest.raises(SourceError):
            read_each(source, len(DATA) - 10, 5, 6)
        assert len(server.seen) == 1


def test_a_source_without_such_requests_is_read_place_by_place() -> None:
    assert read_each(MemorySource(DATA), 3, 5, 0, 9) == expected(3, 5, 0, 9)


# ---- loads


def layers(count: int, *, large: int = 512 * KIB) -> Contents:
    """A weight, a norm and a scale in turn."""
    found: Contents = {}
    for i in range(count):
        found[f"{i}.weight"] = random_entry("F32", (large // 4,), seed=i)
        found[f"{i}.norm"] = random_entry("F32", (256 + i,), seed=100 + i)
        found[f"{i}.scale"] = random_entry("F16", (3,), seed=200 + i)
    return found


CONTENTS = layers(24)


@contextlib.contextmanager
def served(contents: Contents = CONTENTS) -> Iterator[Server]:
    with Server(serialize(contents)) as server:
        yield server


@pytest.mark.parametrize(
    "arguments",
    rest_slow(
        [
            {},
            {"memory_limit": 0},
            {"names": ["3.weight", "3.norm", "4.norm", "5.weight", "5.norm"]},
            {"memory_limit": 3 * MIB},
            {"concurrency": 1},
            {"ownership": "copied"},
            {"order": "file"},
            {"names": "*.norm"},
        ],
        quick=range(1, 3),
    ),
    ids=str,
)
def test_every_tensor_arrives_right(arguments: dict[str, Any]) -> None:
    with served() as server, headrace.stream(server.url, **arguments) as stream:
        found = dict(stream)
    assert found.keys() <= CONTENTS.keys()
    assert len(found) == stream.stats.total_tensors
    assert not wrong(found, CONTENTS)


def test_a_load_makes_the_requests_that_its_plan_names() -> None:
    with served() as server:
        plan = headrace.plan(server.url, concurrency=4)
        before = len(server.seen)
        headrace.load(server.url, concurrency=4)
        assert plan.requests < len(plan.reads) / 4
        assert len(server.seen) - before == 1 + plan.requests  # the opening


@pytest.mark.slow
def test_a_limit_that_has_no_room_for_all_of_a_request_makes_shorter_ones() -> None:
    with served() as server:
        before = len(server.seen)
        with headrace.stream(server.url, memory_limit=0, concurrency=1) as stream:
            assert not wrong(dict(stream), CONTENTS)
        assert stream.stats.peak_nbytes < 16 * MIB
        assert len(server.seen) - before > 24


@pytest.mark.parametrize("rule", ["bfloat16", {"*.norm": "float64"}], ids=str)
def test_what_is_converted_shares_requests_too(rule: Any) -> None:
    contents = {name: entry for name, entry in CONTENTS.items() if not name.endswith("scale")}
    with served(contents) as server:
        found = headrace.load(server.url, dtype=rule, concurrency=4)
        requests = len(server.seen)
    for name, entry in contents.items():
        dtype = getattr(torch, rule if isinstance(rule, str) else rule["*.norm"] if name.endswith("norm") else "float32")
        assert bytes_of(found[name]) == bytes_of(value_of(entry).to(dtype))
    assert requests < len(contents) / 2


def test_given_tensors_are_filled_where_they_lie() -> None:
    into = {name: torch.empty_like(value_of(entry)) for name, entry in CONTENTS.items()}
    with served() as server:
        headrace.load(server.url, into=into, concurrency=4)
        assert len(server.seen) < len(CONTENTS) / 2
    assert not wrong(into, CONTENTS)


def test_a_small_tensor_that_is_kept_keeps_no_large_one() -> None:
    with served() as server:
        stream = headrace.stream(server.url, memory_limit=4 * MIB)
        kept = {}
        with stream:
            for name, tensor in stream:
                if name.endswith("norm"):
                    kept[name] = tensor
                del tensor
    gc.collect()
    assert sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept.values()}.values()) < MIB
    assert not wrong(kept, CONTENTS)


def test_an_error_names_the_whole_range_that_was_asked_for() -> None:
    with Server(serialize(CONTENTS), [fault("status", code=404, min_start=4 * MIB)]) as server:
        plan = headrace.plan(server.url, concurrency=2)
        with pytest.raises(SourceError) as caught:
            headrace.load(server.url, concurrency=2)
    assert caught.value.nbytes is not None
    assert caught.value.nbytes > max(read.nbytes for read in plan.reads)


def test_a_trace_shows_one_read_for_a_request(tmp_path: Path) -> None:
    with served() as server:
        plan = headrace.plan(server.url, concurrency=4)
        headrace.load(server.url, concurrency=4, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "read" for event in events) == plan.requests
