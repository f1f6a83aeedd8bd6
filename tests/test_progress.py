"""What the person who waits is shown, and what the counters say is slow."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import headrace
from headrace import Snapshot
from headrace._bar import Lines

ROOT = Path(__file__).parents[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    save_file({f"w{i}": torch.zeros(256, 1024) for i in range(4)}, path)
    return path


@pytest.fixture
def without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # how the import system writes down that there is none


def test_progress_true_is_a_bar_of_tqdm(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    headrace.load(model, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    last = err.rstrip("\n").rpartition("\r")[2]
    assert re.match(r"loading: 100%\|.*\| 4\.19M/4\.19M \[.*B/s, slowest: (source|caller|memory)\]", last), err


def test_bar_is_closed_where_the_caller_leaves(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with headrace.stream(model, progress=True) as stream:
        next(stream)
    assert capsys.readouterr().err.endswith("\n"), "what is printed next starts on a line of its own"


def test_stream_that_is_never_read_shows_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with headrace.stream(model, progress=True):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("without_tqdm")
def test_without_tqdm_there_are_two_lines(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    headrace.load(model, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    first, last = err.splitlines()
    assert first == "loading 4 tensors, 4 MiB to read"
    assert re.fullmatch(r"loaded 4 MiB of 4 MiB, \d+\.\d\d GB/s; slowest: (source|caller|memory)", last)


def test_line_on_a_terminal_is_written_over_and_tells_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class Terminal:
        write, flush, isatty = staticmethod(written.append), staticmethod(lambda: None), staticmethod(lambda: True)

    monkeypatch.setattr(sys, "stderr", Terminal())
    lines = Lines()
    lines(Snapshot(seconds=2, total_nbytes=100 << 20, read_nbytes=20 << 20, total_tensors=3, source_wait_s=2))
    lines.close()
    assert written[0].startswith("\rloading 3 tensors")
    assert written[1].startswith("\rloaded 20 MiB of 100 MiB, 0.01 GB/s, 8 s left; slowest: source")
    assert not written[1].endswith("\n")
    assert written[2].endswith("\n")


@pytest.mark.parametrize("progress", [False, None])
def test_nothing_is_shown_unasked(model: Path, progress: Any, capsys: pytest.CaptureFixture[str]) -> None:
    headrace.load(model, progress=progress)
    assert capsys.readouterr() == ("", "")


def test_callable_gets_snapshots(model: Path) -> None:
    seen: list[Snapshot] = []
    headrace.load(model, progress=seen.append)
    assert seen[-1].read_nbytes == seen[-1].total_nbytes


@pytest.mark.parametrize(
    ("waits", "slowest"),
    [
        pytest.param({"source_wait_s": 3, "caller_s": 1}, "source", id="source"),
        pytest.param({"source_wait_s": 1, "caller_s": 3}, "caller", id="caller"),
        pytest.param({"source_wait_s": 1, "caller_s": 3, "memory_wait_s": 3.5}, "caller", id="memory-waits-for-the-caller"),
        pytest.param({"source_wait_s": 3, "caller_s": 1, "memory_wait_s": 3.5}, "memory", id="limit-is-too-low"),
        pytest.param({"source_wait_s": 3, "caller_s": 0.1, "memory_wait_s": 1}, "source", id="limit-costs-less-than-the-source"),
    ],
)
def test_slowest_stage_is_who_was_waited_for(waits: dict[str, float], slowest: str) -> None:
    assert Snapshot(**waits).slowest == slowest  # type: ignore[arg-type]


# -- the shape of the statistics -----------------------------------------------------------------------------------------------


def test_statistics_are_printed_as_lines_that_name_route_and_waits(model: Path) -> None:
    with headrace.stream(model) as stream:
        total = sum(1 for _ in stream)
    first, waited, memory, route = str(stream.stats).splitlines()
    assert first.startswith(f"{total} of {total} tensors to cpu; ")
    assert f"slowest: {stream.stats.slowest}" in waited
    assert "of a limit of" in memory
    assert stream.stats.routes[0][2] in route


def test_the_repr_of_a_stream_tells_how_far_it_is(model: Path) -> None:
    with headrace.stream(model) as stream:
        assert repr(stream) == "<TensorStream: 0 of 4 tensors handed out>"
        assert len(list(stream)) == 4
        assert repr(stream) == "<TensorStream: 4 of 4 tensors handed out>"


def test_degraded_loads_are_printed_as_such() -> None:
    assert str(Snapshot(degraded=("read unchecked",))).endswith("degraded read unchecked")


def test_statistics_survive_json(model: Path) -> None:
    with headrace.stream(model) as stream:
        for _ in stream:
            pass
    fields_now = stream.stats.as_dict()
    assert json.loads(json.dumps(fields_now)) == fields_now
    assert fields_now["routes"][0][0] == str(model)


def test_every_field_is_documented_with_its_type() -> None:
    fields_part = (ROOT / "docs" / "stats.md").read_text().partition("## When")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", fields_part, re.MULTILINE)
    kinds = {"int": "integer", "float": "number", "str": "text", "bool | None": "true, false or null"}
    expected = {field.name: kinds.get(str(field.type), "list") for field in fields(Snapshot)}
    assert {name: kind.split(" of ")[0].strip() for name, kind in rows} == expected
    assert len(rows) == len(expected), "a field is described twice"
