"""What a chunk costs on its way to a device whose runtime does nothing, at once: CPU time of Python; and a floor for reading.

Warm, a chunk behind the other; and cold, with as many bytes moved before each as a reader copies out of the page cache, which
leaves little of the interpreter in the CPUs' caches. The time of a whole load is that of all threads together, its plan included,
where reading is a call that reads nothing; one reader, so that none waits for another.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

import headrace
from headrace._addresses import address_of
from headrace._ring import Ring
from headrace._staging import Region
from headrace.devices.cuda import CudaDevice, Runtime
from headrace.testing.simulated.building import build

_MOVED_NBYTES = 8 << 20
_SLOTS, _TURNS, _BATCHES = 19, 500, 9
_TENSOR_NBYTES, _TENSORS = 64 << 20, 64

Chunk = Callable[[], object]


class _Allocator:
    """Memory that is not there: nothing is ever written to it. All of one size is the same, so that none is made or given back,
    which torch's caching allocator would not do either."""

    copy_stream = 1 << 40  # a handle is a number of 64 bits

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    def current(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes not in self._storages:
            self._storages[nbytes] = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(self._storages[nbytes], 0, (nbytes,), (1,))

    def free_nbytes(self) -> int:
        return 1 << 50

    def current_stream(self) -> int:
        return 0

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nothing to record."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


def null_device() -> CudaDevice:
    """The device of the package, over a runtime that does nothing. Raises `BuildError` without a C compiler."""
    library = build("null", [Path(__file__).with_name("null_runtime.c")])
    allocator: Any = _Allocator()
    return CudaDevice(Runtime(str(library)), allocator, index=0, name="null:0")


@contextmanager
def calls(*, cold: bool) -> Iterator[Callable[[], float]]:
    """Microseconds of a chunk's three calls alone: event queried, copy queued, event recorded."""
    runtime = null_device().runtime

    def chunk() -> None:
        runtime._QuickEventQuery(1)
        runtime._QuickMemcpyAsync(1, 2, 3, 1, 4)
        runtime._QuickEventRecord(1, 2)

    yield lambda: _measured(chunk, cold=cold)


@contextmanager
def copying(*, cold: bool) -> Iterator[Callable[[], float]]:
    """Microseconds of a chunk from the slot that is taken to the event behind its copy, calls included."""
    device = null_device()
    target = device.allocate(_MOVED_NBYTES)
    ring = Ring(device, slots=_SLOTS, slot_nbytes=1 << 16, pin="require", on_degraded=str)

    def issue(_: None, data: memoryview, pinned: bool) -> None:
        device.copy_async(target.address, address_of(data), data.nbytes, pinned=pinned)

    def chunk() -> None:
        slot = ring.take()
        ring.send(slot, issue, None, ring.settle(slot, slot.view))

    try:
        yield lambda: _measured(chunk, cold=cold)
    finally:
        ring.close()


def _measured(chunk: Chunk, *, cold: bool) -> float:
    """The quickest of several batches: what else the machine does only adds."""
    mover = _Mover() if cold else None
    return min(_batch(chunk, mover) for _ in range(_BATCHES))


def _batch(chunk: Chunk, mover: _Mover | None) -> float:
    turns = _TURNS if mover is None else _TURNS // 10
    took = 0
    if mover is None:
        start = time.thread_time_ns()
        for _ in range(turns):
            chunk()
        took = time.thread_time_ns() - start
    else:
        for _ in range(turns):
            mover.move()
            start = time.thread_time_ns()
            chunk()
            took += time.thread_time_ns() - start
    return took / turns / 1e3


class _Mover:
    """Copies as many bytes as a reader does between two chunks."""

    def __init__(self) -> None:
        self._regions = Region(_MOVED_NBYTES), Region(_MOVED_NBYTES)
        for region in self._regions:
            region.populate(0, _MOVED_NBYTES)

    def move(self) -> None:
        ctypes.memmove(self._regions[0].address, self._regions[1].address, _MOVED_NBYTES)


@contextmanager
def whole(folder: Path) -> Iterator[Callable[[], float]]:
    """Microseconds a chunk of all threads of a load."""
    path = _write_sparse(folder / "chunks.safetensors")
    device = null_device()

    def go() -> float:
        with headrace.open(path, options=headrace.Options(direct_io="off")) as checkpoint, _reading_nothing():
            start = time.process_time_ns()
            with headrace.stream(checkpoint, device=device, pin="require", keep_staging="on", concurrency=1) as tensors:
                for item in tensors:
                    del item
            return (time.process_time_ns() - start) / tensors.stats.device_copies / 1e3

    try:
        go()  # makes the ring
        yield lambda: min(go() for _ in range(_BATCHES))
    finally:
        headrace.release_staging()
        path.unlink()


def bare_reads(files: Sequence[str], *, threads: int, chunk_nbytes: int) -> Callable[[], dict[str, Any]]:
    """What reads the files by this many threads, each into a slot of its own that was touched before."""
    ring = Region(threads * chunk_nbytes)
    ring.populate(0, ring.nbytes)
    chunks = [(file, offset) for file in files for offset in range(0, os.path.getsize(file), chunk_nbytes)]

    def go() -> dict[str, Any]:
        opened = {file: os.open(file, os.O_RDONLY) for file in files}
        left = iter(chunks)  # `next` of it is one step

        def read(slot: memoryview) -> None:
            for file, offset in left:
                os.preadv(opened[file], [slot], offset)

        slots = [ring.view[i * chunk_nbytes : (i + 1) * chunk_nbytes] for i in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, slots))
        for descriptor in opened.values():
            os.close(descriptor)
        return {"sent": None, "copies": len(chunks), "pinned": None}

    return go


@contextmanager
def _reading_nothing() -> Iterator[None]:
    real, os.preadv = os.preadv, lambda _fd, buffers, _offset: len(buffers[0])  # type: ignore[assignment]
    try:
        yield
    finally:
        os.preadv = real


def _write_sparse(path: Path) -> Path:
    """A checkpoint of 4 GiB that takes a page."""
    import json

    names = [f"t{i}" for i in range(_TENSORS)]
    header = {
        name: {"dtype": "U8", "shape": [_TENSOR_NBYTES], "data_offsets": [i * _TENSOR_NBYTES, (i + 1) * _TENSOR_NBYTES]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + _TENSORS * _TENSOR_NBYTES)
    return path
