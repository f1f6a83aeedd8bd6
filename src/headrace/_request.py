"""What a caller asked for, against an open checkpoint: from arguments to a plan, and to an engine that is ready to run.

torch is imported when an engine is made and not before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from headrace._blocks import Blocks, choose_blocked, dtypes_to_send, in_blocks
from headrace._checkpoint import Checkpoint
from headrace._header import TensorInfo
from headrace._integrity import VerifiedSource
from headrace._interpreter import gc_paused
from headrace._ledgers import LearnedBlocks
from headrace._limits import NETWORK_CHUNK_NBYTES, abilities_of, cast_place, resolve_limits, resolve_staging
from headrace._options import Options
from headrace._plan import CHUNK_NBYTES, Plan, SourceAbilities
from headrace._planner import make_plan
from headrace._progress import Progress, Snapshot
from headrace._resident import Resident
from headrace._routes import cast_on_device
from headrace._selection import DTypeRule, Names, choose_casts, info_at, select, unknown_tensor
from headrace._slices import Index, slice_shape
from headrace.errors import OptionError, SourceError
from headrace.sources.base import ByteSource, MappableSource, is_remote

if TYPE_CHECKING:
    import torch

    from headrace._direct import DirectRoute
    from headrace._engine import Engine
    from headrace._exchange import GroupLanding
    from headrace._inplace import Locked
    from headrace._landing import HostLanding, Landing
    from headrace._peers import Peers
    from headrace._pipeline import DeviceLanding
    from headrace._relay import Relay
    from headrace._tables import SharedReading, Tables
    from headrace._trace import Tracer
    from headrace._wire import DeviceExchange
    from headrace.devices.base import Destination, Device, HostTarget

Into: TypeAlias = "Mapping[str, torch.Tensor] | Callable[[TensorInfo], torch.Tensor | None]"
Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str]"
Order: TypeAlias = Literal["ready", "file"]
Ownership: TypeAlias = Literal["leased", "copied", "borrowed"]

log = logging.getLogger("headrace")

SHARED = "shared-cpu"
_UNUSED = SourceAbilities("memory")  # nothing is read from the shard


class Request:
    """What a caller asked for, against an open checkpoint.

    Attributes:
        tables: the tensors in shared memory, where that is where they go and an engine was made; else None.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Names,
        slices: Mapping[str, Index] | None,
        rule: DTypeRule,
        options: Options,
        device: object = "cpu",
    ) -> None:
        name = name_of_device(device)
        self.is_shared, self.device_name = name == SHARED, "cpu" if name == SHARED else name
        self.checkpoint, self.rule, self.device = checkpoint, rule, device
        self.options = options = options.for_target(name)
        self.tables: Tables | None = None
        self._cast_at = cast_place(options)
        self.slices = dict(slices or {})
        for name in self.slices:
            checkpoint[name]  # raises for a name that does not exist
        with gc_paused.held():
            self.chosen = select(names, checkpoint.headers, checkpoint.rows, checkpoint.where)
        self.unmapped: list[str] = []
        self.resident = Resident(checkpoint, self.chosen, options.in_place or "off", self.device_name)
        self.direct = self._direct_route()
        if options.mmap == "require" and self.device_name != "cpu":
            raise OptionError(f"mmap='require' hands out host memory, and this load goes to {self.device_name}", option="mmap")
        maps = options.mmap in ("auto", "require") and self.device_name == "cpu" and not self.is_shared
        self.mappings = self._map_files() if maps else {}

    def plan(
        self, *, given: Mapping[str, str] | None = None, uncast: Collection[str] = (), opening: bool = False, shared: bool = False
    ) -> Plan:
        """The plan.

        Args:
            given: dtypes of the destinations, for the tensors whose memory the caller provides.
            uncast: names of tensors that are not converted, since their values are copied into a destination's later.
            opening: whether files are opened for direct storage. `shared`: whether ranks load together.
        """
        headers, where = self.checkpoint.headers, self.checkpoint.where
        abilities = [
            abilities_of(source, mapped=shard in self.mappings, network_chunk_nbytes=self.options.network_chunk_nbytes)
            if rows is None or rows
            else _UNUSED
            for shard, (source, rows) in enumerate(zip(self.checkpoint.sources, self.chosen, strict=True))
        ]
        nbytes = sum(header.nbytes for header in headers)
        abilities = [
            replace(ability, in_place=True) if shard in self.resident.shards else ability
            for shard, ability in enumerate(abilities)
        ]
        if self.resident.how:
            abilities = [replace(ability, held=self.resident.how) for ability in abilities]
        if self.direct is not None:
            wanted = [rows is None or bool(rows) for rows in self.chosen]
            abilities = self.direct.decide(self.checkpoint.sources, abilities, wanted, opening=opening, shared=shared)
        largest = self.checkpoint.largest
        if self.device_name == "cpu":
            limits = resolve_limits(self.options, abilities, largest=largest, nbytes=nbytes)
        else:
            limits = resolve_staging(
                self.options, abilities, largest=largest, nbytes=nbytes, cast_at=self._cast_at, shared=shared
            )
        with gc_paused.held():
            casts, left_alone = choose_casts(self.rule, headers, self.chosen, where)
            for name in uncast:
                shard, row = where[name]
                casts[shard].pop(row, None)
            for name, dtype in (given or {}).items():
                shard, row = where[name]
                casts[shard].pop(row, None)
                if dtype != headers[shard].dtypes[row]:
                    casts[shard][row] = dtype
            plan = make_plan(
                headers,
                self.chosen,
                abilities,
                limits,
                casts=casts if any(casts) else None,
                slices=self.slices,
                given=frozenset(given) if given else None,
                left_alone=left_alone,
                device=self.device_name,
                joins=not shared and not self.is_shared,
            )
            return replace(plan, device=SHARED) if self.is_shared else plan

    def _map_files(self) -> dict[int, memoryview]:
        """{shard: mapping} of what can be mapped; the rest is read, and `unmapped` says why."""
        mappings: dict[int, memoryview] = {}
        for shard, (source, rows) in enumerate(zip(self.checkpoint.sources, self.chosen, strict=True)):
            if rows is not None and not rows:
                continue
            try:
                if not hasattr(source, "map"):
                    raise SourceError(_why_unmapped(source, self.options.mmap), url=source.url)
                mappings[shard] = cast(MappableSource, source).map()
            except SourceError as exc:
                if self.options.mmap == "require":
                    raise
                self.unmapped.append(str(exc))
        return mappings

    def engine(
        self,
        *,
        into: Into | None,
        rename: Rename | None,
        ownership: Ownership,
        order: Order,
        progress: Callable[[Snapshot], None] | None,
        on_stop: Callable[[], None],
        opened_here: bool,
        peers: Peers | None = None,
        tracer: Tracer | None = None,
    ) -> Engine | SharedReading:
        """The engine for this request, ready to run.

        Args:
            on_stop: called when the load is over.
            opened_here: whether the checkpoint was opened for it, so that all that its sources were asked for counts.
            peers: the ranks that load together; with them this is collective.
            tracer: records the load.
        """
        from headrace._engine import Engine, Job  # imports torch

        if self.is_shared:
            return self._shared_engine(into, rename, order, progress, on_stop, opened_here, peers, tracer)
        if ownership != "leased" and self.mappings:
            raise OptionError(
                f"mmap hands out views of the file, which cannot be {ownership}; leave one of the two out", option="mmap"
            )
        target = self._open_device()
        in_place = self._in_place(target, peers)
        sliced, blocked, of_ranks = frozenset[str](), dict[str, TensorInfo](), list[dict[str, Index]]()
        together = peers is not None and not self.resident.shards  # in place, nothing is read from storage
        if together:
            sliced, blocked, of_ranks = self._join_terms(cast("Peers", peers))
        destinations = self._destinations(into, target) if into is not None else {}
        given = {name: destination.dtype for name, destination in destinations.items() if self._is_written_to(name, destination)}
        plan = self.plan(given=given, uncast=destinations.keys() - given.keys(), opening=True, shared=peers is not None)
        sources = self.checkpoint.sources
        chunks = [NETWORK_CHUNK_NBYTES if is_remote(source) else CHUNK_NBYTES for source in self.checkpoint.sources]
        if plan.limits.staging is not None:
            chunks = [min(chunk, plan.limits.staging.chunk_nbytes) for chunk in chunks]
        sent_as = cast("Peers", peers).gather(dtypes_to_send(plan, blocked), about="dtypes") if blocked else []
        plan, blocks = in_blocks(plan, blocked, self.slices, chunks, of_ranks, sent_as)
        degraded = [f"{reason}; it is read instead" for reason in self.unmapped]
        degraded += self.direct.degraded if self.direct is not None else []
        degraded += [f"{url}: not verified, there is nothing to check it against" for url in self.checkpoint.unverified]
        counters = _new_progress(plan, degraded, sources)
        counters.count_traffic = _traffic_counter(sources, opened_here=opened_here)
        _withhold_last(plan, sources)
        seen = sources if tracer is None else tracer.sources(sources)
        if tracer is not None and self.direct is not None:
            self.direct.files = tracer.direct(self.direct.files)
        landing = self._landing(plan, seen, target, counters, ownership, destinations, in_place)
        shared = self._share(cast("Peers", peers), landing, plan, target, counters, sliced, blocks) if together else None
        landed = cast("Landing", shared) if shared is not None and self.device_name == "cpu" else landing
        plan = replace(plan, group=counters.group)
        job = Job(
            plan=plan,
            sources=sources,
            landing=landed if tracer is None else tracer.landing(landed),
            into_given=bool(destinations),
            order=order,
            rename=_renaming(rename),
            on_progress=progress,
            on_stop=self._stopping(counters, on_stop),
            demands_direct=self.options.direct_io == "on",
            tracer=tracer,
        )
        engine = Engine(job, counters)
        if shared is not None:
            shared.report_to(engine if tracer is None else tracer.report(engine))
        return engine

    def _direct_route(self) -> DirectRoute | None:
        """None where it is not asked for."""
        demand = self.options.gds or "off"
        if demand == "require" and self.device_name == "cpu":
            raise OptionError("gds='require' reads into a device's memory, and this load goes to the host's", option="gds")
        if demand == "off" or self.device_name == "cpu":
            return None
        from headrace._direct import DirectRoute

        return DirectRoute(demand, lambda: cast("Device", self._open_device()), limit_s=self.options.stall_timeout_s)

    def _stopping(self, counters: Progress, on_stop: Callable[[], None]) -> Callable[[], None]:
        direct = self.direct
        if direct is None:
            return on_stop

        def stop() -> None:
            try:
                direct.finish(counters)
            finally:
                on_stop()

        return stop

    def _shared_engine(
        self,
        into: Into | None,
        rename: Rename | None,
        order: Order,
        progress: Callable[[Snapshot], None] | None,
        on_stop: Callable[[], None],
        opened_here: bool,
        peers: Peers | None,
        tracer: Tracer | None,
    ) -> Engine | SharedReading:
        """For memory that the ranks of the node have in common: one of them runs an engine, the others wait for what it reads."""
        from headrace._engine import Engine, Job
        from headrace._tables import SharedLanding, SharedReading, join_tables
        from headrace.devices.cpu import CpuTarget

        self._check_shareable(into)
        self.resident.borrow(None)
        if peers is not None:  # one rank reads for its node, with all that the node may have under way
            self.options = self.options.merged({"local_ranks": 1})
        plan, sources = self.plan(), self.checkpoint.sources
        degraded = [f"{url}: not verified, there is nothing to check it against" for url in self.checkpoint.unverified]
        counters = _new_progress(plan, degraded, sources)
        counters.count_traffic = _traffic_counter(sources, opened_here=opened_here)
        self.tables = join_tables(plan, CpuTarget(), peers, counters)
        plan = replace(plan, group=counters.group)
        if not self.tables.pages.fills:
            counters.total_nbytes = 0
            return SharedReading(self.tables, counters, _renaming(rename), progress, on_stop)
        _withhold_last(plan, sources)
        landing = SharedLanding(self.tables, sources if tracer is None else tracer.sources(sources), counters)
        job = Job(
            plan=plan,
            sources=sources,
            landing=landing if tracer is None else tracer.landing(landing),
            order=order,
            rename=_renaming(rename),
            on_progress=progress,
            on_stop=on_stop,
            demands_direct=self.options.direct_io == "on",
            tracer=tracer,
        )
        return Engine(job, counters)

    def _check_shareable(self, into: Into | None) -> None:
        """Slices differ from rank to rank, and tensors that are given lie elsewhere."""
        for header, rows in zip(self.checkpoint.headers, self.chosen, strict=True):
            for row in range(len(header.names)) if rows is None else rows:
                name = header.names[row]
                if name in self.slices:
                    raise OptionError(f"{name!r} goes to shared memory as a whole; leave it out of slices", option="slices")
                if into is not None and (into(info_at(header, row)) if callable(into) else into.get(name)) is not None:
                    raise OptionError(f"{name!r} goes to shared memory, so it cannot fill a tensor of yours", option="into")

    def _open_device(self) -> HostTarget | Device:
        from headrace.devices.cpu import CpuTarget  # imports torch

        if self.device_name == "cpu":
            return CpuTarget()
        device = open_device(self.device)
        self.device_name = device.name
        return device

    def let_go(self) -> None:
        """The load is over, or was not to be: a held checkpoint's memory is lent no more. May be called twice."""
        self.resident.let_go()

    def _in_place(self, target: HostTarget | Device, peers: Peers | None) -> Locked | None:
        device = None if self.device_name == "cpu" else cast("Device", target)
        locked, refused = self.resident.lock(device, peers)
        if refused:
            self.unmapped.append(f"not page-locked in place: {refused}")
        return locked

    def _is_written_to(self, name: str, destination: Destination) -> bool:
        """Whether bytes go straight into a destination; else its values are copied in."""
        if self.device_name == "cpu":
            return destination.memory is not None
        source = self.checkpoint[name].dtype
        shard = self.checkpoint.where[name][0]
        if shard in self.resident.shards and destination.dtype != source:
            return False
        converts_there = destination.dtype != source and cast_on_device(source, destination.dtype, self._cast_at)
        return destination.address is not None and not converts_there

    def _landing(
        self,
        plan: Plan,
        sources: Sequence[ByteSource],
        target: HostTarget | Device,
        counters: Progress,
        ownership: Ownership,
        destinations: Mapping[str, Destination],
        in_place: Locked | None,
    ) -> HostLanding | DeviceLanding:
        from headrace._landing import HostLanding
        from headrace.devices.cpu import CpuTarget

        if isinstance(target, CpuTarget):
            return HostLanding(
                plan,
                sources,
                target,
                counters,
                ownership=ownership,
                destinations=destinations,
                mappings=self.mappings,
                pin=self.options.pin or "off",
            )
        from headrace._pipeline import DeviceLanding  # a load to host memory does not wait for it: 4 to 9 ms

        device = cast("Device", target)
        return DeviceLanding(
            plan,
            sources,
            device,
            CpuTarget(),
            counters,
            ownership=ownership,
            destinations=destinations,
            in_place=in_place,
            direct=self.direct.files if self.direct is not None else None,
            compat=self.direct is not None and self.direct.compat,
        )

    def _join_terms(self, peers: Peers) -> tuple[frozenset[str], dict[str, TensorInfo], list[dict[str, Index]]]:
        """What any rank slices, and which of that is read in blocks: of those this rank takes a slice too, be it all of it.

        And the slices of every rank. All convert in the same place, too: on the host where fewer bytes then cross a narrow bus,
        or go from node to node. Each node converts only what it reads.
        """
        terms = peers.gather((self.slices, peers.node, self._cast_at), about="slices")
        slices = [theirs for theirs, _, _ in terms]
        places = {place for _, _, place in terms}
        if self.options.cast_at not in ("host", "device") and (len({node for _, node, _ in terms}) > 1 or "bus" in places):
            self._cast_at = "bus"
        sliced = frozenset(name for each in slices for name in each)
        infos = {name: self.checkpoint[name] for name in sorted(sliced)}
        blocked = choose_blocked(infos, slices)
        self.slices |= {name: ... for name in blocked if name not in self.slices}
        return sliced, {name: infos[name] for name in infos if name in blocked}, slices

    def _share(
        self,
        peers: Peers,
        landing: HostLanding | DeviceLanding,
        plan: Plan,
        target: HostTarget | Device,
        counters: Progress,
        sliced: frozenset[str],
        blocks: Blocks,
    ) -> GroupLanding | Relay | DeviceExchange:
        from headrace._exchange import join_group
        from headrace._landing import HostLanding

        if self.mappings:
            raise OptionError("mmap leaves nothing to share with a group; leave one of the two out", option="mmap")
        ledgers = [source.ledger for source in self.checkpoint.sources if isinstance(source, VerifiedSource)]
        if any(isinstance(ledger, LearnedBlocks) for ledger in ledgers):
            reason = "a group can verify by a manifest only: by a whole file's digest each rank would have to read all of it"
            raise OptionError(f"{reason}; write one with `headrace verify --write`", option="verify")
        policy = self.options.partition or "chunks"
        if not isinstance(landing, HostLanding):
            from headrace._relay import join_relay

            device = cast("Device", target)
            relay = join_relay(peers, plan, self.checkpoint.sources, sliced, blocks, policy, device, counters)
            landing.relay = relay
            return relay
        return join_group(peers, landing, plan, self.checkpoint.sources, sliced, blocks, policy, counters)

    def _destinations(self, into: Into, target: HostTarget | Device) -> dict[str, Destination]:
        found: dict[str, Destination] = {}
        given: dict[str, torch.Tensor] = {}
        for header, rows in zip(self.checkpoint.headers, self.chosen, strict=True):
            for row in range(len(header.names)) if rows is None else rows:
                info = info_at(header, row)
                tensor = into(info) if callable(into) else into.get(info.name)
                if tensor is None:
                    continue
                shape = slice_shape(info.shape, self.slices[info.name]) if info.name in self.slices else info.shape
                found[info.name] = target.destination(tensor, info.name, info.dtype, shape)
                given[info.name] = tensor
        if (shared := target.shared_memory(given)) is not None:
            one, other = shared
            raise OptionError(
                f"into: the tensors given for {one!r} and {other!r} share memory; load one of them and tie it afterwards",
                option="into",
            )
        if not callable(into) and (unknown := next((name for name in into if name not in self.checkpoint), None)) is not None:
            raise unknown_tensor(unknown, self.checkpoint)
        return found


