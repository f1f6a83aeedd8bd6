"""Pages that the ranks of a node have in common: one of them fills them, span by span, and the others read the same memory.

They are a memfd (`_node`), so nothing is left of them when the last process that maps them has ended. In front of the bytes
stand the layout, so that a rank that only reads needs to know nothing of how they are filled, and a flag for each span. Where
ranks are on several nodes, the first rank of each node fills that node's.

Nobody writes to pages that are filled: a filled span is mapped read-only, and everything is in the ranks that do not fill.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final, NamedTuple

from headrace._addresses import Owner, owner_at, view_at
from headrace._leaving import WELL, Leaving, beat_s, check_left, gone_error
from headrace._node import (
    HEAD_NBYTES,
    NAP_S,
    TEXT_AT,
    TEXT_NBYTES,
    Head,
    Invitation,
    invite,
    open_ring,
    sleep,
    wake,
    watch,
)
from headrace.errors import DeviceMemoryError, PeerError

_PAGE: Final = mmap.PAGESIZE
_POPULATE_WRITE: Final = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Layout(NamedTuple):
    """What lies where.

    Attributes:
        spans: (bytes, first row, last row) of each, rows as of the plan's tensors.
        positions: of each row, from the start of its span.
    """

    spans: Sequence[tuple[int, int, int]]
    positions: Sequence[int]

    def pack(self) -> bytes:
        """As numbers of 8 bytes."""
        return array("Q", [len(self.spans), *(number for span in self.spans for number in span), *self.positions]).tobytes()

    @classmethod
    def unpack(cls, packed: memoryview) -> Layout:
        """What was packed."""
        numbers = array("Q")
        numbers.frombytes(packed)
        count = numbers[0]
        spans = [(numbers[at], numbers[at + 1], numbers[at + 2]) for at in range(1, 1 + 3 * count, 3)]
        return cls(spans, numbers[1 + 3 * count :].tolist())


class _Places(NamedTuple):
    """Offsets in the memory: the packed layout comes right behind the head."""

    layout_end: int
    flags: int
    spans: list[int]
    nbytes: int


class Pages:
    """The pages as this process maps them. Made by `share_pages`.

    Attributes:
        fills: whether this process fills them.
        filler: the rank that does.
        layout: what lies where.
        nbytes: of all spans.
    """

    def __init__(
        self, memory: mmap.mmap, layout: Layout, *, fills: bool, filler: int, process: int | None, timeout_s: float
    ) -> None:
        self.layout, self.fills, self.filler = layout, fills, filler
        self.nbytes = sum(nbytes for nbytes, _, _ in layout.spans)
        self._memory, self._places = memory, _places(layout)
        self._head = Head.from_buffer(memory)
        self._address = ctypes.addressof(self._head)
        self._process, self._timeout_s = process, timeout_s
        self._lock = threading.Lock()  # for the words of the head
        self._left = self._ended = False
        self._filled = 0
        if not fills:
            _protect(self._address, len(memory))
            return
        self._closed = threading.Event()
        beating = (self._closed, self._lock, self._head, beat_s(timeout_s) if timeout_s else None)
        threading.Thread(target=_beat, args=beating, name="headrace-beat", daemon=True).start()

    # -- for the rank that fills -------------------------------------------------------------------------------------------------

    def view(self, index: int) -> memoryview:
        """A span's memory, in whole pages, to be filled."""
        return view_at(self._address + self._places.spans[index], _whole_pages(self.layout.spans[index][0]), self._memory)

    def populate(self, index: int, start: int, end: int) -> None:
        """Fault in bytes of a span that are about to be filled."""
        begin = self._places.spans[index] + start - start % _PAGE
        _libc.madvise(self._address + begin, self._places.spans[index] + _whole_pages(end) - begin, _POPULATE_WRITE)

    def announce(self, index: int) -> None:
        """A span is filled. Nobody writes to it from here on."""
        _protect(self._address + self._places.spans[index], _whole_pages(self.layout.spans[index][0]))
        with self._lock:
            self._memory[self._places.flags + index] = 1
            self._filled += 1
            self._ring()

    def leave(self, leaving: Leaving) -> None:
        """Tell the others that this rank fills no more. The first reason counts, and only while spans are missing."""
        with self._lock:
            if not self.fills or self._left or self._filled == len(self.layout.spans):
                return
            self._left = True
            text = leaving.why.encode()[:TEXT_NBYTES]
            self._memory[TEXT_AT : TEXT_AT + len(text)] = text
            self._head.blamed, self._head.status = leaving.blamed, leaving.status
            self._ring()

    # -- for everybody -----------------------------------------------------------------------------------------------------------

    def is_filled(self, index: int) -> bool:
        """Whether a span can be read."""
        return self._memory[self._places.flags + index] == 1

    def wait(self, index: int, timeout_s: float | None = None) -> bool:
        """Until a span is filled. False when `close` was called meanwhile, or the time is over.

        Raises:
            PeerError: the rank that fills it left, is gone or gives no sign of life.
        """
        beat, since = self._head.beat, time.monotonic()
        until = None if timeout_s is None else since + timeout_s
        while not self.is_filled(index):
            bell, now = self._head.bell, time.monotonic()
            if self._ended or (until is not None and now >= until):
                return False
            if not self.fills:
                self._check_filler(index)
                if now - since > self._timeout_s:
                    if self._head.beat == beat:
                        raise PeerError(f"rank {self.filler} gave no sign of life for {self._timeout_s:g} s", rank=self.filler)
                    beat, since = self._head.beat, now
            if self.is_filled(index):
                break
            sleep(self._address + Head.bell.offset, bell, NAP_S)  # type: ignore[attr-defined]
        return True

    def owner(self, index: int) -> Owner:
        """What tensors of a span are made of; the pages live as long as it does."""
        return owner_at(self._address + self._places.spans[index], _whole_pages(self.layout.spans[index][0]), self._memory)

    def close(self) -> None:
        """The load is over; what was handed out stays. May be called twice."""
        self._ended = True
        if self.fills:
            self._closed.set()
        process, self._process = self._process, None
        if process is not None:
            os.close(process)

    def _ring(self) -> None:
        self._head.bell = (self._head.bell + 1) % (1 << 32)
        wake(self._address + Head.bell.offset)  # type: ignore[attr-defined]

    def _check_filler(self, index: int) -> None:
        ended = select.poll()
        if self._process is not None:
            ended.register(self._process, select.POLLIN)
        is_gone = ended.poll(0)  # asked before it is asked what it said last
        if self._head.status != WELL:
            why = self._memory[TEXT_AT : TEXT_AT + TEXT_NBYTES].rstrip(b"\0").decode(errors="replace")
            check_left(Leaving(self._head.status, self._head.blamed, why), self.filler)
        if is_gone and not self.is_filled(index):
            raise gone_error(self.filler)


