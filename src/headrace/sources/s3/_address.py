"""PURE: from s3://bucket/key to the url that goes over the wire.

Path style where a name cannot be part of a host (dots under TLS, capitals, underscores) and at endpoints other than Amazon's,
which seldom have DNS for it; virtual-hosted otherwise. "Virtual hosting of buckets", Amazon S3 user guide.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from headrace.errors import OptionError
from headrace.sources.objects import escape, is_endpoint

_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_HOST_LABEL: Final = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")

# Partitions whose names are not under amazonaws.com, by the beginning of their regions (endpoints.json of botocore 1.44).
_SUFFIXES: Final = {
    "cn-": "amazonaws.com.cn",
    "us-iso-": "c2s.ic.gov",
    "us-isob-": "sc2s.sgov.gov",
    "eu-isoe-": "cloud.adc-e.uk",
    "us-isof-": "csp.hci.ic.gov",
    "eusc-": "amazonaws.eu",
}
_AMAZON: Final = (".amazonaws.com", *(f".{suffix}" for suffix in _SUFFIXES.values()))


def parse_url(url: str) -> tuple[str, str]:
    """Bucket and key of s3://bucket/key. The key is taken as it stands: nothing in it is escaped, and '?' and '#' belong to it.

    Raises:
        OptionError: it is no such url.

    >>> parse_url("s3://models/llama/a b?.safetensors")
    ('models', 'llama/a b?.safetensors')
    """
    scheme, separator, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not separator or scheme.lower() != "s3" or not _BUCKET.fullmatch(bucket):
        # Not quoted back: somebody may have put a key and its secret before the bucket.
        shape = "s3://bucket/key, the bucket's name from 2 letters, digits, '.', '-' and '_' on, without user or host"
        raise OptionError(f"an object in S3 is given as {shape}", option="url")
    if "\0" in key:
        raise OptionError("the key has a NUL in it", option="url")
    return bucket, key


def join_url(bucket: str, key: str) -> str:
    """The url that names an object, or a prefix."""
    return f"s3://{bucket}/{key}" if key else f"s3://{bucket}"


def encode_query(query: Mapping[str, str]) -> str:
    """The query in the order, and with the escapes, in which it is signed."""
    return "&".join(f"{escape(name)}={escape(value)}" for name, value in sorted(query.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where buckets are.

    Attributes:
        endpoint: http(s)://host[:port][/path] of a store; None: Amazon's, by region.
        virtual: bucket in the host's name (True), in the path (False), or as it suits (None).
        fips, dualstack: which of Amazon's endpoints.
    """

    endpoint: str | None = None
    virtual: bool | None = None
    fips: bool = False
    dualstack: bool = False

    def __post_init__(self) -> None:
        """Refuse an endpoint that is none."""
        if self.endpoint is None:
            return
        if not is_endpoint(self.endpoint):
            raise OptionError("the endpoint of S3 is given as https://host[:port], without user or query", option="endpoint")

    def base(self, bucket: str, region: str) -> str:
        """The url of a bucket, without a slash at its end."""
        scheme, netloc, path, _, _ = urlsplit(self.endpoint or f"https://{self._host(region)}")
        if self.is_virtual(bucket):
            return urlunsplit((scheme, f"{bucket}.{netloc}", path.rstrip("/"), "", ""))
        return urlunsplit((scheme, netloc, f"{path.rstrip('/')}/{bucket}", "", ""))

    def is_virtual(self, bucket: str) -> bool:
        """Whether the bucket's name is part of the host's."""
        if self.virtual is not None:
            return self.virtual
        if not _HOST_LABEL.fullmatch(bucket):
            return False
        return self.endpoint is None or (urlsplit(self.endpoint).hostname or "").endswith(_AMAZON)

    def _host(self, region: str) -> str:
        suffix = next((name for begin, name in _SUFFIXES.items() if region.startswith(begin)), "amazonaws.com")
        return f"s3{'-fips' if self.fips else ''}{'.dualstack' if self.dualstack else ''}.{region}.{suffix}"
