"""What a patch puts in the place of safetensors' `safe_open` and `load_file`: the same, by headrace, and counted.

Frameworks that headrace makes no tensors of are left to safetensors, and counted as well.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import headrace
from headrace._dtypes import DTYPES
from headrace.integrations._ahead import Ahead
from headrace.integrations.safetensors import TensorSlice, safe_open

if TYPE_CHECKING:
    import torch

_FRAMEWORKS: Final = ("pt", "pytorch", "torch", "np", "numpy")


@dataclass(frozen=True, slots=True)
class PatchReport:
    """What was loaded while a patch was active.

    Attributes:
        files: the files that tensors were read from by headrace, as paths and urls, in the order of first use.
        tensors: how many tensors, or parts of tensors, were read.
        nbytes: their bytes.
        elsewhere: files that were left to safetensors.
    """

    files: tuple[str, ...] = ()
    tensors: int = 0
    nbytes: int = 0
    elsewhere: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = f"headrace loaded {self.tensors:,} tensors ({self.nbytes:,} bytes) from {_files(self.files)}"
        return f"{said}; {_files(self.elsewhere)} left to safetensors" if self.elsewhere else said


def _files(names: Sequence[str]) -> str:
    return f"{len(names):,} file{'' if len(names) == 1 else 's'}"


@dataclass(slots=True)
class Record:
    """Counts for a report. Thread-safe."""

    _files: dict[str, None] = field(default_factory=dict)
    _elsewhere: dict[str, None] = field(default_factory=dict)
    _tensors: int = 0
    _nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, url: str, *, tensors: int, nbytes: int) -> None:
        with self._lock:
            self._files[url] = None
            self._tensors += tensors
            self._nbytes += nbytes

    def add_elsewhere(self, path: str) -> None:
        with self._lock:
            self._elsewhere[path] = None

    def report(self) -> PatchReport:
        with self._lock:
            return PatchReport(tuple(self._files), self._tensors, self._nbytes, tuple(self._elsewhere))


class Opening(Protocol):
    """What a patch says of the files that are opened under it."""

    def open(self, filename: str | os.PathLike[str]) -> headrace.Checkpoint:
        """Open a file, or what it stands for."""

    def records(self) -> Sequence[Record]:
        """Where to count what is read."""


class LazyTensor(Protocol):
    """A tensor that is read when it is indexed, as safetensors' slices are; it also knows its dtype in torch's terms."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def is_floating_point(self) -> bool: ...
    def __getitem__(self, index: Any) -> Any: ...


def make_safe_open(opening: Opening, original: Callable[..., Any]) -> Callable[..., Any]:
    """A `safe_open`.

    Args:
        opening: asked for each file.
        original: safetensors' own.
    """

    def open_weights(
        filename: str | os.PathLike[str], framework: str, device: Any = "cpu", *, backend: str = "mmap", **more: Any
    ) -> Any:
        if framework not in _FRAMEWORKS:
            for record in opening.records():
                record.add_elsewhere(os.fspath(filename))
            return original(filename, framework, device, backend=backend, **more)
        return CountedFile(opening.open(filename), framework, device, opening.records())

    return open_weights


def make_load_file(opening: Opening) -> Callable[..., dict[str, torch.Tensor]]:
    """A `safetensors.torch.load_file`."""

    def load_weights(filename: str | os.PathLike[str], device: Any = "cpu", *, backend: str = "mmap") -> dict[str, torch.Tensor]:
        del backend
        with opening.open(filename) as checkpoint:
            target = _target(device)
            tensors = headrace.load(checkpoint, device=target if target.startswith("cuda") else "cpu")
            for record in opening.records():
                record.add(checkpoint.url, tensors=len(tensors), nbytes=sum(tensor.nbytes for tensor in tensors.values()))
        return {name: _placed(tensor, target) for name, tensor in tensors.items()}

    return load_weights


class CountedFile(safe_open):
    """`headrace.safe_open` of an open checkpoint; what is read from it is counted, and read ahead where that saves round trips.

    Args:
        checkpoint: the file; closed with this and its slices.
        framework, device: as for `safe_open`. Other devices than the CPU get each tensor by way of the host.
        records: where to count.
    """

    __slots__ = ("_ahead", "_device", "_records", "url")

    def __init__(self, checkpoint: headrace.Checkpoint, framework: str, device: Any, records: Sequence[Record]) -> None:
        super().__init__(checkpoint, framework)  # type: ignore[arg-type]  # what `open` takes, this does
        self.url = checkpoint.url
        self._device, self._records = _target(device), tuple(records)
        limit = checkpoint.options.memory_limit
        may_hold = {} if limit is None or limit < 0 else {"limit_nbytes": limit}
        self._ahead = Ahead(checkpoint, **may_hold) if "://" in checkpoint.url else None

    def get_slice(self, name: str) -> Any:
        """As `headrace.safe_open.get_slice`."""
        return _CountedSlice(self, name, super().get_slice(name))

    def get_tensors(self) -> dict[str, Any]:
        """As `headrace.safe_open.get_tensors`."""
        loaded = super().get_tensors()
        self.count(len(loaded), sum(tensor.nbytes for tensor in loaded.values()))
        return {name: self.placed(tensor) for name, tensor in loaded.items()}

    def ahead(self, name: str) -> Any:
        """The whole tensor, if it is read ahead; else None."""
        return None if self._ahead is None or self._numpy else self._ahead.take(name)

    def placed(self, tensor: Any) -> Any:
        """A tensor on the device that was asked for; arrays as they are."""
        return tensor if self._numpy else _placed(tensor, self._device)

    def count(self, tensors: int, nbytes: int) -> None:
        """Count what was read."""
        for record in self._records:
            record.add(self.url, tensors=tensors, nbytes=nbytes)


class _CountedSlice:
    """A `TensorSlice` of a counted file."""

    __slots__ = ("_file", "_name", "_slice")

    def __init__(self, file: CountedFile, name: str, part: TensorSlice) -> None:
        self._file, self._name, self._slice = file, name, part

    def get_shape(self) -> list[int]:
        return self._slice.get_shape()

    def get_dtype(self) -> str:
        return self._slice.get_dtype()

    @property
    def dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, DTYPES[self.get_dtype()].torch or "uint8", torch.uint8)
        return found

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, index: Any) -> Any:
        loaded = self._file.ahead(self._name) if index is Ellipsis or index == slice(None) else None
        if loaded is None:
            loaded = self._slice[index]
        self._file.count(1, loaded.nbytes)
        return self._file.placed(loaded)


def _target(device: Any) -> str:
    """A device as text; a bare number is a GPU, as for torch."""
    if device is None:
        return "cpu"
    return f"cuda:{device}" if isinstance(device, int) else str(device)


def _placed(tensor: torch.Tensor, device: str) -> torch.Tensor:
    return tensor if device == "cpu" else tensor.to(device)
