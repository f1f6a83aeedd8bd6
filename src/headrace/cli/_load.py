"""`headrace load`: stream every tensor, drop it, and say how that went. A first test of a checkpoint, a disk, or a setting.

On a terminal a bar moves while it runs; elsewhere there is one line at the start and one at the end, both on stderr. stdout gets
the summary, or with --json the fields of `headrace.Snapshot`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Annotated, Any, TypeAlias

import typer

import headrace
from headrace import Snapshot
from headrace.cli._arguments import (
    Concurrency,
    Device,
    DirectIO,
    DTypes,
    Json,
    MemoryLimit,
    Names,
    Paths,
    Slices,
    as_url,
    request,
)
from headrace.cli._exits import say
from headrace.cli._screen import Screen, counted, file_name, nbytes_text, rate_text, seconds_text

Report: TypeAlias = Callable[[Snapshot], None]
Order: TypeAlias = Annotated[
    str, typer.Option("--order", metavar="ready|file", help="Take tensors as they come in, or in the order of the files.")
]
Ownership: TypeAlias = Annotated[
    str, typer.Option("--ownership", metavar="leased|copied|borrowed", help="Whose memory tensors are in; see headrace.stream.")
]

_REDRAWN_PER_S = 10


def load(
    paths: Paths,
    names: Names = None,
    dtypes: DTypes = None,
    slices: Slices = None,
    concurrency: Concurrency = None,
    memory_limit: MemoryLimit = None,
    direct_io: DirectIO = None,
    device: Device = "cpu",
    order: Order = "ready",
    ownership: Ownership = "leased",
    as_json: Json = False,
) -> None:
    """Load every tensor, drop it, and report speed and waits.

    Loads as `headrace.stream` does for a program, into host memory or to a device. Needs torch.
    """
    arguments = request(names, dtypes, slices, concurrency, memory_limit, direct_io, device)
    with _reporting(quiet=as_json) as report:
        stats = _drop_all(as_url(paths), {**arguments, "order": order, "ownership": ownership}, report)
    if as_json:
        sys.stdout.write(json.dumps(stats.as_dict()) + "\n")
    else:
        Screen().pairs(_summary(stats))


def _drop_all(url: str | list[str], arguments: dict[str, Any], report: Report) -> Snapshot:
    with headrace.stream(url, progress=report, **arguments) as stream:
        report(stream.stats)
        for _ in stream:
            pass
    report(stream.stats)
    return stream.stats


# -- while it runs ---------------------------------------------------------------------------------------------------------------


def _reporting(*, quiet: bool) -> AbstractContextManager[Report]:
    """What is told on stderr while a load runs: nothing, a bar on a terminal, two lines elsewhere."""
    if quiet:
        return nullcontext(lambda _: None)
    return _bar() if sys.stderr.isatty() else _lines()


@contextmanager
def _lines() -> Iterator[Report]:
    """A line when it starts and one when it is done."""
    last: Snapshot | None = None

    def report(snapshot: Snapshot) -> None:
        nonlocal last
        if last is None:
            say("", f"loading {counted(snapshot.total_tensors, 'tensor')}, {nbytes_text(snapshot.total_nbytes)} to read")
        last = snapshot

    yield report
    if last is not None:
        say("", f"loaded {counted(last.tensors, 'tensor')} in {seconds_text(last.seconds)}")


@contextmanager
def _bar() -> Iterator[Report]:
    """A bar in bytes. It stays when it is done, or where an error left it; before the first report there is none."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("loading"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
    )
    bar = Progress(*columns, console=console, expand=True, refresh_per_second=_REDRAWN_PER_S)
    due = 0.0

    def report(snapshot: Snapshot) -> None:
        nonlocal due
        now = time.monotonic()
        if now < due and snapshot.tensors < snapshot.total_tensors:
            return
        due = now + 1 / _REDRAWN_PER_S
        rate = rate_text(snapshot.rate) if snapshot.read_nbytes else ""
        if bar.task_ids:
            bar.update(bar.task_ids[0], completed=snapshot.read_nbytes, rate=rate)
        else:
            opening.stop()
            bar.add_task("", total=snapshot.total_nbytes, completed=snapshot.read_nbytes, rate=rate)
            bar.start()

    with console.status("opening") as opening:  # importing torch takes seconds
        try:
            yield report
        finally:
            bar.stop()


