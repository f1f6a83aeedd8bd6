"""Keep a model's index and headers on a local disk, and load from the store without listing it.

python examples/metadata.py MODEL FOLDER
"""

from __future__ import annotations

import sys

import headrace


def main(url: str, folder: str) -> None:
    for path in headrace.save_metadata(url, folder):
        print(f"{path.stat().st_size:>10,} {path.name}")
    weights = headrace.load(url, metadata=folder)
    print(f"{len(weights)} tensors, each shard found to be the one whose header was saved")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
