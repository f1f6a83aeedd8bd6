"""Two properties of the interpreter that cost a loader most of its speed, held down while a load runs and put back afterwards.

A thread that runs pure bytecode gives the GIL away once per switch interval, 5 ms by default; a reader needs it for
microseconds per chunk and waits that long for it (41 GB/s fall to 2.9; at 50 microseconds 28.6 remain). The cyclic
collector walks over everything alive each time many objects are made at once (60,000 tensors: 4.8 instead of 0.8
microseconds each). Both are process-wide, so they are counted: the last one out restores what the first one found.
Figures: docs/design.md, 3.6.

And its end: loads that a program left open are stopped then, while their threads still run and before torch and drivers are taken
down. What is closed later still waits for no thread, as they run no more.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

SWITCH_INTERVAL_S = 50e-6


class _Counted:
    """A process-wide setting, changed while at least one holder wants it.

    The lock is reentrant and the count is brought up to date before the setting: the collector may run between any two
    lines here, end an abandoned stream, and so release on this very thread.
    """

    def __init__(self, change: Callable[[], float], restore: Callable[[float], object]) -> None:
        self._change, self._restore = change, restore
        self._lock = threading.RLock()
        self._holders = 0
        self._active = False
        self._before = 0.0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def acquire(self) -> None:
        with self._lock:
            self._holders += 1
            self._apply()

    def release(self) -> None:
        with self._lock:
            self._holders = max(0, self._holders - 1)  # a forked child may release what only its parent had acquired
            self._apply()

    @contextmanager
    def held(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def _apply(self) -> None:
        if self._holders and not self._active:
            self._active = True
            self._before = self._change()
        elif not self._holders and self._active:
            self._active = False
            self._restore(self._before)

    def _forget(self) -> None:
        """In a forked child nobody is left to release: the readers stayed with the parent."""
        self._lock, self._holders = threading.RLock(), 0
        self._apply()


def _shorten_switch_interval() -> float:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
    return before


def _disable_gc() -> float:
    was_enabled = gc.isenabled()
    gc.disable()
    return float(was_enabled)


def join(thread: threading.Thread, timeout_s: float | None = None) -> None:
    """Wait for a daemon thread to end; not at all where the interpreter is ending, which stops them wherever they are.

    Until Python 3.12 such a join returned at once. From 3.13 on it waits for ever, and 3.14 raises.
    """
    if not sys.is_finalizing():
        thread.join(timeout_s)


class Stoppable(Protocol):
    """What runs threads of its own until it is stopped."""

    def stop(self) -> None: ...


class _Running:
    """Loads under way. A daemon thread that is within torch or a driver when the interpreter ends takes the process down with it.

    The collector may end an abandoned load between any two lines here, so there is no lock: each step is one of a dict's own.
    """

    def __init__(self) -> None:
        self._loads: dict[int, Stoppable] = {}
        self._registered = False
        self.is_over = False

    def add(self, load: Stoppable) -> None:
        if not self._registered:  # now, not at the import: what is registered later runs earlier
            self._registered = True
            atexit.register(self.stop_all)
        self._loads[id(load)] = load

    def discard(self, load: Stoppable) -> None:
        self._loads.pop(id(load), None)

    def stop_all(self) -> None:
        """Stop them, the latest first."""
        self.is_over = True
        for load in reversed(list(self._loads.values())):
            with suppress(Exception):  # nobody is left to take it, and the others have to be stopped as well
                load.stop()


running = _Running()
switching_fast = _Counted(_shorten_switch_interval, sys.setswitchinterval)
gc_paused = _Counted(_disable_gc, lambda was_enabled: gc.enable() if was_enabled else None)
