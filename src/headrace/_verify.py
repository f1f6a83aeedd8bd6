"""Check every file of a checkpoint against its digests, or write a manifest of them.

The report names every file with which something is wrong, and the blocks of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace._checking import Checking, FileCheck, Report
from headrace._manifest import BLOCK_NBYTES, MANIFEST_NAME, Manifest
from headrace._verification import find_manifest, nothing_to_check
from headrace.errors import DestinationError, SourceNotFoundError
from headrace.sources.base import Folder


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was checked, and what was found.

    Attributes:
        url: the folder or file.
        files: one entry each.
        verified_nbytes: bytes that were hashed and found right, or written to the manifest.
        manifest: where the digests were read from; None where they came from the store.
        written: the manifest that was written; None where none was.
        seconds: how long it took.
    """

    url: str
    files: tuple[FileCheck, ...]
    verified_nbytes: int
    manifest: str | None
    written: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every shard was checked and nothing is wrong."""
        return not self.failed

    @property
    def failed(self) -> tuple[FileCheck, ...]:
        """The files with which something is wrong."""
        return tuple(file for file in self.files if file.failed)

    @property
    def rate(self) -> float:
        """Bytes checked per second."""
        return self.verified_nbytes / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields, and `ok`, as plain data for JSON. Names are stable; new ones may be added."""
        return {"ok": self.ok, **asdict(self)}


def verify_folder(
    folder: Folder,
    only: str | None,
    *,
    manifest: Manifest | None,
    out: Path | None,
    concurrency: int | None,
    progress: Report | None,
) -> VerifyReport:
    """Check the files of a folder.

    Args:
        folder: where they lie.
        only: one file of it; None: all, but for hidden ones.
        manifest: what to check against; None: the one beside the files, or the digests of the store.
        out: write a manifest there instead.
        concurrency: blocks read at once; None: 16 over a network, else one for each CPU.
        progress: called on this thread, after every block and twice a second.

    Raises:
        OptionError: there is nothing to check against.
        FormatError: the manifest beside the files is none.
        SourceNotFoundError: there is no such folder, or no file in it.
        DestinationError: the manifest cannot be written.
    """
    if manifest is None and out is None:
        manifest = find_manifest(folder)
    names = [only] if only is not None else _names(folder)
    index: str | None = getattr(folder, "index", None)  # what an index names, and no more
    with Checking(folder, manifest, progress, writes=out is not None) as run:
        run.open(names, concurrency)
        if out is None and all(file.status == "unchecked" for file in run.files):
            uncomputed = sorted({name for file in run.files for name in file.uncomputed})
            raise nothing_to_check(folder.url, uncomputed, instead="or give one with manifest=PATH")
        run.check(concurrency)
        if manifest is not None and only is None and index is None:
            run.miss(set(manifest.files) - set(names))
    written = None
    if out is not None and not any(file.failed for file in run.files):
        write_manifest(Manifest(str(out), BLOCK_NBYTES, {file.name: file.digests() for file in run.files}), out)
        written = str(out)
    now = run.snapshot()
    return VerifyReport(
        url=folder.url if only is None and index is None else f"{folder.url.rstrip('/')}/{only or index}",
        files=tuple(file.outcome() for file in run.files),
        verified_nbytes=now.nbytes,
        manifest=manifest.url if manifest is not None else None,
        written=written,
        seconds=now.seconds,
    )


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest, whole or not at all.

    Raises:
        DestinationError: it cannot be written there.
    """
    temporary: str | None = None
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(fd, "wb") as file:
            file.write(manifest.to_json())
            file.flush()
            os.fchmod(fd, 0o644)  # not 0o600, which is what mkstemp makes: others verify as well
            os.fsync(fd)
        os.replace(temporary, path)
    except OSError as exc:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
        reason = f"cannot write the manifest {path}: {exc.strerror or exc}; choose another place with out"
        raise DestinationError(reason, url=str(path), status=exc.errno) from exc


def _names(folder: Folder) -> list[str]:
    """The files of a folder and those below it, without hidden ones and the manifest itself."""
    walk: Callable[[], list[str]] = getattr(folder, "walk", folder.names)
    names = [name for name in walk() if name.rpartition("/")[2] != MANIFEST_NAME and not _is_hidden(name)]
    if not names:
        raise SourceNotFoundError(f"there is nothing to verify in {folder.url}: it holds no files", url=folder.url)
    return sorted(names)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
