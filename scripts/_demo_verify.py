"""Compare every tensor that headrace streams with what the safetensors library reads, bit by bit. Exits 1 if one differs."""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file

import headrace


def is_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree; unlike ==, NaN equals itself and -0.0 is not 0.0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)))


def main(path: str) -> int:
    expected = load_file(path)
    missing = set(expected)
    nbytes = 0
    wrong = []
    with headrace.stream(path) as stream:
        for name, tensor in stream:
            if name not in missing or not is_same(tensor, expected[name]):
                wrong.append(name)
            missing.discard(name)
            nbytes += tensor.nbytes
    if wrong or missing:
        print(f"DIFFERENT: {len(wrong)} tensors with other bits {wrong[:5]}, {len(missing)} never came {sorted(missing)[:5]}")
        return 1
    print(f"{len(expected)} of {len(expected)} tensors are equal in every bit ({nbytes / 1e6:.1f} MB).")
    print("So headrace gives a program the same weights that safetensors does; it may be used in its place for this model.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
