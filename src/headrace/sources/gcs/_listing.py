"""PURE: a page of a listing, from JSON or XML to plain data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
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
        generation: which of the objects of this key it is.
        md5, crc32c: of its bytes, in base64; None where the store does not tell (composite objects have no MD5, and XML listings
            neither).
    """

    key: str
    name: str
    nbytes: int
    generation: str | None = None
    md5: str | None = None
    crc32c: str | None = None


JSON_FIELDS = "items(name,size,generation,md5Hash,crc32c),prefixes,nextPageToken"


def parse_json_page(body: bytes, *, prefix: str) -> Page[Entry]:
    """Read a page of the JSON API.

    Args:
        body: the answer.
        prefix: what was asked for; keys that do not begin with it are no part of the folder.

    Raises:
        ValueError: it is no page of a listing.
    """
    try:
        page = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    items, folders, token = (
        (page.get(name) for name in ("items", "prefixes", "nextPageToken")) if isinstance(page, dict) else "???"
    )
    if not isinstance(items, (list, type(None))) or not isinstance(folders, (list, type(None))):
        raise ValueError("it is no list of objects")
    if not isinstance(token, (str, type(None))):
        raise ValueError("its token of the next page is no text")
    return Page(_under(prefix, [_json_entry(item, prefix) for item in items or ()]), bool(folders), token or None)


def _json_entry(item: Any, prefix: str) -> Entry:
    fields: Mapping[str, Any] = item if isinstance(item, dict) else {}
    key, size = fields.get("name"), fields.get("size")
    if not isinstance(key, str) or not isinstance(size, str) or re.search("[\ud800-\udfff]", key):
        raise ValueError("it has an object without name or size")
    told = (fields.get(name) for name in ("generation", "md5Hash", "crc32c"))
    generation, md5, crc32c = (value if isinstance(value, str) else None for value in told)
    return _entry(key, prefix, size, generation=generation, md5=md5, crc32c=crc32c)


def parse_xml_page(body: bytes, *, prefix: str) -> Page[Entry]:
    """Read a page of the XML API (list-type=2). Arguments and errors as for `parse_json_page`."""
    root = parse_xml(body)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if root.tag != "ListBucketResult":
        raise ValueError(f"it is {root.tag!r}, and no list of objects")
    encoded = root.findtext("EncodingType") == "url"
    entries = [_xml_entry(found, prefix, encoded) for found in root.iterfind("Contents")]
    token = root.findtext("NextContinuationToken") or None
    if root.findtext("IsTruncated") == "true" and token is None:
        raise ValueError("it is not the last page and names no next one")
    return Page(_under(prefix, entries), root.find("CommonPrefixes") is not None, token)


def _xml_entry(found: ElementTree.Element, prefix: str, encoded: bool) -> Entry:
    key = found.findtext("Key") or ""
    key = unquote_plus(key, errors="surrogateescape") if encoded else key
    return _entry(key, prefix, found.findtext("Size") or "", generation=found.findtext("Generation"))


def _entry(key: str, prefix: str, size: str, **told: str | None) -> Entry:
    if not key:
        raise ValueError("it has an object without name")
    return Entry(key, key[len(prefix) :], parse_size(size), **told)


def _under(prefix: str, entries: list[Entry]) -> tuple[Entry, ...]:
    return tuple(entry for entry in entries if entry.key.startswith(prefix))
