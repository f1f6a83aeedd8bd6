"""`headrace inspect`: what is in a checkpoint, from its headers alone.

The JSON is one object; names are stable, new ones may be added:

    names        the globs that were given, or null
    total        {"tensors", "nbytes", "shards"}
    dtypes       {dtype: {"tensors", "nbytes"}}
    metadata     {key: value} of all shards together
    shards       [{"url", "tensors", "nbytes", "file_nbytes"}]   nbytes: of the tensors; file_nbytes: of the whole file
    tensors      [{"name", "dtype", "shape", "nbytes", "shard", "offset"}]   one a line; fields of `headrace.TensorInfo`

With --names everything counts the chosen tensors only, file_nbytes and metadata excepted.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated

import typer

import headrace
from headrace import Checkpoint, TensorInfo
from headrace._plan import counted
from headrace.cli._arguments import Json, Names, Paths, as_url
from headrace.cli._screen import Column, Screen, file_name, nbytes_text

_MANY_TENSORS = 40  # more than that are grouped on a terminal
_MANY_GROUPS = 60
_MANY_SHARDS = 12
_NUMBER = re.compile(r"(?<![^._/-])\d+(?![^._/-])")


def inspect(
    paths: Paths,
    names: Names = None,
    everything: Annotated[bool, typer.Option("--all", help="On a terminal, list every tensor and shard as well.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint: tensors, dtypes, shapes and sizes.

    Reads the headers and no tensor. On a terminal many tensors are grouped, those that differ only in numbers together; in a pipe
    and with --all every tensor has its line.
    """
    with headrace.open(as_url(paths)) as checkpoint:
        content = _Content(checkpoint, names or [])
        if as_json:
            _print_json(content)
        else:
            _print_content(content, Screen(), everything=everything)


@dataclass(slots=True)
class _Sum:
    """How many tensors, of how many bytes."""

    tensors: int = 0
    nbytes: int = 0

    def add(self, info: TensorInfo) -> None:
        self.tensors += 1
        self.nbytes += info.nbytes


@dataclass(slots=True)
class _Content:
    """The chosen tensors of a checkpoint, and their sums."""

    checkpoint: Checkpoint
    globs: list[str]
    infos: list[TensorInfo] = field(init=False)
    total: _Sum = field(default_factory=_Sum)
    dtypes: dict[str, _Sum] = field(default_factory=dict)
    shards: dict[str, _Sum] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shards.update((url, _Sum()) for url in self.checkpoint.shards)
        self.infos = _choose(self.checkpoint, self.globs)
        for info in self.infos:
            for each in (self.total, self.dtypes.setdefault(info.dtype, _Sum()), self.shards[info.shard]):
                each.add(info)
        if self.globs:
            self.shards = {url: found for url, found in self.shards.items() if found.tensors}

    @property
    def file_nbytes(self) -> dict[str, int]:
        return {header.url: header.nbytes for header in self.checkpoint.headers}


def _choose(checkpoint: Checkpoint, globs: Sequence[str]) -> list[TensorInfo]:
    """The tensors that fit, in file order. A name or glob that fits none is an error, as for a load."""
    if not globs:
        return list(checkpoint.values())
    chosen: set[str] = set()
    for glob in globs:
        fitting = {glob} if glob in checkpoint else {name for name in checkpoint if fnmatchcase(name, glob)}
        chosen |= fitting or {checkpoint[glob].name}  # raises, with the names that are spelled alike
    return [info for name, info in checkpoint.items() if name in chosen]


# -- for programs ----------------------------------------------------------------------------------------------------------------


def _print_json(content: _Content) -> None:
    """Written a tensor at a time, so that a reader need not wait for, nor this process hold, the whole."""
    sizes = content.file_nbytes
    head = {
        "names": content.globs or None,
        "total": {**asdict(content.total), "shards": len(content.shards)},
        "dtypes": {dtype: asdict(found) for dtype, found in sorted(content.dtypes.items())},
        "metadata": content.checkpoint.metadata,
        "shards": [{"url": url, **asdict(found), "file_nbytes": sizes[url]} for url, found in content.shards.items()],
    }
    for key, value in head.items():
        sys.stdout.write(f"{'{' if key == 'names' else ' '}{json.dumps(key)}: {json.dumps(value)},\n")
    sys.stdout.write(' "tensors": [')
    for i, info in enumerate(content.infos):
        sys.stdout.write((",\n  " if i else "\n  ") + json.dumps(asdict(info)))
    sys.stdout.write("\n ]}\n")


