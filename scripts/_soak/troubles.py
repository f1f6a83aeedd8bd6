"""What can go wrong, as tables: how it is brought about, and which errors it explains.

A trouble that a load has to get over explains no error when it comes once; `CURED_ONCE` names those. Changed bytes explain an
error only where they are verified, so `cases` draws them for such loads alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from headrace import errors
from headrace.sources import http
from headrace.testing import s3server

Draw = random.Random


@dataclass(frozen=True, slots=True)
class OnServer:
    """A rule of the S3 server: an action, the errors that it explains, and whether one of it must be got over."""

    make: Callable[[Draw], s3server.Action]
    explains: tuple[type[BaseException], ...]
    cured_once: bool = True
    brisk: bool = False  # it is noticed by waiting in vain


def _after(draw: Draw) -> int:
    return draw.choice([0, 1, 1000, draw.randrange(1 << 20)])


SERVER: dict[str, OnServer] = {
    "503": OnServer(lambda draw: s3server.Status(503, headers=_pause(draw)), (http.ThrottledError,)),
    "429": OnServer(lambda draw: s3server.Status(429, "TooManyRequests", _pause(draw)), (http.ThrottledError,)),
    "500": OnServer(lambda _: s3server.Status(500, "InternalError"), (http.UnavailableError,)),
    "502": OnServer(lambda _: s3server.Status(502, "BadGateway"), (http.UnavailableError,)),
    "400 RequestTimeout": OnServer(lambda _: s3server.Status(400, "RequestTimeout"), (errors.SourceTimeoutError,)),
    "416": OnServer(lambda _: s3server.Status(416, "InvalidRange"), (http.WrongAnswerError, errors.SourceChangedError)),
    "403": OnServer(lambda _: s3server.Status(403, "AccessDenied"), (errors.SourcePermissionError,), cured_once=False),
    "expired": OnServer(lambda _: s3server.Status(400, "ExpiredToken"), (errors.SourcePermissionError, http.RefusedError), False),
    "404": OnServer(lambda _: s3server.Status(404, "NoSuchKey"), (errors.SourceNotFoundError,), cured_once=False),
    "redirect": OnServer(
        lambda _: s3server.Redirect("http://127.0.0.1:9/x"), (http.RedirectError, http.UnreachableError), cured_once=False
    ),
    "ignored range": OnServer(lambda _: s3server.IgnoreRange(), (http.WrongAnswerError,)),
    "wrong range": OnServer(lambda draw: s3server.WrongRange(draw.choice([-4096, -1, 1, 64])), (http.WrongAnswerError,)),
    "lying range": OnServer(lambda draw: s3server.LyingRange(draw.choice([-1, 1, 64])), (errors.IntegrityError,), False),
    "flip": OnServer(lambda draw: s3server.Flip(draw.randrange(1 << 20)), (errors.IntegrityError,), False),
    "fewer": OnServer(lambda draw: s3server.Fewer(draw.randint(1, 100_000)), (errors.TruncatedError,)),
    "extra": OnServer(lambda draw: s3server.Extra(draw.randint(1, 5000)), (http.WrongAnswerError,)),
    "lying length": OnServer(lambda draw: s3server.LyingLength(draw.choice([-10, -1, 1, 10])), (http.WrongAnswerError,)),
    "short": OnServer(lambda draw: s3server.Short(_after(draw)), (errors.TruncatedError,)),
    "reset": OnServer(lambda draw: s3server.Reset(_after(draw)), (http.UnreachableError, errors.TruncatedError)),
    "hangup": OnServer(lambda _: s3server.Hangup(), (http.UnreachableError,)),
    "stall": OnServer(lambda draw: s3server.Stall(_after(draw)), (errors.SourceTimeoutError,), brisk=True),
    "slow start": OnServer(lambda _: s3server.SlowStart(60.0), (errors.SourceTimeoutError,), brisk=True),
    "trickle": OnServer(lambda _: s3server.Trickle(50_000.0), (errors.SourceTimeoutError,), brisk=True),
    "replaced": OnServer(lambda _: s3server.Replaced(), (errors.SourceChangedError, errors.FormatError), cured_once=False),
    "gzip": OnServer(lambda _: s3server.Gzip(), (http.WrongAnswerError,)),
}
NEEDS_VERIFYING = frozenset({"lying range", "flip", "read flipped"})


def _pause(draw: Draw) -> dict[str, str]:
    return draw.choice([{}, {"Retry-After": "0.01"}])


# Reads of a source of this process.
READS: dict[str, tuple[type[BaseException], ...]] = {
    "read error": (errors.SourceError,),
    "read timeout": (errors.SourceTimeoutError,),
    "read memory error": (MemoryError,),
    "read strange error": (ZeroDivisionError,),
    "read blocked": (),
    "read changed": (errors.SourceChangedError,),
    "read flipped": (errors.IntegrityError,),
}

# What somebody else does to a file while it is read. A file that is renamed over or unlinked stays as it is where it is open.
FILES: dict[str, tuple[type[BaseException], ...]] = {
    "truncated": (errors.TruncatedError, errors.SourceChangedError),
    "rewritten": (errors.SourceChangedError,),
    "grown": (errors.SourceChangedError,),
    "renamed over": (),
    "unlinked": (),
}

# Calls of the simulated runtime that fail. Registrations are worked around, unless they are demanded.
CALLS: dict[str, tuple[type[BaseException], ...]] = {
    "cudaHostRegister": (errors.PinningError,),
    "cudaHostAlloc": (errors.PinningError,),
    "cudaMalloc": (errors.DeviceMemoryError,),
    "cudaMemcpyAsync": (errors.DeviceError,),
    "cudaEventRecord": (errors.DeviceError,),
    "cudaEventCreateWithFlags": (errors.DeviceError,),
    "cudaEventQuery": (errors.DeviceError,),
    "cudaStreamWaitEvent": (errors.DeviceError,),
    "little device memory": (errors.DeviceMemoryError,),
    "little pinned memory": (errors.PinningError,),
}
WORKED_AROUND = frozenset({"cudaHostRegister", "cudaHostAlloc", "little pinned memory"})

RANKS = ("killed", "stopped", "paused", "slow", "leaves", "raises", "cannot read")
