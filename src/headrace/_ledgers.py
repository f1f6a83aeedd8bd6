"""What the blocks of a file are compared with: a ledger has a digest for each, or learns it.

`KnownBlocks` has digests from a manifest. `LearnedBlocks` has the digest of the whole file only: it hashes blocks in the order of
the file, a block that comes early waits for its turn, and one that nobody reads is fetched for the hash. It remembers each
block's own digest, so that whatever is read again is what was hashed; and what is withheld waits for the end of the file.
Nothing here knows where digests come from, how blocks are read, or tensors beyond their names.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

from headrace._digests import HASHERS, Digest
from headrace._header import Header
from headrace._manifest import Blocks
from headrace.errors import IntegrityError, SourceError

_NAMED: Final = 5  # tensors in an error

Fetch: TypeAlias = Callable[[int], None]


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


Ledger: TypeAlias = KnownBlocks | LearnedBlocks
