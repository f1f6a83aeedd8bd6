"""What is printed on stdout: lines and tables, laid out for a terminal's width or, in a pipe, with one row a line.

Names come from files and may hold anything. `printable` is the only way to the screen: nothing in a name moves the cursor,
changes colours or starts a line. Tables are laid out here and not by rich, which is too slow for 60,000 rows.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
_LEAST_FOLDED = 24  # a folding column is never narrower; the terminal wraps what is wider than itself
_GAP = "  "


def printable(text: str) -> str:
    r"""`text` with every character that does not show as itself (line ends, controls, text direction) as \n, \x1b or \u202e."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text)


def nbytes_text(nbytes: int) -> str:
    """'512 B', '86.7 MiB': three significant digits, powers of 1024."""
    from rich.filesize import pick_unit_and_suffix

    unit, suffix = pick_unit_and_suffix(nbytes, _UNITS, 1024)
    if nbytes / unit >= 999.5:
        unit, suffix = unit * 1024, _UNITS[_UNITS.index(suffix) + 1]
    return f"{nbytes / unit:.3g} {suffix}"


def rate_text(rate: float) -> str:
    """'1.93 GB/s': powers of 1000, as disks and links are sold."""
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.2f} MB/s"


def seconds_text(seconds: float) -> str:
    """'0.046 s', '83.2 s'."""
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:,.1f} s"


def file_name(url: str) -> str:
    """The last part of a path or URL."""
    return url.rstrip("/").rpartition("/")[2] or url


class Column(NamedTuple):
    """A column of a table. `folds`: the one that gives way where a terminal is too narrow."""

    title: str
    right: bool = False
    folds: bool = False


class Screen:
    """stdout. On a terminal colours and its width are used; in a pipe neither, and nothing is left out."""

    @cached_property
    def console(self) -> Console:
        from rich.console import Console

        return Console(markup=False, highlight=False, emoji=False, soft_wrap=True)

    @cached_property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None where there is no limit."""
        return self.console.width if self.is_terminal else None

    def line(self, text: str = "", *, style: str = "") -> None:
        """Print one line; `style` is rich's, and only for terminals."""
        text = printable(text)
        if style and self.is_terminal:
            self.console.print(text, style=style)
        else:
            sys.stdout.write(f"{text}\n")

    def note(self, text: str) -> None:
        """Print a remark, wrapped."""
        for line in textwrap.wrap(printable(text), self.width) if self.width else [text]:
            self.line(line, style="dim")

    def pairs(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Print labels and what they are about, wrapped under itself on a terminal."""
        found = [(label, printable(text)) for label, text in pairs]
        indent = max((len(label) for label, _ in found), default=0) + len(_GAP)
        for label, text in found:
            lines = textwrap.wrap(text, max(_LEAST_FOLDED, self.width - indent)) if self.width else [text]
            for i, line in enumerate(lines or [""]):
                self._labelled("" if i else label, line, indent)

    def _labelled(self, label: str, text: str, indent: int) -> None:
        if self.is_terminal:
            self.console.print(f"{label:<{indent}}", style="bold", end="")
            self.line(text)
        else:
            self.line(f"{label:<{indent}}{text}".rstrip())

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        """Print rows under titles."""
        cells = [[printable(cell) for cell in row] for row in rows]
        widths = [
            max([len(column.title), *map(_cell_len, texts)])
            for column, texts in zip(columns, zip(*cells, strict=True) if cells else [()] * len(columns), strict=True)
        ]
        self._fit(columns, widths)
        self.line(_row([column.title for column in columns], columns, widths), style="bold")
        for row in cells:
            lines = [row] if self.width is None else zip_longest(*map(_fold, row, widths), fillvalue="")
            for line in lines:
                sys.stdout.write(_row(line, columns, widths) + "\n")

    def _fit(self, columns: Sequence[Column], widths: list[int]) -> None:
        if self.width is None:
            return
        over = sum(widths) + len(_GAP) * (len(widths) - 1) - self.width
        for i, column in enumerate(columns):
            if column.folds and over > 0:
                widths[i] = max(_LEAST_FOLDED, widths[i] - over) if widths[i] > _LEAST_FOLDED else widths[i]


def _row(cells: Iterable[str], columns: Sequence[Column], widths: Sequence[int]) -> str:
    padded = []
    for cell, column, width in zip(cells, columns, widths, strict=True):
        space = " " * (width - _cell_len(cell))
        padded.append(space + cell if column.right else cell + space)
    return _GAP.join(padded).rstrip()


def _fold(text: str, width: int) -> Sequence[str]:
    if _cell_len(text) <= width:
        return (text,)
    from rich.cells import chop_cells

    head = chop_cells(text, width)[0]
    at = max(map(head.rfind, "./_-")) + 1
    if at <= width // 2:
        at = len(head)
    return (text[:at], *_fold("  " + text[at:], width))


def _cell_len(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
