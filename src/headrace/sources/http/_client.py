"""One object's side of the conversation: each try is signed, sent, answered, judged, and made again while that can help.

A `Client` belongs to one source. It takes connections from the lines that all sources of the process share, keeps track of those
it is using so that `close` can end them, follows redirects where that is allowed, and turns the last `Failure` into the error
that callers see. It knows nothing of where bytes go.
"""

from __future__ import annotations

import base64
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from headrace.errors import OptionError, SourceError
from headrace.sources.http._access import Access, Request, Traffic
from headrace.sources.http._answers import Accepted, Asked, Version, check_answer, refusal
from headrace.sources.http._connection import Answer, Connection, Watch, encode_request
from headrace.sources.http._endpoint import Endpoint
from headrace.sources.http._failures import Failure, explain, public_url, scrub, secrets_of
from headrace.sources.http._pool import Line, lines
from headrace.sources.http._retry import Gate, Pace, Tries, parse_rate_limit, wait_asked_for

log = logging.getLogger("headrace")

_T = TypeVar("_T")

_COMPLAINT_NBYTES: Final = 64 << 10
_ENOUGH_NBYTES: Final = 64 << 10  # a server that sends less than it was asked for may go on as long as it sends this much
TICK_S: Final = 0.5
_HOPS: Final = 5
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_SAFE: Final = "%/:=&?~+!$,;'@()*[]"
_OURS: Final = {"Accept-Encoding": "identity", "Accept": "*/*", "User-Agent": "headrace"}


