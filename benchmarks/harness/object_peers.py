"""Other clients of object stores, each as its documentation shows, into memory that is there beforehand.

Where a client hands out its own memory, one copy is made without the GIL. Run:ai's streamer is in `peers`: it takes urls where it
takes files.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401 - before the clock starts, as for everybody

from harness import memory
from harness.child import Job
from harness.floors import in_threads
from harness.targets import RANGE_NBYTES, REGION, Range, Target, ranges


class _Buffers:
    """One per object."""

    def __init__(self, job: Job) -> None:
        self.views = [memory.allocate(os.path.getsize(file)) for file in job.files]
        self._addresses = [memory.address(view) for view in self.views]

    def copy_in(self, file: int, offset: int, chunk: Any) -> int:
        """Copy a piece of a body to where it belongs; return its length."""
        nbytes = len(chunk)
        source = chunk if isinstance(chunk, bytes) else np.frombuffer(chunk, dtype=np.uint8).ctypes.data
        ctypes.memmove(self._addresses[file] + offset, source, nbytes)
        return nbytes


def obstore(job: Job) -> Callable[[], Any]:
    """`get` of ranges, streamed, on threads."""
    import obstore as library

    store = _obstore_store(job.store)

    def read(part: Range, buffers: _Buffers) -> None:
        at = part.start
        for chunk in library.get(store, part.key, options={"range": (part.start, part.end)}).stream(min_chunk_size=256 * 1024):
            at += buffers.copy_in(part.file, at, chunk)
        _require_whole(part, at)

    return _in_ranges(job, read)


def _obstore_store(target: Target) -> Any:
    from obstore.store import AzureStore, GCSStore, S3Store

    client = {"allow_http": True, "timeout": "300s"}
    if target.ca:
        client["root_certificate"] = Path(target.ca).read_text()
    if target.scheme == "gs":
        return GCSStore(target.bucket, skip_signature=True, base_url=target.endpoint, client_options=client)
    if target.scheme == "az":
        return AzureStore(
            target.bucket,
            account_name=target.user,
            account_key=target.secret,
            endpoint=target.endpoint,
            client_options=client,
        )
    return S3Store(
        target.bucket,
        endpoint=target.endpoint,
        access_key_id=target.user,
        secret_access_key=target.secret,
        region=REGION,
        virtual_hosted_style_request=False,
        client_options=client,
    )


def boto3(job: Job) -> Callable[[], Any]:
    """`get_object` of ranges and the body's `readinto`, on threads."""
    import boto3 as library
    from botocore.config import Config

    config = Config(max_pool_connections=job.settings["connections"], s3={"addressing_style": "path"})
    client = library.client("s3", config=config)

    def read(part: Range, buffers: _Buffers) -> None:
        body = client.get_object(Bucket=job.store.bucket, Key=part.key, Range=part.header)["Body"]
        at = part.start
        while at < part.end:
            taken = body.readinto(buffers.views[part.file][at : part.end])
            if not taken:
                break
            at += taken
        _require_whole(part, at)
        body.read()  # its end gives the connection back
        body.close()

    return _in_ranges(job, read)


def _in_ranges(job: Job, read: Callable[[Range, _Buffers], None]) -> Callable[[], Any]:
    """Threads that take ranges off one counter."""
    buffers = _Buffers(job)
    parts = ranges(job.files)

    def run() -> Any:
        in_threads(job.settings["connections"], len(parts), lambda: lambda i: read(parts[i], buffers))
        job.keep_files(buffers.views)
        return {}, buffers

    return run


def awscrt(job: Job) -> Callable[[], Any]:
    """Its S3 client, which cuts each object into parts by itself and hands them out in order."""
    from awscrt import s3
    from awscrt.http import HttpHeaders, HttpRequest

    target, buffers = job.store, _Buffers(job)
    client = _awscrt_client(target, job.settings["connections"])

    def request(file: int, key: str) -> Any:
        return client.make_request(
            type=s3.S3RequestType.GET_OBJECT,
            operation_name="GetObject",
            request=HttpRequest("GET", target.path(key), HttpHeaders([("host", target.netloc)])),
            on_body=lambda chunk, offset, **_: buffers.copy_in(file, offset, chunk),
        )

    def run() -> Any:
        for pending in [request(i, Path(file).name) for i, file in enumerate(job.files)]:
            pending.finished_future.result()
        job.keep_files(buffers.views)
        return {}, buffers

    return run


def _awscrt_client(target: Target, connections: int) -> Any:
    from awscrt import auth, io, s3

    loops = io.EventLoopGroup(0)
    tls = None
    if target.ca:
        options = io.TlsContextOptions()
        options.override_default_trust_store(Path(target.ca).read_bytes())
        tls = io.ClientTlsContext(options).new_connection_options()
    credentials = auth.AwsCredentialsProvider.new_static(target.user, target.secret)
    return s3.S3Client(
        bootstrap=io.ClientBootstrap(loops, io.DefaultHostResolver(loops)),
        region=REGION,
        tls_mode=s3.S3RequestTlsMode.ENABLED if target.tls else s3.S3RequestTlsMode.DISABLED,
        tls_connection_options=tls,
        signing_config=s3.create_default_s3_signing_config(region=REGION, credential_provider=credentials),
        part_size=RANGE_NBYTES,
        throughput_target_gbps=100.0,
        max_active_connections_override=connections,
    )


def runai_pull(job: Job) -> Callable[[], Any]:
    """Run:ai's `pull_files` into a folder. Setting `folder`."""
    from runai_model_streamer import pull_files

    def run() -> Any:
        pull_files(job.store.url(), job.settings["folder"])
        job.keep_folder(job.settings["folder"])

    return run


def boto3_download(job: Job) -> Callable[[], Any]:
    """boto3's `download_file`, one file after the other, each in parts on threads. Setting `folder`."""
    import boto3 as library
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    connections = job.settings["connections"]
    client = library.client("s3", config=Config(max_pool_connections=connections, s3={"addressing_style": "path"}))
    transfer = TransferConfig(max_concurrency=connections)

    def run() -> Any:
        for name in (Path(file).name for file in job.files):
            client.download_file(job.store.bucket, name, str(Path(job.settings["folder"]) / name), Config=transfer)
        job.keep_folder(job.settings["folder"])

    return run


def _require_whole(part: Range, at: int) -> None:
    if at != part.end:
        raise OSError(f"{part.header} of {part.key} ended at {at}")
