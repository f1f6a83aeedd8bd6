"""PURE: a page of ListObjectsV2, from its XML to plain data."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from headrace.sources.http import parse_size, parse_xml
from headrace.sources.objects import Page


@dataclass(frozen=True, slots=True)
class Entry:
    """An object of a listing.

    Attributes:
        key: all of it.
        name: the key without the folder's prefix.
        nbytes: its size.
        etag: without quotes, which some stores leave out.
    """

    key: str
    name: str
    nbytes: int
    etag: str


def parse_page(body: bytes, *, prefix: str) -> Page[Entry]:
    """Read a page.

    Args:
        body: the answer.
        prefix: what was asked for; keys that do not begin with it are no part of the folder.

    Raises:
        ValueError: it is no page of a listing.
    """
    root = parse_xml(body)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # each store has a namespace of its own, or none
    if root.tag != "ListBucketResult":
        raise ValueError(f"it is {root.tag!r}, and no list of objects")
    encoded = root.findtext("EncodingType") == "url"
    entries = tuple(_entry(found, prefix, encoded) for found in root.iterfind("Contents"))
    token = root.findtext("NextContinuationToken") or None
    if root.findtext("IsTruncated") == "true" and token is None:
        raise ValueError("it is not the last page and names no next one")
    return Page(tuple(entry for entry in entries if entry.key.startswith(prefix)), root.find("CommonPrefixes") is not None, token)


def _entry(found: ElementTree.Element, prefix: str, encoded: bool) -> Entry:
    key = found.findtext("Key") or ""
    key = unquote_plus(key, errors="surrogateescape") if encoded else key
    if not key:
        raise ValueError("it has an object without key")
    return Entry(key, key[len(prefix) :], parse_size(found.findtext("Size") or ""), (found.findtext("ETag") or "").strip('"'))
