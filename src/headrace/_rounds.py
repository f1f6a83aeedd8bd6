"""What both ways to devices have in common: the rounds of one load, as readers and the landing see them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from headrace._blocks import Blocks
from headrace._filling import Hops
from headrace._leaving import FAILED, blame_for
from headrace._owners import Share
from headrace._peers import Peers
from headrace._plan import Plan, Read
from headrace._progress import Progress
from headrace._reasons import reason_after
from headrace.devices.base import Device
from headrace.sources.base import ByteSource


class Report(Protocol):
    """Where reads that were exchanged are reported to; the engine."""

    def finish(self, read: Read, hops: Hops) -> None: ...
    def fail(self, error: BaseException) -> None: ...


class DeviceRounds(ABC):
    """The rounds of one load to devices.

    Attributes:
        report: the engine, told of reads that came in.
    """

    def __init__(
        self,
        plan: Plan,
        sources: Sequence[ByteSource],
        share: Share,
        blocks: Blocks,
        peers: Peers,
        device: Device,
        progress: Progress,
    ) -> None:
        self.report: Report | None = None
        self._plan, self._sources, self._share, self._blocks = plan, sources, share, blocks
        self._peers, self._device, self._progress = peers, device, progress
        self._round_of = {(plan.reads[i].span, plan.reads[i].position): k for k, i in enumerate(share.rounds)}
        self._state = threading.Condition()  # guards `_error`, and what those that inherit say
        self._error: BaseException | None = None

    def report_to(self, report: Report) -> None:
        """Who is told of what others have read, and of ranks that failed. Before the start."""
        self.report = report

    def takes(self, read: Read) -> bool:
        """Whether a read is exchanged."""
        return (read.span, read.position) in self._round_of

    @abstractmethod
    def leave(self, status: int, why: str, blamed: int | None = None) -> None:
        """Tell the others that this rank takes no part any more. The first reason counts."""

    def _fail(self, exc: BaseException) -> None:
        with self._state:
            self._error = self._error or exc
        self.leave(FAILED, *blame_for(exc))

    def _reason(self) -> BaseException:
        with self._state:
            return reason_after(self._error)
