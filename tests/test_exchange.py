"""Ranks that load together: each byte is read once, every rank has every tensor, and no rank waits for one that has gone."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import bytes_of
from hypothesis import given
from hypothesis import strategies as st
from ranks import CASTS, alone, decide, error_of, run_ranks, values, write_model
from simulated_gpu import needs_compiler, simulated_gpu

import headrace
from headrace import OptionError, PeerError, SourceChangedError, SourceError
from headrace._node import Leaving, NodeMemory
from headrace._partition import assign_owners
from headrace.sources.file import FileSource
from headrace.testing import Fault, FaultySource, Raise, touches

KIB, MIB = 1 << 10, 1 << 20
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rank_server")]  # a process of torch's own for each rank


def expected(folder: Path) -> dict[str, bytes]:
    """All tensors' bytes, by a load of one's own."""
    return {name: bytes_of(tensor) for name, tensor in headrace.load(folder).items()}


# ---- what ranks do: importable functions


def load(rank: int, path: Path, one_node: bool, arguments: dict[str, Any]) -> tuple[dict[str, bytes], int, int, int]:
    """Load with all ranks; the bytes, and what was read, received and sent."""
    if not one_node:
        alone()
    with headrace.stream(path, group=True, **arguments) as tensors:
        found = {name: bytes_of(tensor) for name, tensor in tensors}
    stats = tensors.stats
    assert (stats.rank, stats.ranks) == (rank, dist.get_world_size())
    assert stats.partition.startswith(arguments["partition"])
    assert ("shared memory" if one_node else "Gloo") in stats.exchange
    assert stats.exchange in str(tensors.plan)
    return found, stats.read_nbytes, stats.from_peers_nbytes, stats.to_peers_nbytes


@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
@pytest.mark.parametrize(("world", "policy"), [(2, "chunks"), (3, "spans"), (4, "chunks"), (4, "files")])
def test_every_rank_has_every_tensor_and_each_byte_is_read_once(
    rank_model: Path, world: int, policy: str, one_node: bool
) -> None:
    found = values(run_ranks(world, load, rank_model, one_node, {"partition": policy}))
    whole, plan = expected(rank_model), headrace.plan(rank_model)
    for tensors, read, received, _ in found:
        assert tensors == whole
        assert read + received == plan.read_nbytes
    assert sum(read for _, read, _, _ in found) == plan.read_nbytes
    assert sum(sent for _, _, _, sent in found) == sum(received for _, _, received, _ in found)


def load_here(_rank: int, path: Path) -> list[int]:
    """`load` with a group keeps the order of the files, and a world of one is a load of one's own."""
    ranks = [dist.new_group([other]) for other in range(dist.get_world_size())]
    mine = headrace.load(path, group=ranks[dist.get_rank()])
    together = headrace.load(path, group=True, dtype="bfloat16")
    return [list(mine) == list(headrace.load(path)), list(together) == list(mine)]


def test_load_keeps_the_order_and_a_world_of_one_is_a_plain_load(rank_model: Path) -> None:
    assert values(run_ranks(2, load_here, rank_model)) == [[True, True]] * 2


def cached_slices(rank: int, columns: bool) -> dict[str, Any]:
    """Rows of a tensor, half of them each; columns of another one."""
    slices: dict[str, Any] = {"1.layer.2.weight": slice(129 * rank, 129 * rank + 129)}
    if columns:
        slices["0.layer.3.weight"] = (slice(None), slice(500 * rank, 500 * rank + 500))
    return slices


def load_cached(
    rank: int, path: Path, uncached_on: int | None, columns: bool, arguments: dict[str, Any]
) -> tuple[dict[str, bytes], Any]:
    """Without a partition: ranks decide whether to read for each other. One of them may not know that the files are cached."""
    decide()
    if rank == uncached_on:
        FileSource.is_in_memory = lambda _: False  # type: ignore[method-assign]
    with headrace.stream(path, group=True, slices=cached_slices(rank, columns), **arguments) as tensors:
        found = {name: bytes_of(tensor) for name, tensor in tensors}
    assert tensors.stats.exchange in str(tensors.plan)
    return found, tensors.stats


