"""The public verbs about tensors. Each assembles the parts for one call: opens the checkpoint, plans, and runs the engine.

torch is imported when tensors are about to be made and not before: `open` and `plan` work without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from headrace._arguments import Group, LoadArguments, Target, Targets
from headrace._at_once import read_at_once
from headrace._bar import open_bar
from headrace._checkpoint import Checkpoint, open_files
from headrace._held import Held
from headrace._hold import hold_checkpoint
from headrace._interpreter import gc_paused
from headrace._location import (
    Location,
    Verify,
    is_remote_url,
    local_path,
    note_verified,
    open_location,
    open_place,
    resolved_options,
    verification_for,
)
from headrace._metadata import Metadata
from headrace._options import Demand, OptionArguments, Options, UsualOptionArguments, resolve
from headrace._phases import (
    gather_more,
    gathered,
    join_plans,
    open_load,
    placeholders_of,
    requests_of,
)
from headrace._plan import Plan
from headrace._progress import Snapshot
from headrace._request import Into, Order, Ownership, Rename
from headrace._selection import DTypeRule, Names
from headrace._sharded import PATTERN, files_of_rank
from headrace._slices import Index
from headrace._stream import TensorStream
from headrace._trace import Tracer
from headrace.errors import OptionError
from headrace.sources.base import Folder

if TYPE_CHECKING:
    import torch


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
    return open_location(url, resolved_options(url, options, overrides), credentials, verify=verify, metadata=metadata)


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
    resolved = resolved_options(url, options, overrides)
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
    resolved = resolved_options(url, options, overrides)
    _check_choice("order", order, ("ready", "file"))
    _check_choice("ownership", ownership, ("leased", "copied", "borrowed"))
    tracer = Tracer(trace) if trace is not None else None
    with gathered(group, resolved) as peers, ExitStack() as opened:
        checkpoint = open_location(url, resolved, credentials, verify=verify, metadata=metadata)
        if checkpoint is not url:
            opened.callback(checkpoint.close)
        requests = requests_of(checkpoint, names, slices, _one_rule(dtype, target_dtypes), resolved, device)
        gather_more(peers, requests)
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
    options = resolved_options(url, given.pop("options", None), _option_overrides(given))
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
    resolved = resolved_options(url, options, overrides)
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


# -- arguments -----------------------------------------------------------------------------------------------------------------


def _reporting(progress: Callable[[Snapshot], None] | bool | None, ending: ExitStack) -> Callable[[Snapshot], None] | None:
    """Who is told how a load goes on; `ending` is when it is over."""
    if callable(progress):
        return progress
    return ending.enter_context(closing(open_bar())) if progress else None


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
