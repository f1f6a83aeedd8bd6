"""Checkpoints for tests: safetensors bytes with known contents, and a source that knows whether memory it filled still lives."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace._dtypes import DTYPES
from headrace.sources.base import ByteSource
from headrace.sources.memory import MemorySource
from headrace.testing import Fault, FaultySource, ReadCall

KIB, MIB = 1 << 10, 1 << 20


class Entry(NamedTuple):
    """One tensor: dtype of the format, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Contents = dict[str, Entry]


def random_entry(dtype: str, shape: Sequence[int], seed: int = 0) -> Entry:
    """A tensor of random bits; booleans are 0 and 1."""
    nbytes = math.prod(shape) * DTYPES[dtype].bits // 8
    bits = np.random.default_rng(seed).integers(0, 256 if dtype != "BOOL" else 2, nbytes, dtype=np.uint8)
    return Entry(dtype, tuple(shape), bits.tobytes())


def random_contents(*sizes: int, dtype: str = "U8") -> Contents:
    """One-dimensional tensors t000, t001, ... of these many bytes each."""
    width = DTYPES[dtype].itemsize
    return {f"t{i:03}": random_entry(dtype, (nbytes // width,), seed=i) for i, nbytes in enumerate(sizes)}


def mixed_contents() -> Contents:
    """Large, small, scalar, empty and unusual tensors in turn, each of another size; about 9 MiB.

    Packed ones have modules of their own: a blanket dtype would leave their neighbours alone.
    """
    found: Contents = {}
    for i in range(8):
        found[f"layer.{i}.weight"] = random_entry("BF16", (256 + i, 1024), seed=i)
        found[f"layer.{i}.norm"] = random_entry("F32", (129 + i,), seed=100 + i)
        found[f"layer.{i}.scale"] = random_entry("F64", (), seed=200 + i)
        found[f"layer.{i}.bias"] = random_entry("F16", (3, 0), seed=300 + i)
        found[f"layer.{i}.mask"] = random_entry("BOOL", (17, 3), seed=400 + i)
        found[f"packed.{i}.bits"] = random_entry("F6_E2M3", (64, 4), seed=500 + i)
        found[f"layer.{i}.table"] = random_entry("I32", (300_000 + 1024 * i,) if i % 2 else (70_001,), seed=600 + i)
    return found


def serialize(contents: Mapping[str, Entry], *, data_start: int = 0) -> bytes:
    """Safetensors bytes whose data part begins at an offset that is `data_start` modulo 8."""
    at, header = 0, dict[str, Any]()
    for name, (dtype, shape, data) in contents.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * ((data_start - len(text)) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(entry.data for entry in contents.values())


def write(path: Path, contents: Mapping[str, Entry], *, data_start: int = 0) -> Path:
    """Write a checkpoint file."""
    path.write_bytes(serialize(contents, data_start=data_start))
    return path


def write_sparse(path: Path, shapes: Mapping[str, int]) -> Path:
    """Write a file of U8 tensors that are one hole each: zeros that take no disk."""
    at, header = 0, {}
    for name, nbytes in shapes.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return path


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, in the order of its elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def value_of(entry: Entry) -> torch.Tensor:
    """What a tensor of the checkpoint should be, in memory of its own."""
    name = DTYPES[entry.dtype].torch
    kind = getattr(torch, name or "uint8")
    if name is None:
        return torch.frombuffer(bytearray(entry.data), dtype=kind)
    if not entry.data:
        return torch.empty(entry.shape, dtype=kind)
    return torch.frombuffer(bytearray(entry.data), dtype=kind).view(entry.shape)


def wrong(tensors: Mapping[str, torch.Tensor], contents: Mapping[str, Entry]) -> list[str]:
    """Names of the tensors whose bytes are not those of the checkpoint."""
    return [name for name, tensor in tensors.items() if bytes_of(tensor) != contents[name].data]


class WatchedSource(FaultySource):
    """A faulty source over a checkpoint in memory, or over another source, that remembers the memory it was asked to fill.

    Attributes:
        memories: weak references to the mappings (or whatever else) behind the buffers.
    """

    def __init__(self, source: ByteSource | bytes, faults: Sequence[Fault] = ()) -> None:
        super().__init__(MemorySource(source) if isinstance(source, bytes) else source, faults)
        self.memories: list[weakref.ref[Any]] = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Read, and remember the memory."""
        if not isinstance(buffer.obj, bytearray):  # headers
            self.memories.append(weakref.ref(buffer.obj))
        super().read_into(offset, buffer)

    @property
    def living(self) -> int:
        """How many of the memories still live."""
        return len({id(memory) for reference in self.memories if (memory := reference()) is not None})


def nth_data_read(*indexes: int) -> Any:
    """Match these reads, counted from 0, the header's one not counted."""
    return lambda call: call.index - 1 in indexes


def any_data_read(call: ReadCall) -> bool:
    """Match every read but the header's."""
    return call.index > 0
