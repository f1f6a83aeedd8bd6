"""`headrace bench`: what the machine and the source can do, what a load makes of it, and what would help.

stdout gets two tables and a paragraph; --json, --plot and --trace write files. What is measured at the moment is said on stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from headrace import OptionError
from headrace.cli._arguments import Trace, with_request
from headrace.cli._exits import say
from headrace.cli._screen import Column, Screen, nbytes_text, rate_text, seconds_text

if TYPE_CHECKING:
    from headrace._bench import Figure, Report, Run

Limit: TypeAlias = Annotated[
    str, typer.Option("--limit", metavar="SIZE", help="Read at most so much in each step, and a quarter of the free memory.")
]
Seconds: TypeAlias = Annotated[
    float, typer.Option("--seconds", metavar="N", help="Measure each part for at most so long, loads for four times that.")
]
Cold: TypeAlias = Annotated[bool, typer.Option("--cold", help="Drop the model's own files from the page cache before each load.")]
Against: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="NAME,...",
        help="Compare with other loaders that are installed here: safetensors, runai, fastsafetensors.",
    ),
]
JsonFile: TypeAlias = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write all figures as JSON.")]
Plot: TypeAlias = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="Draw rates and a timeline of the load; needs headrace[bench].")
]


@with_request
def bench(
    arguments: dict[str, Any],
    limit: Limit = "2GiB",
    seconds: Seconds = 5.0,
    cold: Cold = False,
    against: Against = None,
    json_file: JsonFile = None,
    plot: Plot = None,
    trace: Trace = None,
) -> None:
    """Measure what a load could do here, and what holds it up.

    Storage or network, memory, casts and copies to a GPU are measured one by one, then the load. Nothing is written but the
    files asked for.
    """
    from headrace._bench import Settings, as_trace, measure
    from headrace._bench._chart import check_drawable, draw
    from headrace._bench._rivals import parse_names

    if plot is not None:
        check_drawable(plot)
    if not seconds > 0:
        raise OptionError(f"--seconds is a number above 0, not {seconds:g}", option="seconds")
    for file in (json_file, plot, trace):
        _check_writable(file)
    settings = Settings(limit_nbytes=_nbytes(limit), seconds=seconds, cold=cold, against=parse_names(against or ""))
    with _telling() as tell:
        report = measure(arguments, settings, say=tell)
    _print_report(report, Screen())
    if json_file is not None:
        Path(json_file).write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    if trace is not None:
        Path(trace).write_text(json.dumps(as_trace(report)))
    if plot is not None:
        draw(report, plot)
    for file, what in ((json_file, "figures"), (plot, "picture"), (trace, "trace for https://ui.perfetto.dev")):
        if file is not None:
            say("", f"{what}: {file}")


def _nbytes(text: str) -> int:
    from headrace._options import parse_nbytes

    try:
        return parse_nbytes(text)
    except ValueError:
        raise OptionError(f"--limit {text!r} is no size; write it as 512MiB or 4GiB", option="limit") from None


def _check_writable(file: str | None) -> None:
    """Before minutes are spent on measuring."""
    try:
        if file is not None:
            Path(file).touch()
    except OSError as exc:
        raise OptionError(f"{file} cannot be written to: {exc.strerror}", option="json") from exc


@contextmanager
def _telling() -> Iterator[Callable[[str], None]]:
    """What is measured at the moment: one line that changes on a terminal, a line each elsewhere."""
    if not sys.stderr.isatty():
        yield lambda what: say("", f"measuring {what}")
        return
    from rich.console import Console

    with Console(stderr=True).status("opening") as status:
        yield lambda what: status.update(f"measuring {what}")


# -- afterwards ------------------------------------------------------------------------------------------------------------------


def _print_report(report: Report, screen: Screen) -> None:
    part = "" if report.used_nbytes == report.total_nbytes else f", at most {nbytes_text(report.used_nbytes)} of it in each step"
    screen.pairs([("source", f"{report.url}, {nbytes_text(report.total_nbytes)} to read{part}"), ("machine", report.machine)])
    screen.line()
    screen.table(
        (Column("each part alone"), Column("at a time", True), Column("rate", True), Column("", folds=True)),
        (_figure_row(figure) for figure in report.figures),
    )
    screen.line()
    loads = [(f"headrace, {run.name}", run) for run in report.runs]
    loads += [(f"{run.name}, compared", run) for run in report.rivals]
    screen.table(
        (
            Column("loads"),
            Column("read", True),
            Column("time", True),
            Column("rate", True),
            Column("of what the parts allow", True),
        ),
        (_run_row(name, run) for name, run in loads),
    )
    for name, run in loads:
        if run.skipped:
            screen.note(f"{name}: {run.skipped}")
    screen.line()
    screen.note(report.verdict)


def _figure_row(figure: Figure) -> tuple[str, str, str, str]:
    if figure.skipped:
        return figure.what, "", "", figure.skipped
    return figure.what, str(figure.threads), rate_text(figure.rate), figure.note


def _run_row(name: str, run: Run) -> tuple[str, str, str, str, str]:
    if run.skipped:
        return name, "", "", "skipped", ""
    share = f"{run.share_text} of {rate_text(run.ceiling)}" if run.ceiling else ""
    return name, nbytes_text(run.nbytes), seconds_text(run.seconds), rate_text(run.rate), share
