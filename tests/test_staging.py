"""The pool: no two live leases overlap, the limit holds unless there is one lease only, and everything is given back."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget import examples
from checkpoints import KIB, MIB
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace._staging import PAGE, Lease, Pool, Region, round_up
from headrace.errors import DeviceMemoryError

pytestmark = pytest.mark.timeout(60)


def bytes_in(owner: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What an owner owns, as writable bytes that hold it."""
    return np.frombuffer(owner, dtype=np.uint8)


def granted(pool: Pool, nbytes: int) -> Lease:
    lease = pool.lease(nbytes)
    assert lease is not None
    assert lease.owner is not None
    return lease


class Held:
    """A lease that lives: its bytes are all `mark`."""

    def __init__(self, lease: Lease, mark: int, asked: int) -> None:
        self.lease: Lease | None = lease
        self.nbytes = lease.nbytes
        self.kept = False
        self.handed_over = False
        self.view = bytes_in(lease.owner)
        self.mark = mark
        assert self.view.nbytes >= asked
        self.view[:] = mark

    @property
    def extent(self) -> tuple[int, int]:
        return self.view.ctypes.data, self.view.ctypes.data + self.view.nbytes


SIZES = st.one_of(
    st.integers(1, 3 * PAGE),
    st.sampled_from([PAGE, PAGE + 1, 256 * KIB, MIB - 1, MIB, MIB + 1, 3 * MIB]),
    st.integers(1, 5 * MIB),
)


class PoolMachine(RuleBasedStateMachine):
    """Lease, hand over, drop, count as kept, close, in any order; a model counts along."""

    @initialize(limit=st.sampled_from([0, PAGE, MIB, 6 * MIB, 1 << 40]))
    def open(self, limit: int) -> None:
        self.pool = Pool(limit)
        self.held: list[Held] = []
        self.survivors: list[Held] = []
        self.marks = 0
        self.closed = False

    @property
    def living(self) -> list[Held]:
        return [*getattr(self, "held", []), *getattr(self, "survivors", [])]

    @precondition(lambda self: not self.closed)
    @rule(nbytes=SIZES)
    def lease(self, nbytes: int) -> None:
        lease = self.pool.lease(nbytes)
        used = sum(held.nbytes for held in self.held if not held.kept)
        if lease is None:
            assert used
            assert used + round_up(nbytes, 2 * MIB) > self.pool.limit
            return
        assert not used or used + lease.nbytes <= self.pool.limit
        assert lease.nbytes >= nbytes
        self.marks = self.marks % 250 + 1
        self.held.append(Held(lease, self.marks, nbytes))

    @precondition(lambda self: any(not held.handed_over for held in self.held))
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        held = self.draw(data, [held for held in self.held if not held.handed_over])
        assert held.lease is not None
        assert held.lease.hand_over() is not None
        assert held.lease.owner is None
        held.handed_over = True

    @precondition(lambda self: any(held.handed_over for held in self.held))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.held.remove(self.draw(data, [held for held in self.held if held.handed_over]))

    def draw(self, data: st.DataObject, choices: list[Held]) -> Held:
        """One of them. By index: Hypothesis holds on to what it draws."""
        return choices[data.draw(st.integers(0, len(choices) - 1))]

    @precondition(lambda self: not self.closed)
    @rule()
    def count_as_kept(self) -> None:
        newly = [held for held in self.held if held.handed_over and not held.kept]
        assert self.pool.count_as_kept() == sum(held.nbytes for held in newly)
        for held in newly:
            held.kept = True

    @precondition(lambda self: not self.closed)
    @rule()
    def close(self) -> None:
        self.pool.close()
        self.closed = True
        for held in self.held:
            held.handed_over = True

    @precondition(lambda self: self.closed)
    @rule(limit=st.sampled_from([0, MIB, 6 * MIB]))
    def open_another(self, limit: int) -> None:
        self.survivors += self.held
        self.held = []
        self.pool = Pool(limit)
        self.closed = False

    @invariant()
    def live_leases_do_not_overlap_and_keep_their_bytes(self) -> None:
        extents = sorted(held.extent for held in self.living)
        assert all(end <= following for (_, end), (following, _) in itertools.pairwise(extents))
        for held in self.living:
            assert int(held.view[0]) == int(held.view[-1]) == held.mark
            assert (held.view[:: PAGE - 1] == held.mark).all()

    @invariant()
    def accounts_are_exact(self) -> None:
        if getattr(self, "closed", True):
            return
        self.pool.wake()
        self.pool.wait()
        while not self.pool._returned.empty():
            self.pool.wait()
        assert self.pool.used_nbytes == sum(held.nbytes for held in self.held if not held.kept)
        assert self.pool.kept_nbytes == sum(held.nbytes for held in self.held if held.kept)
        assert self.pool.peak_nbytes >= self.pool.used_nbytes

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.close()
        for held in self.living:
            assert (held.view == held.mark).all()


PoolMachine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


# ---- the limit


@pytest.mark.parametrize("limit", [0, 1, MIB])
def test_one_lease_is_always_granted_however_large(limit: int) -> None:
    pool = Pool(limit)
    lease = granted(pool, 5 * MIB)
    assert pool.lease(1) is None
    lease.owner = None
    assert pool.lease(9 * MIB) is not None
    pool.close()


def test_what_is_kept_no_longer_counts_against_the_limit() -> None:
    pool = Pool(MIB)
    owners = []
    for _ in range(5):
        owners.append(granted(pool, 700 * KIB).hand_over())
        assert pool.lease(700 * KIB) is None
        assert pool.count_as_kept() >= 700 * KIB
        assert pool.count_as_kept() == 0
    assert pool.kept_nbytes >= 5 * 700 * KIB
    owners.clear()
    assert pool.lease(1) is not None
    assert pool.kept_nbytes == 0
    pool.close()


