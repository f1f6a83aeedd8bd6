"""The server as a command.

    python -m headrace.testing.s3server DATA [--port 0] [--access-key AKTEST] [--secret-key SKTESTSECRET] [--rules rules.json] ...

DATA/<bucket>/<key> is served and never written to. Prints one line, {"port": N, "url": ...}, when it listens, and serves until it
is interrupted or terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace.testing.s3server import Bucket, S3Server, parse_rules
from headrace.testing.s3server.server import DOMAINS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; return the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        faults = parse_rules(json.loads(args.rules.read_text())) if args.rules else []
        buckets = _buckets(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(args.log.open("a")) if args.log else None
        server = stack.enter_context(
            S3Server(
                args.data,
                access_key=args.access_key,
                secret_key=args.secret_key,
                require_token=args.require_token,
                buckets=buckets,
                faults=faults,
                latency_s=args.latency_ms / 1000,
                page=args.page,
                tls=tuple(args.tls) if args.tls else None,
                region=args.region or None,
                domains=args.domain or DOMAINS,
                port=args.port,
                log=log,
            )
        )
        sys.stdout.write(json.dumps({"port": server.port, "url": server.url}) + "\n")
        sys.stdout.flush()
        ended.wait()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headrace.testing.s3server", description="An S3 server for tests, on loopback."
    )
    parser.add_argument("data", type=Path, help="folder of buckets: DATA/<bucket>/<key>")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--access-key", default="AKTEST")
    parser.add_argument("--secret-key", default="SKTESTSECRET")
    parser.add_argument("--require-token", metavar="TOKEN", help="session token that requests must carry")
    parser.add_argument("--region", default="us-east-1", help="empty takes any in a signature")
    parser.add_argument("--domain", action="append", help="host whose subdomains are buckets (default: s3.localhost, localhost)")
    parser.add_argument("--tls", nargs=2, metavar=("CERT", "KEY"), help="PEM files")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="added to each request")
    parser.add_argument("--page", type=int, default=1000, help="most entries in one listing")
    parser.add_argument("--rules", type=Path, help="JSON: what goes wrong, and when (see headrace.testing.s3server.faults)")
    parser.add_argument("--log", type=Path, help="gets a line of JSON for each request")
    for flag in ("public", "unlistable", "requester-pays", "versioned"):
        parser.add_argument(f"--{flag}", action="append", default=[], metavar="BUCKET")
    parser.add_argument("--bucket-region", action="append", default=[], metavar="BUCKET=REGION")
    return parser


def _buckets(args: argparse.Namespace) -> dict[str, Bucket]:
    buckets: dict[str, Bucket] = {}

    def change(name: str, **fields: bool | str) -> None:
        buckets[name] = replace(buckets.get(name, Bucket()), **fields)  # type: ignore[arg-type] # each field has its own type

    for name in args.public:
        change(name, public=True)
    for name in args.unlistable:
        change(name, listable=False)
    for name in args.requester_pays:
        change(name, requester_pays=True)
    for name in args.versioned:
        change(name, versioned=True)
    for entry in args.bucket_region:
        name, equals, region = entry.partition("=")
        if not equals:
            raise ValueError(f"--bucket-region is BUCKET=REGION, not {entry!r}")
        change(name, region=region)
    return buckets


if __name__ == "__main__":
    sys.exit(main())
