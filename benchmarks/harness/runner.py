"""Run cases: every measurement in a fresh process, the ways of a case in turn, round after round.

Ways that share a `pick` are tried once each in the same run before the rounds begin; the quickest goes on under the pick's name.
A way that cannot run is left out, with its reason. Before the rounds headrace loads once uncounted, which tells how many reads it
keeps in flight: the floors use as many. Where there is a server, each way loads once uncounted and its bytes are summed: one
that does not come to the sum of the files is left out. On a machine that others use, a measurement waits for a quiet moment and
is taken again where others were busy meanwhile; what was busy decides, never the figure. Ranks load once uncounted as well, and
each rank's bytes are summed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import checkpoints, node, pagecache
from harness.cases import Case, Way
from harness.child import busy_s
from harness.failures import FailedError
from harness.servers import Traffic
from harness.targets import FOREIGN, Target

_ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 180
_CACHED_SHARE = 0.999
_STREAM_NBYTES = 768 << 20  # headrace reads ahead up to 512 MiB
_BUSY_CPUS = 0.3  # what others may use during a measurement
_QUIET_WAIT_S = 3.0

Sample = dict[str, Any]
Say = Callable[[str], None]


@dataclass(slots=True)
class Measured:
    """A way and its samples; `skipped` says why there are none."""

    way: Way
    samples: list[Sample] = field(default_factory=list)
    skipped: str = ""
    settings: str = ""  # what a pick ended with
    trials: dict[str, list[float]] = field(default_factory=dict)

    def median(self, key: str) -> float:
        return statistics.median(sample[key] for sample in self.samples)

    def best(self, key: str) -> float:
        return min(sample[key] for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs cases on the checkpoints in a folder.

    Attributes:
        files: {checkpoint: its shards}.
        rounds: measurements of each way.
        source: headrace as it was when the run began: one run measures one state of it, whatever is edited meanwhile.
        retakes: how often a measurement that others disturbed is taken again.
        picks: {(pick, checkpoint, cold): the quickest of its ways}, found in the first case that has them.
        peers: the interpreter of the peers, or why there is none.
        say: told what goes on.
        serve: starts the server of a case.
        traffic: what a server that counts has sent since this was called last.
    """

    files: Mapping[str, Sequence[str]]
    rounds: int
    source: Path
    peers: Path | str
    say: Say
    serve: Callable[[Case], AbstractContextManager[Target | None]]
    retakes: int = 1
    traffic: Callable[[], Traffic | None] = lambda: None
    picks: dict[tuple[str, str, bool], Way] = field(default_factory=dict)

    def run(self, case: Case) -> list[Measured]:
        """All rounds of one case."""
        if not case.cold:
            pagecache.evict(self.files[case.checkpoint])  # filled by us, and not by whoever came before
        try:
            with self.serve(case) as target:
                return self._run(case, target)
        except FailedError as exc:
            return [Measured(case.ways[0], skipped=str(exc))]

    def _run(self, case: Case, target: Target | None) -> list[Measured]:
        known: dict[str, Any] = {"target": target}
        if target is None and not case.ranks:
            rehearsal = self._measure(case, replace(case.ways[0], settings=_idle(case), kind="stream"), known)
            known |= {"threads": rehearsal["threads"], "idle_s": rehearsal["seconds"]}
        measured = [*self._plain(case), *self._picked(case, known)]
        if target is not None or case.ranks:
            self._check(case, measured, known)
        for turn in range(self.rounds):
            for k in range(len(measured)):
                one = measured[(k + turn) % len(measured)]
                if not one.skipped:
                    self._add_sample(case, one, known, retakes=self.retakes)
                    self._remember_idle(case, one, known)
            self.say(f"{case.name}: round {turn + 1} of {self.rounds}")
        return measured

    def _check(self, case: Case, measured: Iterable[Measured], known: dict[str, Any]) -> None:
        """One uncounted load of each way, with its bytes summed."""
        for one in measured:
            if one.skipped:
                continue
            try:
                expected = self._expected(case, one.way)
                sample = self._measure(case, one.way, known, verify=True)
                if sample["checksum"] != expected:
                    raise FailedError(f"wrong bytes: they sum up to {sample['checksum']}, those of the files to {expected}")
            except FailedError as exc:
                one.skipped = str(exc)
                self.say(f"{case.name}: {one.way.name} skipped: {exc}")

    def _expected(self, case: Case, way: Way) -> str | list[str]:
        """What the bytes sum up to; of ranks, each one's."""
        files = self.files[case.checkpoint]
        if not case.ranks:
            return checkpoints.checksum(files)
        of, first = way.settings.get("of", case.ranks), way.settings.get("part", 0)
        cut = node.cut_of(way)
        if not cut:
            return [checkpoints.checksum(files)] * case.ranks
        return [checkpoints.checksum(files, cut, first + rank, of) for rank in range(case.ranks)]

    def _plain(self, case: Case) -> list[Measured]:
        return [
            Measured(way, skipped=way.unmeasured)
            for way in case.ways
            if way.pick is None and (way.here or not isinstance(self.peers, str))
        ]

    def _picked(self, case: Case, known: dict[str, Any]) -> Iterable[Measured]:
        if isinstance(self.peers, str):
            return
        for pick in dict.fromkeys(way.pick for way in case.ways if way.pick is not None):
            if (known_best := self.picks.get((pick, case.checkpoint, case.cold))) is not None:
                yield Measured(replace(known_best, name=pick), settings=known_best.name)
                continue
            candidates = [Measured(way) for way in case.ways if way.pick == pick]
            for candidate in candidates:
                self._add_sample(case, candidate, known, retakes=0)
            usable = [candidate for candidate in candidates if candidate.samples]
            trials = {candidate.way.name: [sample["seconds"] for sample in candidate.samples] for candidate in candidates}
            if not usable:
                yield Measured(replace(candidates[0].way, name=pick), skipped=candidates[0].skipped, trials=trials)
                continue
            best = min(usable, key=lambda candidate: candidate.best("seconds"))
            self.picks[pick, case.checkpoint, case.cold] = best.way
            self.say(f"{case.name}: {pick} is {best.way.name}")
            yield Measured(replace(best.way, name=pick), settings=best.way.name, trials=trials)

    def _add_sample(self, case: Case, one: Measured, known: dict[str, Any], *, retakes: int) -> None:
        try:
            one.samples.append(self._undisturbed(case, one.way, known, retakes))
        except FailedError as exc:
            one.skipped = str(exc)
            self.say(f"{case.name}: {one.way.name} skipped: {exc}")

    def _undisturbed(self, case: Case, way: Way, known: dict[str, Any], retakes: int) -> Sample:
        """A sample during which others left the CPUs alone; the quietest of a few where there is none."""
        taken: list[Sample] = []
        for _ in range(1 + retakes):
            if retakes:
                _wait_for_quiet()
            taken.append(self._measure(case, way, known))
            if taken[-1]["others_cpus"] <= _BUSY_CPUS:
                break
        return min(taken, key=lambda sample: sample["others_cpus"]) | {"retaken": len(taken) - 1}

    def _remember_idle(self, case: Case, one: Measured, known: dict[str, Any]) -> None:
        if one.way.role != "peer" and one.way.settings == _idle(case) and one.way.kind is None and one.samples:
            known["idle_s"] = one.median("seconds")

    def _measure(self, case: Case, way: Way, known: dict[str, Any], *, verify: bool = False) -> Sample:
        files = list(self.files[case.checkpoint])
        if not case.cold and pagecache.resident_share(files) < _CACHED_SHARE:
            pagecache.fill(files)
        settings = dict(way.settings)
        if settings.get("threads") == "headrace":
            settings["threads"] = known["threads"]
        spin_s = settings.pop("spin_share", 0) * known.get("idle_s", 0.0)
        if spin_s:
            settings["spin_s"] = spin_s
        if case.connections:
            settings["connections"] = case.connections
        kind = way.kind or case.kind
        total = sum(map(os.path.getsize, files))
        all_of_it = kind == "load" or way.role == "peer"
        job = {
            "way": way.call,
            "files": files,
            "kind": kind,
            "cold": case.cold,
            "verify": verify,
            "memory_nbytes": total if all_of_it else min(total, _STREAM_NBYTES),
            "settings": settings,
        }
        target: Target | None = known["target"]
        surroundings = {}
        if target is not None:
            job["target"] = asdict(target)
            surroundings = target.environment()
        environment = {**surroundings, **way.environment, "PYTHONPATH": str(self.source)}
        with _folder(settings, files):
            interpreter = sys.executable if way.here else str(self.peers)
            if case.ranks:
                return self._measure_ranks(case, job, environment, interpreter)
            sample = run_child(job, environment, interpreter)
        if spin_s:
            sample |= {"spin_s": spin_s, "ideal_s": max(spin_s, known["idle_s"])}
        return sample

    def _measure_ranks(self, case: Case, job: Mapping[str, Any], environment: Mapping[str, str], interpreter: str) -> Sample:
        self.traffic()
        with TemporaryDirectory() as folder:
            jobs = node.jobs_of(job, case.ranks, folder)
            commands = [_command(one, {**environment, **node.variables_of(one)}, interpreter) for one in jobs]
            samples = node.run_together(commands, _ROOT, Path(folder))
        model_nbytes = sum(entry.nbytes for file in job["files"] for entry in checkpoints.read_entries(file))
        return node.summed(samples, model_nbytes, self.traffic())


