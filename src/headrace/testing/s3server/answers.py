"""Answers in plain data, and what faults make of them. Nothing is sent here.

An object's answer says which bytes of the object it carries (`Span`); all others carry bytes of their own. `alter` does the
faults that change what is said; those that change how it is said (short, stall, trickle, ...) are done by the connection.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from headrace.testing.s3server import faults
from headrace.testing.s3server.buckets import OpenObject
from headrace.testing.s3server.errors import Refusal


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of an open object, from start to end, end exclusive."""

    source: OpenObject
    start: int
    end: int

    def chunks(self, start: int, end: int) -> Iterator[bytes]:
        """Read a part, positions counted from the span's start."""
        return self.source.chunks(self.start + start, self.start + end)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: status, headers but for Content-Length, and either bytes or a span of an object as its body."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    span: Span | None = None

    @property
    def nbytes(self) -> int:
        """The length of its body."""
        return len(self.body) if self.span is None else self.span.end - self.span.start

    def read(self) -> bytes:
        """Return its body as bytes."""
        return self.body if self.span is None else b"".join(self.span.chunks(0, self.nbytes))


def content_range(start: int, end: int, nbytes: int) -> str:
    """Return the header's value for bytes from start to end (exclusive) of an object."""
    return f"bytes {start}-{end - 1}/{nbytes}"


def refuse(action: faults.Action | None) -> None:
    """Do the faults that come instead of an answer.

    Raises:
        Refusal: the action is one of those.
    """
    match action:
        case faults.Status(code, error, headers):
            raise Refusal(error, status=code, headers=headers)
        case faults.Redirect(to, code):
            raise Refusal("TemporaryRedirect" if code == 307 else "PermanentRedirect", status=code, headers={"Location": to})


def alter(answer: Answer, action: faults.Action | None) -> Answer:
    """Return the answer that a fault makes of one."""
    match action:
        case faults.Flip(at) if answer.nbytes:
            body = bytearray(answer.read())
            body[at % len(body)] ^= 1
            return replace(answer, body=bytes(body), span=None)
        case faults.Gzip() if answer.span is None:
            return replace(answer, body=gzip.compress(answer.body), headers={**answer.headers, "Content-Encoding": "gzip"})
    return answer if answer.span is None or answer.status not in (200, 206) else _alter_span(answer, answer.span, action)


def _alter_span(answer: Answer, span: Span, action: faults.Action | None) -> Answer:
    nbytes = span.source.info.nbytes
    match action:
        case faults.IgnoreRange() | faults.Gzip():
            headers = {name: value for name, value in answer.headers.items() if name != "Content-Range"}
            whole = replace(answer, status=200, headers=headers, span=Span(span.source, 0, nbytes))
            if isinstance(action, faults.IgnoreRange):
                return whole
            return replace(whole, headers={**headers, "Content-Encoding": "gzip"}, body=gzip.compress(whole.read()), span=None)
        case faults.WrongRange(by) | faults.LyingRange(by):
            start = max(0, min(nbytes - answer.nbytes, span.start + by))
            moved = Span(span.source, start, start + answer.nbytes)
            return _told(answer, moved) if isinstance(action, faults.WrongRange) else replace(answer, span=moved)
        case faults.Fewer(fewer):
            return _told(answer, Span(span.source, span.start, max(span.start + 1, span.end - fewer)))
        case faults.Extra(extra):
            more = b"".join(span.source.chunks(span.end, min(nbytes, span.end + extra)))
            return replace(answer, body=answer.read() + more.ljust(extra, b"\0"), span=None)
    return answer


def _told(answer: Answer, span: Span) -> Answer:
    """The answer with another span, and with the truth of it in Content-Range."""
    said = {"Content-Range": content_range(span.start, span.end, span.source.info.nbytes)} if answer.status == 206 else {}
    return replace(answer, headers={**answer.headers, **said}, span=span)
