"""Ranks of one node that load to devices together: each chunk is read by one of them, and reaches every rank's staging slots.

The rank that owns a read fills a slot of its ring and puts a copy of it into the memory that the node shares (`_node`); the
others take it from there into slots of theirs, and from the slots on all go the same way. The threads that do it are the
readers: they take reads in the plan's order on every rank, so whoever waits for another rank waits for an earlier read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Final

from headrace import _node
from headrace._exchange import Share, describe, digest_of, share_reads
from headrace._filling import Hops, SlotFiller, landing_nbytes
from headrace._node import FAILED, SLOTS, STOPPED, Leaving, NodeMemory
from headrace._peers import Peers
from headrace._plan import Plan, Read
from headrace._progress import Progress
from headrace.errors import HeadraceError, OptionError, PeerError, StreamError
from headrace.sources.base import ByteSource

_BEAT_S: Final = 2.0


def join_relay(
    peers: Peers, plan: Plan, sources: Sequence[ByteSource], sliced: Iterable[str], policy: str, progress: Progress
) -> Relay:
    """Agree with the other ranks on who reads what. Arguments as of `_exchange.join_group`.

    Raises:
        PeerError: another rank failed, or is about to load something else.
        OptionError: the ranks do not share memory.
    """
    all_sliced = frozenset(name for names in peers.gather(sorted(sliced)) for name in names)
    share = share_reads(plan, all_sliced, peers.rank, peers.size, policy)
    peers.agree(plan=digest_of(plan, share))
    slot_nbytes = max((landing_nbytes(plan.reads[i]) for i in share.rounds), default=0)
    node = _node.share(peers.rank, peers.gather, slot_nbytes, peers.timeout_s)
    if node is None:
        raise OptionError(
            "group= loads to devices among the ranks of one node only, and these do not share memory", option="group"
        )
    describe(progress, peers, plan, share, policy, over_memory=True)
    return Relay(plan, sources, share, peers, node, progress)


class Relay:
    """Fills slots from the source, or from the rank that owns a read. Used by all readers of a rank."""

    def __init__(
        self, plan: Plan, sources: Sequence[ByteSource], share: Share, peers: Peers, node: NodeMemory, progress: Progress
    ) -> None:
        self._sources, self._share, self._peers, self._node, self._progress = sources, share, peers, node, progress
        self._round_of = {(plan.reads[i].span, plan.reads[i].position): k for k, i in enumerate(share.rounds)}
        self._own_rounds = [k for k, owner in enumerate(share.owners) if owner == peers.rank]
        turns = [0] * peers.size
        self._turn_of: list[int] = []  # of each round, the how-manieth of its owner
        for owner in share.owners:
            self._turn_of.append(turns[owner])
            turns[owner] += 1
        self._state = threading.Condition()  # guards what follows
        self._next_turn = 0  # of this rank's, to be put into shared memory
        self._done: set[int] = set()  # rounds beyond the first one that is not done with
        self._first = 0
        self._left = False
        self._error: BaseException | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="headrace-beat", daemon=True).start()

    def fill_slot(self, filler: SlotFiller, read: Read, slot: memoryview) -> tuple[memoryview, Hops]:
        """As `SlotFiller.fill_slot`.

        Raises:
            PeerError: another rank failed, stopped or is gone. What the source raises, after the others were told.
        """
        k = self._round_of.get((read.span, read.position))
        try:
            if k is None:
                return filler.fill_slot(read, slot)
            if self._share.owners[k] == self._peers.rank:
                data, hops = filler.fill_slot(read, slot)
                self._sources[read.shard].check_unchanged()  # before the bytes go to others
                self._put(k, data)
                self._progress.to_peers_nbytes += data.nbytes * (self._peers.size - 1)
            else:
                data, hops = slot[: landing_nbytes(read)], Hops(received_nbytes=read.nbytes)
                if not self._node.receive(self._share.owners[k], self._turn_of[k], [data]):
                    raise self._reason()
                self._progress.from_peers_nbytes += data.nbytes
        except BaseException as exc:
            with self._state:
                self._error = self._error or exc
            self.leave(FAILED, f"{type(exc).__name__}: {exc}", exc.rank if isinstance(exc, PeerError) else None)
            raise
        self._finish(k)
        return data, hops

    def leave(self, status: int, why: str, blamed: int | None = None) -> None:
        """Tell the others that this rank takes no part any more; the first reason counts, while there is something left to do."""
        with self._state:
            if self._left or self._first == len(self._share.owners):
                return
            self._left = True
            self._state.notify_all()
        self._node.leave(Leaving(status, self._peers.rank if blamed is None else blamed, why))

    def close(self) -> None:
        """The load is over. May be called twice."""
        self.leave(STOPPED, "")
        if not self._closed.is_set():
            self._closed.set()
            self._node.close()
            self._peers.close()

    def _put(self, k: int, data: memoryview) -> None:
        turn = self._turn_of[k]
        with self._state:
            while self._next_turn != turn and not self._left:
                self._state.wait()
        after = self._own_rounds[turn - SLOTS] + 1 if turn >= SLOTS else 0
        if self._left or not self._node.send(turn, [data], after=after):
            raise self._reason()
        with self._state:
            self._next_turn += 1
            self._state.notify_all()

    def _reason(self) -> BaseException:
        """What ends a reader that waits for another rank: the error of the reader that failed first."""
        with self._state:
            failed = self._error
        if isinstance(failed, HeadraceError):
            return copy(failed).with_traceback(None)
        return StreamError("the stream is closed")

    def _finish(self, k: int) -> None:
        with self._state:
            self._done.add(k)
            while self._first in self._done:
                self._done.remove(self._first)
                self._first += 1
            first = self._first
        self._node.done(first)

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            self._node.beat()
