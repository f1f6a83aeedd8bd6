"""Loads to a device: bytes, copies, ownership and trouble, on a simulated GPU that copies as late as it may.

Every test ends with a look at the runtime: no rule of CUDA's was broken, and nothing is left (tests/simulated_gpu.py).
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import queue
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import rest_slow
from checkpoints import (
    KIB,
    MIB,
    Contents,
    Entry,
    WatchedSource,
    bytes_of,
    mixed_contents,
    nth_data_read,
    random_contents,
    random_entry,
    serialize,
    value_of,
    write,
    wrong,
)
from simulated_gpu import Gpu, needs_compiler, simulated_gpu

import headrace
from headrace._dtypes import DTYPES
from headrace._engine import Engine
from headrace.errors import DeviceError, LoadError, OptionError, PinningError, SourceChangedError, SourceError, StreamError
from headrace.testing import Block, Change, Fault, Raise

pytestmark = [pytest.mark.timeout(60), needs_compiler]

MIXED = mixed_contents()
MIXED_BYTES = serialize(MIXED)
LARGE = random_contents(*[700 * KIB + 512 * i for i in range(40)])
LARGE_BYTES = serialize(LARGE)
TIGHT = {"memory_limit": 0, "concurrency": 4}


@pytest.fixture(params=["manual", "random"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with simulated_gpu(request.param) as made:
        yield made


@pytest.fixture
def lazy() -> Iterator[Gpu]:
    """A device that carries out nothing before somebody waits for it."""
    with simulated_gpu() as made:
        yield made


def checked(gpu: Gpu, contents: Contents, data: bytes, **arguments: Any) -> headrace.Snapshot:
    """Load all, compare every byte, drop all."""
    with headrace.stream(WatchedSource(data), device=gpu.device, **arguments) as tensors:
        kept = dict(tensors)
    assert kept.keys() == contents.keys()
    assert not wrong(kept, contents)
    return tensors.stats


# ---- what comes out


@pytest.mark.parametrize("data_start", rest_slow([0, 1, 4, 6], quick=(0, 1)))
@pytest.mark.parametrize("arguments", [{}, TIGHT, {"memory_limit": 3 * MIB, "concurrency": 1, "order": "file"}], ids=str)
def test_unaligned_data_arrives_right(gpu: Gpu, data_start: int, arguments: dict[str, Any]) -> None:
    checked(gpu, MIXED, serialize(MIXED, data_start=data_start), **arguments)


@pytest.mark.parametrize("direct_io", ["on", "off"])
def test_files_arrive_right(gpu: Gpu, tmp_path: Path, direct_io: str) -> None:
    contents = MIXED | random_contents(5 * MIB + 1, 9 * MIB + 4095, 77)
    path = write(tmp_path / "m.safetensors", contents, data_start=1)
    for arguments in ({}, {"memory_limit": 0}):
        assert not wrong(headrace.load(path, device=gpu.device, direct_io=direct_io, **arguments), contents)


def test_dtypes_and_shapes_are_those_of_a_load_to_the_host(gpu: Gpu) -> None:
    contents = MIXED | {dtype: random_entry(dtype, (5, 8)) for dtype in DTYPES} | {"scalar": random_entry("I64", ())}
    data = serialize(contents)
    expected = headrace.load(WatchedSource(data))
    loaded = headrace.load(WatchedSource(data), device=gpu.device)
    assert list(loaded) == list(expected)
    for name, tensor in loaded.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert bytes_of(tensor.view(torch.uint8) if tensor.dim() else tensor) == contents[name].data


def test_a_checkpoint_of_nothing_and_one_of_empty_tensors_end_at_once(lazy: Gpu) -> None:
    assert headrace.load(WatchedSource(serialize({})), device=lazy.device) == {}
    only_empty = {"a": random_entry("F32", (0,)), "b": random_entry("F32", (0, 4))}
    loaded = headrace.load(WatchedSource(serialize(only_empty)), device=lazy.device)
    assert [tuple(tensor.shape) for tensor in loaded.values()] == [(0,), (0, 4)]
    assert lazy.runtime.stats().h2d_copies == 0


INDEXES = [
    (slice(1, 5),),
    (slice(None), slice(3, 90)),
    (slice(None, None, 2), slice(3, 90)),
    (slice(None, None, -1), slice(5, 800)),
    (2,),
    (slice(0, 0),),
]


@pytest.mark.parametrize("index", INDEXES, ids=str)
@pytest.mark.parametrize("dtype", rest_slow([None, "F16", "F64"], quick=(0, 1)))
@pytest.mark.parametrize("cast_at", ["auto", "host", "device"])
def test_slices_are_those_of_a_load_to_the_host(lazy: Gpu, index: Any, dtype: str | None, cast_at: str) -> None:
    contents = {"a": random_entry("F32", (600, 1024), seed=1), "b": random_entry("U8", (3,)), "c": random_entry("F32", (6, 1024))}
    data = serialize(contents, data_start=1)
    arguments: dict[str, Any] = {"slices": {"a": index, "c": index}, "dtype": {"a": dtype, "c": dtype}, "memory_limit": MIB}
    expected = headrace.load(WatchedSource(data), **arguments)
    loaded = headrace.load(WatchedSource(data), device=lazy.device, cast_at=cast_at, **arguments)
    for name, tensor in loaded.items():
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape)
        assert bytes_of(tensor) == bytes_of(expected[name])


@pytest.mark.parametrize("index", [slice(None, None, -1), slice(0, 1), (slice(None), slice(9, None))], ids=str)
@pytest.mark.parametrize("cast_at", ["host", "device"])
@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_rows_that_are_longer_than_a_slot_come_from_odd_offsets_whole(lazy: Gpu, index: Any, cast_at: str, dtype: str) -> None:
    values = torch.arange(2_400_000).remainder(2047).half().view(2, -1)  # exact in every dtype
    data = serialize({"w": Entry("F16", (2, 1_200_000), values.view(torch.uint8).numpy().tobytes())}, data_start=1)
    arguments: dict[str, Any] = {"slices": {"w": index}, "dtype": {"w": dtype}, "memory_limit": 0, "cast_at": cast_at}
    for device in (lazy.device, "cpu"):
        found = headrace.load(WatchedSource(data), device=device, **arguments)["w"]
        expected = values.flip(0) if index == slice(None, None, -1) else values[index]
        assert bytes_of(found) == bytes_of(expected.to(found.dtype))
        assert str(found.dtype) == {"F16": "torch.float16", "F32": "torch.float32"}[dtype]
        del found


# ---- copies


def test_each_chunk_is_one_copy_out_of_page_locked_memory(gpu: Gpu) -> None:
    contents = random_contents(*[40 * KIB + 16 * i for i in range(300)], 5 * MIB, 17 * MIB + 16)
    data = serialize(contents, data_start=1)
    plan = headrace.plan(WatchedSource(data), device=gpu.device, memory_limit=8 * MIB)
    stats = checked(gpu, contents, data, memory_limit=8 * MIB, concurrency=3)
    seen = gpu.runtime.stats()
    assert seen.h2d_copies == stats.device_copies == len(plan.reads) < 40
    assert seen.h2d_pageable_nbytes == 0
    assert seen.h2d_pinned_nbytes == stats.sent_nbytes == stats.read_nbytes == sum(len(entry.data) for entry in contents.values())
    assert (stats.pinned, stats.degraded) == (True, ())


def test_a_tensor_larger_than_the_ring_streams_through_it(gpu: Gpu) -> None:
    contents = random_contents(23 * MIB + 5)
    stats = checked(gpu, contents, serialize(contents), **TIGHT)
    assert stats.staging_nbytes < 3 * MIB
    assert gpu.runtime.stats().peak_pinned_nbytes < 3 * MIB
    assert stats.device_copies >= 23


def test_a_short_load_takes_a_short_ring(lazy: Gpu) -> None:
    contents = random_contents(5 * KIB)
    assert checked(lazy, contents, serialize(contents)).staging_nbytes <= 16 * KIB


def test_tensors_begin_where_vector_loads_may_and_elements_where_they_must(gpu: Gpu) -> None:
    contents = {"odd": random_entry("U8", (4099,)), "scale": random_entry("F32", (1,)), "wide": random_entry("F64", (3,))}
    contents |= {f"w{i}": random_entry("BF16", (33, 65 + i)) for i in range(5)}
    loaded = headrace.load(WatchedSource(serialize(contents, data_start=3)), device=gpu.device)
    assert not wrong(loaded, contents)
    for tensor in loaded.values():
        assert tensor.data_ptr() % (16 if tensor.nbytes >= 4096 else tensor.element_size()) == 0


def test_device_memory_ahead_of_the_caller_is_bounded() -> None:
    limit, contents = 4 * MIB, random_contents(*[700 * KIB] * 40)
    with simulated_gpu("timed") as gpu:
        with headrace.stream(WatchedSource(serialize(contents)), device=gpu.device, memory_limit=limit) as tensors:
            for item in tensors:
                del item
            stats = tensors.stats
        assert 0 < stats.device_peak_nbytes <= limit
        assert gpu.runtime.stats().peak_device_nbytes <= 2 * limit


# ---- dtypes


FLOATS = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]


@pytest.mark.parametrize("cast_at", ["auto", "host", "device"])
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_casts_have_the_bits_of_to(lazy: Gpu, source: str, target: str, cast_at: str) -> None:
    contents = {f"t{i}": random_entry(source, (3, 1000 + 7 * i), seed=i) for i in range(6)} | {
        "empty": random_entry(source, (0,))
    }
    loaded = headrace.load(
        WatchedSource(serialize(contents, data_start=1)),
        device=lazy.device,
        dtype=dict.fromkeys(contents, target),
        cast_at=cast_at,
    )
    kind = getattr(torch, DTYPES[target].torch or "")
    for name, entry in contents.items():
        assert loaded[name].dtype == kind
        assert bytes_of(loaded[name].view(torch.uint8)) == bytes_of(value_of(entry).to(kind).view(torch.uint8)), name


NARROW, WIDE = 12e9, 60e9  # bytes per second of a bus


@pytest.mark.parametrize(
    ("cast_at", "bus", "narrowed"),
    [("auto", NARROW, 2), ("auto", WIDE, 1), ("auto", None, 1), ("host", WIDE, 2), ("device", NARROW, 1)],
)
def test_narrowing_casts_send_half_the_bytes_where_the_bus_is_narrow_and_others_what_is_in_the_file(
    lazy: Gpu, monkeypatch: pytest.MonkeyPatch, cast_at: str, bus: float | None, narrowed: int
) -> None:
    monkeypatch.setattr("headrace._limits._bus_rate", lambda: bus)
    contents = random_contents(*[MIB] * 4, 9 * MIB, dtype="F32")
    total = sum(len(entry.data) for entry in contents.values())
    widened = total if cast_at != "host" else 2 * total
    for dtype, expected in (("BF16", total // narrowed), ("F64", widened), ("F32", total)):
        before = lazy.runtime.stats()
        with headrace.stream(
            WatchedSource(serialize(contents)), device=lazy.device, dtype=dtype, memory_limit=8 * MIB, cast_at=cast_at
        ) as tensors:
            for name, tensor in tensors:
                kind = getattr(torch, str(DTYPES[dtype].torch))
                assert bytes_of(tensor) == bytes_of(value_of(contents[name]).to(kind))
                del tensor
        assert lazy.runtime.stats().h2d_pinned_nbytes - before.h2d_pinned_nbytes == tensors.stats.sent_nbytes == expected
        assert lazy.runtime.stats().h2d_pageable_nbytes == 0


def test_one_conversion_serves_a_run_of_neighbours(lazy: Gpu) -> None:
    contents = random_contents(*[20 * KIB] * 100, dtype="BF16")
    loaded = headrace.load(WatchedSource(serialize(contents)), device=lazy.device, dtype="F32")
    assert all(bytes_of(loaded[name]) == bytes_of(value_of(entry).float()) for name, entry in contents.items())
    assert lazy.runtime.stats().kernels == 1


def test_scales_of_quantized_weights_arrive_bit_by_bit(lazy: Gpu) -> None:
    contents = {
        "a.weight": random_entry("F8_E4M3", (64, 64)),
        "a.weight_scale": random_entry("F32", (64,), seed=1),
        "b.weight": random_entry("F32", (64, 64), seed=2),
        "b.input_scale": random_entry("F32", (), seed=3),
    }
    loaded = headrace.load(WatchedSource(serialize(contents)), device=lazy.device, dtype="BF16")
    assert loaded["b.weight"].dtype == torch.bfloat16
    del loaded["b.weight"]
    assert [
        name
        for name in loaded
        if bytes_of(loaded[name].view(torch.uint8) if loaded[name].dim() else loaded[name]) != contents[name].data
    ] == []


# ---- a tensor you were handed is yours


def test_what_is_held_never_changes(gpu: Gpu) -> None:
    held = {}
    with headrace.stream(WatchedSource(LARGE_BYTES), device=gpu.device, **TIGHT) as tensors:
        for i, (name, tensor) in enumerate(tensors):
            if i % 3 == 0:
                held[name] = tensor.view(-1)[:]
            del tensor
    assert len(held) == 14
    assert not wrong(held, LARGE)


def test_eight_threads_that_drop_late_see_right_bytes(gpu: Gpu) -> None:
    work: queue.SimpleQueue[tuple[str, torch.Tensor] | None] = queue.SimpleQueue()
    found: dict[str, bytes] = {}

    def consume() -> None:
        held = []
        while (item := work.get()) is not None:
            held.append(item)
            if len(held) > 2:
                name, tensor = held.pop(0)
                found[name] = bytes_of(tensor)
            del item
        found.update((name, bytes_of(tensor)) for name, tensor in held)

    threads = [threading.Thread(target=consume) for _ in range(8)]
    for thread in threads:
        thread.start()
    with headrace.stream(WatchedSource(LARGE_BYTES), device=gpu.device, memory_limit=2 * MIB) as tensors:
        for item in tensors:
            work.put(item)
            del item
    for _ in threads:
        work.put(None)
    for thread in threads:
        thread.join(30)
    assert found == {name: entry.data for name, entry in LARGE.items()}


@pytest.mark.parametrize("arguments", [{}, {"ownership": "copied"}, {"dtype": {"layer.*.weight": "F32"}}], ids=str)
def test_each_tensor_has_a_storage_and_a_version_of_its_own(gpu: Gpu, arguments: dict[str, Any]) -> None:
    with torch.inference_mode():
        loaded = headrace.load(WatchedSource(MIXED_BYTES), device=gpu.device, **arguments)
    for tensor in loaded.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert tensor.storage_offset() == 0
        assert not tensor.is_inference()
    before = {name: tensor._version for name, tensor in loaded.items()}
    loaded["layer.3.norm"].add_(1)
    assert [name for name, tensor in loaded.items() if tensor._version != before[name]] == ["layer.3.norm"]
    assert len(pickle.dumps(loaded["layer.4.norm"])) < 4 * KIB


def test_memory_is_not_used_again_before_the_callers_own_copies_are_done(lazy: Gpu) -> None:
    device, runtime = lazy.device, lazy.runtime
    contents = random_contents(*[700 * KIB] * 30)
    streams = [device.allocator.new_stream() for _ in contents]
    targets: dict[str, torch.Tensor] = {}
    with headrace.stream(WatchedSource(serialize(contents)), device=device, **TIGHT) as tensors:
        for stream in streams:
            with device.allocator.stream(stream):
                name, tensor = next(tensors)
                targets[name] = device.tensor(torch.zeros(tensor.nbytes, dtype=torch.uint8))
                device.library.copy_on_device(targets[name].data_ptr(), tensor.data_ptr(), tensor.nbytes, stream)
                del tensor  # while that copy has not begun
    assert not runtime.violations()
    for stream in streams:
        device.library.drain(stream)
    assert not wrong(targets, contents)


def test_a_caller_who_changes_its_stream_in_the_middle_of_a_span_waits_there_too(lazy: Gpu) -> None:
    contents = random_contents(*[4 * KIB] * 8)
    device = lazy.device
    other = device.allocator.new_stream()
    with headrace.stream(WatchedSource(serialize(contents)), device=device) as tensors:
        next(tensors)
        waits = lazy.runtime.calls("cudaStreamWaitEvent")
        next(tensors)
        assert lazy.runtime.calls("cudaStreamWaitEvent") == waits
        with device.allocator.stream(other):
            next(tensors)
            next(tensors)
        assert lazy.runtime.calls("cudaStreamWaitEvent") == waits + 1


def test_copied_tensors_hold_no_memory_of_others(gpu: Gpu) -> None:
    contents = random_contents(*[100 * KIB] * 50)
    with headrace.stream(WatchedSource(serialize(contents)), device=gpu.device, ownership="copied") as tensors:
        kept = {name: tensor for name, tensor in tensors if name == "t007"}
    gc.collect()
    gpu.device.allocator.collect()
    assert sum(block.nbytes for block in gpu.device.allocator.blocks.values()) <= 101 * KIB
    assert not wrong(kept, contents)


def test_borrowed_tensors_that_are_kept_raise_and_dropped_ones_do_not(gpu: Gpu) -> None:
    with headrace.stream(WatchedSource(LARGE_BYTES), device=gpu.device, ownership="borrowed") as tensors:
        for name, tensor in tensors:
            assert bytes_of(tensor) == LARGE[name].data
        del tensor
    with (
        headrace.stream(WatchedSource(LARGE_BYTES), device=gpu.device, ownership="borrowed") as tensors,
        pytest.raises(StreamError),
    ):
        _ = [tensor[3:5] for _, tensor in tensors]


def test_given_tensors_may_be_kept_among_borrowed_ones(gpu: Gpu) -> None:
    given = {name: gpu.device.tensor(torch.zeros(len(entry.data), dtype=torch.uint8)) for name, entry in list(LARGE.items())[::2]}
    with headrace.stream(WatchedSource(LARGE_BYTES), device=gpu.device, into=given, ownership="borrowed", **TIGHT) as tensors:
        for name, tensor in tensors:
            assert bytes_of(tensor) == LARGE[name].data
    del tensor
    assert not wrong(given, {name: LARGE[name] for name in given})


# ---- given tensors


@pytest.mark.parametrize("concurrency", [1, 8])
def test_into_copies_straight_into_given_tensors(gpu: Gpu, concurrency: int) -> None:
    contents = MIXED | random_contents(3 * MIB, 300 * KIB)
    given = {name: gpu.device.tensor(torch.zeros_like(value_of(entry))) for name, entry in contents.items()}
    versions = {name: tensor._version for name, tensor in given.items()}
    before = gpu.runtime.stats()
    loaded = headrace.load(
        WatchedSource(serialize(contents)), device=gpu.device, into=given, concurrency=concurrency, memory_limit=2 * MIB
    )
    assert all(loaded[name] is given[name] for name in contents)
    assert not wrong(given, contents)
    assert all(given[name]._version > version for name, version in versions.items())
    after = gpu.runtime.stats()
    assert after.device_allocations == before.device_allocations, "no device memory but the caller's"
    assert after.d2d_copies == before.d2d_copies
    assert after.h2d_pageable_nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("rule", [None, "BF16"])
def test_into_a_tensor_of_another_dtype_converts_once(lazy: Gpu, dtype: Any, strided: bool, rule: str | None) -> None:
    contents = {"large": random_entry("F32", (300, 1024), seed=1), "other": random_entry("F32", (7,))}
    target = lazy.device.tensor(torch.zeros((600, 1024) if strided else (300, 1024), dtype=dtype))
    target = target[::2] if strided else target
    headrace.load(WatchedSource(serialize(contents)), device=lazy.device, into={"large": target}, dtype=rule)
    assert bytes_of(target) == bytes_of(value_of(contents["large"]).to(dtype))


@pytest.mark.parametrize("index", [slice(1, 4), (slice(None), slice(1, 3)), (slice(None, None, -2), 3)], ids=str)
def test_into_takes_slices(lazy: Gpu, index: Any) -> None:
    entry = random_entry("F32", (7, 5))
    expected = torch.from_numpy(value_of(entry).numpy()[index].copy())
    target = lazy.device.tensor(torch.zeros_like(expected))
    headrace.load(WatchedSource(serialize({"t": entry})), device=lazy.device, slices={"t": index}, into={"t": target})
    assert bytes_of(target) == bytes_of(expected)


def test_into_waits_for_what_the_callers_stream_still_does_to_the_tensor(lazy: Gpu) -> None:
    entry = random_entry("U8", (MIB,))
    given = lazy.device.tensor(torch.zeros(MIB, dtype=torch.uint8))
    spoiled: list[int] = []

    def spoil(memory: memoryview) -> None:
        spoiled.append(1)
        memory[:] = bytes(memory.nbytes)

    assert lazy.runtime.launch(0, spoil, (given.data_ptr(), MIB)) == 0
    headrace.load(WatchedSource(serialize({"t": entry})), device=lazy.device, into={"t": given})
    assert spoiled == [1]
    assert bytes_of(given) == entry.data


def test_into_refuses_tensors_that_lie_elsewhere(lazy: Gpu) -> None:
    source = WatchedSource(LARGE_BYTES)
    with pytest.raises(OptionError, match="t003") as caught:
        headrace.stream(source, device=lazy.device, into={"t003": torch.zeros(len(LARGE["t003"].data), dtype=torch.uint8)})
    assert caught.value.option == "into"
    assert source.closed


def test_a_failed_load_into_says_exactly_what_was_filled(gpu: Gpu) -> None:
    given = {name: gpu.device.tensor(torch.zeros(len(entry.data), dtype=torch.uint8)) for name, entry in LARGE.items()}
    fault = SourceError("the disk is gone", url="memory:")
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(11), Raise(fault))])
    with pytest.raises(LoadError) as caught:
        headrace.load(source, device=gpu.device, into=given, memory_limit=0, concurrency=4)
    right = [name for name in LARGE if bytes_of(given[name]) == LARGE[name].data]
    assert caught.value.__cause__ is fault
    assert sorted(caught.value.filled) == right


# ---- trouble


def opened(gpu: Gpu, *faults: Fault, **arguments: Any) -> tuple[WatchedSource, headrace.TensorStream]:
    source = WatchedSource(LARGE_BYTES, faults)
    return source, headrace.stream(source, device=gpu.device, **(TIGHT | arguments))


def assert_over(source: WatchedSource) -> None:
    assert source.closed
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-")]
    assert source.living == 0


def keep_all(tensors: Iterator[tuple[str, torch.Tensor]], kept: dict[str, torch.Tensor]) -> None:
    kept.update(tensors)


@pytest.mark.parametrize("taken", [0, 1, 5, 40])
def test_a_caller_who_stops_early_and_closes_twice(gpu: Gpu, taken: int) -> None:
    source, tensors = opened(gpu)
    kept = dict(next(tensors) for _ in range(taken))
    tensors.close()
    tensors.close()
    assert_over(source)
    assert gpu.runtime.live().registered == gpu.runtime.live().events == 0
    assert not wrong(kept, LARGE)


@pytest.mark.parametrize("step", ["a span is handed over", "a stream is another one"])
def test_events_are_there_as_long_as_the_caller_waits_for_one(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    # Found by the soak: closed by another thread at this moment, the stream gave an event back that the caller had in hand.
    _, tensors = opened(gpu)
    if step == "a stream is another one":
        next(tensors)
    closing = threading.Thread(target=tensors.close)
    gone, waited_for = threading.Event(), list[Any]()
    destroy, wait = type(gpu.device).destroy, type(gpu.device).hand_over

    def tell(device: Any, events: Any) -> None:
        destroy(device, events)
        if set(waited_for) & set(events):
            gone.set()

    def close_before(device: Any, event: Any, buffers: Any) -> None:
        monkeypatch.setattr(type(gpu.device), "hand_over", wait)
        waited_for.append(event)
        closing.start()
        assert not gone.wait(0.2)
        wait(device, event, buffers)

    monkeypatch.setattr(type(gpu.device), "destroy", tell)
    monkeypatch.setattr(type(gpu.device), "hand_over", close_before)
    with gpu.device.allocator.stream(gpu.device.allocator.new_stream()):
        name, tensor = next(tensors)
    closing.join()
    assert gone.is_set()
    assert not wrong({name: tensor}, LARGE)
    with pytest.raises(StreamError, match="closed"):
        next(tensors)


def test_a_caller_who_raises_in_the_loop(gpu: Gpu) -> None:
    source, tensors = opened(gpu)

    def fail_at_five() -> None:
        with tensors:
            for i, item in enumerate(tensors):
                del item
                if i == 5:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_at_five()
    assert_over(source)
    assert gpu.runtime.live().registered == 0


def test_an_abandoned_stream_ends_with_its_last_reference(gpu: Gpu) -> None:
    source, tensors = opened(gpu)
    next(tensors)
    del tensors
    assert_over(source)
    assert gpu.runtime.live().registered == 0


def test_an_abandoned_stream_in_a_cycle_is_ended_by_a_collector_in_another_thread(gpu: Gpu) -> None:
    source, tensors = opened(gpu)
    cycle: list[Any] = [iter(tensors), tensors]
    next(cycle[0])
    cycle.append(cycle)
    del cycle, tensors
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join(30)
    assert_over(source)
    assert gpu.runtime.live().registered == 0


ERRORS = [SourceError("broken", url="memory:"), OSError(5, "Input/output error"), MemoryError(), SystemExit(3)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("read", rest_slow([0, 13, 39], quick=(1,)))
def test_a_read_that_fails_ends_the_load_with_its_error_after_the_copies(
    gpu: Gpu, error: BaseException, concurrency: int, read: int
) -> None:
    source, tensors = opened(gpu, Fault(nth_data_read(read), Raise(error)), concurrency=concurrency)
    kept: dict[str, torch.Tensor] = {}
    with pytest.raises(type(error)) as caught:
        keep_all(tensors, kept)
    assert caught.value is error
    assert gpu.runtime.live().registered == gpu.runtime.live().events == 0
    assert not wrong(kept, LARGE)
    kept.clear()
    assert_over(source)


def test_a_read_that_fails_in_the_middle_of_a_tensor_ends_the_load(gpu: Gpu) -> None:
    contents = random_contents(8 * MIB, 8 * MIB)
    source = WatchedSource(serialize(contents), [Fault(nth_data_read(5), Raise(SourceError("broken", url="memory:")))])
    with pytest.raises(SourceError):
        headrace.load(source, device=gpu.device, memory_limit=MIB)
    assert_over(source)


def test_nothing_of_a_source_that_changed_is_handed_out_afterwards(gpu: Gpu) -> None:
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(7), Change())])
    taken: dict[str, torch.Tensor] = {}
    with pytest.raises(SourceChangedError):
        keep_all(headrace.stream(source, device=gpu.device, memory_limit=0, concurrency=1), taken)
    assert list(taken) == list(LARGE)[:7]
    assert not wrong(taken, LARGE)


def test_close_with_copies_under_way_waits_for_them(lazy: Gpu) -> None:
    stuck = Block()
    source, tensors = opened(lazy, Fault(nth_data_read(3), stuck), memory_limit=16 * MIB, concurrency=1)
    with tensors:
        assert stuck.entered.wait(30)
        stats = lazy.runtime.stats()
        stuck.release.set()
    assert (stats.h2d_copies, stats.finished) == (3, 0), "nobody has waited for a copy"
    assert lazy.runtime.stats().finished == lazy.runtime.stats().h2d_copies
    assert_over(source)


@pytest.mark.leaky_ok(reason="a reader that its source holds is left behind until it is let go")
@pytest.mark.slow
def test_a_reader_that_comes_back_after_the_end_copies_nothing(lazy: Gpu) -> None:
    stuck = Block()
    source, tensors = opened(lazy, Fault(nth_data_read(3), stuck), memory_limit=16 * MIB, concurrency=1)
    with tensors:
        assert stuck.entered.wait(30)
    copies = lazy.runtime.stats().h2d_copies
    stuck.release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("headrace-"):
            thread.join(30)
    assert lazy.runtime.stats().h2d_copies == copies
    assert_over(source)


@pytest.mark.parametrize(
    ("function", "after"),
    [
        *rest_slow([("cudaMemcpyAsync", after) for after in (0, 3, 9)], quick=(0,)),
        *rest_slow([("cudaEventRecord", after) for after in (0, 3, 9)], quick=(1,)),
        *rest_slow([("cudaStreamWaitEvent", after) for after in (0, 3, 9)], quick=(2,)),
        ("cudaEventCreateWithFlags", 0),
        ("cudaEventCreateWithFlags", 2),
    ],
)
def test_a_call_that_fails_ends_the_load_with_a_device_error(gpu: Gpu, function: str, after: int) -> None:
    source, tensors = opened(gpu)
    gpu.runtime.fail(function, after=after, code=719)
    with pytest.raises(DeviceError) as caught:
        keep_all(tensors, {})
    assert caught.value.device == "simulated:0"
    assert function in str(caught.value)
    assert_over(source)
    assert gpu.runtime.live().registered == 0


@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaEventRecord"])
def test_readers_that_fail_after_the_device_and_are_heard_first_say_the_same(
    gpu: Gpu, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail, failing, heard = Engine.fail, threading.Lock(), threading.Event()

    def late(self: Engine, error: BaseException) -> None:
        if failing.acquire(blocking=False):
            heard.wait(1)  # the first to fail is the last to say so, where another one fails as well
        fail(self, error)
        heard.set()

    monkeypatch.setattr(Engine, "fail", late)
    source, tensors = opened(gpu, memory_limit=64 * MIB)
    gpu.runtime.fail(function, after=2, code=719)
    with pytest.raises(DeviceError, match=function):
        keep_all(tensors, {})
    assert_over(source)


def test_an_error_after_an_error_of_the_device_is_raised_as_well(gpu: Gpu) -> None:
    source, tensors = opened(gpu)
    gpu.runtime.fail("cudaMemcpyAsync", after=4, code=1)
    with pytest.raises(DeviceError):
        keep_all(tensors, {})
    assert_over(source)
    checked(gpu, LARGE, LARGE_BYTES, **TIGHT)  # nothing is left over


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


@forks
def test_a_forked_child_cannot_use_the_parents_stream_and_leaves_it_alone(lazy: Gpu) -> None:
    source, tensors = opened(lazy)
    kept = dict(next(tensors) for _ in range(5))
    child = os.fork()
    if not child:
        code = 1
        try:
            with pytest.raises(StreamError):
                next(tensors)
            tensors.close()
            kept.clear()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    kept |= dict(tensors)
    assert not wrong(kept, LARGE)
    assert len(kept) == len(LARGE)
    kept.clear()
    assert_over(source)


def test_two_streams_of_one_device_taken_in_turn_are_independent(gpu: Gpu) -> None:
    streams = [headrace.stream(WatchedSource(LARGE_BYTES), device=gpu.device, order="file", **TIGHT) for _ in range(2)]
    for (name, first), (other, second) in zip(*streams, strict=True):
        assert name == other
        assert bytes_of(first) == bytes_of(second) == LARGE[name].data
    del first, second
    for tensors in streams:
        tensors.close()


def test_two_streams_in_two_threads_are_independent(gpu: Gpu) -> None:
    results: dict[int, list[str]] = {}

    def work(number: int, contents: Contents, data: bytes) -> None:
        with headrace.stream(WatchedSource(data), device=gpu.device, memory_limit=4 * MIB) as tensors:
            kept = {name: tensor for i, (name, tensor) in enumerate(tensors) if i % 2}
        results[number] = wrong(kept, contents)

    threads = [
        threading.Thread(target=work, args=(number, *pair))
        for number, pair in enumerate([(MIXED, MIXED_BYTES), (LARGE, LARGE_BYTES)])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {0: [], 1: []}


def test_no_thread_works_on_a_device_that_it_was_not_told(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", LARGE)
    with simulated_gpu(devices=3, index=2) as gpu:
        before = ctypes.c_int()
        gpu.runtime.library.cudaSetDevice(1)
        gpu.runtime.library.cudaGetDevice(ctypes.byref(before))
        given = gpu.device.tensor(torch.zeros(len(LARGE["t001"].data), dtype=torch.uint8))
        loaded = headrace.load(path, device=gpu.device, into={"t001": given}, dtype={"t000": "F32"})
        assert {copy.device for copy in gpu.runtime.copies()} == {2}
        assert gpu.runtime.contexts() == {1, 2}, "1 is what the test itself has chosen"
        after = ctypes.c_int()
        gpu.runtime.library.cudaGetDevice(ctypes.byref(after))
        assert (before.value, after.value) == (1, 1), "the caller's device stays what it was"
        assert bytes_of(given) == LARGE["t001"].data
        del loaded, given


@pytest.mark.slow
def test_a_process_may_end_with_tensors_and_an_unfinished_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", LARGE)
    program = """
        import atexit, sys
        atexit.register(lambda: print(runtime.live().registered, runtime.violations()))  # last
        import headrace
        from headrace.testing.devices import SimulatedDevice
        from headrace.testing.simulated import SimulatedRuntime

        runtime = SimulatedRuntime()
        device = SimulatedDevice(runtime)
        stream = headrace.stream(sys.argv[1], device=device, memory_limit=0)
        some = [next(stream), next(stream)]
        abandoned = iter(headrace.stream(sys.argv[1], device=device, memory_limit=0))
        cycle = [next(abandoned), abandoned]
        cycle.append(cycle)
        print("end")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n0 []\n", "")


