"""Fill a local folder from any source: ranges of all files at once, and nothing twice.

Below the destination lies `.headrace-pull/`: a lock, that makes pulls of one node take turns; `pulled`, which file was placed
from which version of its source; and per unfinished file a part and a journal of its finished ranges. A range is written before
its line in the journal, and a part is renamed only when it is whole, so a process may be killed at any moment: what it had done
is found by the next one, and a name of the destination never stands for half a file. Files named *.safetensors.index.json are
placed last.

What reaches the disk when: a file before it gets its name, the folders before the call returns. A journal is not synced; it
counts only until the machine restarts, for until then the page cache remembers what the journal says. All paths below the
destination are opened part by part without following links, so no key and no link leads out of it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import mmap
import os
import queue
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias, TypeVar

from typing_extensions import Self

from headrace._checkpoint import INDEX_SUFFIX
from headrace._interpreter import switching_fast
from headrace._machine import available_cpus
from headrace.errors import (
    DestinationError,
    FormatError,
    HeadraceError,
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

STATE: Final = ".headrace-pull"
RANGE_NBYTES: Final = 8 << 20  # as network reads: a request's overhead is small against it
_NETWORK_CONCURRENCY: Final = 16
_KEPT_OPEN: Final = 256  # more files than this are opened again when their turn comes: descriptors are limited
_OPENERS: Final = 32
_REPORTED_S: Final = 0.5
_NEW: Final = os.O_CREAT | os.O_EXCL
_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # not to wait for who writes to a pipe that lies there
_PATH_NBYTES: Final = 4095  # PATH_MAX without its NUL
_NAME_NBYTES: Final = 255  # NAME_MAX
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | _SAFE

_HINTS: Final = {
    errno.EACCES: "check the permissions of the destination",
    errno.EPERM: "check the permissions of the destination",
    errno.EROFS: "the filesystem is mounted read-only; choose another destination",
    errno.ENOSPC: "free some space or choose another destination; what was copied so far is kept for the next pull",
    errno.EDQUOT: "the quota is used up; what was copied so far is kept for the next pull",
    errno.ENOTDIR: "a part of the path is a file or a link where a folder is needed; move it away",
    errno.ELOOP: "a symbolic link is in the way, and links below the destination are not followed; remove it",
    errno.EISDIR: "a folder is in the way; move it away",
    errno.EEXIST: "a file is in the way; move it away, or choose another destination",
    errno.ENXIO: "a pipe or socket is in the way; move it away",
    errno.EFBIG: "the filesystem has no files of this size",
    errno.ENOLCK: "the filesystem has no locks (flock); choose one that has",
    errno.ENAMETOOLONG: "the name is too long for the filesystem",
    errno.EXDEV: "another filesystem is mounted inside the destination; pull to it directly",
    errno.EIO: "the storage failed; see the kernel log (dmesg)",
}


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
    with _Destination(os.path.abspath(os.fspath(dst))) as destination:
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
    if not name or "\0" in name or "\\" in name:
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
    try:
        raw = os.fsencode(name)
    except UnicodeEncodeError:
        return False  # the destination will say what it thinks of it
    return len(raw) > _PATH_NBYTES or any(len(part) > _NAME_NBYTES for part in raw.split(b"/"))


# -- where it goes ---------------------------------------------------------------------------------------------------------------


@contextmanager
def _writing(path: str, doing: str) -> Iterator[None]:
    """Translate what the operating system says about the destination; errors of headrace pass."""
    try:
        yield
    except HeadraceError:
        raise
    except (OSError, ValueError) as exc:
        number = exc.errno if isinstance(exc, OSError) else errno.EINVAL
        said = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        kind = NoSpaceError if number in (errno.ENOSPC, errno.EDQUOT) else DestinationError
        hint = _HINTS.get(number or 0, "")
        raise kind(f"cannot {doing} {path}: {said}{'; ' if hint else ''}{hint}", url=path, status=number) from exc


class _Destination:
    """The folder that is filled, as descriptors: links below it are never followed. A context manager."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._touched: set[str] = {""}
        self._writing_records = threading.Lock()
        self._records: dict[str, dict[str, Any]] = {}
        with ExitStack() as opened, _writing(path, "make"):
            os.makedirs(path, exist_ok=True)
            self._root = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, self._root)
            self.state = self._enter(self._root, STATE)
            opened.callback(os.close, self.state)
            self._lock = os.open("lock", os.O_RDWR | os.O_CREAT | _SAFE, 0o666, dir_fd=self.state)
            opened.callback(os.close, self._lock)
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._opened.close()

    def lock(self) -> bool:
        """Wait until no other pull, in whatever process of this node, is at work here, and tell whether one was.

        The lock is given back with the descriptor, so also when the process is killed.
        """
        waited = False
        with _writing(self.path, "lock"):
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                log.info("another pull fills %s; waiting for it", self.path)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._records = self._read_records()
        return waited

    def holds(self, name: str, key: str) -> bool:
        """Whether a file is what an earlier pull placed there from this version of its source."""
        record = self._records.get(name)
        if record is None or record.get("key") != key:
            return False
        try:
            with self._inside(name, make=False) as (parent, last):
                now = os.stat(last, dir_fd=parent, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(now.st_mode) and record == _record(name, key, now)

    def holds_file(self, name: str, nbytes: int) -> bool:
        """Whether a regular file of this size is in its place."""
        with suppress(DestinationError), self.opened(name) as fd:
            now = os.fstat(fd)
            return stat.S_ISREG(now.st_mode) and now.st_size == nbytes
        return False

    def place(self, name: str, key: str, part: str, status: os.stat_result) -> None:
        """Give a finished part its name. The record comes first: it is about this inode, and true of no other file."""
        line = b"\n" + json.dumps(_record(name, key, status)).encode() + b"\n"  # a torn line ends where the next one begins
        with _writing(os.path.join(self.path, name), "place"), self._inside(name, make=True) as (parent, last):
            with self._writing_records:
                fd = os.open("pulled", os.O_WRONLY | os.O_APPEND | os.O_CREAT | _SAFE, 0o666, dir_fd=self.state)
                with open(fd, "wb", buffering=0) as records:
                    records.write(line)
            os.rename(part, last, src_dir_fd=self.state, dst_dir_fd=parent)

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """A file that was placed, for reading."""
        with _writing(os.path.join(self.path, name), "read back"), self._inside(name, make=False) as (parent, last):
            fd = os.open(last, os.O_RDONLY | _SAFE, dir_fd=parent)
            try:
                yield fd
            finally:
                os.close(fd)

    def tidy(self) -> None:
        """Remove what is left of files that the source has no more."""
        with _writing(self.path, "tidy up"):
            for name in os.listdir(self.state):
                if name.endswith((".part", ".ranges")):
                    os.unlink(name, dir_fd=self.state)

    def sync(self) -> None:
        """Let every new name, and the records of them, reach the disk."""
        with _writing(self.path, "sync"):
            with suppress(FileNotFoundError):
                self._sync(os.open("pulled", os.O_RDONLY | _SAFE, dir_fd=self.state))
            for folder in sorted(self._touched):
                with self._inside(f"{folder}/." if folder else ".", make=False) as (parent, _):
                    os.fsync(parent)

    def _sync(self, fd: int) -> None:
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @contextmanager
    def _inside(self, name: str, *, make: bool) -> Iterator[tuple[int, str]]:
        """The folder of a name as a descriptor, and the name in it."""
        *folders, last = name.split("/")
        current = os.dup(self._root)
        try:
            for at, each in enumerate(folders):
                below = self._enter(current, each) if make else os.open(each, _FOLDER, dir_fd=current)
                os.close(current)
                current = below
                if make:
                    self._touched.add("/".join(folders[: at + 1]))
            yield current, last
        finally:
            os.close(current)

    def _enter(self, parent: int, name: str) -> int:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
        return os.open(name, _FOLDER, dir_fd=parent)

    def _read_records(self) -> dict[str, dict[str, Any]]:
        found = {}
        for line in _read_all("pulled", self.state).splitlines():
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                record = json.loads(line)
                found[record["name"]] = record
        return found


def _record(name: str, key: str, status: os.stat_result) -> dict[str, Any]:
    return {"name": name, "key": key, "nbytes": status.st_size, "inode": status.st_ino, "mtime_ns": status.st_mtime_ns}


def _read_all(name: str, folder: int) -> bytes:
    try:
        fd = os.open(name, os.O_RDONLY | _SAFE, dir_fd=folder)
    except FileNotFoundError:
        return b""
    with open(fd, "rb") as file:
        return file.read()


def _boot_id() -> str:
    """What tells one run of the machine from the next; where it is unknown nothing is resumed."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.urandom(8).hex()


class _Part:
    """An unfinished file of the destination and the journal of its finished ranges.

    Args:
        destination: where it lies.
        name: of the file it will be.
        key: of the source's version; a part of any other one is worth nothing.
    """

    def __init__(self, destination: _Destination, name: str, key: str, *, nbytes: int, range_nbytes: int) -> None:
        stem = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:40]
        self.name, self._journal_name = f"{stem}.part", f"{stem}.ranges"
        self._state = destination.state
        self._path = os.path.join(destination.path, name)
        self._nbytes, self._range_nbytes = nbytes, range_nbytes
        self._head = json.dumps([_boot_id(), key, nbytes, range_nbytes]).encode()
        self._file: int | None = None
        self._journal: int | None = None

    def finished(self) -> set[int]:
        """Indexes of the ranges that are in it; where there are none, or of something else, what lies there is removed."""
        with _writing(self._path, "resume"):
            head, _, lines = _read_all(self._journal_name, self._state).partition(b"\n")
            with suppress(FileNotFoundError):
                status = os.stat(self.name, dir_fd=self._state, follow_symlinks=False)
                if head == self._head and stat.S_ISREG(status.st_mode) and status.st_size == self._nbytes:
                    found = {int(line, 16) for line in re.findall(rb"^[0-9a-f]{8}$", lines, re.MULTILINE)}
                    if found:
                        return found
            self.discard()
        return set()

    def discard(self) -> None:
        """Remove it: the journal first, which without its part means nothing."""
        for name in (self._journal_name, self.name):
            with _writing(self._path, "start over"), suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._state)

    def open(self, *, resumed: bool) -> int:
        """Open it for writing, of its full size from the start; open already is fine."""
        if self._file is None:
            with _writing(self._path, "write"):
                new = 0 if resumed else _NEW
                self._file = os.open(self.name, os.O_RDWR | _SAFE | new, 0o666, dir_fd=self._state)
                self._journal = os.open(self._journal_name, os.O_WRONLY | os.O_APPEND | _SAFE | new, 0o666, dir_fd=self._state)
                if not resumed:
                    os.ftruncate(self._file, self._nbytes)
                    os.write(self._journal, self._head + b"\n")
        return self._file

    def write(self, index: int, data: memoryview) -> None:
        """Write one range, then say so."""
        assert self._file is not None
        assert self._journal is not None
        offset, done = index * self._range_nbytes, 0
        with _writing(self._path, "write"):
            while done < len(data):
                done += os.pwrite(self._file, data[done:], offset + done)
            os.write(self._journal, b"\n%08x\n" % index)  # a torn line ends where the next one begins

    def sync(self) -> os.stat_result:
        """Let all of it reach the disk."""
        assert self._file is not None
        with _writing(self._path, "write"):
            os.fsync(self._file)
            return os.fstat(self._file)

    def close(self, *, placed: bool = False) -> None:
        """Close it; where it was placed the journal has done its duty."""
        for fd in (self._file, self._journal):
            if fd is not None:
                os.close(fd)
        self._file = self._journal = None
        if placed:
            with suppress(FileNotFoundError):
                os.unlink(self._journal_name, dir_fd=self._state)


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
    part: _Part
    is_there: bool
    is_remote: bool
    resumed: set[int] = field(default_factory=set)
    left: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


_Range: TypeAlias = "tuple[_File, int | None]"  # None: nothing is left to read


class _Pull:
    """One pull: opens the files, copies what is missing, and closes them. A context manager."""

    def __init__(
        self, folder: Folder, destination: _Destination, counts: _Counts, *, concurrency: int | None, range_nbytes: int
    ) -> None:
        self._folder = folder
        self._destination = destination
        self._counts = counts
        self._concurrency = concurrency
        self._range_nbytes = range_nbytes
        self._stop = threading.Event()
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

        def look(name: str, _: memoryview) -> None:
            source = self._folder.open(name)
            try:
                file = self._file(name, source)
                found[name] = file
            except BaseException:
                source.close()
                raise
            if file.is_there or not keep:
                source.close()
                file.source = None

        try:
            self._work_off(names, look, threads=min(_OPENERS, len(names)), buffer_nbytes=0)
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
        part = _Part(self._destination, name, key, nbytes=source.nbytes, range_nbytes=self._range_nbytes)
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
        with _writing(path, "measure the free space of"):
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
                    self._work_off(self._ranges(files), self._copy, **self._crew(files))

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

    def _crew(self, files: Sequence[_File], *, buffers: int = 1) -> dict[str, int]:
        concurrency = self._concurrency
        if concurrency is None:
            remote = any(file.is_remote for file in files)
            concurrency = _NETWORK_CONCURRENCY if remote else min(8, max(2, available_cpus()))
        count = sum(max(1, len(self._indexes(file))) for file in files)
        return {"threads": min(concurrency, count), "buffer_nbytes": buffers * self._range_nbytes}

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
        with _writing(path, "read back"):
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
            self._work_off(self._ranges(self._files), self._compare, **self._crew(self._files, buffers=2))

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

    # ---- threads

    def _work_off(self, tasks: Iterable[T], do: Callable[[T, memoryview], None], *, threads: int, buffer_nbytes: int) -> None:
        """Do all tasks on some threads, and report from this one. An error, or an interrupt of this one, ends all."""
        tasks, taking = iter(tasks), threading.Lock()
        outcomes: queue.SimpleQueue[BaseException | bool] = queue.SimpleQueue()  # True: a task is done; False: a thread is

        def work() -> None:
            try:
                buffer = _buffer(buffer_nbytes)
                while not self._stop.is_set():
                    with taking:
                        task = next(tasks, None)
                    if task is None:
                        break
                    do(task, buffer)
                    outcomes.put(True)
            except BaseException as exc:  # noqa: BLE001 - raised by the thread that called
                if not self._stop.is_set():
                    outcomes.put(exc)
            finally:
                outcomes.put(False)

        crew = [threading.Thread(target=work, name=f"headrace-pull-{i}", daemon=True) for i in range(threads)]
        started: list[threading.Thread] = []
        try:
            for thread in crew:
                thread.start()
                started.append(thread)
            running = len(crew)
            while running:
                outcome = _next_outcome(outcomes)
                if isinstance(outcome, BaseException):
                    raise outcome
                running -= outcome is False
                if outcome is not False:
                    self._counts.report()
        except BaseException:
            self._stop.set()
            self._close_sources()  # ends reads from networks that are under way
            raise
        finally:
            for thread in started:
                thread.join()

    def _close_sources(self) -> None:
        for file in self._files:
            source = file.source
            if source is not None:
                source.close()


def _next_outcome(outcomes: queue.SimpleQueue[BaseException | bool]) -> BaseException | bool | None:
    """What a worker says; None where all are silent for a while, so that a bar shows that nothing comes.

    A signal just before the wait does not end it (CPython looks for signals first, then waits), so no wait is for ever.
    """
    try:
        return outcomes.get(timeout=_REPORTED_S)
    except queue.Empty:
        return None


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
