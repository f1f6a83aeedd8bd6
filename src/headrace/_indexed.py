"""An index and the shards that it names, as a folder that holds nothing else: what the url of an index stands for.

Pulling or verifying such a url takes the files that loading it would read. Nothing is listed, so nobody needs the permission to.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace._shards import INDEX_SUFFIX, shards_of_index
from headrace.sources.base import ByteSource, Folder


class IndexedFiles:
    """The files of a folder that belong to one index.

    Args:
        folder: where they lie; other files (a manifest) can be opened by name.
        index: the name of the index.

    Attributes:
        url: of the folder.
        index: as given.
    """

    def __init__(self, folder: Folder, index: str) -> None:
        self.url, self.index = folder.url, index
        self._folder = folder
        self._names: list[str] | None = None
        if hasattr(folder, "remove"):
            self.remove: Callable[[str], None] = folder.remove

    def names(self) -> list[str]:
        """The shards that the index names and the index itself, whether or not the shards are there.

        Raises:
            SourceNotFoundError: there is no such index.
            FormatError: it is none.
        """
        if self._names is None:
            self._names = [*shards_of_index(self._folder, self.index), self.index]
        return self._names

    def open(self, name: str) -> ByteSource:
        """Open one file. Raises as the folder does."""
        return self._folder.open(name)


def with_shards(folder: Folder, only: str | None) -> tuple[Folder, str | None]:
    """A folder, and the one file of it that is meant: where that is an index, all that belongs to it is."""
    if only is not None and only.endswith(INDEX_SUFFIX):
        return IndexedFiles(folder, only), None
    return folder, only
