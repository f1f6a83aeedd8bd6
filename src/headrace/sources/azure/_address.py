"""PURE: from az://container/path to the url that goes over the wire.

Three ways to write an address: az:// and abfs[s]:// with the container alone, the account being said elsewhere; the same with
container@account.dfs.core.windows.net, as Hadoop and Spark do; and the blob's own https:// url. All of them lead to the blob
service: a dfs host is another door to the same bytes. A host is taken from a url only if it is Microsoft's, or one that the
configuration names, since credentials are sent there.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

from headrace.errors import OptionError
from headrace.sources.objects import escape, is_endpoint

PUBLIC_SUFFIX: Final = "blob.core.windows.net"
_URL: Final = re.compile(r"(az|abfss?|https)://([^/?#]*)(?:/(.*))?", re.DOTALL | re.IGNORECASE)
_CONTAINER: Final = re.compile(r"\$(?:root|web|logs)|[a-z0-9](?:-?[a-z0-9])+")
_ACCOUNT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_HOST: Final = re.compile(
    r"(?P<account>[a-z0-9]{3,24})(?P<copy>-secondary)?(?P<zone>\.z[0-9]{1,2})?\.(?:blob|dfs)\.(?P<cloud>[a-z.]+)"
)
# The public cloud, China, the US government, and accounts with a DNS zone of their own.
_CLOUDS: Final = ("core.windows.net", "core.chinacloudapi.cn", "core.usgovcloudapi.net", "storage.azure.net")
_SIGNED: Final = re.compile(r"[?&]sig=", re.IGNORECASE)
_FORMS: Final = "a blob is given as az://container/path, or abfss://container@account.dfs.core.windows.net/path"


@dataclass(frozen=True, slots=True)
class Location:
    """A blob, or a folder, as a url names it.

    Attributes:
        root: the container's url, as it was written.
        container, key: names, not escaped.
        host: of the account, where the url names it.
    """

    root: str
    container: str
    key: str
    host: str | None = None

    def at(self, key: str) -> Location:
        """Another key of the same container."""
        return Location(self.root, self.container, key, self.host)

    @property
    def url(self) -> str:
        """What it is called in errors."""
        key = escape(self.key, safe="/") if self.root.startswith("https:") else self.key
        return f"{self.root}/{key}" if key else self.root


def parse_url(url: str) -> Location:
    """Read an address. The key is taken as it stands (nothing in it is escaped, '?' and '#' belong to it), but for https://.

    Raises:
        OptionError: it is no such url, or has a signature in it.

    >>> parse_url("az://models/llama/a b?.safetensors").key
    'llama/a b?.safetensors'
    """
    # The url is not quoted back: it may be one with a secret.
    match = _URL.fullmatch(url)
    if _SIGNED.search(url):
        raise OptionError("a SAS token is given as one (sas_token=, AZURE_STORAGE_SAS_TOKEN), and not in a url", option="url")
    if match is None:
        raise OptionError(_FORMS, option="url")
    scheme, authority, key = match[1].lower(), match[2], match[3] or ""
    container, _, host = authority.partition("@")
    root = f"{scheme}://{authority}"
    if scheme == "https":
        parts = urlsplit(url)
        if parts.query or parts.fragment or "@" in authority:
            raise OptionError(f"{_FORMS}; without a query where it is https://", option="url")
        host = authority
        container, _, key = unquote(key, errors="surrogateescape").partition("/")
        root = f"{root}/{container}"
    if not _CONTAINER.fullmatch(container) or ("@" in authority and not host):
        raise OptionError(_FORMS, option="url")
    if "\0" in key:
        raise OptionError("the name of the blob has a NUL in it", option="url")
    return Location(root, container, key, host.lower() or None)


def encode_query(query: Mapping[str, str]) -> str:
    """A query that the service reads as it was meant."""
    return "&".join(f"{escape(name)}={escape(value)}" for name, value in query.items())


def normalise_sas(token: str) -> str:
    """A SAS token as it goes into a url, whether or not it came with a '?' and escapes."""
    pairs = (pair.partition("=") for pair in token.strip().lstrip("?").split("&") if pair)
    return "&".join(f"{escape(unquote(name))}={escape(unquote(value))}" for name, _, value in pairs)


@dataclass(frozen=True, slots=True)
class Service:
    """An account's blob service: its name, None where nobody has said it, and its url without a slash at the end."""

    account: str | None
    base: str

    @property
    def is_private(self) -> bool:
        """Whether nobody can listen to what is sent: TLS, or this very machine."""
        parts = urlsplit(self.base)
        return parts.scheme == "https" or _is_local(parts.hostname or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where accounts are.

    Attributes:
        account: whose containers are meant where a url does not say it.
        endpoint: http(s)://host[:port][/path] of that account's blob service; None: https://account.suffix.
        suffix: what follows the account's name in the names of hosts.
    """

    account: str | None = None
    endpoint: str | None = None
    suffix: str = PUBLIC_SUFFIX

    def __post_init__(self) -> None:
        """Refuse what cannot be an account or an endpoint."""
        if self.account is not None and not _ACCOUNT.fullmatch(self.account):
            raise OptionError("an account's name has only letters, digits and hyphens", option="account_name")
        if not re.fullmatch(r"[A-Za-z0-9.-]+", self.suffix):
            raise OptionError("the suffix of endpoints is part of a host's name: blob.core.windows.net", option="endpoint_suffix")
        if self.endpoint is not None and not is_endpoint(self.endpoint):
            message = "the endpoint of a blob service is given as https://host[:port][/account], without user or query"
            raise OptionError(message, option="endpoint")

    @property
    def owner(self) -> str | None:
        """The account that is meant, from its name or the endpoint's."""
        return self.account or (account_of(self.endpoint) if self.endpoint else None)

    def service(self, host: str | None = None) -> Service:
        """The blob service that a url leads to.

        Args:
            host: from the url, if one stands there.

        Raises:
            OptionError: nobody has named an account, or the url has a host that credentials should not be sent to.
        """
        if host is not None:
            account, base = self._from_host(host)
            return self.service() if account == self.owner and self.endpoint is not None else Service(account, base)
        if self.endpoint is not None:
            return Service(self.owner, self._endpoint_base(self.endpoint))
        if self.account is None:
            raise OptionError(
                "no storage account is named: set AZURE_STORAGE_ACCOUNT_NAME, give AzureCredentials(account_name=...), or write "
                "az://container@account.blob.core.windows.net/path",
                option="account_name",
            )
        return Service(self.account, f"https://{self.account}.{self.suffix}")

    def _from_host(self, host: str) -> tuple[str, str]:
        """(account, base) of a host, which is Microsoft's or ours."""
        match = _HOST.fullmatch(host)
        if match is not None and match["cloud"] in _CLOUDS:
            zone, copy = match["zone"] or "", match["copy"] or ""
            return match["account"], f"https://{match['account']}{copy}{zone}.blob.{match['cloud']}"
        account, _, rest = host.partition(".")
        if _ACCOUNT.fullmatch(account) and rest in (self.suffix, self.suffix.replace("blob.", "dfs.", 1)):
            return account, f"https://{account}.{self.suffix}"
        if self.endpoint is not None and self.owner is not None and host == urlsplit(self.endpoint).netloc.lower():
            return self.owner, self._endpoint_base(self.endpoint)
        raise OptionError(
            "the host in the url is none of Azure's: if credentials may be sent there, name it as the endpoint "
            "(AZURE_STORAGE_ENDPOINT, AzureCredentials(endpoint=...))",
            option="url",
        )

    def _endpoint_base(self, endpoint: str) -> str:
        """Emulators have the account in the path, which some leave to us."""
        parts = urlsplit(endpoint)
        bare = not parts.path.strip("/") and self.account is not None and _is_local(parts.hostname or "")
        return f"{endpoint.rstrip('/')}/{self.account}" if bare else endpoint.rstrip("/")


def account_of(endpoint: str) -> str | None:
    """The account whose blob service this is: the path's first part at an emulator, the first of account.blob.cloud else.

    None where neither tells: a domain of the account's own, or an address.
    """
    parts = urlsplit(endpoint)
    name = parts.path.strip("/").partition("/")[0]
    if name:
        return name
    labels = (parts.hostname or "").split(".")
    return labels[0] if len(labels) > 2 and labels[1] in ("blob", "dfs") else None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
