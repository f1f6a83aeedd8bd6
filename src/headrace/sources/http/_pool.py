"""Connections that wait for their next request, and what all requests of a process to one endpoint share.

A `Line` per endpoint lives as long as anyone uses it; with its last user its connections are closed, so that nothing is left
behind after a load. A forked child begins with none: what it inherits is the parent's.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Final

from headrace.sources.http._connection import Connection
from headrace.sources.http._endpoint import Endpoint
from headrace.sources.http._retry import Gate, Pace

_IDLE_S: Final = 60.0  # load balancers forget silent connections after 60 s and more, without a word


class Line:
    """What all requests of this process to one endpoint share: connections that wait, the gate, and how fast ranges came.

    Attributes:
        reached: whether a connection was ever made, so that a refused one may be a server that starts anew.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.gate = Gate()
        self.pace = Pace()
        self.reached = False
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._users = 0

    def join(self) -> None:
        """Begin to use it."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Stop using it. With the last user its connections go."""
        with self._lock:
            self._users -= 1
            idle, self._idle = ([], self._idle) if self._users else (self._idle, [])
        for connection in idle:
            connection.close()

    def take(self) -> Connection | None:
        """A connection that waits, the one that was used last; None if none is fit."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return None
            if time.monotonic() - connection.idle_since < _IDLE_S and connection.is_silent:
                connection.reused = True
                return connection
            connection.close()

    def give(self, connection: Connection) -> None:
        """Let a connection wait for its next request, if anyone is left who might make one."""
        if connection.is_clean:
            connection.idle_since = time.monotonic()
            with self._lock:
                if self._users:
                    self._idle.append(connection)
                    return
        connection.close()


class Lines:
    """The lines of this process, by endpoint. A line lives as long as anyone holds it."""

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked child: the connections are the parent's."""
        self._lock = threading.Lock()
        self._lines: weakref.WeakValueDictionary[Endpoint, Line] = weakref.WeakValueDictionary()

    def line(self, endpoint: Endpoint) -> Line:
        """The line to an endpoint."""
        with self._lock:
            line = self._lines.get(endpoint)
            if line is None:
                line = self._lines[endpoint] = Line(endpoint)
            return line

    def __iter__(self) -> Iterator[Line]:
        with self._lock:
            return iter(list(self._lines.values()))


lines = Lines()
