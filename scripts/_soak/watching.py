"""What a load leaves behind: threads, descriptors, files, processes, memory, and errors that nobody could catch."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _soak.judging import WrongError

_PAGE = os.sysconf("SC_PAGE_SIZE")
_JOIN_LIMIT_S = 10.0


def resident_nbytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def peak_resident_nbytes() -> int:
    """The most that it was."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def children() -> set[int]:
    """Processes that threads of this one have started and that have not gone."""
    found = set[int]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


class Watch:
    """What there was before a load, to be compared with what there is after it. A context manager."""

    def __init__(self) -> None:
        self._uncaught: list[str] = []
        self._seen_shm = set(os.listdir("/dev/shm"))
        self._suspects: dict[str, int] = {}
        self._hooks = sys.unraisablehook, threading.excepthook
        sys.unraisablehook, threading.excepthook = self._note_unraisable, self._note_thread
        self.begin()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook, threading.excepthook = self._hooks

    def begin(self) -> None:
        """Take stock."""
        self._descriptors, self._files, self._children = _descriptors(), _temporary_files(), children()
        self._interval, self._collecting = sys.getswitchinterval(), gc.isenabled()
        self._uncaught.clear()

    def check(self, seed: int) -> None:
        """Raise `WrongError` where something is left of the case."""
        left = [thread for thread in threading.enumerate() if thread.name.startswith("headrace-")]
        if left or len(_descriptors()) > len(self._descriptors):
            gc.collect()
        for thread in left:
            thread.join(_JOIN_LIMIT_S)
        self._expect("threads", [thread.name for thread in left if thread.is_alive()])
        now = _descriptors()
        # Descriptors of others of this process may come and go; more of them than before are a leak.
        left_open = sorted(target for number, target in now.items() if number not in self._descriptors)
        self._expect("descriptors", left_open if len(now) > len(self._descriptors) else [])
        self._expect("temporary files", sorted(_temporary_files() - self._files))
        self._expect("processes", sorted(children() - self._children))
        self._expect("errors that nobody could catch", list(self._uncaught))
        if sys.getswitchinterval() != self._interval or gc.isenabled() != self._collecting:
            raise WrongError("the switch interval or the collector is not as it was")
        for name in set(os.listdir("/dev/shm")) - self._seen_shm:
            self._suspects.setdefault(name, seed)

    def shared_memory_left(self) -> dict[str, int]:
        """What lies in /dev/shm that was not there before and has stayed, and the case after which it was seen first.

        Other programs use /dev/shm too: only names as headrace and torch give them count, at the end.
        """
        ours = {name: seed for name, seed in self._suspects.items() if name.startswith(("headrace", "torch"))}
        return {name: seed for name, seed in ours.items() if os.path.lexists(f"/dev/shm/{name}")}

    def _expect(self, what: str, found: list[Any]) -> None:
        if found:
            raise WrongError(f"{what} are left: {found}")

    def _note_unraisable(self, unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):  # our own, at a place where nobody can catch it
            self._uncaught.append("".join(traceback.format_exception(unraisable.exc_value)))

    def _note_thread(self, arguments: Any) -> None:
        self._uncaught.append("".join(traceback.format_exception(arguments.exc_value)))


def _descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the one that listed the folder
            continue
    return found


def _temporary_files() -> set[str]:
    return set(os.listdir(tempfile.gettempdir()))


class Watchdog:
    """Calls `hung` when a case takes too long. A context manager."""

    def __init__(self, limit_s: float, hung: Callable[[], None]) -> None:
        self._timer = threading.Timer(limit_s, hung)
        self._timer.daemon = True

    def __enter__(self) -> Watchdog:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
