"""Sources whose bytes are checked before they are handed out.

A file is checked block by block (`_manifest.Blocks`), against a ledger. Blocks that lie wholly inside a read are hashed where the
read has put them. Of a block that is read in part, all is fetched into memory of a `BlockCache`, hashed there and copied out of
it; neighbouring reads find it there. So any read, of whatever range, order and thread, returns checked bytes or raises.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, cast

from headrace._addresses import move
from headrace._block_cache import BlockCache
from headrace._header import Header
from headrace._ledgers import Ledger
from headrace.errors import IntegrityError, SourceChangedError, SourceError, TruncatedError
from headrace.sources.base import AlignedSource, ByteSource, read_as_preferred

_KEPT_HEAD_NBYTES: Final = 1 << 20  # a head of this length is read twice (header, first tensors), and is kept


class VerifiedSource:
    """A source that checks what it reads from another one. `verified` makes them.

    Attributes:
        url, nbytes, version: those of the source behind it.
        ledger: what blocks are compared with.
        checked_by: how bytes are checked, in words.
        checked_block_nbytes: reads that begin and end at multiples of this are checked where they land.
    """

    def __init__(self, source: ByteSource, ledger: Ledger, cache: BlockCache, *, checked_by: str) -> None:
        self.url, self.nbytes, self.version = source.url, source.nbytes, source.version
        self.ledger, self.checked_by = ledger, checked_by
        self.checked_block_nbytes = ledger.cut.block_nbytes
        self._source, self._cache = source, cache
        self._key = object()  # not the source itself: the cache must not keep it alive
        self._head: bytearray | None = None
        self._closed = False
        self._counting = threading.Lock()
        self._verified_nbytes = 0

    @property
    def verified_nbytes(self) -> int:
        """Bytes that were checked since the source was opened; those checked twice count twice."""
        return self._verified_nbytes

    def know(self, header: Header) -> None:
        """Name tensors in errors from now on."""
        self.ledger.subject.header = header

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with checked bytes. See `ByteSource.read_into`.

        Raises:
            IntegrityError: they are not those of the digest; what is in the buffer then is worth nothing.
            SourceError: as the source behind it.
        """
        end = offset + len(buffer)
        if self._closed or not buffer or offset < 0 or end > self.nbytes:
            self._source.read_into(offset, buffer)
            if buffer:
                raise TruncatedError(f"{self.url} ends before byte {end}", url=self.url, offset=offset, nbytes=len(buffer))
            return
        self._read(self._source.read_into, offset, end, buffer)

    def confirm(self) -> None:
        """Return when all that was read so far is known to be right: with a whole file's digest, when all of it was read."""
        try:
            self.ledger.confirm(self._touch)
        except IntegrityError as error:
            self._raise_if_changed(error)
            raise

    def check_unchanged(self) -> None:
        """Raise `SourceChangedError` unless the source still is the version that was opened."""
        self._source.check_unchanged()

    def close(self) -> None:
        """Close the source behind it, and end checks that wait. May be called twice."""
        self._closed = True
        self.ledger.close()
        self._source.close()
        self._cache.forget(self._key)

    def map(self) -> memoryview:
        """Refuse: what lies in a mapping can change after it was checked."""
        raise SourceError(f"cannot map {self.url}: its bytes are verified, and those of a mapping could not be", url=self.url)

    def _read(self, read: Callable[[int, memoryview], None], offset: int, end: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` to `end`, in the order of the file, by `read` where whole blocks are concerned."""
        cut, at = self.ledger.cut, offset
        while at < end:
            block = cut.at(at)
            start, stop = cut.bounds(block)
            if block and at == start and stop <= end:  # the head is read twice, so it is kept
                last = cut.at(end - 1)
                last += cut.bounds(last)[1] <= end
                stop = cut.bounds(last - 1)[1]
                self._read_whole(read, block, last, buffer[at - offset : None if stop == self.nbytes else stop - offset])
            else:
                stop = min(stop, end)
                with self._block(block) as data:
                    move(buffer[at - offset : stop - offset], data[at - start : stop - start])
            at = stop
        if self.ledger.withholds(end):
            self.confirm()

    def _read_whole(self, read: Callable[[int, memoryview], None], first: int, last: int, buffer: memoryview) -> None:
        """Read blocks from `first` to `last` (exclusive) where they stay, and check them there."""
        begin = self.ledger.cut.bounds(first)[0]
        with self.ledger.under_way(first, last):
            read(begin, buffer)
            for block in range(first, last):
                start, end = self.ledger.cut.bounds(block)
                self._check(block, buffer[start - begin : end - begin])

    def _check(self, block: int, data: memoryview) -> None:
        try:
            self.ledger.check(block, data, self._touch)
        except IntegrityError as error:
            self._raise_if_changed(error)
            raise
        with self._counting:
            self._verified_nbytes += len(data)

    def _raise_if_changed(self, error: IntegrityError) -> None:
        """Of a source that is another version by now, that is the news, and not that its bytes are others."""
        try:
            self._source.check_unchanged()
        except SourceChangedError as changed:
            raise changed from error
        except SourceError:
            return  # closed meanwhile: the digest remains what is known

    def _touch(self, block: int) -> None:
        with self._block(block):
            pass

    @contextmanager
    def _block(self, block: int) -> Iterator[memoryview]:
        """All of a block, checked."""
        if block == 0 and self._head is not None:
            yield memoryview(self._head)
            return
        start, end = self.ledger.cut.bounds(block)
        with self._cache.block(self._key, block, end - start, lambda view: self._load(block, view)) as view:
            if block == 0 and end <= _KEPT_HEAD_NBYTES:
                self._head = bytearray(view[:end])
            yield view

    def _load(self, block: int, view: memoryview) -> None:
        start, end = self.ledger.cut.bounds(block)
        with self.ledger.under_way(block, block + 1):
            read_as_preferred(self._source, start, end - start, view)
            self._check(block, view[: end - start])


class RemoteVerifiedSource(VerifiedSource):
    """A `VerifiedSource` over a network."""

    @property
    def traffic(self) -> object:
        """What was asked of the network so far."""
        return self._source.traffic  # type: ignore[attr-defined]  # `verified` has looked


class AlignedVerifiedSource(VerifiedSource):
    """A `VerifiedSource` that can be read past the page cache."""

    @property
    def block_nbytes(self) -> int:
        """That of the source behind it."""
        return self._aligned.block_nbytes

    @property
    def direct_refused(self) -> str | None:
        """That of the source behind it."""
        return self._aligned.direct_refused

    def prefers_direct(self, offset: int, nbytes: int) -> bool:
        """What the source behind it prefers, where blocks begin and end where direct reads can."""
        cut, unit = self.ledger.cut, self._aligned.block_nbytes
        fits = cut.block_nbytes % unit == 0 and (cut.head_nbytes % unit == 0 or cut.head_nbytes == cut.nbytes)
        return fits and self._aligned.prefers_direct(offset, nbytes)

    def read_direct_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with checked bytes past the page cache. See `AlignedSource.read_direct_into`."""
        end = min(offset + len(buffer), self.nbytes)
        if self._closed or offset < 0 or end <= offset or offset + len(buffer) - end >= self.block_nbytes:
            self._aligned.read_direct_into(offset, buffer)
            return
        self._read(self._aligned.read_direct_into, offset, end, buffer)

    @property
    def _aligned(self) -> AlignedSource:
        return cast(AlignedSource, self._source)


def verified(source: ByteSource, ledger: Ledger, cache: BlockCache, *, checked_by: str) -> VerifiedSource:
    """The source, checked by a ledger, with the abilities that it has: direct reads, traffic over a network."""
    kind = VerifiedSource
    if hasattr(source, "read_direct_into"):
        kind = AlignedVerifiedSource
    elif hasattr(source, "traffic"):
        kind = RemoteVerifiedSource
    return kind(source, ledger, cache, checked_by=checked_by)