# -- afterwards ------------------------------------------------------------------------------------------------------------------


def _summary(stats: Snapshot) -> Iterator[tuple[str, str]]:
    yield "tensors", f"{stats.tensors:,}, {nbytes_text(stats.tensor_nbytes)} of memory, each dropped as soon as it came"
    yield "read", _read_text(stats)
    if stats.requests:
        yield "network", _network_text(stats)
    yield "time", f"{seconds_text(stats.seconds)}, {rate_text(stats.rate)}, {counted(stats.concurrency, 'read')} at a time"
    if stats.node_share:
        yield "", f"that is {stats.node_share}"
    yield (
        "waited",
        f"{seconds_text(stats.source_wait_s)} for bytes from the source, {seconds_text(stats.caller_s)} for this command",
    )
    if stats.memory_wait_s:
        yield "", f"{seconds_text(stats.memory_wait_s)} for memory, summed over the readers"
    kept = f"; {nbytes_text(stats.kept_nbytes)} kept by tensors" if stats.kept_nbytes else ""
    yield "memory", f"at most {nbytes_text(stats.peak_nbytes)} at once, of a limit of {nbytes_text(stats.memory_limit)}{kept}"
    if stats.device != "cpu":
        yield from _device_rows(stats)
    if stats.cast_nbytes or stats.copied_nbytes:
        yield (
            "copied",
            f"{nbytes_text(stats.copied_nbytes)} once more in memory, {nbytes_text(stats.cast_nbytes)} of them to another dtype",
        )
    for (route, reason), routes in groupby(sorted(stats.routes, key=lambda each: each[1:]), key=lambda each: each[1:]):
        yield "route", f"{route}: {reason} ({_some([file_name(url) for url, _, _ in routes])})"
    if stats.left_alone:
        why = _some([f"{name}: {reason}" for name, reason in stats.left_alone], "; ")
        yield "kept", f"{counted(len(stats.left_alone), 'tensor')} left in their dtype ({why})"
    for fallback in stats.degraded:
        yield "degraded", fallback


def _device_rows(stats: Snapshot) -> Iterator[tuple[str, str]]:
    copies = f"{nbytes_text(stats.sent_nbytes)} in {counted(stats.device_copies, 'transfer')}"
    yield stats.device, f"{copies}; at most {nbytes_text(stats.device_peak_nbytes)} of its memory ahead of the caller"
    how = stats.pinned_how or "page-locking had not begun"
    yield "staging", f"{nbytes_text(stats.staging_nbytes)} of host memory, {how}"


def _read_text(stats: Snapshot) -> str:
    direct = f"{nbytes_text(stats.direct_nbytes)} of them" if stats.direct_nbytes else "none"
    surplus = (
        f"; {nbytes_text(stats.surplus_nbytes)} that no tensor needs, cheaper read than skipped" if stats.surplus_nbytes else ""
    )
    return f"{nbytes_text(stats.read_nbytes)}, {direct} past the page cache{surplus}"


def _network_text(stats: Snapshot) -> str:
    again = f"{stats.retried:,} made again" if stats.retried else "none made again"
    throttled = f", {stats.throttled:,} of them put off by the store" if stats.throttled else ""
    hedged = f"; {nbytes_text(stats.hedged_nbytes)} asked for twice, being slow" if stats.hedged else ""
    return f"{counted(stats.requests, 'request')}, {again}{throttled}; {nbytes_text(stats.received_nbytes)} received{hedged}"


def _some(texts: Sequence[str], separator: str = ", ") -> str:
    return separator.join(texts[:3]) + (f"{separator}and {len(texts) - 3:,} more" if len(texts) > 3 else "")
