"""A tensor you were handed is yours: it never changes while any reference to its memory lives, and shares nothing else.

Each test drops some tensors so that memory is recycled under the ones that are held, and compares every byte at the end.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import itertools
import os
import pickle
import queue
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from budget import rest_slow
from checkpoints import (
    KIB,
    MIB,
    WatchedSource,
    bytes_of,
    mixed_contents,
    random_contents,
    random_entry,
    serialize,
    value_of,
    write,
    wrong,
)

import headrace
from headrace.errors import StreamError

pytestmark = pytest.mark.timeout(60)

TIGHT = {"memory_limit": 0, "concurrency": 4}
MIXED = mixed_contents()
MIXED_BYTES = serialize(MIXED)
LARGE = random_contents(*[300 * KIB + 4 * i for i in range(40)])
LARGE_BYTES = serialize(LARGE)


def watched(data: bytes = LARGE_BYTES) -> WatchedSource:
    return WatchedSource(data)


# ---- nothing that is held ever changes


def read_capsule(capsule: object) -> bytes:
    return bytes_of(torch.utils.dlpack.from_dlpack(capsule))


def storage_bytes(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


HOLDERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], bytes]]] = {
    "the tensor": (lambda tensor: tensor, bytes_of),
    "a view of a view": (lambda tensor: tensor.view(2, -1).T[:].T.view(-1), bytes_of),
    "detach": (lambda tensor: tensor.detach(), bytes_of),
    "a Parameter": (lambda tensor: torch.nn.Parameter(tensor, requires_grad=False), bytes_of),
    "another dtype's view": (lambda tensor: tensor.view(torch.int32), bytes_of),
    ".data": (lambda tensor: tensor.data, bytes_of),
    "numpy": (lambda tensor: tensor.numpy(), lambda array: array.tobytes()),
    "a memoryview of numpy": (lambda tensor: memoryview(tensor.numpy()), bytes),
    "numpy's from_dlpack": (lambda tensor: np.from_dlpack(tensor), lambda array: array.tobytes()),
    "a DLPack capsule": (torch.utils.dlpack.to_dlpack, read_capsule),
    "the bare storage": (lambda tensor: tensor.untyped_storage(), storage_bytes),
    "as_strided": (lambda tensor: tensor.as_strided((tensor.numel(),), (1,)), bytes_of),
    "a graph": (lambda tensor: torch.ones((), requires_grad=True) * tensor.view(torch.float32), lambda _: b""),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_is_held_never_changes(holder: str) -> None:
    hold, read = HOLDERS[holder]
    small = random_contents(*[40 * KIB] * 150)
    for contents in (random_contents(*[300 * KIB] * 24), dict(list(small.items())[:60])):
        held, copies, reread = {}, {}, 0
        with headrace.stream(watched(serialize(contents)), memory_limit=MIB, concurrency=4) as tensors:
            for i, (name, tensor) in enumerate(tensors):
                if i % 3 == 0:
                    held[name] = hold(tensor)
                    copies[name] = bytes_of(tensor)
                del tensor
        for name, item in held.items():
            assert copies[name] == contents[name].data, name
            found = read(item)
            reread += 1
            assert found in (b"", contents[name].data), name
        assert reread == len(held) > 4


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("memory_limit", [0, MIB, -1])
@pytest.mark.parametrize("order", ["ready", "file"])
def test_a_kept_list_is_right(memory_limit: int, concurrency: int, order: Any) -> None:
    with headrace.stream(watched(MIXED_BYTES), order=order, memory_limit=memory_limit, concurrency=concurrency) as tensors:
        kept = list(tensors)
    assert len(kept) == len(MIXED)
    assert not wrong(dict(kept), MIXED)


def test_tensors_stay_after_close_and_after_the_stream_is_gone() -> None:
    source = watched()
    tensors = headrace.stream(source, **TIGHT)
    kept = dict(next(tensors) for _ in range(5))
    tensors.close()
    assert not wrong(kept, LARGE)
    del tensors
    gc.collect()
    again = headrace.load(watched())  # whatever was given back is written to again
    assert not wrong(kept, LARGE)
    assert not wrong(again, LARGE)


def test_one_of_several_small_tensors_keeps_what_they_shared() -> None:
    contents = random_contents(*[KIB] * 3000)
    kept = {}
    with headrace.stream(watched(serialize(contents)), **TIGHT) as tensors:
        for i, (name, tensor) in enumerate(tensors):
            if i % 500 == 7:
                kept[name] = tensor
    assert len(kept) == 6
    assert not wrong(kept, contents)


def test_eight_threads_that_drop_late_see_right_bytes() -> None:
    work: queue.SimpleQueue[tuple[str, torch.Tensor, threading.Event] | None] = queue.SimpleQueue()
    found: dict[str, bytes] = {}

    def consume() -> None:
        while (item := work.get()) is not None:
            name, tensor, late = item
            assert late.wait(30)
            found[name] = bytes_of(tensor)
            del item, tensor

    threads = [threading.Thread(target=consume, name=f"consumer-{i}") for i in range(8)]
    for thread in threads:
        thread.start()
    waiting: list[threading.Event] = []
    with headrace.stream(watched(), memory_limit=2 * MIB, concurrency=4) as tensors:
        for name, tensor in tensors:
            late = threading.Event()
            waiting.append(late)
            work.put((name, tensor, late))
            del tensor
            if len(waiting) > 6:
                waiting.pop(0).set()
    for late in waiting:
        late.set()
    for _ in threads:
        work.put(None)
    for thread in threads:
        thread.join(30)
    assert found == {name: entry.data for name, entry in LARGE.items()}


def test_threads_that_drop_while_reading_goes_on_see_right_bytes() -> None:
    work: queue.SimpleQueue[tuple[str, torch.Tensor] | None] = queue.SimpleQueue()
    found: dict[str, bytes] = {}

    def consume() -> None:
        while (item := work.get()) is not None:
            found[item[0]] = bytes_of(item[1])
            del item

    threads = [threading.Thread(target=consume, name=f"consumer-{i}") for i in range(8)]
    for thread in threads:
        thread.start()
    with headrace.stream(watched(MIXED_BYTES), memory_limit=2 * MIB, concurrency=8) as tensors:
        for item in tensors:
            work.put(item)
            del item
    for _ in threads:
        work.put(None)
    for thread in threads:
        thread.join(30)
    assert found == {name: entry.data for name, entry in MIXED.items()}


class Node:
    """Refers to itself, so only the collector can end it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.itself = self