@pytest.mark.parametrize(
    ("uncached_on", "columns", "arguments", "alone"),
    [
        (None, False, {}, True),
        (None, True, {}, False),
        (1, False, {}, False),
        (None, False, {"partition": "chunks"}, False),
        (None, False, {"verify": True}, False),
    ],
    ids=str,
)
def test_ranks_read_for_each_other_only_where_that_saves_reading(
    tmp_path: Path, uncached_on: int | None, columns: bool, arguments: dict[str, Any], alone: bool
) -> None:
    write_model(tmp_path)
    if "verify" in arguments:
        headrace.verify(tmp_path, write=True)
    found = values(run_ranks(2, load_cached, tmp_path, uncached_on, columns, arguments))
    whole = headrace.load(tmp_path)
    for rank, (tensors, stats) in enumerate(found):
        slices = cached_slices(rank, columns)
        assert tensors == {name: bytes_of(tensor[slices.get(name, ...)]) for name, tensor in whole.items()}
        assert (stats.rank, stats.ranks) == (rank, 2)
        assert stats.exchange.startswith("none") is alone
        assert (stats.from_peers_nbytes == 0) is alone


def differ_alone(rank: int, path: Path) -> None:
    """Ranks that ask for different things."""
    decide()
    headrace.load(path, group=True, names="0.*" if rank else None)


def test_ranks_that_read_for_themselves_still_agree_on_what_they_load(rank_model: Path) -> None:
    for outcome in run_ranks(2, differ_alone, rank_model):
        assert isinstance(error_of(outcome), PeerError)


def load_in_subgroup(rank: int, path: Path) -> dict[str, bytes] | None:
    """Ranks 1 and 3 load, the others do something else, and the caller's own messages go on meanwhile."""
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    found = {}
    for name, tensor in headrace.stream(path, group=group):
        if len(found) % 7 == 0:
            count = torch.ones(1)
            dist.all_reduce(count, group=group)
            assert count.item() == 2
        found[name] = bytes_of(tensor)
    return found


def test_any_ranks_can_load_together_and_talk_of_other_things_meanwhile(rank_model: Path) -> None:
    whole = expected(rank_model)
    assert values(run_ranks(4, load_in_subgroup, rank_model)) == [None, whole, None, whole]


def load_on_node(rank: int, path: Path) -> tuple[dict[str, bytes], int]:
    """Ranks 0 and 2 are on one machine, 1 and 3 on another, as far as they can tell."""
    import headrace._peers

    headrace._peers._node = lambda: (f"machine {rank % 2}", "")
    with headrace.stream(path, group="node") as tensors:
        found = {name: bytes_of(tensor) for name, tensor in tensors}
    assert (tensors.stats.rank, tensors.stats.ranks) == (rank // 2, 2)
    return found, tensors.stats.read_nbytes


def test_each_node_can_load_for_itself(rank_model: Path) -> None:
    found = values(run_ranks(4, load_on_node, rank_model))
    whole = expected(rank_model)
    assert [tensors for tensors, _ in found] == [whole] * 4
    nbytes = headrace.plan(rank_model).read_nbytes
    assert [found[0][1] + found[2][1], found[1][1] + found[3][1]] == [nbytes, nbytes]


def load_into(_rank: int, path: Path) -> bool:
    """Fill tensors that are there: contiguous, strided and small ones."""
    whole = headrace.load(path)
    given = {
        name: torch.zeros_like(tensor) if tensor.dim() < 2 else torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).t()
        for name, tensor in whole.items()
    }
    headrace.load(path, group=True, into=given)
    return all(bytes_of(given[name]) == bytes_of(tensor) for name, tensor in whole.items())


