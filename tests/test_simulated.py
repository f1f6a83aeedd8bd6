"""The simulated CUDA runtime is as strict and as late as it says: a test per rule, through ctypes as a program would call it."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import simulated
from headrace.testing.simulated import BuildError, Copy, Direction, SimulatedRuntime, building

PAGE = mmap.PAGESIZE
MIB = 1 << 20
MAP_NORESERVE = 0x4000  # not in Python's module before 3.13
NON_BLOCKING = 1
DISABLE_TIMING = 2
READ_ONLY = 8
OK, INVALID, NO_MEMORY, NO_DRIVER, NO_DEVICE, WRONG_DEVICE = 0, 1, 2, 35, 100, 101
WRONG_HANDLE, NOT_READY, ALREADY, NOT_REGISTERED, UNSUPPORTED = 400, 600, 712, 713, 801
H2D, D2H, D2D, BY_POINTER = 1, 2, 3, 4

P, N, INT, U, F = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_float
OUT = ctypes.POINTER
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "HostRegister": (P, N, U),
    "HostUnregister": (P,),
    "HostAlloc": (OUT(P), N, U),
    "FreeHost": (P,),
    "HostGetFlags": (OUT(U), P),
    "HostGetDevicePointer": (OUT(P), P, U),
    "PointerGetAttributes": (P, P),
    "Malloc": (OUT(P), N),
    "Free": (P,),
    "MallocAsync": (OUT(P), N, P),
    "FreeAsync": (P, P),
    "MemGetInfo": (OUT(N), OUT(N)),
    "MemcpyAsync": (P, P, N, INT, P),
    "Memcpy": (P, P, N, INT),
    "MemsetAsync": (P, INT, N, P),
    "Memset": (P, INT, N),
    "StreamCreate": (OUT(P),),
    "StreamCreateWithFlags": (OUT(P), U),
    "StreamDestroy": (P,),
    "StreamSynchronize": (P,),
    "StreamWaitEvent": (P, P, U),
    "StreamQuery": (P,),
    "EventCreate": (OUT(P),),
    "EventCreateWithFlags": (OUT(P), U),
    "EventDestroy": (P,),
    "EventRecord": (P, P),
    "EventQuery": (P,),
    "EventSynchronize": (P,),
    "EventElapsedTime": (OUT(F), P, P),
    "SetDevice": (INT,),
    "GetDevice": (OUT(INT),),
    "GetDeviceCount": (OUT(INT),),
    "DeviceGetAttribute": (OUT(INT), INT, INT),
    "DeviceGetPCIBusId": (ctypes.c_char_p, INT, INT),
    "DeviceSynchronize": (),
    "RuntimeGetVersion": (OUT(INT),),
    "DriverGetVersion": (OUT(INT),),
    "LaunchHostFunc": (P, P, P),
    "GetLastError": (),
    "PeekAtLastError": (),
    "GetErrorString": (INT,),
    "GetErrorName": (INT,),
}
HIP_NAMES = {"HostAlloc": "HostMalloc", "FreeHost": "HostFree"}
NOT_IN_HIP = {"HostGetDevicePointer"}


class PointerAttributes(ctypes.Structure):
    _fields_ = (("type", INT), ("device", INT), ("device_pointer", P), ("host_pointer", P))


class Cuda:
    """libcudart as a program binds it. Functions by their names without the prefix; the ones below are shorter to read."""

    def __init__(self, path: Path, prefix: str = "cuda") -> None:
        library = ctypes.CDLL(str(path))
        for name, arguments in SIGNATURES.items():
            if prefix == "hip" and name in NOT_IN_HIP:
                continue
            function = getattr(library, prefix + (HIP_NAMES.get(name, name) if prefix == "hip" else name))
            function.argtypes = arguments
            function.restype = ctypes.c_char_p if name.startswith("GetError") else INT
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)

    def made(self, name: str, *arguments: Any) -> int:
        """Call a function that makes something, and give its pointer or handle."""
        found = P()
        assert getattr(self, name)(ctypes.byref(found), *arguments) == OK
        assert found.value is not None
        return found.value

    def device_memory(self, nbytes: int) -> int:
        return self.made("Malloc", nbytes)

    def stream(self, flags: int = NON_BLOCKING) -> int:
        return self.made("StreamCreateWithFlags", flags)

    def event(self, flags: int = DISABLE_TIMING) -> int:
        return self.made("EventCreateWithFlags", flags)

    def recorded(self, stream: int | None) -> int:
        event = self.event()
        assert self.EventRecord(event, stream) == OK
        return event

    def free_and_total(self) -> tuple[int, int]:
        free, total = N(), N()
        assert self.MemGetInfo(ctypes.byref(free), ctypes.byref(total)) == OK
        return free.value, total.value

    def number(self, name: str, *arguments: Any) -> int:
        found = INT(-7)
        assert getattr(self, name)(ctypes.byref(found), *arguments) == OK
        return found.value


class Host:
    """Host memory at an address, page-aligned."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        self._first = ctypes.c_char.from_buffer(mapping)
        self.address = ctypes.addressof(self._first)
        self.nbytes = len(mapping)

    def fill(self, value: int) -> None:
        self.mapping[:] = bytes([value]) * self.nbytes

    def unmap(self) -> None:
        del self._first
        self.mapping.close()


KEPT: list[Host] = []


def host(nbytes: int = PAGE) -> Host:
    """Private memory that stays mapped until the end of the test, unless the test unmaps it."""
    KEPT.append(Host(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))
    return KEPT[-1]


@pytest.fixture(autouse=True)
def runtime() -> Iterator[SimulatedRuntime]:
    if simulated.find_compiler() is None:
        pytest.skip("no C compiler on this machine")
    with SimulatedRuntime() as made:
        yield made
    KEPT.clear()


@pytest.fixture
def cuda(runtime: SimulatedRuntime) -> Cuda:
    return Cuda(runtime.path)


@pytest.fixture
def pinned(cuda: Cuda) -> Host:
    memory = host(4 * PAGE)
    assert cuda.HostRegister(memory.address, memory.nbytes, 0) == OK
    return memory


def in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


def first_byte(runtime: SimulatedRuntime, pointer: int) -> int:
    return runtime.device_bytes(pointer, 1)[0]


ROOT = Path(__file__).parent.parent


def has_gpu() -> bool:
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def acceptance() -> Any:
    """The module behind scripts/gpu."""
    return importlib.import_module("headrace.testing.acceptance._run")


