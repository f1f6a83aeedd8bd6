"""A device in a hundred lines: memory of the host that a queue of copies fills, each only when somebody waits for it.

What CONTRIBUTING.md says of adding a device, written down: nothing that headrace ships knows of it.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headrace._addresses import Owner, owner_at
from headrace.devices.base import Destination, DeviceBuffer
from headrace.devices.cpu import CpuTarget
from headrace.devices.tensors import TorchDestination, shared_memory, torch_form
from headrace.errors import DeviceMemoryError

CAPACITY_NBYTES = 1 << 28


class Buffer:
    """Device memory, given back when the last tensor over it is gone."""

    def __init__(self, owner: Owner, address: int, nbytes: int) -> None:
        self.owner, self.address, self.nbytes = owner, address, nbytes


class Event:
    """A place in the queue: all that was queued before it."""

    number = 0


class ToyDevice:
    """See `headrace.devices.base.Device`."""

    name = "toy:0"
    in_place_refused = "toy:0: it has no bus that could read files where they lie"
    pins_read_only = False

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self._queued = self._done = 0
        self._lock = threading.RLock()
        self._memory: dict[int, int] = {}  # bytes of each allocation by its address
        self.pinned: dict[int, int] = {}

    def enter_thread(self) -> None: ...

    def keep_near(self) -> None: ...

    # -- host memory

    def pin(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        assert not read_only
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def allocate_pinned(self, nbytes: int) -> tuple[int, object]:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return memory.data_ptr(), memory

    # -- device memory

    def allocate(self, nbytes: int) -> DeviceBuffer:
        if nbytes > self.free_nbytes():
            free = self.free_nbytes()
            message = f"{self.name} has no room for {nbytes:,} bytes"
            raise DeviceMemoryError(message, device=self.name, requested=nbytes, free=free)
        memory = torch.empty(max(nbytes, 1), dtype=torch.uint8)
        address = memory.data_ptr()
        owner = owner_at(address, nbytes, memory)
        self._memory[address] = nbytes
        weakref.finalize(owner, self._memory.pop, address, None).atexit = False
        return Buffer(owner, address, nbytes)

    def free_nbytes(self) -> int:
        return CAPACITY_NBYTES - sum(list(self._memory.values()))

    def copy_async(self, target: int, source: int, nbytes: int, *, pinned: bool = True) -> None:
        self._put(lambda: ctypes.memmove(target, source, nbytes))
        if not pinned:
            self.drain()

    def move_async(self, target: int, source: int, nbytes: int) -> None:
        self._put(lambda: ctypes.memmove(target, source, nbytes))

    def convert(self, source: DeviceBuffer, target: DeviceBuffer, dtypes: tuple[str, str], counts: Sequence[int]) -> None:
        (raw, _), (made, _) = (torch_form(dtype, (1,), 1) for dtype in dtypes)

        def kernel() -> None:
            values = torch.frombuffer(_owner_of(source), dtype=raw, count=sum(counts)).split(list(counts))
            converted = torch.frombuffer(_owner_of(target), dtype=made, count=sum(counts)).split(list(counts))
            for value, place in zip(values, converted, strict=True):
                place.copy_(value)

        self._put(kernel)

    # -- order

    def new_event(self) -> Event:
        return Event()

    def record(self, event: Event) -> None:
        with self._lock:
            event.number = self._queued

    def is_done(self, event: Event) -> bool:
        """Asking does a piece of the work: a device would go on by itself."""
        with self._lock:
            self._carry_out(min(event.number, self._done + 1))
            return event.number <= self._done

    def synchronize(self, event: Event) -> None:
        self._carry_out(event.number)

    def drain(self) -> None:
        self._carry_out(self._queued)

    def destroy(self, events: Sequence[Event]) -> None: ...

    def await_caller(self) -> None:
        """The caller works on the host, where nothing is queued."""

    def callers_stream(self) -> int:
        return 0

    def hand_over(self, event: Event, buffers: Sequence[DeviceBuffer]) -> None:  # noqa: ARG002 - they are of one memory
        """A caller without a stream waits here."""
        self.synchronize(event)

    # -- tensors

    def wrap(
        self,
        buffer: DeviceBuffer | None,
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        positions: Sequence[int],
        sizes: Sequence[int],
    ) -> list[Any]:
        """The device's memory is the host's, and so are its tensors."""
        owner = _owner_of(buffer) if buffer is not None else None
        return CpuTarget().wrap(owner, dtypes, shapes, positions, sizes)

    def watch(self, tensor: torch.Tensor) -> Callable[[], bool]:
        reference: Any = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return lambda: bool(reference.expired())

    def destination(self, tensor: Any, name: str, dtype: str, shape: Sequence[int]) -> Destination:
        return TorchDestination(tensor, name, dtype, shape, place=(self.name, self._holds), on_host=False)

    def shared_memory(self, tensors: Mapping[str, Any]) -> tuple[str, str] | None:
        return shared_memory(tensors)

    def fill(self, destination: Destination, tensor: Any) -> None:
        self._put(lambda: destination.fill_from(tensor))

    def _holds(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return not tensor.numel() or any(start <= address < start + nbytes for start, nbytes in list(self._memory.items()))

    def _put(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._queue.append(work)
            self._queued += 1

    def _carry_out(self, number: int) -> None:
        with self._lock:
            while self._done < number:
                self._queue.popleft()()
                self._done += 1


def _owner_of(buffer: DeviceBuffer) -> Owner:
    assert isinstance(buffer, Buffer)
    return buffer.owner
