"""Byte ranges of any file as a checkpoint: one U8 tensor per range, so that the engine reads them as it reads weights.

The file that the engine sees is a header of our own with the ranges behind it, in the order in which they lie in the real file.
Ranges that follow on each other stay one stretch, and a read of it one read of the real file.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final

import headrace
from headrace.errors import TruncatedError
from headrace.integrations.runai.file_streamer.requests_iterator import FileChunks
from headrace.sources.base import ByteSource, Folder, is_remote, read_into_each

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
        self.read_into_each(offset, [buffer])

    def read_into_each(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, one after another, with the bytes from `offset` on; a request per stretch. Raises as `read_into`."""
        rest, nbytes = deque(buffers), sum(map(len, buffers))
        if offset + nbytes > self.nbytes:
            why = f"the ranges have {self.nbytes} bytes in all"
            raise TruncatedError(f"cannot read {nbytes} bytes at {offset} of {self.url}: {why}", url=self.url)
        end = offset + nbytes
        while offset < end:
            at = bisect_right(self._begins, offset) - 1
            until = self._begins[at + 1] if at + 1 < len(self._begins) else self.nbytes
            parts = _take(rest, until - offset)
            if at < 0:
                _copy(self._header, offset, parts)
            else:
                read_into_each(self.source, self._offsets[at] + offset - self._begins[at], parts)
            offset = min(until, end)

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


def _take(rest: deque[memoryview], nbytes: int) -> list[memoryview]:
    """So many bytes off the front of what is left to be filled, or all of it where that is less."""
    parts = []
    while rest and nbytes:
        buffer = rest.popleft()
        if len(buffer) > nbytes:
            rest.appendleft(buffer[nbytes:])
            buffer = buffer[:nbytes]
        parts.append(buffer)
        nbytes -= len(buffer)
    return parts


def _copy(data: bytes, offset: int, buffers: Sequence[memoryview]) -> None:
    for buffer in buffers:
        buffer[:] = data[offset : offset + len(buffer)]
        offset += len(buffer)


def _make_header(file: int, order: Sequence[int], sizes: Sequence[int]) -> bytes:
    entries, at = {}, 0
    for index in order:
        entries[range_name(file, index)] = {"dtype": "U8", "shape": [1, sizes[index]], "data_offsets": [at, at + sizes[index]]}
        at += sizes[index]
    text = json.dumps(entries).encode().ljust(_HEADER_NBYTES)
    return len(text).to_bytes(8, "little") + text
