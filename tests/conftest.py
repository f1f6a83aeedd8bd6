"""What every test must leave as it found it, and which tests this machine can run.

A loader that leaks a thread, a descriptor or an interpreter setting harms the program it is used in long after the load; so each
test is also a test of that, unless it is marked `leaky_ok` with a reason.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from budget import QUICK
from hypothesis import settings

# Times differ too much between machines for a limit per example; pytest-timeout stops what hangs.
settings.register_profile("headrace", deadline=None)
settings.register_profile("soak", deadline=None, max_examples=1000, database=None)  # scripts/soak --fuzz
settings.register_profile("quick", deadline=None, max_examples=QUICK)
settings.load_profile("headrace")

_DESCRIPTORS = Path("/proc/self/fd")

# A suite that is started in the background ignores Ctrl-C, and so would the programs it starts, which tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
_JOIN_LIMIT_S = 5.0


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        settings.load_profile("quick")
    # Where nothing compiled is kept, each run rewrites all tests anew, and each interpreter that a test starts compiles headrace.
    kept = pytest.MonkeyPatch()
    config.add_cleanup(kept.undo)
    kept.setattr(sys, "dont_write_bytecode", False)
    kept.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what the session holds, thousands of tests and torch, out of later collections of garbage, which take long else."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # By device node, since asking torch would import it for tests that show that it is not needed.
    if any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd")):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test after which threads or descriptors are left, or interpreter settings have changed."""
    descriptors, interval, collecting = _descriptors(), sys.getswitchinterval(), gc.isenabled()
    yield
    assert sys.getswitchinterval() == interval, "the switch interval was changed"
    assert gc.isenabled() == collecting, "the garbage collector was switched on or off"
    if request.node.get_closest_marker("leaky_ok"):
        return
    # What is abandoned is closed by the collector; a full collection is slow with torch loaded, so only where something is left.
    if _alive() or len(_descriptors()) > len(descriptors):
        gc.collect()
    _join(_alive())
    assert not _alive(), f"threads are left: {_alive()}"
    left = {number: target for number, target in _descriptors().items() if descriptors.get(number) != target}
    assert len(_descriptors()) <= len(descriptors), f"descriptors are left: {left}"


def _alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("headrace-")]


def _join(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + _JOIN_LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _descriptors() -> dict[str, str]:
    """Open descriptors and what they are; empty where the system does not tell."""
    found = {}
    for number in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.is_dir() else ():
        try:
            found[number] = os.readlink(_DESCRIPTORS / number)
        except FileNotFoundError:  # the one that listed the folder
            continue
    return found


@pytest.fixture(scope="session")
def rank_server() -> None:
    """What ranks are forked from; for the session, since it keeps its descriptors."""
    from ranks import prepare_ranks

    prepare_ranks()


@pytest.fixture(scope="session")
def rank_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two shards for ranks to load. Not to be written to."""
    from ranks import write_model

    return write_model(tmp_path_factory.mktemp("model"))
