"""The bar chart: a row per case, a bar per way, a line at its first floor. Draws from the data of the JSON file alone.

Colours are from Okabe and Ito, told apart by people who see colours differently; the names stand next to the bars, so that colour
carries nothing alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

GIB = 1 << 30
_COLOURS = {"headrace": "#0072B2", "floor": "#BBBBBB", "peer": "#E69F00"}
_LINE = "#444444"
_LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # a dashed line behind a figure must not strike it out
_BAR_INCHES, _TITLE_INCHES, _WIDTH_INCHES = 0.27, 0.62, 10.5
_SHARE_INCHES = 3.0


class Bar(NamedTuple):
    """One way that ran. GB/s, and CPU-s/GiB without a busy caller's own: the median, and the most or the least of all rounds.

    `share` is of ranks: bytes that came from storage, over those of the model, the median and the most.
    """

    name: str
    role: str
    rate: float
    best_rate: float
    cpu: float
    least_cpu: float
    share: float = 0.0
    most_share: float = 0.0


def draw(
    data: Mapping[str, Any], path: Path, title: str, *, cpu: bool = False, leave_out: str | None = None, share: bool = False
) -> list[Path]:
    """Write the chart and return its path; nothing where no case has a speed to show.

    Args:
        data: of the JSON file.
        path: of the PNG.
        title: what is shown.
        cpu: show the CPU time beside the speed.
        leave_out: how the names of cases begin that have no speed to show.
        share: show beside them how often the model's bytes came from storage.
    """
    shown = [case for name, case in data["cases"].items() if leave_out is None or not name.startswith(leave_out)]
    panels = [(case["title"], bars) for case in shown if (bars := _bars(case))]
    if not panels:
        return []
    plt = pyplot()
    heights = [len(bars) * _BAR_INCHES + _TITLE_INCHES for _, bars in panels]
    figure, axes = plt.subplots(
        len(panels),
        1 + cpu + share,
        figsize=(_WIDTH_INCHES + share * _SHARE_INCHES, sum(heights) + 0.9),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for row, (name, bars) in zip(axes, panels, strict=True):
        _draw_panel(row[0], [bar.rate for bar in bars], [bar.best_rate for bar in bars], bars)
        row[0].set_yticks(range(len(bars)), [_wrapped(bar.name) for bar in bars], fontsize=8)
        row[0].set_title(name, fontsize=10, fontweight="bold", loc="left")
        if cpu:
            _draw_panel(row[1], [bar.cpu for bar in bars], [bar.least_cpu for bar in bars], bars)
            row[1].set_yticks([])
        if share:
            _draw_panel(row[-1], [bar.share for bar in bars], [bar.most_share for bar in bars], bars)
            row[-1].set_yticks([])
    for axis, text in zip(axes[-1], _labels(cpu=cpu, share=share), strict=True):
        axis.set_xlabel(text, fontsize=9)
    figure.suptitle(f"{title}\n{data['machine']['summary']}", fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return [path]


def pyplot() -> Any:
    """matplotlib, without a screen."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    return plt


def bar_of(name: str, way: Mapping[str, Any]) -> Bar | None:
    """A way of the JSON data; None where it did not run."""
    samples = way["samples"]
    if not samples or way["skipped"]:
        return None
    seconds = [sample["seconds"] for sample in samples]
    cpu = [max(0.0, sample["cpu_s"] - sample.get("spin_s", 0.0)) / (sample["bytes"] / GIB) for sample in samples]
    rate = samples[0]["bytes"] / 1e9
    label = f"{name}: {way['settings']}" if way["settings"] else name
    shares = [sample.get("storage_share", 0.0) for sample in samples]
    return Bar(
        label, way["way"]["role"], rate / median(seconds), rate / min(seconds), median(cpu), min(cpu), median(shares), max(shares)
    )


def _labels(*, cpu: bool, share: bool) -> list[str]:
    """Under the columns. Only ranks have shares, and no floor and no busy caller."""
    if share:
        rate, cost = "GB/s handed out, median (whisker: quickest round)", "CPU-s per GiB handed out,\nmedian (whisker: least)"
    else:
        rate = "GB/s, median (whisker: quickest round); dashed: the floor"
        cost = "CPU-s/GiB of the client, median (whisker: least);\na busy caller's spinning is left out"
    read = "bytes from the disk or the server ÷ the model's,\nmedian (whisker: most)"
    return [rate, *([cost] if cpu else []), *([read] if share else [])]


def _bars(case: Mapping[str, Any]) -> list[Bar]:
    """Each way that ran: headrace, the case's floors, peers from quick to slow."""
    found = [bar for name, way in case["ways"].items() if (bar := bar_of(name, way)) is not None]
    return sorted(found, key=lambda bar: (list(_COLOURS).index(bar.role), -bar.rate if bar.role == "peer" else 0))


def _draw_panel(axis: Any, values: Sequence[float], extremes: Sequence[float], bars: Sequence[Bar]) -> None:
    rows = range(len(bars))
    below = [max(0.0, value - extreme) for value, extreme in zip(values, extremes, strict=True)]
    above = [max(0.0, extreme - value) for value, extreme in zip(values, extremes, strict=True)]
    axis.barh(rows, values, color=[_COLOURS[bar.role] for bar in bars], height=0.72)
    axis.errorbar(values, rows, xerr=[below, above], fmt="none", ecolor=_LINE, elinewidth=1, capsize=2)
    longest = max(*values, *extremes)
    for row, (value, extreme) in enumerate(zip(values, extremes, strict=True)):
        text = f"{value:.2f}" if value < 10 else f"{value:.1f}"
        axis.text(max(value, extreme) + longest * 0.012, row, text, va="center", fontsize=8, bbox=_LABEL_BOX)
    floor = next((value for bar, value in zip(bars, values, strict=True) if bar.role == "floor"), None)
    if floor is not None:
        axis.axvline(floor, color=_LINE, linestyle="--", linewidth=1)
    axis.set_ylim(len(bars) - 0.45, -0.55)
    axis.set_xlim(0, longest * 1.12 or 1.0)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _wrapped(name: str, width: int = 62) -> str:
    return name if len(name) <= width else name[: width - 1] + "…"
