"""The url of an index, pulled and verified: it stands for the shards that it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import random_contents, serialize
from http_servers import Server
from typer.testing import CliRunner

import headrace
from headrace._manifest import MANIFEST_NAME
from headrace.cli import app
from headrace.errors import FormatError, IntegrityError, OptionError, SourceNotFoundError

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PARTS = (random_contents(100_000, 5), {"z": next(iter(random_contents(70_000).values()))})
FILES = {name: serialize(contents) for name, contents in zip(SHARDS, PARTS, strict=True)} | {
    INDEX: json.dumps(
        {"weight_map": {name: shard for shard, contents in zip(SHARDS, PARTS, strict=True) for name in contents}}
    ).encode(),
    "config.json": b"{}",
    "stray.safetensors": serialize(random_contents(10)),
}
WANTED = {*SHARDS, INDEX}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def present(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_pull_of_an_index_takes_its_shards(model: Path, tmp_path: Path) -> None:
    report = headrace.pull(model / INDEX, tmp_path / "copy")
    assert present(tmp_path / "copy") == WANTED
    assert (report.files, report.index) == (3, INDEX)
    assert headrace.load(tmp_path / "copy").keys() == headrace.load(model / INDEX).keys()


def test_a_pull_of_an_index_over_a_network_lists_nothing(tmp_path: Path) -> None:
    with Server({f"/m/{name}": data for name, data in FILES.items()}) as server:
        headrace.pull(server.url_of(f"/m/{INDEX}"), tmp_path / "copy")
        assert {seen.target for seen in server.seen} == {f"/m/{name}" for name in WANTED}
    assert {name: (tmp_path / "copy" / name).read_bytes() for name in WANTED} == {name: FILES[name] for name in WANTED}


def test_patterns_choose_among_what_an_index_names(model: Path, tmp_path: Path) -> None:
    headrace.pull(model / INDEX, tmp_path / "copy", exclude="*-00002-of-*")
    assert present(tmp_path / "copy") == {SHARDS[0], INDEX}


def test_moving_an_index_moves_its_shards_and_nothing_else(model: Path, tmp_path: Path) -> None:
    headrace.pull(model / INDEX, tmp_path / "copy", move=True)
    assert present(model) == FILES.keys() - WANTED
    assert present(tmp_path / "copy") == WANTED


def test_one_shard_stays_one_file(model: Path, tmp_path: Path) -> None:
    assert headrace.pull(model / SHARDS[0], tmp_path / "copy").index is None
    assert present(tmp_path / "copy") == {SHARDS[0]}


def test_the_summary_names_the_index(model: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pull", str(model / INDEX), str(tmp_path / "copy")])
    assert result.exit_code == 0
    assert f"{INDEX}, with the shards that it names" in result.stdout


def test_verifying_an_index_checks_its_shards(model: Path) -> None:
    headrace.verify(model, write=True)
    (model / "config.json").write_bytes(b"[]")
    report = headrace.verify(model / INDEX)
    assert (report.ok, {file.name for file in report.files}) == (True, WANTED)
    assert report.url == f"{model}/{INDEX}"
    data = bytearray(FILES[SHARDS[1]])
    data[-1] ^= 1
    (model / SHARDS[1]).write_bytes(data)
    assert [file.name for file in headrace.verify(model / INDEX).failed] == [SHARDS[1]]


def test_a_shard_that_is_missing_is_an_error(model: Path, tmp_path: Path) -> None:
    headrace.verify(model, write=True)
    (model / SHARDS[1]).unlink()
    assert {file.name: file.status for file in headrace.verify(model / INDEX).failed} == {SHARDS[1]: "unreadable"}
    with pytest.raises(SourceNotFoundError):
        headrace.pull(model / INDEX, tmp_path / "copy")


def pull_it(url: Path, tmp_path: Path) -> None:
    headrace.pull(url, tmp_path / "copy")


def verify_it(url: Path, tmp_path: Path) -> None:
    headrace.verify(url, out=tmp_path / MANIFEST_NAME)


@pytest.mark.parametrize("do", [pull_it, verify_it])
@pytest.mark.parametrize("text", [b"{", b"{}", b'{"weight_map": {"a": "../a.safetensors"}}', b'{"weight_map": {"a": 1}}'])
def test_what_is_no_index_is_refused(model: Path, tmp_path: Path, do: Callable[[Path, Path], None], text: bytes) -> None:
    (model / INDEX).write_bytes(text)
    with pytest.raises((FormatError, IntegrityError)):
        do(model / INDEX, tmp_path)


def test_a_manifest_of_some_files_goes_where_it_is_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        headrace.verify(model / INDEX, write=True)
    headrace.verify(model / INDEX, out=tmp_path / "m.json")
    assert json.loads((tmp_path / "m.json").read_text())["files"].keys() == WANTED
