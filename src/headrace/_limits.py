"""How much at once: reads in flight and memory read ahead, from the options, the sources and the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from headrace._machine import available_cpus, available_memory, gpu_bus_rate
from headrace._options import Options
from headrace._plan import (
    CHUNK_NBYTES,
    KIB,
    MIB,
    PAGE,
    SLOT_SLACK_NBYTES,
    STAGED_CACHED_CHUNK_NBYTES,
    STAGED_CHUNK_NBYTES,
    Limits,
    NodeLimits,
    SourceAbilities,
    Staging,
)
from headrace.sources.base import ByteSource, aligned_source, is_remote

NETWORK_CHUNK_NBYTES = 8 * MIB  # a request's overhead is small against it, and 16 in flight fill a fast link
_NETWORK_CONCURRENCY = 16

_MOST_STAGED = 512 * MIB  # page-locked memory is taken from everybody
_LEAST_SLOT = MIB
_LARGE_SHARED = 2 << 30
_IN_FLIGHT = 3  # slots on their way to the device while every reader fills one
_LEAST_AHEAD_ON_DEVICE, _MOST_AHEAD_ON_DEVICE = 512 * MIB, 1024 * MIB

_NARROW_BUS = 16e9  # bytes per second: 16 lanes of PCIe 3, or 8 of PCIe 4

_MOST_AHEAD = 512 * MIB
_LEAST_AHEAD = 64 * MIB
_LEAST_AHEAD_CACHED = 16 * MIB  # four spans, which fit the L3 cache: memory that is hot is read into fastest (design, 3.3)


def abilities_of(source: ByteSource, *, mapped: bool, network_chunk_nbytes: int | None = None) -> SourceAbilities:
    """What the planner has to know of a source. Whether it is cached is asked of its first chunk."""
    ability = _abilities_of(source, mapped=mapped)
    if ability.kind == "network" and network_chunk_nbytes is not None:
        ability = replace(ability, chunk_nbytes=network_chunk_nbytes)
    if not (verified := getattr(source, "checked_by", "")):
        return ability
    return replace(ability, verified=verified, block_nbytes=getattr(source, "checked_block_nbytes", 0))


def _abilities_of(source: ByteSource, *, mapped: bool) -> SourceAbilities:
    if mapped:
        return SourceAbilities("file", cached=True, mapped=True)
    if is_remote(source):
        return SourceAbilities("network", chunk_nbytes=NETWORK_CHUNK_NBYTES, gap_nbytes=MIB)
    if (aligned := aligned_source(source)) is not None:
        return SourceAbilities("file", cached=not aligned.prefers_direct(0, min(source.nbytes, CHUNK_NBYTES)))
    return SourceAbilities("memory")


def resolve_limits(options: Options, abilities: Sequence[SourceAbilities], *, largest: Sequence[int], nbytes: int) -> Limits:
    """Limits as numbers.

    Args:
        options: what was asked for.
        abilities: of every source that is read.
        largest: bytes of the two largest tensors.
        nbytes: bytes of all sources.
    """
    limit = options.memory_limit
    if limit is None:
        limit = _automatic_limit(abilities, largest)
    elif limit < 0:
        limit = max(2 * nbytes, CHUNK_NBYTES)  # twice: casts may widen, spans are rounded up
    limits = Limits(options.concurrency or _automatic_concurrency(abilities), limit)
    return share_of_node(limits, options.local_ranks or 1, unlimited=(options.memory_limit or 0) < 0)


def share_of_node(limits: Limits, ranks: int, *, unlimited: bool = False) -> Limits:
    """PURE: one process's part of what a node may have under way, where so many of its processes load at once.

    Each has at least one reader, and a limit of 0 still loads, so more processes than that are over the total by what they need.

    Args:
        limits: of the node.
        ranks: processes that share them.
        unlimited: whether memory is limited by the model only, which is each process's own.
    """
    if ranks <= 1:
        return limits
    memory_limit = limits.memory_limit if unlimited else limits.memory_limit // ranks
    node = NodeLimits(ranks, limits.concurrency, None if unlimited else limits.memory_limit)
    return replace(limits, concurrency=max(1, limits.concurrency // ranks), memory_limit=memory_limit, node=node)


def resolve_staging(
    options: Options,
    abilities: Sequence[SourceAbilities],
    *,
    largest: Sequence[int],
    nbytes: int,
    cast_at: str,
    shared: bool = False,
) -> Limits:
    """Limits of a load to a device: the ring in host memory, and how far the device's memory runs ahead of the caller.

    `memory_limit` bounds both, each for itself. Processes of a node share its host memory and its reads; devices have their own.

    Args:
        As of `resolve_limits`.
        cast_at: see `cast_place`.
        shared: whether ranks load together, and fill rings that each of them page-locks.
    """
    ranks = options.local_ranks or 1
    given = options.memory_limit if options.memory_limit is not None and options.memory_limit >= 0 else None
    total = _MOST_STAGED if given is None else given
    most = total // ranks
    longest = max(_longest_staged(abilities, nbytes, shared=shared), *(ability.block_nbytes for ability in abilities), 0)
    chunk = max(_LEAST_SLOT, min(longest, most // 8 // PAGE * PAGE))
    chunk = min(chunk, max(64 * KIB, -(-nbytes // PAGE) * PAGE))
    concurrency = options.concurrency or _staging_concurrency(abilities)
    readers = max(1, concurrency // ranks)
    slot_nbytes = chunk + SLOT_SLACK_NBYTES
    slots = max(2, min(readers + _IN_FLIGHT, most // slot_nbytes))
    ahead = given
    if ahead is None:
        ahead = max(_LEAST_AHEAD_ON_DEVICE, min(_MOST_AHEAD_ON_DEVICE, sum(largest) + MIB))
    staging = Staging(slots, slot_nbytes, ahead, options.pin or "auto", cast_at, options.keep_staging == "on")
    node = NodeLimits(ranks, concurrency, total) if ranks > 1 else None
    return Limits(min(readers, slots - 1), slots * slot_nbytes, staging, node)


def cast_place(options: Options) -> str:
    """Where conversions of a load to a device run: 'host', 'device', or 'bus', which is decided by the bytes that cross it.

    A device converts at its memory's speed, so that bus or reading is what is waited for. CPUs that read 40 GB/s convert no more
    than 10 to 20 (docs/gpu.md): they are worth asking only where the bus is slower than that.
    """
    if options.cast_at in ("host", "device"):
        return options.cast_at
    rate = _bus_rate()
    return "bus" if rate is not None and rate < _NARROW_BUS else "device"


def _longest_staged(abilities: Sequence[SourceAbilities], nbytes: int, *, shared: bool) -> int:
    """Bytes of a slot. Cached bytes are written to the ring and read from there at once: it should stay in the CPUs' cache.

    Of ranks that load together each page-locks the rings of all, 2 ms of CPU time a MiB for four of them, and each handles every
    chunk, 1 ms for all four: long chunks are for large models. A cached GiB took 0.51 CPU-s by 4 MiB, 0.46 by 8 and 0.47 by 16,
    3.7 GiB took 1.95, 1.68 and 1.45 (2 CPUs, 2026-11-30).
    """
    if any(ability.kind == "network" for ability in abilities):
        return NETWORK_CHUNK_NBYTES
    cold = any(ability.cached is False for ability in abilities)
    long = nbytes >= _LARGE_SHARED if shared else cold
    return STAGED_CHUNK_NBYTES if long else STAGED_CACHED_CHUNK_NBYTES


def _staging_concurrency(abilities: Sequence[SourceAbilities]) -> int:
    """A bus takes what 16 readers copy out of the page cache (docs/gpu.md); the caller only hands out."""
    found = _automatic_concurrency(abilities)
    return found if found >= 16 else min(16, max(found, _cpus()))


def _automatic_limit(abilities: Sequence[SourceAbilities], largest: Sequence[int]) -> int:
    """Room for the two largest tensors, so that one is read while the other is used; not less than keeps the source busy.

    Not more either: memory that was never touched costs several times what reading into it does.
    """
    cached = all(ability.cached or ability.kind == "memory" for ability in abilities)
    least, between = _LEAST_AHEAD_CACHED if cached else _LEAST_AHEAD, MIB
    if any(ability.kind == "network" for ability in abilities):
        chunk = max(NETWORK_CHUNK_NBYTES, *(ability.block_nbytes for ability in abilities))
        # What is in flight needs its room, beside large tensors too: with room for two of 64 MiB only 7 of 16 requests were.
        least = between = _NETWORK_CONCURRENCY * chunk
    wanted = max(least, sum(largest) + between)
    return wanted if wanted <= least else min(wanted, max(least, min(_MOST_AHEAD, (available_memory() or 8 * _MOST_AHEAD) // 8)))


def _automatic_concurrency(abilities: Sequence[SourceAbilities]) -> int:
    """Readers that copy out of the page cache keep a CPU busy each; readers that wait for a disk need more of them."""
    if any(ability.kind == "network" for ability in abilities):
        return _NETWORK_CONCURRENCY
    cpus = _cpus()
    return min(16, max(8, cpus)) if any(ability.cached is False for ability in abilities) else min(8, max(2, cpus))


@lru_cache(maxsize=1)
def _bus_rate() -> float | None:
    return gpu_bus_rate()


@lru_cache(maxsize=1)
def _cpus() -> int:
    return available_cpus()
