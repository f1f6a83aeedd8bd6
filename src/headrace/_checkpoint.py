"""A checkpoint: a file, a list of files or a folder of shards, opened and checked, as a mapping of `TensorInfo`.

The index is an allow-list of (tensor, shard) pairs: a shard it names must exist, a tensor it names must be in the shard it
names, and what it does not name is not loaded. Without an index every safetensors file of the folder counts, numbered sets
must be complete, and no name may come twice. Headers are read here, all of them, and nothing else is.
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate, chain
from operator import sub
from types import TracebackType
from typing import Any, NoReturn

from typing_extensions import Self

from headrace._header import Header, TensorInfo, header_nbytes, parse_header
from headrace._interpreter import gc_paused
from headrace._metadata import Metadata, file_name
from headrace._options import Options
from headrace._selection import info_at, unknown_tensor
from headrace.errors import FormatError, SourceNotFoundError
from headrace.sources.base import ByteSource, Folder

log = logging.getLogger("headrace")

INDEX_SUFFIX = ".safetensors.index.json"
_SUFFIX = ".safetensors"
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT = "what torch has pickled is not read: convert it (torch.load with weights_only=True, safetensors.torch.save_file)"
_OPENERS = 32  # files opened at once, where no concurrency is asked for
_FIRST_NBYTES = 64 << 10  # one read takes the length and, for most shards, the whole header
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<part>\d+)-of-(?P<count>\d+)\.safetensors")
_MAX_INDEX_NBYTES = 1 << 30


class Checkpoint(Mapping[str, TensorInfo]):
    """The tensors of a checkpoint by name, in the order of shards and offsets. Metadata only: no tensor is read.

    Holds its shards open, at the version they had when it was made, until it is closed or collected. Thread-safe.

    Attributes:
        url: what was opened.
        headers: one per shard, as columns.
        sources: one per shard, open.
        rows: per shard the rows that belong to the checkpoint; None for all.
        where: (shard, row) of every name.
        options: what it was opened with, the environment included; loads from it start from them.
        largest: bytes of the two largest tensors in the shards.
        unverified: shards that should have been verified, and could not be (`verify="auto"`).
        names_of_shards: the shards' paths below the folder, or their file names.

    Example:
        >>> with headrace.open("models/minilm") as checkpoint:
        ...     checkpoint["embeddings.word_embeddings.weight"].shape
        (30522, 384)
    """

    def __init__(
        self,
        url: str,
        sources: Sequence[ByteSource],
        headers: Sequence[Header],
        rows: Sequence[list[int] | None],
        options: Options,
    ) -> None:
        self.url = url
        self.options = options
        self.unverified: tuple[str, ...] = ()
        self.names_of_shards: tuple[str, ...] = tuple(file_name(source.url) for source in sources)
        self.sources = tuple(sources)
        self.headers = tuple(headers)
        self.rows = tuple(rows)
        self.where = _Where(headers, rows)
        self.largest: tuple[int, ...] = tuple(nlargest(2, chain.from_iterable(map(sub, h.ends, h.starts) for h in headers)))

    @property
    def shards(self) -> tuple[str, ...]:
        """The urls of the files that hold the tensors."""
        return tuple(header.url for header in self.headers)

    @property
    def metadata(self) -> dict[str, str]:
        """The `__metadata__` of all shards together; where they disagree the first one wins."""
        merged: dict[str, str] = {}
        for header in reversed(self.headers):
            merged.update(header.metadata or {})
        return merged

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(
            sum(header.ends) - sum(header.starts) if rows is None else sum(header.ends[row] - header.starts[row] for row in rows)
            for header, rows in zip(self.headers, self.rows, strict=True)
        )

    def __getitem__(self, name: str) -> TensorInfo:
        try:
            shard, row = self.where[name]
        except (KeyError, TypeError):
            raise unknown_tensor(name, self.where) from None
        return info_at(self.headers[shard], row)

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)

    def __contains__(self, name: object) -> bool:
        return name in self.where

    def __repr__(self) -> str:
        shards = f"{len(self.headers):,} shard{'' if len(self.headers) == 1 else 's'}"
        return f"<{type(self).__name__} {self.url}: {len(self):,} tensors in {shards}, {self.nbytes:,} bytes>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an open checkpoint cannot be pickled or copied; open its url again where it is needed")

    def close(self) -> None:
        """Close the shards. The names and shapes stay readable. May be called twice."""
        for source in self.sources:
            source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Shards:
    """Which files of a folder hold the checkpoint, and which of their tensors count; None for all."""

    names: list[str]
    allowed: dict[str, set[str]] | None


def open_folder(
    folder: Folder, options: Options, *, index: str | None = None, remote: bool = False, metadata: Metadata | None = None
) -> Checkpoint:
    """Open a folder of shards.

    Args:
        folder: where the shards lie.
        options: resolved tuning, for the loads to come.
        index: the index file to go by; found by its name where it is None.
        remote: whether every look at the folder is a round trip: then looks are taken side by side.
        metadata: what stands in for the listing and the index, and what the headers have to be.

    Raises:
        SourceNotFoundError: no such folder, or no safetensors file in it.
        FormatError: an index, a name, a header or the set of shards breaks a rule; every shard is checked.
    """
    if metadata is not None:
        present, known = metadata.names, {name: metadata.text(name) for name in metadata.names if name.endswith(INDEX_SUFFIX)}
    elif remote and options.concurrency != 1:
        with ThreadPoolExecutor(max_workers=2, thread_name_prefix="headrace-open") as pool:
            usual = pool.submit(_read_if_there, folder, index or f"model{INDEX_SUFFIX}")
            present, known = folder.names(), usual.result()
    else:
        present, known = folder.names(), {}
    index = index or _find_index(folder, present)
    if index:
        text = known[index] if index in known else _read_index(folder, index)
        shards = _indexed_shards(folder, index, present, text)
    else:
        shards = _Shards(_unindexed_shards(folder, present), None)
    openers = [lambda name=name: folder.open(name) for name in shards.names]
    return _open(openers, folder.url, shards, options, remote, metadata)


def open_files(
    openers: Sequence[Callable[[], ByteSource]],
    url: str,
    options: Options,
    *,
    remote: bool = False,
    metadata: Metadata | None = None,
) -> Checkpoint:
    """Open the files given, all of whose tensors count. Raises as `open_folder`."""
    return _open(openers, url, _Shards([], None), options, remote, metadata)


def _open(
    openers: Sequence[Callable[[], ByteSource]],
    url: str,
    shards: _Shards,
    options: Options,
    remote: bool,
    metadata: Metadata | None,
) -> Checkpoint:
    sources: list[ByteSource] = []
    try:
        at_once = min(_OPENERS, max(1, options.concurrency // (options.local_ranks or 1)) if options.concurrency else _OPENERS)
        _open_all(openers, sources, at_once if remote else 1)
        names = shards.names or [file_name(source.url) for source in sources]
        with gc_paused.held():
            headers = _read_headers(sources, names, metadata, at_once)
            rows = [
                None if shards.allowed is None else _allowed_rows(header, name, shards.allowed[name])
                for header, name in zip(headers, names, strict=True)
            ]
            checkpoint = Checkpoint(url, sources, headers, rows, options)
            checkpoint.names_of_shards = tuple(names)
            return checkpoint
    except BaseException:
        for source in sources:
            source.close()
        raise


def _open_all(openers: Sequence[Callable[[], ByteSource]], sources: list[ByteSource], at_once: int) -> None:
    """Open all files, in one round where each is a round trip away. `sources` has what was opened, also after an error."""
    if at_once < 2 or len(openers) < 2:
        sources.extend(opener() for opener in openers)
        return
    with ThreadPoolExecutor(max_workers=min(at_once, len(openers)), thread_name_prefix="headrace-open") as pool:
        futures = [pool.submit(opener) for opener in openers]
    sources.extend(future.result() for future in futures if future.exception() is None)
    for future in futures:
        future.result()  # raises what went wrong first


def _read_headers(sources: Sequence[ByteSource], names: Sequence[str], metadata: Metadata | None, at_once: int) -> list[Header]:
    """All headers in one round: over a network one round trip, and not one per shard. Parsing gains nothing by threads."""
    if at_once < 2 or len(sources) < 2:
        texts = [read_header_text(source) for source in sources]
    else:
        with ThreadPoolExecutor(max_workers=min(at_once, len(sources)), thread_name_prefix="headrace-header") as pool:
            texts = list(pool.map(read_header_text, sources))
    for name, source, text in zip(names, sources, texts, strict=True):
        if metadata is not None:
            metadata.check(name, source, text)
    return [parse_header(text, url=source.url, nbytes=source.nbytes) for source, text in zip(sources, texts, strict=True)]


def read_header(source: ByteSource) -> Header:
    """Read and check one shard's header: one read, a second only where the header is longer than 64 KiB.

    Raises:
        FormatError: the file is no safetensors file, or breaks a rule of the format.
    """
    return parse_header(read_header_text(source), url=source.url, nbytes=source.nbytes)


def read_header_text(source: ByteSource) -> bytes:
    """The JSON of a shard's header, as it lies there. Raises as `read_header`."""
    first = bytearray(min(_FIRST_NBYTES, source.nbytes))
    source.read_into(0, memoryview(first))
    length = header_nbytes(bytes(first), url=source.url, nbytes=source.nbytes)
    if 8 + length > len(first):
        rest = bytearray(8 + length - len(first))
        source.read_into(len(first), memoryview(rest))
        first += rest
    source.check_unchanged()
    return bytes(memoryview(first)[8 : 8 + length])


