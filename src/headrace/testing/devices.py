"""A GPU that is simulated: the device of `headrace.devices.cuda` over the simulated runtime, for tests on any machine.

    with SimulatedRuntime() as runtime:
        device = SimulatedDevice(runtime)
        tensors = headrace.load("model.safetensors", device=device)

All but the allocator is the code that a GPU runs. The allocator does what torch's does, in the order of the streams: a block
belongs to the stream it was allocated on and is handed out again as soon as its last tensor is gone, unless another stream was
recorded on it; then it waits until that stream is through. Tensors are torch's CPU tensors over simulated device memory, closed
to the host until the stream that the caller works on is through with what was queued.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace._addresses import owner_at
from headrace.devices.base import Destination
from headrace.devices.cuda import CudaDevice, Runtime
from headrace.errors import DeviceError, DeviceMemoryError, PinningError
from headrace.testing.simulated import SimulatedRuntime

_ROUND = 512  # as torch's allocator rounds


@dataclass(eq=False, slots=True)
class _Block:
    """Device memory. `users`: streams that were recorded on it; `events`: what has to be done before it is used again."""

    address: int
    nbytes: int
    users: set[int] = field(default_factory=set)
    events: list[int] = field(default_factory=list)
    visible: bool = False


class _Watch(weakref.ref[Any]):
    """Knows when a block's tensors are gone. No `weakref.finalize`: threads make them while the interpreter ends, and its list of
    all of those must not change then."""

    __slots__ = ("block",)
    block: _Block
    __hash__ = object.__hash__  # a reference's own hash is its referent's, and writable memory has none
    __eq__ = object.__eq__


class SimulatedAllocator:
    """See `headrace.devices.cuda.Allocator`.

    Attributes:
        blocks: device memory that tensors live in now.
        host_blocks: page-locked memory that it gave and that is still used.
    """

    def __init__(self, runtime: SimulatedRuntime, library: _Library, index: int, name: str) -> None:
        self._simulated, self._runtime, self._index, self._name = runtime, library, index, name
        self._current = threading.local()
        with self.current():
            self.copy_stream = library.new_stream()
        self._streams = [self.copy_stream]
        self.blocks: dict[int, _Block] = {}
        self.host_blocks: set[int] = set()
        self._free: list[_Block] = []
        self._returned: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._watches: dict[int, _Watch] = {}
        self._lock = threading.RLock()

    @contextmanager
    def current(self) -> Iterator[None]:
        """As torch's guard: a device without a context does not become the current one again, which would make one there."""
        before = self._runtime.current_device()
        if before != self._index:
            self._runtime.set_device(self._index)
        try:
            yield
        finally:
            if before != self._index and before in self._simulated.contexts():
                self._runtime.set_device(before)

    # -- memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        size = -(-nbytes // _ROUND) * _ROUND
        with self._lock:
            self.collect()
            block = self._reused(size) or self._fresh(size, nbytes)
            self.blocks[block.address] = block
            self._hide(block)
        owner = owner_at(block.address, nbytes, None)
        watch = _Watch(owner, self._returned.put)  # no more than that: the collector may run while the lock is held
        watch.block = block
        self._watches[block.address] = watch
        return torch.frombuffer(owner, dtype=torch.uint8)

    def _reused(self, size: int) -> _Block | None:
        """A free block that nobody uses any more, in the order of the copy stream."""
        for block in self._free:
            if size <= block.nbytes <= 2 * size and all(map(self._runtime.is_done, block.events)):
                self._free.remove(block)
                self._forget_events(block)
                return block
        return None

    def _fresh(self, size: int, nbytes: int) -> _Block:
        try:
            return _Block(self._runtime.allocate_device(size), size)
        except DeviceMemoryError:
            self.empty_cache()
        try:
            return _Block(self._runtime.allocate_device(size), size)
        except DeviceMemoryError as exc:
            free = self._runtime.memory_info()[0]
            raise DeviceMemoryError(
                f"{self._name} has no room for {nbytes:,} bytes", device=self._name, requested=nbytes, free=free
            ) from exc

    def collect(self) -> None:
        """Take back the blocks whose tensors are gone."""
        with self._lock:
            while not self._returned.empty():
                block = self._returned.get().block
                self._watches.pop(block.address, None)
                self.blocks.pop(block.address, None)
                for stream in sorted(block.users):
                    try:
                        event = self._runtime.new_event()
                    except DeviceError:  # a test lets one fail; the block is not to be lost for that
                        self._runtime.drain(stream)
                        continue
                    block.events.append(event)
                    self._runtime.record(event, stream)
                block.users.clear()
                self._free.append(block)

    def empty_cache(self) -> None:
        """Give free memory back to the device, once the streams are through with it."""
        with self._lock:
            self.collect()
            for block in self._free:
                for event in block.events:
                    self._runtime.synchronize(event)
                self._forget_events(block)
                self._runtime.drain(self.copy_stream)
                self._hide(block)
                self._runtime.free_device(block.address)
            self._free.clear()

    def allocate_pinned(self, nbytes: int) -> tuple[int, object]:
        try:
            address = self._runtime.allocate_host(nbytes)
        except PinningError as exc:
            raise PinningError(f"no {nbytes:,} page-locked bytes from the allocator: {exc}", device=self._name) from exc
        self.host_blocks.add(address)
        owner = owner_at(address, nbytes, None)
        weakref.finalize(owner, self._free_host, address).atexit = False
        return address, owner

    def _free_host(self, address: int) -> None:
        self.host_blocks.discard(address)
        self._runtime.free_host(address)

    def free_nbytes(self) -> int:
        with self._lock:
            self.collect()
            return self._runtime.memory_info()[0] + sum(block.nbytes for block in self._free)

    def close(self) -> None:
        """Give everything back, for a test that looks for leaks."""
        self.empty_cache()
        for stream in self._streams:
            self._runtime.destroy_stream(stream)

    def _forget_events(self, block: _Block) -> None:
        for event in block.events:
            self._runtime.destroy_event(event)
        block.events.clear()

    # -- streams

    def current_stream(self) -> int:
        return int(getattr(self._current, "stream", 0))

    def new_stream(self) -> int:
        """A stream for a program to work on; `close` gives it back."""
        with self.current():
            self._streams.append(self._runtime.new_stream())
        return self._streams[-1]

    @contextmanager
    def stream(self, handle: int) -> Iterator[None]:
        """Make a stream the current one of this thread for a while."""
        before = self.current_stream()
        self._current.stream = handle
        try:
            yield
        finally:
            self._current.stream = before

    def use(self, tensors: Sequence[torch.Tensor]) -> None:
        """Record the current stream, and open the memory when it is through with what it was given: as a program that
        synchronizes before it looks."""
        stream = self.current_stream()
        self._runtime.drain(stream)
        with self._lock:
            for tensor in tensors:
                block = self._block_of(tensor)
                if block is not None:
                    block.users.add(stream)
                    self._show(block)

    def _block_of(self, tensor: torch.Tensor) -> _Block | None:
        address = tensor.data_ptr()
        return next((block for block in self.blocks.values() if block.address <= address < block.address + block.nbytes), None)

    def _show(self, block: _Block) -> None:
        try:
            self._simulated.device_bytes(block.address, block.nbytes)  # a violation where a copy into it is still queued
        except ValueError:  # the runtime keeps no bytes: there is nothing to see
            return
        if not block.visible:
            block.visible = True
            self._simulated.library.sim_expose(block.address, True)

    def _hide(self, block: _Block) -> None:
        if block.visible:
            block.visible = False
            self._simulated.library.sim_expose(block.address, False)

    @contextmanager
    def collective(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Gloo works in the host's memory, and at once: so all that was queued is done first, and the memory is open."""
        self._runtime.drain(self.copy_stream)
        with self._lock:
            for tensor in tensors:
                block = self._block_of(tensor)
                if block is not None:
                    self._show(block)
        yield

    # -- kernels

    def convert(self, source: torch.Tensor, target: torch.Tensor, counts: Sequence[int]) -> None:
        kinds, counts = (source.dtype, target.dtype), list(counts)

        def kernel(raw: memoryview, made: memoryview) -> None:
            values, converted = torch.frombuffer(raw, dtype=kinds[0]), torch.frombuffer(made, dtype=kinds[1])
            at = 0
            for count in counts:  # on a CPU neighbours may change the payload of a NaN; a GPU treats every element alike
                converted[at : at + count].copy_(values[at : at + count])
                at += count

        spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in (source, target)]
        if self._simulated.launch(self.copy_stream, kernel, *spans):
            raise DeviceError("the kernel could not be queued", device=self._name)

    def fill(self, destination: Destination, tensor: torch.Tensor) -> None:
        """At once, when the copy stream is through: torch's strided copy needs memory that it can reach."""
        self._runtime.drain(self.copy_stream)
        block = self._block_of(tensor)
        if block is not None:
            self._show(block)
        destination.fill_from(tensor)

    # -- tensors

    def holds(self, tensor: torch.Tensor) -> bool:
        return not tensor.numel() or self._block_of(tensor) is not None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


