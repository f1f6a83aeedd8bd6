"""`headrace bench`: every part is measured on what is really there, and the paragraph says what the figures say."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from http_servers import Server
from safetensors.torch import save_file
from simulated_gpu import needs_compiler, simulated_gpu
from typer.testing import CliRunner

import headrace
from headrace import Options, Snapshot
from headrace._bench import Figure, Report, Run, Settings, measure
from headrace._bench._probes import Bounds, _measured, device_copies, pieces
from headrace._bench._rivals import compare, parse_names
from headrace._bench._verdict import _ADVICE, judge
from headrace.cli import app
from headrace.sources.memory import MemorySource

MIB = 1 << 20
GB = 10**9


# -- the verdict, from figures alone -------------------------------------------------------------------------------------------


def report(
    *figures: Figure,
    rate: float = 1.0,
    ceiling: float = 2.0,
    stages: Any = None,
    remote: bool = False,
    cpus: float = 2.0,
    **stats: Any,
) -> Report:
    """A bench of 4 GB at `rate` GB/s, most of it waiting for the source."""
    seconds = 4 / rate
    found = Snapshot(**{"seconds": seconds, "read_nbytes": 4 * GB, "source_wait_s": seconds, "requests": 500, **stats})
    run = Run("dropped", 4 * GB, seconds, ceiling * GB, found, cpus=cpus, stages=stages or {"read": 1.0})
    return Report("m", "a machine", 2, 4 * GB, 4 * GB, remote, figures, [run])


def disk(rate: float, threads: int = 8) -> Figure:
    return Figure("disk", "disk", int(rate * GB), 1.0, threads)


def network(rate: float, threads: int = 8) -> Figure:
    return Figure("network", "network", int(rate * GB), 1.0, threads)


ON_DISK = {"direct_nbytes": 4 * GB}
ON_GPU = {"device": "cuda:0", "pinned": True}
BUS = Figure("pinned", "to the GPU", 20 * GB, 1.0, 1)


@pytest.mark.parametrize(
    ("found", "bottleneck", "part"),
    [
        pytest.param(report(rate=1.9), "cache", "more CPUs than 2", id="page-cache"),
        pytest.param(report(rate=1.0, cpus=0.4), "busy machine", "0.4 of 2 CPUs", id="others-have-the-cpus"),
        pytest.param(report(stages={"read": 1, "memory": 2}), "fresh memory", "into=", id="fresh-memory"),
        pytest.param(report(stages={"read": 1, "cast": 2}), "cast", "HEADRACE_CAST_AT=device", id="cast"),
        pytest.param(report(stages={"read": 1, "copy": 2}), "copy", "--direct-io off", id="copy"),
        pytest.param(report(source_wait_s=1, caller_s=3, tensors=9000), "caller", "9,000 tensors", id="caller"),
        pytest.param(report(memory_wait_s=4, memory_limit=64 * MIB), "memory", "than 64 MiB", id="memory-limit"),
        pytest.param(report(disk(2), rate=1.8, **ON_DISK), "disk", "/dev/shm", id="disk"),
        pytest.param(report(disk(1), disk(2, 16), rate=0.9, ceiling=1, **ON_DISK), "disk", "--concurrency 16", id="disk-deeper"),
        pytest.param(report(disk(2), stages={"read": 1, "cast": 2}, **ON_DISK), "cast", "converting", id="disk-is-not-it"),
        pytest.param(report(network(2), rate=1.8, remote=True), "network", "headrace pull", id="network"),
        pytest.param(
            report(network(0.1, 1), network(1), network(2, 16), rate=0.9, ceiling=1, remote=True),
            "network",
            "2.00 GB/s to 16",
            id="network-wider",
        ),
        pytest.param(report(retried=100, throttled=90, remote=True), "retries", "lower --concurrency", id="throttled"),
        pytest.param(report(BUS, rate=18, ceiling=20, **ON_GPU), "bus", "the bus", id="bus"),
        pytest.param(
            report(BUS, rate=5, ceiling=20, device="cuda:0", pinned=False, pinned_how="RLIMIT_MEMLOCK"),
            "pageable",
            "(RLIMIT_MEMLOCK)",
            id="not-page-locked",
        ),
    ],
)
def test_verdict_names_the_bottleneck_and_what_would_help(found: Report, bottleneck: str, part: str) -> None:
    said, text = judge(found)
    assert said == bottleneck
    assert part in text
    assert "{" not in text


@pytest.mark.parametrize("bottleneck", list(_ADVICE))
def test_what_is_advised_can_be_typed_and_words_of_python_are_said_to_be_that(bottleneck: str) -> None:
    text = _ADVICE[bottleneck]
    command = typer.main.get_group(app).commands["bench"]
    assert set(re.findall(r"--[a-z-]+", text)) <= {flag for parameter in command.params for flag in parameter.opts}
    variables = {name.lower() for name in re.findall(r"HEADRACE_([A-Z_]+)=", text)}
    assert variables <= set(Options.__dataclass_fields__)
    for name, told in re.findall(r"\b([a-z_]+)=((?:'\w+')?,?(?: in Python)?)", text):
        assert told.endswith("in Python"), name
        assert name in variables or name not in Options.__dataclass_fields__, f"HEADRACE_{name.upper()} is what can be typed"


def test_no_more_threads_are_advised_where_they_gain_nothing() -> None:
    _, text = judge(report(disk(2), disk(2.1, 16), rate=1.8, **ON_DISK))
    assert "--concurrency" not in text


def test_what_is_over_at_once_has_no_speed() -> None:
    run = Run("dropped", 1000, 0.1, stats=Snapshot(seconds=0.1, read_nbytes=1000))
    assert judge(Report("m", "", 2, 1000, 1000, False, [], [run]))[0] == "start"
    assert judge(Report("m", "", 2, 0, 0, False, [], []))[0] == "unknown"


# -- the probes ----------------------------------------------------------------------------------------------------------------


def test_pieces_cover_the_sources_up_to_the_limit() -> None:
    sources = [MemorySource(bytes(10)), MemorySource(bytes(3)), MemorySource(b"")]
    assert [(piece.offset, piece.nbytes) for piece in pieces(sources, 4, 100)] == [(0, 4), (4, 4), (8, 2), (0, 3)]
    assert len(pieces(sources, 4, 5)) == 2


def test_probe_moves_every_chunk_once_on_so_many_threads() -> None:
    moved: list[int] = []
    figure = _measured("disk", "what", [1, 2, 3, 4], 3, 60.0, lambda: moved.append)
    assert sorted(moved) == [0, 1, 2, 3]
    assert (figure.nbytes, figure.threads) == (10, 3)


def test_probe_ends_when_its_time_is_up() -> None:
    figure = _measured("disk", "what", [1] * 1000, 1, 0.0, lambda: lambda _: None)
    assert figure.nbytes == 1


def test_probe_raises_what_a_thread_raises() -> None:
    def refuse(_: int) -> None:
        raise headrace.SourceError("torn", url="m")

    with pytest.raises(headrace.SourceError, match="torn"):
        _measured("disk", "what", [1] * 8, 2, 60.0, lambda: refuse)


def test_probe_whose_workers_cannot_be_made_raises_and_hangs_nowhere() -> None:
    def refuse() -> Any:
        raise MemoryError("no buffer")

    with pytest.raises(MemoryError, match="no buffer"):
        _measured("disk", "what", [1] * 8, 4, 60.0, refuse)


@needs_compiler
def test_copies_to_a_device_are_measured_and_leave_nothing_behind() -> None:
    with simulated_gpu("timed") as gpu:
        pinned, pageable = device_copies(gpu.device, Bounds(2 * MIB, 5.0))
    assert (pinned.kind, pageable.kind) == ("pinned", "pageable")
    assert pinned.nbytes == pageable.nbytes == 32 * 2 * MIB


# -- the whole -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, 48 MiB of F32."""
    folder = tmp_path_factory.mktemp("model")
    for shard in range(2):
        save_file({f"{shard}.{i}": torch.full((MIB * 3,), float(i)) for i in range(2)}, folder / f"model-{shard}.safetensors")
    return folder


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["bench", "--seconds", "0.3", *map(str, arguments)])


