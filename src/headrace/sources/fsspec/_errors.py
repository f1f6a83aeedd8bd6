"""Errors of whatever a filesystem raises, without what must not be shown."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from headrace.errors import SourceError, SourceNotFoundError, SourcePermissionError, SourceTimeoutError


class Words:
    """Makes errors of whatever a filesystem raises, and shows no secret.

    Args:
        where: what a url lies in, to be added to messages.
        secrets: strings that are not shown.
    """

    def __init__(self, where: str, secrets: frozenset[str]) -> None:
        self._where, self._secrets = where, secrets

    def of(self, exc: BaseException) -> str:
        """What an exception says, without secrets."""
        text = re.sub(r"://[^/\s]*@", "://", str(exc))
        text = re.sub(r"(://[^\s?'\"]*)\?[^\s'\")]*", r"\1?...", text)
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "...")
        return text or type(exc).__name__

    def cause(self, exc: Exception) -> Exception | None:
        """The exception, unless it has a secret in it, which a traceback would show."""
        return exc if self.of(exc) in (str(exc), type(exc).__name__) else None

    def error(self, exc: Exception, doing: str, url: str, offset: int | None = None, nbytes: int | None = None) -> SourceError:
        """An exception of the filesystem as one of ours."""
        status = next((code for name in ("status", "errno") if type(code := getattr(exc, name, None)) is int), None)
        what = f"{nbytes} bytes at {offset} of {url}" if nbytes is not None else url
        message = f"cannot {doing} {what}{self._where}: {type(exc).__name__}: {self.of(exc)}"
        return _kind_of(exc, status)(message, url=url, offset=offset, nbytes=nbytes, status=status)

    @contextlib.contextmanager
    def explained(self, doing: str, url: str, offset: int | None = None, nbytes: int | None = None) -> Iterator[None]:
        """What is raised inside, as a `SourceError`."""
        try:
            yield
        except SourceError:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever a filesystem of anybody's raises
            raise self.error(exc, doing, url, offset, nbytes) from self.cause(exc)


def _kind_of(exc: Exception, status: int | None) -> type[SourceError]:
    from asyncio import TimeoutError as AsyncTimeoutError  # another one than the built-in before Python 3.11

    if isinstance(exc, (FileNotFoundError, NotADirectoryError)):
        return SourceNotFoundError
    if isinstance(exc, PermissionError) or (not isinstance(exc, OSError) and status in (401, 403)):
        return SourcePermissionError
    if isinstance(exc, (TimeoutError, AsyncTimeoutError)):
        return SourceTimeoutError
    return SourceError
