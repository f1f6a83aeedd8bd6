"""The dtypes of the safetensors format: a table, and nothing that needs torch.

Names and widths are those of safetensors 0.8.0 (`src/tensor.rs`, enum Dtype). `torch` is the attribute of the torch module that
has the same bits, or None where torch has none: such tensors are handed out as raw uint8.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype of the format.

    Attributes:
        name: as the header spells it.
        bits: width of one element; below 8 several elements share a byte.
        torch: attribute of the torch module with the same bits, or None.
        floating: whether a blanket cast may touch it (wide floats only; fp8 and narrower are quantized data).
    """

    name: str
    bits: int
    torch: str | None
    floating: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes an element's address must be a multiple of; 1 for sub-byte dtypes."""
        return max(1, self.bits // 8)


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("BOOL", 8, "bool"),
        DType("F4", 4, "float4_e2m1fn_x2"),  # torch packs two elements into one: the last dimension halves
        DType("F6_E2M3", 6, None),
        DType("F6_E3M2", 6, None),
        DType("U8", 8, "uint8"),
        DType("I8", 8, "int8"),
        DType("F8_E5M2", 8, "float8_e5m2"),
        DType("F8_E4M3", 8, "float8_e4m3fn"),
        DType("F8_E8M0", 8, "float8_e8m0fnu"),
        DType("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
        DType("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
        DType("I16", 16, "int16"),
        DType("U16", 16, "uint16"),
        DType("F16", 16, "float16", floating=True),
        DType("BF16", 16, "bfloat16", floating=True),
        DType("I32", 32, "int32"),
        DType("U32", 32, "uint32"),
        DType("F32", 32, "float32", floating=True),
        DType("C64", 64, "complex64"),
        DType("F64", 64, "float64", floating=True),
        DType("I64", 64, "int64"),
        DType("U64", 64, "uint64"),
    )
}

BY_TORCH_NAME: dict[str, DType] = {dtype.torch: dtype for dtype in DTYPES.values() if dtype.torch is not None}


def find_dtype(spelling: object) -> DType | None:
    """The dtype a caller means: 'BF16', 'bfloat16', 'torch.bfloat16' or the torch.dtype itself; None if it is none.

    Works without torch: a torch.dtype prints as 'torch.NAME'.
    """
    text = str(spelling).removeprefix("torch.")
    return DTYPES.get(text.upper()) or BY_TORCH_NAME.get(text) or BY_TORCH_NAME.get(_ALIASES.get(text, ""))


_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "long": "int64", "int": "int32", "short": "int16"}
