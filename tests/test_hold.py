"""A checkpoint held in host memory for several loads: read once or not at all, page-locked once, given back once."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    KIB,
    MIB,
    WatchedSource,
    any_data_read,
    bytes_of,
    mixed_contents,
    random_contents,
    random_entry,
    serialize,
    value_of,
    write,
    wrong,
)
from simulated_gpu import Gpu, needs_compiler, simulated_gpu

import headrace
from headrace.errors import (
    IntegrityError,
    OptionError,
    PinningError,
    SourceChangedError,
    SourceError,
    StreamError,
    TensorNotFoundError,
)
from headrace.sources.s3 import S3Credentials
from headrace.testing import Fault, Raise
from headrace.testing.s3server import S3Server

SHM = Path("/dev/shm")
MIXED = mixed_contents()
LARGE = random_contents(*[700 * KIB + 512 * i for i in range(20)], 9 * MIB)

pytestmark = [pytest.mark.timeout(60), needs_compiler]
needs_tmpfs = pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="no tmpfs to write to")


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated_gpu() as made:
        yield made


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="headrace-test-", dir=SHM))
    yield folder
    shutil.rmtree(folder)


def load(held: headrace.Checkpoint, **arguments: Any) -> tuple[dict[str, torch.Tensor], headrace.Snapshot]:
    with headrace.stream(held, **arguments) as tensors:
        kept = dict(tensors)
    return kept, tensors.stats


# ---- in private memory


@pytest.mark.parametrize("data_start", [0, 1, 4])
def test_a_file_is_read_once_and_every_load_has_its_bytes(data_start: int) -> None:
    contents = MIXED | LARGE
    source = WatchedSource(serialize(contents, data_start=data_start))
    with headrace.hold(source) as held:
        read = len(source.calls)
        assert not held.in_place
        assert not held.pinned
        assert held.held_nbytes == source.nbytes
        for _ in range(2):
            kept, stats = load(held)
            assert not wrong(kept, contents)
            assert stats.routes[0][1] == "held"
        assert not wrong(headrace.load(held, names="layer.3.*"), contents)
        assert bytes_of(headrace.read(held, "t020")) == contents["t020"].data
        assert len(source.calls) == read
    assert not wrong(kept, contents), "tensors handed out outlast what was held"


def test_conversions_slices_and_given_tensors_are_those_of_any_load() -> None:
    contents = {"a": random_entry("F32", (600, 100)), "b": random_entry("F32", (700, 90), seed=1), "c": random_entry("F32", (9,))}
    given = {"c": torch.zeros(9, dtype=torch.float64)}
    with headrace.hold(WatchedSource(serialize(contents))) as held:
        kept, _ = load(held, slices={"b": (slice(None), slice(5, 50))}, into=given, dtype={"a": "BF16"})
    assert bytes_of(kept["a"]) == bytes_of(value_of(contents["a"]).bfloat16())
    assert bytes_of(kept["b"]) == bytes_of(value_of(contents["b"])[:, 5:50])
    assert bytes_of(given["c"]) == bytes_of(value_of(contents["c"]).double())


def test_names_that_were_not_asked_for_are_not_held_and_take_no_memory(gpu: Gpu) -> None:
    source = WatchedSource(serialize(LARGE))
    wanted = ["t003", "t004", "t017"]
    with headrace.hold(source, names=wanted, device=gpu.device) as held:
        assert sorted(held) == wanted
        assert held.held_nbytes < sum(len(LARGE[name].data) for name in wanted) + 64 * KIB
        for device in ("cpu", gpu.device):
            kept, _ = load(held, device=device)
            assert sorted(kept) == wanted
            assert not wrong(kept, LARGE)
        with pytest.raises(TensorNotFoundError):
            headrace.load(held, names="t005")


def test_neighbours_with_a_gap_that_loads_read_along_are_held_with_it(gpu: Gpu) -> None:
    contents = {f"t{i}": random_entry("U8", (nbytes,), seed=i) for i, nbytes in enumerate((5000, 20_000, 5000, 40_000, 7))}
    with headrace.hold(WatchedSource(serialize(contents)), names=["t0", "t2", "t4"], device=gpu.device, pin="require") as held:
        for device in ("cpu", gpu.device):
            kept, _ = load(held, device=device)
            assert not wrong(kept, contents)
        assert held.pinned


def test_what_is_page_locked_for_a_device_is_where_copies_come_from(gpu: Gpu) -> None:
    with headrace.hold(WatchedSource(serialize(MIXED | LARGE)), device=gpu.device, pin="require") as held:
        assert (held.pinned, held.device) == (True, "simulated:0")
        for _ in range(3):
            kept, stats = load(held, device=gpu.device)
            assert not wrong(kept, MIXED | LARGE)
            assert stats.routes[0][1] == "held"
            assert "page-locked for simulated:0" in stats.routes[0][2]
        assert headrace.plan(held, device=gpu.device).routes[0][1:] == stats.routes[0][1:]
        assert gpu.runtime.stats().registrations == 1, "what is held, and nothing of a ring"
        assert gpu.runtime.stats().h2d_pageable_nbytes == 0
    assert gpu.runtime.live().registered == 0
    assert not wrong(kept, MIXED | LARGE)


def test_a_device_that_it_was_not_held_for_is_served_by_the_ring() -> None:
    with simulated_gpu(devices=2) as gpu, headrace.hold(WatchedSource(serialize(LARGE)), device=gpu.device) as held:
        other = type(gpu.device)(gpu.runtime, 1)
        kept, stats = load(held, device=other)
        assert not wrong(kept, LARGE)
        assert stats.staging_nbytes
        assert "ring" in stats.routes[0][2]
        assert "ring" in headrace.plan(held, device=other).routes[0].reason
        del kept
        other.close()


def test_where_page_locking_is_refused_nothing_stays_locked_and_loads_take_the_ring(gpu: Gpu, caplog: Any) -> None:
    data = serialize(LARGE)
    gpu.runtime.limits(pinned_nbytes=8 * MIB)
    with pytest.raises(PinningError, match="HostRegister"):
        headrace.hold(WatchedSource(data), device=gpu.device, pin="require")
    with headrace.hold(WatchedSource(data), device=gpu.device) as held:
        assert not held.pinned
        assert len(caplog.records) == 1
        assert gpu.runtime.live().registered == 0
        gpu.runtime.limits()
        kept, stats = load(held, device=gpu.device)
        assert not wrong(kept, LARGE)
        assert "not page-locked" in stats.routes[0][2]
        assert gpu.runtime.stats().h2d_pageable_nbytes == 0
    with headrace.hold(WatchedSource(data), device=gpu.device, pin="off") as held:
        assert not held.pinned
        assert gpu.runtime.live().registered == 0
    assert len(caplog.records) == 1


def test_a_read_that_fails_is_the_error_and_nothing_is_held(gpu: Gpu) -> None:
    source = WatchedSource(serialize(LARGE), [Fault(any_data_read, Raise(SourceError("the disk is gone", url="memory:")))])
    with pytest.raises(SourceError, match="the disk is gone"):
        headrace.hold(source, device=gpu.device)
    assert gpu.runtime.stats().registrations == 0


def test_what_is_verified_is_verified_as_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", LARGE)
    headrace.verify(tmp_path, write=True)
    with headrace.hold(tmp_path, verify=True) as held:
        assert not wrong(headrace.load(held), LARGE)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(IntegrityError):
        headrace.hold(tmp_path, verify=True)


def test_a_store_is_asked_once_for_what_is_wanted() -> None:
    with S3Server({"models": {"m/model.safetensors": serialize(LARGE)}}) as server:
        keys = S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)
        held = headrace.hold("s3://models/m", names=["t003", "t020"], credentials=keys)
    kept, stats = load(held)
    held.close()
    assert sorted(kept) == ["t003", "t020"]
    assert not wrong(kept, LARGE)
    assert stats.requests == 0


def test_every_target_of_a_load_may_take_from_it(gpu: Gpu) -> None:
    with headrace.hold(WatchedSource(serialize(LARGE)), device=gpu.device) as held:
        kept = headrace.load(held, device={"t00*": gpu.device})
        assert not wrong(kept, LARGE)
        shared = headrace.load(held, device="shared-cpu")
        assert not wrong(shared, LARGE)


def test_a_file_may_change_and_go_once_it_was_read(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", LARGE)
    with headrace.hold(path, in_place="off") as held:
        path.write_bytes(b"gone")
        path.unlink()
        assert not wrong(headrace.load(held), LARGE)


def test_a_checkpoint_that_was_open_stays_open(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", MIXED)
    with headrace.open(path) as checkpoint:
        with headrace.hold(checkpoint) as held:
            assert not wrong(headrace.load(held), MIXED)
        assert not wrong(headrace.load(checkpoint), MIXED)


@pytest.mark.parametrize("arguments", [{"in_place": "yes"}, {"pin": True}, {"device": "shared-cpu"}, {"device": "tpu"}])
def test_what_cannot_be_asked_for_is_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        headrace.hold(write(tmp_path / "m.safetensors", MIXED), **arguments)


# ---- in place


@needs_tmpfs
def test_on_tmpfs_nothing_is_read_and_the_file_stays_as_it_is(gpu: Gpu, shm: Path) -> None:
    path = write(shm / "m.safetensors", MIXED | LARGE)
    before, times = path.read_bytes(), path.stat()
    with headrace.hold(path, device=gpu.device, in_place="require", pin="require") as held:
        assert held.in_place
        assert held.held_nbytes == 0
        for device in (gpu.device, "cpu", gpu.device):
            kept, stats = load(held, device=device)
            assert not wrong(kept, MIXED | LARGE)
            assert stats.routes[0][1] == "held"
        seen = gpu.runtime.stats()
        assert (seen.registrations, seen.h2d_pageable_nbytes) == (1, 0)
    assert gpu.runtime.live().registered == 0
    after = path.stat()
    assert (path.read_bytes(), after.st_ino) == (before, times.st_ino)
    assert not gpu.device.pins_read_only or after.st_mtime_ns == times.st_mtime_ns


@needs_tmpfs
def test_a_file_that_is_held_twice_or_loaded_in_place_meanwhile_is_page_locked_once(gpu: Gpu, shm: Path) -> None:
    path = write(shm / "m.safetensors", LARGE)
    os.link(path, shm / "other.safetensors")
    first = headrace.hold(path, device=gpu.device, pin="require")
    second = headrace.hold(shm / "other.safetensors", device=gpu.device, pin="require")
    kept, _ = load(headrace.open(path), device=gpu.device, in_place="require")
    assert gpu.runtime.stats().registrations == 1
    first.close()
    assert gpu.runtime.live().registered == 1
    again, _ = load(second, device=gpu.device)
    second.close()
    assert gpu.runtime.live().registered == 0
    assert not wrong(kept, LARGE)
    assert not wrong(again, LARGE)
    with headrace.hold(path, device=gpu.device, pin="require"):
        assert gpu.runtime.stats().registrations == 2


@needs_tmpfs
def test_a_refusal_on_tmpfs_is_one_warning_and_the_ring(gpu: Gpu, shm: Path, caplog: Any) -> None:
    path = write(shm / "m.safetensors", LARGE)
    gpu.runtime.fail("cudaHostRegister", code=2)
    with headrace.hold(path, device=gpu.device) as held:
        assert (held.in_place, held.pinned) == (True, False)
        kept, stats = load(held, device=gpu.device)
        assert not wrong(kept, LARGE)
        assert "not page-locked" in stats.routes[0][2]
    assert len(caplog.records) == 1
    gpu.runtime.fail("cudaHostRegister", code=2)
    with pytest.raises(PinningError):
        headrace.hold(path, device=gpu.device, pin="require")


@needs_tmpfs
def test_files_elsewhere_are_refused_where_in_place_is_demanded(tmp_path: Path, shm: Path) -> None:
    if os.stat(tmp_path).st_dev == os.stat(shm).st_dev:
        pytest.skip("all is tmpfs here")
    with pytest.raises(OptionError, match="tmpfs"):
        headrace.hold(write(tmp_path / "m.safetensors", LARGE), in_place="require")
    with pytest.raises(OptionError, match="no local file"):
        headrace.hold(WatchedSource(serialize(LARGE)), in_place="require")


@needs_tmpfs
def test_a_file_that_changes_while_it_is_held_in_place_is_an_error(gpu: Gpu, shm: Path) -> None:
    path = write(shm / "m.safetensors", LARGE)
    with headrace.hold(path, device=gpu.device) as held:
        os.utime(path)
        for device in ("cpu", gpu.device):
            with pytest.raises(SourceChangedError):
                headrace.load(held, device=device)


def memfd(contents: Any) -> int:
    fd = os.memfd_create("weights", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(serialize(contents))
    return fd


def test_a_memfd_is_held_where_it_lies_and_outlasts_its_descriptor(gpu: Gpu) -> None:
    fd = memfd(LARGE)
    with headrace.hold(f"/proc/self/fd/{fd}", device=gpu.device, in_place="require", pin="require") as held:
        os.close(fd)
        for device in ("cpu", gpu.device):
            assert not wrong(headrace.load(held, device=device), LARGE)
        assert gpu.runtime.stats().registrations == 1


def test_a_descriptor_is_loaded_by_its_path(gpu: Gpu, tmp_path: Path) -> None:
    fds = [memfd(LARGE), os.open(write(tmp_path / "m.safetensors", LARGE), os.O_RDONLY)]
    (tmp_path / "m.safetensors").unlink()
    for fd in fds:
        assert not wrong(headrace.load(f"/proc/self/fd/{fd}"), LARGE)
        assert not wrong(headrace.load(f"/proc/self/fd/{fd}", device=gpu.device, in_place="auto"), LARGE)
        os.close(fd)


# ---- the end


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_closing_is_refused_while_a_load_runs(gpu: Gpu, device: str) -> None:
    held = headrace.hold(WatchedSource(serialize(LARGE)), device=gpu.device)
    tensors = headrace.stream(held, device=gpu.device if device == "gpu" else "cpu", memory_limit=2 * MIB)
    kept = [next(tensors)]
    with pytest.raises(StreamError, match="did not end"):
        held.close()
    kept += list(tensors)
    assert not wrong(dict(kept), LARGE)
    tensors.close()
    held.close()
    held.close()
    assert gpu.runtime.live().registered == 0
    with pytest.raises(StreamError, match="held no more"):
        headrace.load(held, device=gpu.device)
    with pytest.raises(StreamError, match="held no more"):
        headrace.load(held)


def test_loads_that_fail_or_never_start_keep_nothing(gpu: Gpu) -> None:
    held = headrace.hold(WatchedSource(serialize(LARGE)), device=gpu.device)
    with pytest.raises(OptionError) as caught:
        headrace.stream(held, device=gpu.device, slices={"t000": (1, 2, 3)})
    tensors = headrace.stream(held, device=gpu.device)
    del tensors
    held.close()
    assert gpu.runtime.live().registered == 0
    del caught


def test_an_error_in_the_block_goes_on_and_the_memory_goes_with_the_load(gpu: Gpu) -> None:
    holding = headrace.hold(WatchedSource(serialize(LARGE)), device=gpu.device)
    tensors = headrace.stream(holding, device=gpu.device, memory_limit=2 * MIB)
    next(tensors)
    with pytest.raises(ZeroDivisionError), holding:
        raise ZeroDivisionError
    assert gpu.runtime.live().registered
    assert not wrong(dict(tensors), LARGE)
    tensors.close()
    assert gpu.runtime.live().registered == 0


def test_what_is_dropped_is_given_back_when_its_last_load_ends(gpu: Gpu) -> None:
    held = headrace.hold(WatchedSource(serialize(LARGE)), device=gpu.device)
    tensors = headrace.stream(held, device=gpu.device, memory_limit=2 * MIB)
    kept = [next(tensors)]
    del held
    gc.collect()
    assert gpu.runtime.live().registered
    kept += list(tensors)
    tensors.close()
    del tensors
    gc.collect()
    assert gpu.runtime.live().registered == 0
    assert not wrong(dict(kept), LARGE)


@pytest.mark.slow
def test_an_interpreter_that_ends_gives_back_what_it_held_and_what_runs(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", LARGE)
    program = f"""
import weakref, headrace
from headrace.testing.devices import SimulatedDevice
from headrace.testing.simulated import SimulatedRuntime
runtime = SimulatedRuntime()
def report():
    print(runtime.live().registered, runtime.violations())
weakref.finalize(headrace, report)  # runs last: what is made later ends earlier
device = SimulatedDevice(runtime)
held = headrace.hold({str(tmp_path)!r}, device=device, in_place="off", pin="require")
tensors = headrace.stream(held, device=device, memory_limit=2 << 20)
next(tensors)
print(runtime.live().registered)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["1", "0 []"]), done.stderr


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_reads_what_is_held_and_gives_nothing_of_it_back(gpu: Gpu) -> None:
    with headrace.hold(WatchedSource(serialize(LARGE)), device=gpu.device) as held:
        child = os.fork()
        if not child:
            status = 1
            try:
                fine = not wrong(headrace.load(held, concurrency=1), LARGE)
                held.close()
                status = 0 if fine and gpu.runtime.live().registered == 1 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not wrong(headrace.load(held, device=gpu.device), LARGE)
