"""The steps of a bench, in order, and what each of them may take."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from headrace._api import open as open_checkpoint
from headrace._api import plan as make_plan
from headrace._bench import _probes, _rivals
from headrace._bench._loads import evict, load
from headrace._bench._probes import Bounds
from headrace._bench._report import Figure, Report, Run, best
from headrace._bench._verdict import judge
from headrace._checkpoint import Checkpoint
from headrace._device_names import is_device
from headrace._machine import available_cpus, available_memory
from headrace._plan import MIB, Plan, format_nbytes
from headrace._progress import Snapshot
from headrace.errors import DeviceError
from headrace.sources.base import is_remote

GIB = 1024 * MIB
_LEAST_NBYTES = 64 * MIB
_ROUNDS = 3
_OPEN_OPTIONS = ("credentials", "verify", "options")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a bench may do.

    Attributes:
        limit_nbytes: that each step reads at most.
        seconds: that each step takes at most, about.
        cold: drop the model's own files from the page cache before loads.
        against: other loaders to compare with.
    """

    limit_nbytes: int = 2 * GIB
    seconds: float = 5.0
    cold: bool = False
    against: Sequence[str] = ()


def measure(
    arguments: Mapping[str, Any],
    settings: Settings,
    *,
    say: Callable[[str], None] = lambda _: None,
    progress: Callable[[Snapshot], None] | None = None,
) -> Report:
    """Measure the parts, then the load.

    Args:
        arguments: of `headrace.stream`, `url` among them.
        settings: bounds and extras.
        say: told what is measured next.
        progress: of the loads.
    """
    made = make_plan(**arguments)
    memory_nbytes = available_memory() or 4 * GIB
    limit_nbytes = max(_LEAST_NBYTES, min(settings.limit_nbytes, memory_nbytes // 4))
    bounds = Bounds(limit_nbytes, settings.seconds)
    with _direct(arguments) as checkpoint:
        remote = any(map(is_remote, checkpoint.sources))
        figures = list(_parts(checkpoint, made, bounds, remote, arguments.get("device"), say))
        files = [] if remote else _files(made)
        url = checkpoint.url
    ways = _ways(arguments, figures, settings)
    runs, timeline = _runs({**arguments, **_within(made, limit_nbytes)}, ways, figures, files, settings, say, progress)
    rivals = _compared(files, limit_nbytes, settings, say) if settings.against else []
    report = Report(
        url=url,
        machine=_machine(memory_nbytes),
        cpus=available_cpus(),
        total_nbytes=made.read_nbytes,
        used_nbytes=min(made.read_nbytes, limit_nbytes),
        is_remote=remote,
        figures=figures,
        runs=runs,
        rivals=rivals,
        timeline=timeline,
    )
    bottleneck, verdict = judge(report)
    return replace(report, bottleneck=bottleneck, verdict=verdict)


def _direct(arguments: Mapping[str, Any]) -> Checkpoint:
    """The checkpoint opened so that its files are read past the page cache where that is asked for."""
    keywords = {name: arguments[name] for name in _OPEN_OPTIONS if name in arguments}
    return open_checkpoint(arguments["url"], direct_io="on", **keywords)


# -- the parts -------------------------------------------------------------------------------------------------------------------


def _parts(
    checkpoint: Checkpoint, made: Plan, bounds: Bounds, remote: bool, device: Any, say: Callable[[str], None]
) -> Iterator[Figure]:
    threads, cpus = made.limits.concurrency, available_cpus()
    sources = [source for source, route in zip(checkpoint.sources, made.routes, strict=True) if route.route != "none"]
    if remote:
        say("the network")
        yield from _probes.network(sources, threads, bounds)
    else:
        say("the disk")
        yield from _probes.disk(sources, threads, bounds)
        say("the page cache")
        yield _probes.page_cache(sources, cpus, bounds)
    say("memory")
    small = Bounds(min(bounds.nbytes, GIB // 2), bounds.seconds)
    yield _probes.touched(cpus, small)
    yield _probes.copied(cpus, Bounds(4 * small.nbytes, bounds.seconds))
    say("casts")
    yield from _probes.casts(cpus, Bounds(2 * small.nbytes, bounds.seconds))
    say("copies to the GPU")
    yield from _device_figures(device, bounds)


def _device_figures(device: Any, bounds: Bounds) -> list[Figure]:
    """Copies to the device of the load; of a load to host memory to the current GPU, if there is one."""
    if device is None or not is_device(device):
        from headrace.devices.cuda import open_device

        number = str(device).partition(":")[2]
        try:
            device = open_device(int(number) if number else None)
        except DeviceError:
            return _probes.no_device("no GPU: not measured")
    return _probes.device_copies(device, bounds)


# -- the loads -------------------------------------------------------------------------------------------------------------------


class _Way(NamedTuple):
    """How a load is done: whether tensors are kept, whether it reads the disk, and what else is given."""

    name: str
    keep: bool
    from_disk: bool
    extra: Mapping[str, Any]


def _ways(arguments: Mapping[str, Any], figures: Sequence[Figure], settings: Settings) -> list[_Way]:
    """Dropped and kept; where the page cache would be in the way, and nobody said how to read, also from the disk."""
    from_disk = settings.cold or arguments.get("direct_io") == "on"
    limit = {} if arguments.get("memory_limit") is not None else {"memory_limit": -1}
    ways = [_Way("dropped", False, from_disk, {}), _Way("kept", True, from_disk, limit)]
    if best(figures, "disk") is not None and not settings.cold and arguments.get("direct_io") is None:
        ways.append(_Way("dropped, from the disk", False, True, {"direct_io": "on"}))
    return ways


def _runs(
    arguments: Mapping[str, Any],
    ways: Sequence[_Way],
    figures: Sequence[Figure],
    files: Sequence[str],
    settings: Settings,
    say: Callable[[str], None],
    progress: Callable[[Snapshot], None] | None,
) -> tuple[list[Run], Sequence[Mapping[str, Any]]]:
    """The loads, and the events of the first one."""
    runs: list[Run] = []
    timeline: Sequence[Mapping[str, Any]] = ()
    to_device = str(arguments.get("device") or "cpu") != "cpu"
    for way in ways:
        say(f"the load, {way.name}")
        run, events = _best_of(way, {**arguments, **way.extra}, files, settings, progress)
        timeline = timeline or events
        runs.append(replace(run, ceiling=_ceiling(figures, from_disk=way.from_disk, keep=way.keep, to_device=to_device)))
    return runs, timeline


def _best_of(
    way: _Way,
    arguments: Mapping[str, Any],
    files: Sequence[str],
    settings: Settings,
    progress: Callable[[Snapshot], None] | None,
) -> tuple[Run, Sequence[Mapping[str, Any]]]:
    """The quickest of a few loads; of one that takes its time, that one."""
    found: list[tuple[Run, Sequence[Mapping[str, Any]]]] = []
    while len(found) < _ROUNDS and sum(run.seconds for run, _ in found) < settings.seconds / 2:
        if settings.cold:
            evict(files)
        found.append(load(way.name, arguments, keep=way.keep, seconds=4 * settings.seconds, progress=progress))
    return max(found, key=lambda pair: pair[0].rate)


def _ceiling(figures: Sequence[Figure], *, from_disk: bool, keep: bool, to_device: bool) -> float:
    """Bytes per second that the source and the bus allow; where tensors are kept on the host, with fresh memory for all of them.

    The page cache and touching both take CPUs, so their times add up; a disk or a network goes on meanwhile.
    """
    source = best(figures, "network") or (best(figures, "disk") if from_disk else best(figures, "cache"))
    touch = best(figures, "touch")
    if source is None:
        return 0.0
    if to_device:
        bus = best(figures, "pinned")
        return min(source.rate, bus.rate) if bus is not None else source.rate
    if not keep or touch is None:
        return source.rate
    if source.kind == "cache":
        return 1 / (1 / source.rate + 1 / touch.rate)
    return min(source.rate, touch.rate)


def _within(made: Plan, limit_nbytes: int) -> dict[str, Any]:
    """The `names` of as many tensors as are read for so many bytes; nothing to add where all of them are."""
    if made.read_nbytes <= limit_nbytes:
        return {}
    wanted: set[str] = set()
    nbytes = 0
    for name, size in zip(made.tensors.names, made.tensors.nbytes, strict=True):
        if wanted and nbytes + size > limit_nbytes:
            continue
        wanted.add(name)
        nbytes += size
    return {"names": lambda info: info.name in wanted}


def _files(made: Plan) -> list[str]:
    """Local files that are read."""
    return [route.url for route in made.routes if route.route != "none" and Path(route.url).is_file()]


def _compared(files: Sequence[str], limit_nbytes: int, settings: Settings, say: Callable[[str], None]) -> list[Run]:
    chosen: list[str] = []
    nbytes = 0
    for file in files:
        nbytes += os.path.getsize(file)
        if chosen and nbytes > limit_nbytes:
            break
        chosen.append(file)
    if not chosen:
        return [Run(name, skipped="compared on local files only") for name in settings.against]
    if os.path.getsize(chosen[0]) > limit_nbytes:
        return [Run(name, skipped="the first file is longer than --limit") for name in settings.against]
    seconds = 60 + 4 * settings.seconds
    return _rivals.compare(
        settings.against, chosen, cold=settings.cold, seconds=seconds, say=lambda name: say(f"{name}, compared")
    )


def _machine(memory_nbytes: int) -> str:
    memory = format_nbytes(memory_nbytes)
    return f"{available_cpus()} CPUs ({_cpu_model()}), {memory} of memory free, {platform.system()} {platform.release()}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
