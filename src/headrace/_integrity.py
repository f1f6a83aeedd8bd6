"""Sources whose bytes are checked before they are handed out.

A file is checked block by block (`_manifest.Blocks`). Blocks that lie wholly inside a read are hashed where the read has put
them. Of a block that is read in part, all is fetched into memory of a `BlockCache`, hashed there and copied out of it;
neighbouring reads find it there. So any read, of whatever range, order and thread, returns checked bytes or raises.

What a block is compared with is a ledger's business. `KnownBlocks` has digests from a manifest. `LearnedBlocks` has the digest of
the whole file only: it hashes blocks in the order of the file, a block that comes early waits for its turn, and one that nobody
reads is fetched for the hash. It remembers each block's own digest, so that whatever is read again is what was hashed; and what
is withheld waits for the end of the file. Nothing here knows where digests come from, or tensors beyond their names.
"""

from __future__ import annotations

import hashlib
import importlib
import mmap
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Protocol, cast

from headrace._addresses import move
from headrace._header import Header
from headrace._manifest import Blocks
from headrace.errors import IntegrityError, SourceError, TruncatedError
from headrace.sources.base import AlignedSource, ByteSource

CACHE_NBYTES: Final = 64 << 20  # blocks that nobody is reading are kept up to this: neighbours come soon or not at all
_KEPT_HEAD_NBYTES: Final = 1 << 20  # a head of this length is read twice (header, first tensors), and is kept
_NAMED: Final = 5  # tensors in an error

Fetch = Callable[[int], None]


# -- digests of whole files ------------------------------------------------------------------------------------------------------


