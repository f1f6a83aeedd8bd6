"""The public verbs. Each assembles the parts for one call: finds the source, opens the checkpoint, plans, and runs the engine.

The only module that picks adapters; everything below is handed what it needs. torch is imported when tensors are about to
be made and not before: `open` and `plan` work without it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from typing_extensions import Self

from headrace._checkpoint import INDEX_SUFFIX, Checkpoint, open_files, open_folder
from headrace._header import TensorInfo
from headrace._interpreter import gc_paused
from headrace._machine import available_cpus, available_memory
from headrace._options import Options, resolve
from headrace._plan import CHUNK_NBYTES, MIB, Limits, Plan, SourceAbilities, make_plan
from headrace._progress import Progress, Snapshot
from headrace._selection import DTypeRule, Names, choose_casts, info_at, select, unknown_tensor
from headrace._slices import Index, slice_shape
from headrace.errors import OptionError, SourceError, StreamError
from headrace.sources.base import ByteSource, Folder, aligned_source
from headrace.sources.file import FileFolder, FileSource
from headrace.sources.mapped import MappedSource

if TYPE_CHECKING:
    import torch

    from headrace._engine import Engine
    from headrace.devices.base import Destination, HostTarget

Location: TypeAlias = "str | os.PathLike[str] | Checkpoint | ByteSource | Folder | Sequence[str | os.PathLike[str] | ByteSource]"
Into: TypeAlias = "Mapping[str, torch.Tensor] | Callable[[TensorInfo], torch.Tensor | None]"
Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str]"
Order: TypeAlias = Literal["ready", "file"]
Ownership: TypeAlias = Literal["leased", "copied", "borrowed"]

log = logging.getLogger("headrace")

_MOST_AHEAD = 512 * MIB
_LEAST_AHEAD = 64 * MIB
_LEAST_AHEAD_CACHED = 16 * MIB  # four spans, which fit the L3 cache: memory that is hot is read into fastest (design, 3.3)


def open(url: Location, *, options: Options | None = None, **overrides: Any) -> Checkpoint:
    """Open a checkpoint and check all of its headers. No tensor is read, and torch is not needed.

    Args:
        url: a safetensors file, a folder of shards, an index file, or a list of files; as a path or `file://` URL. A
            `ByteSource` or `Folder` of one's own works as well.
        options: tuning; see `Options`. Every field may also be given by name.

    Returns:
        A mapping from tensor names to `TensorInfo`, and a context manager that closes the files.

    Raises:
        SourceNotFoundError, SourcePermissionError, SourceError: the files cannot be read.
        FormatError: a file or the index breaks a rule of the format; the message names file, tensor and rule.
        OptionError: an unknown option, or one that cannot be used.

    Example:
        >>> with headrace.open("models/minilm") as checkpoint:
        ...     print(len(checkpoint), checkpoint.nbytes)
        103 90405376
    """
    return _open(url, _resolved(url, options, overrides))


def plan(
    url: Location,
    *,
    device: str | torch.device = "cpu",
    names: Names = None,
    slices: Mapping[str, Index] | None = None,
    dtype: DTypeRule = None,
    target_dtypes: DTypeRule = None,
    options: Options | None = None,
    **overrides: Any,
) -> Plan:
    """Plan a load without doing it: what would be read, in what order, where it would land, and why.

    Args:
        url, names, slices, dtype, options: as for `stream`.

    Returns:
        Plain data; `str(plan)` explains it.

    Raises:
        As `open`, and TensorNotFoundError for a name that fits nothing.
    """
    resolved = _resolved(url, options, overrides)
    _check_device(device)
    checkpoint = _open(url, resolved)
    try:
        return _Request(checkpoint, names, slices, _one_rule(dtype, target_dtypes), resolved).plan()
    finally:
        if checkpoint is not url:
            checkpoint.close()


def stream(
    url: Location,
    *,
    device: str | torch.device = "cpu",
    names: Names = None,
    slices: Mapping[str, Index] | None = None,
    dtype: DTypeRule = None,
    target_dtypes: DTypeRule = None,
    into: Into | None = None,
    rename: Rename | None = None,
    ownership: Ownership = "leased",
    order: Order = "ready",
    progress: Callable[[Snapshot], None] | None = None,
    options: Options | None = None,
    **overrides: Any,
) -> TensorStream:
    """Stream tensors: (name, tensor) pairs come as soon as their bytes are in, while reading goes on.

    A tensor that was handed out is yours. It never changes afterwards, whatever you do with it, and its memory is used
    again only when nothing refers to it any more.

    Args:
        url: as for `open`; also an open `Checkpoint`, which stays open.
        device: where the tensors go. Today "cpu".
        names: which tensors: a name or glob, several of them, or a predicate that takes a `TensorInfo`. None: all.
        slices: {name: index} with numpy's meaning (integers, slices with any step, '...'); only what is needed is read,
            or a range that covers it where that is cheaper.
        dtype: convert while loading: one dtype, a mapping from names or globs to dtypes, or a callable that takes a
            `TensorInfo` and returns a dtype or None. The bits are those of `tensor.to(dtype)`. One dtype, or a glob,
            never touches integers, bools or quantized data, nor the scales that belong to it; a full name or a callable
            is obeyed.
        target_dtypes: another name for `dtype`.
        into: tensors to fill: a mapping by name, or a callable that takes a `TensorInfo` and returns a tensor or None. A
            tensor of another dtype converts the values. What is handed out then is the tensor given.
        rename: names to hand the tensors out under: a mapping or a callable.
        ownership: "leased": tensors share recycled memory, safely. "copied": each tensor has memory of its own, of its size.
            "borrowed": a tensor may be used until the next one has been taken; keeping one longer raises `StreamError`.
        order: "ready" hands tensors out as they come in, "file" in the order of shards and offsets.
        progress: called with a `Snapshot` while the load goes on, on the thread that iterates.
        options: tuning; see `Options`. Every field may also be given by name.

    Returns:
        An iterator and context manager. Leaving it, in whatever way, stops the readers and gives everything back.

    Raises:
        As `open`, at once; while iterating SourceError and its kinds for what cannot be read, `LoadError` where `into` was given.

    Example:
        >>> with headrace.stream("models/minilm", dtype="bfloat16") as tensors:
        ...     for name, tensor in tensors:
        ...         model.get_parameter(name).data.copy_(tensor)
    """
    resolved = _resolved(url, options, overrides)
    _check_choice("order", order, ("ready", "file"))
    _check_choice("ownership", ownership, ("leased", "copied", "borrowed"))
    _check_device(device)
    checkpoint = _open(url, resolved)
    close = checkpoint.close if checkpoint is not url else None
    try:
        request = _Request(checkpoint, names, slices, _one_rule(dtype, target_dtypes), resolved)
        return TensorStream(
            request.engine(into=into, rename=rename, ownership=ownership, order=order, progress=progress, on_stop=close)
        )
    except BaseException:
        if close is not None:
            close()
        raise


def load(url: Location, **arguments: Any) -> dict[str, torch.Tensor]:
    """Load tensors into a dict.

    Args:
        url: as for `open`.
        **arguments: as for `stream`. `memory_limit` bounds what is read ahead; by default nothing does, since all of it is kept.

    Returns:
        {name: tensor}, in file order.

    Raises:
        As `stream`.

    Example:
        >>> weights = headrace.load("models/minilm", names="embeddings.*")
    """
    arguments.setdefault("order", "file")
    options = _resolved(url, arguments.pop("options", None), _option_overrides(arguments))
    if options.memory_limit is None:
        options = options.merged({"memory_limit": -1})
    with stream(url, options=options, **arguments) as tensors, gc_paused.held():
        return dict(tensors)


class TensorStream(Iterator[tuple[str, Any]]):
    """(name, tensor) pairs of one load. A context manager, and an iterator that runs once.

    Reading starts with the `with` block or the first tensor that is asked for. The stream closes at its end, at the end
    of the block, on an error, when `close` is called and when it is abandoned.

    Attributes:
        plan: what is being done.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tensors = engine.run()
        self._iterated = False
        self.plan = engine.plan

    @property
    def stats(self) -> Snapshot:
        """What the load has done so far and where its time went; final once the stream is closed."""
        return self._engine.progress.snapshot()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        if self._iterated:
            raise StreamError("a stream runs once; open another one to iterate again")
        self._iterated = True
        return self._pairs()

    def _pairs(self) -> Iterator[tuple[str, Any]]:
        # A generator is quicker than __next__, and this one keeps the stream alive in `for ... in headrace.stream(...)`.
        yield from self._tensors
        self._engine.check_finished()

    def __next__(self) -> tuple[str, Any]:
        try:
            return next(self._tensors)
        except StopIteration:
            self._engine.check_finished()
            raise

    def close(self) -> None:
        """Stop reading and give memory and files back. Tensors that were handed out stay.

        May be called twice, and from any thread: a thread that waits for the next tensor then gets a `StreamError`.
        """
        self._iterated = True
        self._engine.stop()
        with suppress(ValueError):  # it runs at this moment, on another thread or around this call, and will see that it is over
            self._tensors.close()

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if "_engine" in self.__dict__:  # not where __init__ failed
            self.close()


