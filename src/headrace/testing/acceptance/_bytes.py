"""Loads to a device, in every mode, against the bytes in the file: the same answers on a GPU and on the simulated one.

The probe "load bytes".
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.testing.acceptance._runtime import Runtime

Answers = dict[str, object]
_SHM = Path("/dev/shm")


def load_bytes(runtime: Runtime, folder: Path) -> Answers:
    """Loads: whether what comes to the device are the bytes of the file."""
    import torch

    with _device(runtime) as (device, shrink), _files(folder) as (path, on_tmpfs, expected):
        check = _Check(device, path, expected)
        answers = Answers(
            {
                "leased": check.kept(),
                "copied": check.kept(ownership="copied"),
                "borrowed": check.borrowed(),
                "in file order, one reader": check.kept(order="file", concurrency=1, memory_limit=0),
                "not page-locked": check.kept(pin="off"),
                "into given tensors": check.given(),
                "cast on the way": check.kept(torch.bfloat16, dtype=check.floats("bfloat16")),
                "cast on the device": check.kept(torch.bfloat16, dtype=check.floats("bfloat16"), cast_at="device"),
                "widened": check.kept(torch.float64, dtype=check.floats("float64")),
                "held": check.held(),
                "abandoned, then loaded": check.abandoned(),
            }
        )
        if on_tmpfs is not None:
            answers["in place on tmpfs"] = _Check(device, on_tmpfs, expected).kept(in_place="require")
        shrink()
        answers["no room on the device"] = check.kept()
    return answers


class _Check:
    """One checkpoint on one device. Each method answers "equal", or what else came."""

    def __init__(self, device: Any, path: Path, expected: Mapping[str, Any]) -> None:
        self.device, self.path, self.expected = device, path, expected

    def kept(self, to: Any = None, **arguments: Any) -> str:
        import headrace

        return self._answer(lambda: headrace.load(self.path, device=self.device, **arguments), to)

    def floats(self, dtype: str) -> dict[str, str]:
        """By name, since beside integers a dtype for all would leave them as they are."""
        return {name: dtype for name, tensor in self.expected.items() if tensor.is_floating_point()}

    def borrowed(self) -> str:
        import headrace

        def go() -> dict[str, Any]:
            with headrace.stream(self.path, device=self.device, ownership="borrowed") as tensors:
                return {name: tensor.clone() for name, tensor in tensors}

        return self._answer(go)

    def given(self) -> str:
        import headrace

        def go() -> dict[str, Any]:
            given = {name: self._empty(tensor) for name, tensor in self.expected.items()}
            headrace.load(self.path, device=self.device, into=given)
            return given

        return self._answer(go)

    def held(self) -> str:
        import headrace

        def go() -> dict[str, Any]:
            with headrace.hold(self.path, device=self.device, pin="require") as checkpoint:
                headrace.load(checkpoint, device=self.device)
                return headrace.load(checkpoint, device=self.device)

        return self._answer(go)

    def abandoned(self) -> str:
        import headrace

        with headrace.stream(self.path, device=self.device) as tensors:
            next(tensors)
        return self.kept()

    def _empty(self, tensor: Any) -> Any:
        import torch

        zeros = torch.zeros_like(tensor)
        return zeros.to(self.device) if isinstance(self.device, str) else self.device.tensor(zeros)

    def _answer(self, go: Callable[[], dict[str, Any]], to: Any = None) -> str:
        from headrace.errors import HeadraceError

        try:
            found = {name: tensor.cpu() for name, tensor in go().items()}
        except (HeadraceError, RuntimeError) as exc:
            return f"{type(exc).__name__}: {exc}"
        wanted = {
            name: tensor.to(to) if to is not None and tensor.is_floating_point() else tensor
            for name, tensor in self.expected.items()
        }
        wrong = [name for name in wanted if name not in found or not _same(found[name], wanted[name])]
        return f"{len(wrong)} of {len(wanted)} differ, the first is {wrong[0]}" if wrong else "equal"


def _same(one: Any, other: Any) -> bool:
    import torch

    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


@contextlib.contextmanager
def _device(runtime: Runtime) -> Iterator[tuple[Any, Callable[[], None]]]:
    """(device for headrace, what takes its free memory away)"""
    if not runtime.is_simulated:
        import torch

        def shrink() -> None:
            gpu = torch.get_device_module("cuda")
            gpu.empty_cache()
            gpu.set_per_process_memory_fraction(1e-6)

        yield "cuda", shrink
        return
    from headrace.testing.devices import SimulatedDevice
    from headrace.testing.simulated import SimulatedRuntime

    with SimulatedRuntime() as simulated:
        device = SimulatedDevice(simulated)

        def shrink() -> None:
            device.allocator.empty_cache()
            simulated.device_memory(1 << 20)

        yield device, shrink
        if violations := simulated.violations():
            raise RuntimeError(violations[0])


@contextlib.contextmanager
def _files(folder: Path) -> Iterator[tuple[Path, Path | None, Mapping[str, Any]]]:
    """(a checkpoint, the same on tmpfs if there is one, its tensors)"""
    data, expected = _made()
    with tempfile.TemporaryDirectory(dir=folder) as disk, contextlib.ExitStack() as also:
        path = Path(disk, "m.safetensors")
        path.write_bytes(data)
        on_tmpfs = None
        if os.access(_SHM, os.W_OK):
            on_tmpfs = Path(also.enter_context(tempfile.TemporaryDirectory(dir=_SHM)), "m.safetensors")
            on_tmpfs.write_bytes(data)
        yield path, on_tmpfs, expected


def _made() -> tuple[bytes, dict[str, Any]]:
    """A file whose data begins at an odd place, with tensors of one to 20 million elements; no values that casts cannot keep."""
    import torch

    random = torch.Generator().manual_seed(1)
    kinds = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I32": torch.int32, "U8": torch.uint8}
    tensors: dict[str, tuple[str, Any]] = {}
    for i in range(40):
        name, kind = list(kinds.items())[i % len(kinds)]
        shape = (20_000_003,) if i == 20 else (1 + 7919 * i % 1_000_003, 1 + i % 3)
        tensors[f"t{i:02}"] = name, (torch.rand(shape, generator=random) * 200).to(kind)
    at, header, parts = 0, dict[str, Any](), []
    for name, (dtype, tensor) in tensors.items():
        part = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + len(part)]}
        at += len(part)
        parts.append(part)
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)
    return len(text).to_bytes(8, "little") + text + b"".join(parts), {name: tensor for name, (_, tensor) in tensors.items()}
