"""What a caller asked for, against an open checkpoint: from arguments to a plan, and to an engine that is ready to run.

torch is imported when an engine is made and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from headrace._blocks import Blocks, dtypes_to_send, in_blocks
from headrace._checkpoint import Checkpoint
from headrace._counting import new_progress
from headrace._device_names import SHARED, name_of_device, open_device
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
from headrace._slices import Index, misfit, slice_shape
from headrace._terms import Offer, Terms, agree_on_terms
from headrace.errors import OptionError, SourceError
from headrace.sources.base import ByteSource, MappableSource, is_in_memory, is_remote

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
        others = peers if not self.resident.shards else None  # in place, nothing is read from storage
        destinations = self._destinations(into, target) if into is not None else {}
        terms = Terms() if others is None else self._agree_on_terms(others, destinations)
        given = {name: destination.dtype for name, destination in destinations.items() if self._is_written_to(name, destination)}
        plan = self.plan(
            given=given, uncast=destinations.keys() - given.keys(), opening=True, shared=peers is not None and not terms.alone
        )
        sources = self.checkpoint.sources
        chunks = [NETWORK_CHUNK_NBYTES if is_remote(source) else CHUNK_NBYTES for source in self.checkpoint.sources]
        if plan.limits.staging is not None:
            chunks = [min(chunk, plan.limits.staging.chunk_nbytes) for chunk in chunks]
        sent_as = others.gather(dtypes_to_send(plan, terms.blocked), about="dtypes") if others and terms.blocked else []
        plan, blocks = in_blocks(plan, terms.blocked, self.slices, chunks, terms.slices, sent_as)
        degraded = [f"{reason}; it is read instead" for reason in self.unmapped]
        degraded += self.direct.degraded if self.direct is not None else []
        degraded += [f"{url}: not verified, there is nothing to check it against" for url in self.checkpoint.unverified]
        counters = new_progress(plan, degraded, sources, opened_here=opened_here)
        _withhold_last(plan, sources)
        seen = sources if tracer is None else tracer.sources(sources)
        if tracer is not None and self.direct is not None:
            self.direct.files = tracer.direct(self.direct.files)
        landing = self._landing(plan, seen, target, counters, ownership, destinations, in_place)
        shared = self._share(others, landing, plan, target, counters, terms, blocks) if others is not None else None
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
        counters = new_progress(plan, degraded, sources, opened_here=opened_here)
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

    def _agree_on_terms(self, peers: Peers, destinations: Mapping[str, Destination]) -> Terms:
        for name, index in self.slices.items():
            try:
                slice_shape(self.checkpoint[name].shape, index)
            except (IndexError, TypeError, ValueError) as exc:
                raise misfit(name, self.checkpoint[name].shape, index, exc) from exc
        if self.mappings:
            raise OptionError("mmap leaves nothing to share with a group; leave one of the two out", option="mmap")
        verified = [source for source in self.checkpoint.sources if isinstance(source, VerifiedSource)]
        if any(isinstance(source.ledger, LearnedBlocks) for source in verified):
            reason = "a group can verify by a manifest only: by a whole file's digest each rank would have to read all of it"
            raise OptionError(f"{reason}; write one with `headrace verify --write`", option="verify")
        read = [source for source, rows in zip(self.checkpoint.sources, self.chosen, strict=True) if rows is None or rows]
        is_free = self.device_name == "cpu" and self.options.partition is None and all(map(is_in_memory, read))
        may_move = self.options.cast_at not in ("host", "device")
        given = {name: (each.dtype, each.memory is not None, each.address is not None) for name, each in destinations.items()}
        offer = Offer(self.slices, given, peers.node, self._cast_at, may_move, is_free)
        terms = agree_on_terms(peers, offer, self.checkpoint)
        # What others take slices of this rank takes a slice of too, be it all of it: so it has a span of its own on every rank.
        self.slices |= {name: ... for name in terms.sliced if name not in self.slices}
        self._cast_at = terms.cast_at
        return terms

    def _share(
        self,
        peers: Peers,
        landing: HostLanding | DeviceLanding,
        plan: Plan,
        target: HostTarget | Device,
        counters: Progress,
        terms: Terms,
        blocks: Blocks,
    ) -> GroupLanding | Relay | DeviceExchange | None:
        if terms.alone:
            from headrace._owners import stay_alone

            stay_alone(peers, plan, terms.sliced, counters)
            return None
        from headrace._exchange import join_group
        from headrace._landing import HostLanding

        policy = self.options.partition or "chunks"
        if not isinstance(landing, HostLanding):
            from headrace._relay import join_relay

            device = cast("Device", target)
            relay = join_relay(peers, plan, self.checkpoint.sources, terms.sliced, blocks, policy, device, counters)
            landing.relay = relay
            return relay
        return join_group(peers, landing, plan, self.checkpoint.sources, terms.sliced, blocks, policy, counters)

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


def _renaming(rename: Rename | None) -> Callable[[str], str] | None:
    if rename is None or callable(rename):
        return rename
    return lambda name: rename.get(name, name)


def _why_unmapped(source: ByteSource, asked: str | None) -> str:
    """Why a source that cannot map is not mapped: it is none of files, or a file that was opened to be read."""
    if hasattr(source, "reopen"):
        return f"cannot map {source.url}: it was opened without; give mmap={asked!r} where it is opened"
    return f"cannot map {source.url}: only local files can be mapped; leave mmap out, or pull it to a local folder first"


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
