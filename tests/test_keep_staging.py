"""Page-locked staging memory that a load leaves for the next one: registered once, never mixed up, given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import KIB, MIB, WatchedSource, random_contents, serialize, wrong
from simulated_gpu import Gpu, needs_compiler, simulated_gpu

import headrace
from headrace.errors import DeviceError

pytestmark = [pytest.mark.timeout(60), needs_compiler]

CONTENTS = random_contents(*[700 * KIB + 512 * i for i in range(20)], 9 * MIB)
DATA = serialize(CONTENTS)
KEPT = headrace.Options(keep_staging="on", memory_limit=8 * MIB, concurrency=2)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated_gpu() as made:
        yield made
        headrace.release_staging()


def load(gpu: Gpu, options: headrace.Options = KEPT, **arguments: Any) -> headrace.Snapshot:
    with headrace.stream(WatchedSource(DATA), device=gpu.device, options=options, **arguments) as tensors:
        kept = dict(tensors)
    assert not wrong(kept, CONTENTS)
    return tensors.stats


def test_the_second_load_registers_nothing_and_brings_its_own_bytes(gpu: Gpu) -> None:
    first = load(gpu)
    registered = gpu.runtime.stats().registrations
    assert registered == gpu.runtime.live().registered > 0
    second = load(gpu)
    assert gpu.runtime.stats().registrations == registered
    assert gpu.runtime.stats().h2d_pageable_nbytes == 0
    assert first.pinned
    assert second.pinned
    assert "by a load before" in second.pinned_how
    assert "by a load before" not in first.pinned_how


def test_what_is_not_asked_for_is_not_kept(gpu: Gpu) -> None:
    load(gpu, headrace.Options(memory_limit=8 * MIB))
    assert gpu.runtime.live().registered == 0


def test_releasing_gives_all_of_it_back_and_may_be_done_twice(gpu: Gpu) -> None:
    load(gpu)
    headrace.release_staging()
    assert gpu.runtime.live().registered == 0
    headrace.release_staging()
    load(gpu)


def test_loads_at_once_do_not_share_and_leave_one_ring(gpu: Gpu) -> None:
    load(gpu)
    alone = gpu.runtime.live().registered
    streams = [headrace.stream(WatchedSource(DATA), device=gpu.device, options=KEPT) for _ in range(2)]
    found = [dict(tensors) for tensors in streams]
    for tensors in streams:
        tensors.close()
    assert not any(wrong(kept, CONTENTS) for kept in found)
    assert gpu.runtime.live().registered == alone


@pytest.mark.parametrize(
    "other",
    [headrace.Options(keep_staging="on", memory_limit=16 * MIB), headrace.Options(keep_staging="on", memory_limit=2 * MIB)],
)
def test_a_load_that_needs_other_slots_or_more_of_them_makes_its_own(gpu: Gpu, other: headrace.Options) -> None:
    load(gpu)
    load(gpu, other)
    load(gpu)
    assert gpu.runtime.violations() == []


def test_a_longer_ring_goes_on_where_the_kept_one_ends(gpu: Gpu) -> None:
    small = random_contents(600 * KIB)
    with headrace.stream(WatchedSource(serialize(small)), device=gpu.device, options=KEPT) as tensors:
        assert not wrong(dict(tensors), small)
    load(gpu)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_load_that_is_left_early_leaves_its_ring_too(gpu: Gpu, taken: int) -> None:
    tensors = headrace.stream(WatchedSource(DATA), device=gpu.device, options=KEPT)
    for _ in range(taken):
        next(tensors)
    tensors.close()
    load(gpu)


def test_after_an_error_of_the_device_nothing_is_kept(gpu: Gpu) -> None:
    gpu.runtime.fail("cudaMemcpyAsync", after=2, code=1)
    with pytest.raises(DeviceError):
        load(gpu)
    assert gpu.runtime.live().registered == 0
    load(gpu)


def test_memory_that_could_not_be_registered_is_not_kept(gpu: Gpu) -> None:
    gpu.runtime.fail("cudaHostRegister", times=-1)
    assert load(gpu).degraded
    gpu.runtime.fail("cudaHostRegister", times=0)
    assert gpu.runtime.live().registered == 0
    assert not load(gpu).degraded
