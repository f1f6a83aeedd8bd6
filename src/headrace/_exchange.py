"""Ranks load together: each byte is read from storage by one of them, and comes to the others from there.

All ranks have the same plan, and take its reads in the same order. Each read has an owner. The owner's reader fills its memory
from the source, the others only provide theirs; then it is exchanged, on threads of their own while readers go on, and all of
them finish the read. Slices of whole rows are read by each rank for itself.

Ranks of one node copy out of each other's memory (`_node`). Ranks of several broadcast over the group, and with every broadcast
the owner says whether it is well: a rank that stops or fails keeps on taking part until it is its turn to say so, so that no
rank waits for one that has gone.

Tensors of which ranks take columns are read in blocks (`_blocks`). On one node they are exchanged as they lie in the file, and
every rank takes its part out of each; over the group the owner takes them apart, and sends every rank its part alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch

from headrace import _node
from headrace._blocks import Blocks, Cutout, Packing
from headrace._cast import copy_cutout
from headrace._filling import Hops, SlotFiller, landing_nbytes
from headrace._landing import Filling, Landing, Maker
from headrace._leaving import FAILED, STOPPED, Leaving, blame_for, check_status, start_beating, status_of
from headrace._node import SLOTS, NodeMemory
from headrace._owners import Share, describe, digest_of, share_reads
from headrace._peers import Peers
from headrace._plan import Copy, Plan, Read, Span
from headrace._progress import Progress
from headrace._rounds import Report
from headrace._staging import PAGE, Region
from headrace.sources.base import ByteSource

_LEAVE_S: Final = 1.0  # how long `close` waits for this rank's turn to say that it stops
_ROOMS: Final = SLOTS + 2  # blocks that this rank has read and that were not exchanged yet


def join_group(
    peers: Peers,
    inner: Landing,
    plan: Plan,
    sources: Sequence[ByteSource],
    sliced: frozenset[str],
    blocks: Blocks,
    policy: str,
    progress: Progress,
) -> GroupLanding:
    """Agree with the other ranks on who reads what, and share the memory of `inner` with them.

    Args:
        sliced: names of tensors that any rank takes a slice of; each rank reads them for itself.
        blocks: those that are read in blocks instead.
        policy: see `share_reads`.

    Raises:
        PeerError: another rank failed, or is about to load something else.
    """
    share = share_reads(plan, sliced - blocks.names, peers.rank, peers.size, policy)
    peers.agree(plan=digest_of(plan, share, blocks.names))
    slot_nbytes = max((landing_nbytes(plan.reads[i]) for i in share.rounds), default=0)
    node = _node.share(peers.rank, partial(peers.gather, about="rings"), slot_nbytes, peers.timeout_s)
    if node is None:
        peers.connect()
    describe(progress, peers, plan, share, policy, over_memory=node is not None)
    return GroupLanding(inner, _Exchange(plan, share, blocks, peers, node, progress), sources)


class _Offer(NamedTuple):
    """Memory of a read: filled where the rank owns the read, to be filled where it does not."""

    read: Read
    memory: list[memoryview]
    hops: Hops
    part: _Part | None = None

    def take_part(self, block: memoryview) -> None:
        """What this rank takes out of a block, into its tensor."""
        assert self.part is not None
        for cutout in self.part.cutouts:
            copy_cutout(block, self.part.memory, cutout, self.part.copy)

    def take_packed(self, data: memoryview, packing: Packing) -> None:
        """The same, after another rank has taken it out of the block."""
        assert self.part is not None
        copy_cutout(data, self.part.memory, packing.unpack(), Copy(packing.dtype, self.part.copy.target))


class _Part(NamedTuple):
    """What a rank takes out of a block: into which tensor's memory, and converted how."""

    memory: memoryview
    cutouts: list[Cutout]
    copy: Copy


