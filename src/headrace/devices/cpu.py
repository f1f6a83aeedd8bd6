"""Host memory as torch tensors.

A tensor is made of a numpy array over its span's owner: a storage and a version counter of its own for 1.0 to 1.7
microseconds, where `torch.frombuffer(...).view(...)` takes 2.3 and leaves a view of another tensor (2 cores, torch 2.13,
2026-11-29). `as_strided` of one base would be quicker, and wrong: siblings would share a version counter (a BatchNorm's
update makes another tensor's backward fail), and pickling a scale would write the whole span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
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
        if all(sizes) and _USUAL.issuperset(dtypes) and max(map(len, shapes), default=0) <= _NUMPY_NDIM:
            return _usual(owner, dtypes, shapes, positions)
        made = []
        for dtype, shape, position, nbytes in zip(dtypes, shapes, positions, sizes, strict=True):
            if not nbytes or dtype not in _USUAL or len(shape) > _NUMPY_NDIM:
                made.append(_unusual(owner, dtype, shape, position, nbytes))
            else:
                made += _usual(owner, [dtype], [shape], [position])
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


_NUMPY = {name: getattr(np, str(dtype.torch).replace("bool", "bool_"), None) for name, dtype in DTYPES.items()}


def _array_kind(name: str) -> np.dtype[Any]:
    """numpy's dtype, or the integer of that width that torch then views as its own."""
    return np.dtype(_NUMPY[name] or f"i{DTYPES[name].bits // 8}")


_USUAL = frozenset(name for name in DTYPES if TORCH[name] is not None and DTYPES[name].bits >= 8)  # the rest is `_unusual`
_ARRAY_KINDS = {name: _array_kind(name) for name in _USUAL}
_VIEWED_AS = {name: TORCH[name] for name in _USUAL if _NUMPY[name] is None}


def _usual(
    owner: Owner | None, dtypes: Sequence[str], shapes: Sequence[Sequence[int]], positions: Sequence[int]
) -> list[torch.Tensor]:
    """Many at a time, by `map`: a BF16 tensor takes 1.65 microseconds where a loop takes 1.85 (2026-11-30)."""
    make: Callable[..., Any] = np.ndarray  # any buffer will do, which its types know from Python 3.12 on
    made = list(map(torch.from_numpy, map(make, shapes, map(_ARRAY_KINDS.__getitem__, dtypes), repeat(owner), positions)))
    if _VIEWED_AS.keys().isdisjoint(dtypes):
        return made
    kinds = map(_VIEWED_AS.get, dtypes)
    return [tensor if kind is None else tensor.view(kind) for tensor, kind in zip(made, kinds, strict=True)]


def _unusual(owner: Owner | None, dtype: str, shape: Sequence[int], position: int, nbytes: int) -> torch.Tensor:
    """Empty tensors, and dtypes that torch lacks or packs."""
    kind, dimensions = torch_form(dtype, shape, nbytes)
    if not nbytes or owner is None:
        return torch.empty(dimensions, dtype=kind)
    return torch.frombuffer(owner, dtype=torch.uint8, count=nbytes, offset=position).view(kind).view(dimensions)
