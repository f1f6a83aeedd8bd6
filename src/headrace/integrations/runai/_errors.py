"""Errors as programs written for Run:ai catch them: all that goes wrong while streaming is a `ValueError` there.

An error of headrace keeps its class and fields and becomes a `ValueError` as well, so that `except FileNotFoundError` and
`except SourceError` work beside `except ValueError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from headrace.errors import HeadraceError, StreamError


class StreamerStateError(StreamError, ValueError):
    """A streamer is asked for what it cannot do now: a second stream while the first is not finished, tensors after its end."""


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Raise the errors of headrace as `ValueError`s, too."""
    try:
        yield
    except HeadraceError as exc:
        if isinstance(exc, ValueError):
            raise
        raise value_error(exc) from exc


def value_error(error: HeadraceError) -> HeadraceError:
    """The same error, of a class that is also a `ValueError`."""
    return _restore(type(error), error.args, dict(error.__dict__))


def _restore(kind: Any, args: tuple[Any, ...], fields: dict[str, Any]) -> HeadraceError:
    made = _both(kind)
    error = made.__new__(made, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


@cache
def _both(kind: Any) -> type[HeadraceError]:
    def reduce(error: HeadraceError) -> tuple[Any, ...]:
        return _restore, (kind, error.args, dict(error.__dict__))

    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": reduce}
    return type(kind.__name__, (kind, ValueError), names)
