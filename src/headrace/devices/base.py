"""What the engine knows of the place where tensors live.

A `HostTarget` turns host memory into what the caller is handed; readers fill that memory themselves. A `Device` has memory of
its own: bytes get there by copies that run on their own, on the device's copy stream, and what is handed out is ordered behind
them by events. The engine knows nothing of torch or numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
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

    def allocate(self, dtype: str, shape: Sequence[int], nbytes: int, *, pinned: bool = False) -> tuple[Any, memoryview]:
        """One tensor with exactly its own memory, and that memory as bytes.

        Args:
            pinned: page-locked, by an allocator that knows of the copies to devices that the caller starts.

        Raises:
            PinningError: such memory cannot be had.
        """

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
        memory: its bytes; None where they do not lie in one piece or the host cannot reach them.
        address: of its first byte, on whichever side it lies; None where the bytes do not lie in one piece, so that the values
            have to come through memory of the engine's.
    """

    @property
    def dtype(self) -> str: ...
    @property
    def memory(self) -> memoryview | None: ...
    @property
    def address(self) -> int | None: ...

    def fill_from(self, tensor: Any) -> None:
        """Copy the values of `tensor` in. Only where `address` is None."""

    def finish(self) -> Any:
        """Say that the bytes have changed, and give the tensor back."""


class DeviceBuffer(Protocol):
    """Memory of a device. It is given back when neither the buffer nor a tensor of it lives."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class CollectiveDevice(Protocol):
    """A device whose memory torch.distributed can exchange among nodes; what a `Device` may have as well."""

    def collective(self, buffers: Sequence[DeviceBuffer]) -> AbstractContextManager[Sequence[Any]]:
        """The buffers as tensors of bytes. What is called with them inside comes behind all that was queued on the copy stream,
        and before what is queued there after its end has been waited for inside."""


class Device(Protocol):
    """A device with memory of its own, and one stream for copies into it.

    Addresses are numbers. Events are opaque; one may be recorded again when it is done or nothing waits for it any more. All
    methods may be called from any thread that has called `enter_thread`, and those marked so from the caller's as well.

    Attributes:
        name: as the caller writes it, "cuda:0".
        in_place_refused: why files cannot be page-locked where they lie; None where they can.
        pins_read_only: whether memory that the host may only read can be page-locked too.
    """

    @property
    def name(self) -> str: ...
    @property
    def in_place_refused(self) -> str | None: ...
    @property
    def pins_read_only(self) -> bool: ...

    def enter_thread(self) -> None:
        """Make this the current device of a thread that was started for it, and leave it so."""

    def keep_near(self) -> None:
        """Run this thread on CPUs of the device's NUMA node, so that memory it touches first lies there."""

    # -- host memory

    def pin(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Page-lock host memory. Raises `PinningError`.

        Args:
            read_only: the device will only read it. Its pages are not made ready for writing, so that a file they belong to
                stays as it is, times included. Only where `pins_read_only`.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin`. No copy may be under way. From any thread, the collector's included. Raises `DeviceError`."""

    def allocate_pinned(self, nbytes: int) -> tuple[int, object]:
        """(address, owner) of page-locked memory from the device's own allocator. Raises `PinningError`."""

    # -- device memory

    def allocate(self, nbytes: int) -> DeviceBuffer:
        """Memory that belongs to the copy stream. Raises `DeviceMemoryError`, which only allocations raise."""

    def free_nbytes(self) -> int:
        """Bytes that can still be allocated."""

    def copy_async(self, target: int, source: int, nbytes: int, *, pinned: bool = True) -> None:
        """Queue a copy from host memory. Page-locked memory must stay as it is until an event that is recorded later is done.

        Args:
            pinned: whether the memory is page-locked. From other memory the call may last as long as the copy.
        """

    def move_async(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy within the device."""

    def convert(self, source: DeviceBuffer, target: DeviceBuffer, dtypes: tuple[str, str], counts: Sequence[int]) -> None:
        """Queue a conversion of tensors of `counts` elements, which lie one behind the other from the start of both buffers, with
        the bits of `tensor.to`. The buffers may be longer."""

    # -- order

    def new_event(self) -> Any:
        """An event that was never recorded."""

    def record(self, event: Any) -> None:
        """The event is done when all that was queued so far is."""

    def is_done(self, event: Any) -> bool:
        """Whether the event is done; true of one that was never recorded."""

    def synchronize(self, event: Any) -> None:
        """Wait, without the GIL, until the event is done."""

    def drain(self) -> None:
        """Wait until all that was queued is done, events or not. From any thread, the collector's included."""

    def destroy(self, events: Sequence[Any]) -> None:
        """Give events back. From any thread, the collector's included."""

    def await_caller(self) -> None:
        """What is queued from now on runs after all that the caller's current stream has been given so far. On its thread."""

    def callers_stream(self) -> Any:
        """The current stream of the thread that asks, to compare. On the caller's thread."""

    def hand_over(self, event: Any, buffers: Sequence[DeviceBuffer]) -> None:
        """The caller's current stream waits for the event, and uses these buffers from now on. On the caller's thread."""

    # -- tensors

    def wrap(
        self,
        buffer: DeviceBuffer | None,
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        positions: Sequence[int],
        sizes: Sequence[int],
    ) -> list[Any]:
        """Tensors over device memory, as of `HostTarget.wrap`. On the caller's thread or within `fill`."""

    def watch(self, tensor: Any) -> Callable[[], bool]:
        """A function that says whether the tensor's memory is no longer used."""

    def destination(self, tensor: Any, name: str, dtype: str, shape: Sequence[int]) -> Destination:
        """As of `HostTarget.destination`; the tensor has to be on this device."""

    def shared_memory(self, tensors: Mapping[str, Any]) -> tuple[str, str] | None:
        """As of `HostTarget.shared_memory`."""

    def fill(self, destination: Destination, tensor: Any) -> None:
        """Queue a copy of the values of `tensor` into a destination without an address."""
