"""What each file of a checkpoint is checked against, decided when it is opened.

The order is: the manifest that the caller gave, or the one that lies beside the file; then the whole-file digest that the source
has by itself (the hub's SHA-256). A manifest counts for every file that is read: one that it does not list is no part of it.
Where there is nothing, a `Verification` that is required refuses and any other says so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from headrace._block_cache import BlockCache
from headrace._digests import digest_of, uncomputed
from headrace._integrity import verified
from headrace._ledgers import KnownBlocks, KnownTwice, LearnedBlocks, Subject
from headrace._manifest import (
    BLOCK_NBYTES,
    HEAD_NBYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    Blocks,
    Manifest,
    parse_manifest,
)
from headrace._plan import format_nbytes
from headrace.errors import FormatError, IntegrityError, OptionError, SourceNotFoundError, SourcePermissionError
from headrace.sources.base import ByteSource, Folder

log = logging.getLogger("headrace")

_SUFFIX = ".safetensors"


class Verification:
    """What the files of one checkpoint are checked against.

    Args:
        manifest: the caller's; None: the one beside each file, where there is one.
        required: whether a file without anything to check it against is refused.

    Attributes:
        unverified: urls of files that are read unchecked, since there is nothing to check them against.
    """

    def __init__(self, manifest: Manifest | None = None, *, required: bool = True) -> None:
        self.unverified: list[str] = []
        self._given, self._required = manifest, required
        self._beside: dict[str, Manifest | None] = {}
        self._lock = threading.Lock()
        self._cache = BlockCache()

    def folder(self, folder: Folder) -> VerifiedFolder:
        """A folder whose files are checked."""
        return VerifiedFolder(folder, self)

    def manifest(self, folder: Folder | None) -> Manifest | None:
        """The manifest for the files of a folder, read once.

        Raises:
            FormatError: what lies there is no manifest.
        """
        if self._given is not None or folder is None:
            return self._given
        with self._lock:
            if folder.url not in self._beside:
                self._beside[folder.url] = find_manifest(folder)
            return self._beside[folder.url]

    def opened(self, opener: Callable[[], ByteSource], name: str, folder: Folder | None) -> ByteSource:
        """Open a file, to be read checked.

        Args:
            opener: opens it.
            name: its path below the folder, as a manifest would list it.
            folder: where it lies, and a manifest may; None where that is unknown.

        Raises:
            IntegrityError: it has another size than its manifest says, or is not listed there.
            OptionError: there is nothing to check it against, and there has to be.
        """
        manifest = self.manifest(folder)
        source = opener()
        try:
            return self._checked(source, name, manifest)
        except BaseException:
            source.close()
            raise

    def _checked(self, source: ByteSource, name: str, manifest: Manifest | None) -> ByteSource:
        if manifest is not None and (name in manifest.files or self._required):
            return against_manifest(source, name, manifest, self._cache)
        digest = digest_of(source)
        if digest is not None:
            text = f"{digest.algorithm} of the whole file, in order, from {digest.origin}"
            ledger = LearnedBlocks(Subject(source.url, digest.origin), default_cut(source.nbytes), digest)
            return verified(source, ledger, self._cache, checked_by=text)
        if not name.endswith(_SUFFIX):
            return source  # an index: the shards that it names are checked
        if self._required:
            raise nothing_to_check(source.url, uncomputed(source), instead=_INSTEAD)
        self.unverified.append(source.url)
        return source


class VerifiedFolder:
    """A folder whose files are checked as they are read. Made by `Verification.folder`."""

    def __init__(self, folder: Folder, verification: Verification) -> None:
        self.url = folder.url
        self._folder, self._verification = folder, verification

    def names(self) -> list[str]:
        """The files directly inside, sorted.

        Raises:
            IntegrityError: a shard that the manifest lists is not there.
        """
        present = self._folder.names()
        manifest = self._verification.manifest(self._folder)
        listed = manifest.files if manifest is not None else ()
        missing = sorted(name for name in set(listed).difference(present) if name.endswith(_SUFFIX) and "/" not in name)
        if missing and manifest is not None:
            url = f"{self.url}/{missing[0]}"
            raise IntegrityError(f"{self.url} lacks {len(missing)} file(s) that {manifest.url} lists: {missing[0]}", url=url)
        return present

    def open(self, name: str) -> ByteSource:
        """Open one file of the folder, to be read checked. Raises as the folder and `Verification.opened`."""
        return self._verification.opened(lambda: self._folder.open(name), name, self._folder)


def against_manifest(source: ByteSource, name: str, manifest: Manifest, cache: BlockCache, *, twice: bool = False) -> ByteSource:
    """A source that is checked against its entry in a manifest.

    Args:
        source: the file. `name`: its path in the manifest.
        manifest: what it is checked against.
        cache: for its blocks.
        twice: whether the whole file's digest counts as well, for those who read every block once and each file's in order.

    Raises:
        IntegrityError: it has no entry, its size is another, or the store's own digest is.
    """
    entry = manifest.files.get(name)
    if entry is None:
        reason = "so it was not there when that was written; write the manifest anew, or remove the file"
        raise IntegrityError(f"{source.url} is not in {manifest.url}, {reason}", url=source.url)
    if source.nbytes != entry.cut.nbytes:
        raise IntegrityError(
            f"{source.url} has {source.nbytes} bytes, and {entry.cut.nbytes} according to {manifest.url}; fetch it again",
            url=source.url,
        )
    digest = digest_of(source, ask=False)
    if digest is not None and digest.value != entry.sha256:
        error = IntegrityError(
            f"{source.url} has the SHA-256 {digest.value} according to {digest.origin}, and {entry.sha256} according to "
            f"{manifest.url}: they are about different versions of the file",
            url=source.url,
        )
        error.expected, error.found = entry.sha256, digest.value
        raise error
    text = f"SHA-256 of blocks of {format_nbytes(manifest.block_nbytes)}, from {manifest.url.rpartition('/')[2]}"
    subject = Subject(source.url, manifest.url)
    ledger = KnownBlocks(subject, entry.cut, entry.blocks)
    if twice and entry.cut.count > 1:  # of one block both are the same digest
        ledger = KnownTwice(subject, entry.cut, entry.blocks, entry.sha256)
    return verified(source, ledger, cache, checked_by=text)


def default_cut(nbytes: int) -> Blocks:
    """The blocks of a file that no manifest has cut."""
    return Blocks(nbytes, min(HEAD_NBYTES, nbytes), BLOCK_NBYTES)


def find_manifest(folder: Folder) -> Manifest | None:
    """The manifest in a folder; None where there is none, or it may not be read.

    Raises:
        FormatError: what lies there is no manifest.
    """
    try:
        source = folder.open(MANIFEST_NAME)
    except (SourceNotFoundError, SourcePermissionError):  # without the right to list, S3 says that what is missing is forbidden
        return None
    return read_manifest(source)


def read_manifest(source: ByteSource) -> Manifest:
    """Read a manifest, and close the source.

    Raises:
        FormatError: it is none.
    """
    try:
        if source.nbytes > MAX_MANIFEST_NBYTES:
            raise FormatError(f"{source.url} is no manifest: it has {source.nbytes} bytes", url=source.url)
        text = bytearray(source.nbytes)
        source.read_into(0, memoryview(text))
        source.check_unchanged()
        return parse_manifest(bytes(text), url=source.url)
    finally:
        source.close()


_INSTEAD = "give one with verify=PATH, or take verify='auto', which checks what it can"


def nothing_to_check(url: str, uncomputed: Sequence[str], *, instead: str) -> OptionError:
    """The error for a file that cannot be verified.

    Args:
        url: the file, or the folder.
        uncomputed: checksums that its store tells, and that need a library.
        instead: what else can be done than to write a manifest.
    """
    told = "no digest that is known here"
    if uncomputed:
        told = f"{' and '.join(uncomputed)} only, which Python itself does not compute: pip install 'headrace[checksums]'"
    return OptionError(
        f"verify: there is nothing to check {url} against: no {MANIFEST_NAME} beside it, and its store tells {told}. Write a "
        f"manifest from a copy you trust with `headrace verify --write FOLDER`, {instead}",
        option="verify",
    )
