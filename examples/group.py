"""Ranks load a whole model together: each byte is read from storage by one of them.

torchrun --standalone --nproc-per-node 4 examples/group.py MODEL
"""

from __future__ import annotations

import sys

import torch.distributed as dist

import headrace


def main(url: str) -> None:
    dist.init_process_group("gloo")
    with headrace.stream(url, group=True) as tensors:
        weights = dict(tensors)
    stats = tensors.stats
    print(
        f"rank {stats.rank} of {stats.ranks}: {len(weights)} tensors, {stats.tensor_nbytes:,} bytes; "
        f"{stats.read_nbytes:,} read here, {stats.from_peers_nbytes:,} from other ranks, {stats.exchange}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