def test_a_reference_cycle_holds_its_tensor_until_it_is_collected() -> None:
    source = watched()
    nodes: dict[str, weakref.ref[Node]] = {}
    gc.collect()
    gc.disable()
    try:
        with headrace.stream(source, **TIGHT) as tensors:
            for i, (name, tensor) in enumerate(tensors):
                nodes[name] = weakref.ref(Node(tensor))
                del tensor
                if i % 8 == 7:
                    for held, reference in nodes.items():
                        node = reference()
                        assert node is not None
                        assert bytes_of(node.tensor) == LARGE[held].data
                        del node
                    nodes.clear()
                    gc.collect()
        gc.collect()
        assert source.living == 0
    finally:
        gc.enable()


def test_the_collector_may_run_anywhere() -> None:
    thresholds = gc.get_threshold()
    contents = random_contents(*[20 * KIB] * 200)
    gc.set_threshold(1, 2, 1000)
    try:
        with headrace.stream(watched(serialize(contents)), memory_limit=100 * KIB, concurrency=4) as tensors:
            for name, tensor in tensors:
                assert bytes_of(tensor) == contents[name].data
                Node(tensor)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()


def test_writing_to_one_tensor_changes_no_other() -> None:
    with headrace.stream(watched(MIXED_BYTES), memory_limit=MIB) as tensors:
        kept = dict(tensors)
    for name in list(kept)[::2]:
        if kept[name].numel():
            kept[name].reshape(-1).view(torch.uint8).fill_(0xA5)
    others = {name: kept[name] for name in list(kept)[1::2]}
    assert not wrong(others, MIXED)


