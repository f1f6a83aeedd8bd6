"""Tensors as the headers of safetensors files describe them, under the names that programs know them by.

Headers are read and checked by headrace, which takes and refuses what the safetensors package does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, overload

if TYPE_CHECKING:
    import torch

    from headrace import Checkpoint

SAFETENSORS_DATA_OFFSETS_KEY: Final = "data_offsets"
SAFETENSORS_NAME_KEY: Final = "name"
SAFETENSORS_SHAPE_KEY: Final = "shape"
SAFETENSORS_DTYPE_KEY: Final = "dtype"
SAFETENSORS_HEADER_BUFFER_SIZE: Final = 8
LITTLE_ENDIAN_LONG_LONG_STRUCT_FORMAT: Final = "<Q"
MAX_HEADER_SIZE: Final = 100_000_000  # safetensors' own limit; Run:ai's is 100 MiB
PACKED_VALUES_PER_ELEMENT: Final = {"F4": 2}

_TORCH_NAMES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}


def get_safetensors_dtype_map() -> dict[str, torch.dtype]:
    """{dtype of the format: torch's}, for those that this torch has."""
    import torch

    return {name: getattr(torch, kind) for name, kind in _TORCH_NAMES.items() if hasattr(torch, kind)}


def __getattr__(name: str) -> Any:
    if name == "safetensors_to_torch_dtype":
        return get_safetensors_dtype_map()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Offsets:
    """Where a tensor's bytes are, counted from the end of the header; end exclusive."""

    __slots__ = ("end", "start")

    def __init__(self, offsets: Sequence[int]) -> None:
        self.start, self.end = offsets

    def get_diff(self) -> int:
        """The tensor's bytes."""
        return self.end - self.start


class SafetensorMetadata:
    """One tensor of a file, without its data.

    Args:
        name: the tensor's name.
        safetensorMetadata: its entry in the header: dtype, shape, data_offsets.
    """

    __slots__ = ("dtype", "name", "offsets", "shape")

    def __init__(self, name: str, safetensorMetadata: Mapping[str, Any]) -> None:  # noqa: N803  # Run:ai's name
        self.name = name
        self.shape: list[int] = safetensorMetadata[SAFETENSORS_SHAPE_KEY]
        self.dtype: str = safetensorMetadata[SAFETENSORS_DTYPE_KEY]
        self.offsets = Offsets(safetensorMetadata[SAFETENSORS_DATA_OFFSETS_KEY])

    def get_storage_shape(self) -> list[int]:
        """The torch tensor's shape: the header's, but for F4, where torch has two values in one element of the last axis.

        Raises:
            ValueError: F4 of an odd last axis, which torch has no shape for; such a tensor comes as raw bytes.
        """
        values = PACKED_VALUES_PER_ELEMENT.get(self.dtype, 1)
        if values == 1:
            return list(self.shape)
        if not self.shape or self.shape[-1] % values:
            raise ValueError(f"{self.name!r}: torch has no shape for {self.dtype} of {self.shape}")
        return [*self.shape[:-1], self.shape[-1] // values]

    def get_bytesize(self) -> int:
        """The tensor's bytes."""
        return self.offsets.get_diff()

    def get_item_count(self) -> int:
        """Elements of the torch tensor."""
        count = 1
        for size in self.get_storage_shape():
            count *= size
        return count

    def get_element_size(self) -> int:
        """Bytes of one element of the torch tensor."""
        return self.get_torch_dtype().itemsize

    def get_torch_dtype(self) -> torch.dtype:
        """The torch tensor's dtype.

        Raises:
            ValueError: this torch has none for it.
        """
        found = get_safetensors_dtype_map().get(self.dtype)
        if found is None:
            raise ValueError(f"{self.name!r}: torch has no {self.dtype}")
        return found

    def __repr__(self) -> str:
        return f"SafetensorMetadata({self.name!r}, {self.dtype}, {self.shape})"


def create_torch_tensor(buffer: torch.Tensor, tensor_metadata: SafetensorMetadata) -> torch.Tensor:
    """Bytes as the tensor that they are: a view of `buffer`, which is uint8 and has the tensor's bytes."""
    shape, dtype = tensor_metadata.get_storage_shape(), tensor_metadata.get_torch_dtype()
    if not tensor_metadata.get_item_count():
        return buffer.new_empty(shape, dtype=dtype)
    return buffer.view(dtype).view(shape)


class TensorsOfFile(Sequence[SafetensorMetadata]):
    """What a load takes from one file, in the order of the data. An entry is made when it is looked at: most programs only count.

    Args:
        checkpoint: that the file is a shard of.
        shard: which one.
        rows: of its header; None for all.
    """

    def __init__(self, checkpoint: Checkpoint, shard: int, rows: Sequence[int] | None) -> None:
        self._header = checkpoint.headers[shard]
        self._rows: Sequence[int] = range(len(self._header.names)) if rows is None else rows

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(self._header.ends[row] - self._header.starts[row] for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> SafetensorMetadata: ...
    @overload
    def __getitem__(self, index: slice) -> list[SafetensorMetadata]: ...
    def __getitem__(self, index: int | slice) -> SafetensorMetadata | list[SafetensorMetadata]:
        if isinstance(index, slice):
            return [self._entry(row) for row in self._rows[index]]
        return self._entry(self._rows[index])

    def __iter__(self) -> Iterator[SafetensorMetadata]:
        return map(self._entry, self._rows)

    def __repr__(self) -> str:
        return repr(list(self))

    def _entry(self, row: int) -> SafetensorMetadata:
        header = self._header
        start = header.data_offset
        return SafetensorMetadata(
            header.names[row],
            {
                SAFETENSORS_SHAPE_KEY: list(header.shapes[row]),
                SAFETENSORS_DTYPE_KEY: header.dtypes[row],
                SAFETENSORS_DATA_OFFSETS_KEY: (header.starts[row] - start, header.ends[row] - start),
            },
        )
