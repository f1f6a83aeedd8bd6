"""Save what each rank computes with under a name of its own, and load it again: no rank reads a byte that is not its own.

torchrun --standalone --nproc-per-node 2 examples/sharded.py MODEL FOLDER
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import headrace


def main(url: str, folder: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with headrace.open(url) as checkpoint:
        slices = headrace.tensor_parallel(checkpoint, rank, world)
        state = headrace.load(checkpoint, slices=slices)
    files = headrace.save_sharded(state, folder, rank=rank)

    with headrace.open_sharded(folder, rank=rank) as own:
        loaded = headrace.load(own)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    print(f"rank {rank} of {world}: {len(loaded)} tensors in {', '.join(path.name for path in files)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
