"""The probe of loads through headrace: by the ring in host memory and by direct storage, cold and cached; bytes, rates, memory.

The file is random bytes, made in the folder and removed. A load by direct storage that is refused says why.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace.testing.acceptance._runtime import Runtime

NBYTES, TENSORS = 1 << 30, 8


def loads(_: Runtime, folder: Path) -> dict[str, object]:
    """Loads through headrace: rate, route as the library's statistics tell it, and the most memory; which route to use."""
    return measured(folder, "cuda")


def measured(folder: Path, device: Any) -> dict[str, object]:
    """One load per route and state of the page cache."""
    import headrace

    answers: dict[str, object] = {}
    rates: dict[tuple[str, str], float] = {}
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".safetensors") as file:
        expected = write(file)
        headrace.load(file.name, device=device, names="t0")  # starts the driver
        for state in ("cold", "cached"):
            for gds in ("off", "require"):
                put_in_state(file.fileno(), state)
                start = time.perf_counter()
                try:
                    with headrace.stream(file.name, device=device, gds=gds) as stream:
                        kept = dict(stream)
                        _synchronize(device)
                        took = time.perf_counter() - start
                except headrace.HeadraceError as exc:
                    answers[f"{state}, gds={gds}"] = f"{type(exc).__name__}: {exc}"
                    continue
                rates[state, gds] = NBYTES / took / 1e9
                right = all(_is_equal(kept[name], data) for name, data in expected.items())
                answers[f"{state}, gds={gds}"] = f"{'equal' if right else 'WRONG BYTES'}, {rates[state, gds]:.2f} GB/s"
                answers[f"{state}, gds={gds}, route"] = stream.stats.gds or "staged"
                memory = f"{stream.stats.peak_nbytes >> 20} MiB host, {stream.stats.device_peak_nbytes >> 20} MiB device"
                answers[f"{state}, gds={gds}, most memory"] = memory
                del kept
    for state in ("cold", "cached"):
        if (state, "require") in rates and (state, "off") in rates:
            answers[f"{state}: use"] = "gds" if rates[state, "require"] > rates[state, "off"] else "the ring"
    return answers


def write(file: Any, dtype: str = "U8") -> dict[str, bytes]:
    """Fill the file; what the tensors hold."""
    each, width = NBYTES // TENSORS, {"U8": 1, "F32": 4}[dtype]
    names = [f"t{i}" for i in range(TENSORS)]
    header = {
        name: {"dtype": dtype, "shape": [each // width], "data_offsets": [i * each, (i + 1) * each]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    expected = {}
    for name in names:
        expected[name] = os.urandom(each)
        file.write(expected[name])
    file.flush()
    os.fsync(file.fileno())
    return expected


def put_in_state(descriptor: int, state: str) -> None:
    """Have a file "cold" or "cached"."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    if state == "cached":
        for offset in range(0, os.fstat(descriptor).st_size, 1 << 24):
            os.pread(descriptor, 1 << 24, offset)


def _synchronize(device: Any) -> None:
    if isinstance(device, str):
        import torch

        torch.get_device_module(device).synchronize()


def _is_equal(tensor: Any, data: bytes) -> bool:
    return bool(bytes(tensor.cpu().numpy()) == data)
