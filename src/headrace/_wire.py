"""Ranks of several nodes that load to devices together: what one of them has read goes from its device to the others'.

The bytes go over the group's own backend for the device (NCCL, RCCL; Gloo where devices are simulated), on a group of its own
with the same members, made once: nothing mixes with what the caller sends. The owner of a round copies what it has read to memory
on its device; that is broadcast, or of a block (`_blocks`) every rank is sent its part; and each rank moves it to where it
belongs, on its device. Before each round all ranks say over Gloo how they are, so that a rank that stops or fails is not waited
for by a device, which could not be called back.

Not verified with NCCL or RCCL.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
import torch.distributed as dist

from headrace._addresses import address_of, move
from headrace._blocks import Blocks
from headrace._cast import copy_cutout
from headrace._filling import Hops, SlotFiller, landing_nbytes
from headrace._leaving import FAILED, STOPPED, Leaving, check_status, start_beating, status_of
from headrace._owners import Share, describe
from headrace._peers import NEVER, OfWorld, Peers
from headrace._plan import Copy, Plan, Read
from headrace._progress import Progress
from headrace._ring import Issue, Ring, Slot
from headrace._rounds import DeviceRounds
from headrace._staging import Region
from headrace.devices.base import CollectiveDevice, Device, DeviceBuffer
from headrace.errors import HeadraceError, OptionError, PeerError
from headrace.sources.base import ByteSource

_LEAVE_S: Final = 1.0
_DEPTH: Final = 3  # rounds under way on the devices


@dataclass(slots=True)
class _Wire:
    """Connections of a set of ranks. One load at a time has them.

    Attributes:
        group: a backend of torch.distributed; None until it is made.
        taken: by a load. `broken`: nobody uses them again.
    """

    group: Any = None
    taken: bool = True
    broken: bool = False


_wires = OfWorld(dict[tuple[tuple[int, ...], str], list[_Wire]])  # made once, and kept: NCCL's take seconds
_taking = threading.Lock()
_kept_for_good: list[object] = []  # memory that a device may still write to


def join_wire(
    peers: Peers,
    plan: Plan,
    sources: Sequence[ByteSource],
    share: Share,
    blocks: Blocks,
    policy: str,
    device: Device,
    progress: Progress,
) -> DeviceExchange:
    """Make the connections. Arguments as of `_relay.join_relay`; the ranks have agreed on the plan. Collective.

    Raises:
        OptionError: the group has no backend for such devices.
    """
    if not hasattr(device, "collective"):
        raise OptionError(f"{device.name}: torch.distributed cannot reach its memory, and these ranks share none", option="group")
    kind = device.wrap(None, ["U8"], [(0,)], [0], [0])[0].device.type
    backend = backend_of(peers.backends, kind)
    if backend is None:
        how = f"init_process_group('cpu:gloo,{kind}:nccl')"
        raise OptionError(f"the group has no backend for {kind}; start it with {how}, or use group='node'", option="group")
    if backend not in ("gloo", "nccl"):
        raise OptionError(f"ranks of several nodes exchange over nccl or gloo, not {backend}; use group='node'", option="group")
    peers.connect()
    wire = _take_wire(peers, backend)
    describe(progress, peers, plan, share, policy, over_memory=False)
    progress.exchange = f"from device to device over {backend}, since they do not share memory: they are on several nodes"
    if backend != "gloo":
        progress.exchange += f" (headrace has not been verified over {backend})"
    return DeviceExchange(plan, sources, share, blocks, peers, wire, device, progress)


def _take_wire(peers: Peers, backend: str) -> _Wire:
    """Connections that no other load of these ranks has. Collective."""
    with _taking:
        wires = _wires.get().setdefault((tuple(peers.members), backend), [])
        number = next((number for number, wire in enumerate(wires) if not wire.taken), len(wires))
        if number == len(wires):
            wires.append(_Wire())
        wire = wires[number]
        wire.taken = True
    try:
        numbers = peers.gather(number, about="connections")
        if (other := next((rank for rank, theirs in enumerate(numbers) if theirs != number), None)) is not None:
            why = f"rank {other} began its loads in another order: loads of the same ranks that are under way at once begin alike"
            raise PeerError(why, rank=other)
        if any(each.broken for each in wires):
            raise PeerError("the connections of this group's devices broke in an earlier load; start the ranks again")
        if wire.group is None:
            wire.group = _connected(peers, backend)
    except BaseException:
        wire.taken = False
        raise
    return wire


def _connected(peers: Peers, backend: str) -> Any:
    """Connections of these ranks and no others.

    A group of `torch.distributed.new_group` would not do: one of some ranks only torch names by how many groups each of them is
    in, and ranks that are in others besides then wait for each other for ever.
    """
    if backend == "gloo":
        return peers.connected_by_gloo("device")
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = NEVER  # who is slow is waited for; that everybody lives is seen elsewhere
    return nccl(peers.store_for("device"), peers.rank, peers.size, options)


def backend_of(config: str, kind: str) -> str | None:
    """The backend that a group has for one kind of device, out of "cpu:gloo,cuda:nccl"."""
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair).get(kind)


@dataclass(slots=True)
class _Offer:
    """A read for which there is memory on the device; where this rank owns it, with the bytes.

    Attributes:
        data: the bytes, in the slot or in memory of their own. Of a block: the parts of all ranks, this rank's last.
        sent: set when the copies out of the slot are queued, or never will be; `taken` tells which.
    """

    read: Read
    slot: Slot | None = None
    data: memoryview | None = None
    hops: Hops = field(default_factory=Hops)
    sent: threading.Event = field(default_factory=threading.Event)
    taken: bool = False


@dataclass(slots=True)
class _Round:
    """A round under way on the devices.

    Attributes:
        read: where its bytes belong. `asked`: the read of the plan.
        start, nbytes: what of the memory is this rank's.
    """

    work: Any
    buffer: DeviceBuffer
    read: Read
    asked: Read
    start: int
    nbytes: int
    hops: Hops


class DeviceExchange(DeviceRounds):
    """The rounds of one load. Implements `_pipeline.Relay`."""

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[ByteSource],
        share: Share,
        blocks: Blocks,
        peers: Peers,
        wire: _Wire,
        device: Device,
        progress: Progress,
    ) -> None:
        super().__init__(plan, sources, share, blocks, peers, device, progress)
        self._wire = wire
        self._ring: Ring | None = None
        self._issue: Issue[Read] | None = None
        self._place: Callable[[Read, int, int], None] | None = None
        self._scratch: list[DeviceBuffer | None] = [None] * (_DEPTH + 1)
        self._thread: threading.Thread | None = None
        self._offers: dict[int, _Offer] = {}
        self._leaving: Leaving | None = None
        self._ended = threading.Event()
        start_beating(self._ended, peers.timeout_s, peers.beat)

    # -- for the landing and its readers ---------------------------------------------------------------------------------------

    def attach(self, ring: Ring, issue: Issue[Read], place: Callable[[Read, int, int], None]) -> None:
        """Begin: with the ring that reads go to, and what queues copies within the device. Once, by a reader."""
        self._ring, self._issue, self._place = ring, issue, place
        self._begin()

    def fill(self, filler: SlotFiller, read: Read) -> Hops | None:
        """Read what this rank owns; of the rest say that there is memory for it. The engine hears of both when they came in.

        Raises:
            What the source raises, after the others were told.
        """
        k = self._round_of[read.span, read.position]
        try:
            offer = _Offer(read, hops=Hops(received_nbytes=read.nbytes))
            if self._share.owners[k] == self._peers.rank:
                self._fill_own(offer, filler)
            with self._state:
                if self._leaving is None:
                    self._offers[k] = offer
                    self._state.notify_all()
                else:
                    offer.sent.set()
            if offer.data is not None:
                self._await_sent(offer)
        except BaseException as exc:
            self._fail(exc)
            raise
        return None

    def close(self) -> None:
        """The load is over. May be called twice. This rank's turn to say that it stops may be far off: the thread goes on."""
        self.leave(STOPPED, "")
        self._begin()  # also where nothing was ever asked for: the others have to hear of it
        if self._thread is not threading.current_thread():
            self._ended.wait(_LEAVE_S)

    def leave(self, status: int, why: str, blamed: int | None = None) -> None:
        """Take no part any more but to say so. The first reason counts."""
        with self._state:
            if self._leaving is not None or self._ended.is_set():
                return
            self._leaving = Leaving(status, self._peers.rank if blamed is None else blamed, why)
            for offer in self._offers.values():
                offer.sent.set()
            self._offers.clear()
            self._state.notify_all()

    # -- what this rank reads --------------------------------------------------------------------------------------------------

    def _fill_own(self, offer: _Offer, filler: SlotFiller) -> None:
        assert self._ring is not None
        read, slot = offer.read, self._ring.take()
        try:
            data, offer.hops = filler.fill_slot(read, slot.view)
            self._sources[read.shard].check_unchanged()  # before the bytes go to others
            if read.span in self._blocks.rows:
                offer.data = self._pack(read, data)
                self._ring.put_back(slot)
            else:
                offer.data, offer.slot = self._ring.settle(slot, data), slot
        except BaseException:
            self._ring.put_back(slot)
            raise

    def _pack(self, read: Read, block: memoryview) -> memoryview:
        """All ranks' parts of a block, one after another, this rank's behind those of the others."""
        packings, at = self._blocks.packings(read), 0
        packings.append(packings.pop(self._peers.rank))
        nbytes = sum(packing.nbytes for packing in packings)
        if not nbytes:
            return memoryview(b"")
        room = Region(nbytes)
        for packing in packings:
            convert = Copy(self._blocks.sources[read.span], packing.dtype)
            for cutout in packing.cutouts:
                copy_cutout(block, room.view[at : at + packing.nbytes], cutout, convert)
            at += packing.nbytes
        return room.view[:at]

    def _await_sent(self, offer: _Offer) -> None:
        offer.sent.wait()
        with self._state:
            taken = offer.taken
        if not taken:
            if offer.slot is not None and self._ring is not None:
                self._ring.put_back(offer.slot)
            raise self._reason()

    # -- the thread ------------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        with self._state:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="headrace-exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        under_way: deque[_Round] = deque()
        try:
            self._device.enter_thread()
            self._exchange_rounds(under_way)
        except BaseException as exc:  # noqa: BLE001 - the caller's thread raises it
            self._fail(exc)
            self._settle(under_way)
            if self.report is not None:
                self.report.fail(exc)
        finally:
            self._settle(under_way)
            self._scratch.clear()
            self._peers.close()
            self._wire.taken = False
            self._ended.set()

    def _exchange_rounds(self, under_way: deque[_Round]) -> None:
        for k, owner in enumerate(self._share.owners):
            while under_way and (len(under_way) == _DEPTH or not self._is_offered(k)):
                self._complete(under_way.popleft())
            offer = self._await_offer(k)
            buffer = self._prepare(k, owner, offer) if offer is not None else None
            if not self._meet():
                return
            assert offer is not None, "a rank without memory leaves"
            assert buffer is not None
            under_way.append(self._start(owner, offer, buffer))
        while under_way:
            self._complete(under_way.popleft())
        self._meet(at_end=True)

    def _meet(self, *, at_end: bool = False) -> bool:
        """All ranks say how they are. False when this one leaves. From here on it takes part in the round, come what may.

        Args:
            at_end: a rank that has stopped has got everything, then.

        Raises:
            PeerError: another rank leaves, or is gone.
        """
        with self._state:
            leaving = self._leaving if not at_end or (self._leaving and self._leaving.status == FAILED) else None
        for rank, theirs in enumerate(self._peers.gather_statuses(status_of(leaving))):
            if rank != self._peers.rank:
                check_status(theirs, rank)
        return leaving is None

    def _is_offered(self, k: int) -> bool:
        with self._state:
            return k in self._offers or self._leaving is not None

    def _await_offer(self, k: int) -> _Offer | None:
        """None when this rank leaves."""
        with self._state:
            self._state.wait_for(lambda: k in self._offers or self._leaving is not None)
            offer = self._offers.pop(k, None)
            if offer is not None:
                offer.taken = True
            return offer

    def _prepare(self, k: int, owner: int, offer: _Offer) -> DeviceBuffer | None:
        """Memory on the device for a round, with the bytes where this rank has them. Before the others rely on it."""
        try:
            if offer.read.span not in self._blocks.rows:
                nbytes = landing_nbytes(offer.read)
            else:
                own, sent = self._peers.rank, offer.data
                nbytes = sent.nbytes if sent is not None else self._blocks.packing(offer.read, own).nbytes
            buffer = self._room(k, max(1, nbytes))
            if owner == self._peers.rank:
                self._to_device(offer, buffer)
        except BaseException as exc:  # noqa: BLE001 - the others hear of it, and the caller's thread raises it
            self._fail(exc)
            if self.report is not None:
                self.report.fail(exc)
            return None
        finally:
            offer.sent.set()
        return buffer

    def _start(self, owner: int, offer: _Offer, buffer: DeviceBuffer) -> _Round:
        """Have a round's bytes sent, on the devices."""
        read, owns = offer.read, owner == self._peers.rank
        try:
            with cast("CollectiveDevice", self._device).collective([buffer]) as (whole,):
                if read.span in self._blocks.rows:
                    return self._scatter(owner, offer, buffer, whole)
                nbytes, options = landing_nbytes(read), dist.BroadcastOptions()
                options.rootRank = owner
                work = self._wire.group.broadcast([whole[:nbytes]], options)
        except RuntimeError as exc:
            raise self._peers.lost(exc) from exc
        self._count(sent=nbytes * (self._peers.size - 1) if owns else 0, received=0 if owns else nbytes)
        return _Round(work, buffer, read, read, 0, nbytes, offer.hops)

    def _scatter(self, owner: int, offer: _Offer, buffer: DeviceBuffer, whole: torch.Tensor) -> _Round:
        """Every rank's part of a block, from its owner's device to that rank's."""
        read, rank, size = offer.read, self._peers.rank, self._peers.size
        part, none = self._blocks.packing(read, rank), [0] * size
        mine = part.nbytes
        if owner == rank:
            sent = [packing.nbytes if other != rank else 0 for other, packing in enumerate(self._blocks.packings(read))]
            ends, start = (whole[:0], whole[: sum(sent)], none, sent), sum(sent)
        else:
            ends, start = (whole[:mine], whole[:0], [mine if other == owner else 0 for other in range(size)], none), 0
        work = self._wire.group.alltoall_base(*ends)
        self._count(sent=start, received=0 if owner == rank else mine)
        return _Round(work, buffer, read._replace(position=part.position), read, start, mine, offer.hops)

    def _count(self, *, sent: int, received: int) -> None:
        self._progress.to_peers_nbytes += sent
        self._progress.from_peers_nbytes += received

    def _to_device(self, offer: _Offer, buffer: DeviceBuffer) -> None:
        """Queue the copies of what this rank has read."""
        ring, data = self._ring, offer.data
        assert ring is not None
        assert data is not None
        if offer.slot is not None:
            ring.send(offer.slot, self._copy_to, buffer.address, data)
            return
        at = 0
        while at < data.nbytes:
            slot = ring.take()
            piece = slot.view[: min(slot.view.nbytes, data.nbytes - at)]
            move(piece, data[at : at + piece.nbytes])
            try:
                piece = ring.settle(slot, piece)
            except BaseException:
                ring.put_back(slot)
                raise
            ring.send(slot, self._copy_to, buffer.address + at, piece)
            at += piece.nbytes

    def _copy_to(self, address: int, data: memoryview, pinned: bool) -> None:
        self._device.copy_async(address, address_of(data), data.nbytes, pinned=pinned)
        self._progress.device_copies += 1
        self._progress.sent_nbytes += data.nbytes

    def _room(self, k: int, nbytes: int) -> DeviceBuffer:
        """Memory on the device for a round; the moves out of it are queued before its next round."""
        at = k % len(self._scratch)
        buffer = self._scratch[at]
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._scratch[at] = self._device.allocate(nbytes)
        return buffer

    def _complete(self, done: _Round) -> None:
        """Wait for a round's bytes, on the host's clock: a device that waits for a rank that is gone cannot be called back. Then
        move them to their place."""
        self._await_work(done)
        with self._state:
            if self._leaving is not None:  # nobody asks for them any more
                return
        assert self.report is not None, "the engine is told of what comes in"
        try:
            if done.nbytes:
                assert self._ring is not None
                self._ring.send_outside(self._move, done, memoryview(b""))
            self.report.finish(done.asked, done.hops)
        except BaseException as exc:  # noqa: BLE001 - the caller's thread raises it, and the others are told before the next round
            self._fail(exc)
            self.report.fail(exc)
        finally:
            del done  # this frame lives as long as the error's traceback

    def _await_work(self, done: _Round) -> None:
        self._peers.await_alive(done.work.is_completed)
        try:
            with cast("CollectiveDevice", self._device).collective([done.buffer]):
                done.work.wait()
        except RuntimeError as exc:
            raise self._peers.lost(exc) from exc

    def _move(self, done: _Round, data: memoryview, pinned: bool) -> None:
        del data, pinned
        assert self._place is not None
        self._place(done.read, done.buffer.address + done.start, done.nbytes)

    # -- the end ---------------------------------------------------------------------------------------------------------------

    def _settle(self, under_way: deque[_Round]) -> None:
        """Wait for what is under way; what cannot be waited for keeps its memory, and nobody uses the connections again."""
        while under_way:
            left = under_way.popleft()
            try:
                self._await_work(left)
            except HeadraceError:
                _kept_for_good.extend([left, *under_way, *self._scratch])
                self._wire.broken = True
                return
