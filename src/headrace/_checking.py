"""Blocks of several files, read and hashed side by side; what came of each file.

Every thread hashes into memory of its own, and hashing lets go of the GIL. Files take turns, so that also those of which only a
whole digest is known, whose bytes have to be hashed in order, are many at a time. One damaged block does not end it.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final, Literal, TypeAlias

from headrace._block_cache import BlockCache
from headrace._crew import KEPT_OPEN, Crew, default_concurrency
from headrace._digests import digest_of, uncomputed
from headrace._integrity import VerifiedSource, verified
from headrace._interpreter import switching_fast
from headrace._ledgers import LearnedBlocks, Ledger, Subject
from headrace._manifest import BLOCK_NBYTES, Blocks, FileDigests, Manifest, head_nbytes_of
from headrace._verification import against_manifest, default_cut
from headrace.errors import IntegrityError, SourceError
from headrace.sources.base import ByteSource, Folder, is_remote, read_as_preferred

_SUFFIX: Final = ".safetensors"

Status: TypeAlias = Literal["ok", "damaged", "missing", "unlisted", "unreadable", "unchecked"]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """One file of a `VerifyReport`.

    Attributes:
        name: its path below the folder.
        nbytes: its size; 0 where it is missing.
        status: "ok"; "damaged": it is not what the digest says, or the manifest contradicts itself about it; "missing": the
            manifest lists it, and it is not there; "unlisted": it is there, and the manifest does not list it; "unreadable";
            "unchecked": there is no digest of it.
        checked_by: against what, in words; empty where nothing was checked.
        detail: what is wrong, in words.
        blocks: numbers of the damaged blocks, where blocks were checked.
    """

    name: str
    nbytes: int
    status: Status
    checked_by: str = ""
    detail: str = ""
    blocks: tuple[int, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the checkpoint is not what it should be because of it. Files beside the shards may go unchecked."""
        return self.status not in ("ok", "unlisted", "unchecked") or (self.status != "ok" and self.name.endswith(_SUFFIX))


