"""Files, lists and folders of shards as one mapping: what the index allows, what a folder must hold, what is closed again."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import headrace
from headrace._checkpoint import open_folder, read_header
from headrace._options import Options
from headrace.errors import FormatError, HeadraceError, OptionError, SourceError, SourceNotFoundError, TensorNotFoundError
from headrace.sources.file import FileFolder
from headrace.sources.memory import MemoryFolder, MemorySource

INDEX = "model.safetensors.index.json"


def shard(*names: str, metadata: dict[str, str] | None = None) -> bytes:
    """A file whose tensors, two float32 each, hold their place in `names`."""
    return save({name: np.full(2, i, np.float32) for i, name in enumerate(names)}, metadata)


def index(weight_map: Mapping[str, object], **more: object) -> bytes:
    return json.dumps({"weight_map": weight_map, **more}).encode()


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def names_in(files: Mapping[str, bytes]) -> list[str]:
    with headrace.open(MemoryFolder(files, url="memory:/m")) as checkpoint:
        return list(checkpoint)


def error_in(files: Mapping[str, bytes], kind: type[HeadraceError] = FormatError) -> Any:
    with pytest.raises(kind) as caught:
        headrace.open(MemoryFolder(files, url="memory:/m"))
    assert caught.type is kind
    return caught.value


# ---- the index decides

SHARDS = {"a.safetensors": shard("a", "b"), "b.safetensors": shard("c")}


def test_index_lists_what_is_loaded_and_strays_are_not() -> None:
    files = {**SHARDS, INDEX: index({"a": "a.safetensors", "c": "b.safetensors"}), "stray.safetensors": shard("a", "z")}
    assert names_in(files) == ["a", "c"]


def test_a_stray_that_is_no_safetensors_file_does_no_harm() -> None:
    assert names_in({**SHARDS, INDEX: index({"c": "b.safetensors"}), "z.safetensors": b"garbage"}) == ["c"]


def test_numbered_files_that_the_index_does_not_name_need_not_be_complete() -> None:
    assert names_in({"m-00001-of-00009.safetensors": shard("x"), **SHARDS, INDEX: index({"c": "b.safetensors"})}) == ["c"]


def test_a_name_in_two_shards_is_taken_from_the_one_that_the_index_names() -> None:
    files = {"1.safetensors": shard("x", "t"), "2.safetensors": shard("t", "y")}
    files[INDEX] = index({"x": "1.safetensors", "t": "2.safetensors", "y": "2.safetensors"})
    with headrace.open(MemoryFolder(files)) as checkpoint:
        assert checkpoint["t"].shard.endswith("2.safetensors")
        assert list(checkpoint) == ["x", "t", "y"]


def test_tensors_that_the_index_leaves_out_are_said_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="headrace"):
        names_in({**SHARDS, INDEX: index({"a": "a.safetensors", "c": "b.safetensors"})})
    assert [(record.name, record.levelname) for record in caplog.records] == [("headrace", "WARNING")]
    assert "a.safetensors" in caplog.records[0].getMessage()


def test_index_metadata_does_not_matter() -> None:
    assert names_in({**SHARDS, INDEX: index({"c": "b.safetensors"}, metadata={"total_size": -5}, more=[1])}) == ["c"]


def test_a_tensor_that_is_not_in_its_shard_is_named() -> None:
    error = error_in({**SHARDS, INDEX: index({"a": "b.safetensors", "c": "b.safetensors"})})
    assert error.tensor == "a"
    assert error.url.endswith("b.safetensors")


def test_a_missing_shard_is_named() -> None:
    error = error_in({**SHARDS, INDEX: index({"a": "a.safetensors", "q": "gone.safetensors"})}, SourceNotFoundError)
    assert "gone.safetensors" in str(error)
    assert isinstance(error, FileNotFoundError)


@pytest.mark.parametrize(
    "name",
    [
        "../a.safetensors",
        "..",
        "sub/../../a.safetensors",
        "sub/..",
        "./a.safetensors",
        "sub//a.safetensors",
        "sub/",
        "/etc/passwd",
        "//server/share/a.safetensors",
        "..\\a.safetensors",
        "sub\\a.safetensors",
        "\\\\server\\share\\a.safetensors",
        "C:\\a.safetensors",
        "C:a.safetensors",
        "c:/a.safetensors",
        "file:///etc/passwd",
        "https://example.com/a.safetensors",
        "s3://bucket/a.safetensors",
        "a.safetensors\0",
        "a\0/../b",
        "",
        ".",
        "/",
    ],
    ids=repr,
)
def test_a_shard_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "in", {INDEX: index({"a": name}), "a.safetensors": shard("a"), "sub/a.safetensors": shard("a")})
    write(tmp_path, {"a.safetensors": shard("a")})
    with pytest.raises(FormatError) as caught:
        headrace.open(folder)
    assert caught.value.url == str(folder / INDEX)


@pytest.mark.parametrize(
    "name", ["sub/a.safetensors", "s/u/b/a b.safetensors", "..a/a..safetensors", "weights", "ä%2F#?.safetensors"]
)
def test_a_shard_may_lie_in_a_subfolder_and_have_any_name(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, {INDEX: index({"a": name}), name: shard("a")})
    with headrace.open(folder) as checkpoint:
        assert checkpoint["a"].shard == str(folder / name)
    assert list(headrace.load(folder)) == ["a"]


@pytest.mark.parametrize("name", ["sub/gone.safetensors", "folder", "sub/\udcff", "\ud800"], ids=ascii)
def test_a_shard_that_is_not_there_is_not_found_whatever_its_name(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, {INDEX: index({"a": name}), "folder/x": b"", "sub/x": b""})
    with pytest.raises(SourceError):
        headrace.open(folder)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b'{"weight_map": []}',
        b'{"weight_map": null}',
        b'{"metadata": {}}',
        b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}',
        b'{"weight_map": {}, "weight_map": {"a": "a.safetensors"}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": null}}',
        b'{"weight_map": {"a": ["a.safetensors"]}}',
        b'{"weight_map": {"a": "a.safetensors"}',
        b'{"weight_map": {"a": "a.safetensors"}}}',
        b'\xff\xfe{"weight_map": {}}',
        b'{"weight_map": {"a": "a.safetensors"}, "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"weight_map": {"a": "a.safetensors"}, "n": ' + b"9" * 5000 + b"}",
        b"version https://git-lfs.github.com/spec/v1\n",
        b"<!DOCTYPE html>",
    ],
    ids=lambda text: text[:44].decode("latin-1"),
)
def test_an_index_that_is_none_is_named(text: bytes) -> None:
    assert error_in({**SHARDS, INDEX: text}).url == f"memory:/m/{INDEX}"


# ---- which index

OTHER = "diffusion_pytorch_model.safetensors.index.json"


def test_the_only_index_of_a_folder_counts_whatever_its_name() -> None:
    assert names_in({**SHARDS, OTHER: index({"c": "b.safetensors"})}) == ["c"]


def test_of_several_indexes_the_models_own_counts() -> None:
    assert names_in({**SHARDS, OTHER: index({"c": "b.safetensors"}), INDEX: index({"a": "a.safetensors"})}) == ["a"]


def test_several_indexes_of_which_none_is_the_models_are_refused() -> None:
    files = {**SHARDS, OTHER: index({"c": "b.safetensors"}), "x.safetensors.index.json": index({"a": "a.safetensors"})}
    error = error_in(files)
    assert error.url == "memory:/m"
    assert OTHER in str(error)


def test_an_index_may_be_opened_by_its_path(tmp_path: Path) -> None:
    files = {**SHARDS, OTHER: index({"c": "b.safetensors"}), "x.safetensors.index.json": index({"a": "a.safetensors"})}
    write(tmp_path, files)
    for name, expected in ((OTHER, ["c"]), ("x.safetensors.index.json", ["a"])):
        with headrace.open(tmp_path / name) as checkpoint:
            assert list(checkpoint) == expected
    with pytest.raises(SourceNotFoundError):
        headrace.open(tmp_path / INDEX)


# ---- folders without an index


def test_without_an_index_every_file_counts_in_order_of_name() -> None:
    assert names_in({"b.safetensors": shard("a"), "a.safetensors": shard("b", "c"), "config.json": b"{}"}) == ["b", "c", "a"]


def test_hidden_files_and_other_kinds_do_not_count() -> None:
    files = {
        "a.safetensors": shard("a"),
        "._a.safetensors": b"macOS",
        ".safetensors": b"",
        "a.safetensors.part": b"",
        "b.bin": b"",
    }
    assert names_in(files) == ["a"]


@pytest.mark.parametrize(
    "files", [{}, {"config.json": b"{}", "model.bin": b""}, {"a.SAFETENSORS": shard("a")}, {".safetensors": b""}]
)
def test_a_folder_without_safetensors_files_is_named(tmp_path: Path, files: dict[str, bytes]) -> None:
    write(tmp_path, files)
    with pytest.raises(SourceNotFoundError) as caught:
        headrace.open(tmp_path)
    assert caught.value.url == str(tmp_path)


def numbered(*parts: int, count: int = 3, stem: str = "model") -> dict[str, bytes]:
    return {f"{stem}-{part:05d}-of-{count:05d}.safetensors": shard(f"{stem}.{count}.{part}") for part in parts}


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (numbered(1, 2), "model-00003-of-00003.safetensors"),
        (numbered(2, 3), "model-00001-of-00003.safetensors"),
        (numbered(1, 3), "model-00002-of-00003.safetensors"),
        (numbered(0, 1, 2), "model-00003-of-00003.safetensors"),
        (numbered(1, 2, 4), "model-00003-of-00003.safetensors"),
        ({**numbered(1, 2, 3), **numbered(1, count=2, stem="te")}, "te-00002-of-00002.safetensors"),
        ({**numbered(1, 2, 3), **numbered(1, count=2)}, "model-00002-of-00002.safetensors"),
        (numbered(1, count=99999), "model-00002-of-99999.safetensors"),
        ({"m-1-of-" + "9" * 50 + ".safetensors": shard("a")}, "9" * 50),
    ],
)
def test_a_gap_in_a_numbered_set_is_named(files: dict[str, bytes], missing: str) -> None:
    error = error_in(files)
    assert error.url == "memory:/m"
    assert missing in str(error)


@pytest.mark.parametrize(
    "files",
    [
        numbered(1, 2, 3),
        {**numbered(1, 2, 3), **numbered(1, 2, count=2, stem="te"), "extra.safetensors": shard("x")},
        {"model-00001.safetensors": shard("a")},
        {"model-2-of-hearts.safetensors": shard("a")},
    ],
)
def test_complete_sets_and_other_names_are_fine(files: dict[str, bytes]) -> None:
    assert len(names_in(files)) == len(files)


def test_a_name_in_two_files_is_an_error_that_names_both() -> None:
    error = error_in({"a.safetensors": shard("x", "t"), "b.safetensors": shard("t")})
    assert error.tensor == "t"
    assert "a.safetensors" in str(error)
    assert error.url == "memory:/m/b.safetensors"


# ---- links


def test_links_that_lead_out_of_the_folder_are_followed(tmp_path: Path) -> None:
    write(
        tmp_path, {"blobs/1": shard("a"), "blobs/2": shard("b"), "blobs/3": index({"a": "x.safetensors", "b": "y.safetensors"})}
    )
    snapshot = tmp_path / "snapshots/rev"
    snapshot.mkdir(parents=True)
    for name, blob in (("x.safetensors", "1"), ("y.safetensors", "2"), (INDEX, "3")):
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    (tmp_path / "main").symlink_to("snapshots/rev")
    for folder in (snapshot, tmp_path / "main"):
        with headrace.open(folder) as checkpoint:
            assert list(checkpoint) == ["a", "b"]


def test_dangling_and_circular_links_are_not_found(tmp_path: Path) -> None:
    write(tmp_path, {INDEX: index({"a": "a.safetensors"})})
    for target in ("gone", "a.safetensors"):
        (tmp_path / "a.safetensors").symlink_to(target)
        with pytest.raises(SourceError):
            headrace.open(tmp_path)
        with pytest.raises(SourceError):
            headrace.open(tmp_path / "a.safetensors")
        (tmp_path / "a.safetensors").unlink()


# ---- what can be opened


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "my model", {"a.safetensors": shard("a", "b"), "b.safetensors": shard("c")})


@pytest.mark.parametrize(
    "locate",
    [
        str,
        Path,
        lambda folder: f"file://{str(folder).replace(' ', '%20')}",
        lambda folder: f"file://localhost{str(folder).replace(' ', '%20')}/",
        lambda folder: f"{folder}/",
        lambda folder: [folder / "a.safetensors", str(folder / "b.safetensors")],
        lambda folder: (f"file://{folder}/a.safetensors", MemorySource(shard("c"))),
        lambda folder: FileFolder(folder),
        lambda folder: MemoryFolder({path.name: path.read_bytes() for path in folder.iterdir()}),
        lambda folder: os.path.relpath(folder),
    ],
    ids=[
        "str",
        "Path",
        "file url",
        "file url with host",
        "slash",
        "list",
        "mixed tuple",
        "Folder",
        "Folder in memory",
        "relative",
    ],
)
def test_every_kind_of_location_opens_alike(model: Path, locate: Callable[[Path], Any]) -> None:
    with headrace.open(locate(model)) as checkpoint:
        assert {name: (info.dtype, info.shape, info.nbytes) for name, info in checkpoint.items()} == dict.fromkeys(
            "abc", ("F32", (2,), 8)
        )


@pytest.mark.parametrize("locate", [str, Path, lambda path: [path], lambda path: MemorySource(path.read_bytes())])
def test_one_file_opens_alone(model: Path, locate: Callable[[Path], Any]) -> None:
    with headrace.open(locate(model / "a.safetensors")) as checkpoint:
        assert list(checkpoint) == ["a", "b"]
        assert len(checkpoint.shards) == 1


def test_a_list_keeps_its_order(model: Path) -> None:
    with headrace.open([model / "b.safetensors", model / "a.safetensors"]) as checkpoint:
        assert list(checkpoint) == ["c", "a", "b"]


def test_one_file_twice_is_a_name_twice(model: Path) -> None:
    with pytest.raises(FormatError):
        headrace.open([model / "b.safetensors", model / "b.safetensors"])


@pytest.mark.parametrize("url", [[], (), 5, None, object, "gopher://host/m", "file://host/m"], ids=repr)
def test_what_is_no_location_names_the_option(url: Any) -> None:
    with pytest.raises(OptionError) as caught:
        headrace.open(url)
    assert caught.value.option == "url"


@pytest.mark.parametrize("name", ["gone", "gone.safetensors", f"gone/{INDEX}", "a.safetensors/x"])
def test_what_is_not_there_is_named(model: Path, name: str) -> None:
    with pytest.raises(SourceError) as caught:
        headrace.open(model / name)
    assert str(model / name).startswith(str(caught.value.url))


def test_a_folder_in_a_list_is_an_error(model: Path) -> None:
    with pytest.raises(SourceError):
        headrace.open([model])


def test_an_open_checkpoint_is_taken_as_it_is(model: Path) -> None:
    with headrace.open(model) as checkpoint:
        assert headrace.open(checkpoint) is checkpoint
        assert list(headrace.load(checkpoint)) == ["a", "b", "c"]
        assert list(headrace.load(checkpoint, names="c")) == ["c"]


# ---- a mapping


def test_it_is_a_mapping_in_order_of_shards_and_offsets(model: Path) -> None:
    with headrace.open(model) as checkpoint:
        assert isinstance(checkpoint, Mapping)
        assert list(checkpoint) == list(checkpoint.keys()) == [info.name for info in checkpoint.values()] == ["a", "b", "c"]
        assert len(checkpoint) == 3
        assert "a" in checkpoint
        assert "z" not in checkpoint
        assert 5 not in checkpoint
        assert checkpoint.get("z") is None
        info = checkpoint["b"]
        assert (info.name, info.dtype, info.shape, info.nbytes) == ("b", "F32", (2,), 8)
        data = Path(info.shard).read_bytes()[info.offset : info.offset + info.nbytes]
        assert data == np.full(2, 1, np.float32).tobytes()


def test_an_unknown_name_is_a_key_error_with_what_is_spelled_alike() -> None:
    with headrace.open(MemorySource(shard("layer.weight"))) as checkpoint, pytest.raises(KeyError) as caught:
        checkpoint["layer.wieght"]
    assert isinstance(caught.value, TensorNotFoundError)
    assert caught.value.close_matches == ("layer.weight",)


def test_where_finds_every_row_with_and_without_an_index() -> None:
    files = {"a.safetensors": shard("a", "b", "c"), "b.safetensors": shard("d", "e"), "c.safetensors": shard("f")}
    allowed = {"c": "a.safetensors", "d": "b.safetensors", "e": "b.safetensors", "a": "a.safetensors", "f": "c.safetensors"}
    for extra in ({}, {INDEX: index(allowed)}):
        checkpoint = open_folder(MemoryFolder({**files, **extra}), Options())
        assert set(checkpoint.where) == (set(allowed) if extra else set("abcdef"))
        for name, (number, row) in checkpoint.where.items():
            assert checkpoint.headers[number].names[row] == name
            assert checkpoint[name].name == name


def test_totals_and_metadata_are_those_of_all_shards_and_the_first_one_wins() -> None:
    files = {
        "a.safetensors": shard("a", "b", metadata={"format": "pt", "who": "first"}),
        "b.safetensors": shard("c", metadata={"who": "second", "more": "x"}),
        "c.safetensors": shard("d"),
    }
    with headrace.open(MemoryFolder(files, url="memory:/m")) as checkpoint:
        assert checkpoint.nbytes == 4 * 8
        assert checkpoint.metadata == {"format": "pt", "who": "first", "more": "x"}
        assert checkpoint.shards == ("memory:/m/a.safetensors", "memory:/m/b.safetensors", "memory:/m/c.safetensors")
        assert "4 tensors" in repr(checkpoint)
        assert "memory:/m" in repr(checkpoint)
        assert "in 3 shards" in repr(checkpoint)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_open_checkpoint_is_not_duplicated_and_loads_afterwards(duplicate: Callable[[object], object], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(shard("a", "b"))
    with headrace.open(tmp_path) as checkpoint:
        with pytest.raises(TypeError, match="open its url again"):
            duplicate(checkpoint)
        gc.collect()  # half a duplicate would close what the checkpoint reads
        assert headrace.load(checkpoint, names="b")["b"].tolist() == [1.0, 1.0]


def test_a_file_that_is_given_twice_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(shard("a"))
    with pytest.raises(FormatError, match="is given twice"):
        headrace.open([tmp_path / "model.safetensors"] * 2)


def test_a_folder_of_folders_is_not_called_empty(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    with pytest.raises(SourceNotFoundError, match="holds no file itself; open the folder of the shards"):
        headrace.open(tmp_path)


def test_bytes_are_no_list_of_paths() -> None:
    with pytest.raises(OptionError, match="not bytes"):
        headrace.open(b"model")  # type: ignore[arg-type]


def test_totals_leave_out_what_the_index_leaves_out() -> None:
    with headrace.open(MemoryFolder({**SHARDS, INDEX: index({"a": "a.safetensors"})})) as checkpoint:
        assert (len(checkpoint), checkpoint.nbytes) == (1, 8)


def test_a_checkpoint_without_tensors_is_empty() -> None:
    with headrace.open(MemorySource(save({}))) as checkpoint:
        assert (len(checkpoint), list(checkpoint), checkpoint.nbytes, checkpoint.metadata) == (0, [], 0, {})


# ---- open and closed


def test_after_closing_names_can_be_read_and_closing_again_does_nothing(model: Path) -> None:
    with headrace.open(model) as checkpoint:
        assert open_descriptors(model) == ["a.safetensors", "b.safetensors"]
    checkpoint.close()
    assert open_descriptors(model) == []
    assert checkpoint["c"].shape == (2,)
    with pytest.raises(SourceError):
        headrace.load(checkpoint)


def test_a_checkpoint_that_is_dropped_closes_its_shards(model: Path) -> None:
    headrace.open(model)
    assert open_descriptors(model) == []


BROKEN: dict[str, dict[str, bytes]] = {
    "bad header": {"b.safetensors": b"garbage", "c.safetensors": b"more"},
    "cut file": {"b.safetensors": shard("c")[:-1]},
    "empty file": {"b.safetensors": b""},
    "name twice": {"b.safetensors": shard("a")},
    "tensor not in its shard": {INDEX: index({"a": "a.safetensors", "z": "b.safetensors"})},
    "shard not there": {INDEX: index({"a": "a.safetensors", "c": "sub/gone.safetensors"})},
    "bad index": {INDEX: b"{"},
    "bad shard name": {INDEX: index({"a": "a.safetensors", "c": "../b"})},
    "gap": {"m-1-of-2.safetensors": shard("x")},
}


@pytest.mark.parametrize("broken", BROKEN)
def test_shards_are_closed_on_every_error(model: Path, broken: str) -> None:
    write(model, BROKEN[broken])
    with pytest.raises(HeadraceError) as caught:
        headrace.open(model)
    assert open_descriptors(model) == []
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), type(caught.value))


def test_shards_are_closed_when_a_stream_cannot_begin(model: Path) -> None:
    with pytest.raises(TensorNotFoundError):
        headrace.stream(model, names="nothing like it")
    assert open_descriptors(model) == []


def open_descriptors(folder: Path) -> list[str]:
    """The files of `folder` that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = Path(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the one that listed them
            continue
        if folder in target.parents:
            found.append(target.name)
    return sorted(found)


# ---- headers


class CountingSource(MemorySource):
    """Memory that remembers which ranges were asked for."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.ranges: list[tuple[int, int]] = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.ranges.append((offset, len(buffer)))
        super().read_into(offset, buffer)


def test_a_header_is_one_read_and_two_where_it_is_long() -> None:
    short = CountingSource(shard("a"))
    read_header(short)
    assert short.ranges == [(0, short.nbytes)]
    data = save({f"tensor number {i}": np.zeros(100, np.float32) for i in range(2000)})
    length = int.from_bytes(data[:8], "little")
    long = CountingSource(data)
    assert len(read_header(long).names) == 2000
    assert long.ranges == [(0, 64 << 10), (64 << 10, 8 + length - (64 << 10))]
    assert sum(nbytes for _, nbytes in long.ranges) < long.nbytes
