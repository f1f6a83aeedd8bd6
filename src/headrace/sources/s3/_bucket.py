"""One bucket: where it is, and how it is reached.

A bucket knows its region. Where a store says that it is another one, the answer is remembered, and the next try is signed for it
and goes to its host; all sources and listings of a store profit from that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from headrace.errors import SourceError
from headrace.sources.http import Access, Headers, Request, StoreError, fetch
from headrace.sources.objects import escape
from headrace.sources.s3._address import Place, encode_query, join_url
from headrace.sources.s3._errors import parse_complaint, store_error, translate
from headrace.sources.s3._identity import Identity

_ABOUT_REGIONS: Final = ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect")


class Bucket:
    """A name with a region, and the `Access` to all that is in it.

    Args:
        name: of the bucket.
        identity: who asks.
        place: where buckets are.
        region: where this one is supposed to be.
        access: for all buckets.
    """

    def __init__(self, name: str, identity: Identity, place: Place, region: str, access: Access) -> None:
        self.name = name
        self._identity, self._place, self._region = identity, place, region
        self._host = "", ""  # for a region
        self.access = replace(access, authorize=self._authorize, parse_error=self._parse_error)

    @property
    def base(self) -> str:
        """Its url on the wire."""
        return self._place.base(self.name, self._region)

    def url(self, key: str) -> str:
        """The url of an object on the wire."""
        return f"{self.base}/{escape(key, safe='/')}"

    def list_page(self, query: Mapping[str, str]) -> bytes:
        """A page of a listing."""
        base = self.base
        slash = "" if urlsplit(base).path else "/"
        _, body = fetch(f"{base}{slash}?{encode_query(query)}", access=self.access)
        return body

    @contextmanager
    def explained(self, key: str, *, listing: bool = False) -> Iterator[None]:
        """Make errors of what is done here errors about the object, or the folder."""
        try:
            yield
        except SourceError as exc:
            raise self.explain(exc, key, listing=listing) from exc

    def explain(self, error: SourceError, key: str, *, listing: bool = False) -> SourceError:
        """The error as one about the object, or the folder."""
        url = join_url(self.name, key)
        return translate(error, bucket=self.name, key=key, url=url, base=self.base, listing=listing)

    def _authorize(self, request: Request) -> Request:
        region = self._region
        if region != self._host[0]:
            self._host = region, urlsplit(self._place.base(self.name, region)).netloc
        netloc, url, headers = self._host[1], request.url, dict(request.headers)
        if not url.startswith(netloc, url.find("//") + 2):  # the bucket has turned out to be elsewhere
            scheme, _, path, query, _ = urlsplit(url)
            url, headers["Host"] = urlunsplit((scheme, netloc, path, query, "")), netloc
        headers |= self._identity.sign(url, headers, region=region, method=request.method)
        return replace(request, url=url, headers=headers)

    def _parse_error(self, status: int, headers: Headers, body: bytes) -> StoreError:
        complaint = parse_complaint(headers, body)
        elsewhere = bool(complaint.region) and (status in (301, 307) or complaint.code in _ABOUT_REGIONS)
        elsewhere = elsewhere or (status == 400 and not complaint.code and complaint.region not in ("", self._region))
        if elsewhere:
            self._region = complaint.region
        error = store_error(complaint, elsewhere=elsewhere, renewable=self._identity.renewable)
        if error.action == "refresh" and not elsewhere:
            self._identity.note_refusal()
        return error
