"""One connection: reads requests, has them answered, and sends the answers, as well or as badly as the rules say.

Of each request the record is right before the client can know better (see `ledger`), and its object stays open until it is sent.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import ExitStack
from dataclasses import dataclass
from email.utils import formatdate

from headrace.testing.s3server import faults
from headrace.testing.s3server.answers import Answer, alter, refuse
from headrace.testing.s3server.errors import Refusal
from headrace.testing.s3server.faults import Action, RuleBook
from headrace.testing.s3server.ledger import Entry, Ledger
from headrace.testing.s3server.payloads import MAX_NBYTES
from headrace.testing.s3server.service import Route, Service, split_address
from headrace.testing.s3server.turnstile import Turnstile
from headrace.testing.s3server.wire import Head, Wire, format_head, parse_head

_TAIL_NBYTES = 64 << 10  # of a body, sent after its request counts as over
_TRICKLE_STEP_S = 0.05
_HOST_ID = "aGVhZHJhY2UudGVzdGluZy5zM3NlcnZlciBoYXMgbm8gaG9zdHMgYmVoaW5kIGl0LiAg"


@dataclass(slots=True)
class Workings:
    """What all connections of a server share."""

    service: Service
    ledger: Ledger
    rules: RuleBook
    latency_s: float
    turnstile: Turnstile


@dataclass(frozen=True, slots=True)
class _Verdict:
    """An answer and how it is to go out."""

    answer: Answer
    action: Action | None
    keeps_alive: bool


class Connection:
    """The server's side of one connection.

    Args:
        workings: the server's.
        sock: connected, blocking; closed by whoever made it.
        number: of this connection.
    """

    def __init__(self, workings: Workings, sock: socket.socket, number: int) -> None:
        self._workings = workings
        self._ledger = workings.ledger
        self._sock = sock
        self._wire = Wire(sock)
        self._number = number

    def serve(self) -> None:
        """Serve requests until either side wants no more.

        Raises:
            OSError: the client went away.
        """
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Serve a request; return whether another may follow."""
        try:
            data = self._wire.read_head()
            if data is None:
                return False
            head = parse_head(data)
        except ValueError:
            self._wire.send(format_head(400, {"Content-Length": "0", "Connection": "close"}))
            return False
        entry = self._ledger.begin(head, self._number)
        entry.request_id = os.urandom(8).hex().upper()
        try:
            with ExitStack() as stack:  # objects that the answer is made of
                verdict = self._decide(entry, head, stack)
                return verdict is not None and self._deliver(entry, head, verdict)
        finally:
            self._ledger.over(entry)
            self._ledger.write(entry)

    def _decide(self, entry: Entry, head: Head, stack: ExitStack) -> _Verdict | None:
        """Find the answer to a request; None if the client did not wait for one."""
        service, keeps_alive = self._workings.service, False
        try:
            entry.bucket, entry.key = split_address(head, service.domains)
            body = self._wire.read_body(head, limit_nbytes=MAX_NBYTES)
            keeps_alive = head.keeps_alive
            if not self._passes(entry) or not self._holds(entry, self._workings.latency_s):
                return None
            route = service.route(head, body)
            if route.operation in ("GET", "HEAD"):
                return _Verdict(*self._object(entry, route, stack), keeps_alive)
            action = self._match(entry, route, 0)
            refuse(action)
            return _Verdict(alter(service.perform(route, body), action), action, keeps_alive)
        except Refusal as refusal:
            return _Verdict(self._refused(entry, refusal, head), None, keeps_alive)

    def _object(self, entry: Entry, route: Route, stack: ExitStack) -> tuple[Answer, Action | None]:
        service = self._workings.service
        found = service.find(route)
        stack.enter_context(found.opened)
        action = self._match(entry, route, found.start)
        if isinstance(action, faults.Replaced):
            service.buckets.replace(route.bucket, route.key)
            found = service.find(route)
            stack.enter_context(found.opened)
        self._ledger.asked(entry, found.start, found.end)
        refuse(action)
        return alter(service.give(route, found), action), action

    def _match(self, entry: Entry, route: Route, start: int) -> Action | None:
        action = self._workings.rules.match(route.operation, route.subject, start)
        entry.action = faults.name_of(action)
        return action

    def _refused(self, entry: Entry, refusal: Refusal, head: Head) -> Answer:
        entry.error = refusal.code
        if refusal.status == 304:
            return Answer(304, refusal.headers)
        body = refusal.xml(request_id=entry.request_id, host_id=_HOST_ID, resource=head.path)
        return Answer(refusal.status, {"Content-Type": "application/xml", **refusal.headers}, body)

    def _deliver(self, entry: Entry, head: Head, verdict: _Verdict) -> bool:
        """Send an answer; return whether another request may follow."""
        answer, action = verdict.answer, verdict.action
        if isinstance(action, faults.Hangup) or (isinstance(action, faults.SlowStart) and not self._holds(entry, action.wait_s)):
            return False
        keeps_alive = verdict.keeps_alive and answer.headers.get("Connection", "").lower() != "close"
        keeps_alive = keeps_alive and not isinstance(action, faults.LyingLength)  # where the body ends, the connection does
        entry.status = answer.status
        lie = action.by if isinstance(action, faults.LyingLength) else 0
        start_of_answer = format_head(answer.status, self._headers(entry, answer, keeps_alive, lie))
        nbytes = 0 if head.method == "HEAD" or answer.status in (204, 304) else answer.nbytes
        match action:
            case faults.Short(after) | faults.Reset(after) | faults.Stall(after):
                self._send(entry, start_of_answer, answer, min(nbytes, nbytes // 2 if after is None else after), nbytes)
                self._break_off(entry, action)
                return False
            case faults.Trickle(nbytes_per_s):
                return self._trickle(entry, start_of_answer, answer, nbytes, nbytes_per_s) and keeps_alive
            case _:
                return self._send(entry, start_of_answer, answer, nbytes, nbytes) and keeps_alive

    def _headers(self, entry: Entry, answer: Answer, keeps_alive: bool, lie: int) -> dict[str, str]:
        length = {} if answer.status in (204, 304) else {"Content-Length": str(max(0, answer.nbytes + lie))}
        return {
            "x-amz-id-2": _HOST_ID,
            "x-amz-request-id": entry.request_id,
            "Date": formatdate(usegmt=True),
            "Server": "AmazonS3",
            **answer.headers,
            **length,
            **({} if keeps_alive else {"Connection": "close"}),
        }

    def _send(self, entry: Entry, start_of_answer: bytes, answer: Answer, nbytes: int, promised: int) -> bool:
        """Send an answer's head and the first `nbytes` of its body; return whether the client took it."""
        tail = max(0, promised - _TAIL_NBYTES) if nbytes == promised else nbytes
        if tail == 0 and nbytes == promised:
            self._ledger.over(entry)
        if not self._send_head(entry, start_of_answer, more=nbytes > 0) or not self._send_part(entry, answer, 0, tail):
            return False
        if nbytes == promised:
            self._ledger.over(entry)
        return self._send_part(entry, answer, tail, nbytes)

    def _trickle(self, entry: Entry, start_of_answer: bytes, answer: Answer, nbytes: int, nbytes_per_s: float) -> bool:
        step = max(1, int(nbytes_per_s * _TRICKLE_STEP_S))
        if not self._send_head(entry, start_of_answer, more=False):
            return False
        for start in range(0, nbytes, step):
            if not self._send_part(entry, answer, start, min(nbytes, start + step)) or not self._holds(entry, _TRICKLE_STEP_S):
                return False
        return True

    def _send_head(self, entry: Entry, data: bytes, *, more: bool) -> bool:
        entry.left_early = self._wire.send(data, more=more) < len(data)
        return not entry.left_early

    def _send_part(self, entry: Entry, answer: Answer, start: int, end: int) -> bool:
        self._ledger.sent(entry, end - start)
        if answer.span is None:
            sent = self._wire.send(answer.body[start:end])
        else:
            sent = self._wire.send_span(answer.span, start, end)
        if sent == end - start:
            return True
        self._ledger.sent(entry, sent - (end - start))
        entry.left_early = True
        return False

    def _break_off(self, entry: Entry, action: faults.Short | faults.Reset | faults.Stall) -> None:
        if isinstance(action, faults.Stall):
            self._holds(entry, action.wait_s)
        elif isinstance(action, faults.Reset):  # closing then sends RST
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _passes(self, entry: Entry) -> bool:
        """Wait for a turn; return False as soon as the client leaves or the server stops."""
        if self._workings.turnstile.passes(lambda: self._wire.is_held(0.0)):
            return True
        entry.left_early = True
        return False

    def _holds(self, entry: Entry, wait_s: float) -> bool:
        """Wait; return False as soon as the client leaves or the server stops."""
        if wait_s <= 0 or self._wire.is_held(wait_s):
            return True
        entry.left_early = True
        return False