def test_tensors_that_are_given_are_filled_on_every_rank(rank_model: Path) -> None:
    assert values(run_ranks(2, load_into, rank_model)) == [True, True]


def load_slices(rank: int, path: Path) -> tuple[dict[str, bytes], int]:
    """Each rank's rows of the weights, and everything else whole."""
    with headrace.open(path) as checkpoint:
        slices = headrace.tensor_parallel(checkpoint, rank, 2, {"*.weight": "colwise"})
        with headrace.stream(checkpoint, group=True, slices=slices, dtype=CASTS) as tensors:
            return {name: bytes_of(tensor) for name, tensor in tensors}, tensors.stats.read_nbytes


def test_slices_are_read_by_each_rank_and_the_rest_by_one(rank_model: Path) -> None:
    found = values(run_ranks(2, load_slices, rank_model))
    whole = headrace.load(rank_model, dtype=CASTS)
    for name, tensor in whole.items():
        parts = tensor.chunk(2) if name.endswith("weight") else [tensor, tensor]
        assert [tensors[name] for tensors, _ in found] == [bytes_of(part) for part in parts], name
    assert sum(read for _, read in found) == headrace.plan(rank_model).read_nbytes


CUTS: dict[str, list[Any]] = {  # by rank, of 3
    "columns": [(slice(None), slice(0, 100)), (slice(None), slice(100, 101)), (slice(None), slice(101, None))],
    "parts": [(slice(None), headrace.Parts([(i, i + 100), (500 + i, 600 + i)])) for i in (0, 100, 200)],
    "whole, rows, none": [..., slice(3, 70), slice(0, 0)],
    "rows that overlap": [slice(0, 200), slice(100, 250), slice(0, 3)],
}


def load_cuts(
    rank: int, path: Path, one_node: bool, cut: str, arguments: dict[str, Any]
) -> tuple[dict[str, bytes], int, int, int]:
    """Slices that overlap in the file; tensors that are given for some of them. With what was read, received and sent."""
    if not one_node:
        alone()
    names = [f"{shard}.layer.{i}.weight" for shard in range(2) for i in range(8)]
    index = CUTS[cut][rank]
    slices = {name: index for name in names if index is not ...}
    given = {}
    if index is not ...:
        like = headrace.load(path, names=names[:1], slices={names[0]: index})[names[0]]
        given = {names[0]: torch.zeros_like(like, dtype=torch.float32)}
    with headrace.stream(path, group=True, slices=slices, into=given, **arguments) as tensors:
        found = dict(tensors)
    assert all(found[name] is tensor for name, tensor in given.items())
    stats = tensors.stats
    return (
        {name: bytes_of(tensor) for name, tensor in found.items()},
        stats.read_nbytes,
        stats.from_peers_nbytes,
        stats.to_peers_nbytes,
    )


def slices_of(name: str, index: Any) -> dict[str, Any]:
    """The slices for one tensor."""
    return {name: index} if name.endswith(".weight") and index is not ... else {}


@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
@pytest.mark.parametrize("cut", CUTS)
def test_slices_that_overlap_in_the_file_are_read_once(rank_model: Path, one_node: bool, cut: str) -> None:
    for policy in ("chunks", "files") if cut == "columns" else ("chunks",):
        found = values(
            run_ranks(3, load_cuts, rank_model, one_node, cut, {"dtype": CASTS, "partition": policy, "memory_limit": 0})
        )
        whole = headrace.load(rank_model, dtype=CASTS)
        for rank, (tensors, _, received, _) in enumerate(found):
            taken = {name: headrace.load(rank_model, names=[name], slices=slices_of(name, CUTS[cut][rank])) for name in whole}
            own_nbytes = sum((taken[name][name] if name.endswith(".weight") else whole[name]).nbytes for name in whole)
            assert received <= own_nbytes
            index = CUTS[cut][rank]
            for name, tensor in whole.items():
                expected = tensor
                if name.endswith(".weight") and index is not ...:
                    expected = headrace.load(rank_model, names=[name], slices={name: index}, dtype=CASTS)[name]
                    expected = expected.float() if name == "0.layer.0.weight" else expected
                assert tensors[name] == bytes_of(expected), (rank, name)
        assert sum(sent for _, _, _, sent in found) == sum(received for _, _, received, _ in found)
        read = sum(read for _, read, _, _ in found)
        assert read <= 1.02 * headrace.plan(rank_model).read_nbytes


