"""PURE: how the bytes of a shard travel, and why: its route, the length of its reads, where conversions run.

One function for each decision. `_planner` asks them, and `headrace plan` prints what they say. What a source and a device can
do comes in as values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace._dtypes import DTYPES
from headrace._plan import KIB, LARGE_NBYTES, MIB, PAGE, SourceAbilities
from headrace._slices import Index, slice_shape

_LEAST_HEADROOM = 256 * MIB


def choose_route(ability: SourceAbilities, count: int, device: str = "cpu") -> tuple[str, str]:
    """(route, reason) of a shard's bytes to host memory, or to a device."""
    if not count:
        return "none", "no tensor of this shard is wanted"
    if device != "cpu" and ability.direct_nbytes:
        return "gds", ability.direct_reason
    route, reason = _choose_route(ability) if device == "cpu" else _staged_from(ability, device)
    if ability.direct_reason:
        reason += f"; not straight into {device}: {ability.direct_reason}"
    return route, f"{reason}; verified: {ability.verified}" if ability.verified else reason


def _choose_route(ability: SourceAbilities) -> tuple[str, str]:
    if ability.mapped:
        return "mapped", "mmap was asked for: tensors are views of the file, and change when it does"
    if ability.held:
        return "held", f"{ability.held}: copied into the tensors' own memory"
    if ability.kind == "memory":
        return "straight", "copied out of memory into the tensors' own"
    if ability.kind == "network":
        return "straight", "ranges are received into the tensors' memory"
    if ability.cached:
        return "straight", "in the page cache: read into the tensors' memory"
    return "straight", "not in the page cache: read past it, into the tensors' memory"


def choose_direct(demand: str, ability: SourceAbilities, *, usable: bool, mode: str, reason: str) -> tuple[bool, str]:
    """(whether a shard is read straight into the device's memory, why or why not).

    Args:
        demand: 'auto' or 'require'.
        ability: of the shard's source.
        usable, mode, reason: what was found out about the library; see `headrace.sources.gds.Verdict`.
    """
    if ability.kind != "file":
        return False, "only local files can be"
    if ability.verified:
        return False, "what is verified has to pass through host memory"
    if ability.in_place:
        return False, "it is page-locked where it lies"
    if demand == "auto" and ability.cached:
        return False, "the page cache is quicker than the disk"
    if usable and demand == "auto" and mode == "compat":
        return False, f"{reason}, which the ring does better"
    return usable, reason


def leaves_headroom(nbytes: int, free_nbytes: int) -> bool:
    """Whether an allocation on a device leaves max(256 MiB, a quarter of it) for what the caller does with the tensors."""
    return free_nbytes >= nbytes + max(_LEAST_HEADROOM, nbytes // 4)


def _staged_from(ability: SourceAbilities, device: str) -> tuple[str, str]:
    if ability.held:
        place = "there" if ability.in_place else "a ring of page-locked memory"
        return "held", f"{ability.held}: copied from {place} to {device}"
    if ability.in_place:
        return "mapped", f"on tmpfs: page-locked where it lies, and copied from there to {device}"
    if ability.kind == "memory":
        place = "copied out of memory into"
    elif ability.kind == "network":
        place = "ranges are received into"
    else:
        place = "in the page cache: read into" if ability.cached else "not in the page cache: read past it, into"
    return "staged", f"{place} a ring in host memory, and copied from there to {device}"


def cast_on_device(source: str, target: str, cast_at: str) -> bool:
    """Whether a conversion runs on the device rather than in the slot on the host.

    Where the bus is the narrow place ("bus"), a narrowing one runs on the host: fewer bytes cross it then. All others send what
    is in the file.
    """
    if cast_at == "bus":
        return DTYPES[target].itemsize >= DTYPES[source].itemsize
    return cast_at == "device"


def read_unit(ability: SourceAbilities, nbytes: int) -> tuple[int, int]:
    """(length of a read, what its inner boundaries are multiples of, or 0) for a range that is read into place.

    Blocks that are verified are read whole, one or more at a time: then only the first and the last read of a range have a
    block in part, which costs a copy and, if no neighbour reads it too, bytes that nobody wants.
    """
    if block := ability.block_nbytes:
        return max(1, ability.chunk_nbytes // block) * block, block
    chunk = ability.chunk_nbytes * (2 if nbytes >= LARGE_NBYTES else 1)
    if ability.kind == "network":  # equal parts, an eighth longer where that saves one: a short rest costs a whole request
        return -(-nbytes // max(1, -(-8 * nbytes // (9 * chunk)))), 0
    return chunk, PAGE


def pieces_from(ability: SourceAbilities, shape: Sequence[int], index: Index) -> float:
    """Bytes from which pieces of a slice are read one by one rather than with everything between them.

    Measured (docs/design.md, 3.11): from the page cache 8 KiB, whatever the share. Cold, the break-even moves with the
    share of the tensor that is wanted: a sixteenth 12 KiB, an eighth 32 KiB, a quarter 128 KiB, a half never. Network
    requests cost a round trip each: pieces below a chunk never pay.
    """
    if ability.kind == "network":
        return float(ability.chunk_nbytes)
    if ability.kind == "memory" or ability.cached:
        return 8 * KIB
    share = math.prod(slice_shape(shape, index)) / max(1, math.prod(shape))
    for most, nbytes in ((1 / 16, 12 * KIB), (1 / 8, 32 * KIB), (1 / 4, 128 * KIB)):
        if share <= most:
            return float(nbytes)
    return math.inf
