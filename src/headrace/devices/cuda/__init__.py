"""CUDA and ROCm: memory, copies and order on a GPU, through torch and one handle on the runtime library that torch uses.

`_runtime` binds the library with ctypes: page-locking, copies, events and waits, every call checked. `_device` is made of it and
of an `Allocator`, which is what the library does not do: memory from torch's caching allocator, the program's current stream,
conversions. `_torch` is the allocator on a GPU. `headrace.testing` has one for the simulated runtime, so that all else is the
same code in a test and on a GPU.
"""

from headrace.devices.cuda._device import Allocator, CudaDevice
from headrace.devices.cuda._runtime import Runtime, mapped_library
from headrace.devices.cuda._torch import open_device, visible_gpus

__all__ = ["Allocator", "CudaDevice", "Runtime", "mapped_library", "open_device", "visible_gpus"]
