"""Holding a checkpoint in host memory: where it lies, or in private memory that one load fills.

That load is an ordinary one, with its readers, routes, retries and checks: each stretch of a file that is to be held is a tensor
of bytes to it, and the memory is what the caller gives. What is held afterwards, and by whom it is used, is `_held`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace._checkpoint import Checkpoint
from headrace._device_names import SHARED, name_of_device, open_device
from headrace._header import Header
from headrace._held import Held, Image, Memory, Ranges
from headrace._inplace import InPlace, NotInPlaceError, check_on_tmpfs
from headrace._location import source_of
from headrace._options import Options
from headrace._request import Request
from headrace._selection import Names, select
from headrace.devices.base import Device
from headrace.errors import LoadError, OptionError, PinningError
from headrace.sources.base import ByteSource

log = logging.getLogger("headrace")

_PLAIN = {"mmap": "off", "gds": "off", "in_place": "off", "pin": "off"}  # of the load that fills the memory


def hold_checkpoint(
    checkpoint: Checkpoint, options: Options, *, opened_here: bool, device: object, names: Names, in_place: str, pin: str
) -> Held:
    """Hold what is wanted of an open checkpoint. See `headrace.hold`.

    Args:
        opened_here: whether the checkpoint's files are closed with what is held. After an error the caller closes them.
    """
    target = _target(device)
    chosen = select(names, checkpoint.headers, checkpoint.rows, checkpoint.where)
    wanted = {i: s for i, (s, rows) in enumerate(zip(checkpoint.sources, chosen, strict=True)) if rows is None or rows}
    owned: Sequence[ByteSource] = checkpoint.sources if opened_here else ()
    if in_place != "off":
        try:
            for source in wanted.values():
                check_on_tmpfs(source)
        except NotInPlaceError as exc:
            if in_place == "require":
                raise OptionError(f"in_place='require': {exc}", option="in_place") from exc
        else:
            memory, how = _lock_files(wanted, target, pin, owned)
            return _held(Held(checkpoint, chosen, checkpoint.sources, memory, in_place=True, how=how), options)
    image = Image(checkpoint.headers, chosen)
    _fill(image, checkpoint, options)
    memory, sources, how = _lock_image(image, checkpoint, target, pin)
    for source in owned:
        source.close()
    return _held(Held(checkpoint, chosen, sources, memory, in_place=False, how=how), options)


def _held(held: Held, options: Options) -> Held:
    held.options = options
    return held


def _target(device: object) -> Device | None:
    if device is None:
        return None
    name = name_of_device(device)
    if name == SHARED:
        raise OptionError("hold: memory is page-locked for one device; leave device out, or name a GPU", option="device")
    return None if name == "cpu" else open_device(device)


def _lock_files(
    wanted: Mapping[int, ByteSource], target: Device | None, pin: str, owned: Sequence[ByteSource]
) -> tuple[Memory, str]:
    """What lies on tmpfs, page-locked there if it is to be and can be; and that in words."""
    how, locked = "held in place on tmpfs", None
    if target is not None and pin != "off" and wanted:
        try:
            locked = InPlace(target, wanted)
            how += f" and page-locked for {target.name}"
        except NotInPlaceError as exc:
            how += _unpinned(target, pin, exc)

    def release() -> None:
        if locked is not None:
            locked.close()
        for source in owned:
            source.close()

    return Memory(release, views=locked.views if locked is not None else None, device=target), how


def _lock_image(
    image: Image, checkpoint: Checkpoint, target: Device | None, pin: str
) -> tuple[Memory, Sequence[ByteSource], str]:
    """What was read, page-locked if it is to be and can be; sources that read it, and that in words."""
    how, views = "held in memory", dict[int, memoryview]()
    if target is not None and pin != "off":
        try:
            image.pin(target)
            views = dict(enumerate(image.views))
            how += f" that is page-locked for {target.name}"
        except PinningError as exc:
            how += _unpinned(target, pin, exc)
    sources = [source_of(view, source.url) for view, source in zip(image.views, checkpoint.sources, strict=True)]

    def release() -> None:
        image.unpin()
        for source in sources:
            source.close()

    return Memory(release, views=views, device=target, nbytes=image.nbytes), sources, how


def _unpinned(target: Device, pin: str, error: Exception) -> str:
    if pin == "require":
        raise PinningError(f"pin='require': {error}", device=target.name) from error
    text = "held memory is not page-locked for %s, and loads from it take the way through the ring: %s"
    log.warning(text, target.name, str(error))  # a record may be kept for long, and the error has frames and what is in them
    return f", not page-locked: {error}"


def _fill(image: Image, checkpoint: Checkpoint, options: Options) -> None:
    """Read every range, to its place."""
    import torch

    headers = [_as_bytes(i, header, image.ranges[i]) for i, header in enumerate(checkpoint.headers)]
    ranges = Checkpoint(checkpoint.url, checkpoint.sources, headers, [None] * len(headers), options.merged(_PLAIN))
    places = {
        name: torch.frombuffer(image.views[i][start:end], dtype=torch.uint8)
        for i, header in enumerate(headers)
        for name, start, end in zip(header.names, header.starts, header.ends, strict=True)
    }
    load = Request(ranges, None, None, None, ranges.options).engine(
        into=places,
        rename=None,
        ownership="leased",
        order="ready",
        progress=None,
        on_stop=_nothing,
        opened_here=True,
    )
    try:
        for _ in load.run():
            pass
    except LoadError as exc:  # no tensors of anybody's were written in part
        raise exc.__cause__ or exc from None


def _as_bytes(shard: int, header: Header, ranges: Ranges) -> Header:
    """The header of a file whose tensors are the ranges."""
    return replace(
        header,
        metadata=None,
        names=[f"{shard}:{start}" for start, _ in ranges],
        dtypes=["U8"] * len(ranges),
        shapes=[(end - start,) for start, end in ranges],
        starts=[start for start, _ in ranges],
        ends=[end for _, end in ranges],
        aligned=True,
    )


def _nothing() -> None:
    """There is nothing to close behind the load."""
