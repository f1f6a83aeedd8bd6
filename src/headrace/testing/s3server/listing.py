"""ListObjectsV2: which keys are on a page, and the XML that says so. Pure: takes all keys of a bucket, asks for details of a few.

Names are in the order of their UTF-8 bytes, which is Python's order of strings. Common prefixes count as entries of a page. A
continuation token is opaque to clients; here it holds the last entry's name, so a page is right also after keys came or went.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import gmtime, strftime
from typing import Protocol
from urllib.parse import quote_plus

from headrace.testing.s3server.errors import XML_HEAD, Refusal, text

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
MAX_PAGE = 1000  # S3 gives no more, whatever max-keys says


class Listed(Protocol):
    """What a listing tells of an object."""

    @property
    def nbytes(self) -> int:
        """Its size."""

    @property
    def etag(self) -> str:
        """Its ETag, quoted."""

    @property
    def modified_s(self) -> float:
        """When it was written, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class ListQuery:
    """What a client asks for."""

    prefix: str = ""
    delimiter: str = ""
    start_after: str = ""
    token: str = ""  # as sent
    after: str = ""  # the name in the token: the last entry that was given
    max_keys: int = MAX_PAGE
    url_encoded: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """Keys and common prefixes of one answer, in order, and whether there are more."""

    keys: tuple[str, ...]
    prefixes: tuple[str, ...]
    next_token: str | None


def parse(params: Mapping[str, str]) -> ListQuery:
    """Read the query of a request.

    Raises:
        Refusal: max-keys, continuation-token or encoding-type is none.
    """
    try:
        max_keys = int(params.get("max-keys") or MAX_PAGE)
        if max_keys < 0:
            raise ValueError(max_keys)
    except ValueError as error:
        raise Refusal("InvalidArgument", "Provided max-keys not an integer or within integer range") from error
    if params.get("encoding-type", "url") != "url":
        raise Refusal("InvalidArgument", "Invalid Encoding Method specified in Request")
    token = params.get("continuation-token", "")
    if "continuation-token" in params and not token:
        raise Refusal("InvalidArgument", "The continuation token provided is incorrect")
    return ListQuery(
        prefix=params.get("prefix", ""),
        delimiter=params.get("delimiter", ""),
        start_after=params.get("start-after", ""),
        token=token,
        after=_name_in(token),
        max_keys=min(max_keys, MAX_PAGE),
        url_encoded="encoding-type" in params,
    )


def select(keys: Iterable[str], query: ListQuery, *, page: int) -> Page:
    """Choose the entries of one page of at most `page`: those after the token, or else after `start_after`."""
    is_prefix: dict[str, bool] = {}
    for key in sorted(keys):
        # S3 ignores start-after where a token is given.
        if not key.startswith(query.prefix) or (not query.after and query.start_after and key <= query.start_after):
            continue
        cut = key.find(query.delimiter, len(query.prefix)) if query.delimiter else -1
        is_prefix[key if cut < 0 else key[: cut + len(query.delimiter)]] = cut >= 0
    left = [name for name in is_prefix if name > query.after or not query.after]
    count = min(page, query.max_keys)
    here = left[:count]
    token = _token_of(here[-1]) if here and len(left) > count else None
    return Page(tuple(name for name in here if not is_prefix[name]), tuple(name for name in here if is_prefix[name]), token)


def render(bucket: str, query: ListQuery, page: Page, details: Callable[[str], Listed | None]) -> bytes:
    """Write a page as XML; objects that have gone since are left out."""

    def name(value: str) -> str:
        return text(quote_plus(value, safe="/-_.~*", errors="replace") if query.url_encoded else value)

    entries = [(key, details(key)) for key in page.keys]
    contents = "".join(_contents(name(key), listed) for key, listed in entries if listed is not None)
    prefixes = "".join(f"<CommonPrefixes><Prefix>{name(prefix)}</Prefix></CommonPrefixes>" for prefix in page.prefixes)
    fields = [
        f"<Name>{text(bucket)}</Name><Prefix>{name(query.prefix)}</Prefix>",
        f"<Delimiter>{name(query.delimiter)}</Delimiter>" if query.delimiter else "",
        f"<StartAfter>{name(query.start_after)}</StartAfter>" if query.start_after else "",
        "<EncodingType>url</EncodingType>" if query.url_encoded else "",
        f"<ContinuationToken>{text(query.token)}</ContinuationToken>" if query.token else "",
        f"<NextContinuationToken>{text(page.next_token)}</NextContinuationToken>" if page.next_token else "",
        f"<KeyCount>{len(page.keys) + len(page.prefixes)}</KeyCount><MaxKeys>{query.max_keys}</MaxKeys>",
        f"<IsTruncated>{'true' if page.next_token else 'false'}</IsTruncated>",
    ]
    return f'{XML_HEAD}<ListBucketResult xmlns="{NAMESPACE}">{"".join(fields)}{contents}{prefixes}</ListBucketResult>'.encode()


def _contents(key: str, listed: Listed) -> str:
    when = strftime("%Y-%m-%dT%H:%M:%S.000Z", gmtime(listed.modified_s))
    return (
        f"<Contents><Key>{key}</Key><LastModified>{when}</LastModified><ETag>{text(listed.etag)}</ETag>"
        f"<Size>{listed.nbytes}</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


def _token_of(name: str) -> str:
    return base64.urlsafe_b64encode(b"1" + name.encode("utf-8", "surrogateescape")).decode()


def _name_in(token: str) -> str:
    if not token:
        return ""
    try:
        data = base64.b64decode(token, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refusal("InvalidArgument", "The continuation token provided is incorrect") from error
    if data[:1] != b"1":
        raise Refusal("InvalidArgument", "The continuation token provided is incorrect")
    return data[1:].decode("utf-8", "surrogateescape")
