"""What a thread does before there is a source to close, openings and listings, and how another thread ends it.

Reads end when their source is closed. Who opens many files side by side has nothing to close yet; where one of them fails, or
the caller is interrupted, all others would go on with their tries and waits, for minutes where a server has stalled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Here(threading.local):
    openings: Openings | None = None


_here = _Here()


class Openings:
    """Openings of some threads, which any thread may end at once; those that begin later end as they begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: set[Callable[[], None]] = set()
        self._ended = False

    @contextmanager
    def here(self) -> Iterator[None]:
        """What this thread opens meanwhile is one of them."""
        before, _here.openings = _here.openings, self
        try:
            yield
        finally:
            _here.openings = before

    def end(self) -> None:
        """End them, each with the error that a closed source gives. Where an adapter cannot end a wait, that one goes on."""
        with self._lock:
            self._ended = True
            ends = list(self._ends)
        for end in ends:
            end()

    @contextmanager
    def watching(self, end: Callable[[], None]) -> Iterator[None]:
        """Have `end` called when they are ended meanwhile."""
        with self._lock:
            self._ends.add(end)
            ended = self._ended
        try:
            if ended:
                end()
            yield
        finally:
            with self._lock:
                self._ends.discard(end)


@contextmanager
def endable(end: Callable[[], None]) -> Iterator[None]:
    """For adapters: what this thread does meanwhile is ended by `end`, which may be called by any thread, and more than once."""
    openings = _here.openings
    if openings is None:
        yield
        return
    with openings.watching(end):
        yield
