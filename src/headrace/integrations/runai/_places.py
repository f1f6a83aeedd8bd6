"""Folders and urls: what lies there, which of it fits the patterns, and who asks.

Patterns are Run:ai's: fnmatch on all of a key, so that "*.json" fits "models/minilm/config.json" and "config.json" does not.
Credentials are S3's only; other stores find theirs as their own tools do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

import headrace
from headrace.errors import OptionError, SourceNotFoundError
from headrace.integrations.runai._errors import as_value_errors
from headrace.integrations.runai.s3_utils.s3_utils import S3Credentials, filter_allow, filter_ignore, is_s3_path
from headrace.integrations.views import Chosen
from headrace.sources.base import Folder

OBJECT_STORES: Final = ("s3://", "gs://", "az://")


def is_url(path: str) -> bool:
    """Whether it is a url, and no local path."""
    return "://" in path


def kind_of(path: str) -> str:
    """The scheme of a url; "" for local paths."""
    return path.partition("://")[0].lower() if is_url(path) else ""


def credentials_for(url: str, given: S3Credentials | None) -> object:
    """Credentials as headrace takes them; None for what is not in S3."""
    if given is None or not is_s3_path(url):
        return None
    from headrace.sources.s3 import S3Credentials as StoreCredentials

    if isinstance(given, StoreCredentials):
        return given
    return StoreCredentials(
        access_key_id=given.access_key_id,
        secret_access_key=given.secret_access_key,
        session_token=given.session_token,
        region=given.region_name,
        endpoint=given.endpoint,
    )


def list_urls(path: str, allow: Sequence[str] | None, credentials: S3Credentials | None) -> list[str]:
    """Urls of the files directly in the folder that a url names, sorted; none where nothing is there.

    Raises:
        SourceError: the store cannot be reached, or refuses.
    """
    with as_value_errors():
        folder = _folder(path, credentials)
        names = _choose(path, _names(folder.names), allow, None)
    return [f"{path.rstrip('/')}/{name}" for name in names]


def pull(
    path: str, dst: str, allow: Sequence[str] | None, ignore: Sequence[str] | None, credentials: S3Credentials | None
) -> None:
    """Copy what fits the patterns to a folder; what is there already is not copied again."""
    with as_value_errors():
        folder = _folder(path, credentials)
        walk: Callable[[], list[str]] = getattr(folder, "walk", folder.names)
        names = _choose(path, _names(walk), allow, ignore)
        if names:
            # With a pattern, so that what an earlier pull with other patterns has begun is left in place.
            headrace.pull(Chosen(folder, names), dst, include="*")


def list_sizes(path: str, *, recursive: bool, allow: Sequence[str] | None, ignore: Sequence[str] | None) -> list[tuple[str, int]]:
    """(path or url, bytes) of the files in a folder, sorted. Patterns of local files are about the whole path.

    Raises:
        SourceNotFoundError: there is no such local folder.
        SourceError: the store cannot be reached, or refuses.
    """
    if not is_url(path) and os.path.isfile(path):
        raise OptionError(f"{path} is a file, and a folder is what can be listed", option="prefix")
    with as_value_errors():
        sizes = _sizes(_folder(path, None), recursive=recursive)
    base = path.rstrip("/")
    return [(f"{base}/{name}", sizes[name]) for name in _choose(path, sorted(sizes), allow, ignore)]


def _folder(path: str, credentials: S3Credentials | None) -> Folder:
    # With a slash at its end a url names a folder, whatever its last part looks like.
    return headrace.folder(f"{path.rstrip('/')}/" if is_url(path) else path, credentials=credentials_for(path, credentials))


def _sizes(folder: Folder, *, recursive: bool) -> dict[str, int]:
    if hasattr(folder, "list_keys"):  # a listing of a store tells the sizes
        try:
            entries = folder.list_keys(recursive=recursive)
        except SourceNotFoundError as exc:
            if exc.status is not None:
                raise
            return {}
        return {entry.name: entry.nbytes for entry in entries}
    names = folder.walk() if recursive and hasattr(folder, "walk") else folder.names()
    if not is_url(folder.url):
        return {name: os.path.getsize(os.path.join(folder.url, name)) for name in names}
    return {name: _size(folder, name) for name in names}


def _size(folder: Folder, name: str) -> int:
    source = folder.open(name)
    try:
        return source.nbytes
    finally:
        source.close()


def _names(listed: Callable[[], list[str]]) -> list[str]:
    """The listing; nothing where nothing is there. That a bucket does not exist is the store's refusal, which has a status."""
    try:
        return listed()
    except SourceNotFoundError as exc:
        if exc.status is not None:
            raise
        return []


def _choose(path: str, names: Sequence[str], allow: Sequence[str] | None, ignore: Sequence[str] | None) -> list[str]:
    base = path.rstrip("/")
    prefix = base.partition("://")[2].partition("/")[2] if is_url(base) else base
    begin = f"{prefix}/" if prefix else ""
    keys = [begin + name for name in names]
    if allow is not None:
        keys = filter_allow(keys, allow)
    if ignore is not None:
        keys = filter_ignore(keys, ignore)
    return [key[len(begin) :] for key in keys]
