"""Many small tasks on a few threads, and one thread that reports: what pulls and verifications have in common.

Threads are not waited for for ever: where something failed, or the caller was interrupted, what they wait for is ended, and those
whose waits nothing can end are left behind. They end by themselves, and touch nothing any more once `stop` is set.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

T = TypeVar("T")

_REPORTED_S: Final = 0.5


def work_off(
    tasks: Iterable[T],
    start: Callable[[], Callable[[T], None]],
    *,
    name: str,
    threads: int,
    stop: threading.Event,
    report: Callable[[], None],
    end: Callable[[], None],
    patient: bool = True,
) -> None:
    """Do all tasks. The first error ends it, as an interrupt of the calling thread does; errors after that one do not count.

    Args:
        tasks: taken one by one.
        start: called on each thread; gives what does a task, with memory of the thread's own.
        name: of the threads.
        threads: how many.
        stop: set where something failed. Whoever does a task looks at it after each wait.
        report: called on the calling thread, after every task and twice a second.
        end: called after `stop` was set; ends what the threads wait for.
        patient: whether `end` can end every wait, so that the threads can be waited for.

    Raises:
        Whatever a task or `report` raises.
    """
    tasks, taking = iter(tasks), threading.Lock()
    outcomes: queue.SimpleQueue[BaseException | bool] = queue.SimpleQueue()  # True: a task is done; False: a thread is

    def work() -> None:
        try:
            do = start()
            while not stop.is_set():
                with taking:
                    task = next(tasks, None)
                if task is None:
                    break
                do(task)
                outcomes.put(True)
        except BaseException as exc:  # noqa: BLE001 - raised by the thread that called
            if not stop.is_set():
                outcomes.put(exc)
        finally:
            outcomes.put(False)

    crew = [threading.Thread(target=work, name=f"{name}-{i}", daemon=True) for i in range(threads)]
    started: list[threading.Thread] = []
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
                report()
    except BaseException:
        stop.set()
        end()
        if not patient:
            started.clear()
        raise
    finally:
        for thread in started:
            thread.join()


def _next_outcome(outcomes: queue.SimpleQueue[BaseException | bool]) -> BaseException | bool | None:
    """What a worker says; None where all are silent for a while, so that a bar shows that nothing comes.

    A signal just before the wait does not end it (CPython looks for signals first, then waits), so no wait is for ever.
    """
    try:
        return outcomes.get(timeout=_REPORTED_S)
    except queue.Empty:
        return None
