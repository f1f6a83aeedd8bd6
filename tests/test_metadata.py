"""A local folder stands in for a checkpoint's listing and index, and every shard is held against it before it is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import bytes_of, mixed_contents, random_contents, random_entry, serialize, write

import headrace
from headrace import FormatError, OptionError, SourceChangedError, SourceNotFoundError
from headrace._metadata import VERSIONS_NAME
from headrace.sources.file import FileFolder, FileSource

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model-{part}-of-00002.safetensors" for part in ("00001", "00002"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards and an index."""
    path = tmp_path / "model"
    path.mkdir()
    shards = {shard: {f"{shard[6:11]}.{name}": entry for name, entry in mixed_contents().items()} for shard in (FIRST, SECOND)}
    for shard, contents in shards.items():
        write(path / shard, contents)
    weight_map = {name: shard for shard, contents in shards.items() for name in contents}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.fixture
def saved(model: Path, tmp_path: Path) -> Path:
    """What `save_metadata` writes."""
    headrace.save_metadata(model, tmp_path / "saved")
    return tmp_path / "saved"


class Unlisted(FileFolder):
    """A folder that must not be listed, nor asked for an index."""

    def names(self) -> list[str]:
        """Fail."""
        raise AssertionError("the folder was listed")

    def open(self, name: str) -> FileSource:
        """Open a shard."""
        assert not name.endswith(".json"), "the index was read"
        return super().open(name)


def test_a_folder_of_headers_stands_in_for_the_listing_and_the_index(model: Path, saved: Path) -> None:
    expected = {name: bytes_of(tensor) for name, tensor in headrace.load(model).items()}
    found = headrace.load(Unlisted(model), metadata=saved)
    assert {name: bytes_of(tensor) for name, tensor in found.items()} == expected


def test_what_is_saved_is_small_and_each_file_begins_as_the_shard_does(model: Path, saved: Path) -> None:
    for shard in (FIRST, SECOND):
        head = (saved / shard).read_bytes()
        assert (model / shard).read_bytes().startswith(head)
        assert len(head) < 64 << 10
    assert sorted(path.name for path in saved.iterdir()) == sorted([FIRST, SECOND, INDEX, VERSIONS_NAME])


def cut_heads(model: Path, folder: Path) -> None:
    """The first part of each shard, and some of the data."""
    folder.mkdir()
    shutil.copy(model / INDEX, folder)
    for shard in (FIRST, SECOND):
        (folder / shard).write_bytes((model / shard).read_bytes()[: 100 << 10])


def copy_without_index(model: Path, folder: Path) -> None:
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.json"))


@pytest.mark.parametrize("make", [cut_heads, shutil.copytree, copy_without_index])
def test_first_parts_and_whole_copies_will_do(model: Path, tmp_path: Path, make: Callable[[Path, Path], None]) -> None:
    make(model, tmp_path / "copy")
    with headrace.open(Unlisted(model), metadata=tmp_path / "copy") as checkpoint:
        assert dict(checkpoint) == dict(headrace.open(model))


def test_other_ways_to_name_a_checkpoint_take_metadata(model: Path, saved: Path) -> None:
    names = {name for name in headrace.open(model) if name.startswith("00001")}
    assert set(headrace.open(model / FIRST, metadata=saved)) == names
    assert set(headrace.open([model / FIRST], metadata=saved)) == names
    assert set(headrace.open(model / INDEX, metadata=saved)) == set(headrace.open(model))
    assert len(headrace.plan(model, metadata=saved).tensors) == len(headrace.open(model))
    with headrace.open(model) as checkpoint, pytest.raises(OptionError, match="metadata"):
        headrace.load(checkpoint, metadata=saved)


def test_one_ranks_part_takes_metadata(tmp_path: Path) -> None:
    import torch

    for rank in range(2):
        headrace.save_sharded({"w": torch.full((4,), rank)}, tmp_path / "parts", rank=rank)
    headrace.save_metadata([tmp_path / "parts" / "model-rank-1-part-0.safetensors"], tmp_path / "saved")
    with headrace.open_sharded(Unlisted(tmp_path / "parts"), rank=1, metadata=tmp_path / "saved") as checkpoint:
        assert headrace.load(checkpoint)["w"].tolist() == [1] * 4
    with pytest.raises(SourceNotFoundError, match="rank 0"):
        headrace.open_sharded(Unlisted(tmp_path / "parts"), rank=0, metadata=tmp_path / "saved")