def is_device(device: object) -> bool:
    """Whether it is a `Device` rather than the name of one."""
    return hasattr(device, "copy_async")


def open_device(device: object) -> Device:
    """The device that a caller named or gave; not the host. Raises `DeviceError` where there is none."""
    if is_device(device):
        return cast("Device", device)
    from headrace.devices import cuda  # imports torch

    _, _, index = name_of_device(device).partition(":")
    return cuda.open_device(int(index) if index else None)


def name_of_device(device: object) -> str:
    """How a plan calls a device. Nothing is opened: a plan can be made where the device is not.

    Raises:
        OptionError: there is no such kind of device.
    """
    if is_device(device):
        return cast("Device", device).name
    name = str(device)
    if name in ("cpu", SHARED) or re.fullmatch(r"cuda(:\d{1,3})?", name):
        return name
    raise OptionError(
        f"device {name!r} is not supported; load to 'cpu' and move the tensors, or to 'cuda', 'cuda:N' or 'shared-cpu'",
        option="device",
    )


def _renaming(rename: Rename | None) -> Callable[[str], str] | None:
    if rename is None or callable(rename):
        return rename
    return lambda name: rename.get(name, name)


# Fields of a snapshot, and what sources call them.
_TRAFFIC = {
    "requests": "requests",
    "retried": "failed",
    "throttled": "throttled",
    "hedged": "hedges",
    "hedged_nbytes": "hedged_nbytes",
    "received_nbytes": "received_nbytes",
}


