"""What the operating system said about a file, as headrace's errors; the one place where errno is interpreted."""

from __future__ import annotations

import errno
import os
from typing import Final

from headrace.errors import (
    SourceChangedError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
    SourceTimeoutError,
)

_KINDS: Final[dict[int, type[SourceError]]] = {
    errno.ENOENT: SourceNotFoundError,
    errno.ENOTDIR: SourceNotFoundError,
    errno.EACCES: SourcePermissionError,
    errno.EPERM: SourcePermissionError,
    errno.ETIMEDOUT: SourceTimeoutError,
    errno.ESTALE: SourceChangedError,
}
_HINTS: Final = {
    errno.ENOENT: "Check the path, and that a download has finished",
    errno.ENOTDIR: "A part of the path is a file, not a folder",
    errno.EACCES: "Check the permissions of the file and of every folder above it",
    errno.EPERM: "The filesystem or a security module forbids it; check them and the user this runs as",
    errno.EISDIR: "Give a file of the folder, or open the folder as a checkpoint",
    errno.ELOOP: "Its symbolic links lead in a circle",
    errno.EIO: "The storage failed; see the kernel log (dmesg), and copy the file anew",
    errno.EMFILE: "Raise the limit of open files (ulimit -n)",
    errno.ENFILE: "The machine has no file descriptors left (fs.file-max)",
    errno.ESTALE: "It was replaced or removed on the network filesystem; open it again",
    errno.ETIMEDOUT: "The network filesystem stopped answering",
    errno.ENXIO: "It is a socket or a device without a driver; only regular files can be read",
    errno.ENAMETOOLONG: "The path or one of its names is too long for the filesystem",
}


def translate(
    exc: OSError | ValueError, doing: str, url: str, *, offset: int | None = None, nbytes: int | None = None
) -> SourceError:
    """Make the typed error for what the operating system said while it was `doing` something with a file."""
    number = exc.errno if isinstance(exc, OSError) else errno.EINVAL
    said = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
    hint = _HINTS.get(number or 0, "")
    if number == errno.ENOENT and os.path.islink(url):
        hint = f"It is a link to {os.readlink(url)}, which does not exist; fetch that file again"
    where = "" if offset is None else f" ({nbytes} bytes at {offset})"
    kind = _KINDS.get(number or 0, SourceError)
    return kind(f"cannot {doing} {url}{where}: {said}. {hint}".rstrip(), url=url, offset=offset, nbytes=nbytes, status=number)
