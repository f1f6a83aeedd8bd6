"""The interface of Run:ai Model Streamer, on headrace: the same programs see the same, and what Run:ai gets wrong is right.

Where Run:ai's own package is installed in an environment of its own, `runai_programs` runs with both and is compared.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoints import (
    KIB,
    MIB,
    Contents,
    bytes_of,
    mixed_contents,
    random_contents,
    random_entry,
    serialize,
    value_of,
    write,
    wrong,
)
from hypothesis import given
from hypothesis import strategies as st
from ranks import prepare_ranks, run_ranks

import headrace
from headrace._dtypes import DTYPES
from headrace.errors import (
    FormatError,
    HeadraceError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
    TruncatedError,
)
from headrace.integrations import runai
from headrace.integrations.runai import DistributedStreamer, FileChunks, FileStreamer, ObjectStorageModel, SafetensorsStreamer
from headrace.integrations.runai._errors import value_error
from headrace.integrations.runai._ranges import Opener, RangeSource
from headrace.integrations.runai.file_streamer.file_streamer import RunaiStreamerInvalidInputException
from headrace.integrations.runai.s3_utils.s3_utils import S3Credentials
from headrace.sources.base import read_into_each
from headrace.sources.memory import MemorySource
from headrace.testing.s3server import Reset, Rule, S3Server, Status
from headrace.testing.sources import error_of, read

TESTS = Path(__file__).parent
PROGRAMS = TESTS / "runai_programs.py"
CACHE = TESTS.parent / ".cache"  # either of the environments that may have the real package
THEIRS = next((each for each in (CACHE / "runai/venv/bin/python", CACHE / "bench-peers/bin/python") if each.exists()), CACHE)
ACCESS_KEY, SECRET = "AKIATESTTESTTEST0001", "sEcReTsEcReTsEcReT0123456789abcdefABCDEF"
AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CA_BUNDLE",
    "RUNAI_STREAMER_S3_ENDPOINT",
    "RUNAI_STREAMER_S3_UNSIGNED",
    "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING",
    "http_proxy",
    "HTTP_PROXY",
    "all_proxy",
    "ALL_PROXY",
)


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of this machine counts here."""
    for name in AWS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for option in headrace.Options.__dataclass_fields__:
        monkeypatch.delenv(f"HEADRACE_{option.upper()}", raising=False)
        monkeypatch.delenv(f"RUNAI_STREAMER_{option.upper()}", raising=False)
    monkeypatch.delenv("RUNAI_STREAMER_PIN_MEMORY", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def kinds_known_to_both() -> Contents:
    found: Contents = {}
    for i, name in enumerate(DTYPES):
        if not name.startswith("F6_") and not name.endswith("FNUZ"):
            for j, shape in enumerate([(4, 8), (16,), (2, 4, 8), (8, 0), (0, 8)]):
                found[f"{'zyx'[i % 3]}.{name}.{j}"] = random_entry(name, shape, seed=10 * i + j)
    found["scalar"] = random_entry("F32", (), seed=1)
    return found


A = {f"a.{name[1:]}": entry for name, entry in random_contents(3 * MIB, 17, 0, 5 * KIB).items()}
B = {f"b.{name[1:]}": entry for name, entry in random_contents(2 * MIB + 4, 8, dtype="BF16").items()}
COPY = {name: random_entry("F32", (1000 + i,), seed=70 + i) for i, name in enumerate([*A, "only"])}
KINDS = kinds_known_to_both()
ODD = {"odd": random_entry("U8", (13,)), "wide": random_entry("F32", (300, 7)), "half": random_entry("BF16", (33,))}


def header(entries: Mapping[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, size: int, start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [size], "data_offsets": [start, end]}


BROKEN = {
    "empty": b"",
    "short": b"\x08\x00\x00",
    "length": (1 << 40).to_bytes(8, "little") + b"{}",
    "json": (4).to_bytes(8, "little") + b"{oh}",
    "truncated": serialize(A)[:-5],
    "surplus": serialize(A) + b"12345",
    "gap": header({"a": entry("U8", 2, 0, 2), "b": entry("U8", 2, 3, 5)}, b"12345"),
    "overlap": header({"a": entry("U8", 2, 0, 2), "b": entry("U8", 2, 1, 3)}, b"123"),
    "shape": header({"a": entry("F32", 2, 0, 7)}, b"1234567"),
    "dtype": header({"a": entry("F99", 2, 0, 2)}, b"12"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `runai_programs` runs on."""
    path = tmp_path_factory.mktemp("programs")
    for name, contents in {"a": A, "b": B, "copy": COPY, "kinds": KINDS, "none": {}}.items():
        write(path / f"{name}.safetensors", contents)
    write(path / "odd.safetensors", ODD, data_start=3)
    for name, data in BROKEN.items():
        (path / f"broken-{name}.safetensors").write_bytes(data)
    (path / "data.bin").write_bytes(bytes(range(256)) * 4)
    (path / "sub").mkdir()
    (path / "sub" / "more.bin").write_bytes(b"0123456789")
    return path


def run(python: str | Path, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH") if (value := os.environ.get(name))}  # noqa: TID251
    return subprocess.run(
        [str(python), *map(str, arguments)], env=kept | environment, capture_output=True, text=True, timeout=110, check=False
    )


def seen(python: str | Path, *arguments: str | Path, **environment: str) -> dict[str, Any]:
    done = run(python, PROGRAMS, *arguments, **environment)
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ---- the same programs, with both packages


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, Any]:
    return seen(sys.executable, folder, "--headrace")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> dict[str, Any]:
    if THEIRS == CACHE:
        pytest.skip("Run:ai's package is not installed; scripts/test --runai puts it into .cache/runai")
    if run(THEIRS, "-c", "import runai_model_streamer").returncode:
        pytest.skip(f"{THEIRS} has no runai_model_streamer")
    return seen(THEIRS, folder)


ALIKE = [
    name
    for name in [
        line.split("(")[0].removeprefix("    def ") for line in PROGRAMS.read_text().splitlines() if "def program_" in line
    ]
    if name not in ("program_signatures", "program_constants", "program_dtypes")
]


@pytest.mark.slow
@pytest.mark.parametrize("program", ALIKE)
def test_a_program_sees_what_it_sees_with_the_real_package(program: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours[program] == theirs[program]


@pytest.mark.slow
def test_signatures_are_those_of_the_real_package_with_keywords_at_their_end(
    ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    mine, reference = ours["program_signatures"], theirs["program_signatures"]
    private = {
        "DistributedStreamer.get_cuda_free_memory",
        "DistributedStreamer.set_is_distributed",
        "FileStreamer.handle_object_store",
    }
    plumbing = {
        "get_module",
        "get_s3_credentials_module",
        "get_s3_files_module",
        "get_gcs_files_module",
        "get_azure_files_module",
    }
    missing = {name for name in reference if name not in mine}
    assert missing - private - plumbing == set()
    for name in reference.keys() & mine.keys():
        assert mine[name][: len(reference[name])] == reference[name], name
        for _, kind, default in mine[name][len(reference[name]) :]:
            assert kind == "KEYWORD_ONLY" or default != repr(Any), name


@pytest.mark.slow
def test_constants_are_those_of_the_real_package(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    mine, reference = ours["program_constants"], theirs["program_constants"]
    assert {name: mine.get(name) for name in reference} == reference


@pytest.mark.slow
def test_dtypes_are_those_of_the_real_package_and_more(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert theirs["program_dtypes"].items() <= ours["program_dtypes"].items()


@pytest.mark.slow
def test_a_program_sees_the_same_with_the_least_memory(folder: Path, ours: dict[str, Any]) -> None:
    least = seen(sys.executable, folder, "--headrace", RUNAI_STREAMER_MEMORY_LIMIT="0", RUNAI_STREAMER_CONCURRENCY="1")
    assert least == ours


@pytest.mark.slow
def test_the_real_packages_own_tests_of_mirrors_pass(tmp_path: Path, theirs: dict[str, Any]) -> None:
    assert theirs  # it is installed
    (shipped,) = (THEIRS.parents[1] / "lib").glob(
        "python*/site-packages/runai_model_streamer/safetensors_streamer/tests/test_object_storage_model.py"
    )
    (tmp_path / "conftest.py").write_text("from headrace.integrations.runai import install\n\ninstall()\n")
    (tmp_path / shipped.name).write_text(shipped.read_text())
    # the one that is left out wants a folder without its mark emptied, with whatever is in it
    done = run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not stale_dst", "--rootdir", tmp_path, tmp_path
    )
    assert done.returncode == 0, done.stdout


# ---- what is streamed, also where Run:ai's package is not installed


def streamed(*paths: str | Path, **arguments: Any) -> dict[str, torch.Tensor]:
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in paths], **arguments)
        return dict(streamer.get_tensors())


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    return write(tmp_path / "mixed.safetensors", mixed_contents())


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("limit", ["-1", "0", "100000", None])
def test_kept_tensors_stay_right_at_every_memory_limit(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, owned: bool, limit: str | None
) -> None:
    if limit is not None:
        monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", limit)
    tensors = streamed(mixed, owned=owned)
    gc.collect()
    assert not wrong(tensors, mixed_contents())
    assert tensors.keys() == mixed_contents().keys()


def test_tensors_stay_when_the_file_is_gone(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", A)
    tensors = streamed(path, owned=False)
    path.write_bytes(b"\0" * path.stat().st_size)
    path.unlink()
    assert not wrong(tensors, A)


def test_writing_to_a_tensor_reaches_no_other(mixed: Path) -> None:
    tensors = streamed(mixed, owned=False)
    for name in ("layer.0.weight", "layer.1.norm", "layer.1.scale"):
        tensors.pop(name).zero_()
    assert not wrong(tensors, mixed_contents())


def test_dtypes_that_torch_lacks_come_as_raw_bytes(tmp_path: Path) -> None:
    contents = {"six": random_entry("F6_E2M3", (64, 4))}
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(write(tmp_path / "six.safetensors", contents)))
        assert streamer.files_to_tensors_metadata[0][0].shape == [64, 4]
        ((_, tensor),) = streamer.get_tensors()
    assert (tensor.dtype, bytes_of(tensor)) == (torch.uint8, contents["six"].data)


def test_a_name_in_several_files_comes_from_each(folder: Path) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(folder / "a.safetensors"), str(folder / "copy.safetensors")])
        pairs = list(streamer.get_tensors())
    found = sorted((name, bytes_of(tensor)) for name, tensor in pairs)
    assert found == sorted([(name, entry.data) for contents in (A, COPY) for name, entry in contents.items()])


def test_a_broken_file_is_named_also_where_names_are_in_several(folder: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(BROKEN["gap"])
    with pytest.raises(FormatError) as caught:
        streamed(folder / "a.safetensors", folder / "copy.safetensors", bad)
    assert caught.value.url == str(bad)


def test_names_are_taken_as_they_are_written(tmp_path: Path) -> None:
    contents = {name: random_entry("U8", (9,), seed=i) for i, name in enumerate(["a*", "ab", "[x]"])}
    path = write(tmp_path / "m.safetensors", contents)
    tensors = streamed(path, tensor_names=["a*", "[x]"])
    assert sorted(tensors) == ["[x]", "a*"]
    assert not wrong(tensors, contents)


def test_a_failed_read_ends_the_stream_and_the_next_request_works(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", random_contents(MIB, 8 * MIB, MIB))
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        os.truncate(path, 2 * MIB)
        with pytest.raises(ValueError, match=r"m\.safetensors") as caught:
            list(streamer.get_tensors())
        assert isinstance(caught.value, SourceError)
        streamer.stream_file(str(write(tmp_path / "n.safetensors", A)))
        assert not wrong(dict(streamer.get_tensors()), A)


def test_an_iterator_that_outlives_the_block_says_so(mixed: Path) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(mixed))
        tensors = streamer.get_tensors()
        next(tensors)
    with pytest.raises(ValueError, match="closed"):
        next(tensors)


def test_an_abandoned_iterator_does_not_disturb_the_next_request(mixed: Path, folder: Path) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(mixed))
        first = streamer.get_tensors()
        next(first)
        first.close()
        streamer.stream_file(str(folder / "a.safetensors"))
        del first
        gc.collect()
        assert not wrong(dict(streamer.get_tensors()), A)


def test_reading_stops_with_the_block(mixed: Path) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(mixed))
        next(streamer.get_tensors())
    # that no thread and no descriptor is left is checked after each test


def test_the_throughput_is_logged_at_the_end(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="headrace"):
        streamed(folder / "a.safetensors")
    total = sum(len(entry.data) for entry in A.values())
    assert [record.args[0] for record in caplog.records if "streamed" in record.message] == [total]  # type: ignore[index]


# ---- proposals for Run:ai's streamer


def test_target_dtypes_convert_while_loading(tmp_path: Path) -> None:
    contents = {f"m.{i}.weight": random_entry("F32", (100 + i,), seed=i) for i in range(3)}
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(write(tmp_path / "m.safetensors", contents)))
        # a mapping for the whole model, of which this file is a part
        tensors = dict(streamer.get_tensors(target_dtypes={"m.1.weight": torch.bfloat16, "elsewhere.weight": torch.float16}))
    assert [tensors[name].dtype for name in sorted(tensors)] == [torch.float32, torch.bfloat16, torch.float32]
    expected = value_of(contents["m.1.weight"]).to(torch.bfloat16)
    assert bytes_of(tensors["m.1.weight"]) == bytes_of(expected)


def test_target_dtypes_leave_quantized_data_alone(tmp_path: Path) -> None:
    contents = {
        "m.weight": random_entry("F8_E4M3", (8, 8)),
        "m.weight_scale": random_entry("F32", (8,), seed=1),
        "n.weight": random_entry("F32", (8,), seed=2),
    }
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(write(tmp_path / "m.safetensors", contents)))
        tensors = dict(streamer.get_tensors(target_dtypes="bfloat16"))
    assert [str(tensors[name].dtype) for name in contents] == ["torch.float8_e4m3fn", "torch.float32", "torch.bfloat16"]


def test_target_dtypes_come_too_late_after_the_first_tensor(folder: Path) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(folder / "a.safetensors"))
        tensors = streamer.get_tensors()
        next(tensors)
        with pytest.raises(ValueError, match="before the first"):
            next(streamer.get_tensors(target_dtypes="float16"))


def test_target_dtypes_reach_each_of_several_files_with_one_name(folder: Path) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(folder / "copy.safetensors"), str(folder / "copy.safetensors")])
        tensors = list(streamer.get_tensors(target_dtypes={"only": torch.float64, "a.00*": torch.float64}))
    assert len(tensors) == 2 * len(COPY)
    assert {tensor.dtype for _, tensor in tensors} == {torch.float64}


def test_a_dtype_that_is_none_ends_the_request(folder: Path) -> None:
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(folder / "a.safetensors"))
        with pytest.raises(ValueError, match="bfloat17"):
            list(streamer.get_tensors(target_dtypes="bfloat17"))
        streamer.stream_file(str(folder / "a.safetensors"))
        assert not wrong(dict(streamer.get_tensors()), A)


@pytest.mark.parametrize("where", ["class", "request", "environment"])
def test_pinned_memory_is_a_wish_that_host_targets_do_without(folder: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "environment":
        monkeypatch.setenv("RUNAI_STREAMER_PIN_MEMORY", "1")
    with SafetensorsStreamer(pin_memory=True if where == "class" else None) as streamer:
        streamer.stream_file(str(folder / "a.safetensors"), pin_memory=True if where == "request" else None)
        assert not wrong(dict(streamer.get_tensors()), A)


@pytest.mark.parametrize("variable", ["CONCURRENCY", "MEMORY_LIMIT", "PIN_MEMORY"])
def test_a_variable_that_cannot_be_used_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(f"RUNAI_STREAMER_{variable}", "many")
    with pytest.raises(ValueError, match=f"RUNAI_STREAMER_{variable}"):
        streamed(folder / "a.safetensors")


@pytest.mark.parametrize("variable", ["CHUNK_BYTESIZE", "FS_STRATEGY", "RING_BUFFERS", "LOG_LEVEL"])
def test_variables_of_the_other_engine_are_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(f"RUNAI_STREAMER_{variable}", "1")
    assert not wrong(streamed(folder / "a.safetensors"), A)


@pytest.mark.parametrize(("limit", "expected"), [("0", 0), ("2097152", 2 * MIB), ("-1", 24 * MIB)])
def test_the_memory_limit_and_the_concurrency_are_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int
) -> None:
    monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", limit)
    monkeypatch.setenv("RUNAI_STREAMER_CONCURRENCY", "3")
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(write(tmp_path / "m.safetensors", random_contents(*[MIB] * 12))))
        assert streamer._request is not None
        limits = streamer._request._streams[0].plan.limits
    assert limits.concurrency == 3
    assert expected <= limits.memory_limit < expected + 2 * KIB * KIB


# ---- errors


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_file_is_a_value_error_that_names_it(folder: Path, name: str) -> None:
    path = folder / f"broken-{name}.safetensors"
    with pytest.raises(ValueError, match=path.name) as caught:
        streamed(path)
    assert isinstance(caught.value, HeadraceError)


def test_a_missing_file_is_a_value_error_and_what_it_means(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.safetensors") as caught:
        streamed(tmp_path / "no.safetensors")
    assert isinstance(caught.value, SourceNotFoundError)
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.url == str(tmp_path / "no.safetensors")


def test_errors_keep_their_fields_and_can_be_sent_to_other_processes() -> None:
    error = value_error(TruncatedError("it ends", url="u", offset=3, nbytes=4, attempts=2))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.url, again.offset, again.nbytes, again.attempts) == ("it ends", "u", 3, 4, 2)
    assert isinstance(again, ValueError)
    assert isinstance(again, TruncatedError)


def test_a_device_is_passed_on(folder: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a device here")
    with pytest.raises(HeadraceError):
        streamed(folder / "a.safetensors", device="cuda:0")


def test_a_device_that_torch_does_not_know(folder: Path) -> None:
    with pytest.raises(RunaiStreamerInvalidInputException):
        streamed(folder / "a.safetensors", device="bogus")


# ---- ranks


@pytest.fixture
def world() -> Iterator[Callable[[int], None]]:
    """Make this process the first of so many ranks; nothing answers for the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(ranks: int) -> None:
        torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())

    yield start
    torch.distributed.destroy_process_group()


def test_a_world_of_one_reads_everything(folder: Path, world: Callable[[int], None]) -> None:
    world(1)
    assert not wrong(streamed(folder / "a.safetensors", is_distributed=True), A)


def test_ranks_that_run_ai_would_not_let_share_read_everything_and_say_so(
    folder: Path, world: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    world(2)
    assert not wrong(streamed(folder / "a.safetensors", is_distributed=True), A)
    assert "each of the 2 ranks reads everything" in caplog.text


@pytest.fixture(scope="module")
def ranks() -> None:
    """Of this machine, a process each."""
    prepare_ranks()


def read_together(_rank: int, path: str) -> tuple[dict[str, bytes], list[bytes], bool]:
    """What two ranks of a job get that have been told to share the reading."""
    with pytest.MonkeyPatch.context() as patch, SafetensorsStreamer() as streamer:
        patch.setenv("RUNAI_STREAMER_DIST", "1")
        streamer.stream_files([path], is_distributed=True)
        shared = streamer.file_streamer.is_distributed
        tensors = {name: bytes_of(tensor) for name, tensor in streamer.get_tensors()}
        with DistributedStreamer() as ranges:
            ranges.stream_files([FileChunks(0, path, [8, 108], [100, 50])], None, "cpu", True)
            chunks = {index: bytes_of(chunk) for _, index, chunk in ranges.get_chunks()}
    return tensors, [chunks[0], chunks[1]], shared


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_ranks_that_share_get_everything(folder: Path) -> None:
    path = folder / "a.safetensors"
    outcomes = run_ranks(2, read_together, str(path))
    text = path.read_bytes()
    for outcome in outcomes:
        assert outcome is not None
        assert outcome.error is None, outcome.trace
        tensors, chunks, shared = outcome.value
        assert shared
        assert tensors == {name: entry.data for name, entry in A.items()}
        assert chunks == [text[8:108], text[108:158]]


# ---- object stores

MODEL = {"model-1.safetensors": A, "model-2.safetensors": B}
SMALL = {"config.json": b'{"hidden_size": 4}', "tokenizer.model": b"tokens", "sub/deep.json": b"{}", "old.bin": b"x" * 100}


def bucket_content() -> dict[str, bytes]:
    found = {f"minilm/{name}": data for name, data in SMALL.items()}
    found |= {f"minilm/{name}": serialize(contents) for name, contents in MODEL.items()}
    return found | {"minilm/sub/model-3.safetensors": serialize(COPY), "minilm2/config.json": b"{}"}


@contextmanager
def serving(**options: Any) -> Iterator[S3Server]:
    pytest.importorskip("botocore")
    with S3Server({"models": bucket_content()}, access_key=ACCESS_KEY, secret_key=SECRET, **options) as server:
        yield server


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A store that the environment leads to, in the way vLLM's documentation does."""
    with serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "0")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield server


def weights_iterator(files: list[str], is_distributed: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """What vLLM's loader does with the streamer."""
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device="cpu", is_distributed=is_distributed)
        total = sum(len(tensors) for tensors in streamer.files_to_tensors_metadata.values())
        count = 0
        for name, tensor in streamer.get_tensors():
            count += 1
            yield name, tensor.clone()
        assert count == total


@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.usefixtures("store")
def test_listing_streaming_and_pulling_as_vllm_does(tmp_path: Path, slash: str) -> None:
    url = f"s3://models/minilm{slash}"
    files = runai.list_safetensors(url)
    assert files == [f"s3://models/minilm/{name}" for name in sorted(MODEL)]
    assert not wrong(dict(weights_iterator(files)), A | B)
    with ObjectStorageModel(url, str(tmp_path / "mirror")) as mirror:
        mirror.pull_files(allow_pattern=["*.model", "*.py", "*.json"])
        mirror.pull_files(ignore_pattern=["*.pt", "*.safetensors", "*.bin", "*.tensors", "*.pth"])
    assert files_in(tmp_path / "mirror") == {name: SMALL[name] for name in SMALL if not name.endswith(".bin")}


def files_in(folder: Path) -> dict[str, bytes]:
    """What a program finds in a folder that was pulled to."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if not name.startswith((".headrace-pull/", ".runai_complete"))}


def test_credentials_given_as_an_argument_count_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        # those of the environment are wrong, and were Run:ai's choice for listing and pulling
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAWRONGWRONGWRONG1")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        given = S3Credentials(access_key_id=ACCESS_KEY, secret_access_key=SECRET, region_name="us-east-1", endpoint=server.url)
        files = runai.list_safetensors("s3://models/minilm", given)
        assert len(files) == len(MODEL)
        assert not wrong(streamed(*files, s3_credentials=given), A | B)
        runai.pull_files("s3://models/minilm", str(tmp_path / "dst"), ["*/config.json"], s3_credentials=given)
        with ObjectStorageModel("s3://models/minilm", str(tmp_path / "model"), given) as model:
            model.pull_files(["*.json"])
        with FileStreamer() as streamer:
            streamer.stream_files([FileChunks(0, "s3://models/minilm/old.bin", [10], [5])], given)
            assert [bytes_of(data) for _, _, data in streamer.get_chunks()] == [b"xxxxx"]
        assert {request.status for request in server.requests} <= {200, 206}
    assert files_in(tmp_path / "dst") == {"config.json": SMALL["config.json"]}


def test_refused_credentials_are_an_error_and_no_empty_listing(store: S3Server, tmp_path: Path) -> None:
    given = S3Credentials(access_key_id=ACCESS_KEY, secret_access_key="wrong", endpoint=store.url)
    for program in (
        lambda: runai.list_safetensors("s3://models/minilm", given),
        lambda: runai.pull_files("s3://models/minilm", str(tmp_path / "x"), s3_credentials=given),
        lambda: streamed("s3://models/minilm/model-1.safetensors", s3_credentials=given),
    ):
        with pytest.raises(ValueError, match="models") as caught:
            program()
        assert isinstance(caught.value, SourcePermissionError)
        assert "wrong" not in str(caught.value)
        assert SECRET not in str(caught.value)


def test_credentials_do_not_show_secrets() -> None:
    assert "hidden" not in repr(S3Credentials("AK", "hidden1", "hidden2"))


@pytest.mark.usefixtures("store")
def test_a_prefix_without_objects_is_an_empty_list_and_a_missing_bucket_an_error(tmp_path: Path) -> None:
    assert runai.list_safetensors("s3://models/nowhere") == []
    assert FileStreamer().list_files("s3://models/nowhere") == []
    runai.pull_files("s3://models/nowhere", str(tmp_path / "dst"))
    assert not (tmp_path / "dst").exists()
    with pytest.raises(SourceNotFoundError):
        runai.list_safetensors("s3://nobucket/minilm")


@pytest.mark.usefixtures("store")
def test_a_missing_object_names_itself() -> None:
    with pytest.raises(ValueError, match=r"s3://models/minilm/gone\.safetensors") as caught:
        streamed("s3://models/minilm/gone.safetensors")
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.usefixtures("store")
def test_a_store_that_stumbles_does_not_fail_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ATTEMPTS", "5")
    with serving(
        faults=[Rule(Status(503), key="*model-1*", times=1), Rule(Reset(after=1000), key="*model-2*", times=1)]
    ) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        assert not wrong(streamed(*runai.list_safetensors("s3://models/minilm")), A | B)


@pytest.mark.parametrize(
    ("allow", "ignore", "expected"),
    [
        (None, None, [*SMALL, *MODEL, "sub/model-3.safetensors"]),
        (["*.json"], None, ["config.json", "sub/deep.json"]),
        (["*.json"], ["*/sub/*"], ["config.json"]),
        (None, ["*.safetensors", "*.bin"], ["config.json", "tokenizer.model", "sub/deep.json"]),
        (["minilm/*.model"], None, ["tokenizer.model"]),  # patterns are about the whole key,
        (["config.json"], None, []),  # so that this fits nothing
    ],
)
@pytest.mark.usefixtures("store")
def test_patterns_are_about_whole_keys(
    tmp_path: Path, allow: list[str] | None, ignore: list[str] | None, expected: list[str]
) -> None:
    runai.pull_files("s3://models/minilm/", str(tmp_path / "dst"), allow, ignore)
    assert sorted(files_in(tmp_path / "dst")) == sorted(expected)


def test_listing_tells_sizes_without_asking_for_each(store: S3Server) -> None:
    listed = FileStreamer().list_files("s3://models/minilm")
    assert dict(listed) == {
        f"s3://models/{key}": len(data) for key, data in bucket_content().items() if key.startswith("minilm/")
    }
    assert FileStreamer().list_files("s3://models/minilm", is_recursive=False, allow_patterns=["*.json"]) == [
        ("s3://models/minilm/config.json", len(SMALL["config.json"]))
    ]
    assert len(store.requests) == 2


def test_a_complete_folder_is_not_fetched_again(store: S3Server, tmp_path: Path) -> None:
    for _ in range(2):
        with ObjectStorageModel("s3://models/minilm", str(tmp_path / "m")) as model:
            model.pull_files(["*.json"])
            assert model.dir == str(tmp_path / "m")
        asked = len(store.requests)
    assert len(store.requests) == asked
    assert (tmp_path / "m" / ObjectStorageModel.SENTINEL_NAME).exists()


@pytest.mark.usefixtures("store")
def test_after_an_error_the_next_one_completes_what_is_there(tmp_path: Path) -> None:
    target = tmp_path / "m"
    with suppress(KeyError), ObjectStorageModel("s3://models/minilm", str(target)) as model:
        model.pull_files(["*.json"])
        raise KeyError
    assert not (target / ObjectStorageModel.SENTINEL_NAME).exists()
    (target / "mine.txt").write_text("not to be removed")
    with ObjectStorageModel("s3://models/minilm", str(target)) as model:
        model.pull_files(["*.json", "*.model"])
    assert (target / ObjectStorageModel.SENTINEL_NAME).exists()
    assert files_in(target).keys() == {"config.json", "sub/deep.json", "tokenizer.model", "mine.txt"}


@pytest.mark.usefixtures("store")
def test_fetching_nothing_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="nothing was fetched"),
        ObjectStorageModel("s3://models/no", str(tmp_path / "m")) as model,
    ):
        model.pull_files()
    assert not (tmp_path / "m" / ObjectStorageModel.SENTINEL_NAME).exists()


def test_processes_that_want_one_folder_fetch_it_once(store: S3Server, tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def fetch(_: int) -> bool:
        barrier.wait()
        with ObjectStorageModel(
            "s3://models/minilm", str(tmp_path / "m")
        ) as model:  # flock is per open file, as between processes
            model.pull_files(["*.model"])
            return model._skip

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(fetch, range(4))) == [False, True, True, True]
    assert sum(request.key == "minilm/tokenizer.model" for request in store.requests) == 1


def test_a_bucket_of_google_is_listed_streamed_and_pulled_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("google.auth")
    from gcs_server import GcsServer

    with GcsServer({"models": bucket_content()}) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url_of(""))
        monkeypatch.setenv("RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS", "true")
        files = runai.list_safetensors("gs://models/minilm")
        assert files == [f"gs://models/minilm/{name}" for name in sorted(MODEL)]
        assert not wrong(streamed(*files), A | B)
        with ObjectStorageModel("gs://models/minilm", str(tmp_path / "m")) as model:
            model.pull_files(["*.json"])
        assert runai.list_safetensors("gs://models/nowhere") == []
        sizes = dict(FileStreamer().list_files("gs://models/minilm", is_recursive=False))
    assert files_in(tmp_path / "m").keys() == {"config.json", "sub/deep.json"}
    assert sizes["gs://models/minilm/old.bin"] == 100


# ---- ranges


@pytest.mark.usefixtures("store")
def test_ranges_of_an_object_in_any_order() -> None:
    data = bucket_content()["minilm/model-1.safetensors"]
    ranges = [(0, 8), (2 * MIB, MIB), (100, 0), (50, 100), (50, 10)]
    with FileStreamer() as streamer:
        streamer.stream_files([FileChunks(3, "s3://models/minilm/model-1.safetensors", *map(list, zip(*ranges, strict=True)))])
        found = {index: bytes_of(chunk) for _, index, chunk in streamer.get_chunks()}
    assert found == {i: data[offset : offset + nbytes] for i, (offset, nbytes) in enumerate(ranges)}


def test_ranges_larger_than_the_memory_limit(tmp_path: Path) -> None:
    data = random_entry("U8", (9 * MIB,)).data
    path = tmp_path / "data.bin"
    path.write_bytes(data)
    with FileStreamer() as streamer:
        streamer.stream_files([FileChunks.contiguous(0, str(path), 0, [MIB // 2] * 18)], memory_limit=MIB, owned=False)
        kept = {index: chunk for _, index, chunk in streamer.get_chunks()}
    assert b"".join(bytes_of(kept[index]) for index in sorted(kept)) == data


def test_ranges_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(b"0123456789")
    with FileStreamer() as streamer:
        streamer.stream_files([FileChunks(0, str(path), [0, 4], [2, 100])])  # as in Run:ai's, no error yet
        with pytest.raises(ValueError, match=r"data\.bin") as caught:
            list(streamer.get_chunks())
        assert isinstance(caught.value, TruncatedError)
        streamer.stream_files([FileChunks(0, str(path), [0], [2])])
        assert [bytes_of(data) for _, _, data in streamer.get_chunks()] == [b"01"]


@given(
    ranges=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 200)), max_size=12),
    cuts=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 900)), min_size=1, max_size=5),
)
def test_any_part_of_any_ranges_is_what_lies_there(ranges: list[tuple[int, int]], cuts: list[tuple[int, int]]) -> None:
    data = random_entry("U8", (700,)).data
    chunks = FileChunks(0, "m", [offset for offset, _ in ranges], [nbytes for _, nbytes in ranges])
    source = RangeSource(MemorySource(data), 5, chunks)
    header_nbytes = 8 + int.from_bytes(read(source, 0, 8), "little")
    expected = b"".join(data[offset : offset + nbytes] for offset, nbytes in sorted(ranges))
    assert source.nbytes == header_nbytes + len(expected)
    whole = read(source, 0, header_nbytes) + expected
    for at, nbytes in cuts:  # around the end of the header
        start = min(max(0, header_nbytes - 1000 + at), source.nbytes)
        end = min(start + nbytes, source.nbytes)
        assert read(source, start, end - start) == whole[start:end]
        step = 1 + at % 50
        parts = [bytearray(min(step, end - begin)) for begin in range(start, end, step)]
        read_into_each(source, start, [memoryview(part) for part in parts])
        assert b"".join(parts) == whole[start:end]


def test_more_than_all_ranges_is_refused() -> None:
    source = RangeSource(MemorySource(b"0123456789"), 5, FileChunks(0, "m", [2], [3]))
    error_of(TruncatedError, read, source, source.nbytes - 3, 4)


def test_ranges_that_follow_on_each_other_are_one_request(store: S3Server) -> None:
    data = bucket_content()["minilm/model-1.safetensors"]
    sizes = [1000, 2 * MIB, 7, 500_000, 100]
    chunks = FileChunks.contiguous(0, "s3://models/minilm/model-1.safetensors", 100_000, sizes)
    with closing(Opener().open(0, chunks, None)) as source:
        store.forget()
        parts = [bytearray(size) for size in sizes]
        read_into_each(source, source.nbytes - sum(sizes), [memoryview(part) for part in parts])
        assert b"".join(parts) == data[100_000 : 100_000 + sum(sizes)]
        assert [request.start for request in store.requests] == [100_000]


# ---- the name


def test_install_gives_the_package_under_the_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    without_their_names(monkeypatch)
    for _ in range(2):  # idempotent
        runai.install()
    try:
        import runai_model_streamer
        import runai_model_streamer.safetensors_streamer.safetensors_streamer as module
        from runai_model_streamer.distributed_streamer.distributed_streamer import DistributedStreamer
        from runai_model_streamer.file_streamer import FileChunks as TheirChunks
        from runai_model_streamer.s3_utils.s3_utils import is_s3_path

        assert runai_model_streamer is runai
        assert module.SafetensorsStreamer is SafetensorsStreamer
        assert TheirChunks is FileChunks
        assert DistributedStreamer is runai.DistributedStreamer
        assert is_s3_path("s3://b/k")
        with pytest.raises(ModuleNotFoundError):
            import runai_model_streamer.libstreamer
    finally:
        runai.uninstall()
    assert not [name for name in sys.modules if name.startswith("runai_model_streamer")]
    runai.uninstall()


def test_install_refuses_where_the_real_package_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    without_their_names(monkeypatch)
    real = ModuleType("runai_model_streamer")
    monkeypatch.setitem(sys.modules, "runai_model_streamer", real)
    with pytest.raises(ImportError, match="already"):
        runai.install()
    runai.uninstall()
    assert sys.modules["runai_model_streamer"] is real


def without_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "runai_model_streamer"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.slow
def test_a_program_runs_without_a_change_to_it(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from beside import answer\n"
        "from runai_model_streamer import SafetensorsStreamer\n"
        "with SafetensorsStreamer() as streamer:\n"
        "    streamer.stream_file(sys.argv[1])\n"
        "    print(__name__, answer, len(dict(streamer.get_tensors())), SafetensorsStreamer.__module__.partition('.')[0])\n"
    )
    (tmp_path / "beside.py").write_text("answer = 42\n")
    done = run(sys.executable, "-m", "headrace.integrations.runai", program, folder / "a.safetensors")
    assert (done.stdout, done.returncode) == (f"__main__ 42 {len(A)} headrace\n", 0), done.stderr
    assert run(sys.executable, "-m", "headrace.integrations.runai").returncode == 2


@pytest.mark.slow
def test_installing_does_not_import_torch() -> None:
    code = (
        "import sys, headrace.integrations.runai as r; r.install(); import runai_model_streamer; sys.exit('torch' in sys.modules)"
    )
    assert run(sys.executable, "-c", code).returncode == 0


# ---- the stand-in for tests


def test_a_bucket_can_be_played_by_a_folder(tmp_path: Path) -> None:
    from headrace.integrations.runai.safetensors_streamer.streamer_mock import StreamerPatcher

    (tmp_path / "bucket" / "m").mkdir(parents=True)
    write(tmp_path / "bucket" / "m" / "model.safetensors", A)
    (tmp_path / "bucket" / "m" / "config.json").write_bytes(b"{}")
    patcher = StreamerPatcher(str(tmp_path / "bucket"))
    files = patcher.shim_list_safetensors("gs://whatever/m")
    assert files == ["gs://whatever/m/model.safetensors"]
    with patcher.create_mock_streamer() as streamer:
        streamer.stream_files(files)
        assert not wrong(dict(streamer.get_tensors()), A)
        streamer.stream_file(files[0])
        assert math.isclose(streamer.total_size, sum(len(entry.data) for entry in A.values()))
        assert not wrong(dict(streamer.get_tensors()), A)
    patcher.shim_pull_files("gs://whatever/m", str(tmp_path / "dst"), allow_pattern=["*.json"])
    assert files_in(tmp_path / "dst") == {"config.json": b"{}"}