def _beat(closed: threading.Event, lock: threading.Lock, head: Head, every_s: float | None) -> None:
    while not closed.wait(every_s):
        with lock:
            head.beat = (head.beat + 1) % (1 << 32)


def share_pages(
    layout: Layout, *, rank: int = 0, gather: Callable[[Any], list[Any]] | None = None, timeout_s: float = 0.0
) -> Pages:
    """Pages for all ranks of this node; those of this process alone where `gather` is None. Collective otherwise.

    Args:
        layout: as this rank would fill them.
        rank: this rank.
        gather: gives something of every rank's to every rank.
        timeout_s: how long the rank that fills may give no sign of life.

    Raises:
        DeviceMemoryError: the system has no such memory.
    """
    places = _places(layout)
    with ExitStack() as own, ExitStack() as opened:
        invitation, memory = invite(places.nbytes, own)
        if memory is not None:
            memory[HEAD_NBYTES : places.layout_end] = layout.pack()
        filler, process = rank, None
        if gather is not None:
            invitations: list[Invitation | None] = gather(invitation)
            for other, found in enumerate(invitations[:rank]):
                with suppress(OSError, ValueError):
                    memory, process, filler = *_opened(found, opened), other
                    break
            gather(None)  # the descriptors stay open until all that wanted to come have come
        if memory is None:
            raise DeviceMemoryError(
                f"the system refuses {places.nbytes:,} bytes of shared memory", device="shared-cpu", requested=places.nbytes
            )
        opened.pop_all()
        if filler != rank:  # and this rank's own memory goes
            return Pages(memory, _layout_in(memory), fills=False, filler=filler, process=process, timeout_s=timeout_s)
        assert invitation is not None
        own.pop_all()
        os.close(invitation.fd)
        return Pages(memory, layout, fills=True, filler=rank, process=None, timeout_s=timeout_s)


def _opened(invitation: Invitation | None, stack: ExitStack) -> tuple[mmap.mmap, int]:
    with ExitStack() as attempt:
        memory = open_ring(invitation, attempt)
        assert invitation is not None
        process = watch(invitation, attempt)
        stack.push(attempt.pop_all())
    return memory, process


def _layout_in(memory: mmap.mmap) -> Layout:
    count = int.from_bytes(memory[HEAD_NBYTES : HEAD_NBYTES + 8], "little")
    rows = max((int.from_bytes(memory[at + 16 : at + 24], "little") for at in _span_places(count)), default=0)
    return Layout.unpack(memoryview(memory[HEAD_NBYTES : HEAD_NBYTES + 8 * (1 + 3 * count + rows)]))


def _span_places(count: int) -> Iterator[int]:
    return iter(range(HEAD_NBYTES + 8, HEAD_NBYTES + 8 + 24 * count, 24))


def _places(layout: Layout) -> _Places:
    layout_end = HEAD_NBYTES + 8 * (1 + 3 * len(layout.spans) + len(layout.positions))
    at, spans = _whole_pages(layout_end + len(layout.spans)), []
    for nbytes, _, _ in layout.spans:
        spans.append(at)
        at += _whole_pages(nbytes)
    return _Places(layout_end, layout_end, spans, at)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _protect(address: int, nbytes: int) -> None:
    if nbytes and _libc.mprotect(address, nbytes, mmap.PROT_READ):
        raise OSError(ctypes.get_errno(), "mprotect")
