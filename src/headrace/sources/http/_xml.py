"""PURE: XML as stores send it, with one kind of error for whatever else it is."""

from __future__ import annotations

import re
from xml.etree import ElementTree


def parse_xml(text: bytes) -> ElementTree.Element:
    """The root of a document. Stores send no document types; what one could blow up, or refer to, is refused.

    Raises:
        ValueError: it is no XML, or of a kind that no store sends.

    >>> parse_xml(b"<a><b/></a>").tag
    'a'
    """
    if b"<!DOCTYPE" in text:
        raise ValueError("it has a document type")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as exc:
        raise ValueError(f"it is not XML ({exc})") from None
    except LookupError:  # it says that it is in an encoding that nobody has heard of
        raise ValueError("it is not XML (its encoding is unknown)") from None


def parse_size(text: str) -> int:
    """The size of an object, in digits. Raises ValueError for anything else."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError("it has an object without a size")
    return int(text)
