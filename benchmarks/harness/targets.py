"""Where objects are and how one gets at them: plain data that goes to every process, and the ranges that all but headrace read.

A bucket has the name of its checkpoint, a key that of its file; what is served are the files themselves, so that names, sizes and
the right bytes are known without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

RANGE_NBYTES = 8 << 20  # what headrace asks a network for, and what others get as their part or chunk size where they have one
REGION = "us-east-1"
FOREIGN = (  # variables for a person's own stores, which win over what is set here or do not go with it
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_ENDPOINT",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "no_proxy",
)


@dataclass(frozen=True, slots=True)
class Target:
    """One bucket at one server.

    Attributes:
        scheme: s3, gs or az.
        endpoint: of the server; Azure's account is the first part of its path.
        bucket: bucket or container.
        user: access key or account; "" where nobody has to say who they are.
        secret: its key.
        query: what lets a bare GET in at Azure, a shared access signature.
        ca: PEM file to trust.
        pids: processes of the server, whose CPU time is nobody's else.
    """

    scheme: str
    endpoint: str
    bucket: str
    user: str = ""
    secret: str = ""
    query: str = ""
    ca: str | None = None
    pids: tuple[int, ...] = ()

    @property
    def tls(self) -> bool:
        return urlsplit(self.endpoint).scheme == "https"

    @property
    def netloc(self) -> str:
        return urlsplit(self.endpoint).netloc

    def path(self, key: str) -> str:
        """Of an object, as it stands in a request, path-style."""
        return f"{urlsplit(self.endpoint).path}/{self.bucket}/{quote(key, safe='/-_.~')}"

    def url(self, key: str = "") -> str:
        """Of an object or of the whole bucket, as loaders take it."""
        return f"{self.scheme}://{self.bucket}/{key}"

    def environment(self) -> dict[str, str]:
        """Variables for a client, which needs those in `FOREIGN` out of its sight."""
        trust = {"AWS_CA_BUNDLE": self.ca} if self.ca else {}
        own = {
            "s3": {
                "AWS_ENDPOINT_URL": self.endpoint,
                "AWS_ACCESS_KEY_ID": self.user,
                "AWS_SECRET_ACCESS_KEY": self.secret,
                "AWS_REGION": REGION,
                "AWS_DEFAULT_REGION": REGION,
                "AWS_CONFIG_FILE": "/dev/null",
                "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
                "AWS_EC2_METADATA_DISABLED": "true",
                "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
                **trust,
            },
            "gs": {"STORAGE_EMULATOR_HOST": self.endpoint},
            "az": {"AZURE_STORAGE_CONNECTION_STRING": self.connection_string()},
        }[self.scheme]
        return {**own, "NO_PROXY": urlsplit(self.endpoint).hostname or ""}

    def connection_string(self) -> str:
        """Azure's way of saying all of it."""
        return f"DefaultEndpointsProtocol=http;AccountName={self.user};AccountKey={self.secret};BlobEndpoint={self.endpoint};"


class Range(NamedTuple):
    """A part of one object: `start` to `end`, exclusive, of its `nbytes`."""

    file: int
    key: str
    start: int
    end: int
    nbytes: int

    @property
    def header(self) -> str:
        return f"bytes={self.start}-{self.end - 1}"

    @property
    def content_range(self) -> str:
        return f"bytes {self.start}-{self.end - 1}/{self.nbytes}"


def ranges(files: Sequence[str], nbytes: int = RANGE_NBYTES) -> list[Range]:
    """All files in ranges, in order."""
    found = []
    for i, file in enumerate(map(Path, files)):
        size = file.stat().st_size
        found += [Range(i, file.name, start, min(start + nbytes, size), size) for start in range(0, size, nbytes)]
    return found