def test_tensors_do_not_alias_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", MIXED)
    kept = headrace.load(path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    os.truncate(path, 0)
    assert not wrong(kept, MIXED)


# ---- nothing else is shared


@pytest.fixture
def siblings() -> dict[str, torch.Tensor]:
    contents = {f"t{i}": random_entry("I32", (16,), seed=i) for i in range(100)}
    contents |= {"weight": random_entry("I32", (4, 4), seed=7)}
    tensors: dict[str, torch.Tensor] = headrace.load(watched(serialize(contents)))
    assert not wrong(tensors, contents)
    return tensors


def all_kinds(**arguments: Any) -> dict[str, torch.Tensor]:
    with headrace.stream(watched(MIXED_BYTES), **arguments) as tensors:
        return dict(tensors)


@pytest.mark.parametrize("ownership", ["leased", "copied"])
def test_each_tensor_has_a_storage_of_exactly_its_size(ownership: str) -> None:
    tensors = all_kinds(ownership=ownership)
    for name, tensor in tensors.items():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() == len(MIXED[name].data), name
        assert tensor.storage_offset() == 0
        assert tensor.is_contiguous()
    starts = sorted((tensor.data_ptr(), tensor.untyped_storage().nbytes()) for tensor in tensors.values() if tensor.numel())
    assert all(at + nbytes <= following for (at, nbytes), (following, _) in itertools.pairwise(starts))


def test_addresses_are_aligned_to_the_element() -> None:
    narrow_first = {"narrow": random_entry("F32", (2,)), "wide": random_entry("F64", (1,))}
    for contents, data_start in itertools.product((MIXED, narrow_first), range(8)):
        for tensor in headrace.load(watched(serialize(contents, data_start=data_start))).values():
            assert tensor.data_ptr() % tensor.element_size() == 0


def test_an_update_in_place_leaves_the_version_of_siblings(siblings: dict[str, torch.Tensor]) -> None:
    before = {name: tensor._version for name, tensor in siblings.items()}
    siblings["t0"].add_(1)
    assert siblings["t0"]._version == before["t0"] + 1
    assert all(siblings[name]._version == version for name, version in before.items() if name != "t0")


def test_an_update_in_place_does_not_fail_the_backward_of_a_sibling(siblings: dict[str, torch.Tensor]) -> None:
    weight = siblings["t1"].view(torch.float32).nan_to_num_().requires_grad_()
    running_mean = siblings["t2"]
    loss = (weight * weight).sum()
    running_mean.add_(1)  # as BatchNorm does in training
    loss.backward()
    assert weight.grad is not None


def test_a_pickled_tensor_of_64_bytes_is_short(siblings: dict[str, torch.Tensor]) -> None:
    assert len(pickle.dumps(siblings["t0"])) < 2 * KIB
    saved = io.BytesIO()
    torch.save(siblings["t0"], saved)
    assert len(saved.getvalue()) < 2 * KIB
    assert torch.equal(pickle.loads(pickle.dumps(siblings["t0"])), siblings["t0"])


def test_a_deep_copy_is_independent(siblings: dict[str, torch.Tensor]) -> None:
    before = bytes_of(siblings["t0"])
    clone = copy.deepcopy(siblings["t0"])
    clone.zero_()
    assert bytes_of(siblings["t0"]) == before
    together = copy.deepcopy(siblings)
    assert {bytes_of(tensor) for tensor in together.values()} == {bytes_of(tensor) for tensor in siblings.values()}


@pytest.mark.leaky_ok(reason="a shared tensor has a descriptor of torch's, which the fixture holds for longer than the test")
def test_share_memory_moves_one_tensor_only(siblings: dict[str, torch.Tensor]) -> None:
    before = {name: bytes_of(tensor) for name, tensor in siblings.items()}
    siblings["t3"].share_memory_()
    assert [name for name, tensor in siblings.items() if tensor.is_shared()] == ["t3"]
    siblings["t3"].zero_()
    after = {name: bytes_of(tensor) for name, tensor in siblings.items()}
    assert {name for name in after if after[name] != before[name]} == {"t3"}


def test_resizing_a_tensor_leaves_its_siblings(siblings: dict[str, torch.Tensor]) -> None:
    before = bytes_of(siblings["t5"])
    with pytest.raises(RuntimeError, match="resiz"):
        siblings["t4"].resize_(1000)
    assert bytes_of(siblings["t5"]) == before


@pytest.mark.parametrize("arguments", [{}, {"ownership": "copied"}, {"dtype": "F64"}, {"memory_limit": 0}], ids=str)
def test_tensors_taken_under_inference_mode_are_no_inference_tensors(arguments: dict[str, Any]) -> None:
    with torch.inference_mode():
        tensors = all_kinds(**arguments)
    assert [name for name, tensor in tensors.items() if tensor.is_inference()] == []
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.requires_grad_()
        elif tensor.dtype == torch.int32:
            tensor.add_(1)


def test_borrowed_tensors_under_inference_mode_are_no_inference_tensors() -> None:
    with torch.inference_mode(), headrace.stream(watched(MIXED_BYTES), ownership="borrowed") as tensors:
        assert not any(tensor.is_inference() for _, tensor in tensors)


@pytest.mark.slow  # torch imports its compiler for an optimizer
def test_a_train_step_on_loaded_tensors(tmp_path: Path) -> None:
    values = {"weight": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8), "bias": np.zeros(4, np.float32)}
    contents = {name: headrace_entry(array) for name, array in values.items()}
    loaded = headrace.load(write(tmp_path / "m.safetensors", contents))
    model = torch.nn.Linear(8, 4)
    model.load_state_dict(loaded, assign=True)
    model.requires_grad_()
    expected = torch.nn.Linear(8, 4)
    expected.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in values.items()})
    for module in (model, expected):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.ones(3, 8)).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))


