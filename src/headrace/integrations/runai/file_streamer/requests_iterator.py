"""Which ranges of which files: what a request of `FileStreamer` is made of.

`RUNAI_STREAMER_MEMORY_LIMIT` is read by `headrace.Options`. There is no ring here, so the other variables have nothing to set;
their names, and the exception, are here for programs that refer to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

RUNAI_STREAMER_MEMORY_LIMIT_ENV_VAR_NAME: Final = "RUNAI_STREAMER_MEMORY_LIMIT"
RUNAI_STREAMER_RING_BUFFERS_ENV_VAR_NAME: Final = "RUNAI_STREAMER_RING_BUFFERS"
RUNAI_STREAMER_MAX_PADS_PER_BUFFER_ENV_VAR_NAME: Final = "RUNAI_STREAMER_MAX_PADS_PER_BUFFER"


class RunaiStreamerMemoryLimitException(Exception):  # noqa: N818  # Run:ai's name
    """Never raised: a range larger than the memory limit is read all the same."""


class FileChunks:
    """Ranges of one file, in any order; they may overlap.

    Args:
        id: of the caller's choice, one per request; comes back with every range.
        path: a local path or a url.
        offsets, sizes: bytes, one of each per range.

    Raises:
        ValueError: they are not of one length.
    """

    def __init__(self, id: int, path: str, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        if len(offsets) != len(sizes):
            raise ValueError(f"{path}: {len(offsets)} offsets and {len(sizes)} sizes; each range has one of both")
        self.id = id
        self.path = path
        self.offsets = offsets
        self.sizes = sizes

    @staticmethod
    def contiguous(id: int, path: str, offset: int, sizes: Sequence[int]) -> FileChunks:
        """Ranges that follow on each other, the first one at `offset`."""
        offsets = []
        for nbytes in sizes:
            offsets.append(offset)
            offset += nbytes
        return FileChunks(id, path, offsets, sizes)

    def total_size(self) -> int:
        """Bytes of all ranges."""
        return sum(self.sizes)

    def max_chunk_size(self) -> int:
        """Bytes of the largest range."""
        return max(self.sizes)

    def __repr__(self) -> str:
        return f"FileChunks(id={self.id!r}, path={self.path!r}, {len(self.sizes)} ranges, {self.total_size()} bytes)"