def keep_within_limit(_rank: int, path: Path) -> bool:
    """A caller that keeps everything, with little memory to read ahead."""
    with headrace.stream(path, group=True, memory_limit=0) as tensors:
        kept = {name: (tensor, bytes_of(tensor)) for name, tensor in tensors}
    return all(bytes_of(tensor) == before for tensor, before in kept.values())


def test_little_memory_and_callers_that_keep_everything_do_not_stop_each_other(rank_model: Path) -> None:
    assert values(run_ranks(3, keep_within_limit, rank_model)) == [True] * 3


# ---- ranks that fail, stop, disagree or disappear


def stop_early(rank: int, path: Path, one_node: bool) -> int:
    """Rank 1 takes three tensors."""
    if not one_node:
        alone()
    taken = 0
    with headrace.stream(path, group=True, memory_limit=0) as tensors:
        for _ in tensors:
            taken += 1
            if rank == 1 and taken == 3:
                break
    return taken


@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
def test_a_rank_that_stops_early_is_named_to_the_others(rank_model: Path, one_node: bool) -> None:
    outcomes = run_ranks(3, stop_early, rank_model, one_node)
    assert outcomes[1] is not None
    assert outcomes[1].value == 3
    for rank in (0, 2):
        error = error_of(outcomes[rank])
        assert isinstance(error, PeerError)
        assert error.rank == 1


def stop_early_with_columns(rank: int, path: Path) -> None:
    """Rank 1 goes while blocks are under way."""
    with headrace.open(path) as checkpoint:
        slices = headrace.tensor_parallel(checkpoint, rank, 3, {"*.weight": "rowwise"})
        with headrace.stream(checkpoint, group=True, slices=slices, memory_limit=0) as tensors:
            for count, _ in enumerate(tensors):
                if rank == 1 and count == 3:
                    break


def test_a_rank_that_stops_early_is_named_where_blocks_are_read(rank_model: Path) -> None:
    outcomes = run_ranks(3, stop_early_with_columns, rank_model)
    assert [error_of(outcomes[rank]).rank for rank in (0, 2)] == [1, 1]  # type: ignore[attr-defined]


def fail_reading(rank: int, path: Path, one_node: bool) -> None:
    """Rank 2's disk breaks."""
    if not one_node:
        alone()
    files = sorted(path.glob("*.safetensors"))
    sources: list[Any] = [headrace.open(file).sources[0] for file in files]
    if rank == 2:
        sources[1] = FaultySource(sources[1], [Fault(touches(2 * MIB, 3 * MIB), Raise(SourceError))])
    for _ in headrace.stream(sources, group=True):
        pass


@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
def test_a_rank_that_cannot_read_is_named_to_the_others_with_its_reason(rank_model: Path, one_node: bool) -> None:
    outcomes = run_ranks(3, fail_reading, rank_model, one_node)
    assert isinstance(error_of(outcomes[2]), SourceError)
    for rank in (0, 1):
        error = error_of(outcomes[rank])
        assert isinstance(error, PeerError)
        assert error.rank == 2
        assert type(error_of(outcomes[2])).__name__ in str(error)


def fail_slowly(rank: int, path: Path) -> None:
    """Rank 2's disk breaks, and what it says of that is held up until its threads have ended, if they can."""
    leave, close, closed = NodeMemory.leave, NodeMemory.close, threading.Event()

    def held_up(node: NodeMemory, leaving: Leaving) -> None:
        closed.wait(1.0)
        leave(node, leaving)

    def watched(node: NodeMemory) -> None:
        close(node)
        closed.set()

    if rank == 2:
        NodeMemory.leave, NodeMemory.close = held_up, watched  # type: ignore[method-assign]
    fail_reading(rank, path, True)


