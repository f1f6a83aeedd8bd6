"""One page of all benchmarks, out of the JSON that they write: machine, versions, commands, every table and every goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from harness import device_report
from harness.device_cases import CASES, ON_REQUEST

GIB, MIB = 1 << 30, 1 << 20
_TOLD = frozenset(
    (
        *("python", "commit", "headrace", "torch", "safetensors", "botocore"),
        *("awscrt", "boto3", "obstore", "runai-model-streamer", "fastsafetensors", "instanttensor", "tensorizer"),
    )
)
_HEAD = """# Results

Written by `scripts/bench all` from what each benchmark left; [benchmarks](benchmarks.md) says what is measured and how. Figures
of different runs, or of different machines, are not to be compared: each table has its own floor and its own rivals, measured in
turns with headrace. **Bold** are headrace's ways, *italic* the floors. Goals that are missed are on the page like all others.
"""


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of the runs, in their order."""
    return "\n".join([_HEAD, *(line for run in runs for line in _run(run))])


def _run(run: Mapping[str, Any]) -> Iterator[str]:
    is_device = "simulated" in run
    name = run["command"].split()[1] if run["command"].startswith("scripts/bench") else "device"
    yield f"## {name}{', on a simulated GPU' if is_device and run['simulated'] else ''}\n"
    versions = {name: version for name, version in run.get("versions", {}).items() if name.removeprefix("peers: ") in _TOLD}
    yield f"`{run['command']}`, {run.get('started') or run['date']}  "
    yield f"{run['machine']['summary']}{'; ' + run['device'] if run.get('device') else ''}  "
    if versions:
        yield ", ".join(f"{package} {version}" for package, version in versions.items() if not _is_double(package, versions))
    yield ""
    for case_name, case in run["cases"].items():
        yield f"### {case_name}: {case['title']}\n"
        yield from _device_case(case_name, case, simulated=run["simulated"]) if is_device else _case(case)
        yield ""


def _is_double(package: str, versions: Mapping[str, str]) -> bool:
    """A package of the others that headrace's own environment has in the same version."""
    return package.startswith("peers: ") and versions.get(package.removeprefix("peers: ")) == versions[package]


def _case(case: Mapping[str, Any]) -> Iterator[str]:
    ways = {name: way for name, way in case["ways"].items() if way["samples"] and not way.get("skipped")}
    medians = {name: _median(way, "seconds") for name, way in ways.items()}
    ours = medians.get("headrace")
    head = ["way", "median s", "GB/s", "CPU-s/GiB", "peak MiB", "× headrace"]
    rows = [
        [
            _styled(name, way["way"]["role"]),
            f"{medians[name]:.3f}",
            f"{way['samples'][0]['bytes'] / medians[name] / 1e9:.2f}",
            f"{_median(way, 'cpu_s') / (way['samples'][0]['bytes'] / GIB):.2f}",
            f"{_median(way, 'peak_nbytes') / MIB:.0f}",
            f"{ours / medians[name]:.2f}" if ours else "",
        ]
        for name, way in ways.items()
    ]
    yield from _table(head, rows)
    yield ""
    yield from (f"- {goal['text']}" for goal in case["goals"])


def _device_case(name: str, case: Mapping[str, Any], *, simulated: bool) -> Iterator[str]:
    head, *rows = device_report.table(case.get("is_of", "device"), case["ways"], simulated=simulated)
    yield from _table(head, [[_styled(way, case["ways"][way]["role"]), *cells] for way, *cells in rows])
    yield ""
    for known in (*CASES, *ON_REQUEST):
        if known.name == name:
            yield from (
                f"- {device_report.verdict(goal, case['ways'])}" for goal in known.goals if goal.counts(simulated=simulated)
            )


def _median(way: Mapping[str, Any], key: str) -> float:
    return float(median(sample[key] for sample in way["samples"]))


def _styled(name: str, role: str) -> str:
    return {"headrace": f"**{name}**", "floor": f"*{name}*"}.get(role, name)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
