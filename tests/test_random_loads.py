"""Random loads, by one process and by several ranks: all that is handed out is what the files hold, and nothing is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import KIB, Contents, Entry, bytes_of, value_of, write
from ranks import alone, decide, run_ranks, values
from simulated_gpu import needs_compiler, simulated_gpu

import headrace
import headrace._limits
import headrace._node
import headrace._peers
import headrace._request
from headrace._dtypes import DTYPES

pytestmark = needs_compiler

FLOATS = ("F32", "BF16", "F16", "F64")
KINDS = (*FLOATS, "I32", "U8", "F8_E4M3", "BOOL", "I64")
LOADS = 30


def contents_of(draw: random.Random) -> list[Contents]:
    """A few shards of tensors whose values are exact in every dtype that they are converted to."""
    shards: list[Contents] = [{} for _ in range(draw.randint(1, 2))]
    for i in range(draw.randint(3, 9)):
        kind = draw.choice(KINDS)
        shape = tuple(draw.choice([0, 1, 2, 3, 7, 64, 300]) for _ in range(draw.randint(0, 3)))
        if draw.random() < 0.3:
            shape = (draw.randint(2, 5), draw.randint(20_000, 90_000))
        dtype = getattr(torch, str(DTYPES[kind].torch))
        data = torch.arange(math.prod(shape)).remainder(2 if kind == "BOOL" else 8).to(dtype).reshape(-1).view(torch.uint8)
        shards[draw.randrange(len(shards))][f"m.{i}"] = Entry(kind, shape, data.numpy().tobytes())
    return shards


def index_for(draw: random.Random, shape: tuple[int, ...]) -> Any:
    """What a rank takes of a tensor."""
    parts: list[Any] = []
    for size in shape[: draw.randint(0, len(shape))]:
        cut = sorted(draw.choices(range(size + 1), k=2))
        steps = [slice(None), slice(*cut), slice(*cut), slice(None, None, -1), slice(*cut, 2)]
        parts.append(draw.choice([*steps, draw.randrange(size)] if size else steps))
    return tuple(parts) if parts else ...


def taken(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """`tensor[index]`, with negative steps, of any dtype."""
    dim = 0
    for part in index if isinstance(index, tuple) else ():
        if isinstance(part, int):
            tensor = tensor.select(dim, part)
            continue
        positions = torch.tensor(range(*part.indices(tensor.shape[dim])), dtype=torch.int64)
        raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        tensor = raw.index_select(dim, positions).view(tensor.dtype)
        dim += 1
    return tensor


class Case:
    """One load, the same on all ranks but for what each slices and gives."""

    def __init__(self, seed: int, world: int) -> None:
        draw = random.Random(seed)
        self.shards = contents_of(draw)
        self.entries = {name: entry for shard in self.shards for name, entry in shard.items()}
        self.on_device, self.one_node = draw.random() < 0.5, draw.random() < 0.5
        self.dtypes = {name: draw.choice(FLOATS) for name, entry in self.entries.items() if entry.dtype in FLOATS}
        self.dtypes = {name: kind for name, kind in self.dtypes.items() if draw.random() < 0.4}
        self.arguments = {
            "cast_at": draw.choice(["auto", "host", "device"]),
            "memory_limit": draw.choice([0, None, 1 << 20]),
            "concurrency": draw.choice([None, 1, 2, 4]),
            "partition": draw.choice([None, "chunks", "spans", "files"]),
            "order": draw.choice(["ready", "file"]),
        }
        sliced = [name for name in self.entries if draw.random() < 0.5]
        self.slices = [
            {name: index_for(draw, self.entries[name].shape) for name in sliced if draw.random() < 0.8} for _ in range(world)
        ]
        given = [name for name in self.entries if draw.random() < 0.3]
        self.given = [{name: draw.choice(FLOATS) for name in given if draw.random() < 0.7} for _ in range(world)]
        self.strided = [draw.random() < 0.3 for _ in range(world)]

    def expected(self, rank: int) -> dict[str, torch.Tensor]:
        """What a rank has to be handed."""
        found = {}
        for name, entry in self.entries.items():
            tensor = taken(value_of(entry), self.slices[rank].get(name, ...))
            kind = self.given[rank].get(name) if entry.dtype in FLOATS else None
            kind = kind or self.dtypes.get(name)
            found[name] = tensor if kind is None else tensor.to(getattr(torch, str(DTYPES[kind].torch)))
        return found


def small_chunks(put: Callable[[Any, str, Any], None]) -> None:
    """So that small tensors take many reads. `put` is setattr."""
    kept = headrace._limits._abilities_of
    put(headrace._limits, "_abilities_of", lambda *args, **given: replace(kept(*args, **given), chunk_nbytes=64 * KIB))
    put(headrace._request, "CHUNK_NBYTES", 64 * KIB)
    for name in ("_LEAST_SLOT", "STAGED_CACHED_CHUNK_NBYTES", "STAGED_CHUNK_NBYTES"):
        put(headrace._limits, name, 64 * KIB)


def load_them(rank: int, folder: Path, first: int) -> list[str]:
    """Every load in turn; what was wrong."""
    decide()
    small_chunks(setattr)
    world = dist.get_world_size()
    dist.new_group(list(range(1, world)))  # so that ranks are in different numbers of groups
    wrong: list[str] = []
    node: Any = headrace._node
    peers: Any = headrace._peers
    together = node._NAME, peers._node
    for seed in range(first, first + LOADS):
        case = Case(seed, world)
        path = folder / str(seed)
        if rank == 0:
            path.mkdir()
            for i, shard in enumerate(case.shards):
                write(path / f"{i}.safetensors", shard, data_start=seed % 8)
        dist.barrier()
        node._NAME, peers._node = together
        if not case.one_node:
            alone()
        wrong += [f"seed {seed}: {what}" for what in load_one(case, rank, path, group=True, peer_timeout_s=20)]
    return wrong


def load_one(case: Case, rank: int, path: Path, **more: Any) -> list[str]:
    """One load; what was wrong."""
    expected = case.expected(rank)
    dtype = {name: DTYPES[kind].torch for name, kind in case.dtypes.items()}
    with ExitStack() as stack:
        gpu = stack.enter_context(simulated_gpu("random")) if case.on_device else None
        into = {}
        for name in case.given[rank]:
            if case.entries[name].dtype in FLOATS:
                room = torch.zeros_like(expected[name].contiguous())
                if case.strided[rank] and room.dim():
                    room = torch.zeros((*room.shape, 2), dtype=room.dtype)[..., 0]
                into[name] = gpu.device.tensor(room) if gpu is not None else room
        arguments = {**case.arguments, **more, "slices": case.slices[rank], "into": into, "dtype": dtype}
        try:
            found = headrace.load(path, device="cpu" if gpu is None else gpu.device, **arguments)
        except Exception as exc:  # noqa: BLE001 - it goes to the test
            return [f"{type(exc).__name__}: {exc}"]
        bad = [name for name, tensor in found.items() if not is_same(tensor, expected[name])]
        missing = expected.keys() ^ found.keys()
        del found, into, arguments
    return [f"{name} differs" for name in bad] + [f"{name} is missing" for name in missing]


def is_same(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Dtype, shape and every byte. What is strided and has one element calls itself contiguous."""
    plain, wanted = (torch.empty(each.shape, dtype=each.dtype).copy_(each) for each in (tensor, expected))
    return (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape) and bytes_of(plain) == bytes_of(wanted)


@pytest.mark.slow
@pytest.mark.usefixtures("rank_server")
@pytest.mark.parametrize(("world", "first"), [(2, 0), (3, 1000), (4, 2000)])
def test_every_rank_has_what_it_would_have_alone(tmp_path: Path, world: int, first: int) -> None:
    found = values(run_ranks(world, load_them, tmp_path, first, timeout_s=150))
    assert [what for wrong in found for what in wrong] == []


@pytest.mark.parametrize("first", [5000, *(pytest.param(5000 + 40 * i, marks=pytest.mark.slow) for i in range(1, 6))])
def test_every_load_hands_out_what_is_in_its_files(tmp_path: Path, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch.setattr)
    wrong = []
    for seed in range(first, first + 40):
        case = Case(seed, 1)
        path = tmp_path / str(seed)
        path.mkdir()
        for i, shard in enumerate(case.shards):
            write(path / f"{i}.safetensors", shard, data_start=seed % 8)
        wrong += [f"seed {seed}: {what}" for what in load_one(case, 0, path)]
    assert wrong == []
