"""The cases of `scripts/bench object`: objects at a server on loopback, bytes in host memory or in a folder.

The floor and the peers that hand out bytes fill buffers that are there beforehand; headrace and Run:ai hand out tensors.
"""

from __future__ import annotations

from dataclasses import replace

from harness.cases import Case, Goal, Server, Way
from harness.targets import RANGE_NBYTES

_CONNECTIONS = 16
_OURS = Way("headrace", "ours:run", "headrace")
_OURS_INTO = Way("headrace, into given tensors", "ours:run", "headrace", kind="into")
_OURS_LOAD = Way("headrace, all kept", "ours:run", "headrace", kind="load")
_OURS_BUSY = Way("headrace, busy caller", "ours:run", "headrace", settings={"spin_share": 0.5})
_FLOOR = Way("floor: bare http.client", "bare_http:into_buffers", "floor", note="readinto, 8 MiB at a time")


def _peer(name: str, call: str, environment: dict[str, str] | None = None, **settings: object) -> Way:
    return Way(name, call, "peer", settings=settings, environment=environment or {}, here=False)


def _runai(connections: int) -> tuple[Way, ...]:
    """As many clients as the others have connections, and its defaults: the quicker counts."""
    given = {"RUNAI_STREAMER_OBJ_CONCURRENCY": str(connections), "RUNAI_STREAMER_CHUNK_BYTESIZE": str(RANGE_NBYTES)}
    return (
        _peer(f"Run:ai, {connections} clients", "peers:runai", given, owned=True),
        _peer("Run:ai default", "peers:runai", owned=True),
    )


_OBSTORE = _peer("obstore", "object_peers:obstore")
_AWSCRT = _peer("awscrt", "object_peers:awscrt")
_BOTO3 = _peer("boto3", "object_peers:boto3")
_S3_PEERS = (*_runai(_CONNECTIONS), _OBSTORE, _AWSCRT, _BOTO3)
_RUNAI = ("Run:ai*",)

_HTTP_GOALS = (
    Goal("0.9 × the bare http.client loop", "speed", at_least=0.9, against=(_FLOOR.name,)),
    Goal("3.5 × Run:ai", "speed", at_least=3.5, against=_RUNAI),
    Goal("0.35 × Run:ai's CPU", "cpu", at_most=0.35, against=_RUNAI),
    Goal("at most 64 MiB over the memory limit", "over_limit_mib", at_most=64),
)
_HTTP = Case(
    "s3_http",
    "S3 over HTTP, 16 connections, one object, streamed",
    "object",
    "stream",
    False,
    (_OURS, _OURS_INTO, _OURS_LOAD, _FLOOR, *_S3_PEERS),
    (
        *_HTTP_GOALS,
        Goal(
            "into given tensors: 0.9 × the bare http.client loop",
            "speed",
            at_least=0.9,
            way=_OURS_INTO.name,
            against=(_FLOOR.name,),
        ),
    ),
    server="s3",
    connections=_CONNECTIONS,
)
_TLS = Case(
    "s3_tls",
    "S3 over TLS, 16 connections, one object, streamed",
    "object",
    "stream",
    False,
    (_OURS, _OURS_INTO, _OURS_BUSY, _FLOOR, *_S3_PEERS),
    (
        Goal("0.95 × awscrt", "speed", at_least=0.95, against=(_AWSCRT.name,)),
        Goal("1.5 × Run:ai", "speed", at_least=1.5, against=_RUNAI),
        Goal("1.1 × awscrt's CPU", "cpu", at_most=1.1, against=(_AWSCRT.name,)),
    ),
    server="s3-tls",
    connections=_CONNECTIONS,
)


def _more_tls(connections: int) -> Case:
    return Case(
        f"s3_tls_{connections}",
        f"S3 over TLS, {connections} connections, one object, streamed",
        "object",
        "stream",
        False,
        (_OURS, _OURS_BUSY, _FLOOR, _AWSCRT),
        server="s3-tls",
        connections=connections,
    )


def _against_obstore(name: str, title: str, server: Server) -> Case:
    return Case(
        name,
        f"{title}, 16 connections, one object, streamed",
        "object",
        "stream",
        False,
        (_OURS, _OURS_INTO, _FLOOR, _OBSTORE),
        (
            Goal("not slower than obstore", "speed", at_least=1.0, against=(_OBSTORE.name,)),
            Goal("0.6 × obstore's CPU", "cpu", at_most=0.6, against=(_OBSTORE.name,)),
        ),
        server=server,
        connections=_CONNECTIONS,
    )


def _pull(name: str, title: str, folder: str) -> Case:
    return Case(
        name,
        title,
        "shards",
        "pull",
        False,
        (
            Way("headrace", "ours:pull", "headrace", settings={"folder": folder}),
            Way("floor: bare http.client, pwrite", "bare_http:into_files", "floor", settings={"folder": folder}),
            _peer("Run:ai pull_files", "object_peers:runai_pull", folder=folder),
            _peer("boto3 download_file", "object_peers:boto3_download", folder=folder),
        ),
        (Goal("2 × Run:ai's pull_files", "speed", at_least=2.0, against=("Run:ai pull_files",)),),
        server="s3",
        connections=_CONNECTIONS,
    )


CASES = (
    _HTTP,
    replace(
        _HTTP,
        name="s3_http_shards",
        title="S3 over HTTP, 16 connections, a model of four shards, streamed",
        checkpoint="shards",
        goals=_HTTP_GOALS,
    ),
    _TLS,
    _more_tls(32),
    _more_tls(64),
    _against_obstore("gcs", "GCS (fake-gcs-server)", "gcs"),
    _against_obstore("azure", "Azure Blob (azurite)", "azure"),
    _pull("pull", "pull of four files from S3 over HTTP to tmpfs", "memory"),
    _pull("pull_disk", "pull of four files from S3 over HTTP to a disk", "disk"),
)

ON_REQUEST = {"pull_disk"}  # a disk sets the pace; left out unless --cases asks for it
CURVE = ("s3_tls", "s3_tls_32", "s3_tls_64")
QUICK_SETS = {"object": "short-object", "shards": "short-shards"}
