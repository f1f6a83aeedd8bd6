"""The folder that a pull fills, and what it keeps there to go on later.

Below the destination lies `.headrace-pull/`: a lock, that makes pulls of one node take turns; `pulled`, which file was placed
from which version of its source; and per unfinished file a part and a journal of its finished ranges. A range is written before
its line in the journal, and a part is renamed only when it is whole, so a process may be killed at any moment: what it had done
is found by the next one, and a name of the destination never stands for half a file.

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
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from typing_extensions import Self

from headrace.errors import DestinationError, HeadraceError, NoSpaceError

log = logging.getLogger("headrace")

STATE: Final = ".headrace-pull"
_NEW: Final = os.O_CREAT | os.O_EXCL
_SAFE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # not to wait for who writes to a pipe that lies there
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


@contextmanager
def writing(path: str, doing: str) -> Iterator[None]:
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


class Destination:
    """The folder that is filled, as descriptors: links below it are never followed. A context manager."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._touched: set[str] = {""}
        self._writing_records = threading.Lock()
        self._records: dict[str, dict[str, Any]] = {}
        with ExitStack() as opened, writing(path, "make"):
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
        with writing(self.path, "lock"):
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
        with writing(os.path.join(self.path, name), "place"), self._inside(name, make=True) as (parent, last):
            with self._writing_records:
                fd = os.open("pulled", os.O_WRONLY | os.O_APPEND | os.O_CREAT | _SAFE, 0o666, dir_fd=self.state)
                with open(fd, "wb", buffering=0) as records:
                    records.write(line)
            os.rename(part, last, src_dir_fd=self.state, dst_dir_fd=parent)

    @contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """A file that was placed, for reading."""
        with writing(os.path.join(self.path, name), "read back"), self._inside(name, make=False) as (parent, last):
            fd = os.open(last, os.O_RDONLY | _SAFE, dir_fd=parent)
            try:
                yield fd
            finally:
                os.close(fd)

    def tidy(self) -> None:
        """Remove what is left of files that the source has no more."""
        with writing(self.path, "tidy up"):
            for name in os.listdir(self.state):
                if name.endswith((".part", ".ranges")):
                    os.unlink(name, dir_fd=self.state)

    def sync(self) -> None:
        """Let every new name, and the records of them, reach the disk."""
        with writing(self.path, "sync"):
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


class Part:
    """An unfinished file of the destination and the journal of its finished ranges.

    Args:
        destination: where it lies.
        name: of the file it will be.
        key: of the source's version; a part of any other one is worth nothing.
    """

    def __init__(self, destination: Destination, name: str, key: str, *, nbytes: int, range_nbytes: int) -> None:
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
        with writing(self._path, "resume"):
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
            with writing(self._path, "start over"), suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._state)

    def open(self, *, resumed: bool) -> int:
        """Open it for writing, of its full size from the start; open already is fine."""
        if self._file is None:
            with writing(self._path, "write"):
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
        with writing(self._path, "write"):
            while done < len(data):
                done += os.pwrite(self._file, data[done:], offset + done)
            os.write(self._journal, b"\n%08x\n" % index)  # a torn line ends where the next one begins

    def sync(self) -> os.stat_result:
        """Let all of it reach the disk."""
        assert self._file is not None
        with writing(self._path, "write"):
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
