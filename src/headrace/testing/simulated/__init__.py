"""A CUDA runtime without a GPU: a shared library with libcudart's names that is as strict and as late as CUDA allows.

What binds libcudart through ctypes loads `SimulatedRuntime.path` instead; HIP's names are there as well. The class has the
controls of the test: when queued work is carried out, limits, faults, several devices, and what was counted or done wrong.

    with SimulatedRuntime() as runtime:
        library = ctypes.CDLL(str(runtime.path))
        ...
        assert not runtime.violations()
        assert not runtime.live()

Rules
- Work on a stream is carried out when the host waits for it (`manual`, the default), by chance (`random`), or after a delay and
  at the speed of a bus (`timed`). A pinned source is read at that moment, a pageable one during the call, as the driver does.
- Device memory is filled with 0xCD and closed to the host: touching its pointer ends in SIGSEGV, also after it was freed.
- Registering refuses zero bytes, unmapped pages, and pages without write access (1), pages that are registered already (712),
  read-only registration where the device lacks it (801), and what is over a limit (2). Unregistering a strange pointer gives 713.
- A thread keeps its last error until `cudaGetLastError` reads it, success does not clear it, and `cudaErrorNotReady` counts.
- Violations are noted, and the program goes on: unregistering, freeing or unmapping memory that queued work still uses, reading
  device memory too early, a copy across the end of a registration, streams and events used after their end, work on a stream of
  a device that is not current, and a call that makes a context on device 0 because its thread never called `cudaSetDevice`.

From headers (CUDA 13.0), NVIDIA's documentation and the libcudart of CUDA 13 without a driver: names, signatures, codes, the
meaning of records and waits, refusal of copies that are pinned in part, the mode without a driver.
From public reports only, not seen on a GPU: 712 for neighbours on one page, unaligned registrations, refusals by kind of mapping
(shared files on a disk, read-only pages), `cudaDevAttrHostRegisterReadOnlySupported` = 0, the cap of 512 GiB per registration,
flags of registered memory, the device of unregistered pointers, what is still possible after queued work failed.
Stricter than CUDA is known to be: a copy from one registration into the next and one against its direction give 1 (CUDA leaves
both open), and freeing under queued work is a violation although cudaFree may wait.
A mapping that took the place of one which was unmapped too early looks like the first one.
Not simulated: torch's allocators, capture, peer access, the per-thread default stream, the speed of a GPU.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.testing.simulated.building import BuildError, build, find_compiler

__all__ = ["BuildError", "Copy", "Direction", "Live", "SimulatedRuntime", "Stats", "find_compiler", "library_path"]

_HERE = Path(__file__).parent
_SOURCES = tuple(_HERE / name for name in ("runtime.c", "memory.c", "streams.c", "controls.c", "hip.c"))
_HEADERS = (_HERE / "simulation.h",)
_NO_LIMIT = (1 << 64) - 1
_LARGEST_REGISTRATION = (512 << 30) - 1
_MODES = {"manual": 0, "timed": 1, "random": 2}


def library_path() -> Path:
    """Path of the simulated libcudart; it is compiled when it is not there yet.

    Raises:
        BuildError: no compiler, or it failed.
    """
    return build("libcudart-simulated", _SOURCES, _HEADERS)


@dataclass(frozen=True, slots=True)
class Stats:
    """What the runtime did since the last reset.

    Attributes:
        h2d_pinned_nbytes, h2d_pageable_nbytes: bytes of host-to-device copies, by the kind of their source.
        h2d_copies, d2d_copies, d2h_copies: calls; copies of zero bytes are not counted.
        registrations, unregistrations, host_allocations, device_allocations: calls that succeeded.
        pinned_nbytes, peak_pinned_nbytes: page-locked memory in whole pages, registered and allocated.
        device_nbytes, peak_device_nbytes: memory of all devices in whole pages.
        finished: copies, fills and kernels that were carried out.
        kernels: those of them that were functions.
        waits: calls in which the host waited.
        violations: lines of `violations()`.
        copied_by_pinning_nbytes: bytes of private file mappings that registering made a copy of.
    """

    h2d_pinned_nbytes: int
    h2d_pageable_nbytes: int
    h2d_copies: int
    d2d_nbytes: int
    d2d_copies: int
    d2h_nbytes: int
    d2h_copies: int
    registrations: int
    unregistrations: int
    host_allocations: int
    device_allocations: int
    pinned_nbytes: int
    peak_pinned_nbytes: int
    device_nbytes: int
    peak_device_nbytes: int
    finished: int
    kernels: int
    waits: int
    violations: int
    copied_by_pinning_nbytes: int


class Direction(enum.IntEnum):
    """cudaMemcpyKind."""

    HOST_TO_HOST = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy, in the order of the calls.

    Attributes:
        stream: number of the stream, from 1 in the order in which they were made.
        pinned: its host side was page-locked; False where it has none.
    """

    nbytes: int
    stream: int
    direction: Direction
    device: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class Live:
    """What was made and not given back yet. False when there is nothing."""

    registered: int
    host_allocated: int
    device_allocated: int
    streams: int
    events: int

    def __bool__(self) -> bool:
        return any(astuple(self))


