"""Which tensors of a checkpoint a rank reads, and with whom: what the loaders of vLLM and SGLang have in common.

A filter works on names, so what it drops is never read. Ranks that load together give the same names; where they want different
experts, those are read by each for itself, after the rest.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import headrace
from headrace.errors import OptionError
from headrace.sources.base import ByteSource, Folder

if TYPE_CHECKING:
    import torch

INDEX: Final = "model.safetensors.index.json"
_UNSHARED: Final = ("group", "verify", "mmap")  # what a group cannot do is said by errors about these


def open_weights(
    place: str | Sequence[str],
    *,
    patterns: Sequence[str] | None,
    ignored: Sequence[str],
    index_from: str | None,
    metadata: str | None,
    verify: Any,
    options: headrace.Options,
) -> headrace.Checkpoint:
    """Open the checkpoint that a model's weights are in.

    Args:
        place: a folder, a url, or a list of files.
        patterns: globs of the only files that count; the index does not, then. None: those of the index, or all.
        ignored: globs of files that do not count, where they are not on this machine.
        index_from: a local folder whose index is used in place of the store's, which is not listed then.
        metadata, verify, options: as for `headrace.open`.

    Raises:
        As `headrace.open`; SourceNotFoundError where no file fits the patterns.
    """
    given: Any = place
    if patterns is not None and isinstance(place, str):
        given = _urls(place, patterns, options)
    elif isinstance(place, str) and "://" in place and (ignored or index_from is not None):
        folder = headrace.folder(f"{place.rstrip('/')}/", options=options)
        given = _Remaining(folder, ignored) if index_from is None else _IndexedHere(folder, headrace.folder(index_from))
    return headrace.open(given, metadata=metadata, verify=verify, options=options)


def _urls(place: str, patterns: Sequence[str], options: headrace.Options) -> list[str]:
    folder = headrace.folder(f"{place.rstrip('/')}/" if "://" in place else place, options=options)
    walk: Callable[[], list[str]] = (
        getattr(folder, "walk", folder.names) if any("/" in each for each in patterns) else folder.names
    )
    names = [name for name in walk() if name.endswith(".safetensors") and any(fnmatchcase(name, each) for each in patterns)]
    if not names:
        raise headrace.SourceNotFoundError(f"no *.safetensors file in {place} fits {', '.join(patterns)}", url=place)
    return [f"{place.rstrip('/')}/{name}" for name in names]


class _Remaining:
    """A folder without the files that do not count."""

    def __init__(self, folder: Folder, ignored: Sequence[str]) -> None:
        self.url, self._folder, self._ignored = folder.url, folder, ignored
        if hasattr(folder, "sha256"):
            self.sha256 = folder.sha256  # digests that the store has, for `verify`

    def names(self) -> list[str]:
        return [name for name in self._folder.names() if not any(fnmatchcase(name, each) for each in self._ignored)]

    def open(self, name: str) -> ByteSource:
        return self._folder.open(name)


class _IndexedHere(_Remaining):
    """A store's folder whose index lies on this machine: nothing is listed. A shard that does not fit the index is refused."""

    def __init__(self, folder: Folder, local: Folder) -> None:
        super().__init__(folder, ())
        self._local = local

    def names(self) -> list[str]:
        source = self._local.open(INDEX)
        text = bytearray(source.nbytes)
        try:
            source.read_into(0, memoryview(text))
        finally:
            source.close()
        try:
            shards = json.loads(text)["weight_map"].values()
        except (ValueError, KeyError, TypeError, AttributeError):
            shards = ()  # opening it says what is wrong
        return sorted({INDEX, *(shard for shard in shards if isinstance(shard, str))})

    def open(self, name: str) -> ByteSource:
        return self._local.open(name) if name == INDEX else self._folder.open(name)


def kept_names(
    checkpoint: headrace.Checkpoint, *, is_skipped: Callable[[str], bool], is_unneeded: Callable[[str], bool] | None
) -> set[str]:
    """The names that are read.

    Args:
        is_skipped: tells of a name that this rank has no use for it.
        is_unneeded: tells the same for a part of the model that is not run. It counts for a shard of which it is true of every
            tensor, where there are several, as some names cannot be told from those of other parts.
    """
    kept = {name for name in checkpoint if not is_skipped(name)}
    if is_unneeded is None or len(checkpoint.headers) < 2:
        return kept
    for header in checkpoint.headers:
        if all(map(is_unneeded, header.names)):
            kept.difference_update(header.names)
    return kept


def stream_weights(
    checkpoint: headrace.Checkpoint,
    names: Collection[str],
    *,
    own: Collection[str],
    device: str,
    places: Mapping[str, str],
    group: Any,
    is_demanded: bool,
    dtype: Any,
    log: logging.Logger,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the names from an open checkpoint, and close it.

    Args:
        own: those of them that other ranks do not want, as a whole.
        device: where they go, but for those that `places` has keys for; as of `headrace.stream`.
        group: of torch.distributed, whose ranks share the reading; None: this one reads for itself.
        is_demanded: whether it is an error, and no line in the log, where the group cannot share.
    """
    shared = set(names).difference(own) if group is not None else set()
    rest = set(names).difference(shared)
    try:
        if shared:
            yield from _drained(_shared(checkpoint, shared, device, places, group, is_demanded, dtype, log), log)
        if rest:
            yield from _drained(_stream(checkpoint, rest, device, places, None, dtype), log)
    finally:
        checkpoint.close()


def _shared(
    checkpoint: headrace.Checkpoint,
    names: set[str],
    device: str,
    places: Mapping[str, str],
    group: Any,
    is_demanded: bool,
    dtype: Any,
    log: logging.Logger,
) -> headrace.TensorStream:
    """A stream that the group shares. Whatever it cannot share is found out by all of its ranks alike."""
    try:
        return _stream(checkpoint, names, device, places, group, dtype)
    except OptionError as exc:
        if exc.option not in _UNSHARED or (is_demanded and device == "cpu"):
            raise
        if not is_demanded:
            log.info("ranks do not share their reading, each reads everything: %s", exc)
            return _stream(checkpoint, names, device, places, None, dtype)
        log.warning("ranks share their reading in host memory, from where weights are copied one by one: %s", exc)
        return _stream(checkpoint, names, "cpu", places, group, dtype)


def _stream(
    checkpoint: headrace.Checkpoint, names: set[str], device: str, places: Mapping[str, str], group: Any, dtype: Any
) -> headrace.TensorStream:
    chosen = None if len(names) == len(checkpoint) else lambda info: info.name in names
    where: Any = {**places, "*": device} if places else device
    return headrace.stream(checkpoint, names=chosen, device=where, group=group, dtype=dtype)


def _drained(stream: headrace.TensorStream, log: logging.Logger) -> Iterator[tuple[str, torch.Tensor]]:
    with stream as tensors:
        yield from tensors
    log.info("headrace: %s", summary(stream.stats))


def summary(stats: headrace.Snapshot) -> str:
    """What was loaded, for a log."""
    ranks = f" by rank {stats.rank} of {stats.ranks}" if stats.ranks > 1 else ""
    staging = f"; staging: {stats.pinned_how}" if stats.pinned_how else ""
    return (
        f"{stats.tensors:,} tensors to {stats.device}, {stats.read_nbytes:,} bytes read{ranks} in {stats.seconds:.2f} s, "
        f"{stats.rate / (1 << 30):.2f} GiB/s{staging}"
    )


def prefixed(prefix: str, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs, with a prefix to their names."""
    for name, tensor in pairs:
        yield prefix + name, tensor
