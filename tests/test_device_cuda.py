"""The runtime library through ctypes, and a device made of it: every call checked, no error left for others, order by events."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import KIB, MIB
from simulated_gpu import Gpu, needs_compiler, simulated_gpu

import headrace
from headrace._addresses import address_of
from headrace._dtypes import DTYPES
from headrace.devices.cuda import Runtime, mapped_library, open_device
from headrace.devices.cuda._runtime import cpus_of_node
from headrace.errors import DeviceError, DeviceMemoryError, PinningError

pytestmark = [pytest.mark.timeout(60), needs_compiler]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated_gpu() as made:
        made.device.enter_thread()
        yield made


@pytest.fixture
def memory() -> Iterator[memoryview]:
    mapping = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(mapping)
    view[:] = bytes(range(256)) * 4096
    yield view
    view.release()
    mapping.close()


# ---- the library


CALLS: dict[str, tuple[Callable[[Any], object], type[DeviceError]]] = {
    "HostRegister": (lambda library: library.register(4096, 4096), PinningError),
    "HostUnregister": (lambda library: library.unregister(4096), DeviceError),
    "HostAlloc": (lambda library: library.allocate_host(4096), PinningError),
    "FreeHost": (lambda library: library.free_host(4096), DeviceError),
    "Malloc": (lambda library: library.allocate_device(4096), DeviceMemoryError),
    "MemGetInfo": (lambda library: library.memory_info(), DeviceError),
    "MemcpyAsync": (lambda library: library.copy_to_device(4096, 4096, 1, 0, pinned=True), DeviceError),
    "EventCreateWithFlags": (lambda library: library.new_event(), DeviceError),
    "EventRecord": (lambda library: library.record(0, 0), DeviceError),
    "EventQuery": (lambda library: library.is_done(0), DeviceError),
    "EventSynchronize": (lambda library: library.synchronize(0), DeviceError),
    "EventDestroy": (lambda library: library.destroy_event(0), DeviceError),
    "StreamWaitEvent": (lambda library: library.wait(0, 0), DeviceError),
    "StreamSynchronize": (lambda library: library.drain(0), DeviceError),
    "SetDevice": (lambda library: library.set_device(0), DeviceError),
    "GetDevice": (lambda library: library.current_device(), DeviceError),
    "GetDeviceCount": (lambda library: library.device_count(), DeviceError),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [1, 2, 35, 719])
def test_a_failure_takes_the_last_error_back_and_says_what_failed(gpu: Gpu, call: str, code: int) -> None:
    function, kind = CALLS[call]
    gpu.runtime.fail(f"cuda{call}", code=code)
    with pytest.raises(DeviceError) as caught:
        function(gpu.device.library)
    assert type(caught.value) is kind
    assert caught.value.device == "simulated:0"
    assert f"cuda{call}" in str(caught.value)
    assert str(code) in str(caught.value)
    assert gpu.runtime.library.cudaGetLastError() == 0


def test_an_event_that_is_not_done_leaves_no_error_behind(gpu: Gpu, memory: memoryview) -> None:
    target, event = gpu.device.allocate(MIB), gpu.device.new_event()
    gpu.device.pin(address_of(memory), MIB)
    gpu.device.copy_async(target.address, address_of(memory), MIB)
    gpu.device.record(event)
    assert not gpu.device.is_done(event)
    assert gpu.runtime.library.cudaGetLastError() == 0
    gpu.device.synchronize(event)
    assert gpu.device.is_done(event)
    assert gpu.runtime.device_bytes(target.address, MIB) == memory
    gpu.device.unpin(address_of(memory))
    gpu.device.destroy([event])
    del target


def test_hip_has_the_same_calls_under_its_own_names(gpu: Gpu, memory: memoryview) -> None:
    library = Runtime(str(gpu.runtime.path), prefix="hip", device="cuda:0")
    library.register(address_of(memory), MIB)
    library.unregister(address_of(memory))
    with pytest.raises(DeviceError) as caught:
        library.unregister(address_of(memory))
    assert "hipHostUnregister" in str(caught.value)
    library.free_host(library.allocate_host(4096))


def test_without_a_driver_every_call_says_so(gpu: Gpu) -> None:
    gpu.runtime.driver(False)
    for function, _ in CALLS.values():
        with pytest.raises(DeviceError) as caught:
            function(gpu.device.library)
        assert "35" in str(caught.value)
    gpu.runtime.driver(True)
    gpu.runtime.library.cudaGetLastError()


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="torch has mapped one of its own")
def test_the_librarys_path_is_the_one_that_the_process_has_mapped(gpu: Gpu) -> None:
    assert mapped_library() == (str(gpu.runtime.path), "cuda")


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", [0, 1, 2, 3, 8]), ("5", [5]), ("", []), ("no list", [])],
)
def test_the_cpus_of_a_node_are_parsed(text: str, cpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert list(cpus_of_node(0)) == cpus


# ---- a GPU that is not there


def test_a_gpu_that_torch_cannot_use_is_refused_with_the_reason() -> None:
    if torch.cuda.is_available():  # noqa: TID251
        pytest.skip("there is a GPU")
    for index in (None, 0, 7):
        with pytest.raises(DeviceError, match="torch") as caught:
            open_device(index)
        assert caught.value.device == "cuda"


@pytest.mark.gpu
@pytest.mark.leaky_ok("the driver opens its files once in a process")
def test_a_load_to_the_gpu_brings_the_bytes_of_a_load_to_the_host(tmp_path: Path) -> None:
    from checkpoints import mixed_contents, write, wrong

    contents = mixed_contents()
    path = write(tmp_path / "m.safetensors", contents, data_start=1)
    loaded = headrace.load(path, device="cuda")
    assert not wrong({name: tensor.cpu() for name, tensor in loaded.items()}, contents)


# ---- memory and order


def test_no_room_is_a_memory_error_that_says_how_much_there_is(gpu: Gpu) -> None:
    gpu.runtime.device_memory(MIB)
    with pytest.raises(DeviceMemoryError) as caught:
        gpu.device.allocate(2 * MIB)
    assert (caught.value.requested, caught.value.free) == (2 * MIB, MIB)
    assert gpu.runtime.library.cudaGetLastError() == 0


def test_free_memory_counts_what_the_allocator_keeps(gpu: Gpu) -> None:
    gpu.runtime.device_memory(4 * MIB)
    buffer = gpu.device.allocate(3 * MIB)
    assert gpu.device.free_nbytes() == MIB
    del buffer
    assert gpu.device.free_nbytes() == 4 * MIB


def test_the_callers_stream_waits_for_a_hand_over_and_the_caller_does_not(gpu: Gpu, memory: memoryview) -> None:
    device, runtime = gpu.device, gpu.runtime
    target, event = device.allocate(MIB), device.new_event()
    device.pin(address_of(memory), MIB)
    device.copy_async(target.address, address_of(memory), MIB)
    device.record(event)
    device.runtime.wait(device.allocator.current_stream(), event)
    assert runtime.stats().finished == 0
    device.hand_over(event, [target])
    assert bytes(runtime.device_bytes(target.address, MIB)) == bytes(memory)
    device.unpin(address_of(memory))
    device.destroy([event])
    del target


def test_work_of_the_callers_comes_before_what_is_queued_afterwards(gpu: Gpu) -> None:
    device, runtime = gpu.device, gpu.runtime
    target, order = device.allocate(KIB), list[str]()
    assert runtime.launch(0, lambda _: order.append("caller"), (target.address, KIB)) == 0
    device.await_caller()
    assert runtime.launch(device.copy_stream, lambda _: order.append("copy stream"), (target.address, KIB)) == 0
    device.drain()
    assert order == ["caller", "copy stream"]
    del target


def test_a_thread_that_enters_works_on_the_device(gpu: Gpu) -> None:
    seen: list[int] = []

    def work() -> None:
        gpu.device.enter_thread()
        gpu.device.keep_near()
        seen.append(gpu.device.library.current_device())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert seen == [0]


# ---- tensors


@pytest.mark.parametrize("dtype", [name for name, dtype in DTYPES.items() if dtype.torch is not None])
def test_tensors_have_dtype_shape_and_a_storage_of_their_own(gpu: Gpu, dtype: str) -> None:
    nbytes = 12 * DTYPES[dtype].bits // 8
    buffer = gpu.device.allocate(1024)
    one, other, empty = gpu.device.wrap(buffer, [dtype] * 3, [(3, 4), (12,), (0, 8)], [0, 256, 512], [nbytes, nbytes, 0])
    kind = getattr(torch, str(DTYPES[dtype].torch))
    assert one.dtype == other.dtype == empty.dtype == kind
    assert one.untyped_storage().nbytes() == one.numel() * one.element_size() == nbytes
    assert one.data_ptr() == buffer.address
    assert other.data_ptr() == buffer.address + 256
    assert empty.numel() == 0
    assert one.is_contiguous()


def test_a_tensor_keeps_its_memory_and_the_last_one_gives_it_back(gpu: Gpu) -> None:
    buffer = gpu.device.allocate(1024)
    tensors = gpu.device.wrap(buffer, ["U8"] * 2, [(512,)] * 2, [0, 512], [512] * 2)
    address = buffer.address
    del buffer
    gpu.device.allocator.collect()
    assert address in gpu.device.allocator.blocks
    view = tensors.pop()[5:]
    tensors.clear()
    gpu.device.allocator.collect()
    assert address in gpu.device.allocator.blocks
    del view
    gpu.device.allocator.collect()
    assert address not in gpu.device.allocator.blocks


def test_a_tensor_alone_in_its_memory_is_the_allocation_itself(gpu: Gpu) -> None:
    """Then `record_stream` of the caller's reaches the allocator, which does not know parts of an allocation."""
    buffer = gpu.device.allocate(1024)
    (tensor,) = gpu.device.wrap(buffer, ["F32"], [(256,)], [0], [1024])
    assert tensor.untyped_storage()._cdata == buffer.tensor.untyped_storage()._cdata  # type: ignore[attr-defined]
    del buffer, tensor


