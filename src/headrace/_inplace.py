"""A checkpoint on tmpfs where it lies: its files mapped and page-locked, as the source of copies to a device.

Nothing is read and nothing is held twice: the device copies out of the file's own pages. That works for tmpfs and memfds alone
(what the filesystem says, not the path), mapped shared and opened for writing: a private mapping would copy the file as it is
page-locked, and files on a disk are refused by the driver, or hang it. Nothing is ever written to the file.

All files of a load or none: where one is refused, those that were page-locked before are given back and the load takes the
way through the ring. Page-locking ends before the mapping does, and after the last copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from headrace._addresses import address_of
from headrace._staging import PAGE, round_up
from headrace.devices.base import Device
from headrace.errors import DeviceError, HeadraceError, PinningError
from headrace.sources.base import ByteSource

_TMPFS_MAGIC = 0x01021994  # f_type of statfs(2), of memfds too
_THREADS = 8


class NotInPlaceError(HeadraceError):
    """A file cannot be used where it lies; the message says which and why."""


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
        self._held = _Held(device)
        self._finalizer = weakref.finalize(self, self._held.release)
        try:
            with ThreadPoolExecutor(min(_THREADS, max(1, len(sources))), "headrace-in-place", device.enter_thread) as pool:
                views = list(pool.map(self._held.add, sources.values()))
        except BaseException as exc:
            self.close()
            if isinstance(exc, PinningError):
                raise NotInPlaceError(str(exc)) from exc
            raise
        self.views = dict(zip(sources, views, strict=True))

    def close(self) -> None:
        """End page-locking and let go of the files. No copy may be under way. May be called twice."""
        self._finalizer()
        self.views = {}


class _Held:
    """What was page-locked. Held by the finalizer, so it knows nothing of who uses it."""

    def __init__(self, device: Device) -> None:
        self._device, self._pid = device, os.getpid()
        self._mappings: dict[int, mmap.mmap] = {}

    def add(self, source: ByteSource) -> memoryview:
        mapping = _map(source)
        view = memoryview(mapping)
        if view.nbytes:
            address = address_of(view)
            self._device.pin(address, round_up(view.nbytes, PAGE))
            self._mappings[address] = mapping
        return view

    def release(self) -> None:
        if self._pid != os.getpid():  # what is page-locked is the parent's
            return
        mappings, self._mappings = self._mappings, {}
        for address, mapping in mappings.items():
            try:
                self._device.unpin(address)
            except DeviceError:  # the device may still read it: it must never be unmapped
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


def _map(source: ByteSource) -> mmap.mmap:
    """All of a file, shared and writable."""
    reopen = getattr(source, "reopen", None)
    if reopen is None:
        raise NotInPlaceError(f"{source.url}: it is no local file, or its bytes are verified as they are read")
    try:
        fd = cast(int, reopen(os.O_RDWR))
    except OSError as exc:
        raise NotInPlaceError(f"{source.url}: it cannot be opened for writing, which page-locking needs: {exc.strerror}") from exc
    try:
        if _filesystem(fd) != _TMPFS_MAGIC:
            raise NotInPlaceError(f"{source.url}: it does not lie on tmpfs")
        if not source.nbytes or os.fstat(fd).st_size != source.nbytes:
            raise NotInPlaceError(f"{source.url}: it is empty, or no longer as long as when it was opened")
        return mmap.mmap(fd, source.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as exc:
        raise NotInPlaceError(f"{source.url}: it cannot be mapped: {exc.strerror}") from exc
    finally:
        os.close(fd)


def _filesystem(fd: int) -> int:
    answer = (ctypes.c_long * 64)()  # struct statfs is 120 bytes on 64-bit Linux and begins with f_type
    if ctypes.CDLL(None, use_errno=True).fstatfs(ctypes.c_int(fd), answer):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(answer[0])
