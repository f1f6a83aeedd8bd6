"""Ranks of several nodes that connect while one of them is killed, or stopped: the others name it, and none hangs."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Outcome, alone, error_of, run_ranks, values
from simulated_gpu import needs_compiler, simulated_gpu
from torch.distributed.distributed_c10d import _get_default_store

import headrace
from headrace.errors import PeerError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rank_server")]

LOST = 1
TIMEOUT_S = 2.0
DEVICES = [("cpu", 1), *(pytest.param("gpu", nth, marks=needs_compiler) for nth in (1, 2))]


def speak_over_tcp(rank: int) -> None:
    """As torchrun has it: a store in which nobody else of a process can speak while one waits. It ends with rank 0."""
    served = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)] if rank == 0 else []
    port = [served[0].port if served else None]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    store = served[0] if served else dist.TCPStore("127.0.0.1", port[0], is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    dist.barrier()  # all are in it


def lose(rank: int, path: Path, lost: int, device: str, nth: int, number: int, late_s: float, over_tcp: bool) -> None:
    """One rank gets a signal when it makes its connections, `late_s` after it began to: the others come later still."""
    alone()
    if over_tcp:
        speak_over_tcp(rank)
    make, made = dist.ProcessGroupGloo, [0]

    def connect(*arguments: Any) -> Any:
        made[0] += 1
        if made[0] == nth and rank == lost:
            threading.Timer(late_s, os.kill, (os.getpid(), number)).start() if late_s else os.kill(os.getpid(), number)
        elif made[0] == nth:
            threading.Event().wait(2 * late_s)
        return make(*arguments)

    dist.ProcessGroupGloo = connect  # type: ignore[misc]
    load(path, device, TIMEOUT_S)


def load(path: Path, device: str, timeout_s: float, *, nap_s: float = 0) -> int:
    """All of it, with a nap after the first tensor; how many tensors there are."""
    arguments: dict[str, Any] = {"memory_limit": 0}
    with ExitStack() as stack:
        if device == "gpu":
            arguments["device"] = stack.enter_context(simulated_gpu("random")).device
        with headrace.stream(path, group=True, peer_timeout_s=timeout_s, **arguments) as tensors:
            next(tensors)
            threading.Event().wait(nap_s)
            return 1 + sum(1 for _ in tensors)


@pytest.mark.parametrize("over_tcp", [True, False], ids=["tcp", "file"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("late_s", [0, 0.3])
@pytest.mark.parametrize(("device", "nth"), DEVICES)
def test_a_rank_that_is_lost_while_connections_are_made_is_named(
    rank_model: Path, device: str, nth: int, number: int, late_s: float, over_tcp: bool
) -> None:
    lost = 1 if over_tcp else 2
    assert_named(lost, run_ranks(3, lose, rank_model, lost, device, nth, number, late_s, over_tcp, hanging=lost))


def assert_named(lost: int, outcomes: list[Outcome | None]) -> None:
    errors = [error_of(outcome) for rank, outcome in enumerate(outcomes) if rank != lost]
    assert [(type(error), getattr(error, "rank", None)) for error in errors] == [(PeerError, lost)] * 2, errors


def stay_away(rank: int, path: Path, lost: int, one_node: bool) -> None:
    """One rank is killed before the load begins."""
    speak_over_tcp(rank)
    if not one_node:
        alone()
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    load(path, "cpu", TIMEOUT_S)


@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
@pytest.mark.parametrize("lost", [1, 2])
def test_a_rank_that_never_comes_is_named_also_when_the_store_ends_with_the_first_rank(
    rank_model: Path, lost: int, one_node: bool
) -> None:
    assert_named(lost, run_ranks(3, stay_away, rank_model, lost, one_node, hanging=lost))


def stop_the_keeper(rank: int, path: Path, device: str, one_node: bool) -> None:
    """Rank 0, which keeps the store, is stopped in the middle."""
    speak_over_tcp(rank)
    if not one_node:
        alone()
    if rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    load(path, device, TIMEOUT_S, nap_s=1)


@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=needs_compiler)])
def test_a_store_that_does_not_answer_any_more_is_not_waited_for(rank_model: Path, device: str, one_node: bool) -> None:
    assert_named(0, run_ranks(3, stop_the_keeper, rank_model, device, one_node, hanging=0))


def lock_and_stop(rank: int, path: Path) -> None:
    """One rank is stopped while it has the file of the store locked, as it has for each of its calls."""
    dist.barrier()  # torch itself is done with the store
    if rank == LOST:
        store = _get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        with open(store.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.kill(os.getpid(), signal.SIGSTOP)
    load(path, "cpu", TIMEOUT_S)


def test_a_file_that_a_rank_has_locked_for_ever_is_not_waited_for(rank_model: Path) -> None:
    outcomes = run_ranks(3, lock_and_stop, rank_model, hanging=LOST)
    errors = [error_of(outcome) for rank, outcome in enumerate(outcomes) if rank != LOST]
    assert [(type(error), getattr(error, "rank", None)) for error in errors] == [(PeerError, None)] * 2, errors


def connect_late(rank: int, path: Path, device: str, nth: int) -> int:
    """One rank takes longer for its connections than a rank may be silent."""
    alone()
    speak_over_tcp(rank)
    make, made = dist.ProcessGroupGloo, [0]

    def connect(*arguments: Any) -> Any:
        made[0] += 1
        if made[0] == nth and rank == LOST:
            threading.Event().wait(1.5 * TIMEOUT_S)
        return make(*arguments)

    dist.ProcessGroupGloo = connect  # type: ignore[misc]
    return load(path, device, TIMEOUT_S)


@pytest.mark.parametrize(("device", "nth"), DEVICES)
def test_a_rank_that_is_slow_to_connect_is_waited_for(rank_model: Path, device: str, nth: int) -> None:
    assert values(run_ranks(3, connect_late, rank_model, device, nth)) == [len(headrace.load(rank_model))] * 3


def wait_for_a_late_one(rank: int, path: Path, device: str, log: str) -> str:
    """What a rank's process says while it waits for another one, which is late at the start and slow afterwards."""
    alone()
    speak_over_tcp(rank)
    os.dup2(os.open(f"{log}-{rank}", os.O_CREAT | os.O_WRONLY, 0o600), 2)
    if rank == LOST:
        threading.Event().wait(0.5)
    load(path, device, TIMEOUT_S, nap_s=1.5 * TIMEOUT_S if rank == LOST else 0)
    return Path(f"{log}-{rank}").read_text()


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=needs_compiler)])
def test_ranks_that_wait_for_another_do_so_in_silence(rank_model: Path, tmp_path: Path, device: str) -> None:
    assert values(run_ranks(3, wait_for_a_late_one, rank_model, device, str(tmp_path / "said"))) == [""] * 3
