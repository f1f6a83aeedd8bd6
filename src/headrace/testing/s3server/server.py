"""The server: a thread that accepts, and a thread for each connection.

Threads start with the server and end with `stop`: it sets an event, shuts all sockets down, which ends each wait, and joins them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import IO

from headrace.testing.s3server.buckets import Bucket, Buckets, Content
from headrace.testing.s3server.connection import Connection, Workings
from headrace.testing.s3server.faults import Rule, RuleBook
from headrace.testing.s3server.ledger import Ledger, Request
from headrace.testing.s3server.service import Service
from headrace.testing.s3server.signatures import Credential
from headrace.testing.s3server.turnstile import Turnstile

DOMAINS = ("s3.localhost", "localhost")

_HOST = "127.0.0.1"


class S3Server:
    """An S3 server on loopback that checks signatures, counts what it does, and fails as it is told.

    It runs from construction to `stop`, or to the end of a `with`.

    Args:
        content: a folder of buckets (served, never written to), or bytes and paths of files by key by bucket.
        access_key: who may sign.
        secret_key: with what.
        require_token: a session token that requests must carry.
        buckets: buckets that are not as usual, by name.
        faults: what goes wrong, and when.
        latency_s: added to each request, listings included, before its answer begins.
        page: the most entries in one listing.
        tls: certificate and key files, or a server's context.
        region: where it is; a signature for another is refused. None takes any.
        domains: hosts whose subdomains are buckets; of two that fit, the first one counts.
        port: 0 takes a free one.
        log: gets a line of JSON for each request when it is over.
        clock: gives seconds since the epoch.

    Example:
        >>> with S3Server({"models": {"a.bin": b"bytes"}}) as server:
        ...     server.url.startswith("http://127.0.0.1:")
        True
    """

    def __init__(
        self,
        content: str | os.PathLike[str] | Mapping[str, Mapping[str, Content]],
        *,
        access_key: str = "AKTEST",
        secret_key: str = "SKTESTSECRET",
        require_token: str | None = None,
        buckets: Mapping[str, Bucket] | None = None,
        faults: Iterable[Rule] = (),
        latency_s: float = 0.0,
        page: int = 1000,
        tls: tuple[str | os.PathLike[str], str | os.PathLike[str]] | ssl.SSLContext | None = None,
        region: str | None = "us-east-1",
        domains: Sequence[str] = DOMAINS,
        port: int = 0,
        log: IO[str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._credentials = {access_key: Credential(secret_key, require_token)}
        service = Service(Buckets(content, buckets or {}), self._credentials, region, domains, page, clock)
        self._ledger = Ledger(log)
        self._turnstile = Turnstile(self._ledger.change)
        self._workings = Workings(service, self._ledger, RuleBook(faults), latency_s, self._turnstile)
        self._tls = _context(tls)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._listener = socket.create_server((_HOST, port), backlog=1024)
        self._port = int(self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="headrace-s3server-accept", daemon=True)
        self._acceptor.start()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._port

    @property
    def url(self) -> str:
        """The endpoint, without a slash at its end."""
        return f"{'https' if self._tls else 'http'}://{_HOST}:{self.port}"

    @property
    def requests(self) -> list[Request]:
        """All requests since the start or `forget`, in the order in which they came (the last 100,000)."""
        return self._ledger.records()

    @property
    def bytes_asked(self) -> int:
        """Bytes of objects that GETs were for, also where they did not get them."""
        return self._ledger.bytes_asked

    @property
    def bytes_sent(self) -> int:
        """Bytes of all bodies that were sent, errors and listings included."""
        return self._ledger.bytes_sent

    @property
    def inflight(self) -> int:
        """How many requests are under way."""
        return self._ledger.inflight

    @property
    def peak_inflight(self) -> int:
        """How many requests were under way at once, at most."""
        return self._ledger.peak_inflight

    @property
    def connections(self) -> int:
        """How many connections were opened."""
        return self._ledger.connections

    @property
    def open_connections(self) -> int:
        """How many connections are open."""
        return self._ledger.open_connections

    @property
    def peak_connections(self) -> int:
        """How many connections were open at once, at most."""
        return self._ledger.peak_connections

    @property
    def held(self) -> int:
        """How many requests wait for `release`."""
        return self._turnstile.waiting

    @property
    def rounds(self) -> int:
        """How often `release` or `let_go` ended a wait."""
        return self._turnstile.rounds

    def hold(self) -> None:
        """From now on have every request wait for `release`, so that the rounds of a client can be counted without a clock.

        Example:
            >>> with S3Server({"models": {"a": b"a"}}) as server:  # doctest: +SKIP
            ...     server.hold()
            ...     start_a_client_that_lists_and_then_reads_four_shards()
            ...     for requests in (1, 4):
            ...         server.wait_until(lambda: server.held == requests)
            ...         server.release()
        """
        self._turnstile.hold()

    def release(self) -> int:
        """Answer the requests that wait, and have later ones wait; return how many they were."""
        return self._turnstile.release()

    def let_go(self) -> int:
        """Answer the requests that wait, and have none wait any more; return how many they were."""
        return self._turnstile.open()

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        """Wait for `requests` or a count to be as wished; return whether they are.

        Example:
            >>> with S3Server({}) as server:
            ...     server.wait_until(lambda: server.inflight == 0)
            True
        """
        return self._ledger.wait_until(predicate, timeout_s)

    def forget(self) -> None:
        """Begin anew with `requests` and counts."""
        self._ledger.forget()

    def fail(self, *rules: Rule) -> None:
        """Replace the rules of what goes wrong, with counts that begin anew; none, and nothing goes wrong any more."""
        self._workings.rules = RuleBook(rules)

    def put(self, bucket: str, key: str, content: Content) -> str:
        """Write an object, as a PUT would, and return its ETag."""
        return self._workings.service.buckets.put(bucket, key, content).etag

    def delete(self, bucket: str, key: str) -> None:
        """Delete an object, as a DELETE would."""
        self._workings.service.buckets.delete(bucket, key)

    def rotate(self, *, access_key: str, secret_key: str, token: str | None = None) -> None:
        """From now on other credentials are right; those so far are refused as expired, or their token if only that changes."""
        expired = {key: Credential(old.secret_key, old.token, expired=True) for key, old in self._credentials.items()}
        spent = self._credentials.get(access_key)
        tokens = (*spent.spent_tokens, spent.token) if spent and spent.token else ()
        self._credentials = {**expired, access_key: Credential(secret_key, token, spent_tokens=tokens)}
        self._workings.service.credentials = self._credentials

    def stop(self) -> None:
        """Close all connections, whatever they are at, and end all threads. May be called again."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            left = dict(self._connections)
        for sock in left.values():
            with contextlib.suppress(OSError):
                socket.socket.shutdown(
                    sock, socket.SHUT_RDWR
                )  # SSLSocket's own would pull TLS from under the thread that uses it
        for thread in left:
            thread.join()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # stopped, or out of descriptors
                self._stopping.wait(0.01)
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:  # the handshake is left to the connection's thread
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            number = self._ledger.connected()
            name = f"headrace-s3server-{number}"
            thread = threading.Thread(target=self._serve, args=(sock, number), name=name, daemon=True)
            with self._lock:
                self._connections[thread] = sock
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError), contextlib.closing(sock):
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            Connection(self._workings, sock, number).serve()
        self._ledger.disconnected()
        with self._lock:
            self._connections.pop(threading.current_thread(), None)


def _context(tls: tuple[str | os.PathLike[str], str | os.PathLike[str]] | ssl.SSLContext | None) -> ssl.SSLContext | None:
    if tls is None or isinstance(tls, ssl.SSLContext):
        return tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls)
    return context
