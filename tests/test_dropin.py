"""The drop-ins behave as safetensors does, wherever it behaves; the installed package is asked, never remembered."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from checkpoints import (
    MIB,
    Contents,
    WatchedSource,
    bytes_of,
    mixed_contents,
    nth_data_read,
    random_contents,
    random_entry,
    serialize,
    write,
    write_sparse,
    wrong,
)
from corpus.fixtures import CorpusFolder, corpus  # noqa: F401  # a fixture
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace._dtypes import DTYPES
from headrace.errors import FormatError, OptionError, SourceChangedError, SourceError, TensorNotFoundError
from headrace.testing import Fault, Raise

SHAPES = [(4, 8), (16,), (2, 4, 8), (), (8, 0), (0, 8)]
BOX = (3, 4, 5)
METADATA = {"format": "pt", "é": "ü"}


def every_kind() -> Contents:
    """Every dtype in several shapes, a scalar and empty ones among them."""
    found: Contents = {}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        for j, shape in enumerate(SHAPES):
            if math.prod(shape) * dtype.bits % 8 == 0:
                found[f"{'zyx'[i % 3]}.{name}.{j}"] = random_entry(name, shape, seed=10 * i + j)
    return found


KINDS = every_kind()


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("kinds") / "kinds.safetensors", KINDS)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("box") / "box.safetensors"
    tensors = {
        "box": torch.arange(math.prod(BOX), dtype=torch.float32).reshape(BOX),
        "half": torch.arange(math.prod(BOX), dtype=torch.bfloat16).reshape(BOX),
        "scalar": torch.tensor(5.0),
        "empty": torch.empty(3, 0),
    }
    safetensors.torch.save_file(tensors, path, metadata=METADATA)
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    return write(tmp_path / "mixed.safetensors", mixed_contents())


def outcome(function: Callable[[], Any]) -> Any:
    """What comes of a call, comparable: a tensor's dtype, shape and bits; the builtin that an error is."""
    try:
        value = function()
    except Exception as exc:  # noqa: BLE001 - the kind of error is what is compared
        return next(kind for kind in type(exc).__mro__ if kind.__module__ == "builtins")
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, tuple(value.shape), bytes_of(value.clone(memory_format=torch.contiguous_format))
    if isinstance(value, (np.ndarray, np.generic)):
        return "array", value.dtype, value.shape, value.tobytes()
    return value


# ---- names, metadata, whole tensors


def names_by_dtype(*unlike: str) -> list[str]:
    return [name for name, entry in KINDS.items() if not entry.dtype.startswith(unlike)]


@pytest.mark.parametrize("framework", ["pt", "pytorch", "torch", "np", "numpy"])
def test_each_tensor_is_what_safetensors_gives(kinds: Path, framework: str) -> None:
    unlike = ("F4", "F6_", "F8", "BF16") if framework.startswith("n") else ("F6_",)
    with headrace.safe_open(kinds, framework) as ours, safetensors.safe_open(kinds, framework) as theirs:
        assert ours.keys() == theirs.keys() == sorted(KINDS)
        for name in names_by_dtype(*unlike):
            assert outcome(lambda: ours.get_tensor(name)) == outcome(lambda: theirs.get_tensor(name)), name  # noqa: B023
            mine, reference = ours.get_slice(name), theirs.get_slice(name)
            assert (mine.get_shape(), mine.get_dtype()) == (reference.get_shape(), reference.get_dtype())


def test_dtypes_that_torch_lacks_are_raw_bytes_where_safetensors_has_nothing(kinds: Path) -> None:
    with headrace.safe_open(kinds, "pt") as f, safetensors.safe_open(kinds, "pt") as theirs:
        for name in (name for name, entry in KINDS.items() if entry.dtype.startswith("F6_")):
            with pytest.raises(safetensors.SafetensorError):
                theirs.get_tensor(name)
            assert f.get_tensor(name).dtype == torch.uint8
            assert bytes_of(f.get_tensor(name)) == KINDS[name].data
            assert f.get_slice(name).get_shape() == list(KINDS[name].shape)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3"])
def test_dtypes_that_numpy_lacks_are_refused_before_anything_is_read(dtype: str) -> None:
    watched = WatchedSource(serialize({"a": random_entry("F32", (4,)), "b": random_entry(dtype, (16,))}))
    f = headrace.safe_open(watched, "np")  # type: ignore[arg-type]
    for call in (lambda: f.get_tensor("b"), lambda: f.get_slice("b")[:2], f.get_tensors):
        with pytest.raises(OptionError) as caught:
            call()
        assert caught.value.option == "framework"
    assert len(watched.calls) == 1
    assert f.get_tensor("a").dtype == np.float32


