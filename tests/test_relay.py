"""Ranks that load to devices together: each byte is read by one rank, and every rank's device has every tensor."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import bytes_of, mixed_contents, random_entry, write
from ranks import CASTS, alone, error_of, run_ranks, values
from simulated_gpu import needs_compiler, simulated_gpu

import headrace
from headrace import OptionError, PeerError, SourceError
from headrace._wire import backend_of
from headrace.devices.cuda import CudaDevice
from headrace.testing import Fault, FaultySource, Raise, touches

KIB, MIB = 1 << 10, 1 << 20
pytestmark = [pytest.mark.slow, needs_compiler, pytest.mark.usefixtures("rank_server")]


NODES = pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])


def load(
    rank: int, path: Path, one_node: bool, arguments: dict[str, Any], mode: str = "random"
) -> tuple[dict[str, bytes], int, int, int]:
    """Load to a device with all ranks; the bytes, and what was read, received and sent to the device."""
    if not one_node:
        alone()
    with simulated_gpu(mode) as gpu:
        with headrace.stream(path, device=gpu.device, group=True, **arguments) as tensors:
            kept = dict(tensors)
        found = {name: bytes_of(tensor) for name, tensor in kept.items()}
        del kept
        stats = tensors.stats
        assert (stats.rank, stats.ranks) == (rank, dist.get_world_size())
        return found, stats.read_nbytes, stats.from_peers_nbytes, stats.sent_nbytes


@pytest.mark.parametrize(
    ("world", "arguments"),
    [(2, {}), (4, {"memory_limit": 0}), (3, {"partition": "spans", "concurrency": 2}), (2, {"partition": "files"})],
    ids=str,
)
@NODES
def test_every_device_has_every_tensor_and_each_byte_is_read_once(
    rank_model: Path, world: int, arguments: dict[str, Any], one_node: bool
) -> None:
    found = values(run_ranks(world, load, rank_model, one_node, arguments))
    whole = {name: bytes_of(tensor) for name, tensor in headrace.load(rank_model).items()}
    nbytes = headrace.plan(rank_model, device="cuda:0", **arguments).read_nbytes
    for tensors, read, received, sent in found:
        assert tensors == whole
        assert read + received == nbytes
        assert sent == nbytes if one_node else sent == read  # from its device to the others
    assert sum(read for _, read, _, _ in found) == nbytes


@pytest.mark.parametrize("world", [2, 3])
@NODES
def test_shared_slots_are_filled_again_only_when_all_copies_out_of_them_are_done(
    rank_model: Path, world: int, one_node: bool
) -> None:
    """Devices carry out nothing before somebody waits for it."""
    arguments = {"memory_limit": 0, "concurrency": 1}
    found = values(run_ranks(world, load, rank_model, one_node, arguments, "manual"))
    whole = {name: bytes_of(tensor) for name, tensor in headrace.load(rank_model).items()}
    assert all(tensors == whole for tensors, _, _, _ in found)


def load_counted(rank: int, path: Path, refused_on: int | None, arguments: dict[str, Any]) -> tuple[dict[str, bytes], Any]:
    """Load to a device; on one rank the driver may refuse to page-lock what is shared."""
    with simulated_gpu("random") as gpu:
        if rank == refused_on:
            gpu.runtime.fail("cudaHostRegister", code=2)
        with headrace.stream(path, device=gpu.device, group=True, **arguments) as tensors:
            kept = dict(tensors)
        found = {name: bytes_of(tensor) for name, tensor in kept.items()}
        del kept
        return found, tensors.stats


@pytest.mark.parametrize(("refused_on", "pin"), [(None, "auto"), (1, "auto"), (None, "off")])
def test_copies_come_straight_out_of_the_shared_rings_where_these_can_be_page_locked(
    rank_model: Path, refused_on: int | None, pin: str
) -> None:
    found = values(run_ranks(3, load_counted, rank_model, refused_on, {"pin": pin}))
    whole = {name: bytes_of(tensor) for name, tensor in headrace.load(rank_model).items()}
    for rank, (tensors, stats) in enumerate(found):
        assert tensors == whole
        assert ("through each rank's own ring" in stats.exchange) == (rank == refused_on)
        assert stats.pinned is (pin == "auto")
        assert ("of the node's ranks" in stats.pinned_how) == (pin == "auto" and rank != refused_on)


CUTS: dict[str, list[Any]] = {  # by rank, of 3
    "columns": [(slice(None), slice(0, 100)), (slice(None), slice(100, 101)), (slice(None), slice(101, None))],
    "parts": [(slice(None), headrace.Parts([(i, i + 100), (500 + i, 600 + i)])) for i in (0, 100, 200)],
    "whole, rows, none": [..., slice(3, 70), slice(0, 0)],
}


def load_cuts(rank: int, path: Path, one_node: bool, cut: str, arguments: dict[str, Any]) -> tuple[dict[str, bytes], Any]:
    """Slices that overlap in the file; a tensor of the caller's for one of them."""
    if not one_node:
        alone()
    names = [f"{shard}.layer.{i}.weight" for shard in range(2) for i in range(8)]
    index = CUTS[cut][rank]
    slices = {name: index for name in names if index is not ...}
    with simulated_gpu("random") as gpu:
        given = {}
        if index is not ...:
            like = headrace.load(path, names=names[:1], slices={names[0]: index})[names[0]]
            given = {names[0]: gpu.device.tensor(torch.zeros_like(like))}
        with headrace.stream(path, device=gpu.device, group=True, slices=slices, into=given, **arguments) as tensors:
            kept = dict(tensors)
        assert all(kept[name] is tensor for name, tensor in given.items())
        found = {name: bytes_of(tensor) for name, tensor in kept.items()}
        stats = tensors.stats
        given.clear()
        del kept, tensors  # the stream knows the tensors that it filled
        return found, stats


