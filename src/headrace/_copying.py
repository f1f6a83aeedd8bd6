"""Ranges of several files, copied side by side from a source into a destination, and compared with it.

All files are opened in one round, then ranges of them are read, written and noted by some threads at once. A file is given its
name when it is whole, and those named *.safetensors.index.json last. What survives a kill is the business of `_destination`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeAlias

from typing_extensions import Self

from headrace._crew import KEPT_OPEN, Crew, default_concurrency
from headrace._destination import Destination, Part, writing
from headrace._digests import digest_of
from headrace._interpreter import switching_fast
from headrace._shards import INDEX_SUFFIX
from headrace.errors import DestinationError, IntegrityError, NoSpaceError, SourceChangedError
from headrace.sources.base import ByteSource, Folder, is_remote, read_as_preferred


@dataclass(frozen=True, slots=True)
class PullProgress:
    """A pull at one moment.

    Attributes:
        seconds: since the pull began, the wait for another one included.
        total_nbytes, total_files: of all files that were asked for.
        copied_nbytes: bytes copied by this pull.
        resumed_nbytes: bytes of unfinished files that an earlier pull had copied.
        skipped_nbytes, skipped_files: what was there already.
        files: files that are in their place by now, those that were there already included.
        compared_nbytes: bytes compared with the source after writing (`move`).
        copying_s: of `seconds`, those since the first byte was asked for.
    """

    seconds: float = 0.0
    total_nbytes: int = 0
    total_files: int = 0
    copied_nbytes: int = 0
    resumed_nbytes: int = 0
    skipped_nbytes: int = 0
    skipped_files: int = 0
    files: int = 0
    compared_nbytes: int = 0
    copying_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that are there by now."""
        return self.copied_nbytes + self.resumed_nbytes + self.skipped_nbytes

    @property
    def rate(self) -> float:
        """Bytes copied per second so far."""
        return self.copied_nbytes / self.copying_s if self.copying_s > 0 else 0.0


Report: TypeAlias = Callable[[PullProgress], None]


