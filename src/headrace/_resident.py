"""Shards of a load whose bytes are in host memory already: of a held checkpoint, and files on tmpfs, page-locked where they lie.

Ranks that load together do without reading, all of them or none: one that did would not give the others what they wait for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from headrace._checkpoint import Checkpoint
from headrace._held import Held, Loan
from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace._inplace import InPlace, Locked
    from headrace._peers import Peers
    from headrace.devices.base import Device


class Resident:
    """What one load finds in memory.

    Args:
        checkpoint: what is loaded from.
        chosen: rows that are wanted of each shard; None for all.
        demand: the option `in_place`.
        device_name: where the load goes.

    Attributes:
        shards: those that copies to the device come straight out of.
        how: in words how a held checkpoint is held; empty for any other.
    """

    def __init__(self, checkpoint: Checkpoint, chosen: Sequence[Collection[int] | None], demand: str, device_name: str) -> None:
        self._held = checkpoint if isinstance(checkpoint, Held) else None
        self._asked, self._demands = demand in ("auto", "require"), demand == "require"
        self._wanted = {
            shard: source
            for shard, (source, rows) in enumerate(zip(checkpoint.sources, chosen, strict=True))
            if rows is None or rows
        }
        self._loan: Loan | None = None
        self.shards = self._held.locked_for(device_name) if self._held is not None else frozenset[int]()
        self.how = self._held.how if self._held is not None else ""

    def let_go(self) -> None:
        """Held memory is lent no more. May be called twice."""
        if self._loan is not None:
            self._loan.close()

    def borrow(self, device: Device | None) -> Locked | None:
        """Memory of a held checkpoint, for the load's time; what is page-locked for the device is where copies come from."""
        if self._held is None:
            return None
        self.shards = self._held.locked_for(device)
        self._loan = self._held.lend(device if self.shards else None)
        return self._loan

    def lock(self, device: Device | None, peers: Peers | None) -> tuple[Locked | None, str]:
        """Page-locked memory that copies to a device come from: what is held, or the files where they lie. Collective.

        Args:
            device: where copies go; None for the host.
            peers: ranks that load together.

        Returns:
            The memory, and why it is none although it was asked for.

        Raises:
            OptionError: it cannot be, and was demanded.
        """
        wants = self._asked or self._held is not None
        if device is None or (peers is not None and not all(peers.gather(wants, about="page-locking"))):
            refused = "another rank does not ask for it" if self._asked and device is not None else ""
            return self.borrow(None), refused
        locked, why, reasons = self._lock_by_turns(device, peers)
        if any(reasons) and self.shards:
            why = f"rank {next(rank for rank, reason in enumerate(reasons) if reason)} could not"
            self.shards = frozenset()
            if self._held is not None:
                self.let_go()
                locked = self.borrow(None)
            elif locked is not None:
                locked.close()
                locked = None
        return locked, why if self._held is None and not self.shards and self._asked else ""

    def _lock_by_turns(self, device: Device, peers: Peers | None) -> tuple[Locked | None, str, list[str]]:
        """(what is locked, why it is not, why not on each rank).

        Page-locking may move a file's times (`_inplace`). So one rank does it after the other, when all have opened their files,
        and each forgives what those before and behind it have moved.
        """
        locked: Locked | None = None
        why, reasons = "", list[str]()
        for turn in range(1 if peers is None else peers.size):
            if peers is None or turn == peers.rank:
                if turn and not any(reasons):
                    self._forgive_times(device)
                locked, why = (self.borrow(device), "") if self._held is not None else self._lock_files(device)
                if not self.shards and not why:
                    why = "what is held is not page-locked for the device"
            if peers is not None:
                reasons.append(peers.gather(why, about="page-locking")[turn])
        if peers is not None and not all(reasons):
            self._forgive_times(device)
        return locked, why, reasons

    def _forgive_times(self, device: Device) -> None:
        if self._asked and not device.pins_read_only:
            for source in self._wanted.values():
                if hasattr(source, "forgive_times"):
                    source.forgive_times()

    def _lock_files(self, device: Device) -> tuple[InPlace | None, str]:
        """The wanted shards page-locked where they lie, if that is asked for and can be; else why not."""
        if not self._asked:
            return None, "it was not asked for"
        from headrace._inplace import InPlace, NotInPlaceError

        try:
            locked = InPlace(device, self._wanted)
        except NotInPlaceError as exc:
            if self._demands:
                raise OptionError(f"in_place='require': {exc}", option="in_place") from exc
            return None, str(exc)
        self.shards = frozenset(self._wanted)
        return locked, ""