class _Request:
    """What a caller asked for, against an open checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, names: Names, slices: Mapping[str, Index] | None, rule: DTypeRule, options: Options
    ) -> None:
        self.checkpoint, self.rule, self.options = checkpoint, rule, options
        self.slices = dict(slices or {})
        for name in self.slices:
            checkpoint[name]  # raises for a name that does not exist
        with gc_paused.held():
            self.chosen = select(names, checkpoint.headers, checkpoint.rows, checkpoint.where)
        self.unmapped: list[str] = []
        self.mappings = self._map_files() if options.mmap in ("auto", "require") else {}

    def plan(self, *, given: Mapping[str, str] | None = None) -> Plan:
        """The plan. `given`: dtypes of the destinations, for the tensors whose memory the caller provides."""
        headers, where = self.checkpoint.headers, self.checkpoint.where
        abilities = [
            _abilities(source, mapped=shard in self.mappings) if rows is None or rows else _UNUSED
            for shard, (source, rows) in enumerate(zip(self.checkpoint.sources, self.chosen, strict=True))
        ]
        with gc_paused.held():
            casts, left_alone = choose_casts(self.rule, headers, self.chosen, where)
            for name, dtype in (given or {}).items():
                shard, row = where[name]
                casts[shard].pop(row, None)
                if dtype != headers[shard].dtypes[row]:
                    casts[shard][row] = dtype
            return make_plan(
                headers,
                self.chosen,
                abilities,
                _limits(self.options, abilities, self.checkpoint),
                casts=casts if any(casts) else None,
                slices=self.slices,
                given=frozenset(given) if given else None,
                left_alone=left_alone,
            )

    def _map_files(self) -> dict[int, memoryview]:
        """{shard: mapping} of what can be mapped; the rest is read, and `unmapped` says why."""
        mappings: dict[int, memoryview] = {}
        for shard, (source, rows) in enumerate(zip(self.checkpoint.sources, self.chosen, strict=True)):
            if rows is not None and not rows:
                continue
            try:
                if not isinstance(source, MappedSource):
                    raise SourceError(f"cannot map {source.url}: open it with mmap={self.options.mmap!r}", url=source.url)
                mappings[shard] = source.map()
            except SourceError as exc:
                if self.options.mmap == "require":
                    raise
                self.unmapped.append(str(exc))
        return mappings

    def engine(
        self,
        *,
        into: Into | None,
        rename: Rename | None,
        ownership: Ownership,
        order: Order,
        progress: Callable[[Snapshot], None] | None,
        on_stop: Callable[[], None] | None,
    ) -> Engine:
        """The engine for this request, ready to run."""
        from headrace._engine import Engine, Job
        from headrace.devices.cpu import CpuTarget

        if ownership != "leased" and self.mappings:
            raise OptionError(
                f"mmap hands out views of the file, which cannot be {ownership}; leave one of the two out", option="mmap"
            )
        target = CpuTarget()
        destinations = self._destinations(into, target) if into is not None else {}
        given = {name: destination.dtype for name, destination in destinations.items() if destination.memory is not None}
        plan = self.plan(given=given)
        job = Job(
            plan=plan,
            sources=self.checkpoint.sources,
            target=target,
            order=order,
            ownership=ownership,
            destinations=destinations,
            rename=_renaming(rename),
            on_progress=progress,
            on_stop=on_stop,
            mappings=self.mappings,
            demands_direct=self.options.direct_io == "on",
        )
        return Engine(job, _new_progress(plan, self.unmapped))

    def _destinations(self, into: Into, target: HostTarget) -> dict[str, Destination]:
        found: dict[str, Destination] = {}
        given: dict[str, torch.Tensor] = {}
        for header, rows in zip(self.checkpoint.headers, self.chosen, strict=True):
            for row in range(len(header.names)) if rows is None else rows:
                info = info_at(header, row)
                tensor = into(info) if callable(into) else into.get(info.name)
                if tensor is None:
                    continue
                shape = slice_shape(info.shape, self.slices[info.name]) if info.name in self.slices else info.shape
                found[info.name] = target.destination(tensor, info.name, info.dtype, shape)
                given[info.name] = tensor
        if (shared := target.shared_memory(given)) is not None:
            one, other = shared
            raise OptionError(
                f"into: the tensors given for {one!r} and {other!r} share memory; load one of them and tie it afterwards",
                option="into",
            )
        if not callable(into) and (unknown := next((name for name in into if name not in self.checkpoint), None)) is not None:
            raise unknown_tensor(unknown, self.checkpoint)
        return found


def _renaming(rename: Rename | None) -> Callable[[str], str] | None:
    if rename is None or callable(rename):
        return rename
    return lambda name: rename.get(name, name)


def _new_progress(plan: Plan, degraded: list[str]) -> Progress:
    for fallback in degraded:
        log.warning("%s; it is read instead", fallback)
    return Progress(
        degraded=list(degraded),
        total_nbytes=plan.read_nbytes,
        surplus_nbytes=plan.surplus_nbytes,
        total_tensors=len(plan.tensors),
        concurrency=plan.limits.concurrency,
        memory_limit=plan.limits.memory_limit,
        routes=tuple((route.url, route.route, route.reason) for route in plan.routes),
        left_alone=plan.left_alone,
    )


# -- limits --------------------------------------------------------------------------------------------------------------------


_UNUSED = SourceAbilities("memory")  # nothing is read from the shard


def _abilities(source: ByteSource, *, mapped: bool) -> SourceAbilities:
    if mapped:
        return SourceAbilities("file", cached=True, mapped=True)
    if isinstance(source, FileSource):
        return SourceAbilities("file", cached=not source.prefers_direct(0, min(source.nbytes, CHUNK_NBYTES)))
    if aligned_source(source) is not None:
        return SourceAbilities("file", cached=None)
    return SourceAbilities("memory")


def _limits(options: Options, abilities: Sequence[SourceAbilities], checkpoint: Checkpoint) -> Limits:
    limit = options.memory_limit
    if limit is None:
        limit = _automatic_limit(abilities, checkpoint.largest)
    elif limit < 0:
        nbytes = sum(header.nbytes for header in checkpoint.headers)
        limit = max(2 * nbytes, CHUNK_NBYTES)  # twice: casts may widen, spans are rounded up
    return Limits(options.concurrency or _automatic_concurrency(abilities), limit)


def _automatic_limit(abilities: Sequence[SourceAbilities], largest: Sequence[int]) -> int:
    """Room for the two largest tensors, so that one is read while the other is used; not less than keeps the source busy.

    Not more either: memory that was never touched costs several times what reading into it does.
    """
    cached = all(ability.cached or ability.kind == "memory" for ability in abilities)
    least = _LEAST_AHEAD_CACHED if cached else _LEAST_AHEAD
    wanted = max(least, sum(largest) + MIB)  # and what lies between them
    return wanted if wanted <= least else min(wanted, max(least, min(_MOST_AHEAD, (available_memory() or 8 * _MOST_AHEAD) // 8)))


def _automatic_concurrency(abilities: Sequence[SourceAbilities]) -> int:
    """Readers that copy out of the page cache keep a CPU busy each; readers that wait for a disk need more of them."""
    cpus = _cpus()
    return min(16, max(8, cpus)) if any(ability.cached is False for ability in abilities) else min(8, max(2, cpus))


@lru_cache(maxsize=1)
def _cpus() -> int:
    return available_cpus()


# -- arguments -----------------------------------------------------------------------------------------------------------------


def _resolved(url: Location, options: Options | None, overrides: dict[str, Any]) -> Options:
    """The options of one call. An open checkpoint has asked the environment already."""
    if isinstance(url, Checkpoint):
        return (url.options if options is None else _over(url.options, options)).merged(overrides)
    return resolve(options, overrides)


def _over(base: Options, options: Options) -> Options:
    return base.merged({name: getattr(options, name) for name in Options.__dataclass_fields__})


def _open(url: Location, options: Options) -> Checkpoint:
    _refuse_unavailable(options)
    if isinstance(url, Checkpoint):
        return url
    if isinstance(url, (str, os.PathLike)):
        return _open_path(_local_path(url), options)
    if isinstance(url, Sequence):
        return _open_list(url, options)
    if hasattr(url, "read_into"):
        source = cast(ByteSource, url)
        return open_files([lambda: source], source.url, options)
    if hasattr(url, "names"):
        return open_folder(url, options)
    raise OptionError(f"url is a path, a URL, a list of them, a source or a folder, not {type(url).__name__}", option="url")


def _open_path(path: Path, options: Options) -> Checkpoint:
    if path.is_dir():
        return open_folder(_folder(path, options), options)
    if path.name.endswith(INDEX_SUFFIX):
        return open_folder(_folder(path.parent, options), options, index=path.name)
    return open_files([lambda: _file(path, options)], str(path), options)


def _kind(options: Options) -> type[FileSource]:
    return MappedSource if options.mmap in ("auto", "require") else FileSource


def _file(path: Path, options: Options) -> FileSource:
    return _kind(options)(path, direct_io=options.direct_io or "auto")


def _folder(path: Path, options: Options) -> FileFolder:
    return FileFolder(path, direct_io=options.direct_io or "auto", kind=_kind(options))


def _open_list(urls: Sequence[Any], options: Options) -> Checkpoint:
    if not urls:
        raise OptionError("url is an empty list: there is nothing to load", option="url")

    def opener(url: Any) -> Callable[[], ByteSource]:
        if hasattr(url, "read_into"):
            return lambda: url
        path = _local_path(url)
        return lambda: _file(path, options)

    named = ", ".join(str(getattr(url, "url", url)) for url in urls[:3])
    return open_files([opener(url) for url in urls], named, options)


def _local_path(url: str | os.PathLike[str]) -> Path:
    if not isinstance(url, (str, os.PathLike)):
        raise OptionError(f"url is a path, a URL or a source, not {type(url).__name__}", option="url")
    text = os.fspath(url)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise OptionError(f"{text}: a file URL names no host; write file:///path", option="url")
        return Path(unquote(parts.path))
    if scheme:
        raise OptionError(f"{text}: there is no source for {scheme}:// yet; local paths and file:// work", option="url")
    return Path(text).expanduser()


def _refuse_unavailable(options: Options) -> None:
    """What cannot be done is refused where it was demanded, and said once where it was merely wished for."""
    for name in ("pin", "in_place", "gds"):
        asked = getattr(options, name)
        if asked == "require":
            raise OptionError(
                f"{name}='require': this version loads to host memory only, where there is no such thing", option=name
            )


def _check_device(device: object) -> None:
    if str(device) != "cpu":
        raise OptionError(f"device {str(device)!r} is not supported yet; load to 'cpu' and move the tensors", option="device")


def _check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise OptionError(f"{option} is one of {', '.join(map(repr, choices))}, not {value!r}", option=option)


def _one_rule(dtype: DTypeRule, target_dtypes: DTypeRule) -> DTypeRule:
    if dtype is not None and target_dtypes is not None:
        raise OptionError("dtype and target_dtypes are two names of one argument; give one of them", option="dtype")
    return dtype if dtype is not None else target_dtypes


def _option_overrides(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the options out of keyword arguments."""
    return {name: arguments.pop(name) for name in list(arguments) if name in Options.__dataclass_fields__}
