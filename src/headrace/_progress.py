"""What a load has done so far, and where its time went.

`Progress` counts; the engine writes it under its own lock. `Snapshot` is a frozen copy for everybody else: progress bars, logs,
`stream.stats`. Nothing here knows where the numbers come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A load at one moment. Bytes are bytes, times are seconds of wall clock. `str(snapshot)` says the most of it in a few lines.

    Attributes:
        seconds: since the stream was opened, until it ended.
        total_nbytes: bytes that will be read from the sources, the surplus included, headers not.
        read_nbytes: bytes read so far; `direct_nbytes` of them past the page cache.
        surplus_nbytes: bytes of the plan that no tensor needs, read because that is cheaper than leaving them out.
        total_tensors, tensors: how many tensors will be, and have been, handed out.
        tensor_nbytes: bytes of the tensors handed out so far.
        copied_nbytes: bytes that took one more hop in host memory (casts, slices, unaligned direct reads); `cast_nbytes`
            of them were converted on the way. Both count source bytes.
        source_wait_s: how long the caller waited for bytes.
        memory_wait_s: how long readers waited for memory, that is, for the caller.
        caller_s: how long the caller kept the iterator waiting between tensors.
        peak_nbytes: most host memory the load held at once for tensors and staging, in bytes.
        device: where the tensors go.
        staging_nbytes: host memory that bytes pass through on their way to a device; part of `peak_nbytes`.
        pinned: whether all of it that was used is page-locked; None where there is none. `pinned_how`: how, or why not.
        device_copies, sent_nbytes: copies from the host to the device, and their bytes.
        device_peak_nbytes: most device memory of tensors that had not been handed out yet.
        gds: how direct storage served, told by its library's statistics when the load is over: 'gds(p2p): ...', 'gds(compat):
            ...', 'gds(mixed): ...', 'gds: ...' where it does not tell, or 'staged: ' and why; empty where it was not asked for.
        gds_nbytes: bytes that the library read into the device's memory; part of `direct_nbytes`.
        kept_nbytes: memory of tensors that the caller still held when the load had to go on without it.
        rank, ranks: this rank, and how many load together; `read_nbytes` counts what this one read.
        from_peers_nbytes, to_peers_nbytes: bytes that came from other ranks, and bytes that went to them.
        exchange: how the ranks of a group exchange what they read, and why so, in words; else empty. `partition`: who reads what.
        concurrency, memory_limit: what was chosen, where the caller left it open.
        node_share: where processes of a node share budgets, which part of which these two are, in words; else empty.
        requests: GETs sent for the shards, their opening included; 0 for what is no network.
        retried: tries that failed, and were made again where that could help; `throttled` of them the store wanted later.
        hedged, hedged_nbytes: ranges asked for a second time because they were slow, and their bytes.
        received_nbytes: bytes that came over the network, what came twice included.
        routes: per shard (url, route, reason).
        left_alone: (tensor, reason) of tensors that a blanket dtype did not touch.
        degraded: every fallback, in words; each was also warned about once.
        verified_nbytes: bytes that were found to be those of their digest, since the checkpoint was opened: headers and whole
            blocks count, and what was checked twice counts twice. `routes` says by which digests.
    """

    seconds: float = 0.0
    total_nbytes: int = 0
    read_nbytes: int = 0
    direct_nbytes: int = 0
    surplus_nbytes: int = 0
    total_tensors: int = 0
    tensors: int = 0
    tensor_nbytes: int = 0
    copied_nbytes: int = 0
    cast_nbytes: int = 0
    source_wait_s: float = 0.0
    memory_wait_s: float = 0.0
    caller_s: float = 0.0
    peak_nbytes: int = 0
    kept_nbytes: int = 0
    rank: int = 0
    ranks: int = 1
    from_peers_nbytes: int = 0
    to_peers_nbytes: int = 0
    exchange: str = ""
    partition: str = ""
    concurrency: int = 0
    memory_limit: int = 0
    routes: tuple[tuple[str, str, str], ...] = ()
    left_alone: tuple[tuple[str, str], ...] = ()
    degraded: tuple[str, ...] = ()
    verified_nbytes: int = 0
    node_share: str = ""
    requests: int = 0
    retried: int = 0
    throttled: int = 0
    hedged: int = 0
    hedged_nbytes: int = 0
    received_nbytes: int = 0
    device: str = "cpu"
    staging_nbytes: int = 0
    pinned: bool | None = None
    pinned_how: str = ""
    device_copies: int = 0
    sent_nbytes: int = 0
    device_peak_nbytes: int = 0
    gds: str = ""
    gds_nbytes: int = 0

    @property
    def rate(self) -> float:
        """Bytes read per second so far."""
        return self.read_nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def slowest(self) -> str:
        """What held the load up most: 'source', 'caller', or 'memory', a limit so low that the readers waited for it.

        Readers also wait for memory while the caller is busy with what it was given; that is the caller's time.
        """
        memory = min(self.source_wait_s, max(0.0, self.memory_wait_s - self.caller_s))
        waits = {"source": self.source_wait_s - memory, "caller": self.caller_s, "memory": memory}
        return max(waits, key=lambda stage: waits[stage])

    def __str__(self) -> str:
        read = f"{self.read_nbytes / 2**20:,.1f} MiB read in {self.seconds:.3f} s, {self.rate / 1e9:.2f} GB/s"
        waits = f"{self.source_wait_s:.3f} s for the source, {self.memory_wait_s:.3f} s for memory"
        peak = f"{self.peak_nbytes / 2**20:,.1f} MiB"
        ways = sorted({(route, reason) for _, route, reason in self.routes if route != "none"})
        return "\n".join(
            [
                f"{self.tensors:,} of {self.total_tensors:,} tensors to {self.device}; {read}",
                f"waited   {waits}, {self.caller_s:.3f} s for the caller; slowest: {self.slowest}",
                f"memory   {peak} at most, of a limit of {self.memory_limit / 2**20:,.1f} MiB",
                *(f"route    {route}: {reason}" for route, reason in ways),
                *(f"degraded {fallback}" for fallback in self.degraded),
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data for JSON. Names are stable; new ones may be added. docs/stats.md describes them."""
        return {name: _plain(value) for name, value in asdict(self).items()}


@dataclass(slots=True)
class Progress:
    """Counters of a running load. Written by the engine under its lock; read through `snapshot()`."""

    total_nbytes: int = 0
    surplus_nbytes: int = 0
    total_tensors: int = 0
    concurrency: int = 0
    memory_limit: int = 0
    routes: tuple[tuple[str, str, str], ...] = ()
    left_alone: tuple[tuple[str, str], ...] = ()
    read_nbytes: int = 0
    direct_nbytes: int = 0
    tensors: int = 0
    tensor_nbytes: int = 0
    copied_nbytes: int = 0
    cast_nbytes: int = 0
    source_wait_s: float = 0.0
    memory_wait_s: float = 0.0
    caller_s: float = 0.0
    peak_nbytes: int = 0
    kept_nbytes: int = 0
    rank: int = 0
    ranks: int = 1
    from_peers_nbytes: int = 0
    to_peers_nbytes: int = 0
    exchange: str = ""
    partition: str = ""
    device: str = "cpu"
    staging_nbytes: int = 0
    pinned: bool | None = None
    pinned_how: str = ""
    device_copies: int = 0
    sent_nbytes: int = 0
    device_peak_nbytes: int = 0
    gds: str = ""
    gds_nbytes: int = 0
    degraded: list[str] = field(default_factory=list)
    count_verified: Callable[[], int] = int
    node_share: str = ""
    count_traffic: Callable[[], Mapping[str, Any]] = dict
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None

    @property
    def group(self) -> str:
        """What the ranks of a group do, in words; empty where there is none."""
        if self.ranks == 1:
            return ""
        return "; ".join(filter(None, (f"{self.ranks} ranks, this is rank {self.rank}", self.partition, self.exchange)))

    def finish(self) -> None:
        """Stop the clock, and count no more traffic: what follows is another load's. The first call counts."""
        if self.ended is None:
            self.ended = time.perf_counter()
            traffic = self.count_traffic()
            self.count_traffic = lambda: traffic

    def snapshot(self) -> Snapshot:
        """A frozen copy of the counters as they are now."""
        end = self.ended if self.ended is not None else time.perf_counter()
        return Snapshot(
            seconds=end - self.started,
            degraded=tuple(self.degraded),
            verified_nbytes=self.count_verified(),
            **self.count_traffic(),
            **{name: getattr(self, name) for name in _COPIED},
        )


def _plain(value: Any) -> Any:
    """Tuples as lists, which is what comes back from JSON."""
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


_NOT_COPIED = ("degraded", "count_verified", "count_traffic", "started", "ended")
_COPIED = tuple(name for name in Progress.__dataclass_fields__ if name not in _NOT_COPIED)
