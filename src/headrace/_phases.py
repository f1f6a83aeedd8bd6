"""A load to several places at once: one phase for each, one after another, looking like one load from outside.

Every phase is a request of its own, with its own limits; nothing of one phase is left in the next. All of them are planned, and
agreed upon with other ranks, before the first byte is read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from headrace._checkpoint import Checkpoint
from headrace._device_names import is_device, name_of_device
from headrace._options import Options
from headrace._plan import Plan, Read, Span, Tensors
from headrace._progress import Snapshot
from headrace._request import Request
from headrace._selection import DTypeRule, Names, select
from headrace._slices import Index
from headrace._targets import DEFAULT, divide, divide_by
from headrace.errors import OptionError, PeerError

if TYPE_CHECKING:
    from headrace._peers import Peers
    from headrace._tables import SharedTensor

_FIRST: Final = ("rank", "ranks", "pinned_how")  # the first phase that says something
_MOST: Final = (
    "seconds",
    "concurrency",
    "memory_limit",
    "peak_nbytes",
    "device_peak_nbytes",
    "staging_nbytes",
    "verified_nbytes",
)
# Phases read from the same sources, whose traffic is counted from their opening on: the last one has all of it.
_TRAFFIC: Final = ("requests", "retried", "throttled", "hedged", "hedged_nbytes", "received_nbytes")


class _Counters(Protocol):
    def snapshot(self) -> Snapshot: ...


class Load(Protocol):
    """What a `TensorStream` runs: an `Engine`, or something with the same verbs."""

    @property
    def plan(self) -> Plan: ...
    @property
    def progress(self) -> _Counters: ...
    def start(self) -> None: ...
    def run(self) -> Generator[tuple[str, Any], None, None]: ...
    def stop(self) -> None: ...
    def check_finished(self) -> None: ...


def is_function(device: object) -> bool:
    """Whether it is a function of a tensor's name, rather than one target (torch.device can be called, too) or a mapping."""
    return callable(device) and not is_device(device) and not hasattr(device, "index")


def targets_of(device: object) -> dict[str, object]:
    """{name: target} of all places that tensors may go to; known before anything is opened, but for a function's.

    Raises:
        OptionError: there is no such target.
    """
    if is_function(device):
        return {}
    if not isinstance(device, Mapping):
        return {name_of_device(device): device}
    if not all(isinstance(key, str) for key in device):
        raise OptionError('device: the keys of a mapping are names, globs or "file:NAME"', option="device")
    found: dict[str, object] = {}
    for target in (*device.values(), DEFAULT):
        found.setdefault(name_of_device(target), target)
    return found


def requests_of(
    checkpoint: Checkpoint,
    names: Names,
    slices: Mapping[str, Index] | None,
    rule: DTypeRule,
    options: Options,
    device: object,
) -> list[Request]:
    """One request for each place that tensors go to.

    Raises:
        OptionError: a key of `device` that fits nothing, or a limit for a place that nothing goes to.
        As `Request`.
    """
    if is_function(device):
        return _requests_by(cast("Callable[[str], object]", device), checkpoint, names, slices, rule, options)
    targets = targets_of(device)
    options.check_targets(targets)
    if not isinstance(device, Mapping):
        return [Request(checkpoint, names, slices, rule, options, device)]
    chosen = select(names, checkpoint.headers, checkpoint.rows, checkpoint.where)
    by_key = {key: name_of_device(target) for key, target in device.items()}
    divided = divide(by_key, DEFAULT, checkpoint.headers, chosen, checkpoint.where, checkpoint.names_of_shards)
    return [Request(checkpoint, members, slices, rule, options, targets[name]) for name, members in divided.items()]


def _requests_by(
    target_of: Callable[[str], object],
    checkpoint: Checkpoint,
    names: Names,
    slices: Mapping[str, Index] | None,
    rule: DTypeRule,
    options: Options,
) -> list[Request]:
    targets: dict[str, object] = {}

    def named(name: str) -> str:
        target = target_of(name)
        found = name_of_device(DEFAULT if target is None else target)
        targets.setdefault(found, DEFAULT if target is None else target)
        return found

    chosen = select(names, checkpoint.headers, checkpoint.rows, checkpoint.where)
    divided = divide_by(named, checkpoint.headers, chosen) or {DEFAULT: []}
    options.check_targets(targets or divided)
    return [Request(checkpoint, members, slices, rule, options, targets.get(name, name)) for name, members in divided.items()]


def agree_on_places(requests: Sequence[Request], peers: Peers) -> None:
    """Compare where the ranks load to: as many places, of the same kinds. Collective.

    Raises:
        PeerError: a rank has others, or failed.
    """
    kinds = ["shared-cpu" if request.is_shared else request.device_name.partition(":")[0] for request in requests]
    for rank, theirs in enumerate(peers.gather(kinds, about="places")):
        if theirs != kinds:
            raise PeerError(f"rank {rank} loads to {theirs}, and rank {peers.rank} to {kinds}, in this order", rank=rank)


def open_load(
    requests: Sequence[Request],
    peers: Sequence[Peers | None],
    *,
    progress: Callable[[Snapshot], None] | None,
    on_stop: Callable[[], None],
    **arguments: Any,
) -> Load:
    """The requests as one load, ready to run. Arguments as of `Request.engine`; collective where there are peers."""
    if len(requests) == 1:
        return requests[0].engine(progress=progress, on_stop=on_stop, peers=peers[0], **arguments)
    phases = _Phases(on_stop)
    told = None if progress is None else lambda _: progress(phases.progress.snapshot())
    try:
        for request, those in zip(requests, peers, strict=True):
            phases.loads.append(request.engine(progress=told, on_stop=_nothing, peers=those, **arguments))
    except BaseException:
        phases.stop_all()
        raise
    phases.plan = join_plans([load.plan for load in phases.loads])
    return phases


