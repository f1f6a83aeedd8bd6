"""One HTTP/1.1 connection, and what is read off it.

`http.client` parses heads. What came along with a head is handed out first; then the body is received straight into the caller's
memory, and what has arrived is counted whatever happens next. Waiting is cut into short ticks, and at each the caller's `Watch`
may end it. Nothing here knows when to try again, what a good answer is, or what a store is; every exception of sockets and TLS
becomes a `Failure`.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import os
import re
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.errors import MissingHeaderBodySeparatorDefect
from typing import Final, Protocol

from headrace.sources.http._endpoint import Endpoint, Proxy
from headrace.sources.http._failures import Failure, Headers, Kind

_HEAD_NBYTES: Final = 64 << 10
_INFORMATIONAL: Final = 16  # answers before the answer; a server has one or two to give (RFC 9110, 15.2)
_READ_AHEAD_NBYTES: Final = 4096  # heads are shorter; what comes along is body, and has to be copied

# A reader is woken when so many bytes wait for it, and not for each packet, so that sender and reader take turns less often where
# they share a CPU: a bare loop of such calls took 0.34 and not 0.44 CPU-s/GiB, the server as much as before (16 connections, two
# busy CPUs, medians of 7 rounds, by turns, 2026-11-30; 256 KiB: 0.38, 2 MiB: 0.34). The kernel makes the window as large at once.
_WAKE_NBYTES: Final = 512 << 10


class Watch(Protocol):
    """Told of waiting and progress; either may raise a `Failure` to end it."""

    def on_connection(self, connection: Connection) -> None:
        """This connection is used from here on."""

    def on_waiting(self) -> None:
        """The gate is shut."""

    def on_quiet(self) -> None:
        """Nothing came for a tick."""

    def on_bytes(self, nbytes: int) -> None:
        """Bytes have come."""


# ---- answers


@dataclass(slots=True)
class Answer:
    """The head of an answer, and what is left of its body.

    Attributes:
        status, headers: of the head.
        reusable: whether the connection can carry another request once the body is read.
    """

    status: int
    headers: Headers
    reusable: bool
    _connection: Connection
    _watch: Watch
    _left: int | None  # bytes to come: of the body, or of a chunk; None: until the connection ends
    _chunked: bool
    _finished: bool = False

    @property
    def finished(self) -> bool:
        """Whether all of the body was read."""
        return self._finished or (self._left == 0 and not self._chunked)

    def expect_no_body(self) -> None:
        """Take the lengths in the head for those of another answer, as they are in one to HEAD."""
        self._left, self._chunked = 0, False

    def receive_into(self, view: memoryview) -> int:
        """Receive some bytes of the body into `view`. Returns how many; 0 at the body's end."""
        self.finish()
        if self.finished or not view:
            return 0
        room = view if self._left is None else view[: self._left]
        got = self._connection.receive_into(room, self._watch, coming=self._left or 0)
        if got == 0:
            if self._left is not None:
                raise Failure("truncated", "the connection ended before the body did", status=self.status)
            self._finished = True
        elif self._left is not None:
            self._left -= got
            if self._chunked and self._left == 0:
                self._connection.read_line(self._watch)
        return got

    def finish(self) -> None:
        """Read the end of the framing, once all of the body that was wanted is in: only then the connection can be used again."""
        if self._chunked and self._left == 0 and not self._finished:
            self._next_chunk()

    def read(self, limit: int) -> bytes:
        """The body, or its first `limit` bytes."""
        body, got = bytearray(), 1
        piece = memoryview(bytearray(min(limit, _HEAD_NBYTES)))
        while got and len(body) < limit:
            got = self.receive_into(piece[: limit - len(body)])
            body += piece[:got]
        return bytes(body)

    def _next_chunk(self) -> None:
        """The size line of the next chunk, and after the last one the trailers (RFC 9112, 7.1)."""
        digits = self._connection.read_line(self._watch).partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", digits):
            raise Failure("protocol", "a chunk of the body begins without its size", status=self.status)
        self._left = int(digits, 16)
        if self._left == 0:
            self._read_trailers()
            self._finished = True

    def _read_trailers(self) -> None:
        got = 0
        while line := self._connection.read_line(self._watch):
            got += len(line)
            if got > _HEAD_NBYTES:
                raise Failure("protocol", f"the trailers of the answer are longer than {_HEAD_NBYTES} bytes", status=self.status)


