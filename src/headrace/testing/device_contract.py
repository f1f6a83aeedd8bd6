"""The contract of devices as tests that every adapter passes, those of other packages too.

Subclass the suite in a test module, say in `make` how to get the device, and in `bytes_of` how to see what a tensor of it holds
where `tensor.cpu()` does not show it; pytest runs it:

    class TestMyDevice(DeviceTests):
        def make(self):
            return MyDevice()

It looks at what the pipeline relies on: order by events, tensors that own their memory, and loads that are right bit for bit. How
quick a device is, it does not see. It needs torch, and no pytest.
"""

from __future__ import annotations

import gc
import json
import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

import headrace
from headrace._addresses import address_of, view_at
from headrace._dtypes import DTYPES
from headrace.devices.base import Device, DeviceBuffer
from headrace.devices.tensors import torch_form
from headrace.errors import DeviceMemoryError, OptionError
from headrace.sources.memory import MemorySource
from headrace.testing.sources import error_of, pattern

_T = TypeVar("_T")

NBYTES = 1 << 20
CASTS = (("F32", "BF16"), ("F32", "F16"), ("F16", "F32"), ("BF16", "F32"))


class DeviceTests:
    """What every `Device` does. Subclasses override `make`, and `bytes_of` where tensors cannot be moved to the CPU."""

    device: Device

    def make(self) -> Device:
        """Open the device; whoever makes it closes it."""
        raise NotImplementedError

    def bytes_of(self, tensor: torch.Tensor) -> bytes:
        """What a tensor of the device holds, once it was handed over."""
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    def setup_method(self) -> None:
        """Called by pytest before each test."""
        self.device = self.make()

    def reading(self, call: Callable[[], _T]) -> _T:
        """Do something on a thread that was started for the device, as readers are."""
        with ThreadPoolExecutor(1, initializer=self.device.enter_thread) as thread:
            return thread.submit(call).result()

    def pinned(self, data: bytes) -> tuple[int, object]:
        """Page-locked memory with this content."""
        address, owner = self.device.allocate_pinned(len(data))
        view_at(address, len(data), owner)[:] = data
        return address, owner

    def handed_over(self, buffer: DeviceBuffer, event: Any, dtype: str = "U8") -> torch.Tensor:
        """All of a buffer as one tensor."""
        self.device.hand_over(event, [buffer])
        count = buffer.nbytes * 8 // DTYPES[dtype].bits
        (tensor,) = self.device.wrap(buffer, [dtype], [(count,)], [0], [buffer.nbytes])
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def test_says_what_it_is(self) -> None:
        assert self.device.name not in ("", "cpu", "shared-cpu")
        assert self.device.in_place_refused is None or self.device.in_place_refused
        assert self.device.pins_read_only in (True, False)
        assert self.reading(self.device.free_nbytes) >= 0
        self.reading(self.device.keep_near)

    def test_an_event_that_was_never_recorded_is_done(self) -> None:
        def ask() -> None:
            event = self.device.new_event()
            assert self.device.is_done(event)
            self.device.synchronize(event)
            self.device.destroy([event])

        self.reading(ask)

    def test_a_copy_has_arrived_when_its_event_is_done(self) -> None:
        data, device = pattern(NBYTES), self.device
        address, owner = self.reading(lambda: self.pinned(data))

        def copy() -> tuple[DeviceBuffer, Any]:
            buffer, event = device.allocate(NBYTES), device.new_event()
            for start in range(0, NBYTES, NBYTES // 4):
                device.copy_async(buffer.address + start, address + start, NBYTES // 4)
            device.record(event)
            device.synchronize(event)
            assert device.is_done(event)
            return buffer, event

        buffer, event = self.reading(copy)
        assert self.bytes_of(self.handed_over(buffer, event)) == data
        device.destroy([event])
        del owner

    def test_what_is_queued_is_done_in_order_and_handed_over_behind_it(self) -> None:
        """Nobody waits but `hand_over`: the first copy is moved on before the second one overwrites it."""
        first, second, device = pattern(NBYTES), pattern(NBYTES)[::-1], self.device
        (here, owner), (there, other) = self.reading(lambda: (self.pinned(first), self.pinned(second)))

        def queue() -> tuple[DeviceBuffer, DeviceBuffer, Any]:
            buffer, moved, event = device.allocate(NBYTES), device.allocate(NBYTES), device.new_event()
            device.copy_async(buffer.address, here, NBYTES)
            device.move_async(moved.address, buffer.address, NBYTES)
            device.copy_async(buffer.address, there, NBYTES)
            device.record(event)
            return buffer, moved, event

        buffer, moved, event = self.reading(queue)
        assert self.bytes_of(self.handed_over(buffer, event)) == second
        assert self.bytes_of(self.handed_over(moved, event)) == first
        self.reading(lambda: device.destroy([event]))
        del owner, other

    def test_an_event_may_be_recorded_again(self) -> None:
        device = self.device
        address, owner = self.reading(lambda: self.pinned(pattern(NBYTES)))

        def again() -> None:
            buffer, event = device.allocate(NBYTES), device.new_event()
            for _ in range(3):
                device.copy_async(buffer.address, address, NBYTES)
                device.record(event)
                device.synchronize(event)
            device.drain()
            assert device.is_done(event)
            device.destroy([event])

        self.reading(again)
        del owner

    def test_converts_with_the_bits_of_tensor_to(self) -> None:
        device, counts = self.device, (1000, 1, 7)
        for dtype, wanted in CASTS:
            kinds = [torch_form(name, (1,), 1)[0] for name in (dtype, wanted)]
            values = torch.linspace(-70_000.0, 70_000.0, sum(counts)).to(kinds[0])
            expected = torch.cat([part.to(kinds[1]) for part in torch.split(values, list(counts))])
            data = values.view(torch.uint8).numpy().tobytes()
            address, owner = self.reading(lambda data=data: self.pinned(data))  # type: ignore[misc]

            def convert(
                address: int = address, nbytes: int = len(data), dtypes: tuple[str, str] = (dtype, wanted)
            ) -> tuple[DeviceBuffer, DeviceBuffer, Any]:
                raw, made = device.allocate(nbytes), device.allocate(sum(counts) * DTYPES[dtypes[1]].bits // 8)
                event = device.new_event()
                device.copy_async(raw.address, address, nbytes)
                device.convert(raw, made, dtypes, counts)
                device.record(event)
                return raw, made, event

            raw, made, event = self.reading(convert)
            assert self.bytes_of(self.handed_over(made, event, wanted)) == self.bytes_of(expected), (dtype, wanted)
            device.destroy([event])
            del owner, raw

    def test_memory_of_the_host_is_pinned_and_unpinned(self) -> None:
        device, data = self.device, pattern(NBYTES)
        with mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
            mapping[:] = data
            view = memoryview(mapping)
            address = address_of(view)
            view.release()

            def copy() -> tuple[DeviceBuffer, Any]:
                device.pin(address, NBYTES)
                buffer, event = device.allocate(NBYTES), device.new_event()
                device.copy_async(buffer.address, address, NBYTES)
                device.record(event)
                device.drain()
                return buffer, event

            buffer, event = self.reading(copy)
            device.unpin(address)  # the caller's thread, as the collector may
            assert self.bytes_of(self.handed_over(buffer, event)) == data
            device.destroy([event])

    def test_a_copy_of_memory_that_is_not_pinned_arrives(self) -> None:
        device, data = self.device, bytearray(pattern(NBYTES))

        def copy() -> tuple[DeviceBuffer, Any]:
            buffer, event = device.allocate(NBYTES), device.new_event()
            device.copy_async(buffer.address, address_of(memoryview(data)), NBYTES, pinned=False)
            device.record(event)
            device.synchronize(event)
            return buffer, event

        buffer, event = self.reading(copy)
        assert self.bytes_of(self.handed_over(buffer, event)) == data
        device.destroy([event])

    def test_more_memory_than_there_is_raises_with_what_was_asked_for(self) -> None:
        error = self.reading(lambda: error_of(DeviceMemoryError, self.device.allocate, 1 << 60))
        assert (error.requested, error.device) == (1 << 60, self.device.name)

    def test_tensors_of_every_dtype_lie_where_they_should(self) -> None:
        for dtype in DTYPES:
            nbytes = DTYPES[dtype].bits  # of eight elements
            buffer, event = self._filled(pattern(256))
            self.device.hand_over(event, [buffer])
            tensor, empty = self.device.wrap(buffer, [dtype, dtype], [(2, 4), (0, 4)], [64, 64 + nbytes], [nbytes, 0])
            kind, dimensions = torch_form(dtype, (2, 4), nbytes)
            assert (tensor.dtype, tuple(tensor.shape)) == (kind, tuple(dimensions)), dtype
            assert self.bytes_of(tensor) == pattern(256)[64 : 64 + nbytes], dtype
            assert not empty.numel()
            self.device.destroy([event])

    def test_tensors_of_one_buffer_have_storages_and_version_counters_of_their_own(self) -> None:
        buffer, event = self._filled(pattern(256))
        self.device.hand_over(event, [buffer])
        with torch.inference_mode():
            one, other = self.device.wrap(buffer, ["F32", "F32"], [(8,), (8,)], [0, 32], [32, 32])
        assert not one.is_inference()
        version = other._version
        one.add_(1)
        assert (other._version, self.bytes_of(other)) == (version, pattern(256)[32:64])
        assert one.untyped_storage().nbytes() == 32
        self.device.destroy([event])

    def test_memory_that_no_tensor_uses_is_seen_to_be_free(self) -> None:
        buffer, event = self._filled(pattern(256))
        tensor = self.handed_over(buffer, event)
        is_gone = self.device.watch(tensor)
        view = tensor[4:]
        del buffer, tensor
        assert not is_gone()
        del view
        gc.collect()
        assert is_gone()
        self.device.destroy([event])

    def test_tensors_of_the_host_are_no_destinations(self) -> None:
        error = error_of(OptionError, self.device.destination, torch.zeros(4), "t", "F32", (4,))
        assert error.option == "into"

    def test_reads_from_many_threads_at_once(self) -> None:
        device, start, data = self.device, threading.Barrier(4), pattern(NBYTES)

        def copy(turn: int) -> tuple[DeviceBuffer, Any, object]:
            address, owner = self.pinned(data)
            buffer, event = device.allocate(NBYTES), device.new_event()
            start.wait()
            for _ in range(8):
                device.copy_async(buffer.address, address, NBYTES)
                device.record(event)
            device.synchronize(event)
            return buffer, event, (owner, turn)

        with ThreadPoolExecutor(4, initializer=device.enter_thread) as threads:
            made = list(threads.map(copy, range(4)))
        for buffer, event, _ in made:
            assert self.bytes_of(self.handed_over(buffer, event)) == data
        device.destroy([event for _, event, _ in made])

    def test_a_checkpoint_is_loaded_bit_for_bit(self) -> None:
        values = {f"t{i}": torch.arange(i * 1000, i * 1500 + 5, dtype=torch.float32).sin() for i in range(24)}
        data = _checkpoint(values)
        loaded = headrace.load(MemorySource(data), device=self.device)
        assert list(loaded) == list(values)
        for name, tensor in loaded.items():
            assert self.bytes_of(tensor) == self.bytes_of(values[name]), name
        cast = headrace.load(MemorySource(data), device=self.device, dtype="bfloat16")
        for name, tensor in cast.items():
            assert self.bytes_of(tensor) == self.bytes_of(values[name].to(torch.bfloat16)), name

    def test_a_load_fills_tensors_that_are_there_already(self) -> None:
        values, others = ({"t": torch.arange(start, start + 70_000)} for start in (0, 9))
        there = headrace.load(MemorySource(_checkpoint(values)), device=self.device)
        filled = headrace.load(MemorySource(_checkpoint(others)), device=self.device, into=there)
        assert filled["t"] is there["t"]
        assert self.bytes_of(there["t"]) == self.bytes_of(others["t"])

    def _filled(self, data: bytes) -> tuple[DeviceBuffer, Any]:
        """Device memory with this content, and the event behind it."""

        def fill() -> tuple[DeviceBuffer, Any]:
            address, owner = self.pinned(data)
            buffer, event = self.device.allocate(len(data)), self.device.new_event()
            self.device.copy_async(buffer.address, address, len(data))
            self.device.record(event)
            self.device.synchronize(event)
            del owner
            return buffer, event

        return self.reading(fill)


def _checkpoint(values: dict[str, torch.Tensor]) -> bytes:
    names = {torch.float32: "F32", torch.int64: "I64"}
    at, header, data = 0, dict[str, Any](), []
    for name, tensor in values.items():
        nbytes = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + nbytes]}
        data.append(tensor.view(torch.uint8).numpy().tobytes())
        at += nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data)
