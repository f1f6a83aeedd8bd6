"""What the engine knows of the place where tensors live.

Today that is host memory. A `HostTarget` turns a span's memory into what the caller is handed; the engine fills the
memory and knows nothing of torch or numpy. Devices with memory of their own add verbs to copy into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace._addresses import Owner


class HostTarget(Protocol):
    """Makes tensors, or arrays, out of host memory.

    Attributes:
        name: the target as the caller writes it, "cpu".
    """

    @property
    def name(self) -> str: ...

    def wrap(
        self,
        owner: Owner | None,
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        positions: Sequence[int],
        sizes: Sequence[int],
    ) -> list[Any]:
        """Tensors over a span's memory, one per row of the columns.

        Every tensor holds a reference to `owner`, has a storage and a version counter of its own, and can be written to.

        Args:
            owner: the memory; None where all tensors are empty.
            dtypes: names of the format. One that the target lacks becomes raw uint8 of one dimension.
            shapes: in elements of that dtype.
            positions: first byte of each tensor within `owner`, a multiple of its dtype's width.
            sizes: bytes of each tensor.
        """

    def allocate(self, dtype: str, shape: Sequence[int], nbytes: int) -> tuple[Any, memoryview]:
        """One tensor with exactly its own memory, and that memory as bytes."""

    def destination(self, tensor: Any, name: str, dtype: str, shape: Sequence[int]) -> Destination:
        """Check that `tensor` can take the values of a tensor of the checkpoint.

        Args:
            tensor: where the caller wants the values.
            name: for the error.
            dtype, shape: what the checkpoint (and the slice) says.

        Raises:
            OptionError: it cannot; the message names the tensor and the reason.
        """

    def shared_memory(self, tensors: Mapping[str, Any]) -> tuple[str, str] | None:
        """Names of two of these tensors that have an element in common; None where no two have."""


class Destination(Protocol):
    """Memory that the caller gave for one tensor.

    Attributes:
        dtype: what it holds, as a name of the format.
        memory: its bytes; None where they do not lie in one piece, so that the values have to come through memory of the
            engine's.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def memory(self) -> memoryview | None: ...

    def fill_from(self, tensor: Any) -> None:
        """Copy the values of `tensor` in. Only where `memory` is None."""

    def finish(self) -> Any:
        """Say that the bytes have changed, and give the tensor back."""
