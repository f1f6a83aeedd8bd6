"""Bytes in memory pass the contract of every source, and are used where they lie."""

from __future__ import annotations

import pytest

from headrace.errors import SourceError
from headrace.sources.memory import Bytes, MemoryFolder, MemorySource
from headrace.testing import FolderTests, SourceTests


class TestMemorySource(SourceTests):
    def make(self, data: bytes) -> MemorySource:
        return MemorySource(data, url="memory:some/model.safetensors")


class TestMemorySourceOfAnInnerView(SourceTests):
    def make(self, data: bytes) -> MemorySource:
        return MemorySource(memoryview(bytearray(b"before" + data + b"after"))[6 : 6 + len(data)])


class TestMemoryFolder(FolderTests):
    def make(self, files: dict[str, bytes]) -> MemoryFolder:
        return MemoryFolder(files, url="memory:some")


@pytest.mark.parametrize(
    "data", [b"\0\1\2\3", bytearray(b"\0\1\2\3"), memoryview(b"\0\1\2\3"), memoryview(b"\0\1\2\3").cast("H")]
)
def test_takes_anything_that_is_bytes(data: Bytes) -> None:
    source, buffer = MemorySource(data), bytearray(3)
    source.read_into(1, memoryview(buffer))
    assert buffer == b"\1\2\3"
    assert source.nbytes == 4


def test_data_is_not_copied_and_let_go_on_close() -> None:
    data = bytearray(8)
    source = MemorySource(data)
    data[:] = b"headrace"
    buffer = bytearray(8)
    source.read_into(0, memoryview(buffer))
    assert buffer == b"headrace"
    source.close()
    data.clear()  # BufferError while the source still refers to it


def test_check_after_close_raises() -> None:
    source = MemorySource(b"")
    source.close()
    with pytest.raises(SourceError):
        source.check_unchanged()
