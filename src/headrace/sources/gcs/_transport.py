"""How google-auth reaches those who give tokens: its interface of a transport, over `http.client`, with our proxies and CAs.

google-auth decides what to send, and to try again when an answer says so; here a request is sent and its answer handed back. A
request for a token that got no answer is tried again here, which google-auth does with those to metadata servers only.
"""

from __future__ import annotations

import http.client
import importlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from headrace.errors import OptionError
from headrace.sources.http import Access, public_url

_TRIES: Final = 3  # of a POST; asking for a token twice does no harm


def google(module: str) -> Any:
    """A module of google-auth.

    Raises:
        OptionError: it is not installed.
    """
    try:
        return importlib.import_module(f"google.{module}")
    except ImportError as exc:
        raise OptionError("gs:// needs google-auth, which is not installed: pip install 'headrace[gcs]'", option="url") from exc


@dataclass(frozen=True, slots=True)
class Response:
    """An answer as google-auth reads it."""

    status: int
    headers: http.client.HTTPMessage
    data: bytes


class Transport:
    """Send what google-auth wants sent. May be called from several threads at once.

    Args:
        access: proxies, trusted CAs and patience.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **more: Any,
    ) -> Response:
        """Send one request.

        Raises:
            google.auth.exceptions.TransportError: there is no answer.
        """
        if more.get("cert") is not None:
            raise google("auth.exceptions").TransportError("client certificates are not supported")
        timing, tries = self._access.timing, _TRIES if method == "POST" else 1
        for failed in range(1, tries + 1):
            try:
                return self._send(url, method, body, dict(headers or {}), timeout)
            except (OSError, ValueError, http.client.HTTPException) as exc:
                if failed == tries:
                    raise google("auth.exceptions").TransportError(f"cannot reach {public_url(url)}: {exc}") from exc
            timing.wait(threading.Event(), timing.draw() * self._access.policy.backoff_s * failed)
        raise AssertionError("the last try returns or raises")

    def _send(
        self, url: str, method: str, body: bytes | str | None, headers: dict[str, str], timeout_s: float | None
    ) -> Response:
        connection, target = self._connect(url, headers, timeout_s or self._access.policy.stall_timeout_s)
        try:
            connection.request(method, target, body, headers)
            answer = connection.getresponse()
            return Response(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def _connect(self, url: str, headers: dict[str, str], timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
        """(connection, what to ask it for). No proxy leads to a metadata server, which answers this machine only."""
        endpoint, parts = self._access.endpoint(url), urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        of_metadata = any(name.lower() == "metadata-flavor" for name in headers)
        proxy = None if of_metadata else endpoint.proxy
        host, port = (proxy.host, proxy.port) if proxy else (endpoint.host, endpoint.port)
        login = {"Proxy-Authorization": proxy.authorization} if proxy and proxy.authorization else {}
        if endpoint.tls is not None:
            connection = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=endpoint.tls)
            if proxy:
                connection.set_tunnel(endpoint.host, endpoint.port, login)
            return connection, target
        if proxy:
            headers.update(login)
            target = f"http://{endpoint.authority}{target}"
        return http.client.HTTPConnection(host, port, timeout=timeout_s), target
