"""Memory that ranks share: who waits for another rank is woken when it says what is waited for, and nobody else is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from headrace import _node
from headrace._leaving import STOPPED, Leaving
from headrace._node import NodeMemory
from headrace.errors import PeerError

NEVER_S = 1000.0  # a rank that is not woken sleeps longer than a test may take
pytestmark = pytest.mark.timeout(30)


@contextmanager
def node(ranks: int) -> Iterator[list[NodeMemory]]:
    """The memory of so many ranks, which are threads here, with two slots each."""
    gathered: list[list[Any]] = [[], []]
    all_there = threading.Barrier(ranks)

    def gather(rank: int) -> Callable[[Any], list[Any]]:
        turns = iter(range(2))

        def exchange(value: Any) -> list[Any]:
            turn = next(turns)
            with lock:
                gathered[turn].append((rank, value))
            all_there.wait()
            return [value for _, value in sorted(gathered[turn], key=lambda pair: pair[0])]

        return exchange

    lock = threading.Lock()
    with ThreadPoolExecutor(ranks) as threads:
        made = list(threads.map(lambda rank: _node.share(rank, gather(rank), 4096, NEVER_S, 2), range(ranks)))
    found = [memory for memory in made if memory is not None]
    assert len(found) == ranks
    try:
        yield found
    finally:
        for memory in found:
            memory.close()


@pytest.fixture(autouse=True)
def no_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_node, "NAP_S", NEVER_S)


def asleep(thread: threading.Thread) -> bool:
    """Whether the kernel has a thread waiting."""
    with open(f"/proc/self/task/{thread.native_id}/stat", "rb") as stat:
        return stat.read().rsplit(b")", 1)[1].split()[0] == b"S"


@contextmanager
def waiting(wait: Callable[[], Any]) -> Iterator[list[Any]]:
    """A thread that waits; what it got, or the error, is in the list when the `with` ends."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(wait())
        except PeerError as exc:
            outcome.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    while not asleep(thread):
        threading.Event().wait(0.001)
    yield outcome
    thread.join()


@pytest.mark.parametrize(("ranks", "owner"), [(2, 0), (3, 2), (34, 1), (34, 33)])
def test_an_owner_is_woken_by_the_last_rank_that_is_done_with_its_round(ranks: int, owner: int) -> None:
    with node(ranks) as memories:
        with waiting(lambda: memories[owner].room(2, after=1)) as outcome:
            for rank in range(ranks):
                if rank != owner:
                    assert not outcome
                    memories[rank].done(1, [owner])
        assert outcome[0].nbytes == 4096


def test_a_rank_is_woken_by_one_that_is_done_with_rounds_of_several() -> None:
    with node(3) as memories:
        memories[2].done(3, [])
        with waiting(lambda: memories[1].room(2, after=2)) as outcome:
            memories[0].done(3, [2, 1, 0])
        assert outcome[0].nbytes == 4096


@pytest.mark.parametrize("rank", [1, 2])
def test_what_is_filled_wakes_whoever_waits_for_it(rank: int) -> None:
    with node(3) as memories:
        memories[0].room(0, after=0)[:3] = b"abc"
        with waiting(lambda: memories[rank].filled_slot(0, 0)) as outcome:
            memories[0].announce(1)
        assert bytes(outcome[0][:3]) == b"abc"


@pytest.mark.parametrize("wait", ["room", "filled"])
def test_a_rank_that_leaves_wakes_all_that_wait_for_it(wait: str) -> None:
    with node(2) as memories:
        waits = {"room": lambda: memories[1].room(2, after=1), "filled": lambda: memories[1].filled_slot(0, 0)}
        with waiting(waits[wait]) as outcome:
            memories[0].leave(Leaving(STOPPED, 0, ""))
        assert isinstance(outcome[0], PeerError)
        assert outcome[0].rank == 0
