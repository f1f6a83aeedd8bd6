"""`safe_open` and `load_file` as safetensors has them (0.8.0), on headrace's reading.

A file is opened once and its header checked; each tensor or slice is a load of its own from the open checkpoint, so any number
of threads may take any number of them. What is handed out is the caller's: its memory never aliases the file, and stays when
the file is closed, rewritten or gone.

The index of a slice is split in two: what says which bytes are needed (integers, slices, the range that a list of rows spans)
goes into the load, what is left (new axes, lists, masks) is applied to the result by the framework, with the framework's meaning.
"""

from __future__ import annotations

import errno
import operator
import os
from collections.abc import Sequence
from functools import partial
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from typing_extensions import Self

import headrace
from headrace.errors import OptionError, SourceError

if TYPE_CHECKING:
    import numpy
    import torch

Basic: TypeAlias = "int | slice | EllipsisType"

_TORCH = ("pt", "pytorch", "torch")
_NUMPY = ("np", "numpy")

# What numpy calls the dtypes of the format. Those with a digit after "float8", and bfloat16, it knows once ml_dtypes is imported.
_NUMPY_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def load_file(
    filename: str | os.PathLike[str], device: str | torch.device | None = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """Load a file into a dict, as `safetensors.torch.load_file` does and as fast as `headrace.load`.

    Args:
        filename: a safetensors file; also a folder of shards, or whatever else `headrace.open` takes.
        device: where the tensors go. Today "cpu".
        backend: accepted for safetensors' sake, and ignored: headrace decides how to read.

    Returns:
        {name: tensor}, in the order of offsets. The tensors are yours and do not alias the file.

    Raises:
        As `headrace.load`; OptionError for a device that is not supported.

    Example:
        >>> weights = headrace.load_file("model.safetensors")
    """
    del backend
    _check_device(device)
    return headrace.load(filename, mmap="off")


class safe_open:  # noqa: N801  # safetensors' name
    """Open a safetensors file lazily, as `safetensors.safe_open` does: headers now, each tensor when it is asked for.

    Thread-safe. It closes with the `with` block, or when it is collected; slices that were taken from it before keep the file
    open and go on working, as in safetensors.

    Args:
        filename: a safetensors file; also a folder of shards, or whatever else `headrace.open` takes.
        framework: "pt" (also "pytorch", "torch") for torch tensors, "np" (also "numpy") for numpy arrays.
        device: where the tensors go. Today "cpu".
        backend: accepted for safetensors' sake, and ignored: headrace decides how to read.

    Raises:
        SourceNotFoundError, SourcePermissionError, SourceError: the file cannot be read; FileNotFoundError and so on as well.
        FormatError: it is no safetensors file, or breaks a rule of the format.
        OptionError: a framework or device that is not supported.

    Example:
        >>> with headrace.safe_open("model.safetensors", framework="pt") as f:
        ...     for name in f.keys():
        ...         rows = f.get_slice(name)[:16]
    """

    __slots__ = ("__weakref__", "_checkpoint", "_numpy", "_url")

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: str | torch.device | None = "cpu",
        *,
        backend: str = "mmap",
    ) -> None:
        del backend
        self._numpy = _wants_numpy(framework)
        _check_device(device)
        self._url = str(filename)
        # Whatever the environment says of mmap: what is handed out here must not alias the file.
        self._checkpoint: headrace.Checkpoint | None = headrace.open(filename, mmap="off")

    def keys(self) -> list[str]:
        """The names of the tensors, sorted."""
        return sorted(self._opened())

    def offset_keys(self) -> list[str]:
        """The names of the tensors, in the order of offsets: the order in which reading them is quickest."""
        return list(self._opened())

    def metadata(self) -> dict[str, str] | None:
        """The header's `__metadata__`; None where it has none."""
        checkpoint = self._opened()
        return checkpoint.metadata if any(header.metadata is not None for header in checkpoint.headers) else None

    def get_tensor(self, name: str) -> Any:
        """Load one tensor.

        Raises:
            TensorNotFoundError: the file has no such tensor.
            SourceError: the file is closed or cannot be read. SourceChangedError: it is no longer the one that was opened.
            OptionError: numpy has no such dtype (BF16 and F8 need ml_dtypes to be imported; F4 and F6 there are none of).
        """
        return self.get_slice(name)[...]

    def get_tensors(self) -> dict[str, Any]:
        """Load all tensors at once, much quicker than one by one. Raises as `get_tensor`."""
        checkpoint = self._opened()
        if not self._numpy:
            return headrace.load(checkpoint)
        kinds = {name: _numpy_dtype(checkpoint[name]) for name in checkpoint}  # raises before anything is read
        return {name: _as_numpy(tensor, kinds[name]) for name, tensor in headrace.load(checkpoint).items()}

    def get_slice(self, name: str) -> TensorSlice:
        """Make an object that loads the part of a tensor that it is indexed with. Nothing is read yet.

        Raises:
            TensorNotFoundError: the file has no such tensor.
        """
        checkpoint = self._opened()
        return TensorSlice(checkpoint, checkpoint[name], as_numpy=self._numpy)

    def _opened(self) -> headrace.Checkpoint:
        if self._checkpoint is None:
            raise SourceError(f"{self._url} is used after it was closed", url=self._url, status=errno.EBADF)
        return self._checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Forgotten and not closed: slices and loads under way hold it, and the last of them closes the file.
        self._checkpoint = None

    def __reduce__(self) -> str:
        raise TypeError("an open file cannot be pickled or copied; open it again where it is needed")


