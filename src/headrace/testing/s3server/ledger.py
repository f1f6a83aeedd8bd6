"""What a server was asked for and what it did: a record of each request, and counts over all of them.

A client sees nothing of an answer before the record says so: status and bytes are written down before they are sent, and taken
back if the client leaves, so a test may look as soon as its client is done. For the same reason a request counts as over when the
last part of its answer is about to be sent.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO

from headrace.testing.s3server.wire import Head

KEPT = 100_000  # records; the counts go on


@dataclass(frozen=True, slots=True)
class Request:
    """A request and what came of it.

    Attributes:
        method: GET, HEAD, ...
        target: path and query as they came.
        headers: by lower-case name, Authorization included.
        bucket: empty where there is none.
        key: empty where there is none.
        range: the Range header.
        start: first byte that was asked for, of an object that exists.
        end: end of what was asked for, exclusive.
        status: 0 before, and in place of, an answer.
        error: S3's code of what is no 2xx.
        request_id: the answer's x-amz-request-id.
        sent: bytes of the answer's body, so far.
        action: name of the fault.
        inflight: how many were under way as it came, itself included.
        connection: number of its connection, from 1.
        began_s: seconds since the epoch.
        took_s: until its last byte was about to be sent; None before.
        left_early: the client closed before all was sent.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    bucket: str
    key: str
    range: str | None
    start: int | None
    end: int | None
    status: int
    error: str | None
    request_id: str
    sent: int
    action: str | None
    inflight: int
    connection: int
    began_s: float
    took_s: float | None
    left_early: bool


@dataclass(slots=True)
class Entry:
    """A record in the making; changed by the thread of its connection, and by the ledger."""

    head: Head
    inflight: int
    connection: int
    began_s: float
    bucket: str = ""
    key: str = ""
    start: int | None = None
    end: int | None = None
    status: int = 0
    error: str | None = None
    request_id: str = ""
    sent: int = 0
    action: str | None = None
    took_s: float | None = None
    left_early: bool = False
    began_at_s: float = field(default_factory=time.perf_counter)

    def record(self) -> Request:
        """Return it as it is now."""
        return Request(
            method=self.head.method,
            target=self.head.target,
            headers=self.head.headers,
            bucket=self.bucket,
            key=self.key,
            range=self.head.headers.get("range"),
            start=self.start,
            end=self.end,
            status=self.status,
            error=self.error,
            request_id=self.request_id,
            sent=self.sent,
            action=self.action,
            inflight=self.inflight,
            connection=self.connection,
            began_s=self.began_s,
            took_s=self.took_s,
            left_early=self.left_early,
        )

    def line(self) -> str:
        """Return it as a line of JSON for a log file, without headers."""
        took_s = time.perf_counter() - self.began_at_s
        fields = {
            "t": round(self.began_s, 4),
            "method": self.head.method,
            "path": self.head.target,
            "range": self.head.headers.get("range"),
            "status": self.status,
            "error": self.error,
            "sent": self.sent,
            "do": self.action,
            "inflight": self.inflight,
            "connection": self.connection,
            "left_early": self.left_early,
            "secs": round(took_s, 6),
        }
        return json.dumps(fields)


class Ledger:
    """Records and counts of one server.

    Args:
        log: gets a line of JSON for each request when it is over.
    """

    def __init__(self, log: IO[str] | None = None) -> None:
        self.connections = 0
        self.open_connections = 0
        self.peak_connections = 0
        self.inflight = 0
        self.peak_inflight = 0
        self.bytes_asked = 0
        self.bytes_sent = 0
        self._entries: deque[Entry] = deque(maxlen=KEPT)
        self._log = log
        self._lock = threading.Condition()

    def connected(self) -> int:
        """Count a connection, and return its number."""
        with self._lock:
            self.connections += 1
            self.open_connections += 1
            self.peak_connections = max(self.peak_connections, self.open_connections)
            self._lock.notify_all()
            return self.connections

    def disconnected(self) -> None:
        """Count a connection as closed."""
        with self._lock:
            self.open_connections -= 1
            self._lock.notify_all()

    def change(self, do: Callable[[], None]) -> None:
        """Do something to counts that are kept elsewhere, and have whoever waits look at them."""
        with self._lock:
            do()
            self._lock.notify_all()

    def begin(self, head: Head, connection: int) -> Entry:
        """Write down a request that has come."""
        with self._lock:
            self.inflight += 1
            self.peak_inflight = max(self.peak_inflight, self.inflight)
            entry = Entry(head, self.inflight, connection, time.time())
            self._entries.append(entry)
            self._lock.notify_all()
            return entry

    def asked(self, entry: Entry, start: int, end: int) -> None:
        """Write down which bytes of an object a GET is for."""
        entry.start, entry.end = start, end
        if entry.head.method == "GET":
            with self._lock:
                self.bytes_asked += end - start
                self._lock.notify_all()

    def sent(self, entry: Entry, nbytes: int) -> None:
        """Count bytes of a body that are about to be sent; negative, that were not."""
        with self._lock:
            entry.sent += nbytes
            self.bytes_sent += nbytes
            self._lock.notify_all()

    def over(self, entry: Entry) -> None:
        """Count a request as over, the first time."""
        with self._lock:
            if entry.took_s is None:
                entry.took_s = time.perf_counter() - entry.began_at_s
                self.inflight -= 1
                self._lock.notify_all()

    def write(self, entry: Entry) -> None:
        """Write a request's line to the log file."""
        if self._log is not None:
            with self._lock:
                self._log.write(entry.line() + "\n")
                self._log.flush()

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for the records or counts to be as wished."""
        with self._lock:
            return self._lock.wait_for(predicate, timeout_s)

    def records(self) -> list[Request]:
        """Return all that are kept, in the order in which they came."""
        with self._lock:
            return [entry.record() for entry in self._entries]

    def forget(self) -> None:
        """Begin anew with records and counts; what is under way stays in flight."""
        with self._lock:
            self._entries.clear()
            self.peak_inflight = self.inflight
            self.peak_connections = self.open_connections
            self.bytes_asked = self.bytes_sent = self.connections = 0
