"""The public verbs about whole files, which know nothing of tensors' values: find, copy and check them, save their headers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from glob import escape
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from headrace._checking import VerifyProgress
from headrace._checkpoint import read_header_text
from headrace._copying import PullProgress
from headrace._indexed import with_shards
from headrace._location import Location, load_manifest, local_path, open_location, open_place, resolved_options
from headrace._manifest import MANIFEST_NAME
from headrace._metadata import write_metadata
from headrace._options import OptionArguments, Options
from headrace._patterns import Patterns
from headrace._pull import PullReport, pull_folder
from headrace._verify import VerifyReport, verify_folder
from headrace.errors import OptionError
from headrace.sources.base import Folder


def save_metadata(
    url: Location,
    dst: str | os.PathLike[str],
    *,
    credentials: object = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> list[Path]:
    """Save what `metadata=` takes: an index, the header of every shard under the shard's name, and their versions.

    Args:
        url: as for `open`.
        dst: the folder; made where it does not exist.
        credentials, options: as for `open`.

    Returns:
        The files. A shard's begins as the shard does, and ends with the header.

    Raises:
        As `open`; OptionError: two shards have one name; OSError: `dst` cannot be written to.

    Example:
        >>> headrace.save_metadata("s3://bucket/minilm", "metadata/minilm")
        >>> weights = headrace.load("s3://bucket/minilm", metadata="metadata/minilm")
    """
    checkpoint = open_location(url, resolved_options(url, options, overrides), credentials)
    try:
        names, sources = checkpoint.names_of_shards, checkpoint.sources
        if len(set(names)) < len(names):
            raise OptionError(f"{checkpoint.url}: two of its files have one name; save the metadata of each folder", option="url")
        return write_metadata(
            local_path(dst),
            {name: read_header_text(source) for name, source in zip(names, sources, strict=True)},
            {tensor: names[shard] for tensor, (shard, _) in checkpoint.where.items()},
            dict(zip(names, sources, strict=True)),
        )
    finally:
        if checkpoint is not url:
            checkpoint.close()


def pull(
    url: str | os.PathLike[str] | Folder,
    dst: str | os.PathLike[str],
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    move: bool = False,
    credentials: object = None,
    progress: Callable[[PullProgress], None] | None = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> PullReport:
    """Copy files from any source to a local folder, /dev/shm for example: in parallel, resumable, each file whole or not there.

    Args:
        url: a folder, or one file, as for `open`; an index stands for itself and the shards that it names.
        dst: the folder to fill; made where it does not exist. Two pulls to one folder do the work once.
        include, exclude: patterns of paths below `url`; None: everything, and nothing.
        move: remove the files from a local source, after every byte was compared.
        credentials: as for `open`.
        progress: called with a `PullProgress`, on the calling thread.
        options: tuning; see `Options`. Every field may also be given by name.

    Returns:
        What was copied, resumed and skipped.

    Raises:
        As `open`; DestinationError, NoSpaceError: `dst` cannot be written to, or has no room. FormatError: a name that leads out
        of `dst`. IntegrityError: a copy is not what was read.

    Example:
        >>> headrace.pull("s3://bucket/minilm", "/dev/shm/minilm", exclude="*.bin")
    """
    resolved = resolved_options(url, options, overrides)
    folder, only = with_shards(*open_place(url, resolved, credentials))
    return pull_folder(
        folder,
        local_path(dst),
        include=include if only is None else escape(only),
        exclude=exclude,
        concurrency=resolved.concurrency,
        move=move,
        progress=progress,
    )


def verify(
    url: str | os.PathLike[str] | Folder,
    *,
    manifest: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    write: bool = False,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
    credentials: object = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> VerifyReport:
    """Check every file of a checkpoint against its digests, or write a manifest of them. Reads everything.

    Args:
        url: a folder, or one file, as for `open`. Hidden files are left out.
        manifest: a path, a URL or the JSON of a manifest. None: the headrace.manifest.json in the folder, or where there is
            none the digests that the store knows.
        write: write a manifest instead, of the files as they are. It is put into the folder, which has to be a local one.
        out: write it to this local path, whatever the folder is.
        progress: called with a `VerifyProgress`, on the calling thread.
        credentials: as for `open`.
        options: tuning; see `Options`. Every field may also be given by name.

    Returns:
        What was found, file by file. Damage does not raise: look at `report.ok` and `report.failed`.

    Raises:
        As `open`; OptionError: there is nothing to check against, or a manifest would have to be written into a store.
        DestinationError: the manifest cannot be written.

    Example:
        >>> headrace.verify("models/minilm", write=True).written
        'models/minilm/headrace.manifest.json'
        >>> headrace.verify("models/minilm").ok
        True
    """
    resolved = resolved_options(url, options, overrides)
    place, only = with_shards(*open_place(url, resolved, credentials))
    if (write or out is not None) and manifest is not None:
        making = "write=True" if write else "out="
        raise OptionError(f"{making} makes a manifest, so manifest= cannot be given; leave one of the two out", option="manifest")
    return verify_folder(
        place,
        only,
        manifest=load_manifest(manifest, resolved, credentials) if manifest is not None else None,
        out=_manifest_path(place, only, out) if write or out is not None else None,
        concurrency=resolved.concurrency,
        progress=progress,
    )


def folder(
    url: str | os.PathLike[str] | Folder,
    *,
    credentials: object = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> Folder:
    """Find the folder, bucket prefix or repository that a url names, to list it and to open its files. Nothing is asked yet.

    Args:
        url: a folder, or a local or safetensors file, whose folder is meant.
        credentials: as for `open`.
        options: tuning; see `Options`. Every field may also be given by name.

    Returns:
        `names()` lists the files directly inside, `walk()` those below as well where the store can tell, `open(name)` opens one.
        Any of them raises SourceNotFoundError, SourcePermissionError or SourceError where the store says so.

    Raises:
        OptionError: there is no source for such a url.

    Example:
        >>> headrace.folder("models/minilm").names()
        ['config.json', 'model.safetensors']
    """
    return open_place(url, resolved_options(url, options, overrides), credentials)[0]


def _manifest_path(place: Folder, only: str | None, out: str | os.PathLike[str] | None) -> Path:
    """Where a manifest is to be written."""
    if out is not None:
        path = local_path(out)
        return path / MANIFEST_NAME if path.is_dir() else path
    if "://" in place.url:
        raise OptionError(f"a manifest is never written into a store; give out=PATH for the one of {place.url}", option="out")
    if only is not None or hasattr(place, "index"):
        raise OptionError("a folder's manifest is of all its files; verify the folder, or give out=PATH", option="out")
    return Path(place.url, MANIFEST_NAME)
