"""The probe of the two cliffs and of the floor: page-locked against pageable memory, a cast on the way against a copy that
converts, and all of them beside bare copies of the same length.

One F32 file in the page cache, made in the folder and removed. Each way runs once uncounted; of three runs the quickest counts,
in bytes of the file over seconds until the device has everything.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from headrace.testing.acceptance import _runtime as gpu
from headrace.testing.acceptance._loads import put_in_state, write
from headrace.testing.acceptance._runtime import Runtime

_COPY_NBYTES, _SOURCE_NBYTES = 16 << 20, 256 << 20
_RUNS = 3


def rates(_: Runtime, folder: Path) -> dict[str, object]:
    """Rates of cached loads beside bare copies: GB/s of the file, and how much of the first that is."""
    from headrace.devices.cuda import open_device

    return measured(folder, open_device(None), "cuda")


def measured(folder: Path, device: Any, converts_on: str | None) -> dict[str, object]:
    """Every way.

    Args:
        converts_on: torch's name of the device, for its own copies that convert; None where torch does not know it.
    """
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".safetensors") as file, ExitStack() as opened:
        nbytes = sum(map(len, write(file, dtype="F32").values()))
        put_in_state(file.fileno(), "cached")
        ways: dict[str, Callable[[], object]] = {
            "bare copies, page-locked": opened.enter_context(_bare(device, nbytes, pinned=True)),
            "bare copies, pageable": opened.enter_context(_bare(device, nbytes, pinned=False)),
            "headrace": lambda: _load(file.name, device, pin="require"),
            "headrace, pin='off'": lambda: _load(file.name, device, pin="off"),
            "headrace, to BF16 on the host": lambda: _load(file.name, device, dtype="bfloat16", cast_at="host"),
            "headrace, to BF16 on the device": lambda: _load(file.name, device, dtype="bfloat16", cast_at="device"),
        }
        if converts_on is not None:
            ways |= _converting(nbytes, converts_on)
        found = {name: nbytes / _seconds(way) / 1e9 for name, way in ways.items()}
    floor = found["bare copies, page-locked"]
    return {name: f"{rate:.2f} GB/s, {rate / floor:.2f}" for name, rate in found.items()}


def _seconds(way: Callable[[], object]) -> float:
    took = []
    for _ in range(1 + _RUNS):
        start = time.perf_counter()
        way()
        took.append(time.perf_counter() - start)
    return min(took[1:])


def _load(path: str, device: Any, **arguments: Any) -> None:
    import headrace

    with headrace.stream(path, device=device, **arguments) as tensors:
        for item in tensors:
            del item
    device.drain()


@contextmanager
def _bare(device: Any, nbytes: int, *, pinned: bool) -> Iterator[Callable[[], None]]:
    """Copies one behind the other, out of memory that was touched before."""
    device.enter_thread()
    with gpu.mapped(_SOURCE_NBYTES) as address:
        gpu.touch(address, _SOURCE_NBYTES)
        if pinned:
            device.pin(address, _SOURCE_NBYTES)
        target, event = device.allocate(_SOURCE_NBYTES), device.new_event()

        def go() -> None:
            for at in range(0, nbytes, _COPY_NBYTES):
                place = at % _SOURCE_NBYTES
                device.copy_async(target.address + place, address + place, min(_COPY_NBYTES, nbytes - at), pinned=pinned)
            device.record(event)
            device.synchronize(event)

        try:
            yield go
        finally:
            device.destroy([event])
            if pinned:
                device.unpin(address)


def _converting(nbytes: int, device: str) -> dict[str, Callable[[], object]]:
    """torch's `copy_` of page-locked F32 into BF16 on the device; nothing is read."""
    import torch

    source = torch.ones(nbytes // 4, pin_memory=True)
    target = torch.empty(nbytes // 4, dtype=torch.bfloat16, device=device)

    def go(*, non_blocking: bool) -> None:
        target.copy_(source, non_blocking=non_blocking)
        torch.get_device_module(device).synchronize()

    return {
        "torch's converting copy_": lambda: go(non_blocking=False),
        "torch's converting copy_, non-blocking": lambda: go(non_blocking=True),
    }
