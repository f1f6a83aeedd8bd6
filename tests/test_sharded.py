"""Checkpoints divided among ranks: what is written is found again, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from checkpoints import bytes_of, mixed_contents, value_of
from safetensors.torch import load_file

import headrace
from headrace import FormatError, OptionError, SourceNotFoundError
from headrace._sharded import files_of_rank


def state() -> dict[str, torch.Tensor]:
    """Tensors of every kind that torch has."""
    found = {name: value_of(entry) for name, entry in mixed_contents().items()}
    found["sliced"] = torch.arange(100, dtype=torch.float32).view(10, 10)[:, ::3]
    found["scalar"] = torch.tensor(1.5, dtype=torch.float64)
    found["conjugate"] = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    found["parameter"] = torch.nn.Parameter(torch.ones(3))
    return found


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether names, dtypes, shapes and values agree; order does not count."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype
        and found[name].shape == value.shape
        and bytes_of(found[name]) == bytes_of(value.resolve_conj())
        for name, value in expected.items()
    )


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    tensors = state()
    headrace.save_sharded(tensors, tmp_path, rank=0)
    with headrace.open_sharded(tmp_path, rank=0) as checkpoint:
        assert equal(headrace.load(checkpoint), tensors)


def test_safetensors_reads_what_is_saved(tmp_path: Path) -> None:
    tensors = state()
    (path,) = headrace.save_sharded(tensors, tmp_path, rank=3)
    assert path.name == "model-rank-3-part-0.safetensors"
    assert equal(load_file(path), tensors)


def test_ranks_have_files_of_their_own(tmp_path: Path) -> None:
    for rank in (0, 1, 10):
        headrace.save_sharded({"w": torch.full((4,), rank)}, tmp_path, rank=rank)
    for rank in (0, 1, 10):
        with headrace.open_sharded(tmp_path, rank=rank) as checkpoint:
            assert headrace.load(checkpoint)["w"].tolist() == [rank] * 4


def test_parts_hold_no_more_than_asked_for_and_a_large_tensor_has_its_own(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(nbytes, dtype=torch.uint8) for name, nbytes in zip("abcd", (10, 20, 100, 5), strict=True)}
    paths = headrace.save_sharded(tensors, tmp_path, rank=0, part_nbytes=30)
    assert [sorted(load_file(path)) for path in paths] == [["a", "b"], ["c"], ["d"]]
    with headrace.open_sharded(tmp_path, rank=0) as checkpoint:
        assert sorted(checkpoint) == ["a", "b", "c", "d"]


def test_saving_again_replaces_the_ranks_parts_and_no_others(tmp_path: Path) -> None:
    for rank in range(2):
        headrace.save_sharded({str(i): torch.zeros(10) for i in range(3)}, tmp_path, rank=rank, part_nbytes=40)
    (tmp_path / "config.json").write_text("{}")
    headrace.save_sharded({"new": torch.ones(1)}, tmp_path, rank=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model-rank-0-part-0.safetensors",
        *[f"model-rank-1-part-{part}.safetensors" for part in range(3)],
    ]


def test_a_save_that_fails_leaves_everything_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headrace.save_sharded({"w": torch.zeros(4)}, tmp_path, rank=0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refuse(_fd: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="no space"):
        headrace.save_sharded({"w": torch.ones(4)}, tmp_path, rank=0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_empty_state_is_a_part_without_tensors(tmp_path: Path) -> None:
    headrace.save_sharded({}, tmp_path, rank=0)
    with headrace.open_sharded(tmp_path, rank=0) as checkpoint:
        assert headrace.load(checkpoint) == {}


def test_dtypes_that_the_format_lacks_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"'w'.*complex128"):
        headrace.save_sharded({"w": torch.zeros(1, dtype=torch.complex128)}, tmp_path, rank=0)
    assert not list(tmp_path.iterdir())


def test_a_pattern_of_ones_own_is_used_for_both(tmp_path: Path) -> None:
    pattern = "tp{rank}of2.{part}.safetensors"
    headrace.save_sharded({"w": torch.zeros(1)}, tmp_path, rank=1, pattern=pattern)
    assert [path.name for path in tmp_path.iterdir()] == ["tp1of2.0.safetensors"]
    with headrace.open_sharded(tmp_path, rank=1, pattern=pattern) as checkpoint:
        assert list(checkpoint) == ["w"]


@pytest.mark.parametrize(
    "pattern", ["model.safetensors", "{rank}.safetensors", "{rank}-{rank}-{part}", "a/{rank}-{part}", "{rank", "{x}"]
)
def test_patterns_without_rank_and_part_are_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(OptionError, match="pattern"):
        headrace.save_sharded({}, tmp_path, rank=0, pattern=pattern)
    with pytest.raises(OptionError, match="pattern"):
        headrace.open_sharded(tmp_path, rank=0, pattern=pattern)


def chosen(*names: str, rank: int = 0) -> list[str]:
    """The files of a rank among these."""
    return files_of_rank(
        [f"model-rank-{name}.safetensors" for name in names],
        rank=rank,
        pattern="model-rank-{rank}-part-{part}.safetensors",
        url="somewhere",
    )


def test_parts_are_ordered_by_number_and_not_by_name() -> None:
    names = [f"0-part-{part}" for part in (10, 2, *range(2), *range(3, 10))]
    assert chosen(*names) == [f"model-rank-0-part-{part}.safetensors" for part in range(11)]


def test_a_missing_part_is_named() -> None:
    with pytest.raises(FormatError, match=r"model-rank-0-part-1\.safetensors"):
        chosen("0-part-0", "0-part-2", "1-part-1")


def test_a_rank_without_files_hears_which_ranks_have_some() -> None:
    with pytest.raises(SourceNotFoundError, match=r"rank 0, 1$"):
        chosen("0-part-0", "1-part-0", rank=2)
    with pytest.raises(SourceNotFoundError, match="no file there is called like that"):
        chosen(rank=2)


def test_one_part_under_two_names_is_refused() -> None:
    with pytest.raises(FormatError, match="several names"):
        chosen("0-part-0", "00-part-0")


def test_a_file_is_no_folder_of_ranks(tmp_path: Path) -> None:
    (path,) = headrace.save_sharded({"w": torch.zeros(1)}, tmp_path, rank=0)
    with pytest.raises(OptionError, match="is a folder"):
        headrace.open_sharded(path, rank=0)
