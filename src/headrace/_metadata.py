"""A local folder that stands in for a checkpoint's listing and index: what `metadata=` names, and what `save_metadata` writes.

For each shard it has a file of the shard's name that begins as the shard does: the header at least, or all of it. An index says
which shards there are; without one, the files do. headrace.metadata.json, where there is one, has the version that each had.
The shards themselves are compared with all this as they are opened, before anything is done with them: a shard's first request
brings its size, version and header in any case.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from headrace.errors import FormatError, SourceChangedError, SourceNotFoundError
from headrace.sources.base import ByteSource, is_remote

VERSIONS_NAME: Final = "headrace.metadata.json"
INDEX_NAME: Final = "model.safetensors.index.json"
_LENGTH_NBYTES: Final = 8
_MAX_HEADER_NBYTES: Final = 100_000_000  # the format's own limit


class Metadata:
    """What is known of a checkpoint beforehand.

    Args:
        path: the local folder.

    Attributes:
        path: of the folder.
        names: its files.

    Raises:
        SourceNotFoundError: there is no such folder.
        FormatError: its headrace.metadata.json is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.names = sorted(entry.name for entry in os.scandir(path) if not entry.is_dir())
        except OSError as exc:
            raise SourceNotFoundError(f"metadata: {path} is no folder that can be read: {exc}", url=str(path)) from exc
        self._versions = _read_versions(path / VERSIONS_NAME) if VERSIONS_NAME in self.names else {}

    def text(self, name: str) -> bytes:
        """A file as a whole: the index."""
        return (self.path / name).read_bytes()

    def has(self, shard: str) -> bool:
        """Whether a shard's header is there."""
        return (self.path / shard).is_file()

    def check(self, shard: str, source: ByteSource, header: bytes) -> None:
        """Compare a shard with what is known of it. Its size follows from its header, and is compared with that.

        Args:
            shard: its name in the checkpoint.
            source: the shard as it was opened.
            header: the JSON of its header.

        Raises:
            SourceChangedError: it is another one; the message names it and what differs.
            FormatError: the folder lacks its header, or has something else in its place.
        """
        path = self.path / shard
        if _read_header(path) != header:
            raise _changed(source.url, path, "its header is another one")
        saved, found = self._versions.get(shard), version_text(source)
        if saved is not None and found and saved["url"] == source.url and saved["version"] != found:
            raise _changed(source.url, path, f"it is version {found} now, and not {saved['version']}")


def write_metadata(
    dst: Path, headers: Mapping[str, bytes], weight_map: Mapping[str, str], sources: Mapping[str, ByteSource]
) -> list[Path]:
    """Write a folder for `Metadata`, each file whole or not at all.

    Args:
        dst: the folder; made where it does not exist.
        headers: {shard: the JSON of its header}.
        weight_map: {tensor: shard}.
        sources: {shard: its source}.

    Returns:
        The files.
    """
    index = {"metadata": {}, "weight_map": dict(weight_map)}
    known = {shard: {"url": source.url, "version": version_text(source)} for shard, source in sources.items()}
    files = {shard: len(text).to_bytes(_LENGTH_NBYTES, "little") + text for shard, text in headers.items()}
    files[INDEX_NAME] = json.dumps(index, indent=2, ensure_ascii=False).encode()
    files[VERSIONS_NAME] = json.dumps({"shards": known}, indent=2, ensure_ascii=False).encode()
    return [_write(dst / name, data) for name, data in files.items()]


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    return path


def _read_versions(path: Path) -> dict[str, dict[str, str]]:
    try:
        shards = json.loads(path.read_bytes())["shards"]
        return {name: {key: str(known[key]) for key in ("url", "version")} for name, known in shards.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        raise FormatError(f"{path} is not what headrace.save_metadata writes; save it again", url=str(path)) from exc


def _read_header(path: Path) -> bytes:
    """The header's JSON."""
    again = "save it again with headrace.save_metadata"
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_NBYTES), "little")
            text = file.read(length) if length <= _MAX_HEADER_NBYTES else b""
    except OSError as exc:
        raise FormatError(f"metadata: {path} cannot be read: {exc.strerror}; {again}", url=str(path)) from exc
    if len(text) < length or not length:
        raise FormatError(f"metadata: {path} does not hold a whole header; {again}", url=str(path))
    return text


def _changed(url: str, path: Path, how: str) -> SourceChangedError:
    return SourceChangedError(
        f"{url} is not what {path} says: {how}; it was replaced, or the metadata are another model's", url=url
    )


def version_text(source: ByteSource) -> str:
    """What stays the same of a source's version from machine to machine and proxy to proxy; nothing of a local file's does."""
    if not is_remote(source):
        return ""
    etag = getattr(source.version, "etag", None)
    return etag.removeprefix("W/").strip('"') if etag else repr(source.version)


def file_name(url: str) -> str:
    """What a file that was named by itself is called in a folder of metadata."""
    return url.partition("?")[0].rpartition("/")[2]
