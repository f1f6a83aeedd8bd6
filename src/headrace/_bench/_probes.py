"""The parts of a load one by one: threads that take chunks off a counter and do one thing with each.

Every probe stops when it has moved what it was given or when its time is up. Reads go through the sources that a load would use,
into a small buffer per thread that stays in cache, so that nothing but the source is measured.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from headrace._addresses import move
from headrace._bench._report import Figure
from headrace._cast import copy_out
from headrace._dtypes import DTYPES
from headrace._interpreter import switching_fast
from headrace._plan import CHUNK_NBYTES, MIB, Copy
from headrace._staging import Region, round_up
from headrace.devices.base import Device
from headrace.errors import DeviceError, PinningError
from headrace.sources.base import ByteSource, aligned_source

_REMOTE_CHUNK_NBYTES = DISK_CHUNK_NBYTES = 8 * MIB
_COPY_NBYTES = 64 * MIB  # beyond what caches hold
_TOUCHES = 3
_DEVICE_NBYTES = 64 * MIB
_DEVICE_COPIES = 32
_CASTS = (("F32", "BF16"), ("BF16", "F32"), ("F16", "BF16"))

Work = Callable[[int], None]  # one chunk by number


class Bounds(NamedTuple):
    """What a probe may take."""

    nbytes: int
    seconds: float


class Piece(NamedTuple):
    """A chunk of a source."""

    source: ByteSource
    offset: int
    nbytes: int


def pieces(sources: Sequence[ByteSource], chunk_nbytes: int, nbytes: int) -> list[Piece]:
    """The first `nbytes` of the sources in chunks."""
    found: list[Piece] = []
    for source in sources:
        for offset in range(0, source.nbytes, chunk_nbytes):
            if nbytes <= 0:
                return found
            found.append(Piece(source, offset, min(chunk_nbytes, source.nbytes - offset)))
            nbytes -= chunk_nbytes
    return found


# -- the source ------------------------------------------------------------------------------------------------------------------


def disk(sources: Sequence[ByteSource], threads: int, bounds: Bounds) -> list[Figure]:
    """Reads past the page cache, with the threads that a load would use and with twice as many."""
    aligned = [aligned_source(source) for source in sources]
    missing = Figure("disk", "disk, past the page cache", skipped="there are no direct reads from such a source")
    if not all(aligned):
        return [missing]
    work = pieces(sources, DISK_CHUNK_NBYTES, bounds.nbytes)
    figures = []
    for count in (threads, 2 * threads):
        figures.append(_read_all("disk", "disk, past the page cache", work, count, bounds.seconds, direct=True))
        for source in aligned:
            if source is not None and source.direct_refused is not None:
                return [replace(missing, skipped=source.direct_refused)]
    return figures


def page_cache(sources: Sequence[ByteSource], threads: int, bounds: Bounds) -> Figure:
    """Reads out of the page cache, of what a pass before has put there."""
    work = pieces(sources, CHUNK_NBYTES, bounds.nbytes)
    filled = _read_all("cache", "page cache", work, threads, bounds.seconds)
    work = work[: max(1, filled.nbytes // CHUNK_NBYTES)]
    return _read_all("cache", "page cache", work, threads, bounds.seconds)


def network(sources: Sequence[ByteSource], threads: int, bounds: Bounds) -> list[Figure]:
    """Ranged GETs on one connection, on those that a load would use, and on twice as many."""
    work = pieces(sources, _REMOTE_CHUNK_NBYTES, bounds.nbytes)
    counts = dict.fromkeys((1, threads, 2 * threads))
    return [_read_all("network", "network, ranged GETs", work, count, bounds.seconds) for count in counts]


def _read_all(kind: str, what: str, work: Sequence[Piece], threads: int, seconds: float, *, direct: bool = False) -> Figure:
    room = max((piece.nbytes for piece in work), default=1)

    def reader() -> Work:
        region = Region(room)
        region.populate(0, region.nbytes)

        def read(i: int) -> None:
            source, offset, nbytes = work[i]
            aligned = aligned_source(source) if direct else None
            if aligned is not None:
                aligned.read_direct_into(offset, region.view[: round_up(nbytes, aligned.block_nbytes)])
            else:
                source.read_into(offset, region.view[:nbytes])

        return read

    return _measured(kind, what, [piece.nbytes for piece in work], threads, seconds, reader)


# -- the host --------------------------------------------------------------------------------------------------------------------


def touched(threads: int, bounds: Bounds) -> Figure:
    """Fresh memory, faulted in: several times, since a virtual machine may first have to get it back from its host."""
    first, *others = [_touch(threads, bounds) for _ in range(_TOUCHES)]
    again = max(others, key=lambda figure: figure.rate)
    slow = first.rate < again.rate / 2
    return replace(again, note=f"the first time {first.rate / 1e9:.2f} GB/s, as its host had to give it" if slow else "")


def _touch(threads: int, bounds: Bounds) -> Figure:
    region = Region(bounds.nbytes)
    sizes = [min(CHUNK_NBYTES, region.nbytes - at) for at in range(0, region.nbytes, CHUNK_NBYTES)]

    def touch(i: int) -> None:
        region.populate(i * CHUNK_NBYTES, i * CHUNK_NBYTES + sizes[i])

    return _measured("touch", "fresh memory, touched", sizes, threads, bounds.seconds, lambda: touch)


def copied(threads: int, bounds: Bounds) -> Figure:
    """Memory to memory, beyond the caches."""

    def copier() -> Work:
        source, target = (_populated(_COPY_NBYTES) for _ in range(2))
        return lambda _: move(target.view, source.view)

    sizes = [_COPY_NBYTES] * max(1, bounds.nbytes // _COPY_NBYTES)
    return _measured("copy", "memory, copied", sizes, threads, bounds.seconds, copier)


def casts(threads: int, bounds: Bounds) -> list[Figure]:
    """Conversions of a chunk that is in cache, as readers do them."""
    return [_cast(source, target, threads, bounds) for source, target in _CASTS]


def _cast(source: str, target: str, threads: int, bounds: Bounds) -> Figure:
    made_nbytes = CHUNK_NBYTES // DTYPES[source].itemsize * DTYPES[target].itemsize

    def caster() -> Work:
        slot, made = _populated(CHUNK_NBYTES), _populated(made_nbytes)
        return lambda _: copy_out(slot.view, made.view, 0, Copy(source, target))

    sizes = [CHUNK_NBYTES] * max(1, bounds.nbytes // CHUNK_NBYTES)
    return _measured("cast", f"cast, {source} to {target}", sizes, threads, bounds.seconds, caster)


def _populated(nbytes: int) -> Region:
    region = Region(nbytes)
    region.populate(0, region.nbytes)
    return region


# -- a device --------------------------------------------------------------------------------------------------------------------


def device_copies(device: Device, bounds: Bounds) -> list[Figure]:
    """Copies to a device, out of page-locked and out of ordinary memory."""
    device.enter_thread()
    nbytes = min(_DEVICE_NBYTES, bounds.nbytes)
    region = _populated(nbytes)
    found = []
    try:
        with _pinned(device, region):
            found.append(_device_figure("pinned", "to the GPU, page-locked", device, region, bounds))
    except PinningError as exc:
        found.append(Figure("pinned", "to the GPU, page-locked", skipped=str(exc)))
    found.append(_device_figure("pageable", "to the GPU, pageable", device, region, bounds))
    return found


def no_device(reason: str) -> list[Figure]:
    """The same, where there is none."""
    whats = {"pinned": "to the GPU, page-locked", "pageable": "to the GPU, pageable"}
    return [Figure(kind, what, skipped=reason) for kind, what in whats.items()]


def _device_figure(kind: str, what: str, device: Device, region: Region, bounds: Bounds) -> Figure:
    try:
        target, event = device.allocate(region.nbytes), device.new_event()
    except DeviceError as exc:
        return Figure(kind, what, skipped=str(exc))
    try:
        moved, began = 0, 0.0
        for turn in range(_DEVICE_COPIES + 1):
            device.copy_async(target.address, region.address, region.nbytes)
            device.record(event)
            device.synchronize(event)
            if not turn:
                began = time.perf_counter()  # the first one also sets things up
                continue
            moved += region.nbytes
            if time.perf_counter() - began > bounds.seconds:
                break
        return Figure(kind, what, moved, time.perf_counter() - began, 1)
    finally:
        device.destroy([event])


@contextmanager
def _pinned(device: Device, region: Region) -> Iterator[None]:
    device.pin(region.address, region.nbytes)
    try:
        yield
    finally:
        device.unpin(region.address)


# -- threads ---------------------------------------------------------------------------------------------------------------------


def _measured(kind: str, what: str, sizes: Sequence[int], threads: int, seconds: float, worker: Callable[[], Work]) -> Figure:
    """Have threads take the chunks of these sizes off a counter, until there is none or the time is up.

    What a worker needs is made before the clock starts. The first error of a thread is raised here.
    """
    threads = max(1, min(threads, len(sizes)))
    tickets, done, errors = itertools.count(), [0] * threads, list[BaseException]()
    began = 0.0

    def start_clock() -> None:
        nonlocal began
        began = time.perf_counter()

    ready = threading.Barrier(threads, start_clock)

    def work(thread: int) -> None:
        try:
            do = worker()
            ready.wait()
            while not errors and (i := next(tickets)) < len(sizes) and (not i or time.perf_counter() < began + seconds):
                do(i)
                done[thread] += sizes[i]
        except threading.BrokenBarrierError:
            return  # another thread has failed
        except BaseException as exc:  # noqa: BLE001 - raised in the measuring thread
            errors.append(exc)
            ready.abort()

    pool = [threading.Thread(target=work, args=(k,), name=f"headrace-bench-{k}", daemon=True) for k in range(threads)]
    with switching_fast.held():
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
    took = time.perf_counter() - began
    if errors:
        raise errors[0]
    return Figure(kind, what, sum(done), took, threads)
