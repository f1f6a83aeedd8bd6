"""Which bytes a request is for, and whether it is to be answered at all: Range and the If-... headers. Pure.

Rules: RFC 9110, sections 13 and 14. S3 honours one range only; a header with several, or none that can be read, is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from headrace.testing.s3server.errors import Refusal


def byte_range(header: str | None, nbytes: int) -> tuple[int, int] | None:
    """Return start and end (exclusive) of the range that a header asks for; None where there is none to honour.

    Raises:
        Refusal: 416, no byte of an object of `nbytes` lies in it.
    """
    match = re.fullmatch(r"bytes=(\d{0,19})-(\d{0,19})", (header or "").strip(), re.ASCII)
    if match is None or not (match[1] or match[2]):
        return None
    if match[1]:
        start, end = int(match[1]), int(match[2]) + 1 if match[2] else nbytes
        if match[2] and end <= start:
            return None  # its last byte lies before its first: no valid range, ignored
    else:
        start, end = max(0, nbytes - int(match[2])), nbytes
    if start >= end or start >= nbytes:
        fields = {"RangeRequested": header or "", "ActualObjectSize": str(nbytes)}
        raise Refusal("InvalidRange", headers={"Content-Range": f"bytes */{nbytes}"}, fields=fields)
    return start, min(end, nbytes)


def check_conditions(headers: Mapping[str, str], *, etag: str, modified_s: float) -> None:
    """Check the conditions of a GET or HEAD, in the order of RFC 9110, section 13.2.2.

    Raises:
        Refusal: 412 or 304.
    """
    if_match, if_none_match = headers.get("if-match"), headers.get("if-none-match")
    if if_match is not None:
        if not _names(if_match, etag):
            raise Refusal("PreconditionFailed", fields={"Condition": "If-Match"})
    elif _is_later(modified_s, headers.get("if-unmodified-since")) is True:
        raise Refusal("PreconditionFailed", fields={"Condition": "If-Unmodified-Since"})
    if if_none_match is not None:
        if _names(if_none_match, etag):
            raise Refusal("NotModified", headers={"ETag": etag})
    elif _is_later(modified_s, headers.get("if-modified-since")) is False:
        raise Refusal("NotModified", headers={"ETag": etag})


def range_applies(headers: Mapping[str, str], *, etag: str) -> bool:
    """Whether Range counts: If-Range is absent or names what is there."""
    return headers.get("if-range") in (None, etag)


def _names(header: str, etag: str) -> bool:
    names = [name.strip().removeprefix("W/").strip('"') for name in header.split(",")]
    return names == ["*"] or etag.strip('"') in names


def _is_later(modified_s: float, date: str | None) -> bool | None:
    """Whether an object was written after a date; None where there is no date that can be read."""
    if date is None:
        return None
    try:
        return int(modified_s) > parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
