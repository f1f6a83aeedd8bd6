"""Check every file of a checkpoint against its digests, or write a manifest of them.

Blocks of all files are read and hashed by some threads at once, each into memory of its own; hashing lets go of the GIL. Files
take turns, so that also those of which only a whole digest is known, whose bytes have to be hashed in order, are many at a time.
One damaged block does not end it: the report names every file and block.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

from headrace._block_cache import BlockCache
from headrace._crew import work_off
from headrace._digests import digest_of, uncomputed
from headrace._integrity import VerifiedSource, verified
from headrace._interpreter import switching_fast
from headrace._ledgers import LearnedBlocks, Ledger, Subject
from headrace._machine import available_cpus
from headrace._manifest import BLOCK_NBYTES, MANIFEST_NAME, Blocks, FileDigests, Manifest, head_nbytes_of
from headrace._verification import against_manifest, default_cut, find_manifest, nothing_to_check
from headrace.errors import DestinationError, IntegrityError, SourceError, SourceNotFoundError
from headrace.sources.base import ByteSource, Folder, is_remote, read_as_preferred

_SUFFIX: Final = ".safetensors"
_NETWORK_CONCURRENCY: Final = 16
_OPENERS: Final = 32
_KEPT_OPEN: Final = 256  # more files than this are opened again when their turn comes: descriptors are limited

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
class VerifyReport:
    """What was checked, and what was found.

    Attributes:
        url: the folder or file.
        files: one entry each.
        verified_nbytes: bytes that were hashed and found right, or written to the manifest.
        manifest: where the digests were read from; None where they came from the store.
        written: the manifest that was written; None where none was.
        seconds: how long it took.
    """

    url: str
    files: tuple[FileCheck, ...]
    verified_nbytes: int
    manifest: str | None
    written: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every shard was checked and nothing is wrong."""
        return not self.failed

    @property
    def failed(self) -> tuple[FileCheck, ...]:
        """The files with which something is wrong."""
        return tuple(file for file in self.files if file.failed)

    @property
    def rate(self) -> float:
        """Bytes checked per second."""
        return self.verified_nbytes / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields, and `ok`, as plain data for JSON. Names are stable; new ones may be added."""
        return {"ok": self.ok, **asdict(self)}


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
T = TypeVar("T")


def verify_folder(
    folder: Folder,
    only: str | None,
    *,
    manifest: Manifest | None,
    out: Path | None,
    concurrency: int | None,
    progress: Report | None,
) -> VerifyReport:
    """Check the files of a folder.

    Args:
        folder: where they lie.
        only: one file of it; None: all, but for hidden ones.
        manifest: what to check against; None: the one beside the files, or the digests of the store.
        out: write a manifest there instead.
        concurrency: blocks read at once; None: 16 over a network, else one for each CPU.
        progress: called on this thread, after every block and twice a second.

    Raises:
        OptionError: there is nothing to check against.
        FormatError: the manifest beside the files is none.
        SourceNotFoundError: there is no such folder, or no file in it.
        DestinationError: the manifest cannot be written.
    """
    if manifest is None and out is None:
        manifest = find_manifest(folder)
    names = [only] if only is not None else _names(folder)
    index: str | None = getattr(folder, "index", None)  # what an index names, and no more
    with _Run(folder, manifest, progress, writes=out is not None) as run:
        run.open(names, concurrency)
        if out is None and all(file.status == "unchecked" for file in run.files):
            uncomputed = sorted({name for file in run.files for name in file.uncomputed})
            raise nothing_to_check(folder.url, uncomputed, instead="or give one with manifest=PATH")
        run.check(concurrency)
        if manifest is not None and only is None and index is None:
            run.miss(set(manifest.files) - set(names))
    written = None
    if out is not None and not any(file.failed for file in run.files):
        write_manifest(Manifest(str(out), BLOCK_NBYTES, {file.name: file.digests() for file in run.files}), out)
        written = str(out)
    now = run.snapshot()
    return VerifyReport(
        url=folder.url if only is None and index is None else f"{folder.url.rstrip('/')}/{only or index}",
        files=tuple(file.outcome() for file in run.files),
        verified_nbytes=now.nbytes,
        manifest=manifest.url if manifest is not None else None,
        written=written,
        seconds=now.seconds,
    )


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest, whole or not at all.

    Raises:
        DestinationError: it cannot be written there.
    """
    temporary: str | None = None
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(fd, "wb") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fchmod(fd, 0o644)  # not 0o600, which is what mkstemp makes: others verify as well
            os.fsync(fd)
        os.replace(temporary, path)
    except OSError as exc:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        reason = f"cannot write the manifest {path}: {exc.strerror or exc}; choose another place with out"
        raise DestinationError(reason, url=str(path), status=exc.errno) from exc


def _names(folder: Folder) -> list[str]:
    """The files of a folder and those below it, without hidden ones and the manifest itself."""
    walk: Callable[[], list[str]] = getattr(folder, "walk", folder.names)
    names = [name for name in walk() if name.rpartition("/")[2] != MANIFEST_NAME and not _is_hidden(name)]
    if not names:
        raise SourceNotFoundError(f"there is nothing to verify in {folder.url}: it holds no files", url=folder.url)
    return sorted(names)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


# -- one file --------------------------------------------------------------------------------------------------------------------


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


# -- all of them -----------------------------------------------------------------------------------------------------------------


class _Run:
    """One verification: opens the files, checks them, closes them. A context manager."""

    def __init__(self, folder: Folder, manifest: Manifest | None, progress: Report | None, *, writes: bool) -> None:
        self.files: list[_File] = []
        self._folder, self._manifest, self._writes = folder, manifest, writes
        self._progress = progress
        self._cache = BlockCache()
        self._stop = threading.Event()
        self._counting = threading.Lock()
        self._started = time.perf_counter()
        self._ended: float | None = None
        self._total_nbytes = self._nbytes = self._done = 0
        self._is_remote = False

    def __enter__(self) -> _Run:
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
        keep = len(names) <= _KEPT_OPEN

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
            if not keep or self._stop.is_set():
                _close_source(file)

        try:
            self._work_off(found, lambda: look, threads=min(concurrency or _OPENERS, _OPENERS, len(names)), patient=False)
        finally:
            self.files = found
        self._total_nbytes = sum(file.nbytes for file in found if file.ledger is not None)

    def check(self, concurrency: int | None) -> None:
        """Check every block of every file, from several threads."""
        files = [file for file in self.files if file.ledger is not None and file.status == "ok"]
        for file in files:
            assert file.ledger is not None
            file.left = max(1, file.ledger.cut.count)
        if concurrency is None:
            concurrency = _NETWORK_CONCURRENCY if self._is_remote else min(16, max(2, available_cpus()))
        with switching_fast.held():
            self._work_off(_in_turns(files, concurrency), self._start, threads=min(concurrency, sum(file.left for file in files)))
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
            if not self._stop.is_set():
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

    # ---- threads

    def _work_off(
        self, tasks: Iterable[T], start: Callable[[], Callable[[T], None]], *, threads: int, patient: bool = True
    ) -> None:
        work_off(
            tasks, start, name="headrace-verify", threads=threads, patient=patient,
            stop=self._stop, report=self._report, end=self._close,
        )  # fmt: skip

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