def _parse_head(raw: bytes) -> tuple[int, bool, Headers]:
    """(status, whether it is HTTP/1.1, fields)."""
    line, _, rest = raw.partition(b"\n")
    match = re.fullmatch(rb"HTTP/1\.([01]) +([1-5][0-9]{2})(?: .*)?\r?", line)
    if match is None:
        raise Failure("protocol", "what came back is not HTTP/1")
    return int(match[2]), match[1] == b"1", Headers(_parse_fields(rest))


# What nearly all servers send: fields of visible characters, each on one line. A tenth of the time that http.client takes.
_PLAIN_FIELDS: Final = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e]*\r?\n)*\r?\n")


def _parse_fields(raw: bytes) -> list[tuple[str, str]]:
    """The fields of a head as they come: (name, value)."""
    if _PLAIN_FIELDS.fullmatch(raw):
        pairs = (line.partition(":") for line in raw.decode("ascii").split("\n") if line.rstrip("\r"))
        return [(name, value.strip(" \t\r")) for name, _, value in pairs]
    try:
        fields = http.client.parse_headers(io.BytesIO(raw))
    except http.client.HTTPException as exc:
        raise Failure("protocol", "the head of the answer cannot be read") from exc
    if any(isinstance(defect, MissingHeaderBodySeparatorDefect) for defect in fields.defects):
        # The parser stops at a line without a colon, and what it has not read may be what says how long the body is.
        raise Failure("protocol", "the head of the answer has a line that is no field")
    return list(fields.items())


# ---- connections


