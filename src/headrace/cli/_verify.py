"""`headrace verify`: check every byte of a checkpoint, or write down what its bytes are, and say what was found.

On a terminal a bar moves while it runs; elsewhere there is one line at the start and one at the end, both on stderr. stdout gets
the files and a summary, or with --json the fields of `headrace.VerifyReport`. Where something is wrong the exit code is 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

import headrace
from headrace import IntegrityError
from headrace._plan import counted
from headrace.cli._arguments import Concurrency, Json
from headrace.cli._screen import Column, Screen, nbytes_text, rate_text, seconds_text
from headrace.cli._waiting import State, waiting

if TYPE_CHECKING:
    from headrace import FileCheck, VerifyProgress, VerifyReport

_MANY_FILES = 20  # more than that are listed on a terminal only where something is wrong with them


def verify(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A folder or file: a path or URL. An index stands for its shards, too.")
    ],
    manifest: Annotated[
        str | None,
        typer.Option(
            "--manifest",
            metavar="PATH",
            help="Check against it, a path or URL.  [default: headrace.manifest.json beside the files, or what the store says]",
        ),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write headrace.manifest.json into URL, a local folder.")] = False,
    out: Annotated[str | None, typer.Option("--out", metavar="PATH", help="Write the manifest to this local path.")] = None,
    concurrency: Concurrency = None,
    as_json: Json = False,
) -> None:
    """Check every byte against a manifest, or against what its store says.

    With --write or --out it writes a manifest of the files as they are, for later checks and for verify= while loading.
    """
    with waiting(_state, starts=_first_line, ends=_last_line, quiet=as_json) as report:
        done: VerifyReport = headrace.verify(
            url, manifest=manifest, write=write, out=out, progress=report, concurrency=concurrency
        )
    if as_json:
        sys.stdout.write(json.dumps(done.as_dict()) + "\n")
    else:
        _print_report(done, Screen())
    if not done.ok:
        raise IntegrityError(_verdict(done), url=done.url)


# -- while it runs ---------------------------------------------------------------------------------------------------------------


def _state(progress: VerifyProgress) -> State | None:
    if not progress.total_files:  # the files are still being opened
        return None
    doing = f"verifying, {progress.failed_files:,} failed" if progress.failed_files else "verifying"
    is_last = progress.nbytes >= progress.total_nbytes
    return State(doing, progress.nbytes, progress.total_nbytes, rate=progress.rate if progress.nbytes else 0.0, is_last=is_last)


def _first_line(progress: VerifyProgress) -> str:
    return f"verifying {counted(progress.total_files, 'file')}, {nbytes_text(progress.total_nbytes)} to read"


def _last_line(progress: VerifyProgress) -> str:
    done = "were right" if progress.failed_files else "read"  # what is damaged is not among these bytes
    return f"{nbytes_text(progress.nbytes)} {done} in {seconds_text(progress.seconds)}"


# -- afterwards ------------------------------------------------------------------------------------------------------------------


def _print_report(done: VerifyReport, screen: Screen) -> None:
    brief = screen.is_terminal and len(done.files) > _MANY_FILES
    listed = [file for file in done.files if file.failed or not brief]
    if listed:
        columns = (Column("file", folds=True), Column("size", True), Column("result"), Column("checked by", folds=True))
        screen.table(columns, ((file.name, nbytes_text(file.nbytes), _result(file, done), file.checked_by) for file in listed))
        screen.line()
    screen.pairs(_summary(done))
    for file in done.failed:
        if file.detail:
            screen.line(f"{file.name}: {file.detail}", style="red")


def _result(file: FileCheck, done: VerifyReport) -> str:
    if file.status == "damaged" and file.blocks:
        return f"DAMAGED, {counted(len(file.blocks), 'block')}"
    if file.status == "ok" and done.written is not None:
        return "written"
    return file.status.upper() if file.failed else file.status


def _summary(done: VerifyReport) -> Iterator[tuple[str, str]]:
    unchecked = sum(file.status in ("unchecked", "unlisted") for file in done.files)
    yield "files", f"{len(done.files):,} in {done.url}" + (f"; {unchecked:,} unchecked" if unchecked else "")
    if done.manifest is not None:
        yield "manifest", done.manifest
    yield "read", f"{nbytes_text(done.verified_nbytes)} in {seconds_text(done.seconds)}, {rate_text(done.rate)}"
    if done.written is not None:
        yield "written", done.written
    elif done.ok:
        yield "result", "every byte that was checked is as it should be"


def _verdict(done: VerifyReport) -> str:
    names = [file.name for file in done.failed]
    named = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
    return f"{counted(len(names), 'file')} of {len(done.files):,} failed: {named}"
