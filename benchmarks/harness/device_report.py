"""Tables, verdicts and the chart of `scripts/bench device`. Needs the standard library alone; matplotlib for the chart."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness import chart
from harness.device_cases import FLOOR, DeviceCase, DeviceGoal

GIB = 1 << 30
_COLOURS = {"headrace": "#0072B2", "floor": "#BBBBBB", "peer": "#E69F00"}


def show(case: DeviceCase, found: Mapping[str, Any], *, simulated: bool) -> None:
    """Print one case: on a simulated GPU the use of its bus and what was copied, and no speed."""
    print(f"\n{case.name}: {case.title}{' - SIMULATED GPU, no speed was measured' if simulated else ''}")
    if "failed" in found:
        print(f"  FAILED: {found['failed']}")
        return
    print(aligned(table(case.is_of, found["ways"], simulated=simulated)))
    for name, way in found["ways"].items():
        if way["skipped"]:
            print(f"  skipped: {name}: {way['skipped']}")
    for goal in case.goals:
        if goal.counts(simulated=simulated):
            print(f"  {verdict(goal, found['ways'])}")


def table(is_of: str, ways: Mapping[str, Any], *, simulated: bool) -> list[list[str]]:
    """The head and a line for each way that was measured. `is_of`: as of `DeviceCase`."""
    measured = {name: way for name, way in ways.items() if way["samples"]}
    if is_of == "python":
        return [["way", "µs a chunk"], *([name, f"{figure(way, 'python'):.1f}"] for name, way in measured.items())]
    of_bus = simulated and is_of == "device"
    if of_bus:
        head = ["way", "bus in use", "copies", "MiB sent", "pageable MiB"]
    else:
        head = ["way", "median s", "GB/s", "CPU-s/GiB", "copies", "× bare"]
    return [head, *(row(name, way, ways, simulated=of_bus) for name, way in measured.items())]


def row(name: str, way: Mapping[str, Any], ways: Mapping[str, Any], *, simulated: bool) -> list[str]:
    """One way's line."""
    of = {key: median(sample[key] for sample in way["samples"]) for key in ("seconds", "cpu_s", "bytes", "copies")}
    if simulated:
        sent, pageable = (median(sample[key] for sample in way["samples"]) / (1 << 20) for key in ("sent", "pageable"))
        return [name, f"{figure(way, 'bus'):.2f}", f"{of['copies']:.0f}", f"{sent:.0f}", f"{pageable:.0f}"]
    floor = ways.get(FLOOR, {}).get("samples")
    share = f"{figure(way, 'speed') / figure(ways[FLOOR], 'speed'):.2f}" if floor else ""
    return [
        name,
        f"{of['seconds']:.3f}",
        f"{figure(way, 'speed') / 1e9:.2f}",
        f"{of['cpu_s'] / (of['bytes'] / GIB):.2f}",
        f"{of['copies']:.0f}",
        share,
    ]


def figure(way: Mapping[str, Any], metric: str) -> float:
    """The median of a metric of `DeviceGoal`."""
    samples = way["samples"]
    if metric in ("speed", "reads"):
        return median(sample["bytes"] / sample["seconds"] for sample in samples)
    if metric == "sent":
        return median(sample["sent"] / sample["bytes"] for sample in samples)
    return median(sample[metric] for sample in samples)


def verdict(goal: DeviceGoal, ways: Mapping[str, Any]) -> str:
    """Whether a goal holds, in a line."""
    needed = [goal.way, *([goal.against] if goal.against else [])]
    if any(not ways.get(name, {}).get("samples") for name in needed):
        return f"----  {goal.text}: not measured"
    value = figure(ways[goal.way], goal.metric)
    if goal.against:
        value /= figure(ways[goal.against], goal.metric)
    holds = value >= goal.at_least if goal.at_least is not None else value <= (goal.at_most or 0)
    bound = f"≥ {goal.at_least:g}" if goal.at_least is not None else f"≤ {goal.at_most:g}"
    against = f", against {goal.against}" if goal.against else ""
    return f"{'PASS' if holds else 'MISS'}  {goal.text}: {value:.3g} ({bound}){against}"


def aligned(table: Sequence[Sequence[str]]) -> str:
    """A table with columns as wide as they need to be; all but the first to the right."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        "  "
        + "  ".join(
            cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    )


def draw(data: Mapping[str, Any], path: Path) -> list[Path]:
    """The chart's path; nothing where there is no matplotlib, or nothing to show."""
    metric, scale = ("bus", 1.0) if data["simulated"] else ("speed", 1e9)
    cases = [
        (case["title"], [(name, way) for name, way in case["ways"].items() if way["samples"]])
        for case in data["cases"].values()
        if case.get("is_of", "device") == "device"
    ]
    cases = [(title, ways) for title, ways in cases if ways]
    try:
        plt = chart.pyplot()
    except ImportError:
        return []
    if not cases:
        return []
    heights = [len(ways) * 0.27 + 0.62 for _, ways in cases]
    figure_, axes = plt.subplots(
        len(cases), 1, figsize=(10.5, sum(heights) + 0.9), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for (axis,), (title, ways) in zip(axes, cases, strict=True):
        values = [figure(way, metric) / scale for _, way in ways]
        axis.barh(range(len(ways)), values, color=[_COLOURS[way["role"]] for _, way in ways], height=0.72)
        for i, value in enumerate(values):
            axis.text(value + max(values) * 0.012, i, f"{value:.2f}", va="center", fontsize=8)
        axis.set_yticks(range(len(ways)), [name for name, _ in ways], fontsize=8)
        axis.set_title(title, fontsize=10, fontweight="bold", loc="left")
        axis.set_ylim(len(ways) - 0.45, -0.55)
        axis.set_xlim(0, max(values) * 1.12)
        axis.spines[["top", "right"]].set_visible(False)
    simulated = "SIMULATED GPU: share of the simulated bus in use, no speed" if data["simulated"] else "source GB/s, median"
    axes[-1][0].set_xlabel(simulated, fontsize=9)
    figure_.suptitle(
        f"headrace, page cache to a device\n{data['device']}; {data['machine']['summary']}", fontsize=10, x=0.01, ha="left"
    )
    figure_.savefig(path, dpi=150)
    plt.close(figure_)
    return [path]


def machine() -> dict[str, Any]:
    """What it was measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"summary": f"{cpu}, {os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}"}
