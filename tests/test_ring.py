"""The ring of page-locked slots: which memory is made and registered, when, and how it goes."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from checkpoints import KIB, MIB
from simulated_gpu import Gpu, needs_compiler, simulated_gpu

from headrace import _ring
from headrace._ring import Ring, Slot
from headrace.devices.base import DeviceBuffer
from headrace.errors import DeviceError, PinningError, StreamError

pytestmark = [pytest.mark.timeout(60), needs_compiler]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated_gpu() as made:
        yield made


@contextmanager
def ring_of(
    gpu: Gpu, slots: int, *, slot_nbytes: int = 64 * KIB, pin: str = "auto", say: Callable[[str], None] = print
) -> Iterator[Ring]:
    gpu.device.enter_thread()
    ring = Ring(gpu.device, slots=slots, slot_nbytes=slot_nbytes, pin=pin, on_degraded=say)
    try:
        yield ring
    finally:
        ring.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-pin")]


def fill(slot: Slot, byte: int) -> memoryview:
    slot.view[:] = bytes([byte]) * slot.view.nbytes
    return slot.view


def copy_to(gpu: Gpu, target: DeviceBuffer) -> Callable[[int, memoryview, bool], None]:
    """What queues the copy of a slot to the i-th place of a buffer."""

    def issue(i: int, data: memoryview, pinned: bool) -> None:
        source = ctypes.addressof(ctypes.c_char.from_buffer(data))
        gpu.device.copy_async(target.address + i * data.nbytes, source, data.nbytes, pinned=pinned)

    return issue


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("mode", ["manual", "random"])
def test_slots_are_used_again_only_when_their_copies_are_done(slots: int, mode: str) -> None:
    with simulated_gpu(mode) as gpu, ring_of(gpu, slots) as ring:
        target = gpu.device.allocate(20 * 64 * KIB)
        for i in range(20):
            slot = ring.take()
            data = ring.settle(slot, fill(slot, i + 1))
            ring.send(slot, copy_to(gpu, target), i, data)
        gpu.device.drain()
        found = gpu.runtime.device_bytes(target.address, target.nbytes)
        assert [set(found[i * 64 * KIB : (i + 1) * 64 * KIB]) for i in range(20)] == [{i + 1} for i in range(20)]
        del target, found


def test_slots_that_nobody_needs_get_no_memory(gpu: Gpu) -> None:
    with ring_of(gpu, 64) as ring:
        target = gpu.device.allocate(64 * KIB)
        for _ in range(30):
            slot = ring.take()
            ring.send(slot, copy_to(gpu, target), 0, ring.settle(slot, slot.view))
            gpu.device.drain()
        assert ring.used_nbytes <= 2 * 64 * KIB
        assert gpu.runtime.stats().peak_pinned_nbytes <= 2 * 64 * KIB
        del target


def test_segments_grow_from_one_slot_to_the_largest_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ring, "SEGMENT_NBYTES", 8 * MIB)
    segments = _ring._segments(50, MIB, 0)
    assert [segment.last - segment.first for segment in segments] == [1, 1, 2, 4, 8, 8, 8, 8, 8, 2]
    assert [segment.first for segment in segments[1:]] == [segment.last for segment in segments[:-1]]


def test_the_first_slot_can_be_filled_before_it_is_registered(gpu: Gpu) -> None:
    registering, go_on = threading.Event(), threading.Event()
    pin = gpu.device.pin

    def slow_pin(address: int, nbytes: int) -> None:
        registering.set()
        assert go_on.wait(30)
        pin(address, nbytes)

    gpu.device.pin = slow_pin  # type: ignore[method-assign]
    with ring_of(gpu, 3) as ring:
        slot = ring.take()
        assert registering.wait(30)
        data = fill(slot, 7)
        assert ring.pinned is None
        go_on.set()
        ring.settle(slot, data)
        assert ring.pinned is True
        ring.put_back(slot)


def test_taking_from_a_closed_ring_and_sending_into_one_raises(gpu: Gpu) -> None:
    with ring_of(gpu, 2) as ring:
        slot = ring.take()
    with pytest.raises(StreamError):
        ring.take()
    with pytest.raises(StreamError):
        ring.send(slot, lambda _, __: pytest.fail("nothing may be queued"), 0, slot.view)
    ring.close()


def test_closing_waits_for_the_copies_and_then_unregisters(gpu: Gpu) -> None:
    target = gpu.device.allocate(3 * 64 * KIB)
    with ring_of(gpu, 4) as ring:
        for i in range(3):
            slot = ring.take()
            ring.send(slot, copy_to(gpu, target), i, ring.settle(slot, fill(slot, i)))
        assert gpu.runtime.stats().finished == 0
    stats, live = gpu.runtime.stats(), gpu.runtime.live()
    assert (stats.finished, live.registered, live.events) == (3, 0, 0)
    assert stats.registrations == stats.unregistrations > 0
    del target


def test_a_ring_that_is_forgotten_after_a_close_goes_with_its_memory(gpu: Gpu) -> None:
    with ring_of(gpu, 2) as ring:
        ring.put_back(ring.take())
        region = ring._memory.region
    del ring
    gc.collect()
    assert len(gc.get_referrers(region)) <= 1


def test_an_unregistration_that_fails_leaves_the_memory_mapped(gpu: Gpu) -> None:
    with ring_of(gpu, 1) as ring:
        slot = ring.take()
        ring.settle(slot, slot.view)
        address = ring._memory.region.address
        gpu.runtime.fail("cudaHostUnregister", code=719)
    del ring, slot
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert any(int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16) for line in maps)
    gpu.device.unpin(address)


def test_the_ladder_goes_from_segments_to_slots_to_the_allocator_to_pageable(gpu: Gpu) -> None:
    said: list[str] = []
    gpu.runtime.limits(registration_nbytes=128 * KIB)
    with ring_of(gpu, 16, say=said.append) as ring:
        for _ in range(16):
            slot = ring.take()
            ring.settle(slot, slot.view)
        assert ring.pinned is True
        assert "smaller pieces" in ring.how
    assert said == []
    gpu.runtime.limits(pinned_nbytes=3 * 64 * KIB, registration_nbytes=0)
    with ring_of(gpu, 8, say=said.append) as ring:
        slots = [ring.take() for _ in range(8)]
        for slot in slots:
            ring.settle(slot, slot.view)
        assert sum(slot.pinned for slot in slots) == 3
        assert ring.pinned is False
        assert "not page-locked" in ring.how
        del slots, slot
    assert len(said) == 1
    assert "HostRegister" in said[0]


def test_bytes_that_were_read_before_the_allocator_gave_its_memory_come_along(gpu: Gpu) -> None:
    gpu.runtime.fail("cudaHostRegister", times=-1)
    with ring_of(gpu, 1) as ring:
        slot = ring.take()
        before = slot.view
        data = ring.settle(slot, fill(slot, 9)[5:1000])
        assert bytes(data) == bytes([9]) * 995
        assert slot.view is not before
        assert slot.pinned
        ring.put_back(slot)
        del slot, data, before


def test_require_raises_where_nothing_can_be_page_locked(gpu: Gpu) -> None:
    gpu.runtime.limits(pinned_nbytes=0)
    with ring_of(gpu, 2, pin="require") as ring:
        slot = ring.take()
        with pytest.raises(PinningError) as caught:
            ring.settle(slot, slot.view)
        assert caught.value.device == "simulated:0"
        ring.put_back(slot)


def test_off_registers_nothing_and_starts_no_thread(gpu: Gpu) -> None:
    with ring_of(gpu, 2, pin="off") as ring:
        slot = ring.take()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-pin")]
        ring.settle(slot, slot.view)
        assert ring.pinned is False
        ring.put_back(slot)
    assert gpu.runtime.stats().registrations == 0


def test_a_copy_that_no_event_tells_of_ends_the_ring_and_is_waited_for(gpu: Gpu) -> None:
    copy = copy_to(gpu, gpu.device.allocate(64 * KIB))
    gpu.runtime.fail("cudaEventRecord", code=1)
    with ring_of(gpu, 2) as ring:
        slot, other = ring.take(), ring.take()
        data = ring.settle(slot, slot.view)
        with pytest.raises(DeviceError) as caught:
            ring.send(slot, copy, 0, data)
        for use in (
            ring.take,  # the slot may still be read by the device
            partial(ring.send, other, copy, 1, data),
            partial(ring.send_outside, copy, 1, data),
        ):
            with pytest.raises(DeviceError, match="cudaEventRecord") as again:
                use()
            assert again.value is not caught.value  # its traceback would hold memory
    assert gpu.runtime.stats().finished == 1


def test_a_copy_that_cannot_be_waited_for_leaves_its_slot_in_flight(gpu: Gpu) -> None:
    target = gpu.device.allocate(64 * KIB)
    with ring_of(gpu, 1) as ring:
        slot = ring.take()
        ring.send(slot, copy_to(gpu, target), 0, ring.settle(slot, slot.view))
        gpu.runtime.fail("cudaEventSynchronize", code=1)
        with pytest.raises(DeviceError):
            ring.take()
    assert gpu.runtime.stats().finished == 1
    del target
