"""Many small tasks on a few threads, and one thread that reports: what openings, pulls and verifications have in common.

Threads are not waited for for ever: where something failed, or the caller was interrupted, what they wait for is ended, and those
whose waits nothing can end are left behind after a second. They end by themselves, and touch nothing any more once `stop` is set.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from headrace._machine import available_cpus
from headrace.sources.openings import Openings

T = TypeVar("T")

KEPT_OPEN: Final = 256  # of more files than this, each is opened again when its turn comes: descriptors are limited
_REPORTED_S: Final = 0.5
_LEAVE_S: Final = 1.0
_NETWORK_CONCURRENCY: Final = 16
_OPENERS: Final = 32


def default_concurrency(*, is_remote: bool, most: int) -> int:
    """Tasks at once where nobody said how many: enough for a network's round trips, else one for each CPU, up to `most`."""
    return _NETWORK_CONCURRENCY if is_remote else min(most, max(2, available_cpus()))


def _do_nothing() -> None:
    """There is nothing to end, nobody to report to."""


class Crew:
    """The threads of one opening, pull or verification.

    Args:
        name: of the threads.
        end: called after `stop` was set; ends what the threads wait for, but for openings, which are ended by then.
        report: called on the calling thread, after every task and twice a second.

    Attributes:
        stop: set where something failed. Whoever does a task looks at it after each wait.
    """

    def __init__(self, name: str, *, end: Callable[[], None] = _do_nothing, report: Callable[[], None] = _do_nothing) -> None:
        self.stop = threading.Event()
        self._name, self._end, self._report = name, end, report
        self._openings = Openings()

    def open_all(self, tasks: Sequence[T], do: Callable[[T], None], *, concurrency: int | None) -> None:
        """Open files, many at once. Not every wait can be ended, so threads are left behind where it fails. As `work_off`."""
        threads = min(concurrency or _OPENERS, _OPENERS, len(tasks))
        self.work_off(tasks, lambda: do, threads=threads, is_patient=False)

    def work_off(
        self, tasks: Iterable[T], start: Callable[[], Callable[[T], None]], *, threads: int, is_patient: bool = True
    ) -> None:
        """Do all tasks. The first error ends it, as an interrupt of the caller does; errors after that one do not count.

        Args:
            tasks: taken one by one.
            start: called on each thread; gives what does a task, with memory of the thread's own.
            threads: how many.
            is_patient: whether `end` can end every wait, so that the threads can be waited for; else they have a second to end.

        Raises:
            Whatever a task or `report` raises.
        """
        tasks, taking = iter(tasks), threading.Lock()
        outcomes: queue.SimpleQueue[BaseException | bool] = queue.SimpleQueue()  # True: a task is done; False: a thread is

        def work() -> None:
            try:
                do = start()
                with self._openings.here():
                    while not self.stop.is_set():
                        with taking:
                            task = next(tasks, None)
                        if task is None:
                            break
                        do(task)
                        outcomes.put(True)
            except BaseException as exc:  # noqa: BLE001 - raised by the thread that called
                if not self.stop.is_set():
                    outcomes.put(exc)
            finally:
                outcomes.put(False)

        crew = [threading.Thread(target=work, name=f"{self._name}-{i}", daemon=True) for i in range(threads)]
        started: list[threading.Thread] = []
        until: float | None = None
        try:
            for thread in crew:
                thread.start()
                started.append(thread)
            running = len(crew)
            while running:
                outcome = _next_outcome(outcomes)
                if isinstance(outcome, BaseException):
                    raise outcome
                running -= outcome is False
                if outcome is not False:
                    self._report()
        except BaseException:
            self.stop.set()
            self._openings.end()
            self._end()
            if not is_patient:
                until = time.monotonic() + _LEAVE_S
            raise
        finally:
            for thread in started:
                thread.join(None if until is None else max(0.0, until - time.monotonic()))


def _next_outcome(outcomes: queue.SimpleQueue[BaseException | bool]) -> BaseException | bool | None:
    """What a worker says; None where all are silent for a while, so that a bar shows that nothing comes.

    A signal just before the wait does not end it (CPython looks for signals first, then waits), so no wait is for ever.
    """
    try:
        return outcomes.get(timeout=_REPORTED_S)
    except queue.Empty:
        return None
