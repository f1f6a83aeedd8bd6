"""An S3 server for tests, demos and benchmarks: real signatures, ranges, conditions, paged listings, and faults on order.

As a context manager, or as a command (`python -m headrace.testing.s3server --help`). Only the standard library is needed, and it
listens on loopback only.

    rules = [Rule(Status(503), key="*.safetensors", times=2), Rule(Short(after=4096), skip=2, times=1)]
    with S3Server("data", access_key="AK", secret_key="SK", faults=rules) as server:
        ...  # read from server.url, path-style or, with Host: bucket.localhost, virtual-hosted
        assert [request.status for request in server.requests] == [503, 503, 206]

What it plays: GET, HEAD, PUT, DELETE of objects, ListObjectsV2, HeadBucket, GetBucketLocation, ListBuckets; versions; full-object
checksums; buckets that are public, in another region, not listable, requester-pays. As it takes requests in absolute form, it is
also a plain HTTP proxy to itself: a client that is told to use it as its proxy reaches http://bucket.localhost without DNS.

The rest of the package is pure but for `wire`, `connection` and `server`: `signatures` (SigV4), `listing`, `conditions` (Range,
If-Match), `checksums`, `payloads`, `faults` (rules), `answers` (what faults make of them), `buckets`, `service` (what S3 answers
to what), `ledger` (records and counts), `turnstile` (requests that wait for each other).
"""

from headrace.testing.s3server.buckets import Bucket
from headrace.testing.s3server.certificates import Certificates, make_certificates
from headrace.testing.s3server.faults import (
    Action,
    Extra,
    Fewer,
    Flip,
    Gzip,
    Hangup,
    IgnoreRange,
    LyingLength,
    LyingRange,
    Redirect,
    Replaced,
    Reset,
    Rule,
    Short,
    SlowStart,
    Stall,
    Status,
    Trickle,
    WrongRange,
    parse_rules,
)
from headrace.testing.s3server.ledger import Request
from headrace.testing.s3server.server import S3Server

__all__ = [
    "Action",
    "Bucket",
    "Certificates",
    "Extra",
    "Fewer",
    "Flip",
    "Gzip",
    "Hangup",
    "IgnoreRange",
    "LyingLength",
    "LyingRange",
    "Redirect",
    "Replaced",
    "Request",
    "Reset",
    "Rule",
    "S3Server",
    "Short",
    "SlowStart",
    "Stall",
    "Status",
    "Trickle",
    "WrongRange",
    "make_certificates",
    "parse_rules",
]
