"""Each rank loads the rows and columns that it computes with.

torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py MODEL
"""

from __future__ import annotations

import sys

import torch.distributed as dist

import headrace


def main(url: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with headrace.open(url) as checkpoint:
        slices = headrace.tensor_parallel(checkpoint, rank, world)
        with headrace.stream(checkpoint, slices=slices, group=True) as tensors:
            nbytes = sum(tensor.nbytes for _, tensor in tensors)
        print(f"rank {rank} of {world}: {len(slices)} tensors are cut, {nbytes:,} bytes of {checkpoint.nbytes:,} are here")
        if rank == 0:
            print(tensors.plan)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
