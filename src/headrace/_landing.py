"""Where a load's bytes land, and how tensors come of them: what the engine asks of memory, and host memory's answer.

The engine hands out tickets, keeps the order and raises the errors; a `Landing` provides memory for spans, fills it read by
read, and makes the tensors. `HostLanding` is for host memory: readers fill what the caller will hold. `_pipeline` is for
devices with memory of their own. Neither knows which reader does what, and when.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headrace._addresses import Owner, bytes_of, move, owner_at, owner_of
from headrace._filling import Filler, Hops, SpanMemory, landing_nbytes
from headrace._plan import Plan, Read, Span
from headrace._progress import Progress
from headrace._staging import Pool
from headrace.devices.base import Destination, HostTarget
from headrace.errors import PinningError, StreamError
from headrace.sources.base import ByteSource

log = logging.getLogger("headrace")

Maker = Callable[[int, int], list[Any]]


class Filling(Protocol):
    """Carries out reads, one at a time. Every reader has its own."""

    def fill(self, read: Read) -> Hops | None:
        """Read, and do all that has to be done so that the bytes get to their place. Raises what the source raises.

        Returns:
            The way they took; None where somebody else reports to the engine when the read is finished.
        """

    def close(self) -> None:
        """Let go of memory; the traceback of an error may keep this object for long."""


class JoiningFilling(Filling, Protocol):
    """A filling that makes one request of reads that are joined (`Read.joined`)."""

    def fill_together(self, reads: Sequence[Read]) -> list[Hops]:
        """Carry out reads of one range. Otherwise as `fill`."""


class Landing(Protocol):
    """Memory for the spans of one load.

    Attributes:
        reads_on_caller: whether a load of one read may run on the caller's thread.
        before_each: called on the caller's thread before each tensor is handed out; None where there is nothing to do.
        filled: names of the given tensors that have been written completely.
    """

    @property
    def reads_on_caller(self) -> bool: ...
    @property
    def before_each(self) -> Callable[[], None] | None: ...
    @property
    def filled(self) -> Sequence[str]: ...

    def start(self) -> None:
        """The caller's thread asks for the first tensor."""

    def filling(self) -> Filling:
        """For one reader, on its thread."""

    def provide(self, index: int, span: Span) -> bool:
        """Memory for a span; False where the limit does not allow it now. One thread at a time, in the order of the spans."""

    def memory_of(self, read: Read, *, touch: bool = False) -> list[memoryview]:
        """Where a read lands, in host memory that was provided: one piece, or one for each tensor of its span.

        Args:
            touch: fault the memory in first, since others will write to it.
        """

    def wait(self) -> None:
        """Sleep until memory may have come back, or `wake` is called."""

    def wake(self) -> None:
        """End a `wait`, from any thread."""

    def go_on(self) -> None:
        """The caller waits, nothing is ready and nothing in flight: waiting for memory would never end."""

    def complete(self, index: int, span: Span) -> int:
        """The last read of a span is in, and its source unchanged. On the reader's thread.

        Returns:
            Bytes that took one more hop in host memory.
        """

    def take(self, index: int, span: Span) -> Maker:
        """What makes tensors of a finished span, rows `begin` to `end`. The landing lets go of the span's memory here."""

    def close(self) -> None:
        """Forget all memory that no tensor lives in. The readers have ended, but for those that a source holds."""


