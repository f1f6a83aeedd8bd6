"""`headrace pull`: fill a local folder from any source, and say what that took.

On a terminal a bar moves while it runs; elsewhere there is one line at the start and one at the end, both on stderr. stdout gets
the summary, or with --json the fields of `headrace.PullReport`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

import headrace
from headrace.cli._arguments import Concurrency, Json
from headrace.cli._exits import say
from headrace.cli._screen import Screen, counted, nbytes_text, rate_text, seconds_text

if TYPE_CHECKING:
    from headrace._pull import PullProgress, PullReport

Report: TypeAlias = "Callable[[PullProgress], None]"
Include: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Only files whose relative path fits; * also matches /. May be repeated."),
]
Exclude: TypeAlias = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="GLOB", help="No files whose relative path fits; may be repeated.")
]

_REDRAWN_PER_S = 10


def pull(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A folder or file: a path or URL.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="The folder to fill; made where it does not exist.")],
    include: Include = None,
    exclude: Exclude = None,
    concurrency: Concurrency = None,
    move: Annotated[
        bool, typer.Option("--move", help="Remove the files from SRC, a local folder, once every byte was compared.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint to a local folder, /dev/shm for example.

    A pull that was stopped goes on where it was; what is there already is not copied again. Two pulls to one folder do the
    work once.
    """
    with _reporting(quiet=as_json) as report:
        done: PullReport = headrace.pull(
            src,
            dst,
            include=include or None,
            exclude=exclude or None,
            move=move,
            progress=report,
            concurrency=concurrency,
        )
    if as_json:
        sys.stdout.write(json.dumps(done.as_dict()) + "\n")
    else:
        Screen().pairs(_summary(done))


def _reporting(*, quiet: bool) -> AbstractContextManager[Report]:
    """What is told on stderr while a pull runs: nothing, a bar on a terminal, two lines elsewhere."""
    if quiet:
        return nullcontext(lambda _: None)
    return _bar() if sys.stderr.isatty() else _lines()


@contextmanager
def _lines() -> Iterator[Report]:
    """A line when it starts and one when it is done."""
    last: PullProgress | None = None

    def report(snapshot: PullProgress) -> None:
        nonlocal last
        if not snapshot.total_files:  # the files are still being opened
            return
        if last is None:
            missing = snapshot.total_nbytes - snapshot.nbytes
            say("", f"pulling {counted(snapshot.total_files, 'file')}, {nbytes_text(missing)} to copy")
        last = snapshot

    yield report
    if last is not None:
        say("", f"pulled {counted(last.files, 'file')} in {seconds_text(last.seconds)}")


@contextmanager
def _bar() -> Iterator[Report]:
    """A bar in bytes. It stays when it is done, or where an error left it; before the files are open there is none."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.fields[doing]}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
    )
    bar = Progress(*columns, console=console, expand=True, refresh_per_second=_REDRAWN_PER_S)
    due = 0.0

    def report(snapshot: PullProgress) -> None:
        nonlocal due
        now = time.monotonic()
        if not snapshot.total_files or (now < due and snapshot.files < snapshot.total_files):
            return
        due = now + 1 / _REDRAWN_PER_S
        shown = _shown(snapshot)
        if bar.task_ids:
            bar.update(bar.task_ids[0], **shown)
        else:
            opening.stop()
            bar.add_task("", total=snapshot.total_nbytes, **shown)
            bar.start()

    with console.status("opening") as opening:  # it may also wait for another pull
        try:
            yield report
        finally:
            bar.stop()


def _shown(snapshot: PullProgress) -> dict[str, Any]:
    if snapshot.compared_nbytes:
        return {"doing": "comparing", "completed": snapshot.compared_nbytes, "rate": ""}
    rate = rate_text(snapshot.rate) if snapshot.copied_nbytes else ""
    return {"doing": "pulling", "completed": snapshot.nbytes, "rate": rate}


def _summary(done: PullReport) -> Iterator[tuple[str, str]]:
    yield "files", f"{done.files:,} in {done.destination}, {nbytes_text(done.nbytes)}"
    copied = f"{nbytes_text(done.copied_nbytes)} in {seconds_text(done.seconds)}"
    yield "copied", copied + (f", {rate_text(done.rate)}" if done.copied_nbytes else "")
    if done.resumed_nbytes:
        yield "resumed", f"{nbytes_text(done.resumed_nbytes)} that an earlier pull had copied"
    if done.skipped_files:
        yield "skipped", f"{counted(done.skipped_files, 'file')} that were there already"
    if done.moved:
        yield "moved", f"every byte was compared, and the files were removed from {done.url}"
