"""Stores, folders and objects: names around `headrace.sources.http`, which carries the bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Final

from headrace._environment import GcsSettings, NetworkSettings
from headrace.errors import OptionError
from headrace.sources.base import ByteSource
from headrace.sources.gcs._address import join_url, parse_url
from headrace.sources.gcs._bucket import Bucket
from headrace.sources.gcs._errors import ObjectNotFoundError
from headrace.sources.gcs._identity import GcsCredentials, GiveCredentials, Identity
from headrace.sources.gcs._listing import Entry
from headrace.sources.http import Access, Headers, HttpError, Version
from headrace.sources.objects import (
    PREFIX_NBYTES,
    Explained,
    KeyFolder,
    Page,
    ask_checksums,
    decode_checksum,
    is_marker,
    leads_out,
    open_object,
    prefix_nbytes_of,
)

_CHECKSUMS: Final = {"crc32c": 4, "md5": 16}  # their lengths in bytes


class GcsStore:
    """Google Cloud Storage, or an emulator of it, as one set of credentials sees it. Make one for all that is loaded together.

    Args:
        credentials: who asks, and where; a function that returns them is asked again when they have expired. None: as google-auth
            finds them (application default credentials).
        access: patience, proxies and trusted CAs, for buckets and for those who give tokens; None: the usual patience, the rest
            from the environment.
        settings: what the environment says; read now where it is None.

    Raises:
        OptionError: an endpoint that is none.

    Example:
        >>> store = GcsStore(GcsCredentials(anonymous=True))
        >>> store.open("gs://models/minilm/model.safetensors").nbytes  # doctest: +SKIP
        90868376
    """

    def __init__(
        self,
        credentials: GcsCredentials | GiveCredentials | None = None,
        *,
        access: Access | None = None,
        settings: GcsSettings | None = None,
    ) -> None:
        access = access if access is not None else _usual_access()
        self._identity = Identity(credentials, settings if settings is not None else GcsSettings.from_environment(), access)
        self._place = self._identity.place()
        self._access = replace(access, allow_redirect=None)
        self._buckets: dict[str, Bucket] = {}
        self._lock = threading.Lock()

    def open(self, url: str, *, prefix_nbytes: int = PREFIX_NBYTES) -> GcsSource:
        """Open the object gs://bucket/key with one GET of its first bytes. See `open_gcs`."""
        name, key = parse_url(url)
        if not key:
            raise OptionError(f"{url} names no object but a bucket; a folder of it is a GcsFolder", option="url")
        bucket = self._bucket(name)
        access, pin = bucket.pinned_access()
        with bucket.explained(key):
            opened = open_object(bucket.url(key), access, prefix_nbytes)
        if isinstance(opened.version, Version):
            pin.generation = opened.version.generation
        return GcsSource(opened, bucket, key, access)

    def folder(self, url: str) -> GcsFolder:
        """The objects under gs://bucket/prefix. See `GcsFolder`."""
        return GcsFolder(url, store=self)

    def _bucket(self, name: str) -> Bucket:
        with self._lock:
            return self._buckets.setdefault(name, Bucket(name, self._identity, self._place, self._access))


def _usual_access() -> Access:
    found = NetworkSettings.from_environment()
    return Access(proxies=found.proxies, no_proxy=found.no_proxy, tls=found.ca_bundle)


class GcsSource(Explained):
    """An object, readable at any offset from several threads. Made by `open_gcs`, `GcsStore.open` and `GcsFolder.open`.

    Attributes:
        url: gs://bucket/key.
        nbytes, version: when it was opened; every range is demanded of that generation.
    """

    def __init__(self, source: ByteSource, bucket: Bucket, key: str, access: Access) -> None:
        super().__init__(source, join_url(bucket.name, key), lambda error: bucket.explain(error, key))
        self._wire_url, self._access = bucket.url(key), access

    @cached_property
    def checksums(self) -> dict[str, str]:
        """The store's checksums of the whole object, {algorithm: hexadecimal}; empty where it tells none. Asked for once.

        Raises:
            SourceChangedError: the object is no longer the one that was opened.
            SourceError: any other failure.
        """
        return ask_checksums(self, self._wire_url, self._access, parse_checksums)


