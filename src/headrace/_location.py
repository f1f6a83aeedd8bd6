"""Where a url leads: from a path, a URL, a list of them, a source or a folder to an open checkpoint.

Here adapters of storage are picked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from headrace._checkpoint import INDEX_SUFFIX, Checkpoint, open_files, open_folder
from headrace._options import Options
from headrace.errors import OptionError
from headrace.sources.base import ByteSource, Folder
from headrace.sources.file import FileFolder, FileSource
from headrace.sources.mapped import MappedSource

Location: TypeAlias = "str | os.PathLike[str] | Checkpoint | ByteSource | Folder | Sequence[str | os.PathLike[str] | ByteSource]"


def open_location(url: Location, options: Options, credentials: object = None) -> Checkpoint:
    """Open what a url names; an open checkpoint is returned as it is.

    Args:
        url: see `headrace.open`.
        options: resolved tuning.
        credentials: for the store that a URL leads to; None where they are found as the store's own tools find them.

    Raises:
        OptionError: it is no url, or of a kind that there is no source for.
        As `_checkpoint.open_folder`.
    """
    if isinstance(url, Checkpoint):
        return url
    if isinstance(url, (str, os.PathLike)):
        if is_remote_url(url):
            return _open_url(str(url), options, credentials)
        return _open_path(local_path(url), options)
    if isinstance(url, Sequence):
        return _open_list(url, options, credentials)
    if hasattr(url, "read_into"):
        source = cast(ByteSource, url)
        return open_files([lambda: source], source.url, options)
    if hasattr(url, "names"):
        return open_folder(url, options)
    raise OptionError(f"url is a path, a URL, a list of them, a source or a folder, not {type(url).__name__}", option="url")


def open_place(url: object, options: Options, credentials: object) -> tuple[Folder, str | None]:
    """The folder that a url names, and the file in it where it names one.

    Raises:
        OptionError: there is no source for it.
    """
    if hasattr(url, "names"):
        return cast(Folder, url), None
    if is_remote_url(url):
        from headrace._remote import Remote

        return Remote(options, credentials).place(str(url))
    path = local_path(cast("str | os.PathLike[str]", url))
    return (_folder(path.parent, options), path.name) if path.is_file() else (_folder(path, options), None)


def is_remote_url(url: object) -> bool:
    """Whether it is a URL of a scheme other than file."""
    return isinstance(url, str) and "://" in url and not url.lower().startswith("file:")


def _open_url(url: str, options: Options, credentials: object) -> Checkpoint:
    from headrace._remote import Remote  # brings the network's modules in

    remote = Remote(options, credentials)
    path = urlsplit(url).path
    if path.endswith(INDEX_SUFFIX):
        base, _, index = url.partition("?")[0].rpartition("/")
        return open_folder(remote.folder(base), options, index=index, remote=True)
    if path.endswith(".safetensors"):
        return open_files([lambda: remote.open(url)], url, options)
    return open_folder(remote.folder(url), options, remote=True)


def _open_path(path: Path, options: Options) -> Checkpoint:
    if path.is_dir():
        return open_folder(_folder(path, options), options)
    if path.name.endswith(INDEX_SUFFIX):
        return open_folder(_folder(path.parent, options), options, index=path.name)
    return open_files([lambda: _file(path, options)], str(path), options)


def _kind(options: Options) -> type[FileSource]:
    return MappedSource if options.mmap in ("auto", "require") else FileSource


def _file(path: Path, options: Options) -> FileSource:
    return _kind(options)(path, direct_io=options.direct_io or "auto")


def _folder(path: Path, options: Options) -> FileFolder:
    return FileFolder(path, direct_io=options.direct_io or "auto", kind=_kind(options))


def _open_list(urls: Sequence[Any], options: Options, credentials: object) -> Checkpoint:
    if not urls:
        raise OptionError("url is an empty list: there is nothing to load", option="url")
    is_remote = any(is_remote_url(url) for url in urls)
    open_url = _url_opener(options, credentials) if is_remote else None

    def opener(url: Any) -> Callable[[], ByteSource]:
        if hasattr(url, "read_into"):
            return lambda: url
        if open_url is not None and is_remote_url(url):
            return lambda: open_url(url)
        path = local_path(url)
        return lambda: _file(path, options)

    named = ", ".join(str(getattr(url, "url", url)) for url in urls[:3])
    return open_files([opener(url) for url in urls], named, options, remote=is_remote)


def _url_opener(options: Options, credentials: object) -> Callable[[str], ByteSource]:
    from headrace._remote import Remote

    return Remote(options, credentials).open


def local_path(url: str | os.PathLike[str]) -> Path:
    """The path that a path or file URL names. Raises OptionError for what is neither."""
    if not isinstance(url, (str, os.PathLike)):
        raise OptionError(f"url is a path, a URL or a source, not {type(url).__name__}", option="url")
    text = os.fspath(url)
    if is_remote_url(text):
        raise OptionError(f"{text}: this has to be a local path", option="url")
    if text.lower().startswith("file://"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise OptionError(f"{text}: a file URL names no host; write file:///path", option="url")
        return Path(unquote(parts.path))
    return Path(text).expanduser()