@pytest.mark.slow
@pytest.mark.leaky_ok("matplotlib keeps its fonts open")
def test_bench_prints_tables_and_a_paragraph_and_writes_what_was_asked_for(model: Path, tmp_path: Path) -> None:
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in model.iterdir()}
    files = [tmp_path / name for name in ("b.json", "b.png", "t.json")]
    result = run(model, "--json", files[0], "--plot", files[1], "--trace", files[2])
    assert result.exit_code == 0, result.output
    for part in ("page cache", "fresh memory, touched", "cast, F32 to BF16", "headrace, dropped", "headrace, kept"):
        assert re.search(rf"^{re.escape(part)} .* GB/s|^{re.escape(part)} .* MB/s", result.stdout, re.MULTILINE), part
    assert "no GPU: not measured" in result.stdout
    assert result.stdout.rstrip().splitlines()[-1].startswith("The load (dropped) read 48 MiB")
    figures = json.loads(files[0].read_text())
    assert figures["verdict"] in result.stdout
    assert figures["runs"][0]["stats"].keys() == Snapshot().as_dict().keys()
    assert figures["runs"][0]["nbytes"] == figures["total_nbytes"] == 48 * MIB
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files[2].read_text())["traceEvents"]
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in model.iterdir()} == before


@pytest.mark.slow
def test_limit_bounds_what_is_read(model: Path) -> None:
    arguments = {"url": str(model), "names": None}
    found = measure(arguments, Settings(limit_nbytes=1, seconds=0.3))  # 64 MiB is the least that has a speed
    assert found.used_nbytes == 48 * MIB
    assert all(run.nbytes <= 64 * MIB for run in found.runs)


