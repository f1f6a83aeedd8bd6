"""What came out: tables for people, JSON for later, and whether each goal holds."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.cases import Case, Goal
from harness.runner import Measured, as_data

GIB, MIB = 1 << 30, 1 << 20
_SHARES = frozenset({"read_share", "storage_share", "slice_share", "stated_share"})
_PACKAGES = ("headrace", "torch", "numpy", "safetensors")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal and what was reached. `holds` None: there was nothing to compare with."""

    goal: Goal
    value: float | None
    against: str
    holds: bool | None

    @property
    def text(self) -> str:
        word = "PASS" if self.holds else "MISS" if self.holds is False else "----"
        bound = f"≥ {self.goal.at_least:g}" if self.goal.at_least is not None else f"≤ {self.goal.at_most:g}"
        value = "not measured" if self.value is None else f"{self.value:.3g} ({bound})"
        return f"{word}  {self.goal.text}: {value}" + (f", against {self.against}" if self.against else "")


def judge(goal: Goal, measured: Sequence[Measured]) -> Verdict:
    """Whether a goal holds, by medians."""
    usable = [one for one in measured if one.samples and not one.skipped]
    ours = next((one for one in usable if one.way.name == goal.way), None)
    others = [one for one in usable if any(fnmatch(one.way.name, pattern) for pattern in goal.against) and one is not ours]
    if ours is None or (goal.against and not others):
        return Verdict(goal, None, "", None)
    other = min(others, key=lambda one: one.median("seconds")) if others else None
    value = _value(goal, ours, other)
    holds = value >= goal.at_least if goal.at_least is not None else value <= (goal.at_most or 0)
    return Verdict(goal, value, other.way.name if other else "", holds)