def parse_checksums(headers: Headers) -> dict[str, str]:
    """The checksums in x-goog-hash, in hexadecimal: CRC-32C always, MD5 for what was not composed of other objects.

    They are of the bytes as they are stored, which are the ones that headrace reads.
    """
    found = {}
    for part in ",".join(headers.get_all("x-goog-hash")).split(","):
        algorithm, _, text = part.strip().partition("=")
        value = decode_checksum(text, _CHECKSUMS.get(algorithm, 0))
        if value:
            found[algorithm] = value
    return found


class GcsFolder(KeyFolder[Entry]):
    """The objects of a bucket whose keys begin with a prefix and a slash: 'gs://bucket/m' is 'm/...', and never 'm2/...'.

    Args:
        url: gs://bucket/prefix, with or without a slash at its end; gs://bucket is all of it.
        credentials, access: as for `GcsStore`.
        store: where others are opened as well; instead of `credentials` and `access`.

    Raises:
        As `GcsStore`.

    Example:
        >>> with headrace.open(GcsFolder("gs://models/llama")) as checkpoint:  # doctest: +SKIP
        ...     len(checkpoint)
        291
    """

    def __init__(
        self,
        url: str,
        *,
        credentials: GcsCredentials | GiveCredentials | None = None,
        access: Access | None = None,
        store: GcsStore | None = None,
    ) -> None:
        bucket, prefix = parse_url(url)
        prefix = prefix.rstrip("/")
        self.url = join_url(bucket, prefix)
        self._prefix = f"{prefix}/" if prefix else ""
        self._store = _one_store(store, credentials, access)
        self._bucket = self._store._bucket(bucket)

    def open(self, name: str) -> GcsSource:
        """Open an object by its name under the prefix, which may have slashes. Listing is not needed, or allowed, for it.

        Raises:
            ObjectNotFoundError: it does not exist, or the name leads out of the folder.
        """
        key = self._prefix + name
        if leads_out(name):
            url = join_url(self._bucket.name, key)
            raise ObjectNotFoundError(f"cannot open {url!r}: {name!r} is no name inside of {self.url}", url=url)
        prefix_nbytes = prefix_nbytes_of(name)
        return self._store.open(join_url(self._bucket.name, key), prefix_nbytes=prefix_nbytes)

    def _pages(self, recursive: bool) -> Iterator[Page[Entry]]:
        token: str | None = ""
        while token is not None:
            with self._bucket.explained(self._prefix.rstrip("/"), listing=True):
                page = self._bucket.list_page(self._prefix, recursive=recursive, token=token)
            yield page
            token = page.token

    def _is_marker(self, entry: Entry) -> bool:
        return is_marker(entry)

    def _no_such_prefix(self) -> HttpError:
        key = self._prefix.rstrip("/")
        hint = "Check the prefix; a url of one file ends in .safetensors"
        error = ObjectNotFoundError(f"cannot list {self.url}: no object's key begins with {self._prefix!r}. {hint}", url=self.url)
        error.bucket, error.key, error.hint = self._bucket.name, key, hint
        return error


def open_gcs(
    url: str,
    *,
    credentials: GcsCredentials | GiveCredentials | None = None,
    access: Access | None = None,
    store: GcsStore | None = None,
    prefix_nbytes: int = PREFIX_NBYTES,
) -> GcsSource:
    """Open an object with one GET of its first bytes, which also tells its size and generation.

    Args:
        url: gs://bucket/key, the key as it is, not escaped.
        credentials: who asks, and where; a function that returns them is asked again when they have expired. None: as google-auth
            finds them.
        access: patience, proxies and trusted CAs.
        store: where others are opened as well, so that a token is had once; instead of `credentials` and `access`.
        prefix_nbytes: bytes to fetch now and keep, so that reading the header of a checkpoint costs no second request.

    Returns:
        An open source; `close` it.

    Raises:
        OptionError: no such url or endpoint, or google-auth is missing.
        BucketNotFoundError, ObjectNotFoundError, AccessDeniedError, CredentialsError: the store says so.
        SourceError: it cannot be reached or read; the classes are those of `headrace.sources.http`.

    Example:
        >>> source = open_gcs("gs://models/minilm/model.safetensors")  # doctest: +SKIP
        >>> source.nbytes  # doctest: +SKIP
        90868376
    """
    return _one_store(store, credentials, access).open(url, prefix_nbytes=prefix_nbytes)


def _one_store(store: GcsStore | None, credentials: GcsCredentials | GiveCredentials | None, access: Access | None) -> GcsStore:
    if store is None:
        return GcsStore(credentials, access=access)
    if credentials is not None or access is not None:
        raise OptionError("a store has credentials and access of its own", option="store")
    return store
