"""The checkpoints that are measured: made once, kept in a folder that git ignores.

`llama` has the shapes of a Llama of 2 G parameters: three shards, 164 BF16 tensors, 3.7 GiB, the largest 376 MiB. `moe` has
60,000 BF16 tensors of 4 to 64 KiB in three shards of 1 GiB together. `f32` has 32 F32 tensors of 32 MiB. `object` is one file of
64 BF16 tensors of 16 MiB, `shards` a Llama of 0.5 G parameters in four. The others serve smoke runs and tests.
Values are random bits with the top exponent bit cleared, so none is NaN or infinite. The header is read here as well, without
headrace, so that floors and peers know names and offsets.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30
WIDTHS = {"BF16": 2, "F32": 4}
_PATTERN_NBYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: offset and size are bytes of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class New:
    """One tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * WIDTHS[self.dtype]


def llama(vocab: int = 64128, layers: int = 18, shards: int = 3) -> list[list[New]]:
    """Shards of a Llama-like model: embeddings large, norms tiny."""
    hidden, inner, kv = 3072, 8192, 1024
    shapes = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, inner),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (kv, hidden),
    }
    tensors = [New("model.embed_tokens.weight", "BF16", (vocab, hidden))]
    tensors += [New(f"model.layers.{i}.{name}.weight", "BF16", shape) for i in range(layers) for name, shape in shapes.items()]
    return _shards([*tensors, New("model.norm.weight", "BF16", (hidden,))], shards)


def moe(count: int = 60_000) -> list[list[New]]:
    """Shards of many small tensors."""
    pick = random.Random(1)
    tensors = []
    for n in range(count):
        kind, part = ("weight", "weight_scale_inv")[n // 3 % 2], ("gate_proj", "up_proj", "down_proj")[n % 3]
        name = f"model.layers.{n // 1920}.mlp.experts.{n // 6 % 320}.{part}.{kind}"
        tensors.append(New(name, "BF16", (pick.choice([4, 4, 4, 8, 8, 16, 16, 32, 64]) * 8, 64)))
    return _shards(tensors, 3)


def f32() -> list[list[New]]:
    """One file of wide F32 tensors."""
    return [[New(f"layers.{i}.w", "F32", (4096, 2048)) for i in range(32)]]


def one_object(count: int = 64) -> list[list[New]]:
    """One file, 1 GiB and its header."""
    return [[New(f"layers.{i}.w", "BF16", (4096, 2048)) for i in range(count)]]


def four_shards() -> list[list[New]]:
    """Four shards of a quarter GiB each."""
    return llama(vocab=32000, layers=4, shards=4)


def tiny() -> list[list[New]]:
    """One file of a few small tensors."""
    return [[New(f"layers.{i}.{name}", "F32", shape) for i in range(8) for name, shape in (("norm", (64,)), ("w", (256, 512)))]]


def short() -> list[list[New]]:
    """A llama of one layer, for smoke runs."""
    return llama(vocab=8192, layers=1)


def short_object() -> list[list[New]]:
    """One file of 64 MiB."""
    return one_object(count=4)


def short_shards() -> list[list[New]]:
    """A llama of one layer in four files."""
    return llama(vocab=8192, layers=1, shards=4)


def tiny_shards() -> list[list[New]]:
    """A few small tensors in four files."""
    return _shards(tiny()[0], 4)


SETS = {
    "llama": llama,
    "moe": moe,
    "f32": f32,
    "object": one_object,
    "shards": four_shards,
    "short": short,
    "short-object": short_object,
    "short-shards": short_shards,
    "tiny": tiny,
    "tiny-shards": tiny_shards,
}


def ensure(folder: Path, names: Iterable[str]) -> None:
    """Write the sets that `folder` lacks. Sets of the same layout that came from elsewhere are taken as they are."""
    for name in names:
        if not (folder / name).is_dir():
            print(f"writing checkpoint {name} ...", flush=True)
            _write_set(folder / name, SETS[name]())


def files_of(folder: Path) -> list[str]:
    """The shards of one set, in order."""
    return sorted(str(path) for path in folder.glob("*.safetensors"))


def read_entries(file: str) -> list[Entry]:
    """The tensors of a file, in the order of their offsets."""
    with open(file, "rb") as opened:
        header_nbytes = struct.unpack("<Q", opened.read(8))[0]
        header = json.loads(opened.read(header_nbytes))
    header.pop("__metadata__", None)
    base = 8 + header_nbytes
    found = [Entry(name, item["dtype"], tuple(item["shape"]), base + item["data_offsets"][0], 0) for name, item in header.items()]
    sized = [
        Entry(entry.name, entry.dtype, entry.shape, entry.offset, base + header[entry.name]["data_offsets"][1] - entry.offset)
        for entry in found
    ]
    return sorted(sized, key=lambda entry: entry.offset)


def checksum(files: Iterable[str], cut: Mapping[str, int] | None = None, part: int = 0, of: int = 1) -> str:
    """What `child.byte_sum` makes of all tensors, from the files themselves.

    Args:
        cut: {glob of names: dimension} of tensors that are cut as torch.chunk does it; the first that fits counts.
        part: which part of them. `of`: of how many.
    """
    import numpy as np

    total = 0
    for file in files:
        data = np.memmap(file, np.uint8, mode="r")
        for entry in read_entries(file):
            piece = data[entry.offset : entry.offset + entry.nbytes]
            dim = next((dim for glob, dim in (cut or {}).items() if fnmatchcase(entry.name, glob)), None)
            if dim is not None:
                step = -(-entry.shape[dim] // of)
                chosen = (slice(None),) * dim + (slice(part * step, (part + 1) * step),)
                piece = np.ascontiguousarray(piece.reshape(*entry.shape, WIDTHS[entry.dtype])[chosen]).reshape(-1)
            words = len(piece) // 8 * 8
            total += int(piece[:words].view("<u8").sum(dtype=np.uint64)) + int(piece[words:].sum(dtype=np.uint64))
    return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"


def _shards(tensors: list[New], count: int) -> list[list[New]]:
    """Split in order into `count` shards of about the same size."""
    share = sum(tensor.nbytes for tensor in tensors) / count
    shards: list[list[New]] = [[]]
    done = 0
    for tensor in tensors:
        if done + tensor.nbytes / 2 > share * len(shards) and len(shards) < count:
            shards.append([])
        shards[-1].append(tensor)
        done += tensor.nbytes
    return shards


def _write_set(folder: Path, shards: list[list[New]]) -> None:
    part = folder.with_name(folder.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    many = len(shards) > 1
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
        _write_file(part / name, sorted(shard, key=lambda tensor: tensor.name))
    part.rename(folder)


def _write_file(path: Path, tensors: list[New]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for piece in _random_bytes(end):
            file.write(piece)
        os.fsync(file.fileno())  # only clean pages can be evicted later


def _random_bytes(nbytes: int) -> Iterator[memoryview]:
    """Each piece begins elsewhere in the pattern, so that a read from a wrong place shows."""
    import numpy as np

    size = min(_PATTERN_NBYTES, nbytes // 2 * 2 + 65536)
    pattern = np.random.default_rng(0).integers(0, 256, size=size, dtype=np.uint8)
    pattern.view(np.uint16)[:] &= 0xBFFF
    turn = 0
    while nbytes:
        piece = memoryview(pattern)[4096 * (turn % 16) :][:nbytes]
        yield piece
        nbytes -= len(piece)
        turn += 1
