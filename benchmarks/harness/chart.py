"""The bar chart: a panel per case, a bar per way, a line at its first floor. Draws from the data of the JSON file alone.

Colours are from Okabe and Ito, told apart by people who see colours differently; the names stand next to the bars, so that colour
carries nothing alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

_COLOURS = {"headrace": "#0072B2", "floor": "#BBBBBB", "peer": "#E69F00"}
_LINE = "#444444"
_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # a dashed line behind a figure must not strike it out
_BAR_INCHES, _TITLE_INCHES, _WIDTH_INCHES = 0.27, 0.62, 10.5


def draw(data: Mapping[str, Any], path: Path) -> Path | None:
    """Write the chart; None where no case has a speed to show."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    panels = {case["title"]: _bars(case) for name, case in data["cases"].items() if not name.startswith("rss_")}
    panels = {title: bars for title, bars in panels.items() if bars}
    if not panels:
        return None
    heights = [len(bars) * _BAR_INCHES + _TITLE_INCHES for bars in panels.values()]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(_WIDTH_INCHES, sum(heights) + 0.9),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, bars) in zip(axes[:, 0], panels.items(), strict=True):
        _draw_panel(axis, title, bars)
    axes[-1, 0].set_xlabel("GB/s, median (whisker: quickest round); dashed: the floor", fontsize=9)
    figure.suptitle(f"headrace, local files to host memory\n{data['machine']['summary']}", fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _bars(case: Mapping[str, Any]) -> list[tuple[str, str, float, float]]:
    """(name, role, median GB/s, best GB/s) of each way that ran: headrace, the case's floors, peers from quick to slow."""
    found = []
    for name, way in case["ways"].items():
        if way["samples"] and not way["skipped"]:
            seconds = [sample["seconds"] for sample in way["samples"]]
            rate = way["samples"][0]["bytes"] / 1e9
            label = f"{name}: {way['settings']}" if way["settings"] else name
            found.append((label, way["way"]["role"], rate / median(seconds), rate / min(seconds)))
    return sorted(found, key=lambda bar: (list(_COLOURS).index(bar[1]), -bar[2] if bar[1] == "peer" else 0))


def _draw_panel(axis: Any, title: str, bars: list[tuple[str, str, float, float]]) -> None:
    rows = range(len(bars))
    rates = [rate for _, _, rate, _ in bars]
    spans = [[0] * len(bars), [best - rate for _, _, rate, best in bars]]
    axis.barh(rows, rates, color=[_COLOURS[role] for _, role, _, _ in bars], height=0.72)
    axis.errorbar(rates, rows, xerr=spans, fmt="none", ecolor=_LINE, elinewidth=1, capsize=2)
    longest = max(best for *_, best in bars)
    for row, (_, _, rate, best) in zip(rows, bars, strict=True):
        axis.text(
            best + longest * 0.012, row, f"{rate:.1f}" if rate >= 1 else f"{rate:.2f}", va="center", fontsize=8, bbox=_LABEL_BOX
        )
    floor = next((rate for _, role, rate, _ in bars if role == "floor"), None)
    if floor is not None:
        axis.axvline(floor, color=_LINE, linestyle="--", linewidth=1)
    axis.set_yticks(rows, [_wrapped(name) for name, *_ in bars], fontsize=8)
    axis.set_ylim(len(bars) - 0.45, -0.55)
    axis.set_xlim(0, longest * 1.09)
    axis.set_title(title, fontsize=10, fontweight="bold", loc="left")
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _wrapped(name: str, width: int = 62) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