def headrace_entry(array: np.ndarray[Any, Any]) -> Any:
    entry = random_entry("F32", array.shape)
    return entry._replace(data=array.tobytes())


# ---- memory is bounded, recycled and given back


def fill_memory(source: Any, **arguments: Any) -> headrace.Snapshot:
    with headrace.stream(source, **arguments) as tensors:
        for _, tensor in tensors:
            del tensor
        return tensors.stats


def test_memory_of_dropped_tensors_is_used_again() -> None:
    pages: set[int] = set()
    with headrace.stream(watched(), memory_limit=MIB, concurrency=2) as tensors:
        for _, tensor in tensors:
            pages.update(range(tensor.data_ptr() // 4096, (tensor.data_ptr() + tensor.nbytes) // 4096 + 1))
            del tensor
    assert len(pages) * 4096 <= 3 * MIB


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("memory_limit", [0, MIB, 4 * MIB])
def test_peak_is_the_limit_when_tensors_are_dropped_at_once(memory_limit: int, concurrency: int) -> None:
    stats = fill_memory(watched(), memory_limit=memory_limit, concurrency=concurrency)
    largest = max(len(entry.data) for entry in LARGE.values())
    # The loop variable may live for one step longer than the limit foresees; then it is counted as kept.
    assert 0 < stats.peak_nbytes <= max(memory_limit, largest) + stats.kept_nbytes + 2 * largest + 64 * KIB
    assert stats.kept_nbytes <= largest + 64 * KIB


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of resident memory")
def test_resident_memory_peaks_at_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", random_contents(*[3 * MIB + 4096 * i for i in range(32)]))
    fill_memory(path, memory_limit=8 * MIB)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmHWM")
    fill_memory(path, memory_limit=8 * MIB)
    assert resident("VmHWM") - before < (8 + 16) * MIB


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def anonymous() -> int:
    """Private memory of this process in bytes, what the allocator holds for later given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])


needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux tells resident memory")


@needs_smaps
@pytest.mark.parametrize("memory_limit", [0, 16 * MIB])
@pytest.mark.parametrize("rows", rest_slow([128, 1024]))
def test_a_caller_who_keeps_only_vectors_keeps_only_their_bytes(tmp_path: Path, memory_limit: int, rows: int) -> None:
    contents = {}
    for i in range(24):
        contents[f"{i}.weight"] = random_entry("F32", (rows, 1024), seed=i)
        contents[f"{i}.norm"] = random_entry("F32", (1024,), seed=100 + i)
    path = write(tmp_path / "m.safetensors", contents)
    fill_memory(path)
    before = anonymous()
    with headrace.stream(path, memory_limit=memory_limit) as tensors:
        kept = {name: tensor for name, tensor in tensors if tensor.ndim == 1}
    assert anonymous() - before < sum(tensor.nbytes for tensor in kept.values()) + 24 * 4096 + MIB
    assert not wrong(kept, contents)


@needs_smaps
def test_a_caller_who_keeps_every_tenth_tensor_keeps_only_their_pages(tmp_path: Path) -> None:
    contents = random_contents(*[MIB + 40 * i for i in range(60)])
    path = write(tmp_path / "m.safetensors", contents)
    fill_memory(path)
    before = anonymous()
    kept = {}
    with headrace.stream(path, memory_limit=8 * MIB) as tensors:
        for i, (name, tensor) in enumerate(tensors):
            if i % 10 == 3:
                kept[name] = tensor
            del tensor
    assert anonymous() - before < sum(tensor.nbytes for tensor in kept.values()) + 6 * 8192 + 2 * MIB
    assert not wrong(kept, contents)


@needs_smaps
def test_all_memory_goes_back_when_the_last_tensor_is_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", random_contents(*[MIB] * 40))
    fill_memory(path)
    before = anonymous()
    kept = headrace.load(path)
    assert anonymous() - before > 39 * MIB
    kept.clear()
    assert anonymous() - before < 2 * MIB


@needs_smaps
def test_memory_goes_back_tensor_by_tensor_after_close(tmp_path: Path) -> None:
    contents = random_contents(*[5 * MIB] * 12)  # a span each
    path = write(tmp_path / "m.safetensors", contents)
    fill_memory(path)
    before = anonymous()
    kept = headrace.load(path)
    kept = {name: tensor for name, tensor in kept.items() if name in ("t000", "t005", "t011")}
    assert anonymous() - before < 3 * (5 * MIB + 8192) + 2 * MIB
    assert not wrong(kept, contents)


def test_all_memory_is_unmapped_when_the_last_tensor_is_dropped() -> None:
    source = watched(MIXED_BYTES)
    kept = headrace.load(source)
    gc.collect()
    assert source.living > 0
    del kept
    gc.collect()
    assert source.living == 0


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("memory_limit", [0, 2 * MIB])
def test_kept_bytes_are_in_the_stats(memory_limit: int, concurrency: int) -> None:
    with headrace.stream(watched(), memory_limit=memory_limit, concurrency=concurrency) as tensors:
        kept = dict(tensors)
        stats = tensors.stats
    total = sum(len(entry.data) for entry in LARGE.values())
    rounding = 16 * KIB * len(kept)
    assert total - max(memory_limit, 400 * KIB) - 400 * KIB <= stats.kept_nbytes <= total + rounding
    assert stats.peak_nbytes >= total


def test_nothing_is_kept_where_memory_suffices() -> None:
    with headrace.stream(watched(), memory_limit=-1) as tensors:
        kept = dict(tensors)
        assert tensors.stats.kept_nbytes == 0
    assert len(kept) == len(LARGE)


@pytest.mark.parametrize("order", ["ready", "file"])
def test_empty_tensors_among_large_ones_do_not_stop_a_caller_who_keeps_everything(order: Any) -> None:
    contents = random_contents(300 * KIB, 0, 300 * KIB, 0, 300 * KIB, 300 * KIB, 0, 300 * KIB)
    with headrace.stream(watched(serialize(contents)), order=order, memory_limit=0) as tensors:
        kept = dict(tensors)
    assert not wrong(kept, contents)
    assert len(kept) == len(contents)


def test_a_dropped_tensor_is_gone_before_the_next_one_is_asked_for() -> None:
    with headrace.stream(watched(), memory_limit=0) as tensors:
        for item in tensors:
            gone = weakref.ref(item[1])
            del item
            assert gone() is None


# ---- copied and borrowed


def test_copied_tensors_are_right_whatever_is_done_to_the_others() -> None:
    tensors = all_kinds(ownership="copied", memory_limit=0, concurrency=8)
    assert not wrong(tensors, MIXED)
    tensors["layer.0.norm"].zero_()
    del tensors["layer.0.norm"]
    assert not wrong(tensors, MIXED)


def test_a_small_copied_tensor_holds_no_memory_of_the_stream() -> None:
    contents = random_contents(*[KIB] * 1000)
    source = watched(serialize(contents))
    with headrace.stream(source, ownership="copied") as tensors:
        kept = dict(next(tensors) for _ in range(3))
    gc.collect()
    assert source.living == 0
    assert not wrong(kept, contents)


@needs_smaps
def test_a_large_copied_tensor_holds_its_own_pages_only() -> None:
    contents = random_contents(*[MIB + 4 * i for i in range(12)])
    data = serialize(contents)
    fill_memory(watched(data), ownership="copied")
    before = anonymous()
    with headrace.stream(watched(data), ownership="copied", memory_limit=4 * MIB) as tensors:
        kept = {name: tensor for name, tensor in tensors if name == "t005"}
    assert anonymous() - before < 2 * MIB + 8192
    assert not wrong(kept, contents)


@pytest.mark.parametrize("memory_limit", [0, MIB, -1])
@pytest.mark.parametrize("data", [LARGE_BYTES, MIXED_BYTES], ids=["large", "mixed"])
def test_a_for_loop_over_borrowed_tensors_works(data: bytes, memory_limit: int) -> None:
    contents = LARGE if data is LARGE_BYTES else MIXED
    seen = 0
    with headrace.stream(watched(data), ownership="borrowed", memory_limit=memory_limit) as tensors:
        for name, tensor in tensors:
            assert bytes_of(tensor) == contents[name].data
            seen += 1
    assert seen == len(contents)


@pytest.mark.parametrize("memory_limit", [0, MIB, -1])
@pytest.mark.parametrize("data", [LARGE_BYTES, serialize(random_contents(*[KIB] * 50))], ids=["large", "small"])
def test_keeping_a_borrowed_tensor_for_two_steps_raises(data: bytes, memory_limit: int) -> None:
    tensors = headrace.stream(watched(data), ownership="borrowed", memory_limit=memory_limit)
    kept = [next(tensors), next(tensors)]
    with pytest.raises(StreamError):
        kept += [next(tensors), next(tensors)]
    with pytest.raises((StreamError, StopIteration)):
        next(tensors)
    tensors.close()


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_given_tensors_may_be_kept_among_borrowed_ones(strided: bool) -> None:
    contents = random_contents(*[300 * KIB] * 4, *[KIB] * 10)
    given = {
        name: torch.zeros(2 * len(entry.data), dtype=torch.uint8)[:: 2 if strided else 1][: len(entry.data)]
        for name, entry in list(contents.items())[::2]
    }
    with headrace.stream(watched(serialize(contents)), into=given, ownership="borrowed") as tensors:
        for name, tensor in tensors:
            assert bytes_of(tensor) == contents[name].data
    assert not wrong(given, contents)


def test_a_view_of_a_borrowed_tensor_counts_as_keeping_it() -> None:
    with headrace.stream(watched(), ownership="borrowed") as tensors, pytest.raises(StreamError):
        _ = [tensor[3:5] for _, tensor in tensors]


# ---- the end of the process


def run_python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.slow
def test_a_process_may_end_with_tensors_and_an_unfinished_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", random_contents(*[300 * KIB] * 40))
    done = run_python(
        """
        import sys, headrace
        kept = headrace.load(sys.argv[1])
        stream = headrace.stream(sys.argv[1], memory_limit=0)
        some = [next(stream), next(stream)]
        abandoned = iter(headrace.stream(sys.argv[1], memory_limit=0))
        cycle = [next(abandoned), abandoned]
        cycle.append(cycle)
        print("end")
        """,
        str(path),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.slow
@needs_smaps
def test_twenty_loads_in_one_process_stay_flat(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", MIXED)
    process = psutil.Process()
    levels = []
    for turn in range(22):
        tensors = headrace.load(path) if turn % 2 else dict(headrace.stream(path, memory_limit=MIB, dtype="F32"))
        assert len(tensors) == len(MIXED)
        del tensors
        levels.append((anonymous(), process.num_fds(), process.num_threads()))
    memory, descriptors, threads = zip(*levels[2:], strict=True)
    assert max(memory) - min(memory) < 4 * MIB
    assert set(descriptors) == {descriptors[0]}
    assert max(threads) - min(threads) == 0


def test_values_are_those_of_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    contents = {name: entry for name, entry in MIXED.items() if "packed" not in name}
    path = write(tmp_path / "m.safetensors", contents)
    theirs = load_file(path)
    ours = headrace.load(path)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        assert bytes_of(tensor) == bytes_of(theirs[name]) == bytes_of(value_of(contents[name]))
