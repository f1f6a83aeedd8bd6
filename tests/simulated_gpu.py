"""A simulated GPU for a test, and what must hold when the test is over: nothing forbidden was done, and nothing is left."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from headrace.testing.devices import SimulatedDevice
from headrace.testing.simulated import SimulatedRuntime, find_compiler

REGISTERS_READ_ONLY = 113  # cudaDevAttrHostRegisterReadOnlySupported: 0 was reported of a B300, 1 seen on an H200
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="the simulated runtime needs a C compiler")


class Gpu(NamedTuple):
    """One simulated device and the runtime behind it."""

    runtime: SimulatedRuntime
    device: SimulatedDevice

    def assert_clean(self) -> None:
        """No rule was broken, no error is left for others, and all memory, streams and events are given back."""
        for _ in range(2):  # what the first collection ends may be what keeps the rest
            self.device.allocator.collect()
            if self.device.allocator.blocks or self.device.allocator.host_blocks:
                gc.collect()  # takes long with torch loaded
        self.device.close()
        assert self.runtime.violations() == []
        live = self.runtime.live()
        assert not live, live
        assert self.runtime.library.cudaGetLastError() == 0
        assert 0 not in self.runtime.contexts() or self.device.index == 0


@contextmanager
def simulated_gpu(
    mode: str = "manual", *, devices: int = 1, index: int = 0, seed: int = 0, pins_read_only: bool = False
) -> Iterator[Gpu]:
    """A device that is looked over when the block ends without an error."""
    with SimulatedRuntime(devices=devices, seed=seed) as runtime:
        runtime.mode(mode)
        runtime.attribute(REGISTERS_READ_ONLY, int(pins_read_only), device=index)
        gpu = Gpu(runtime, SimulatedDevice(runtime, index))
        yield gpu
        gpu.assert_clean()
