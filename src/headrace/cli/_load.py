"""`headrace load`: stream every tensor, drop it, and say how that went. A first test of a checkpoint, a disk, or a setting.

On a terminal a bar moves while it runs; elsewhere there is one line at the start and one at the end, both on stderr. stdout gets
the summary, or with --json the fields of `headrace.Snapshot`, which docs/stats.md describes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, TypeAlias

import typer

import headrace
from headrace import Snapshot
from headrace._plan import counted
from headrace.cli._arguments import Json, Trace, with_request
from headrace.cli._screen import Screen, file_name, nbytes_text, rate_text, seconds_text
from headrace.cli._waiting import State, waiting

Order: TypeAlias = Annotated[
    str, typer.Option("--order", metavar="ready|file", help="Take tensors as they come in, or in the order of the files.")
]
Ownership: TypeAlias = Annotated[
    str, typer.Option("--ownership", metavar="leased|copied|borrowed", help="Whose memory tensors are in; see headrace.stream.")
]


@with_request
def load(
    arguments: dict[str, Any],
    order: Order = "ready",
    ownership: Ownership = "leased",
    trace: Trace = None,
    as_json: Json = False,
) -> None:
    """Load every tensor, drop it, and report speed and waits.

    Loads as `headrace.stream` does for a program, into host memory or to a device. Needs torch.
    """
    with waiting(state_of_load, starts=_first_line, ends=_last_line, quiet=as_json) as report:
        stats = _drop_all({**arguments, "order": order, "ownership": ownership, "trace": trace}, report)
    if as_json:
        sys.stdout.write(json.dumps(stats.as_dict()) + "\n")
    else:
        traced = [("trace", f"{trace}, for https://ui.perfetto.dev")] if trace is not None else []
        Screen().pairs([*_summary(stats), *traced])


def _drop_all(arguments: dict[str, Any], report: Callable[[Snapshot], None]) -> Snapshot:
    with headrace.stream(**arguments, progress=report) as stream:
        report(stream.stats)
        for _ in stream:
            pass
    report(stream.stats)
    return stream.stats


# -- while it runs ---------------------------------------------------------------------------------------------------------------


def state_of_load(snapshot: Snapshot) -> State:
    """What a bar shows of a load."""
    begun = snapshot.read_nbytes > 0
    return State(
        "loading",
        snapshot.read_nbytes,
        snapshot.total_nbytes,
        rate=snapshot.rate if begun else 0.0,
        note=f"slowest: {snapshot.slowest}" if begun else "",
        is_last=snapshot.tensors == snapshot.total_tensors,
    )


def _first_line(snapshot: Snapshot) -> str:
    return f"loading {counted(snapshot.total_tensors, 'tensor')}, {nbytes_text(snapshot.total_nbytes)} to read"


def _last_line(snapshot: Snapshot) -> str:
    return f"loaded {counted(snapshot.tensors, 'tensor')} in {seconds_text(snapshot.seconds)}"


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
