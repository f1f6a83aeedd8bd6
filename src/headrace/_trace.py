"""A load as a timeline: what each thread did when, in the form that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Sources and the landing of a load are wrapped, so the engine knows nothing of this but for the caller's waits, and a load that is
not traced runs the same code as ever. Stages, each with the shard, offset and bytes that it was about:

    memory     a reader gets memory to fill: touches fresh pages, or waits for a slot of the ring to a device
    read       a source is read, and verified where that was asked for
    cast, copy bytes that were read are converted; or moved, or sent on their way to a device or another rank
    exchange   since the last round among ranks: waiting for it, and sending or receiving
    wait       the caller waits for a tensor, or a reader for the memory limit
    hand-out   tensors are made and handed to the caller, until it asks for the next

Events are kept in memory, some 200 bytes each and about two a chunk, and written when the load ends. Of urls only the last part
is written, since what follows it may be a secret.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from headrace.errors import HeadraceError, OptionError
from headrace.sources.base import AlignedSource, ByteSource, DirectSource, JoiningSource, aligned_source

if TYPE_CHECKING:
    from headrace._filling import Hops
    from headrace._landing import Filling, JoiningFilling, Landing
    from headrace._plan import Plan, Read

log = logging.getLogger("headrace")

_Made = TypeVar("_Made")

_LEAST_S = 10e-6  # what takes less between two events is the loop itself


class _Event(NamedTuple):
    stage: str
    thread: str
    start: float
    end: float
    shard: int | None
    about: dict[str, Any]


class Tracer:
    """Collects the events of one load, and writes them when it is over.

    Args:
        path: of the file to write. It is made at once, so that a place that cannot be written to is known before the load.

    Raises:
        OptionError: it cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._pid, self._began = os.getpid(), time.perf_counter()
        self._events: list[_Event] = []  # appending is atomic
        self._shards: list[str] = []
        self._caller = ""
        self._here = threading.local()
        try:
            self._path.write_text("")
        except OSError as exc:
            raise OptionError(f"trace: {self._path} cannot be written to: {exc.strerror}", option="trace") from exc

    # -- what is recorded --------------------------------------------------------------------------------------------------------

    def add(self, stage: str, start: float, end: float, shard: int | None = None, **about: Any) -> None:
        """Record what this thread did from `start` to `end`."""
        self._events.append(_Event(stage, threading.current_thread().name, start, end, shard, about))

    def add_span(self, plan: Plan, index: int, *, asked: float, got: float, left: float) -> None:
        """Record that the caller waited for a span, and that it was handed out. On the caller's thread."""
        self._caller = threading.current_thread().name
        span = plan.spans[index]
        if got - asked > _LEAST_S:
            self.add("wait", asked, got, span.shard)
        offset = min((read.offset for read in plan.reads[span.first_read : span.last_read]), default=0)
        nbytes = sum(plan.tensors.nbytes[span.first : span.last])
        self.add("hand-out", got, left, span.shard, offset=offset, nbytes=nbytes, tensors=span.last - span.first)

    def sources(self, sources: Sequence[ByteSource]) -> list[ByteSource]:
        """The sources, each recording its reads."""
        self._shards = [source.url.partition("?")[0].rstrip("/").rpartition("/")[2] for source in sources]
        return [cast(ByteSource, _recording(source)(source, shard, self)) for shard, source in enumerate(sources)]

    def direct(self, files: Mapping[int, DirectSource]) -> dict[int, DirectSource]:
        """Files that a library reads into a device's memory, each recording its reads."""
        return {shard: cast(DirectSource, _Direct(cast(Any, file), shard, self)) for shard, file in files.items()}

    def landing(self, landing: Landing) -> Landing:
        """The landing, recording what happens around each read."""
        return cast("Landing", _Landing(landing, self))

    def report(self, engine: Any) -> _Report:
        """The engine as the exchange among ranks reports to it, recording how long each round took."""
        return _Report(engine, self)

    @property
    def reads(self) -> list[tuple[float, float]]:
        """(start, end) of this thread's reads since the list was cleared."""
        if not hasattr(self._here, "reads"):
            self._here.reads = []
        return cast("list[tuple[float, float]]", self._here.reads)

    # -- what is written ---------------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the file. A failure is a warning: the load itself is over. A forked child leaves the file to its parent."""
        if self._pid != os.getpid():
            return
        try:
            with self._path.open("w") as file:
                json.dump({"traceEvents": list(self._entries()), "displayTimeUnit": "ms"}, file, separators=(",", ":"))
        except OSError as exc:
            log.warning("the trace %s could not be written: %s", self._path, exc.strerror)

    def _entries(self) -> Iterator[dict[str, Any]]:
        threads = sorted({event.thread for event in self._events}, key=lambda name: (name != self._caller, len(name), name))
        numbers = {name: number for number, name in enumerate(threads, 1)}
        yield {"ph": "M", "name": "process_name", "pid": self._pid, "args": {"name": "headrace"}}
        for name, number in numbers.items():
            shown = "caller" if name == self._caller else name.removeprefix("headrace-")
            for kind, value in (("thread_name", {"name": shown}), ("thread_sort_index", {"sort_index": number})):
                yield {"ph": "M", "name": kind, "pid": self._pid, "tid": number, "args": value}
        for event in sorted(self._events, key=lambda event: event.start):
            yield {
                "ph": "X",
                "name": event.stage,
                "cat": "headrace",
                "pid": self._pid,
                "tid": numbers[event.thread],
                "ts": round((event.start - self._began) * 1e6, 3),
                "dur": round((event.end - event.start) * 1e6, 3),
                "args": self._about(event),
            }

    def _about(self, event: _Event) -> dict[str, Any]:
        return event.about if event.shard is None else {"shard": self._shards[event.shard], **event.about}