class TensorSlice:
    """A tensor of an open file that is loaded by indexing; what `safe_open.get_slice` returns.

    Takes all that the framework's own tensors can be indexed with, and steps backwards also where torch does not. Integers and
    slices have numpy's meaning, and only the bytes they need are read. With a list of rows, the range that it spans is read.

    Example:
        >>> with headrace.safe_open("model.safetensors", framework="pt") as f:
        ...     part = f.get_slice("embedding")[:, 8:16]
    """

    __slots__ = ("_as_numpy", "_checkpoint", "_info")

    def __init__(self, checkpoint: headrace.Checkpoint, info: headrace.TensorInfo, *, as_numpy: bool) -> None:
        self._checkpoint, self._info, self._as_numpy = checkpoint, info, as_numpy

    def get_shape(self) -> list[int]:
        """The whole tensor's shape, as the header has it: elements, also where torch packs two into one."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The tensor's dtype as the header spells it, such as "BF16"."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        """Load `tensor[index]`.

        Raises:
            IndexError: out of range, or more indices than dimensions.
            TypeError, ValueError: what is no index; a step of 0; elements narrower than a byte cut along the last dimension.
            SourceError, OptionError: as `safe_open.get_tensor`.
        """
        convert = partial(_as_numpy, kind=_numpy_dtype(self._info)) if self._as_numpy else _as_is
        items = index if isinstance(index, tuple) else (index,)
        wanted, rest = _split(items, self._info.shape) or (None, index)
        loaded = convert(self._load(wanted))
        return loaded if rest is None else loaded[rest]

    def _load(self, wanted: Sequence[Basic] | None) -> torch.Tensor:
        shape = self._info.shape
        index = None if not wanted or _is_everything(wanted, len(shape)) else cast(Any, tuple(wanted))
        try:
            return headrace.read(self._checkpoint, self._info.name, index)
        except OptionError as exc:
            if isinstance(
                exc.__cause__, (IndexError, TypeError, ValueError)
            ):  # `for row in tensor_slice` ends with an IndexError
                raise exc.__cause__ from None
            raise

    def __reduce__(self) -> str:
        raise TypeError("a slice of an open file cannot be pickled or copied; load it first")


# -- indices -------------------------------------------------------------------------------------------------------------------


def _split(items: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[list[Basic], Any] | None:
    """(what to load, what to apply to that); nothing to apply is None. None where all is to be loaded and the index applied.

    An index of integers, slices, '...' and new axes goes into the load, but for the axes. With lists of integers among them, what
    is loaded is the range that each list spans; integers become ranges of 1, since beside a list they have more than one meaning.
    """
    kept = [item for item in items if item is not None]
    if sum(item is Ellipsis for item in kept) > 1:
        return None
    if all(map(_is_basic, kept)):
        axes = tuple(item if item is None or item is Ellipsis else slice(None) for item in items if not _is_integer(item))
        return kept, axes if len(kept) < len(items) else None
    sizes = _sizes(kept, shape)
    if sizes is None:
        return None
    wanted: list[Basic] = []
    rest: list[Any] = []
    for item in items:
        if item is None or item is Ellipsis:
            wanted += [item] if item is Ellipsis else []
            rest.append(item)
        elif (spanned := _spanned(item, sizes.pop(0))) is not None:
            wanted.append(spanned[0])
            rest.append(spanned[1])
        else:
            return None
    return wanted, tuple(rest)


def _spanned(item: Any, size: int) -> tuple[Basic, Any] | None:
    """(what to load of a dimension, the index into that), or None where that cannot be said."""
    if isinstance(item, slice):
        return item, slice(None)
    numbers = [operator.index(item)] if _is_integer(item) else _numbers(item)
    if numbers is None or not all(-size <= number < size for number in numbers):
        return None
    places = [number % size for number in numbers]
    first, last = (min(places), max(places) + 1) if places else (0, 0)
    moved = [place - first for place in places]
    return slice(first, last), 0 if _is_integer(item) else moved


def _sizes(kept: Sequence[Any], shape: tuple[int, ...]) -> list[int] | None:
    """The size of the dimension that each item is about, '...' left out; None where they are too many."""
    dots = next((i for i, item in enumerate(kept) if item is Ellipsis), len(kept))
    after = max(0, len(kept) - dots - 1)
    if dots + after > len(shape):
        return None
    return [*shape[:dots], *shape[len(shape) - after :]]


def _numbers(item: Any) -> list[int] | None:
    """The integers of a list, range, or array of one dimension; None where it is something else."""
    if getattr(item, "ndim", 0) == 1 and hasattr(item, "tolist"):
        item = item.tolist()
    if isinstance(item, (list, tuple, range)) and all(map(_is_integer, item)):
        return [operator.index(number) for number in item]
    return None


def _is_basic(item: Any) -> bool:
    return item is Ellipsis or isinstance(item, slice) or _is_integer(item)


def _is_integer(item: Any) -> bool:
    """Whether it selects one place. Booleans are masks; an array's `__index__` fails where it has more than one element."""
    if isinstance(item, int):
        return not isinstance(item, bool)
    return hasattr(item, "__index__") and not getattr(item, "ndim", 0) and "bool" not in str(getattr(item, "dtype", ""))