class Hasher(Protocol):
    """What hashlib's hashes have in common."""

    def update(self, data: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Crc:
    """A checksum that goes on from the last value, in the manner of hashlib."""

    def __init__(self, go_on: Callable[[memoryview, int], int], digits: int) -> None:
        self._go_on, self._digits = go_on, digits
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = self._go_on(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:0{self._digits}x}"


_PIECE_NBYTES: Final = 256 << 10  # stays in cache while it is copied and read again


def _of_crt(name: str) -> Callable[[memoryview, int], int]:
    """By the AWS runtime."""
    found: Callable[[memoryview, int], int] = getattr(importlib.import_module("awscrt.checksums"), name)
    return found


def _of_anycrc(name: str) -> Callable[[memoryview, int], int]:
    """By anycrc, what headrace[checksums] brings."""
    found: Callable[[memoryview, int], int] = importlib.import_module("anycrc").Model(name).calc
    return found


def _of_google() -> Callable[[memoryview, int], int]:
    """By google-crc32c, which comes with Google's own client. It takes immutable bytes only."""
    module = importlib.import_module("google_crc32c")
    if module.implementation != "c":
        raise ImportError("google-crc32c is there without its C library, and a hundred times slower so")

    def go_on(data: memoryview, value: int) -> int:
        for at in range(0, len(data), _PIECE_NBYTES):
            value = module.extend(value, bytes(data[at : at + _PIECE_NBYTES]))
        return value

    return go_on


def _first(digits: int, *makers: Callable[[], Callable[[memoryview, int], int]]) -> Hasher:
    """A checksum for which Python has nothing quick, by the first library that is installed. Raises ImportError without any."""
    for make in makers:
        with suppress(ImportError, AttributeError):
            return _Crc(make(), digits)
    raise ImportError("no library that computes it is installed")


# Best first.
HASHERS: Final[dict[str, Callable[[], Hasher]]] = {
    "sha256": hashlib.sha256,
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "crc64nvme": lambda: _first(16, lambda: _of_crt("crc64nvme"), lambda: _of_anycrc("CRC64-NVME")),
    "crc32c": lambda: _first(8, lambda: _of_crt("crc32c"), _of_google, lambda: _of_anycrc("CRC32C")),
    "crc32": lambda: _Crc(zlib.crc32, 8),
    "md5": lambda: hashlib.md5(usedforsecurity=False),
}


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of a whole file.

    Attributes:
        algorithm: a key of `HASHERS`.
        value: in hexadecimal, lower case.
        origin: who says so, in words.
    """

    algorithm: str
    value: str
    origin: str


def digest_of(source: ByteSource, *, ask: bool = True) -> Digest | None:
    """The whole-file digest that a source has by itself: `sha256` (the hub) or `checksums` ({algorithm: hexadecimal}).

    Args:
        source: the file.
        ask: whether to look at `checksums`, for which a store may have to be asked.
    """
    sha256: object = getattr(source, "sha256", None)
    if isinstance(sha256, str):
        return Digest("sha256", sha256.lower(), "the hub")
    checksums = (getattr(source, "checksums", None) if ask else None) or {}
    for algorithm in HASHERS:
        if isinstance(value := checksums.get(algorithm), str) and _is_available(algorithm):
            return Digest(algorithm, value.lower(), "the store")
    return None


def _is_available(algorithm: str) -> bool:
    try:
        HASHERS[algorithm]()
    except ImportError:
        return False
    return True


def uncomputed(source: ByteSource) -> tuple[str, ...]:
    """Checksums that a source's store tells and that no installed library computes."""
    return tuple(name for name in HASHERS if name in (getattr(source, "checksums", None) or {}) and not _is_available(name))


# -- blocks that are read in part ------------------------------------------------------------------------------------------------


class _Entry:
    __slots__ = ("memory", "ready", "users")

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory, self.ready, self.users = memory, False, 1


class BlockCache:
    """Checked blocks, shared by the sources of a checkpoint. What is in use is kept; of the rest, the last `keep_nbytes`.

    Args:
        keep_nbytes: bytes of blocks that nobody uses.
    """

    def __init__(self, keep_nbytes: int = CACHE_NBYTES) -> None:
        self._keep_nbytes = keep_nbytes
        self._changed = threading.Condition()
        self._entries: OrderedDict[tuple[object, int], _Entry] = OrderedDict()  # the one used longest ago first

    @contextmanager
    def block(self, owner: object, number: int, nbytes: int, load: Callable[[memoryview], None]) -> Iterator[memoryview]:
        """A block's memory, loaded by whoever comes first; the others wait. It begins at a page and is a whole number of them."""
        key = (owner, number)
        entry, is_new = self._enter(key, nbytes)
        try:
            if is_new:
                self._load(key, entry, load)
            yield memoryview(entry.memory)
        finally:
            with self._changed:
                entry.users -= 1

    def forget(self, owner: object) -> None:
        """Drop what nobody is using of an owner's blocks."""
        with self._changed:
            for key in [key for key, entry in self._entries.items() if key[0] is owner and not entry.users]:
                del self._entries[key]

    def _enter(self, key: tuple[object, int], nbytes: int) -> tuple[_Entry, bool]:
        with self._changed:
            while (entry := self._entries.get(key)) is not None:
                if entry.ready:
                    entry.users += 1
                    self._entries.move_to_end(key)
                    return entry, False
                self._changed.wait()
            entry = self._entries[key] = _Entry(self._room(max(1, nbytes)))
            return entry, True

    def _load(self, key: tuple[object, int], entry: _Entry, load: Callable[[memoryview], None]) -> None:
        try:
            load(memoryview(entry.memory))
            entry.ready = True
        finally:
            with self._changed:
                if not entry.ready:
                    del self._entries[key]
                self._changed.notify_all()

    def _room(self, nbytes: int) -> mmap.mmap:
        """Memory for a block: that of the oldest ones where there are too many, since touching fresh memory is dear."""
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        idle = [key for key, entry in self._entries.items() if entry.ready and not entry.users]
        over = sum(len(self._entries[key].memory) for key in idle) + nbytes - self._keep_nbytes
        found: mmap.mmap | None = None
        for key in idle:
            if over <= 0:
                break
            memory = self._entries.pop(key).memory
            over -= len(memory)
            found = memory if len(memory) == nbytes else found
        return found if found is not None else mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


# -- what blocks are compared with -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Subject:
    """The file that is checked, for errors.

    Attributes:
        url: the file.
        origin: where its digests come from.
        header: its tensors, once they are known.
    """

    url: str
    origin: str
    header: Header | None = None

    def mismatch(self, start: int, end: int, *, block: int | None, expected: str, found: str) -> IntegrityError:
        """The error for bytes that are not those of the digest."""
        names = self._tensors(start, end) if block is not None else []
        what = f"block {block}, {end - start} bytes at {start}," if block is not None else "the whole file"
        held = f" It holds {', '.join(map(repr, names[:_NAMED]))}{' and others' if len(names) > _NAMED else ''}." if names else ""
        error = IntegrityError(
            f"{self.url} is not what {self.origin} says: {what} has the digest {found}, expected {expected}.{held} "
            "Read it again; if it stays so, fetch the file anew from where it was made",
            url=self.url, offset=start, nbytes=end - start,
        )  # fmt: skip
        error.block, error.expected, error.found, error.tensors = block, expected, found, tuple(names)
        return error

    def _tensors(self, start: int, end: int) -> list[str]:
        header = self.header
        if header is None:
            return []
        columns = zip(header.names, header.starts, header.ends, strict=True)
        return [name for name, first, last in columns if first < end and last > start]


class KnownBlocks:
    """Every block's digest is known.

    Args:
        subject: the file.
        cut: its blocks.
        digests: SHA-256 of each, in hexadecimal.
    """

    def __init__(self, subject: Subject, cut: Blocks, digests: tuple[str, ...]) -> None:
        self.subject, self.cut, self._digests = subject, cut, digests

    @contextmanager
    def under_way(self, first: int, last: int) -> Iterator[None]:  # noqa: ARG002 - nobody has to wait for anybody
        """Do nothing."""
        yield

    def check(self, block: int, data: memoryview, fetch: Fetch) -> None:  # noqa: ARG002 - no block needs another one
        """Raise IntegrityError unless `data` is the block."""
        found = hashlib.sha256(data).hexdigest()
        if found != self._digests[block]:
            start, end = self.cut.bounds(block)
            raise self.subject.mismatch(start, end, block=block, expected=self._digests[block], found=found)

    def withholds(self, end: int) -> bool:  # noqa: ARG002 - what was checked is right
        """Nothing has to wait."""
        return False

    def withhold(self, end: int) -> None:
        """Do nothing."""

    def confirm(self, fetch: Fetch) -> None:
        """Do nothing: what was checked is right, whatever the rest of the file is."""

    def close(self) -> None:
        """Do nothing."""

    def reopen(self) -> None:
        """Do nothing."""


class KnownTwice(KnownBlocks):
    """Every block's digest is known, and the whole file's, too: once all blocks were found right, both have to agree.

    For those who read every block once, each file's in order; a load, which reads what it needs, has no use for it.

    Args:
        subject, cut, digests: as of `KnownBlocks`.
        whole: SHA-256 of the whole file, in hexadecimal.
    """

    def __init__(self, subject: Subject, cut: Blocks, digests: tuple[str, ...], whole: str) -> None:
        super().__init__(subject, cut, digests)
        self._expected = whole
        self._hasher = hashlib.sha256()
        self._changed = threading.Condition()
        self._turn, self._gave_up = 0, False

    @contextmanager
    def under_way(self, first: int, last: int) -> Iterator[None]:  # noqa: ARG002 - what fails counts, not which block
        """Give the whole file's digest up where a block is not right: it is not the manifest that is wrong then."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def check(self, block: int, data: memoryview, fetch: Fetch) -> None:
        """Raise IntegrityError unless `data` is the block, and, with the last block, unless the manifest agrees with itself."""
        super().check(block, data, fetch)
        with self._changed:
            while block > self._turn and not self._gave_up:
                self._changed.wait()
            if block != self._turn or self._gave_up:
                return
        self._hasher.update(data)  # alone: the others wait for this block
        with self._changed:
            self._turn += 1
            self._changed.notify_all()
            is_last = self._turn == self.cut.count
        if is_last and (found := self._hasher.hexdigest()) != self._expected:
            raise self.contradiction(found)

    def contradiction(self, found: str) -> IntegrityError:
        """The error for right blocks that do not make up the file."""
        error = IntegrityError(
            f"{self.subject.origin} contradicts itself about {self.subject.url}: all blocks have the digests it says, and the "
            f"whole file has {found}, where it says {self._expected}. Somebody has changed one of them; write the manifest anew "
            "from a copy you trust",
            url=self.subject.url,
        )
        error.expected, error.found = self._expected, found
        return error

    def close(self) -> None:
        """Wake those who wait for their turn; the whole file is not looked at any more."""
        with self._changed:
            self._gave_up = True
            self._changed.notify_all()

    def reopen(self) -> None:
        """The file, which was closed before its first block was read, is open again."""
        self._gave_up = False


class LearnedBlocks:
    """The digest of the whole file is known, or wanted; those of blocks are learned as they are hashed in the file's order.

    Args:
        subject: the file.
        cut: its blocks.
        expected: of the whole file; None where it is only to be found out.

    Attributes:
        digests: SHA-256 of the blocks hashed so far, in hexadecimal.
        found: the whole file's digest; None before its end.

    Raises:
        IntegrityError: the file is empty, and the digest is not that of nothing.
    """

    def __init__(self, subject: Subject, cut: Blocks, expected: Digest | None) -> None:
        self.subject, self.cut = subject, cut
        self.digests: list[str] = []
        self.found: str | None = None
        self._expected = expected
        self._hasher = HASHERS[expected.algorithm if expected is not None else "sha256"]()
        self._changed = threading.Condition()
        self._under_way: Counter[int] = Counter()
        self._is_hashing = self._closed = False
        self._withheld_from: int | None = None
        if not cut.count:
            self._finish()
            self._check_whole()

    @contextmanager
    def under_way(self, first: int, last: int) -> Iterator[None]:
        """Say that blocks from `first` up to `last` (exclusive) are being read, so that nobody else has to fetch them."""
        with self._changed:
            self._under_way.update(range(first, last))
        try:
            yield
        finally:
            with self._changed:
                self._under_way.subtract(range(first, last))
                self._changed.notify_all()

    def check(self, block: int, data: memoryview, fetch: Fetch) -> None:
        """Hash a block when it is its turn. One that was hashed before has to be the same again.

        Args:
            block: its number.
            data: its bytes.
            fetch: reads a block and checks it, for those in front that nobody reads.

        Raises:
            IntegrityError: it is not the same, or the file ends with it and is not what its digest says.
        """
        found = hashlib.sha256(data).hexdigest()
        if not self._await_turn(block, found, fetch):
            return
        try:
            self._hasher.update(data)
            self.digests.append(found)
        finally:
            with self._changed:
                self._is_hashing = False
                if len(self.digests) == self.cut.count:
                    self._finish()
                self._changed.notify_all()
        self._check_whole()

    def withholds(self, end: int) -> bool:
        """Whether bytes up to `end` may be handed out only after the whole file was found right."""
        return self.found is not None or (self._withheld_from is not None and end >= self._withheld_from)

    def withhold(self, end: int) -> None:
        """Withhold what reaches to `end` or further."""
        with self._changed:
            self._withheld_from = end if self._withheld_from is None else min(end, self._withheld_from)

    def confirm(self, fetch: Fetch) -> None:
        """Fetch what nobody has read, and raise IntegrityError unless the whole file is right."""
        while (gap := self._next_gap()) is not None:
            fetch(gap)
        self._check_whole()

    def close(self) -> None:
        """Wake those who wait for their turn; they raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def reopen(self) -> None:
        """Go on with the file opened again: what was learned stays."""
        self._closed = False

    def _await_turn(self, block: int, found: str, fetch: Fetch) -> bool:
        """Wait until all before a block is hashed. False where the block is hashed already."""
        while True:
            with self._changed:
                self._check_open()
                turn = len(self.digests)
                if block < turn:
                    self._check_again(block, found)
                    return False
                if block == turn and not self._is_hashing:
                    self._is_hashing = True
                    return True
                if self._is_hashing or block == turn or self._under_way[turn] > 0:
                    self._changed.wait()
                    continue
            fetch(turn)

    def _next_gap(self) -> int | None:
        """The next block that nobody reads; None when all are hashed."""
        with self._changed:
            while True:
                self._check_open()
                turn = len(self.digests)
                if turn == self.cut.count:
                    return None
                if not self._is_hashing and self._under_way[turn] <= 0:
                    return turn
                self._changed.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise SourceError(f"{self.subject.url} was closed while it was checked", url=self.subject.url)

    def _check_again(self, block: int, found: str) -> None:
        if found != self.digests[block]:
            start, end = self.cut.bounds(block)
            raise self.subject.mismatch(start, end, block=block, expected=self.digests[block], found=found)
        self._check_whole()

    def _finish(self) -> None:
        self.found = self._hasher.hexdigest()

    def _check_whole(self) -> None:
        """Raise if the file was read to its end and is not the one."""
        if self.found is not None and self._expected is not None and self.found != self._expected.value:
            raise self.subject.mismatch(0, self.cut.nbytes, block=None, expected=self._expected.value, found=self.found)


# -- sources ---------------------------------------------------------------------------------------------------------------------


class VerifiedSource:
    """A source that checks what it reads from another one. `verified` makes them.

    Attributes:
        url, nbytes, version: those of the source behind it.
        ledger: what blocks are compared with.
        checked_by: how bytes are checked, in words.
        checked_block_nbytes: reads that begin and end at multiples of this are checked where they land.
    """

    def __init__(self, source: ByteSource, ledger: KnownBlocks | LearnedBlocks, cache: BlockCache, *, checked_by: str) -> None:
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
        self.ledger.confirm(self._touch)

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
        self.ledger.check(block, data, self._touch)
        with self._counting:
            self._verified_nbytes += len(data)

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
            self._fetch(start, end, view)
            self._check(block, view[: end - start])

    def _fetch(self, start: int, end: int, view: memoryview) -> None:
        self._source.read_into(start, view[: end - start])


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

    def _fetch(self, start: int, end: int, view: memoryview) -> None:
        unit = self._aligned.block_nbytes
        nbytes = -(-(end - start) // unit) * unit
        if nbytes <= len(view) and self.prefers_direct(start, end - start):
            self._aligned.read_direct_into(start, view[:nbytes])
        else:
            super()._fetch(start, end, view)

    @property
    def _aligned(self) -> AlignedSource:
        return cast(AlignedSource, self._source)


def verified(source: ByteSource, ledger: KnownBlocks | LearnedBlocks, cache: BlockCache, *, checked_by: str) -> VerifiedSource:
    """The source, checked by a ledger, with the abilities that it has: direct reads, traffic over a network."""
    kind = VerifiedSource
    if hasattr(source, "read_direct_into"):
        kind = AlignedVerifiedSource
    elif hasattr(source, "traffic"):
        kind = RemoteVerifiedSource
    return kind(source, ledger, cache, checked_by=checked_by)
