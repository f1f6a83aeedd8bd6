"""HTTP/1.1 on one connection: heads and bodies in, bytes out. Knows nothing of S3.

Sockets block and have no timeout: whoever stops a server shuts them down, which ends each wait. Files go out through sendfile,
over TLS through one buffer. Requests in absolute form ("GET http://host/path"), as proxies get them and as the AWS CRT sends
them to anyone, are taken as if host and path had come apart.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from headrace.testing.s3server.answers import Span
from headrace.testing.s3server.errors import Refusal

_HEAD_LIMIT_NBYTES = 64 << 10
_RECEIVE_NBYTES = 64 << 10
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_REASONS = {status.value: status.phrase for status in HTTPStatus}


@dataclass(frozen=True, slots=True)
class Head:
    """A request without its body.

    Attributes:
        method: GET, HEAD, ...
        path: as it came, escaped; begins with a slash.
        query: as it came, escaped, without the question mark.
        host: whom it is for, with port: the target's, or else the Host header's.
        headers: by lower-case name; several of one name are joined with commas.
        keeps_alive: whether the client wants to go on with this connection.
    """

    method: str
    path: str
    query: str
    host: str
    headers: Mapping[str, str]
    keeps_alive: bool

    @property
    def target(self) -> str:
        """Path and query."""
        return f"{self.path}?{self.query}" if self.query else self.path


def parse_head(data: bytes) -> Head:
    """Read a head, up to and without the empty line.

    Raises:
        ValueError: it is none.
    """
    first, *lines = data.decode("latin-1").split("\r\n")
    method, target, version = first.split(" ")
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise ValueError(f"unknown version {version!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise ValueError(f"not a header: {line!r}")
        name, value = name.lower(), value.strip(" \t")
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    host = headers.get("host", "")
    if target.startswith(("http://", "https://")):
        host, _, target = target.partition("://")[2].partition("/")
        target = "/" + target
    if not target.startswith("/"):
        raise ValueError(f"unknown target {target!r}")
    path, _, query = target.partition("?")
    connection = headers.get("connection", "keep-alive" if version == "HTTP/1.1" else "close").lower()
    return Head(method, path, query, host, headers, "close" not in connection)


def format_head(status: int, headers: Mapping[str, str]) -> bytes:
    """Write a head, the empty line included."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


class Wire:
    """The server's end of a connection.

    Args:
        sock: connected and blocking; closed by whoever made it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()
        self._is_plain = not isinstance(sock, ssl.SSLSocket)

    def read_head(self) -> bytes | None:
        """Wait for a request's head; None if the client has closed instead.

        Raises:
            ValueError: it is too long.
        """
        while (end := self._received.find(b"\r\n\r\n")) < 0:
            if len(self._received) > _HEAD_LIMIT_NBYTES:
                raise ValueError("the head is too long")
            data = self._sock.recv(_RECEIVE_NBYTES)
            if not data:
                return None
            self._received += data
        head = bytes(self._received[:end])
        del self._received[: end + 4]
        return head

    def read_body(self, head: Head, *, limit_nbytes: int) -> bytes:
        """Read a request's body, which most have not.

        Raises:
            Refusal: it is too long or cannot be read.
            ConnectionError: the client left before its end.
        """
        is_chunked = head.headers.get("transfer-encoding", "").lower() == "chunked"
        length = head.headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 19:
            raise Refusal("InvalidRequest", "Content-Length is no number")
        if int(length) > limit_nbytes:
            raise Refusal("EntityTooLarge")
        if (is_chunked or int(length)) and head.headers.get("expect", "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self._read_chunked(limit_nbytes) if is_chunked else self._read(int(length))

    def _read_chunked(self, limit_nbytes: int) -> bytes:
        """Read a body in the chunked transfer coding (RFC 9112, section 7.1), trailers included, which are dropped."""
        parts: list[bytes] = []
        total = 0
        while True:
            try:
                nbytes = int(self._read_line().partition(b";")[0], 16)
            except ValueError as error:
                raise Refusal("InvalidRequest", "The chunks of the body cannot be read") from error
            total += nbytes
            if total > limit_nbytes:
                raise Refusal("EntityTooLarge")
            if nbytes == 0:
                break
            parts.append(self._read(nbytes))
            self._read_line()
        while self._read_line():
            pass
        return b"".join(parts)

    def _read_line(self) -> bytes:
        while (end := self._received.find(b"\r\n")) < 0:
            self._receive(_RECEIVE_NBYTES)
        return self._read(end + 2)[:-2]

    def _read(self, nbytes: int) -> bytes:
        while len(self._received) < nbytes:
            self._receive(min(1 << 20, nbytes - len(self._received)))
        data = bytes(self._received[:nbytes])
        del self._received[:nbytes]
        return data

    def _receive(self, nbytes: int) -> None:
        data = self._sock.recv(nbytes)
        if not data:
            raise ConnectionResetError("the client left in its request")
        self._received += data

    def send(self, data: bytes, *, more: bool = False) -> int:
        """Send bytes, and return how many were taken: fewer if the client has left.

        Args:
            data: what to send.
            more: more follows at once, which may share its last packet.
        """
        view, sent = memoryview(data), 0
        flags = socket.MSG_MORE if more and self._is_plain else 0
        try:
            while sent < len(view):
                sent += self._sock.send(view[sent:], flags)
        except OSError:
            pass
        return sent

    def send_span(self, span: Span, start: int, end: int) -> int:
        """Send a part of a span, and return how many bytes were taken: fewer if the client has left or the file was cut."""
        descriptor = span.source.descriptor
        if descriptor is None:
            return self._send_view(memoryview(span.source.data)[span.start + start : span.start + end])
        if self._is_plain:
            return self._send_file(descriptor, span.start + start, span.start + end)
        return self._send_chunks(span, start, end)

    def is_held(self, wait_s: float) -> bool:
        """Wait; return False as soon as the client leaves or the connection is shut down."""
        poller = select.poll()
        poller.register(self._sock, _GONE)
        return not poller.poll(max(0.0, wait_s) * 1000)

    def _send_view(self, view: memoryview) -> int:
        sent = 0
        try:
            while sent < len(view):
                sent += self._sock.send(view[sent : sent + (1 << 22)])
        except OSError:
            pass
        return sent

    def _send_file(self, descriptor: int, start: int, end: int) -> int:
        at = start
        try:
            while at < end and (sent := os.sendfile(self._sock.fileno(), descriptor, at, end - at)):
                at += sent
        except OSError:
            pass
        return at - start

    def _send_chunks(self, span: Span, start: int, end: int) -> int:
        total = 0
        for chunk in span.chunks(start, end):
            sent = self.send(chunk)
            total += sent
            if sent < len(chunk):
                break
        return total