def test_dtypes_that_ml_dtypes_brings_to_numpy_are_arrays(kinds: Path) -> None:
    pytest.importorskip("ml_dtypes")
    with headrace.safe_open(kinds, "np") as f:
        for name in names_by_dtype("F4", "F6_"):
            array = f.get_tensor(name)
            assert (array.shape, array.tobytes()) == (KINDS[name].shape, KINDS[name].data)
            assert array.dtype.name == str(DTYPES[KINDS[name].dtype].torch)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, METADATA], ids=str)
def test_metadata_and_order_of_names(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {name: torch.arange(i + 1, dtype=torch.float32) for i, name in enumerate(["b", "é", "a.10", "a.9", "Z", ""])}
    tensors["double"] = torch.ones(3, dtype=torch.float64)
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    with headrace.safe_open(path, framework="pt") as ours, safetensors.safe_open(path, framework="pt") as theirs:
        assert ours.metadata() == theirs.metadata()
        assert ours.keys() == theirs.keys()
        assert ours.offset_keys() == theirs.offset_keys()
        assert list(ours.get_tensors()) == list(theirs.get_tensors())


@pytest.mark.slow  # makes the files
def test_files_from_the_field(corpus: CorpusFolder) -> None:  # noqa: F811
    checked = 0
    for case in corpus.cases:
        if case["kind"] != "file" or case["stricter"] or case.get("limits") or "tensors_file" in case:
            continue
        path = corpus.path(case)
        if case["expect"] == "error":
            with pytest.raises(FormatError):
                headrace.safe_open(path, "pt")
            continue
        with headrace.safe_open(path, "pt") as ours, safetensors.safe_open(path, "pt") as theirs:
            assert (ours.keys(), ours.metadata()) == (theirs.keys(), theirs.metadata()), case["id"]
            for name in ours.keys():  # noqa: SIM118  # as its users write it
                part = ours.get_slice(name)
                if part.get_dtype()[:3] not in ("F4", "F6_") and max(part.get_shape(), default=0) < 1 << 63:
                    assert outcome(lambda: ours.get_tensor(name)) == outcome(lambda: theirs.get_tensor(name)), name  # noqa: B023
        checked += 1
    assert checked > 20


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_load_file_is_safetensors_load_file(tmp_path: Path, backend: str) -> None:
    path = write(tmp_path / "m.safetensors", {n: e for n, e in mixed_contents().items() if e.dtype[:3] != "F6_"})
    ours, theirs = headrace.load_file(path, backend=backend), safetensors.torch.load_file(path, backend=backend)
    assert list(ours) == list(theirs)
    assert {n: outcome(lambda: ours[n]) for n in ours} == {n: outcome(lambda: theirs[n]) for n in theirs}  # noqa: B023
    assert list(headrace.load_file(str(path), "cpu")) == list(headrace.load_file(path, device=torch.device("cpu"))) == list(ours)


def test_get_tensors_as_arrays(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {n: KINDS[n] for n in names_by_dtype("F4", "F6_", "F8", "BF16")})
    with headrace.safe_open(path, "np") as f:
        ours, theirs = f.get_tensors(), safetensors.numpy.load_file(path)
    assert {n: outcome(lambda: ours[n]) for n in ours} == {n: outcome(lambda: theirs[n]) for n in theirs}  # noqa: B023


def test_a_folder_of_shards_is_one_file(tmp_path: Path) -> None:
    contents = random_contents(100, 200, 300)
    write(tmp_path / "model-00001-of-00002.safetensors", {"t000": contents["t000"]})
    write(tmp_path / "model-00002-of-00002.safetensors", {n: e for n, e in contents.items() if n != "t000"})
    assert not wrong(headrace.load_file(tmp_path), contents)
    with headrace.safe_open(tmp_path, "pt") as f:
        assert f.keys() == sorted(contents)
        assert not wrong({name: f.get_tensor(name) for name in f.keys()}, contents)  # noqa: SIM118


# ---- slices

INDICES: list[Any] = [
    0, -1, 2, -3, 3, -4, slice(None), slice(1, None), slice(None, -1), slice(-2, None), slice(1, 1), slice(2, 1), slice(0, 99),
    slice(7, 9), slice(-99, 2), slice(None, None, 2), slice(1, None, 2), slice(None, None, 99), ..., (), None, (0, 0), (0, 0, 0),
    (0, 0, 0, 0), (slice(None), 1), (slice(None), slice(1, 3)), (slice(None), slice(None), slice(1, 3)), (..., 0), (0, ...),
    (0, ..., 1), (..., slice(1, 3)), (slice(None), -1), (slice(None), 4), (slice(None), -5), (0, slice(3, 1)),
    (slice(None),) * 3, (slice(None),) * 4, (0, None), (None, 0), (slice(None), None, 1), (..., None), (None, ..., None),
    (None,) * 3,
    (slice(0, 2), slice(1, 4, 2), slice(None, None, 3)), (1, slice(1, 3), slice(2, None)),
    [0], [0, 1], [1, 0], [0, 0], [-1, 1], [], [5], ([2, 0], ...), (slice(None), [0, 2]), (slice(1, None), [2, -1], slice(1, 3)),
    ([0], [1]), ([0, 1], 0), (0, [1, 2]), (0, slice(None), [1, 2]), (slice(None), 0, [1, 2]), ([0, 1], slice(None), [1, 2]),
    (None, [0, 1]), ([0, 1], None), ([0, 1], ..., None), (..., [3, 1]), (slice(None), slice(None), [4, 0, 0]), ((0, 1),),
    ((0, 1), 0),
    range(1, 3), (slice(None), range(2)), ([1], [5]), ([[0, 1], [1, 0]],), True, False, (True, 0), (0, True), [True, False, True],
    (slice(None), [True, False, True, True]), torch.tensor(1), torch.tensor([0, 2]), torch.tensor([True, False, True]),
    (0, torch.tensor([2, 0])), np.int64(1), np.array([0, 2]), (slice(None), np.array([3, 1])), np.array([[0, 1], [1, 0]]),
    slice(np.int64(0), np.int64(2)), slice(torch.tensor(0), torch.tensor(2)), (..., ...), (..., 0, ...),
    1.0, (0, 1.0), slice(0.0, 1.0), slice(None, "a"), slice(None, None, 0), "x", {},
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("name", ["box", "half", "scalar", "empty"])
def test_a_slice_is_what_safetensors_gives(box: Path, name: str) -> None:
    with headrace.safe_open(box, "pt") as ours, safetensors.safe_open(box, "pt") as theirs:
        part, reference = ours.get_slice(name), theirs.get_slice(name)
        for index in INDICES:
            got, expected = outcome(lambda: part[index]), outcome(lambda: reference[index])  # noqa: B023
            wrong_in_two_ways = (
                name == "scalar" and isinstance(index, slice) and isinstance(got, type) and isinstance(expected, type)
            )
            assert got == expected or wrong_in_two_ways, index


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_a_slice_of_an_array_is_numpys_where_safetensors_refuses(box: Path) -> None:
    whole = np.arange(math.prod(BOX), dtype=np.float32).reshape(BOX)
    with headrace.safe_open(box, "np") as ours, safetensors.safe_open(box, "np") as theirs:
        part, reference = ours.get_slice("box"), theirs.get_slice("box")
        for index in INDICES:
            got, expected = outcome(lambda: part[index]), outcome(lambda: reference[index])  # noqa: B023
            assert got == outcome(lambda: whole[index]), index  # noqa: B023
            takes_booleans_for_integers = any(
                item is True or item is False for item in (index if type(index) is tuple else [index])
            )
            assert got == expected or not isinstance(expected, tuple) or takes_booleans_for_integers, index


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_steps_may_go_backwards(box: Path, framework: str) -> None:
    whole = np.arange(math.prod(BOX), dtype=np.float32).reshape(BOX)
    with headrace.safe_open(box, framework) as f:
        for index in (slice(None, None, -1), (0, slice(3, 0, -2)), (..., slice(None, None, -1)), ([0, 2], slice(None, None, -1))):
            assert np.array_equal(np.asarray(f.get_slice("box")[index]), whole[index])


def test_iterating_a_slice_ends(box: Path) -> None:
    with headrace.safe_open(box, "pt") as f:
        rows = list(f.get_slice("box"))  # by __getitem__ until IndexError
    assert [tuple(row.shape) for row in rows] == [BOX[1:]] * BOX[0]


def selectors(size: int, *, lists: bool) -> st.SearchStrategy[Any]:
    ends = st.none() | st.integers(-size - 2, size + 2)
    choices = [
        st.integers(-size, size - 1),
        st.builds(slice, ends, ends, st.none() | st.integers(1, size + 1)),
        st.just(slice(None)),
    ]
    if lists:
        choices.append(st.lists(st.integers(-size, size - 1), max_size=4))
    return st.one_of(choices)


@st.composite
def indices(draw: st.DrawFn, *, lists: bool) -> Any:
    chosen = [draw(selectors(size, lists=lists)) for size in BOX[: draw(st.integers(0, 3))]]
    if draw(st.booleans()):
        chosen = [*chosen[:1], ..., *[draw(selectors(size, lists=False)) for size in BOX[len(BOX) - len(chosen[1:]) :]]]
    for _ in range(draw(st.integers(0, 2))):
        chosen.insert(draw(st.integers(0, len(chosen))), None)
    return tuple(chosen)


@given(index=indices(lists=False))
def test_any_slice_is_safetensors_slice(box: Path, index: Any) -> None:
    with headrace.safe_open(box, "pt") as ours, safetensors.safe_open(box, "pt") as theirs:
        assert outcome(lambda: ours.get_slice("half")[index]) == outcome(lambda: theirs.get_slice("half")[index])


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@given(index=indices(lists=True))
def test_any_slice_with_lists_is_safetensors_slice(box: Path, index: Any) -> None:
    with headrace.safe_open(box, "pt") as ours, safetensors.safe_open(box, "pt") as theirs:
        assert outcome(lambda: ours.get_slice("box")[index]) == outcome(lambda: theirs.get_slice("box")[index])


@given(index=indices(lists=True))
def test_any_slice_of_an_array_is_numpys(box: Path, index: Any) -> None:
    whole = np.arange(math.prod(BOX), dtype=np.float32).reshape(BOX)
    with headrace.safe_open(box, "np") as ours:
        assert outcome(lambda: ours.get_slice("box")[index]) == outcome(lambda: whole[index])


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name[:3] not in ("F4", "F6_")])
def test_slices_of_every_dtype(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path / "m.safetensors", {"w": random_entry(dtype, (6, 8))})
    with headrace.safe_open(path, "pt") as ours, safetensors.safe_open(path, "pt") as theirs:
        for index in (2, slice(1, 5), (slice(None), slice(2, 7, 3)), (..., None), (slice(None, None, 2), 3)):
            assert outcome(lambda: ours.get_slice("w")[index]) == outcome(lambda: theirs.get_slice("w")[index])  # noqa: B023


