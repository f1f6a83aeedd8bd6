"""`headrace pull`: fill a local folder from any source, and say what that took.

On a terminal a bar moves while it runs; elsewhere there is one line at the start and one at the end, both on stderr. stdout gets
the summary, or with --json the fields of `headrace.PullReport`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

import headrace
from headrace._plan import counted
from headrace.cli._arguments import Concurrency, Json
from headrace.cli._screen import Screen, nbytes_text, rate_text, seconds_text
from headrace.cli._waiting import State, waiting

if TYPE_CHECKING:
    from headrace import PullProgress, PullReport

Include: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Only files whose relative path fits; * also matches /. May be repeated."),
]
Exclude: TypeAlias = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="GLOB", help="No files whose relative path fits; may be repeated.")
]


def pull(
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="A folder or file: a path or URL. An index stands for its shards, too.")
    ],
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
    with waiting(_state, starts=_first_line, ends=_last_line, quiet=as_json) as report:
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


def _state(progress: PullProgress) -> State | None:
    if not progress.total_files:  # the files are still being opened
        return None
    is_last = progress.files == progress.total_files
    if progress.compared_nbytes:
        return State("comparing", progress.compared_nbytes, progress.total_nbytes, is_last=is_last)
    rate = progress.rate if progress.copied_nbytes else 0.0
    return State("pulling", progress.nbytes, progress.total_nbytes, rate=rate, is_last=is_last)


def _first_line(progress: PullProgress) -> str:
    missing = progress.total_nbytes - progress.nbytes
    return f"pulling {counted(progress.total_files, 'file')}, {nbytes_text(missing)} to copy"


def _last_line(progress: PullProgress) -> str:
    return f"pulled {counted(progress.files, 'file')} in {seconds_text(progress.seconds)}"


def _summary(done: PullReport) -> Iterator[tuple[str, str]]:
    yield "files", f"{done.files:,} in {done.destination}, {nbytes_text(done.nbytes)}"
    if done.index is not None:
        yield "index", f"{done.index}, with the shards that it names"
    copied = f"{nbytes_text(done.copied_nbytes)} in {seconds_text(done.seconds)}"
    yield "copied", copied + (f", {rate_text(done.rate)}" if done.copied_nbytes else "")
    if done.resumed_nbytes:
        yield "resumed", f"{nbytes_text(done.resumed_nbytes)} that an earlier pull had copied"
    if done.skipped_files:
        yield "skipped", f"{counted(done.skipped_files, 'file')} that were there already"
    if done.moved:
        yield "moved", f"every byte was compared, and the files were removed from {done.url}"
