"""Ranks that load together, one of which is killed, stopped, paused, slow, leaves, or cannot read.

Where one goes, every other rank ends within the timeout with an error that names it, or was through already.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ranks import Outcome, prepare_ranks, run_ranks
from simulated_gpu import simulated_gpu

import headrace
from _soak.cases import Case, Trouble
from _soak.judging import WrongError
from _soak.loading import Result
from _soak.models import Model, is_same, make_model, value_at
from headrace.testing import Fault, FaultySource, Raise, nth_read

_TIMEOUT_S = 4.0
_SLACK_S = 12.0  # two CPUs for all ranks, and whatever else runs
_EXPECTED = {  # what the victim and the others end in, if the trouble comes about before they are through
    "killed": (None, "PeerError"),
    "stopped": (None, "PeerError"),
    "paused": ("right bytes", "right bytes"),
    "slow": ("right bytes", "right bytes"),
    "leaves": ("left", "PeerError"),
    "raises": ("CallersError", "PeerError"),
    "cannot read": ("SourceError", "PeerError"),
}


class Told(NamedTuple):
    """What a rank tells: how it ended, which rank its error names, and the longest that it waited for a tensor."""

    how: str
    rank: int | None
    waited_s: float
    told: str = ""
    tensors: int = 0


def run_group(case: Case, root: Path) -> Result:
    """Load with several ranks.

    Raises:
        WrongError: a rank ended otherwise than it may.
    """
    prepare_ranks()
    result, model = Result(), make_model(case, root)
    trouble = case.troubles[0] if case.troubles else None
    victim = random.Random(trouble.seed).randrange(case.ranks) if trouble is not None else None
    stopped = victim if trouble is not None and trouble.kind == "stopped" else None
    outcomes = run_ranks(case.ranks, take_part, case, model, victim, timeout_s=60, hanging=stopped)
    for rank, outcome in enumerate(outcomes):
        ended = _judge(rank, outcome, victim, trouble)
        result.errors.update([ended] if ended.endswith("Error") else [])
        result.outcome = "error" if result.errors else result.outcome
    if trouble is not None:
        result.injected["rank " + trouble.kind] += 1
    result.tensors = sum(outcome.value.tensors for outcome in outcomes if outcome is not None and outcome.error is None)
    return result


def _judge(rank: int, outcome: Outcome | None, victim: int | None, trouble: Trouble | None) -> str:
    """How a rank ended; raises `WrongError` where it may not end so."""
    on_victim, on_others = _EXPECTED[trouble.kind] if trouble is not None else ("right bytes", "right bytes")
    expected = on_victim if rank == victim else on_others
    if outcome is None:
        if expected is not None:
            raise WrongError(f"rank {rank} disappeared")
        return "gone"
    if outcome.error is not None:
        raise WrongError(f"rank {rank} of which {victim} has trouble: {outcome.trace}")
    told: Told = outcome.value
    if told.how not in (expected, "right bytes"):
        raise WrongError(f"rank {rank}, with {victim} in trouble, ended in {told.how} and not in {expected}: {told.told}")
    if told.how == "PeerError" and told.rank != victim:
        raise WrongError(f"rank {rank} blames {told.rank} and not {victim}: {told.told}")
    if told.waited_s > _TIMEOUT_S + _SLACK_S:
        raise WrongError(f"rank {rank} waited {told.waited_s:.1f} s with a timeout of {_TIMEOUT_S:g} s")
    return told.how


# ---- in the ranks' processes


def take_part(rank: int, case: Case, model: Model, victim: int | None) -> Told:
    """Load with the others, and be in trouble if this rank is the victim."""
    trouble = case.troubles[0] if case.troubles and rank == victim else None
    waited_s, number, before = 0.0, 0, time.monotonic()
    try:
        with _device(case) as device:
            for name, tensor in _stream(case, model, device, trouble):
                waited_s = max(waited_s, time.monotonic() - before)
                if not is_same(tensor, value_at(model, name, {}, tensor.dtype), exact="dtype" not in case.arguments):
                    return Told("wrong bytes", None, waited_s, name)
                del tensor
                if trouble is not None and number == trouble.after and trouble.kind in _AT_A_TENSOR:
                    if trouble.kind == "leaves":
                        return Told("left", None, waited_s)
                    _AT_A_TENSOR[trouble.kind]()
                if trouble is not None and trouble.kind == "slow":
                    threading.Event().wait(0.05)
                number += 1
                before = time.monotonic()
    except Exception as exc:  # noqa: BLE001 - it is told
        waited_s = max(waited_s, time.monotonic() - before)
        return Told(type(exc).__name__, getattr(exc, "rank", None), waited_s, str(exc), number)
    if number != len(model.contents):
        return Told("too few tensors", None, waited_s, f"{number} of {len(model.contents)}")
    return Told("right bytes", None, waited_s, "", number)


def _stream(case: Case, model: Model, device: Any, trouble: Trouble | None) -> Iterator[tuple[str, Any]]:
    location: Any = model.folder
    if any(each.kind == "cannot read" for each in case.troubles):  # all ranks name what they read in the same way
        sources = [headrace.folder(model.folder).open(path.name) for path in model.shards]
        faults = [Fault(nth_read(1 + trouble.after % 3), Raise(headrace.SourceError))] if trouble is not None else []
        location = [FaultySource(source, faults) for source in sources]
    if trouble is not None and trouble.kind in _AT_A_TENSOR and trouble.kind not in ("leaves", "raises") and trouble.seed % 2:
        timer = threading.Timer(random.Random(trouble.seed).uniform(0, 0.1), _AT_A_TENSOR[trouble.kind])
        timer.daemon = True
        timer.start()
    with headrace.stream(
        location, device=device, group=True, peer_timeout_s=_TIMEOUT_S, **case.arguments, **case.options
    ) as tensors:
        yield from tensors


@contextmanager
def _device(case: Case) -> Iterator[Any]:
    if case.device != "gpu":
        yield case.device
        return
    with simulated_gpu("random") as gpu:
        yield gpu.device


class CallersError(Exception):
    """What a rank's caller raises itself."""


def _raise() -> None:
    raise CallersError


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _pause() -> None:
    """Stop for a second: another process lets this one go on."""
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
    _stop()


_AT_A_TENSOR = {"killed": _kill, "stopped": _stop, "paused": _pause, "raises": _raise, "leaves": _raise}
