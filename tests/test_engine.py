"""The engine: order, destinations, names, progress, statistics, direct reads, and how a stream is used."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
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

import headrace
from headrace.errors import LoadError, OptionError, SourceError, StreamError, TensorNotFoundError
from headrace.testing import Block, Fault, Raise

pytestmark = pytest.mark.timeout(60)

MIXED = mixed_contents()
MIXED_BYTES = serialize(MIXED)
LARGE = random_contents(*[300 * KIB] * 24)
LARGE_BYTES = serialize(LARGE)


# ---- what comes out


@pytest.mark.parametrize("data_start", range(8))
def test_unaligned_data_arrives_right(data_start: int, tmp_path: Path) -> None:
    data = serialize(MIXED, data_start=data_start)
    assert not wrong(headrace.load(WatchedSource(data), memory_limit=MIB, concurrency=4), MIXED)
    (tmp_path / "m.safetensors").write_bytes(data)
    for direct_io in ("on", "off"):
        assert not wrong(headrace.load(tmp_path / "m.safetensors", direct_io=direct_io), MIXED)


def test_dtypes_that_torch_lacks_are_raw_bytes_of_one_dimension() -> None:
    contents = {name: random_entry(name, (5, 8)) for name in ("F6_E2M3", "F6_E3M2")}
    for name, tensor in headrace.load(WatchedSource(serialize(contents))).items():
        assert (tensor.dtype, tensor.shape) == (torch.uint8, (len(contents[name].data),))
        assert bytes_of(tensor) == contents[name].data


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["F32", "BOOL", "I64", "F8_E4M3", "C64"])
def test_scalars_and_empty_tensors_keep_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    entry = random_entry(dtype, shape)
    (tensor,) = headrace.load(WatchedSource(serialize({"t": entry}))).values()
    expected = value_of(entry)
    assert (tensor.dtype, tensor.shape, bytes_of(tensor)) == (expected.dtype, expected.shape, entry.data)


def test_a_checkpoint_of_nothing_and_one_of_empty_tensors_end_at_once() -> None:
    assert headrace.load(WatchedSource(serialize({}))) == {}
    only_empty = {"a": random_entry("F32", (0,)), "b": random_entry("F32", (0, 4))}
    assert list(headrace.load(WatchedSource(serialize(only_empty)), memory_limit=0)) == ["a", "b"]


def test_a_tensor_of_many_chunks_arrives_right() -> None:
    contents = random_contents(17 * MIB + 3, 5)
    assert not wrong(headrace.load(WatchedSource(serialize(contents, data_start=3)), memory_limit=0, concurrency=8), contents)


# ---- order and names


def test_file_order_is_the_order_of_offsets() -> None:
    for concurrency in (1, 8):
        with headrace.stream(WatchedSource(MIXED_BYTES), order="file", memory_limit=MIB, concurrency=concurrency) as tensors:
            assert [name for name, _ in tensors] == list(MIXED)


def test_ready_order_does_not_wait_for_a_read_that_is_stuck() -> None:
    stuck = Block()
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(0), stuck)])
    with headrace.stream(source, order="ready", memory_limit=MIB, concurrency=2) as tensors:
        try:
            others = {name: bytes_of(tensor) == LARGE[name].data for name, tensor in islice(tensors, len(LARGE) - 1)}
        finally:
            stuck.release.set()
        ((last, tensor),) = [next(tensors)]
    assert last in ("t000", "t001"), "one of the two readers' first reads was stuck"
    assert others == {name: True for name in LARGE if name != last}
    assert bytes_of(tensor) == LARGE[last].data


def test_readers_run_ahead_up_to_the_limit_and_no_further() -> None:
    limit, size = 2 * MIB, 300 * KIB
    filled = threading.Event()
    taken = 0
    ahead: list[int] = []

    class Counting(WatchedSource):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            if len(buffer) >= size:
                ahead.append(len(self.calls) * size - taken * size)
                if len(self.calls) * size >= limit - size:
                    filled.set()
            super().read_into(offset, buffer)

    with headrace.stream(Counting(LARGE_BYTES), memory_limit=limit, concurrency=4) as tensors:
        assert filled.wait(30), "reading must go on while the caller works"
        for _, tensor in tensors:
            del tensor
            taken += 1
    assert max(ahead) <= limit + 2 * size


@pytest.mark.parametrize("rename", [{"t003": "third"}, lambda name: "third" if name == "t003" else name], ids=["mapping", "call"])
def test_rename_changes_the_name_that_is_handed_out(rename: Any) -> None:
    loaded = headrace.load(WatchedSource(LARGE_BYTES), rename=rename, names=["t002", "t003"])
    assert list(loaded) == ["t002", "third"]
    assert bytes_of(loaded["third"]) == LARGE["t003"].data


def test_an_error_of_rename_reaches_the_caller_and_closes_the_stream() -> None:
    def fail(name: str) -> str:
        raise ZeroDivisionError(name)

    source = WatchedSource(LARGE_BYTES)
    with pytest.raises(ZeroDivisionError):
        headrace.load(source, rename=fail)
    assert source.closed


# ---- how a stream is used


def test_a_stream_runs_once() -> None:
    tensors = headrace.stream(WatchedSource(LARGE_BYTES))
    assert len(list(tensors)) == len(LARGE)
    with pytest.raises(StreamError):
        iter(tensors)


def test_a_stream_that_was_left_early_does_not_start_again() -> None:
    tensors = headrace.stream(WatchedSource(LARGE_BYTES))
    for _ in tensors:
        break
    with pytest.raises(StreamError):
        list(tensors)


def test_a_closed_stream_says_so_and_does_not_just_end() -> None:
    tensors = headrace.stream(WatchedSource(LARGE_BYTES))
    running = iter(tensors)
    next(running)
    tensors.close()
    with pytest.raises(StreamError):
        next(running)
    with pytest.raises(StreamError):
        next(tensors)


def test_close_from_another_thread_ends_a_wait_with_a_stream_error() -> None:
    stuck = Block()
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(2), stuck)])
    tensors = headrace.stream(source, order="file", memory_limit=0, concurrency=1)
    failed: list[BaseException] = []

    def close() -> None:
        stuck.entered.wait(30)
        try:
            tensors.close()
        except BaseException as error:  # noqa: BLE001
            failed.append(error)
            stuck.release.set()

    closer = threading.Thread(target=close, name="closer")
    closer.start()
    try:
        with pytest.raises(StreamError):
            list(tensors)
    finally:
        stuck.release.set()
        closer.join(30)
    assert not failed
    assert source.closed


def test_nothing_is_read_before_the_first_tensor_is_asked_for() -> None:
    source = WatchedSource(LARGE_BYTES)
    tensors = headrace.stream(source)
    assert source.read_count == 1  # the header
    tensors.close()
    assert source.read_count == 1
    assert source.closed


def test_an_open_checkpoint_stays_open_after_a_stream_of_it() -> None:
    source = WatchedSource(LARGE_BYTES)
    with headrace.open(source) as checkpoint:
        for _ in range(2):
            assert not wrong(headrace.load(checkpoint), LARGE)
        assert not source.closed
    assert source.closed


@pytest.mark.parametrize("arguments", [{"order": "random"}, {"ownership": "mine"}, {"device": "tpu"}, {"dtype": "F31"}], ids=str)
def test_a_choice_that_does_not_exist_is_refused_and_the_source_closed(arguments: dict[str, Any]) -> None:
    source = WatchedSource(LARGE_BYTES)
    with pytest.raises(OptionError) as caught:
        headrace.stream(source, **arguments)
    assert caught.value.option == next(iter(arguments))
    assert source.closed or not source.calls


# ---- the interpreter


def test_the_caller_runs_with_a_short_switch_interval_and_the_collector_on() -> None:
    before = sys.getswitchinterval()
    with headrace.stream(WatchedSource(MIXED_BYTES)) as tensors:
        for _ in tensors:
            assert sys.getswitchinterval() <= 50e-6 * 1.01
            assert gc.isenabled()
    assert sys.getswitchinterval() == before


def test_streams_that_overlap_restore_the_interval_when_the_last_one_ends() -> None:
    before = sys.getswitchinterval()
    first, second = (headrace.stream(WatchedSource(LARGE_BYTES)) for _ in range(2))
    next(first)
    next(second)
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        headrace.load(WatchedSource(MIXED_BYTES))
        assert not gc.isenabled()
    finally:
        gc.enable()


# ---- progress and statistics


def test_progress_is_called_on_the_callers_thread_and_never_goes_back() -> None:
    seen: list[headrace.Snapshot] = []
    threads = set()

    def progress(snapshot: headrace.Snapshot) -> None:
        threads.add(threading.current_thread())
        seen.append(snapshot)

    headrace.load(WatchedSource(MIXED_BYTES), progress=progress, memory_limit=MIB)
    assert threads == {threading.current_thread()}
    assert [s.read_nbytes for s in seen] == sorted(s.read_nbytes for s in seen)
    assert [s.tensors for s in seen] == sorted(s.tensors for s in seen)
    assert seen[-1].read_nbytes == seen[-1].total_nbytes == sum(len(entry.data) for entry in MIXED.values())


def test_progress_goes_on_while_a_read_is_stuck() -> None:
    stuck = Block()
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(0), stuck)])
    calls = 0

    def progress(_: headrace.Snapshot) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            stuck.release.set()

    assert not wrong(headrace.load(source, progress=progress, concurrency=1), LARGE)


def test_an_error_of_progress_reaches_the_caller_and_closes_the_stream() -> None:
    def progress(_: headrace.Snapshot) -> None:
        raise ZeroDivisionError

    source = WatchedSource(LARGE_BYTES)
    with pytest.raises(ZeroDivisionError):
        headrace.load(source, progress=progress)
    assert source.closed


def stats_of(source: Any, **arguments: Any) -> headrace.Snapshot:
    with headrace.stream(source, **arguments) as tensors:
        for _ in tensors:
            pass
    return tensors.stats


@pytest.mark.parametrize("concurrency", [1, 8])
def test_stats_count_bytes_and_tensors_exactly(concurrency: int) -> None:
    source = WatchedSource(MIXED_BYTES)
    stats = stats_of(source, concurrency=concurrency, memory_limit=2 * MIB)
    total = sum(len(entry.data) for entry in MIXED.values())
    assert stats.read_nbytes == stats.total_nbytes == stats.tensor_nbytes == total
    assert sum(call.nbytes for call in source.calls[1:]) == total
    assert stats.tensors == stats.total_tensors == len(MIXED)
    assert (stats.surplus_nbytes, stats.copied_nbytes, stats.cast_nbytes, stats.direct_nbytes) == (0, 0, 0, 0)
    assert (stats.concurrency, stats.memory_limit) == (concurrency, 2 * MIB)
    assert [route[:2] for route in stats.routes] == [("memory:", "straight")]


def test_stats_of_a_cast_count_source_bytes() -> None:
    contents = {"a": random_entry("F32", (1000,)), "b": random_entry("BF16", (1000,)), "c": random_entry("I32", (1000,))}
    stats = stats_of(WatchedSource(serialize(contents)), dtype="BF16")
    assert (stats.read_nbytes, stats.cast_nbytes, stats.copied_nbytes) == (10_000, 4000, 4000)
    assert stats.tensor_nbytes == 2000 + 2000 + 4000


def test_stats_of_a_column_slice_count_the_surplus() -> None:
    entry = random_entry("F32", (64, 64))
    stats = stats_of(WatchedSource(serialize({"a": entry})), slices={"a": (slice(None), slice(0, 32))})
    assert stats.read_nbytes == stats.total_nbytes == 64 * 64 * 4 - 32 * 4
    assert stats.surplus_nbytes == stats.read_nbytes - 64 * 32 * 4
    assert stats.tensor_nbytes == 64 * 32 * 4
    assert stats.copied_nbytes == stats.read_nbytes


@pytest.mark.parametrize(
    "arguments",
    [{"ownership": "copied"}, {"into": {f"t{i:03}": torch.empty(KIB, dtype=torch.uint8) for i in range(20)}}],
    ids=["copied", "into"],
)
def test_stats_count_the_second_hop_of_small_tensors(arguments: dict[str, Any]) -> None:
    stats = stats_of(WatchedSource(serialize(random_contents(*[KIB] * 20))), **arguments)
    assert (stats.read_nbytes, stats.copied_nbytes, stats.cast_nbytes) == (20 * KIB, 20 * KIB, 0)


def test_stats_of_a_stream_that_was_left_early_count_what_was_handed_out() -> None:
    contents = random_contents(*[KIB] * 100)
    with headrace.stream(WatchedSource(serialize(contents))) as tensors:
        for _ in range(3):
            next(tensors)
    assert (tensors.stats.tensors, tensors.stats.tensor_nbytes, tensors.stats.total_tensors) == (3, 3 * KIB, 100)
    assert tensors.stats == tensors.stats


def test_times_of_the_stats_add_up() -> None:
    stats = stats_of(WatchedSource(MIXED_BYTES), memory_limit=MIB)
    assert stats.seconds >= stats.source_wait_s + stats.caller_s > 0


# ---- direct reads


@pytest.fixture(scope="module")
def direct_folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("direct")
    contents = MIXED | random_contents(5 * MIB + 1, 9 * MIB + 4095, 77)
    return {
        "even": write(folder / "even.safetensors", contents),
        "odd": write(folder / "odd.safetensors", contents, data_start=1),
        "short": write(folder / "short.safetensors", random_contents(77, 5)),
    }


@pytest.mark.parametrize("file", ["even", "odd", "short"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"memory_limit": 0, "concurrency": 8},
        {"dtype": "F64"},
        {"dtype": "F16", "ownership": "copied"},
        {"slices": {"layer.*": (slice(1, -1),)}},
        {"slices": {"layer.*": (slice(None, None, 2), slice(3, 90))}},
        {"slices": {"layer.*": (slice(None, None, -1), slice(5, 800))}, "dtype": "F32"},
    ],
    ids=str,
)
def test_direct_reads_bring_the_same_bytes_as_buffered_ones(
    direct_folder: dict[str, Path], file: str, arguments: dict[str, Any]
) -> None:
    path = direct_folder[file]
    if "slices" in arguments:
        with headrace.open(path) as checkpoint:
            (index,) = arguments["slices"].values()
            fitting = {n: index for n, info in checkpoint.items() if len(info.shape) == 2 and "weight" in n}
        arguments = arguments | {"slices": fitting}
    results = []
    for direct_io in ("on", "off"):
        with headrace.stream(path, direct_io=direct_io, order="file", **arguments) as tensors:
            results.append([(name, bytes_of(tensor)) for name, tensor in tensors])
        stats = tensors.stats
        assert direct_io == "on" or stats.direct_nbytes == 0
        assert 0 <= stats.direct_nbytes <= stats.read_nbytes
    assert results[0] == results[1]


@pytest.mark.parametrize("file", ["even", "odd"])
def test_direct_reads_fill_given_tensors_the_same_way(direct_folder: dict[str, Path], file: str) -> None:
    results = []
    for direct_io in ("on", "off"):
        with headrace.open(direct_folder[file]) as checkpoint:
            infos = {name: info for name, info in checkpoint.items() if info.dtype in ("BF16", "U8", "F32")}
        given = {
            name: torch.empty(info.shape, dtype=value_of(Entry(info.dtype, (0,), b"")).dtype) for name, info in infos.items()
        }
        headrace.load(direct_folder[file], into=given, direct_io=direct_io, memory_limit=MIB)
        results.append({name: bytes_of(tensor) for name, tensor in given.items()})
    assert results[0] == results[1]


def test_direct_reads_are_used_where_the_filesystem_has_them(direct_folder: dict[str, Path]) -> None:
    from headrace.sources.file import FileSource

    source = FileSource(direct_folder["even"], direct_io="on")
    possible = source.prefers_direct(0, 4096)
    source.close()
    stats = stats_of(direct_folder["even"], direct_io="on")
    if not possible:
        pytest.skip("no direct reads on this filesystem")
    assert stats.direct_nbytes > 0.9 * stats.read_nbytes


def test_direct_reads_that_cannot_be_had_are_degraded_aloud(caplog: pytest.LogCaptureFixture) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no tmpfs here")
    path = shm / "headrace-test-direct.safetensors"
    try:
        write(path, LARGE)
        stats = stats_of(path, direct_io="on")
    finally:
        path.unlink(missing_ok=True)
    assert stats.direct_nbytes == 0
    assert len(stats.degraded) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# ---- into


VALUES: Contents = {
    "large": random_entry("F32", (300, 1024), seed=1),
    "small": random_entry("F32", (7, 5), seed=2),
    "other": random_entry("BF16", (11,), seed=3),
    "scalar": random_entry("F64", (), seed=4),
    "empty": random_entry("F32", (0, 3), seed=5),
    "ints": random_entry("I64", (13,), seed=6),
    "raw": random_entry("F6_E2M3", (16,), seed=7),
    "tail": random_entry("F16", (200, 1000), seed=8),
}
VALUES_BYTES = serialize(VALUES)
SENTINEL = 77


def blank(entry: Entry) -> torch.Tensor:
    return torch.full_like(value_of(entry), SENTINEL)


@pytest.mark.parametrize("form", ["mapping", "callable"])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_into_fills_the_given_tensors_and_hands_them_out(form: str, concurrency: int) -> None:
    given = {name: blank(entry) for name, entry in VALUES.items()}
    into: Any = given if form == "mapping" else lambda info: given[info.name]
    source = WatchedSource(VALUES_BYTES)
    loaded = headrace.load(source, into=into, concurrency=concurrency)
    assert all(loaded[name] is given[name] for name in VALUES)
    assert not wrong(given, VALUES)


def test_tensors_without_a_destination_are_made() -> None:
    given = {"small": blank(VALUES["small"]), "tail": blank(VALUES["tail"])}
    for into in (given, lambda info: given.get(info.name)):
        loaded = headrace.load(WatchedSource(VALUES_BYTES), into=into)
        assert {name for name in loaded if loaded[name] is given.get(name)} == set(given)
        assert not wrong(loaded, VALUES)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda like: torch.full(like.shape[::-1], SENTINEL, dtype=like.dtype).T,
    "every other column": lambda like: torch.full((like.shape[0], 2 * like.shape[1]), SENTINEL, dtype=like.dtype)[:, ::2],
    "part of a larger one": lambda like: torch.full((like.shape[0], like.shape[1] + 5), SENTINEL, dtype=like.dtype)[:, 2:-3],
    "rows of a larger one": lambda like: torch.full((like.shape[0] + 4, like.shape[1]), SENTINEL, dtype=like.dtype)[1:-3],
    "channels last": lambda like: torch.full((1, *like.shape, 1), SENTINEL, dtype=like.dtype).permute(0, 2, 1, 3)[0, :, :, 0].T,
}


@pytest.mark.parametrize("layout", STRIDED)
@pytest.mark.parametrize("name", ["large", "small", "tail"])
def test_into_fills_tensors_of_any_layout_and_nothing_beside_them(layout: str, name: str) -> None:
    target = STRIDED[layout](value_of(VALUES[name]))
    whole = target._base if target._base is not None else target
    headrace.load(WatchedSource(VALUES_BYTES), names=[name, "other"], into={name: target})
    assert bytes_of(target) == VALUES[name].data
    target.fill_(SENTINEL)
    assert torch.equal(whole, torch.full_like(whole, SENTINEL))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("rule", [None, "BF16", "F16"])
def test_into_a_tensor_of_another_dtype_converts_once_whatever_dtype_says(dtype: Any, strided: bool, rule: str | None) -> None:
    target = torch.empty(600, 1024, dtype=dtype)[::2] if strided else torch.empty(300, 1024, dtype=dtype)
    headrace.load(WatchedSource(VALUES_BYTES), names="large", into={"large": target}, dtype=rule)
    assert bytes_of(target) == bytes_of(value_of(VALUES["large"]).to(dtype))


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("index", [slice(1, 4), (slice(None), slice(1, 3)), (slice(None, None, -2), 3), (slice(0, 0),)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_into_takes_slices(index: Any, strided: bool, dtype: Any) -> None:
    expected = torch.from_numpy(value_of(VALUES["small"]).numpy()[index].copy()).to(dtype)
    shape = (*expected.shape, 2) if strided else expected.shape
    target = torch.full(shape, SENTINEL, dtype=dtype)
    target = target[..., 1] if strided else target
    headrace.load(WatchedSource(VALUES_BYTES), names=["small"], slices={"small": index}, into={"small": target})
    assert bytes_of(target) == bytes_of(expected)


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_into_a_parameter_bumps_its_version_and_leaves_the_graph_alone(strided: bool) -> None:
    data = torch.zeros(5, 7).T if strided else torch.zeros(7, 5)
    parameter = torch.nn.Parameter(data)
    loss = (parameter * parameter).sum()
    version = parameter._version
    loaded = headrace.load(WatchedSource(VALUES_BYTES), names="small", into={"small": parameter})
    assert loaded["small"] is parameter
    assert parameter.requires_grad
    assert parameter.is_leaf
    assert bytes_of(parameter) == VALUES["small"].data
    assert parameter._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_into_works_under_inference_mode_and_into_inference_tensors() -> None:
    with torch.inference_mode():
        tensor = blank(VALUES["small"])
        assert tensor.is_inference()
        ordinary = torch.nn.Parameter(value_of(VALUES["large"]))
        headrace.load(WatchedSource(VALUES_BYTES), names=["small", "large"], into={"small": tensor, "large": ordinary})
    assert bytes_of(tensor) == VALUES["small"].data
    headrace.load(WatchedSource(VALUES_BYTES), names=["small"], into={"small": tensor})


def test_into_fused_tensors_by_rows_and_by_columns() -> None:
    contents = {name: random_entry("F32", (6, 4), seed=i) for i, name in enumerate("qkv")}
    by_rows, by_columns = torch.empty(18, 4), torch.empty(6, 12)
    headrace.load(WatchedSource(serialize(contents)), into=dict(zip("qkv", by_rows.chunk(3), strict=True)))
    assert torch.equal(by_rows, torch.cat([value_of(contents[name]) for name in "qkv"]))
    headrace.load(WatchedSource(serialize(contents)), into=dict(zip("qkv", by_columns.chunk(3, dim=1), strict=True)))
    assert torch.equal(by_columns, torch.cat([value_of(contents[name]) for name in "qkv"], dim=1))


REFUSED: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.empty(7, 5, device="meta"),
    "negated": lambda: torch.zeros(7, 5, dtype=torch.complex64).conj().imag,
    "expanded": lambda: torch.zeros(1, 5).expand(7, 5),
    "overlapping": lambda: torch.zeros(40).as_strided((7, 5), (1, 1)),
    "wrong shape": lambda: torch.zeros(5, 7),
    "wrong rank": lambda: torch.zeros(35),
    "sparse": lambda: torch.zeros(7, 5).to_sparse(),
    "numpy": lambda: torch.zeros(7, 5).numpy(),
    "a string": lambda: "small",
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("form", ["mapping", "callable"])
def test_into_refuses_by_name_what_cannot_be_written(kind: str, form: str) -> None:
    tensor = REFUSED[kind]()
    source = WatchedSource(VALUES_BYTES)
    into: Any = {"small": tensor} if form == "mapping" else lambda info: tensor if info.name == "small" else None
    with pytest.raises(OptionError, match="small") as caught:
        headrace.stream(source, into=into)
    assert caught.value.option == "into"
    assert source.read_count == 1
    assert source.closed


def test_into_refuses_a_conjugated_view() -> None:
    contents = {"small": random_entry("C64", (3, 3))}
    with pytest.raises(OptionError, match="small"):
        headrace.stream(WatchedSource(serialize(contents)), into={"small": torch.zeros(3, 3, dtype=torch.complex64).conj()})


def test_into_refuses_two_names_for_the_same_memory() -> None:
    tied = torch.zeros(20, 5)
    with pytest.raises(OptionError) as caught:
        headrace.stream(
            WatchedSource(serialize({"a": random_entry("F32", (7, 5)), "b": random_entry("F32", (7, 5))})),
            into={"a": tied[:7], "b": tied[5:12]},
        )
    assert caught.value.option == "into"


def test_into_refuses_a_name_that_is_not_in_the_checkpoint() -> None:
    with pytest.raises(TensorNotFoundError) as caught:
        headrace.stream(WatchedSource(VALUES_BYTES), into={"smal": blank(VALUES["small"])})
    assert (caught.value.name, caught.value.close_matches[0]) == ("smal", "small")


@pytest.mark.parametrize("concurrency", [1, 8])
def test_a_failed_load_into_says_exactly_what_was_filled(concurrency: int) -> None:
    given = {name: torch.full((300 * KIB,), SENTINEL, dtype=torch.uint8) for name in LARGE}
    versions = {name: tensor._version for name, tensor in given.items()}
    fault = SourceError("the disk is gone", url="memory:")
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(11), Raise(fault))])
    with pytest.raises(LoadError) as caught:
        headrace.load(source, into=given, memory_limit=0, concurrency=concurrency)
    assert caught.value.__cause__ is fault
    filled = caught.value.filled
    right = [name for name in LARGE if bytes_of(given[name]) == LARGE[name].data]
    assert sorted(filled) == right
    assert concurrency > 1 or filled == tuple(LARGE)[:11]
    assert all(given[name]._version > versions[name] for name in filled), "what was written to must not pass for unchanged"


def test_what_readers_fill_after_the_error_is_said_to_be_filled() -> None:
    given = {name: torch.full((300 * KIB,), SENTINEL, dtype=torch.uint8) for name in LARGE}
    slow, fault = Block(), SourceError("the disk is gone", url="memory:")
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(3), slow), Fault(nth_data_read(5), Raise(fault))])
    later = threading.Timer(0.5, slow.release.set)
    later.start()
    with pytest.raises(LoadError) as caught:
        headrace.load(source, into=given, memory_limit=0, concurrency=4)
    later.join()
    filled = caught.value.filled
    assert "t003" in filled
    assert sorted(filled) == [name for name in LARGE if bytes_of(given[name]) == LARGE[name].data]


def test_an_interrupt_of_the_only_read_into_a_tensor_stays_an_interrupt() -> None:
    # One read needs no thread of its own: the signal arrives while the caller's thread reads.
    source = WatchedSource(serialize({"t": LARGE["t000"]}), [Fault(nth_data_read(0), Raise(KeyboardInterrupt()))])
    with pytest.raises(KeyboardInterrupt):
        headrace.load(source, into={"t": torch.empty(300 * KIB, dtype=torch.uint8)})
    assert source.closed


def test_close_from_another_thread_does_not_wait_for_the_only_read() -> None:
    stuck, closed = Block(), threading.Event()
    tensors = headrace.stream(WatchedSource(serialize({"t": LARGE["t000"]}), [Fault(nth_data_read(0), stuck)]))

    def close() -> None:
        stuck.entered.wait(30)
        tensors.close()
        closed.set()

    def let_go() -> None:
        closed.wait(10)
        stuck.release.set()

    threads = [threading.Thread(target=close), threading.Thread(target=let_go)]
    for thread in threads:
        thread.start()
    with pytest.raises(StreamError):
        next(tensors)
    for thread in threads:
        thread.join(30)


def test_leaving_early_bumps_the_versions_of_what_was_written() -> None:
    given = {name: torch.full((300 * KIB,), SENTINEL, dtype=torch.uint8) for name in LARGE}
    versions = {name: tensor._version for name, tensor in given.items()}
    with headrace.stream(WatchedSource(LARGE_BYTES), into=given, memory_limit=0) as tensors:
        for _ in range(3):
            next(tensors)
    written = [name for name, tensor in given.items() if int(tensor[0]) != SENTINEL or int(tensor[-1]) != SENTINEL]
    assert len(written) >= 3
    assert [name for name in written if given[name]._version == versions[name]] == []


def test_nothing_is_written_into_a_given_tensor_after_close() -> None:
    stuck = Block()
    given = {name: torch.full((300 * KIB,), SENTINEL, dtype=torch.uint8) for name in LARGE}
    source = WatchedSource(LARGE_BYTES, [Fault(nth_data_read(4), stuck)])
    tensors = headrace.stream(source, into=given, memory_limit=0, concurrency=1, order="file")
    next(tensors)
    assert stuck.entered.wait(30)
    closing = threading.Timer(0.1, stuck.release.set)
    closing.start()
    tensors.close()
    before = {name: bytes_of(tensor) for name, tensor in given.items()}
    closing.join()
    assert {name: bytes_of(tensor) for name, tensor in given.items()} == before


def test_two_streams_in_two_threads_are_independent() -> None:
    start = threading.Barrier(2)
    results: dict[int, list[str]] = {}

    def work(number: int, contents: Contents, data: bytes) -> None:
        start.wait(30)
        for _ in range(3):
            with headrace.stream(WatchedSource(data), memory_limit=MIB, concurrency=3) as tensors:
                kept = {name: tensor for i, (name, tensor) in enumerate(tensors) if i % 2}
            results.setdefault(number, []).extend(wrong(kept, contents))

    threads = [
        threading.Thread(target=work, args=(number, *pair), name=f"caller-{number}")
        for number, pair in enumerate([(MIXED, MIXED_BYTES), (LARGE, LARGE_BYTES)])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {0: [], 1: []}


def test_two_streams_taken_in_turn_by_one_thread_are_independent() -> None:
    streams = [headrace.stream(WatchedSource(LARGE_BYTES), memory_limit=0, order="file") for _ in range(2)]
    for (name, first), (other, second) in zip(*streams, strict=True):
        assert name == other
        assert bytes_of(first) == bytes_of(second) == LARGE[name].data
    for tensors in streams:
        tensors.close()
