"""Memory that the ranks of one node share: each has a ring of slots that the others map, and take bytes out of.

A ring is a memfd: it has no name, and goes with the last process that maps it, however that one ends. The others open it by way
of /proc, so ranks in different containers, or of different users, do without. A rank writes to no ring but its own, where it
also says how far it is, that it is alive, and when and why it leaves. Who waits for that sleeps on a futex.

The order of a slot's bytes and the count that announces them is kept by the interpreter: it lets go of its lock, and takes it
again, around every copy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any, Final, NamedTuple

from headrace._addresses import move
from headrace._leaving import WELL, Leaving, check_left, gone_error
from headrace.errors import PeerError

SLOTS: Final = 3  # one being filled, one being emptied, one for whoever is late

_NAME: Final = "headrace-ring"
TOKEN_NBYTES: Final = 64
HEAD_NBYTES: Final = 4096
TEXT_AT, TEXT_NBYTES = 512, 1024
_STARTS_AT: Final = 2048  # of each slot, where its bytes begin
MOST_SLOTS: Final = (HEAD_NBYTES - _STARTS_AT) // 4
_HUGE_NBYTES: Final = 2 << 20
NAP_S: Final = 0.05  # how long to sleep before looking whether everybody is still there
_SYSCALL: Final = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98}  # futex
_FUTEX_WAIT_BITSET, _FUTEX_WAKE_BITSET = 9, 10
_ALL: Final = 0xFFFFFFFF


class Head(ctypes.Structure):
    """What a rank says of itself. All counts are of rounds or turns, from 0 on."""

    _fields_ = (
        ("token", ctypes.c_char * TOKEN_NBYTES),
        ("bell", ctypes.c_uint32),  # changes with everything but `done`
        ("filled", ctypes.c_uint32),  # turns whose slots have been filled
        ("done", ctypes.c_uint32),  # the first round of which it may still need a slot
        ("status", ctypes.c_uint32),
        ("blamed", ctypes.c_uint32),
        ("beat", ctypes.c_uint32),
        ("done_bell", ctypes.c_uint32),  # changes with `done` and `status`: who waits for bytes is not woken by who has got them
    )
    bell: int
    filled: int
    done: int
    status: int
    blamed: int
    beat: int
    done_bell: int


class _Ring:
    """One rank's memory, as it is mapped here."""

    def __init__(self, memory: mmap.mmap, slots: int) -> None:
        self.memory, self.head = memory, Head.from_buffer(memory)
        self.bells = {name: ctypes.addressof(self.head) + getattr(Head, name).offset for name in ("bell", "done_bell")}
        self.slots, self._slot_nbytes = slots, (len(memory) - HEAD_NBYTES) // slots
        self._starts = memoryview(memory)[_STARTS_AT : _STARTS_AT + 4 * slots].cast("I")

    def slot(self, turn: int) -> memoryview:
        at = HEAD_NBYTES + turn % self.slots * self._slot_nbytes
        return memoryview(self.memory)[at : at + self._slot_nbytes]

    def begin(self, turn: int, start: int) -> None:
        """Say where the bytes of a slot begin."""
        self._starts[turn % self.slots] = start

    def filled(self, turn: int) -> memoryview:
        """The bytes of a slot."""
        return self.slot(turn)[self._starts[turn % self.slots] :]

    def why(self) -> str:
        text = self.memory[TEXT_AT : TEXT_AT + TEXT_NBYTES]
        return text.rstrip(b"\0").decode(errors="replace")

    def close(self) -> None:
        del self.head
        self._starts.release()
        with suppress(BufferError):  # a copy is under way; the mapping goes when it is over
            self.memory.close()


