"""Files on plain web servers: the byte engine with redirects followed, and a folder where nothing can be listed.

Name and password in a url, and the caller's headers, go to the host that the url names and to no other; `sources.http` sees to
that. A web server does not say what a folder holds, so names come from the caller, from model.safetensors.index.json, or are
model.safetensors alone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Final
from urllib.parse import SplitResult, quote, urlsplit, urlunsplit

from headrace.errors import FormatError, OptionError, SourceNotFoundError
from headrace.sources.base import ByteSource
from headrace.sources.http import Access, Headers, fetch, open_http, public_url
from headrace.sources.memory import MemorySource

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"


def open_web(url: str, *, access: Access | None = None) -> ByteSource:
    """Open a file on a web server, wherever it redirects to.

    Args:
        url: http:// or https://; name and password in it are sent as basic authorization, to its host only.
        access: headers (a bearer token, say), trust, proxies and patience. Headers go to the url's host only.

    Raises:
        SourceError: it cannot be reached, found or read; the classes are those of `headrace.sources.http`.

    Example:
        >>> source = open_web("https://example.org/model.safetensors")  # doctest: +SKIP
    """
    return open_http(url, access=_following(access))


class WebFolder:
    """A folder on a web server: opens by name, and lists what is named elsewhere.

    Args:
        base_url: of the folder; a query (a signature of the whole folder) is sent with every file.
        names: the files in it; None: what its model.safetensors.index.json names, or model.safetensors.
        access: as for `open_web`.

    Raises:
        OptionError: it is no http:// or https:// url.

    Example:
        >>> folder = WebFolder("https://example.org/minilm", ["model.safetensors"])
        >>> folder.names()
        ['model.safetensors']
    """

    def __init__(self, base_url: str, names: Iterable[str] | None = None, *, access: Access | None = None) -> None:
        self._parts = _split(base_url)
        self.url = public_url(urlunsplit(self._parts._replace(query="", fragment=""))).rstrip("/")
        self._access = _following(access)
        self._names = None if names is None else sorted(names)
        self._is_found = names is None  # by the index, if there is one
        self._index: bytes | None = None
        self._finding = threading.Lock()
        self._below: set[str] = set()

    def names(self) -> list[str]:
        """The files directly inside, sorted, as far as they can be known.

        Raises:
            SourceNotFoundError: there is neither an index nor a model.safetensors.
            FormatError: the index is no JSON object.
        """
        with self._finding:
            if self._names is None:
                self._names = self._find_names()
            return list(self._names)

    def walk(self) -> list[str]:
        """The files in it, and those in folders below that the index names, sorted. Raises as `names`."""
        return sorted({*self.names(), *self._below})

    def open(self, name: str) -> ByteSource:
        """Open a file of the folder, a named one or any other. Raises as `open_web`."""
        if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
            url = f"{self.url}/{name}"
            raise SourceNotFoundError(f"cannot open {url}: it is no name of a file inside the folder", url=url)
        if name == INDEX_NAME and self._is_found:
            return self._open_index()
        return open_http(self._url_of(name), access=self._access)

    def _open_index(self) -> ByteSource:
        """The index that tells the names, which is asked for once."""
        self.names()
        url = f"{self.url}/{INDEX_NAME}"
        if self._index is None:
            raise SourceNotFoundError(f"cannot open {url}: the server has none", url=url, status=404)
        return MemorySource(self._index, url=url)

    def _url_of(self, name: str) -> str:
        return urlunsplit(self._parts._replace(path=f"{self._parts.path.rstrip('/')}/{quote(name)}", fragment=""))

    def _find_names(self) -> list[str]:
        try:
            _, self._index = fetch(self._url_of(INDEX_NAME), access=self._access, limit_nbytes=1 << 30)
        except SourceNotFoundError as exc:
            return self._find_single(exc)
        named = _shards(self._index, url=f"{self.url}/{INDEX_NAME}")
        self._below = {name for name in named if "/" in name}
        return sorted({INDEX_NAME, *(name for name in named if "/" not in name)})

    def _find_single(self, missing: SourceNotFoundError) -> list[str]:
        try:
            open_http(self._url_of(SINGLE_NAME), access=self._access, prefix_nbytes=0).close()
        except SourceNotFoundError as exc:
            message = (
                f"cannot tell what is in {self.url}: a web server does not list its files, and there is neither {INDEX_NAME} nor "
                f"{SINGLE_NAME} (status {exc.status}). Give the urls of the files as a list"
            )
            raise SourceNotFoundError(message, url=self.url, status=exc.status) from missing
        return [SINGLE_NAME]


def _following(access: Access | None) -> Access:
    access = access if access is not None else Access()
    return access if access.allow_redirect is not None else replace(access, allow_redirect=_follow)


def _follow(_old: str, _new: str, _headers: Headers) -> bool:
    return True


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        valid = False
    if not valid:
        raise OptionError(f"{public_url(url)} is no http:// or https:// url with a host", option="url")
    return parts


def _shards(index: bytes, *, url: str) -> set[str]:
    """Files that an index names; what else is wrong with it, the reader of checkpoints will say."""
    try:
        parsed = json.loads(index)
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"{url} is not JSON: {exc}", url=url) from exc
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    return {name for name in weight_map.values() if isinstance(name, str)} if isinstance(weight_map, dict) else set()