def placeholders_of(requests: Sequence[Request]) -> dict[str, SharedTensor]:
    """{name: what is known of it} of the tensors that go to shared memory."""
    found: dict[str, SharedTensor] = {}
    for request in requests:
        if request.tables is not None:
            found |= request.tables.placeholders()
    return found


def _nothing() -> None:
    """What is done at the end of a phase; the end of the load is `_Phases.stop`'s."""


class _Phases:
    """Loads, one after another. Implements `Load`."""

    plan: Plan

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self.loads: list[Load] = []
        self.progress = _AllCounters(self.loads)
        self._on_stop, self._stopped = on_stop, False

    def start(self) -> None:
        for load in self.loads:
            stand_by = getattr(getattr(load, "landing", None), "stand_by", None)
            if stand_by is not None:  # other ranks may get to a phase long before this one
                stand_by()
        self.loads[0].start()

    def run(self) -> Generator[tuple[str, Any], None, None]:
        try:
            self.start()
            for load in self.loads:
                yield from load.run()
        finally:
            self.stop()

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        try:
            self.stop_all()
        finally:
            self._on_stop()

    def stop_all(self) -> None:
        """Stop every phase, the first error of it being raised when all are stopped."""
        errors: list[BaseException] = []
        for load in self.loads:
            try:
                load.stop()
            except BaseException as exc:  # noqa: BLE001 - raised below
                errors.append(exc)
        if errors:
            raise errors[0]

    def check_finished(self) -> None:
        for load in self.loads:
            load.check_finished()


class _AllCounters:
    """The counters of all phases together."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads = loads

    def snapshot(self) -> Snapshot:
        return join_snapshots([load.progress.snapshot() for load in self._loads])


def join_snapshots(phases: Sequence[Snapshot]) -> Snapshot:
    """PURE: one snapshot of several phases of one load."""
    joined: dict[str, Any] = {}
    for field in fields(Snapshot):
        values = [getattr(phase, field.name) for phase in phases]
        if field.name in (*_MOST, *_TRAFFIC):
            joined[field.name] = max(values)
        elif field.name in _FIRST:
            joined[field.name] = next(filter(None, values), values[0])
        elif field.name == "pinned":
            joined[field.name] = next((value for value in values if value is not None), None)
        elif isinstance(values[0], tuple):
            joined[field.name] = tuple(dict.fromkeys(item for value in values for item in value))
        elif isinstance(values[0], str):
            joined[field.name] = "; ".join(dict.fromkeys(filter(None, values)))
        else:
            joined[field.name] = sum(values)
    return Snapshot(**joined)


@dataclass(frozen=True, slots=True)
class MixedPlan(Plan):
    """A load to several places. Its tables are those of its phases, one after another; `str(plan)` explains each phase.

    Attributes:
        phases: a plan for each place, in the order in which they are carried out.
    """

    phases: tuple[Plan, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join(f"phase {i} of {len(self.phases)}: to {plan.device}\n{plan}" for i, plan in enumerate(self.phases, 1))


def join_plans(phases: Sequence[Plan]) -> MixedPlan:
    """PURE: the plans of several phases as one."""
    tensors, spans, reads = Tensors(), list[Span](), list[Read]()
    for plan in phases:
        first, first_read, first_span = len(tensors), len(reads), len(spans)
        for column in fields(Tensors):
            getattr(tensors, column.name).extend(getattr(plan.tensors, column.name))
        reads += [read._replace(span=read.span + first_span) for read in plan.reads]
        spans += [
            replace(
                span,
                first=span.first + first,
                last=span.last + first,
                first_read=span.first_read + first_read,
                last_read=span.last_read + first_read,
                misaligned=tuple(row + first for row in span.misaligned),
            )
            for span in plan.spans
        ]
    return MixedPlan(
        tensors,
        spans,
        reads,
        routes=tuple(dict.fromkeys(route for plan in phases for route in plan.routes)),
        limits=phases[0].limits,
        wanted_nbytes=sum(plan.wanted_nbytes for plan in phases),
        read_nbytes=sum(plan.read_nbytes for plan in phases),
        mapped_nbytes=sum(plan.mapped_nbytes for plan in phases),
        left_alone=tuple(dict.fromkeys(pair for plan in phases for pair in plan.left_alone)),
        device=", ".join(plan.device for plan in phases),
        phases=tuple(phases),
    )


@contextmanager
def gathered(group: object, options: Options) -> Iterator[list[Peers | None]]:
    """The ranks that load together, for the first phase; None where there is one. They are told if what follows fails."""
    if group is None or group is False:
        yield [None]
        return
    from headrace._peers import Peers

    first = Peers(group, options.peer_timeout_s)
    if first.size == 1:
        yield [None]
        return
    given: list[Peers | None] = [first]
    try:
        yield given
    except BaseException as exc:
        for each in given:  # in the order in which the others come to them
            if each is not None:
                each.give_up(exc)
        raise


def gather_more(peers: list[Peers | None], requests: Sequence[Request]) -> None:
    """Ranks for each phase. They have as many, of the same kinds."""
    if (first := peers[0]) is None:
        peers += [None] * (len(requests) - 1)
        return
    agree_on_places(requests, first)
    peers += [first.next_phase() for _ in requests[1:]]