def test_rows_of_packed_elements_can_be_cut(tmp_path: Path) -> None:
    entry = random_entry("F4", (6, 8))  # safetensors gives whole F4 tensors, and fails at a slice of one
    with headrace.safe_open(write(tmp_path / "m.safetensors", {"w": entry}), "pt") as f:
        part = f.get_slice("w")
        assert bytes_of(part[1:3]) == entry.data[4:12]
        assert part[1:3].shape == (2, 4)
        assert bytes_of(part[...]) == bytes_of(part[:, :]) == entry.data
        with pytest.raises(ValueError, match="4 bits"):
            part[:, 2:4]


# ---- what is read


@pytest.mark.parametrize(
    ("index", "nbytes"),
    [
        pytest.param(slice(100, 110), 10, id="rows"),
        pytest.param(7, 1, id="row"),
        pytest.param([700, 703], 4, id="list"),
        pytest.param((None, torch.tensor([999, 990]), ...), 10, id="tensor"),
        pytest.param(range(5, 8), 3, id="range"),
        pytest.param(slice(5, 5), 0, id="empty"),
    ],
)
def test_only_the_rows_needed_are_read(index: Any, nbytes: int) -> None:
    watched = WatchedSource(serialize({"w": random_entry("U8", (1000, 4096)), "other": random_entry("U8", (MIB,))}))
    with headrace.safe_open(watched, "pt") as f:  # type: ignore[arg-type]
        part = f.get_slice("w")
        assert (part.get_shape(), part.get_dtype(), f.keys()) == ([1000, 4096], "U8", ["other", "w"])
        assert len(watched.calls) == 1  # the header
        part[index]
    assert sum(call.nbytes for call in watched.calls[1:]) == nbytes * 4096


