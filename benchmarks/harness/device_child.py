"""All ways of one case to a device, in this process: prints one JSON line.

Each way runs once uncounted, then the ways take turns. The clock runs until the device has everything: a copy that was queued is
not a copy that was made. Files are cached before it starts; so is the memory of bare copies there, touched and page-locked.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import headrace
from harness import chunk_cost, pagecache
from harness.checkpoints import read_entries
from harness.device_cases import CASES, ON_REQUEST, DeviceWay

_CHUNK_NBYTES = 16 << 20  # as headrace's
_SOURCE_NBYTES = 256 << 20  # memory that bare copies come from, again and again
_BUS = 1e9  # bytes per second of the simulated bus: slow enough to be what two CPUs have to wait for


@dataclass(slots=True)
class Bench:
    """What the ways share.

    Attributes:
        runtime: the simulated one; None on a GPU.
        nbytes: of all tensors of the files.
    """

    device: Any
    files: list[str]
    runtime: Any = None
    nbytes: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)


Go = Callable[[], dict[str, Any]]


@contextmanager
def bare(bench: Bench, *, pinned: bool) -> Iterator[Go]:
    """Copies of 16 MiB, one queued behind the other, out of memory that is there."""
    device, size = bench.device, min(_SOURCE_NBYTES, -(-bench.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    owner = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(owner)
    ctypes.memset(address, 1, size)
    device.enter_thread()
    if pinned:
        device.pin(address, size)
    target, event = device.allocate(size), device.new_event()

    def go() -> dict[str, Any]:
        at = copies = 0
        while at < bench.nbytes:
            place = at % size
            step = min(_CHUNK_NBYTES, bench.nbytes - at, size - place)
            device.copy_async(target.address + place, address + place, step)
            at, copies = at + step, copies + 1
        device.record(event)
        device.synchronize(event)
        return {"sent": at, "copies": copies, "pinned": pinned}

    try:
        yield go
    finally:
        device.destroy([event])
        if pinned:
            device.unpin(address)


@contextmanager
def ours(bench: Bench, **arguments: Any) -> Iterator[Go]:
    """`stream` of the files; each tensor is dropped when the next one comes."""
    yield lambda: _streamed(bench, bench.files, **arguments)


@contextmanager
def held(bench: Bench) -> Iterator[Go]:
    """The same from a checkpoint that was read and page-locked before."""
    with headrace.hold(bench.files, device=bench.device, in_place="off", pin="require") as checkpoint:
        yield lambda: _streamed(bench, checkpoint)


def _streamed(bench: Bench, place: Any, **arguments: Any) -> dict[str, Any]:
    with headrace.stream(place, device=bench.device, **arguments) as tensors:
        for item in tensors:
            del item
    bench.device.drain()
    stats = tensors.stats
    return {"sent": stats.sent_nbytes, "copies": stats.device_copies, "pinned": stats.pinned, "how": stats.pinned_how}


@contextmanager
def converting(bench: Bench, *, non_blocking: bool = False) -> Iterator[Go]:
    """`copy_` of page-locked F32 tensors into BF16 tensors of the device; nothing is read."""
    sources = {shape: torch.ones(shape, pin_memory=True) for shape in set(bench.shapes)}
    targets = {shape: torch.empty(shape, dtype=torch.bfloat16, device=bench.device.name) for shape in sources}

    def go() -> dict[str, Any]:
        for shape in bench.shapes:
            targets[shape].copy_(sources[shape], non_blocking=non_blocking)
        torch.cuda.synchronize()  # noqa: TID251 - a program of its own, beside the package
        return {"sent": None, "copies": len(bench.shapes), "pinned": True}

    yield go


@contextmanager
def tuned(bench: Bench, *, chunk_nbytes: int, concurrency: int) -> Iterator[Go]:
    """`stream` with slots of another length than it chooses for cached files."""
    from headrace import _limits

    chosen, _limits.STAGED_CACHED_CHUNK_NBYTES = _limits.STAGED_CACHED_CHUNK_NBYTES, chunk_nbytes
    try:
        yield lambda: _streamed(bench, bench.files, pin="require", concurrency=concurrency)
    finally:
        _limits.STAGED_CACHED_CHUNK_NBYTES = chosen


@contextmanager
def peer(bench: Bench, *, library: str) -> Iterator[Go]:
    """The same files through another library, its tensors on the device and dropped at once."""
    load = {
        "safetensors": _safetensors,
        "runai": _runai,
        "fastsafetensors": _fastsafetensors,
        "instanttensor": _instanttensor,
    }[library]

    def go() -> dict[str, Any]:
        count = load(bench.files, bench.device.name)
        torch.cuda.synchronize()  # noqa: TID251
        return {"sent": None, "copies": count, "pinned": None}

    yield go


def _safetensors(files: list[str], device: str) -> int:
    from safetensors import safe_open

    count = 0
    for file in files:
        with safe_open(file, framework="pt", device=device) as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                opened.get_tensor(name)
                count += 1
    return count


def _runai(files: list[str], device: str) -> int:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device=device)
        return sum(1 for _ in streamer.get_tensors())


def _fastsafetensors(files: list[str], device: str) -> int:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    loader.add_filenames({0: files})
    buffers = loader.copy_files_to_device()
    names = list(buffers.key_to_rank_lidx)
    for name in names:
        buffers.get_tensor(name)
    buffers.close()
    loader.close()
    return len(names)


def _instanttensor(files: list[str], device: str) -> int:
    from instanttensor import safe_open

    with safe_open(files, framework="pt", device=device) as opened:
        return sum(1 for _ in opened.tensors())


@contextmanager
def chunk(bench: Bench, *, of: str, **arguments: Any) -> Iterator[Go]:
    """CPU time of chunks, see `chunk_cost`."""
    del bench
    with TemporaryDirectory() as folder:
        way = chunk_cost.whole(Path(folder)) if of == "whole" else getattr(chunk_cost, of)(**arguments)
        with way as measured:
            yield lambda: {"python": measured(), "sent": None, "copies": None, "pinned": None}


@contextmanager
def to_nowhere(bench: Bench, **arguments: Any) -> Iterator[Go]:
    """`stream` to a device whose copies are done at once."""
    there = Bench(chunk_cost.null_device(), bench.files, nbytes=bench.nbytes)
    try:
        yield lambda: _streamed(there, bench.files, pin="require", **arguments)
    finally:
        headrace.release_staging()


@contextmanager
def reads(bench: Bench) -> Iterator[Go]:
    """The files by as many threads, and as much at once, as `to_nowhere` reads; each into a slot of its own that was touched."""
    limits = headrace.plan(bench.files, device=chunk_cost.null_device()).limits
    assert limits.staging is not None
    yield chunk_cost.bare_reads(bench.files, threads=limits.concurrency, chunk_nbytes=limits.staging.chunk_nbytes)


_WAYS = {
    "bare": bare,
    "ours": ours,
    "held": held,
    "converting": converting,
    "tuned": tuned,
    "peer": peer,
    "chunk": chunk,
    "to_nowhere": to_nowhere,
    "reads": reads,
}


def sample(bench: Bench, go: Go) -> dict[str, Any]:
    """One measurement."""
    before = bench.runtime.stats() if bench.runtime is not None else None
    started, cpu = time.perf_counter(), time.process_time()
    found = go()
    found |= {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu, "bytes": bench.nbytes}
    if before is not None and bench.runtime.stats() != before:
        after = bench.runtime.stats()
        sent = [getattr(after, f"h2d_{kind}_nbytes") - getattr(before, f"h2d_{kind}_nbytes") for kind in ("pinned", "pageable")]
        found |= {"sent": sum(sent), "pageable": sent[1], "bus": sum(sent) / _BUS / found["seconds"]}
    return found


def measure(bench: Bench, ways: tuple[DeviceWay, ...], rounds: int) -> dict[str, Any]:
    """{name: {role, samples, skipped}}"""
    found: dict[str, Any] = {way.name: {"role": way.role, "samples": [], "skipped": ""} for way in ways}
    for turn in range(-1, rounds):
        for k in range(len(ways)):
            way = ways[(k + turn) % len(ways)]
            record = found[way.name]
            if bench.runtime is not None and way.on_gpu_only:
                record["skipped"] = way.on_gpu_only
            if record["skipped"]:
                continue
            try:
                with _WAYS[way.call](bench, **way.arguments) as go:
                    taken = sample(bench, go)
            except (headrace.HeadraceError, RuntimeError, ImportError) as exc:
                record["skipped"] = str(exc)
                continue
            if turn >= 0:
                record["samples"].append(taken)
    return found


@contextmanager
def opened(*, simulated: bool) -> Iterator[tuple[Any, Any, str]]:
    """(device, simulated runtime or None, what it is)"""
    if not simulated:
        from headrace.devices.cuda import open_device

        device = open_device(None)
        name = torch.cuda.get_device_name(device.index)  # noqa: TID251
        yield device, None, f"{name}, torch {torch.__version__}"
        return
    from headrace.testing.devices import SimulatedDevice
    from headrace.testing.simulated import SimulatedRuntime

    with SimulatedRuntime() as runtime:
        runtime.mode("timed", bytes_per_s=_BUS)
        device = SimulatedDevice(runtime)
        yield device, runtime, f"simulated GPU, bus of {_BUS / 1e9:g} GB/s"
        device.close()
        if violations := runtime.violations():
            raise RuntimeError(violations[0])


def main() -> None:
    """Carry out the job in the first argument."""
    job = json.loads(sys.argv[1])
    case = next(case for case in (*CASES, *ON_REQUEST) if case.name == job["case"])
    files = job["files"]
    pagecache.fill(files)
    entries = [entry for file in files for entry in read_entries(file)]
    with opened(simulated=job["simulated"]) as (device, runtime, name):
        bench = Bench(device, files, runtime, sum(entry.nbytes for entry in entries), [entry.shape for entry in entries])
        ways = measure(bench, case.ways, job["rounds"])
    print(json.dumps({"device": name, "cpus": os.cpu_count(), "ways": ways}))


if __name__ == "__main__":
    main()