@pytest.mark.parametrize("arguments", [{}, {"memory_limit": 0, "cast_at": "host"}], ids=str)
@pytest.mark.parametrize("cut", CUTS)
@NODES
def test_slices_that_overlap_in_the_file_are_read_once(
    rank_model: Path, cut: str, arguments: dict[str, Any], one_node: bool
) -> None:
    found = values(run_ranks(3, load_cuts, rank_model, one_node, cut, {"dtype": CASTS, **arguments}))
    whole = headrace.load(rank_model, dtype=CASTS)
    for rank, (tensors, stats) in enumerate(found):
        index = CUTS[cut][rank]
        own_nbytes = 0
        for name in whole:
            sliced = {name: index} if name.endswith(".weight") and index is not ... else {}
            expected = headrace.load(rank_model, names=[name], slices=sliced, dtype=CASTS)[name]
            assert tensors[name] == bytes_of(expected), (rank, name)
            own_nbytes += headrace.load(rank_model, names=[name], slices=sliced)[name].nbytes
        assert stats.from_peers_nbytes <= own_nbytes
    assert sum(stats.read_nbytes for _, stats in found) <= 1.02 * headrace.plan(rank_model).read_nbytes
    assert sum(stats.to_peers_nbytes for _, stats in found) == sum(stats.from_peers_nbytes for _, stats in found)


def load_held(rank: int, path: Path, held_on: list[int]) -> tuple[dict[str, bytes], Any]:
    """Some ranks, or all, hold the checkpoint in page-locked memory."""
    with simulated_gpu("random") as gpu, ExitStack() as stack:
        source: Any = path
        if rank in held_on:
            source = stack.enter_context(headrace.hold(path, device=gpu.device))
        with headrace.stream(source, device=gpu.device, group=True) as tensors:
            kept = dict(tensors)
        found = {name: bytes_of(tensor) for name, tensor in kept.items()}
        del kept
        return found, tensors.stats


