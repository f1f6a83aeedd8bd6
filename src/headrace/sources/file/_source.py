"""A local file: `preadv` through the page cache, or past it with O_DIRECT where that is quicker.

One descriptor per file, pinned to its inode: renaming or unlinking the path does not disturb it, and a rewrite in place is
noticed by `check_unchanged`. Which of the two ways suits a range is decided once per 64 MiB from what the page cache holds; a
filesystem that refuses O_DIRECT is read buffered from then on, and `direct_refused` says why. Descriptors belong to `_Descriptor`
objects, so that a close cannot pull one away under a read.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Final, Literal, NoReturn, TypeVar

from headrace._addresses import address_of
from headrace.errors import OptionError, SourceChangedError, SourceError, TruncatedError
from headrace.sources.file._errors import translate
from headrace.sources.file._filesystem import BLOCK_FILESYSTEMS, MEMORY_FILESYSTEMS, direct_alignment, filesystem_name
from headrace.sources.file._residency import Residency

DirectIO = Literal["auto", "on", "off"]
Path = str | os.PathLike[str]
T = TypeVar("T")

# The page: what direct reads need at most on disks with 512 or 4096-byte sectors, and what costs nothing where they need less.
_PAGE_NBYTES: Final = 4096
# One read returns at most 0x7ffff000 bytes (MAX_RW_COUNT), which is no multiple of a block above 4 KiB; 1 GiB is.
_DIRECT_CALL_NBYTES: Final = 1 << 30


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
            descriptor = None  # as in `_with_descriptor`
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
                raise self._closed()
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
            raise self._changed(changed)

    def reopen(self, flags: int) -> int:
        """Open the same inode again, with flags of open(2). See `LocalSource.reopen`."""
        return self._with_descriptor(lambda fd: os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC))

    def forgive_times(self) -> None:
        """See `LocalSource.forgive_times`."""
        now = self._with_descriptor(os.fstat)
        if _version(now)[:3] != self.version[:3]:  # all but the time
            raise self._changed(self._difference(now))
        self._opened, self.version = now, _version(now)

    def close(self) -> None:
        """Give back the descriptors; reads that are under way in other threads finish first. May be called twice."""
        with self._lock:
            self._descriptor = self._direct = None

    def _with_descriptor(self, use: Callable[[int], T]) -> T:
        """What a call makes of the open file's number, which is held until it returns."""
        descriptor = self._descriptor
        try:
            if descriptor is None:
                raise self._closed()
            return use(descriptor.fd)
        finally:
            descriptor = None  # a traceback that lives on must not keep the file open

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
        return max(_PAGE_NBYTES, direct_alignment(descriptor.fd) or 0) if descriptor else _PAGE_NBYTES

    def prefers_direct(self, offset: int, nbytes: int) -> bool:
        """Whether this range is better read directly. The first answer for a range of 64 MiB is kept.

        The kernel is asked what its page cache holds; where it does not say, the range counts as cached.
        """
        descriptor = self._descriptor
        if descriptor is None or self._direct_io == "off" or self.direct_refused:
            return False
        if self._direct_io == "on":
            return self._direct_descriptor() is not None
        if (known := self._residency.known(offset, nbytes)) is not None:  # before each read, and nearly always so
            return not known
        if self.filesystem not in BLOCK_FILESYSTEMS.values() or self._direct_descriptor() is None:
            return False
        return not self._residency.mostly_cached(descriptor.fd, offset, nbytes)

    def is_in_memory(self) -> bool:
        """Whether it lies on tmpfs, or the kernel says that its page cache has nearly all of every 64 MiB, and may be used."""
        if self.filesystem in MEMORY_FILESYSTEMS.values():
            return True
        descriptor = self._descriptor
        return descriptor is not None and self._direct_io != "on" and self._residency.known_cached(descriptor.fd)

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
            if address_of(buffer) % self.block_nbytes:
                raise ValueError(f"the address of a direct read's buffer is not aligned to {self.block_nbytes}") from exc
            self.direct_refused = f"{self.filesystem} refused a direct read: {exc.strerror}"
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
            if self.filesystem in MEMORY_FILESYSTEMS.values():
                self.direct_refused = f"{self.filesystem} is memory; there is nothing to read past its page cache"
            elif direct_alignment(fd) == 0:
                self.direct_refused = f"{self.filesystem} has no direct reads of this file (statx reports none)"
            else:
                try:
                    # By the open descriptor, not by the path: whatever lies there by now may be another file.
                    self._direct = _Descriptor(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
                except OSError as exc:
                    self.direct_refused = f"{self.filesystem} cannot open it with O_DIRECT: {exc.strerror}"
            return self._direct

    @functools.cached_property
    def filesystem(self) -> str:
        """'ext4', 'tmpfs', ...; f_type in hexadecimal where headrace does not know it as local."""
        descriptor = self._descriptor
        return filesystem_name(descriptor.fd) if descriptor else "closed"

    @functools.cached_property
    def _residency(self) -> Residency:
        # overlayfs keeps its pages in the file of the layer below and answers 0 to cachestat on its own inode, however much is
        # cached (kernel 6.18); mincore sees the real mapping.
        return Residency(self.nbytes, cachestat=self.filesystem != "overlay", mincore=os.geteuid() == self._opened.st_uid)

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

    def _changed(self, changed: str, offset: int | None = None, nbytes: int | None = None) -> SourceChangedError:
        return SourceChangedError(
            f"{self.url} was changed while it was read ({changed}); load it again once nothing writes to it",
            url=self.url, offset=offset, nbytes=nbytes,
        )  # fmt: skip

    def _closed(self, offset: int | None = None, nbytes: int | None = None) -> SourceError:
        return SourceError(
            f"{self.url} is read after it was closed; open it again",
            url=self.url, offset=offset, nbytes=nbytes, status=errno.EBADF,
        )  # fmt: skip


class _Descriptor:
    """A descriptor number that is closed when the last reference to this object goes.

    Python's own reference count is the count of reads under way: a read holds a reference for as long as it uses the number, and
    `close` only drops the source's. So no number is used after the kernel could give it to another file, without a lock.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> NoReturn:
        # Two objects would close one number, which may be another file's by then.
        raise TypeError("an open file cannot be pickled or copied; open it again where it is needed")

    def __del__(self, _close=os.close) -> None:  # type: ignore[no-untyped-def]  # bound here: `os` may be gone at exit
        _close(self.fd)


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
