"""The public verbs. Each assembles the parts for one call: opens the checkpoint, plans, and runs the engine.

torch is imported when tensors are about to be made and not before: `open` and `plan` work without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from glob import escape
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self, Unpack

from headrace._arguments import Group, LoadArguments, Target, Targets
from headrace._at_once import read_at_once
from headrace._bar import open_bar
from headrace._checking import VerifyProgress
from headrace._checkpoint import Checkpoint, open_files, read_header_text
from headrace._copying import PullProgress
from headrace._held import Held
from headrace._hold import hold_checkpoint
from headrace._indexed import with_shards
from headrace._interpreter import gc_paused
from headrace._location import (
    Location,
    Verify,
    is_remote_url,
    load_manifest,
    local_path,
    note_verified,
    open_location,
    open_place,
    verification_for,
)
from headrace._manifest import MANIFEST_NAME
from headrace._metadata import Metadata, write_metadata
from headrace._options import Demand, OptionArguments, Options, UsualOptionArguments, resolve
from headrace._patterns import Patterns
from headrace._phases import (
    Load,
    agree_on_places,
    join_plans,
    open_load,
    placeholders_of,
    requests_of,
)
from headrace._plan import Plan
from headrace._progress import Snapshot
from headrace._pull import PullReport, pull_folder
from headrace._request import Into, Order, Ownership, Rename, Request
from headrace._selection import DTypeRule, Names
from headrace._sharded import PATTERN, files_of_rank
from headrace._slices import Index
from headrace._trace import Tracer
from headrace._verify import VerifyReport, verify_folder
from headrace.errors import OptionError, StreamError
from headrace.sources.base import Folder

if TYPE_CHECKING:
    import torch

    from headrace._peers import Peers
    from headrace._tables import SharedTensor


def open(
    url: Location,
    *,
    verify: Verify = None,
    metadata: str | os.PathLike[str] | None = None,
    credentials: object = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> Checkpoint:
    """Open a checkpoint and check all of its headers. No tensor is read, and torch is not needed.

    Args:
        url: a safetensors file, a folder of shards, an index file, or a list of files; as a path or URL: `file://`,
            `s3://bucket/prefix`, `hf://org/repo@revision`, `https://`. A `ByteSource` or `Folder` of one's own works as well.
        verify: check every byte before it is used, headers included. True or "require": against the headrace.manifest.json
            beside the files or the digest that the hub knows, and refuse a file that has neither; "auto": the same, and
            read a file that has neither unchecked, with a warning; a path, a URL or the JSON of a manifest: against that.
            None or False: not. See docs/integrity.md.
        metadata: a local folder that stands in for the listing and the index: the index, and for each shard a file of its name
            that begins as it does; `save_metadata` writes one, and a copy of the checkpoint is one. Every shard is compared with
            its header there as it is opened. None: the store is asked.
        credentials: for the store: `headrace.sources.s3.S3Credentials`, a token for the hub or a web server. None: as the
            store's own tools find them.
        options: tuning; see `Options`. Every field may also be given by name.

    Returns:
        A mapping from tensor names to `TensorInfo`, and a context manager that closes the files.

    Raises:
        SourceNotFoundError, SourcePermissionError, SourceError: the files cannot be read.
        FormatError: a file or the index breaks a rule of the format; the message names file, tensor and rule.
        SourceChangedError: a shard is not what `metadata` says.
        IntegrityError: what was read is not what `verify` says; the error has url, offset, block and both digests.
        OptionError: an unknown option, or one that cannot be used; `verify` where there is nothing to check against.

    Example:
        >>> with headrace.open("models/minilm") as checkpoint:
        ...     print(len(checkpoint), checkpoint.nbytes)
        103 90405376
    """
    return open_location(url, _resolved(url, options, overrides), credentials, verify=verify, metadata=metadata)


def save_metadata(
    url: Location,
    dst: str | os.PathLike[str],
    *,
    credentials: object = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> list[Path]:
    """Save what `metadata=` takes: an index, the header of every shard under the shard's name, and their versions.

    Args:
        url: as for `open`.
        dst: the folder; made where it does not exist.
        credentials, options: as for `open`.

    Returns:
        The files. A shard's begins as the shard does, and ends with the header.

    Raises:
        As `open`; OptionError: two shards have one name; OSError: `dst` cannot be written to.

    Example:
        >>> headrace.save_metadata("s3://bucket/minilm", "metadata/minilm")
        >>> weights = headrace.load("s3://bucket/minilm", metadata="metadata/minilm")
    """
    checkpoint = open_location(url, _resolved(url, options, overrides), credentials)
    try:
        names, sources = checkpoint.names_of_shards, checkpoint.sources
        if len(set(names)) < len(names):
            raise OptionError(f"{checkpoint.url}: two of its files have one name; save the metadata of each folder", option="url")
        return write_metadata(
            local_path(dst),
            {name: read_header_text(source) for name, source in zip(names, sources, strict=True)},
            {tensor: names[shard] for tensor, (shard, _) in checkpoint.where.items()},
            dict(zip(names, sources, strict=True)),
        )
    finally:
        if checkpoint is not url:
            checkpoint.close()


def open_sharded(
    url: str | os.PathLike[str] | Folder,
    *,
    rank: int,
    pattern: str = PATTERN,
    verify: Verify = None,
    metadata: str | os.PathLike[str] | None = None,
    credentials: object = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> Checkpoint:
    """Open one rank's part of a checkpoint that is divided already; `stream` and `load` take what this returns.

    Args:
        url: the folder, as for `open`.
        rank: whose part.
        pattern: what the files are called; has {rank} and {part}.
        verify: as for `open`.
        metadata: as for `open`; of all ranks or of this one.
        credentials, options: as for `open`.

    Returns:
        The rank's tensors, those of all its parts, as `open` does.

    Raises:
        As `open`; OptionError: no such pattern; SourceNotFoundError: the rank has no files; FormatError: a part is missing.

    Example:
        >>> with headrace.open_sharded("s3://models/llama-tp8", rank=3) as checkpoint:
        ...     weights = headrace.load(checkpoint)
    """
    resolved = resolve(options, overrides)
    folder, only = open_place(url, resolved, credentials)
    if only is not None:
        raise OptionError(f"{folder.url}/{only}: a checkpoint divided among ranks is a folder, and this is a file", option="url")
    verification = verification_for(verify, resolved, credentials)
    if verification is not None:
        folder = verification.folder(folder)
    known = Metadata(local_path(metadata)) if metadata is not None else None
    names = files_of_rank(folder.names() if known is None else known.names, rank=rank, pattern=pattern, url=folder.url)
    openers = [lambda name=name: folder.open(name) for name in names]
    checkpoint = open_files(openers, folder.url, resolved, remote=is_remote_url(url), metadata=known)
    note_verified(checkpoint, verification)
    return checkpoint


def plan(
    url: Location,
    *,
    device: Targets = "cpu",
    names: Names = None,
    slices: Mapping[str, Index] | None = None,
    dtype: DTypeRule = None,
    target_dtypes: DTypeRule = None,
    verify: Verify = None,
    metadata: str | os.PathLike[str] | None = None,
    credentials: object = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> Plan:
    """Plan a load without doing it: what would be read, in what order, where it would land, and why.

    Args:
        url, device, names, slices, dtype, verify, metadata, credentials, options: as for `stream`.

    Returns:
        Plain data; `str(plan)` explains it. Where there are several targets, it has a plan for each in `phases`.

    Raises:
        As `open`, and TensorNotFoundError for a name that fits nothing.
    """
    resolved = _resolved(url, options, overrides)
    checkpoint = open_location(url, resolved, credentials, verify=verify, metadata=metadata)
    try:
        requests = requests_of(checkpoint, names, slices, _one_rule(dtype, target_dtypes), resolved, device)
        plans = [request.plan() for request in requests]
        return plans[0] if len(plans) == 1 else join_plans(plans)
    finally:
        if checkpoint is not url:
            checkpoint.close()


def stream(
    url: Location,
    *,
    device: Targets = "cpu",
    names: Names = None,
    slices: Mapping[str, Index] | None = None,
    dtype: DTypeRule = None,
    target_dtypes: DTypeRule = None,
    into: Into | None = None,
    rename: Rename | None = None,
    ownership: Ownership = "leased",
    order: Order = "ready",
    group: Group = None,
    progress: Callable[[Snapshot], None] | bool | None = None,
    trace: str | os.PathLike[str] | None = None,
    verify: Verify = None,
    metadata: str | os.PathLike[str] | None = None,
    credentials: object = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> TensorStream:
    """Stream tensors: (name, tensor) pairs come as soon as their bytes are in, while reading goes on.

    A tensor that was handed out is yours. It never changes afterwards, whatever you do with it, and its memory is used
    again only when nothing refers to it any more.

    Args:
        url: as for `open`; also an open `Checkpoint`, which stays open.
        device: where the tensors go: "cpu", "cuda" (the current GPU), "cuda:1", a torch.device, or a `Device` of one's own.
            "shared-cpu": memory that all ranks of the node have in common, filled by one of them and not to be written to. A
            mapping from names, globs or "file:NAME" to such targets, what it leaves out going to "cpu", or a callable that takes
            a name and returns a target or None: one target is loaded after the other, each with its own `memory_limit` where
            that is a mapping. See docs/distributed.md.
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
        group: ranks of torch.distributed that load together, each byte read by one of them and sent to the others: a process
            group, True for the default one, or "node" for those of it that are on one node with this one. All of them call
            this, with the same arguments but for `slices`, and take tensors at about the same pace: the slowest sets it.
            None: no rank talks to another. See docs/distributed.md.
        progress: True: a bar of tqdm's, in scripts and notebooks, or a line on stderr where tqdm is not installed. A callable:
            called with a `Snapshot` while the load goes on, on the thread that iterates.
        trace: a file to write, when the load is over, with all that its threads did when; ui.perfetto.dev opens it.
        verify: as for `open`. A tensor is handed out when all blocks of the file that it lies in were checked. Where only the
            digest of a whole file is known, that of the file's last tensor waits for it, and all of the file is read.
        metadata: as for `open`.
        credentials: as for `open`.
        options: tuning; see `Options`. Every field may also be given by name.

    Returns:
        An iterator and context manager. Leaving it, in whatever way, stops the readers and gives everything back.

    Raises:
        As `open`, at once. PeerError: another rank failed, stopped early, or gave other arguments. While iterating SourceError
        and its kinds for what cannot be read, `LoadError` where `into` was given.

    Example:
        >>> with headrace.stream("models/minilm", dtype="bfloat16") as tensors:
        ...     for name, tensor in tensors:
        ...         model.get_parameter(name).data.copy_(tensor)
    """
    resolved = _resolved(url, options, overrides)
    _check_choice("order", order, ("ready", "file"))
    _check_choice("ownership", ownership, ("leased", "copied", "borrowed"))
    tracer = Tracer(trace) if trace is not None else None
    with _gathered(group, resolved) as peers, ExitStack() as opened:
        checkpoint = open_location(url, resolved, credentials, verify=verify, metadata=metadata)
        if checkpoint is not url:
            opened.callback(checkpoint.close)
        requests = requests_of(checkpoint, names, slices, _one_rule(dtype, target_dtypes), resolved, device)
        _gather_more(peers, requests)
        for request in requests:
            opened.callback(request.let_go)
        ending = ExitStack()  # what is done when the load is over
        load = open_load(
            requests,
            peers,
            into=into,
            rename=rename,
            ownership=ownership,
            order=order,
            progress=_reporting(progress, ending),
            on_stop=ending.close,
            opened_here=checkpoint is not url,
            tracer=tracer,
        )
        if tracer is not None:
            ending.callback(tracer.write)
        ending.push(opened.pop_all())
        return TensorStream(load, placeholders_of(requests))


def load(url: Location, **arguments: Unpack[LoadArguments]) -> dict[str, torch.Tensor]:
    """Load tensors into a dict.

    Args:
        url: as for `open`.
        **arguments: as for `stream`. `memory_limit` bounds what is read ahead; by default nothing does, since all of it is kept.

    Returns:
        {name: tensor}, in file order; where there are several targets, those of one after those of the other.

    Raises:
        As `stream`.

    Example:
        >>> weights = headrace.load("models/minilm", names="embeddings.*")
    """
    given: dict[str, Any] = {"order": "file", **arguments}
    options = _resolved(url, given.pop("options", None), _option_overrides(given))
    if options.memory_limit is None:
        limits = options.memory_limits
        options = options.merged({"memory_limit": -1 if limits is None else {"*": -1} | dict(limits)})
    with stream(url, options=options, **given) as tensors, gc_paused.held():
        return dict(tensors)


def read(checkpoint: Checkpoint, name: str, index: Index | None = None) -> torch.Tensor:
    """Read one tensor of an open checkpoint, or the part of it that an index selects, into memory of its own.

    For callers that take tensors one at a time. What is one contiguous read of up to 4 MiB is done at once, on the calling
    thread, for about 30 microseconds over the bytes; the rest is a `load`, whose plan and engine take ten times that. For more
    than a few tensors `load` and `stream` are quicker. Thread-safe.

    Args:
        checkpoint: from `open`.
        name: the tensor's full name.
        index: as in the `slices` of `stream`. None: the whole tensor.

    Returns:
        The tensor, which is yours.

    Raises:
        TensorNotFoundError: the checkpoint has no such tensor.
        OptionError: it is no open checkpoint; or the index does not fit the tensor, and its cause is the IndexError, TypeError or
            ValueError.
        SourceError: it cannot be read. SourceChangedError: it is no longer what was opened.

    Example:
        >>> with headrace.open("models/minilm") as checkpoint:
        ...     bias = headrace.read(checkpoint, "pooler.dense.bias")
    """
    if not isinstance(checkpoint, Checkpoint):
        raise OptionError(f"checkpoint is what headrace.open returns, not {type(checkpoint).__name__}", option="checkpoint")
    info = checkpoint[name]
    tensor = read_at_once(checkpoint, info, index)
    if tensor is not None:
        return tensor
    slices = None if index is None else {name: index}
    # The limit is what keeps a small part in a small piece of address space.
    return load(checkpoint, names=[name], slices=slices, memory_limit=info.nbytes)[name]


def release_staging() -> None:
    """Give back the page-locked memory that loads with `keep_staging="on"` have left in this process for the next ones."""
    from headrace._pinned import release_kept

    release_kept()


def hold(
    url: Location,
    *,
    device: Target | None = None,
    names: Names = None,
    in_place: Demand = "auto",
    pin: Demand = "auto",
    verify: Verify = None,
    metadata: str | os.PathLike[str] | None = None,
    credentials: object = None,
    options: Options | None = None,
    **overrides: Unpack[UsualOptionArguments],
) -> Held:
    """Keep a checkpoint in host memory, for loads again and again: reloads of weights, several models in one process.

    On tmpfs, and in memfds, it is held where it lies, and nothing is read. Elsewhere it is read once, into private memory.

    Args:
        url: as for `open`; also an open `Checkpoint`, which has to stay open as long as it is held in place.
        device: a GPU that it is to be loaded to: the memory is page-locked for it, and loads to it are copies from there. None:
            it is for loads to host memory; loads to a device then take the way through the ring.
        names: which tensors, as for `stream`. None: all.
        in_place: "auto": where it lies if that is tmpfs; "require": raise where it is not; "off": always in private memory. What
            lies on tmpfs must not be changed while it is held, and is page-locked once however often it is held.
        pin: page-lock it for `device`: "auto" (one warning where that fails), "require" (raise) or "off".
        verify, metadata, credentials: as for `open`. What is verified is verified once, as it is read.
        options: tuning, also for the loads from it; see `Options`. Every field may also be given by name.

    Returns:
        A checkpoint that `stream`, `load`, `read` and `plan` take, and a context manager. Closing it while a load from it runs
        raises `StreamError`; leaving its block by an error does not, and the memory then goes with that load.

    Raises:
        As `open` and `stream`. OptionError: in_place="require", and it does not lie on tmpfs. PinningError: pin="require", and it
        cannot be page-locked. DeviceMemoryError: there is no memory for it.

    Example:
        >>> with headrace.hold("models/minilm") as held:
        ...     weights = headrace.load(held)
    """
    resolved = _resolved(url, options, overrides)
    for option, value in (("in_place", in_place), ("pin", pin)):
        _check_choice(option, value, ("off", "auto", "require"))
    checkpoint = open_location(url, resolved, credentials, verify=verify, metadata=metadata)
    opened_here = checkpoint is not url
    try:
        return hold_checkpoint(
            checkpoint, resolved, opened_here=opened_here, device=device, names=names, in_place=in_place, pin=pin
        )
    except BaseException:
        if opened_here:
            checkpoint.close()
        raise


def pull(
    url: str | os.PathLike[str] | Folder,
    dst: str | os.PathLike[str],
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    move: bool = False,
    credentials: object = None,
    progress: Callable[[PullProgress], None] | None = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> PullReport:
    """Copy files from any source to a local folder, /dev/shm for example: in parallel, resumable, each file whole or not there.

    Args:
        url: a folder, or one file, as for `open`; an index stands for itself and the shards that it names.
        dst: the folder to fill; made where it does not exist. Two pulls to one folder do the work once.
        include, exclude: patterns of paths below `url`; None: everything, and nothing.
        move: remove the files from a local source, after every byte was compared.
        credentials: as for `open`.
        progress: called with a `PullProgress`, on the calling thread.
        options: tuning; see `Options`. Every field may also be given by name.

    Returns:
        What was copied, resumed and skipped.

    Raises:
        As `open`; DestinationError, NoSpaceError: `dst` cannot be written to, or has no room. FormatError: a name that leads out
        of `dst`. IntegrityError: a copy is not what was read.

    Example:
        >>> headrace.pull("s3://bucket/minilm", "/dev/shm/minilm", exclude="*.bin")
    """
    resolved = _resolved(url, options, overrides)
    folder, only = with_shards(*open_place(url, resolved, credentials))
    return pull_folder(
        folder,
        local_path(dst),
        include=include if only is None else escape(only),
        exclude=exclude,
        concurrency=resolved.concurrency,
        move=move,
        progress=progress,
    )


def verify(
    url: str | os.PathLike[str] | Folder,
    *,
    manifest: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    write: bool = False,
    out: str | os.PathLike[str] | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
    credentials: object = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> VerifyReport:
    """Check every file of a checkpoint against its digests, or write a manifest of them. Reads everything.

    Args:
        url: a folder, or one file, as for `open`. Hidden files are left out.
        manifest: a path, a URL or the JSON of a manifest. None: the headrace.manifest.json in the folder, or where there is
            none the digests that the store knows.
        write: write a manifest instead, of the files as they are. It is put into the folder, which has to be a local one.
        out: write it to this local path, whatever the folder is.
        progress: called with a `VerifyProgress`, on the calling thread.
        credentials: as for `open`.
        options: tuning; see `Options`. Every field may also be given by name.

    Returns:
        What was found, file by file. Damage does not raise: look at `report.ok` and `report.failed`.

    Raises:
        As `open`; OptionError: there is nothing to check against, or a manifest would have to be written into a store.
        DestinationError: the manifest cannot be written.

    Example:
        >>> headrace.verify("models/minilm", write=True).written
        'models/minilm/headrace.manifest.json'
        >>> headrace.verify("models/minilm").ok
        True
    """
    resolved = _resolved(url, options, overrides)
    place, only = with_shards(*open_place(url, resolved, credentials))
    if (write or out is not None) and manifest is not None:
        making = "write=True" if write else "out="
        raise OptionError(f"{making} makes a manifest, so manifest= cannot be given; leave one of the two out", option="manifest")
    return verify_folder(
        place,
        only,
        manifest=load_manifest(manifest, resolved, credentials) if manifest is not None else None,
        out=_manifest_path(place, only, out) if write or out is not None else None,
        concurrency=resolved.concurrency,
        progress=progress,
    )


def folder(
    url: str | os.PathLike[str] | Folder,
    *,
    credentials: object = None,
    options: Options | None = None,
    **overrides: Unpack[OptionArguments],
) -> Folder:
    """Find the folder, bucket prefix or repository that a url names, to list it and to open its files. Nothing is asked yet.

    Args:
        url: a folder, or a local or safetensors file, whose folder is meant.
        credentials: as for `open`.
        options: tuning; see `Options`. Every field may also be given by name.

    Returns:
        `names()` lists the files directly inside, `walk()` those below as well where the store can tell, `open(name)` opens one.
        Any of them raises SourceNotFoundError, SourcePermissionError or SourceError where the store says so.

    Raises:
        OptionError: there is no source for such a url.

    Example:
        >>> headrace.folder("models/minilm").names()
        ['config.json', 'model.safetensors']
    """
    return open_place(url, _resolved(url, options, overrides), credentials)[0]


class TensorStream(Iterator[tuple[str, Any]]):
    """(name, tensor) pairs of one load. A context manager, and an iterator that runs once.

    Reading starts with the `with` block or the first tensor that is asked for. The stream closes at its end, at the end
    of the block, on an error, when `close` is called and when it is abandoned.

    Attributes:
        plan: what is being done.
        shared: {name: `SharedTensor`} of the tensors that go to "shared-cpu", known before they are there.
    """

    def __init__(self, engine: Load, shared: Mapping[str, SharedTensor]) -> None:
        self._engine = engine
        self._tensors = engine.run()
        self._iterated = False
        self.plan, self.shared = engine.plan, shared

    @property
    def stats(self) -> Snapshot:
        """What the load has done so far and where its time went; final once the stream is closed."""
        return self._engine.progress.snapshot()

    def __repr__(self) -> str:
        stats = self.stats
        return f"<TensorStream: {stats.tensors:,} of {stats.total_tensors:,} tensors handed out>"

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        if self._iterated:
            raise StreamError("a stream runs once; open another one to iterate again")
        self._iterated = True
        return self._pairs()

    def _pairs(self) -> Iterator[tuple[str, Any]]:
        # A generator is quicker than __next__, and this one keeps the stream alive in `for ... in headrace.stream(...)`.
        # With `yield from`, leaving a loop would close what `next` may go on with; a variable would keep a tensor alive.
        while True:
            try:
                yield next(self._tensors)
            except StopIteration:
                break
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


# -- arguments -----------------------------------------------------------------------------------------------------------------


def _reporting(progress: Callable[[Snapshot], None] | bool | None, ending: ExitStack) -> Callable[[Snapshot], None] | None:
    """Who is told how a load goes on; `ending` is when it is over."""
    if callable(progress):
        return progress
    return ending.enter_context(closing(open_bar())) if progress else None


def _manifest_path(place: Folder, only: str | None, out: str | os.PathLike[str] | None) -> Path:
    """Where a manifest is to be written."""
    if out is not None:
        path = local_path(out)
        return path / MANIFEST_NAME if path.is_dir() else path
    if "://" in place.url:
        raise OptionError(f"a manifest is never written into a store; give out=PATH for the one of {place.url}", option="out")
    if only is not None or hasattr(place, "index"):
        raise OptionError("a folder's manifest is of all its files; verify the folder, or give out=PATH", option="out")
    return Path(place.url, MANIFEST_NAME)


@contextmanager
def _gathered(group: object, options: Options) -> Iterator[list[Peers | None]]:
    """The ranks that load together, for the first phase; None where there is one. They are told if what follows fails."""
    if group is None or group is False:
        yield [None]
        return
    from headrace._peers import Peers

    first = Peers(group, options.peer_timeout_s)
    if first.size == 1:
        yield [None]
        return
    given: list[Peers | None] = [first]
    try:
        yield given
    except BaseException as exc:
        for each in given:  # in the order in which the others come to them
            if each is not None:
                each.give_up(exc)
        raise


def _gather_more(peers: list[Peers | None], requests: Sequence[Request]) -> None:
    """Ranks for each phase. They have as many, of the same kinds."""
    if (first := peers[0]) is None:
        peers += [None] * (len(requests) - 1)
        return
    agree_on_places(requests, first)
    peers += [first.next_phase() for _ in requests[1:]]


def _resolved(url: Location, options: Options | None, overrides: Mapping[str, Any]) -> Options:
    """The options of one call. An open checkpoint has asked the environment already."""
    if not isinstance(url, Checkpoint):
        return resolve(options, overrides)
    resolved = (url.options if options is None else _over(url.options, options)).merged(overrides)
    for name in _OF_OPENING:
        given, opened = getattr(resolved, name), getattr(url.options, name)
        if given != opened:
            raise OptionError(
                f"{name}={given!r}: files are opened with it, and {url.url} was opened with {opened!r}; give it to headrace.open",
                option=name,
            )
    return resolved


_OF_OPENING = ("direct_io", "attempts", "deadline_s")  # what a source is made with


def _over(base: Options, options: Options) -> Options:
    return base.merged({name: getattr(options, name) for name in Options.__dataclass_fields__})


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
