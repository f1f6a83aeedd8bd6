"""The benchmarks' own machinery on tiny data: the child protocol, floors, the page cache, stores, goals and the charts' input."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


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


@pytest.mark.slow
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


# ---- object stores


@pytest.fixture(scope="module", params=["s3", "s3-tls"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Any]]:
    """A checkpoint of four shards, and the S3 server that has it, plain and over TLS."""
    from harness import checkpoints
    from harness.cases import Case
    from harness.servers import Servers

    folder = tmp_path_factory.mktemp("served")
    checkpoints.ensure(folder, ["tiny-shards"])
    case = Case("case", "", "tiny-shards", "stream", False, (), server=request.param, connections=3)
    with Servers(folder, BENCHMARKS.parent / "src", folder).serve(case) as target:
        yield checkpoints.files_of(folder / "tiny-shards"), target


@pytest.fixture
def job_at(served: tuple[list[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes jobs on what is served."""
    from harness.child import Job

    files, target = served
    for name, value in target.environment().items():
        monkeypatch.setenv(name, value)

    def make(way: str, *, kind: str = "stream", **settings: Any) -> Job:
        return Job(way, files, target, kind=kind, verify=True, settings={"connections": 3, **settings})

    return make


@pytest.mark.parametrize("kind", ["stream", "into", "load"])
def test_headrace_and_the_bare_loop_get_the_bytes_of_the_files_from_a_store(job_at: Callable[..., Any], kind: str) -> None:
    from harness import bare_http, checkpoints, ours

    headrace, bare = job_at("ours:run", kind=kind), job_at("bare_http:into_buffers")
    ours.run(headrace)()
    bare_http.into_buffers(bare)()
    expected = checkpoints.checksum(headrace.files)
    assert (f"{headrace.checksum:016x}", f"{bare.checksum:016x}") == (expected, expected)
    assert headrace.tensors == bare.tensors == 16


def test_pull_and_the_bare_loop_write_the_files(job_at: Callable[..., Any], tmp_path: Path) -> None:
    from harness import bare_http, ours

    for way, function in (("ours", ours.pull), ("bare", bare_http.into_files)):
        folder = tmp_path / way
        folder.mkdir()
        job = job_at(way, folder=str(folder))
        function(job)()
        assert [(folder / Path(file).name).read_bytes() == Path(file).read_bytes() for file in job.files] == [True] * 4


def test_bare_loop_refuses_an_answer_that_is_not_its_range(job_at: Callable[..., Any]) -> None:
    from harness import bare_http

    job = job_at("bare_http:into_buffers")
    job.target = replace(job.target, secret="not the secret")
    with pytest.raises(OSError, match="403"):
        bare_http.into_buffers(job)()


def test_server_is_gone_after_its_case(tmp_path: Path) -> None:
    from harness import checkpoints
    from harness.cases import Case
    from harness.servers import Servers

    checkpoints.ensure(tmp_path, ["tiny"])
    with Servers(tmp_path, BENCHMARKS.parent / "src", tmp_path).serve(Case("", "", "tiny", "", False, (), server="s3")) as target:
        assert all(Path(f"/proc/{pid}").exists() for pid in target.pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in target.pids)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
STARTS = {
    "a rank": f"node.run_together([{SLEEPS}] * 3, folder, folder)",
    "a measurement": "runner.run_child({}, {}, sys.executable)",
    "a server": f"servers._process({SLEEPS}, folder).__enter__()",
    "a benchmark": f"subprocess.run({SLEEPS})",
    "one that does not listen": f"subprocess.run(['env', '--ignore-signal=TERM', *{SLEEPS}])",
}
INTERRUPTED = """
import os, signal, subprocess, sys
from pathlib import Path
from harness import ending, node, runner, servers

folder, number, turn, started = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), []

class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        started.append(self.pid)
        print(self.pid, flush=True)
        if len(started) == turn:  # before anyone has got hold of it
            os.kill(os.getpid(), number)

subprocess.Popen, ending._GRACE_S = Popen, 0.2
with ending.ends_its_children():
    %s
"""


