"""PURE: block manifests, the digests of a checkpoint's files as JSON, and which bytes each digest is of.

A file is cut into blocks: the first is its head, which holds a shard's whole header, so that opening a checkpoint needs no more
than that; the others end at multiples of the block length. Every block has a SHA-256, so that any part of a file can be checked
by itself, in any order. docs/integrity.md describes the format. Whatever the format does not allow is refused with `FormatError`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from headrace.errors import FormatError

MANIFEST_NAME: Final = "headrace.manifest.json"
BLOCK_NBYTES: Final = 16 << 20
HEAD_NBYTES: Final = 64 << 10  # what the reader of headers asks for first
PAGE_NBYTES: Final = 4096  # blocks end at pages, so that they can be read past the page cache
MAX_MANIFEST_NBYTES: Final = 1 << 30

_FORMAT: Final = "headrace.manifest"
_VERSION: Final = 1
_MAX_BLOCK_NBYTES: Final = 64 << 20  # a block is held in memory to be checked
_MAX_HEAD_NBYTES: Final = 128 << 20  # the format of safetensors allows headers of 100 MB
_MAX_NBYTES: Final = 1 << 62
_TOP: Final = frozenset({"format", "version", "block_nbytes", "files"})
_ENTRY: Final = frozenset({"nbytes", "head_nbytes", "sha256", "blocks"})
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_NOTHING_SHA256: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a file is cut into blocks.

    Attributes:
        nbytes: of the file.
        head_nbytes: of the first block; a multiple of `PAGE_NBYTES`, or all of a file that is not longer.
        block_nbytes: the other blocks end at multiples of this, the last one at the end of the file.

    >>> [Blocks(100_000, 65_536, 16_384).bounds(block) for block in range(4)]
    [(0, 65536), (65536, 81920), (81920, 98304), (98304, 100000)]
    """

    nbytes: int
    head_nbytes: int
    block_nbytes: int

    @property
    def count(self) -> int:
        """How many blocks there are; none in an empty file."""
        if self.nbytes <= self.head_nbytes:
            return 1 if self.nbytes else 0
        return 1 - (-self.nbytes // self.block_nbytes) - self.head_nbytes // self.block_nbytes

    def bounds(self, block: int) -> tuple[int, int]:
        """(start, end) of a block, end exclusive."""
        if block == 0:
            return 0, min(self.head_nbytes, self.nbytes)
        start = (self.head_nbytes // self.block_nbytes + block - 1) * self.block_nbytes
        return max(self.head_nbytes, start), min(start + self.block_nbytes, self.nbytes)

    def at(self, offset: int) -> int:
        """The block that the byte at `offset` lies in."""
        if offset < self.head_nbytes:
            return 0
        return 1 + offset // self.block_nbytes - self.head_nbytes // self.block_nbytes


@dataclass(frozen=True, slots=True)
class FileDigests:
    """The digests of one file.

    Attributes:
        cut: the blocks.
        sha256: of the whole file, in hexadecimal.
        blocks: SHA-256 of each block, in hexadecimal.
    """

    cut: Blocks
    sha256: str
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The digests of the files of one folder, by their paths in it.

    Attributes:
        url: where it was read from.
        block_nbytes: the block length, of all files.
        files: {path below the folder, with '/': digests}.
    """

    url: str
    block_nbytes: int
    files: Mapping[str, FileDigests]

    def to_json(self) -> bytes:
        """The manifest as the text of its file."""
        files = {
            name: {
                "nbytes": found.cut.nbytes,
                "head_nbytes": found.cut.head_nbytes,
                "sha256": found.sha256,
                "blocks": list(found.blocks),
            }
            for name, found in sorted(self.files.items())
        }
        whole = {"format": _FORMAT, "version": _VERSION, "block_nbytes": self.block_nbytes, "files": files}
        return json.dumps(whole, indent=1).encode() + b"\n"


def head_nbytes_of(first: bytes, *, nbytes: int, is_shard: bool) -> int:
    """How long the head of a file is: 64 KiB, or for shards their whole header if that is longer, to the next page.

    Args:
        first: the first 8 bytes of the file, or all of a shorter one.
        nbytes: of the file.
        is_shard: whether it is a safetensors file.
    """
    wanted = HEAD_NBYTES
    if is_shard and len(first) >= 8:
        wanted = max(wanted, 8 + int.from_bytes(first[:8], "little"))
    if wanted > _MAX_HEAD_NBYTES:  # no header is that long: whatever this file is, it is no shard
        wanted = HEAD_NBYTES
    return min(nbytes, -(-wanted // PAGE_NBYTES) * PAGE_NBYTES)


def parse_manifest(text: bytes, *, url: str) -> Manifest:
    """Read a manifest.

    Raises:
        FormatError: it is no manifest, or of a version that is not known here.
    """
    try:
        found = json.loads(text.decode(), object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as exc:  # also UnicodeDecodeError, and integers of thousands of digits
        raise FormatError(f"{url} is no manifest: it is not JSON: {exc}", url=url) from exc
    return manifest_of(found, url=url)


def manifest_of(found: object, *, url: str) -> Manifest:
    """A manifest from its JSON, as Python's own values. Raises as `parse_manifest`."""
    check = _Check(url)
    whole = check.mapping(found, "the manifest")
    if whole.get("format") != _FORMAT:
        check.refuse(f"its format is {_shown(whole.get('format'))}, not {_FORMAT!r}")
    version = whole.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version != _VERSION:
        check.refuse(f"its version is {_shown(version)}, and this headrace knows version {_VERSION}; try a newer one")
    check.keys(whole, _TOP, "the manifest")
    block_nbytes = check.number(whole["block_nbytes"], "block_nbytes", least=PAGE_NBYTES, most=_MAX_BLOCK_NBYTES)
    if block_nbytes % PAGE_NBYTES:
        check.refuse(f"block_nbytes is {block_nbytes}, no multiple of {PAGE_NBYTES}")
    files = check.mapping(whole["files"], "files")
    return Manifest(url, block_nbytes, {name: _file(check, name, entry, block_nbytes) for name, entry in files.items()})


def _file(check: _Check, name: str, entry: object, block_nbytes: int) -> FileDigests:
    check.name(name)
    values = check.mapping(entry, f"the entry of {name!r}")
    check.keys(values, _ENTRY, f"the entry of {name!r}")
    nbytes = check.number(values["nbytes"], f"nbytes of {name!r}", least=0, most=_MAX_NBYTES)
    head = check.number(
        values["head_nbytes"], f"head_nbytes of {name!r}", least=min(1, nbytes), most=min(nbytes, _MAX_HEAD_NBYTES)
    )
    if head % PAGE_NBYTES and head != nbytes:
        check.refuse(f"head_nbytes of {name!r} is {head}: neither a multiple of {PAGE_NBYTES} nor the whole file")
    cut = Blocks(nbytes, head, block_nbytes)
    blocks = values["blocks"]
    if not isinstance(blocks, list) or len(blocks) != cut.count:
        has = f"{len(blocks)} blocks" if isinstance(blocks, list) else "no list of blocks"
        check.refuse(f"{name!r} of {nbytes} bytes has {cut.count} blocks, and the manifest {has}")
    found = FileDigests(
        cut,
        check.digest(values["sha256"], f"sha256 of {name!r}"),
        tuple(check.digest(each, f"block {i} of {name!r}") for i, each in enumerate(blocks)),
    )
    if cut.count < 2 and found.sha256 != (found.blocks[0] if found.blocks else _NOTHING_SHA256):
        check.refuse(f"it contradicts itself: {name!r} is one block, and its sha256 is not that block's")
    return found


class _Check:
    """What a manifest may hold; refuses the rest."""

    def __init__(self, url: str) -> None:
        self._url = url

    def refuse(self, reason: str) -> NoReturn:
        raise FormatError(f"{self._url} is no manifest: {reason}", url=self._url)

    def mapping(self, value: object, what: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            self.refuse(f"{what} is no object")
        return value

    def keys(self, value: Mapping[str, Any], wanted: frozenset[str], what: str) -> None:
        if value.keys() != wanted:
            missing, unknown = sorted(wanted - value.keys()), sorted(value.keys() - wanted)
            self.refuse(
                f"{what} " + (f"lacks {missing[0]!r}" if missing else f"has {_shown(unknown[0])}, which means nothing here")
            )

    def number(self, value: object, what: str, *, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.refuse(f"{what} is {_shown(value)}, no whole number from {least} to {most}")
        return value

    def digest(self, value: object, what: str) -> str:
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            self.refuse(f"{what} is {_shown(value)}, not 64 hexadecimal digits in lower case")
        return value

    def name(self, name: str) -> None:
        """A path below the folder, as it is written there; the manifest is not about itself."""
        parts = name.split("/")
        is_path = not any(part in ("", ".", "..") for part in parts) and not re.match(r"[A-Za-z]:", name)
        is_text = "\0" not in name and "\\" not in name and not re.search(r"[\ud800-\udfff]", name)
        if not is_path or not is_text or parts[-1] == MANIFEST_NAME:
            self.refuse(f"{_shown(name)} is no path of a file below the folder")


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice in one object")
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")
