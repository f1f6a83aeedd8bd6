"""PURE: a plan as values: what is read, in what order, where it lands, and why.

`_planner` turns headers and a selection into three flat tables. `Tensors`: a column per property, a row per tensor.
`Span`: a run of tensors that share one stretch of memory, and the reads that fill it. `Read`: one request to a source.
The unit of work is the chunk, never the tensor: one read spans many small tensors, a large tensor spans many reads. The
engine carries the tables out in order and decides nothing that is decided here.

On the host a span is filled in one of two ways. Straight: its memory is an image of the file, the bytes are read where they
stay. By way of a slot: a reader reads into a small buffer of its own and copies out of it while it is hot in cache, converting
or thinning out on the way. For a device with memory of its own (`Limits.staging`) every read fills a slot of a ring, and one
copy carries that to the span's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from headrace._dtypes import DTYPES

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
LARGE_NBYTES = 32 * MIB  # what is read into place of this length or more leaves the cache anyway: chunks are twice as long
CHUNK_NBYTES = 4 * MIB  # page cache: three of them fit the L3 cache, 35 GB/s where 16 MiB reach 24 (docs/design.md, 3.3)
STAGED_CHUNK_NBYTES = 16 * MIB  # to a device: one copy is near the bus's peak from 4 MiB on (docs/gpu.md)
STAGED_CACHED_CHUNK_NBYTES = 8 * MIB  # out of the page cache: a ring that fits the L3 cache fills faster
STAGED_SPAN_NBYTES = 64 * MIB  # device memory that tensors may share
SLOT_SLACK_NBYTES = 128 * KIB  # beside a chunk: the rest of its first and last block, or a tail that is not worth a copy
ALIGNED_NBYTES, ALIGNMENT = 4 * KIB, 16  # device tensors from this size on begin at multiples of 16: vector loads need it
DIRECT_NBYTES = 64 * KIB  # whole pages from this length on are worth a request of their own to a library of direct storage
SMALL_NBYTES = 256 * KIB  # below it tensors live apart from larger ones: who keeps only norms and scales keeps only those


@dataclass(frozen=True, slots=True)
class SourceAbilities:
    """What the planner needs to know of a shard's source.

    Attributes:
        kind: 'file', 'memory' or 'network'.
        chunk_nbytes: the length of a read; twice that within tensors of `LARGE_NBYTES` and more.
        gap_nbytes: unwanted bytes up to this length are read along rather than skipped.
        cached: whether the bytes come from the page cache; None where there is none to ask.
        mapped: whether the shard is handed out as views of the mapped file.
        in_place: whether the shard is page-locked where it lies and copied to a device from there.
        verified: how its bytes are checked, in words; empty where they are not.
        block_nbytes: where they are, what is read whole blocks at a time is checked where it lands.
        direct_nbytes: the longest request of a library that reads the file straight into the device's memory; 0: none does.
        direct_reason: why, or why not; empty where that was not asked for.
        held: how the shard is kept in host memory for several loads, in words; empty where it is not.
    """

    kind: str
    chunk_nbytes: int = CHUNK_NBYTES
    gap_nbytes: int = 32 * KIB
    cached: bool | None = None
    mapped: bool = False
    in_place: bool = False
    verified: str = ""
    block_nbytes: int = 0
    direct_nbytes: int = 0
    direct_reason: str = ""
    held: str = ""


@dataclass(frozen=True, slots=True)
class Staging:
    """Resolved limits of the way to a device with memory of its own.

    Attributes:
        slots, slot_nbytes: the ring of host memory that all bytes pass through.
        ahead_nbytes: device memory of spans that the caller has not been given yet; one span is always granted.
        pin: whether the ring is page-locked: 'off', 'auto' or 'require'.
        cast_at: where dtypes are converted: 'host', 'device', or 'bus': on the host if that sends fewer bytes.
        keep: whether the ring stays for the next load.
    """

    slots: int
    slot_nbytes: int
    ahead_nbytes: int
    pin: str = "auto"
    cast_at: str = "device"
    keep: bool = False

    @property
    def chunk_nbytes(self) -> int:
        """Bytes that one copy carries, as a rule."""
        return self.slot_nbytes - SLOT_SLACK_NBYTES


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """What the processes of a node may have under way together. `memory_limit` None: as much as each of them reads."""

    ranks: int
    concurrency: int
    memory_limit: int | None

    def __str__(self) -> str:
        memory = f" and {format_nbytes(self.memory_limit)}" if self.memory_limit is not None else ""
        return f"1/{self.ranks} of the node's {self.concurrency} reads{memory}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Resolved limits of a load: reads in flight, and host bytes read ahead of the caller. `staging` for devices only."""

    concurrency: int
    memory_limit: int
    staging: Staging | None = None
    node: NodeLimits | None = None

    @property
    def span_nbytes(self) -> int:
        """Bytes that small tensors may share: a quarter of the limit, so that several spans are under way."""
        if self.staging is not None:
            return max(SMALL_NBYTES, min(STAGED_SPAN_NBYTES, self.staging.ahead_nbytes // 4))
        return max(SMALL_NBYTES, min(CHUNK_NBYTES - PAGE, self.memory_limit // 4))


class Route(NamedTuple):
    """How the bytes of one shard travel, and why."""

    url: str
    route: str
    reason: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Out of a slot into a span's memory, at a read's position. `shape` None: as many elements as were read, one after another.

    Attributes:
        source, target: dtypes of the format; the same where nothing is converted.
        shape, strides: a block of the slot, strides in elements.
        flip: dimensions of `shape` that run backwards in memory.
    """

    source: str
    target: str
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    flip: tuple[int, ...] = ()


class Read(NamedTuple):
    """One request to a source. A tuple, as there are many: it is made in a quarter of a frozen dataclass's time.

    Attributes:
        shard: which source.
        offset, nbytes: what is read; `nbytes` counts all pieces.
        span: whose memory it fills.
        position: first byte of that memory that it fills.
        pieces, stride: equal pieces whose starts lie `stride` bytes apart in the file; 1 and 0 for a contiguous range.
        copy: how the bytes get out of a slot; None where they are read into place.
        direct: whole pages of the file, for a library that reads them straight into the device's memory.
        joined: it goes on in the file where the read before it ends, and comes with the same request where memory allows.
    """

    shard: int
    offset: int
    nbytes: int
    span: int
    position: int
    pieces: int = 1
    stride: int = 0
    copy: Copy | None = None
    direct: bool = False
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Tensors that share one stretch of memory.

    Attributes:
        shard: the source they come from.
        first, last: their rows in `Plan.tensors`, end exclusive.
        first_read, last_read: the reads that fill it, end exclusive.
        nbytes: bytes of memory.
        offset: where the memory is an image of the file, the file offset of its byte `lead`; None where it is not.
        lead: unused bytes in front, so that addresses and offsets are congruent modulo a page (direct I/O, direct storage).
        given: the memory is the caller's, one tensor at a time, and not the engine's.
        mapped: the memory is the mapped file itself; nothing is read.
        cast: (source, target) dtypes of a conversion on the device, once all bytes are there; `nbytes` and the reads' positions
            are those of the source then, the tensors' positions those of the target.
        misaligned: rows of tensors whose address would not suit them; they are copied to memory of their own on the device.
    """

    shard: int
    first: int
    last: int
    first_read: int
    last_read: int
    nbytes: int
    offset: int | None
    lead: int = 0
    given: bool = False
    mapped: bool = False
    cast: tuple[str, str] | None = None
    misaligned: tuple[int, ...] = ()

    @property
    def cast_nbytes(self) -> int:
        """Bytes of memory that a conversion on the device fills; 0 where there is none."""
        return 0 if self.cast is None else self.nbytes // DTYPES[self.cast[0]].itemsize * DTYPES[self.cast[1]].itemsize


@dataclass(frozen=True, slots=True)
class Tensors:
    """The planned tensors as columns, in file order.

    Attributes:
        names: as the checkpoint spells them.
        sources: dtype in the file. `dtypes`: dtype handed out.
        shapes: as handed out, in elements of the format's dtype.
        positions: first byte in the span's memory. `nbytes`: bytes in memory.
        rows: row of the header; the shard is the span's.
    """

    names: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[Sequence[int]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A load, decided but not done. `str(plan)` explains it; printing it costs nothing and reads nothing.

    Attributes:
        tensors, spans, reads: the tables; see their classes.
        routes: per shard, how its bytes travel and why.
        limits: concurrency and memory limit, resolved.
        wanted_nbytes: bytes of the files that the selected tensors and slices need.
        read_nbytes: bytes that will be read.
        mapped_nbytes: bytes of tensors that are views of a mapped file.
        left_alone: (tensor, reason) for tensors that a blanket dtype does not touch.
        device: where the tensors go.
        group: what the ranks of a group do, in words; empty where there is none.
    """

    tensors: Tensors
    spans: list[Span]
    reads: list[Read]
    routes: tuple[Route, ...]
    limits: Limits
    wanted_nbytes: int
    read_nbytes: int
    mapped_nbytes: int = 0
    left_alone: tuple[tuple[str, str], ...] = ()
    device: str = "cpu"
    group: str = ""

    @property
    def surplus_nbytes(self) -> int:
        """Bytes read though no tensor needs them, because that is cheaper than leaving them out."""
        return self.read_nbytes + self.mapped_nbytes - self.wanted_nbytes

    @property
    def requests(self) -> int:
        """How often sources are asked for something: neighbours that are joined share a request."""
        return sum(not read.joined for read in self.reads)

    @property
    def memory_nbytes(self) -> int:
        """Memory that all tensors take together, in bytes."""
        return sum(self.tensors.nbytes)

    def __str__(self) -> str:
        return "\n".join(_explain(self))

    def __repr__(self) -> str:
        return f"<Plan: {_size(self)}>"  # the tables of a large model are megabytes of text


# -- in words ------------------------------------------------------------------------------------------------------------------


def _explain(plan: Plan) -> Iterator[str]:
    yield _size(plan)
    surplus = plan.surplus_nbytes
    extra = f", {format_nbytes(surplus)} of them surplus (cheaper read than skipped)" if surplus else ""
    requests = f"{counted(plan.requests, 'request')} for {format_nbytes(plan.read_nbytes)}"
    yield f"reads    {requests}{extra}; {plan.limits.concurrency} at a time"
    if plan.limits.node is not None:
        yield f"share    {plan.limits.node}; at least one read each"
    if plan.group:
        yield f"group    {plan.group}"
    spans, bound = counted(len(plan.spans), "span"), format_nbytes(_bound(plan))
    if plan.mapped_nbytes:
        yield f"mapped   {format_nbytes(plan.mapped_nbytes)} of tensors are views of their files; nothing of them is read ahead"
    yield f"memory   {format_nbytes(plan.memory_nbytes)} of tensors in {spans}; at most {bound} ahead of the caller"
    if plan.limits.staging is not None:
        yield from _explain_staging(plan, plan.limits.staging)
    for count, place in _cast_places(plan):
        yield f"casts    {counted(count, 'tensor')}, {place}"
    if plan.left_alone:
        keep = "keeps its" if len(plan.left_alone) == 1 else "keep their"
        yield f"kept     {counted(len(plan.left_alone), 'tensor')} {keep} dtype: {_first(plan.left_alone)}"
    for (route, reason), group in groupby(sorted(plan.routes, key=lambda r: r[1:]), key=lambda r: r[1:]):
        urls = [r.url for r in group]
        yield f"route    {route}: {reason} ({_shortened(urls)})"


def _size(plan: Plan) -> str:
    used, shards = sum(route.route != "none" for route in plan.routes), len(plan.routes)
    tensors = counted(len(plan.tensors), "tensor")
    return f"{tensors}, {format_nbytes(plan.wanted_nbytes)} in {used:,} of {counted(shards, 'shard')}"


def _explain_staging(plan: Plan, staging: Staging) -> Iterator[str]:
    pinned = {"off": "not page-locked (pin='off')", "auto": "page-locked if it can be", "require": "page-locked"}[staging.pin]
    ring = f"{counted(staging.slots, 'slot')} of {format_nbytes(staging.slot_nbytes)}"
    yield f"staging  {ring} in host memory, {pinned}; one copy per read to {plan.device}"
    direct = [read.nbytes for read in plan.reads if read.direct]
    if direct:
        share = f"{counted(len(direct), 'request')} for {format_nbytes(sum(direct))} straight into {plan.device}"
        yield f"direct   {share}; what is no whole page goes through the ring"
    misaligned = sum(len(span.misaligned) for span in plan.spans)
    if misaligned:
        once = f"{counted(misaligned, 'tensor')} copied once more on the device"
        yield f"aligned  {once}, to where suits the dtype"


def _cast_places(plan: Plan) -> Iterator[tuple[int, str]]:
    """(how many tensors are converted, where and why)"""
    on_device = sum(span.last - span.first for span in plan.spans if span.cast is not None)
    casts = sum(source != target for source, target in zip(plan.tensors.sources, plan.tensors.dtypes, strict=True))
    if casts > on_device:
        less = "; fewer bytes cross the bus" if plan.limits.staging is not None else ""
        yield casts - on_device, f"in the reader threads while the bytes are hot in cache{less}"
    if on_device:
        yield on_device, "on the device, a run of neighbours at a time; the CPUs only read"


def _bound(plan: Plan) -> int:
    if plan.limits.staging is not None:
        return max(plan.limits.staging.ahead_nbytes, max((max(span.nbytes, span.cast_nbytes) for span in plan.spans), default=0))
    return max(plan.limits.memory_limit, max((span.nbytes for span in plan.spans), default=0))


def _first(pairs: Sequence[tuple[str, str]]) -> str:
    shown = "; ".join(f"{_printable(name)} ({reason})" for name, reason in pairs[:3])
    return shown + ("; ..." if len(pairs) > 3 else "")


def _shortened(urls: Sequence[str]) -> str:
    names = [_printable(url.rstrip("/").rpartition("/")[2]) for url in urls]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _printable(name: str) -> str:
    """A name on one line, without control characters: checkpoints come from strangers."""
    return name if name.isprintable() else ascii(name)[1:-1]


def counted(count: int, noun: str) -> str:
    """'1 tensor', '60,000 tensors'."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_nbytes(nbytes: float) -> str:
    """'512 B', '1.5 KiB', '86.7 MiB', '3.74 GiB': three significant digits, powers of 1024."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(nbytes) >= 999.5 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.0f} B" if units[0] == "B" else f"{nbytes:.3g} {units[0]}"