@dataclass(frozen=True, slots=True)
class VerifyProgress:
    """A verification at one moment.

    Attributes:
        seconds: since it began.
        total_nbytes, total_files: what is to be checked; 0 until the files are open.
        nbytes, files: what has been checked.
        failed_files: files with which something is wrong so far.
    """

    seconds: float = 0.0
    total_nbytes: int = 0
    total_files: int = 0
    nbytes: int = 0
    files: int = 0
    failed_files: int = 0

    @property
    def rate(self) -> float:
        """Bytes checked per second so far."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


Report: TypeAlias = Callable[[VerifyProgress], None]


@dataclass(slots=True, eq=False)
class _File:
    """A file while it is checked. Worker threads write it under its lock."""

    name: str
    nbytes: int = 0
    source: ByteSource | None = None
    ledger: Ledger | None = None
    checked_by: str = ""
    status: Status = "ok"
    detail: str = ""
    bad: list[int] = field(default_factory=list)
    uncomputed: tuple[str, ...] = ()
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def failed(self) -> bool:
        return self.outcome().failed

    def fail(self, status: Status, detail: str) -> None:
        """Something is wrong; the first thing counts."""
        with self.lock:
            if self.status == "ok":
                self.status, self.detail = status, detail

    def outcome(self) -> FileCheck:
        """What came of it."""
        return FileCheck(self.name, self.nbytes, self.status, self.checked_by, self.detail, tuple(sorted(self.bad)))

    def digests(self) -> FileDigests:
        """Its entry in a manifest."""
        assert isinstance(self.ledger, LearnedBlocks)
        assert self.ledger.found is not None
        return FileDigests(self.ledger.cut, self.ledger.found, tuple(self.ledger.digests))


_Task: TypeAlias = "tuple[_File, int]"


class Checking:
    """One verification: opens the files, checks them, closes them. A context manager."""

    def __init__(self, folder: Folder, manifest: Manifest | None, progress: Report | None, *, writes: bool) -> None:
        self.files: list[_File] = []
        self._folder, self._manifest, self._writes = folder, manifest, writes
        self._progress = progress
        self._cache = BlockCache()
        self._crew = Crew("headrace-verify", report=self._report, end=self._close)
        self._counting = threading.Lock()
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._total_nbytes = self._nbytes = self._done = 0
        self._is_remote = False

    def __enter__(self) -> Checking:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = time.perf_counter()
        self._close()

    def snapshot(self) -> VerifyProgress:
        """How far it is."""
        now = self._ended if self._ended is not None else time.perf_counter()
        with self._counting:
            done, nbytes = self._done, self._nbytes
        failed = sum(file.failed for file in self.files)
        return VerifyProgress(now - self._started, self._total_nbytes, len(self.files), nbytes, done, failed)

    def open(self, names: Sequence[str], concurrency: int | None) -> None:
        """Open all files in one round, as many at once as was asked for, and find what each is checked against."""
        found = [_File(name) for name in names]
        keep = len(names) <= KEPT_OPEN

        def look(file: _File) -> None:
            try:
                source = self._opened(file)
                self._is_remote |= is_remote(source)
                file.source = source
            except IntegrityError as exc:
                listed = self._manifest is None or file.name in self._manifest.files
                file.fail("damaged" if listed else "unlisted", str(exc))
            except SourceError as exc:
                file.fail("unreadable", str(exc))
            if not keep or self._crew.stop.is_set():
                _close_source(file)

        try:
            self._crew.open_all(found, look, concurrency=concurrency)
        finally:
            self.files = found
        self._total_nbytes = sum(file.nbytes for file in found if file.ledger is not None)

    def check(self, concurrency: int | None) -> None:
        """Check every block of every file, from several threads."""
        files = [file for file in self.files if file.ledger is not None and file.status == "ok"]
        for file in files:
            assert file.ledger is not None
            file.left = max(1, file.ledger.cut.count)
        most = concurrency or default_concurrency(is_remote=self._is_remote, most=16)
        with switching_fast.held():
            self._crew.work_off(_in_turns(files, most), self._start, threads=min(most, sum(file.left for file in files)))
        self._report()

    def miss(self, names: Iterable[str]) -> None:
        """Report files that the manifest lists and the folder lacks."""
        for name in sorted(names):
            self.files.append(_File(name, status="missing", detail="the manifest lists it, and it is not there"))

    # ---- one file

    def _opened(self, file: _File) -> ByteSource:
        """Open a file, and decide what it is checked against when that is done for the first time."""
        source = self._folder.open(file.name)
        try:
            file.nbytes = source.nbytes
            if file.ledger is not None:
                if source.nbytes != file.ledger.cut.nbytes:
                    raise IntegrityError(f"{source.url} has changed its size while it was verified", url=source.url)
                file.ledger.reopen()
                return verified(source, file.ledger, self._cache, checked_by=file.checked_by)
            wrapped = self._wrapped(file, source)
        except BaseException:
            source.close()
            raise
        if isinstance(wrapped, VerifiedSource):
            file.ledger, file.checked_by = wrapped.ledger, wrapped.checked_by
        else:
            file.uncomputed = uncomputed(source)
            needs = f", but {' and '.join(file.uncomputed)}: pip install 'headrace[checksums]'" if file.uncomputed else ""
            file.status, file.detail = "unchecked", f"there is no digest of it{needs}"
        return wrapped

    def _wrapped(self, file: _File, source: ByteSource) -> ByteSource:
        if self._manifest is not None:
            return against_manifest(source, file.name, self._manifest, self._cache, twice=True)
        digest = digest_of(source)
        if self._writes:
            usable = digest if digest is not None and digest.algorithm == "sha256" else None
            origin = usable.origin if usable is not None else "itself"
            ledger = LearnedBlocks(Subject(source.url, origin), _cut(file.name, source), usable)
            return verified(source, ledger, self._cache, checked_by=f"sha256 from {origin}" if usable is not None else "")
        if digest is None:
            return source
        ledger = LearnedBlocks(Subject(source.url, digest.origin), default_cut(source.nbytes), digest)
        return verified(source, ledger, self._cache, checked_by=f"{digest.algorithm} from {digest.origin}")

    def _start(self) -> Callable[[_Task], None]:
        buffer = _Buffer()
        return lambda task: self._check_block(task, buffer)

    def _check_block(self, task: _Task, buffer: _Buffer) -> None:
        file, block = task
        try:
            with file.lock:
                if file.source is None and file.status in ("ok", "damaged"):
                    file.source = self._opened(file)
                source = file.source
            if source is not None and file.status != "unreadable":
                self._read_block(file, source, block, buffer)
        except IntegrityError as exc:
            file.fail("damaged", str(exc))
            if exc.block is not None:
                with file.lock:
                    file.bad.append(exc.block)
        except SourceError as exc:
            if not self._crew.stop.is_set():
                file.fail("unreadable", str(exc))
        with file.lock:
            file.left -= 1
            is_last = not file.left
        if is_last:
            _close_source(file)
            with self._counting:
                self._done += 1

    def _read_block(self, file: _File, source: ByteSource, block: int, buffer: _Buffer) -> None:
        assert file.ledger is not None
        if not file.ledger.cut.count:
            source.check_unchanged()
            return
        start, end = file.ledger.cut.bounds(block)
        read_as_preferred(source, start, end - start, buffer.view(end - start))
        source.check_unchanged()
        with self._counting:
            self._nbytes += end - start

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self.snapshot())

    def _close(self) -> None:
        for file in self.files:
            source = file.source
            if source is not None:
                source.close()


class _Buffer:
    """A worker's memory for a block, as long as the longest so far."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def view(self, nbytes: int) -> memoryview:
        """At least so many bytes, whole pages that begin at one: direct reads need that."""
        if self._memory is None or len(self._memory) < nbytes:
            pages = -(-max(nbytes, BLOCK_NBYTES) // mmap.PAGESIZE)
            self._memory = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(self._memory)


def _in_turns(files: Sequence[_File], most: int) -> Iterator[_Task]:
    """Blocks of several files by turns, each file's in order."""
    waiting = deque(files)
    active: deque[Iterator[_Task]] = deque()
    while waiting or active:
        while waiting and len(active) < most:
            file = waiting.popleft()
            active.append(zip(repeat(file), range(file.left)))
        blocks = active.popleft()
        task = next(blocks, None)
        if task is not None:
            active.append(blocks)
            yield task


def _cut(name: str, source: ByteSource) -> Blocks:
    """The blocks of a file that a manifest is written for."""
    first = bytearray(min(8, source.nbytes))
    source.read_into(0, memoryview(first))
    is_shard = name.endswith(_SUFFIX)
    return Blocks(source.nbytes, head_nbytes_of(bytes(first), nbytes=source.nbytes, is_shard=is_shard), BLOCK_NBYTES)


def _close_source(file: _File) -> None:
    with file.lock:
        source, file.source = file.source, None
    if source is not None:
        source.close()
