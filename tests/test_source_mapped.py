"""Mapped files: the contract, what is refused, and what the mapping outlives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.errors import SourceChangedError, SourceError, SourceNotFoundError
from headrace.sources import mapped
from headrace.sources.file import filesystem_name, is_local_filesystem
from headrace.sources.mapped import MappedSource
from headrace.testing import AlignedSourceTests, MappableSourceTests


class TestMappedSource(AlignedSourceTests, MappableSourceTests):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, data: bytes) -> MappedSource:
        path = self.folder / f"{len(data)}.safetensors"
        if not path.exists():
            path.write_bytes(data)
        return MappedSource(path)


def test_mapping_outlives_the_path_and_the_source(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"weights" * 1000)
    source = MappedSource(path)
    view = source.map()
    source.close()
    path.unlink()
    assert view == b"weights" * 1000


def test_mapping_goes_with_its_last_slice(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"weights" * 1000)
    source = MappedSource(path)
    view = source.map()
    part = view[3:9]
    del view
    assert str(path) in Path("/proc/self/maps").read_text()
    del part
    assert str(path) not in Path("/proc/self/maps").read_text()
    source.close()


@pytest.mark.parametrize("nbytes", [0, 3, 20_000])
def test_a_file_of_another_size_is_not_mapped(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(9000))
    source = MappedSource(path)
    os.truncate(path, nbytes)
    with pytest.raises(SourceChangedError):
        source.map()
    source.close()


def test_a_network_filesystem_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "is_local_filesystem", lambda _: False)
    path = tmp_path / "a"
    path.write_bytes(b"bytes")
    source = MappedSource(path)
    with pytest.raises(SourceError) as caught:
        source.map()
    assert caught.value.url == str(path)
    source.close()


def test_proc_counts_as_no_place_to_map_from() -> None:
    with open("/proc/self/status", "rb") as file:
        assert not is_local_filesystem(filesystem_name(file.fileno()))


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm")
def test_tmpfs_is_mapped() -> None:
    path = Path(f"/dev/shm/headrace-test-{os.getpid()}")
    path.write_bytes(b"weights")
    try:
        source = MappedSource(path)
        assert source.map() == b"weights"
        source.close()
    finally:
        path.unlink()


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError):
        MappedSource(tmp_path / "missing")
