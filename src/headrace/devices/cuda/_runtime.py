"""The CUDA or HIP runtime through ctypes: the few calls that a pipeline makes, each checked, on one handle.

It has to be the library that torch itself has mapped: a failed call leaves an error behind, per thread and per copy of the
library, which the next unrelated call of torch's would raise; `torch.cuda` has no way to take it back (facts: cudart(),
torch 2.13). So every failure takes the error back before it becomes an exception.

Calls let go of the GIL, but for those that only queue or ask: they take a few microseconds, and a reader that let go of the GIL
there, with the ring's lock in its hand, would have to queue for it behind all other readers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.errors import DeviceError, PinningError

SUCCESS, NOT_READY = 0, 600
HOST_TO_DEVICE, DEVICE_TO_DEVICE = 1, 3
_DISABLE_TIMING = 2
_READ_ONLY = 8  # cudaHostRegisterReadOnly
_PCI_BUS, _PCI_DEVICE, _PCI_DOMAIN, _REGISTERS_READ_ONLY = 33, 34, 50, 113  # enum cudaDeviceAttr, CUDA 13.0

_pointer, _size, _int, _unsigned = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_out = ctypes.POINTER(ctypes.c_void_p)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "HostRegister": (_pointer, _size, _unsigned),
    "HostUnregister": (_pointer,),
    "HostAlloc": (_out, _size, _unsigned),
    "FreeHost": (_pointer,),
    "Malloc": (_out, _size),
    "Free": (_pointer,),
    "MemGetInfo": (ctypes.POINTER(_size), ctypes.POINTER(_size)),
    "MemcpyAsync": (_pointer, _pointer, _size, _int, _pointer),
    "StreamCreateWithFlags": (_out, _unsigned),
    "StreamDestroy": (_pointer,),
    "StreamSynchronize": (_pointer,),
    "StreamWaitEvent": (_pointer, _pointer, _unsigned),
    "EventCreateWithFlags": (_out, _unsigned),
    "EventDestroy": (_pointer,),
    "EventRecord": (_pointer, _pointer),
    "EventQuery": (_pointer,),
    "EventSynchronize": (_pointer,),
    "SetDevice": (_int,),
    "GetDevice": (ctypes.POINTER(_int),),
    "GetDeviceCount": (ctypes.POINTER(_int),),
    "DeviceGetAttribute": (ctypes.POINTER(_int), _int, _int),
    "GetLastError": (),
}
_QUICK = ("MemcpyAsync", "EventRecord", "EventQuery", "GetLastError")
_HIP_NAMES = {"HostAlloc": "HostMalloc", "FreeHost": "HostFree"}
_LIBRARIES = (("libcudart", "cuda"), ("libamdhip64", "hip"))


def mapped_library() -> tuple[str, str] | None:
    """(path, prefix of its functions) of the runtime library that this process has mapped; None where there is none."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1].removesuffix(" (deleted)") for line in lines if "/" in line}
    for name, prefix in _LIBRARIES:
        found = sorted(path for path in paths if Path(path).name.startswith(name))
        if found:
            return found[0], prefix
    return None


