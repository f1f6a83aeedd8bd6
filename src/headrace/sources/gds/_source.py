"""Files of one load that a library reads into device memory.

A library is opened once per process and never closed: torch and others may use it as well.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Final

from headrace._calls import Callers
from headrace.errors import SourceError, SourceTimeoutError, TruncatedError
from headrace.sources.base import LocalSource
from headrace.sources.gds import _verdict
from headrace.sources.gds._library import CallError, Handle, Library, Routes, register
from headrace.sources.gds._verdict import Verdict, mode_of

READ_LIMIT_S: Final = 60.0  # one request of at most 16 MiB


class _Opened:
    """The libraries that this process has opened, or found that it cannot open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[int, Library | str]] = {}

    def get(self, path: str, prefix: str, callers: Callers) -> Library:
        """Raises `SourceError`."""
        with self._lock:
            pid, found = self._known.get(path, (0, ""))
            if not pid:
                pid, found = self._known[path] = os.getpid(), _open(path, prefix, callers)
        if pid != os.getpid():
            raise SourceError("the library was opened before this process was forked off, which it does not survive", url=path)
        if isinstance(found, str):
            raise SourceError(found, url=path)
        return found


_opened = _Opened()


def _open(path: str, prefix: str, callers: Callers) -> Library | str:
    limit_s = _verdict.PROBE_LIMIT_S
    try:
        library = Library(path, prefix)
        callers.call(library.open, limit_s=limit_s)
    except TimeoutError:
        return f"opening it did not come back within {limit_s:g} s, though it did where it was tried out"
    except (CallError, OSError, AttributeError) as exc:
        return str(exc)
    return library


class DirectFile:
    """A local file that a library reads into device memory. See `DirectSource`.

    Args:
        source: the open file; it can be closed while this one lives.
        library: opened.
        callers: threads for its calls.
        limit_s: seconds after which a call is given up.

    Attributes:
        max_nbytes: the longest request that the library carries out in one piece.

    Raises:
        SourceError: the library refuses the file. SourceTimeoutError: registering it did not come back.
    """

    def __init__(self, source: LocalSource, library: Library, callers: Callers, *, limit_s: float, max_nbytes: int) -> None:
        self.url, self.nbytes, self.max_nbytes = source.url, source.nbytes, max_nbytes
        self._library, self._callers, self._limit_s = library, callers, limit_s
        self._handle: Handle | None
        try:
            self._handle = callers.call(register, library, source.reopen, limit_s=limit_s)
        except SourceError:  # it was closed
            raise
        except TimeoutError:
            raise self._overdue("registering it", None, None) from None
        except OSError as exc:
            raise SourceError(f"cannot open {self.url} again: {exc.strerror}", url=self.url, status=exc.errno) from exc
        except CallError as exc:
            raise SourceError(f"cannot read {self.url} directly: {exc}", url=self.url, status=exc.code) from exc

    def read_into_device(self, offset: int, pointer: int, nbytes: int, *, keep: object) -> None:
        done = 0
        while done < nbytes:
            length = min(nbytes - done, self.max_nbytes)
            count = self._read(offset + done, pointer + done, length, keep)
            if not count:
                raise TruncatedError(
                    f"{self.url} ended at byte {offset + done} while {self._library.kind} read {nbytes} bytes at {offset}",
                    url=self.url,
                    offset=offset,
                    nbytes=nbytes,
                )
            done += count

    def _read(self, offset: int, pointer: int, nbytes: int, keep: object) -> int:
        handle = self._handle
        try:
            if handle is None:
                raise SourceError(f"{self.url} is read after it was closed", url=self.url, offset=offset, nbytes=nbytes)
            count = self._callers.call(_read, self._library, handle, pointer, nbytes, offset, keep, limit_s=self._limit_s)
        except TimeoutError as exc:
            if isinstance(exc, SourceError):
                raise
            raise self._overdue(f"reading {nbytes} bytes at {offset}", offset, nbytes) from None
        except CallError as exc:
            raise SourceError(
                f"cannot read {self.url} directly ({nbytes} bytes at {offset}): {exc}; gds='off' reads it the usual way",
                url=self.url, offset=offset, nbytes=nbytes, status=exc.code,
            ) from exc  # fmt: skip
        finally:
            handle = keep = None  # a traceback that lives on must keep neither
        if not 0 <= count <= nbytes:
            raise SourceError(f"{self._library.kind} says it read {count} bytes of {nbytes}", url=self.url, offset=offset)
        return count

    def _overdue(self, doing: str, offset: int | None, nbytes: int | None) -> SourceTimeoutError:
        return SourceTimeoutError(
            f"{self._library.kind} did not come back within {self._limit_s:g} s from {doing} of {self.url}; its thread and "
            "memory are left to it. gds='off' reads the file the usual way",
            url=self.url, offset=offset, nbytes=nbytes,
        )  # fmt: skip

    def close(self) -> None:
        """Give the handle back, when no read is under way any more. May be called twice."""
        self._handle = None


def _read(library: Library, handle: Handle, pointer: int, nbytes: int, offset: int, keep: object) -> int:
    count = library.read(handle.value, pointer, nbytes, offset)
    del keep  # not before: it is what the call writes to
    return count


class DirectLoad:
    """The files of one load, and what the library says of their reads when it is over.

    Args:
        verdict: usable.
        prefix: of the GPU's runtime.
        enter: makes the GPU the current device of a thread.
        limit_s: seconds after which a call is given up; None: a minute.

    Raises:
        SourceError: the library cannot be opened here.
    """

    def __init__(self, verdict: Verdict, prefix: str, enter: Callable[[], None], *, limit_s: float | None) -> None:
        self._callers = Callers(enter)
        self._limit_s = READ_LIMIT_S if limit_s is None else limit_s
        self._max_nbytes = verdict.max_nbytes
        self._files: list[DirectFile] = []
        try:
            self._library = _opened.get(verdict.path, prefix, self._callers)
        except BaseException:
            self._callers.close()
            raise
        self._before = self._library.routes()

    def open(self, source: LocalSource) -> DirectFile:
        """Register a file. Raises `SourceError`."""
        file = DirectFile(source, self._library, self._callers, limit_s=self._limit_s, max_nbytes=self._max_nbytes)
        self._files.append(file)
        return file

    def routes(self) -> Routes | None:
        """Which way reads took since the load began, those of other loads at the same time included; None: it does not tell."""
        now = self._library.routes()
        return now.since(self._before) if now is not None and self._before is not None else None

    def summary(self) -> str:
        """'gds(p2p): ...', 'gds(compat): ...', 'gds(mixed): ...' or 'gds: ...'."""
        routes = self.routes()
        if routes is None:
            return f"gds: {self._library.name} does not tell which way its reads took"
        mode = mode_of(routes)
        return f"gds({mode}): {self._library.name}, reads: {routes}" if mode else f"gds: {self._library.name} counts no reads"

    def close(self) -> None:
        """Give the files back. May be called twice."""
        for file in self._files:
            file.close()
        self._callers.close()