class GroupLanding:
    """Another landing's memory, filled by whichever rank owns a read. Implements `Landing`."""

    reads_on_caller = False

    def __init__(self, inner: Landing, exchange: _Exchange, sources: Sequence[ByteSource]) -> None:
        self._inner, self._exchange, self._sources = inner, exchange, sources

    @property
    def before_each(self) -> Callable[[], None] | None:
        return self._inner.before_each

    @property
    def filled(self) -> Sequence[str]:
        return self._inner.filled

    def report_to(self, report: Report) -> None:
        """Who is told of reads that came in, and of ranks that failed. Before the start."""
        self._exchange.report = report

    def start(self) -> None:
        self._inner.start()
        self._exchange.begin()

    def stand_by(self) -> None:
        """Give signs of life from here on, though it may take a while until anything is read."""
        self._exchange.begin()

    def filling(self) -> Filling:
        return _GroupFilling(self._inner, self._exchange, self._sources)

    def provide(self, index: int, span: Span) -> bool:
        return self._inner.provide(index, span)

    def memory_of(self, read: Read, *, touch: bool = False) -> list[memoryview]:
        return self._inner.memory_of(read, touch=touch)

    def wait(self) -> None:
        self._inner.wait()

    def wake(self) -> None:
        self._inner.wake()

    def go_on(self) -> None:
        self._inner.go_on()

    def complete(self, index: int, span: Span) -> int:
        return self._inner.complete(index, span)

    def take(self, index: int, span: Span) -> Maker:
        return self._inner.take(index, span)

    def close(self) -> None:
        self._exchange.leave(STOPPED, "")
        self._exchange.end()
        self._inner.close()


class _GroupFilling:
    """Reads what this rank owns; of the rest only the memory is offered."""

    def __init__(self, inner: Landing, exchange: _Exchange, sources: Sequence[ByteSource]) -> None:
        self._inner, self._exchange, self._sources = inner, exchange, sources
        self._filling = inner.filling()
        self._blocks = SlotFiller(exchange.plan, sources)

    def close(self) -> None:
        self._filling.close()
        self._blocks.close()

    def fill(self, read: Read) -> Hops | None:
        k = self._exchange.round_of(read)
        try:
            if k is None:
                return self._filling.fill(read)
            if (read.span, read.position) in self._exchange.blocks.cutouts:
                self._offer_block(k, read)
                return None
            hops: Hops | None = Hops(received_nbytes=read.nbytes)
            owns = self._exchange.owns(k)
            if owns:
                hops = self._filling.fill(read)
                self._sources[read.shard].check_unchanged()  # before the bytes go to others
            assert hops is not None, "only host memory is exchanged"
            self._exchange.offer(k, _Offer(read, self._inner.memory_of(read, touch=not owns), hops))
        except BaseException as exc:
            self._exchange.leave(FAILED, *blame_for(exc))
            raise
        return None

    def _offer_block(self, k: int, read: Read) -> None:
        """A block of rows: read into memory of its own where this rank owns it, and only the place for its part where not."""
        part = self._part_of(read)
        if not self._exchange.owns(k):
            self._exchange.offer(k, _Offer(read, [], Hops(received_nbytes=read.nbytes), part))
            return
        room = self._exchange.rent(k)
        if room is None:
            return
        data, hops = self._blocks.fill_slot(read, room.view)
        self._sources[read.shard].check_unchanged()
        counted = Hops(hops.direct_nbytes, read.nbytes)
        self._exchange.offer(k, _Offer(read, [data], counted, part))

    def _part_of(self, read: Read) -> _Part:
        plan, blocks = self._exchange.plan, self._exchange.blocks
        tensors, row = plan.tensors, blocks.rows[read.span]
        whole = Read(read.shard, 0, tensors.nbytes[row], read.span, tensors.positions[row])
        (memory,) = self._inner.memory_of(whole, touch=read.position == 0)
        copy = Copy(tensors.sources[row], tensors.dtypes[row])
        return _Part(memory, blocks.cutouts[read.span, read.position], copy)