# -- for people ------------------------------------------------------------------------------------------------------------------


def _print_content(content: _Content, screen: Screen, *, everything: bool) -> None:
    _print_totals(content, screen)
    brief = screen.is_terminal and not everything
    screen.line()
    _print_shards(content, screen, most=_MANY_SHARDS if brief else len(content.shards))
    if not content.infos:
        return
    screen.line()
    if brief and len(content.infos) > _MANY_TENSORS:
        _print_groups(content, screen)
    else:
        _print_tensors(content, screen)


def _print_totals(content: _Content, screen: Screen) -> None:
    checkpoint = content.checkpoint
    screen.line(checkpoint.url, style="bold")
    chosen = f"{counted(content.total.tensors, 'tensor')}, {nbytes_text(content.total.nbytes)}"
    if content.globs:
        chosen += f", of {counted(len(checkpoint), 'tensor')}, {nbytes_text(checkpoint.nbytes)}"
    by_size = sorted(content.dtypes.items(), key=lambda pair: -pair[1].nbytes)
    pairs = [("total", f"{chosen} in {counted(len(content.shards), 'file')}")]
    pairs += [(dtype, f"{counted(found.tensors, 'tensor')}, {nbytes_text(found.nbytes)}") for dtype, found in by_size]
    if checkpoint.metadata:
        shown = ", ".join(f"{key}={_cut(value)}" for key, value in list(checkpoint.metadata.items())[:8])
        pairs.append(("metadata", shown + (", ..." if len(checkpoint.metadata) > 8 else "")))
    screen.pairs(pairs)


def _cut(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _print_shards(content: _Content, screen: Screen, *, most: int) -> None:
    sizes = content.file_nbytes
    rows = [
        (str(number), file_name(url), f"{found.tensors:,}", nbytes_text(found.nbytes), nbytes_text(sizes[url]))
        for number, (url, found) in enumerate(content.shards.items(), 1)
    ]
    columns = (
        Column("#", True),
        Column("file", folds=True),
        Column("tensors", True),
        Column("in tensors", True),
        Column("file size", True),
    )
    screen.table(columns, rows[:most])
    if len(rows) > most:
        screen.note(f"... and {counted(len(rows) - most, 'more file')}; --all lists them")


def _print_tensors(content: _Content, screen: Screen) -> None:
    """Every tensor. Where there is one file it is not repeated; on a terminal the number of the table above has to do."""
    labels = {url: str(number) if screen.is_terminal else file_name(url) for number, url in enumerate(content.shards, 1)}
    several = len(labels) > 1
    columns = [Column("tensor", folds=True), Column("dtype"), Column("shape"), Column("size", True)]
    screen.table(
        [*columns, Column("file", screen.is_terminal)] if several else columns,
        (
            (info.name, info.dtype, str(list(info.shape)), nbytes_text(info.nbytes), *([labels[info.shard]] if several else ()))
            for info in content.infos
        ),
    )


def _print_groups(content: _Content, screen: Screen) -> None:
    groups = _group(content.infos)
    columns = (
        Column("tensors", folds=True),
        Column("count", True),
        Column("dtype"),
        Column("shape of each"),
        Column("size", True),
    )
    screen.table(
        columns,
        (
            (name, f"{found.tensors:,}", dtype, str(list(shape)), nbytes_text(found.nbytes))
            for name, dtype, shape, found in groups[:_MANY_GROUPS]
        ),
    )
    more = f"... and {counted(len(groups) - _MANY_GROUPS, 'more group')}. " if len(groups) > _MANY_GROUPS else ""
    pattern = next((name for name, _, _, found in groups if found.tensors > 1), "*")
    screen.line()
    screen.note(f"{more}Tensors that differ only in numbers are together; --all lists each, --names '{pattern}' some of them.")


def _group(infos: Iterable[TensorInfo]) -> list[tuple[str, str, tuple[int, ...], _Sum]]:
    """(name, dtype, shape, sum) of tensors that differ only in numbers; the name is a glob where there are several."""
    found: dict[tuple[str, str, tuple[int, ...]], tuple[str, _Sum]] = {}
    for info in infos:
        _, group = found.setdefault((_NUMBER.sub("*", info.name), info.dtype, info.shape), (info.name, _Sum()))
        group.add(info)
    return [
        (pattern if group.tensors > 1 else first, dtype, shape, group)
        for (pattern, dtype, shape), (first, group) in found.items()
    ]
