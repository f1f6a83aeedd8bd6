"""What `progress=True` shows: tqdm's bar, which notebooks draw as well; without tqdm lines on stderr.

Both take a `Snapshot` whenever there is one and are closed once, when the load is over. Nothing is shown before the first.
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from typing import Any, Protocol

from headrace._plan import format_nbytes
from headrace._progress import Snapshot

_REDRAWN_S = 0.2


class Bar(Protocol):
    """Shows how a load goes on."""

    def __call__(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


def open_bar() -> Bar:
    """tqdm's bar, or lines where it is not installed."""
    try:
        tqdm = import_module("tqdm.auto").tqdm
    except ImportError:
        return Lines()
    return TqdmBar(tqdm)


class TqdmBar:
    """A bar in bytes. It stays where it was when the load ended."""

    def __init__(self, tqdm: Any) -> None:
        self._tqdm, self._pid = tqdm, os.getpid()
        self._bar: Any = None

    def __call__(self, snapshot: Snapshot) -> None:
        if self._bar is None:
            self._bar = self._tqdm(total=snapshot.total_nbytes, desc="loading", unit="B", unit_scale=True)
        if snapshot.read_nbytes:
            self._bar.set_postfix_str(f"slowest: {snapshot.slowest}", refresh=False)
        self._bar.update(snapshot.read_nbytes - self._bar.n)

    def close(self) -> None:
        """Draw the last state. A forked child leaves that to its parent."""
        if self._bar is not None and self._pid == os.getpid():
            self._bar.close()


class Lines:
    """A line at the start and one at the end; between them, on a terminal, one that is written over."""

    def __init__(self) -> None:
        self._pid, self._due = os.getpid(), 0.0
        self._last: Snapshot | None = None
        self._on_terminal = sys.stderr.isatty()

    def __call__(self, snapshot: Snapshot) -> None:
        if self._last is None:
            self._say(f"loading {snapshot.total_tensors:,} tensors, {format_nbytes(snapshot.total_nbytes)} to read")
        self._last = snapshot
        if self._on_terminal and time.monotonic() >= self._due:
            self._due = time.monotonic() + _REDRAWN_S
            sys.stderr.write(f"\r{_state(snapshot)}\x1b[K")
            sys.stderr.flush()

    def close(self) -> None:
        """Say how it ended. A forked child leaves that to its parent."""
        if self._last is not None and self._pid == os.getpid():
            self._say(_state(self._last))

    def _say(self, text: str) -> None:
        sys.stderr.write(f"\r{text}\x1b[K\n" if self._on_terminal else f"{text}\n")


def _state(snapshot: Snapshot) -> str:
    read, total = format_nbytes(snapshot.read_nbytes), format_nbytes(snapshot.total_nbytes)
    left = (snapshot.total_nbytes - snapshot.read_nbytes) / snapshot.rate if snapshot.rate else 0.0
    eta = f", {left:.0f} s left" if left >= 1 else ""
    return f"loaded {read} of {total}, {snapshot.rate / 1e9:.2f} GB/s{eta}; slowest: {snapshot.slowest}"
