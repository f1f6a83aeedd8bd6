"""Files that are compressed block by block, as a source and a folder of headrace's.

A packed file is what `pack` writes: a magic, the size and the length of a block, where each block begins, and the blocks. Any
range is read by unpacking the blocks that it lies in, so many threads can read at once. The packed file itself may lie anywhere
that headrace reads from: on a disk, in a bucket, on a web server.
"""

from __future__ import annotations

import errno
import struct
import sys
import zlib
from array import array
from pathlib import Path

from headrace import SourceError, SourceNotFoundError, TruncatedError
from headrace.sources.base import ByteSource, Folder

MAGIC = b"PACKED01"
SUFFIX = ".packed"
BLOCK_NBYTES = 1 << 20
HEAD = struct.Struct("<8sQQ")


def pack(path: Path, target: Path) -> int:
    """Write `path` to `target`, packed; returns the packed size."""
    data = memoryview(path.read_bytes())
    blocks = [zlib.compress(data[at : at + BLOCK_NBYTES], 1) for at in range(0, len(data), BLOCK_NBYTES)]
    starts = array("Q", [HEAD.size + 8 * (len(blocks) + 1)])
    for block in blocks:
        starts.append(starts[-1] + len(block))
    if sys.byteorder == "big":
        starts.byteswap()
    target.write_bytes(HEAD.pack(MAGIC, len(data), BLOCK_NBYTES) + starts.tobytes() + b"".join(blocks))
    return target.stat().st_size


class PackedSource:
    """The bytes that a packed file stands for.

    Args:
        packed: the packed file; closed with this source.
        url: names this source in errors.
    """

    def __init__(self, packed: ByteSource, url: str) -> None:
        self.url, self.version = url, packed.version
        self._packed: ByteSource | None = packed
        head = _read(packed, 0, HEAD.size)
        magic, self.nbytes, self._block_nbytes = HEAD.unpack(head)
        if magic != MAGIC or not self._block_nbytes:
            raise SourceError(f"cannot open {url}: {packed.url} is no packed file", url=url)
        self._starts = array("Q", _read(packed, HEAD.size, 8 * (-(-self.nbytes // self._block_nbytes) + 1)))
        if sys.byteorder == "big":
            self._starts.byteswap()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the bytes from `offset` on."""
        packed, nbytes = self._packed, len(buffer)
        if packed is None:
            raise self._error(SourceError, "it was closed", offset, nbytes, errno.EBADF)
        if offset < 0:
            raise self._error(SourceError, "the offset is negative", offset, nbytes, errno.EINVAL)
        if offset + nbytes > self.nbytes:
            raise self._error(TruncatedError, f"it has {self.nbytes} bytes", offset, nbytes)
        done = 0
        try:
            while done < nbytes:
                block, start = divmod(offset + done, self._block_nbytes)
                part = self._unpacked(packed, block)[start : start + nbytes - done]
                buffer[done : done + len(part)] = part
                done += len(part)
        except (SourceError, zlib.error) as exc:
            raise self._error(SourceError, f"{packed.url}: {exc}", offset, nbytes) from exc

    def check_unchanged(self) -> None:
        """The packed file says whether it still is the one that was opened."""
        if self._packed is None:
            raise SourceError(f"{self.url} was closed", url=self.url, status=errno.EBADF)
        self._packed.check_unchanged()

    def close(self) -> None:
        """Close the packed file. May be called twice."""
        if self._packed is not None:
            self._packed.close()
        self._packed = None

    def _unpacked(self, packed: ByteSource, block: int) -> memoryview:
        start, end = self._starts[block : block + 2]
        data = zlib.decompress(_read(packed, start, end - start))
        if len(data) != min(self._block_nbytes, self.nbytes - block * self._block_nbytes):
            raise zlib.error(f"block {block} has {len(data)} bytes")
        return memoryview(data)

    def _error(self, kind: type[SourceError], why: str, offset: int, nbytes: int, status: int | None = None) -> SourceError:
        message = f"cannot read {nbytes} bytes at {offset} of {self.url}: {why}"
        return kind(message, url=self.url, offset=offset, nbytes=nbytes, status=status)


class PackedFolder:
    """A folder in which packed files go by the names of what they stand for.

    Args:
        folder: as `headrace.folder(url)` gives it.
    """

    def __init__(self, folder: Folder) -> None:
        self.url, self._folder = folder.url, folder

    def names(self) -> list[str]:
        """Names of the files, sorted."""
        return sorted(name.removesuffix(SUFFIX) for name in self._folder.names())

    def open(self, name: str) -> ByteSource:
        """Open a file, packed or not."""
        try:
            packed = self._folder.open(name + SUFFIX)
        except SourceNotFoundError:
            return self._folder.open(name)
        try:
            return PackedSource(packed, f"{self.url}/{name}")
        except BaseException:
            packed.close()
            raise


def _read(source: ByteSource, offset: int, nbytes: int) -> bytearray:
    buffer = bytearray(nbytes)
    source.read_into(offset, memoryview(buffer))
    return buffer


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        packed_nbytes = pack(path, path.with_name(path.name + SUFFIX))
        print(f"{name}: {path.stat().st_size:,} bytes, packed {packed_nbytes / path.stat().st_size:.0%} of that")
        path.unlink()
