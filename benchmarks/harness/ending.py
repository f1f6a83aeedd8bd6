"""A benchmark that is asked to end takes along every process that it has started.

A signal may come in the middle of a start, when a process runs that has no name yet in this one: Python hears signals between any
two calls. So the kernel is asked which children there are, once everything that knows its own has let go of it.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_S = 10.0  # for a child that is a benchmark, or a server


@contextmanager
def ends_its_children() -> Iterator[None]:
    """SIGINT and SIGTERM end the block by SystemExit with 128 + the signal, also in a shell's background, where SIGINT is
    ignored otherwise. No child of this process is left after the block. In the main thread only."""
    before = {number: signal.signal(number, _leave) for number in _SIGNALS}
    try:
        yield
    finally:
        _hear_no_more()
        _end(_children())
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    """End by an exception, so that who has started a process can end it in its own way. What is asked twice is heard once."""
    _hear_no_more()
    raise SystemExit(128 + number)


def _hear_no_more() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _children() -> list[int]:
    """Children of every thread, those that have ended and were not waited for among them."""
    return [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]


def _end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGTERM)  # ours until waited for, so its number is nobody else's
    for pid in pids:
        descriptor = os.pidfd_open(pid)
        try:
            if not select.select([descriptor], [], [], _GRACE_S)[0]:
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(descriptor)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
