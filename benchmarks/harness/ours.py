"""headrace, used as any caller would: the public functions only."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - before the clock starts: everybody who loads tensors has it

import headrace
from harness import memory
from harness.child import Job

_ADAPTERS = {"s3": "s3", "gs": "gcs", "az": "azure"}
_LIBRARIES = {"s3": "botocore.session", "gs": "google.auth", "az": "azure.storage.blob"}


def run(job: Job) -> Callable[[], Any]:
    """`stream`, `stream(into=...)` or `load` of the whole checkpoint.

    Settings: `arguments` for headrace; `connections` to a server; `largest_nbytes` leaves larger tensors out; `spin_s` keeps the
    caller busy.
    """
    place = _place(job)
    arguments = _arguments(job)
    if (most := job.settings.get("largest_nbytes")) is not None:
        arguments["names"] = lambda info: info.nbytes <= most
    _import_engine(job)
    if job.kind == "load":
        return lambda: ({}, job.keep(headrace.load(place, **arguments)))
    if job.kind == "into":
        arguments["into"] = memory.destinations(job.files)
    spin = _spinning(job.settings.get("spin_s", 0.0))

    def go() -> Any:
        with headrace.stream(place, **arguments) as tensors:
            job.take(spin(tensors, tensors.stats.total_tensors))
        stats = tensors.stats.as_dict()
        return {"stats": stats, "threads": stats["concurrency"], "bytes": stats["read_nbytes"]}, arguments.get("into")

    return go


def ranks(job: Job) -> Callable[[], Any]:
    """One of several ranks: `stream` of the whole checkpoint, or of the slices that `tensor_parallel` gives.

    Settings: `group`, whether they load together; `arguments` for headrace; `rules` of `tensor_parallel`, "usual" being its own;
    `part` and `of`, which part of how many, this rank's among all where not given; `simulated`: to a simulated device.
    """
    arguments: dict[str, Any] = {**_arguments(job), "group": True} if job.settings.get("group") else _arguments(job)
    rules = job.settings.get("rules")
    part, of = job.settings.get("part", job.rank), job.settings.get("of", job.ranks)
    rings: int | None = None
    _import_engine(job)
    importlib.import_module("headrace._exchange")  # put off until there is a group
    if job.settings.get("simulated"):
        arguments["device"] = _simulated_device(moves=job.verify)

    def with_rings(pairs: Iterable[Any]) -> Iterable[Any]:
        nonlocal rings
        for pair in pairs:
            if rings is None:
                rings = memory.shared_nbytes("headrace-ring")
            yield pair

    def go() -> Any:
        with headrace.open(_place(job)) as checkpoint:
            if rules is not None:
                usual = (rules,) if rules != "usual" else ()
                arguments["slices"] = headrace.tensor_parallel(checkpoint, part, of, *usual)
            with headrace.stream(checkpoint, **arguments) as tensors:
                pairs = with_rings(tensors) if job.settings.get("group") else tensors
                kept = job.keep(dict(pairs)) if job.kind == "load" else job.take(pairs)
        stats = tensors.stats.as_dict()
        return {"stats": stats, "bytes": stats["tensor_nbytes"], "rings_nbytes": rings or 0}, kept

    return go


def _simulated_device(*, moves: bool) -> Any:
    """A simulated GPU whose copy engine costs no CPU time: bytes are moved only where they are looked at."""
    from headrace.testing.devices import SimulatedDevice
    from headrace.testing.simulated import SimulatedRuntime

    for module in ("_pipeline", "_relay"):
        importlib.import_module(f"headrace.{module}")
    runtime = SimulatedRuntime()
    runtime.mode("timed")
    runtime.move_bytes(moves)
    return SimulatedDevice(runtime)


def pull(job: Job) -> Callable[[], Any]:
    """`pull` of the whole bucket. Setting `folder`."""
    arguments = _arguments(job)
    _import_store(job)

    def go() -> Any:
        headrace.pull(job.store.url(), job.settings["folder"], **arguments)
        job.keep_folder(job.settings["folder"])

    return go


def _place(job: Job) -> str | Path:
    """What the caller names: the file, or the folder of several."""
    if job.target is not None:
        return job.target.url() if len(job.files) > 1 else job.locations[0]
    return Path(job.files[0]).parent if len(job.files) > 1 else job.files[0]


def _arguments(job: Job) -> dict[str, Any]:
    connections = {"concurrency": job.settings["connections"]} if "connections" in job.settings else {}
    return {**connections, **job.settings.get("arguments", {})}


def _import_engine(job: Job) -> None:
    """Imports that headrace puts off until tensors are made."""
    import headrace._engine
    import headrace.devices.cpu  # noqa: F401

    _import_store(job)


def _import_store(job: Job) -> None:
    """Imports that it puts off until a url of the scheme is opened."""
    if job.target is None:
        return
    import headrace._remote  # noqa: F401

    importlib.import_module(f"headrace.sources.{_ADAPTERS[job.target.scheme]}")
    importlib.import_module(_LIBRARIES[job.target.scheme])


def _spinning(seconds: float) -> Callable[[Iterable[Any], int], Iterable[Any]]:
    """A caller that runs bytecode for `seconds` in all, the same amount after each tensor. Counted in turns of a loop that were
    timed beforehand, since a clock would count the wait for the GIL as work done."""
    if not seconds:
        return lambda pairs, _count: pairs
    turns = round(seconds * _turns_per_s())

    def spin(pairs: Iterable[Any], count: int) -> Iterable[Any]:
        share = turns // max(1, count)
        for pair in pairs:
            _spin(share)
            yield pair

    return spin


def _spin(turns: int) -> int:
    x = 0
    for i in range(turns):
        x ^= i
    return x


def _turns_per_s() -> float:
    trial = 200_000
    best = min(_timed(trial) for _ in range(5))
    return trial / best


def _timed(turns: int) -> float:
    began = time.perf_counter()
    _spin(turns)
    return time.perf_counter() - began