@pytest.mark.parametrize(("what", "turn"), [("a rank", 1), ("a rank", 3), *((what, 1) for what in [*STARTS][1:])])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_ended_ends_what_it_is_about_to_start(tmp_path: Path, what: str, turn: int, number: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED % STARTS[what], str(tmp_path), str(int(number)), str(turn)]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + number, done.stderr
    pids = done.stdout.split()
    assert len(pids) == turn
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_benchmark_that_is_ended_ends_the_ranks_that_it_has_started(tmp_path: Path, number: int, ranks: int) -> None:
    command = [sys.executable, BENCHMARKS / "ranks.py", "--quick", "--no-peers", "--cases", "warm_devices"]
    folders = ["--data", tmp_path / "data", "--out", tmp_path / "out"]
    with subprocess.Popen([*command, *folders], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as benchmark:
        children = Path(f"/proc/{benchmark.pid}/task/{benchmark.pid}/children")
        started: list[str] = []
        while len(started) < ranks:
            assert benchmark.poll() is None
            threading.Event().wait(0.001)
            started = children.read_text().split()
        benchmark.send_signal(number)
        assert benchmark.wait(30) == 128 + number
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_case_without_its_server_says_why(tmp_path: Path) -> None:
    from harness.cases import Case, Way
    from harness.runner import Runner
    from harness.servers import Servers

    case = Case("azure", "", "tiny", "stream", True, (Way("headrace", "ours:run", "headrace"),), server="azure")
    servers = Servers(tmp_path, BENCHMARKS.parent / "src", tmp_path / "nowhere")
    (only,) = Runner({"tiny": []}, 1, tmp_path, "left out", lambda _text: None, servers.serve).run(case)
    assert "azurite is not installed" in only.skipped


@pytest.mark.slow
def test_way_with_wrong_bytes_gets_no_figure(tmp_path: Path) -> None:
    from harness import checkpoints
    from harness.cases import Case, Way
    from harness.runner import Runner
    from harness.servers import Servers

    for folder in ("served", "right"):
        checkpoints.ensure(tmp_path / folder, ["tiny"])
    (served,) = checkpoints.files_of(tmp_path / "served" / "tiny")
    with open(served, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    bare = Way("floor", "bare_http:into_buffers", "floor")
    case = Case("case", "", "tiny", "stream", False, (bare,), server="s3", connections=2)
    serve = Servers(tmp_path / "served", BENCHMARKS.parent / "src", tmp_path).serve
    for folder, samples, skipped in (("served", 1, ""), ("right", 0, "wrong bytes")):
        files = {"tiny": checkpoints.files_of(tmp_path / folder / "tiny")}
        runner = Runner(files, 1, BENCHMARKS.parent / "src", "left out", lambda _text: None, serve, retakes=0)
        (only,) = runner.run(case)
        assert (len(only.samples), only.skipped[: len("wrong bytes")]) == (samples, skipped)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 17))
def test_ranges_cover_every_object_once_and_in_order(sizes: list[int], nbytes: int) -> None:
    from harness.targets import ranges

    with TemporaryDirectory() as folder:
        files = [Path(folder) / str(i) for i in range(len(sizes))]
        for file, size in zip(files, sizes, strict=True):
            file.write_bytes(bytes(size))
        found = ranges([str(file) for file in files], nbytes)
    for i, size in enumerate(sizes):
        mine = [part for part in found if part.file == i]
        assert [at for part in mine for at in range(part.start, part.end)] == list(range(size))
        assert all(0 < part.end - part.start <= nbytes and part.nbytes == size for part in mine)