class NodeMemory:
    """This rank's ring, and those of the others. Made by `share`.

    Attributes:
        own_nbytes, slot_count: of this rank's ring.

    Either a slot is filled by `send`, or in place: by whoever has asked for its `room`, and then says so (`announce`).
    """

    def __init__(self, rank: int, rings: Sequence[tuple[mmap.mmap, int]], processes: Sequence[int], timeout_s: float) -> None:
        self._rank, self._timeout_s = rank, timeout_s
        self._rings = [_Ring(ring, slots) for ring, slots in rings]
        self._own = self._rings[rank]
        self._lock = threading.Lock()  # for the words of this rank's own head
        self._processes = list(processes)
        self._left = False
        self.own_nbytes, self.slot_count = len(self._own.memory) - HEAD_NBYTES, self._own.slots

    def send(self, turn: int, pieces: Sequence[memoryview], *, after: int) -> bool:
        """Fill the slot of this rank's next turn, once all others are done with `after` rounds. False when it leaves instead.

        Raises:
            PeerError: another rank left, or is gone.
        """
        for other in self._rings:
            if other is not self._own and not self._wait_done(other, after):
                return False
        _copy(pieces, self._own.slot(turn), out=False)
        self._say("bell", filled=turn + 1)
        return True

    def room(self, turn: int, *, after: int) -> memoryview | None:
        """The slot of this rank's `turn`-th turn, once all other ranks are done with `after` rounds. Raises as `send`."""
        others = (ring for ring in self._rings if ring is not self._own)
        return self._own.slot(turn) if all(self._wait_done(ring, after) for ring in others) else None

    def begin(self, turn: int, start: int) -> None:
        """Say where in its slot the bytes of a turn begin. Before it is announced."""
        with self._lock:
            if self._rings:
                self._own.begin(turn, start)

    def announce(self, turns: int) -> None:
        """So many turns of this rank's have been filled, from the first one on."""
        self._say("bell", filled=turns)

    def slots(self, rank: int) -> memoryview:
        """All slots of a rank's ring."""
        return memoryview(self._rings[rank].memory)[HEAD_NBYTES:]

    def receive(self, owner: int, turn: int, pieces: Sequence[memoryview]) -> bool:
        """Copy out of the slot of another rank's `turn`-th turn, once it has been filled. False and raises as `send`."""
        slot = self.filled_slot(owner, turn)
        if slot is None:
            return False
        _copy(pieces, slot, out=True)
        return True

    def filled_slot(self, owner: int, turn: int) -> memoryview | None:
        """The slot of another rank's `turn`-th turn, once it has been filled, until `done`. None when this rank leaves instead.

        Raises:
            PeerError: another rank left, or is gone.
        """
        ring = self._rings[owner]
        return ring.filled(turn) if self._wait(ring, "bell", lambda head: head.filled > turn) else None

    def is_filled(self, owner: int, turn: int) -> bool:
        """Whether the slot of another rank's `turn`-th turn has been filled."""
        return bool(self._rings[owner].head.filled > turn)

    def done(self, rounds: int, owners: Iterable[int]) -> None:
        """This rank needs nothing more of the first so many rounds; `owners` have those that are new, and may wait for that."""
        whom = 0
        for owner in owners:
            whom |= _bit(owner)
        self._say("done_bell", whom=whom, done=rounds)

    def leave(self, leaving: Leaving) -> None:
        """Tell the others that this rank takes no part any more, and end its own waiting."""
        self._left = True
        text = leaving.why.encode()[:TEXT_NBYTES]
        with self._lock:
            if not self._rings:
                return
            self._own.memory[TEXT_AT : TEXT_AT + len(text)] = text
        self._say("bell", "done_bell", blamed=leaving.blamed, status=leaving.status)

    def beat(self) -> None:
        """Give a sign of life."""
        with self._lock:
            if self._rings:
                self._own.head.beat = (self._own.head.beat + 1) % (1 << 32)

    def close(self) -> None:
        """Unmap. The others keep what they have mapped. May be called twice."""
        with self._lock:
            rings, processes = list(self._rings), list(self._processes)
            self._rings.clear()
            self._processes.clear()
        for ring in rings:
            ring.close()
        for fd in processes:
            os.close(fd)

    def _say(self, *bells: str, whom: int = _ALL, **words: int) -> None:
        with self._lock:
            if not self._rings:
                return
            head = self._own.head
            for name, value in words.items():
                setattr(head, name, value)
            for bell in bells:
                setattr(head, bell, (getattr(head, bell) + 1) % (1 << 32))
                wake(self._own.bells[bell], whom)

    def _wait_done(self, ring: _Ring, rounds: int) -> bool:
        return self._wait(ring, "done_bell", lambda head: head.done >= rounds)

    def _wait(self, ring: _Ring, bell: str, is_so: Callable[[Head], bool]) -> bool:
        """Until another rank's head says so. False when this rank leaves; PeerError when another one does."""
        if is_so(ring.head) and not self._left:
            return True
        beats = [other.head.beat for other in self._rings]
        since = looked = time.monotonic()
        while True:
            rung, now, gone = getattr(ring.head, bell), time.monotonic(), list[int]()
            if now - looked >= NAP_S:  # who is there is looked at now and then: it costs more than all of the rest
                gone, looked = self._ended(), now  # asked before they are asked what they said last
            if self._left:
                return False
            if is_so(ring.head):
                return True
            self._check_others(gone)
            if now - since > self._timeout_s:
                self._check_beats(beats)
                beats, since = [other.head.beat for other in self._rings], now
            sleep(ring.bells[bell], rung, NAP_S, _bit(self._rank))

    def _ended(self) -> list[int]:
        """Ranks whose processes have ended."""
        ended = select.poll()  # one of its own: two threads must not use one at once
        for fd in self._processes:
            ended.register(fd, select.POLLIN)
        return [self._processes.index(fd) for fd, _ in ended.poll(0)]

    def _check_others(self, gone: Sequence[int]) -> None:
        for rank, other in enumerate(self._rings):
            if rank != self._rank and other.head.status != WELL:
                check_left(Leaving(other.head.status, other.head.blamed, other.why()), rank)
        if gone:
            raise gone_error(gone[0])

    def _check_beats(self, before: Sequence[int]) -> None:
        for rank, (other, beat) in enumerate(zip(self._rings, before, strict=True)):
            if other.head.beat == beat and rank != self._rank:
                raise PeerError(f"rank {rank} gave no sign of life for {self._timeout_s:g} s", rank=rank)


