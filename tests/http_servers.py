"""Servers on loopback for the tests of the network engine: raw sockets that answer well, or badly on order.

A `Server` serves bytes by path, with ranges, ETags and keep-alive. `Fault`s say which requests are answered otherwise, and how:
every action of the fault server that the project was handed, and some that need a socket of one's own. A `ProxyServer` tunnels
and forwards. `Certificates` makes a CA and a leaf with the openssl command, since Python cannot make certificates by itself.
Nothing waits for time to pass: what stalls does so until the server is stopped.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: close() sends RST


@dataclass(frozen=True)
class Seen:
    """A request as it arrived. `end` is exclusive; both are None without a Range."""

    index: int
    connection: int
    method: str
    target: str
    headers: Mapping[str, str]
    start: int | None = None
    end: int | None = None

    @property
    def asked_nbytes(self) -> int:
        return (self.end or 0) - (self.start or 0)


@dataclass
class Fault:
    """What to do with requests that match: those from `min_start` on, after `skip` of them, each `every`-th, `times` times."""

    do: str
    skip: int = 0
    times: int = 1 << 60
    every: int = 1
    min_start: int = 0
    with_range: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    _matched: int = 0
    _used: int = 0

    def takes(self, seen: Seen) -> bool:
        if (seen.start or 0) < self.min_start or self._used >= self.times:
            return False
        self._matched += 1
        if self._matched <= self.skip or (self._matched - self.skip) % self.every:
            return False
        self._used += 1
        return True


def fault(do: str, *, skip: int = 0, times: int = 1 << 60, every: int = 1, min_start: int = 0, **options: Any) -> Fault:
    """A `Fault` in one line."""
    return Fault(do, skip=skip, times=times, every=every, min_start=min_start, options=options)


class Server:
    """Serve bytes by path.

    Attributes:
        seen: every request, in the order of arrival.
        connections: how many were accepted.
        peak: most requests under way at once.
        released: set it to end what stalls.
    """

    def __init__(
        self,
        data: bytes | Mapping[str, bytes],
        faults: Sequence[Fault] = (),
        *,
        tls: ssl.SSLContext | None = None,
        check: Callable[[Seen], tuple[int, Mapping[str, str], bytes] | None] | None = None,
        headers: Mapping[str, str] | None = None,
        etag: bool = True,
        chunked: bool = False,
        ranges: bool = True,
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self.files = {"/model.safetensors": data} if isinstance(data, (bytes, bytearray)) else dict(data)
        self.faults = list(faults)
        self.seen: list[Seen] = []
        self.connections = self.peak = 0
        self.released = threading.Event()
        self.entered = threading.Event()  # a request has begun to stall
        self._replaced = False
        self._tls, self._check, self._headers = tls, check, dict(headers or {})
        self._etag, self._chunked, self._ranges = etag, chunked, ranges
        self._in_flight = 0
        self._here = threading.local()  # what the thread of a connection answers
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listening = socket.create_server((host, 0), backlog=128)
        self.port: int = self._listening.getsockname()[1]
        self._start(self._accept)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self.host}:{self.port}/model.safetensors"

    def url_of(self, path: str) -> str:
        return f"{'https' if self._tls else 'http'}://{self.host}:{self.port}{path}"

    @property
    def asked_nbytes(self) -> int:
        return sum(seen.asked_nbytes for seen in list(self.seen))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.released.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.drop_connections()
        for thread in list(self._threads):
            thread.join(5)

    def drop_connections(self) -> None:
        """Close all connections from this side."""
        with self._lock:
            opened = list(self._open)
        for sock in opened:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="test-server", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            self._start(self._serve, sock, self.connections)

    def _serve(self, sock: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError, ssl.SSLError, ValueError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True)
            with self._lock:
                self._open.add(sock)
            with sock.makefile("rb") as reader:
                while (seen := self._read_request(reader, number)) is not None:
                    with self._lock:
                        self._in_flight += 1
                        self.peak = max(self.peak, self._in_flight)
                    try:
                        if not self.answer(sock, seen) or seen.headers.get("connection") == "close":
                            break
                    finally:
                        with self._lock:
                            self._in_flight -= 1
        with self._lock:
            self._open.discard(sock)
        sock.close()

    def _read_request(self, reader: Any, number: int) -> Seen | None:
        first = reader.readline()
        if not first:
            return None
        method, target, _ = first.decode().split(" ", 2)
        headers = {}
        while line := reader.readline().decode("latin-1").strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        start, end = None, None
        if headers.get("range", "").startswith("bytes="):
            first_byte, _, last = headers["range"][6:].partition("-")
            start, end = int(first_byte), int(last) + 1
        with self._lock:
            seen = Seen(len(self.seen), number, method, target, headers, start, end)
            self.seen.append(seen)
        self._here.is_head = method == "HEAD"
        return seen

    def reply(self, sock: socket.socket, status: int, headers: Mapping[str, str], body: bytes = b"") -> bool:
        fields = {"Content-Length": str(len(body)), **self._headers, **headers}
        head = f"HTTP/1.1 {status} Some Reason\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
        sock.sendall(head.encode("latin-1") + b"\r\n" + (b"" if getattr(self._here, "is_head", False) else body))
        return True

    def answer(self, sock: socket.socket, seen: Seen) -> bool:
        """Answer one request. False where the connection should be closed."""
        if self._check is not None and (refused := self._check(seen)) is not None:
            return self.reply(sock, *refused)
        with self._lock:
            found = next((fault for fault in self.faults if fault.takes(seen)), None)
        do, options = (found.do, found.options) if found else ("", {})
        if do == "hangup":
            return False
        if do == "slow_start":
            self.entered.set()
            self.released.wait(options["seconds"])
        if do == "status":
            body = options.get("body", b"<Error><Code>SlowDown</Code><Message>please</Message></Error>")
            return self.reply(sock, options["code"], options.get("headers", {}), body)
        if do == "redirect":
            return self.reply(sock, options.get("code", 307), {"Location": options["to"]}, b"moved")
        if do == "garbage":
            sock.sendall(options.get("head", b"SSH-2.0-OpenSSH_9.2\r\n\r\n"))
            return False
        if do == "drip":
            for byte in options["head"]:
                sock.sendall(bytes([byte]))
                if self.released.wait(options["seconds"]):
                    break
            return False
        data = self.files.get(seen.target.partition("?")[0])
        if data is None:
            return self.reply(sock, 404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
        if do == "replaced":
            self._replaced = True
        if self._replaced:
            data = bytes(byte ^ 0x55 for byte in data)
        return self._send_object(sock, seen, data, do, options)

    def _send_object(self, sock: socket.socket, seen: Seen, data: bytes, do: str, options: dict[str, Any]) -> bool:
        size, etag = len(data), f'"{hashlib.md5(data).hexdigest()}"'
        if seen.headers.get("if-match") not in (None, etag) and not options.get("ignore_if_match"):
            return self.reply(sock, 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>")
        ranged = seen.start is not None and self._ranges and do not in ("ignore_range", "gzip")
        start, end = (seen.start or 0, min(seen.end or size, size)) if ranged else (0, size)
        if ranged and start >= size:
            return self.reply(sock, 416, {"Content-Range": f"bytes */{size}"}, b"<Error><Code>InvalidRange</Code></Error>")
        first, last = start, end
        if do in ("wrong_range", "lying_range"):
            first = max(0, min(size - (end - start), start + options["by"]))
            last = first + (end - start)
        if do == "fewer":
            last = max(first + 1, last - options["bytes"])
        if do == "extra":
            last = min(size, last + options["bytes"])
        body = data[first:last]
        if do == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        headers = {"Content-Type": "application/octet-stream"}
        if self._etag:
            headers["ETag"] = etag
        if do == "gzip":
            body, headers["Content-Encoding"] = (
                gzip.compress(body[:1000]),
                "gzip",
            )  # compressing all takes longer than a brisk stall timeout
        if ranged:
            told = (start, end) if do == "lying_range" else (first, last)
            headers["Content-Range"] = f"bytes {told[0]}-{told[1] - 1}/{options.get('total', size)}"
        headers |= options.get("headers", {})
        status = options.get("status", 206 if ranged else 200)
        if self._chunked or do == "chunked":
            return self.reply(sock, status, {"Content-Length": "", "Transfer-Encoding": "chunked", **headers}, _chunks(body))
        return self._send_body(sock, status, headers, body, do, options)

    def _send_body(
        self, sock: socket.socket, status: int, headers: dict[str, str], body: bytes, do: str, options: dict[str, Any]
    ) -> bool:
        headers["Content-Length"] = str(options.get("length", len(body)))
        after = options.get("after", len(body) // 2)
        if do in ("short", "reset", "stall"):
            self.reply(sock, status, headers, body[:after])
            if do == "stall":
                self.entered.set()
                self.released.wait(options.get("seconds", 60))
            if do == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                with self._lock:
                    self._open.discard(sock)
                sock.close()
            return False
        if do == "trickle":
            self.reply(sock, status, headers)
            step = options["step"]
            for position in range(0, len(body), step):
                sock.sendall(body[position : position + step])
                self.entered.set()
                if self.released.wait(options["seconds"]):
                    break
            sock.sendall(body[position + step :])
            return True
        self.reply(sock, status, headers, body + options.get("surplus", b""))
        return do != "close"


def _chunks(body: bytes) -> bytes:
    pieces = [body[at : at + 70_001] for at in range(0, len(body), 70_001)]
    return b"".join(f"{len(piece):x};note=1\r\n".encode() + piece + b"\r\n" for piece in pieces) + b"0\r\nTrailer: 1\r\n\r\n"


class ProxyServer(Server):
    """A proxy: CONNECT is tunnelled, requests in absolute form are forwarded. `login` is what it demands."""

    def __init__(self, *, login: str | None = None, refuse: int | None = None) -> None:
        self._login, self._refuse = login, refuse
        super().__init__({})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def answer(self, sock: socket.socket, seen: Seen) -> bool:
        if self._login is not None and seen.headers.get("proxy-authorization") != self._login:
            return self.reply(sock, 407, {"Proxy-Authenticate": "Basic"}, b"who are you?")
        if self._refuse is not None:
            return self.reply(sock, self._refuse, {}, b"no")
        target = seen.target if seen.method == "CONNECT" else seen.target.split("/", 3)[2]
        host, _, port = target.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as there:
            with self._lock:
                self._open.add(there)
            if seen.method == "CONNECT":
                sock.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                fields = {name: value for name, value in seen.headers.items() if not name.startswith("proxy-")}
                fields["connection"] = "close"
                lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
                there.sendall(f"{seen.method} /{seen.target.split('/', 3)[3]} HTTP/1.1\r\n{lines}\r\n".encode())
            self._start(_pump, sock, there)
            _pump(there, sock)
            with self._lock:
                self._open.discard(there)
        return False


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for sock, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            sock.shutdown(how)


@dataclass(frozen=True)
class Certificates:
    """A CA, and a leaf for 127.0.0.1 and localhost that it signed; both as strict as Python wants them from 3.13 on."""

    ca: Path
    leaf: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        """Needs the openssl command; raises FileNotFoundError where there is none."""
        extensions = ("subjectAltName=DNS:localhost,IP:127.0.0.1", "basicConstraints=CA:FALSE", "authorityKeyIdentifier=keyid")
        (folder / "ext").write_text("\n".join(extensions) + "\n")
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        signs = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
        signed_by = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"]
        commands = [
            ["req", "-x509", *key, "-days", "2", "-subj", "/CN=testca", *signs, "-keyout", "ca.key", "-out", "ca.pem"],
            ["req", *key, "-subj", "/CN=localhost", "-keyout", "leaf.key", "-out", "leaf.csr"],
            ["x509", "-req", "-in", "leaf.csr", *signed_by, "-days", "2", "-extfile", "ext", "-out", "leaf.pem"],
        ]
        for command in commands:
            subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)
        return cls(folder / "ca.pem", folder / "leaf.pem", folder / "leaf.key")

    def server_side(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.leaf, self.key)
        return context


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def silent_listener() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield int(sock.getsockname()[1])