def test_what_was_not_handed_over_is_not_counted_as_kept() -> None:
    pool = Pool(MIB)
    lease = granted(pool, 700 * KIB)
    assert pool.count_as_kept() == 0
    assert lease.owner is not None
    pool.close()


def test_memory_that_came_back_is_leased_again_whatever_the_size() -> None:
    pool = Pool(8 * MIB)
    addresses = set()
    for nbytes in (5 * MIB, 3 * MIB, 4 * MIB + 1, 6 * MIB, 2 * MIB, 5 * MIB):
        owner = granted(pool, nbytes).hand_over()
        addresses.add(bytes_in(owner).ctypes.data // (8 * MIB))
        del owner
    assert len(addresses) <= 2
    assert pool.peak_nbytes <= 9 * MIB
    pool.close()


def test_free_memory_beyond_the_limit_goes_back_to_the_system() -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("only Linux tells resident memory")
    pool = Pool(4 * MIB)
    before = anonymous()
    owners = []
    for _ in range(10):
        owner = granted(pool, 4 * MIB).hand_over()
        bytes_in(owner)[:] = 1
        owners.append(owner)
        pool.count_as_kept()
    del owner
    assert anonymous() - before >= 39 * MIB
    owners.clear()
    assert pool.lease(4 * MIB) is not None
    assert anonymous() - before <= 6 * MIB
    pool.close()


def anonymous() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("Anonymous:")).split()[1])


def test_memory_that_the_system_refuses_is_a_typed_error_and_the_pool_goes_on() -> None:
    pool = Pool(-1 & ((1 << 62) - 1))
    with pytest.raises(DeviceMemoryError) as caught:
        pool.lease(1 << 60)
    assert caught.value.requested is not None
    assert caught.value.requested >= 1 << 60
    assert (pool.used_nbytes, pool.kept_nbytes) == (0, 0)
    assert pool.lease(MIB) is not None
    pool.close()


# ---- coming back


def test_wait_ends_when_an_owner_is_dropped_in_another_thread() -> None:
    pool = Pool(0)
    owners = [granted(pool, MIB).hand_over()]
    assert pool.lease(MIB) is None
    dropper = threading.Thread(target=owners.clear)
    dropper.start()
    pool.wait()
    dropper.join(30)
    assert pool.lease(MIB) is not None
    pool.close()


def test_wake_ends_a_wait_without_a_lease() -> None:
    pool = Pool(0)
    waiter = threading.Thread(target=pool.wait)
    waiter.start()
    pool.wake()
    waiter.join(30)
    assert not waiter.is_alive()
    pool.close()


def test_an_owner_that_the_collector_finds_comes_back() -> None:
    pool = Pool(0)
    cycle: list[Any] = [granted(pool, MIB).hand_over()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.lease(MIB) is not None
    pool.close()


def test_the_collector_may_drop_owners_at_any_step_of_the_pool() -> None:
    """Whatever the pool is doing, and whatever it holds, when the collector ends an owner on the same thread."""
    gc.disable()
    try:
        for step in itertools.count():
            pool = Pool(8 * MIB)
            cycle: list[Any] = [granted(pool, MIB).hand_over(), granted(pool, 300 * KIB).hand_over()]
            cycle.append(cycle)
            del cycle
            steps, reached = itertools.count(), []

            def profile(*_: Any, step: int = step, steps: Any = steps, reached: list[int] = reached) -> None:
                if next(steps) == step:
                    reached.append(gc.collect(0))

            sys.setprofile(profile)
            try:
                leases = [pool.lease(2 * MIB), pool.lease(MIB)]
            finally:
                sys.setprofile(None)
            assert None not in leases
            pool.wake()
            pool.wait()
            del leases
            pool.close()
            if not reached:
                break
    finally:
        gc.enable()
    assert step > 20


def test_owners_that_outlive_the_pool_keep_their_bytes_and_nothing_returns_to_it() -> None:
    pool = Pool(8 * MIB)
    owners = [granted(pool, nbytes).hand_over() for nbytes in (1, PAGE, 300 * KIB, MIB, 2 * MIB)]
    for mark, owner in enumerate(owners):
        bytes_in(owner)[:] = mark
    pool.close()
    pool.close()
    del pool
    gc.collect()
    other = Pool(8 * MIB)
    for _ in range(3):
        bytes_in(granted(other, 2 * MIB).hand_over())[:] = 255
    for mark, owner in enumerate(owners):
        assert set(bytes_in(owner).tolist()[:: PAGE // 4]) == {mark}
    other.close()


# ---- regions


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 2 * MIB, 3 * MIB + 5])
def test_a_region_is_page_aligned_zeroed_private_memory(nbytes: int) -> None:
    region = Region(nbytes)
    assert region.nbytes % PAGE == 0
    assert region.nbytes >= nbytes
    assert region.address % PAGE == 0
    region.populate(0, nbytes)
    view = np.frombuffer(region.view, dtype=np.uint8)
    assert view.ctypes.data == region.address
    assert not view.any()
    view[:] = 7
    region.populate(0, nbytes)  # bytes stay
    assert (view == 7).all()


def test_what_a_region_gives_back_is_zero_and_the_rest_stays() -> None:
    region = Region(4 * MIB)
    view = np.frombuffer(region.view, dtype=np.uint8)
    view[:] = 7
    region.give_back(PAGE, 3 * PAGE)
    assert (view[:PAGE] == 7).all()
    assert not view[PAGE : 3 * PAGE].any()
    assert (view[3 * PAGE :] == 7).all()
