"""Memory by its address: where a view lies, a view of what lies somewhere, and copying without the GIL."""

from __future__ import annotations

import ctypes


def address_of(view: memoryview) -> int:
    """Address of a writable view's first byte; 0 for an empty one."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def view_at(address: int, nbytes: int, keep_alive: object) -> memoryview:
    """Writable bytes at an address. The view keeps `keep_alive` alive."""
    if not nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_char * nbytes).from_address(address)
    memory._keep_alive = keep_alive  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def move(target: memoryview, source: memoryview) -> None:
    """Copy bytes without the GIL (a slice assignment would hold it). Both views are writable and of one length."""
    ctypes.memmove(address_of(target), address_of(source), source.nbytes)
