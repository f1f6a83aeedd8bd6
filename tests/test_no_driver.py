"""A CUDA runtime library without a driver, as where torch was built for GPUs and none is there: what needs the device fails with
what is missing, all else goes on, and nothing is left behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import KIB, MIB, random_contents, write, wrong
from simulated_gpu import Gpu, needs_compiler, simulated_gpu

import headrace
from headrace.errors import DeviceError
from headrace.testing.devices import SimulatedDevice

pytestmark = [pytest.mark.timeout(60), needs_compiler]

LARGE = random_contents(*[700 * KIB + 512 * i for i in range(8)], 3 * MIB)
SAYS_SO = "driver version is insufficient"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "m.safetensors", LARGE)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """A device whose driver went away after it was made."""
    with simulated_gpu() as made:
        made.runtime.driver(False)
        yield made
        made.runtime.driver(True)
        made.runtime.library.cudaGetLastError()  # it keeps answering 35 without a driver, as the real one does


def test_a_device_cannot_be_made(gpu: Gpu) -> None:
    with pytest.raises(DeviceError, match=SAYS_SO):
        SimulatedDevice(gpu.runtime)


def in_place_on_tmpfs(path: Path, gpu: Gpu) -> None:
    folder = Path(tempfile.mkdtemp(prefix="headrace-test-", dir="/dev/shm"))
    try:
        shutil.copy(path, folder)
        headrace.load(folder, device=gpu.device, in_place="auto")
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda path, gpu: headrace.load(path, device=gpu.device), id="load"),
        pytest.param(lambda path, gpu: headrace.load(path, device=gpu.device, pin="require"), id="pin"),
        pytest.param(lambda path, gpu: headrace.load(path, device=gpu.device, pin="off"), id="not-pinned"),
        pytest.param(lambda path, gpu: headrace.hold(path, device=gpu.device, in_place="off"), id="hold"),
        pytest.param(in_place_on_tmpfs, id="in-place"),
    ],
)
def test_what_needs_the_device_fails_with_what_is_missing(path: Path, gpu: Gpu, use: Callable[[Path, Gpu], Any]) -> None:
    with pytest.raises(DeviceError, match=SAYS_SO) as caught:
        use(path, gpu)
    assert gpu.runtime.live().registered == 0
    del caught


def test_loads_to_the_host_are_not_touched_by_it(path: Path, gpu: Gpu) -> None:
    assert not wrong(headrace.load(path), LARGE)
    with headrace.hold(path) as held:
        assert not wrong(headrace.load(held), LARGE)
    assert gpu.runtime.calls("cudaHostRegister") == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")  # noqa: TID251
@pytest.mark.parametrize("built", [None, "13.0"])
def test_torch_without_a_usable_gpu_is_refused_in_words(path: Path, monkeypatch: pytest.MonkeyPatch, built: str | None) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(DeviceError, match="no GPU that it can use" if built else "for the CPU only") as caught:
        headrace.load(path, device="cuda")
    assert "cpu" in str(caught.value)
    with pytest.raises(DeviceError):
        headrace.hold(path, device="cuda:0")


def test_a_plan_needs_no_driver(path: Path) -> None:
    assert "cuda:0" in str(headrace.plan(path, device="cuda:0"))
