"""The picture: rates as bars, loads against their ceiling, and below a timeline of what each thread did in the first load.

Colours are from Okabe and Ito, told apart by people who see colours differently; names stand beside the bars, so that colour
carries nothing alone there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace._bench._report import Report, Run
from headrace._plan import format_nbytes
from headrace.errors import OptionError

_STAGES = {  # how a stage is drawn, and what it is called
    "read": ("#0072B2", "read"),
    "memory": ("#999999", "memory: touched, or a slot awaited"),
    "cast": ("#D55E00", "cast"),
    "copy": ("#E69F00", "copy"),
    "exchange": ("#CC79A7", "exchange with other ranks"),
    "wait": ("#F0E442", "wait"),
    "hand-out": ("#009E73", "hand-out to the caller"),
}
_PART, _LOAD, _RIVAL, _LINE = "#BBBBBB", "#0072B2", "#E69F00", "#333333"
_WIDTH_INCHES, _BAR_INCHES, _TRACK_INCHES = 10.5, 0.3, 0.26
_MOST_TRACKS = 24
_MOST_RATIO = 50  # of the longest bar to the shortest; beyond that the short ones could not be seen


class _Bar(NamedTuple):
    label: str
    rate: float
    colour: str
    ceiling: float = 0.0
    share: str = ""


def draw(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the picture.

    Raises:
        OptionError: matplotlib is not installed, or the file cannot be written.
    """
    plt = _pyplot()
    bars, tracks = _bars(report), _tracks(report.timeline)
    heights = [max(1, len(bars)) * _BAR_INCHES + 0.5, max(1, len(tracks)) * _TRACK_INCHES + 0.5]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(_WIDTH_INCHES, sum(heights) + 1.5), height_ratios=heights, layout="constrained"
    )
    try:
        _draw_bars(top, bars)
        _draw_timeline(bottom, tracks, report.runs[0] if report.runs else None)
        figure.suptitle(f"{_shortened(report.url)}\n{report.machine}", fontsize=10, x=0.01, ha="left")
        figure.savefig(path, dpi=150)
    except OSError as exc:
        raise OptionError(f"plot: {path} cannot be written: {exc.strerror}", option="plot") from exc
    finally:
        plt.close(figure)


def check_drawable(path: str | os.PathLike[str]) -> None:
    """Raise OptionError where matplotlib is missing, or has no such pictures: before minutes are spent on measuring."""
    kinds, suffix = _pyplot().Figure().canvas.get_supported_filetypes(), Path(path).suffix.lower().removeprefix(".")
    if suffix and suffix not in kinds:
        raise OptionError(f"--plot {os.fspath(path)}: there are no pictures of this kind; {', '.join(kinds)} are", option="plot")


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as exc:
        raise OptionError("--plot needs matplotlib; try: pip install 'headrace[bench]'", option="plot") from exc
    mpl.use("agg")  # no screen
    import matplotlib.pyplot as plt

    return plt


# -- rates -----------------------------------------------------------------------------------------------------------------------


def _bars(report: Report) -> list[_Bar]:
    parts = [
        _Bar(f"{figure.what}, {figure.threads} at a time" if figure.threads > 1 else figure.what, figure.rate, _PART)
        for figure in report.figures
        if figure.rate
    ]
    loads = [_Bar(f"load, {run.name}", run.rate, _LOAD, run.ceiling, run.share_text) for run in report.runs if run.rate]
    rivals = [
        _Bar(f"compared: {run.name}", run.rate, _LOAD if run.name == "headrace" else _RIVAL) for run in report.rivals if run.rate
    ]
    return [*parts, *loads, *rivals]


def _draw_bars(axis: Any, bars: Sequence[_Bar]) -> None:
    rates = [bar.rate / 1e9 for bar in bars]
    axis.barh(range(len(bars)), rates, color=[bar.colour for bar in bars], height=0.7)
    longest, shortest = max([*rates, *(bar.ceiling / 1e9 for bar in bars)], default=1.0), min(rates, default=1.0)
    logarithmic = longest > _MOST_RATIO * shortest
    for row, bar in enumerate(bars):
        text, at = _rate_text(bar.rate), bar.rate / 1e9
        if bar.ceiling:
            axis.plot([bar.ceiling / 1e9] * 2, [row - 0.42, row + 0.42], color=_LINE, linewidth=2)
            text, at = f"{text}, {bar.share} of its ceiling", max(at, bar.ceiling / 1e9)
        axis.text(at * 1.08 if logarithmic else at + longest * 0.01, row, text, va="center", fontsize=8)
    axis.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=8)
    axis.set_ylim(len(bars) - 0.4, -0.6)
    if logarithmic:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlim(shortest / 3, longest * (longest / shortest) ** 0.3)
    else:
        axis.set_xlim(0, longest * 1.28)
    unit = "GB/s on a logarithmic scale" if logarithmic else "GB/s"
    axis.set_xlabel(f"{unit}; grey: the parts, each measured alone; blue: loads; |: what the parts allow", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _rate_text(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"


# -- the timeline ----------------------------------------------------------------------------------------------------------------


def _tracks(events: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """{thread: its events}, the caller first."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for _, name in sorted(names.items())[:_MOST_TRACKS]}
    for event in events:
        if event["ph"] == "X" and names[event["tid"]] in found:
            found[names[event["tid"]]].append(event)
    return found


def _draw_timeline(axis: Any, tracks: Mapping[str, Sequence[Mapping[str, Any]]], run: Run | None) -> None:
    used = set()
    for row, events in enumerate(tracks.values()):
        for stage, (colour, _) in _STAGES.items():
            stretches = [(event["ts"] / 1e6, event["dur"] / 1e6) for event in events if event["name"] == stage]
            if stretches:
                used.add(stage)
                axis.broken_barh(stretches, (row - 0.38, 0.76), facecolors=colour, linewidth=0)
    axis.set_yticks(range(len(tracks)), list(tracks), fontsize=8)
    axis.set_ylim(len(tracks) - 0.4, -0.6)
    axis.set_xlim(left=0)
    axis.set_xlabel("seconds since the load was asked for; white: opening, idle, or waiting for a turn", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    if run is not None:
        ending = ", stopped when its time was up" if run.cut_short else ""
        axis.set_title(f"the load ({run.name}), {format_nbytes(run.nbytes)}{ending}", fontsize=9, loc="left", pad=22)
    patches = [axis.barh(0, 0, color=colour, label=label) for stage, (colour, label) in _STAGES.items() if stage in used]
    if patches:
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(patches), fontsize=8, frameon=False, borderaxespad=0)


def _shortened(url: str, most: int = 110) -> str:
    first, _, others = url.partition(", ")
    text = f"{first}, and others" if others else first
    return text if len(text) <= most else f"…{text[-most + 1 :]}"
