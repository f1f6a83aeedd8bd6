"""Sources that fail on purpose, at a chosen read, in a chosen way, the same each time.

A `Fault` says when (which read, or which bytes) and what then; a `FaultySource` applies all that match, in their order, and
keeps a record of what it was asked for. Nothing waits for time to pass: a `Block` lasts until the test releases it.

    faults = [Fault(nth_read(2), Raise(SourceTimeoutError)), Fault(touches(8, 16), Flip())]
    source = FaultySource(MemorySource(data), faults)
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import SourceChangedError, SourceError
from headrace.sources.base import AlignedSource, ByteSource


@dataclass(frozen=True, slots=True)
class ReadCall:
    """One read that was asked for: the how-manieth, counted from 0, and its range in bytes."""

    index: int
    url: str
    offset: int
    nbytes: int
    direct: bool = False


When = Callable[[ReadCall], bool]


def every_read(_: ReadCall) -> bool:
    """Match each read."""
    return True


def nth_read(*indexes: int) -> When:
    """Match the reads with these numbers, counted from 0 over all threads."""
    return lambda call: call.index in indexes


def touches(start: int, end: int) -> When:
    """Match reads of at least one byte from `start` to `end`, end exclusive."""
    return lambda call: call.offset < end and call.offset + call.nbytes > start


@dataclass(frozen=True, slots=True)
class Raise:
    """Raise instead of reading: this exception, or one of this class, with the fields of the read if it is a `SourceError`."""

    error: BaseException | type[BaseException]


@dataclass(frozen=True, slots=True)
class Block:
    """Wait until `release` is set, then read. `entered` is set when a read has begun to wait."""

    release: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Flip:
    """Change bytes after reading: all bits of `mask` in the read's byte at `position` (negative: from its end)."""

    position: int = 0
    mask: int = 0xFF


@dataclass(frozen=True, slots=True)
class Change:
    """Read as if nothing were, but from then on the source is another version and `check_unchanged` raises."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and at which reads."""

    when: When
    then: Raise | Block | Flip | Change


class FaultySource:
    """A source that reads from another one, with faults.

    Args:
        source: where the bytes come from; closed with this one.
        faults: all that match a read are applied, in this order.

    Attributes:
        calls: every read that was asked for, failed ones too, in the order in which they began.
        closed: whether `close` was called.
    """

    def __init__(self, source: ByteSource, faults: Sequence[Fault] = ()) -> None:
        self.calls: list[ReadCall] = []
        self.closed = False
        self._source = source
        self._faults = tuple(faults)
        self._indexes = itertools.count()
        self._changes = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """That of the source behind it."""
        return self._source.url

    @property
    def nbytes(self) -> int:
        """That of the source behind it."""
        return self._source.nbytes

    @property
    def version(self) -> object:
        """That of the source behind it, and another one after each `Change`."""
        return (self._source.version, self._changes) if self._changes else self._source.version

    @property
    def read_count(self) -> int:
        """How many reads were asked for."""
        return len(self.calls)

    @property
    def asked_nbytes(self) -> int:
        """How many bytes were asked for, in all reads together."""
        return sum(call.nbytes for call in list(self.calls))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Read from the source behind it, unless and until a fault matches."""
        self._read(self._source.read_into, offset, buffer, direct=False)

    def check_unchanged(self) -> None:
        """Raise `SourceChangedError` after a `Change`; otherwise ask the source behind it."""
        if self._changes:
            raise SourceChangedError(f"{self.url} was changed by a fault", url=self.url)
        self._source.check_unchanged()

    def close(self) -> None:
        """Close the source behind it."""
        self.closed = True
        self._source.close()

    def _read(self, read: Callable[[int, memoryview], None], offset: int, buffer: memoryview, *, direct: bool) -> None:
        with self._lock:  # a read's number is its place in `calls`
            call = ReadCall(next(self._indexes), self.url, offset, len(buffer), direct)
            self.calls.append(call)
        actions = [fault.then for fault in self._faults if fault.when(call)]
        for action in actions:
            self._before(action, call)
        read(offset, buffer)
        for action in actions:
            if isinstance(action, Flip) and buffer:
                buffer[action.position] ^= action.mask

    def _before(self, action: Raise | Block | Flip | Change, call: ReadCall) -> None:
        match action:
            case Raise(error):
                raise _make(error, call)
            case Block(release, entered):
                entered.set()
                release.wait()
            case Change():
                with self._lock:
                    self._changes += 1


class FaultyAlignedSource(FaultySource):
    """As `FaultySource`, in front of an `AlignedSource`; direct reads count and fail like the others."""

    def __init__(self, source: AlignedSource, faults: Sequence[Fault] = ()) -> None:
        super().__init__(source, faults)
        self._aligned = source

    @property
    def block_nbytes(self) -> int:
        """That of the source behind it."""
        return self._aligned.block_nbytes

    @property
    def direct_refused(self) -> str | None:
        """That of the source behind it."""
        return self._aligned.direct_refused

    def prefers_direct(self, offset: int, nbytes: int) -> bool:
        """What the source behind it prefers."""
        return self._aligned.prefers_direct(offset, nbytes)

    def read_direct_into(self, offset: int, buffer: memoryview) -> None:
        """Read directly from the source behind it, unless and until a fault matches."""
        self._read(self._aligned.read_direct_into, offset, buffer, direct=True)


def _make(error: BaseException | type[BaseException], call: ReadCall) -> BaseException:
    if isinstance(error, BaseException):
        return error
    if issubclass(error, SourceError):
        message = f"{call.url}: a fault was asked for at read {call.index}"
        return error(message, url=call.url, offset=call.offset, nbytes=call.nbytes)
    return error("a fault was asked for")
