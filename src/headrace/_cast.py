"""Out of a slot while it is hot: convert, thin out, or just move, from the reader's thread.

A 4 MiB chunk that is converted right after it was read costs no more than one that is not (docs/design.md, 3.8). torch does the
conversion, so the bits are those of `tensor.to`. Blocks of one dtype are copied as integers of the same width: every
bit pattern survives, and dtypes without a copy kernel need none.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache
from pathlib import Path

import torch

from headrace._blocks import Cutout
from headrace._dtypes import DTYPES
from headrace._plan import Copy

_BY_WIDTH = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
_thread = threading.local()


def copy_out(slot: memoryview, memory: memoryview, position: int, copy: Copy) -> None:
    """Copy a read's bytes from `slot` into `memory` from `position` on, as `copy` says.

    Args:
        slot: exactly the bytes that were read; its address is a multiple of the element's width.
        memory: the span's memory.
    """
    keep_to_this_thread()
    source, target = _torch_dtypes(copy)
    elements = torch.frombuffer(slot, dtype=source)
    if copy.shape is not None:
        elements = elements.as_strided(copy.shape, copy.strides)
        if copy.flip:  # as integers: not every dtype has a kernel for it
            elements = elements.view(_BY_WIDTH[max(8, DTYPES[copy.source].bits)]).flip(copy.flip).view(source)
    count = elements.numel()
    with torch.no_grad():
        torch.frombuffer(memory, dtype=target, count=count, offset=position).view(elements.shape).copy_(elements)


def copy_cutout(block: memoryview, memory: memoryview, cutout: Cutout, copy: Copy) -> None:
    """Copy a part of a block of rows into a tensor's memory, converting as `copy` says."""
    keep_to_this_thread()
    if not all(cutout.shape):
        return
    source, target = _torch_dtypes(copy)
    taken = torch.frombuffer(block, dtype=source).as_strided(cutout.shape, cutout.source_strides, cutout.source)
    with torch.no_grad():
        torch.frombuffer(memory, dtype=target).as_strided(cutout.shape, cutout.target_strides, cutout.target).copy_(taken)


def _torch_dtypes(copy: Copy) -> tuple[torch.dtype, torch.dtype]:
    if copy.source == copy.target:
        same = _BY_WIDTH[max(8, DTYPES[copy.source].bits)]
        return same, same
    return getattr(torch, str(DTYPES[copy.source].torch)), getattr(torch, str(DTYPES[copy.target].torch))


def keep_to_this_thread() -> None:
    """Stop torch from dividing this thread's copies among threads of its own: the readers are the parallelism.

    OpenMP keeps the number per thread; torch.set_num_threads would change it for the whole process. A chunk is converted
    three times faster so (2 cores, torch 2.13, 2026-11-29). Without an OpenMP library there is nothing to stop.
    """
    if getattr(_thread, "alone", False):
        return
    torch.get_num_threads()  # torch sets the thread's number up on first use; afterwards ours stays
    for library in _openmp():
        library.omp_set_num_threads(1)
    _thread.alone = True


@lru_cache(maxsize=1)
def _openmp() -> tuple[ctypes.CDLL, ...]:
    """The OpenMP runtimes that this process has loaded."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line or "libiomp" in line or "libomp" in line}
    return tuple(ctypes.CDLL(path) for path in sorted(paths) if Path(path).exists())
