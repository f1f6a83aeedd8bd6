"""Large tables go to memory that the ranks of a node have in common, one file to every rank's own, the rest to where it computes.

torchrun --standalone --nproc-per-node 2 examples/mixed.py MODEL FILE cpu        # or cuda
"""

from __future__ import annotations

import sys

import torch.distributed as dist

import headrace


def main(url: str, file: str, compute: str) -> None:
    dist.init_process_group("gloo")
    places = {"*.table": "shared-cpu", f"file:{file}": "cpu", "*": compute}
    limits = {"shared-cpu": "64MiB", "*": "256MiB"}
    with headrace.stream(url, device=places, memory_limit=limits, group=True) as tensors:
        waiting = list(tensors.shared.values())  # names, dtypes and shapes of the tables, before they are there
        dist.barrier()  # what the ranks have to say to each other meanwhile is theirs
        weights = dict(tensors)
    assert all(each.ready and each.tensor().data_ptr() == weights[each.name].data_ptr() for each in waiting)
    stats = tensors.stats
    print(f"rank {stats.rank} of {stats.ranks}: {len(waiting)} shared tables, {stats.read_nbytes:,} bytes read here")
    if stats.rank == 0:
        print(tensors.plan)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