def _value(goal: Goal, ours: Measured, other: Measured | None) -> float:
    if goal.metric == "peak_mib":
        return max(sample["peak_nbytes"] for sample in ours.samples) / MIB
    if goal.metric == "over_limit_mib":
        return max(sample["peak_nbytes"] - sample["stats"]["memory_limit"] for sample in ours.samples) / MIB
    if goal.metric == "over_slice_mib":
        return max(sample["over_slice_nbytes"] for sample in ours.samples) / MIB
    if goal.metric in _SHARES:
        return max(float(sample[goal.metric]) for sample in ours.samples)
    if goal.metric == "ideal":
        return sorted(sample["ideal_s"] / sample["seconds"] for sample in ours.samples)[len(ours.samples) // 2]
    assert other is not None, "the other metrics compare"
    if goal.metric == "speed":
        return other.median("seconds") / ours.median("seconds")
    if goal.metric == "cpu":
        return ours.median("cpu_s") / other.median("cpu_s")
    if goal.metric == "memory":
        return ours.median("peak_nbytes") / other.median("peak_nbytes")
    return (ours.median("seconds") - other.median("seconds")) / ours.samples[0]["tensors"] * 1e6


@dataclass(slots=True)
class Run:
    """One run of a benchmark, and its output: NAME.json, NAME.png and what else `draw` makes."""

    name: str
    draw: Callable[[Mapping[str, Any], Path], Sequence[Path]]
    command: str
    files: Mapping[str, Sequence[str]]
    peers: Path | str
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %Z"))
    cases: dict[str, tuple[Case, list[Measured], list[Verdict]]] = field(default_factory=dict)

    def add(self, case: Case, measured: list[Measured]) -> None:
        self.cases[case.name] = (case, measured, [judge(goal, measured) for goal in case.goals])

    def print_case(self, case: Case) -> None:
        """The table of one case, its goals under it."""
        console = Console(width=150, highlight=False)
        _, measured, verdicts = self.cases[case.name]
        console.print(_ranks_table(case, measured) if case.ranks else _table(case, measured))
        for verdict in verdicts:
            style = {True: "green", False: "bold red", None: "dim"}[verdict.holds]
            console.print(f"  {verdict.text}", style=style)
        for one in measured:
            if one.skipped:
                console.print(f"  skipped: {one.way.name}: {one.skipped}", style="dim", markup=False)
        console.print()

    def save(self, out: Path) -> Path:
        """Write what there is so far."""
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"{self.name}.json"
        path.write_text(json.dumps(self.as_data(), indent=1))
        return path

    def as_data(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "started": self.started,
            "machine": machine(),
            "versions": versions(self.peers),
            "cases": {
                name: {
                    "title": case.title,
                    "checkpoint": case.checkpoint,
                    "kind": case.kind,
                    "cold": case.cold,
                    "server": case.server,
                    "connections": case.connections,
                    "ranks": case.ranks,
                    "ways": {one.way.name: as_data(one) for one in measured},
                    "goals": [{**asdict(verdict), "text": verdict.text} for verdict in verdicts],
                }
                for name, (case, measured, verdicts) in self.cases.items()
            },
        }

    def finish(self, out: Path) -> None:
        """The charts, and where everything is."""
        path = self.save(out)
        data = self.as_data()
        pictures = self.draw(data, out)
        missed = [(name, v) for name, (_, _, verdicts) in self.cases.items() for v in verdicts if v.holds is False]
        print(f"{data['machine']['summary']}\n{self.command}", path, *pictures, sep="\n")
        for name, verdict in missed:
            print(f"{name}: {verdict.text}")


def _table(case: Case, measured: Sequence[Measured]) -> Table:
    shown = [one for one in measured if one.samples and not one.skipped]
    columns = ["median s", "best s", "GB/s", "CPU-s/GiB", "peak MiB", "× floor", "× headrace", "others' CPUs"]
    table = _titled(case, [*columns, *(["server CPU-s/GiB"] if case.server else [])])
    floors = [one.median("seconds") for one in shown if one.way.role == "floor"]
    ours = next((one.median("seconds") for one in shown if one.way.name == "headrace"), None)
    for one in shown:
        seconds, nbytes = one.median("seconds"), one.samples[0]["bytes"]
        label = f"{one.way.name} ({one.settings})" if one.settings else one.way.name
        table.add_row(
            label,
            f"{seconds:.3f}",
            f"{one.best('seconds'):.3f}",
            f"{nbytes / seconds / 1e9:.2f}",
            f"{one.median('cpu_s') / (nbytes / GIB):.3f}",
            f"{one.median('peak_nbytes') / MIB:.0f}",
            f"{floors[0] / seconds:.2f}" if floors else "",
            f"{ours / seconds:.2f}" if ours else "",
            f"{one.median('others_cpus'):.2f}",
            *([f"{one.median('server_cpu_s') / (nbytes / GIB):.3f}"] if case.server else []),
            style={"headrace": "bold", "floor": "cyan"}.get(one.way.role, ""),
        )
    return table


def _ranks_table(case: Case, measured: Sequence[Measured]) -> Table:
    """Rates, CPU time and bytes are of all ranks together, per byte that was handed out; memory is that of the rank with most."""
    over = case.kind == "load"
    titles = ["median s", "GB/s a rank", "GB/s in all", "CPU-s /GiB", "peak MiB", *(["over tensors"] if over else [])]
    more = ["read ÷ model", f"{'server' if case.server else 'disk'} ÷ model", "× headrace", "others' CPUs"]
    table = _titled(case, [*titles, *more, *(["opened MiB", "server CPU-s"] if case.server else [])])
    shown = [one for one in measured if one.samples and not one.skipped]
    ours = next((one.median("seconds") for one in shown if one.way.name == "headrace"), None)
    for one in shown:
        seconds, first = one.median("seconds"), one.samples[0]
        rate = first["bytes"] / seconds / 1e9
        table.add_row(
            one.way.name,
            f"{seconds:.3f}",
            f"{rate / first['ranks']:.2f}",
            f"{rate:.2f}",
            f"{one.median('cpu_s') / (first['bytes'] / GIB):.3f}",
            f"{one.median('peak_nbytes') / MIB:.0f}",
            *([f"{one.median('over_slice_nbytes') / MIB:.0f}"] if over else []),
            "" if first["read_share"] is None else f"{one.median('read_share'):.3f}",
            f"{one.median('storage_share'):.3f}",
            f"{ours / seconds:.2f}" if ours else "",
            f"{one.median('others_cpus'):.2f}",
            *([f"{first['traffic']['opening_nbytes'] / MIB:.2f}", f"{one.median('server_cpu_s'):.2f}"] if case.server else []),
            style={"headrace": "bold", "floor": "cyan"}.get(one.way.role, ""),
        )
    return table


def _titled(case: Case, columns: Sequence[str]) -> Table:
    table = Table(title=f"{case.name}: {case.title}", title_justify="left", title_style="bold")
    table.add_column("way", no_wrap=True)
    for title in columns:
        table.add_column(title, justify="right")
    return table


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    lines = _lines("/proc/cpuinfo")
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    cpus = sum(line.startswith("processor") for line in lines)
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return {
        "cpu": cpu,
        "cpus": cpus,
        "memory_gib": round(memory_kib / MIB, 1),
        "kernel": platform.release(),
        "huge_pages": "".join(_lines("/sys/kernel/mm/transparent_hugepage/enabled")).strip(),
        "summary": f"{cpu}, {cpus} CPUs, {memory_kib / MIB:.0f} GiB, {system}",
    }


def versions(peers: Path | str) -> dict[str, str]:
    """Packages of this environment and of the peers', and the commit."""
    found = {"python": platform.python_version(), "commit": _commit()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    if isinstance(peers, str):
        return found
    frozen = _said([str(peers), "-m", "pip", "freeze", "--disable-pip-version-check"]).split()
    return found | {f"peers: {name}": number for name, _, number in (line.partition("==") for line in frozen) if number}


def _commit() -> str:
    return _said(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]).strip() or "unknown"


def _said(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