class Counts:
    """Counters of a pull, written under their lock by the workers and reported by the thread that called."""

    def __init__(self, progress: Report | None) -> None:
        self._lock = threading.Lock()
        self._numbers = dict.fromkeys(PullProgress.__dataclass_fields__, 0)
        for clock in ("seconds", "copying_s"):
            del self._numbers[clock]
        self._progress = progress
        self._started = time.perf_counter()
        self._copying: float | None = None
        self._copied: float | None = None

    def add(self, **numbers: int) -> None:
        with self._lock:
            for name, number in numbers.items():
                self._numbers[name] += number

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Take the time that the rate is about."""
        self._copying = time.perf_counter()
        try:
            yield
        finally:
            self._copied = time.perf_counter()

    def snapshot(self) -> PullProgress:
        now = time.perf_counter()
        copying_s = (self._copied or now) - self._copying if self._copying is not None else 0.0
        with self._lock:
            return PullProgress(seconds=now - self._started, copying_s=copying_s, **self._numbers)

    def report(self) -> None:
        if self._progress is not None:
            self._progress(self.snapshot())


@dataclass(slots=True, eq=False)
class _File:
    """One file to pull. `left` counts the ranges that are still to come."""

    name: str
    source: ByteSource | None
    key: str
    nbytes: int
    part: Part
    is_there: bool
    is_remote: bool
    range_nbytes: int
    resumed: set[int] = field(default_factory=set)
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def count(self) -> int:
        """How many ranges it has."""
        return -(-self.nbytes // self.range_nbytes)

    def nbytes_of(self, index: int) -> int:
        """The length of a range."""
        return min(self.range_nbytes, self.nbytes - index * self.range_nbytes)


_Range: TypeAlias = "tuple[_File, int | None]"  # None: nothing is left to read


class Copying:
    """One pull: opens the files, copies what is missing, and closes them. A context manager."""

    def __init__(
        self, folder: Folder, destination: Destination, counts: Counts, *, concurrency: int | None, range_nbytes: int
    ) -> None:
        self._folder = folder
        self._destination = destination
        self._counts = counts
        self._concurrency = concurrency
        self._range_nbytes = range_nbytes
        self._crew = Crew("headrace-pull", report=counts.report, end=self._close_sources)
        self._looking = threading.Lock()  # held where an opened file is looked up in the destination
        self._files: list[_File] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close_sources()
        for file in self._files:
            file.part.close()

    def open(self, names: Sequence[str]) -> None:
        """Open all files in one round, and see what is there already, whole or in part."""
        found: dict[str, _File] = {}
        keep = len(names) <= KEPT_OPEN

        def look(name: str) -> None:
            with ExitStack() as opened:
                source = opened.enter_context(closing(self._folder.open(name)))
                with self._looking:
                    if self._crew.stop.is_set():
                        return
                    found[name] = file = self._file(name, source)
                    if file.is_there or not keep:
                        file.source = None
                    else:
                        opened.pop_all()

        try:
            self._crew.open_all(names, look, concurrency=self._concurrency)
        finally:
            self._files = [found[name] for name in names if name in found]
        there = [file for file in self._files if file.is_there]
        self._counts.add(
            total_files=len(names),
            total_nbytes=sum(file.nbytes for file in self._files),
            skipped_files=len(there),
            skipped_nbytes=sum(file.nbytes for file in there),
            files=len(there),
            resumed_nbytes=sum(file.nbytes_of(index) for file in self._files for index in file.resumed),
        )
        self._counts.report()

    def _file(self, name: str, source: ByteSource) -> _File:
        key = _key(source)
        part = Part(self._destination, name, key, nbytes=source.nbytes, range_nbytes=self._range_nbytes)
        known = getattr(source.version, "tells_apart", True)  # else what is here may be of any version of that size
        there = known and self._destination.holds(name, key)
        file = _File(name, source, key, source.nbytes, part, there, is_remote(source), self._range_nbytes)
        if there or not known:
            part.discard()
        if not there:
            file.resumed = {index for index in part.finished() if index < file.count}
            file.left = max(1, file.count - len(file.resumed))
        return file

    def check_space(self, free_nbytes: Callable[[str], int]) -> None:
        """Refuse to begin what cannot end well."""
        done = self._counts.snapshot()
        needed, path = done.total_nbytes - done.nbytes, self._destination.path
        with writing(path, "measure the free space of"):
            free = free_nbytes(path)
        if needed > free:
            raise NoSpaceError(
                f"cannot pull {self._folder.url} to {path}: {needed:,} bytes are needed and {free:,} are free; "
                "free some, choose another destination, or pull fewer files with include= and exclude=",
                url=path, status=errno.ENOSPC, needed=needed, free=free,
            )  # fmt: skip

    def copy(self) -> None:
        """Copy what is missing, and place each file when it is whole: first the shards, then the indexes."""
        missing = [file for file in self._files if not file.is_there]
        with self._counts.copying(), switching_fast.held():
            for is_index in (False, True):
                files = [file for file in missing if file.name.endswith(INDEX_SUFFIX) == is_index]
                if files:
                    self._crew.work_off(self._ranges(files), self._with_buffer(self._copy), threads=self._threads(files))

    def _ranges(self, files: Iterable[_File]) -> Iterator[_Range]:
        for file in files:
            indexes = [index for index in range(file.count) if index not in file.resumed]
            yield from ((file, index) for index in indexes)
            if not indexes:
                yield file, None

    def _threads(self, files: Sequence[_File]) -> int:
        is_remote = any(file.is_remote for file in files)
        most = self._concurrency or default_concurrency(is_remote=is_remote, most=8)
        return min(most, sum(max(1, file.count) for file in files))

    def _with_buffer(
        self, do: Callable[[_Range, memoryview], None], *, buffers: int = 1
    ) -> Callable[[], Callable[[_Range], None]]:
        """What gives each thread the work, and memory of its own for it."""

        def start() -> Callable[[_Range], None]:
            buffer = _buffer(buffers * self._range_nbytes)
            return lambda task: do(task, buffer)

        return start

    def _copy(self, task: _Range, buffer: memoryview) -> None:
        file, index = task
        try:
            with file.lock:
                source = self._source(file)
                file.part.open(resumed=bool(file.resumed))
            if index is not None:
                nbytes = file.nbytes_of(index)
                read_as_preferred(source, index * self._range_nbytes, nbytes, buffer)
                source.check_unchanged()
                if self._crew.stop.is_set():
                    return
                file.part.write(index, buffer[:nbytes])
                self._counts.add(copied_nbytes=nbytes)
            with file.lock:
                file.left -= 1
                last = not file.left
            if last:
                self._finish(file, source)
        except SourceChangedError:
            file.part.discard()  # it may be of both versions
            raise

    def _source(self, file: _File) -> ByteSource:
        """The file's source, opened again where it is not open."""
        if file.source is None:
            source = self._folder.open(file.name)
            if _key(source) != file.key:
                source.close()
                raise SourceChangedError(f"{source.url} was changed while it was pulled; pull it again", url=source.url)
            file.source = source
        return file.source

    def _finish(self, file: _File, source: ByteSource) -> None:
        fd = file.part.open(resumed=True)
        status = file.part.sync()
        self._check_digest(file, source, fd)
        source.check_unchanged()
        if self._crew.stop.is_set():
            return
        self._destination.place(file.name, file.key, file.part.name, status)
        file.part.close(placed=True)
        source.close()
        file.source = None
        self._counts.add(files=1)

    def _check_digest(self, file: _File, source: ByteSource, fd: int) -> None:
        """Read a file back where the source knows its SHA-256, as the hub does."""
        expected = digest_of(source, ask=False)
        if expected is None:
            return
        path = os.path.join(self._destination.path, file.name)
        digest, block, at = hashlib.sha256(), memoryview(bytearray(1 << 20)), 0
        with writing(path, "read back"):
            while got := os.preadv(fd, [block], at):
                digest.update(block[:got])
                at += got
        if digest.hexdigest() != expected.value:
            file.part.discard()
            raise IntegrityError(
                f"{self._folder.url}: {file.name} arrived with SHA-256 {digest.hexdigest()}, and the source says "
                f"{expected.value}; pull it again, and check what lies between if it happens twice",
                url=f"{self._folder.url}/{file.name}",
            )

    # ---- moving

    def compare(self) -> None:
        """Read every file back, from the disk as far as the kernel allows it, and compare it with its source."""
        for file in self._files:
            file.resumed, file.left = set(), max(1, file.count)
            with self._destination.opened(file.name) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with switching_fast.held():
            compare = self._with_buffer(self._compare, buffers=2)
            self._crew.work_off(self._ranges(self._files), compare, threads=self._threads(self._files))

    def _compare(self, task: _Range, buffer: memoryview) -> None:
        file, index = task
        with file.lock:
            source = self._source(file)
        if index is not None:
            self._compare_range(file, source, index, buffer)
        with file.lock:
            file.left -= 1
            if not file.left:
                source.close()
                file.source = None

    def _compare_range(self, file: _File, source: ByteSource, index: int, buffer: memoryview) -> None:
        offset, nbytes = index * self._range_nbytes, file.nbytes_of(index)
        ours, theirs = buffer[self._range_nbytes :][:nbytes], buffer[:nbytes]
        source.read_into(offset, theirs)
        source.check_unchanged()
        with self._destination.opened(file.name) as fd:
            whole = _fill(fd, offset, ours)
        if not whole or ours.tobytes() != theirs.tobytes():
            raise IntegrityError(
                f"{file.name} in {self._destination.path} is not what {source.url} holds ({nbytes} bytes at {offset}); "
                "nothing was removed; check the disk and memory, and pull again",
                url=source.url, offset=offset, nbytes=nbytes,
            )  # fmt: skip
        self._counts.add(compared_nbytes=nbytes)

    def remove(self) -> None:
        """Remove the source's files, which were compared: the indexes first, so that what is left does not look whole."""
        remove: Callable[[str], None] = self._folder.remove  # type: ignore[attr-defined]  # `_check_places` has looked
        for file in reversed(self._files):
            if not self._destination.holds_file(file.name, file.nbytes):
                raise DestinationError(f"{file.name} vanished from {self._destination.path}", url=self._destination.path)
            with closing(self._folder.open(file.name)) as now:
                if _key(now) != file.key:
                    raise SourceChangedError(f"{now.url} was changed after it was pulled; it was not removed", url=now.url)
            remove(file.name)

    def _close_sources(self) -> None:
        """End reads from networks that are under way. Files that are still being opened will not touch the destination."""
        with self._looking:
            files = list(self._files)
        for file in files:
            source = file.source
            if source is not None:
                source.close()


def _key(source: ByteSource) -> str:
    """What must be the same for bytes to be the same: the source, its version and its size."""
    url = source.url if "://" in source.url else os.path.abspath(source.url)
    return json.dumps([url, repr(source.version), source.nbytes])


def _buffer(nbytes: int) -> memoryview:
    """Memory for reading into, at the start of a page: direct reads need that."""
    if not nbytes:
        return memoryview(bytearray())
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # direct reads into small pages take twice as long
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _fill(fd: int, offset: int, buffer: memoryview) -> bool:
    """Read all of a buffer, unless the file ends before."""
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done:]], offset + done)
        if not got:
            return False
        done += got
    return True
