"""What the engine knows of storage: a few verbs, and nothing of files, sockets or clouds.

A `ByteSource` is one file or object of known size, opened at one version. A `Folder` is a place that holds them by name. Adapters
translate their own exceptions into `headrace.errors` at this boundary, once. No adapter knows tensors, devices or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast, runtime_checkable


class ByteSource(Protocol):
    """One file or object, readable at any offset from several threads at once.

    Attributes:
        url: names the source in every error and statistic.
        nbytes: its size when it was opened, in bytes.
        version: whatever identifies these bytes (inode and times, ETag, generation); compared with ==, never parsed.
    """

    @property
    def url(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def version(self) -> object: ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the bytes from `offset` on, or raise.

        Args:
            offset: first byte; `offset + len(buffer)` must not pass `nbytes`.
            buffer: writable, contiguous bytes (format 'B'). May be empty.

        Raises:
            TruncatedError: the source ends early.
            SourceError: any other failure, with url, offset and nbytes.
        """

    def check_unchanged(self) -> None:
        """Raise `SourceChangedError` unless the source still is the version that was opened.

        Called after the last read of a range and before its bytes are handed out. Sources that pin their version with every
        read (HTTP's If-Match) have nothing to do.
        """

    def close(self) -> None:
        """Give back descriptors and connections. Reads after it raise `SourceError`. May be called twice."""


@runtime_checkable
class AlignedSource(ByteSource, Protocol):
    """A source that can also be read past the page cache, from and into aligned addresses only.

    Attributes:
        block_nbytes: offsets, addresses and lengths of direct reads are multiples of this.
        direct_refused: why direct reads do not work here; None while they do, or have not been tried.
    """

    @property
    def block_nbytes(self) -> int: ...
    @property
    def direct_refused(self) -> str | None: ...

    def prefers_direct(self, offset: int, nbytes: int) -> bool:
        """Whether this range is better read directly: direct reads work here and the range is not in the page cache."""

    def read_direct_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` past the page cache.

        Args:
            offset: a multiple of `block_nbytes`.
            buffer: its address and length are multiples of `block_nbytes`. It may reach past the end of the source by less than
                one block; those bytes are left as they are.

        Raises:
            As `read_into`. A filesystem that refuses is no error: the bytes come by `read_into`'s way and
            `prefers_direct` answers False from then on.
        """


def aligned_source(source: ByteSource) -> AlignedSource | None:
    """The source as one that can be read past the page cache, or None. isinstance() would take 30 microseconds a read."""
    return cast(AlignedSource, source) if hasattr(source, "read_direct_into") else None


def read_as_preferred(source: ByteSource, offset: int, nbytes: int, memory: memoryview) -> None:
    """Fill the first `nbytes` of memory that begins at a page, past the page cache where the source prefers that and it fits."""
    aligned = aligned_source(source)
    if aligned is not None and offset % aligned.block_nbytes == 0 and aligned.prefers_direct(offset, nbytes):
        rounded = -(-nbytes // aligned.block_nbytes) * aligned.block_nbytes
        if rounded <= len(memory):
            aligned.read_direct_into(offset, memory[:rounded])
            return
    source.read_into(offset, memory[:nbytes])


class CachedSource(Protocol):
    """A source that may know that reading it costs no more than a copy."""

    def is_in_memory(self) -> bool:
        """Whether all of it lies in this machine's memory. False also where that cannot be known."""


def is_in_memory(source: ByteSource) -> bool:
    """Whether all of a source is known to lie in this machine's memory."""
    return hasattr(source, "is_in_memory") and cast(CachedSource, source).is_in_memory()


@runtime_checkable
class JoiningSource(ByteSource, Protocol):
    """A source that fetches neighbouring ranges with one request, whatever memory each of them belongs to."""

    def read_into_each(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, one after another, with the bytes from `offset` on. Otherwise as `read_into`."""


def read_into_each(source: ByteSource, offset: int, buffers: Sequence[memoryview]) -> None:
    """Fill buffers with the bytes that follow each other from `offset` on: by one request where the source can do that."""
    if hasattr(source, "read_into_each"):
        cast(JoiningSource, source).read_into_each(offset, buffers)
        return
    for buffer in buffers:
        source.read_into(offset, buffer)
        offset += len(buffer)


def is_remote(source: ByteSource) -> bool:
    """Whether every read is a round trip over a network. Such sources count their `traffic`."""
    return hasattr(source, "traffic")


@runtime_checkable
class MappableSource(ByteSource, Protocol):
    """A source whose bytes can be mapped into memory where they lie."""

    def map(self) -> memoryview:
        """The whole source as memory, copy on write: writes never reach it. Valid while the view, or a slice of it, lives."""


@runtime_checkable
class LocalSource(ByteSource, Protocol):
    """A file of this machine, which others may open again."""

    def reopen(self, flags: int) -> int:
        """A new descriptor of the open file, whatever lies at its path by now; the caller closes it. Raises OSError."""

    def forgive_times(self) -> None:
        """Take the file's times as they are now for those of the version that was opened.

        For who has just made its pages writable, which moves them although nothing is written. Raises `SourceChangedError` where
        it is another file by now, or of another size.
        """


class DirectSource(Protocol):
    """A file that can be read straight into the memory of a device."""

    def read_into_device(self, offset: int, pointer: int, nbytes: int, *, keep: object) -> None:
        """Fill `nbytes` bytes of device memory with the bytes from `offset` on, or raise.

        Args:
            offset, nbytes: in the file.
            pointer: address of the device memory, which nothing that was queued before may still use.
            keep: its owner. A call that does not come back in time keeps it for as long as it may still write there.

        Raises:
            SourceTimeoutError: the call did not come back in time; the memory must not be used again.
            TruncatedError: the file ends early.
            SourceError: any other failure.
        """


class Folder(Protocol):
    """A place that holds sources by name: a directory, a prefix in a bucket, a repository on a hub."""

    @property
    def url(self) -> str: ...

    def names(self) -> list[str]:
        """Names of the files directly inside, sorted. Raises `SourceNotFoundError` where the place does not exist."""

    def open(self, name: str) -> ByteSource:
        """Open one file of the folder. Raises `SourceNotFoundError` where it does not exist."""


@runtime_checkable
class Tree(Folder, Protocol):
    """A folder that also knows what lies in the folders below it."""

    def walk(self) -> list[str]:
        """Paths of all files in it and below it, relative, with '/', sorted; `open` takes them. Raises as `names`."""


@runtime_checkable
class RemovableFolder(Folder, Protocol):
    """A folder whose files may be removed, once they are safe elsewhere. No store in a cloud is one."""

    def remove(self, name: str) -> None:
        """Remove one file; of a link the link. Raises `SourceError` where that is not possible."""
