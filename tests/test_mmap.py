"""Views of the mapped file: handed out where they were asked for, said aloud, and private when written to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import random_contents, write, wrong

import headrace
from headrace.errors import OptionError, SourceError
from headrace.sources import mapped
from headrace.sources.memory import MemorySource

CONTENTS = random_contents(5000, 0, 300_000, 64, 5_000_000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "m.safetensors", CONTENTS)


@pytest.mark.parametrize("mmap", ["auto", "require"])
def test_tensors_are_views_of_the_file_and_nothing_is_read(path: Path, mmap: str) -> None:
    with headrace.stream(path, mmap=mmap) as tensors:
        got = dict(tensors)
        stats = tensors.stats
    assert not wrong(got, CONTENTS)
    assert (stats.read_nbytes, stats.peak_nbytes, stats.surplus_nbytes) == (0, 0, 0)
    assert {route for _, route, _ in stats.routes} == {"mapped"}
    assert stats.degraded == ()


def test_off_by_default(path: Path) -> None:
    with headrace.stream(path) as tensors:
        dict(tensors)
        assert {route for _, route, _ in tensors.stats.routes} == {"straight"}


def test_writing_to_a_view_never_reaches_the_file(path: Path) -> None:
    before = path.read_bytes()
    tensor = headrace.load(path, mmap="require")["t002"]
    tensor.fill_(0)
    assert path.read_bytes() == before
    assert not torch.any(tensor)


def test_views_outlive_the_stream_and_the_path(path: Path) -> None:
    got = headrace.load(path, mmap="require")
    path.unlink()
    assert not wrong(got, CONTENTS)


def test_casts_and_slices_are_read_beside_the_views(tmp_path: Path) -> None:
    weights = {"a": torch.randn(40, 50), "b": torch.randn(60, 70), "c": torch.randn(30)}
    path = tmp_path / "m.safetensors"
    from safetensors.torch import save_file

    save_file(weights, path)
    with headrace.stream(path, mmap="require", dtype={"a": "bfloat16"}, slices={"b": (slice(3, 9), slice(1, 4))}) as tensors:
        got = dict(tensors)
        stats = tensors.stats
    assert torch.equal(got["a"], weights["a"].to(torch.bfloat16))
    assert torch.equal(got["b"], weights["b"][3:9, 1:4])
    assert torch.equal(got["c"], weights["c"])
    assert stats.read_nbytes > 0


def test_given_tensors_are_filled_and_not_replaced(path: Path) -> None:
    into = {"t002": torch.empty(300_000, dtype=torch.uint8)}
    got = headrace.load(path, mmap="require", into=into)
    assert got["t002"] is into["t002"]
    assert not wrong(got, CONTENTS)


def test_what_cannot_be_mapped_is_read_and_reported_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mapped, "is_local_filesystem", lambda _: False)
    with headrace.stream(path, mmap="auto") as tensors:
        got = dict(tensors)
        stats = tensors.stats
    assert not wrong(got, CONTENTS)
    assert len(stats.degraded) == 1
    assert [record.name for record in caplog.records] == ["headrace"]


def test_what_cannot_be_mapped_is_an_error_where_it_is_required(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "is_local_filesystem", lambda _: False)
    with pytest.raises(SourceError):
        headrace.load(path, mmap="require")


def test_a_source_that_is_no_file_cannot_be_mapped(path: Path) -> None:
    with pytest.raises(SourceError):
        headrace.load(MemorySource(path.read_bytes()), mmap="require")


@pytest.mark.parametrize("ownership", ["copied", "borrowed"])
def test_views_cannot_have_another_owner(path: Path, ownership: str) -> None:
    with pytest.raises(OptionError) as caught:
        headrace.load(path, mmap="require", ownership=ownership)
    assert caught.value.option == "mmap"


def test_the_plan_says_mapped(path: Path) -> None:
    plan = headrace.plan(path, mmap="require")
    assert plan.reads == []
    assert plan.mapped_nbytes == sum(len(entry.data) for entry in CONTENTS.values())
    assert "mapped" in str(plan)
