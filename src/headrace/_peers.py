"""The ranks of a torch.distributed group that load together, and what they say to each other.

They agree by way of the store that torch.distributed was started with, so that a rank that does not come is known by name after
a while, and nothing gets mixed up with what the caller sends over the group. Only ranks on several nodes need connections of
their own, and make a Gloo group of them.
"""

from __future__ import annotations

import hashlib
import pickle
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from headrace._board import Board
from headrace._leaving import beat_s, start_beating
from headrace.errors import HeadraceError, OptionError, PeerError

_TIMEOUT_S: Final = 120.0
_FAREWELL_S: Final = 5.0  # how long a rank that cannot begin stays, so that the others hear of it
NEVER: Final = timedelta(days=30)
_POLL_S: Final = 0.0005
_SURVEY_S: Final = 5.0  # how long the others have to say that they are alive, after a connection broke
_LOOK_S: Final = 0.25  # how often to look whether one broke elsewhere
_SLOW_POLL_S: Final = 0.02  # how often to ask the store for what takes long
_BROKE: Final = "broke"  # a key of the store: somebody has lost a connection
_GONE: Final = "gone"  # and this one: the rank that somebody found to be gone

_T = TypeVar("_T")


class OfWorld(Generic[_T]):
    """One thing for each start of torch.distributed, as long as that lasts: after another start all ranks begin anew."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._each: weakref.WeakKeyDictionary[object, _T] = weakref.WeakKeyDictionary()

    def get(self) -> _T:
        """That of the start that lasts."""
        with self._lock:
            return self._each.setdefault(_get_default_store(), self._make())


_loads: Final = OfWorld(Counter[str])  # by group: all ranks of one begin their loads together in the same order


def _node() -> tuple[str, str]:
    """What tells this node, or container, from others."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot_id.read_text().strip() if boot_id.exists() else ""


class _Failure(NamedTuple):
    """What a rank gives that cannot begin."""

    why: str


class _Word(NamedTuple):
    """What a rank gives at one step, and what it is about."""

    about: str
    what: Any


class _Missing(NamedTuple):
    """Ranks that did not come in time, those that gave no sign of life first."""

    ranks: list[int]
    silent: int  # how many of them


