"""The contract of devices holds for a toy, for a simulated GPU, and for a real one where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import mixed_contents, write, wrong
from simulated_gpu import needs_compiler, simulated_gpu
from toy_device import ToyDevice

import headrace
from headrace.devices.base import Device
from headrace.devices.cuda import open_device
from headrace.testing.device_contract import DeviceTests


class TestToyDevice(DeviceTests):
    def make(self) -> Device:
        return ToyDevice()


@needs_compiler
class TestSimulatedDevice(DeviceTests):
    @pytest.fixture(autouse=True)
    def gpu(self) -> Iterator[None]:
        with simulated_gpu() as gpu:
            self.device = gpu.device
            yield
            del self.device

    def setup_method(self) -> None:
        """The fixture does it."""


@pytest.mark.gpu
class TestGpu(DeviceTests):
    def make(self) -> Device:
        return open_device(0)


def test_a_toy_takes_every_kind_of_tensor_as_any_device_does(tmp_path: Path) -> None:
    contents, device = mixed_contents(), ToyDevice()
    path = write(tmp_path / "m.safetensors", contents)
    assert "toy:0" in str(headrace.plan(path, device=device))
    assert not wrong(headrace.load(path, device=device), contents)
    assert not device.pinned