# ---- page-locking that is refused


@pytest.mark.parametrize("times", [1, 2, -1], ids=["once", "twice", "always"])
@pytest.mark.parametrize("after", rest_slow(range(8), quick=(0, 3)))
@pytest.mark.parametrize("allocator", [True, False], ids=["allocator", "no allocator"])
def test_a_registration_that_is_refused_is_worked_around_and_said_once(
    lazy: Gpu, after: int, times: int, allocator: bool, caplog: pytest.LogCaptureFixture
) -> None:
    contents = random_contents(*[MIB] * 12, 6 * MIB)
    lazy.runtime.fail("cudaHostRegister", after=after, code=2, times=times)
    if not allocator:
        lazy.runtime.fail("cudaHostAlloc", code=2, times=-1)
    stats = checked(lazy, contents, serialize(contents), memory_limit=16 * MIB, concurrency=12)
    pageable = lazy.runtime.stats().h2d_pageable_nbytes
    assert (stats.pinned is True) == (pageable == 0)
    assert len(stats.degraded) == len(caplog.records) <= 1
    assert stats.degraded or stats.pinned
    if pageable:
        assert not allocator
        assert "HostRegister" in stats.pinned_how


def test_a_registration_that_is_too_long_is_made_in_pieces(lazy: Gpu) -> None:
    contents = random_contents(*[2 * MIB] * 20)
    lazy.runtime.limits(registration_nbytes=3 * MIB)
    stats = checked(lazy, contents, serialize(contents), memory_limit=16 * MIB, concurrency=16)
    assert (stats.pinned, stats.degraded) == (True, ())
    assert lazy.runtime.stats().h2d_pageable_nbytes == 0


