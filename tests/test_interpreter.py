"""Settings of the whole interpreter are changed while somebody wants it, counted, and put back however that ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import MIB, random_contents, write

import headrace
from headrace._interpreter import SWITCH_INTERVAL_S, gc_paused, join, running, switching_fast

OWN_INTERVAL_S = 0.003


def interval() -> float:
    return round(sys.getswitchinterval(), 6)


SETTINGS: dict[str, tuple[Any, Callable[[], object], object, object]] = {
    # name: (the guard, how to look, what it is before, what it is while held)
    "switch interval": (switching_fast, interval, OWN_INTERVAL_S, SWITCH_INTERVAL_S),
    "collector": (gc_paused, gc.isenabled, True, False),
}


@pytest.fixture(autouse=True)
def known_settings() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(OWN_INTERVAL_S)
    yield
    sys.setswitchinterval(before)
    gc.enable()


@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_changed_while_held_and_put_back(name: str) -> None:
    guard, look, before, during = SETTINGS[name]
    assert look() == before
    with guard.held():
        assert look() == during
    assert look() == before


@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_put_back_after_an_error(name: str) -> None:
    guard, look, before, _ = SETTINGS[name]
    with pytest.raises(KeyboardInterrupt), guard.held():
        raise KeyboardInterrupt
    assert look() == before


@pytest.mark.parametrize("name", SETTINGS)
def test_the_last_one_out_puts_it_back(name: str) -> None:
    guard, look, before, during = SETTINGS[name]
    guard.acquire()
    with guard.held():
        guard.acquire()
        guard.release()
        assert look() == during
    assert look() == during
    guard.release()
    assert look() == before


@pytest.mark.parametrize("name", SETTINGS)
def test_holders_on_two_threads_are_counted_together(name: str) -> None:
    guard, look, before, during = SETTINGS[name]
    held, let_go, seen = threading.Event(), threading.Event(), []

    def hold() -> None:
        with guard.held():
            held.set()
            let_go.wait(10)
        seen.append(look())

    thread = threading.Thread(target=hold)
    with guard.held():
        thread.start()
        assert held.wait(10)
    assert look() == during
    let_go.set()
    thread.join(10)
    assert seen == [before]
    assert look() == before


@pytest.mark.parametrize("name", SETTINGS)
def test_many_threads_at_once_leave_it_as_it_was(name: str) -> None:
    guard, look, before, during = SETTINGS[name]
    start, wrong = threading.Barrier(8), []

    def hold_often() -> None:
        start.wait(10)
        for _ in range(300):
            with guard.held():
                if look() != during:
                    wrong.append(look())

    threads = [threading.Thread(target=hold_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert look() == before


def test_an_interval_that_is_shorter_already_stays() -> None:
    sys.setswitchinterval(1e-5)
    with switching_fast.held():
        assert interval() == 1e-5
    assert interval() == 1e-5


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with gc_paused.held():
        assert not gc.isenabled()
    assert not gc.isenabled()
    gc.enable()


def test_what_the_second_holder_finds_is_not_taken_for_the_original() -> None:
    with switching_fast.held():
        pass
    sys.setswitchinterval(0.004)
    with switching_fast.held():
        assert interval() == SWITCH_INTERVAL_S
    assert interval() == 0.004


class Abandoned:
    """Part of a cycle; releases when the collector finds it."""

    def __init__(self, guard: Any) -> None:
        self.guard, self.cycle = guard, self
        guard.acquire()

    def __del__(self) -> None:
        self.guard.release()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_collector_may_release_while_this_thread_is_inside(name: str) -> None:
    guard, look, before, during = SETTINGS[name]
    Abandoned(guard)
    with guard._lock:  # as where a collection begins inside `acquire`
        gc.collect()
    assert look() == before
    with guard.held():
        assert look() == during


FORK = """
    import gc, os, sys
    from headrace._interpreter import gc_paused, switching_fast
    sys.setswitchinterval(0.003)
    def look():
        return round(sys.getswitchinterval(), 6), gc.isenabled()
    with switching_fast.held(), gc_paused.held():
        child = os.fork()
        if not child:
            forgotten = look() == (0.003, True)
            with switching_fast.held(), gc_paused.held():
                works = look() == (5e-5, False)
            os._exit(0 if forgotten and works and look() == (0.003, True) else 1)
        status = os.waitpid(child, 0)[1]
        kept = look() == (5e-5, False)
    print(os.waitstatus_to_exitcode(status), kept, look())
