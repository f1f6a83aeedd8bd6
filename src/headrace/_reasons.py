"""Why a thread of a load cannot go on after another one has failed."""

from __future__ import annotations

from copy import copy

from headrace.errors import HeadraceError, StreamError


def reason_after(failed: BaseException | None) -> BaseException:
    """The error of the one that failed first, without its traceback, whose frames hold memory.

    It may reach the caller before that error does.
    """
    if isinstance(failed, HeadraceError):
        return copy(failed).with_traceback(None)
    return StreamError("the stream is closed")
