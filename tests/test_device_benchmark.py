"""The benchmark of loads to a device: what it says without a GPU, and what it counts on a simulated one: nothing is a speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_gpu import needs_compiler

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(*arguments: str | Path) -> str:
    command = [sys.executable, str(BENCHMARKS / "device.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")  # noqa: TID251
def test_without_a_gpu_it_measures_nothing_and_says_so(tmp_path: Path) -> None:
    assert "nothing was measured on a GPU" in run("--data", tmp_path, "--out", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_compiler
def test_a_simulated_run_counts_and_calls_nothing_a_speed(tmp_path: Path) -> None:
    output = run("--simulated", "--quick", "--rounds", "1", "--data", tmp_path, "--out", tmp_path)
    assert "GB/s " not in output
    assert output.count("SIMULATED GPU, no speed was measured") == 2
    found = json.loads((tmp_path / "device-simulated.json").read_text())
    assert found["simulated"] is True
    ways: dict[str, Any] = found["cases"]["cast"]["ways"]
    (cast,), (bare,) = ways["headrace, cast on the way"]["samples"], ways["bare copies, page-locked"]["samples"]
    assert 2 * cast["sent"] == bare["sent"] == cast["bytes"]
    assert cast["pageable"] == bare["pageable"] == 0
    (pageable,) = found["cases"]["pinned"]["ways"]['headrace, pin="off"']["samples"]
    assert pageable["pageable"] == pageable["sent"] == pageable["bytes"]
    assert not (tmp_path / "device.json").exists()


@pytest.mark.slow
@needs_compiler
def test_reading_is_measured_against_bare_reads(tmp_path: Path) -> None:
    output = run("--simulated", "--quick", "--rounds", "1", "--cases", "reading", "--data", tmp_path, "--out", tmp_path)
    assert "0.95 × bare reads" in output
    ways = json.loads((tmp_path / "device-simulated.json").read_text())["cases"]["reading"]["ways"]
    assert [way["skipped"] for way in ways.values()] == ["", "", ""]
    assert len({way["samples"][0]["bytes"] for way in ways.values()}) == 1
    assert not (tmp_path / "device-simulated.png").exists(), "there is nothing of a device to show"


@pytest.mark.slow
@needs_compiler
def test_what_a_chunk_costs_in_python_is_measured_over_a_runtime_that_does_nothing(tmp_path: Path) -> None:
    output = run("--simulated", "--quick", "--rounds", "1", "--cases", "python", "--data", tmp_path, "--out", tmp_path)
    assert "µs a chunk" in output
    ways = json.loads((tmp_path / "device-simulated.json").read_text())["cases"]["python"]["ways"]
    assert [len(way["samples"]) for way in ways.values()] == [1] * 5
    assert all(way["samples"][0]["python"] > 0 for way in ways.values())


def test_goals_of_a_gpu_and_of_a_simulated_one_are_told_apart() -> None:
    from harness.device_cases import CASES, ON_REQUEST, DeviceGoal
    from harness.device_child import _WAYS
    from harness.device_report import verdict

    assert {way.call for case in (*CASES, *ON_REQUEST) for way in case.ways} == set(_WAYS)
    names = {case.name: {way.name for way in case.ways} for case in (*CASES, *ON_REQUEST)}
    for case in (*CASES, *ON_REQUEST):
        for goal in case.goals:
            assert {goal.way, *([goal.against] if goal.against else [])} <= names[case.name]
            assert goal.counts(simulated=False) or goal.counts(simulated=True)
            assert (case.is_of != "device") == (goal.counts(simulated=False) and goal.counts(simulated=True))
    ways = {
        "a": {"samples": [{"bytes": 300, "seconds": 1.0, "bus": 0.5}]},
        "b": {"samples": [{"bytes": 100, "seconds": 1.0}]},
        "c": {"samples": []},
    }
    assert verdict(DeviceGoal("x", "speed", "a", "b", at_least=3), ways).startswith("PASS")
    assert verdict(DeviceGoal("x", "speed", "a", "b", at_least=3.1), ways).startswith("MISS")
    assert verdict(DeviceGoal("x", "bus", "a", at_most=0.4), ways).startswith("MISS")
    assert "not measured" in verdict(DeviceGoal("x", "speed", "a", "c", at_least=1), ways)


def rate(slots: int, **machine: float) -> float:
    from ring import Machine, Ring

    usual = {"readers": 4, "reads": 4e9, "bus": 4e9, "chunk_nbytes": 1 << 20, "python_s": 0.0, "varies": 0.0}
    return float(Ring(Machine(**{**usual, **machine}), slots).rate())


def test_the_model_of_the_ring_has_the_rate_of_whatever_is_slowest() -> None:
    assert rate(8, bus=1e9) == pytest.approx(1e9, rel=0.01)
    assert rate(8, reads=1e9) == pytest.approx(1e9, rel=0.01)
    assert rate(8, reads=8e9, bus=8e9, python_s=2**20 / 2e9) == pytest.approx(2e9, rel=0.01)
    assert rate(2) < 0.6 * rate(8), "two slots are filled by two of the readers"
    assert rate(5, varies=0.3) < rate(12, varies=0.3) < 4e9
