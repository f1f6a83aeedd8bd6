"""How a place is reached, as plain data: headers, credentials, redirects, trust, proxies and patience. What adapters fill in."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.sources.http._endpoint import Endpoint, Proxy, endpoint_of, proxy_for, tls_context
from headrace.sources.http._failures import Headers, ParseError, parse_error_headers, public_url
from headrace.sources.http._retry import Policy, Timing


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it is about to be sent.

    Attributes:
        method, url: the url as it goes over the wire, percent-encoded.
        headers: all that will be sent; what `authorize` returns comes on top.
        range: (start, end) in bytes, end exclusive; None for the whole object.
        refused: whether the last try was refused because of its credentials, so that remembered ones are of no use.
    """

    method: str
    url: str
    headers: Mapping[str, str]
    range: tuple[int, int] | None = None
    refused: bool = False

    def __repr__(self) -> str:
        return f"Request({self.method} {public_url(self.url)}, range={self.range})"


Authorize: TypeAlias = "Callable[[Request], Mapping[str, str] | Request]"
AllowRedirect: TypeAlias = "Callable[[str, str, Headers], bool]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How the objects of a place are reached; one for all of them.

    Attributes:
        headers: sent with every request, but not to another host after a redirect.
        authorize: called before every try; returns headers to add (a token, a signature), or a request to send instead (a
            presigned url). Not called for another host after a redirect. May be called from several threads at once.
        parse_error: makes a `StoreError` of an answer's status, headers and body, for every answer that is no success.
        allow_redirect: whether to follow, given the old url, the new one, and the headers of the answer; None: never.
        tls: trusted CAs, as settings or as the path of a PEM file; None: those of the system.
        proxies: {"http": url, "https": url}, by the scheme of the object's url.
        no_proxy: hosts that are reached without; see `proxy_for`.
        policy: how patient to be.
        timing: clock and chance.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    authorize: Authorize | None = field(default=None, repr=False)
    parse_error: ParseError = field(default=parse_error_headers, repr=False)
    allow_redirect: AllowRedirect | None = field(default=None, repr=False)
    tls: ssl.SSLContext | str | None = None
    proxies: Mapping[str, str] = field(default_factory=dict, repr=False)
    no_proxy: str = ""
    policy: Policy = field(default_factory=Policy)
    timing: Timing = field(default_factory=Timing, repr=False)

    def endpoint(self, url: str) -> Endpoint:
        """Where requests for this url go. Raises ValueError where it is no url of ours."""
        proxy = proxy_for(url, self.proxies, self.no_proxy)
        is_secure = url[:6].lower() == "https:"  # reading CAs takes 20 ms, of which plain http has no use
        tls = (tls_context(self.tls) if is_secure else None) if isinstance(self.tls, str) else self.tls
        return endpoint_of(url, tls=tls, proxy=Proxy.parse(proxy) if proxy else None)


@dataclass(slots=True)
class Traffic:
    """What a source has asked of the network.

    Attributes:
        requests: GETs sent, those of redirects included.
        asked_nbytes, received_nbytes: of ranges, all tries and hedges together.
        failed: tries that failed.
        throttled: those of them that the store wants made later.
        hedges, hedged_nbytes: ranges asked for a second time because they were slow, and their bytes.
    """

    requests: int = 0
    asked_nbytes: int = 0
    received_nbytes: int = 0
    failed: int = 0
    throttled: int = 0
    hedges: int = 0
    hedged_nbytes: int = 0
