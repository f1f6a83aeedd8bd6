"""Which files of a folder hold a checkpoint, and which of their tensors count.

The index is an allow-list of (tensor, shard) pairs: a shard it names must exist, a tensor it names must be in the shard it
names, and what it does not name is not loaded. Without an index every safetensors file of the folder counts, and numbered sets
must be complete.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace._header import Header
from headrace.errors import FormatError, SourceNotFoundError
from headrace.sources.base import Folder
from headrace.sources.openings import endable

log = logging.getLogger("headrace")

INDEX_SUFFIX: Final = ".safetensors.index.json"
USUAL_INDEX: Final = f"model{INDEX_SUFFIX}"
_SUFFIX: Final = ".safetensors"
_OTHER_FORMATS: Final = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT: Final = (
    "what torch has pickled is not read: convert it (torch.load with weights_only=True, safetensors.torch.save_file)"
)
_NUMBERED: Final = re.compile(r"(?P<stem>.+)-(?P<part>\d+)-of-(?P<count>\d+)\.safetensors")
_MAX_INDEX_NBYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Shards:
    """Which files of a folder hold the checkpoint, and which of their tensors count; None for all."""

    names: list[str]
    allowed: dict[str, set[str]] | None


def find_shards(folder: Folder, present: Sequence[str], *, index: str | None, known: Mapping[str, bytes]) -> Shards:
    """The files of a checkpoint in a folder.

    Args:
        folder: where they lie.
        present: the names of its files.
        index: the index to go by; found by its name where it is None.
        known: texts of indexes that were read already.

    Raises:
        SourceNotFoundError: there is no safetensors file, or one that the index names is not there.
        FormatError: the index, a name or the set of shards breaks a rule.
    """
    index = index or _find_index(folder, present)
    if index:
        return _indexed_shards(folder, index, present, known[index] if index in known else _read_index(folder, index))
    return Shards(_unindexed_shards(folder, present), None)


def _find_index(folder: Folder, present: Sequence[str]) -> str | None:
    """The folder's index: model.safetensors.index.json, or the only file that is called like one."""
    found = [name for name in present if name.endswith(INDEX_SUFFIX)]
    if USUAL_INDEX in found:
        return USUAL_INDEX
    if len(found) > 1:
        raise FormatError(
            f"{folder.url} has {len(found)} indexes ({', '.join(found[:4])}); open the one that is meant, by its path",
            url=folder.url,
        )
    return found[0] if found else None


def _unindexed_shards(folder: Folder, present: Sequence[str]) -> list[str]:
    names = [name for name in present if name.endswith(_SUFFIX) and not name.startswith(".")]
    if not names:
        others = ", ".join(sorted(present)[:3])
        seen = f"it holds {others}{', ...' if len(present) > 3 else ''}" if present else "it holds no file itself"
        what_to_do = _CONVERT if any(name.endswith(_OTHER_FORMATS) for name in present) else "open the folder of the shards"
        raise SourceNotFoundError(f"no *.safetensors file in {folder.url}: {seen}; {what_to_do}", url=folder.url)
    _check_numbered_sets(folder, names)
    return names


def _check_numbered_sets(folder: Folder, names: Sequence[str]) -> None:
    """Shards called STEM-00001-of-00003 promise how many there are."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            sets.setdefault((match["stem"], match["count"]), set()).add(int(match["part"]))
    for (stem, count), parts in sets.items():
        missing = sorted(set(range(1, int(count) + 1)) - parts) if int(count) <= 100_000 else [int(count)]
        if missing:
            width = len(count)
            shown = ", ".join(f"{stem}-{part:0{width}d}-of-{count}{_SUFFIX}" for part in missing[:3])
            raise FormatError(
                f"{folder.url} lacks {len(missing)} of {int(count)} shards: {shown}{', ...' if len(missing) > 3 else ''}; "
                "an incomplete download? Fetch them again",
                url=folder.url,
            )


def _indexed_shards(folder: Folder, index: str, present: Sequence[str] | None, text: bytes) -> Shards:
    """What an index says; `present` None: not compared with what is there."""
    url = posixpath.join(folder.url, index)
    allowed: dict[str, set[str]] = {}
    for tensor, shard in _parse_weight_map(text, url).items():
        if not isinstance(shard, str):
            raise FormatError(f"{url}: weight_map names no file for {tensor!r} but {shard!r}", url=url, tensor=tensor)
        allowed.setdefault(shard, set()).add(tensor)
    for shard in allowed:
        _check_shard_name(shard, url)
    missing = sorted(shard for shard in allowed if present is not None and "/" not in shard and shard not in present)
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise SourceNotFoundError(
            f"{url} names {len(missing)} shard(s) that are not there: {shown}; an incomplete download? Fetch them again", url=url
        )
    return Shards(sorted(allowed), allowed)


def shards_of_index(folder: Folder, index: str) -> list[str]:
    """The files that an index names, sorted.

    Raises:
        SourceNotFoundError: there is no such index.
        FormatError: it is no index, or names what is no file inside of the folder.
    """
    return _indexed_shards(folder, index, None, _read_index(folder, index)).names


def read_if_there(folder: Folder, index: str) -> dict[str, bytes]:
    """{index: its text}, or nothing where there is no such file."""
    try:
        return {index: _read_index(folder, index)}
    except SourceNotFoundError:
        return {}


def _read_index(folder: Folder, index: str) -> bytes:
    source = folder.open(index)
    try:
        if source.nbytes > _MAX_INDEX_NBYTES:
            raise FormatError(f"{source.url}: {source.nbytes:,} bytes are no index", url=source.url)
        text = bytearray(source.nbytes)
        with endable(source.close):
            source.read_into(0, memoryview(text))
        source.check_unchanged()
        return bytes(text)
    finally:
        source.close()


def _parse_weight_map(text: bytes, url: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as exc:
        raise FormatError(f"{url} is not JSON: {exc}", url=url) from exc
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError(f"{url} has no weight_map, so it names no tensors", url=url)
    return weight_map


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{repeated!r} comes twice")
    return value


def _check_shard_name(shard: str, url: str) -> None:
    """A shard lies inside the folder. Links may lead out of it: the hub's cache is made of them."""
    parts = shard.split("/")
    reason = ""
    if not shard or "\0" in shard or "\\" in shard:
        reason = "is no file name"
    elif shard.startswith("/") or re.match(r"[A-Za-z]:", shard):
        reason = "is an absolute path"
    elif "://" in shard:
        reason = "is a URL"
    elif ".." in parts or "." in parts or "" in parts:
        reason = "leads out of the checkpoint's folder"
    if reason:
        raise FormatError(f"{url}: the shard name {shard!r} {reason}; only files inside the folder are read", url=url)


def allowed_rows(header: Header, shard: str, allowed: set[str]) -> list[int] | None:
    """The rows that the index names; None where it names all of them. Raises `FormatError` where it names others."""
    absent = allowed.difference(header.names)
    if absent:
        name = min(absent)
        raise FormatError(
            f"the index says that {len(absent)} tensor(s) are in {shard}, and they are not: {name!r}"
            f"{', ...' if len(absent) > 1 else ''}; the index and the shards are not of one version",
            url=header.url,
            tensor=name,
        )
    if len(allowed) == len(header.names):
        return None
    extra = len(header.names) - len(allowed)
    log.warning("%s: %d tensor(s) that the index does not name are left out", header.url, extra)
    return [row for row, name in enumerate(header.names) if name in allowed]