class _Where(Mapping[str, tuple[int, int]]):
    """{name: (shard, row)} of a checkpoint, as one number a name: a tuple each would give the collector much to walk over.

    A name in two shards is an error, since nothing says which one counts.
    """

    def __init__(self, headers: Sequence[Header], rows: Sequence[list[int] | None]) -> None:
        self._rows = rows
        counts = [len(header.names) if kept is None else len(kept) for header, kept in zip(headers, rows, strict=True)]
        self._begins = list(accumulate(counts, initial=0))
        names = chain.from_iterable(
            header.names if kept is None else map(header.names.__getitem__, kept)
            for header, kept in zip(headers, rows, strict=True)
        )
        self._numbers = dict(zip(names, range(self._begins[-1]), strict=True))
        if len(self._numbers) != self._begins[-1]:
            raise _repeated_name(headers, rows)

    def __getitem__(self, name: str) -> tuple[int, int]:
        return self._row(self._numbers[name])

    def _row(self, number: int) -> tuple[int, int]:
        shard = bisect_right(self._begins, number) - 1
        at, kept = number - self._begins[shard], self._rows[shard]
        return shard, at if kept is None else kept[at]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: object) -> bool:
        return name in self._numbers


def _repeated_name(headers: Sequence[Header], rows: Sequence[list[int] | None]) -> FormatError:
    seen: dict[str, str] = {}
    for header, kept in zip(headers, rows, strict=True):
        for row in range(len(header.names)) if kept is None else kept:
            name = header.names[row]
            if name in seen and seen[name] == header.url:
                return FormatError(f"{header.url} is given twice; give each file once", url=header.url, tensor=name)
            if name in seen:
                return FormatError(
                    f"tensor {name!r} is in {seen[name]} and in {header.url}, and no index says which one counts; "
                    "remove one of them, or open the files that belong together as a list",
                    url=header.url,
                    tensor=name,
                )
            seen[name] = header.url
    raise AssertionError("a name was repeated and is not any more")


# -- which files ---------------------------------------------------------------------------------------------------------------


def _find_index(folder: Folder, present: Sequence[str]) -> str | None:
    """The folder's index: model.safetensors.index.json, or the only file that is called like one."""
    found = [name for name in present if name.endswith(INDEX_SUFFIX)]
    if f"model{INDEX_SUFFIX}" in found:
        return f"model{INDEX_SUFFIX}"
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


def _indexed_shards(folder: Folder, index: str, present: Sequence[str] | None, text: bytes) -> _Shards:
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
    return _Shards(sorted(allowed), allowed)


def shards_of_index(folder: Folder, index: str) -> list[str]:
    """The files that an index names, sorted.

    Raises:
        SourceNotFoundError: there is no such index.
        FormatError: it is no index, or names what is no file inside of the folder.
    """
    return _indexed_shards(folder, index, None, _read_index(folder, index)).names


def _read_if_there(folder: Folder, index: str) -> dict[str, bytes]:
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


def _allowed_rows(header: Header, shard: str, allowed: set[str]) -> list[int] | None:
    """The rows that the index names; None where it names all of them."""
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
