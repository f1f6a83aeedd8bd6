"""What the ranks of a load write for each other, in a part of the store that torch.distributed was started with.

A store may stop answering for ever: a TCPStore whose process is stopped, a FileStore that a rank locked when it was stopped. Its
calls know no time limit, so each is made on a thread that is given up (`_calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from headrace._calls import Callers

_T = TypeVar("_T")


class Board:
    """A part of a store. Thread-safe.

    Args:
        store: the whole of it.
        prefix: of all keys.
        limit_s: how long an answer may take.

    Attributes:
        is_stuck: an answer did not come. From then on every call fails at once.
        keeper: the rank in the world whose process keeps the store, as a rule; None where no process does.

    All methods raise RuntimeError where the store cannot be reached, or does not answer.
    """

    def __init__(self, store: Any, prefix: str, *, limit_s: float) -> None:
        self._store: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        self._limit_s = limit_s
        self._callers = Callers(name="headrace-store")
        self.is_stuck = False
        self.keeper = None if _is_file(store) else 0

    def part(self, purpose: str) -> Any:
        """A part of the store that nobody else writes to, for torch. A copy that does not hold up others, from torch 2.8 on."""
        part = dist.PrefixStore(purpose, self._store)  # type: ignore[attr-defined]
        return self._ask(part.clone) if hasattr(part, "clone") else part

    def set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def set_first(self, key: str, value: str) -> str:
        """Set what nobody has set. What is there then."""
        return str(self._ask(self._store.compare_set, key, "", value), "ascii")

    def get(self, key: str) -> str:
        """What is there; waits as torch does where nothing is."""
        return str(self._ask(self._store.get, key), "ascii")

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of these are set."""
        return bool(self._ask(self._store.check, list(keys)))

    def delete(self, key: str) -> None:
        self._ask(self._store.delete_key, key)

    def close(self) -> None:
        """End the threads. May be called twice."""
        self._callers.close()

    def _ask(self, function: Callable[..., _T], *arguments: object) -> _T:
        if not self.is_stuck:
            try:
                return self._callers.call(function, *arguments, limit_s=self._limit_s)
            except TimeoutError:
                self.is_stuck = True
        raise RuntimeError(f"it does not answer within {self._limit_s:g} s")


def _is_file(store: Any) -> bool:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)  # type: ignore[attr-defined]
