"""Accounts, folders and blobs: names around `headrace.sources.http`, which carries the bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Final

from headrace._environment import AzureSettings, NetworkSettings
from headrace.errors import OptionError
from headrace.sources.azure._address import Location, parse_url
from headrace.sources.azure._container import Container
from headrace.sources.azure._errors import BlobNotFoundError
from headrace.sources.azure._identity import Given, Identity
from headrace.sources.azure._listing import Entry, parse_page
from headrace.sources.base import ByteSource
from headrace.sources.http import (
    Access,
    Headers,
    HttpError,
)
from headrace.sources.objects import (
    PREFIX_NBYTES,
    Explained,
    KeyFolder,
    Page,
    ask_checksums,
    decode_checksum,
    leads_out,
    open_object,
    prefix_nbytes_of,
)

_VERSION: Final = "2023-11-03"  # of the service's interface; tokens need one, and names in listings one from 2021 on


class AzureStore:
    """Azure Blob Storage as one set of credentials sees it. Make one for all that is loaded together.

    Args:
        credentials: who asks, and where; a function that returns them is asked again when they are refused; an object with
            azure-identity's `get_token` gives bearer tokens. None: as the environment says.
        access: patience, proxies and trusted CAs, for all containers; None: the usual patience, the rest from the environment.
        settings: what the environment says; read now where it is None.

    Raises:
        OptionError: an endpoint, key or connection string that is none.

    Example:
        >>> store = AzureStore(AzureCredentials(account_name="models", anonymous=True))  # doctest: +SKIP
        >>> store.open("az://public/minilm/model.safetensors").nbytes  # doctest: +SKIP
        90868376
    """

    def __init__(self, credentials: Given = None, *, access: Access | None = None, settings: AzureSettings | None = None) -> None:
        access = access if access is not None else _usual_access()
        settings = settings if settings is not None else AzureSettings.from_environment()
        self._identity = Identity(credentials, settings, access.timing.now)
        self._access = replace(access, headers={**access.headers, "x-ms-version": _VERSION}, allow_redirect=None)
        self._containers: dict[tuple[str, str], Container] = {}
        self._lock = threading.Lock()

    def open(self, url: str, *, prefix_nbytes: int = PREFIX_NBYTES) -> AzureSource:
        """Open the blob that a url names, with one GET of its first bytes. See `open_azure`."""
        location = parse_url(url)
        if not location.key:
            raise OptionError(f"{url} names no blob but a container; a folder of it is an AzureFolder", option="url")
        return self._open(location, prefix_nbytes)

    def folder(self, url: str) -> AzureFolder:
        """The blobs under az://container/prefix. See `AzureFolder`."""
        return AzureFolder(url, store=self)

    def _open(self, location: Location, prefix_nbytes: int) -> AzureSource:
        container = self._container(location)
        with container.explained(location):
            return AzureSource(open_object(container.url(location.key), container.access, prefix_nbytes), container, location)

    def _container(self, location: Location) -> Container:
        service = self._identity.place.service(location.host)
        with self._lock:
            key = service.base, location.container
            if key not in self._containers:
                self._containers[key] = Container(location.container, service, self._identity, self._access)
            return self._containers[key]


def _usual_access() -> Access:
    found = NetworkSettings.from_environment()
    return Access(proxies=found.proxies, no_proxy=found.no_proxy, tls=found.ca_bundle)


class AzureSource(Explained):
    """A blob, readable at any offset from several threads. Made by `open_azure`, `AzureStore.open` and `AzureFolder.open`.

    Attributes:
        url: as it was given.
        nbytes, version: when it was opened.
    """

    def __init__(self, source: ByteSource, container: Container, location: Location) -> None:
        super().__init__(source, location.url, lambda error: container.explain(error, location))
        self._wire_url, self._access = container.url(location.key), container.access

    @cached_property
    def checksums(self) -> dict[str, str]:
        """The MD5 of the whole blob that is stored with it, {"md5": hexadecimal}; empty where there is none. Asked for once.

        Azure keeps what the client that wrote it has sent: most of them do for blobs of several blocks only when asked to.

        Raises:
            SourceChangedError: the blob is no longer the one that was opened.
            SourceError: any other failure.
        """
        return ask_checksums(self, self._wire_url, self._access, parse_checksums)