@pytest.mark.parametrize("held_on", [[0, 1], [1]], ids=str)
def test_a_held_checkpoint_is_copied_from_where_all_ranks_hold_it_and_else_exchanged(
    rank_model: Path, held_on: list[int]
) -> None:
    found = values(run_ranks(2, load_held, rank_model, held_on))
    whole = {name: bytes_of(tensor) for name, tensor in headrace.load(rank_model).items()}
    nbytes = headrace.plan(rank_model).read_nbytes
    assert all(tensors == whole for tensors, _ in found)
    moved = [stats.from_peers_nbytes for _, stats in found]
    assert moved == [0, 0] if held_on == [0, 1] else sum(moved) == pytest.approx(nbytes, rel=0.1)


def load_converted(_rank: int, path: Path, one_node: bool, cast_at: Any) -> dict[str, bytes]:
    """Narrower on the host before they are shared, wider on the device; each rank's rows of some."""
    if not one_node:
        alone()
    with simulated_gpu("random") as gpu, headrace.open(path) as checkpoint:
        slices = headrace.tensor_parallel(checkpoint, dist.get_rank(), 2, {"*.weight": "rowwise"})
        kept = headrace.load(checkpoint, device=gpu.device, group=True, dtype=CASTS, slices=slices, cast_at=cast_at)
        found = {name: bytes_of(tensor) for name, tensor in kept.items()}
        del kept
        return found


@pytest.mark.parametrize("cast_at", ["auto", "host", "device"])
@NODES
def test_casts_and_slices_are_those_of_a_load_alone(rank_model: Path, one_node: bool, cast_at: str) -> None:
    found = values(run_ranks(2, load_converted, rank_model, one_node, cast_at))
    whole = headrace.load(rank_model, dtype=CASTS)
    assert all(whole[name].dtype == getattr(torch, dtype) for name, dtype in CASTS.items())
    for rank, tensors in enumerate(found):
        for name, tensor in whole.items():
            part = tensor.chunk(2, dim=1)[rank] if name.endswith("weight") else tensor
            assert tensors[name] == bytes_of(part), name


def load_narrow(rank: int, path: Path, device: str, arguments: dict[str, Any]) -> tuple[dict[str, bytes], Any]:
    """One tensor whole and one in columns, as bfloat16, on as many nodes as ranks."""
    alone()
    slices = {"cut": (slice(None), slice(256 * rank, 256 * (rank + 1)))}
    with ExitStack() as stack:
        target: Any = stack.enter_context(simulated_gpu("random")).device if device == "cuda" else device
        with headrace.stream(path, device=target, group=True, slices=slices, dtype="bfloat16", **arguments) as tensors:
            kept = dict(tensors)
        found = {name: bytes_of(tensor) for name, tensor in kept.items()}
        del kept
        return found, tensors.stats


@pytest.mark.parametrize(("device", "arguments"), [("cpu", {}), ("cuda", {}), ("cuda", {"cast_at": "host"})], ids=str)
def test_what_becomes_narrower_is_converted_before_it_is_sent_to_other_nodes(
    tmp_path: Path, device: str, arguments: dict[str, Any]
) -> None:
    contents = {"whole": random_entry("F32", (512, 512)), "cut": random_entry("F32", (512, 512), seed=1)}
    path = write(tmp_path / "model.safetensors", contents)
    converted = headrace.load(path, dtype="bfloat16")
    found = values(run_ranks(2, load_narrow, path, device, arguments))
    for rank, (tensors, stats) in enumerate(found):
        assert tensors["whole"] == bytes_of(converted["whole"])
        assert tensors["cut"] == bytes_of(converted["cut"][:, 256 * rank : 256 * (rank + 1)])
        assert "several nodes" in stats.exchange
    sent = sum(stats.to_peers_nbytes for _, stats in found)
    assert sent == sum(stats.from_peers_nbytes for _, stats in found) == MIB // 2 + MIB // 4


def end_early(rank: int, path: Path, one_node: bool, how: str) -> int:
    """Rank 1 stops, fails or is killed after a few tensors."""
    if not one_node:
        alone()
    taken = 0
    sources: list[Any] = [headrace.open(file).sources[0] for file in sorted(path.glob("*.safetensors"))]
    if rank == 1 and how == "fails":
        sources[1] = FaultySource(sources[1], [Fault(touches(2 * MIB, 3 * MIB), Raise(SourceError))])
    with simulated_gpu("random") as gpu:
        for _ in headrace.stream(sources, device=gpu.device, group=True, memory_limit=0, concurrency=2):
            taken += 1
            if rank == 1 and taken == 4:
                if how == "stops":
                    break
                if how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
    return taken


