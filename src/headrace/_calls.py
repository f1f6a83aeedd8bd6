"""Calls that may never come back, each on a thread that is given up when it does not.

A thread whose call is overdue is left behind with everything that it was given: what the call may still write to lives for as
long as the call does, and nobody uses thread or memory again. What comes back in time goes to its caller, and the thread to the
next one.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from headrace._interpreter import join

_T = TypeVar("_T")


class _Call:
    """One call, and what became of it."""

    __slots__ = ("arguments", "done", "error", "function", "result")

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function: Callable[..., Any] | None = function
        self.arguments = arguments
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def carry_out(self) -> None:
        function, arguments = self.function, self.arguments
        assert function is not None
        try:
            self.result = function(*arguments)
        except BaseException as exc:  # noqa: BLE001 - raised in the thread that waits
            self.error = exc.with_traceback(None)
        finally:
            self.function, self.arguments = None, ()
            self.done.set()


class Callers:
    """Threads for such calls, as many as there are calls at the same time.

    Args:
        enter: what a thread does first.
        name: of the threads, with a number behind it.
    """

    def __init__(self, enter: Callable[[], None] = lambda: None, *, name: str = "headrace-direct") -> None:
        self._enter, self._name = enter, name
        self._lock = threading.Lock()
        self._idle: list[_Caller] = []
        self._closed = False
        self._numbers = itertools.count()
        weakref.finalize(self, _dismiss, self._idle)  # of a load that failed before it began

    def call(self, function: Callable[..., _T], *arguments: object, limit_s: float) -> _T:
        """Call, and wait for the result as long as that.

        Raises:
            TimeoutError: it did not come back. Whatever the function raises.
        """
        with self._lock:
            caller = self._idle.pop() if self._idle else None
        if caller is None:
            caller = _Caller(f"{self._name}-{next(self._numbers)}", self._enter)
        call = _Call(function, arguments)
        caller.calls.put(call)
        if not call.done.wait(limit_s):
            caller.thread.name = f"lost {caller.thread.name}"
            caller.calls.put(None)  # should it ever come back
            raise TimeoutError
        self._take_back(caller)
        if call.error is not None:
            raise call.error
        result: _T = call.result
        return result

    def _take_back(self, caller: _Caller) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(caller)
                return
        caller.calls.put(None)

    def close(self) -> None:
        """End the threads that wait for calls. May be called twice."""
        with self._lock:
            self._closed = True
            threads = _dismiss(self._idle)
        for thread in threads:
            join(thread)


class _Caller:
    """A thread, and its queue of calls."""

    def __init__(self, name: str, enter: Callable[[], None]) -> None:
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=(self.calls, enter), name=name, daemon=True)
        self.thread.start()


def _dismiss(idle: list[_Caller]) -> list[threading.Thread]:
    """End the threads that wait for calls."""
    threads = [caller.thread for caller in idle]
    while idle:
        idle.pop().calls.put(None)
    return threads


def _serve(calls: queue.SimpleQueue[_Call | None], enter: Callable[[], None]) -> None:
    failed: BaseException | None = None
    try:
        enter()
    except BaseException as exc:  # noqa: BLE001 - every call of this thread raises it
        failed = exc.with_traceback(None)
    while (call := calls.get()) is not None:
        if failed is not None:
            call.error = failed
            call.done.set()
        else:
            call.carry_out()
        del call  # nothing of it may live until the next one comes
