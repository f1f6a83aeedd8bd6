"""How a rank tells the others that it takes no part any more, and why; and that it lives while it does.

Over memory that ranks share it is words in that memory (`_node`, `_pages`), over a group a message of fixed length.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from headrace.errors import PeerError

WELL, STOPPED, FAILED = 0, 1, 2

_BEAT_S: Final = 2.0
_STATUS_NBYTES: Final = 512


class Leaving(NamedTuple):
    """Why a rank takes no part any more.

    Attributes:
        status: WELL (it does take part), STOPPED or FAILED.
        blamed: the rank that is the reason, itself or one that it has lost.
        why: in words.
    """

    status: int
    blamed: int
    why: str


def gone_error(rank: int) -> PeerError:
    """The error about a rank whose process has ended without a word."""
    hint = "its own output says why, or the kernel's log (dmesg) if it was killed"
    return PeerError(f"rank {rank} is gone: its process has ended; {hint}", rank=rank)


def beat_s(timeout_s: float) -> float:
    """How often a rank gives signs of life, where others wait this long for one."""
    return min(_BEAT_S, timeout_s / 4)


def check_left(leaving: Leaving, rank: int) -> None:
    """Raise PeerError if that is what a rank says of itself."""
    if leaving.status == STOPPED:
        raise PeerError(f"rank {rank} stopped before the end of this load; its own output says why", rank=rank)
    if leaving.status == FAILED:
        why = leaving.why if leaving.blamed != rank else f"rank {rank} failed: {leaving.why}"
        raise PeerError(why, rank=leaving.blamed)


def status_of(leaving: Leaving | None) -> torch.Tensor:
    """A message about this rank."""
    status, blamed, why = leaving if leaving is not None else (WELL, 0, "")
    message = bytes([status]) + blamed.to_bytes(4, "little") + why.encode()[: _STATUS_NBYTES - 5]
    return torch.frombuffer(bytearray(message.ljust(_STATUS_NBYTES, b"\0")), dtype=torch.uint8)


def check_status(status: torch.Tensor, rank: int) -> None:
    """Raise PeerError if a rank's message says that it takes no part any more."""
    message = bytes(status.tolist())
    blamed, why = int.from_bytes(message[1:5], "little"), message[5:].rstrip(b"\0").decode(errors="replace")
    check_left(Leaving(message[0], blamed, why), rank)


def blame_for(error: BaseException) -> tuple[str, int | None]:
    """What to tell the others of an error that ends this rank's part: (in words, the rank that is the reason; None: this one)."""
    if isinstance(error, PeerError):
        return str(error), error.rank
    return f"{type(error).__name__}: {error}", None


def start_beating(ended: threading.Event, timeout_s: float, beat: Callable[[], None]) -> None:
    """Give signs of life, on a thread of its own, until the load has ended."""

    def run() -> None:
        while not ended.wait(beat_s(timeout_s)):
            beat()

    threading.Thread(target=run, name="headrace-beat", daemon=True).start()
