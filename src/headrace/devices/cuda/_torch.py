"""A GPU of torch's: its caching allocator, its streams and its kernels. The only place that names torch.cuda.

Not verified on a GPU. The rules are those of torch 2.13's sources and of public reports (docs/device.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache

import torch

from headrace.devices.base import Destination
from headrace.devices.cuda._device import CudaDevice
from headrace.devices.cuda._runtime import Runtime, mapped_library
from headrace.errors import DeviceError, DeviceMemoryError, PinningError


def open_device(index: int | None) -> CudaDevice:
    """The GPU with this number, or the current one. One object per GPU: its copy stream is made once.

    Raises:
        DeviceError: torch was built without CUDA and ROCm, there is no such GPU, or its runtime library cannot be found.
    """
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "there is no GPU that it can use" if built else "this build of torch is for the CPU only"
        raise DeviceError(
            f"cannot load to a GPU: {why} (torch {torch.__version__}); install a build for the GPU, or load to 'cpu'",
            device="cuda",
        )
    if index is None:
        index = torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise DeviceError(f"there is no cuda:{index}; torch sees {torch.cuda.device_count()} GPU(s)", device=f"cuda:{index}")
    return _open(index)


@cache
def _open(index: int) -> CudaDevice:
    name = f"cuda:{index}"
    torch.cuda.init()  # type: ignore[no-untyped-call]
    found = mapped_library()
    if found is None:
        raise DeviceError("torch has no CUDA or HIP runtime library mapped, which page-locking needs", device=name)
    path, prefix = found
    return CudaDevice(Runtime(path, prefix=prefix, device=name), TorchAllocator(index), index=index, name=name)


def visible_gpus() -> list[tuple[str, int]]:
    """(name, bytes of memory) of every GPU that torch can use."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [(properties.name, properties.total_memory) for properties in found]


class TorchAllocator:
    """See `Allocator`."""

    def __init__(self, index: int) -> None:
        self._index, self._device = index, torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.copy_stream = int(self._stream.cuda_stream)

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        try:
            with torch.cuda.stream(self._stream), torch.inference_mode(False):
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.cuda.OutOfMemoryError as exc:
            free = self.free_nbytes()
            raise DeviceMemoryError(
                f"{self._device} has no room for {nbytes:,} bytes ({free:,} are free)",
                device=str(self._device),
                requested=nbytes,
                free=free,
            ) from exc

    def allocate_pinned(self, nbytes: int) -> tuple[int, object]:
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as exc:
            raise PinningError(f"torch cannot allocate {nbytes:,} page-locked bytes: {exc}", device=str(self._device)) from exc
        return memory.data_ptr(), memory

    def free_nbytes(self) -> int:
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0] + cached)

    def current_stream(self) -> int:
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # asked for before each tensor: a tenth of the public way
        if raw is not None:
            return int(raw(self._index))
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream(self._device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def convert(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        del counts  # a kernel treats every element alike
        with torch.cuda.stream(self._stream), torch.no_grad():
            target.copy_(source)

    def fill(self, destination: Destination, tensor: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            destination.fill_from(tensor)

    def collective(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        del tensors  # their memory belongs to the copy stream
        return torch.cuda.stream(self._stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)
