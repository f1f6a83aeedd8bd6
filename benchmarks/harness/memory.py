"""Memory for floors and for destinations: all of it present before the clock starts.

Huge pages where the kernel grants them: they make preparing quicker; for the reads that are timed, page size makes no difference.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

HUGE_NBYTES = 2 << 20
_HUGEPAGE, _POPULATE_WRITE = 14, 23  # madvise
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def allocate(nbytes: int, *, present: bool = True) -> memoryview:
    """Page-aligned private memory, a multiple of 2 MiB."""
    nbytes = -(-nbytes // HUGE_NBYTES) * HUGE_NBYTES
    memory = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    _libc.madvise(address(memory), nbytes, _HUGEPAGE)
    if present:
        populate(memory)
    return memory


def populate(memory: memoryview) -> None:
    """Have the kernel make the pages, without the GIL."""
    if memory.nbytes and _libc.madvise(address(memory), memory.nbytes, _POPULATE_WRITE):
        memory[:] = bytes(memory.nbytes)  # before Linux 5.14


def shared_nbytes(name: str) -> int:
    """Size of what this process maps of memfds of a name."""
    with open("/proc/self/maps") as file:
        ranges = [line.split(None, 1)[0].split("-") for line in file if f"/memfd:{name}" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


def claim_from_host(nbytes: int) -> None:
    """Touch memory and free it again, so that a hypervisor has given it by the time it is needed."""
    step = 64 << 20
    held = [allocate(step) for _ in range(nbytes // step)]
    del held


def address(memory: memoryview) -> int:
    """Where writable memory lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def destinations(files: list[str]) -> dict[str, Any]:
    """A torch tensor for every tensor of the checkpoint, its memory touched."""
    import torch

    from harness.checkpoints import read_entries

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    made = {}
    for file in files:
        for entry in read_entries(file):
            tensor = torch.empty(entry.shape, dtype=dtypes[entry.dtype])
            start = -(-tensor.data_ptr() // HUGE_NBYTES) * HUGE_NBYTES
            inside = tensor.data_ptr() + entry.nbytes - start
            if inside >= HUGE_NBYTES:
                _libc.madvise(start, inside // HUGE_NBYTES * HUGE_NBYTES, _HUGEPAGE)
            made[entry.name] = tensor.zero_()
    return made


def view_of(tensor: Any) -> memoryview:
    """The bytes of a contiguous tensor, writable."""
    import torch

    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
