"""A program on the public API, for the type checker: `mypy --strict` has to find every type, and no more than what is meant.

It is not run. Each `assert_type` fails the check where headrace's own types say something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from typing_extensions import assert_type

import headrace
from headrace import Checkpoint, Options, Plan, Snapshot, TensorInfo


class Archive:
    """A `ByteSource` of one's own."""

    def __init__(self, data: bytes) -> None:
        self.url, self.nbytes, self.version = "archive:model", len(data), object()
        self._data = data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._data[offset : offset + len(buffer)]

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...


def look(path: Path) -> None:
    with headrace.open(path, verify="auto") as checkpoint:
        assert_type(checkpoint, Checkpoint)
        for name, info in checkpoint.items():
            assert_type(name, str)
            assert_type(info, TensorInfo)
            print(name, info.dtype, info.shape, info.nbytes)
        assert_type(headrace.read(checkpoint, "bias", slice(0, 2)), torch.Tensor)
    planned = headrace.plan(path, names="layers.*", dtype="bfloat16")
    assert_type(planned, Plan)
    assert_type(planned.read_nbytes, int)


def report(snapshot: Snapshot) -> None:
    assert_type(snapshot.rate, float)
    assert_type(snapshot.as_dict(), dict[str, Any])
    print(snapshot.read_nbytes, snapshot.slowest)


def load(url: str, given: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    options = Options(concurrency=8, memory_limit=256 << 20)
    with headrace.stream(
        url,
        names=lambda info: info.nbytes > 1024,
        slices={"lm_head.weight": (slice(0, 128), ...)},
        into=given,
        rename={"a": "b"},
        progress=report,
        trace="trace.json",
        options=options,
        order="file",
    ) as stream:
        for name, tensor in stream:
            assert_type(name, str)
            yield tensor
        assert_type(stream.stats, Snapshot)
    weights = headrace.load(Archive(b""), progress=True, stall_timeout_s=5.0)
    assert_type(weights, dict[str, torch.Tensor])
    assert_type(headrace.load_file("m.safetensors"), dict[str, torch.Tensor])


def move(url: str) -> None:
    done = headrace.pull(url, "/dev/shm/model", progress=lambda now: print(now.nbytes))
    assert_type(done.copied_nbytes, int)
    checked = headrace.verify(done.destination)
    assert_type(checked.ok, bool)


def main(url: str, module: torch.nn.Module) -> None:
    try:
        print(headrace.load_into(module, url).missing)
    except headrace.TensorNotFoundError as error:
        print(error.name, error.close_matches)
    except headrace.SourceError as error:
        print(error.url, error.offset, error.nbytes)
    except headrace.HeadraceError as error:
        assert_type(error.others, tuple[BaseException, ...])