def _cases() -> list[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from harness import local_cases, object_cases, rank_cases
    finally:
        sys.path.remove(str(BENCHMARKS))
    return [*local_cases.CASES, *object_cases.CASES, *rank_cases.CASES]


@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_case_names_what_there_is(case: Any) -> None:
    from harness.checkpoints import SETS

    assert case.checkpoint in SETS
    for way in case.ways:
        module, _, function = way.call.partition(":")
        assert f"\ndef {function}(job: Job)" in (BENCHMARKS / "harness" / f"{module}.py").read_text()
    names = {way.pick or way.name for way in case.ways}
    for goal in case.goals:
        assert goal.way in names
        assert not goal.against or any(fnmatch(name, pattern) for name in names for pattern in goal.against)


@pytest.mark.parametrize("module", ["object_cases", "rank_cases"])
def test_smoke_runs_have_sets_of_their_own(module: str) -> None:
    from harness.checkpoints import SETS

    cases = importlib.import_module(f"harness.{module}")
    assert {case.checkpoint for case in cases.CASES} == set(cases.QUICK_SETS)
    assert set(cases.QUICK_SETS.values()) <= set(SETS)


def test_memory_goal_counts_from_the_limit_that_was_chosen() -> None:
    from harness.cases import Goal, Way
    from harness.report import judge
    from harness.runner import Measured

    goal = Goal("at most 64 MiB over the limit", "over_limit_mib", at_most=64)
    samples = [{"peak_nbytes": peak << 20, "stats": {"memory_limit": 256 << 20}} for peak in (300, 330, 310)]
    verdict = judge(goal, [Measured(Way("headrace", "", "headrace"), samples)])
    assert (verdict.value, verdict.holds) == (74, False)


# ---- ranks


def run_ranks(folder: Path, way: Any, *, server: str = "s3-counted", served: Path | None = None, ranks: int = 2) -> Any:
    """One round of a way on a tiny checkpoint of four shards."""
    from harness import checkpoints
    from harness.cases import Case
    from harness.runner import Runner
    from harness.servers import Servers

    checkpoints.ensure(folder, ["tiny-shards"])
    servers = Servers(served or folder, BENCHMARKS.parent / "src", folder)
    case = Case("case", "", "tiny-shards", "load", False, (way,), server=server, ranks=ranks)  # type: ignore[arg-type] # a name
    files = {"tiny-shards": checkpoints.files_of(folder / "tiny-shards")}
    runner = Runner(files, 1, servers.source, "left out", lambda _text: None, servers.serve, 0, servers.traffic)
    (only,) = runner.run(case)
    return only


@pytest.mark.slow
@pytest.mark.parametrize(("together", "share"), [(True, 1), (False, 2)])
def test_bytes_that_ranks_read_are_counted_by_them_and_by_the_server(tmp_path: Path, together: bool, share: int) -> None:
    from harness.cases import Way

    only = run_ranks(tmp_path, Way("headrace", "ours:ranks", "headrace", settings={"group": together}))
    (sample,) = only.samples
    traffic = sample["traffic"]
    sent = traffic["data_nbytes"] + traffic["opening_nbytes"]
    headers = 2 * 4 * (64 << 10)  # of each shard by each rank, tensors behind a header among them
    assert sample["read_share"] == share
    assert share * sample["model_nbytes"] - headers <= sent <= share * sample["model_nbytes"] + headers
    assert sample["bytes"] == 2 * sample["model_nbytes"]
    assert len(sample["peaks_nbytes"]) == sample["ranks"] == 2
    assert bool(sample["rings_nbytes"]) is together


@pytest.mark.slow
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_of_ranks_are_compared_with_those_of_the_files(tmp_path: Path, dim: int) -> None:
    from harness.cases import Way

    only = run_ranks(tmp_path, Way("headrace", "ours:ranks", "headrace", settings={"rules": {"*.w": dim}}), server="")
    (sample,) = only.samples
    assert sample["model_nbytes"] < sample["bytes"] < 1.01 * sample["model_nbytes"]  # vectors are whole on both


@pytest.mark.slow
def test_ranks_with_wrong_bytes_get_no_figure(tmp_path: Path) -> None:
    from harness import checkpoints
    from harness.cases import Way

    checkpoints.ensure(tmp_path / "served", ["tiny-shards"])
    with open(checkpoints.files_of(tmp_path / "served" / "tiny-shards")[-1], "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    only = run_ranks(tmp_path, Way("headrace", "ours:ranks", "headrace"), served=tmp_path / "served", ranks=1)
    assert (only.samples, only.skipped[: len("wrong bytes")]) == ([], "wrong bytes")


def test_failed_rank_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    from harness.failures import FailedError
    from harness.node import run_together

    waits = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid())); __import__('threading').Event().wait()"
    programs = [waits, "raise SystemExit('no such file')"]
    with pytest.raises(FailedError, match="rank 1: no such file"):
        run_together([[sys.executable, "-c", program] for program in programs], tmp_path, tmp_path)
    pid = (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""
    assert not pid or not Path(f"/proc/{pid}").exists()


def test_ranks_take_from_the_first_start_to_the_last_end() -> None:
    from harness.node import summed
    from harness.servers import Traffic

    def sample(began_s: float, seconds: float, peak: int) -> dict[str, Any]:
        stats = {"read_nbytes": 30, "total_nbytes": 30}
        counts = {"cpu_s": 1.0, "busy_s": 4.0, "server_cpu_s": 0.5, "bytes": 50, "tensors": 3, "device_nbytes": 7}
        return {**counts, "began_s": began_s, "seconds": seconds, "peak_nbytes": peak, "checksum": None, "stats": stats}

    samples = [sample(10.0, 2.0, 60), sample(10.5, 4.5, 90)]
    found = summed(samples, 100, Traffic(5, 80, 4))
    assert (found["seconds"], found["cpu_s"], found["bytes"], found["peak_nbytes"]) == (5.0, 2.0, 100, 90)
    assert (found["read_share"], found["storage_share"], found["slice_share"], found["over_slice_nbytes"]) == (0.6, 0.8, 0.85, 40)
    assert found["others_cpus"] == (4.0 - 2.0 - 0.5) / 5.0
    assert summed(samples, 100, None)["storage_share"] == 0.14


@given(part_count=st.integers(1, 9), dim=st.integers(0, 1))
def test_parts_of_a_checkpoint_sum_up_to_all_of_it(part_count: int, dim: int) -> None:
    from harness import checkpoints

    with TemporaryDirectory() as folder:
        checkpoints._write_set(Path(folder) / "set", [[checkpoints.New("a.w", "F32", (14, 14))]])
        files = checkpoints.files_of(Path(folder) / "set")
        parts = [checkpoints.checksum(files, {"*": dim}, part, part_count) for part in range(part_count)]
        (entry,) = checkpoints.read_entries(files[0])
        values = torch.from_file(files[0], size=Path(files[0]).stat().st_size, dtype=torch.uint8)
        tensor = values[entry.offset :].view(torch.float32).reshape(entry.shape)
        chunks = tensor.chunk(part_count, dim)
        assert parts == [f"{byte_sum_of(chunk) & 0xFFFFFFFFFFFFFFFF:016x}" for chunk in chunks] + [f"{0:016x}"] * (
            part_count - len(chunks)
        )


def byte_sum_of(tensor: torch.Tensor) -> int:
    from harness.child import byte_sum

    return byte_sum(tensor)


def test_way_that_is_not_measured_is_listed_with_its_reason(tmp_path: Path) -> None:
    from harness.cases import Way

    only = run_ranks(tmp_path, Way("headrace", "ours:ranks", "headrace", unmeasured="no such device"), server="")
    assert (only.samples, only.skipped) == ([], "no such device")


@pytest.mark.parametrize(("share", "holds"), [(1.0, True), (1.5, False)])
def test_share_goals_take_the_worst_round(share: float, *, holds: bool) -> None:
    from harness.cases import Goal, Way
    from harness.report import judge
    from harness.runner import Measured

    samples = [{"read_share": value} for value in (1.0, share, 1.0)]
    verdict = judge(Goal("read once", "read_share", at_most=1.001), [Measured(Way("headrace", "", "headrace"), samples)])
    assert (verdict.value, verdict.holds) == (share, holds)


def _data(**cases: tuple[int, tuple[str, ...]]) -> dict[str, Any]:
    """The JSON of a run: {case: (connections, ways)}."""
    sample = {"seconds": 0.5, "cpu_s": 0.25, "bytes": 1 << 30}
    way = {"samples": [sample], "skipped": "", "settings": "", "way": {"role": "headrace"}}
    made = {
        name: {"title": name, "connections": connections, "ways": dict.fromkeys(ways, way)}
        for name, (connections, ways) in cases.items()
    }
    return {"machine": {"summary": "a machine"}, "cases": made}


def test_curve_has_a_line_for_each_way_of_two_cases_or_more() -> None:
    from harness.curve import lines_of

    data = _data(b=(64, ("headrace", "awscrt")), a=(16, ("headrace", "awscrt", "boto3")), other=(8, ("headrace",)))
    found = {name: [(count, bar.cpu) for count, bar in line] for name, line in lines_of(data, ["a", "b", "c"]).items()}
    assert found == {"headrace": [(16, 0.25), (64, 0.25)], "awscrt": [(16, 0.25), (64, 0.25)]}


@pytest.mark.slow
@pytest.mark.leaky_ok(reason="matplotlib keeps its fonts open")
def test_charts_are_drawn_where_there_is_something_to_show(tmp_path: Path) -> None:
    from harness import chart, curve

    data = _data(a=(16, ("headrace",)), b=(64, ("headrace",)))
    assert chart.draw(data, tmp_path / "bars.png", "title", cpu=True) == [tmp_path / "bars.png"]
    assert curve.draw(data, tmp_path / "curve.png", "title", ["a", "b"]) == [tmp_path / "curve.png"]
    assert curve.draw(data, tmp_path / "none.png", "title", ["a"]) == []
    assert {path.name for path in tmp_path.iterdir() if path.read_bytes().startswith(b"\x89PNG")} == {"bars.png", "curve.png"}


# ---- one page of all


def test_the_page_of_all_benchmarks_has_every_way_and_every_goal(tmp_path: Path) -> None:
    result = BENCHMARKS / "results" / "2026-11-29-h200.json"
    out = tmp_path / "docs" / "results.md"
    command = [sys.executable, str(BENCHMARKS / "all.py"), "--render", str(result), "--page", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    for name, way in json.loads(result.read_text())["cases"]["peers"]["ways"].items():
        assert f"**{name}**" in text if way["role"] == "headrace" else name in text
    assert "MISS  0.95 × bare copies: 0.432" in text


def test_a_page_of_nothing_is_a_failure(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "all.py"),
        "--render",
        str(tmp_path / "none.json"),
        "--page",
        str(tmp_path / "p.md"),
    ]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 1
