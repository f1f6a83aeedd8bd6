"""Local files that can also be mapped into memory where they lie.

For callers who ask for it by name (`mmap="auto"`, `local_view`), never the default, for two reasons. A mapping aliases the file:
whoever writes to the file changes the tensors, so headrace's promise that a tensor handed out is yours does not hold. And a file
that is truncated under its mapping kills the process with SIGBUS where `read_into` raises. Over a network both are a matter of
time, and pages come 4 KiB at a time, so only local filesystems and tmpfs are mapped.
"""

from __future__ import annotations

import errno
import mmap

from headrace.errors import SourceError
from headrace.sources.file import FileSource, is_local_filesystem, translate

_MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on. A checkpoint that is only read needs no swap set aside


class MappedSource(FileSource):
    """A `FileSource` that can also be mapped. Takes and raises what `FileSource` does."""

    def map(self) -> memoryview:
        """Map the whole file, copy on write. The mapping lives as long as the view or a slice of it, past `close` too.

        The bytes are the file's own: they change when it is written to, and reading beyond a new, earlier end is SIGBUS. What
        is written to the view stays in this process and never reaches the file.

        Raises:
            SourceChangedError: the file no longer is the one that was opened.
            SourceError: it lies on a network or FUSE filesystem, or the kernel refuses to map it; read it instead.
        """
        self.check_unchanged()
        if not is_local_filesystem(self.filesystem):
            raise SourceError(
                f"cannot map {self.url}: it lies on {self.filesystem}, which is not known as local; use mmap='off'",
                url=self.url, status=errno.ENODEV,
            )  # fmt: skip
        if self.nbytes == 0:
            return memoryview(bytearray())  # an empty mapping is EINVAL
        try:
            flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            return memoryview(self._with_descriptor(lambda fd: mmap.mmap(fd, self.nbytes, flags=flags, prot=prot)))
        except SourceError:
            raise
        except (OSError, ValueError) as exc:  # ValueError: the file has shrunk since it was checked
            raise translate(exc, "map", self.url) from exc
