"""One short read of one tensor, on the caller's thread, without a plan and an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from headrace._checkpoint import Checkpoint
from headrace._dtypes import DTYPES
from headrace._header import TensorInfo
from headrace._integrity import VerifiedSource
from headrace._interpreter import switching_fast
from headrace._options import Options
from headrace._plan import CHUNK_NBYTES
from headrace._slices import Index, cut_slice

if TYPE_CHECKING:
    import torch


def read_at_once(checkpoint: Checkpoint, info: TensorInfo, index: Index | None) -> torch.Tensor | None:
    """One tensor, or the part of it that an index selects, read on this thread without a plan; None for what is more than that.

    An engine for one read of 16 KiB takes 400 microseconds, this 30 (2 cores, 2026-11-29), and it would read on this thread too.
    """
    found = _contiguous(checkpoint.options, info, index)
    if found is None:
        return None
    from headrace.devices.cpu import CpuTarget

    offset, nbytes, shape = found
    tensor, memory = CpuTarget().allocate(info.dtype, shape, nbytes)
    source = checkpoint.sources[checkpoint.where[info.name][0]]
    with switching_fast.held():
        source.read_into(offset, memory)
        if isinstance(source, VerifiedSource):
            source.confirm()
    source.check_unchanged()
    return cast("torch.Tensor", tensor)


def _contiguous(options: Options, info: TensorInfo, index: Index | None) -> tuple[int, int, Sequence[int]] | None:
    """(offset, bytes, shape) of what is one short read through the page cache."""
    if options.direct_io == "on" or options.mmap in ("auto", "require"):
        return None
    if index is None:
        return (info.offset, info.nbytes, info.shape) if info.nbytes <= CHUNK_NBYTES else None
    try:
        bits = DTYPES[info.dtype].bits
        cuts, shape = cut_slice(info.shape, index, bits=bits, slot_nbytes=CHUNK_NBYTES, pieces_from_nbytes=math.inf)
    except (IndexError, TypeError, ValueError):
        return None  # a plan says what is wrong with it
    if not cuts:
        return info.offset, 0, shape
    cut = cuts[0]
    is_short = len(cuts) == 1 and cut.pieces == 1 and cut.shape is None and cut.nbytes <= CHUNK_NBYTES
    return (info.offset + cut.offset, cut.nbytes, shape) if is_short else None
