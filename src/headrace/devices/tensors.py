"""What tensors of the format are in torch, and which tensors of a caller can take them: the same wherever they live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace._addresses import view_at
from headrace._dtypes import BY_TORCH_NAME, DTYPES
from headrace.errors import OptionError

_LARGEST_SIZE = (1 << 63) - 1  # of a dimension in torch; the format allows 64 bits, beside a 0

TORCH: dict[str, torch.dtype | None] = {
    name: getattr(torch, dtype.torch, None) if dtype.torch else None for name, dtype in DTYPES.items()
}


class TorchDestination:
    """A tensor of the caller's, checked, and kept alive while bytes are written through its address.

    Args:
        place: where the load goes, and whether a tensor lies there.
        on_host: whether the host reaches its bytes.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        name: str,
        dtype: str,
        shape: Sequence[int],
        *,
        place: tuple[str, Callable[[torch.Tensor], bool]],
        on_host: bool,
    ) -> None:
        _refuse_unwritable(tensor, name, *place)
        found = BY_TORCH_NAME.get(str(tensor.dtype).removeprefix("torch."))
        nbytes = DTYPES[dtype].bits * torch.Size(shape).numel() // 8
        expected, dimensions = torch_form(dtype, shape, nbytes)
        if tuple(tensor.shape) != tuple(dimensions):
            raise _refusal(name, f"its shape is {list(tensor.shape)}, the checkpoint's is {list(dimensions)}")
        if found is None or (
            tensor.dtype != expected and (found.bits < 8 or DTYPES[dtype].bits < 8 or DTYPES[dtype].torch is None)
        ):
            raise _refusal(name, f"{dtype} cannot be converted to its dtype, {tensor.dtype}")
        self._tensor = tensor
        self.dtype = dtype if tensor.dtype == expected else found.name
        self.memory: memoryview | None = None
        self.address = tensor.data_ptr() if tensor.is_contiguous() else None
        if self.address is not None and on_host:
            self.memory = view_at(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor)

    def fill_from(self, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            self._tensor.copy_(tensor)

    def finish(self) -> torch.Tensor:
        if self.address is not None:
            torch.autograd.graph.increment_version(self._tensor)
        return self._tensor


def torch_form(dtype: str, shape: Sequence[int], nbytes: int) -> tuple[torch.dtype, Sequence[int]]:
    """(torch dtype, torch shape) of a tensor of the format; raw uint8 of one dimension where torch cannot have it.

    torch packs two F4 elements into one of float4_e2m1fn_x2, so the last dimension halves, as in safetensors' own loader.
    """
    kind = TORCH[dtype]
    if kind is None or any(size > _LARGEST_SIZE for size in shape):
        return torch.uint8, (nbytes,)
    if DTYPES[dtype].bits == 8 * kind.itemsize:
        return kind, shape
    if shape and shape[-1] % 2 == 0:
        return kind, (*shape[:-1], shape[-1] // 2)
    return torch.uint8, (nbytes,)


def shared_memory(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Names of two of these tensors that have an element in common; None where no two have."""
    stretches = sorted((*_reach(tensor), name) for name, tensor in tensors.items() if tensor.numel())
    near: list[str] = []  # tensors whose stretches of memory overlap; their elements may still lie in turns
    reached = 0
    for start, end, name in stretches:
        if start >= reached:
            near = []
        near.append(name)
        reached = max(reached, end)
        if len(near) > 1 and (other := _common(tensors, near)) is not None:
            return other, name
    return None


def _refuse_unwritable(tensor: torch.Tensor, name: str, device: str, lies_there: Callable[[torch.Tensor], bool]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise _refusal(name, f"it is a {type(tensor).__name__}, not a tensor")
    if tensor.layout == torch.strided and not lies_there(tensor):
        raise _refusal(name, f"it is on {tensor.device}, and this load goes to {device}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise _refusal(name, "it is sparse or quantized")
    if tensor.is_conj() or tensor.is_neg():
        raise _refusal(name, "it is a conjugated or negated view; call resolve_conj() or resolve_neg() on it first")
    if _overlaps_itself(tensor):
        raise _refusal(name, "several of its elements share memory (it was expanded); call contiguous() on it first")


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    covered = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride < covered:
            return True
        covered = stride * size
    return False


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _common(tensors: Mapping[str, torch.Tensor], names: list[str]) -> str | None:
    """Which of the other tensors has an element in common with the last one."""
    last, last_nbytes = _runs(tensors[names[-1]])
    for name in names[:-1]:
        starts, nbytes = _runs(tensors[name])
        both = np.concatenate([starts, last])
        ends = both + np.repeat([nbytes, last_nbytes], [len(starts), len(last)])
        order = np.argsort(both)
        if (both[order][1:] < ends[order][:-1]).any():
            return name
    return None


def _runs(tensor: torch.Tensor) -> tuple[Any, int]:
    """(addresses, bytes of each) of the contiguous runs that a tensor consists of."""
    run, outer = 1, []
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda axis: axis[1]):
        if size > 1 and stride == run:
            run *= size
        elif size > 1:
            outer.append((size, stride))
    addresses = np.array([tensor.data_ptr()], dtype=np.int64)
    for size, stride in outer:
        steps = np.arange(size, dtype=np.int64) * (stride * tensor.element_size())
        addresses = np.add.outer(addresses, steps).reshape(-1)
    return addresses, run * tensor.element_size()


def _refusal(name: str, reason: str) -> OptionError:
    return OptionError(f"into: cannot write {name!r} into the tensor given for it: {reason}", option="into")
