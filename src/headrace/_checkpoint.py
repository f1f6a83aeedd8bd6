"""A checkpoint: a file, a list of files or a folder of shards, opened and checked, as a mapping of `TensorInfo`.

Which files of a folder belong to it is the business of `_shards`. No name may come twice. Headers are read here, all of them, and
nothing else is; over a network one round trip takes a file's opening and its header.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate, chain
from operator import sub
from types import TracebackType
from typing import NoReturn

from typing_extensions import Self

from headrace._crew import Crew
from headrace._header import Header, TensorInfo, header_nbytes, parse_header
from headrace._interpreter import gc_paused
from headrace._metadata import Metadata, file_name
from headrace._options import Options
from headrace._selection import info_at, unknown_tensor
from headrace._shards import INDEX_SUFFIX, USUAL_INDEX, Shards, allowed_rows, find_shards, read_if_there
from headrace.errors import FormatError, SourceError
from headrace.sources.base import ByteSource, Folder
from headrace.sources.openings import endable

_OPENERS = 32  # files opened at once, where no concurrency is asked for
_FIRST_NBYTES = 64 << 10  # one read takes the length and, for most shards, the whole header


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
        present, known = _list_and_read(folder, index or USUAL_INDEX)
    else:
        present, known = folder.names(), {}
    shards = find_shards(folder, present, index=index, known=known)
    openers = [lambda name=name: folder.open(name) for name in shards.names]
    return _open(openers, folder.url, shards, options, remote, metadata)


def _list_and_read(folder: Folder, index: str) -> tuple[list[str], dict[str, bytes]]:
    """The listing, and the text of an index that is probably there, in one round. The listing's error comes first."""
    names: list[str] = []
    text: dict[str, bytes] = {}
    refused: list[SourceError] = []

    def read() -> None:
        try:
            text.update(read_if_there(folder, index))
        except SourceError as exc:
            refused.append(exc)

    looks = [lambda: names.extend(folder.names()), read]
    Crew("headrace-open").open_all(looks, lambda look: look(), concurrency=len(looks))
    for error in refused:
        raise error
    return names, text


def open_files(
    openers: Sequence[Callable[[], ByteSource]],
    url: str,
    options: Options,
    *,
    remote: bool = False,
    metadata: Metadata | None = None,
) -> Checkpoint:
    """Open the files given, all of whose tensors count. Raises as `open_folder`."""
    return _open(openers, url, Shards([], None), options, remote, metadata)


def _open(
    openers: Sequence[Callable[[], ByteSource]],
    url: str,
    shards: Shards,
    options: Options,
    remote: bool,
    metadata: Metadata | None,
) -> Checkpoint:
    at_once = min(_OPENERS, max(1, options.concurrency // (options.local_ranks or 1)) if options.concurrency else _OPENERS)
    sources, texts = _open_all(openers, at_once if remote else 1)
    try:
        names = shards.names or [file_name(source.url) for source in sources]
        with gc_paused.held():
            headers = [_header(*shard, metadata) for shard in zip(names, sources, texts, strict=True)]
            rows = [
                None if shards.allowed is None else allowed_rows(header, name, shards.allowed[name])
                for header, name in zip(headers, names, strict=True)
            ]
            checkpoint = Checkpoint(url, sources, headers, rows, options)
            checkpoint.names_of_shards = tuple(names)
            return checkpoint
    except BaseException:
        _close_all(sources)
        raise


def _open_all(openers: Sequence[Callable[[], ByteSource]], at_once: int) -> tuple[list[ByteSource], list[bytes]]:
    """Open all files and read the texts of their headers, so many at once; none is left open after an error."""
    sources: dict[int, ByteSource] = {}
    texts: dict[int, bytes] = {}
    crew, keeping = Crew("headrace-open"), threading.Lock()

    def open_one(number: int) -> None:
        source = openers[number]()
        with keeping:
            if crew.stop.is_set():  # too late: the others are closed by now
                source.close()
                return
            sources[number] = source
        with endable(source.close):
            texts[number] = read_header_text(source)

    everything = range(len(openers))
    try:
        if at_once < 2 or len(openers) < 2:
            for number in everything:
                open_one(number)
        else:
            crew.open_all(everything, open_one, concurrency=at_once)
    except BaseException:
        with keeping:
            _close_all(sources.values())
        raise
    return [sources[number] for number in everything], [texts[number] for number in everything]


def _close_all(sources: Iterable[ByteSource]) -> None:
    for source in sources:
        source.close()


def _header(name: str, source: ByteSource, text: bytes, metadata: Metadata | None) -> Header:
    if metadata is not None:
        metadata.check(name, source, text)
    return parse_header(text, url=source.url, nbytes=source.nbytes)


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