@NODES
@pytest.mark.parametrize("how", ["stops", "fails", "dies"])
def test_a_rank_that_ends_early_is_named_to_the_others(rank_model: Path, how: str, one_node: bool) -> None:
    outcomes = run_ranks(3, end_early, rank_model, one_node, how)
    for rank in (0, 2):
        error = error_of(outcomes[rank])
        assert isinstance(error, PeerError), outcomes[rank]
        assert error.rank == 1
    if how == "fails":
        assert isinstance(error_of(outcomes[1]), SourceError)


def stop_idle(rank: int, path: Path, one_node: bool) -> int:
    """Two files, so that rank 2 reads nothing for others; it stops after a few tensors."""
    if not one_node:
        alone()
    taken = 0
    with (
        simulated_gpu("random") as gpu,
        headrace.stream(path, device=gpu.device, group=True, partition="files", memory_limit=0) as tensors,
    ):
        for _ in tensors:
            taken += 1
            if rank == 2 and taken == 4:
                break
    return taken


@NODES
def test_a_rank_that_reads_nothing_for_others_says_so_when_it_stops(rank_model: Path, one_node: bool) -> None:
    outcomes = run_ranks(3, stop_idle, rank_model, one_node, timeout_s=30)
    assert values(outcomes[2:]) == [4]
    for outcome in outcomes[:2]:
        error = error_of(outcome)
        assert isinstance(error, PeerError)
        assert (error.rank, "stopped before the end" in str(error)) == (2, True), error


def load_in_place(rank: int, path: Path, refused_on: int | None) -> tuple[dict[str, bytes], int, list[str]]:
    """Load from tmpfs; on one rank the driver may refuse to page-lock the file."""
    with simulated_gpu("random") as gpu:
        if rank == refused_on:
            gpu.runtime.fail("cudaHostRegister", code=2)
        with headrace.stream(path, device=gpu.device, group=True, in_place="auto") as tensors:
            kept = dict(tensors)
        found = {name: bytes_of(tensor) for name, tensor in kept.items()}
        del kept
        return found, tensors.stats.read_nbytes, list(tensors.stats.degraded)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
@pytest.mark.parametrize("refused_on", [None, 1])
def test_ranks_load_in_place_together_or_not_at_all(refused_on: int | None) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        path = write(Path(name, "m.safetensors"), mixed_contents())
        found = values(run_ranks(2, load_in_place, path, refused_on))
        whole = {name: bytes_of(tensor) for name, tensor in headrace.load(path).items()}
        nbytes = headrace.plan(path).read_nbytes
    assert all(tensors == whole for tensors, _, _ in found)
    if refused_on is not None:
        assert nbytes <= sum(read for _, read, _ in found) < 1.1 * nbytes
        assert "rank 1 could not" in found[0][2][0]


def load_without(rank: int, path: Path) -> None:
    """The device is of a kind that torch.distributed cannot reach."""
    alone()
    del rank, CudaDevice.collective
    with simulated_gpu() as gpu:
        headrace.load(path, device=gpu.device, group=True)


def test_devices_that_collectives_cannot_reach_are_refused_among_several_nodes(rank_model: Path) -> None:
    for outcome in run_ranks(2, load_without, rank_model):
        error = error_of(outcome)
        assert isinstance(error, OptionError)
        assert error.option == "group"


@pytest.mark.parametrize(
    ("config", "kind", "backend"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:gloo", "cuda", "gloo"),
        ("cpu:gloo", "cuda", None),
        ("", "cpu", None),
    ],
)
def test_the_backend_is_the_groups_own_for_the_device(config: str, kind: str, backend: str | None) -> None:
    assert backend_of(config, kind) == backend
