"""The model whose weights are loaded again and again."""

from __future__ import annotations

from torch import nn

HIDDEN, LAYERS = 512, 8


def make() -> nn.Module:
    blocks = [(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)) for _ in range(LAYERS)]
    return nn.Sequential(*(layer for block in blocks for layer in block))
