"""Write a small checkpoint in two shards, with weights that can be compressed: python make_model.py FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    for shard in (1, 2):
        layers = range((shard - 1) * 4, shard * 4)
        tensors = {f"layers.{layer}.weight": torch.randn(512, 1024).mul(8).round().bfloat16() for layer in layers}
        save_file(tensors, folder / f"model-0000{shard}-of-00002.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