class _CopyRecord(ctypes.Structure):
    _fields_ = (
        ("nbytes", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("direction", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("pinned", ctypes.c_int32),
        ("padding", ctypes.c_int32),
    )


class _Span(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_StatsArray = ctypes.c_uint64 * len(fields(Stats))
_LiveArray = ctypes.c_size_t * len(fields(Live))

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sim_reset": (None, (ctypes.c_int, ctypes.c_uint64)),
    "sim_set_mode": (None, (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_double, ctypes.c_uint)),
    "sim_set_limits": (None, (ctypes.c_size_t, ctypes.c_size_t)),
    "sim_set_device_memory": (None, (ctypes.c_int, ctypes.c_size_t)),
    "sim_set_attribute": (None, (ctypes.c_int, ctypes.c_int, ctypes.c_int)),
    "sim_set_driver": (None, (ctypes.c_int,)),
    "sim_move_bytes": (None, (ctypes.c_int,)),
    "sim_fail": (ctypes.c_int, (ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_long)),
    "sim_calls": (ctypes.c_int64, (ctypes.c_char_p,)),
    "sim_release": (ctypes.c_long, (ctypes.c_long,)),
    "sim_stats": (None, (ctypes.POINTER(ctypes.c_uint64),)),
    "sim_copies": (ctypes.c_size_t, (ctypes.POINTER(_CopyRecord), ctypes.c_size_t)),
    "sim_violations": (ctypes.c_size_t, (ctypes.c_char_p, ctypes.c_size_t)),
    "sim_violate": (None, (ctypes.c_char_p,)),
    "sim_live": (None, (ctypes.POINTER(ctypes.c_size_t),)),
    "sim_contexts": (ctypes.c_uint, ()),
    "sim_view": (ctypes.c_int, (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))),
    "sim_expose": (ctypes.c_int, (ctypes.c_size_t, ctypes.c_int)),
    "sim_launch": (ctypes.c_int, (ctypes.c_void_p, _Function, ctypes.c_void_p, ctypes.POINTER(_Span), ctypes.c_int)),
}


class SimulatedRuntime:
    """The simulated libcudart and its controls. There is one state per process: two objects control the same runtime.

    Args:
        devices: how many there are, 0 to 16.
        seed: of everything that is left to chance.

    Attributes:
        path: the shared library, for whatever binds libcudart.
        library: the same, loaded.

    Raises:
        BuildError: there is no compiler, or it failed.
    """

    def __init__(self, *, devices: int = 1, seed: int = 0) -> None:
        self.path = library_path()
        self.library = ctypes.CDLL(str(self.path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        self._callbacks: list[Any] = []  # until the next reset: freeing one while it returns would free the code that it runs in
        self.reset(devices=devices, seed=seed)

    def __enter__(self) -> SimulatedRuntime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.reset()

    def reset(self, *, devices: int = 1, seed: int = 0) -> None:
        """Go back to the start: no memory, no streams, no faults, no counts; queued work is forgotten, not carried out.

        Pointers and handles of before are unknown from here on, and no thread has chosen a device.
        """
        self.library.sim_reset(devices, seed)
        self._callbacks.clear()

    def mode(
        self, name: str, *, bytes_per_s: float = 0.0, latency_s: float = 0.0, jitter_s: float = 0.0, patience: int = 64
    ) -> None:
        """Choose when queued work is carried out: "manual", "random" or "timed".

        Args:
            bytes_per_s: timed: speed of the bus of each device in each direction, shared by its streams; 0 is without limit.
            latency_s, jitter_s: timed: from the bus to the end of a copy, and what chance adds to it at most.
            patience: manual: unsuccessful queries after which one piece of the work that they ask for is carried out.
        """
        self.library.sim_set_mode(_MODES[name], round(latency_s * 1e9), round(jitter_s * 1e9), bytes_per_s / 1e9, patience)

    def release(self, count: int = 1) -> int:
        """Carry out up to `count` queued copies, fills or kernels, and say how many there were."""
        return int(self.library.sim_release(count))

    def limits(self, *, pinned_nbytes: int | None = None, registration_nbytes: int | None = None) -> None:
        """Set how much memory can be page-locked: in all, and by one registration."""
        pinned = _NO_LIMIT if pinned_nbytes is None else pinned_nbytes
        self.library.sim_set_limits(pinned, _LARGEST_REGISTRATION if registration_nbytes is None else registration_nbytes)

    def device_memory(self, nbytes: int, *, device: int = 0) -> None:
        """Set how much memory a device has."""
        self.library.sim_set_device_memory(device, nbytes)

    def attribute(self, number: int, value: int, *, device: int = 0) -> None:
        """Set what cudaDeviceGetAttribute answers; -1 makes the attribute unknown."""
        self.library.sim_set_attribute(device, number, value)

    def driver(self, present: bool) -> None:
        """Take the driver away, or bring it back: without one every call gives cudaErrorInsufficientDriver."""
        self.library.sim_set_driver(present)

    def move_bytes(self, wanted: bool) -> None:
        """Keep the books only: device memory is address space without bytes, copies move nothing. For sizes no machine has."""
        self.library.sim_move_bytes(wanted)

    def fail(self, name: str, *, after: int = 0, code: int = 2, times: int = 1) -> None:
        """Let `after` calls of a function pass, and make the next `times` (-1: all) fail with `code`.

        Args:
            name: as in CUDA or HIP; "work" is a queued copy, fill or kernel that fails when it is carried out: whoever waits for
                the device from then on gets the code.
        """
        if self.library.sim_fail(name.encode(), after, code, times):
            raise ValueError(f"the simulated runtime has no function {name}")

    def calls(self, name: str) -> int:
        """How often a function was called, failed calls included."""
        count = int(self.library.sim_calls(name.encode()))
        if count < 0:
            raise ValueError(f"the simulated runtime has no function {name}")
        return count

    def stats(self) -> Stats:
        """What was done since the last reset."""
        found = _StatsArray()
        self.library.sim_stats(found)
        return Stats(*found)

    def copies(self) -> list[Copy]:
        """Every copy since the last reset."""
        count = self.library.sim_copies(None, 0)
        found = (_CopyRecord * count)()
        count = min(count, self.library.sim_copies(found, count))
        return [Copy(row.nbytes, row.stream, Direction(row.direction), row.device, bool(row.pinned)) for row in found[:count]]

    def violations(self) -> list[str]:
        """What was done that CUDA does not allow, a line each."""
        length = self.library.sim_violations(None, 0)
        found = ctypes.create_string_buffer(length + 1)
        self.library.sim_violations(found, length + 1)
        return found.value.decode().splitlines()

    def live(self) -> Live:
        """What was made and not given back; false when nothing is left."""
        found = _LiveArray()
        self.library.sim_live(found)
        return Live(*found)

    def contexts(self) -> set[int]:
        """Devices on which a context was made."""
        mask = int(self.library.sim_contexts())
        return {device for device in range(mask.bit_length()) if mask >> device & 1}

    def device_bytes(self, pointer: int, nbytes: int) -> memoryview:
        """Device memory as the host cannot see it: a writable view, valid until the memory is freed.

        A copy into it that is still queued is a violation, since a program that looks now is too early.

        Raises:
            ValueError: not device memory, or no bytes are kept.
        """
        return self._view(pointer, nbytes, in_order=False)

    def _view(self, pointer: int, nbytes: int, *, in_order: bool) -> memoryview:
        found = ctypes.c_void_p()
        if self.library.sim_view(pointer, nbytes, in_order, ctypes.byref(found)) < 0 or found.value is None:
            raise ValueError(f"{nbytes} bytes at {pointer:#x} are not device memory with bytes")
        return memoryview((ctypes.c_char * nbytes).from_address(found.value)).cast("B")

    @contextmanager
    def exposed(self, pointer: int) -> Iterator[None]:
        """Open one allocation of device memory to the host for a while, so that its pointer can be followed."""
        if self.library.sim_expose(pointer, True):
            raise ValueError(f"{pointer:#x} is not device memory")
        try:
            yield
        finally:
            self.library.sim_expose(pointer, False)

    def launch(self, stream: int | None, kernel: Callable[..., object], *spans: tuple[int, int]) -> int:
        """Queue a function in the place of a kernel; it is called in the stream's order, by whatever thread carries it out.

        Args:
            stream: handle of the stream; None or 0 is the null stream.
            kernel: called with a writable view of each span. What it raises becomes a violation.
            spans: address and nbytes of the device memory that it uses; it has to live until the kernel has run.

        Returns:
            The error code, 0 when it is queued.
        """
        pending = [kernel]  # taken out when it runs: what it refers to must not live until the next reset

        def call(_: int | None) -> None:
            try:
                pending.pop()(*(self._view(pointer, nbytes, in_order=True) for pointer, nbytes in spans))
            except Exception as error:  # noqa: BLE001 - there is no caller to raise it in
                self.library.sim_violate(f"a kernel raised {type(error).__name__}: {error}".encode())

        callback = _Function(call)
        self._callbacks.append(callback)
        rows = (_Span * len(spans))(*(_Span(*span) for span in spans))
        return int(self.library.sim_launch(stream, callback, None, rows, len(spans)))
