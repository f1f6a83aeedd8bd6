"""What is left of a group after loads over it: nothing keeps it, and torch.distributed can be started anew.

A group that somebody still holds when the interpreter ends is taken down by Gloo's threads then, which may end the process with
SIGABRT (torch 2.13; 5 of 60 runs of four ranks, 2026-11-30).
"""

from __future__ import annotations

import gc
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoints import bytes_of
from ranks import alone, run_ranks, values
from simulated_gpu import needs_compiler, simulated_gpu

import headrace

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rank_server")]


def load(path: Path, device: str, named: bool) -> dict[str, bytes]:
    """All tensors, of a load over the default group."""
    arguments: dict[str, Any] = {"group": dist.group.WORLD if named else True}
    with ExitStack() as stack:
        if device == "gpu":
            arguments["device"] = stack.enter_context(simulated_gpu("random")).device
        with headrace.stream(path, **arguments) as tensors:
            return {name: bytes_of(tensor) for name, tensor in tensors}


def load_and_end(
    rank: int, path: Path, device: str, named: bool, one_node: bool, again: str
) -> tuple[bool, list[dict[str, bytes]]]:
    """Load, end the group, start another one with the ranks the other way round, and load over that."""
    if not one_node:
        alone()
    gc.disable()  # what only the collector frees would be there when the interpreter ends
    found = [load(path, device, named)]
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    is_gone = group() is None
    dist.init_process_group("gloo", init_method=Path(again).as_uri(), rank=1 - rank, world_size=2)
    found.append(load(path, device, named))
    return is_gone, found


@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
@pytest.mark.parametrize("named", [True, False], ids=["a group", "the default group"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=needs_compiler)])
def test_nothing_keeps_a_group_that_was_loaded_over(
    rank_model: Path, tmp_path: Path, device: str, named: bool, one_node: bool
) -> None:
    whole = {name: bytes_of(tensor) for name, tensor in headrace.load(rank_model).items()}
    found = values(run_ranks(2, load_and_end, rank_model, device, named, one_node, str(tmp_path / "again")))
    assert found == [(True, [whole, whole])] * 2
