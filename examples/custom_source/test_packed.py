"""Packed files are sources, and folders of them are folders, as headrace's own contract says."""

from __future__ import annotations

from pathlib import Path

import pytest
from packed import HEAD, SUFFIX, PackedFolder, pack

import headrace
from headrace.sources.base import ByteSource
from headrace.testing import FolderTests, SourceTests


@pytest.fixture(autouse=True)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if request.instance is not None:
        request.instance.path = tmp_path / "m"


def packed_folder(path: Path, files: dict[str, bytes]) -> PackedFolder:
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
        pack(path / name, path / (name + SUFFIX))
        (path / name).unlink()
    return PackedFolder(headrace.folder(path))


class TestPackedSource(SourceTests):
    path: Path
    data = SourceTests.data * 8  # several blocks

    def make(self, data: bytes) -> ByteSource:
        return packed_folder(self.path, {f"{len(data)}": data}).open(f"{len(data)}")


class TestPackedFolder(FolderTests):
    path: Path

    def make(self, files: dict[str, bytes]) -> PackedFolder:
        return packed_folder(self.path, files)

    def make_missing(self) -> PackedFolder:
        return PackedFolder(headrace.folder(self.path))


def test_a_block_that_is_damaged_is_an_error_and_no_wrong_bytes(tmp_path: Path) -> None:
    folder = packed_folder(tmp_path / "m", {"a": bytes(3 << 20)})
    path = tmp_path / "m" / ("a" + SUFFIX)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    source = folder.open("a")
    source.read_into(0, memoryview(bytearray(1000)))
    with pytest.raises(headrace.SourceError):
        source.read_into(2 << 20, memoryview(bytearray(1000)))
    source.close()


def test_what_is_no_packed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / ("a" + SUFFIX)).write_bytes(bytes(HEAD.size))
    with pytest.raises(headrace.SourceError):
        PackedFolder(headrace.folder(tmp_path)).open("a")