def parse_checksums(headers: Headers) -> dict[str, str]:
    """The MD5 in Content-MD5, in hexadecimal."""
    value = decode_checksum(headers.get("content-md5") or "", 16)
    return {"md5": value} if value is not None else {}


class AzureFolder(KeyFolder[Entry]):
    """The blobs of a container whose names begin with a prefix and a slash: 'az://models/m' is 'm/...', and never 'm2/...'.

    Args:
        url: az://container/prefix or another form, with or without a slash at its end; az://container is all of it.
        credentials, access: as for `AzureStore`.
        store: where others are opened as well; instead of `credentials` and `access`.

    Raises:
        As `AzureStore`.

    Example:
        >>> with headrace.open(AzureFolder("az://models/llama")) as checkpoint:  # doctest: +SKIP
        ...     len(checkpoint)
        291
    """

    def __init__(
        self, url: str, *, credentials: Given = None, access: Access | None = None, store: AzureStore | None = None
    ) -> None:
        self._store = _store(store, credentials, access)
        location = parse_url(url)
        prefix = location.key.rstrip("/")
        self._location = location.at(prefix)
        self.url = self._location.url
        self._prefix = f"{prefix}/" if prefix else ""
        self._container = self._store._container(location)

    def open(self, name: str) -> AzureSource:
        """Open a blob by its name under the prefix, which may have slashes. Listing is not needed, or allowed, for it.

        Raises:
            BlobNotFoundError: it does not exist, or the name leads out of the folder.
        """
        location = self._location.at(self._prefix + name)
        if leads_out(name):
            url = location.url
            raise BlobNotFoundError(f"cannot open {url!r}: {name!r} is no name inside of {self.url}", url=url)
        return self._store._open(location, prefix_nbytes_of(name))

    def _pages(self, recursive: bool) -> Iterator[Page[Entry]]:
        query = {"restype": "container", "comp": "list", "include": "metadata"}
        query |= {"prefix": self._prefix} if self._prefix else {}
        query |= {} if recursive else {"delimiter": "/"}
        marker: str | None = ""
        while marker is not None:
            with self._container.explained(self._location, listing=True):
                body = self._container.list_page(query | ({"marker": marker} if marker else {}))
                page = self._page_of(body, marker, parse_page, store="Azure Blob Storage")
            yield page
            marker = page.token

    def _is_marker(self, entry: Entry) -> bool:
        return entry.is_folder

    def _no_such_prefix(self) -> HttpError:
        hint = "Check the prefix; a url of one file ends in .safetensors"
        error = BlobNotFoundError(f"cannot list {self.url}: no blob's name begins with {self._prefix!r}. {hint}", url=self.url)
        error.account, error.container, error.key = self._container.service.account, self._container.name, self._location.key
        error.hint = hint
        return error


def _store(store: AzureStore | None, credentials: Given, access: Access | None) -> AzureStore:
    if store is not None and (credentials is not None or access is not None):
        raise OptionError("a store has credentials and access of its own", option="store")
    return store if store is not None else AzureStore(credentials, access=access)


def open_azure(
    url: str,
    *,
    credentials: Given = None,
    access: Access | None = None,
    store: AzureStore | None = None,
    prefix_nbytes: int = PREFIX_NBYTES,
) -> AzureSource:
    """Open a blob with one GET of its first bytes, which also tells its size and version.

    Args:
        url: az://container/path, abfss://container@account.dfs.core.windows.net/path or, percent-encoded,
            https://account.blob.core.windows.net/container/path.
        credentials: who asks, and where; a function that returns them is asked again when they are refused; an object with
            azure-identity's `get_token` gives bearer tokens. None: as the environment says.
        access: patience, proxies and trusted CAs.
        store: where others are opened as well, so that credentials are found once; instead of `credentials` and `access`.
        prefix_nbytes: bytes to fetch now and keep, so that reading the header of a checkpoint costs no second request.

    Returns:
        An open source; `close` it.

    Raises:
        OptionError: no such url or endpoint, no account, or a library is missing.
        AccountNotFoundError, ContainerNotFoundError, BlobNotFoundError, AccessDeniedError, CredentialsError: Azure says so.
        SourceError: it cannot be reached or read; the classes are those of `headrace.sources.http`.

    Example:
        >>> source = open_azure("az://models/minilm/model.safetensors")  # doctest: +SKIP
        >>> source.nbytes  # doctest: +SKIP
        90868376
    """
    return _store(store, credentials, access).open(url, prefix_nbytes=prefix_nbytes)
