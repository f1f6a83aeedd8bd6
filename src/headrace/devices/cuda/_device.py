"""A GPU as the pipeline sees it: one copy stream, memory that belongs to it, and events that order everything else.

Memory is allocated on the copy stream, so that a block which torch hands out again is written behind whatever was queued there
before. What the caller gets is recorded on the caller's stream, once per allocation: the allocator then keeps the block until
that stream is through with it, however early the last tensor is dropped.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headrace._dtypes import DTYPES
from headrace.devices.base import Destination, DeviceBuffer
from headrace.devices.cuda._runtime import Runtime, cpus_of_node
from headrace.devices.tensors import TORCH, TorchDestination, shared_memory, torch_form


class Allocator(Protocol):
    """What the runtime library does not do for a device. `current`, `current_stream` and `use` are for the caller's thread too.

    Attributes:
        copy_stream: handle of the stream that memory is allocated on and copies are queued on.
    """

    @property
    def copy_stream(self) -> int: ...

    def current(self) -> AbstractContextManager[object]:
        """Make the device this thread's current one for a while, and make no context on another one afterwards.

        cudaSetDevice makes one (hundreds of MB) where there is none, so that putting back what was current before has a price.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """One dimension of uint8 on the copy stream, with a storage of exactly this size. Raises `DeviceMemoryError`."""

    def allocate_pinned(self, nbytes: int) -> tuple[int, object]:
        """(address, owner) of page-locked host memory. Raises `PinningError`."""

    def free_nbytes(self) -> int:
        """Bytes that can still be allocated: free ones, and those that the allocator keeps for later."""

    def current_stream(self) -> int:
        """Handle of the stream that this thread's program works on."""

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        """The current stream uses these from now on; their memory is not written again before it is through with them."""

    def convert(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        """Queue `target.copy_(source)` on the copy stream; they are of one dimension, of tensors of `counts` elements."""

    def fill(self, destination: Destination, tensor: torch.Tensor) -> None:
        """Queue `destination.fill_from(tensor)` on the copy stream."""

    def collective(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        """Within it, what torch.distributed does with these tensors is ordered with the copy stream."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this device's memory."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor without elements, on the device."""


class Buffer:
    """Device memory: the tensor over all of it, and where it lies."""

    __slots__ = ("address", "nbytes", "tensor")

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self.tensor, self.nbytes, self.address = tensor, nbytes, tensor.data_ptr()


class CudaDevice:
    """One GPU, or a simulated one.

    Args:
        runtime: the library.
        allocator: torch's, or a simulated one.
        index: of the device, for the library.
        name: as the caller writes it.
    """

    def __init__(self, runtime: Runtime, allocator: Allocator, *, index: int, name: str) -> None:
        self.runtime, self.allocator, self.index, self.name = runtime, allocator, index, name
        self.copy_stream = allocator.copy_stream
        self._node = runtime.numa_node(index)
        self.pins_read_only = runtime.registers_read_only(index)

    @property
    def in_place_refused(self) -> str | None:
        if self.runtime.prefix != "hip":
            return None
        return f"{self.name}: ROCm suspends all queues whenever pages of a file that it knows change their place"

    def enter_thread(self) -> None:
        self.runtime.set_device(self.index)  # a thread that has not said so works on device 0, and makes a context there

    def keep_near(self) -> None:
        if self._node is None:
            return
        near = set(cpus_of_node(self._node)) & os.sched_getaffinity(0)
        if near:
            with suppress(OSError):  # of the calling thread alone; a container may forbid it
                os.sched_setaffinity(0, near)

    # -- host memory

    def pin(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        self.runtime.register(address, nbytes, read_only=read_only)

    def unpin(self, address: int) -> None:
        with self.allocator.current():
            self.runtime.unregister(address)

    def allocate_pinned(self, nbytes: int) -> tuple[int, object]:
        return self.allocator.allocate_pinned(nbytes)

    # -- device memory

    def allocate(self, nbytes: int) -> DeviceBuffer:
        return Buffer(self.allocator.allocate(nbytes), nbytes)

    def free_nbytes(self) -> int:
        return self.allocator.free_nbytes()

    def copy_async(self, target: int, source: int, nbytes: int, *, pinned: bool = True) -> None:
        self.runtime.copy_to_device(target, source, nbytes, self.copy_stream, pinned=pinned)

    def move_async(self, target: int, source: int, nbytes: int) -> None:
        self.runtime.copy_on_device(target, source, nbytes, self.copy_stream)

    def convert(self, source: DeviceBuffer, target: DeviceBuffer, dtypes: tuple[str, str], counts: Sequence[int]) -> None:
        raw, converted = (
            _tensor_of(buffer)[: sum(counts) * DTYPES[dtype].itemsize].view(torch_form(dtype, (1,), 1)[0])
            for buffer, dtype in zip((source, target), dtypes, strict=True)
        )
        self.allocator.convert(raw, converted, counts)

    # -- order

    def new_event(self) -> int:
        return self.runtime.new_event()

    def record(self, event: int) -> None:
        self.runtime.record(event, self.copy_stream)

    def is_done(self, event: int) -> bool:
        return self.runtime.is_done(event)

    def synchronize(self, event: int) -> None:
        with self.allocator.current():
            self.runtime.synchronize(event)

    def destroy(self, events: Sequence[int]) -> None:
        with self.allocator.current():
            for event in events:
                self.runtime.destroy_event(event)

    def drain(self) -> None:
        with self.allocator.current():
            self.runtime.drain(self.copy_stream)

    def await_caller(self) -> None:
        with self.allocator.current():
            event = self.runtime.new_event()
            self.runtime.record(event, self.allocator.current_stream())
            self.runtime.wait(self.copy_stream, event)
            self.runtime.destroy_event(event)

    def callers_stream(self) -> int:
        return self.allocator.current_stream()

    def hand_over(self, event: int, buffers: Sequence[DeviceBuffer]) -> None:
        with self.allocator.current():
            self.runtime.wait(self.allocator.current_stream(), event)
            self.allocator.use([_tensor_of(buffer) for buffer in buffers])

    # -- tensors

    def wrap(
        self,
        buffer: DeviceBuffer | None,
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        positions: Sequence[int],
        sizes: Sequence[int],
    ) -> list[Any]:
        if torch.is_inference_mode_enabled():  # a tensor made in inference mode could never be trained or written to
            with torch.inference_mode(False):
                return self.wrap(buffer, dtypes, shapes, positions, sizes)
        storage = _tensor_of(buffer).untyped_storage() if buffer is not None else None
        whole = buffer.nbytes if buffer is not None else 0
        forms = [_form(*row) for row in zip(dtypes, shapes, sizes, strict=True)]
        blanks = self._blanks([kind for kind, _ in forms])
        made = []
        for (kind, dimensions), position, nbytes in zip(forms, positions, sizes, strict=True):
            if not nbytes or storage is None:
                made.append(self.allocator.empty(dimensions, kind))
                continue
            # A storage of its own, which keeps the one it is a part of alive; alone in its memory it is that one, whose
            # record_stream torch obeys (of a part it is ignored: the allocator does not know its address).
            own = storage if nbytes == whole else storage[position : position + nbytes]
            made.append(blanks[kind].pop().set_(own, 0, dimensions, _strides(dimensions)))
        return made

    def _blanks(self, kinds: Sequence[torch.dtype]) -> dict[torch.dtype, list[torch.Tensor]]:
        """Tensors without memory, as many of each dtype as there are: in one call, where one call each takes half of the time.

        "unsafe" means that each has a version counter of its own, which is what is wanted: none of them stays what it is.
        """
        blanks = {}
        for kind, count in Counter(kinds).items():
            blanks[kind] = list(torch.unsafe_split_with_sizes(self.allocator.empty((0,), kind), [0] * count))
        return blanks

    def watch(self, tensor: torch.Tensor) -> Callable[[], bool]:
        reference: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return lambda: bool(reference.expired())

    @contextmanager
    def collective(self, buffers: Sequence[DeviceBuffer]) -> Iterator[list[torch.Tensor]]:
        tensors = [_tensor_of(buffer) for buffer in buffers]
        with self.allocator.collective(tensors):
            yield tensors

    def destination(self, tensor: Any, name: str, dtype: str, shape: Sequence[int]) -> Destination:
        place = (self.name, self.allocator.holds)
        return TorchDestination(tensor, name, dtype, shape, place=place, on_host=False)

    def shared_memory(self, tensors: Mapping[str, Any]) -> tuple[str, str] | None:
        return shared_memory(tensors)

    def fill(self, destination: Destination, tensor: Any) -> None:
        self.allocator.fill(destination, tensor)


def _tensor_of(buffer: DeviceBuffer) -> torch.Tensor:
    assert isinstance(buffer, Buffer)
    return buffer.tensor


def _form(dtype: str, shape: Sequence[int], nbytes: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """As `torch_form`, without its calls for what is common."""
    kind = _COMMON.get(dtype)
    if kind is not None and nbytes:
        return kind, tuple(shape)
    kind, dimensions = torch_form(dtype, shape, nbytes)
    return kind, tuple(dimensions)


_COMMON = {name: kind for name, kind in TORCH.items() if kind is not None and DTYPES[name].bits == 8 * kind.itemsize}


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor, in elements."""
    if len(shape) == 2:
        return (shape[1], 1)
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
