"""The timeline of a load: what is in the file, that it is about the load that ran, and that it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import prepare_ranks, run_ranks
from safetensors.torch import save_file
from simulated_gpu import needs_compiler, simulated_gpu
from typer.testing import CliRunner

import headrace
from headrace.cli import app
from headrace.sources.memory import MemorySource
from headrace.testing import Fault, FaultySource, Raise, touches

MIB = 1 << 20


@pytest.fixture(scope="module")
def _ranks() -> None:
    prepare_ranks()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards, 24 MiB of F32."""
    folder = tmp_path / "model"
    folder.mkdir()
    for shard in range(2):
        tensors = {f"{shard}.{i}": torch.arange(MIB * 3 // 4, dtype=torch.float32) + i for i in range(4)}
        save_file(tensors, folder / f"model-{shard + 1:05}-of-00002.safetensors")
    return folder


def events(path: Path) -> list[dict[str, Any]]:
    """What happened, with the name of the thread."""
    entries = json.loads(path.read_text())["traceEvents"]
    names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    return [{**entry, "thread": names[entry["tid"]]} for entry in entries if entry["ph"] == "X"]


def of_stage(found: list[dict[str, Any]], stage: str) -> list[dict[str, Any]]:
    return [event for event in found if event["name"] == stage]


def test_every_byte_is_in_a_read_and_every_tensor_in_a_hand_out(model: Path, tmp_path: Path) -> None:
    with headrace.stream(model, trace=tmp_path / "t.json", direct_io="off") as stream:
        tensors = dict(stream)
    found = events(tmp_path / "t.json")
    reads, handed = of_stage(found, "read"), of_stage(found, "hand-out")
    assert sum(event["args"]["nbytes"] for event in reads) == stream.stats.read_nbytes
    assert sum(event["args"]["tensors"] for event in handed) == len(tensors) == 8
    assert sum(event["args"]["nbytes"] for event in handed) == stream.stats.tensor_nbytes
    assert {event["args"]["shard"] for event in reads} == {file.name for file in model.iterdir()}
    assert {event["thread"] for event in handed} == {"caller"}
    assert all(event["thread"].startswith("reader-") for event in reads)
    assert of_stage(found, "memory"), "fresh memory was touched"


def test_events_of_a_thread_do_not_overlap(model: Path, tmp_path: Path) -> None:
    headrace.load(model, dtype="bfloat16", trace=tmp_path / "t.json", concurrency=3)
    ends: dict[str, float] = {}
    for event in events(tmp_path / "t.json"):
        assert event["ts"] >= ends.get(event["thread"], 0.0) - 0.01
        assert event["dur"] >= 0
        ends[event["thread"]] = event["ts"] + event["dur"]


def test_casts_have_a_stage_of_their_own(model: Path, tmp_path: Path) -> None:
    headrace.load(model, dtype="bfloat16", trace=tmp_path / "cast.json")
    headrace.load(model, trace=tmp_path / "plain.json")
    assert of_stage(events(tmp_path / "cast.json"), "cast")
    assert not of_stage(events(tmp_path / "plain.json"), "cast")


def test_direct_reads_are_marked_where_the_source_has_them(model: Path, tmp_path: Path) -> None:
    with headrace.stream(model, trace=tmp_path / "t.json", direct_io="on") as stream:
        tensors = dict(stream)
    direct = [event for event in of_stage(events(tmp_path / "t.json"), "read") if event["args"].get("direct")]
    assert bool(direct) == (stream.stats.direct_nbytes > 0)
    assert torch.equal(tensors["1.3"], torch.arange(MIB * 3 // 4, dtype=torch.float32) + 3)


def test_memory_limit_shows_as_waits_of_readers(model: Path, tmp_path: Path) -> None:
    with headrace.stream(model, trace=tmp_path / "t.json", memory_limit=0) as stream:
        for _ in stream:
            pass
    waits = of_stage(events(tmp_path / "t.json"), "wait")
    assert any(event["args"].get("reason") == "memory limit" for event in waits)


def test_failed_load_is_written_too_and_names_the_error(model: Path, tmp_path: Path) -> None:
    torn = Raise(headrace.SourceError)
    source = FaultySource(MemorySource(min(model.iterdir()).read_bytes(), url="m"), [Fault(touches(8 * MIB, 8 * MIB + 1), torn)])
    with pytest.raises(headrace.SourceError):
        headrace.load(source, trace=tmp_path / "t.json")
    (failed,) = (event for event in events(tmp_path / "t.json") if "error" in event["args"])
    assert failed["args"]["error"] == "SourceError"
    assert failed["args"]["offset"] <= 8 * MIB < failed["args"]["offset"] + failed["args"]["nbytes"]


def test_secrets_of_a_url_are_left_out(tmp_path: Path) -> None:
    data = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(8)}, data)

    source = MemorySource(data.read_bytes(), url="https://host/m.safetensors?signature=hunter2")
    headrace.load(source, trace=tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    assert "m.safetensors" in text
    assert "hunter2" not in text


def test_place_that_cannot_be_written_to_is_refused_before_the_load(model: Path, tmp_path: Path) -> None:
    with pytest.raises(headrace.OptionError, match=r"trace: .*nowhere"):
        headrace.stream(model, trace=tmp_path / "nowhere" / "t.json")


def test_disk_that_is_full_at_the_end_costs_the_trace_and_not_the_load(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(headrace.load(model, trace="/dev/full")) == 8
    assert "could not be written" in caplog.text


def traced_rank(rank: int, model: str, folder: str) -> int:
    """Load with the others, and return the bytes that this rank read."""
    with headrace.stream(model, group=True, trace=f"{folder}/{rank}.json") as stream:
        assert len(list(stream)) == 8
    return stream.stats.read_nbytes


@pytest.mark.slow
@pytest.mark.usefixtures("_ranks")
def test_ranks_show_their_exchange(model: Path, tmp_path: Path) -> None:
    outcomes = run_ranks(2, traced_rank, str(model), str(tmp_path))
    for rank, outcome in enumerate(outcomes):
        assert outcome is not None
        assert outcome.error is None, outcome.trace
        found = events(tmp_path / f"{rank}.json")
        assert sum(event["args"]["nbytes"] for event in of_stage(found, "read")) == outcome.value
        assert {event["args"]["received"] for event in of_stage(found, "exchange")} <= {True, False}
        assert of_stage(found, "exchange")
        assert all(event["thread"].startswith("exchange") for event in of_stage(found, "exchange"))


@pytest.mark.slow
@needs_compiler
def test_load_to_a_device_is_traced_as_well(model: Path, tmp_path: Path) -> None:
    with simulated_gpu("timed") as gpu:
        assert len(headrace.load(model, device=gpu.device, trace=tmp_path / "t.json")) == 8
    found = events(tmp_path / "t.json")
    assert sum(event["args"]["nbytes"] for event in of_stage(found, "read")) >= 24 * MIB
    assert of_stage(found, "hand-out")


def test_command_line_writes_one_and_says_where(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    result = CliRunner().invoke(app, ["load", str(model), "--trace", str(path)])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"trace    {path}, for https://ui.perfetto.dev"
    assert of_stage(events(path), "read")
