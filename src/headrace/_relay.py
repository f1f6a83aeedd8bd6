"""Ranks of one node that load to devices together: each chunk is read by one of them, and copied to every device from there.

The rank that owns a read fills a slot of the ring that it shares with the others (`_node`). Every rank has page-locked all of
these rings for its own device, and its copies come straight out of the slots: no byte is moved in host memory. A slot is filled
again when the copies of all ranks are done, which each says when its event is. Where a ring cannot be page-locked, and where a
rank takes a part of a block (`_blocks`), the bytes pass through a slot of this rank's own ring.

Readers fill slots; of reads that others own they only say that there is memory for them. One thread copies what others have
filled, in the order of the plan; while there is nothing to copy it waits for the copies under way, and lets their owners have the
slots back. A thread more, for the events alone, took a fifth of the CPU time beside reading.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from headrace import _node
from headrace._addresses import address_of, move
from headrace._blocks import Blocks, Cutout, packed
from headrace._cast import copy_cutout
from headrace._dtypes import DTYPES
from headrace._filling import Hops, SlotFiller, landing_nbytes
from headrace._interpreter import join
from headrace._leaving import STOPPED, Leaving, start_beating
from headrace._node import NodeMemory
from headrace._owners import Share, describe, digest_of, share_reads
from headrace._peers import Peers
from headrace._plan import Copy, Plan, Read
from headrace._progress import Progress
from headrace._ring import Issue, Ring
from headrace._rounds import DeviceRounds
from headrace._staging import PAGE, Region, round_up
from headrace._wire import DeviceExchange, join_wire
from headrace.devices.base import Device
from headrace.errors import DeviceError, StreamError
from headrace.sources.base import ByteSource

_JOIN_S: Final = 1.0


def join_relay(
    peers: Peers,
    plan: Plan,
    sources: Sequence[ByteSource],
    sliced: frozenset[str],
    blocks: Blocks,
    policy: str,
    device: Device,
    progress: Progress,
) -> Relay | DeviceExchange:
    """Agree with the other ranks on who reads what, and share memory with them. Arguments as of `_exchange.join_group`.

    Args:
        device: of this rank.

    Raises:
        PeerError: another rank failed, or is about to load something else.
        OptionError: the ranks do not share memory, and their group has no backend for such devices.
    """
    share = share_reads(plan, sliced - blocks.names, peers.rank, peers.size, policy)
    peers.agree(plan=digest_of(plan, share, blocks.names))
    staging = plan.limits.staging
    assert staging is not None, "of a load to a device"
    longest = max((max(plan.reads[i].nbytes, landing_nbytes(plan.reads[i])) for i in share.rounds), default=0)
    slot_nbytes = round_up(min(staging.slot_nbytes, longest + 2 * PAGE), PAGE)
    # One for each reader, and one that is copied out of: every rank page-locks every slot of the node. Where ranks have
    # one reader each, CPUs are what is waited for, and the other ranks read meanwhile.
    readers = plan.limits.concurrency
    slots = max(1, min(staging.slots, readers + (readers > 1), share.owners.count(peers.rank), _node.MOST_SLOTS))
    node = _node.share(peers.rank, partial(peers.gather, about="rings"), slot_nbytes, peers.timeout_s, slots)
    if node is None:
        return join_wire(peers, plan, sources, share, blocks, policy, device, progress)
    describe(progress, peers, plan, share, policy, over_memory=True)
    return Relay(plan, sources, share, blocks, peers, node, device, progress)


class Relay(DeviceRounds):
    """The rounds of one load. Implements `_pipeline.Relay`."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[ByteSource],
        share: Share,
        blocks: Blocks,
        peers: Peers,
        node: NodeMemory,
        device: Device,
        progress: Progress,
    ) -> None:
        super().__init__(plan, sources, share, blocks, peers, device, progress)
        self._node, self._others = node, [rank for rank in range(peers.size) if rank != peers.rank]
        self._own_rounds = [k for k, owner in enumerate(share.owners) if owner == peers.rank]
        turns = [0] * peers.size
        self._turn_of: list[int] = []  # of each round, the how-manieth of its owner
        for owner in share.owners:
            self._turn_of.append(turns[owner])
            turns[owner] += 1
        self._locked = _LockedRings(node, device, peers, plan, progress)
        self._ring: Ring | None = None
        self._issue: Issue[Read] | None = None
        self._threads: list[threading.Thread] = []
        self._issuing = threading.Lock()  # no copy is queued out of shared memory after `_unlocked`
        self._unlocked = False
        # By slot of this rank: the last turn that was passed on, and the event of the copy out of it if there was one.
        self._own_flying: list[tuple[int, Any]] = [(-1, None)] * node.slot_count
        self._flying: deque[tuple[int, Any]] = deque()  # rounds of others, and the events of copies straight out of their slots
        self._events: list[Any] = []  # that no copy is waited for with
        self._offers: dict[int, Read] = {}
        self._filled: set[int] = set()  # turns of this rank beyond the first that is not filled
        self._announced = 0
        self._to_come = len(share.owners) - len(self._own_rounds)  # rounds of others that were not passed on
        self._left = False
        self._closed = threading.Event()
        start_beating(self._closed, peers.timeout_s, node.beat)

    # -- for the landing and its readers ---------------------------------------------------------------------------------------

    def attach(self, ring: Ring, issue: Issue[Read], place: Callable[[Read, int, int], None]) -> None:
        """Begin: with the ring for what cannot be copied out of shared memory, and what queues copies. Once, by a reader."""
        del place  # nothing comes by way of another device
        self._ring, self._issue = ring, issue
        for name, work in (("lock", self._locked.lock), ("exchange", self._receive_rounds)):
            thread = threading.Thread(target=self._run, args=(work,), name=f"headrace-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def fill(self, filler: SlotFiller, read: Read) -> Hops | None:
        """Read, and queue the copies to this rank's device; of a read that another rank owns, wait for nothing.

        Raises:
            PeerError: another rank failed, stopped or is gone. What the source raises, after the others were told.
        """
        k = self._round_of[read.span, read.position]
        try:
            if self._share.owners[k] == self._peers.rank:
                return self._fill_own(k, filler, read)
            with self._state:
                self._offers[k] = read
                self._state.notify_all()
        except BaseException as exc:
            self._fail(exc)
            raise
        return None

    def close(self) -> None:
        """The load is over: wait for the copies out of shared memory, and let go of it. May be called twice."""
        if self._closed.is_set():
            return
        self.leave(STOPPED, "")
        for thread in self._threads:
            if thread is not threading.current_thread():
                join(thread, _JOIN_S)
        with self._issuing:
            self._unlocked = True
        self._closed.set()
        drained = True
        try:
            self._device.drain()
        except DeviceError:
            drained = False
        self._locked.unlock(drained=drained)
        flying = [event for _, event in (*self._flying, *self._own_flying) if event is not None]
        self._device.destroy(self._events + flying)
        self._progress.peak_nbytes += self._node.own_nbytes
        self._node.close()
        self._peers.close()

    def leave(self, status: int, why: str, blamed: int | None = None) -> None:
        """Tell the others that this rank takes no part any more; the first reason counts, while they wait for anything of it.

        Who has passed on all rounds is waited for by nobody: the slots that it still copies out of are not filled again.
        """
        with self._state:
            if not self._left and (self._to_come or self._announced < len(self._own_rounds)):
                self._node.leave(Leaving(status, self._peers.rank if blamed is None else blamed, why))
            self._left = True
            self._state.notify_all()

    # -- rounds ----------------------------------------------------------------------------------------------------------------

    def _fill_own(self, k: int, filler: SlotFiller, read: Read) -> Hops:
        turn = self._turn_of[k]
        before = turn - self._node.slot_count
        if before >= 0:
            self._await_own_copy(before)
        slot = self._node.room(turn, after=self._own_rounds[before] + 1 if before >= 0 else 0)
        if slot is None:
            raise self._reason()
        data, hops = filler.fill_slot(read, slot)
        self._sources[read.shard].check_unchanged()  # before the bytes go to others
        self._node.begin(turn, address_of(data) - address_of(slot))
        is_block = read.span in self._blocks.rows
        sent_nbytes = self._blocks.taken_nbytes(read, self._others) if is_block else data.nbytes * len(self._others)
        self._announce(turn, sent_nbytes)
        _, event = self._pass_on(k, read, data)
        with self._state:
            self._own_flying[turn % self._node.slot_count] = turn, event
            self._state.notify_all()
        return hops

    def _await_own_copy(self, turn: int) -> None:
        """Until this rank's own copy out of the slot of a turn is done. Another reader may not have queued it yet."""
        at = turn % self._node.slot_count
        with self._state:
            self._state.wait_for(lambda: self._own_flying[at][0] == turn or self._left)
            passed_on, event = self._own_flying[at]
            if passed_on != turn or event is None:
                return
        self._device.synchronize(event)
        with self._state:
            self._own_flying[at] = turn, None
            self._events.append(event)

    def _announce(self, turn: int, sent_nbytes: int) -> None:
        with self._state:
            self._progress.to_peers_nbytes += sent_nbytes
            self._filled.add(turn)
            while self._announced in self._filled:
                self._filled.remove(self._announced)
                self._announced += 1
            self._node.announce(self._announced)

    def _receive_rounds(self) -> None:
        """What the others have filled, in the order of the rounds."""
        for k, owner in enumerate(self._share.owners):
            if owner == self._peers.rank:
                continue
            self._return_slots(wait=False)
            while self._flying and not (k in self._offers and self._node.is_filled(owner, self._turn_of[k])):
                self._return_slots(wait=True)
            with self._state:
                self._state.wait_for(lambda k=k: k in self._offers or self._left)  # type: ignore[misc]
                read = self._offers.pop(k, None)
            filled = self._node.filled_slot(owner, self._turn_of[k]) if read is not None else None
            if read is None or filled is None:
                return
            nbytes, event = self._pass_on(k, read, filled[: landing_nbytes(read)])
            self._flying.append((k, event))
            with self._state:
                self._to_come -= 1
                self._progress.from_peers_nbytes += nbytes
            assert self.report is not None, "the engine is told of what comes in"
            self.report.finish(read, Hops(received_nbytes=read.nbytes))

    def _return_slots(self, *, wait: bool) -> None:
        """Let the owners of slots that nothing is copied out of any more have them back; wait for one, if need be."""
        rounds, events = list[int](), list[Any]()
        while self._flying:
            k, event = self._flying[0]
            if event is not None:
                if wait and not rounds:
                    self._device.synchronize(event)
                elif not self._device.is_done(event):
                    break
                events.append(event)
            rounds.append(k)
            self._flying.popleft()
        if rounds:
            self._node.done(rounds[-1] + 1, [self._share.owners[k] for k in rounds])
            with self._state:
                self._events += events

    def _pass_on(self, k: int, read: Read, data: memoryview) -> tuple[int, Any]:
        """Queue the copies of what a shared slot holds to this rank's device.

        Returns:
            How many of its bytes they are, and the event behind a copy that comes straight out of the slot; else None.
        """
        cutouts = self._blocks.cutouts.get((read.span, read.position))
        if cutouts is not None:
            return self._send_part(read, data, cutouts), None
        if self._locked.is_locked(self._share.owners[k]):
            return data.nbytes, self._send_in_place(read, data)
        return self._send_by_ring(read, data.nbytes, lambda view: move(view, data)), None

    def _send_in_place(self, read: Read, data: memoryview) -> Any:
        with self._state:
            event = self._events.pop() if self._events else None
        event = self._device.new_event() if event is None else event
        with self._issuing:
            if self._unlocked or self._ring is None:
                raise StreamError("the stream is closed")
            self._ring.send_outside(self._issue_and_record, (read, event), data)
        return event

    def _issue_and_record(self, what: tuple[Read, Any], data: memoryview, pinned: bool) -> None:
        assert self._issue is not None
        read, event = what
        self._issue(read, data, pinned and self._locked.is_registered)
        self._device.record(event)

    def _send_part(self, read: Read, block: memoryview, cutouts: Sequence[Cutout]) -> int:
        """What this rank takes out of a block: one stretch of its tensor, by way of its own ring."""
        tensors, row = self._plan.tensors, self._blocks.rows[read.span]
        on_device = self._plan.spans[read.span].cast is not None
        convert = Copy(tensors.sources[row], tensors.sources[row] if on_device else tensors.dtypes[row])
        part = packed(cutouts, convert.target)

        def fill(view: memoryview) -> None:
            for cutout in part.cutouts:
                copy_cutout(block, view, cutout, convert)

        if part.elements:
            self._send_by_ring(read._replace(position=part.position), part.nbytes, fill)
        return part.elements * DTYPES[convert.source].itemsize

    def _send_by_ring(self, read: Read, nbytes: int, fill: Callable[[memoryview], None]) -> int:
        """Bytes that `fill` puts into memory, to the device by a slot of this rank's own ring, or by several."""
        assert self._ring is not None
        assert self._issue is not None
        slot = self._ring.take()
        try:
            room = Region(nbytes) if nbytes > slot.view.nbytes else None  # a conversion may make it longer than a slot
            whole = (room.view if room is not None else slot.view)[:nbytes]
            fill(whole)
            step = slot.view.nbytes // PAGE * PAGE
            for at in range(0, nbytes, step):
                if at:
                    slot = self._ring.take()
                piece = whole[at : at + step]
                if nbytes > step:
                    move(slot.view[: piece.nbytes], piece)
                    piece = slot.view[: piece.nbytes]
                piece = self._ring.settle(slot, piece)
                self._ring.send(slot, self._issue, read._replace(position=read.position + at), piece)
                slot = None  # type: ignore[assignment]
        except BaseException:
            if slot is not None:
                self._ring.put_back(slot)
            raise
        return nbytes

    # -- the end ---------------------------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            self._device.enter_thread()
            work()
        except BaseException as exc:  # noqa: BLE001 - the caller's thread raises it
            self._fail(exc)
            if self.report is not None:
                self.report.fail(exc)


class _LockedRings:
    """The rings of all ranks, page-locked for this rank's device, one after another on a thread of its own.

    Attributes:
        is_registered: whether what is copied out of in place is page-locked.
    """

    def __init__(self, node: NodeMemory, device: Device, peers: Peers, plan: Plan, progress: Progress) -> None:
        assert plan.limits.staging is not None
        self._node, self._device, self._progress, self._pin = node, device, progress, plan.limits.staging.pin
        self._order = [peers.rank, *(rank for rank in range(peers.size) if rank != peers.rank)]
        self.is_registered = self._pin != "off"
        self._settled = [threading.Event() for _ in range(peers.size)]
        self._in_place = [False] * peers.size
        self._pins: list[tuple[int, memoryview]] = []
        self._stopped = False

    def lock(self) -> None:
        """Page-lock them; what is refused once is not tried again."""
        refused = self._device.in_place_refused if self._pin != "off" else None
        try:
            for rank in self._order:
                if refused is None and not self._stopped:
                    refused = self._lock_one(rank)
                self._settled[rank].set()
        finally:
            for settled in self._settled:
                settled.set()
            self._say(refused)

    def _lock_one(self, rank: int) -> str | None:
        """Why not; None where it is done."""
        slots = self._node.slots(rank)
        if self._pin != "off" and slots.nbytes:
            try:
                self._device.pin(address_of(slots), slots.nbytes)
            except DeviceError as exc:
                return str(exc)
            self._pins.append((address_of(slots), slots))
        self._in_place[rank] = True
        return None

    def is_locked(self, rank: int) -> bool:
        """Whether copies may come straight out of a rank's ring. Waits until that is known."""
        self._settled[rank].wait()
        return self._in_place[rank]

    def _say(self, refused: str | None) -> None:
        if refused is not None:
            self._progress.exchange += f", through each rank's own ring to its device: {refused}"
            return
        self._progress.exchange += ", from where it is copied to each rank's device"
        if self._pin == "off":
            self._progress.pinned, self._progress.pinned_how = False, "not page-locked: pin='off'"
        else:
            self._progress.pinned = True
            self._progress.pinned_how = "page-locked: the rings of the node's ranks, registered with the driver by each of them"

    def unlock(self, *, drained: bool) -> None:
        """End the registrations. Memory that the device may still read is never unmapped."""
        self._stopped = True
        pins, self._pins = self._pins, []
        for address, view in pins:
            try:
                self._device.unpin(address)
            except DeviceError:
                drained = False
            if not drained:
                _kept_for_good.append(view)


_kept_for_good: list[memoryview] = []