class Connection:
    """One connection to an endpoint. Used by one thread at a time; `shut` may come from any.

    Attributes:
        reused: whether it has carried a request before.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.reused = False
        self.idle_since = 0.0
        self._sock: socket.socket | None = None
        self._ahead = b""  # received and not handed out yet
        self._pid = os.getpid()
        self._lock = threading.Lock()  # a number is not closed, and given away by the kernel, while `shut` uses it
        self._is_shut = False
        self._tick_s = 0.0
        self._wakes_at = 1

    def open(self, timeout_s: float) -> None:
        """Connect, through the proxy if there is one, and shake hands."""
        endpoint = self.endpoint
        via = endpoint.proxy
        host, port = (via.host, via.port) if via else (endpoint.host, endpoint.port)
        where = f"the proxy {host}:{port}" if via else f"{host}:{port}"
        try:
            sock = self._connect(host, port, timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if endpoint.tls is not None:
                if via is not None:
                    self._ask_for_tunnel(via, timeout_s)
                where = f"{endpoint.host}:{endpoint.port}"  # whose certificate it is
                self._begin_tls(sock, endpoint.tls).do_handshake()
        except OSError as exc:
            failure = _translate(exc, where, f"no connection to {where} within {timeout_s:g} s")
            if via is not None and failure.kind in ("refused", "dns", "unreachable"):
                failure.kind = "proxy"
            raise failure from exc

    def _connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """To the first address that answers. Not `create_connection`, whose sockets nobody could shut meanwhile."""
        last: OSError = OSError(errno.EADDRNOTAVAIL, "no address")
        try:
            # As bytes: for a str Python loads its tables of names in other scripts first, which takes 2 ms.
            found = socket.getaddrinfo(host.encode() if host.isascii() else host, port, type=socket.SOCK_STREAM)
        except UnicodeError as exc:  # a label that is empty, or longer than 63 characters
            raise Failure("proxy" if self.endpoint.proxy else "dns", f"{host} cannot be the name of a host") from exc
        for family, kind, protocol, _, address in found:
            sock: socket.socket | None = None
            try:
                sock = socket.socket(family, kind, protocol)
                self._adopt(sock)
                sock.settimeout(timeout_s)
                sock.connect(address)
            except OSError as exc:
                last = exc
                if sock is not None:
                    sock.close()
            else:
                return sock
        raise last

    def _adopt(self, sock: socket.socket) -> None:
        with self._lock:
            self._sock = sock
            if self._is_shut:
                raise Failure("closed", "it was closed")

    def _begin_tls(self, sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Under the lock: where another thread shuts the socket just then, the standard library loses it, open."""
        with self._lock:
            if self._is_shut:
                raise Failure("closed", "it was closed")
            self._sock = tls = context.wrap_socket(sock, server_hostname=self.endpoint.host, do_handshake_on_connect=False)
            return tls

    def _ask_for_tunnel(self, proxy: Proxy, timeout_s: float) -> None:
        target = f"{self.endpoint.host}:{self.endpoint.port}"
        if ":" in self.endpoint.host:
            target = f"[{self.endpoint.host}]:{self.endpoint.port}"
        login = {"Proxy-Authorization": proxy.authorization} if proxy.authorization else {}
        self.send(encode_request("CONNECT", target, {"Host": target, **login}))
        answer = self.read_answer(_Until(time.monotonic() + timeout_s))
        if not 200 <= answer.status < 300:
            failure = Failure("proxy", f"the proxy {proxy.host}:{proxy.port} answered {answer.status}", status=answer.status)
            failure.action = "retry" if answer.status in (502, 503, 504) else "fail"
            raise failure
        if self._ahead:
            raise Failure("proxy", f"the proxy {proxy.host}:{proxy.port} sent data before the server could")

    def set_tick(self, tick_s: float) -> None:
        """Wait no longer than this for bytes before the `Watch` is asked."""
        if tick_s == self._tick_s or self._sock is None:
            return
        self._tick_s = tick_s
        if self.endpoint.tls is not None:
            self._sock.settimeout(tick_s)
            return
        # A blocking socket with SO_RCVTIMEO: settimeout makes it non-blocking, which undoes MSG_WAITALL.
        self._sock.settimeout(None)
        timeval = struct.pack("ll", int(tick_s), int(tick_s % 1 * 1e6) or int(tick_s < 1))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", max(1, int(tick_s)) * 10, 0))

    def send(self, data: bytes) -> None:
        """Send all of a request."""
        try:
            self._open_socket.sendall(data)
        except OSError as exc:
            raise _translate(exc, self.endpoint.authority, "the request could not be sent in time") from exc

    def read_answer(self, watch: Watch) -> Answer:
        """The head of the answer; informational ones (1xx) are passed over."""
        for _ in range(_INFORMATIONAL + 1):
            status, is_new, headers = _parse_head(self._read_head(watch))
            if status >= 200:
                break
        else:
            raise Failure("protocol", f"more than {_INFORMATIONAL} informational answers came, and no other", status=status)
        watch.on_bytes(1)  # of the head only its end is progress
        wishes = {wish.strip().lower() for value in headers.get_all("connection") for wish in value.split(",")}
        reusable = "close" not in wishes if is_new else "keep-alive" in wishes
        coding = ", ".join(headers.get_all("transfer-encoding")).lower()
        if coding not in ("", "chunked"):
            raise Failure("encoding", f"the server sent it with Transfer-Encoding {coding!r}", status=status)
        chunked = coding == "chunked"
        length = headers.get("content-length") or ""
        left: int | None = int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None
        if chunked or status in (204, 304):
            left = 0
        return Answer(status, headers, reusable and left is not None, self, watch, left, chunked)

    def _read_head(self, watch: Watch) -> bytes:
        scan, raw = re.compile(rb"\n\r?\n"), bytearray(self._ahead)
        self._ahead = b""
        piece = memoryview(bytearray(_READ_AHEAD_NBYTES))
        while (end := scan.search(raw)) is None:
            if len(raw) > _HEAD_NBYTES:
                raise Failure("protocol", f"the head of the answer is longer than {_HEAD_NBYTES} bytes")
            got = self._receive(piece, watch, 0)
            if not got:
                raise Failure("lost", "the connection was closed without an answer")
            raw += piece[:got]
        self._ahead = bytes(raw[end.end() :])
        return bytes(raw[: end.end()])

    def read_line(self, watch: Watch) -> bytes:
        """A line of the framing between chunks, without its end."""
        piece = memoryview(bytearray(_READ_AHEAD_NBYTES))
        while b"\n" not in self._ahead:
            got = self._receive(piece, watch, 0)
            if not got or len(self._ahead) > _HEAD_NBYTES:
                raise Failure("truncated", "the connection ended between two chunks of the body")
            self._ahead += piece[:got]
        line, _, self._ahead = self._ahead.partition(b"\n")
        return line.rstrip(b"\r")

    def receive_into(self, view: memoryview, watch: Watch, *, coming: int = 0) -> int:
        """Receive into memory: what came along with the head first. Returns the number of bytes; 0 when the connection ended.

        Args:
            view: where to.
            watch: told of what comes, and of waiting.
            coming: bytes that the server has promised, those for `view` included; 0 where it is not known how many.
        """
        if self._ahead:
            got = min(len(view), len(self._ahead))
            view[:got] = self._ahead[:got]
            self._ahead = self._ahead[got:]
            watch.on_bytes(got)
            return got
        # One call for all that is missing: the kernel fills it without the GIL, and comes back early when it had to wait for a
        # tick. Pieces of 8 MiB, 2 MiB, 1 MiB, 256 KiB cost 0.44, 0.49, 0.52, 0.79 CPU-s/GiB, `http.client` 0.43 (16 threads on 2
        # busy cores, first quartile of 14 runs, 2026-11-29).
        if self.endpoint.tls is None:
            view = self._wake_late(view, coming)
        return self._receive(view, watch, socket.MSG_WAITALL)

    def _wake_late(self, view: memoryview, coming: int) -> memoryview:
        """Have the kernel wake us for many bytes at once, and return the part of `view` for which that is safe.

        It is safe while so many bytes follow what is waited for; whoever waits for the last ones is woken for any.
        """
        most = coming - _WAKE_NBYTES
        is_late = most >= _WAKE_NBYTES
        wakes_at = _WAKE_NBYTES if is_late else 1
        if wakes_at != self._wakes_at:
            self._open_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wakes_at)
            self._wakes_at = wakes_at
        return view[:most] if is_late else view

    def _receive(self, view: memoryview, watch: Watch, flags: int) -> int:
        sock = self._open_socket
        while True:
            try:
                got = self._records_into(sock, view) if flags and self.endpoint.tls else sock.recv_into(view, len(view), flags)
            except (BlockingIOError, TimeoutError):  # SO_RCVTIMEO; settimeout
                watch.on_quiet()
            except OSError as exc:
                raise _translate(exc, self.endpoint.authority, "") from exc
            else:
                if flags:
                    watch.on_bytes(got)
                else:
                    watch.on_quiet()  # part of a head, or of a line between chunks: who sends them byte by byte is stalling
                return got

    def _records_into(self, sock: socket.socket, view: memoryview) -> int:
        """As a MSG_WAITALL of one tick, for TLS, which hands out a record of at most 16 KiB at a time. The hot loop under TLS.

        By `read`, which is what `recv_into` calls after looking at its arguments: a tenth less CPU time (one connection, first
        quartile of 12 runs of 64 MiB, by turns, 2026-11-29).
        """
        read: Callable[[int, memoryview], int] = sock.read  # type: ignore[attr-defined]  # of an SSLSocket
        done, nbytes, now = 0, len(view), time.monotonic
        until = now() + self._tick_s
        try:
            while done < nbytes and (got := read(nbytes, view[done:])):
                done += got
                if now() > until:
                    break
        except ValueError as exc:
            raise Failure("lost", "the connection is closed") from exc
        except OSError:
            if not done:
                raise
            # What has come is counted; what went wrong comes again with the next call.
        return done

    @property
    def _open_socket(self) -> socket.socket:
        if self._sock is None:
            raise Failure("lost", "the connection is closed")
        return self._sock

    @property
    def is_clean(self) -> bool:
        """Whether no more has been received than was asked for."""
        return not self._ahead and self._sock is not None

    @property
    def is_silent(self) -> bool:
        """Whether nothing waits to be received, not even the end: only then it may carry another request."""
        if self._sock is None:
            return False
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def shut(self) -> None:
        """End whatever another thread is waiting for on this connection."""
        with self._lock:
            self._is_shut = True
            if self._sock is not None:
                _shut_down(self._sock)

    def close(self) -> None:
        """Give back the descriptor. In a forked child the parent goes on using the connection."""
        with self._lock:
            sock, self._sock = self._sock, None
            if sock is not None:
                if self._pid == os.getpid():
                    _shut_down(sock)
                sock.close()

    def __del__(self) -> None:
        # Without the lock: nobody else is left, and in a forked child it may be held for ever.
        sock = self._sock
        if sock is not None:
            if self._pid == os.getpid():
                _shut_down(sock)
            sock.close()


