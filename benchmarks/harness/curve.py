"""Speed and CPU time over the number of connections, a line per way. Draws from the data of the JSON file alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.chart import Bar, bar_of, pyplot

# Okabe and Ito, in the order of the ways, each with a marker of its own: colour carries nothing alone.
_STYLES = (("#0072B2", "o", "-"), ("#56B4E9", "s", "--"), ("#666666", "^", "-"), ("#E69F00", "D", "-"), ("#009E73", "v", "-"))

Line = list[tuple[int, Bar]]


def draw(data: Mapping[str, Any], path: Path, title: str, cases: Sequence[str]) -> list[Path]:
    """Write the chart and return its path; nothing where fewer than two of the cases were measured."""
    lines = lines_of(data, cases)
    if not lines:
        return []
    plt = pyplot()
    figure, (speed, cpu) = plt.subplots(1, 2, figsize=(10.5, 4.4), layout="constrained")
    for (name, line), (colour, marker, dashes) in zip(lines.items(), _STYLES, strict=False):
        style = {"color": colour, "marker": marker, "linestyle": dashes, "label": name, "markersize": 6}
        connections = [count for count, _ in line]
        speed.plot(connections, [bar.rate for _, bar in line], **style)
        cpu.plot(connections, [bar.cpu for _, bar in line], **style)
    ticks = sorted({count for line in lines.values() for count, _ in line})
    for axis, label in ((speed, "GB/s, median"), (cpu, "CPU-s/GiB of the client, spinning left out, median")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("connections", fontsize=9)
        axis.set_title(label, fontsize=10, fontweight="bold", loc="left")
        axis.tick_params(labelsize=8)
        axis.grid(axis="y", linewidth=0.5, alpha=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=len(lines), fontsize=9, frameon=False)
    figure.suptitle(f"{title}\n{data['machine']['summary']}", fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return [path]


def lines_of(data: Mapping[str, Any], cases: Sequence[str]) -> dict[str, Line]:
    """{way: its (connections, figures)}, of ways that ran in two cases or more."""
    found: dict[str, Line] = {}
    for case in (data["cases"][name] for name in cases if name in data["cases"]):
        for name, way in case["ways"].items():
            if (bar := bar_of(name, way)) is not None:
                found.setdefault(name, []).append((case["connections"], bar))
    return {name: sorted(line) for name, line in found.items() if len(line) > 1}
