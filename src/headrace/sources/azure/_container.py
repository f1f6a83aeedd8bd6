"""One container: where it is, and how it is reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from headrace.errors import SourceError
from headrace.sources.azure._address import Location, Service, encode_query
from headrace.sources.azure._errors import About, parse_complaint, store_error, translate
from headrace.sources.azure._identity import Identity
from headrace.sources.http import Access, Headers, Request, StoreError, fetch
from headrace.sources.objects import escape


class Container:
    """A name in an account, and the `Access` to all that is in it.

    Args:
        name: of the container.
        service: the account's.
        identity: who asks.
        access: for all containers.
    """

    def __init__(self, name: str, service: Service, identity: Identity, access: Access) -> None:
        self.name, self.service = name, service
        self._identity = identity
        self.access = replace(access, authorize=self._authorize, parse_error=self._parse_error)

    def url(self, key: str) -> str:
        """The url of a blob on the wire."""
        return f"{self.service.base}/{self.name}/{escape(key, safe='/')}"

    def list_page(self, query: Mapping[str, str]) -> bytes:
        """A page of a listing."""
        _, body = fetch(f"{self.service.base}/{self.name}?{encode_query(query)}", access=self.access)
        return body

    @contextmanager
    def explained(self, location: Location, *, listing: bool = False) -> Iterator[None]:
        """Make errors of what is done here errors about the blob, or the folder."""
        try:
            yield
        except SourceError as exc:
            raise self.explain(exc, location, listing=listing) from exc

    def explain(self, error: SourceError, location: Location, *, listing: bool = False) -> SourceError:
        """The error as one about the blob, or the folder."""
        about = About(
            account=self.service.account,
            container=self.name,
            key=location.key,
            url=location.url,
            base=self.service.base,
            listing=listing,
            by_name=self._identity.place.endpoint is None,
            expired=self._identity.expired,
        )
        return translate(error, about)

    def _authorize(self, request: Request) -> Request:
        query, headers = self._identity.prove(self.service, self.name)
        url = f"{request.url}{'&' if '?' in request.url else '?'}{query}" if query else request.url
        return replace(request, url=url, headers={**request.headers, **headers})

    def _parse_error(self, _status: int, headers: Headers, body: bytes) -> StoreError:
        error = store_error(parse_complaint(headers, body), renewable=self._identity.renewable)
        if error.action == "refresh":
            self._identity.note_refusal()
        return error