def test_watching_a_tensor_tells_when_its_memory_is_no_longer_used(gpu: Gpu) -> None:
    buffer = gpu.device.allocate(1024)
    tensors = gpu.device.wrap(buffer, ["U8"] * 2, [(512,)] * 2, [0, 512], [512] * 2)
    is_gone = gpu.device.watch(tensors[0])
    view = tensors[0][3:]
    tensors.clear()
    assert not is_gone()
    del view
    assert is_gone()
    del buffer


def test_a_destination_lies_on_the_device_it_is_for(gpu: Gpu) -> None:
    given = gpu.device.tensor(torch.zeros(3, 4))
    destination = gpu.device.destination(given, "t", "F32", (3, 4))
    assert (destination.address, destination.memory) == (given.data_ptr(), None)
    with pytest.raises(headrace.OptionError, match=r"'t'.*simulated:0"):
        gpu.device.destination(torch.zeros(3, 4), "t", "F32", (3, 4))
    del given, destination


def test_the_null_pointer_is_no_memory(gpu: Gpu) -> None:
    with pytest.raises(DeviceError):
        gpu.device.copy_async(0, 0, 5)
    assert ctypes.c_int(gpu.runtime.library.cudaGetLastError()).value == 0
    gpu.runtime.violations()
    gpu.runtime.reset()
    gpu.device.__init__(gpu.runtime)  # type: ignore[misc]  # for the look at the end


def test_the_simulated_allocator_loses_no_block_whose_event_cannot_be_made(gpu: Gpu) -> None:
    # Found by the soak: what fails on purpose is not to look like a leak of headrace's.
    with gpu.device.allocator.stream(gpu.device.allocator.new_stream()):
        tensor = gpu.device.tensor(torch.ones(4))
    gpu.runtime.fail("cudaEventCreateWithFlags", after=gpu.runtime.calls("cudaEventCreateWithFlags"))
    del tensor
    gpu.device.allocator.collect()
    assert not gpu.device.allocator.blocks
