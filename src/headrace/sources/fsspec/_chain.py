"""PURE: urls as fsspec takes them, links chained with '::': which part names the file, and what of them is secret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from headrace.sources.http import public_url

_OWN: Final = {  # other programs' names of stores that have a source here, and how their addresses are written for it
    "gcs": "gs://bucket/...",
    "s3a": "s3://bucket/...",
    "s3n": "s3://bucket/...",
    "adl": "az://container/...",
    "wasb": "az://container/...",
    "wasbs": "az://container/...",
}


def own_form(url: str) -> str | None:
    """How an address is written for the source that headrace has for its store; None: it has none, or not inside a chain.

    >>> own_form("s3a://models/m")
    's3://bucket/...'
    """
    return None if "::" in url else _OWN.get(url.partition("://")[0].lower())


def shown_chain(url: str) -> str:
    """The url as it may be shown: without passwords and the values of queries in any of its links.

    >>> shown_chain("zip://m::sftp://me:pw@host/m.zip")
    'zip://m::sftp://host/m.zip'
    """
    return "::".join(public_url(link) for link in re.sub(r"://[^/]*@", "://", url).split("::"))


def split_chain(url: str) -> tuple[str, str]:
    """All of a url but the last part of its first path, and that part: the folder and the name of a file.

    >>> split_chain("zip://m/a.safetensors::https://host/m.zip")
    ('zip://m::https://host/m.zip', 'a.safetensors')
    >>> split_chain("memory://a.safetensors")
    ('memory://', 'a.safetensors')
    """
    links = url.split("::")
    first = next((index for index, link in enumerate(links) if "://" in link), 0)
    scheme, mark, path = links[first].partition("://")
    folder, _, name = path.rpartition("/")
    return "::".join([*links[:first], f"{scheme}{mark}{folder}", *links[first + 1 :]]), name


def secrets_of(url: str, options: Mapping[str, Any] | None) -> frozenset[str]:
    """Strings that no message shows: logins and queries in the url, and all options but where the host is."""
    logins = re.findall(r"://([^/]*)@", url)
    pairs = [pair for link in url.split("::") for pair in link.partition("?")[2].split("&")]
    parts = {part for login in logins for part in (login, *login.split(":", 1)[1:])} | {pair.partition("=")[2] for pair in pairs}
    return frozenset(text for text in {*parts, *map(unquote, parts), *_strings(options or {})} if len(text) > 2)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in ("host", "protocol", "target_protocol"):
                yield from _strings(inner)
