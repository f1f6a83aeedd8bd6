"""The benchmarks' own machinery on tiny data: the child protocol, floors, the page cache, goals and the chart's input."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    from harness import checkpoints

    checkpoints.ensure(tmp_path, ["tiny"])
    return checkpoints.files_of(tmp_path / "tiny")


def measure(files: list[str], way: str, **job: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "harness.child", json.dumps({"way": way, "files": files, **job})]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_child_reports_a_stream_as_one_json_line(files: list[str]) -> None:
    sample = measure(files, "ours:run", verify=True)
    assert sample["tensors"] == 16
    assert 0 < sample["bytes"] < Path(files[0]).stat().st_size  # without the header
    assert sample["seconds"] > 0
    assert sample["cpu_s"] > 0
    assert sample["threads"] >= 1


def test_headrace_and_the_floor_fill_destinations_with_the_same_bytes(files: list[str]) -> None:
    from harness.child import Job
    from harness.floors import into_given
    from harness.ours import run

    ours = Job("ours:run", files, kind="into", verify=True)
    floor = Job("floors:into_given", files, kind="into", verify=True, settings={"threads": 2})
    run(ours)()
    into_given(floor)()
    assert ours.checksum == floor.checksum != 0


@pytest.mark.parametrize("settings", [{"threads": 3}, {"threads": 1, "direct": True}])
def test_chunk_floor_reads_to_the_end(files: list[str], settings: dict[str, Any]) -> None:
    from harness.child import Job
    from harness.floors import chunks

    chunks(Job("floors:chunks", files, settings=settings))()


def test_filled_files_are_resident(files: list[str]) -> None:
    from harness import pagecache

    pagecache.fill(files)
    assert pagecache.resident_share(files) == 1.0


def test_entries_cover_the_file(files: list[str]) -> None:
    from harness import checkpoints

    entries = checkpoints.read_entries(files[0])
    assert all(a.offset + a.nbytes == b.offset for a, b in pairwise(entries))
    assert entries[-1].offset + entries[-1].nbytes == Path(files[0]).stat().st_size


@pytest.mark.parametrize(("seconds", "holds"), [(0.9, True), (2.0, False)])
def test_speed_goal_compares_medians_with_the_quickest_of_the_others(seconds: float, *, holds: bool) -> None:
    from harness.cases import Goal, Way
    from harness.report import judge
    from harness.runner import Measured

    def measured(name: str, *walls: float) -> Measured:
        return Measured(Way(name, "", "peer"), [{"seconds": wall} for wall in walls])

    goal = Goal("as quick as the quickest floor", "speed", at_least=1.0, against=("floor*",))
    verdict = judge(goal, [measured("headrace", 5.0, seconds, 0.1), measured("floor a", 1.0), measured("floor b", 3.0)])
    assert (verdict.against, verdict.holds) == ("floor a", holds)


def test_goal_without_anything_to_compare_with_is_open() -> None:
    from harness.cases import Goal, Way
    from harness.report import judge
    from harness.runner import Measured

    goal = Goal("quicker than a peer", "speed", at_least=1.0, against=("Run:ai*",))
    missing = Measured(Way("Run:ai default", "", "peer"), skipped="not installed")
    assert judge(goal, [Measured(Way("headrace", "", "headrace"), [{"seconds": 1.0}]), missing]).holds is None