class _Changing(FaultySource):
    """A source that turns out to have changed once something was read."""

    has_changed = False

    def check_unchanged(self) -> None:
        if self.has_changed:
            raise SourceChangedError("it has changed", url=self.url)


def find_changed(rank: int, path: Path, one_node: bool, on_device: bool) -> None:
    """Rank 1 finds that the first file has changed, when a tensor of it is complete that rank 0 has read."""
    if not one_node:
        alone()
    sources: list[Any] = [headrace.open(file).sources[0] for file in sorted(path.glob("*.safetensors"))]
    if rank == 1:
        sources[0] = _Changing(sources[0], [])
    with simulated_gpu("random") if on_device else nullcontext() as gpu:
        device: Any = gpu.device if gpu is not None else "cpu"
        with headrace.stream(sources, group=True, device=device, partition="files", memory_limit=0, concurrency=1) as tensors:
            if rank == 1:
                sources[0].has_changed = True
            for _, tensor in tensors:
                del tensor


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=needs_compiler)], ids=["host", "device"])
@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
def test_a_rank_that_fails_when_a_tensor_is_complete_is_the_one_that_is_named(
    rank_model: Path, one_node: bool, on_device: bool
) -> None:
    first, second = run_ranks(2, find_changed, rank_model, one_node, on_device, timeout_s=30)
    assert isinstance(error_of(second), SourceChangedError)
    error = error_of(first)
    assert isinstance(error, PeerError)
    assert (error.rank, "it has changed" in str(error)) == (1, True)


def slice_wrongly(rank: int, path: Path, kind: str) -> None:
    """One rank takes a slice that is none."""
    wrong: Any = {"floats": slice(0.0, 2.0), "texts": slice("a", "b"), "function": lambda: 0, "too many": (0, 0, 0)}[kind]
    headrace.load(path, group=True, slices={"0.layer.3.weight": slice(2, 4) if rank else wrong})


@pytest.mark.parametrize("kind", ["floats", "texts", "function", "too many"])
def test_a_slice_that_is_none_is_refused_where_it_was_given_and_the_others_hear_of_it(rank_model: Path, kind: str) -> None:
    first, second = run_ranks(2, slice_wrongly, rank_model, kind, timeout_s=30)
    assert isinstance(error_of(first), OptionError)
    error = error_of(second)
    assert isinstance(error, PeerError)
    assert (error.rank, "OptionError" in str(error)) == (0, True)


def test_a_reason_is_given_before_the_memory_that_it_is_written_to_is_let_go(rank_model: Path) -> None:
    outcomes = run_ranks(3, fail_slowly, rank_model)
    assert [type(error_of(outcome)) for outcome in outcomes] == [PeerError, PeerError, SourceError]
    assert all("SourceError" in str(error_of(outcome)) for outcome in outcomes[:2])


def die(rank: int, path: Path, one_node: bool) -> None:
    """Rank 1 is killed in the middle."""
    if not one_node:
        alone()
    for count, _ in enumerate(headrace.stream(path, group=True, memory_limit=0)):
        if rank == 1 and count == 5:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
def test_a_rank_that_is_killed_is_named_to_the_others(rank_model: Path, one_node: bool) -> None:
    outcomes = run_ranks(3, die, rank_model, one_node)
    assert outcomes[1] is None
    for rank in (0, 2):
        error = error_of(outcomes[rank])
        assert isinstance(error, PeerError)
        assert error.rank == 1


