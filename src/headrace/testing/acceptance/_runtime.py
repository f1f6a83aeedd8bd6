"""The runtime that the probes ask: libcudart or HIP's library through ctypes, or the simulated one, by the same names.

Standard library only, since a machine with a GPU may have nothing but torch; torch itself is imported only to find the library
that it uses.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

H2D, D2H, D2D = 1, 2, 3
NON_BLOCKING = 1
DISABLE_TIMING = 2
READ_ONLY = 8

_pointer, _size, _int, _unsigned = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
_out = ctypes.POINTER
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "HostRegister": (_pointer, _size, _unsigned),
    "HostUnregister": (_pointer,),
    "HostAlloc": (_out(_pointer), _size, _unsigned),
    "FreeHost": (_pointer,),
    "HostGetFlags": (_out(_unsigned), _pointer),
    "PointerGetAttributes": (_pointer, _pointer),
    "Malloc": (_out(_pointer), _size),
    "Free": (_pointer,),
    "MemGetInfo": (_out(_size), _out(_size)),
    "MemcpyAsync": (_pointer, _pointer, _size, _int, _pointer),
    "Memcpy": (_pointer, _pointer, _size, _int),
    "MemsetAsync": (_pointer, _int, _size, _pointer),
    "StreamCreateWithFlags": (_out(_pointer), _unsigned),
    "StreamSynchronize": (_pointer,),
    "StreamWaitEvent": (_pointer, _pointer, _unsigned),
    "StreamQuery": (_pointer,),
    "EventCreateWithFlags": (_out(_pointer), _unsigned),
    "EventDestroy": (_pointer,),
    "EventRecord": (_pointer, _pointer),
    "EventQuery": (_pointer,),
    "EventSynchronize": (_pointer,),
    "EventElapsedTime": (_out(ctypes.c_float), _pointer, _pointer),
    "SetDevice": (_int,),
    "GetDeviceCount": (_out(_int),),
    "DeviceGetAttribute": (_out(_int), _int, _int),
    "DeviceGetPCIBusId": (ctypes.c_char_p, _int, _int),
    "DeviceSynchronize": (),
    "RuntimeGetVersion": (_out(_int),),
    "DriverGetVersion": (_out(_int),),
    "GetLastError": (),
}
_HIP_NAMES = {"HostAlloc": "HostMalloc", "FreeHost": "HostFree"}


class PointerAttributes(ctypes.Structure):
    """cudaPointerAttributes, with the words that CUDA 13 added."""

    _fields_ = (
        ("type", _int),
        ("device", _int),
        ("device_pointer", _pointer),
        ("host_pointer", _pointer),
        ("more", _pointer * 8),
    )


class Runtime:
    """A runtime library. Its functions are attributes without the prefix and give the error code.

    Attributes:
        path: where the library lies.
        is_simulated: whether it is the simulated one.
    """

    def __init__(self, path: str, *, prefix: str, is_simulated: bool = False) -> None:
        self.path = path
        self.is_simulated = is_simulated
        library = ctypes.CDLL(path)
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, prefix + (_HIP_NAMES.get(name, name) if prefix == "hip" else name))
            function.argtypes, function.restype = arguments, _int
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for type checkers: the functions are set above
        raise AttributeError(name)

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function, take its error back, and give its code."""
        code = int(getattr(self, name)(*arguments))
        self.GetLastError()
        return code

    def made(self, name: str, *arguments: Any) -> int:
        """Call a function that makes something and give its pointer or handle.

        Raises:
            RuntimeError: it gave an error.
        """
        found = _pointer()
        code = self.code(name, ctypes.byref(found), *arguments)
        if code:
            raise RuntimeError(f"{name} gave error {code}")
        return found.value or 0

    def number(self, name: str, *arguments: Any) -> int:
        """Call a function that answers with a number; minus the code where it gives an error."""
        found = _int()
        return -self.code(name, ctypes.byref(found), *arguments) or found.value

    def stream(self) -> int:
        return self.made("StreamCreateWithFlags", NON_BLOCKING)

    def recorded(self, stream: int) -> int:
        event = self.made("EventCreateWithFlags", DISABLE_TIMING)
        self.EventRecord(event, stream)
        return event

    def memory_kind(self, pointer: int) -> int:
        """0 unregistered, 1 host, 2 device; minus the code where it gives an error."""
        found = PointerAttributes()
        return -self.code("PointerGetAttributes", ctypes.byref(found), pointer) or int(found.type)

    def fetched(self, pointer: int, nbytes: int) -> bytes:
        """Device memory as bytes, once everything that is queued is done."""
        self.DeviceSynchronize()
        memory = ctypes.create_string_buffer(nbytes)
        self.Memcpy(memory, pointer, nbytes, D2H)
        return memory.raw


def simulated(attributes: str = "") -> Runtime:
    """The simulated runtime, as the tests use it, with attributes of its device as "99=1 113=0"."""
    from headrace.testing.simulated import SimulatedRuntime

    controls = SimulatedRuntime()
    for number, value in (pair.split("=") for pair in attributes.split()):
        controls.attribute(int(number), int(value))
    return Runtime(str(controls.path), prefix="cuda", is_simulated=True)


def real() -> Runtime:
    """The library that torch uses, with a context on device 0.

    Raises:
        LookupError: there is no torch, or it has no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise LookupError(f"no torch for {sys.executable}: {error}") from error
    from headrace.devices.cuda import visible_gpus

    if not visible_gpus():
        raise LookupError(f"torch {torch.__version__} of {sys.executable} finds no GPU")
    torch.zeros(1, device="cuda")
    for name, prefix in (("libcudart", "cuda"), ("libamdhip64", "hip")):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1].removesuffix(" (deleted)")
            if name in path.rpartition("/")[2]:
                return Runtime(path, prefix=prefix)
    raise LookupError("torch has mapped neither libcudart nor libamdhip64")


# Host memory by address: unlike `mmap.mmap` it can be unmapped, and mapped read-only, while something points into it.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype, _libc.mmap.argtypes = _pointer, (_pointer, _size, _int, _int, _int, ctypes.c_long)
_libc.munmap.argtypes = (_pointer, _size)
_libc.madvise.argtypes = (_pointer, _size, _int)
READABLE, WRITABLE = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
HUGE_PAGES, POPULATE = 14, 23


def map_memory(
    nbytes: int,
    *,
    protection: int = WRITABLE,
    flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
    file: int = -1,
    at: int | None = None,
) -> int:
    """Map memory, at this address where one is given; the address.

    Raises:
        OSError: the kernel refused.
    """
    found = _libc.mmap(at, nbytes, protection, flags, file, 0)
    if found in (None, _pointer(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(found)


def unmap_memory(address: int, nbytes: int) -> None:
    _libc.munmap(address, nbytes)


def touch(address: int, nbytes: int) -> None:
    """Write to all pages of writable memory."""
    ctypes.memset(address, 1, nbytes)


def advise(address: int, nbytes: int, advice: int) -> bool:
    """madvise; False where the kernel does not know it."""
    return bool(_libc.madvise(address, nbytes, advice) == 0)


@contextmanager
def mapped(nbytes: int, **how: Any) -> Iterator[int]:
    """Memory that is mapped for a while."""
    address = map_memory(nbytes, **how)
    try:
        yield address
    finally:
        unmap_memory(address, nbytes)
