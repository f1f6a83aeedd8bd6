"""PURE: from gs://bucket/key to the urls that go over the wire.

The bucket stands in the path: both APIs take it there, at Google's endpoint, at private and regional ones, and at emulators.
"Request endpoints", Cloud Storage documentation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.errors import OptionError
from headrace.sources.objects import escape, is_endpoint

_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")


def parse_url(url: str) -> tuple[str, str]:
    """Bucket and key of gs://bucket/key. The key is taken as it stands: nothing in it is escaped, and '?' and '#' belong to it.

    Raises:
        OptionError: it is no such url.

    >>> parse_url("gs://models/llama/a b?.safetensors")
    ('models', 'llama/a b?.safetensors')
    """
    scheme, separator, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not separator or scheme.lower() != "gs" or not _BUCKET.fullmatch(bucket):
        # Not quoted back: somebody may have put a token before the bucket.
        raise OptionError("an object in Google Cloud Storage is given as gs://bucket/key, without user or host", option="url")
    if "\0" in key:
        raise OptionError("the key has a NUL in it", option="url")
    return bucket, key


def join_url(bucket: str, key: str) -> str:
    """The url that names an object, or a prefix."""
    return f"gs://{bucket}/{key}" if key else f"gs://{bucket}"


def _encode_query(query: Mapping[str, str]) -> str:
    return "&".join(f"{escape(name)}={escape(value)}" for name, value in sorted(query.items()))


@dataclass(frozen=True, slots=True)
class Place:
    """Where buckets are.

    Attributes:
        endpoint: http(s)://host[:port][/path] of the service or an emulator.
    """

    endpoint: str

    def __post_init__(self) -> None:
        """Refuse an endpoint that is none."""
        if not is_endpoint(self.endpoint):
            raise OptionError(
                "the endpoint of Google Cloud Storage is given as https://host[:port], without user or query", option="endpoint"
            )

    def object_url(self, bucket: str, key: str, query: Mapping[str, str]) -> str:
        """An object in the XML API."""
        return _joined(f"{self._base}/{bucket}/{escape(key, safe='/')}", query)

    def xml_list_url(self, bucket: str, query: Mapping[str, str]) -> str:
        """A page of a listing in the XML API."""
        return _joined(f"{self._base}/{bucket}", query)

    def json_list_url(self, bucket: str, query: Mapping[str, str]) -> str:
        """A page of a listing in the JSON API."""
        return _joined(f"{self._base}/storage/v1/b/{bucket}/o", query)

    @property
    def _base(self) -> str:
        return self.endpoint.rstrip("/")


def _joined(url: str, query: Mapping[str, str]) -> str:
    return f"{url}?{_encode_query(query)}" if query else url
