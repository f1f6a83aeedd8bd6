"""Casts while loading: the bits are those of `tensor.to`, whatever the bits were, and torch's threads stay the caller's."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import KIB, MIB, Entry, WatchedSource, bytes_of, random_entry, serialize, value_of

import headrace
from headrace._cast import copy_out, keep_to_this_thread
from headrace._dtypes import DTYPES
from headrace._plan import Copy

FLOATS = ("F64", "F32", "F16", "BF16")
BITS = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
LAYOUT = {"F64": (11, 52), "F32": (8, 23), "F16": (5, 10), "BF16": (8, 7)}  # exponent and fraction bits
COUNTS = (1, 2, 3, 7, 8, 9, 15, 17, 31, 33, 255, 1021, 4099)


def torch_dtype(name: str) -> torch.dtype:
    kind = getattr(torch, str(DTYPES[name].torch))
    assert isinstance(kind, torch.dtype)
    return kind


@cache
def hostile_bits(dtype: str, count: int) -> bytes:
    """Random bits with every kind of value among them: NaNs of both kinds with payloads, infinities, zeros, subnormals, ties."""
    exponent, fraction = LAYOUT[dtype]
    random = np.random.default_rng(count)
    bits = np.frombuffer(random.bytes(count * BITS[dtype](0).itemsize), dtype=BITS[dtype]).copy()
    full = ((1 << exponent) - 1) << fraction
    sign = 1 << (exponent + fraction)
    special = [0, sign, full, full | sign, full | 1, full | sign | 1, full | (1 << (fraction - 1)), full | ((1 << fraction) - 1)]
    special += [1, sign | 1, (1 << fraction) - 1, 1 << fraction, full - 1, (full - 1) | sign]
    special += [(1 << (exponent + fraction - 1)) | 1 << k for k in range(fraction)]
    payloads = random.integers(1, 1 << fraction, 64)
    special += [full | int(p) for p in payloads] + [full | sign | int(p) for p in payloads]
    where = random.permutation(count)[: len(special)]
    bits[where] = np.array(special[: len(where)], dtype=BITS[dtype])
    return bits.tobytes()


def cast_in_slot(data: bytes, source: str, target: str) -> bytes:
    """What `copy_out` makes of these bytes, in a slot that is aligned as the engine's are."""
    count = len(data) // DTYPES[source].itemsize
    slot = memoryview(bytearray(torch.frombuffer(bytearray(data), dtype=torch.uint8).numpy()))
    lead = 64
    memory = bytearray(b"\xa5" * (count * DTYPES[target].itemsize + 2 * lead))
    copy_out(slot, memoryview(memory), lead, Copy(source, target))
    assert set(memory[:lead]) | set(memory[len(memory) - lead :]) == {0xA5}, "wrote beside its place"
    return bytes(memory[lead : len(memory) - lead])


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(FLOATS, 2)))
def test_floats_are_cast_bit_by_bit_as_torch_does(source: str, target: str) -> None:
    for count in COUNTS:
        data = hostile_bits(source, count)
        expected = torch.frombuffer(bytearray(data), dtype=torch_dtype(source)).to(torch_dtype(target))
        assert cast_in_slot(data, source, target) == bytes_of(expected), count


@pytest.mark.parametrize("source", ["I64", "I32", "I16", "I8", "U8"])
@pytest.mark.parametrize("target", FLOATS)
def test_integers_that_are_named_are_cast_as_torch_does(source: str, target: str) -> None:
    entry = random_entry(source, (4099,))
    loaded = headrace.load(WatchedSource(serialize({"w": entry})), dtype={"w": target})["w"]
    assert bytes_of(loaded) == bytes_of(value_of(entry).to(torch_dtype(target)))


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(FLOATS, 2)))
def test_casts_across_chunks_and_tensors_are_those_of_the_whole_tensor(source: str, target: str) -> None:
    width = DTYPES[source].itemsize
    counts = (MIB // width + 4096, 64, 0, 320, 70_016)  # torch's own NaN payloads depend on where its vectors end
    contents = {f"w{i}": Entry(source, (count,), hostile_bits(source, count)) for i, count in enumerate(counts)}
    loaded = headrace.load(WatchedSource(serialize(contents, data_start=1)), dtype=target, concurrency=4, memory_limit=MIB)
    for name, entry in contents.items():
        assert bytes_of(loaded[name]) == bytes_of(value_of(entry).to(torch_dtype(target))), name


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread. With several it cuts a tensor of more than 32,768 elements, and payloads of NaNs tell where."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "counts", [(MIB // 2 + 4099, 1, 3, 333, 70_001), (1,) * 40, (3, 64, 7, 128, 20), (100, 192) * 9], ids=str
)
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(FLOATS, 2)))
def test_casts_of_odd_sizes_are_those_of_each_tensor_down_to_the_payload_of_nans(
    source: str, target: str, counts: tuple[int, ...]
) -> None:
    contents = {f"w{i}": Entry(source, (count,), hostile_bits(source, count)) for i, count in enumerate(counts)}
    loaded = headrace.load(WatchedSource(serialize(contents, data_start=1)), dtype=target, concurrency=4, memory_limit=MIB)
    for name, entry in contents.items():
        assert bytes_of(loaded[name]) == bytes_of(value_of(entry).to(torch_dtype(target))), name


