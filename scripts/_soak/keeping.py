"""Tensors that are kept from earlier loads, and looked at again later: a tensor that was handed out never changes."""

from __future__ import annotations

import random
import zlib
from collections import deque
from typing import NamedTuple

import torch
from checkpoints import bytes_of

from _soak.judging import WrongError

_MOST_NBYTES = 48 << 20


class Kept(NamedTuple):
    """A tensor, where it comes from, and the checksum of its bytes when it was handed out."""

    seed: int
    name: str
    tensor: torch.Tensor
    checksum: int


class Keeper:
    """Keeps tensors up to some bytes, the latest ones."""

    def __init__(self) -> None:
        self._kept: deque[Kept] = deque()
        self.nbytes = self.checks = 0

    def keep(self, seed: int, name: str, tensor: torch.Tensor) -> None:
        """Keep a tensor."""
        self._kept.append(Kept(seed, name, tensor, zlib.crc32(bytes_of(tensor))))
        self.nbytes += tensor.nbytes
        while self.nbytes > _MOST_NBYTES:
            self.nbytes -= self._kept.popleft().tensor.nbytes

    def drop_some(self, draw: random.Random) -> None:
        """Let go of some, so that memory is used again beside what is kept."""
        self._kept = deque(kept for kept in self._kept if draw.random() < 0.9)
        self.nbytes = sum(kept.tensor.nbytes for kept in self._kept)

    def check(self) -> None:
        """Raise `WrongError` if one has changed."""
        for kept in self._kept:
            self.checks += 1
            if zlib.crc32(bytes_of(kept.tensor)) != kept.checksum:
                raise WrongError(f"tensor {kept.name} of case {kept.seed} has changed since it was handed out")
