"""Local files: `preadv` through the page cache, or past it with O_DIRECT where that is quicker.

One descriptor per file, pinned to its inode: renaming or unlinking the path does not disturb it, and a rewrite in place is
noticed by `check_unchanged`. Which of the two ways suits a range is decided once per 64 MiB from what the page cache holds
(`_Residency`); a filesystem that refuses O_DIRECT is read buffered from then on, and `direct_refused` says why. Descriptors
belong to `_Descriptor` objects, so that a close cannot pull one away under a read. The page cache is filled by reading only:
WILLNEED and FADV_RANDOM leave it in small folios, and every later read is 3-4x slower (measured, ext4, kernel 6.18).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
import stat
import threading
import time
from datetime import datetime, timezone
from typing import Final, Literal

from headrace.errors import (
    OptionError,
    SourceChangedError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
    SourceTimeoutError,
    TruncatedError,
)

DirectIO = Literal["auto", "on", "off"]
Path = str | os.PathLike[str]

# The page: what direct reads need at most on disks with 512 or 4096-byte sectors, and what costs nothing where they need less.
_PAGE_NBYTES: Final = 4096
_RANGE_NBYTES: Final = 64 << 20
# From this share on, a partly cached range is read buffered. Filling holes is slow; direct into huge pages against buffered in
# GB/s, 4 MiB reads: none cached 1.6 : 1.2, half 1.7 : 0.5, three quarters 1.5 : 1.1-1.9, all 1.7 : 5.3 (2 shared vCPUs, virtio
# disk, ext4, kernel 6.18, 2026-11-29). Even near 0.8, and higher on faster disks. CPU: 0.03 against 0.2-0.9 s/GiB.
_CACHED_SHARE: Final = 0.8
_PROBES: Final = 64
# A probe that took longer has waited for the disk, whatever the kernel answers: since 6.x a missed page is read all the same,
# and on a busy virtual machine it may be there before the call returns. In us, ext4 on a virtio disk, kernel 6.18: cached pages
# 2 to 20, missed ones that were answered as cached 66 and more.
_PROBE_WAIT_NS: Final = 30_000
# One read returns at most 0x7ffff000 bytes (MAX_RW_COUNT), which is no multiple of a block above 4 KiB; 1 GiB is.
_DIRECT_CALL_NBYTES: Final = 1 << 30

_NR_CACHESTAT: Final = {"x86_64": 451, "aarch64": 451}
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000

# f_type of statfs(2). Local block filesystems are those where a direct read reaches a disk of this machine.
_BLOCK_FILESYSTEMS: Final = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x794C7630: "overlay",
}
_MEMORY_FILESYSTEMS: Final = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
_OTHER_LOCAL_FILESYSTEMS: Final = {0xE0F5E1E2: "erofs", 0x73717368: "squashfs", 0x2FC12FC1: "zfs"}
_LOCAL_FILESYSTEMS: Final = _BLOCK_FILESYSTEMS | _MEMORY_FILESYSTEMS | _OTHER_LOCAL_FILESYSTEMS

_KINDS: Final[dict[int, type[SourceError]]] = {
    errno.ENOENT: SourceNotFoundError,
    errno.ENOTDIR: SourceNotFoundError,
    errno.EACCES: SourcePermissionError,
    errno.EPERM: SourcePermissionError,
    errno.ETIMEDOUT: SourceTimeoutError,
    errno.ESTALE: SourceChangedError,
}
_HINTS: Final = {
    errno.ENOENT: "Check the path, and that a download has finished",
    errno.ENOTDIR: "A part of the path is a file, not a folder",
    errno.EACCES: "Check the permissions of the file and of every folder above it",
    errno.EPERM: "The filesystem or a security module forbids it; check them and the user this runs as",
    errno.EISDIR: "Give a file of the folder, or open the folder as a checkpoint",
    errno.ELOOP: "Its symbolic links lead in a circle",
    errno.EIO: "The storage failed; see the kernel log (dmesg), and copy the file anew",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENFILE: "The machine has no file descriptors left (fs.file-max)",
    errno.ESTALE: "It was replaced or removed on the network filesystem; open it again",
    errno.ETIMEDOUT: "The network filesystem stopped answering",
    errno.ENXIO: "It is a socket or a device without a driver; only regular files can be read",
    errno.ENAMETOOLONG: "The path or one of its names is too long for the filesystem",
}


class FileSource:
    """Open a local file for reads at any offset from several threads.

    Args:
        path: a regular file, or a symbolic link to one.
        direct_io: "auto" reads past the page cache what is not in it, on local block filesystems; "on" wherever the filesystem
            lets it; "off" never.

    Attributes:
        url: the path.
        nbytes: the size when it was opened.
        version: device, inode, size and mtime in ns when it was opened.
        direct_refused: why direct reads are not possible here although they were tried; None where they are or were not tried.

    Raises:
        SourceNotFoundError, SourcePermissionError, SourceError: it cannot be opened, or is no regular file.
        OptionError: `direct_io` is none of the three.

    Example:
        >>> import os, tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     _ = file.write(b"weights"); file.flush()
        ...     source, buffer = FileSource(file.name), bytearray(3)
        ...     source.read_into(2, memoryview(buffer))
        ...     source.close()
        >>> bytes(buffer)
        b'igh'
    """

    def __init__(self, path: Path, *, direct_io: DirectIO = "auto") -> None:
        if direct_io not in ("auto", "on", "off"):
            raise OptionError(f"direct_io={direct_io!r} is none of 'auto', 'on' and 'off'", option="direct_io")
        self.url = os.fsdecode(path)
        self._descriptor: _Descriptor | None
        self._descriptor, self._opened = _open_regular(self.url)
        self.nbytes = self._opened.st_size
        self.version: tuple[int, int, int, int] = _version(self._opened)
        self.direct_refused: str | None = None
        self._direct_io = direct_io
        self._direct: _Descriptor | None = None
        self._lock = threading.Lock()  # opening the direct descriptor, and close
        # Bytes by thread: each thread writes its own key only, so the hot path needs no lock. A later thread with the same
        # identifier carries on where the finished one stopped.
        self._buffered_nbytes: dict[int, int] = {}
        self._direct_nbytes: dict[int, int] = {}

    # ---- the page cache's way

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the bytes from `offset` on, through the page cache. See `ByteSource.read_into`."""
        nbytes = len(buffer)
        descriptor = self._descriptor
        try:
            if descriptor is None or offset < 0 or offset + nbytes > self.nbytes:
                raise self._refuse_range(offset, nbytes)
            done = 0
            while done < nbytes:  # short reads: signals, 0x7ffff000 bytes at most (MAX_RW_COUNT). EINTR: Python retries (PEP 475)
                got = os.preadv(descriptor.fd, [buffer[done:] if done else buffer], offset + done)
                if not got:
                    raise self._explain_early_end(descriptor, offset, nbytes, done)
                done += got
        except SourceError:
            raise
        except OSError as exc:
            raise translate(exc, "read", self.url, offset=offset, nbytes=nbytes) from exc
        finally:
            descriptor = None  # a traceback that lives on must not keep the file open
        thread = threading.get_ident()
        self._buffered_nbytes[thread] = self._buffered_nbytes.get(thread, 0) + nbytes

    def check_unchanged(self) -> None:
        """Raise `SourceChangedError` if the inode was written to since it was opened. See `ByteSource.check_unchanged`.

        Compares device, inode, size and mtime, and ctime too unless the number of links changed. `cp -p` over the file restores
        mtime but not ctime; unlinking, linking or renaming over the path moves ctime as well, and leaves the bytes alone. A
        chmod or chown, or renaming the file itself, cannot be told from `cp -p`, and is reported.
        """
        descriptor = self._descriptor
        try:
            if descriptor is None:
                raise self._closed(None, None)
            now = os.fstat(descriptor.fd)
            intact = now.st_ctime_ns == self._opened.st_ctime_ns or now.st_nlink != self._opened.st_nlink
            changed = "" if intact and _version(now) == self.version else self._difference(now)
        except SourceError:
            raise
        except OSError as exc:
            raise translate(exc, "check", self.url) from exc
        finally:
            descriptor = None
        if changed:
            raise self._changed(changed, None, None)

    def reopen(self, flags: int) -> int:
        """Open the same inode again, with flags of open(2). See `LocalSource.reopen`."""
        descriptor = self._descriptor
        try:
            if descriptor is None:
                raise self._closed(None, None)
            return os.open(f"/proc/self/fd/{descriptor.fd}", flags | os.O_CLOEXEC)
        finally:
            descriptor = None

    def forgive_times(self) -> None:
        """See `LocalSource.forgive_times`."""
        descriptor = self._descriptor
        try:
            if descriptor is None:
                raise self._closed(None, None)
            now = os.fstat(descriptor.fd)
        finally:
            descriptor = None
        same = [getattr(now, field) == getattr(self._opened, field) for field in ("st_dev", "st_ino", "st_size")]
        if not all(same):
            raise self._changed(self._difference(now), None, None)
        self._opened, self.version = now, _version(now)

    def close(self) -> None:
        """Give back the descriptors; reads that are under way in other threads finish first. May be called twice."""
        with self._lock:
            self._descriptor = self._direct = None

    @property
    def read_nbytes(self) -> dict[str, int]:
        """Bytes read so far, by way: {"buffered": ..., "direct": ...}."""
        return {
            "buffered": sum(list(self._buffered_nbytes.values())),
            "direct": sum(list(self._direct_nbytes.values())),
        }

    # ---- past the page cache

    @functools.cached_property
    def block_nbytes(self) -> int:
        """Offsets, addresses and lengths of direct reads are multiples of this: what the filesystem says, at least 4096."""
        descriptor = self._descriptor
        return max(_PAGE_NBYTES, _direct_alignment(descriptor.fd) or 0) if descriptor else _PAGE_NBYTES

    def prefers_direct(self, offset: int, nbytes: int) -> bool:
        """Whether this range is better read directly. The first answer for a range of 64 MiB is kept.

        The kernel is asked what its page cache holds; where it does not say, the range counts as cached.
        """
        descriptor = self._descriptor
        if descriptor is None or self._direct_io == "off" or self.direct_refused:
            return False
        if self._direct_io == "on":
            return self._direct_descriptor() is not None
        if self._filesystem not in _BLOCK_FILESYSTEMS.values() or self._direct_descriptor() is None:
            return False
        return not self._residency.mostly_cached(descriptor.fd, offset, nbytes)

    def read_direct_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` past the page cache. See `AlignedSource.read_direct_into`.

        Give it huge pages: into 4 KiB pages the kernel splits a read into requests of 254 segments, about 1 MiB, and half of the
        speed is gone (0.75 against 1.85 GB/s and three times the CPU; virtio, 4 MiB reads, kernel 6.18).

        The file's last, partial block comes through the page cache: a direct read that passes the end overwrites the buffer up
        to the end of the request (ext4 on kernel 6.18 zeroes it), and callers are promised that those bytes stay.

        Raises:
            ValueError: offset, length or address is no multiple of `block_nbytes`.
        """
        block = self.block_nbytes
        if offset % block or len(buffer) % block:
            raise ValueError(f"a direct read at {offset} of {len(buffer)} bytes is not aligned to {block}")
        wanted = min(len(buffer), self.nbytes - offset)
        if len(buffer) - wanted >= block or wanted < 0:
            raise self._refuse_range(offset, len(buffer))
        done = 0
        direct = self._direct_descriptor()
        if direct is not None:
            done = self._read_whole_blocks(direct, offset, buffer[: wanted - wanted % block])
        self.read_into(offset + done, buffer[done:wanted])

    def _read_whole_blocks(self, direct: _Descriptor, offset: int, buffer: memoryview) -> int:
        """Read directly until the end, or until the kernel wants it otherwise; the caller reads the rest buffered."""
        done = 0
        nbytes = len(buffer)
        try:
            while done < nbytes:
                got = os.preadv(direct.fd, [buffer[done : done + _DIRECT_CALL_NBYTES]], offset + done)
                done += got
                if not got or got % self.block_nbytes:
                    break  # the file has shrunk, or the kernel stopped within a block, from where it cannot go on directly
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise translate(exc, "read", self.url, offset=offset, nbytes=nbytes) from exc
            if _address(buffer) % self.block_nbytes:
                raise ValueError(f"the address of a direct read's buffer is not aligned to {self.block_nbytes}") from exc
            self.direct_refused = f"{self._filesystem} refused a direct read: {exc.strerror}"
        thread = threading.get_ident()
        self._direct_nbytes[thread] = self._direct_nbytes.get(thread, 0) + done
        return done

    def _direct_descriptor(self) -> _Descriptor | None:
        """The O_DIRECT descriptor, opened when it is first wanted; None where direct reads are off, refused or over."""
        direct = self._direct
        if self.direct_refused or self._direct_io == "off":
            return None
        return direct if direct is not None else self._open_direct()

    def _open_direct(self) -> _Descriptor | None:
        with self._lock:
            if self._descriptor is None or self._direct is not None or self.direct_refused:
                return self._direct
            fd = self._descriptor.fd
            if self._filesystem in _MEMORY_FILESYSTEMS.values():
                self.direct_refused = f"{self._filesystem} is memory; there is nothing to read past its page cache"
            elif _direct_alignment(fd) == 0:
                self.direct_refused = f"{self._filesystem} has no direct reads of this file (statx reports none)"
            else:
                try:
                    # By the open descriptor, not by the path: whatever lies there by now may be another file.
                    self._direct = _Descriptor(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
                except OSError as exc:
                    self.direct_refused = f"{self._filesystem} cannot open it with O_DIRECT: {exc.strerror}"
            return self._direct

    @property
    def filesystem(self) -> str:
        """'ext4', 'tmpfs', ...; f_type in hexadecimal where headrace does not know it as local."""
        return self._filesystem

    @functools.cached_property
    def _filesystem(self) -> str:
        descriptor = self._descriptor
        return filesystem_name(descriptor.fd) if descriptor else "closed"

    @functools.cached_property
    def _residency(self) -> _Residency:
        # overlayfs keeps its pages in the file of the layer below and answers 0 to cachestat on its own inode, however much is
        # cached (kernel 6.18); mincore sees the real mapping.
        return _Residency(self.nbytes, cachestat=self._filesystem != "overlay", mincore=os.geteuid() == self._opened.st_uid)

    # ---- what went wrong

    def _difference(self, now: os.stat_result) -> str:
        """What tells `now` from the file that was opened; empty if nothing does."""
        before = self._opened
        fields = ["st_dev", "st_ino", "st_size", "st_mtime_ns"]
        if now.st_nlink == before.st_nlink:
            fields.append("st_ctime_ns")
        return ", ".join(
            f"{name[3:].removesuffix('_ns')} {_shown(name, getattr(before, name))} -> {_shown(name, getattr(now, name))}"
            for name in fields
            if getattr(before, name) != getattr(now, name)
        )

    def _explain_early_end(self, descriptor: _Descriptor, offset: int, nbytes: int, done: int) -> SourceError:
        changed = self._difference(os.fstat(descriptor.fd))
        if changed:
            return self._changed(changed, offset, nbytes)
        return TruncatedError(
            f"{self.url} ended at byte {offset + done} while reading {nbytes} bytes at {offset}, although its size is "
            f"{self.nbytes}; check the filesystem, and copy the file anew",
            url=self.url, offset=offset, nbytes=nbytes,
        )  # fmt: skip

    def _refuse_range(self, offset: int, nbytes: int) -> SourceError:
        if self._descriptor is None:
            return self._closed(offset, nbytes)
        if offset < 0:
            return SourceError(
                f"cannot read {nbytes} bytes at {offset} of {self.url}: the offset is negative",
                url=self.url, offset=offset, nbytes=nbytes, status=errno.EINVAL,
            )  # fmt: skip
        return TruncatedError(
            f"cannot read {nbytes} bytes at {offset} of {self.url}: it has {self.nbytes} bytes; it may be half of a download",
            url=self.url, offset=offset, nbytes=nbytes,
        )  # fmt: skip

    def _changed(self, changed: str, offset: int | None, nbytes: int | None) -> SourceChangedError:
        return SourceChangedError(
            f"{self.url} was changed while it was read ({changed}); load it again once nothing writes to it",
            url=self.url, offset=offset, nbytes=nbytes,
        )  # fmt: skip

    def _closed(self, offset: int | None, nbytes: int | None) -> SourceError:
        return SourceError(
            f"{self.url} is read after it was closed", url=self.url, offset=offset, nbytes=nbytes, status=errno.EBADF
        )


class FileFolder:
    """A directory of this machine.

    Args:
        path: the directory; that it exists is found out by `names` and `open`.
        direct_io: handed to every source opened here.
        kind: what files are opened as.
    """

    def __init__(self, path: Path, *, direct_io: DirectIO = "auto", kind: type[FileSource] = FileSource) -> None:
        self.url = os.fsdecode(path)
        self._direct_io: DirectIO = direct_io
        self._kind = kind

    def names(self) -> list[str]:
        """Names of the files directly inside, sorted; links to files count, dangling links and folders do not."""
        try:
            with os.scandir(self.url) as entries:
                return sorted(entry.name for entry in entries if _is_file(entry))
        except (OSError, ValueError) as exc:
            raise translate(exc, "list", self.url) from exc

    def walk(self) -> list[str]:
        """Paths of all files in it and below it, relative, sorted; links to files count, links to folders are not entered."""
        found, below = [], [""]
        while below:
            prefix = below.pop()
            path = os.path.join(self.url, prefix)
            try:
                with os.scandir(path) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            below.append(f"{prefix}{entry.name}/")
                        elif _is_file(entry):
                            found.append(prefix + entry.name)
            except (OSError, ValueError) as exc:
                raise translate(exc, "list", path) from exc
        return sorted(found)

    def open(self, name: str) -> FileSource:
        """Open one file of the folder. Names that lead out of it are refused as not found."""
        return self._kind(self._path(name), direct_io=self._direct_io)

    def remove(self, name: str) -> None:
        """Remove one file of the folder; of a link the link. Only `pull` does, after it has compared every byte of the copy."""
        path = self._path(name)
        try:
            os.unlink(path)
        except (OSError, ValueError) as exc:
            raise translate(exc, "remove", path) from exc

    def _path(self, name: str) -> str:
        path = os.path.join(self.url, name)
        if not name or os.path.isabs(name) or os.pardir in name.split("/"):
            raise SourceNotFoundError(f"{name!r} is not the name of a file inside {self.url}", url=path)
        return path


class _Descriptor:
    """A descriptor number that is closed when the last reference to this object goes.

    Python's own reference count is the count of reads under way: a read holds a reference for as long as it uses the number, and
    `close` only drops the source's. So no number is used after the kernel could give it to another file, without a lock.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, _close=os.close) -> None:  # type: ignore[no-untyped-def]  # bound here: `os` may be gone at exit
        _close(self.fd)


class _Residency:
    """Which ranges of one file are in the page cache: asked once per 64 MiB, so that reading it does not sway the answer."""

    def __init__(self, nbytes: int, *, cachestat: bool, mincore: bool) -> None:
        self._nbytes = nbytes
        self._ask_cachestat = cachestat
        self._ask_mincore = mincore
        self._sampled = False
        self._sample: float | None = None
        self._ranges: dict[int, bool] = {}  # setdefault: when two threads ask at once, both get the first answer

    def mostly_cached(self, fd: int, offset: int, nbytes: int) -> bool:
        """Whether at least half of the 64 MiB ranges that this one touches count as cached."""
        first, last = offset // _RANGE_NBYTES, (offset + max(nbytes, 1) - 1) // _RANGE_NBYTES
        return 2 * sum(self._is_cached(fd, index) for index in range(first, last + 1)) >= last + 1 - first

    def _is_cached(self, fd: int, index: int) -> bool:
        known = self._ranges.get(index)
        if known is None:
            start = index * _RANGE_NBYTES
            share = self._share(fd, start, min(_RANGE_NBYTES, self._nbytes - start))
            known = self._ranges.setdefault(index, share >= _CACHED_SHARE)
        return known

    def _share(self, fd: int, start: int, nbytes: int) -> float:
        if nbytes <= 0:
            return 1.0
        share = _cachestat_share(fd, start, nbytes) if self._ask_cachestat else None
        if share is not None:
            return share
        self._ask_cachestat = False  # ENOSYS before kernel 6.5, EPERM under seccomp: the next range would get the same answer
        share = self._sampled_share(fd)
        if share is None and self._ask_mincore:
            share = _mincore_share(fd, start, nbytes)
        return 1.0 if share is None else share

    def _sampled_share(self, fd: int) -> float | None:
        """Of the whole file, by one-page reads that must not wait; once per file, because they pull in what they miss."""
        if not self._sampled:
            self._sample = _nowait_share(fd, self._nbytes)
            self._sampled = True
        return self._sample


def _cachestat_share(fd: int, offset: int, nbytes: int) -> float | None:
    number = _NR_CACHESTAT.get(os.uname().machine)
    if number is None:
        return None
    wanted = (ctypes.c_uint64 * 2)(offset, nbytes)  # struct cachestat_range {off, len}
    found = (ctypes.c_uint64 * 5)()  # struct cachestat {nr_cache, nr_dirty, nr_writeback, nr_evicted, nr_recently_evicted}
    failed = _libc().syscall(ctypes.c_long(number), ctypes.c_long(fd), wanted, found, ctypes.c_long(0))
    return None if failed else found[0] / math.ceil(nbytes / mmap.PAGESIZE)


def _nowait_share(fd: int, nbytes: int) -> float | None:
    pages = math.ceil(nbytes / mmap.PAGESIZE)
    probes = min(_PROBES, pages)
    page = bytearray(mmap.PAGESIZE)
    cached = 0
    for probe in range(probes):
        began = time.perf_counter_ns()
        try:
            found = os.preadv(fd, [page], probe * pages // probes * mmap.PAGESIZE, os.RWF_NOWAIT) > 0
        except BlockingIOError:  # EAGAIN: it would have to wait for the disk
            continue
        except OSError:  # ENOTSUP on overlayfs and others
            return None
        cached += found and time.perf_counter_ns() - began < _PROBE_WAIT_NS
    return cached / probes if probes else None


def _mincore_share(fd: int, offset: int, nbytes: int) -> float | None:
    """For the file's owner only: to others the kernel reports every page as cached (can_do_mincore, since 5.2)."""
    libc = _libc()
    length = ctypes.c_size_t(nbytes)
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(offset))
    if address is None or address == ctypes.c_void_p(-1).value:
        return None
    pages = (ctypes.c_ubyte * math.ceil(nbytes / mmap.PAGESIZE))()
    try:
        failed = libc.mincore(ctypes.c_void_p(address), length, pages)
    finally:
        libc.munmap(ctypes.c_void_p(address), length)
    return None if failed else sum(page & 1 for page in bytes(pages)) / len(pages)


def filesystem_name(fd: int) -> str:
    """Name the filesystem of an open file, or give its f_type in hexadecimal where headrace does not know it as local."""
    answer = (ctypes.c_long * 64)()  # struct statfs is 120 bytes on 64-bit Linux and begins with f_type
    if _libc().fstatfs(ctypes.c_int(fd), answer):
        return "an unknown filesystem"
    return _LOCAL_FILESYSTEMS.get(answer[0], f"filesystem {answer[0]:#x}")


def cached_share(fd: int, nbytes: int) -> float | None:
    """Which part of an open file's first bytes is in the page cache, by cachestat; None where the kernel does not have it."""
    return _cachestat_share(fd, 0, nbytes) if nbytes else 0.0


def is_local_filesystem(name: str) -> bool:
    """Whether a name from `filesystem_name` is a local filesystem, whose pages no network can take away."""
    return name in _LOCAL_FILESYSTEMS.values()


def _direct_alignment(fd: int) -> int | None:
    """What statx (kernel 6.1) says direct reads need; 0: there are none for this file; None: it does not say."""
    statx = getattr(_libc(), "statx", None)
    answer = (ctypes.c_uint32 * 64)()  # struct statx: 256 bytes; stx_mask at 0, stx_dio_mem_align at 152, _offset_align at 156
    if statx is None or statx(ctypes.c_int(fd), b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer):
        return None
    if not answer[0] & _STATX_DIOALIGN:
        return None
    return max(answer[38], answer[39]) if answer[39] else 0


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p  # the default, int, cuts addresses
    return libc


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _shown(field: str, value: int) -> str:
    """A field of stat as people read it: times to the microsecond, in UTC."""
    if not field.endswith("_ns"):
        return str(value)
    return f"{datetime.fromtimestamp(value // 10**9, timezone.utc):%Y-%m-%dT%H:%M:%S}.{value % 10**9 // 1000:06d}Z"


def _version(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _open_regular(url: str) -> tuple[_Descriptor, os.stat_result]:
    try:
        # O_NONBLOCK: the open of a FIFO would wait for its writer. O_NOCTTY: a terminal must not become ours.
        descriptor = _Descriptor(os.open(url, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY))
        opened = os.fstat(descriptor.fd)
        os.set_blocking(descriptor.fd, True)
    except (OSError, ValueError) as exc:
        raise translate(exc, "open", url) from exc
    if stat.S_ISDIR(opened.st_mode):
        raise translate(OSError(errno.EISDIR, os.strerror(errno.EISDIR)), "open", url)
    if not stat.S_ISREG(opened.st_mode):
        raise SourceError(f"cannot open {url}: it is no regular file", url=url, status=errno.EINVAL)
    return descriptor, opened


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link in a circle, or into a folder that may not be entered, is no reason not to list the others
        return False


def translate(
    exc: OSError | ValueError, doing: str, url: str, *, offset: int | None = None, nbytes: int | None = None
) -> SourceError:
    """Make the typed error for what the operating system said; the one place where errno is interpreted."""
    number = exc.errno if isinstance(exc, OSError) else errno.EINVAL
    said = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
    hint = _HINTS.get(number or 0, "")
    if number == errno.ENOENT and os.path.islink(url):
        hint = f"It is a link to {os.readlink(url)}, which does not exist; fetch that file again"
    where = "" if offset is None else f" ({nbytes} bytes at {offset})"
    kind = _KINDS.get(number or 0, SourceError)
    return kind(f"cannot {doing} {url}{where}: {said}. {hint}".rstrip(), url=url, offset=offset, nbytes=nbytes, status=number)