def test_opening_reads_the_header_and_nothing_else(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "m.safetensors", {f"t{i}": 64 * MIB for i in range(16)})
    before = read_nbytes()
    with headrace.safe_open(path, "pt") as f:
        for name in f.keys():  # noqa: SIM118
            f.get_slice(name).get_shape()
    assert read_nbytes() - before < 2 * MIB


def read_nbytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def test_names_shapes_and_metadata_need_no_torch(box: Path) -> None:
    code = (
        "import sys, json, headrace\n"
        f"with headrace.safe_open({str(box)!r}, 'pt') as f:\n"
        "    seen = [f.keys(), f.offset_keys(), f.metadata(), f.get_slice('box').get_shape(), f.get_slice('half').get_dtype()]\n"
        "print(json.dumps([seen, sorted({'torch', 'numpy', 'safetensors'} & set(sys.modules))]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seen, imported = json.loads(result.stdout)
    assert seen[2:] == [METADATA, list(BOX), "BF16"]
    assert imported == []


# ---- what is handed out is the caller's


@pytest.mark.parametrize("mmap", ["off", "auto"])
def test_tensors_do_not_alias_the_file(mixed: Path, monkeypatch: pytest.MonkeyPatch, mmap: str) -> None:
    monkeypatch.setenv("HEADRACE_MMAP", mmap)
    contents = mixed_contents()
    with headrace.safe_open(mixed, "pt") as f:
        whole = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
        table = f.get_slice("layer.0.table")[1000:1010]
    loaded = headrace.load_file(mixed)
    part = table.clone()
    with mixed.open("r+b") as file:
        file.write(bytes(mixed.stat().st_size))
    assert not wrong(whole, contents)
    assert not wrong(loaded, contents)
    assert torch.equal(table, part)
    for tensor in (*whole.values(), *loaded.values(), table):
        tensor.zero_()
    assert not any(map(any, map(bytes_of, whole.values())))


def test_arrays_can_be_written_and_are_alone(mixed: Path) -> None:
    with headrace.safe_open(mixed, "np") as f:
        one, other = f.get_tensor("layer.0.norm"), f.get_tensor("layer.0.norm")
        part = f.get_slice("layer.0.norm")[:8]
    assert one.flags.writeable
    assert part.flags.writeable
    one[:] = 0
    assert other.any()
    assert part.any()


def test_pickled_tensors_are_their_size(mixed: Path) -> None:
    with headrace.safe_open(mixed, "pt") as f:
        small, part = f.get_tensor("layer.0.scale"), f.get_slice("layer.0.weight")[3]
        framed = f.get_slice("layer.0.weight")[None, 3]
    for tensor in (small, part, framed):
        pickled = pickle.dumps(tensor)
        assert len(pickled) < tensor.nbytes + 1024
        assert bytes_of(pickle.loads(pickled)) == bytes_of(tensor)


def test_memory_of_kept_tensors_is_what_they_hold(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", random_contents(*[16 << 10] * 2000))
    with headrace.safe_open(path, "pt") as f:
        f.get_tensor("t000")
        before, kept = address_space(), []
        kept += [f.get_tensor(name) for name in f.keys()]  # noqa: SIM118
        assert address_space() - before < sum(tensor.nbytes for tensor in kept) + 16 * MIB


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


# ---- threads, closing, errors


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_eight_threads_take_tensors_from_one_file(mixed: Path, framework: str) -> None:
    contents = {n: e for n, e in mixed_contents().items() if framework == "pt" or e.dtype not in ("BF16", "F6_E2M3")}
    with headrace.safe_open(mixed, framework) as f, ThreadPoolExecutor(8) as pool:
        for tensors in (pool.map(f.get_tensor, contents), pool.map(lambda name: f.get_slice(name)[...], contents)):
            found = {name: torch.as_tensor(tensor) for name, tensor in zip(contents, tensors, strict=True)}
            assert not wrong(found, contents)


def test_a_loop_like_transformers(mixed: Path) -> None:
    """Slices of all files first; then from a pool, sorted by name, after the files are out of sight."""
    files = [headrace.safe_open(mixed, framework="pt", device="cpu", backend="mmap")]
    lazy = {name: f.get_slice(name) for f in files for name in f.keys()}  # noqa: SIM118
    assert files[0].metadata() is None
    assert all(part.get_dtype() in DTYPES and isinstance(part.get_shape(), list) for part in lazy.values())
    with ThreadPoolExecutor(4) as pool:
        jobs = {name: pool.submit(lambda part: part[...], lazy[name]) for name in sorted(lazy)}
        loaded = {name: job.result() for name, job in jobs.items()}
    for f in files:
        f.__exit__(None, None, None)
    assert not wrong(loaded, mixed_contents())


def test_a_loop_like_vllm(mixed: Path) -> None:
    found = {}
    with headrace.safe_open(str(mixed), framework="pt") as f:
        for name in f.keys():  # noqa: SIM118
            found[name] = f.get_tensor(name)
    assert not wrong(found, mixed_contents())


def test_a_closed_file_says_so_and_its_slices_go_on(box: Path) -> None:
    f = headrace.safe_open(box, "pt")
    part = f.get_slice("box")
    with f as same:
        assert same is f
    for call in (f.keys, f.offset_keys, f.metadata, f.get_tensors, lambda: f.get_tensor("box"), lambda: f.get_slice("box")):
        with pytest.raises(SourceError) as caught:
            call()
        assert (caught.value.status, caught.value.url) == (errno.EBADF, str(box))
    f.__exit__(None, None, None)
    assert part[0].shape == BOX[1:]
    assert part.get_shape() == list(BOX)


def test_the_file_is_closed_with_the_block_or_its_last_slice(box: Path) -> None:
    with headrace.safe_open(box, "pt") as f:
        f.get_tensor("box")
        assert is_open(box)
    assert not is_open(box)
    part = headrace.safe_open(box, "pt").get_slice("box")
    assert is_open(box)
    del part
    assert not is_open(box)


def is_open(path: Path) -> bool:
    return str(path) in {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}


def test_it_can_be_used_without_with_and_dropped(box: Path) -> None:
    for _ in range(50):
        assert headrace.safe_open(box, "pt").get_tensor("scalar") == 5
    assert not is_open(box)


@pytest.mark.parametrize("make", [lambda f: f, lambda f: f.get_slice("box")], ids=["file", "slice"])
def test_open_files_are_not_pickled(box: Path, make: Callable[[Any], Any]) -> None:
    with headrace.safe_open(box, "pt") as f, pytest.raises(TypeError):
        pickle.dumps(make(f))


def test_unknown_names(box: Path) -> None:
    with headrace.safe_open(box, "pt") as f:
        for call in (f.get_tensor, f.get_slice):
            with pytest.raises(TensorNotFoundError) as caught:
                call("boxx")
            assert caught.value.close_matches[0] == "box"
            with pytest.raises(KeyError):
                call("b*")  # no globs here
            with pytest.raises(TypeError):
                call(3)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        *(
            ({"framework": framework}, "framework")
            for framework in ("tf", "flax", "jax", "mlx", "paddle", "PT", "bogus", None, 3)
        ),
        *(
            ({"framework": f, "device": d}, "device")
            for f in ("pt", "np")
            for d in ("cuda", "cuda:0", 0, "mps", "meta", "bogus", -1)
        ),
    ],
    ids=str,
)
def test_frameworks_and_devices_that_are_not_there(box: Path, arguments: dict[str, Any], option: str) -> None:
    with pytest.raises(OptionError) as caught:
        headrace.safe_open(box, **arguments)
    assert caught.value.option == option
    if arguments["framework"] == "pt":
        with pytest.raises(OptionError):
            headrace.load_file(box, arguments["device"])


