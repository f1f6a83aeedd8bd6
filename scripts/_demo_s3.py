"""Serve a model from an S3 server on loopback, stream it, and compare it with the local file. Exits 1 on a difference."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import headrace
from headrace.sources.s3 import S3Credentials
from headrace.testing.s3server import S3Server


def main(path: str) -> int:
    expected = headrace.load(path)
    with S3Server({"models": {"minilm/model.safetensors": Path(path)}}) as server:
        credentials = S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)
        with headrace.stream("s3://models/minilm", credentials=credentials) as stream:
            wrong = [name for name, tensor in stream if not torch.equal(tensor, expected.pop(name))]
        stats = stream.stats
        if wrong or expected:
            print(f"DIFFERENT: {len(wrong)} tensors with other values {wrong[:5]}, {len(expected)} never came")
            return 1
        requests, sent = len(server.requests), server.bytes_sent
    print(
        f"{stats.tensors} of {stats.total_tensors} tensors are equal ({stats.read_nbytes / 1e6:.1f} MB in {stats.seconds:.2f} s)."
    )
    print(f"The server saw {requests} signed requests and sent {sent / 1e6:.1f} MB: each byte once, and the listing.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
