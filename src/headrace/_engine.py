"""Carry out a plan: readers fill memory, the caller takes tensors out, and neither runs away from the other.

Readers take reads in the plan's order, a ticket at a time, so a span that is needed earlier always has its memory
earlier and nothing can wait for itself. Whoever starts a span has its memory provided; where the limit does not allow it,
the ticket holder waits for the caller. A span is ready when its last read is in and its source is still the version that was
opened. The caller's thread makes tensors and never copies a byte.

The engine knows `ByteSource`, a plan and a `Landing`, the memory of host or device. What is read, where it lands and why was
decided before.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from headrace._filling import IN_PLACE, Hops
from headrace._interpreter import gc_paused, join, running, switching_fast
from headrace._landing import JoiningFilling, Landing
from headrace._plan import Plan, Read, Span
from headrace._progress import Progress, Snapshot
from headrace._trace import Tracer
from headrace.errors import HeadraceError, LoadError, StreamError
from headrace.sources.base import ByteSource, aligned_source

log = logging.getLogger("headrace")

Order: TypeAlias = Literal["ready", "file"]

_JOIN_S = 1.0  # readers that do not come back from a stalled source by then are left behind; they hold nothing that is reused
_BATCH = 128  # tensors made at a time
_TICK_S = 0.1  # how often a waiting caller reports progress


@dataclass(slots=True)
class Job:
    """Everything one load needs, decided and opened.

    Attributes:
        plan: what to do.
        sources: one per shard of the plan.
        landing: provides the memory and makes the tensors.
        into_given: whether tensors of the caller's are filled, so that an error has to say which.
        order: hand spans out as they become ready, or in file order.
        rename: the name a tensor is handed out under.
        on_progress: called on the caller's thread while it waits and between spans.
        demands_direct: whether reading past the page cache was demanded, so that a refusal is worth a warning.
        on_stop: called once when the load is over, however it ended.
        tracer: told of the caller's waits; the landing and its sources tell the rest.
    """

    plan: Plan
    sources: Sequence[ByteSource]
    landing: Landing
    into_given: bool = False
    order: Order = "ready"
    rename: Callable[[str], str] | None = None
    on_progress: Callable[[Snapshot], None] | None = None
    on_stop: Callable[[], None] | None = None
    demands_direct: bool = False
    tracer: Tracer | None = None


class Engine:
    """One load. `run()` yields the tensors; leaving it, however, stops the readers and frees what they held.

    Attributes:
        progress: counters, kept after the end.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job, self.plan, self.landing, self.progress = job, job.plan, job.landing, progress
        self.pid = os.getpid()
        self._order = threading.Lock()  # tickets: held while a span's memory is provided, so spans get memory in order
        self._state = threading.Condition()  # guards everything below
        self._next_read = 0  # written under _order
        self._finished_reads = 0
        self._reads_left = [span.last_read - span.first_read for span in self.plan.spans]
        self._ready: deque[int] = deque(i for i, left in enumerate(self._reads_left) if not left)
        self._errors: list[BaseException] = []
        self._left = len(self.plan.spans)
        self._turn = 0  # which span the caller waits for, in file order
        self._caller_waits = self._reader_waits = self._started = self._stopped = False
        self._threads: list[threading.Thread] = []

    # -- the caller's side -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start reading. `run` does it where it has not been done; then `stop` has to be called."""
        if self._started or self._stopped:
            return
        switching_fast.acquire()
        running.add(self)
        self._started = True
        self.landing.start()
        if len(self.plan.reads) == 1 and self.landing.reads_on_caller:
            return  # a thread would take longer to start than the read
        for i in range(min(self.plan.limits.concurrency, self.plan.requests)):
            thread = threading.Thread(target=self._reader, name=f"headrace-reader-{i}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop reading, wait for the readers and forget all memory that no tensor lives in. May be called twice."""
        if self.pid != os.getpid():
            self._state = threading.Condition()  # a reader of the parent's may have held it at the fork
        with self._state:
            if self._stopped:
                return
            self._stopped = True
            self._state.notify_all()
        running.discard(self)
        self.landing.wake()
        try:
            self._join_readers()
        finally:
            self._report_refusals()
            self.progress.finish()
            try:
                self.landing.close()
            finally:
                if self.job.on_stop is not None:
                    self.job.on_stop()

    def check_finished(self) -> None:
        """Raise StreamError if the load was stopped before its end: what came is not all there is."""
        if self._left:
            raise StreamError("the stream is closed")

    def _report_refusals(self) -> None:
        """Say once per source that direct reads were demanded and could not be had."""
        for source in self.job.sources if self.job.demands_direct else ():
            aligned = aligned_source(source)
            if aligned is not None and (reason := aligned.direct_refused) is not None:
                self.progress.degraded.append(f"{source.url}: read through the page cache, though direct_io='on': {reason}")
                log.warning("%s", self.progress.degraded[-1])

    def _join_readers(self) -> None:
        if not self._started or self.pid != os.getpid():
            return
        switching_fast.release()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():  # the collector may end an abandoned stream on one of its own readers
                join(thread, max(0.0, deadline - time.monotonic()))

    def run(self) -> Generator[tuple[str, Any], None, None]:
        """The tensors, (name, tensor) each. The generator's end, close or collection stops the engine."""
        try:
            self.start()
            for index in self._finished_spans():
                yield from self._hand_out(index)
                self._left -= 1
        except BaseException as exc:
            if self._errors and exc is self._errors[0]:
                self.stop()  # readers are at work until then: more is filled, or fails
                self._explain(exc, self._errors[1:])
            raise
        finally:
            self.stop()

    def _finished_spans(self) -> Iterator[int]:
        asked = time.perf_counter()
        for turn in range(len(self.plan.spans)):
            index = self._wait_for_span(turn)
            got = time.perf_counter()
            self.progress.source_wait_s += got - asked
            if self.job.on_progress:
                self.job.on_progress(self.progress.snapshot())
            yield index
            left = time.perf_counter()
            self.progress.caller_s += left - got
            if self.job.tracer is not None:
                self.job.tracer.add_span(self.plan, index, asked=asked, got=got, left=left)
            asked = left

    def _wait_for_span(self, turn: int) -> int:
        """The next span that can be handed out."""
        if self.pid != os.getpid():
            raise StreamError(
                "this stream was opened before a fork, and its readers stayed with the parent; open one in the child"
            )
        if not self._threads and self.plan.reads:
            self._caller_waits, self._turn = True, turn
            self._reader()
        tick = _TICK_S if self.job.on_progress else None
        with self._state:
            self._caller_waits, self._turn = True, turn
            try:
                while True:
                    if self._stopped:
                        self._stay_if_daemon()
                        raise StreamError("the stream is closed")
                    if self._errors:
                        raise self._errors[0]
                    if self._can_take():
                        return self._take_ready()
                    if self._reader_waits and self._nothing_in_flight():
                        self.landing.wake()
                    if not self._state.wait(tick) and self.job.on_progress:
                        self.job.on_progress(self.progress.snapshot())
            finally:
                self._caller_waits = False

    def _stay_if_daemon(self) -> None:
        """Once the interpreter ends, keep the program's daemon threads where they are: no error, as of any other wait."""
        while running.is_over and threading.current_thread().daemon:
            self._state.wait()

    def _nothing_in_flight(self) -> bool:
        """Whether every ticket that was taken has been finished. Steady while a reader waits for memory with the next one."""
        return self._finished_reads == self._next_read

    def _can_take(self) -> bool:
        """Whether a span is ready that the caller may have now."""
        return bool(self._ready) if self.job.order == "ready" else self._turn in self._ready

    def _take_ready(self) -> int:
        if self.job.order == "ready":
            return self._ready.popleft()
        self._ready.remove(self._turn)
        return self._turn

    def _hand_out(self, index: int) -> Iterator[tuple[str, Any]]:
        """A span's tensors, made a few at a time: all at once would have the allocator fetch and return pages for each span."""
        span = self.plan.spans[index]
        names, sizes = self.plan.tensors.names, self.plan.tensors.nbytes
        made = self.landing.take(index, span)
        before_each = self.landing.before_each
        done = span.first
        try:
            for begin in range(span.first, span.last, _BATCH):
                gc_paused.acquire()
                try:
                    end = min(begin + _BATCH, span.last)
                    batch = names[begin:end] if self.job.rename is None else [self.job.rename(name) for name in names[begin:end]]
                    tensors = made(begin, end)
                    if end == span.last:
                        del made  # from here on only the tensors hold the span's memory
                finally:
                    gc_paused.release()
                tensors.reverse()
                for name in batch:
                    if before_each is not None:
                        before_each()
                    done += 1
                    yield name, tensors.pop()
        finally:
            self.progress.tensors += done - span.first
            self.progress.tensor_nbytes += sum(sizes[span.first : done])

    def _explain(self, first: BaseException, others: Sequence[BaseException]) -> None:
        """Attach the others to the first error. Raises LoadError in its place where tensors were given: some are filled now."""
        if isinstance(first, HeadraceError):
            first.others = tuple(others)
        if self.job.into_given and isinstance(first, Exception):  # an interrupt stays one
            filled = tuple(self.landing.filled)
            what = f"the load into given tensors stopped when {len(filled)} of them were filled: {first}"
            raise LoadError(what, filled=filled) from first

    # -- the readers' side -----------------------------------------------------------------------------------------------------

    def _reader(self) -> None:
        filling = None
        try:
            filling = self.landing.filling()
            joins = hasattr(filling, "fill_together")
            while reads := self._next_ticket(joins=joins):
                hops = cast("JoiningFilling", filling).fill_together(reads) if len(reads) > 1 else [filling.fill(reads[0])]
                for read, way in zip(reads, hops, strict=True):
                    if way is not None:
                        self.finish(read, way)
        except BaseException as exc:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self.fail(exc)
        finally:
            if filling is not None:
                filling.close()  # the traceback of an error outlives this call, and this frame with it

    def _next_ticket(self, *, joins: bool) -> list[Read]:
        """The next read, with those that are joined to it and whose memory can be had now; none at the end."""
        with self._order:
            i = self._next_read
            if i >= len(self.plan.reads) or self._stopped or self._errors:
                return []
            read = self.plan.reads[i]
            span = self.plan.spans[read.span]
            if i == span.first_read and not self._provide_memory(read.span, span):
                return []
            taken = [read]
            while joins and self._has_room_for_joined(i + len(taken)):
                taken.append(self.plan.reads[i + len(taken)])
            self._next_read = i + len(taken)
            return taken

    def _has_room_for_joined(self, i: int) -> bool:
        """Whether a read comes with the one before it. Nobody waits for its memory: what does not fit is a request of its own."""
        if i >= len(self.plan.reads) or not (read := self.plan.reads[i]).joined:
            return False
        span = self.plan.spans[read.span]
        return i > span.first_read or self.landing.provide(read.span, span)

    def _provide_memory(self, index: int, span: Span) -> bool:
        """Memory for a span, waiting for the caller if need be. False when the load was stopped meanwhile."""
        return self.landing.provide(index, span) or self._wait_for_memory(index, span)

    def _wait_for_memory(self, index: int, span: Span) -> bool:
        began = time.perf_counter()
        provided = False
        while not provided:
            with self._state:
                if self._stopped or self._errors:
                    return False
                if self._caller_waits and self._nothing_in_flight() and not self._can_take():
                    self.landing.go_on()
                else:
                    self._reader_waits = True
                    self._state.notify_all()
            if self._reader_waits:
                self.landing.wait()
                self._reader_waits = False
            provided = self.landing.provide(index, span)
        self.progress.memory_wait_s += time.perf_counter() - began
        return True

    def fail(self, error: BaseException) -> None:
        """Hand an error to the caller's thread, which raises it."""
        _let_go_of_memory(error)
        with self._state:
            self._errors.append(error)
            self._state.notify_all()

    def finish(self, read: Read, hops: Hops) -> None:
        """Count a read, and announce its span when it was the last one."""
        index = read.span
        with self._state:
            self._count(read, hops)
            self._reads_left[index] -= 1
            if self._reads_left[index]:
                self._finished_reads += 1
                if self._reader_waits and self._nothing_in_flight():
                    self._state.notify_all()
                return
        self.job.sources[read.shard].check_unchanged()
        copied_nbytes = self.landing.complete(index, self.plan.spans[index])
        with self._state:
            self.progress.copied_nbytes += copied_nbytes
            self._finished_reads += 1
            self._ready.append(index)
            self._state.notify_all()

    def _count(self, read: Read, hops: Hops) -> None:
        progress = self.progress
        progress.read_nbytes += read.nbytes
        if hops is not IN_PLACE:
            progress.read_nbytes -= hops.received_nbytes
            progress.direct_nbytes += hops.direct_nbytes
            progress.copied_nbytes += hops.copied_nbytes
        if read.copy is not None and read.copy.source != read.copy.target:
            progress.cast_nbytes += read.nbytes


def _let_go_of_memory(error: BaseException) -> None:
    """Free the locals of the frames that an error has passed: they hold views of memory, and tracebacks are kept for long."""
    seen: BaseException | None = error
    done = set[int]()  # an error may be its own cause
    while seen is not None and id(seen) not in done:
        done.add(id(seen))
        trace = seen.__traceback__
        if seen is error and trace is not None:
            trace = seen.__traceback__ = trace.tb_next  # the reader's own frame is still running
        traceback.clear_frames(trace)
        seen = seen.__cause__ or seen.__context__
