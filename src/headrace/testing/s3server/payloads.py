"""What clients send along: request bodies, their hashes and checksums, and the aws-chunked encoding. Pure."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping

from headrace.testing.s3server.checksums import ALGORITHMS, checksum
from headrace.testing.s3server.errors import Refusal
from headrace.testing.s3server.signatures import UNSIGNED_PAYLOAD

MAX_NBYTES = 256 << 20

_STREAMED = (
    "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
    "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
)


def check_hash(declared: str, body: bytes) -> None:
    """Compare a body with what was signed for it, x-amz-content-sha256.

    Raises:
        Refusal: it is not what was signed, or what was signed is no hash.
    """
    if declared == UNSIGNED_PAYLOAD or declared in _STREAMED:
        return
    if not re.fullmatch("[0-9a-f]{64}", declared):
        message = f"x-amz-content-sha256 must be {UNSIGNED_PAYLOAD}, {', '.join(_STREAMED)} or a valid sha256 value."
        raise Refusal("InvalidArgument", message)
    computed = hashlib.sha256(body).hexdigest()
    if computed != declared:
        fields = {"ClientComputedContentSHA256": declared, "S3ComputedContentSHA256": computed}
        raise Refusal("XAmzContentSHA256Mismatch", fields=fields)


def decode(headers: Mapping[str, str], body: bytes) -> tuple[bytes, dict[str, str]]:
    """Return what a body holds and its checksum headers, those that come behind it as trailers too.

    Raises:
        Refusal: it is not the bytes that its checksums are of, or its chunks cannot be read.
    """
    trailers: dict[str, str] = {}
    if headers.get("x-amz-content-sha256") in _STREAMED:
        try:
            body, trailers = _unchunk(body)
        except ValueError as error:
            raise Refusal("InvalidRequest", "The chunks of the body cannot be read") from error
        if str(len(body)) != headers.get("x-amz-decoded-content-length", str(len(body))):
            raise Refusal("InvalidRequest", "The body is not as long as x-amz-decoded-content-length says")
    given = {**headers, **trailers}
    md5 = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
    if given.get("content-md5", md5) != md5:
        raise Refusal("BadDigest", "The Content-MD5 you specified did not match what we received.")
    sums = {f"x-amz-checksum-{name}": name for name in ALGORITHMS if f"x-amz-checksum-{name}" in given}
    for header, algorithm in sums.items():
        if checksum(algorithm, [body]) != given[header]:
            raise Refusal("BadDigest", f"The {algorithm} you specified did not match the calculated checksum.")
    return body, {header: given[header] for header in sums}


def _unchunk(body: bytes) -> tuple[bytes, dict[str, str]]:
    """Take apart `size[;chunk-signature=...] CRLF data CRLF ... 0 CRLF trailer: value CRLF ... CRLF`."""
    parts, at = [], 0
    while True:
        line_end = body.index(b"\r\n", at)
        nbytes = int(body[at:line_end].partition(b";")[0], 16)
        at = line_end + 2
        if nbytes == 0:
            break
        if body[at + nbytes : at + nbytes + 2] != b"\r\n":
            raise ValueError("a chunk ends early")
        parts.append(body[at : at + nbytes])
        at += nbytes + 2
    lines = [line for line in body[at:].decode("latin-1").split("\r\n") if ":" in line]
    return b"".join(parts), {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
