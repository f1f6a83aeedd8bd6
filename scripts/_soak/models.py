"""A case's checkpoint as files, and what its tensors should be."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoints import Contents, bytes_of, random_entry, value_of, write

import headrace
from _soak.cases import Case, Shard

PREFIX = "models/soak"


@dataclass(frozen=True, slots=True)
class Model:
    """Files below `root`/models/soak, and the bytes of every tensor."""

    root: Path
    contents: Contents
    verified: bool

    @property
    def folder(self) -> Path:
        return self.root / PREFIX

    @property
    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


def make_model(case: Case, root: Path) -> Model:
    """Write the files; with a manifest where the case verifies."""
    folder, contents, weight_map = root / PREFIX, dict[str, Any](), dict[str, str]()
    folder.mkdir(parents=True)
    for shard in case.shards:
        own = _contents(shard, case.seed)
        contents |= own
        weight_map |= dict.fromkeys(own, shard.name)
        path = write(folder / shard.name, own, data_start=shard.data_start)
        os.utime(path, (1, 1))  # a change within one tick of the kernel's clock would not be seen by its times
    if len(case.shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    if case.verifies:
        headrace.verify(folder, write=True)
    return Model(root, contents, case.verifies)


def _contents(shard: Shard, seed: int) -> Contents:
    return {
        tensor.name: random_entry(tensor.dtype, tensor.shape, seed=hash((seed, number, len(tensor.name))) & 0xFFFFFFFF)
        for number, tensor in enumerate(shard.tensors)
    }


def draw_slices(model: Model, seed: int) -> dict[str, Any]:
    """Indices with numpy's meaning for about a third of the tensors that have more than raw bytes."""
    draw, found = random.Random(seed), {}
    for name, entry in model.contents.items():
        if not entry.shape or 0 in entry.shape or entry.dtype.startswith("F6") or draw.random() > 0.3:
            continue
        found[name] = tuple(_draw_index(draw, size) for size in entry.shape[: draw.randint(1, len(entry.shape))])
    return found


def _draw_index(draw: random.Random, size: int) -> Any:
    start = draw.randrange(size)
    end = draw.randint(start, size)
    return draw.choice([slice(None), slice(start, end), slice(start, end, draw.randint(1, 3)), draw.randrange(size)])


def value_at(model: Model, name: str, slices: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """What a tensor should be."""
    value = value_of(model.contents[name])
    if name in slices:
        value = value[slices[name]].clone(memory_format=torch.contiguous_format)
    return value.to(dtype)


def is_same(tensor: torch.Tensor, value: torch.Tensor, *, exact: bool) -> bool:
    """Whether the bits are the same; of converted values NaNs are all one: torch makes another one of it where it is alone."""
    if tensor.shape != value.shape:
        return tensor.dtype == torch.uint8 and bytes_of(tensor) == bytes_of(value)
    if exact or bytes_of(tensor) == bytes_of(value):
        return bytes_of(tensor) == bytes_of(value)
    return bool(((tensor == value) | (tensor.isnan() & value.isnan())).all())


def targets(model: Model, kind: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Tensors to fill, for every other name: of the checkpoint's dtype, or "other": floating ones of another."""
    found = {}
    for name in list(names)[::2]:
        entry = model.contents[name]
        if not entry.dtype.startswith("F6"):
            like = torch.zeros(value_of(entry).shape, dtype=value_of(entry).dtype)
            found[name] = like.float() if kind == "other" and like.dtype in (torch.bfloat16, torch.float16) else like
    return found