class _Source:
    """A source that records its reads; all else is the source's own."""

    def __init__(self, source: ByteSource, shard: int, tracer: Tracer) -> None:
        self._source, self._shard, self._tracer = source, shard, tracer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        start = time.perf_counter()
        try:
            self._source.read_into(offset, buffer)
        except HeadraceError as exc:
            self._record(start, offset, buffer.nbytes, error=type(exc).__name__)
            raise
        self._record(start, offset, buffer.nbytes)

    def _record(self, start: float, offset: int, nbytes: int, **more: Any) -> None:
        end = time.perf_counter()
        self._tracer.reads.append((start, end))
        self._tracer.add("read", start, end, self._shard, offset=offset, nbytes=nbytes, **more)


class _Joining(_Source):
    """The same, of a source that fetches neighbouring ranges with one request."""

    def read_into_each(self, offset: int, buffers: Sequence[memoryview]) -> None:
        start, nbytes = time.perf_counter(), sum(map(len, buffers))
        try:
            cast(JoiningSource, self._source).read_into_each(offset, buffers)
        except HeadraceError as exc:
            self._record(start, offset, nbytes, error=type(exc).__name__)
            raise
        self._record(start, offset, nbytes)


class _Aligned(_Source):
    """The same, of a source that can be read past the page cache."""

    def read_direct_into(self, offset: int, buffer: memoryview) -> None:
        start = time.perf_counter()
        cast(AlignedSource, self._source).read_direct_into(offset, buffer)
        self._record(start, offset, buffer.nbytes, direct=True)


def _recording(source: ByteSource) -> type[_Source]:
    if hasattr(source, "read_into_each"):
        return _Joining
    return _Source if aligned_source(source) is None else _Aligned


class _Direct(_Source):
    """The same, of a file that a library reads into a device's memory."""

    def read_into_device(self, offset: int, pointer: int, nbytes: int, *, keep: object) -> None:
        start = time.perf_counter()
        cast(DirectSource, self._source).read_into_device(offset, pointer, nbytes, keep=keep)
        self._record(start, offset, nbytes, direct=True)


class _Landing:
    """A landing that records what its readers do; all else is the landing's own."""

    def __init__(self, landing: Landing, tracer: Tracer) -> None:
        self._landing, self._tracer = landing, tracer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._landing, name)

    def filling(self) -> _Filling:
        filling = self._landing.filling()
        return (_JoiningFilling if hasattr(filling, "fill_together") else _Filling)(filling, self._tracer)

    def wait(self) -> None:
        start = time.perf_counter()
        self._landing.wait()
        self._tracer.add("wait", start, time.perf_counter(), reason="memory limit")


class _Filling:
    """What happens between a reader's reads is told by what was asked for."""

    def __init__(self, filling: Filling, tracer: Tracer) -> None:
        self._filling, self._tracer = filling, tracer
        self.close = filling.close

    def fill(self, read: Read) -> Hops | None:
        return self._recorded(lambda: self._filling.fill(read), [read])

    def _recorded(self, fill: Callable[[], _Made], reads: Sequence[Read]) -> _Made:
        seen = self._tracer.reads
        seen.clear()
        at, stage = time.perf_counter(), "memory"
        hops = fill()
        casts = any(read.copy is not None and read.copy.source != read.copy.target for read in reads)
        nbytes = sum(read.nbytes for read in reads)
        for start, end in (*seen, (time.perf_counter(),) * 2):
            if start - at > _LEAST_S:
                self._tracer.add(stage, at, start, reads[0].shard, offset=reads[0].offset, nbytes=nbytes)
            at, stage = end, "cast" if casts else "copy"
        return hops


class _JoiningFilling(_Filling):
    """The same, of one that makes a request of several reads."""

    def fill_together(self, reads: Sequence[Read]) -> list[Hops]:
        return self._recorded(lambda: cast("JoiningFilling", self._filling).fill_together(reads), reads)


class _Report:
    """On the threads of the exchange, from each report to the next."""

    def __init__(self, engine: Any, tracer: Tracer) -> None:
        self.fail = engine.fail
        self._finish, self._tracer = engine.finish, tracer
        self._last: dict[int, float] = {}

    def finish(self, read: Read, hops: Hops) -> None:
        thread, now = threading.get_ident(), time.perf_counter()
        if (start := self._last.get(thread)) is not None:
            about = {"offset": read.offset, "nbytes": read.nbytes, "received": hops.received_nbytes > 0}
            self._tracer.add("exchange", start, now, read.shard, **about)
        self._finish(read, hops)
        self._last[thread] = time.perf_counter()