def share(
    rank: int, gather: Callable[[Any], list[Any]], slot_nbytes: int, timeout_s: float, slots: int = SLOTS
) -> NodeMemory | None:
    """Share memory with all other ranks; None where that cannot be, on any of them. Collective.

    Args:
        rank: this rank.
        gather: gives something of every rank's to every rank.
        slot_nbytes: the most that one round moves.
        timeout_s: how long a rank may give no sign of life.
        slots: of this rank's ring; the others' may have more or fewer.
    """
    with ExitStack() as stack:
        invitation, ring = invite(HEAD_NBYTES + slots * slot_nbytes, stack, slots=slots)
        invitations: list[Invitation | None] = gather(invitation)
        rings, processes = [], list[int]()
        if ring is not None:
            with suppress(OSError, ValueError):
                rings = [ring if other == rank else open_ring(found, stack) for other, found in enumerate(invitations)]
                processes = [watch(found, stack) for found in invitations if found is not None]
        # A second round: the descriptors stay open until all that were asked to come have come.
        if not all(gather(len(processes) == len(invitations))):
            return None
        stack.pop_all()
        if invitation is not None:
            os.close(invitation.fd)
        counts = [found.slots for found in invitations if found is not None]
        return NodeMemory(rank, list(zip(rings, counts, strict=True)), processes, timeout_s)


class Invitation(NamedTuple):
    """Where another rank finds this one's ring."""

    pid: int
    fd: int
    nbytes: int
    token: bytes
    slots: int


def invite(nbytes: int, stack: ExitStack, *, slots: int = 1) -> tuple[Invitation | None, mmap.mmap | None]:
    """Memory that other processes can open, and where they find it; None where there can be none. `stack` keeps both open."""
    token = os.urandom(TOKEN_NBYTES)
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        stack.callback(os.close, fd)
        os.ftruncate(fd, nbytes)
        ring = stack.enter_context(closing(_mapped(fd, nbytes)))
    except (OSError, ValueError):
        return None, None
    ring[:TOKEN_NBYTES] = token
    return Invitation(os.getpid(), fd, nbytes, token, slots), ring


def open_ring(invitation: Invitation | None, stack: ExitStack) -> mmap.mmap:
    """Another rank's ring. Raises OSError or ValueError where there is none: on another node its pid means nothing."""
    if invitation is None:
        raise ValueError("it has none")
    path = f"/proc/{invitation.pid}/fd/{invitation.fd}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise ValueError("that is another process")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        ring = stack.enter_context(closing(_mapped(fd, invitation.nbytes)))  # ValueError where it is shorter
    finally:
        os.close(fd)
    if ring[:TOKEN_NBYTES] != invitation.token:
        raise ValueError("that is another ring")
    return ring


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    """Shared memory, in huge pages where the system grants them (transparent_hugepage/shmem_enabled is "never" by default)."""
    memory = mmap.mmap(fd, nbytes)
    if nbytes >= _HUGE_NBYTES:
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def watch(invitation: Invitation, stack: ExitStack) -> int:
    """A descriptor that can be read when the process has ended, also while nobody has waited for it."""
    fd = os.pidfd_open(invitation.pid)
    stack.callback(os.close, fd)
    return fd


def _copy(pieces: Sequence[memoryview], slot: memoryview, *, out: bool) -> None:
    at = 0
    for piece in pieces:
        if piece.nbytes:
            part = slot[at : at + piece.nbytes]
            move(*((piece, part) if out else (part, piece)))
            at += piece.nbytes


# ---- futex


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_number = _SYSCALL.get(platform.machine())


def _bit(rank: int) -> int:
    """Of those who sleep on a word, the ranks that are woken together."""
    return 1 << rank % 32


def sleep(address: int, value: int, seconds: float, who: int = _ALL) -> None:
    """Until somebody wakes one of `who` at this address, its word is no longer `value`, or the time is over."""
    if _number is None:
        threading.Event().wait(min(seconds, 0.001))
        return
    until = time.monotonic() + seconds  # FUTEX_WAIT_BITSET takes a point in time (futex(2))
    timeout = _Timespec(int(until), int(until % 1 * 1e9))
    _libc.syscall(
        _number,
        ctypes.c_void_p(address),
        _FUTEX_WAIT_BITSET,
        ctypes.c_uint32(value),
        ctypes.byref(timeout),
        ctypes.c_void_p(0),
        ctypes.c_uint32(who),
    )


def wake(address: int, whom: int = _ALL) -> None:
    """All that sleep at this address as one of `whom`."""
    if _number is not None and whom:
        _libc.syscall(
            _number,
            ctypes.c_void_p(address),
            _FUTEX_WAKE_BITSET,
            1 << 30,
            ctypes.c_void_p(0),
            ctypes.c_void_p(0),
            ctypes.c_uint32(whom),
        )
