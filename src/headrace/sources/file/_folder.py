"""A directory of this machine, and the files in it and below it."""

from __future__ import annotations

import os

from headrace.errors import SourceNotFoundError
from headrace.sources.file._errors import translate
from headrace.sources.file._source import DirectIO, FileSource, Path


class FileFolder:
    """A directory of this machine.

    Args:
        path: the directory; that it exists is found out by `names` and `open`.
        direct_io: handed to every source opened here.
        kind: what files are opened as.
    """

    def __init__(self, path: Path, *, direct_io: DirectIO = "auto", kind: type[FileSource] = FileSource) -> None:
        self.url = os.fsdecode(path)
        self._direct_io: DirectIO = direct_io
        self._kind = kind

    def names(self) -> list[str]:
        """Names of the files directly inside, sorted; links to files count, dangling links and folders do not."""
        try:
            with os.scandir(self.url) as entries:
                return sorted(entry.name for entry in entries if _is_file(entry))
        except (OSError, ValueError) as exc:
            raise translate(exc, "list", self.url) from exc

    def walk(self) -> list[str]:
        """Paths of all files in it and below it, relative, sorted; links to files count, links to folders are not entered."""
        found, below = [], [""]
        while below:
            prefix = below.pop()
            path = os.path.join(self.url, prefix)
            try:
                with os.scandir(path) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            below.append(f"{prefix}{entry.name}/")
                        elif _is_file(entry):
                            found.append(prefix + entry.name)
            except (OSError, ValueError) as exc:
                raise translate(exc, "list", path) from exc
        return sorted(found)

    def open(self, name: str) -> FileSource:
        """Open one file of the folder. Names that lead out of it are refused as not found."""
        return self._kind(self._path(name), direct_io=self._direct_io)

    def remove(self, name: str) -> None:
        """Remove one file of the folder; of a link the link. Only `pull` does, after it has compared every byte of the copy."""
        path = self._path(name)
        try:
            os.unlink(path)
        except (OSError, ValueError) as exc:
            raise translate(exc, "remove", path) from exc

    def _path(self, name: str) -> str:
        path = os.path.join(self.url, name)
        if not name or os.path.isabs(name) or os.pardir in name.split("/"):
            raise SourceNotFoundError(f"{name!r} is not the name of a file inside {self.url}", url=path)
        return path


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link in a circle, or into a folder that may not be entered, is no reason not to list the others
        return False