def _why_unmapped(source: ByteSource, asked: str | None) -> str:
    """Why a source that cannot map is not mapped: it is none of files, or a file that was opened to be read."""
    if hasattr(source, "reopen"):
        return f"cannot map {source.url}: it was opened without; give mmap={asked!r} where it is opened"
    return f"cannot map {source.url}: only local files can be mapped; leave mmap out, or pull it to a local folder first"


def _traffic_counter(sources: Sequence[ByteSource], *, opened_here: bool) -> Callable[[], Mapping[str, int]]:
    """Counts what a load asks of the network; of sources that were open before, what they have asked for since."""
    remote = [source for source in sources if is_remote(source)]

    def now() -> dict[str, int]:
        counts = [cast(Any, source).traffic for source in remote]
        return {ours: sum(getattr(count, theirs) for count in counts) for ours, theirs in _TRAFFIC.items()}

    before = dict.fromkeys(_TRAFFIC, 0) if opened_here else now()
    return lambda: {name: count - before[name] for name, count in now().items()}


def _withhold_last(plan: Plan, sources: Sequence[ByteSource]) -> None:
    """Where only the digest of a whole file is known, its last tensor is handed out when all of the file is known to be right."""
    ends: dict[int, int] = {}
    for read in plan.reads:
        end = read.offset + (read.pieces - 1) * read.stride + read.nbytes // read.pieces
        ends[read.shard] = max(end, ends.get(read.shard, 0))
    wanted = {span.shard for span in plan.spans}
    for shard, source in enumerate(sources):
        if not isinstance(source, VerifiedSource) or shard not in wanted:
            continue
        if shard in ends:
            source.ledger.withhold(ends[shard])
        else:
            source.confirm()  # tensors without bytes: their shapes are in the header


def _new_progress(plan: Plan, degraded: list[str], sources: Sequence[ByteSource]) -> Progress:
    for fallback in degraded:
        log.warning("%s", fallback)
    verified = [source for source in sources if isinstance(source, VerifiedSource)]
    return Progress(
        degraded=degraded,
        count_verified=lambda: sum(source.verified_nbytes for source in verified),
        total_nbytes=plan.read_nbytes,
        surplus_nbytes=plan.surplus_nbytes,
        total_tensors=len(plan.tensors),
        concurrency=plan.limits.concurrency,
        memory_limit=plan.limits.memory_limit,
        device=plan.device,
        node_share=str(plan.limits.node or ""),
        routes=tuple((route.url, route.route, route.reason) for route in plan.routes),
        left_alone=plan.left_alone,
    )
