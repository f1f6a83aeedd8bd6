"""What a person who waits is told on stderr: a bar on a terminal, a line at the start and one at the end elsewhere.

A command says how to read its own progress: as a `State` for the bar, None while nothing is known yet, and as the two lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeVar

from headrace.cli._exits import say
from headrace.cli._screen import rate_text

_T = TypeVar("_T")
_REDRAWN_PER_S = 10


class State(NamedTuple):
    """How far something is.

    Attributes:
        doing: 'loading', 'comparing': a word or two.
        nbytes, total_nbytes: done, and in all.
        rate: bytes per second; 0 where none is worth showing.
        note: what else there is to say.
        is_last: whether it is done, so that this is drawn at once.
    """

    doing: str
    nbytes: int
    total_nbytes: int
    rate: float = 0.0
    note: str = ""
    is_last: bool = False


def waiting(
    state: Callable[[_T], State | None], *, starts: Callable[[_T], str], ends: Callable[[_T], str], quiet: bool
) -> AbstractContextManager[Callable[[_T], None]]:
    """A context with the callable to tell of the progress.

    Args:
        state: what the bar shows.
        starts, ends: the first line, and the last.
        quiet: show nothing.
    """
    if quiet:
        return nullcontext(lambda _: None)
    return _bar(state) if sys.stderr.isatty() else _lines(state, starts, ends)


@contextmanager
def _lines(
    state: Callable[[_T], State | None], starts: Callable[[_T], str], ends: Callable[[_T], str]
) -> Iterator[Callable[[_T], None]]:
    last: _T | None = None

    def report(progress: _T) -> None:
        nonlocal last
        if state(progress) is None:
            return
        if last is None:
            say("", starts(progress))
        last = progress

    yield report
    if last is not None:
        say("", ends(last))


@contextmanager
def _bar(state: Callable[[_T], State | None]) -> Iterator[Callable[[_T], None]]:
    """A bar in bytes. It stays when it is done, or where an error left it; before anything is known there is none."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.fields[doing]}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}"),
    )
    bar = Progress(*columns, console=console, expand=True, refresh_per_second=_REDRAWN_PER_S)
    due = 0.0

    def report(progress: _T) -> None:
        nonlocal due
        now, shown = time.monotonic(), state(progress)
        if shown is None or (now < due and not shown.is_last):
            return
        due = now + 1 / _REDRAWN_PER_S
        if not bar.task_ids:
            opening.stop()
            bar.add_task("", total=shown.total_nbytes, doing="", rate="", note="")
        rate = rate_text(shown.rate) if shown.rate else ""
        bar.update(bar.task_ids[0], completed=shown.nbytes, doing=shown.doing, rate=rate, note=shown.note)
        bar.start()

    with console.status("opening") as opening:  # importing torch takes seconds; a pull may wait for another one
        try:
            yield report
        finally:
            bar.stop()
