"""A checkpoint on tmpfs where it lies: its files mapped and page-locked, as the source of copies to a device.

Nothing is read and nothing is held twice: the device copies out of the file's own pages. That is done for tmpfs and memfds alone
(what the filesystem says, not the path), mapped shared: a private mapping would copy the file as it is page-locked, and files
on a disk are refused by some drivers, or hang them. Nothing is ever written to the file. Where the device can page-lock memory
for reading, the file is opened for reading only. Elsewhere it has to be opened for writing, and the kernel, which then faults
its pages in as a write would, moves its times: the source is told, and others who read the file at that moment see a change.

All files of a load or none: where one is refused, those that were page-locked before are given back and the load takes the
way through the ring. A file that several loads use at once, or that is held for all of them, is mapped and page-locked once for a
device, until the last of them is over. Page-locking ends before the mapping does, and after the last copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, cast

from headrace._addresses import address_of
from headrace._staging import PAGE, round_up
from headrace.devices.base import Device
from headrace.errors import DeviceError, HeadraceError, PinningError
from headrace.sources.base import ByteSource, LocalSource

_TMPFS_MAGIC = 0x01021994  # f_type of statfs(2), of memfds too
_THREADS = 8


class NotInPlaceError(HeadraceError):
    """A file cannot be used where it lies; the message says which and why."""


class Locked(Protocol):
    """Shards in page-locked host memory, for one load.

    Attributes:
        views: {shard: all of its bytes}.
    """

    @property
    def views(self) -> Mapping[int, memoryview]: ...
    def close(self) -> None:
        """Let go of them. No copy may be under way. May be called twice."""


class InPlace:
    """The files of one load, mapped and page-locked.

    Args:
        device: that copies will go to.
        sources: {shard: its source}.

    Attributes:
        views: {shard: all of its bytes}.

    Raises:
        NotInPlaceError: one of them cannot be used so; none is page-locked then.
    """

    def __init__(self, device: Device, sources: Mapping[int, ByteSource]) -> None:
        if (reason := device.in_place_refused) is not None:
            raise NotInPlaceError(reason)
        self.views: dict[int, memoryview] = {}
        self._used = _Used(device)
        self._finalizer = weakref.finalize(self, self._used.release)
        try:
            with ThreadPoolExecutor(min(_THREADS, max(1, len(sources))), "headrace-in-place") as pool:
                views = list(pool.map(self._used.add, sources.values()))
        except BaseException as exc:
            self.close()
            if isinstance(exc, PinningError):
                raise NotInPlaceError(str(exc)) from exc
            raise
        self.views = dict(zip(sources, views, strict=True))

    def close(self) -> None:
        """End page-locking, where nobody else uses the files, and let go. No copy may be under way. May be called twice."""
        self._finalizer()
        self.views = {}


class _Used:
    """The files that one load uses. Held by the finalizer, so it knows nothing of who that is."""

    def __init__(self, device: Device) -> None:
        self._device, self._pid = device, os.getpid()
        self._files: list[_File] = []

    def add(self, source: ByteSource) -> memoryview:
        with _opened(source, os.O_RDONLY if self._device.pins_read_only else os.O_RDWR) as fd:
            file = _shelf.take(self._device, fd, self)
            self._files.append(file)
            return file.settle(fd, source)

    def release(self) -> None:
        if self._pid != os.getpid():  # what is page-locked is the parent's
            return
        files, self._files = self._files, []
        for file in files:
            _shelf.put_back(file, self)


_Key = tuple[int, int, int, int, int]  # process, device, and what tells the file: its filesystem, inode and size


class _File:
    """One file, mapped once and page-locked for one device, for all that use it now."""

    def __init__(self, key: _Key, device: Device) -> None:
        self.key, self.device = key, device
        self.users: set[_Used] = set()
        self._settling = threading.Lock()
        self._mapping: mmap.mmap | None = None
        self._address = 0

    def settle(self, fd: int, source: ByteSource) -> memoryview:
        """Its bytes, page-locked by whoever comes first. Raises `NotInPlaceError` or `PinningError`; the next one tries again."""
        if not source.nbytes or os.fstat(fd).st_size != source.nbytes:
            raise NotInPlaceError(f"{source.url}: it is empty, or no longer as long as when it was opened")
        read_only = self.device.pins_read_only
        with self._settling:
            if self._mapping is None:
                mapping = _map(fd, source, mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE)
                try:
                    self.device.enter_thread()
                    address = address_of(memoryview(mapping))
                    source.check_unchanged()
                    try:
                        self.device.pin(address, round_up(source.nbytes, PAGE), read_only=read_only)
                    except DeviceError:
                        if not read_only:  # pages may have been faulted in before it was refused, and now the file is read
                            cast(LocalSource, source).forgive_times()
                        raise
                    self._mapping, self._address = mapping, address
                except BaseException:
                    mapping.close()  # it has a descriptor, and the error's traceback may live on
                    raise
            if not read_only:
                cast(LocalSource, source).forgive_times()
            return memoryview(self._mapping)

    def release(self) -> None:
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        try:
            self.device.unpin(self._address)
        except DeviceError:  # the device may still read it: it must never be unmapped
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


class _Shelf:
    """The files that are page-locked now in this process.

    The collector may end a load at any point, also while its thread is in here: so the lock can be taken again by its holder, and
    a file is looked up once more when its user has been noted.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._files: dict[_Key, _File] = {}

    def take(self, device: Device, fd: int, user: _Used) -> _File:
        status = os.fstat(fd)
        key = (os.getpid(), id(device), status.st_dev, status.st_ino, status.st_size)
        with self._lock:
            while True:
                file = self._files.setdefault(key, _File(key, device))
                file.users.add(user)
                if self._files.get(key) is file:
                    return file

    def put_back(self, file: _File, user: _Used) -> None:
        with self._lock:
            file.users.discard(user)
            if file.users or self._files.get(file.key) is not file:
                return
            del self._files[file.key]
        file.release()


_shelf = _Shelf()


def check_on_tmpfs(source: ByteSource) -> None:
    """Raise `NotInPlaceError` for what does not lie in memory already."""
    with _opened(source, os.O_RDONLY):
        pass


@contextmanager
def _opened(source: ByteSource, flags: int) -> Iterator[int]:
    """A descriptor of a file on tmpfs."""
    reopen = getattr(source, "reopen", None)
    if reopen is None:
        raise NotInPlaceError(f"{source.url}: it is no local file, or its bytes are verified as they are read")
    try:
        fd = cast(int, reopen(flags))
    except OSError as exc:
        what = "for writing, which page-locking needs" if flags == os.O_RDWR else "again"
        raise NotInPlaceError(f"{source.url}: it cannot be opened {what}: {exc.strerror}") from exc
    try:
        if _filesystem(fd) != _TMPFS_MAGIC:
            raise NotInPlaceError(f"{source.url}: it does not lie on tmpfs")
        yield fd
    finally:
        os.close(fd)


def _map(fd: int, source: ByteSource, protection: int) -> mmap.mmap:
    """All of a file, shared."""
    try:
        return mmap.mmap(fd, source.nbytes, flags=mmap.MAP_SHARED, prot=protection)
    except OSError as exc:
        raise NotInPlaceError(f"{source.url}: it cannot be mapped: {exc.strerror}") from exc


def _filesystem(fd: int) -> int:
    answer = (ctypes.c_long * 64)()  # struct statfs is 120 bytes on 64-bit Linux and begins with f_type
    if ctypes.CDLL(None, use_errno=True).fstatfs(ctypes.c_int(fd), answer):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(answer[0])
