"""The direct route of one load: which files a library reads straight into the device's memory, and why not the others.

The decision is the planner's (`choose_direct`); here it gets its facts: what a child process found out about the library, which
files it took, and, when the load is over, what its statistics say of the way that the bytes took.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from headrace._plan import SourceAbilities
from headrace._progress import Progress
from headrace._routes import choose_direct
from headrace.devices.base import Device
from headrace.errors import DeviceError, OptionError, SourceError
from headrace.sources.base import ByteSource, DirectSource, LocalSource
from headrace.sources.gds import DirectLoad, Gpu, Verdict, find_libraries, verdict_of


class Choice(NamedTuple):
    """For one shard.

    Attributes:
        used: whether it is read directly.
        reason: why, or why not.
        warns: whether that is a fallback.
    """

    used: bool
    reason: str
    verdict: Verdict
    warns: bool = False


def verdict_for(source: LocalSource, device: Device) -> Verdict:
    """What was, or now is, found out about the library for a file and a device."""
    made = cast(Any, device)
    runtime = getattr(made, "runtime", None)
    if runtime is None:
        return Verdict(False, f"no library reads files into the memory of {device.name}")
    gpu = Gpu(runtime.path, runtime.prefix, made.index, device.name)
    libraries = getattr(made, "direct_libraries", None) or find_libraries(runtime.prefix)
    try:
        return verdict_of(source, gpu, libraries)
    except OSError as exc:
        return Verdict(False, f"{source.url} cannot be opened again: {exc}")


class DirectRoute:
    """The direct route of one load.

    Args:
        demand: 'auto' or 'require'.
        open_device: opens the device; raises DeviceError where there is none.
        limit_s: seconds after which a read is given up; None: a minute.

    Attributes:
        files: {shard: the file}, once they are open.
        compat: whether the library was found to go by way of host memory.
        degraded: what is to be warned about.
    """

    def __init__(self, demand: str, open_device: Callable[[], Device], *, limit_s: float | None) -> None:
        self._demand, self._open_device, self._limit_s = demand, open_device, limit_s
        self.files: dict[int, DirectSource] = {}
        self.compat = False
        self.degraded: list[str] = []
        self._load: DirectLoad | None = None
        self._why = ""

    def decide(
        self,
        sources: Sequence[ByteSource],
        abilities: Sequence[SourceAbilities],
        wanted: Sequence[bool],
        *,
        opening: bool,
        shared: bool,
    ) -> list[SourceAbilities]:
        """The abilities, with what is read directly.

        Args:
            sources, abilities, wanted: one per shard; whether anything of it is.
            opening: whether the files are to be opened for it; else nothing but a child process does anything.
            shared: whether several ranks load together.

        Raises:
            OptionError: it was demanded and cannot be done.
        """
        choices = self._choose(sources, abilities, wanted, shared)
        if opening:
            choices = self._opened(sources, choices)
        fallbacks = [choice.reason for choice in choices if choice.warns]
        if fallbacks and self._demand == "require":
            self.close()
            raise OptionError(f"gds='require': {fallbacks[0]}", option="gds")
        if fallbacks:
            self.degraded.append(f"gds='auto': files go through host memory instead: {fallbacks[0]}")
        self._why = next((choice.reason for choice in choices if not choice.used and choice.reason), "nothing is read")
        self.compat = any(choice.used and choice.verdict.mode == "compat" for choice in choices)
        return [
            replace(ability, direct_nbytes=choice.verdict.max_nbytes if choice.used else 0, direct_reason=choice.reason)
            for ability, choice in zip(abilities, choices, strict=True)
        ]

    def _choose(
        self, sources: Sequence[ByteSource], abilities: Sequence[SourceAbilities], wanted: Sequence[bool], shared: bool
    ) -> list[Choice]:
        found = [Choice(False, "", Verdict(False, ""))] * len(sources)
        for shard in sorted(range(len(sources)), key=lambda shard: -sources[shard].nbytes):  # the longest is tried out
            if wanted[shard]:
                found[shard] = self._choose_one(sources[shard], abilities[shard], shared)
        return found

    def _choose_one(self, source: ByteSource, ability: SourceAbilities, shared: bool) -> Choice:
        if shared:
            reason = "ranks share what they read by way of host memory"
            return Choice(False, reason, Verdict(False, reason), self._demand == "require")
        nothing = Verdict(False, "")
        used, reason = choose_direct(self._demand, ability, usable=True, mode="", reason="")
        if not used:  # whatever the library can do
            return Choice(False, reason, nothing, self._demand == "require")
        if not hasattr(source, "reopen"):
            return Choice(False, "only files of this machine can be", nothing, self._demand == "require")
        try:
            verdict = verdict_for(cast(LocalSource, source), self._open_device())
        except DeviceError as exc:
            verdict = Verdict(False, str(exc))
        used, reason = choose_direct(self._demand, ability, usable=verdict.usable, mode=verdict.mode, reason=verdict.reason)
        return Choice(used, reason, verdict, not used and verdict.is_fallback)

    def _opened(self, sources: Sequence[ByteSource], choices: Sequence[Choice]) -> list[Choice]:
        """Open the library and register the files. What it refuses goes the other way."""
        found = []
        for shard, choice in enumerate(choices):
            try:
                if choice.used:
                    self.files[shard] = self._open(choice.verdict).open(cast(LocalSource, sources[shard]))
            except SourceError as exc:
                choice = Choice(False, str(exc), choice.verdict, warns=True)
            found.append(choice)
        return found

    def _open(self, verdict: Verdict) -> DirectLoad:
        if self._load is None:
            device = cast(Any, self._open_device())
            self._load = DirectLoad(verdict, device.runtime.prefix, device.enter_thread, limit_s=self._limit_s)
        return self._load

    def finish(self, progress: Progress) -> None:
        """Say which way the bytes took, and give the files back."""
        if progress.gds_nbytes and self._load is not None:
            progress.gds = self._load.summary()
        elif self.files:
            progress.gds = "staged: no stretch of whole pages was long enough, or its memory was not on the device"
        else:
            progress.gds = f"staged: {self._why}"
        self.close()

    def close(self) -> None:
        """Give the files back. May be called twice."""
        self.files = {}
        if self._load is not None:
            with contextlib.suppress(SourceError):
                self._load.close()
