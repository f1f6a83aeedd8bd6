"""Bytes that are in memory already: small checkpoints, tests, and whatever a caller fetched by other means.

The data is used where it lies and not copied, so whoever hands in a bytearray must not write to it while it is read.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

from headrace.errors import SourceError, SourceNotFoundError, TruncatedError

Bytes = bytes | bytearray | memoryview


class MemorySource:
    """Read from bytes in memory.

    Args:
        data: contiguous bytes; kept alive, not copied.
        url: names the source in errors and statistics.

    Example:
        >>> buffer = bytearray(3)
        >>> MemorySource(b"weights").read_into(2, memoryview(buffer))
        >>> bytes(buffer)
        b'igh'
    """

    def __init__(self, data: Bytes, *, url: str = "memory:") -> None:
        self.url = url
        self._data: memoryview | None = memoryview(data).cast("B")
        self.nbytes = self._data.nbytes
        self.version: object = (id(data), self.nbytes)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the bytes from `offset` on. See `ByteSource.read_into`."""
        data, nbytes = self._data, len(buffer)
        if data is None or offset < 0 or offset + nbytes > self.nbytes:
            raise self._refuse_range(offset, nbytes)
        buffer[:] = data[offset : offset + nbytes]

    def is_in_memory(self) -> bool:
        """True."""
        return True

    def check_unchanged(self) -> None:
        """Do nothing: the caller promised not to write to the bytes."""
        if self._data is None:
            raise self._refuse_range(None, None)

    def close(self) -> None:
        """Let go of the bytes. May be called twice."""
        self._data = None

    def _refuse_range(self, offset: int | None, nbytes: int | None) -> SourceError:
        kind: type[SourceError] = TruncatedError
        status: int | None = None
        why = f"it has {self.nbytes} bytes"
        if self._data is None:
            kind, status, why = SourceError, errno.EBADF, "it was closed"
        elif offset is None or offset < 0:
            kind, status, why = SourceError, errno.EINVAL, "the offset is negative"
        message = f"cannot read {nbytes} bytes at {offset} of {self.url}: {why}"
        return kind(message, url=self.url, offset=offset, nbytes=nbytes, status=status)


class MemoryFolder:
    """Files by name, in memory.

    Args:
        files: the bytes of each file by its name; looked up when asked for, so later additions are seen.
        url: names the folder; a file's url is this, a slash and its name.
    """

    def __init__(self, files: Mapping[str, Bytes], *, url: str = "memory:") -> None:
        self.url = url
        self._files = files

    def names(self) -> list[str]:
        """Names of the files, sorted."""
        return sorted(self._files)

    def open(self, name: str) -> MemorySource:
        """Open one file of the folder. Raises `SourceNotFoundError` where there is none of this name."""
        url = f"{self.url}/{name}"
        if name not in self._files:
            raise SourceNotFoundError(f"{self.url} holds no {name!r}", url=url)
        return MemorySource(self._files[name], url=url)