class TestRegistration:
    def test_memory_is_registered_once(self, cuda: Cuda) -> None:
        memory = host(16 * PAGE)
        start = memory.address + 4 * PAGE
        assert cuda.HostRegister(start, 4 * PAGE, 0) == OK
        for offset, nbytes in ((0, 4 * PAGE), (PAGE, PAGE), (-PAGE, 2 * PAGE), (3 * PAGE, 2 * PAGE), (-PAGE, 8 * PAGE)):
            assert cuda.HostRegister(start + offset, nbytes, 0) == ALREADY
        for offset in (-PAGE, 4 * PAGE):
            assert cuda.HostRegister(start + offset, PAGE, 0) == OK

    def test_whole_pages_are_locked_and_neighbours_may_share_one(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        memory = host(4 * PAGE)
        assert cuda.HostRegister(memory.address + 100, PAGE, 0) == OK
        assert runtime.stats().pinned_nbytes == 2 * PAGE
        assert cuda.HostRegister(memory.address, 101, 0) == ALREADY
        assert cuda.HostRegister(memory.address + PAGE + 99, 100, 0) == ALREADY
        assert cuda.HostRegister(memory.address, 100, 0) == OK
        assert cuda.HostRegister(memory.address + PAGE + 100, 100, 0) == OK

    def test_nothing_and_nonsense_are_invalid(self, cuda: Cuda) -> None:
        memory = host()
        assert cuda.HostRegister(memory.address, 0, 0) == INVALID
        assert cuda.HostRegister(None, PAGE, 0) == INVALID
        assert cuda.HostRegister(memory.address, PAGE, 16) == INVALID

    def test_only_a_registered_start_is_unregistered_and_once(self, cuda: Cuda) -> None:
        memory = host(4 * PAGE)
        assert cuda.HostUnregister(memory.address) == NOT_REGISTERED
        cuda.HostRegister(memory.address, 4 * PAGE, 0)
        assert cuda.HostUnregister(memory.address + PAGE) == INVALID
        assert cuda.HostUnregister(memory.address) == OK
        assert cuda.HostUnregister(memory.address) == NOT_REGISTERED
        assert cuda.HostRegister(memory.address, 4 * PAGE, 0) == OK

    def test_every_page_must_be_mapped(self, cuda: Cuda) -> None:
        memory = host(2 * PAGE)
        address = memory.address
        memory.unmap()
        assert cuda.HostRegister(address, 2 * PAGE, 0) == INVALID
        first = mapped_at(None, 3 * PAGE)
        unmapped_at(first + PAGE, PAGE)
        assert cuda.HostRegister(first, 3 * PAGE, 0) == INVALID
        assert cuda.HostRegister(first, PAGE, 0) == OK
        assert cuda.HostUnregister(first) == OK
        unmapped_at(first, 3 * PAGE)

    def test_a_claim_outlives_its_mapping(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        start = mapped_at(None, PAGE)
        assert cuda.HostRegister(start, PAGE, 0) == OK
        unmapped_at(start, PAGE)
        assert mapped_at(start, PAGE) == start
        assert cuda.HostRegister(start, PAGE, 0) == ALREADY
        unmapped_at(start, PAGE)
        assert not runtime.violations()
        assert cuda.HostUnregister(start) == OK
        assert "unmapped" in only(runtime.violations())

    def test_read_only_pages_need_the_flag_and_the_attribute(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        start = mapped_at(None, PAGE, protection=mmap.PROT_READ)
        assert cuda.HostRegister(start, PAGE, 0) == INVALID
        assert cuda.HostRegister(start, PAGE, READ_ONLY) == UNSUPPORTED
        runtime.attribute(113, 1)
        assert cuda.HostRegister(start, PAGE, 0) == INVALID
        assert cuda.HostRegister(start, PAGE, READ_ONLY) == OK
        assert cuda.HostUnregister(start) == OK
        runtime.attribute(113, 0)
        runtime.attribute(100, 1)
        assert cuda.HostRegister(start, PAGE, 0) == OK
        assert cuda.HostUnregister(start) == OK
        unmapped_at(start, PAGE)

    def test_a_device_may_not_register_at_all(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.attribute(99, 0)
        assert cuda.HostRegister(host().address, PAGE, 0) == UNSUPPORTED

    def test_pinned_memory_is_limited_in_all(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.limits(pinned_nbytes=4 * PAGE)
        memory = host(8 * PAGE)
        assert cuda.HostRegister(memory.address, 5 * PAGE, 0) == NO_MEMORY
        assert cuda.HostRegister(memory.address, 3 * PAGE, 0) == OK
        assert cuda.HostRegister(memory.address + 4 * PAGE, 2 * PAGE, 0) == NO_MEMORY
        assert cuda.HostAlloc(ctypes.byref(P()), 2 * PAGE, 0) == NO_MEMORY
        allocated = cuda.made("HostAlloc", PAGE, 0)
        assert cuda.HostRegister(memory.address + 4 * PAGE, PAGE, 0) == NO_MEMORY
        assert cuda.FreeHost(allocated) == OK
        assert cuda.HostRegister(memory.address + 4 * PAGE, PAGE, 0) == OK

    def test_one_registration_is_limited(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.limits(registration_nbytes=2 * PAGE)
        memory = host(8 * PAGE)
        assert cuda.HostRegister(memory.address, 3 * PAGE, 0) == NO_MEMORY
        for segment in range(4):
            assert cuda.HostRegister(memory.address + segment * 2 * PAGE, 2 * PAGE, 0) == OK

    def test_one_registration_ends_below_512_gib(self, cuda: Cuda) -> None:
        start = mapped_at(None, 512 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        assert cuda.HostRegister(start, 512 << 30, 0) == NO_MEMORY
        assert cuda.HostRegister(start, (512 << 30) - PAGE, 0) == OK
        unmapped_at(start, 512 << 30)

    def test_flags_are_those_of_mapped_memory(self, cuda: Cuda, pinned: Host) -> None:
        flags = U(0)
        assert cuda.HostGetFlags(ctypes.byref(flags), pinned.address + 5) == OK
        assert flags.value == 2
        assert cuda.HostGetFlags(ctypes.byref(flags), host().address) == INVALID

    def test_pointers_are_told_apart(self, cuda: Cuda, pinned: Host) -> None:
        device = cuda.device_memory(PAGE)
        strange = host()
        allocated = cuda.made("HostAlloc", PAGE, 0)
        for pointer, kind, number, on_host in (
            (strange.address, 0, -2, strange.address),
            (pinned.address + 9, 1, 0, pinned.address + 9),
            (allocated, 1, 0, allocated),
            (device + 1, 2, 0, None),
        ):
            found = PointerAttributes()
            assert cuda.PointerGetAttributes(ctypes.byref(found), pointer) == OK
            assert (found.type, found.device, found.host_pointer) == (kind, number, on_host)
        found = P()
        assert cuda.HostGetDevicePointer(ctypes.byref(found), pinned.address, 0) == OK
        assert found.value == pinned.address
        assert cuda.HostGetDevicePointer(ctypes.byref(found), strange.address, 0) == INVALID

    def test_allocated_host_memory_is_pinned_and_freed_once(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        pointer = cuda.made("HostAlloc", PAGE + 1, 0)
        ctypes.memset(pointer, 7, PAGE + 1)
        assert runtime.stats().pinned_nbytes == 2 * PAGE
        assert cuda.HostUnregister(pointer) == INVALID
        assert cuda.HostRegister(pointer, PAGE, 0) == ALREADY
        assert cuda.FreeHost(pointer) == OK
        assert cuda.FreeHost(pointer) == INVALID
        assert cuda.FreeHost(None) == OK
        assert runtime.stats().pinned_nbytes == 0


class TestMappings:
    """Which mappings of files can be registered. Measured with io_uring's pins, not seen on a GPU."""

    def check(self, cuda: Cuda, mapping: mmap.mmap, expected: int) -> None:
        memory = Host(mapping)
        assert cuda.HostRegister(memory.address, memory.nbytes, 0) == expected
        if not expected:
            assert cuda.HostUnregister(memory.address) == OK
        memory.unmap()

    def test_memory_files_are_pinned_where_they_lie(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        self.check(cuda, mmap.mmap(-1, PAGE), OK)  # shared and anonymous
        descriptor = os.memfd_create("weights")
        os.ftruncate(descriptor, PAGE)
        self.check(cuda, mmap.mmap(descriptor, PAGE, mmap.MAP_SHARED), OK)
        os.close(descriptor)
        assert runtime.stats().copied_by_pinning_nbytes == 0

    @pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
    def test_files_on_tmpfs_are_pinned_where_they_lie_also_when_deleted(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            path = Path(folder, "with space.bin")
            path.write_bytes(bytes(PAGE))
            with path.open("r+b") as file:
                kept = mmap.mmap(file.fileno(), PAGE, mmap.MAP_SHARED)
                self.check(cuda, mmap.mmap(file.fileno(), PAGE, mmap.MAP_SHARED), OK)
                path.unlink()
                self.check(cuda, kept, OK)
        assert runtime.stats().copied_by_pinning_nbytes == 0

    def test_shared_files_on_a_disk_are_refused(self, cuda: Cuda, disk_file: Path) -> None:
        with disk_file.open("r+b") as file:
            self.check(cuda, mmap.mmap(file.fileno(), PAGE, mmap.MAP_SHARED), INVALID)

    def test_private_files_are_copied_by_pinning(self, cuda: Cuda, runtime: SimulatedRuntime, disk_file: Path) -> None:
        with disk_file.open("r+b") as file:
            self.check(cuda, mmap.mmap(file.fileno(), PAGE, mmap.MAP_PRIVATE), OK)
        assert runtime.stats().copied_by_pinning_nbytes == PAGE


class TestLastError:
    def test_stays_until_it_is_read(self, cuda: Cuda) -> None:
        memory = host()
        cuda.HostRegister(memory.address, 0, 0)
        assert cuda.HostRegister(memory.address, PAGE, 0) == OK
        assert cuda.PeekAtLastError() == INVALID
        assert cuda.PeekAtLastError() == INVALID
        assert cuda.GetLastError() == INVALID
        assert cuda.GetLastError() == OK

    def test_is_the_last_one(self, cuda: Cuda) -> None:
        cuda.HostRegister(host().address, 0, 0)
        cuda.HostUnregister(123)
        assert cuda.GetLastError() == NOT_REGISTERED

    def test_belongs_to_its_thread(self, cuda: Cuda) -> None:
        cuda.HostUnregister(123)
        assert in_thread(lambda: (cuda.GetLastError(), cuda.HostRegister(host().address, 0, 0))) == (OK, INVALID)
        assert cuda.GetLastError() == NOT_REGISTERED

    def test_is_not_what_is_only_not_ready(self, cuda: Cuda, pinned: Host) -> None:
        stream = cuda.stream()
        cuda.MemcpyAsync(cuda.device_memory(PAGE), pinned.address, PAGE, H2D, stream)
        assert cuda.StreamQuery(stream) == NOT_READY
        assert cuda.GetLastError() == OK

    def test_errors_have_names_and_texts(self, cuda: Cuda) -> None:
        assert cuda.GetErrorName(712) == b"cudaErrorHostMemoryAlreadyRegistered"
        assert cuda.GetErrorString(2) == b"out of memory"
        assert cuda.GetErrorName(0) == b"cudaSuccess"
        assert cuda.GetErrorString(54321) == b"unrecognized error code"


class TestLateCopies:
    def test_a_pinned_source_is_read_when_somebody_waits(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, stream = cuda.device_memory(PAGE), cuda.stream()
        pinned.fill(1)
        assert cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream) == OK
        event = cuda.recorded(stream)
        pinned.fill(2)
        assert cuda.EventQuery(event) == NOT_READY
        assert cuda.EventSynchronize(event) == OK
        assert cuda.EventQuery(event) == OK
        pinned.fill(3)
        assert bytes(runtime.device_bytes(target, PAGE)) == bytes([2]) * PAGE

    def test_a_slot_that_waits_for_its_event_can_be_used_again(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        for waits in (False, True):
            target, stream, event = cuda.device_memory(4 * PAGE), cuda.stream(), cuda.event()
            for turn in range(4):
                if waits:
                    cuda.EventSynchronize(event)
                pinned.fill(turn)
                cuda.MemcpyAsync(target + turn * PAGE, pinned.address, PAGE, H2D, stream)
                cuda.EventRecord(event, stream)
            cuda.StreamSynchronize(stream)
            assert [first_byte(runtime, target + turn * PAGE) for turn in range(4)] == ([0, 1, 2, 3] if waits else [3] * 4)

    def test_a_pageable_source_is_read_during_the_call_and_arrives_late(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        memory, target, stream = host(), cuda.device_memory(PAGE), cuda.stream()
        memory.fill(1)
        assert cuda.MemcpyAsync(target, memory.address, PAGE, H2D, stream) == OK
        memory.fill(2)
        memory.unmap()
        assert cuda.StreamQuery(stream) == NOT_READY
        cuda.StreamSynchronize(stream)
        assert first_byte(runtime, target) == 1
        assert (runtime.stats().h2d_pageable_nbytes, runtime.stats().h2d_pinned_nbytes) == (PAGE, 0)
        assert not runtime.violations()

    def test_waiting_carries_out_what_it_needs_and_no_more(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, first, second = cuda.device_memory(4 * PAGE), cuda.stream(), cuda.stream()
        cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, first)
        event = cuda.recorded(first)
        cuda.MemcpyAsync(target + PAGE, pinned.address, PAGE, H2D, first)
        cuda.MemcpyAsync(target + 2 * PAGE, pinned.address, PAGE, H2D, second)
        cuda.EventSynchronize(event)
        assert runtime.stats().finished == 1
        assert cuda.StreamQuery(second) == NOT_READY
        cuda.StreamSynchronize(first)
        assert runtime.stats().finished == 2
        cuda.DeviceSynchronize()
        assert runtime.stats().finished == 3

    def test_released_work_is_carried_out(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, stream = cuda.device_memory(4 * PAGE), cuda.stream()
        for turn in range(4):
            pinned.fill(turn)
            cuda.MemcpyAsync(target + turn * PAGE, pinned.address, PAGE, H2D, stream)
            assert runtime.release(1) == 1
        assert [first_byte(runtime, target + turn * PAGE) for turn in range(4)] == [0, 1, 2, 3]
        assert runtime.release(5) == 0

    def test_whoever_asks_often_enough_gets_an_end_of_it(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        runtime.mode("manual", patience=5)
        target, stream = cuda.device_memory(PAGE), cuda.stream()
        cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream)
        event = cuda.recorded(stream)
        answers = [cuda.EventQuery(event) for _ in range(6)]
        assert answers == [NOT_READY] * 5 + [OK]

    def test_streams_take_turns_by_chance_and_the_seed_decides(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        def order(seed: int) -> list[int]:
            runtime.reset(seed=seed)
            done: list[int] = []
            streams = [cuda.stream() for _ in range(4)]
            for number, stream in enumerate(streams):
                for _ in range(3):
                    runtime.launch(stream, lambda number=number: done.append(number))
            last = cuda.stream()
            for stream in streams:
                cuda.StreamWaitEvent(last, cuda.recorded(stream), 0)
            cuda.StreamSynchronize(last)
            return done

        orders = {tuple(order(seed)) for seed in range(8)}
        assert len(orders) > 4
        assert all(sorted(found) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3] for found in orders)
        assert order(5) == order(5)

    def test_random_mode_may_be_early(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        early = set()
        for seed in range(16):
            runtime.reset(seed=seed)
            runtime.mode("random")
            cuda.HostRegister(pinned.address, pinned.nbytes, 0)
            target, stream = cuda.device_memory(4 * PAGE), cuda.stream()
            for turn in range(4):
                cuda.MemcpyAsync(target + turn * PAGE, pinned.address, PAGE, H2D, stream)
            early.add(runtime.stats().finished)
            while cuda.StreamQuery(stream) == NOT_READY:
                pass
            assert runtime.stats().finished == 4
        assert len(early) > 2


class TestOrder:
    def test_a_stream_is_carried_out_in_order(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, stream = cuda.device_memory(PAGE), cuda.stream()
        pinned.fill(1)
        cuda.MemsetAsync(target, 9, PAGE, stream)
        cuda.MemcpyAsync(target + 1, pinned.address, 2, H2D, stream)
        cuda.MemcpyAsync(target + 100, target, 4, D2D, stream)
        cuda.MemsetAsync(target + 1, 8, 1, stream)
        cuda.StreamSynchronize(stream)
        assert bytes(runtime.device_bytes(target, 5)) == bytes([9, 8, 1, 9, 9])
        assert bytes(runtime.device_bytes(target + 100, 4)) == bytes([9, 1, 1, 9])

    def test_a_stream_waits_for_another_ones_event(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        for seed in range(8):
            runtime.reset(seed=seed)
            cuda.HostRegister(pinned.address, pinned.nbytes, 0)
            pinned.fill(5)
            span, tensor, copies, consumer = cuda.device_memory(PAGE), cuda.device_memory(PAGE), cuda.stream(), cuda.stream()
            cuda.MemcpyAsync(span, pinned.address, PAGE, H2D, copies)
            event = cuda.recorded(copies)
            assert cuda.StreamWaitEvent(consumer, event, 0) == OK
            assert cuda.EventDestroy(event) == OK
            cuda.MemcpyAsync(tensor, span, PAGE, D2D, consumer)
            assert cuda.StreamQuery(consumer) == NOT_READY
            cuda.StreamSynchronize(consumer)
            assert first_byte(runtime, tensor) == 5
            assert not runtime.violations()

    def test_without_a_wait_the_other_stream_may_be_first(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        pinned.fill(5)
        span, tensor, copies, consumer = cuda.device_memory(PAGE), cuda.device_memory(PAGE), cuda.stream(), cuda.stream()
        cuda.MemcpyAsync(span, pinned.address, PAGE, H2D, copies)
        cuda.MemcpyAsync(tensor, span, PAGE, D2D, consumer)
        cuda.StreamSynchronize(consumer)
        assert first_byte(runtime, tensor) == 0xCD

    def test_an_event_never_recorded_is_complete(self, cuda: Cuda) -> None:
        event, stream = cuda.event(), cuda.stream()
        assert cuda.EventQuery(event) == OK
        assert cuda.EventSynchronize(event) == OK
        assert cuda.StreamWaitEvent(stream, event, 0) == OK
        assert cuda.StreamQuery(stream) == OK

    def test_a_wait_means_the_record_at_the_time_of_the_call(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, first, second = cuda.device_memory(2 * PAGE), cuda.stream(), cuda.stream()
        cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, first)
        event = cuda.recorded(first)
        cuda.StreamWaitEvent(second, event, 0)
        cuda.MemcpyAsync(target + PAGE, pinned.address, PAGE, H2D, first)
        cuda.EventRecord(event, first)
        cuda.StreamSynchronize(second)
        assert runtime.stats().finished == 1
        assert cuda.EventQuery(event) == NOT_READY
        assert cuda.EventSynchronize(event) == OK
        assert runtime.stats().finished == 2

    def test_a_wait_does_not_mean_what_was_queued_after_the_record(
        self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host
    ) -> None:
        target, first, second = cuda.device_memory(2 * PAGE), cuda.stream(), cuda.stream()
        cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, first)
        event = cuda.recorded(first)
        cuda.MemcpyAsync(target + PAGE, pinned.address, PAGE, H2D, first)
        cuda.StreamWaitEvent(second, event, 0)
        cuda.StreamSynchronize(second)
        assert runtime.stats().finished == 1

    def test_waits_go_through_several_streams(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        done: list[int] = []
        streams = [cuda.stream() for _ in range(5)]
        for number, stream in enumerate(streams):
            if number:
                cuda.StreamWaitEvent(stream, cuda.recorded(streams[number - 1]), 0)
            runtime.launch(stream, lambda number=number: done.append(number))
        cuda.StreamSynchronize(streams[-1])
        assert done == [0, 1, 2, 3, 4]

    def test_the_null_stream_joins_blocking_streams_only(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        done: list[str] = []
        blocking, free = cuda.made("StreamCreate"), cuda.stream()
        runtime.launch(blocking, lambda: done.append("blocking"))
        runtime.launch(free, lambda: done.append("free"))
        runtime.launch(None, lambda: done.append("null"))
        runtime.launch(blocking, lambda: done.append("blocking again"))
        cuda.StreamSynchronize(blocking)
        assert done == ["blocking", "null", "blocking again"]
        cuda.DeviceSynchronize()
        assert done[3:] == ["free"]

    def test_a_destroyed_stream_still_does_its_work(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, stream = cuda.device_memory(PAGE), cuda.stream()
        pinned.fill(4)
        cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream)
        event = cuda.recorded(stream)
        assert cuda.StreamDestroy(stream) == OK
        cuda.EventSynchronize(event)
        assert first_byte(runtime, target) == 4
        assert not runtime.violations()

    def test_time_between_events(self, cuda: Cuda) -> None:
        stream, found = cuda.stream(), F(-1)
        start, end, without = cuda.event(0), cuda.event(0), cuda.event(DISABLE_TIMING)
        assert cuda.EventElapsedTime(ctypes.byref(found), start, end) == WRONG_HANDLE
        cuda.EventRecord(start, stream)
        cuda.MemsetAsync(cuda.device_memory(PAGE), 0, PAGE, stream)
        cuda.EventRecord(end, stream)
        cuda.EventRecord(without, stream)
        assert cuda.EventElapsedTime(ctypes.byref(found), start, end) == NOT_READY
        cuda.StreamSynchronize(stream)
        assert cuda.EventElapsedTime(ctypes.byref(found), start, without) == WRONG_HANDLE
        assert cuda.EventElapsedTime(ctypes.byref(found), start, end) == OK
        assert found.value >= 0


class TestCopies:
    def test_to_pinned_host_memory_arrives_late(self, cuda: Cuda, pinned: Host) -> None:
        target, stream = cuda.device_memory(PAGE), cuda.stream()
        pinned.fill(1)
        assert cuda.MemcpyAsync(pinned.address, target, PAGE, D2H, stream) == OK
        assert pinned.mapping[0] == 1
        cuda.StreamSynchronize(stream)
        assert pinned.mapping[: PAGE + 1] == b"\xcd" * PAGE + b"\1"

    def test_to_pageable_host_memory_has_arrived_when_the_call_returns(self, cuda: Cuda) -> None:
        memory, target, stream = host(), cuda.device_memory(PAGE), cuda.stream()
        cuda.MemsetAsync(target, 3, PAGE, stream)
        assert cuda.MemcpyAsync(memory.address, target, PAGE, D2H, stream) == OK
        assert memory.mapping[:] == bytes([3]) * PAGE

    def test_without_async_are_done_when_the_call_returns(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target = cuda.device_memory(PAGE)
        pinned.fill(6)
        assert cuda.Memcpy(target, pinned.address, PAGE, H2D) == OK
        pinned.fill(7)
        assert first_byte(runtime, target) == 6
        assert cuda.Memset(target, 1, 1) == OK
        assert cuda.Memcpy(pinned.address, target, PAGE, BY_POINTER) == OK
        assert pinned.mapping[:2] == b"\1\6"

    def test_of_nothing_do_nothing(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        assert cuda.MemcpyAsync(None, None, 0, H2D, cuda.stream()) == OK
        assert runtime.stats().h2d_copies == 0

    def test_must_say_their_direction(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, stream = cuda.device_memory(PAGE), cuda.stream()
        for direction in (0, D2H, D2D):
            assert cuda.MemcpyAsync(target, pinned.address, PAGE, direction, stream) == OK, "the driver goes by the pointers"
        assert len(runtime.violations()) == 3
        assert cuda.MemcpyAsync(target, pinned.address, PAGE, 9, stream) == 21

    def test_must_stay_inside_device_memory(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, stream = cuda.device_memory(100), cuda.stream()
        assert cuda.MemcpyAsync(target + 50, pinned.address, 51, H2D, stream) == INVALID
        assert cuda.MemcpyAsync(pinned.address, target, 101, D2H, stream) == INVALID
        assert cuda.MemsetAsync(target + 50, 0, 51, stream) == INVALID
        assert cuda.MemcpyAsync(target + 50, pinned.address, 50, H2D, stream) == OK
        assert len(runtime.violations()) == 2

    def test_must_stay_inside_one_registration(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        memory, target, stream = host(8 * PAGE), cuda.device_memory(4 * PAGE), cuda.stream()
        for segment in (1, 2, 6):
            cuda.HostRegister(memory.address + segment * PAGE, PAGE, 0)
        for page in (0, 1, 2, 5):  # into one, from one to the next, out of one, into one from far off
            assert cuda.MemcpyAsync(target, memory.address + page * PAGE + 8, 2 * PAGE, H2D, stream) == INVALID
        assert len(runtime.violations()) == 4
        assert cuda.MemcpyAsync(target, memory.address + PAGE, PAGE, H2D, stream) == OK
        assert cuda.MemcpyAsync(target, memory.address + 3 * PAGE, 3 * PAGE, H2D, stream) == OK
        assert len(runtime.violations()) == 4

    def test_from_an_unmapped_pageable_source_are_refused(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        target, stream = cuda.device_memory(PAGE), cuda.stream()
        start = mapped_at(None, PAGE)
        unmapped_at(start, PAGE)
        assert cuda.MemcpyAsync(target, start, PAGE, H2D, stream) == INVALID
        assert "not mapped" in only(runtime.violations())

    def test_are_listed_with_sizes(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, first, second = cuda.device_memory(2 * PAGE), cuda.stream(), cuda.stream()
        cuda.MemcpyAsync(target, pinned.address, 10, H2D, first)
        cuda.MemcpyAsync(target, host().address, 11, H2D, second)
        cuda.MemcpyAsync(target + 100, target, 12, D2D, second)
        cuda.MemcpyAsync(pinned.address, target, 13, D2H, first)
        assert runtime.copies() == [
            Copy(10, 1, Direction.HOST_TO_DEVICE, 0, True),
            Copy(11, 2, Direction.HOST_TO_DEVICE, 0, False),
            Copy(12, 2, Direction.DEVICE_TO_DEVICE, 0, False),
            Copy(13, 1, Direction.DEVICE_TO_HOST, 0, True),
        ]
        found = runtime.stats()
        assert (found.h2d_copies, found.h2d_pinned_nbytes, found.h2d_pageable_nbytes) == (2, 10, 11)
        assert (found.d2d_copies, found.d2d_nbytes, found.d2h_copies, found.d2h_nbytes) == (1, 12, 1, 13)


class TestDeviceMemory:
    def test_is_filled_limited_and_given_back(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.device_memory(MIB)
        pointer = cuda.device_memory(MIB - PAGE + 1)
        assert bytes(runtime.device_bytes(pointer, 5)) == b"\xcd" * 5
        assert cuda.free_and_total() == (0, MIB)
        assert cuda.Malloc(ctypes.byref(P()), 1) == NO_MEMORY
        assert cuda.Free(pointer) == OK
        assert cuda.free_and_total() == (MIB, MIB)
        assert cuda.Malloc(ctypes.byref(P()), (1 << 64) - 1) == NO_MEMORY
        assert (runtime.stats().device_nbytes, runtime.stats().peak_device_nbytes) == (0, MIB)

    def test_of_no_bytes_is_a_null_pointer(self, cuda: Cuda) -> None:
        found = P(5)
        assert cuda.Malloc(ctypes.byref(found), 0) == OK
        assert found.value is None
        assert cuda.Free(None) == OK

    def test_is_freed_once_and_by_its_start(self, cuda: Cuda, pinned: Host) -> None:
        pointer = cuda.device_memory(2 * PAGE)
        assert cuda.Free(pointer + PAGE) == INVALID
        assert cuda.Free(pinned.address) == INVALID
        assert cuda.Free(pointer) == OK
        assert cuda.Free(pointer) == INVALID

    def test_pointers_are_never_given_out_again(self, cuda: Cuda) -> None:
        pointers = []
        for _ in range(8):
            pointers.append(cuda.device_memory(PAGE))
            cuda.Free(pointers[-1])
        assert len(set(pointers)) == 8

    def test_is_closed_to_the_host_before_and_after_copies_and_when_freed(self) -> None:
        done = subprocess.run([sys.executable, "-c", TOUCH], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == [str(int(signal.SIGSEGV))] * 3 + ["0", str(int(signal.SIGSEGV))]

    def test_seen_too_early_is_a_violation(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, stream = cuda.device_memory(2 * PAGE), cuda.stream()
        cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream)
        runtime.device_bytes(target + PAGE, PAGE)
        assert not runtime.violations()
        runtime.device_bytes(target + PAGE - 1, 1)
        assert "is queued" in only(runtime.violations())
        cuda.StreamSynchronize(stream)
        runtime.device_bytes(target, PAGE)
        assert len(runtime.violations()) == 1

    def test_is_looked_at_where_it_is(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target = cuda.device_memory(PAGE)
        for pointer, nbytes in ((pinned.address, 1), (target, PAGE + 1), (target - 1, 1)):
            with pytest.raises(ValueError, match="not device memory"):
                runtime.device_bytes(pointer, nbytes)

    def test_opened_by_a_test_shares_its_bytes(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        target = cuda.device_memory(PAGE)
        with runtime.exposed(target):
            ctypes.memset(target, 5, 3)
        assert bytes(runtime.device_bytes(target, 4)) == b"\5\5\5\xcd"
        with pytest.raises(ValueError, match="not device memory"), runtime.exposed(host().address):
            pass

    def test_of_a_stream_is_freed_in_its_order(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        stream = cuda.stream()
        pointer = cuda.made("MallocAsync", PAGE, stream)
        cuda.MemcpyAsync(pointer, pinned.address, PAGE, H2D, stream)
        assert cuda.FreeAsync(pointer, stream) == OK
        assert cuda.FreeAsync(pinned.address, stream) == INVALID
        assert runtime.live().device_allocated == 1
        cuda.StreamSynchronize(stream)
        assert runtime.live().device_allocated == 0
        assert not runtime.violations()


class TestViolations:
    def queue(self, cuda: Cuda, source: int, nbytes: int = PAGE) -> tuple[int, int]:
        target, stream = cuda.device_memory(nbytes), cuda.stream()
        assert cuda.MemcpyAsync(target, source, nbytes, H2D, stream) == OK
        return target, stream

    def test_unregistering_under_a_queued_copy(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, stream = self.queue(cuda, pinned.address + PAGE)
        assert cuda.HostUnregister(pinned.address) == OK
        assert "cudaHostUnregister" in only(runtime.violations())
        cuda.StreamSynchronize(stream)
        assert "unregistered before" in runtime.violations()[1]
        assert first_byte(runtime, target) == 0xCD

    def test_unregistering_after_the_copy_is_fine(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        _, stream = self.queue(cuda, pinned.address)
        cuda.StreamSynchronize(stream)
        assert cuda.HostUnregister(pinned.address) == OK
        assert not runtime.violations()

    def test_freeing_host_memory_under_a_queued_copy(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        pointer = cuda.made("HostAlloc", PAGE, 0)
        _, stream = self.queue(cuda, pointer)
        assert cuda.FreeHost(pointer) == OK
        assert "cudaFreeHost" in only(runtime.violations())
        cuda.StreamSynchronize(stream)
        assert len(runtime.violations()) == 2

    def test_freeing_device_memory_under_queued_work(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, stream = self.queue(cuda, pinned.address)
        assert cuda.Free(target) == OK
        assert "cudaFree(" in only(runtime.violations())
        cuda.StreamSynchronize(stream)
        assert "freed before" in runtime.violations()[1]
        target = cuda.device_memory(PAGE)
        runtime.launch(stream, lambda _: None, (target, PAGE))
        cuda.Free(target)
        cuda.StreamSynchronize(stream)
        assert "kernel" in runtime.violations()[3]

    def test_unmapping_under_a_queued_copy(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        memory = host()
        cuda.HostRegister(memory.address, PAGE, 0)
        target, stream = self.queue(cuda, memory.address)
        memory.unmap()
        cuda.StreamSynchronize(stream)
        assert "no longer mapped" in only(runtime.violations())
        assert first_byte(runtime, target) == 0xCD

    def test_unmapping_before_unregistering(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        memory = host(2 * PAGE)
        start = memory.address
        cuda.HostRegister(start, 2 * PAGE, 0)
        memory.unmap()
        assert cuda.HostUnregister(start) == OK
        assert "unmapped" in only(runtime.violations())

    def test_using_a_stream_or_an_event_after_its_end(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        target, stream, event = cuda.device_memory(PAGE), cuda.stream(), cuda.event()
        cuda.StreamDestroy(stream)
        cuda.EventDestroy(event)
        assert cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream) == WRONG_HANDLE
        assert cuda.StreamDestroy(stream) == WRONG_HANDLE
        assert cuda.EventRecord(event, None) == WRONG_HANDLE
        assert cuda.EventDestroy(event) == WRONG_HANDLE
        assert ["stream" in line for line in runtime.violations()] == [True, True, False, False]

    def test_handles_of_an_earlier_reset_are_refused_in_silence(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        stream, event, target = cuda.stream(), cuda.event(), cuda.device_memory(PAGE)
        runtime.reset()
        assert cuda.StreamDestroy(stream) == WRONG_HANDLE
        assert cuda.EventDestroy(event) == WRONG_HANDLE
        assert cuda.Free(target) == INVALID
        assert not runtime.violations()


class TestKernels:
    def test_run_in_the_streams_order_on_device_memory(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        def double(source: memoryview, target: memoryview) -> None:
            target[:] = bytes(2 * value for value in source)

        raw, cast, stream = cuda.device_memory(4), cuda.device_memory(4), cuda.stream()
        pinned.mapping[:4] = b"\1\2\3\4"
        cuda.MemcpyAsync(raw, pinned.address, 4, H2D, stream)
        assert runtime.launch(stream, double, (raw, 4), (cast, 4)) == OK
        cuda.MemsetAsync(raw, 0, 4, stream)
        assert runtime.stats().kernels == 0
        cuda.StreamSynchronize(stream)
        assert bytes(runtime.device_bytes(cast, 4)) == b"\2\4\6\10"
        assert runtime.stats().kernels == 1
        assert not runtime.violations()

    def test_must_stay_inside_device_memory(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        assert runtime.launch(None, lambda _: None, (cuda.device_memory(4), 5)) == INVALID
        assert len(runtime.violations()) == 1

    def test_that_raise_are_violations(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.launch(None, lambda: 1 // 0)
        cuda.StreamSynchronize(None)
        assert "ZeroDivisionError" in only(runtime.violations())

    def test_let_go_of_what_they_refer_to(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        class Kernel:
            gone = False

            def __call__(self) -> None:
                pass

            def __del__(self) -> None:
                Kernel.gone = True

        runtime.launch(None, Kernel())
        assert not Kernel.gone
        cuda.StreamSynchronize(None)
        assert Kernel.gone

    def test_may_be_cudas_own_host_functions(self, cuda: Cuda) -> None:
        called: list[int | None] = []
        callback = ctypes.CFUNCTYPE(None, P)(called.append)
        assert cuda.LaunchHostFunc(None, ctypes.cast(callback, P), 77) == OK
        assert not called
        cuda.DeviceSynchronize()
        assert called == [77]
        assert cuda.LaunchHostFunc(None, None, None) == INVALID


class TestDevices:
    @pytest.fixture
    def runtime(self, runtime: SimulatedRuntime) -> SimulatedRuntime:
        runtime.reset(devices=3)
        return runtime

    def test_are_counted_and_chosen_by_thread(self, cuda: Cuda) -> None:
        assert cuda.number("GetDeviceCount") == 3
        assert cuda.SetDevice(2) == OK
        assert cuda.number("GetDevice") == 2
        assert in_thread(lambda: cuda.number("GetDevice")) == 0
        assert cuda.SetDevice(3) == WRONG_DEVICE
        assert cuda.SetDevice(-1) == WRONG_DEVICE
        assert cuda.number("GetDevice") == 2

    def test_may_be_none(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.reset(devices=0)
        assert cuda.GetDeviceCount(ctypes.byref(INT())) == NO_DEVICE
        assert cuda.SetDevice(0) == WRONG_DEVICE

    def test_have_attributes(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        asked = (99, 100, 113, 116, 40, 33, 34, 50)
        assert [cuda.number("DeviceGetAttribute", number, 1) for number in asked] == [1, 0, 0, 1, 3, 0x11, 0, 0]
        runtime.attribute(116, 0, device=1)
        assert [cuda.number("DeviceGetAttribute", 116, device) for device in range(3)] == [1, 0, 1]
        assert cuda.DeviceGetAttribute(ctypes.byref(INT()), 99, 3) == WRONG_DEVICE
        assert cuda.DeviceGetAttribute(ctypes.byref(INT()), 99999, 0) == INVALID

    def test_have_addresses_on_the_bus(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.attribute(33, 0xAB, device=1)
        text = ctypes.create_string_buffer(32)
        assert cuda.DeviceGetPCIBusId(text, 32, 1) == OK
        assert text.value == b"0000:AB:00.0"
        assert cuda.DeviceGetPCIBusId(text, 5, 1) == INVALID

    def test_have_memory_of_their_own(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.device_memory(MIB, device=1)
        cuda.SetDevice(1)
        pointer = cuda.device_memory(MIB)
        assert cuda.free_and_total() == (0, MIB)
        found = PointerAttributes()
        cuda.PointerGetAttributes(ctypes.byref(found), pointer)
        assert (found.type, found.device) == (2, 1)
        cuda.SetDevice(2)
        cuda.device_memory(MIB)
        assert cuda.free_and_total()[1] > MIB

    @pytest.mark.parametrize("call", ["copy", "register", "allocate", "stream"])
    def test_a_thread_that_chose_none_makes_a_context_on_device_0(self, cuda: Cuda, runtime: SimulatedRuntime, call: str) -> None:
        cuda.SetDevice(1)
        memory, target, stream = host(), cuda.device_memory(PAGE), cuda.stream()
        calls = {
            "copy": lambda: cuda.MemcpyAsync(target, memory.address, PAGE, H2D, stream),
            "register": lambda: cuda.HostRegister(memory.address, PAGE, 0),
            "allocate": lambda: cuda.Malloc(ctypes.byref(P()), PAGE),
            "stream": lambda: cuda.StreamCreate(ctypes.byref(P())),
        }
        assert runtime.contexts() == {1}
        assert in_thread(calls[call]) == OK
        assert "never called cudaSetDevice" in runtime.violations()[0]
        assert runtime.contexts() == {0, 1}

    def test_a_thread_that_chose_the_device_does_not(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        cuda.SetDevice(1)
        memory, target, stream = host(), cuda.device_memory(PAGE), cuda.stream()

        def copy() -> tuple[int, ...]:
            return (
                cuda.SetDevice(1),
                cuda.HostRegister(memory.address, PAGE, 0),
                cuda.MemcpyAsync(target, memory.address, PAGE, H2D, stream),
                cuda.StreamSynchronize(stream),
            )

        assert in_thread(copy) == (OK, OK, OK, OK)
        assert not runtime.violations()
        assert runtime.contexts() == {1}

    def test_choosing_a_device_makes_its_context(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        assert runtime.contexts() == set()
        cuda.SetDevice(2)
        assert runtime.contexts() == {2}
        assert in_thread(lambda: cuda.HostRegister(host().address, PAGE, 0)) == OK
        assert len(runtime.violations()) == 1

    def test_a_program_on_device_0_need_not_choose(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        cuda.device_memory(PAGE)
        assert in_thread(lambda: cuda.HostRegister(host().address, PAGE, 0)) == OK
        assert not runtime.violations()

    def test_work_on_a_stream_of_another_device(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        cuda.SetDevice(1)
        target, stream, event = cuda.device_memory(PAGE), cuda.stream(), cuda.event()
        cuda.SetDevice(0)
        assert cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream) == OK
        assert "of device 1 while device 0 is current" in only(runtime.violations())
        assert cuda.EventRecord(event, stream) == OK
        assert cuda.EventRecord(event, cuda.stream()) == WRONG_HANDLE

    def test_waits_join_devices(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        pinned.fill(8)
        source, first = cuda.device_memory(PAGE), cuda.stream()
        cuda.MemcpyAsync(source, pinned.address, PAGE, H2D, first)
        event = cuda.recorded(first)
        cuda.SetDevice(1)
        target, second = cuda.device_memory(PAGE), cuda.stream()
        assert cuda.StreamWaitEvent(second, event, 0) == OK
        assert cuda.MemcpyAsync(target, source, PAGE, D2D, second) == OK
        cuda.DeviceSynchronize()
        assert first_byte(runtime, target) == 8
        assert not runtime.violations()

    def test_synchronizing_one_leaves_the_others(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        for device in range(2):
            cuda.SetDevice(device)
            cuda.MemcpyAsync(cuda.device_memory(PAGE), pinned.address, PAGE, H2D, cuda.stream())
        cuda.DeviceSynchronize()
        assert runtime.stats().finished == 1


class TestFaults:
    @pytest.mark.parametrize(
        "name", sorted(set(SIGNATURES) - {"GetLastError", "PeekAtLastError", "GetErrorString", "GetErrorName"})
    )
    def test_every_function_can_fail_at_the_nth_call(self, cuda: Cuda, runtime: SimulatedRuntime, name: str) -> None:
        arguments = [ctypes.byref(kind._type_()) if isinstance(kind, type(OUT(INT))) else kind() for kind in SIGNATURES[name]]
        runtime.fail("cuda" + name, after=2, code=999)
        assert 999 not in [getattr(cuda, name)(*arguments) for _ in range(2)]
        assert getattr(cuda, name)(*arguments) == 999
        assert cuda.GetLastError() == 999
        assert getattr(cuda, name)(*arguments) != 999
        assert runtime.calls("cuda" + name) == 4

    def test_can_last(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.fail("cudaMalloc", code=2, times=2)
        assert [cuda.Malloc(ctypes.byref(P()), 1) for _ in range(3)] == [2, 2, 0]
        runtime.fail("cudaMalloc", code=2, times=-1)
        assert {cuda.Malloc(ctypes.byref(P()), 1) for _ in range(30)} == {2}

    def test_leave_nothing_half_done(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.fail("cudaHostRegister")
        memory = host()
        assert cuda.HostRegister(memory.address, PAGE, 0) == NO_MEMORY
        assert not runtime.live()
        assert runtime.stats().registrations == 0
        assert cuda.HostRegister(memory.address, PAGE, 0) == OK

    def test_queued_work_that_fails_breaks_the_device(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        runtime.fail("work", after=1, code=700)
        target, stream = cuda.device_memory(2 * PAGE), cuda.stream()
        pinned.fill(1)
        cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream)
        first = cuda.recorded(stream)
        assert cuda.MemcpyAsync(target + PAGE, pinned.address, PAGE, H2D, stream) == OK
        second = cuda.recorded(stream)
        assert cuda.EventSynchronize(first) == OK
        assert cuda.EventSynchronize(second) == 700
        assert first_byte(runtime, target + PAGE) == 0xCD
        assert cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream) == 700
        assert [cuda.EventQuery(second), cuda.StreamQuery(stream), cuda.StreamSynchronize(stream)] == [700] * 3
        assert cuda.DeviceSynchronize() == 700
        assert cuda.HostUnregister(pinned.address) == 700
        assert runtime.live().registered == 0

    def test_have_names(self, runtime: SimulatedRuntime) -> None:
        with pytest.raises(ValueError, match="cudaNothing"):
            runtime.fail("cudaNothing")
        with pytest.raises(ValueError, match="cudaNothing"):
            runtime.calls("cudaNothing")


class TestBooks:
    def test_leaks_are_seen(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        assert not runtime.live()
        memory = host()
        cuda.HostRegister(memory.address, PAGE, 0)
        allocated = [cuda.made("HostAlloc", PAGE, 0) for _ in range(2)]
        device = [cuda.device_memory(PAGE) for _ in range(3)]
        streams = [cuda.stream() for _ in range(4)]
        events = [cuda.event() for _ in range(5)]
        cuda.EventRecord(events[0], None)
        assert runtime.live() == simulated.Live(1, 2, 3, 4, 5)
        cuda.HostUnregister(memory.address)
        for name, pointers in (("FreeHost", allocated), ("Free", device), ("StreamDestroy", streams), ("EventDestroy", events)):
            assert runtime.live()
            for pointer in pointers:
                assert getattr(cuda, name)(pointer) == OK
        assert not runtime.live()

    def test_peak_stays_when_memory_is_given_back(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        first, second = host(2 * PAGE), host(PAGE)
        cuda.HostRegister(first.address, 2 * PAGE, 0)
        cuda.HostUnregister(first.address)
        cuda.HostRegister(second.address, PAGE, 0)
        found = runtime.stats()
        assert (found.peak_pinned_nbytes, found.pinned_nbytes) == (2 * PAGE, PAGE)
        assert (found.registrations, found.unregistrations) == (2, 1)

    def test_waits_are_counted(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        cuda.EventSynchronize(cuda.event())
        cuda.StreamSynchronize(cuda.stream())
        cuda.DeviceSynchronize()
        assert runtime.stats().waits == 3

    def test_reset_forgets(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        runtime.limits(pinned_nbytes=PAGE)
        runtime.fail("cudaMalloc", times=-1)
        cuda.HostUnregister(5)
        cuda.MemcpyAsync(1, 2, 3, H2D, None)
        runtime.reset()
        assert cuda.GetLastError() == OK
        assert (runtime.live(), runtime.violations(), runtime.copies()) == (simulated.Live(0, 0, 0, 0, 0), [], [])
        assert set(vars_of(runtime.stats()).values()) == {0}
        assert cuda.HostRegister(pinned.address, pinned.nbytes, 0) == OK
        assert cuda.device_memory(PAGE)

    def test_sizes_without_bytes(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        runtime.move_bytes(False)
        runtime.device_memory(1 << 40)
        target, stream = cuda.device_memory(433 << 30), cuda.stream()
        before = pinned.mapping[:]
        assert cuda.MemcpyAsync(target + (432 << 30), pinned.address, PAGE, H2D, stream) == OK
        assert cuda.MemcpyAsync(target, host().address, PAGE, H2D, stream) == OK
        assert cuda.MemcpyAsync(pinned.address, target, PAGE, D2H, stream) == OK
        cuda.StreamSynchronize(stream)
        assert pinned.mapping[:] == before
        assert [copy.nbytes for copy in runtime.copies()] == [PAGE] * 3
        assert not runtime.violations()
        with pytest.raises(ValueError, match="with bytes"):
            runtime.device_bytes(target, 1)
        cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream)
        cuda.HostUnregister(pinned.address)
        assert len(runtime.violations()) == 1


class TestTimed:
    def elapsed_ms(self, cuda: Cuda, start: int, end: int) -> float:
        found = F()
        assert cuda.EventElapsedTime(ctypes.byref(found), start, end) == OK
        return found.value

    def test_copies_take_the_time_of_the_bus(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.move_bytes(False)
        memory, target, stream = host(MIB), cuda.device_memory(MIB), cuda.stream()
        cuda.HostRegister(memory.address, MIB, 0)
        runtime.mode("timed", bytes_per_s=1e9)
        start, end = cuda.event(0), cuda.event(0)
        cuda.EventRecord(start, stream)
        for _ in range(4):
            cuda.MemcpyAsync(target, memory.address, MIB, H2D, stream)
        cuda.EventRecord(end, stream)
        assert cuda.EventQuery(end) == NOT_READY
        cuda.EventSynchronize(end)
        assert self.elapsed_ms(cuda, start, end) >= 4 * MIB / 1e6
        assert runtime.stats().finished == 4

    def test_streams_share_the_bus(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.move_bytes(False)
        memory, target = host(MIB), cuda.device_memory(MIB)
        cuda.HostRegister(memory.address, MIB, 0)
        runtime.mode("timed", bytes_per_s=1e9, latency_s=1e-5, jitter_s=1e-5)
        start, ends = cuda.event(0), []
        cuda.EventRecord(start, None)
        for _ in range(4):
            stream, end = cuda.stream(), cuda.event(0)
            cuda.MemcpyAsync(target, memory.address, MIB, H2D, stream)
            cuda.EventRecord(end, stream)
            ends.append(end)
        cuda.DeviceSynchronize()
        assert max(self.elapsed_ms(cuda, start, end) for end in ends) >= 4 * MIB / 1e6

    def test_copies_end_later_than_the_bus_is_free(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        runtime.mode("timed", latency_s=0.01)
        target, stream, start, end = cuda.device_memory(PAGE), cuda.stream(), cuda.event(0), cuda.event(0)
        cuda.EventRecord(start, stream)
        for _ in range(3):
            cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream)
        cuda.EventRecord(end, stream)
        cuda.EventSynchronize(end)
        assert self.elapsed_ms(cuda, start, end) >= 10

    def test_bytes_arrive_and_waits_hold(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        runtime.mode("timed", bytes_per_s=1e9, latency_s=1e-4, jitter_s=1e-4)
        span, tensor, copies, consumer = cuda.device_memory(PAGE), cuda.device_memory(PAGE), cuda.stream(), cuda.stream()
        for turn in range(8):
            pinned.fill(turn)
            cuda.MemcpyAsync(span, pinned.address, PAGE, H2D, copies)
            cuda.StreamWaitEvent(consumer, cuda.recorded(copies), 0)
            cuda.MemcpyAsync(tensor, span, PAGE, D2D, consumer)
            cuda.StreamSynchronize(consumer)
            assert first_byte(runtime, tensor) == turn

    def test_going_back_to_manual_leaves_nobody_waiting(self, cuda: Cuda, runtime: SimulatedRuntime, pinned: Host) -> None:
        runtime.mode("timed", latency_s=3600)
        target, stream = cuda.device_memory(PAGE), cuda.stream()
        cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(cuda.StreamSynchronize, stream)
            runtime.mode("manual")
            assert waiting.result(timeout=30) == OK
        runtime.mode("timed", latency_s=3600)
        cuda.MemcpyAsync(target, pinned.address, PAGE, H2D, stream)
        runtime.mode("timed", latency_s=3600)
        runtime.reset()


class TestThreads:
    @pytest.mark.parametrize("mode", ["manual", "random", "timed"])
    def test_many_load_at_once(self, cuda: Cuda, runtime: SimulatedRuntime, mode: str) -> None:
        runtime.reset(devices=2)
        runtime.mode(mode, bytes_per_s=10e9, latency_s=1e-5, jitter_s=5e-5)
        count, turns = 6, 12
        start = threading.Barrier(count)

        def load(thread: int) -> bool:
            start.wait()
            cuda.SetDevice(thread % 2)
            memory, stream, target = host(2 * PAGE), cuda.stream(), cuda.device_memory(turns * PAGE)
            assert cuda.HostRegister(memory.address, memory.nbytes, 0) == OK
            events = [cuda.event(), cuda.event()]
            for turn in range(turns):
                slot = turn % 2
                assert cuda.EventSynchronize(events[slot]) == OK
                memory.mapping[slot * PAGE : (slot + 1) * PAGE] = bytes([thread * turns + turn]) * PAGE
                assert cuda.MemcpyAsync(target + turn * PAGE, memory.address + slot * PAGE, PAGE, H2D, stream) == OK
                assert cuda.EventRecord(events[slot], stream) == OK
            assert cuda.StreamSynchronize(stream) == OK
            found = [first_byte(runtime, target + turn * PAGE) for turn in range(turns)]
            assert cuda.HostUnregister(memory.address) == OK
            for pointer in events:
                cuda.EventDestroy(pointer)
            cuda.StreamDestroy(stream)
            cuda.Free(target)
            return found == [thread * turns + turn for turn in range(turns)]

        with ThreadPoolExecutor(count) as threads:
            assert list(threads.map(load, range(count))) == [True] * count
        assert not runtime.violations()
        assert not runtime.live()
        assert runtime.stats().h2d_copies == runtime.stats().finished == count * turns

    def test_several_wait_for_the_same_work(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        stream, ran = cuda.stream(), []
        for number in range(50):
            runtime.launch(stream, lambda number=number: ran.append(number))
        event = cuda.recorded(stream)
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda _: cuda.EventSynchronize(event), range(4))) == [OK] * 4
        assert ran == list(range(50))


class TestWithoutDriver:
    def test_every_call_says_so_and_keeps_saying_so(self, cuda: Cuda, runtime: SimulatedRuntime) -> None:
        runtime.driver(False)
        self.check(cuda)
        runtime.driver(True)
        assert cuda.number("GetDeviceCount") == 1

    def test_as_the_real_library_does(self) -> None:
        found = real_libcudart()
        if found is None or has_gpu():
            pytest.skip("no libcudart here, or a driver")
        self.check(Cuda(found))

    def check(self, cuda: Cuda) -> None:
        memory, count = host(), INT(-1)
        assert cuda.GetDeviceCount(ctypes.byref(count)) == NO_DRIVER
        assert cuda.HostRegister(memory.address, PAGE, 0) == NO_DRIVER
        assert cuda.Malloc(ctypes.byref(P()), PAGE) == NO_DRIVER
        assert cuda.StreamCreateWithFlags(ctypes.byref(P()), NON_BLOCKING) == NO_DRIVER
        assert cuda.EventCreateWithFlags(ctypes.byref(P()), DISABLE_TIMING) == NO_DRIVER
        assert cuda.DeviceGetAttribute(ctypes.byref(count), 99, 0) == NO_DRIVER
        assert [cuda.GetLastError() for _ in range(3)] == [NO_DRIVER] * 3
        assert cuda.number("DriverGetVersion") == 0
        assert cuda.number("RuntimeGetVersion") > 0


class TestHip:
    def test_has_every_function_under_its_own_name(self, runtime: SimulatedRuntime) -> None:
        hip = Cuda(runtime.path, "hip")
        memory, target, stream = host(), hip.device_memory(PAGE), hip.stream()
        memory.fill(3)
        assert hip.HostRegister(memory.address, PAGE, 0) == OK
        assert hip.HostRegister(memory.address, PAGE, 0) == ALREADY
        assert hip.GetLastError() == ALREADY
        assert hip.MemcpyAsync(target, memory.address, PAGE, H2D, stream) == OK
        assert hip.EventSynchronize(hip.recorded(stream)) == OK
        assert first_byte(runtime, target) == 3
        assert hip.HostUnregister(memory.address) == OK

    def test_numbers_attributes_its_own_way(self, runtime: SimulatedRuntime) -> None:
        hip = Cuda(runtime.path, "hip")
        runtime.attribute(33, 0x21)
        runtime.attribute(50, 3)
        assert [hip.number("DeviceGetAttribute", number, 0) for number in (2, 66, 67, 68, 69)] == [3, 0, 0x21, 0, 3]
        for number in (33, 34, 50, -1):
            assert hip.DeviceGetAttribute(ctypes.byref(INT()), number, 0) == INVALID
        text = ctypes.create_string_buffer(32)
        assert hip.DeviceGetPCIBusId(text, 32, 0) == OK
        assert text.value == b"0003:21:00.0"

    def test_fails_by_either_name(self, runtime: SimulatedRuntime) -> None:
        hip = Cuda(runtime.path, "hip")
        for name in ("hipHostMalloc", "cudaHostAlloc"):
            runtime.fail(name, code=999)
            assert hip.HostAlloc(ctypes.byref(P()), PAGE, 0) == 999
        assert runtime.calls("hipHostMalloc") == 2


class TestBuilding:
    def test_library_is_made_once(self) -> None:
        made = simulated.library_path().stat()
        assert simulated.library_path().stat() == made

    def test_signatures_are_those_of_cudas_header(self) -> None:
        headers = cuda_headers()
        if headers is None:
            pytest.skip("no CUDA headers on this machine")
        compiler, folder = simulated.find_compiler(), Path(simulated.__file__).parent
        assert compiler is not None
        command = [compiler, "-std=gnu11", "-fsyntax-only", "-Werror", "-DSIM_WITH_CUDA_HEADERS", f"-I{headers}"]
        done = subprocess.run([*command, *map(str, folder.glob("*.c"))], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    def test_without_a_compiler_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda _: None)
        with pytest.raises(BuildError, match="install gcc"):
            building.build("nothing", [])

    def test_the_compilers_complaint_is_in_the_error(self, tmp_path: Path, cache: Path) -> None:
        source = tmp_path / "wrong.c"
        source.write_text("#error this cannot be built\n")
        with pytest.raises(BuildError, match="this cannot be built"):
            building.build("wrong", [source])
        assert [path for path in cache.rglob("*") if path.is_file()] == []

    @pytest.mark.usefixtures("cache")
    def test_another_source_is_another_library(self, tmp_path: Path) -> None:
        source = tmp_path / "small.c"
        paths = set()
        for value in (1, 2):
            source.write_text(f"{VISIBLE}int value(void) {{ return {value}; }}\n")
            paths.add(building.build("small", [source]))
            paths.add(building.build("small", [source]))
        assert len(paths) == 2

    def test_many_may_build_at_once(self, tmp_path: Path, cache: Path) -> None:
        source = tmp_path / "small.c"
        source.write_text(VISIBLE + "int value(void) { return 7; }\n")
        with ThreadPoolExecutor(4) as threads:
            paths = set(threads.map(lambda _: building.build("small", [source]), range(4)))
        assert ctypes.CDLL(str(only(list(paths)))).value() == 7
        assert [path.name for path in next(cache.iterdir()).iterdir()] == [only(list(paths)).name]

    def test_a_folder_that_others_can_write_to_is_refused(self, cache: Path) -> None:
        folder = cache / f"headrace-simulated-{os.getuid()}"
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.raises(BuildError, match="only this user"):
            simulated.library_path()

    @pytest.mark.slow
    def test_wheels_contain_the_sources(self, tmp_path: Path) -> None:
        builders = pytest.importorskip("hatchling.builders.wheel")
        (made,) = builders.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
        folder = Path(simulated.__file__).parent
        names = set(
            subprocess.run(
                [sys.executable, "-m", "zipfile", "-l", made], capture_output=True, text=True, check=True
            ).stdout.split()
        )
        for source in (*folder.glob("*.c"), *folder.glob("*.h")):
            assert f"headrace/testing/simulated/{source.name}" in names

    @pytest.fixture
    def cache(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        folder = tmp_path / "cache"
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        return folder


class TestAcceptance:
    """scripts/gpu: the same questions to a real driver and to the simulator."""

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.defpath, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [ROOT / "scripts" / "gpu", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)

    @pytest.mark.slow
    @pytest.mark.skipif(has_gpu(), reason="there is a GPU")
    @pytest.mark.skipif(not (ROOT / ".venv/bin/python").exists(), reason="no .venv beside the scripts")
    def test_a_python_without_torch_is_passed_over(self, tmp_path: Path) -> None:
        for name in ("python3", "python"):  # first on the path, as a system's own is
            (tmp_path / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
            (tmp_path / name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.defpath}"}
        command = [ROOT / "scripts" / "gpu", "--simulated"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout
        assert "FAILED" not in done.stdout

    @pytest.mark.skipif(has_gpu(), reason="there is a GPU")
    def test_without_a_gpu_nothing_is_tested_and_nothing_fails(self, tmp_path: Path) -> None:
        for arguments in ([], ["--json", tmp_path / "answers.json"]):
            done = self.run(*arguments)
            assert (done.returncode, done.stderr) == (0, "")
            assert "nothing was tested" in done.stdout
        assert not list(tmp_path.iterdir())

    @pytest.mark.slow
    def test_the_simulator_answers_every_question(self, tmp_path: Path) -> None:
        done = self.run("--simulated", "--json", tmp_path / "answers.json", "--folder", tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "no GPU was used" in done.stdout
        answers = json.loads((tmp_path / "answers.json").read_text())["simulated"]
        assert {name: "the probe" in found for name, found in answers.items()} == dict.fromkeys(acceptance().probes.RULES, False)
        assert answers["register"]["neighbour on the same page"] == OK
        assert answers["late"]["pinned: overwriting the source changes what arrives"] is True

    def test_answers_are_compared_one_by_one(self) -> None:
        rows = acceptance().compare({"same": 0, "other": 1, "asked of one": 2}, {"same": 0, "other": 712, "new": True})
        assert rows == [
            ("same", "0", "0", True),
            ("other", "1", "712", False),
            ("asked of one", "2", "not answered", False),
            ("new", "not answered", "True", False),
        ]

    def test_a_difference_is_the_exit_status(self) -> None:
        show, said = acceptance().show_compared, list[str]()
        assert show({"register": {"again": 712}}, {"register": {"again": 712}}, {}, said.append) == 0
        assert show({"register": {"again": 0}}, {"register": {"again": 712}}, {"machine": {"devices": 1}}, said.append) == 1
        assert "DIFFERS" in "\n".join(said)

    def test_without_a_compiler_the_bytes_of_loads_still_count(self) -> None:
        show, said = acceptance().show_compared, list[str]()
        real = {"register": {"again": 0}, "load bytes": {"leased": "equal", "held": "equal"}}
        assert show(real, {}, {}, said.append) == 0
        real["load bytes"]["held"] = "1 of 40 differ, the first is t00"
        assert show(real, {}, {}, said.append) == 1
        assert "1 of 2 loads are equal; no C compiler" in said[-1]

    def test_a_probe_that_hangs_or_dies_is_given_up(self, tmp_path: Path) -> None:
        ask = acceptance().ask
        assert "did not end" in str(ask("register", "simulated", tmp_path, 0.001)["the probe"])
        assert "KeyError" in str(ask("no such probe", "simulated", tmp_path, 60)["the probe"])

    def test_the_simulator_takes_the_real_devices_attributes(self) -> None:
        machine = {"devices": 2, "attribute 113: read-only registration": 1, "attribute 99: host register": 1}
        assert acceptance().simulated_like(machine) == "simulated 113=1 99=1"


VISIBLE = '__attribute__((visibility("default"))) '
TOUCH = """
import ctypes, os, signal
from headrace.testing.simulated import SimulatedRuntime

def touched(pointer):
    child = os.fork()
    if not child:
        ctypes.string_at(pointer, 1)
        os._exit(0)
    print(os.waitpid(child, 0)[1] & 0x7F)

with SimulatedRuntime() as runtime:
    cuda = runtime.library
    pointer = ctypes.c_void_p()
    cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(5000))
    touched(pointer.value)
    touched(pointer.value + 4999)
    cuda.cudaMemset(pointer, 1, ctypes.c_size_t(5000))
    cuda.cudaDeviceSynchronize()
    touched(pointer.value)
    with runtime.exposed(pointer.value):
        touched(pointer.value)
    cuda.cudaFree(pointer)
    touched(pointer.value)
"""


def only(items: list[Any]) -> Any:
    (item,) = items
    return item


def vars_of(stats: simulated.Stats) -> dict[str, int]:
    return {name: getattr(stats, name) for name in stats.__slots__}


def libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype, library.mmap.argtypes = P, (P, N, INT, INT, INT, ctypes.c_long)
    library.munmap.argtypes = (P, N)
    return library


def mapped_at(
    address: int | None,
    nbytes: int,
    *,
    protection: int = mmap.PROT_READ | mmap.PROT_WRITE,
    flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
) -> int:
    """Map fresh pages, at this address where one is given; unlike `mmap.mmap` it can be unmapped in part."""
    found = libc().mmap(address, nbytes, protection, flags, -1, 0)
    assert found not in (None, P(-1).value)
    return int(found)


def unmapped_at(address: int, nbytes: int) -> None:
    assert libc().munmap(address, nbytes) == 0


@pytest.fixture
def disk_file(tmp_path: Path) -> Path:
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=False).stdout.strip()
    if kind in ("", "tmpfs", "ramfs"):
        pytest.skip(f"the folder for temporary files lies on {kind or 'an unknown filesystem'}")
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(PAGE))
    return path


def real_libcudart() -> Path | None:
    patterns = ["/usr/local/cuda*/lib*/libcudart.so*"]
    patterns += [f"{folder}/nvidia/**/libcudart.so*" for folder in sys.path if folder.endswith("-packages")]
    found = [path for pattern in patterns for path in sorted(glob.glob(pattern, recursive=True))]
    return Path(found[0]) if found else None


def cuda_headers() -> Path | None:
    found = sorted(glob.glob("/usr/local/cuda*/include/cuda_runtime_api.h"))
    return Path(found[-1]).parent if found else None


def test_leaving_the_context_resets(runtime: SimulatedRuntime) -> None:
    with contextlib.suppress(KeyError), SimulatedRuntime() as again:
        again.fail("cudaMalloc", times=-1)
        raise KeyError
    assert Cuda(runtime.path).device_memory(PAGE)