class Peers:
    """The ranks that load together. `gather`, `agree` and `connect` are collective: all of them call these in the same order.

    Args:
        group: of torch.distributed; True: the default one; "node": those of the default one that are on this node, so that each
            node loads for itself. Finding them is collective over the default group.
        timeout_s: how long a rank may give no sign of life, or keep the others waiting for the start.

    Attributes:
        rank, size: this rank within the group, and how many there are. `members`: their ranks in the world.
        backends: of the caller's group, "cpu:gloo,cuda:nccl". The group itself is not kept: it ends with its last reference, and
            where that is when the interpreter ends, a thread of Gloo's may end it with SIGABRT.
        timeout_s: as resolved.
        node: what tells this node, or container, from others.

    Raises:
        OptionError: no such group, or this process is not in it.
    """

    def __init__(self, group: Any, timeout_s: float | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise OptionError("group= needs torch.distributed.init_process_group to have been called", option="group")
        if group is not True and group != "node" and not isinstance(group, dist.ProcessGroup):
            raise OptionError(f'group is a torch.distributed group, True, "node" or None, not {group!r}', option="group")
        self.timeout_s = _TIMEOUT_S if timeout_s is None else timeout_s
        members = dist.get_process_group_ranks(dist.group.WORLD if group is True or group == "node" else group)
        if dist.get_rank() not in members:
            raise OptionError("this process is not in the group", option="group")
        found: Any = dist.group.WORLD if group is True or group == "node" else group
        self.backends: str = dist.get_backend_config(found)
        self._name = str(found.group_name)
        self.node = _node()
        self._join(members)
        if group == "node":
            nodes = self.gather(self.node, about="nodes")
            self._join([member for member, node in zip(members, nodes, strict=True) if node == nodes[self.rank]])

    def _join(self, members: Sequence[int]) -> None:
        name = hashlib.sha256(repr((self._name, list(members))).encode()).hexdigest()[:16]
        loads = _loads.get()
        self._begin(members, f"headrace/{name}/{loads[name]}")
        loads[name] += 1

    def _begin(self, members: Sequence[int], prefix: str) -> None:
        self.rank, self.size, self.members = members.index(dist.get_rank()), len(members), list(members)
        self._prefix, self._phases = prefix, 0
        self._board = Board(_get_default_store(), prefix, limit_s=max(self.timeout_s, _SURVEY_S))
        self._steps = self._beat_count = 0
        self._agreed = self._surveyed = False
        self._wire: Any = None

    def next_phase(self) -> Peers:
        """The same ranks, for another phase of the same load: ranks with more or fewer phases still are at the same load."""
        other = copy(self)
        self._phases += 1
        other._begin(self.members, f"{self._prefix}/{self._phases}")
        return other

    def agree(self, **digests: str) -> None:
        """Compare what the ranks are about to do. Raises PeerError where another rank has failed, or other digests."""
        for rank, theirs in enumerate(self.gather(digests, about=", ".join(digests))):
            for what, digest in digests.items():
                if theirs[what] != digest:
                    raise PeerError(
                        f"rank {rank} is about to load with another {what} than rank {self.rank}; ranks of a group give the same "
                        "arguments, slices excepted",
                        rank=rank,
                    )
        self._agreed = True

    def gather(self, what: Any, *, about: str) -> list[Any]:
        """What every rank gives, in the order of ranks.

        Args:
            about: in a word; ranks that ask for other kinds of loads have other things to say.

        Raises:
            PeerError: a rank has failed instead, speaks of something else, or did not come.
        """
        word = pickle.dumps(_Word(about, what)).hex()  # where that fails the others hear of it at this step
        step, self._steps = self._steps, self._steps + 1
        keys = [f"{step}/{rank}" for rank in range(self.size)]
        try:
            self._board.set(keys[self.rank], word)
            if missing := self._await_keys(keys, self.timeout_s).ranks:
                raise self.gone(missing[0], f"rank {missing[0]} did not come to load within {self.timeout_s:g} s")
            found = [pickle.loads(bytes.fromhex(self._board.get(key))) for key in keys]
            if step:
                self._board.delete(f"{step - 1}/{self.rank}")  # all have read it, since they are at this step
        except PeerError:
            raise
        except RuntimeError as exc:
            raise self._unanswered(exc) from exc
        for rank, theirs in enumerate(found):
            if theirs.about != about and rank != self.rank:
                self._agreed = True  # they know that this rank does not go on
                if isinstance(theirs.what, _Failure):
                    raise PeerError(f"rank {rank} failed before the load began: {theirs.what.why}", rank=rank)
                raise PeerError(
                    f"rank {rank} is about to load in another way than rank {self.rank} (it comes with {theirs.about}, this rank "
                    f"with {about}); ranks of a group give the same arguments, slices excepted",
                    rank=rank,
                )
        return [theirs.what for theirs in found]

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank cannot begin; then leave, when they have heard of it."""
        if not self._agreed and not self._surveyed:
            self.timeout_s = min(self.timeout_s, _FAREWELL_S)
            with suppress(HeadraceError):
                self.gather(_Failure(f"{type(error).__name__}: {error}"[:2000]), about="failure")
        self.close()

    def store_for(self, purpose: str) -> Any:
        """Of the store that the ranks share, a part that nothing else of this load, or of another one, writes to."""
        return self._board.part(purpose)

    def connect(self) -> None:
        """Make the connections for `broadcast`. Raises PeerError where they cannot be made."""
        self._wire = self.connected_by_gloo("wire")

    def connected_by_gloo(self, purpose: str) -> Any:
        """A backend of torch.distributed for these ranks, over which they wait for each other for ever: who is slow is waited for
        while it gives signs of life, and Gloo knows nothing of these.

        Gloo connects on a thread of its own, which is left behind where that fails: a rank that is gone is noticed by its missing
        signs of life, and by Gloo after five times its time limit. It has a store of its own where torch can copy one, as nobody
        else of this process can speak in the one that it waits in.

        Raises:
            PeerError: the connections could not be made, or a rank gave no sign of life meanwhile.
        """
        limit, made = timedelta(seconds=2 * self.timeout_s), Future[Any]()

        def make() -> None:
            try:
                made.set_result(dist.ProcessGroupGloo(self.store_for(purpose), self.rank, self.size, limit))
            except BaseException as exc:  # noqa: BLE001 - who waits raises it
                made.set_exception(exc)

        threading.Thread(target=make, name="headrace-connect", daemon=True).start()
        connected = threading.Event()
        start_beating(connected, self.timeout_s, self.beat)
        try:
            self.await_alive(made.done)
            group = made.result()
        except PeerError:
            raise
        except RuntimeError as exc:
            raise self.lost(exc) from exc
        finally:
            connected.set()
        group._set_default_timeout(NEVER)
        return group

    def broadcast(self, tensors: Sequence[torch.Tensor], owner: int) -> None:
        """Send, or receive into, these tensors. Raises PeerError where a rank is gone."""
        options = dist.BroadcastOptions()
        options.rootRank = owner
        try:
            for work in [self._wire.broadcast([tensor], options) for tensor in tensors]:
                self._wait(work)
        except PeerError:
            raise
        except RuntimeError as exc:
            raise self.lost(exc) from exc

    def scatter(self, status: torch.Tensor, parts: torch.Tensor, sizes: Sequence[int], owner: int) -> None:
        """Send everybody the owner's status, and each rank a part of its own. Raises as `broadcast`.

        Args:
            status: of the owner; received into on the others.
            parts: on the owner those of all ranks, one after another; on the others where this rank's comes to. Bytes.
            sizes: of each rank's part, the owner's own being 0; on the others only that of their own counts.
        """
        options = dist.BroadcastOptions()
        options.rootRank = owner
        nothing, none = torch.empty(0, dtype=torch.uint8), [0] * self.size
        if owner == self.rank:
            ends = (nothing, parts, none, list(sizes))
        else:
            ends = (parts, nothing, [sizes[self.rank] if rank == owner else 0 for rank in range(self.size)], none)
        try:
            for work in [self._wire.broadcast([status], options), self._wire.alltoall_base(*ends)]:
                self._wait(work)
        except PeerError:
            raise
        except RuntimeError as exc:
            raise self.lost(exc) from exc

    def gather_statuses(self, status: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's status, in the order of ranks, over the connections. Raises as `broadcast`."""
        found = [torch.empty_like(status) for _ in range(self.size)]
        try:
            self._wait(self._wire.allgather([found], [status]))
        except PeerError:
            raise
        except RuntimeError as exc:
            raise self.lost(exc) from exc
        return found

    def await_alive(self, is_done: Callable[[], bool]) -> None:
        """Until something is done, which may take as long as it likes while every rank gives signs of life. Raises PeerError."""
        nap, signs, look_at = threading.Event(), _Signs(self), time.monotonic() + _LOOK_S
        while not is_done():
            nap.wait(_POLL_S)
            if (now := time.monotonic()) > look_at:
                look_at = now + _LOOK_S
                self._check_unbroken()
                signs.check()

    def beat(self) -> None:
        """Give a sign of life."""
        self._beat_count += 1
        with suppress(RuntimeError):  # who misses the store finds out by the connections
            self._board.set(f"beat/{self.rank}", str(self._beat_count))

    def close(self) -> None:
        """Close the connections, also under what waits for a rank that is gone. May be called twice."""
        self._board.close()
        wire, self._wire = self._wire, None
        if wire is not None:
            with suppress(RuntimeError):
                wire.abort()

    def _await_keys(self, keys: Sequence[str], timeout_s: float) -> _Missing:
        """Until all ranks have written theirs, giving signs of life meanwhile. Who has not, after a while; nobody as a rule.

        By asking again and again: while a store waits in one thread, no other one of the process can write to it what the ranks
        of another load wait for, and torch complains of every wait that ends without its keys.
        """
        began = looked = time.monotonic()
        before, nap = list[str](), threading.Event()
        while not self._board.has(list(keys)):
            now = time.monotonic()
            if now - began > timeout_s or (self._surveyed and self._board.has([_GONE])):
                break
            if now - looked > min(_LOOK_S, timeout_s / 4):
                looked = now
                self.beat()
                before = before or self._beats()
                self._check_unbroken()
            nap.wait(min(max(_POLL_S, (now - began) / 16), _SLOW_POLL_S))
        else:
            return _Missing([], 0)
        beats = self._beats()
        missing = [rank for rank, key in enumerate(keys) if not self._board.has([key])]
        living = [rank for rank in missing if before and beats[rank] != before[rank]]
        silent = [rank for rank in missing if rank not in living]
        return _Missing([*silent, *living], len(silent))

    def _wait(self, work: Any) -> None:
        """Wait for an operation; it may take as long as it likes, so long as every rank gives signs of life."""
        signs = _Signs(self)
        while True:
            try:
                work.wait(timedelta(seconds=signs.due_s()))
            except RuntimeError:
                if work.is_completed():
                    raise
                signs.check()
            else:
                return

    def _beats(self) -> list[str]:
        """What each rank has said last, "" where nothing. Raises PeerError where the store does not answer."""
        keys = [f"beat/{rank}" for rank in range(self.size)]
        try:
            return [self._board.get(key) if self._board.has([key]) else "" for key in keys]
        except RuntimeError as exc:
            if self._board.is_stuck:
                raise self._unanswered(exc) from exc
        return [""] * self.size  # who misses the store finds out by the connections

    def _unanswered(self, error: RuntimeError) -> PeerError:
        """The error where the store cannot be reached: its keeper is gone, if a rank keeps it and that is another one."""
        rank = self._keeper()
        hint = f"; as a rule rank {rank} keeps it" if rank is not None else ""
        return PeerError(f"the store of the group cannot be reached: {str(error).splitlines()[0][:200]}{hint}", rank=rank)

    def _keeper(self) -> int | None:
        keeper = self._board.keeper
        rank = self.members.index(keeper) if keeper in self.members else None
        return rank if rank != self.rank else None

    def _check_unbroken(self) -> None:
        """Raise PeerError, about the rank that is gone, where another one has lost a connection."""
        broke = False
        with suppress(RuntimeError):  # who misses the store finds out by the connections
            broke = not self._surveyed and self._board.has([_BROKE])
        if broke:
            raise self.lost(RuntimeError("another rank lost its connection"))

    def lost(self, error: RuntimeError) -> PeerError:
        """Who is gone, after a connection broke: the one that does not say within a while that it is alive."""
        rank = self._survey()
        if rank is None:
            return PeerError(f"the connection to another rank broke: {str(error).splitlines()[0][:200]}")
        if rank == self.rank:
            return PeerError(f"rank {rank}, this one, gave no sign of life for so long that others took it for gone", rank=rank)
        return self.gone(rank, f"rank {rank} is gone: {str(error).splitlines()[0][:200]}")

    def gone(self, rank: int, why: str) -> PeerError:
        """The error about a rank that is gone, or about the one that another rank found to be gone first.

        The others have heard of it then: the store may end with this process.
        """
        self._surveyed = True
        with suppress(RuntimeError):
            first = int(self._board.set_first(_GONE, str(rank)))
            if first not in (rank, self.rank):
                rank, why = first, f"rank {first} is gone: another rank found out"
            for key in (_BROKE, f"heard/{self.rank}"):
                self._board.set(key, "1")
            heard = [f"heard/{other}" for other in range(self.size) if other != rank]
            until = time.monotonic() + _FAREWELL_S
            while not self._board.has(heard) and time.monotonic() < until:
                threading.Event().wait(_SLOW_POLL_S)
        return PeerError(why, rank=rank)

    def _survey(self) -> int | None:
        self._surveyed = True
        keys = [f"alive/{rank}" for rank in range(self.size)]
        try:
            self._board.set(keys[self.rank], "1")
            self._board.set(_BROKE, "1")
            missing = self._await_keys(keys, min(_SURVEY_S, self.timeout_s))
            if self._board.has([_GONE]):
                return int(self._board.get(_GONE))
        except RuntimeError:
            return self._keeper()
        return missing.ranks[0] if missing.silent else None


class _Signs:
    """Whether the other ranks give signs of life while this one waits for something.

    The first look is after a moment, as most waiting is over by then and each look asks the store about every rank.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers, self._seen = peers, list[str]()
        self._look_at = time.monotonic() + beat_s(peers.timeout_s)

    def due_s(self) -> float:
        """Until the next look."""
        return max(0.001, self._look_at - time.monotonic())

    def check(self) -> None:
        """Look, if it is time. Raises PeerError about a rank that gave no sign of life since the last look."""
        if time.monotonic() < self._look_at:
            return
        peers, before = self._peers, self._seen
        self._seen = peers._beats()
        self._look_at = time.monotonic() + peers.timeout_s
        silent = [rank for rank, beat in enumerate(before) if beat == self._seen[rank] and rank != peers.rank]
        if silent:
            raise peers.gone(silent[0], f"rank {silent[0]} gave no sign of life for {peers.timeout_s:g} s") from None
