"""Stores, folders and objects: names around `headrace.sources.http`, which carries the bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Final

from headrace._environment import NetworkSettings, S3Settings
from headrace.errors import OptionError
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
    is_marker,
    leads_out,
    open_object,
    prefix_nbytes_of,
)
from headrace.sources.s3._address import join_url, parse_url
from headrace.sources.s3._bucket import Bucket
from headrace.sources.s3._errors import ObjectNotFoundError
from headrace.sources.s3._identity import GiveCredentials, Identity, S3Credentials
from headrace.sources.s3._listing import Entry, parse_page

_CHECKSUMS: Final = {"sha256": 32, "sha1": 20, "crc64nvme": 8, "crc32": 4, "crc32c": 4}  # their lengths in bytes


class S3Store:
    """S3, or a store that speaks its language, as one set of credentials sees it. Make one for all that is loaded together.

    Args:
        credentials: who asks, and where; a function that returns them is asked again when they have expired. None: as for the
            aws command.
        access: patience, proxies and trusted CAs, for all buckets; None: the usual patience, the rest from the environment.
        settings: what the environment says; read now where it is None.

    Raises:
        OptionError: an endpoint that is none, or botocore is missing.
        CredentialsError: there is no such profile.

    Example:
        >>> store = S3Store(S3Credentials(anonymous=True, region="us-west-2"))  # doctest: +SKIP
        >>> store.open("s3://models/minilm/model.safetensors").nbytes  # doctest: +SKIP
        90868376
    """

    def __init__(
        self,
        credentials: S3Credentials | GiveCredentials | None = None,
        *,
        access: Access | None = None,
        settings: S3Settings | None = None,
    ) -> None:
        self._identity = Identity(credentials, settings if settings is not None else S3Settings.from_environment())
        self._place = self._identity.place()
        self._region = self._identity.region()
        access = access if access is not None else _usual_access(self._identity.ca_bundle())
        payer = {"x-amz-request-payer": "requester"} if self._identity.given.requester_pays else {}
        tls = access.tls if access.tls is not None else self._identity.ca_bundle()
        self._access = replace(access, headers={**access.headers, **payer}, tls=tls, allow_redirect=None)
        self._buckets: dict[str, Bucket] = {}
        self._lock = threading.Lock()

    def open(self, url: str, *, prefix_nbytes: int = PREFIX_NBYTES) -> S3Source:
        """Open the object s3://bucket/key with one GET of its first bytes. See `open_s3`."""
        name, key = parse_url(url)
        if not key:
            raise OptionError(f"{url} names no object but a bucket; a folder of it is an S3Folder", option="url")
        bucket = self._bucket(name)
        with bucket.explained(key):
            return S3Source(open_object(bucket.url(key), bucket.access, prefix_nbytes), bucket, key)

    def folder(self, url: str) -> S3Folder:
        """The objects under s3://bucket/prefix. See `S3Folder`."""
        return S3Folder(url, store=self)

    def _bucket(self, name: str) -> Bucket:
        with self._lock:
            return self._buckets.setdefault(name, Bucket(name, self._identity, self._place, self._region, self._access))


def _usual_access(ca_bundle: str | None) -> Access:
    found = NetworkSettings.from_environment(aws=True)
    return Access(proxies=found.proxies, no_proxy=found.no_proxy, tls=ca_bundle or found.ca_bundle)


class S3Source(Explained):
    """An object, readable at any offset from several threads. Made by `open_s3`, `S3Store.open` and `S3Folder.open`.

    Attributes:
        url: s3://bucket/key.
        nbytes, version: when it was opened.
    """

    def __init__(self, source: ByteSource, bucket: Bucket, key: str) -> None:
        super().__init__(source, join_url(bucket.name, key), lambda error: bucket.explain(error, key))
        self._bucket, self._key = bucket, key

    @cached_property
    def checksums(self) -> dict[str, str]:
        """The store's checksums of the whole object, {algorithm: hexadecimal}; empty where it tells none. Asked for once.

        Raises:
            SourceChangedError: the object is no longer the one that was opened.
            SourceError: any other failure.
        """
        access = replace(self._bucket.access, headers={**self._bucket.access.headers, "x-amz-checksum-mode": "ENABLED"})
        return ask_checksums(self, self._bucket.url(self._key), access, parse_checksums)


