"""Load a checkpoint of packed files from anywhere: python load.py URL"""

from __future__ import annotations

import sys

from packed import PackedFolder

import headrace


def main(url: str) -> None:
    with headrace.stream(PackedFolder(headrace.folder(url)), order="file") as tensors:
        for name, tensor in tensors:
            print(name, tuple(tensor.shape), tensor.dtype)
    print(f"{tensors.stats.tensors} tensors, {tensors.stats.tensor_nbytes:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