class SimulatedDevice(CudaDevice):
    """A simulated GPU, for `device=`.

    Args:
        runtime: the simulated runtime, which carries queued work out and counts what is done wrong.
        index: of the device.
        prefix: of the runtime's functions: "cuda" or "hip".
        direct: the library that reads files into its memory (`headrace.testing.simulated.cufile`); None: there is none.
    """

    allocator: SimulatedAllocator

    def __init__(
        self,
        runtime: SimulatedRuntime,
        index: int = 0,
        *,
        prefix: str = "cuda",
        direct: str | os.PathLike[str] | None = None,
    ) -> None:
        name = f"simulated:{index}"
        library = _Library(str(runtime.path), prefix=prefix, device=name)
        self.direct_libraries = (os.fspath(direct) if direct is not None else "no library was given",)
        super().__init__(library, SimulatedAllocator(runtime, library, index, name), index=index, name=name)
        self.library = library

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor of the caller's on this device, with these values, in the memory of its own and visible to the host."""
        with self.allocator.current():
            whole = self.allocator.allocate(max(1, values.nbytes))
            self.allocator.use([whole])
        made = whole[: values.nbytes].view(values.dtype).view(values.shape)
        made.copy_(values)
        return made

    def close(self) -> None:
        """Give back what the allocator keeps, and its stream."""
        with self.allocator.current():
            self.allocator.close()


class _Library(Runtime):
    """What only the simulated allocator calls: on a GPU it is torch that does."""

    def allocate_device(self, nbytes: int) -> int:
        """Raises `DeviceMemoryError`."""
        found = ctypes.c_void_p()
        self._check(self._Malloc(ctypes.byref(found), nbytes), "Malloc", f"{nbytes:,} bytes", DeviceMemoryError)
        return found.value or 0

    def free_device(self, address: int) -> None:
        self._check(self._Free(address), "Free")

    def new_stream(self) -> int:
        found = ctypes.c_void_p()
        self._check(self._StreamCreateWithFlags(ctypes.byref(found), 1), "StreamCreateWithFlags")
        return found.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._check(self._StreamDestroy(stream), "StreamDestroy")