class _Here:
    """What a client has under way in one process; a forked child begins with nothing."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.active: set[Connection] = set()
        self.lines: dict[Endpoint, Line] = {}

    def line(self, endpoint: Endpoint) -> Line:
        """The line to an endpoint, which this client has joined."""
        with self.lock:
            line = self.lines.get(endpoint)
            if line is None:
                if self.stopped.is_set():
                    raise Failure("closed", "it was closed")
                line = self.lines[endpoint] = lines.line(endpoint)
                line.join()
            return line

    def adopt(self, connection: Connection) -> None:
        """From here on `stop` ends what waits on it."""
        with self.lock:
            if self.stopped.is_set():
                raise Failure("closed", "it was closed")
            self.active.add(connection)

    def drop(self, connection: Connection) -> None:
        with self.lock:
            self.active.discard(connection)

    def stop(self) -> None:
        """End everything that waits, and leave the lines."""
        with self.lock:
            self.stopped.set()
            active, joined = list(self.active), list(self.lines.values())
            self.lines.clear()
        for connection in active:
            connection.shut()
        for line in joined:
            line.gate.wake()
            line.leave()


class Client:
    """Ask a server for an object, or parts of it, from several threads at once.

    Args:
        url: http:// or https://; name and password in it are sent as basic authorization, unless `access` authorizes.
        access: how it is reached.
        method: GET, or HEAD, whose answers have no body.

    Attributes:
        url: as it may be shown.
        version: what every answer is compared with; None until the object is open.
        traffic: what was asked of the network so far.

    Raises:
        SourceError: it is no url that can be asked for.
        OptionError: a proxy or a file of CAs that cannot be used.
    """

    def __init__(self, url: str, access: Access, *, method: str = "GET") -> None:
        self.access = access
        self.method = method
        self.url = public_url(url)
        self.version: Version | None = None
        self.traffic = Traffic()
        self.closed = False
        self._url, self._login = _wire_url(url)
        self._located: tuple[str, bool] | None = None  # where the last redirect led: (url, whether it is the same host)
        self._pinned_at: Endpoint | None = None
        self._endpoints: dict[str, Endpoint] = {}
        self._counting = threading.Lock()
        self._process = _Here()
        try:
            self._home = self._endpoint(self._url)
        except OptionError:
            raise
        except ValueError as exc:
            raise SourceError(f"cannot open {self.url}: it is {exc}", url=self.url) from None

    def _endpoint(self, url: str) -> Endpoint:
        """Where requests for this url go; worked out once for all urls of a host. Raises ValueError as `Access.endpoint` does."""
        origin = url[: url.find("/", url.find("//") + 2)]
        found = self._endpoints.get(origin)
        if found is None:
            found = self._endpoints[origin] = self.access.endpoint(url)
        return found

    # ---- the life of it

    @property
    def here(self) -> _Here:
        """What is under way in this process."""
        here = self._process
        if here.pid != os.getpid():
            self._counting = threading.Lock()  # another thread of the parent may have held it at the fork
            here = self._process = _Here()
        return here

    def check_open(self) -> None:
        """Raise `Failure` once the client is closed."""
        if self.closed:
            raise Failure("closed", "it was closed")

    def close(self) -> None:
        """End what waits in other threads. May be called twice."""
        self.closed = True
        self.here.stop()

    def count(self, **more: int) -> None:
        """Add to the fields of `traffic`."""
        with self._counting:
            for name, number in more.items():
                setattr(self.traffic, name, getattr(self.traffic, name) + number)

    @property
    def pace(self) -> Pace:
        """How fast ranges came lately from where they last came from."""
        return self.here.line(self._endpoint((self._located or (self._url, True))[0])).pace

    # ---- patience

    def persist(
        self,
        attempt: Callable[[Tries], _T | None],
        *,
        doing: str,
        asked: tuple[int, int] | None = None,
        received: Callable[[], int] = lambda: 0,
    ) -> _T:
        """Make tries until one returns something.

        Args:
            attempt: one try; raises `Failure`, or returns None where the server sent less than was asked for, and said so.
            doing: the verb for the error.
            asked: (offset, nbytes) for the error.
            received: bytes that are in so far.

        Raises:
            SourceError: no further try can help, or none is allowed.
        """
        access, here = self.access, self.here
        tries = Tries(access.policy, access.timing)
        offset, nbytes = asked if asked is not None else (None, None)
        while True:
            before = received()
            tries.begin()
            try:
                result = attempt(tries)
                if result is not None:
                    return result
                if received() - before >= _ENOUGH_NBYTES:
                    continue
                failure = Failure("truncated", "the server sends less than was asked for")
            except Failure as exc:
                failure = exc
            if self.closed:
                failure = Failure("closed", "it was closed")
            delay_s = tries.after(failure, received() - before)
            self.count(failed=1, throttled=failure.action == "throttled")
            if delay_s is None:
                raise explain(
                    failure, doing=doing, url=self.url, offset=offset, nbytes=nbytes, attempts=tries.made, limits=tries.limit
                ) from failure
            log.info("%s: %s; trying again in %.2f s", self.url, failure, delay_s)
            access.timing.wait(here.stopped, delay_s)

    # ---- one try

    @contextmanager
    def ranged(self, asked: Asked, watch: Watch, tries: Tries) -> Iterator[tuple[Answer, Accepted]]:
        """Ask for a range. What the `with` receives may be taken: `Accepted.nbytes` bytes of the answer's body."""
        self.count(asked_nbytes=asked.end - asked.start)
        with self.asking(asked, watch, tries) as answer:
            try:
                yield answer, check_answer(answer.status, answer.headers, asked)
            except Failure as failure:
                failure.note_answer(answer.status, answer.headers)
                raise

    @contextmanager
    def asking(self, asked: Asked | None, watch: Watch, tries: Tries) -> Iterator[Answer]:
        """Ask for a range, or for all where it is None, and follow redirects where that is allowed.

        Raises:
            Failure: the server refuses, or there is no answer.
        """
        located = self._located
        url, ours = located or (self._url, True)
        for hop in range(_HOPS + 1):
            request = self._request(url, ours, asked, tries.refused and hop == 0)
            with self._exchange(request, ours, watch, tries) as (answer, sent):
                target = self._redirect(answer, sent)
                if target is None:
                    self._judge(answer, sent, asked, located if hop == 0 else None)
                    if hop:
                        self._located = url, ours
                    if self._pinned_at is None:
                        self._pinned_at = self._endpoint(url)
                    yield answer
                    return
                answer.read(_COMPLAINT_NBYTES)
            url, ours = target
        raise Failure("redirect", f"it was redirected more than {_HOPS} times")

    def _request(self, url: str, ours: bool, asked: Asked | None, refused: bool) -> Request:
        endpoint = self._endpoint(url)
        headers = {"Host": endpoint.authority, **_OURS}
        if asked is not None:
            headers["Range"] = f"bytes={asked.start}-{asked.end - 1}"
            # A hub does not know the ETag that its CDN told us.
            if asked.version is not None and self._pinned_at is endpoint:
                headers |= asked.version.precondition
        if ours:
            headers |= self._login | dict(self.access.headers)
        return Request(self.method, url, headers, (asked.start, asked.end) if asked is not None else None, refused)

    def _redirect(self, answer: Answer, sent: Request) -> tuple[str, bool] | None:
        """Where the answer leads, if it does and we may follow."""
        location, allow = answer.headers.get("location"), self.access.allow_redirect
        if answer.status not in _REDIRECTS or location is None or allow is None:
            return None
        try:
            url, _ = _wire_url(urljoin(sent.url, location))
            endpoint = self._endpoint(url)
        except OptionError:
            raise
        except (ValueError, SourceError):
            return None
        if sent.url.startswith("https:") and endpoint.scheme != "https":
            raise Failure("redirect", f"it leads from https to {public_url(url)}, without encryption", status=answer.status)
        return (url, endpoint == self._home) if allow(sent.url, url, answer.headers) else None

    def _judge(self, answer: Answer, sent: Request, asked: Asked | None, located: tuple[str, bool] | None) -> None:
        """Raise what the store says when the answer is no success."""
        opening_empty = answer.status == 416 and asked is not None and asked.version is None
        if answer.status in (200, 206) or (opening_empty and (answer.headers.get("content-range") or "").endswith("*/0")):
            return
        try:
            body = answer.read(_COMPLAINT_NBYTES)
        except Failure:
            body = b""
        store = scrub(self.access.parse_error(answer.status, answer.headers, body), secrets_of(sent.headers, sent.url))
        failure = refusal(answer.status, answer.headers, store, asked, wait_asked_for(answer.headers, self.access.timing.now()))
        if failure.kind == "redirect" and (location := answer.headers.get("location")):
            failure.args = (f"{failure}, and leads to {_target(sent.url, location)}",)
        if located is not None and located == self._located and failure.kind in ("denied", "unauthorized", "missing"):
            self._located = None  # signed for a time that is over: let the first host say anew where it is
            failure.action = "refresh"
        elif failure.action == "refresh" and self.access.authorize is None:
            failure.action = "fail"  # there is nothing to renew
        raise failure

    @contextmanager
    def _exchange(self, request: Request, ours: bool, watch: Watch, tries: Tries) -> Iterator[tuple[Answer, Request]]:
        """Send a request when the gate lets it, and see to the connection afterwards."""
        here, clock = self.here, self.access.timing.clock
        gate = here.line(self._endpoint(request.url)).gate
        quiet_s = gate.quiet_s(clock())
        if quiet_s >= tries.left_s:
            raise Failure("deadline", f"the server asks for a pause of {quiet_s:.0f} s")
        if quiet_s:
            self.access.timing.wait(here.stopped, quiet_s)
        while (ticket := gate.enter(TICK_S)) is None:
            watch.on_waiting()
        connection: Connection | None = None
        throttled = succeeded = usable = False
        try:
            connection, line, answer, sent = self._ask(here, request, ours, watch, tries)
            yield answer, sent
            succeeded = usable = True
            self._keep_quiet(gate, parse_rate_limit(answer.headers, self.access.timing.now()))
        except Failure as failure:
            throttled, usable = failure.action == "throttled", failure.status is not None
            if throttled:
                self._keep_quiet(gate, failure.wait_s)
            raise
        finally:
            gate.leave(ticket, throttled=throttled, succeeded=succeeded)
            if connection is not None:
                here.drop(connection)
                if usable and answer.reusable and answer.finished:
                    line.give(connection)
                else:
                    connection.close()

    def _keep_quiet(self, gate: Gate, wait_s: float | None) -> None:
        if wait_s and wait_s <= self.access.policy.longest_wait_s:
            gate.keep_quiet(self.access.timing.clock() + wait_s)

    def _ask(
        self, here: _Here, request: Request, ours: bool, watch: Watch, tries: Tries
    ) -> tuple[Connection, Line, Answer, Request]:
        """Sign and send, on a connection that waits if there is one; if the server has closed that meanwhile, on a new one."""
        allow_reuse = True
        while True:
            signed = self._signed(request) if ours else request
            line = here.line(self._endpoint(signed.url))
            connection = (line.take() if allow_reuse else None) or Connection(line.endpoint)
            try:
                here.adopt(connection)
                watch.on_connection(connection)
                self._prepare(connection, line, tries)
                connection.send(_encoded(signed, line.endpoint))
                self.count(requests=1)
                answer = connection.read_answer(watch)
                if signed.method == "HEAD":
                    answer.expect_no_body()
                return connection, line, answer, signed
            except BaseException as exc:
                here.drop(connection)
                connection.close()
                if not isinstance(exc, Failure) or exc.kind != "lost" or not connection.reused or self.closed:
                    raise
                allow_reuse = False

    def _prepare(self, connection: Connection, line: Line, tries: Tries) -> None:
        policy = self.access.policy
        if not connection.reused:
            try:
                connection.open(max(0.001, min(policy.connect_timeout_s, tries.left_s)))
            except Failure as failure:
                no_way = failure.kind in ("refused", "dns", "unreachable", "proxy") and failure.status is None
                if line.reached and no_way:
                    failure.action = "retry"  # it was there a moment ago
                raise
            line.reached = True
        connection.set_tick(min(TICK_S, policy.stall_timeout_s, policy.deadline_s or TICK_S))

    def _signed(self, request: Request) -> Request:
        if self.access.authorize is None:
            return request
        answer = self.access.authorize(request)
        return answer if isinstance(answer, Request) else replace(request, headers={**request.headers, **answer})