def test_where_nothing_can_be_page_locked_require_raises_and_auto_loads(lazy: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    lazy.runtime.limits(pinned_nbytes=0)
    source = WatchedSource(LARGE_BYTES)
    with pytest.raises(PinningError) as caught:
        headrace.load(source, device=lazy.device, pin="require")
    assert caught.value.device == "simulated:0"
    assert_over(source)
    stats = checked(lazy, LARGE, LARGE_BYTES)
    assert stats.pinned is False
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert lazy.runtime.stats().h2d_pinned_nbytes == 0


def test_require_is_content_with_page_locked_memory_of_the_allocator(lazy: Gpu) -> None:
    lazy.runtime.fail("cudaHostRegister", times=-1)
    assert checked(lazy, LARGE, LARGE_BYTES, pin="require").pinned is True
    assert lazy.runtime.stats().h2d_pageable_nbytes == 0
    assert lazy.runtime.live().host_allocated == 0


def test_pin_off_registers_nothing(lazy: Gpu) -> None:
    stats = checked(lazy, LARGE, LARGE_BYTES, pin="off")
    assert (stats.pinned, stats.degraded) == (False, ())
    assert lazy.runtime.stats().registrations == lazy.runtime.stats().host_allocations == 0


def test_an_unregistration_that_fails_keeps_the_memory_mapped(lazy: Gpu) -> None:
    lazy.runtime.fail("cudaHostUnregister", code=719)
    loaded = headrace.load(WatchedSource(LARGE_BYTES), device=lazy.device)
    assert not wrong(loaded, LARGE)
    assert lazy.runtime.live().registered == 1
    del loaded
    lazy.runtime.library.cudaGetLastError()
    lazy.device.close()
    assert lazy.runtime.violations() == []
    lazy.runtime.reset()
    lazy.device.__init__(lazy.runtime)  # type: ignore[misc]  # for the look at the end


# ---- device memory that runs out


def roomy(gpu: Gpu, nbytes: int) -> None:
    gpu.runtime.device_memory(nbytes)


def test_a_caller_who_drops_tensors_needs_room_for_few(gpu: Gpu) -> None:
    roomy(gpu, 4 * MIB)
    with headrace.stream(WatchedSource(LARGE_BYTES), device=gpu.device, memory_limit=3 * MIB) as tensors:
        for name, tensor in tensors:
            assert bytes_of(tensor) == LARGE[name].data
            del tensor
    assert tensors.stats.degraded == ()


@pytest.mark.parametrize(
    "arguments", [{}, {"ownership": "copied"}, {"dtype": dict.fromkeys(LARGE, "F16")}], ids=["plain", "copied", "cast"]
)
def test_tensors_that_find_no_room_are_handed_out_on_the_host(
    gpu: Gpu, arguments: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    roomy(gpu, 9 * MIB)
    with headrace.stream(WatchedSource(LARGE_BYTES), device=gpu.device, **arguments) as tensors:
        kept = dict(tensors)
    expected = headrace.load(WatchedSource(LARGE_BYTES), **arguments)
    assert all(bytes_of(kept[name].view(torch.uint8)) == bytes_of(expected[name].view(torch.uint8)) for name in LARGE)
    there = [name for name, tensor in kept.items() if gpu.device.allocator.holds(tensor)]
    assert 0 < len(there) < len(LARGE)
    assert len(tensors.stats.degraded) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_tensors_are_allocated_apart_where_there_is_no_room_for_a_span(gpu: Gpu) -> None:
    contents = random_contents(*[512 * KIB] * 30)
    roomy(gpu, 5 * MIB)
    with headrace.stream(WatchedSource(serialize(contents)), device=gpu.device) as tensors:
        found = {name: gpu.device.allocator.holds(tensor) for name, tensor in tensors}
    assert any(found.values())


@pytest.mark.parametrize("dtype", [None, "F16", "F64"])
def test_borrowed_tensors_that_were_allocated_apart_are_gone_when_they_are_dropped(gpu: Gpu, dtype: str | None) -> None:
    contents = random_contents(*[512 * KIB] * 30, dtype="F32")
    roomy(gpu, 5 * MIB)
    with headrace.stream(WatchedSource(serialize(contents)), device=gpu.device, ownership="borrowed", dtype=dtype) as tensors:
        found = []
        for name, tensor in tensors:
            found.append(gpu.device.allocator.holds(tensor))
            assert dtype is not None or bytes_of(tensor) == contents[name].data
            del tensor
    assert any(found)


@pytest.mark.parametrize("after", range(0, 12, 2))
def test_one_allocation_that_fails_changes_no_byte(gpu: Gpu, after: int) -> None:
    gpu.runtime.fail("cudaMalloc", after=after, code=2, times=2)
    checked(gpu, MIXED, serialize(MIXED, data_start=1), memory_limit=2 * MIB)


# ---- what a plan and the names say


def test_the_plan_states_route_staging_and_casts(lazy: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace._limits._bus_rate", lambda: NARROW)
    contents = {"a": random_entry("F32", (1000,)), "b": random_entry("BF16", (1000,))}
    data, dtype = serialize(contents), {"a": "BF16", "b": "F32"}
    text = str(headrace.plan(WatchedSource(data), device=lazy.device, dtype=dtype))
    monkeypatch.setattr("headrace._limits._bus_rate", lambda: WIDE)
    assert "fewer bytes" not in str(headrace.plan(WatchedSource(data), device=lazy.device, dtype=dtype))
    assert "staged" in text
    assert "simulated:0" in text
    assert "page-locked" in text
    assert "fewer bytes cross the bus" in text
    assert "on the device" in text
    assert lazy.runtime.stats().h2d_copies == 0


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)], ids=str)
def test_a_plan_for_a_gpu_needs_none_and_a_load_says_that_there_is_none(device: Any) -> None:
    if torch.cuda.is_available():  # noqa: TID251
        pytest.skip("there is a GPU")
    source = WatchedSource(MIXED_BYTES)
    assert headrace.plan(source, device=device).device == str(device)
    with pytest.raises(DeviceError) as caught:
        headrace.stream(WatchedSource(MIXED_BYTES), device=device)
    assert caught.value.device == "cuda"


def test_mmap_is_not_for_devices(lazy: Gpu, tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", MIXED)
    with pytest.raises(OptionError) as caught:
        headrace.stream(path, device=lazy.device, mmap="require")
    assert caught.value.option == "mmap"
    assert not wrong(headrace.load(path, device=lazy.device, mmap="auto"), MIXED)


def test_the_command_line_plans_for_a_gpu_and_says_where_there_is_none(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from headrace.cli import app

    path = str(write(tmp_path / "m.safetensors", MIXED))
    planned = CliRunner().invoke(app, ["plan", "--device", "cuda:0", path])
    assert planned.exit_code == 0
    assert "copied from there to cuda:0" in " ".join(planned.output.split())
    if not torch.cuda.is_available():  # noqa: TID251
        assert CliRunner().invoke(app, ["load", "--device", "cuda:0", path]).exit_code != 0
