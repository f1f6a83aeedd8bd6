"""Page-locked tensors for callers on the host: `device="cpu", pin=...`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from checkpoints import KIB, WatchedSource, mixed_contents, random_contents, serialize, wrong

import headrace
from headrace.devices.cpu import CpuTarget
from headrace.errors import PinningError

MIXED = mixed_contents()
MIXED_BYTES = serialize(MIXED)


def has_gpu() -> bool:
    return torch.cuda.is_available()  # noqa: TID251


def test_auto_without_a_gpu_loads_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    if has_gpu():
        pytest.skip("there is a GPU")
    with headrace.stream(WatchedSource(MIXED_BYTES), pin="auto", concurrency=4) as tensors:
        kept = dict(tensors)
    assert not wrong(kept, MIXED)
    assert tensors.stats.pinned is False
    assert len(tensors.stats.degraded) == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_require_without_a_gpu_raises(caplog: pytest.LogCaptureFixture) -> None:
    if has_gpu():
        pytest.skip("there is a GPU")
    source = WatchedSource(MIXED_BYTES)
    with pytest.raises(PinningError) as caught:
        headrace.load(source, pin="require")
    assert caught.value.device == "cpu"
    assert source.closed
    assert not caplog.records


def test_off_and_nothing_said_page_lock_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for arguments in ({}, {"pin": "off"}):
        with headrace.stream(WatchedSource(MIXED_BYTES), **arguments) as tensors:
            assert not wrong(dict(tensors), MIXED)
        assert tensors.stats.pinned is None
    assert not caplog.records


def test_each_pinned_tensor_is_an_allocation_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch tracks copies out of its allocations, by their first byte."""
    asked: list[int] = []
    allocate = CpuTarget.allocate

    def pretend(self: CpuTarget, dtype: str, shape: Sequence[int], nbytes: int, *, pinned: bool = False) -> Any:
        if pinned:
            asked.append(nbytes)
        return allocate(self, dtype, shape, nbytes)

    monkeypatch.setattr(CpuTarget, "allocate", pretend)
    contents = random_contents(*[KIB] * 20, 300 * KIB)
    source = WatchedSource(serialize(contents))
    with headrace.stream(source, pin="require") as tensors:
        kept = dict(tensors)
    assert not wrong(kept, contents)
    assert sorted(asked) == sorted(len(entry.data) for entry in contents.values())
    assert all(tensor.storage_offset() == 0 for tensor in kept.values())
    assert tensors.stats.pinned is True
    assert source.living == 0, "no memory of the stream's own is handed out"