def _is_everything(wanted: Sequence[Basic], ndim: int) -> bool:
    dots = sum(item is Ellipsis for item in wanted)
    whole = all(item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in wanted)
    return whole and len(wanted) - dots <= ndim


# -- frameworks ----------------------------------------------------------------------------------------------------------------


def _wants_numpy(framework: str) -> bool:
    if framework not in (*_TORCH, *_NUMPY):
        raise OptionError(f"framework {framework!r} is not supported; 'pt' gives tensors, 'np' arrays", option="framework")
    return framework in _NUMPY


def _check_device(device: object) -> None:
    if device is not None and str(device) != "cpu":
        raise OptionError(f"device {str(device)!r} is not supported yet; load to 'cpu' and move the tensors", option="device")


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _numpy_dtype(info: headrace.TensorInfo) -> numpy.dtype[Any]:
    import numpy

    try:
        return numpy.dtype(_NUMPY_NAMES[info.dtype])
    except (KeyError, TypeError):
        hint = "import ml_dtypes first, or " if info.dtype in _NUMPY_NAMES else ""
        raise OptionError(
            f"cannot make {info.name!r} a numpy array: numpy has no {info.dtype}; {hint}open the file with framework='pt'",
            option="framework",
        ) from None


def _as_numpy(tensor: torch.Tensor, kind: numpy.dtype[Any]) -> numpy.ndarray[Any, Any]:
    """The tensor's memory as an array, which holds it."""
    import torch

    if kind.isbuiltin == 1:
        return tensor.numpy()
    bits = {1: torch.uint8, 2: torch.int16}[kind.itemsize]  # a dtype of ml_dtypes', which torch cannot hand over
    return tensor.view(bits).numpy().view(kind)
