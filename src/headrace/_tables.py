"""Tensors in pages that the ranks of a node have in common ("shared-cpu"): read by one rank, used where they lie by all.

The rank that fills them runs an engine over a `SharedLanding`. On the others a `SharedReading` hands out the same tensors in the
order of the file, each when it is there, and reads nothing. Nobody may write to them: an attempt ends the process (SIGSEGV).
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Final

from headrace._filling import Filler, Hops, SpanMemory, landing_nbytes
from headrace._landing import Filling, Maker
from headrace._leaving import FAILED, STOPPED, Leaving
from headrace._pages import Layout, Pages, share_pages
from headrace._peers import Peers
from headrace._plan import Plan, Read, Span
from headrace._progress import Progress, Snapshot
from headrace.devices.base import HostTarget
from headrace.errors import StreamError
from headrace.sources.base import ByteSource

_BATCH: Final = 128  # tensors made at a time


def join_tables(plan: Plan, target: HostTarget, peers: Peers | None, progress: Progress) -> Tables:
    """Agree with the other ranks on what is loaded, and on who reads it for which of them. Collective where there are peers.

    Raises:
        PeerError: another rank failed, or is about to load something else.
        DeviceMemoryError: there is no such memory.
    """
    layout = Layout([(span.nbytes, span.first, span.last) for span in plan.spans], plan.tensors.positions)
    if peers is None:
        pages = share_pages(layout)
        progress.exchange = "pages of this process's own: there is no group"
        return Tables(plan, pages, target)
    peers.agree(tables=_digest_of(plan))
    pages = share_pages(layout, rank=peers.rank, gather=partial(peers.gather, about="pages"), timeout_s=peers.timeout_s)
    peers.close()
    progress.rank, progress.ranks = peers.rank, peers.size
    progress.exchange = f"pages that the ranks of the node have in common, read by rank {pages.filler}"
    return Tables(plan, pages, target)


def _digest_of(plan: Plan) -> str:
    tensors = plan.tensors
    return hashlib.sha256(repr((tensors.names, tensors.dtypes, list(map(tuple, tensors.shapes)))).encode()).hexdigest()


class SharedTensor:
    """What is known of a tensor in shared memory before it is there, and the tensor once it is.

    Attributes:
        name: in the checkpoint.
        dtype: the format's, such as "BF16". `shape`: in its elements. `nbytes`: in memory.
    """

    __slots__ = ("_row", "_tables", "dtype", "name", "nbytes", "shape")

    def __init__(self, tables: Tables, row: int) -> None:
        tensors = tables.plan.tensors
        self._tables, self._row = tables, row
        self.name, self.dtype, self.nbytes = tensors.names[row], tensors.dtypes[row], tensors.nbytes[row]
        self.shape = tuple(tensors.shapes[row])

    def __repr__(self) -> str:
        return f"<SharedTensor {self.name!r}: {self.dtype} {list(self.shape)}, {'ready' if self.ready else 'not read yet'}>"

    @property
    def ready(self) -> bool:
        """Whether its bytes are there."""
        return self._tables.pages.is_filled(self._tables.span_of(self._row))

    def tensor(self) -> Any:
        """The tensor, over the shared pages; not to be written to.

        Raises:
            StreamError: its bytes are not there yet.
        """
        if not self.ready:
            raise StreamError(f"{self.name!r} has not been read yet; the stream hands it out when it is")
        return self._tables.make(self._tables.span_of(self._row), self._row, self._row + 1)[0]


class Tables:
    """The tensors of a plan, in shared pages.

    Attributes:
        plan: of this rank. pages: their memory.
    """

    def __init__(self, plan: Plan, pages: Pages, target: HostTarget) -> None:
        self.plan, self.pages, self._target = plan, pages, target
        self._spans = [index for index, (_, first, last) in enumerate(pages.layout.spans) for _ in range(first, last)]

    def span_of(self, row: int) -> int:
        """The span that a tensor lies in."""
        return self._spans[row]

    def make(self, index: int, begin: int, end: int) -> list[Any]:
        """The tensors of rows `begin` to `end` of a span that is filled."""
        tensors, rows = self.plan.tensors, slice(begin, end)
        positions = self.pages.layout.positions[rows]
        return self._target.wrap(
            self.pages.owner(index), tensors.dtypes[rows], tensors.shapes[rows], positions, tensors.nbytes[rows]
        )

    def placeholders(self) -> dict[str, SharedTensor]:
        """{name: what is known of it}"""
        return {name: SharedTensor(self, row) for row, name in enumerate(self.plan.tensors.names)}


class SharedLanding:
    """Shared pages as memory that readers fill. Implements `Landing`.

    The pages stay until nobody uses them, so the limit is about what is read ahead of the caller.
    """

    reads_on_caller = True
    before_each: Callable[[], None] | None = None
    filled: Sequence[str] = ()

    def __init__(self, tables: Tables, sources: Sequence[ByteSource], progress: Progress) -> None:
        self._tables, self._plan, self._pages = tables, tables.plan, tables.pages
        self._sources, self._progress = sources, progress
        self._limit = tables.plan.limits.memory_limit
        self._lock = threading.Lock()
        self._ahead_nbytes = 0
        self._returned: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        """Spans of empty tensors are there: nothing is read for them, so nothing completes them."""
        for index, span in enumerate(self._plan.spans):
            if span.first_read == span.last_read:
                self._pages.announce(index)

    def filling(self) -> Filling:
        return _SharedFilling(Filler(self._plan, self._sources), self._pages, self._sources)

    def provide(self, index: int, span: Span) -> bool:
        del index
        with self._lock:
            if self._ahead_nbytes and self._ahead_nbytes + span.nbytes > self._limit:
                return False
            self._ahead_nbytes += span.nbytes
        self._progress.peak_nbytes += span.nbytes
        return True

    def memory_of(self, read: Read, *, touch: bool = False) -> list[memoryview]:
        end = read.position + landing_nbytes(read)
        if touch:
            self._pages.populate(read.span, read.position, end)
        return [self._pages.view(read.span)[read.position : end]]

    def wait(self) -> None:
        self._returned.get()

    def wake(self) -> None:
        self._returned.put(None)

    def go_on(self) -> None:
        with self._lock:
            self._ahead_nbytes = 0

    def complete(self, index: int, span: Span) -> int:
        del span
        self._pages.announce(index)
        return 0

    def take(self, index: int, span: Span) -> Maker:
        with self._lock:
            self._ahead_nbytes = max(0, self._ahead_nbytes - span.nbytes)
        self._returned.put(None)
        return lambda begin, end: self._tables.make(index, begin, end)

    def close(self) -> None:
        self._pages.leave(Leaving(STOPPED, self._pages.filler, ""))
        self._pages.close()


class _SharedFilling:
    """Fills shared pages, and tells the other ranks where that fails."""

    def __init__(self, filler: Filler, pages: Pages, sources: Sequence[ByteSource]) -> None:
        self._filler, self._sources = filler, sources
        self._pages: Pages | None = pages

    def fill(self, read: Read) -> Hops:
        pages = self._pages
        assert pages is not None, "a reader that has ended does not fill"
        try:
            pages.populate(read.span, read.position, read.position + landing_nbytes(read))
            hops = self._filler.fill(read, SpanMemory(None, [pages.view(read.span)]))
            self._sources[read.shard].check_unchanged()
        except BaseException as exc:
            pages.leave(Leaving(FAILED, pages.filler, f"{type(exc).__name__}: {exc}"))
            raise
        return hops

    def close(self) -> None:
        self._filler.close()
        self._pages = None


class SharedReading:
    """A load on a rank that reads nothing: it hands out what another rank has filled. Has the verbs of an `Engine`.

    Attributes:
        plan: of what is handed out; its reads are another rank's.
        progress: counters.
    """

    def __init__(
        self,
        tables: Tables,
        progress: Progress,
        rename: Callable[[str], str] | None,
        on_progress: Callable[[Snapshot], None] | None,
        on_stop: Callable[[], None] | None,
    ) -> None:
        self.plan, self.progress = tables.plan, progress
        self._tables, self._pages = tables, tables.pages
        self._rename, self._on_progress, self._on_stop = rename, on_progress, on_stop
        self._left = len(tables.pages.layout.spans)
        self._stopped = False

    def start(self) -> None:
        """Nothing to do."""

    def run(self) -> Generator[tuple[str, Any], None, None]:
        """The tensors, (name, tensor) each, in the order of the file.

        Raises:
            PeerError: the rank that reads them failed, stopped or is gone.
            StreamError: `stop` was called meanwhile.
        """
        try:
            for index, (_, first, last) in enumerate(self._pages.layout.spans):
                if self._stopped or not self._pages.wait(index):
                    raise StreamError("the stream is closed")
                if self._on_progress is not None:
                    self._on_progress(self.progress.snapshot())
                yield from self._hand_out(index, first, last)
                self._left -= 1
        finally:
            self.stop()

    def stop(self) -> None:
        """End it. What was handed out stays. May be called twice."""
        if self._stopped:
            return
        self._stopped = True
        self._pages.close()
        self.progress.finish()
        if self._on_stop is not None:
            self._on_stop()

    def check_finished(self) -> None:
        """Raise StreamError if the load was stopped before its end."""
        if self._left:
            raise StreamError("the stream is closed")

    def _hand_out(self, index: int, first: int, last: int) -> Iterator[tuple[str, Any]]:
        tensors = self.plan.tensors
        for begin in range(first, last, _BATCH):
            end = min(begin + _BATCH, last)
            made = self._tables.make(index, begin, end)
            made.reverse()
            for row in range(begin, end):
                name = tensors.names[row] if self._rename is None else self._rename(tensors.names[row])
                self.progress.tensors += 1
                self.progress.tensor_nbytes += tensors.nbytes[row]
                yield name, made.pop()
