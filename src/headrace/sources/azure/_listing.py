"""PURE: a page of List Blobs, from its XML to plain data."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote
from xml.etree import ElementTree

from headrace.sources.http import parse_size, parse_xml
from headrace.sources.objects import Page


@dataclass(frozen=True, slots=True)
class Entry:
    """A blob of a listing.

    Attributes:
        key: all of its name.
        name: the name without the folder's prefix.
        nbytes: its size.
        etag: without quotes, as listings have it.
        is_folder: whether it stands for a folder and is no file: a directory of a hierarchical namespace, what Hadoop leaves
            behind (hdi_isfolder), or an empty blob whose name ends with a slash.
    """

    key: str
    name: str
    nbytes: int
    etag: str
    is_folder: bool = False


def parse_page(body: bytes, *, prefix: str) -> Page[Entry]:
    """Read a page.

    Args:
        body: the answer.
        prefix: what was asked for; names that do not begin with it are no part of the folder.

    Raises:
        ValueError: it is no page of a listing.
    """
    root = parse_xml(body)
    if root.tag != "EnumerationResults":
        raise ValueError(f"it is {root.tag!r}, and no list of blobs")
    entries = tuple(_entry(found, prefix) for found in root.iterfind("Blobs/Blob"))
    has_folders = root.find("Blobs/BlobPrefix") is not None
    kept = tuple(entry for entry in entries if entry.key.startswith(prefix))
    return Page(kept, has_folders, root.findtext("NextMarker") or None)


def _entry(found: ElementTree.Element, prefix: str) -> Entry:
    element = found.find("Name")
    key = (element.text or "") if element is not None else ""
    if element is not None and element.get("Encoded") == "true":  # from 2021-02-12 on, where XML could not hold the name
        key = unquote(key)
    size = found.findtext("Properties/Content-Length") or "0"  # a directory has none
    if not key:
        raise ValueError("it has a blob without name")
    nbytes = parse_size(size)
    is_folder = key == prefix or (nbytes == 0 and (key.endswith("/") or _says_folder(found)))
    etag = (found.findtext("Properties/Etag") or "").strip('"')
    return Entry(key, key[len(prefix) :], nbytes, etag, is_folder)


def _says_folder(found: ElementTree.Element) -> bool:
    if (found.findtext("Properties/ResourceType") or "").lower() == "directory":
        return True
    metadata = {element.tag.lower(): (element.text or "").strip().lower() for element in found.iterfind("Metadata/*")}
    return metadata.get("hdi_isfolder") == "true"