def hang(rank: int, path: Path, one_node: bool) -> None:
    """Rank 2 is stopped, and stays so until the test ends it."""
    if not one_node:
        alone()
    for count, _ in enumerate(headrace.stream(path, group=True, memory_limit=0, peer_timeout_s=5)):
        if rank == 2 and count == 5:
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
def test_a_rank_that_hangs_is_named_after_the_timeout(rank_model: Path, one_node: bool) -> None:
    outcomes = run_ranks(3, hang, rank_model, one_node, hanging=2)
    for rank in (0, 1):
        error = error_of(outcomes[rank])
        assert isinstance(error, PeerError)
        assert error.rank == 2


def dawdle(rank: int, path: Path, one_node: bool) -> dict[str, bytes]:
    """Rank 1 does something else for longer than a rank may give no sign of life."""
    if not one_node:
        alone()
    found: dict[str, bytes] = {}
    for name, tensor in headrace.stream(path, group=True, memory_limit=0, peer_timeout_s=1):
        found[name] = bytes_of(tensor)
        if rank == 1 and len(found) in (5, 20):
            select.select([], [], [], 2.5)
    return found


@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
def test_a_rank_that_is_slow_is_waited_for_as_long_as_it_lives(rank_model: Path, one_node: bool) -> None:
    assert values(run_ranks(3, dawdle, rank_model, one_node)) == [expected(rank_model)] * 3


def ask_for_other_things(rank: int, path: Path) -> None:
    """Rank 0 wants other tensors than rank 1."""
    headrace.load(path, group=True, names="*.weight" if rank else None)


def test_ranks_that_ask_for_different_things_hear_so_before_the_first_byte(rank_model: Path) -> None:
    for outcome in run_ranks(2, ask_for_other_things, rank_model):
        error = error_of(outcome)
        assert isinstance(error, PeerError)
        assert "another plan" in str(error)


def open_nothing(rank: int, path: Path) -> None:
    """Rank 1 has no such folder."""
    headrace.load(path if rank != 1 else path / "missing", group=True)


def test_a_rank_that_cannot_begin_is_named_to_the_others(rank_model: Path) -> None:
    outcomes = run_ranks(3, open_nothing, rank_model)
    assert isinstance(error_of(outcomes[1]), FileNotFoundError)
    for rank in (0, 2):
        error = error_of(outcomes[rank])
        assert isinstance(error, PeerError)
        assert error.rank == 1
        assert "SourceNotFoundError" in str(error)


def load_again(_rank: int, path: Path) -> list[int]:
    """Loads that ended in every way leave nothing, and the next one works."""
    counts = []
    for turn in range(4):
        try:
            with headrace.stream(path, group=True) as tensors:
                for count, _ in enumerate(tensors):
                    if turn % 2 and count == 2:
                        raise KeyError("the caller's own")
        except KeyError:
            pass
        except PeerError:
            pass
        dist.barrier()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert len(headrace.load(path, group=True)) == len(headrace.load(path))
    return counts


def test_loads_that_failed_leave_no_descriptors_and_the_next_one_works(rank_model: Path) -> None:
    for counts in values(run_ranks(2, load_again, rank_model)):
        assert max(counts[1:]) <= counts[0] + 2


def test_without_a_process_group_a_group_is_refused(rank_model: Path) -> None:
    with pytest.raises(OptionError, match="init_process_group"):
        headrace.stream(rank_model, group=True)


# ---- who reads what


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1000)), max_size=40), st.integers(1, 6))
def test_one_key_has_one_owner_and_no_rank_has_much_more_than_another(items: list[tuple[int, int]], world: int) -> None:
    keys, sizes = [key for key, _ in items], [size for _, size in items]
    owners = assign_owners(keys, sizes, world)
    assert len(owners) == len(keys)
    assert all(len({owner for other, owner in zip(keys, owners, strict=True) if other == key}) == 1 for key in keys)
    loads, totals = Counter[int](), Counter[int]()
    for key, size, owner in zip(keys, sizes, owners, strict=True):
        loads[owner] += size
        totals[key] += size
    assert max(loads.values(), default=0) - min((loads[rank] for rank in range(world)), default=0) <= max(
        totals.values(), default=0
    )