"""


def test_a_forked_child_begins_anew_and_the_parent_goes_on() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(FORK)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0 True (0.003, True)"


RELEASED_IN_CHILD = """
    import os, sys
    from headrace._interpreter import switching_fast
    sys.setswitchinterval(0.003)
    switching_fast.acquire()
    child = os.fork()
    switching_fast.release()  # in both: the child runs the same `finally`
    ok = round(sys.getswitchinterval(), 6) == 0.003
    with switching_fast.held():
        ok = ok and round(sys.getswitchinterval(), 6) == 5e-5
    ok = ok and round(sys.getswitchinterval(), 6) == 0.003
    if not child:
        os._exit(0 if ok else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ok)
"""


def test_a_release_that_the_child_inherits_does_no_harm() -> None:
    code = textwrap.dedent(RELEASED_IN_CHILD)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0 True"


LEFT_OPEN = """
    import threading
    from headrace._interpreter import join
    class Left:
        def __init__(self):
            self.thread = threading.Thread(target=threading.Event().wait, daemon=True)
            self.thread.start()
        def __del__(self, join=join):
            join(self.thread)
            print("over")
    left = Left()
"""


def test_what_a_program_left_open_waits_for_no_thread_when_the_interpreter_ends() -> None:
    code = textwrap.dedent(LEFT_OPEN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "over", "")


def test_a_thread_is_waited_for_otherwise() -> None:
    done = threading.Event()
    waiting = threading.Thread(target=done.wait, daemon=True)
    waiting.start()
    join(waiting, 0.01)
    assert waiting.is_alive()
    done.set()
    join(waiting)
    assert not waiting.is_alive()


LOADS = """
    import atexit, threading
    def left():
        print([thread.name for thread in threading.enumerate() if thread.name.startswith("headrace")], flush=True)
    atexit.register(left)  # runs last
    import headrace
    from headrace._interpreter import running
    class Failing:
        def stop(self):
            raise OSError("is not to keep the others from being stopped")
    tensors = headrace.stream({path!r}, concurrency=2, memory_limit=0)
    name, kept = next(tensors)
    print(len(running._loads), any(thread.name.startswith("headrace") for thread in threading.enumerate()))
    running.add(Failing())
"""


@pytest.mark.slow
def test_loads_that_a_program_left_open_are_stopped_before_the_interpreter_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", random_contents(*[MIB] * 8))
    code = textwrap.dedent(LOADS.format(path=str(path)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, ["1 True", "[]"], "")


DAEMON = """
    import threading
    import headrace
    from headrace.sources.memory import MemorySource
    waits = threading.Event()
    class Endless(MemorySource):
        def read_into(self, offset, buffer):
            if offset >= 4 << 20:
                waits.set()
                threading.Event().wait()
            super().read_into(offset, buffer)
    def load():
        for _ in headrace.stream(Endless(open({path!r}, "rb").read()), concurrency=2, memory_limit=0):
            pass
    threading.Thread(target=load, daemon=True).start()
    waits.wait()
"""


@pytest.mark.slow
def test_a_daemon_thread_that_waits_for_a_tensor_says_nothing_when_the_interpreter_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", random_contents(*[MIB] * 8))
    code = textwrap.dedent(DAEMON.format(path=str(path)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_loads_that_are_over_are_known_no_more(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", random_contents(*[MIB] * 2))
    before = len(running._loads)
    headrace.load(path)
    tensors = headrace.stream(path, concurrency=2)
    next(tensors)
    assert len(running._loads) == before + 1
    del tensors
    gc.collect()
    assert len(running._loads) == before
