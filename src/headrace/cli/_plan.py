"""`headrace plan`: what a load would do, and why, without doing it.

The JSON is one object; names are stable, new ones may be added:

    device                                                        where the tensors go
    wanted_nbytes, read_nbytes, surplus_nbytes, memory_nbytes     as in `headrace.Plan`
    concurrency, memory_limit                                     as resolved
    routes       [{"url", "route", "reason"}]                     one per shard
    left_alone   [{"name", "reason"}]                             tensors that a blanket --dtype does not touch
    tensors      [{"name", "source", "dtype", "shape", "nbytes"}] in file order; source: the dtype in the file
    reads        [{"shard", "offset", "nbytes", "pieces", "stride", "tensor", "tensors"}] in the order they are made
                 shard: an index into routes; tensor, tensors: the first one in the memory it fills, and how many share that
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import typer

import headrace
from headrace import Plan
from headrace._plan import counted
from headrace.cli._arguments import Json, with_request
from headrace.cli._screen import Column, Screen, file_name, nbytes_text


@with_request
def plan(
    arguments: dict[str, Any],
    reads: Annotated[int, typer.Option("--reads", metavar="N", show_default=False, help="Also list the first N reads.")] = 0,
    as_json: Json = False,
) -> None:
    """Show what a load would read, where it would land, and why.

    Takes the options of `headrace load` and reads the headers only.
    """
    made = headrace.plan(**arguments)
    if as_json:
        _print_json(made)
        return
    screen = Screen()
    _print_plan(made, screen)
    if reads > 0:
        _print_reads(made, screen, reads)


def _print_plan(made: Plan, screen: Screen) -> None:
    headline, *rest = str(made).splitlines()
    screen.line(headline, style="bold")
    screen.pairs((label, text.strip()) for label, _, text in (line.partition(" ") for line in rest))


def _print_reads(made: Plan, screen: Screen, most: int) -> None:
    columns = (
        Column("#", True),
        Column("file", folds=True),
        Column("offset", True),
        Column("size", True),
        Column("fills", folds=True),
    )
    screen.line()
    screen.table(columns, ((str(i), *row) for i, row in enumerate(islice(_read_rows(made), most), 1)))
    if len(made.reads) > most:
        screen.note(f"... and {counted(len(made.reads) - most, 'more read')}")


def _read_rows(made: Plan) -> Iterator[tuple[str, str, str, str]]:
    for read in made.reads:
        span = made.spans[read.span]
        fills = made.tensors.names[span.first]
        if span.last - span.first > 1:
            fills += f" and {span.last - span.first - 1:,} more"
        size = nbytes_text(read.nbytes) + (f" in {read.pieces:,} pieces" if read.pieces > 1 else "")
        yield file_name(made.routes[read.shard].url), f"{read.offset:,}", size, fills


def _print_json(made: Plan) -> None:
    """Written an entry at a time: a large checkpoint has a hundred thousand reads."""
    head = {
        "device": made.device,
        "wanted_nbytes": made.wanted_nbytes,
        "read_nbytes": made.read_nbytes,
        "surplus_nbytes": made.surplus_nbytes,
        "memory_nbytes": made.memory_nbytes,
        "concurrency": made.limits.concurrency,
        "memory_limit": made.limits.memory_limit,
        "routes": [route._asdict() for route in made.routes],
        "left_alone": [{"name": name, "reason": reason} for name, reason in made.left_alone],
    }
    sys.stdout.write("{")
    for key, value in head.items():
        sys.stdout.write(f"{json.dumps(key)}: {json.dumps(value)},\n ")
    _print_list("tensors", _tensor_entries(made), ",\n ")
    _print_list("reads", _read_entries(made), "}\n")


def _print_list(key: str, entries: Iterator[dict[str, Any]], end: str) -> None:
    sys.stdout.write(f"{json.dumps(key)}: [")
    for i, entry in enumerate(entries):
        sys.stdout.write((",\n  " if i else "\n  ") + json.dumps(entry))
    sys.stdout.write(f"\n ]{end}")


def _tensor_entries(made: Plan) -> Iterator[dict[str, Any]]:
    tensors = made.tensors
    columns = (tensors.names, tensors.sources, tensors.dtypes, map(list, tensors.shapes), tensors.nbytes)
    for row in zip(*columns, strict=True):
        yield dict(zip(("name", "source", "dtype", "shape", "nbytes"), row, strict=True))


def _read_entries(made: Plan) -> Iterator[dict[str, Any]]:
    for read in made.reads:
        span = made.spans[read.span]
        yield {
            "shard": read.shard,
            "offset": read.offset,
            "nbytes": read.nbytes,
            "pieces": read.pieces,
            "stride": read.stride,
            "tensor": made.tensors.names[span.first],
            "tensors": span.last - span.first,
        }