def _idle(case: Case) -> dict[str, Any]:
    """Settings of the first way without a busy caller."""
    return {key: value for key, value in case.ways[0].settings.items() if key != "spin_share"}


@contextmanager
def _folder(settings: dict[str, Any], files: Sequence[str]) -> Iterator[None]:
    """Where the settings ask for a folder: an empty one, in memory or next to the checkpoints, which is removed afterwards."""
    if "folder" not in settings:
        yield
        return
    on = "/dev/shm" if settings["folder"] == "memory" else Path(files[0]).parent.parent
    with TemporaryDirectory(dir=on, prefix=".headrace-bench-") as folder:
        settings["folder"] = folder
        yield


def _wait_for_quiet() -> None:
    """Wait until others leave the CPUs alone, a few seconds at most."""
    never, window_s = threading.Event(), 0.2
    for _ in range(round(_QUIET_WAIT_S / window_s)):
        before = busy_s()
        never.wait(window_s)
        if busy_s() - before <= _BUSY_CPUS * window_s:
            return


def run_child(job: Mapping[str, Any], environment: Mapping[str, str], interpreter: str) -> Sample:
    """Measure in a process of its own. Raises `FailedError` with the last line it said."""
    try:
        done = subprocess.run(
            _command(job, environment, interpreter), cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"took longer than {_TIMEOUT_S} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        raise FailedError(said[-1][:200] if said else f"exit status {done.returncode}")
    return dict(json.loads(lines[-1]))


def _command(job: Mapping[str, Any], environment: Mapping[str, str], interpreter: str) -> list[str]:
    unset = [word for name in FOREIGN for word in ("-u", name)]
    variables = [f"{key}={value}" for key, value in environment.items()]
    return ["env", *unset, *variables, interpreter, "-m", "harness.child", json.dumps(job)]


def as_data(measured: Measured) -> dict[str, Any]:
    """For the JSON file."""
    data = asdict(measured)
    data["way"]["settings"] = {key: value for key, value in data["way"]["settings"].items() if not callable(value)}
    return data
