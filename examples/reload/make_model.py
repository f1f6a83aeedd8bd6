"""Write two versions of the weights of one small model: python make_model.py FOLDER FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from model import make
from safetensors.torch import save_file


def main(*folders: Path) -> None:
    for seed, folder in enumerate(folders):
        folder.mkdir(parents=True)
        torch.manual_seed(seed)
        save_file(make().state_dict(), folder / "model.safetensors")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