class HostLanding:
    """Host memory, leased from a pool, or the caller's own."""

    reads_on_caller = True

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[ByteSource],
        target: HostTarget,
        progress: Progress,
        *,
        ownership: str = "leased",
        destinations: Mapping[str, Destination] | None = None,
        mappings: Mapping[int, memoryview] | None = None,
        pin: str = "off",
    ) -> None:
        self.filled: list[str] = []
        self._plan, self._sources, self._target, self._progress = plan, sources, target, progress
        self._ownership, self._pin = ownership, pin
        self._given: Mapping[str, Destination] = destinations or {}
        self._mappings = mappings or {}
        self._said = threading.Lock()
        self._pool = Pool(plan.limits.memory_limit, sum(span.nbytes for span in plan.spans))
        self._memory: dict[int, SpanMemory] = {}
        self._copies: dict[int, list[Any]] = {}
        self._written: set[str] = set()  # given tensors that readers write to and that were not handed out yet
        self._lent: deque[weakref.ref[Owner] | None] | None = deque() if ownership == "borrowed" else None
        self._handed = 0  # borrowed tensors handed out

    @property
    def before_each(self) -> Callable[[], None] | None:
        return None if self._lent is None else self._check_returned

    def start(self) -> None:
        """Nothing to do: memory is taken span by span."""

    # -- the readers' side -----------------------------------------------------------------------------------------------------

    def filling(self) -> Filling:
        return _HostFilling(Filler(self._plan, self._sources), self._memory)

    def provide(self, index: int, span: Span) -> bool:
        if span.given:
            names = self._plan.tensors.names[span.first : span.last]
            self._written.update(names)
            self._memory[index] = SpanMemory(None, [_given(self._given[name]) for name in names])
            return True
        lease = self._pool.lease(span.nbytes)
        if lease is None or lease.owner is None:
            return False
        self._memory[index] = SpanMemory(lease, [bytes_of(lease.owner)])
        return True

    def memory_of(self, read: Read, *, touch: bool = False) -> list[memoryview]:
        memory, end = self._memory[read.span], read.position + landing_nbytes(read)
        if touch and memory.lease is not None:
            memory.lease.populate(read.position, end)
        return memory.views if len(memory.views) > 1 else [memory.views[0][read.position : end]]

    def wait(self) -> None:
        self._pool.wait()

    def wake(self) -> None:
        self._pool.wake()

    def go_on(self) -> None:
        self._pool.count_as_kept()
        self._progress.kept_nbytes = self._pool.kept_nbytes

    def complete(self, index: int, span: Span) -> int:
        copied = 0
        shares = span.last - span.first > 1
        if ((self._ownership == "copied" and shares) or self._pin != "off") and not span.given:
            self._copies[index] = self._copied(index, span)
            copied = sum(self._plan.tensors.nbytes[span.first : span.last])
        if self._given:
            self._fill_given(index, span)
        return copied

    def _fill_given(self, index: int, span: Span) -> None:
        """Those of the given tensors that readers could not write to, and a note of all that are written now."""
        given = self._given
        names = self._plan.tensors.names[span.first : span.last]
        strided = [i for i, name in enumerate(names) if name in given and not span.given]
        if strided:
            memory = self._memory[index]
            made = self._copies.get(index) or self._plain(span.first, span.last, memory.lease.owner if memory.lease else None)
            for i in strided:
                given[names[i]].fill_from(made[i])
            self._copies[index] = made
        self.filled += [name for name in names if name in given]

    def _copied(self, index: int, span: Span) -> list[Any]:
        """Tensors with exactly their own memory, out of a span that they shared."""
        tensors, source = self._plan.tensors, self._memory[index].views[0]
        made = []
        for row in range(span.first, span.last):
            at, nbytes = tensors.positions[row], tensors.nbytes[row]
            tensor, memory = self._allocate(tensors.dtypes[row], tensors.shapes[row], nbytes)
            move(memory, source[at : at + nbytes])
            made.append(tensor)
        return made

    def _allocate(self, dtype: str, shape: Sequence[int], nbytes: int) -> tuple[Any, memoryview]:
        """A tensor's own memory: page-locked where that is wanted and can be had.

        The pool's memory would not do. A caller may drop a tensor while its copy to a device is under way; torch's allocator
        knows of that copy and keeps the memory until it is done, but only of memory that is an allocation of its own.
        """
        if self._pin == "off" or not nbytes:
            return self._target.allocate(dtype, shape, nbytes)
        try:
            found = self._target.allocate(dtype, shape, nbytes, pinned=True)
        except PinningError as exc:
            if self._pin == "require":
                raise
            with self._said:
                if self._pin != "off":
                    self._pin, self._progress.pinned, self._progress.pinned_how = "off", False, f"not page-locked: {exc}"
                    self._progress.degraded.append(f"tensors are not page-locked: {exc}")
                    log.warning("%s", self._progress.degraded[-1])
            return self._target.allocate(dtype, shape, nbytes)
        if self._progress.pinned is None:
            self._progress.pinned, self._progress.pinned_how = True, "page-locked: each tensor an allocation of torch's"
        return found

    # -- the caller's side -----------------------------------------------------------------------------------------------------

    def take(self, index: int, span: Span) -> Maker:
        memory, copies = self._memory.pop(index, None), self._copies.pop(index, None)
        owner = memory.lease.hand_over() if memory is not None and memory.lease is not None else None
        if span.mapped:
            mapping = self._mappings[span.shard]
            owner = owner_of(mapping, 0, mapping.nbytes)
        given = self._given

        def made(begin: int, end: int) -> list[Any]:
            if self._lent is not None and (copies is not None or span.given):
                self._lent.extend([None] * (end - begin))  # nothing that is lent
            if copies is not None:
                tensors = copies[begin - span.first : end - span.first]
                copies[begin - span.first : end - span.first] = [None] * (end - begin)
            else:
                tensors = [None] * (end - begin) if span.given else self._wrap(begin, end, owner)
            if given:
                names = self._plan.tensors.names[begin:end]
                self._written.difference_update(names)
                tensors = [given[name].finish() if name in given else tensor for name, tensor in zip(names, tensors, strict=True)]
            return tensors

        return made

    def close(self) -> None:
        for name in list(self._written):  # also those that were written, perhaps in part, and never handed out
            self._given[name].finish()
        self._written.clear()
        self._progress.peak_nbytes = self._pool.peak_nbytes
        self._memory.clear()
        self._copies.clear()
        self._pool.close()

    def _check_returned(self) -> None:
        """Borrowed: a loop variable still holds the previous tensor as the next is asked for; the one before must be gone."""
        assert self._lent is not None
        if self._handed > 1 and (owner := self._lent.popleft()) is not None and owner() is not None:
            raise StreamError("a borrowed tensor was kept beyond the next step; use ownership='leased', or clone what you keep")
        self._handed += 1

    def _wrap(self, begin: int, end: int, owner: Owner | None) -> list[Any]:
        if self._lent is None or owner is None:
            if self._lent is not None:
                self._lent.extend([None] * (end - begin))
            return self._plain(begin, end, owner)
        return [self._lend(owner, *column) for column in zip(*self._columns(begin, end), strict=True)]

    def _plain(self, begin: int, end: int, owner: Owner | None) -> list[Any]:
        """Tensors that nobody watches."""
        return self._target.wrap(owner, *self._columns(begin, end))

    def _columns(self, begin: int, end: int) -> tuple[list[str], list[Sequence[int]], list[int], list[int]]:
        tensors, rows = self._plan.tensors, slice(begin, end)
        return tensors.dtypes[rows], tensors.shapes[rows], tensors.positions[rows], tensors.nbytes[rows]

    def _lend(self, owner: Owner, dtype: str, shape: Sequence[int], position: int, nbytes: int) -> Any:
        """One tensor with an owner of its own, so that it is known when it is gone."""
        assert self._lent is not None
        own = owner_at(ctypes.addressof(owner) + position, nbytes, owner)
        self._lent.append(weakref.ref(own) if nbytes else None)
        return self._target.wrap(own, [dtype], [shape], [0], [nbytes])[0]


class _HostFilling:
    """A `Filler`, with the memory that its reads go to."""

    def __init__(self, filler: Filler, memory: Mapping[int, SpanMemory]) -> None:
        self._filler, self._memory = filler, memory
        self.close = filler.close

    def fill(self, read: Read) -> Hops:
        return self._filler.fill(read, self._memory[read.span])

    def fill_together(self, reads: Sequence[Read]) -> list[Hops]:
        return self._filler.fill_together(reads, [self._memory[read.span] for read in reads])


def _given(destination: Destination) -> memoryview:
    memory = destination.memory
    assert memory is not None, "destinations without memory of their own are filled from the engine's"
    return memory