@pytest.mark.parametrize(("source", "target", "bits"), [("F16", "F32", 0x7C01), ("F64", "BF16", 0x7FF4 << 48)])
def test_a_lone_nan_is_the_one_that_torch_makes_of_it_alone(source: str, target: str, bits: int) -> None:
    nan = bits.to_bytes(DTYPES[source].itemsize, "little")
    contents = {f"w{i}": Entry(source, (count,), nan * count) for i, count in enumerate((1, 64, 1, 13))}
    loaded = headrace.load(WatchedSource(serialize(contents)), dtype=target)
    assert all(bytes_of(loaded[name]) == bytes_of(value_of(entry).to(torch_dtype(target))) for name, entry in contents.items())


@pytest.mark.parametrize("target", ["F32", "BF16"])
@pytest.mark.parametrize(
    "index", [(slice(None), slice(3, 40)), (slice(None, None, -1),), (slice(None, None, 3), slice(None, None, -2))], ids=str
)
def test_casts_of_slices_are_those_of_the_sliced_tensor(target: str, index: Any) -> None:
    entry = Entry("F32", (61, 83), hostile_bits("F32", 61 * 83))
    loaded = headrace.load(WatchedSource(serialize({"w": entry})), dtype=target, slices={"w": index})["w"]
    sliced = torch.from_numpy(value_of(entry).view(torch.int32).numpy()[index].copy()).view(torch.float32)
    assert bytes_of(loaded) == bytes_of(sliced.to(torch_dtype(target)))


@pytest.mark.parametrize("dtype", ["BOOL", "U8", "F8_E4M3", "F8_E8M0", "F16", "U16", "F32", "U32", "F64", "U64", "C64"])
def test_strided_and_reversed_blocks_keep_every_bit(dtype: str) -> None:
    width = DTYPES[dtype].itemsize
    data = np.random.default_rng(5).bytes(6 * 10 * width)
    words = np.frombuffer(data, dtype=np.dtype((np.void, width))).reshape(6, 10)
    memory = bytearray(3 * 4 * width)
    slot = memoryview(bytearray(data))
    copy_out(slot, memoryview(memory), 0, Copy(dtype, dtype, shape=(3, 4), strides=(20, 2), flip=(0,)))
    assert bytes(memory) == words[0:5:2, 0:8:2][::-1].tobytes()
    copy_out(slot, memoryview(memory), 0, Copy(dtype, dtype, shape=(3, 4), strides=(10, 1), flip=(0, 1)))
    assert bytes(memory) == words[:3, :4][::-1, ::-1].tobytes()


def test_the_callers_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        contents = {f"w{i}": random_entry("F32", (300 * KIB,), seed=i) for i in range(4)}
        headrace.load(WatchedSource(serialize(contents)), dtype="BF16", concurrency=4)
        assert torch.get_num_threads() == 2
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join(30)
        assert later == [2], "threads that are started later are the caller's too"
        assert torch.ones(1000, 1000).sum() == 1_000_000
    finally:
        torch.set_num_threads(before)


def test_keeping_to_one_thread_is_a_matter_of_that_thread_alone() -> None:
    inside: list[int] = []

    def work() -> None:
        keep_to_this_thread()
        inside.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(30)
        assert torch.get_num_threads() == 3
        if torch.backends.openmp.is_available():
            assert inside == [1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_bits_do_not_depend_on_the_callers_threads(threads: int) -> None:
    entry = Entry("F32", (MIB,), hostile_bits("F32", MIB))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = bytes_of(value_of(entry).to(torch.bfloat16))
        assert bytes_of(headrace.load(WatchedSource(serialize({"w": entry})), dtype="BF16")["w"]) == expected
    finally:
        torch.set_num_threads(before)


def test_casts_under_inference_mode_or_without_grad_are_ordinary_tensors() -> None:
    entry = Entry("F32", (1000,), hostile_bits("F32", 1000))
    with torch.inference_mode():
        tensor = headrace.load(WatchedSource(serialize({"w": entry})), dtype="BF16")["w"]
    assert not tensor.is_inference()
    assert not tensor.requires_grad
    tensor.requires_grad_().float().nan_to_num().sum().backward()


def test_quantized_neighbours_are_left_alone_by_a_blanket_dtype() -> None:
    contents = {
        "mlp.weight": random_entry("F8_E4M3", (16, 16), seed=1),
        "mlp.weight_scale": random_entry("F32", (16,), seed=2),
        "mlp.other": random_entry("F32", (16,), seed=3),
        "norm.weight": random_entry("F32", (16,), seed=4),
    }
    with headrace.stream(WatchedSource(serialize(contents)), dtype="BF16") as tensors:
        loaded = dict(tensors)
    assert {name: tensor.dtype for name, tensor in loaded.items() if tensor.dtype == torch.bfloat16} == {
        "norm.weight": torch.bfloat16
    }
    assert all(bytes_of(loaded[name]) == contents[name].data for name in contents if name != "norm.weight")
    assert {name for name, _ in tensors.stats.left_alone} == {"mlp.weight_scale", "mlp.other"}
