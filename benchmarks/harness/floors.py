"""Floors: bare loops in plain Python that do nothing but read, as fast as `os.preadv` and a few threads can.

Threads take chunks of 4 MiB off one counter, in file order; nothing waits for anything. Headers are parsed and buffers made
before the clock starts. What the bytes land in tells the floors apart.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

from harness import memory
from harness.checkpoints import Entry, read_entries
from harness.child import Job

_CHUNK_NBYTES = 4 << 20
_Reader = Callable[[int], None]  # reads one chunk by number


def into_given(job: Job) -> Callable[[], Any]:
    """Into the memory of the destination tensors, the same that headrace fills."""
    given = memory.destinations(job.files)
    chunks = _tensor_chunks(job.files, lambda entry: memory.view_of(given[entry.name]))

    def run() -> Any:
        _read_all(job, chunks)
        job.keep(given)
        return {}, given

    return run


def into_recycled(job: Job) -> Callable[[], Any]:
    """Into one buffer per tensor size, used again for every tensor of that size."""
    buffers: dict[int, memoryview] = {}

    def buffer(entry: Entry) -> memoryview:
        if entry.nbytes not in buffers:
            buffers[entry.nbytes] = memory.allocate(entry.nbytes)
        return buffers[entry.nbytes]

    chunks = _tensor_chunks(job.files, buffer)
    return lambda: _read_all(job, chunks)


def into_fresh(job: Job) -> Callable[[], Any]:
    """Into fresh memory, one stretch of huge pages per file, made present chunk by chunk by the thread that fills it."""
    threads = job.settings["threads"]

    def run() -> Any:
        fds = [os.open(file, os.O_RDONLY) for file in job.files]
        kept = [memory.allocate(os.fstat(fd).st_size, present=False) for fd in fds]
        chunks = [(fd, view, at) for fd, view in zip(fds, kept, strict=True) for at in range(0, view.nbytes, _CHUNK_NBYTES)]

        def read(i: int) -> None:
            fd, view, at = chunks[i]
            piece = view[at : at + _CHUNK_NBYTES]
            memory.populate(piece)
            os.preadv(fd, [piece], at)

        in_threads(threads, len(chunks), lambda: read)
        _close(fds)
        return {}, kept

    return run


def chunks(job: Job) -> Callable[[], Any]:
    """Every file in chunks into one small buffer per thread; with `direct`, past the page cache."""
    flags = os.O_RDONLY | (os.O_DIRECT if job.settings.get("direct") else 0)
    nbytes = job.settings.get("chunk_nbytes", _CHUNK_NBYTES)
    threads = job.settings["threads"]
    buffers = [memory.allocate(nbytes)[:nbytes] for _ in range(threads)]

    def run() -> Any:
        fds = [os.open(file, flags) for file in job.files]
        offsets = [(fd, at) for fd in fds for at in range(0, os.fstat(fd).st_size, nbytes)]
        free = iter(buffers)

        def reader() -> _Reader:
            buffer = [next(free)]

            def read(i: int) -> None:
                fd, at = offsets[i]
                os.preadv(fd, buffer, at)

            return read

        in_threads(threads, len(offsets), reader)
        _close(fds)

    return run


def _tensor_chunks(files: list[str], place: Callable[[Entry], memoryview]) -> list[list[tuple[memoryview, int]]]:
    """Per file, (memory, offset) of every chunk of every tensor, in file order."""
    found = []
    for file in files:
        chunks = []
        for entry in read_entries(file):
            view = place(entry)[: entry.nbytes]
            chunks += [(view[at : at + _CHUNK_NBYTES], entry.offset + at) for at in range(0, entry.nbytes, _CHUNK_NBYTES)]
        found.append(chunks)
    return found


def _read_all(job: Job, per_file: list[list[tuple[memoryview, int]]]) -> None:
    fds = [os.open(file, os.O_RDONLY) for file in job.files]
    flat = [(fd, [view], offset) for fd, chunks in zip(fds, per_file, strict=True) for view, offset in chunks]

    def read(i: int) -> None:
        fd, views, offset = flat[i]
        if os.preadv(fd, views, offset) != views[0].nbytes:
            raise OSError(f"short read at {offset}")

    in_threads(job.settings["threads"], len(flat), lambda: read)
    _close(fds)


def in_threads(threads: int, count: int, reader: Callable[[], _Reader]) -> None:
    """Read chunks 0 to `count` with `threads` threads, each with a reader of its own."""
    tickets = itertools.count()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            read = reader()
            while (i := next(tickets)) < count:
                read(i)
        except BaseException as exc:  # noqa: BLE001 - raised below, in the measuring thread
            errors.append(exc)

    pool = [threading.Thread(target=work) for _ in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    if errors:
        raise errors[0]


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