@pytest.mark.parametrize("device", ["cpu", None, torch.device("cpu")], ids=repr)
def test_devices_that_mean_the_host(box: Path, device: Any) -> None:
    assert headrace.safe_open(box, "pt", device).get_tensor("scalar") == 5


@pytest.mark.parametrize(
    "opener", [lambda path: headrace.safe_open(path, "pt"), headrace.load_file], ids=["safe_open", "load_file"]
)
def test_errors_are_the_builtins_that_callers_expect(tmp_path: Path, opener: Callable[[Path], Any]) -> None:
    with pytest.raises(FileNotFoundError):
        opener(tmp_path / "absent.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"abc")
    with pytest.raises(ValueError, match="too few"):
        opener(tmp_path / "bad.safetensors")


def test_a_file_that_was_replaced_is_an_error(mixed: Path) -> None:
    with headrace.safe_open(mixed, "pt") as f:
        f.get_tensor("layer.0.norm")
        with mixed.open("r+b") as file:
            file.truncate(mixed.stat().st_size - 4096)
        with pytest.raises(SourceChangedError):
            f.get_tensor("layer.1.norm")


def test_a_failed_read_harms_no_other() -> None:
    contents = random_contents(1000, 2000)
    watched = WatchedSource(serialize(contents), [Fault(nth_data_read(0), Raise(OSError(errno.EIO, "broken")))])
    with headrace.safe_open(watched, "pt") as f:  # type: ignore[arg-type]
        with pytest.raises(OSError, match="broken"):
            f.get_tensor("t000")
        assert not wrong({name: f.get_tensor(name) for name in contents}, contents)