class Runtime:
    """The runtime library. Addresses, streams and events are numbers.

    Args:
        path: the library; for a GPU the one of `mapped_library`.
        prefix: of its functions, "cuda" or "hip".
        device: for errors, "cuda:0".
    """

    def __init__(self, path: str, *, prefix: str = "cuda", device: str = "cuda") -> None:
        self.path, self.prefix, self.device = path, prefix, device
        library = ctypes.CDLL(path)
        for name, arguments in _SIGNATURES.items():
            exported = prefix + (_HIP_NAMES.get(name, name) if prefix == "hip" else name)
            setattr(self, f"_{name}", _function(library, exported, arguments))
        keeps_gil = ctypes.PyDLL(path)
        for name in _QUICK:
            setattr(self, f"_Quick{name}", _function(keeps_gil, prefix + name, _SIGNATURES[name]))
        self._describe = getattr(library, f"{prefix}GetErrorString")
        self._describe.argtypes, self._describe.restype = (_int,), ctypes.c_char_p

    def __getattr__(self, name: str) -> Any:
        """The functions are set in `__init__`; this is for the type checker."""
        raise AttributeError(name)

    # -- host memory

    def register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        """Page-lock memory that is there already. Raises `PinningError`."""
        flags = _READ_ONLY if read_only else 0
        self._check(self._HostRegister(address, nbytes, flags), "HostRegister", f"{nbytes:,} bytes", PinningError)

    def unregister(self, address: int) -> None:
        """Undo `register`, of the same address."""
        self._check(self._HostUnregister(address), "HostUnregister", f"memory at {address:#x}")

    def allocate_host(self, nbytes: int) -> int:
        """The address of new page-locked memory. Raises `PinningError`."""
        found = ctypes.c_void_p()
        self._check(self._HostAlloc(ctypes.byref(found), nbytes, 0), "HostAlloc", f"{nbytes:,} bytes", PinningError)
        return found.value or 0

    def free_host(self, address: int) -> None:
        """Give back what `allocate_host` gave."""
        self._check(self._FreeHost(address), "FreeHost")

    # -- device memory

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int, *, pinned: bool) -> None:
        """Queue a copy from host memory. From memory that is not page-locked the call may last as long as the copy."""
        call = self._QuickMemcpyAsync if pinned else self._MemcpyAsync
        code = call(target, source, nbytes, HOST_TO_DEVICE, stream)
        if code:
            self._check(code, "MemcpyAsync", f"{nbytes:,} bytes to the device")

    def copy_on_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy from device memory to device memory."""
        self._check(self._MemcpyAsync(target, source, nbytes, DEVICE_TO_DEVICE, stream), "MemcpyAsync", f"{nbytes:,} bytes")

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self._MemGetInfo(ctypes.byref(free), ctypes.byref(total)), "MemGetInfo")
        return free.value, total.value

    # -- streams and events

    def new_event(self) -> int:
        """An event of the current device, without a time."""
        found = ctypes.c_void_p()
        self._check(self._EventCreateWithFlags(ctypes.byref(found), _DISABLE_TIMING), "EventCreateWithFlags")
        return found.value or 0

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        self._check(self._EventDestroy(event), "EventDestroy")

    def record(self, event: int, stream: int) -> None:
        """The event is done when all that the stream was given so far is."""
        code = self._QuickEventRecord(event, stream)
        if code:
            self._check(code, "EventRecord")

    def is_done(self, event: int) -> bool:
        """Whether an event is done."""
        code = self._QuickEventQuery(event)
        if code == SUCCESS:
            return True
        if code != NOT_READY:
            self._check(code, "EventQuery")
        self._QuickGetLastError()  # no error on driver 580; torch takes one back here as well
        return False

    def synchronize(self, event: int) -> None:
        """Wait until an event is done."""
        self._check(self._EventSynchronize(event), "EventSynchronize")

    def drain(self, stream: int) -> None:
        """Wait until a stream has done all that it was given."""
        self._check(self._StreamSynchronize(stream), "StreamSynchronize")

    def wait(self, stream: int, event: int) -> None:
        """What the stream is given from now on waits for the event as it was recorded last."""
        self._check(self._StreamWaitEvent(stream, event, 0), "StreamWaitEvent")

    # -- devices

    def set_device(self, index: int) -> None:
        """Make a device the current one of this thread."""
        self._check(self._SetDevice(index), "SetDevice", f"device {index}")

    def current_device(self) -> int:
        """The current device of this thread."""
        found = ctypes.c_int()
        self._check(self._GetDevice(ctypes.byref(found)), "GetDevice")
        return found.value

    def device_count(self) -> int:
        """How many devices there are."""
        found = ctypes.c_int()
        self._check(self._GetDeviceCount(ctypes.byref(found)), "GetDeviceCount")
        return found.value

    def numa_node(self, index: int) -> int | None:
        """The NUMA node of a device's slot; None where nobody knows."""
        try:
            domain, bus, slot = (self._attribute(number, index) for number in (_PCI_DOMAIN, _PCI_BUS, _PCI_DEVICE))
            node = int(Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/numa_node").read_text())
        except (DeviceError, OSError, ValueError):
            return None
        return node if node >= 0 else None

    def registers_read_only(self, index: int) -> bool:
        """Whether `register` takes memory for reading alone. HIP is not asked: nothing of a file is registered there."""
        try:
            return self.prefix == "cuda" and self._attribute(_REGISTERS_READ_ONLY, index) == 1
        except DeviceError:
            return False

    def _attribute(self, number: int, index: int) -> int:
        found = ctypes.c_int()
        self._check(self._DeviceGetAttribute(ctypes.byref(found), number, index), "DeviceGetAttribute", f"{number}")
        return found.value

    def _check(self, code: int, call: str, what: str = "", kind: type[DeviceError] = DeviceError) -> None:
        if code == SUCCESS:
            return
        self._GetLastError()  # else the next call of torch's on this thread would raise it
        text = (self._describe(code) or b"unknown error").decode(errors="replace")
        of = f" of {what}" if what else ""
        raise kind(f"{self.prefix}{call}{of} failed: {text} (error {code})", device=self.device)


def _function(library: ctypes.CDLL, name: str, arguments: tuple[Any, ...]) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, _int
    return function


def cpus_of_node(node: int) -> Sequence[int]:
    """The CPUs of a NUMA node; none where the system does not tell."""
    try:
        text = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip()
        found: list[int] = []
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    except (OSError, ValueError):
        return ()
    return found
