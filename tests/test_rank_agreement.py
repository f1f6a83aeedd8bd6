"""Ranks that are about to load different things, or that load several things at once: told apart by whatever they ask for."""

from __future__ import annotations

import threading
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoints import bytes_of
from ranks import alone, run_ranks, values
from simulated_gpu import needs_compiler, simulated_gpu

import headrace
from headrace import HeadraceError, PeerError

pytestmark = [pytest.mark.slow, needs_compiler, pytest.mark.usefixtures("rank_server")]
TIMEOUT_S = 10.0


def requests(path: Path, gpu: Any) -> dict[str, dict[str, Any]]:
    """Loads that differ in one thing or another."""
    return {
        "host": {},
        "shared": {"device": "shared-cpu"},
        "device": {"device": gpu},
        "device, in place": {"device": gpu, "in_place": "auto"},
        "two places": {"device": {"*.table": "shared-cpu", "*": "cpu"}},
        "two other places": {"device": {"*.table": "cpu", "*": gpu}},
        "a function": {"device": lambda name: "shared-cpu" if name.endswith("table") else None},
        "fewer tensors": {"names": "*.weight"},
        "another type": {"dtype": {"0.layer.0.norm": "bfloat16"}},
        "another policy": {"partition": "files"},
        "fewer files": {"url": path / "model-1.safetensors"},
        "no such file": {"url": path / "model-7.safetensors"},
        "no such tensor": {"names": ["nothing"]},
    }


PAIRS = list(combinations(requests(Path(), None), 2))
NO_DIFFERENCE = ("device", "device, in place")  # both exchange, then, and say so


def ask_for_other_things(rank: int, path: Path) -> tuple[list[tuple[str, int | None]], bool]:
    """Every pair of requests, one after another; then the same one on both ranks."""
    found: list[tuple[str, int | None]] = []
    with simulated_gpu("random") as gpu:
        for pair in PAIRS:
            arguments = {"url": path, **requests(path, gpu.device)[pair[rank]]}
            try:
                headrace.load(**arguments, group=True, peer_timeout_s=TIMEOUT_S)
                found.append(("nothing", None))
            except PeerError as exc:
                found.append(("PeerError", exc.rank))
            except HeadraceError as exc:
                found.append((type(exc).__name__, rank))
    together = headrace.load(path, group=True, peer_timeout_s=TIMEOUT_S)
    whole = headrace.load(path)
    return found, all(bytes_of(together[name]) == bytes_of(tensor) for name, tensor in whole.items())


def test_ranks_that_ask_for_different_things_name_each_other_and_can_load_afterwards(rank_model: Path) -> None:
    found = values(run_ranks(2, ask_for_other_things, rank_model))
    assert [right for _, right in found] == [True, True]
    for number, pair in enumerate(PAIRS):
        for rank, (outcomes, _) in enumerate(found):
            kind, blamed = outcomes[number]
            if pair[rank].startswith("no such"):
                assert kind != "nothing", pair
            elif pair != NO_DIFFERENCE:
                assert (kind, blamed) == ("PeerError", 1 - rank), (pair, rank)


def load_at_once(_rank: int, path: Path, one_node: bool, to_device: bool) -> list[bool]:
    """Two loads of the same ranks at the same time, in two threads, each over a group of its own."""
    if not one_node:
        alone()
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
    whole = {name: bytes_of(tensor) for name, tensor in headrace.load(path).items()}
    found: list[Any] = [None, None]
    with simulated_gpu("random") as gpu:

        def load(number: int) -> None:
            device: Any = gpu.device if to_device else "cpu"
            try:
                mine = headrace.load(path, group=groups[number], device=device, peer_timeout_s=TIMEOUT_S)
                found[number] = {name: bytes_of(tensor) for name, tensor in mine.items()} == whole
            except HeadraceError as exc:
                found[number] = str(exc)

        threads = [threading.Thread(target=load, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found


@pytest.mark.parametrize("to_device", [False, True], ids=["to the host", "to devices"])
def test_loads_over_two_groups_of_the_same_ranks_can_be_under_way_at_once(rank_model: Path, to_device: bool) -> None:
    assert values(run_ranks(3, load_at_once, rank_model, True, to_device)) == [[True, True]] * 3


def test_loads_over_two_groups_of_several_nodes_can_be_under_way_at_once(rank_model: Path) -> None:
    assert values(run_ranks(2, load_at_once, rank_model, False, False)) == [[True, True]] * 2


def take_turns(_rank: int, path: Path, one_node: bool, to_device: bool) -> list[Any]:
    """Two streams of one group are open at once, and the caller takes a tensor of each in turn."""
    if not one_node:
        alone()
    whole = {name: bytes_of(tensor) for name, tensor in headrace.load(path).items()}
    found: list[dict[str, bytes]] = [{}, {}]
    with simulated_gpu("random") as gpu:
        device: Any = gpu.device if to_device else "cpu"
        streams = [headrace.stream(path, group=True, device=device, peer_timeout_s=TIMEOUT_S) for _ in range(2)]
        for pairs in zip(*streams, strict=True):
            for number, (name, tensor) in enumerate(pairs):
                found[number][name] = bytes_of(tensor)
        del pairs, tensor
    return [tensors == whole for tensors in found]


@pytest.mark.parametrize("to_device", [False, True], ids=["to the host", "to devices"])
@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
def test_two_streams_of_one_group_can_be_open_at_once(rank_model: Path, one_node: bool, to_device: bool) -> None:
    assert values(run_ranks(2, take_turns, rank_model, one_node, to_device)) == [[True, True]] * 2
