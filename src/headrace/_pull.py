"""Fill a local folder from any source, and nothing twice: choose, check, copy, and remove from the source what is moved.

Where it goes, and what survives a kill, is the business of `_destination`; how bytes get there that of `_copying`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from headrace._copying import Copying, Counts, Report
from headrace._destination import STATE, Destination
from headrace._patterns import Patterns, choose
from headrace._shards import INDEX_SUFFIX
from headrace.errors import OptionError
from headrace.sources.base import Folder

RANGE_NBYTES: Final = 8 << 20  # as network reads: a request's overhead is small against it


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did.

    Attributes:
        url, destination: from where to where.
        files: files that were asked for and are in their place now.
        nbytes: their bytes.
        copied_nbytes: bytes this pull copied.
        resumed_nbytes: bytes an earlier, unfinished pull had copied.
        skipped_files: files that were there already.
        moved: whether the source's files were removed.
        seconds: how long it took, the wait for another pull included.
        copying_s: of `seconds`, those from the first byte to the last.
        index: the index whose shards were pulled with it; None where a folder or a file was asked for.
    """

    url: str
    destination: str
    files: int
    nbytes: int
    copied_nbytes: int
    resumed_nbytes: int
    skipped_files: int
    moved: bool
    seconds: float
    copying_s: float
    index: str | None = None

    @property
    def rate(self) -> float:
        """Bytes copied per second."""
        return self.copied_nbytes / self.copying_s if self.copying_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain data for JSON. Names are stable; new ones may be added."""
        return asdict(self)


def pull_folder(
    folder: Folder,
    dst: str | os.PathLike[str],
    *,
    include: Patterns,
    exclude: Patterns,
    concurrency: int | None,
    move: bool,
    progress: Report | None,
    range_nbytes: int = RANGE_NBYTES,
    free_nbytes: Callable[[str], int] = lambda path: shutil.disk_usage(path).free,
) -> PullReport:
    """Copy the files of a folder into a local one.

    Args:
        folder: the source; folders below it are pulled where it can `walk`.
        dst: made where it does not exist. It may be a link, what is below it may not.
        include, exclude: globs on paths relative to the source; `*` also matches `/`. None: all, and none.
        concurrency: ranges at once; None: 16 over a network, else from the CPUs.
        move: remove the files from the source once all of them are in place and every byte was read back and compared.
        progress: called on this thread, after every range and twice a second.
        range_nbytes: how much is read at once.
        free_nbytes: tells how much room a path has.

    Raises:
        OptionError: `move` from a source that cannot remove, or a destination that overlaps the source.
        SourceNotFoundError: there is no such folder, or it has no file that was asked for.
        FormatError: a name would lead out of the destination.
        NoSpaceError, DestinationError: the destination cannot be written to.
        IntegrityError: the bytes are not those of the digest that the source names.
        SourceError: a source cannot be read. What was copied is kept, and the next pull goes on from there.
    """
    _check_places(folder, dst, move=move)
    counts = Counts(progress)
    names = _choose(folder, include, exclude)
    with Destination(os.path.abspath(os.fspath(dst))) as destination:
        if destination.lock():
            names = _choose(folder, include, exclude)  # the other one may have taken its time, or moved them
        with Copying(folder, destination, counts, concurrency=concurrency, range_nbytes=range_nbytes) as pull:
            pull.open(names)
            pull.check_space(free_nbytes)
            pull.copy()
            if include is None and exclude is None:
                destination.tidy()
            destination.sync()
            if move:
                pull.compare()
                pull.remove()
    done = counts.snapshot()
    return PullReport(
        url=folder.url,
        destination=destination.path,
        files=done.files,
        nbytes=done.total_nbytes,
        copied_nbytes=done.copied_nbytes,
        resumed_nbytes=done.resumed_nbytes,
        skipped_files=done.skipped_files,
        moved=move,
        seconds=done.seconds,
        copying_s=done.copying_s,
        index=getattr(folder, "index", None),
    )


def _check_places(folder: Folder, dst: str | os.PathLike[str], *, move: bool) -> None:
    if move and not hasattr(folder, "remove"):
        raise OptionError(f"move: only files of local folders can be removed, not those of {folder.url}", option="move")
    if "://" in folder.url or not os.path.isdir(folder.url):
        return
    source, target = os.path.realpath(folder.url), os.path.realpath(os.fspath(dst))
    if os.path.commonpath([source, target]) == source:
        raise OptionError(f"{os.fspath(dst)} lies inside {folder.url}, which is pulled; choose another destination", option="dst")


def _choose(folder: Folder, include: Patterns, exclude: Patterns) -> list[str]:
    """The names to pull, indexes last."""
    walk: Callable[[], list[str]] = getattr(folder, "walk", folder.names)
    present = (name for name in walk() if name.split("/", 1)[0] != STATE)
    return sorted(choose(present, include, exclude, url=folder.url), key=lambda name: (name.endswith(INDEX_SUFFIX), name))