def _shut_down(sock: socket.socket) -> None:
    # Not SSLSocket.shutdown, which forgets the TLS state first: a reader in another thread would be given ciphertext for data.
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Until:
    """A `Watch` over something short."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def on_connection(self, connection: Connection) -> None:
        """Nothing to keep: it is only waited for here."""

    def on_waiting(self) -> None:
        """No gate is in the way."""

    def on_quiet(self) -> None:
        self.on_bytes(0)

    def on_bytes(self, nbytes: int) -> None:
        del nbytes
        if time.monotonic() > self._deadline:
            raise Failure("stalled", "the proxy did not answer in time")


_LINE_ENDS: Final = re.compile(r"[\r\n\0]")
_UNSENDABLE: Final = re.compile(r"[^\x21-\x7e]")


def encode_request(method: str, target: str, headers: dict[str, str]) -> bytes:
    """The head of a request. Raises `Failure` for what would let a name or value begin a header, or a request, of its own."""
    fields = [f"{name}: {value}" for name, value in headers.items()]
    if _LINE_ENDS.search("".join(fields)):
        name = next(name for name, value in headers.items() if _LINE_ENDS.search(f"{name}{value}"))
        where = f"the header {name}" if name.isprintable() else "a header"
        raise Failure("status", f"{where} has characters that cannot be sent, such as the line end after a key or token")
    if _UNSENDABLE.search(target):
        raise Failure("status", "the url has characters that cannot be sent")
    return "\r\n".join([f"{method} {target} HTTP/1.1", *fields, "\r\n"]).encode("latin-1", "replace")


_DNS_AGAIN: Final = (socket.EAI_AGAIN, socket.EAI_FAIL)


def _translate(exc: OSError, where: str, timed_out: str) -> Failure:
    """The failure of an exception of sockets or TLS."""
    kind: Kind = "lost"
    message = f"the connection to {where} failed: {exc.strerror or type(exc).__name__}"
    if isinstance(exc, socket.gaierror):
        kind, message = "dns", f"the host of {where} cannot be resolved: {exc.strerror}"
    elif isinstance(exc, ConnectionRefusedError):
        kind, message = "refused", f"the connection to {where} is refused"
    elif isinstance(exc, ssl.SSLCertVerificationError):
        kind, message = "certificate", f"the certificate of {where} cannot be trusted: {exc.verify_message}"
    elif isinstance(exc, ssl.SSLError) and not isinstance(exc, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        kind, message = "tls", f"TLS with {where} failed: {exc.reason or type(exc).__name__}"
    elif isinstance(exc, (TimeoutError, BlockingIOError)):
        kind, message = "stalled", timed_out
    elif exc.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.EACCES):
        kind = "unreachable"
    failure = Failure(kind, message)
    if isinstance(exc, socket.gaierror) and exc.errno in _DNS_AGAIN:
        failure.action = "retry"
    return failure
