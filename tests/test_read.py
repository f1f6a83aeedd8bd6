"""One tensor of an open checkpoint: the bits of `load`, in one read where that is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import MIB, WatchedSource, bytes_of, mixed_contents, random_entry, serialize, write

import headrace
from headrace._dtypes import DTYPES
from headrace.errors import OptionError, SourceChangedError, TensorNotFoundError


def test_a_tensor_that_is_read_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", mixed_contents(), data_start=3)
    with headrace.open(path) as checkpoint:
        for name, expected in headrace.load(checkpoint).items():
            tensor = headrace.read(checkpoint, name)
            assert (tensor.dtype, tensor.shape, bytes_of(tensor)) == (expected.dtype, expected.shape, bytes_of(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [None, 1, slice(1, 3), slice(2, 2), (0, ...), slice(None, None, -1), (slice(None),)], ids=str)
def test_a_part_that_is_read_is_the_one_that_is_loaded(dtype: str, index: Any) -> None:
    with headrace.open(WatchedSource(serialize({"w": random_entry(dtype, (4, 16))}))) as checkpoint:
        expected = headrace.load(checkpoint, slices=None if index is None else {"w": index})["w"]
        tensor = headrace.read(checkpoint, "w", index)
        assert (tensor.dtype, tensor.shape, bytes_of(tensor)) == (expected.dtype, expected.shape, bytes_of(expected))


@pytest.mark.parametrize(
    ("index", "reads"), [(None, [8 * MIB]), (3, [MIB]), (slice(2, 6), [4 * MIB]), (slice(5, 5), [0])], ids=str
)
def test_a_short_part_is_one_read(index: Any, reads: list[int]) -> None:
    watched = WatchedSource(serialize({"w": random_entry("U8", (8, MIB))}))
    with headrace.open(watched) as checkpoint:
        headrace.read(checkpoint, "w", index)
    if index is not None:
        assert [call.nbytes for call in watched.calls[1:]] == reads
    assert sum(call.nbytes for call in watched.calls[1:]) == sum(reads)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"w": random_entry("U8", (4, 16))})
    with headrace.open(path) as checkpoint:
        with pytest.raises(TensorNotFoundError):
            headrace.read(checkpoint, "w*")
        with pytest.raises(OptionError) as caught:
            headrace.read(checkpoint, "w", 4)
        assert isinstance(caught.value.__cause__, IndexError)
        path.write_bytes(path.read_bytes())
        with pytest.raises(SourceChangedError):
            headrace.read(checkpoint, "w")


def test_a_path_is_no_open_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"what headrace\.open returns, not str"):
        headrace.read(str(tmp_path), "w")  # type: ignore[arg-type]


def test_memory_is_the_tensors_own(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"w": random_entry("U8", (4, 16))})
    with headrace.open(path, mmap="auto") as mapped, headrace.open(path) as checkpoint, torch.inference_mode():
        one, other = headrace.read(checkpoint, "w"), headrace.read(checkpoint, "w", slice(1, 3))
        assert not one.is_inference()
        one.zero_()
        assert other.any()
        assert headrace.read(mapped, "w").any()  # a view of the file, as mmap= says
