"""Fill a local folder from any source: ranges of all files at once, and nothing twice.

What is pulled is chosen and checked first, all files are opened in one round, and then ranges of them are copied side by side.
Files named *.safetensors.index.json are placed last. Where it goes, and what survives a kill, is the business of `_destination`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Final, TypeAlias, TypeVar

from typing_extensions import Self

from headrace._checkpoint import INDEX_SUFFIX
from headrace._crew import work_off
from headrace._destination import STATE, Destination, Part, writing
from headrace._interpreter import switching_fast
from headrace._machine import available_cpus
from headrace.errors import (
    DestinationError,
    FormatError,
    IntegrityError,
    NoSpaceError,
    OptionError,
    SourceChangedError,
    SourceNotFoundError,
)
from headrace.sources.base import ByteSource, Folder, aligned_source, is_remote

log = logging.getLogger("headrace")

Patterns: TypeAlias = "str | Sequence[str] | None"
T = TypeVar("T")

RANGE_NBYTES: Final = 8 << 20  # as network reads: a request's overhead is small against it
_NETWORK_CONCURRENCY: Final = 16
_KEPT_OPEN: Final = 256  # more files than this are opened again when their turn comes: descriptors are limited
_OPENERS: Final = 32
_PATH_NBYTES: Final = 4095  # PATH_MAX without its NUL
_NAME_NBYTES: Final = 255  # NAME_MAX


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


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did.

    Attributes:
        url, destination: from where to where.
        files: files that were asked for and are in their place now.
        nbytes: their bytes.
        copied_nbytes: bytes this pull copied.
        resumed_nbytes: bytes an earlier, unfinished pull had copied.
        skipped_files: files that were there already.
        moved: whether the source's files were removed.
        seconds: how long it took, the wait for another pull included.
        copying_s: of `seconds`, those from the first byte to the last.
        index: the index whose shards were pulled with it; None where a folder or a file was asked for.
    """

    url: str
    destination: str
    files: int
    nbytes: int
    copied_nbytes: int
    resumed_nbytes: int
    skipped_files: int
    moved: bool
    seconds: float
    copying_s: float
    index: str | None = None

    @property
    def rate(self) -> float:
        """Bytes copied per second."""
        return self.copied_nbytes / self.copying_s if self.copying_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data for JSON. Names are stable; new ones may be added."""
        return asdict(self)


Report: TypeAlias = Callable[[PullProgress], None]


def pull_folder(
    folder: Folder,
    dst: str | os.PathLike[str],
    *,
    include: Patterns,
    exclude: Patterns,
    concurrency: int | None,
    move: bool,
    progress: Report | None,
    range_nbytes: int = RANGE_NBYTES,
    free_nbytes: Callable[[str], int] = lambda path: shutil.disk_usage(path).free,
) -> PullReport:
    """Copy the files of a folder into a local one.

    Args:
        folder: the source; folders below it are pulled where it can `walk`.
        dst: made where it does not exist. It may be a link, what is below it may not.
        include, exclude: globs on paths relative to the source; `*` also matches `/`. None: all, and none.
        concurrency: ranges at once; None: 16 over a network, else from the CPUs.
        move: remove the files from the source once all of them are in place and every byte was read back and compared.
        progress: called on this thread, after every range and twice a second.
        range_nbytes: how much is read at once.
        free_nbytes: tells how much room a path has.

    Raises:
        OptionError: `move` from a source that cannot remove, or a destination that overlaps the source.
        SourceNotFoundError: there is no such folder, or it has no file that was asked for.
        FormatError: a name would lead out of the destination.
        NoSpaceError, DestinationError: the destination cannot be written to.
        IntegrityError: the bytes are not those of the digest that the source names.
        SourceError: a source cannot be read. What was copied is kept, and the next pull goes on from there.
    """
    _check_places(folder, dst, move=move)
    counts = _Counts(progress)
    names = _choose(folder, include, exclude)
    with Destination(os.path.abspath(os.fspath(dst))) as destination:
        if destination.lock():
            names = _choose(folder, include, exclude)  # the other one may have taken its time, or moved them
        with _Pull(folder, destination, counts, concurrency=concurrency, range_nbytes=range_nbytes) as pull:
            pull.open(names)
            pull.check_space(free_nbytes)
            pull.copy()
            if include is None and exclude is None:
                destination.tidy()
            destination.sync()
            if move:
                pull.compare()
                pull.remove()
    done = counts.snapshot()
    return PullReport(
        url=folder.url,
        destination=destination.path,
        files=done.files,
        nbytes=done.total_nbytes,
        copied_nbytes=done.copied_nbytes,
        resumed_nbytes=done.resumed_nbytes,
        skipped_files=done.skipped_files,
        moved=move,
        seconds=done.seconds,
        copying_s=done.copying_s,
        index=getattr(folder, "index", None),
    )


# -- what is pulled --------------------------------------------------------------------------------------------------------------


def _check_places(folder: Folder, dst: str | os.PathLike[str], *, move: bool) -> None:
    if move and not hasattr(folder, "remove"):
        raise OptionError(f"move: only files of local folders can be removed, not those of {folder.url}", option="move")
    if "://" in folder.url or not os.path.isdir(folder.url):
        return
    source, target = os.path.realpath(folder.url), os.path.realpath(os.fspath(dst))
    if os.path.commonpath([source, target]) == source:
        raise OptionError(f"{os.fspath(dst)} lies inside {folder.url}, which is pulled; choose another destination", option="dst")


def _choose(folder: Folder, include: Patterns, exclude: Patterns) -> list[str]:
    """The names to pull, indexes last."""
    walk: Callable[[], list[str]] = getattr(folder, "walk", folder.names)
    present = [name for name in dict.fromkeys(walk()) if name.split("/", 1)[0] != STATE]
    wanted, unwanted = _globs(include), _globs(exclude)
    chosen = [name for name in present if _fits(name, wanted, default=True) and not _fits(name, unwanted, default=False)]
    if not chosen:
        seen = f"none of its {len(present):,} files fits the patterns" if present else "it holds no files"
        raise SourceNotFoundError(f"there is nothing to pull from {folder.url}: {seen}", url=folder.url)
    folders = {name[:at] for name in chosen for at in range(len(name)) if name[at] == "/"}
    for name in chosen:
        _check_name(name, folder.url, folders)
    return sorted(chosen, key=lambda name: (name.endswith(INDEX_SUFFIX), name))


def _globs(patterns: Patterns) -> list[str] | None:
    if patterns is None:
        return None
    try:
        given = [patterns] if isinstance(patterns, str) else list(patterns)
        refused = not all(isinstance(each, str) for each in given)
    except TypeError:
        given, refused = [], True
    if refused:
        raise OptionError(f"include and exclude are globs, a str or a list of them, not {patterns!r}", option="include")
    return [f"{each}*" if each.endswith("/") else each for each in given] or None


def _fits(name: str, globs: Sequence[str] | None, *, default: bool) -> bool:
    return default if globs is None else any(fnmatchcase(name, glob) for glob in globs)


def _check_name(name: str, url: str, folders: set[str]) -> None:
    """A key of an object store may be anything; what is no plain relative path is refused before anything is written."""
    reason = ""
    if not name or "\\" in name or re.search("[\0\ud800-\udc7f\udd00-\udfff]", name):  # half characters are no bytes
        reason = "is no file name"
    elif name.startswith("/") or re.match(r"[A-Za-z]:", name):
        reason = "is an absolute path"
    elif any(part in ("", ".", "..") for part in name.split("/")):
        reason = "leads out of the destination or is no plain path"
    elif name in folders:
        reason = "is a file and a folder at once, which no filesystem can hold"
    elif _is_too_long(name):
        reason = "is longer than filesystems allow"
        name = f"{name[:60]}..."
    if reason:
        raise FormatError(f"{url}: the name {name!r} {reason}; leave it out with exclude", url=url)


def _is_too_long(name: str) -> bool:
    raw = os.fsencode(name)
    return len(raw) > _PATH_NBYTES or any(len(part) > _NAME_NBYTES for part in raw.split(b"/"))


# -- the copying -----------------------------------------------------------------------------------------------------------------


class _Counts:
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
    resumed: set[int] = field(default_factory=set)
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


_Range: TypeAlias = "tuple[_File, int | None]"  # None: nothing is left to read


class _Pull:
    """One pull: opens the files, copies what is missing, and closes them. A context manager."""

    def __init__(
        self, folder: Folder, destination: Destination, counts: _Counts, *, concurrency: int | None, range_nbytes: int
    ) -> None:
        self._folder = folder
        self._destination = destination
        self._counts = counts
        self._concurrency = concurrency
        self._range_nbytes = range_nbytes
        self._stop = threading.Event()
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
        keep = len(names) <= _KEPT_OPEN

        def look(name: str) -> None:
            with ExitStack() as opened:
                source = opened.enter_context(closing(self._folder.open(name)))
                with self._looking:
                    if self._stop.is_set():
                        return
                    found[name] = file = self._file(name, source)
                    if file.is_there or not keep:
                        file.source = None
                    else:
                        opened.pop_all()

        try:
            self._work_off(names, lambda: look, threads=min(self._concurrency or _OPENERS, _OPENERS, len(names)), patient=False)
        finally:
            self._files = [found[name] for name in names if name in found]
        there = [file for file in self._files if file.is_there]
        self._counts.add(
            total_files=len(names),
            total_nbytes=sum(file.nbytes for file in self._files),
            skipped_files=len(there),
            skipped_nbytes=sum(file.nbytes for file in there),
            files=len(there),
            resumed_nbytes=sum(self._nbytes_of(file, index) for file in self._files for index in file.resumed),
        )
        self._counts.report()

    def _file(self, name: str, source: ByteSource) -> _File:
        key = _key(source)
        part = Part(self._destination, name, key, nbytes=source.nbytes, range_nbytes=self._range_nbytes)
        known = getattr(source.version, "tells_apart", True)  # else what is here may be of any version of that size
        there = known and self._destination.holds(name, key)
        file = _File(name, source, key, source.nbytes, part, there, is_remote(source))
        if there:
            part.discard()
        else:
            count = len(self._indexes(file))
            if not known:
                part.discard()
            file.resumed = {index for index in part.finished() if index < count}
            file.left = max(1, count - len(file.resumed))
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
                "free some, choose another destination, or pull fewer files with include and exclude",
                url=path, status=errno.ENOSPC, needed=needed, free=free,
            )  # fmt: skip

    def copy(self) -> None:
        """Copy what is missing, and place each file when it is whole: first the shards, then the indexes."""
        missing = [file for file in self._files if not file.is_there]
        with self._counts.copying(), switching_fast.held():
            for is_index in (False, True):
                files = [file for file in missing if file.name.endswith(INDEX_SUFFIX) == is_index]
                if files:
                    self._work_off(self._ranges(files), self._with_buffer(self._copy), threads=self._threads(files))

    def _ranges(self, files: Iterable[_File]) -> Iterator[_Range]:
        for file in files:
            indexes = [index for index in self._indexes(file) if index not in file.resumed]
            yield from ((file, index) for index in indexes)
            if not indexes:
                yield file, None

    def _indexes(self, file: _File) -> range:
        return range(-(-file.nbytes // self._range_nbytes))

    def _nbytes_of(self, file: _File, index: int) -> int:
        return min(self._range_nbytes, file.nbytes - index * self._range_nbytes)

    def _threads(self, files: Sequence[_File]) -> int:
        concurrency = self._concurrency
        if concurrency is None:
            remote = any(file.is_remote for file in files)
            concurrency = _NETWORK_CONCURRENCY if remote else min(8, max(2, available_cpus()))
        count = sum(max(1, len(self._indexes(file))) for file in files)
        return min(concurrency, count)

    def _with_buffer(
        self, do: Callable[[_Range, memoryview], None], *, buffers: int = 1
    ) -> Callable[[], Callable[[_Range], None]]:
        """What gives each thread the work, and memory of its own for it."""

        def start() -> Callable[[_Range], None]:
            buffer = _buffer(buffers * self._range_nbytes)
            return lambda task: do(task, buffer)

        return start

    def _work_off(
        self, tasks: Iterable[T], start: Callable[[], Callable[[T], None]], *, threads: int, patient: bool = True
    ) -> None:
        work_off(
            tasks, start, name="headrace-pull", threads=threads, patient=patient,
            stop=self._stop, report=self._counts.report, end=self._close_sources,
        )  # fmt: skip

    def _copy(self, task: _Range, buffer: memoryview) -> None:
        file, index = task
        try:
            with file.lock:
                source = self._source(file)
                file.part.open(resumed=bool(file.resumed))
            if index is not None:
                nbytes = self._nbytes_of(file, index)
                _read(source, index * self._range_nbytes, buffer, nbytes)
                source.check_unchanged()
                if self._stop.is_set():
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
        if self._stop.is_set():
            return
        self._destination.place(file.name, file.key, file.part.name, status)
        file.part.close(placed=True)
        source.close()
        file.source = None
        self._counts.add(files=1)

    def _check_digest(self, file: _File, source: ByteSource, fd: int) -> None:
        """Read a file back where the source knows its SHA-256, as the hub does."""
        expected: str | None = getattr(source, "sha256", None)
        if expected is None:
            return
        path = os.path.join(self._destination.path, file.name)
        digest, block, at = hashlib.sha256(), memoryview(bytearray(1 << 20)), 0
        with writing(path, "read back"):
            while got := os.preadv(fd, [block], at):
                digest.update(block[:got])
                at += got
        if digest.hexdigest() != expected.lower():
            file.part.discard()
            raise IntegrityError(
                f"{self._folder.url}: {file.name} arrived with SHA-256 {digest.hexdigest()}, and the source says {expected}; "
                "pull it again, and check what lies between if it happens twice",
                url=f"{self._folder.url}/{file.name}",
            )

    # ---- moving

    def compare(self) -> None:
        """Read every file back, from the disk as far as the kernel allows it, and compare it with its source."""
        for file in self._files:
            file.resumed, file.left = set(), max(1, len(self._indexes(file)))
            with self._destination.opened(file.name) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with switching_fast.held():
            compare = self._with_buffer(self._compare, buffers=2)
            self._work_off(self._ranges(self._files), compare, threads=self._threads(self._files))

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
        offset, nbytes = index * self._range_nbytes, self._nbytes_of(file, index)
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


def _read(source: ByteSource, offset: int, buffer: memoryview, nbytes: int) -> None:
    """Read past the page cache where the source likes that better; what is copied once need not be kept twice."""
    aligned = aligned_source(source)
    if aligned is not None:
        rounded = -(-nbytes // aligned.block_nbytes) * aligned.block_nbytes
        if rounded <= len(buffer) and offset % aligned.block_nbytes == 0 and aligned.prefers_direct(offset, nbytes):
            aligned.read_direct_into(offset, buffer[:rounded])
            return
    source.read_into(offset, buffer[:nbytes])


def _fill(fd: int, offset: int, buffer: memoryview) -> bool:
    """Read all of a buffer, unless the file ends before."""
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done:]], offset + done)
        if not got:
            return False
        done += got
    return True
