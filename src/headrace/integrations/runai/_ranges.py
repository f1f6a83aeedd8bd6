"""Byte ranges of any file as a checkpoint: one U8 tensor per range, so that the engine reads them as it reads weights.

The file that the engine sees is a header of our own with the ranges behind it, in the order in which they lie in the real file.
Ranges that follow on each other stay one stretch, and a read of it one read of the real file.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import headrace
from headrace.integrations.runai.file_streamer.requests_iterator import FileChunks
from headrace.sources.base import ByteSource, Folder, is_remote

_HEADER_NBYTES: Final = 64 << 10  # what is read of a file to begin with: opening must not read ranges


def range_name(file: int, index: int) -> str:
    """The tensor that stands for a range: of the request's file-th entry the index-th range."""
    return f"{file}:{index}"


def parse_range_name(name: str) -> tuple[int, int]:
    """The reverse of `range_name`."""
    file, _, index = name.partition(":")
    return int(file), int(index)


class Opener:
    """Opens files as checkpoints of their ranges; files of one folder share its store."""

    def __init__(self) -> None:
        self._folders: dict[tuple[str, object], Folder] = {}

    def open(self, file: int, chunks: FileChunks, credentials: object) -> RangeSource:
        """Open the file of `chunks`, which is the request's file-th.

        Raises:
            SourceError: it cannot be opened.
        """
        parent, slash, name = chunks.path.rpartition("/")
        place = parent or slash or "."
        if (place, credentials) not in self._folders:
            self._folders[place, credentials] = headrace.folder(place, credentials=credentials)
        source = self._folders[place, credentials].open(name)
        kind = RemoteRangeSource if is_remote(source) else RangeSource
        return kind(source, file, chunks)


class RangeSource:
    """Ranges of a source, with a header before them. A `ByteSource`.

    Args:
        source: what is read; closed with this.
        file: number of the file in its request.
        chunks: the ranges.
    """

    def __init__(self, source: ByteSource, file: int, chunks: FileChunks) -> None:
        self.url, self.version = source.url, source.version
        self.source = source
        order = sorted(range(len(chunks.sizes)), key=lambda index: (chunks.offsets[index], chunks.sizes[index]))
        self._header = _make_header(file, order, chunks.sizes)
        self._begins: list[int] = []  # of the stretches, in what the engine sees
        self._offsets: list[int] = []  # and in the source
        self.nbytes = len(self._header)
        end = None
        for index in order:
            if chunks.offsets[index] != end:
                self._begins.append(self.nbytes)
                self._offsets.append(chunks.offsets[index])
            self.nbytes += chunks.sizes[index]
            end = chunks.offsets[index] + chunks.sizes[index]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer`; a part per stretch. See `ByteSource.read_into`."""
        if offset < len(self._header):
            part = self._header[offset : offset + len(buffer)]
            buffer[: len(part)] = part
            offset, buffer = offset + len(part), buffer[len(part) :]
        while len(buffer):
            at = bisect_right(self._begins, offset) - 1
            end = self._begins[at + 1] if at + 1 < len(self._begins) else self.nbytes
            nbytes = min(len(buffer), end - offset)
            self.source.read_into(self._offsets[at] + offset - self._begins[at], buffer[:nbytes])
            offset, buffer = offset + nbytes, buffer[nbytes:]

    def check_unchanged(self) -> None:
        """As the source's."""
        self.source.check_unchanged()

    def close(self) -> None:
        """Close the source."""
        self.source.close()


class RemoteRangeSource(RangeSource):
    """Ranges of an object in a store; read with the concurrency and in the sizes that a network wants."""

    @property
    def traffic(self) -> object:
        """What was asked of the network so far."""
        return getattr(self.source, "traffic", None)


def _make_header(file: int, order: Sequence[int], sizes: Sequence[int]) -> bytes:
    entries, at = {}, 0
    for index in order:
        entries[range_name(file, index)] = {"dtype": "U8", "shape": [1, sizes[index]], "data_offsets": [at, at + sizes[index]]}
        at += sizes[index]
    text = json.dumps(entries).encode().ljust(_HEADER_NBYTES)
    return len(text).to_bytes(8, "little") + text