def _encoded(request: Request, endpoint: Endpoint) -> bytes:
    headers = dict(request.headers)
    target = request.url[request.url.find("/", request.url.find("//") + 2) :]
    if endpoint.proxy is not None and endpoint.tls is None:
        target = f"http://{endpoint.authority}{target}"
        if endpoint.proxy.authorization:
            headers["Proxy-Authorization"] = endpoint.proxy.authorization
    return encode_request(request.method, target, headers)


def _target(url: str, location: str) -> str:
    """Where a redirect leads, as it may be shown."""
    try:
        return public_url(urljoin(url, location))
    except ValueError:
        return public_url(location)


def _wire_url(url: str) -> tuple[str, dict[str, str]]:
    """(url without userinfo and fragment, percent-encoded where it must be; header of the userinfo)."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise SourceError(f"cannot open {public_url(url)}", url=public_url(url)) from None
    userinfo, _, netloc = parts.netloc.rpartition("@")
    login = {}
    if userinfo:
        name, _, password = userinfo.partition(":")
        pair = f"{unquote(name)}:{unquote(password)}".encode()
        login = {"Authorization": "Basic " + base64.b64encode(pair).decode()}
    return urlunsplit((parts.scheme, netloc, quote(parts.path or "/", safe=_SAFE), quote(parts.query, safe=_SAFE), "")), login
