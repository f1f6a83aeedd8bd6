"""Requests that wait for each other: held back when they have come, until whoever holds them lets all that wait go on at once.

So rounds of requests can be counted without a clock: what a client asks for only after an answer comes a round later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

_LOOK_S = 0.01  # how often a request that waits looks whether its client has left


@dataclass(slots=True)
class _Round:
    """Those that wait together."""

    waiting: int = 0
    over: threading.Event = field(default_factory=threading.Event)


class Turnstile:
    """Open, until `hold`.

    Args:
        note_change: does something and has whoever waits for counts look at them.

    Attributes:
        rounds: how often those that waited were let go on.
    """

    def __init__(self, note_change: Callable[[Callable[[], None]], None]) -> None:
        self.rounds = 0
        self._note_change = note_change
        self._round: _Round | None = None

    @property
    def waiting(self) -> int:
        """How many requests are held back now."""
        held = self._round
        return held.waiting if held is not None else 0

    def hold(self) -> None:
        """From now on requests wait. May be called again."""
        if self._round is None:
            self._round = _Round()

    def release(self) -> int:
        """Let those go on that wait now, and hold back the ones that come; return how many went on."""
        return self._turn(_Round())

    def open(self) -> int:
        """Let all go on, and hold back none any more; return how many had waited."""
        return self._turn(None)

    def _turn(self, following: _Round | None) -> int:
        held = self._round
        if held is None:
            return 0

        def turn() -> None:
            self.rounds += 1
            self._round = following

        self._note_change(turn)
        held.over.set()
        return held.waiting

    def passes(self, is_there: Callable[[], bool]) -> bool:
        """Wait for a turn; return False as soon as `is_there` says that the client has left."""
        held = self._enter()
        if held is None:
            return True
        while not held.over.wait(_LOOK_S):
            if not is_there():
                self._note_change(lambda: self._leave(held))
                return False
        return True

    def _enter(self) -> _Round | None:
        entered: list[_Round] = []

        def enter() -> None:
            if self._round is not None:
                self._round.waiting += 1
                entered.append(self._round)

        if self._round is not None:
            self._note_change(enter)
        return entered[0] if entered else None

    @staticmethod
    def _leave(held: _Round) -> None:
        held.waiting -= 1