@pytest.mark.slow
def test_selection_of_the_load_is_the_benchs(model: Path) -> None:
    found = measure({"url": str(model), "names": "0.*", "dtype": "bfloat16"}, Settings(seconds=0.3))
    assert found.total_nbytes == 24 * MIB
    assert {run.stats.tensors for run in found.runs if run.stats is not None} == {2}
    assert all(run.stages["cast"] > 0 for run in found.runs)


@pytest.mark.slow
def test_remote_checkpoint_is_measured_over_its_connections(model: Path) -> None:
    data = (model / "model-0.safetensors").read_bytes()
    with Server({"/m.safetensors": data}) as server:
        found = measure({"url": server.url_of("/m.safetensors"), "concurrency": 3}, Settings(seconds=0.5, against=["runai"]))
    assert [figure.threads for figure in found.figures if figure.kind == "network"] == [1, 3, 4]  # there are four chunks
    assert not [figure for figure in found.figures if figure.kind in ("disk", "cache")]
    assert found.is_remote
    assert found.rivals[0].skipped == "compared on local files only"


@pytest.mark.slow
def test_cold_drops_the_models_own_files_and_no_others(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = set()
    real = os.posix_fadvise

    def watch(fd: int, offset: int, length: int, advice: int) -> None:
        dropped.add(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", watch)
    measure({"url": str(model)}, Settings(seconds=0.3))
    assert not dropped
    measure({"url": str(model)}, Settings(seconds=0.3, cold=True))
    assert dropped == {str(file) for file in model.iterdir()}


@pytest.mark.slow
def test_other_loaders_are_compared_where_they_are_installed(model: Path) -> None:
    said: list[str] = []
    ours, theirs, missing = compare(
        ["safetensors", "runai"], [str(file) for file in model.iterdir()], cold=False, seconds=100, say=said.append
    )
    assert (ours.name, theirs.name, missing.name) == ("headrace", "safetensors", "runai")
    assert ours.rate > 0 < theirs.rate
    assert missing.skipped == "not installed here; pip install runai-model-streamer"
    assert said.count("safetensors") == 2


@pytest.mark.slow
def test_other_loader_that_fails_is_a_line(tmp_path: Path) -> None:
    broken = tmp_path / "m.safetensors"
    broken.write_bytes(b"no header")
    ours, theirs = compare(["safetensors"], [str(broken)], cold=False, seconds=100, say=lambda _: None)
    assert ours.skipped.startswith("failed: ")
    assert theirs.skipped.startswith("failed: ")


# -- mistakes ------------------------------------------------------------------------------------------------------------------


def test_names_of_loaders_are_checked() -> None:
    assert parse_names("safetensors, runai,") == ["safetensors", "runai"]
    with pytest.raises(headrace.OptionError, match="takes safetensors, runai"):
        parse_names("torch")


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--limit", "lots"], 2, "512MiB"),
        (["--against", "torch"], 2, "takes safetensors"),
        (["--json", "/nowhere/b.json"], 2, "/nowhere/b.json"),
        (["--seconds", "0"], 2, "--seconds is a number above 0"),
        pytest.param(["--plot", "b.sketch"], 2, "png", marks=pytest.mark.slow),  # imports matplotlib
    ],
)
def test_mistakes_are_found_before_anything_is_measured(model: Path, arguments: list[str], code: int, part: str) -> None:
    result = run(model, *arguments)
    assert result.exit_code == code
    assert part in result.stderr
    assert "measuring" not in result.stderr


def test_missing_matplotlib_names_the_extra(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(model, "--plot", tmp_path / "b.png")
    assert result.exit_code == 2
    assert "pip install 'headrace[bench]'" in result.stderr
