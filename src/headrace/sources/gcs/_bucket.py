"""One bucket: how its objects and listings are reached, and what its errors mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from headrace.errors import SourceError
from headrace.sources.gcs._address import Place, join_url
from headrace.sources.gcs._errors import store_error, translate
from headrace.sources.gcs._identity import Identity
from headrace.sources.gcs._listing import JSON_FIELDS, Entry, parse_json_page, parse_xml_page
from headrace.sources.http import Access, Headers, Request, StoreError, WrongAnswerError, fetch
from headrace.sources.objects import Page

_PAGE: Final = 1000  # what both APIs give at most


class Bucket:
    """A name, and the `Access` to all that is in it.

    Args:
        name: of the bucket.
        identity: who asks.
        place: where buckets are.
        access: for all buckets.
    """

    def __init__(self, name: str, identity: Identity, place: Place, access: Access) -> None:
        self.name = name
        self._identity, self._place = identity, place
        self._access = replace(access, authorize=identity.authorize, parse_error=self._parse_error)

    def url(self, key: str) -> str:
        """The url of an object on the wire."""
        return self._place.object_url(self.name, key, self._payer)

    def pinned_access(self) -> tuple[Access, Pin]:
        """How one object is reached, and what has all answers be of one generation of it."""
        pin = Pin(self._identity)
        return replace(self._access, authorize=pin.authorize), pin

    def list_page(self, prefix: str, *, recursive: bool, token: str) -> Page[Entry]:
        """A page of a listing, the first one where the token is empty.

        Raises:
            WrongAnswerError: the answer is no page.
            SourceError: there is none.
        """
        query = {"prefix": prefix} | ({} if recursive else {"delimiter": "/"})
        if self._identity.signs:
            query |= {"list-type": "2", "encoding-type": "url", "max-keys": str(_PAGE), **self._payer}
            query |= {"continuation-token": token} if token else {}
            url, parse = self._place.xml_list_url(self.name, query), parse_xml_page
        else:
            query |= {"maxResults": str(_PAGE), "fields": JSON_FIELDS}
            query |= {"pageToken": token} if token else {}
            url, parse = self._place.json_list_url(self.name, query), parse_json_page
        _, body = fetch(url, access=self._access)
        try:
            page = parse(body, prefix=prefix)
            if page.token == token:
                raise ValueError("it names itself as the next one")
        except ValueError as exc:
            raise WrongAnswerError(f"the answer is no page of a listing: {exc}") from exc
        return page

    @contextmanager
    def explained(self, key: str, *, listing: bool = False) -> Iterator[None]:
        """Make errors of what is done here errors about the object, or the folder."""
        try:
            yield
        except SourceError as exc:
            raise self.explain(exc, key, listing=listing) from exc

    def explain(self, error: SourceError, key: str, *, listing: bool = False) -> SourceError:
        """The error as one about the object, or the folder."""
        return translate(
            error,
            bucket=self.name,
            key=key,
            url=join_url(self.name, key),
            base=self._place.endpoint,
            anonymous=self._identity.anonymous,
            listing=listing,
        )

    @property
    def _payer(self) -> dict[str, str]:
        """Who pays, where a header of Google's own cannot say so."""
        project = self._identity.user_project
        return {"userProject": project} if project and self._identity.signs else {}

    def _parse_error(self, status: int, headers: Headers, body: bytes) -> StoreError:
        return store_error(status, headers, body, renewable=self._identity.renewable)


class Pin:
    """Says who asks for an object, and demands one generation of it once it is known.

    Attributes:
        generation: what every further answer has to be of.
    """

    def __init__(self, identity: Identity) -> None:
        self.generation: str | None = None
        self._identity = identity

    def authorize(self, request: Request) -> dict[str, str]:
        """Headers for a GET of the object.

        With 'Accept-Encoding: gzip' the store sends what it has, as it has it, and says so. Without it, an object that is stored
        compressed is decompressed on the way ("Transcoding of gzip-compressed files", Cloud Storage documentation): then ranges
        count for nothing, and the size is not told.
        """
        headers = {"Accept-Encoding": "gzip", **self._identity.authorize(request)}
        if self.generation and not self._identity.signs:  # signed requests have If-Match
            headers["x-goog-if-generation-match"] = self.generation
        return headers