class _Exchange:
    """The rounds: of each, memory is offered by readers, exchanged, and reported as finished.

    Attributes:
        report: the engine.
    """

    def __init__(
        self, plan: Plan, share: Share, blocks: Blocks, peers: Peers, node: NodeMemory | None, progress: Progress
    ) -> None:
        self.report: Report | None = None
        self.plan, self.blocks = plan, blocks
        self._share, self._peers, self._node, self._progress = share, peers, node, progress
        self._others = [rank for rank in range(peers.size) if rank != peers.rank]
        self._round_of = {(plan.reads[i].span, plan.reads[i].position): k for k, i in enumerate(share.rounds)}
        self._own_rounds = [k for k, owner in enumerate(share.owners) if owner == peers.rank]
        own_blocks = [k for k in self._own_rounds if plan.reads[share.rounds[k]].span in blocks.rows]
        self._block_turns = {k: turn for turn, k in enumerate(own_blocks)}
        self._room_nbytes = max((plan.reads[share.rounds[k]].nbytes for k in own_blocks), default=0)
        self._rooms: list[Region | None] = [None] * _ROOMS  # made when they are first needed
        self._state = threading.Condition()  # guards what follows
        self._offers: dict[int, _Offer] = {}
        self._blocks_sent = 0
        self._leaving: Leaving | None = None
        self._begun = False
        self._running = 0
        self._ended = threading.Event()

    # -- for the landing and its readers ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the threads, once."""
        work = [self._over_group] if self._node is None else [self._send_rounds, self._receive_rounds]
        with self._state:
            if self._begun:
                return
            self._begun, self._running = True, len(work)
        for function in work:
            threading.Thread(target=self._run, args=(function,), name="headrace-exchange", daemon=True).start()
        start_beating(self._ended, self._peers.timeout_s, self._peers.beat if self._node is None else self._node.beat)

    def end(self) -> None:
        """Wait for the threads: for long enough to tell the others, and not for the others' callers.

        Over a group this rank's turn to say that it leaves may be far off. The thread goes on until then, with scratch memory.
        """
        self.begin()  # also where no tensor was ever asked for: the others have to hear of it
        self._ended.wait(_LEAVE_S)

    def round_of(self, read: Read) -> int | None:
        """The round in which a read is exchanged; None for one that each rank does for itself."""
        return self._round_of.get((read.span, read.position))

    def owns(self, k: int) -> bool:
        """Whether this rank reads it."""
        return self._share.owners[k] == self._peers.rank

    def offer(self, k: int, offer: _Offer) -> None:
        """The memory of a read is there."""
        with self._state:
            if self._leaving is None:
                self._offers[k] = offer
            self._state.notify_all()

    def rent(self, k: int) -> Region | None:
        """Memory for a block that this rank reads, until it has been exchanged. None when this rank takes no part any more.

        In the order of the rounds: were a later block to have the memory that an earlier one waits for, none would go on.
        """
        turn = self._block_turns[k]
        with self._state:
            while self._blocks_sent <= turn - _ROOMS and self._leaving is None:
                self._state.wait()
            if self._leaving is not None:
                return None
        room = self._rooms[turn % _ROOMS] = self._rooms[turn % _ROOMS] or Region(self._room_nbytes + 2 * PAGE)
        return room

    def leave(self, status: int, why: str, blamed: int | None = None) -> None:
        """Take no part any more but to say so. The first reason counts, and only while there is something left to do.

        Args:
            blamed: the rank that is the reason; None where it is this one.
        """
        with self._state:
            if self._leaving is not None or self._ended.is_set():
                return
            self._leaving = leaving = Leaving(status, self._peers.rank if blamed is None else blamed, why)
            self._offers.clear()
            if self._node is not None:
                self._node.leave(leaving)  # before the threads hear of it: the last one to end closes what this is written to
            self._state.notify_all()

    # -- threads ---------------------------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - the caller's thread raises it
            self.leave(FAILED, *blame_for(exc))
            if self.report is not None:
                self.report.fail(exc)
        finally:
            with self._state:
                self._running -= 1
                last = not self._running
            if last:
                self._offers.clear()
                self._rooms.clear()
                if self._node is not None:
                    self._node.close()
                self._peers.close()
                self._ended.set()

    def _await_offer(self, k: int) -> _Offer | None:
        with self._state:
            while k not in self._offers and self._leaving is None:
                self._state.wait()
            return self._offers.pop(k, None)

    def _finish(self, offer: _Offer, *, sent: bool, nbytes: int | None = None) -> None:
        """A read is done. `nbytes`: what moved, if it was not all of the read to every rank."""
        if nbytes is None:
            nbytes = landing_nbytes(offer.read) * (self._peers.size - 1 if sent else 1)
        if sent:
            self._progress.to_peers_nbytes += nbytes
        else:
            self._progress.from_peers_nbytes += nbytes
        if sent and offer.part is not None:
            with self._state:
                self._blocks_sent += 1
                self._state.notify_all()
        assert self.report is not None, "the engine is told of what comes in"
        try:
            self.report.finish(offer.read, offer.hops)
        except BaseException as exc:  # noqa: BLE001 - the caller's thread raises it; the others are told when it is this rank's turn
            self.leave(FAILED, *blame_for(exc))
            self.report.fail(exc)

    # -- on one node -----------------------------------------------------------------------------------------------------------

    def _send_rounds(self) -> None:
        assert self._node is not None
        for turn, k in enumerate(self._own_rounds):
            offer = self._await_offer(k)
            after = self._own_rounds[turn - SLOTS] + 1 if turn >= SLOTS else 0
            if offer is None or not self._node.send(turn, offer.memory, after=after):
                return
            nbytes = None
            if offer.part is not None:
                offer.take_part(offer.memory[0])
                nbytes = self.blocks.taken_nbytes(offer.read, self._others)
            self._finish(offer, sent=True, nbytes=nbytes)

    def _receive_rounds(self) -> None:
        assert self._node is not None
        turns = [0] * self._peers.size
        for k, owner in enumerate(self._share.owners):
            if owner != self._peers.rank:
                offer = self._await_offer(k)
                if offer is None or not self._receive(offer, owner, turns[owner]):
                    return
                nbytes = self.blocks.taken_nbytes(offer.read, [self._peers.rank]) if offer.part is not None else None
                self._finish(offer, sent=False, nbytes=nbytes)
            turns[owner] += 1
            self._node.done(k + 1, [owner])

    def _receive(self, offer: _Offer, owner: int, turn: int) -> bool:
        assert self._node is not None
        if offer.part is None:
            return self._node.receive(owner, turn, offer.memory)
        slot = self._node.filled_slot(owner, turn)
        if slot is not None:
            offer.take_part(slot[: offer.read.nbytes])
        return slot is not None

    # -- over the group --------------------------------------------------------------------------------------------------------

    def _over_group(self) -> None:
        for k, owner in enumerate(self._share.owners):
            offer = self._await_offer(k)
            read = self.plan.reads[self._share.rounds[k]]
            if read.span in self.blocks.rows:
                self._scatter(read, owner, offer)
            else:
                self._broadcast(read, owner, offer)
            if owner == self._peers.rank and offer is None:
                return
        # Everybody hears how everybody is: who fails after its last turn could not say so.
        failed = self._leaving if self._leaving is not None and self._leaving.status == FAILED else None
        for rank, status in enumerate(self._peers.gather_statuses(status_of(failed))):
            if rank != self._peers.rank:
                check_status(status, rank)

    def _broadcast(self, read: Read, owner: int, offer: _Offer | None) -> None:
        """A read that every rank takes whole."""
        owns = owner == self._peers.rank
        status = status_of(self._leaving if owns else None)
        in_place = offer is not None and (owns or len(offer.memory) == 1)
        data = _joined(offer.memory) if offer and in_place else torch.empty(landing_nbytes(read), dtype=torch.uint8)
        self._peers.broadcast([status, data], owner)
        if not owns:
            check_status(status, owner)
        if offer is not None:
            if not in_place:
                _divide(data, offer.memory)
            self._finish(offer, sent=owns)

    def _scatter(self, read: Read, owner: int, offer: _Offer | None) -> None:
        """A block, of which each rank is sent what it takes."""
        own = self._peers.rank
        if owner == own:
            packings = self.blocks.packings(read)
            sizes = [packing.nbytes if rank != own else 0 for rank, packing in enumerate(packings)]
            parts = torch.empty(sum(sizes), dtype=torch.uint8)
            if offer is not None:
                _pack(offer, packings, sizes, parts)
            self._peers.scatter(status_of(self._leaving), parts, sizes, owner)
            if offer is not None:
                offer.take_part(offer.memory[0])
                self._finish(offer, sent=True, nbytes=parts.nbytes)
            return
        mine, status = self.blocks.packing(read, own), status_of(None)
        parts = torch.empty(mine.nbytes, dtype=torch.uint8)
        self._peers.scatter(status, parts, [parts.nbytes if rank == own else 0 for rank in range(self._peers.size)], owner)
        check_status(status, owner)
        if offer is not None:
            offer.take_packed(parts.numpy().data, mine)
            self._finish(offer, sent=False, nbytes=parts.nbytes)


def _pack(offer: _Offer, packings: Sequence[Packing], sizes: Sequence[int], parts: torch.Tensor) -> None:
    """Every rank's part of a block, one after another; those that nothing is sent to are left out."""
    assert offer.part is not None
    at, into = 0, parts.numpy().data
    for packing, nbytes in zip(packings, sizes, strict=True):
        for cutout in packing.cutouts if nbytes else ():
            copy_cutout(offer.memory[0], into[at : at + nbytes], cutout, Copy(offer.part.copy.source, packing.dtype))
        at += nbytes


def _joined(pieces: Sequence[memoryview]) -> torch.Tensor:
    """The bytes as one tensor: in place where they lie in one piece."""
    tensors = [torch.frombuffer(piece, dtype=torch.uint8) for piece in pieces if piece.nbytes]
    return tensors[0] if len(tensors) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8), *tensors])


def _divide(data: torch.Tensor, pieces: Sequence[memoryview]) -> None:
    at = 0
    for piece in pieces:
        if piece.nbytes:
            torch.frombuffer(piece, dtype=torch.uint8).copy_(data[at : at + piece.nbytes])
            at += piece.nbytes
