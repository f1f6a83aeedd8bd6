"""Where a url leads: from a path, a URL, a list of them, a source or a folder to an open checkpoint.

Here adapters of storage are picked, and wrapped where what they read is to be verified: before a header is read.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from headrace._checkpoint import Checkpoint, open_files, open_folder
from headrace._integrity import VerifiedSource
from headrace._manifest import MANIFEST_NAME, Manifest, manifest_of
from headrace._metadata import Metadata
from headrace._options import Options, resolve
from headrace._shards import INDEX_SUFFIX
from headrace._verification import Verification, read_manifest
from headrace.errors import OptionError, SourceNotFoundError
from headrace.sources.base import ByteSource, Folder
from headrace.sources.file import FileFolder, FileSource
from headrace.sources.mapped import MappedSource
from headrace.sources.memory import MemorySource

if TYPE_CHECKING:
    from headrace._remote import Remote

Location: TypeAlias = "str | os.PathLike[str] | Checkpoint | ByteSource | Folder | Sequence[str | os.PathLike[str] | ByteSource]"
_ALMOST_A_URL = re.compile(r"(?P<scheme>s3|gs|az|abfss?|hf|https?):/?(?=[^/:])", re.IGNORECASE)
_OF_OPENING = ("direct_io", "attempts", "deadline_s")  # options that a source is made with
_LIKE_A_REPOSITORY = re.compile(r"[\w-]+/[\w.-]+")
Verify: TypeAlias = "bool | str | os.PathLike[str] | Mapping[str, Any] | None"


def open_location(
    url: Location,
    options: Options,
    credentials: object = None,
    *,
    verify: Verify = None,
    metadata: str | os.PathLike[str] | None = None,
) -> Checkpoint:
    """Open what a url names; an open checkpoint is returned as it is.

    Args:
        url: see `headrace.open`.
        options: resolved tuning.
        credentials: for the store that a URL leads to; None where they are found as the store's own tools find them.
        verify, metadata: see `headrace.open`.

    Raises:
        OptionError: it is no url, or of a kind that there is no source for; or `verify` or `metadata` cannot be used.
        As `_checkpoint.open_folder`.
    """
    if isinstance(url, Checkpoint):
        _check_verified(url, verify)
        if metadata is not None:
            raise OptionError("metadata has to be given to headrace.open: the checkpoint is open already", option="metadata")
        return url
    verification = verification_for(verify, options, credentials)
    known = Metadata(local_path(metadata)) if metadata is not None else None
    checkpoint = _open(url, options, credentials, verification, known)
    note_verified(checkpoint, verification)
    return checkpoint


def _open(
    url: Location, options: Options, credentials: object, verification: Verification | None, metadata: Metadata | None
) -> Checkpoint:
    if isinstance(url, (str, os.PathLike)):
        if is_remote_url(url):
            return _open_url(str(url), options, credentials, verification, metadata)
        return _open_path(local_path(url), options, verification, metadata)
    if isinstance(url, Sequence) and not hasattr(url, "decode"):  # bytes are sequences, too
        return _open_list(url, options, credentials, verification, metadata)
    if hasattr(url, "read_into"):
        source = cast(ByteSource, url)
        return open_files([_checked(verification, lambda: source, source.url)], source.url, options, metadata=metadata)
    if hasattr(url, "names"):
        return open_folder(_checked_folder(verification, cast(Folder, url)), options, metadata=metadata)
    raise OptionError(f"url is a path, a URL, a list of them, a source or a folder, not {type(url).__name__}", option="url")


def source_of(data: memoryview, url: str) -> ByteSource:
    """Bytes in memory as what they were read from."""
    return MemorySource(data, url=url)


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


def _open_url(
    url: str, options: Options, credentials: object, verification: Verification | None, metadata: Metadata | None
) -> Checkpoint:
    from headrace._remote import Remote, is_file_name, shown_url, split_url  # brings the network's modules in

    remote = Remote(options, credentials)
    base, name = split_url(url)
    if name.endswith(INDEX_SUFFIX):
        folder = _checked_folder(verification, remote.folder(base))
        return open_folder(folder, options, index=name, remote=True, metadata=metadata)
    if is_file_name(name):
        return open_files([_remote_opener(url, remote, verification)], shown_url(url), options, metadata=metadata)
    return open_folder(_checked_folder(verification, remote.folder(url)), options, remote=True, metadata=metadata)


def _remote_opener(url: str, remote: Remote, verification: Verification | None) -> Callable[[], ByteSource]:
    from headrace._remote import split_url

    return _checked(verification, lambda: remote.open(url), split_url(url)[1], lambda: remote.place(url)[0])


def _open_path(path: Path, options: Options, verification: Verification | None, metadata: Metadata | None) -> Checkpoint:
    if path.is_dir():
        return open_folder(_checked_folder(verification, _folder(path, options)), options, metadata=metadata)
    if path.name.endswith(INDEX_SUFFIX):
        folder = _checked_folder(verification, _folder(path.parent, options))
        return open_folder(folder, options, index=path.name, metadata=metadata)
    if _LIKE_A_REPOSITORY.fullmatch(str(path)) and not path.parent.exists():
        hint = f"check the path; a model of the Hugging Face hub is hf://{path}"
        raise SourceNotFoundError(f"there is no {path} here: {hint}", url=str(path), status=errno.ENOENT)
    return open_files([_file_opener(path, options, verification)], str(path), options, metadata=metadata)


def _file_opener(path: Path, options: Options, verification: Verification | None) -> Callable[[], ByteSource]:
    return _checked(verification, lambda: _file(path, options), path.name, lambda: _folder(path.parent, options))


def _kind(options: Options) -> type[FileSource]:
    return MappedSource if options.mmap in ("auto", "require") else FileSource


def _file(path: Path, options: Options) -> FileSource:
    return _kind(options)(path, direct_io=options.direct_io or "auto")


def _folder(path: Path, options: Options) -> FileFolder:
    return FileFolder(path, direct_io=options.direct_io or "auto", kind=_kind(options))


def _open_list(
    urls: Sequence[Any], options: Options, credentials: object, verification: Verification | None, metadata: Metadata | None
) -> Checkpoint:
    if not urls:
        raise OptionError("url is an empty list: there is nothing to load", option="url")
    is_remote = any(is_remote_url(url) for url in urls)
    remote = _remote(options, credentials) if is_remote else None

    def opener(url: Any) -> Callable[[], ByteSource]:
        if hasattr(url, "read_into"):
            return _checked(verification, lambda: url, url.url)
        if remote is not None and is_remote_url(url):
            return _remote_opener(url, remote, verification)
        return _file_opener(local_path(url), options, verification)

    named = ", ".join(_shown(getattr(url, "url", url)) for url in urls[:3])
    return open_files([opener(url) for url in urls], named, options, remote=is_remote, metadata=metadata)


def _shown(url: str | os.PathLike[str]) -> str:
    """The url as it may be shown."""
    if not is_remote_url(url):
        return str(url)
    from headrace._remote import shown_url

    return shown_url(str(url))


def _remote(options: Options, credentials: object) -> Remote:
    from headrace._remote import Remote

    return Remote(options, credentials)


def local_path(url: str | os.PathLike[str]) -> Path:
    """The path that a path or file URL names. Raises OptionError for what is neither."""
    if not isinstance(url, (str, os.PathLike)):
        raise OptionError(f"url is a path, a URL or a source, not {type(url).__name__}", option="url")
    text = os.fspath(url)
    if not text:
        raise OptionError("the path is empty; write . for the current folder", option="url")
    if is_remote_url(text):
        raise OptionError(f"{_shown(text)}: this has to be a local path", option="url")
    if text.lower().startswith("file://"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise OptionError(f"{text}: a file URL names no host; write file:///path", option="url")
        return Path(unquote(parts.path))
    path = Path(text).expanduser()
    almost = _ALMOST_A_URL.match(text)
    if almost and not os.path.exists(path):
        meant = f"{almost['scheme']}://{text[almost.end() :]}"
        raise OptionError(f"there is no such path; did you mean the URL {_shown(meant)}?", option="url")
    return path


# -- verification ----------------------------------------------------------------------------------------------------------------


def note_verified(checkpoint: Checkpoint, verification: Verification | None) -> None:
    """Tell a checkpoint what of it is read unchecked, and its verified sources which tensors they hold."""
    if verification is None:
        return
    checkpoint.unverified = tuple(sorted(verification.unverified))
    for source, header in zip(checkpoint.sources, checkpoint.headers, strict=True):
        if isinstance(source, VerifiedSource):
            source.know(header)


def verification_for(verify: Verify, options: Options, credentials: object) -> Verification | None:
    """What an argument `verify` asks for; None: nothing is checked."""
    if verify is None or verify is False:
        return None
    if options.mmap == "require":
        raise OptionError("mmap='require' hands out what lies in the file, which cannot be verified; read it", option="verify")
    if verify is True or (isinstance(verify, str) and verify in ("auto", "require")):
        return Verification(required=verify != "auto")
    return Verification(load_manifest(verify, options, credentials))


def load_manifest(manifest: object, options: Options, credentials: object) -> Manifest:
    """A manifest from a path, a URL, the folder it lies in, or its JSON.

    Raises:
        FormatError: it is none.
        OptionError: it is of another kind.
        SourceError: it cannot be read.
    """
    if isinstance(manifest, Mapping):
        return manifest_of(manifest, url="the manifest given")
    if not isinstance(manifest, (str, os.PathLike)):
        kinds = "True, 'auto', 'require', or a manifest: its path, URL or JSON"
        raise OptionError(f"verify is {kinds}, not {type(manifest).__name__}", option="verify")
    if is_remote_url(manifest):
        return read_manifest(_remote(options, credentials).open(str(manifest)))
    path = local_path(manifest)
    return read_manifest(FileSource(path / MANIFEST_NAME if path.is_dir() else path, direct_io="off"))


def _check_verified(checkpoint: Checkpoint, verify: Verify) -> None:
    """An open checkpoint is verified or not since it was opened."""
    if verify is None or verify is False:
        return
    if not all(isinstance(source, VerifiedSource) for source in checkpoint.sources) or verify not in (True, "auto", "require"):
        raise OptionError("verify has to be given to headrace.open: the checkpoint was opened without it", option="verify")


def _checked(
    verification: Verification | None,
    opener: Callable[[], ByteSource],
    path: str,
    folder: Callable[[], Folder | None] = lambda: None,
) -> Callable[[], ByteSource]:
    """The opener of a file that is read checked, if it is to be."""
    if verification is None:
        return opener
    return lambda: verification.opened(opener, path.rpartition("/")[2], folder())


def _checked_folder(verification: Verification | None, folder: Folder) -> Folder:
    return folder if verification is None else verification.folder(folder)


def resolved_options(url: Location, options: Options | None, overrides: Mapping[str, Any]) -> Options:
    """The options of one call. An open checkpoint has asked the environment already."""
    if not isinstance(url, Checkpoint):
        return resolve(options, overrides)
    resolved = (url.options if options is None else _over(url.options, options)).merged(overrides)
    for name in _OF_OPENING:
        given, opened = getattr(resolved, name), getattr(url.options, name)
        if given != opened:
            raise OptionError(
                f"{name}={given!r}: files are opened with it, and {url.url} was opened with {opened!r}; give it to headrace.open",
                option=name,
            )
    return resolved


def _over(base: Options, options: Options) -> Options:
    return base.merged({name: getattr(options, name) for name in Options.__dataclass_fields__})