def parse_checksums(headers: Headers) -> dict[str, str]:
    """The checksums in an answer that are of the whole object, in hexadecimal.

    Those of multipart uploads may be of the parts' checksums instead (COMPOSITE); they say nothing about the bytes by themselves.
    """
    if (headers.get("x-amz-checksum-type") or "FULL_OBJECT").upper() != "FULL_OBJECT":
        return {}
    found = {}
    for algorithm, nbytes in _CHECKSUMS.items():
        value = decode_checksum(headers.get(f"x-amz-checksum-{algorithm}") or "", nbytes)
        if value is not None:  # "...-3" is of three parts
            found[algorithm] = value
    return found


class S3Folder(KeyFolder[Entry]):
    """The objects of a bucket whose keys begin with a prefix and a slash: 's3://bucket/m' is 'm/...', and never 'm2/...'.

    Args:
        url: s3://bucket/prefix, with or without a slash at its end; s3://bucket is all of it.
        credentials, access: as for `S3Store`.
        store: where others are opened as well; instead of `credentials` and `access`.

    Raises:
        As `S3Store`.

    Example:
        >>> with headrace.open(S3Folder("s3://models/llama")) as checkpoint:  # doctest: +SKIP
        ...     len(checkpoint)
        291
    """

    def __init__(
        self,
        url: str,
        *,
        credentials: S3Credentials | GiveCredentials | None = None,
        access: Access | None = None,
        store: S3Store | None = None,
    ) -> None:
        if store is not None and (credentials is not None or access is not None):
            raise OptionError("a store has credentials and access of its own", option="store")
        bucket, prefix = parse_url(url)
        prefix = prefix.rstrip("/")
        self.url = join_url(bucket, prefix)
        self._prefix = f"{prefix}/" if prefix else ""
        self._store = store if store is not None else S3Store(credentials, access=access)
        self._bucket = self._store._bucket(bucket)

    def open(self, name: str) -> S3Source:
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
        query = {"list-type": "2", "prefix": self._prefix, "encoding-type": "url"} | ({} if recursive else {"delimiter": "/"})
        token: str | None = ""
        while token is not None:
            with self._bucket.explained(self._prefix.rstrip("/"), listing=True):
                body = self._bucket.list_page(query | ({"continuation-token": token} if token else {}))
                page = self._page_of(body, token, parse_page, store="S3")
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


def open_s3(
    url: str,
    *,
    credentials: S3Credentials | GiveCredentials | None = None,
    access: Access | None = None,
    store: S3Store | None = None,
    prefix_nbytes: int = PREFIX_NBYTES,
) -> S3Source:
    """Open an object with one GET of its first bytes, which also tells its size and version.

    Args:
        url: s3://bucket/key, the key as it is, not escaped.
        credentials: who asks, and where; a function that returns them is asked again when they have expired. None: as for the
            aws command.
        access: patience, proxies and trusted CAs.
        store: where others are opened as well, so that credentials and regions are found once; instead of `credentials` and
            `access`.
        prefix_nbytes: bytes to fetch now and keep, so that reading the header of a checkpoint costs no second request.

    Returns:
        An open source; `close` it.

    Raises:
        OptionError: no such url or endpoint, or botocore is missing.
        BucketNotFoundError, ObjectNotFoundError, AccessDeniedError, CredentialsError: S3 says so.
        SourceError: it cannot be reached or read; the classes are those of `headrace.sources.http`.

    Example:
        >>> source = open_s3("s3://models/minilm/model.safetensors")  # doctest: +SKIP
        >>> source.nbytes  # doctest: +SKIP
        90868376
    """
    if store is not None and (credentials is not None or access is not None):
        raise OptionError("a store has credentials and access of its own", option="store")
    store = store if store is not None else S3Store(credentials, access=access)
    return store.open(url, prefix_nbytes=prefix_nbytes)
