"""Whether a load ended as it may: right bytes, or an error that its troubles explain."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from _soak.cases import Case
from _soak.troubles import CALLS, FILES, READS, SERVER, WORKED_AROUND
from headrace.errors import IntegrityError, LoadError, StreamError
from headrace.sources.http import WrongAnswerError

SECRET = "SoakCanarySecret"


class WrongError(Exception):
    """Something happened that must not: wrong bytes, an error without a reason, something left behind."""


class CallersError(Exception):
    """What the caller of a load raises itself."""


def explained(case: Case) -> tuple[type[BaseException], ...]:
    """The errors that a case may end in."""
    found = list(_of_temper(case.temper))
    alone = len(case.troubles) == 1
    for trouble in case.troubles:
        if trouble.kind in SERVER:
            kind = SERVER[trouble.kind]
            if not (alone and kind.cured_once and trouble.times == 1 and not kind.brisk):
                found += kind.explains
            if trouble.kind.startswith(("400", "expired")) and case.place == "http":
                found.append(WrongAnswerError)  # of a web server 400 says no more than that
            if trouble.kind == "replaced" and case.verifies:
                found.append(IntegrityError)
        elif trouble.kind in CALLS:
            if trouble.kind not in WORKED_AROUND or case.options.get("pin") == "require":
                found += CALLS[trouble.kind]
        else:
            found += READS.get(trouble.kind, ()) + FILES.get(trouble.kind, ())
    return tuple(found)


def _of_temper(temper: str) -> Iterator[type[BaseException]]:
    if temper == "raises":
        yield CallersError
    elif temper == "closes elsewhere":
        yield StreamError
    elif temper == "interrupts":
        yield KeyboardInterrupt


def check_error(error: BaseException, case: Case) -> str:
    """Return the error's kind, or raise `WrongError` where nothing explains it, or it tells a secret."""
    cause = error
    if isinstance(error, LoadError) and error.__cause__ is not None:
        cause = error.__cause__
    told = "".join(traceback.format_exception(error)) + repr(error)
    if SECRET in told:
        raise WrongError(f"a secret is told: {told}")
    if not isinstance(cause, explained(case)):
        raise WrongError(f"nothing explains {type(cause).__name__}: {cause}") from error
    return type(cause).__name__
