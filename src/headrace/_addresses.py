"""Memory by its address: where a view lies, a view of what lies somewhere, and copying without the GIL."""

from __future__ import annotations

import ctypes
from typing import TypeAlias

Owner: TypeAlias = "ctypes.Array[ctypes.c_char]"


class _Buffer(ctypes.Structure):
    """Py_buffer of the C API."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.py_object),
        ("nbytes", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("others", ctypes.c_void_p * 5),
    )


def address_of(view: memoryview) -> int:
    """Address of a view's first byte; 0 for an empty one."""
    if not view.nbytes:
        return 0
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    buffer = _Buffer()  # ctypes has no other way to memory that must not be written to
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    address = buffer.address
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return int(address or 0)


def owner_at(address: int, nbytes: int, keep_alive: object) -> Owner:
    """An object over the bytes at an address, which keeps `keep_alive` alive."""
    owner = (ctypes.c_char * nbytes).from_address(address)
    owner._keep_alive = keep_alive  # type: ignore[attr-defined]
    return owner


def view_at(address: int, nbytes: int, keep_alive: object) -> memoryview:
    """Writable bytes at an address. The view keeps `keep_alive` alive."""
    return bytes_of(owner_at(address, nbytes, keep_alive)) if nbytes else memoryview(bytearray())


def owner_of(view: memoryview, start: int, nbytes: int) -> Owner:
    """An object of its own over part of a writable view, that exports its bytes and can be referred to weakly.

    Not a slice of the view: numpy keeps what is behind a memoryview, and not the memoryview, so its end would go unnoticed.
    """
    return (ctypes.c_char * nbytes).from_buffer(view, start)


def bytes_of(owner: Owner) -> memoryview:
    """The owner's bytes, writable."""
    return memoryview(owner).cast("B")


def move(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the GIL (a slice assignment would hold it). The views are of one length, and the target writable."""
    ctypes.memmove(address_of(target), address_of(source), source.nbytes)
