"""Floors for stores: bare `http.client`, a thread per connection, and ranges off one counter.

Each range is one signed GET whose answer is checked and read by `readinto` into memory that is there beforehand. Nobody retries,
and nobody makes tensors.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import memory
from harness.child import Job
from harness.floors import in_threads
from harness.targets import RANGE_NBYTES, REGION, Range, Target, ranges

_NOTHING_SHA256 = hashlib.sha256(b"").hexdigest()


def into_buffers(job: Job) -> Callable[[], Any]:
    """Into one buffer per object."""
    views = [memory.allocate(os.path.getsize(file)) for file in job.files]

    def run() -> Any:
        _read_all(job, lambda: lambda part: views[part.file][part.start : part.end])
        job.keep_files(views)
        return {}, views

    return run


def into_files(job: Job) -> Callable[[], Any]:
    """Into a buffer per thread, and from there into the files of a folder by `pwrite`. Setting `folder`."""
    folder = Path(job.settings["folder"])
    paths = [folder / Path(file).name for file in job.files]

    def place() -> Callable[[Range], memoryview]:
        buffer = memory.allocate(RANGE_NBYTES)
        return lambda part: buffer[: part.end - part.start]

    def run() -> Any:
        fds = [os.open(path, os.O_WRONLY | os.O_CREAT, 0o600) for path in paths]
        _read_all(job, place, lambda part, view: os.pwrite(fds[part.file], view, part.start))
        for fd in fds:
            os.close(fd)
        job.keep_folder(folder)

    return run


def _read_all(
    job: Job,
    make_place: Callable[[], Callable[[Range], memoryview]],
    then: Callable[[Range, memoryview], object] = lambda _part, _view: None,
) -> None:
    """Read all ranges. `make_place` tells each thread where a range goes, `then` what becomes of it."""
    target = job.store
    parts = ranges(job.files)
    context = ssl.create_default_context(cafile=target.ca) if target.tls else None
    connections = ExitStack()

    def reader() -> Callable[[int], None]:
        connection, place = _connection(target, context), make_place()
        connections.callback(connection.close)

        def read(i: int) -> None:
            view = place(parts[i])
            _get(connection, target, parts[i], view)
            then(parts[i], view)

        return read

    with connections:
        in_threads(job.settings["connections"], len(parts), reader)


def _connection(target: Target, context: ssl.SSLContext | None) -> http.client.HTTPConnection:
    if context is not None:
        return http.client.HTTPSConnection(target.netloc, context=context)
    return http.client.HTTPConnection(target.netloc)


def _get(connection: http.client.HTTPConnection, target: Target, part: Range, view: memoryview) -> None:
    path = target.path(part.key)
    headers = {"Range": part.header}
    if target.scheme == "s3":
        headers |= signature(target, path, part.header)
    connection.request("GET", f"{path}?{target.query}" if target.query else path, headers=headers)
    response = connection.getresponse()
    if response.status != 206 or response.getheader("Content-Range") != part.content_range:
        raise OSError(f"{part.header} of {part.key}: {response.status}, Content-Range {response.getheader('Content-Range')}")
    at = 0
    while at < len(view):
        taken = response.readinto(view[at:])
        if not taken:
            raise OSError(f"{part.header} of {part.key} ended after {at} bytes")
        at += taken
    response.read()  # the connection takes no further request before it has seen the end


def signature(target: Target, path: str, byte_range: str) -> dict[str, str]:
    """Headers that sign a GET of a range: AWS Signature Version 4, as S3 has it (the path as it is sent, nothing as payload)."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    signed = {"host": target.netloc, "range": byte_range, "x-amz-content-sha256": _NOTHING_SHA256, "x-amz-date": now}
    names = ";".join(signed)
    request = "\n".join(["GET", path, "", *(f"{name}:{value}" for name, value in signed.items()), "", names, _NOTHING_SHA256])
    scope = [now[:8], REGION, "s3", "aws4_request"]
    text = "\n".join(["AWS4-HMAC-SHA256", now, "/".join(scope), hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{target.secret}".encode()
    for word in scope:
        key = hmac.digest(key, word.encode(), "sha256")
    return {
        "x-amz-content-sha256": _NOTHING_SHA256,
        "x-amz-date": now,
        "Authorization": f"AWS4-HMAC-SHA256 Credential={target.user}/{'/'.join(scope)}, SignedHeaders={names}, "
        f"Signature={hmac.digest(key, text.encode(), 'sha256').hex()}",
    }