def renamed_tensor(model: Path) -> None:
    text = (model / SECOND).read_bytes()
    (model / SECOND).write_bytes(text.replace(b'"00002.layer.0.norm"', b'"00002.layer.0.Norm"'))


def longer_file(model: Path) -> None:
    with (model / SECOND).open("ab") as file:
        file.write(b"\0")


def shorter_file(model: Path) -> None:
    text = (model / SECOND).read_bytes()
    (model / SECOND).write_bytes(text[:-1])


def no_shard(model: Path) -> None:
    (model / SECOND).unlink()


def other_model(model: Path) -> None:
    write(model / SECOND, random_contents(100, 200))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (renamed_tensor, SourceChangedError),
        (other_model, SourceChangedError),
        (longer_file, FormatError),
        (shorter_file, FormatError),
        (no_shard, SourceNotFoundError),
    ],
)
def test_shards_that_are_others_are_named_before_a_tensor_is_handed_out(
    model: Path, saved: Path, damage: Callable[[Path], None], error: type[Exception]
) -> None:
    damage(model)
    with pytest.raises(error) as raised:
        headrace.stream(model, metadata=saved)
    assert str(raised.value.url).endswith(SECOND)  # type: ignore[attr-defined]


def drop_header(saved: Path) -> None:
    (saved / SECOND).unlink()


def cut_header(saved: Path) -> None:
    (saved / SECOND).write_bytes((saved / SECOND).read_bytes()[:-1])


def empty_header(saved: Path) -> None:
    (saved / SECOND).write_bytes(b"")


def huge_header(saved: Path) -> None:
    (saved / SECOND).write_bytes(b"\xff" * 100)


def spoil_versions(saved: Path) -> None:
    (saved / VERSIONS_NAME).write_text('{"shards": {"a": 1}}')


@pytest.mark.parametrize("damage", [drop_header, cut_header, empty_header, huge_header, spoil_versions])
def test_metadata_that_lack_something_are_refused_by_name(model: Path, saved: Path, damage: Callable[[Path], None]) -> None:
    damage(saved)
    with pytest.raises((FormatError, SourceNotFoundError)) as raised:
        headrace.open(model, metadata=saved)
    assert str(raised.value.url).startswith(str(saved)) or SECOND in str(raised.value)


def test_a_folder_that_is_not_there_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="nowhere"):
        headrace.open(model, metadata=tmp_path / "nowhere")


def test_files_of_one_name_are_not_saved_together(model: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / FIRST, random_contents(10))
    with pytest.raises(OptionError, match="one name"):
        headrace.save_metadata([model / FIRST, tmp_path / "other" / FIRST], tmp_path / "saved")


# ---- from a store


def test_a_store_is_asked_for_the_shards_only_and_a_new_version_of_one_is_noticed(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("botocore")
    from headrace.sources.s3 import S3Credentials
    from headrace.testing.s3server import S3Server

    objects = {f"m/{path.name}": path.read_bytes() for path in model.iterdir()}
    with S3Server({"models": objects}) as server:
        keys = S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)
        headrace.save_metadata("s3://models/m", tmp_path / "saved", credentials=keys)
        asked = len(server.requests)
        with headrace.open("s3://models/m", metadata=tmp_path / "saved", credentials=keys) as checkpoint:
            assert len(server.requests) == asked + 2
            assert set(checkpoint) == set(headrace.open(model))
        contents = mixed_contents() | {"layer.0.weight": random_entry("BF16", (256, 1024), seed=1)}
        server.put("models", f"m/{SECOND}", serialize({f"00002.{name}": entry for name, entry in contents.items()}))
        with pytest.raises(SourceChangedError, match=SECOND):
            headrace.open("s3://models/m", metadata=tmp_path / "saved", credentials=keys)
