"""Where connections lead: scheme, host, port, whom to trust, and which proxy is between. PURE, but for reading a file of CAs."""

from __future__ import annotations

import base64
import contextlib
import functools
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from headrace.errors import OptionError

_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; for https it is asked to CONNECT."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> Proxy:
        """From 'http://[user:password@]host:port'.

        Raises:
            OptionError: another scheme: TLS to the proxy itself and SOCKS are not spoken.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or 80
        except ValueError:
            raise OptionError("the proxy's url cannot be read", option="proxy") from None
        if parts.scheme != "http" or not parts.hostname:
            raise OptionError(f"a proxy is given as http://host:port; {parts.scheme}:// is not supported", option="proxy")
        login = None
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            login = "Basic " + base64.b64encode(pair.encode()).decode()
        return cls(parts.hostname, port, login)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where connections lead, and what they have in common."""

    scheme: str
    host: str
    port: int
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    proxy: Proxy | None = None

    @property
    def authority(self) -> str:
        """Host and port as they stand in a request; the scheme's own port is left out."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def endpoint_of(url: str, *, tls: ssl.SSLContext | None, proxy: Proxy | None) -> Endpoint:
    """The endpoint that a url leads to; `tls` is used for https only.

    Raises:
        ValueError: it is no http(s) url with a host.
    """
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if scheme not in _PORTS or not parts.hostname:
        raise ValueError("no http:// or https:// url with a host")
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    context = (tls if tls is not None else tls_context(None)) if scheme == "https" else None
    return Endpoint(scheme, host, parts.port or _PORTS[scheme], context, proxy)


@functools.cache
def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """TLS settings that trust the CAs in this file, or the system's; made once, since reading them takes 20 ms.

    Raises:
        OptionError: the file cannot be read, or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as exc:
        raise OptionError(f"cannot read CA certificates from {ca_file}: {exc}", option="ca_bundle") from exc
    context.set_alpn_protocols(["http/1.1"])
    return context


def proxy_for(url: str, proxies: Mapping[str, str], no_proxy: str) -> str | None:
    """The proxy for a url, or None.

    Args:
        url: of the object.
        proxies: {scheme of the object's url: url of the proxy}.
        no_proxy: hosts that are reached without one, separated by commas: '*', a domain with all below it (a leading dot
            or '*.' changes nothing), an address, or a network such as 10.0.0.0/8; ':port' narrows it down.

    >>> proxy_for("https://a.example.com/x", {"https": "http://proxy:3128"}, "example.com") is None
    True
    """
    parts = urlsplit(url)
    host, port = (parts.hostname or "").lower().rstrip("."), parts.port or _PORTS.get(parts.scheme)
    for entry in filter(None, (entry.strip().lower() for entry in no_proxy.replace(" ", ",").split(","))):
        if entry == "*" or _covers(entry, host, port):
            return None
    return proxies.get(parts.scheme) or None


def _covers(entry: str, host: str, port: int | None) -> bool:
    try:
        address = ipaddress.ip_address(host)
        with contextlib.suppress(ValueError):
            return address in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        pass
    name, colon, digits = entry.rpartition(":")
    if colon and digits.isdigit():
        if int(digits) != port:
            return False
        entry = name
    domain = entry.strip("[]").removeprefix("*").lstrip(".").rstrip(".")
    return bool(domain) and (host == domain or host.endswith("." + domain))
