"""Host memory as torch tensors.

A tensor is made of a numpy array over its span's owner: a storage and a version counter of its own for 1.0 to 1.7
microseconds, where `torch.frombuffer(...).view(...)` takes 2.3 and leaves a view of another tensor (2 cores, torch 2.13,
2026-11-29). `as_strided` of one base would be quicker, and wrong: siblings would share a version counter (a BatchNorm's
update makes another tensor's backward fail), and pickling a scale would write the whole span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace._addresses import Owner, view_at
from headrace._dtypes import DTYPES
from headrace.devices.base import Destination
from headrace.devices.tensors import TORCH, TorchDestination, shared_memory, torch_form
from headrace.errors import PinningError

_NUMPY_NDIM = 32  # numpy 1; numpy 2 takes 64


class CpuTarget:
    """The CPU's memory, as torch tensors."""

    name = "cpu"

    def wrap(
        self,
        owner: Owner | None,
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        positions: Sequence[int],
        sizes: Sequence[int],
    ) -> list[Any]:
        if torch.is_inference_mode_enabled():  # a tensor made in inference mode could never be trained or written to
            with torch.inference_mode(False):
                return self.wrap(owner, dtypes, shapes, positions, sizes)
        kinds, ndarray, from_numpy = _KINDS, np.ndarray, torch.from_numpy
        made = []
        for dtype, shape, position, nbytes in zip(dtypes, shapes, positions, sizes, strict=True):
            array_kind, kind = kinds[dtype]
            if array_kind is None or not nbytes or len(shape) > _NUMPY_NDIM:
                made.append(_unusual(owner, dtype, shape, position, nbytes))
                continue
            # Any buffer will do; numpy's types know that from Python 3.12 on.
            tensor = from_numpy(ndarray(shape, array_kind, owner, position))  # type: ignore[arg-type, unused-ignore]
            made.append(tensor if kind is None else tensor.view(kind))
        return made

    def allocate(self, dtype: str, shape: Sequence[int], nbytes: int, *, pinned: bool = False) -> tuple[Any, memoryview]:
        kind, dimensions = torch_form(dtype, shape, nbytes)
        try:
            with torch.inference_mode(False):
                tensor = torch.empty(dimensions, dtype=kind, pin_memory=pinned)
        except RuntimeError as exc:
            if not pinned:
                raise
            reason = str(exc).partition("\n")[0].rstrip(".")
            message = f"torch cannot allocate {nbytes:,} page-locked bytes: {reason}; pin='auto' goes on without"
            raise PinningError(message, device=self.name) from exc
        return tensor, view_at(tensor.data_ptr(), nbytes, tensor)

    def destination(self, tensor: Any, name: str, dtype: str, shape: Sequence[int]) -> Destination:
        return TorchDestination(tensor, name, dtype, shape, place=(self.name, _is_on_host), on_host=True)

    def shared_memory(self, tensors: Mapping[str, Any]) -> tuple[str, str] | None:
        return shared_memory(tensors)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _kind(name: str) -> tuple[Any, torch.dtype | None]:
    """(numpy dtype, torch dtype to view it as; None where it is the same); (None, None) for what `_unusual` makes."""
    kind, bits = TORCH[name], DTYPES[name].bits
    if kind is None or bits < 8:
        return None, None
    same = getattr(np, str(DTYPES[name].torch).replace("bool", "bool_"), None)
    return (np.dtype(same), None) if same is not None else (np.dtype(f"i{bits // 8}"), kind)


_KINDS = {name: _kind(name) for name in DTYPES}


def _unusual(owner: Owner | None, dtype: str, shape: Sequence[int], position: int, nbytes: int) -> torch.Tensor:
    """Empty tensors, and dtypes that torch lacks or packs."""
    kind, dimensions = torch_form(dtype, shape, nbytes)
    if not nbytes or owner is None:
        return torch.empty(dimensions, dtype=kind)
    return torch.frombuffer(owner, dtype=torch.uint8, count=nbytes, offset=position).view(kind).view(dimensions)
