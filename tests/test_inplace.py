"""A checkpoint on tmpfs copied to a device from where it lies: page-locked whole, never changed, all of its files or none."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from budget import rest_slow
from checkpoints import KIB, MIB, bytes_of, mixed_contents, random_contents, random_entry, value_of, write, wrong
from simulated_gpu import Gpu, needs_compiler, simulated_gpu

import headrace
from headrace.errors import OptionError, SourceChangedError

SHM = Path("/dev/shm")

pytestmark = [
    pytest.mark.timeout(60),
    needs_compiler,
    pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="no tmpfs to write to"),
]

MIXED = mixed_contents()
LARGE = random_contents(*[700 * KIB + 512 * i for i in range(20)], 9 * MIB)


@pytest.fixture(params=[False, True], ids=["for writing", "for reading"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    with simulated_gpu(pins_read_only=request.param) as made:
        yield made


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="headrace-test-", dir=SHM))
    yield folder
    shutil.rmtree(folder)


@contextmanager
def read_only(path: Path) -> Iterator[Path]:
    """The file under a path that cannot be opened for writing, not even by root: sealed memory."""
    fd = os.memfd_create("m.safetensors", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, path.read_bytes())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def load(path: Path, gpu: Gpu, **arguments: Any) -> tuple[dict[str, torch.Tensor], headrace.Snapshot]:
    with headrace.stream(path, device=gpu.device, **({"in_place": "require"} | arguments)) as tensors:
        kept = dict(tensors)
    return kept, tensors.stats


@pytest.mark.parametrize("data_start", rest_slow([0, 1, 4], quick=(1,)))
def test_bytes_come_from_the_file_itself_and_the_file_stays_as_it_is(gpu: Gpu, shm: Path, data_start: int) -> None:
    path = write(shm / "m.safetensors", MIXED | LARGE, data_start=data_start)
    before, times = path.read_bytes(), path.stat()
    kept, stats = load(path, gpu)
    assert not wrong(kept, MIXED | LARGE)
    assert stats.routes[0][1] == "mapped"
    assert stats.degraded == ()
    seen = gpu.runtime.stats()
    assert (seen.registrations, seen.h2d_pageable_nbytes) == (1, 0), "the file, and nothing of a ring"
    assert seen.h2d_pinned_nbytes == stats.sent_nbytes == stats.read_nbytes
    assert gpu.runtime.live().registered == 0
    after = path.stat()
    assert (path.read_bytes(), after.st_ino, after.st_size) == (before, times.st_ino, times.st_size)
    if gpu.device.pins_read_only:
        assert (after.st_mtime_ns, after.st_ctime_ns) == (times.st_mtime_ns, times.st_ctime_ns)


def test_a_file_that_may_only_be_read_can_be_used_where_the_device_page_locks_for_reading(gpu: Gpu, shm: Path) -> None:
    path = write(shm / "m.safetensors", LARGE)
    with read_only(path) as checkpoint:
        if not gpu.device.pins_read_only:
            with pytest.raises(OptionError, match=r"cannot be (opened|mapped)"):
                load(checkpoint, gpu)
            return
        kept, stats = load(checkpoint, gpu)
    assert not wrong(kept, LARGE)
    assert stats.routes[0][1] == "mapped"


def test_loads_at_once_and_one_after_the_other_see_no_change(gpu: Gpu, shm: Path) -> None:
    path = write(shm / "m.safetensors", LARGE)
    for _ in range(2):
        with headrace.open(path) as opened:
            one = headrace.stream(opened, device=gpu.device, in_place="require")
            other = headrace.stream(path, device=gpu.device, in_place="require")
            assert not wrong(dict(one), LARGE)
            assert not wrong(dict(other), LARGE)
            assert not wrong(headrace.load(opened), LARGE), "a load to the host, of the file that was opened before"
            one.close(), other.close()


def test_several_files_are_page_locked_each_and_all_given_back(gpu: Gpu, shm: Path) -> None:
    contents = {}
    for i in range(3):
        part = {f"s{i}.{name}": entry for name, entry in LARGE.items()}
        write(shm / f"model-{i + 1:05}-of-00003.safetensors", part)
        contents |= part
    kept, _ = load(shm, gpu)
    assert not wrong(kept, contents)
    assert gpu.runtime.stats().registrations == gpu.runtime.stats().unregistrations == 3


@pytest.mark.parametrize("fails", rest_slow([0, 1, 2], quick=(1,)))
def test_where_one_file_is_refused_none_is_page_locked_and_the_ring_serves(gpu: Gpu, shm: Path, fails: int, caplog: Any) -> None:
    contents = {}
    for i in range(3):
        part = {f"s{i}.{name}": entry for name, entry in LARGE.items()}
        write(shm / f"model-{i + 1:05}-of-00003.safetensors", part)
        contents |= part
    gpu.runtime.fail("cudaHostRegister", after=fails, code=2)
    with pytest.raises(OptionError, match="HostRegister") as caught:
        headrace.load(shm, device=gpu.device, in_place="require")
    assert caught.value.option == "in_place"
    assert gpu.runtime.live().registered == 0
    gpu.runtime.fail("cudaHostRegister", after=fails, code=2)
    kept, stats = load(shm, gpu, in_place="auto")
    assert not wrong(kept, contents)
    assert {route for _, route, _ in stats.routes} == {"staged"}
    assert len(stats.degraded) == len(caplog.records) == 1
    assert gpu.runtime.stats().h2d_pageable_nbytes == 0
    del caught


@pytest.mark.parametrize("cast_at", ["auto", "host"])
def test_conversions_run_on_the_device(gpu: Gpu, shm: Path, cast_at: str) -> None:
    contents = {f"t{i}": random_entry("F32", (300, 100 + i), seed=i) for i in range(5)}
    path = write(shm / "m.safetensors", contents)
    kept, _ = load(path, gpu, dtype="BF16", cast_at=cast_at)
    assert all(bytes_of(kept[name]) == bytes_of(value_of(entry).bfloat16()) for name, entry in contents.items())
    assert gpu.runtime.stats().registrations == 1


def test_slices_and_given_tensors_are_those_of_a_staged_load(gpu: Gpu, shm: Path) -> None:
    contents = {"a": random_entry("F32", (600, 100)), "b": random_entry("F32", (700, 90), seed=1), "c": random_entry("F32", (9,))}
    path = write(shm / "m.safetensors", contents)
    slices = {"a": (slice(3, 500),), "b": (slice(None), slice(5, 50))}
    given = {"c": gpu.device.tensor(torch.zeros(9, dtype=torch.float64))}
    kept, _ = load(path, gpu, slices=slices, into=given)
    for name, index in slices.items():
        assert torch.equal(kept[name].view(torch.int32), value_of(contents[name])[index].contiguous().view(torch.int32))
    assert bytes_of(given["c"]) == bytes_of(value_of(contents["c"]).double())


def test_files_elsewhere_and_verified_or_read_only_ones_take_the_ring(gpu: Gpu, shm: Path, tmp_path: Path) -> None:
    if os.stat(tmp_path).st_dev != os.stat(shm).st_dev:
        path = write(tmp_path / "m.safetensors", LARGE)
        with pytest.raises(OptionError, match="tmpfs"):
            headrace.load(path, device=gpu.device, in_place="require")
        kept, stats = load(path, gpu, in_place="auto")
        assert not wrong(kept, LARGE)
        assert "tmpfs" in stats.degraded[0]


def test_a_link_to_tmpfs_is_tmpfs(gpu: Gpu, shm: Path, tmp_path: Path) -> None:
    write(shm / "m.safetensors", LARGE)
    (tmp_path / "m.safetensors").symlink_to(shm / "m.safetensors")
    kept, stats = load(tmp_path / "m.safetensors", gpu)
    assert not wrong(kept, LARGE)
    assert stats.routes[0][1] == "mapped"


def test_rocm_takes_the_ring(gpu: Gpu, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(shm / "m.safetensors", LARGE)
    monkeypatch.setattr(gpu.device.runtime, "prefix", "hip")
    with pytest.raises(OptionError, match="ROCm"):
        headrace.load(path, device=gpu.device, in_place="require")
    assert gpu.runtime.stats().registrations == 0


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_leaving_early_waits_for_the_copies_before_the_file_is_let_go(gpu: Gpu, shm: Path, taken: int) -> None:
    path = write(shm / "m.safetensors", LARGE)
    tensors = headrace.stream(path, device=gpu.device, in_place="require", memory_limit=2 * MIB)
    kept = dict(next(tensors) for _ in range(taken))
    tensors.close()
    assert gpu.runtime.live().registered == 0
    assert not wrong(kept, LARGE)


def test_a_stream_that_is_never_started_and_one_that_cannot_be_made_give_the_file_back(gpu: Gpu, shm: Path) -> None:
    path = write(shm / "m.safetensors", LARGE)
    tensors = headrace.stream(path, device=gpu.device, in_place="require")
    assert gpu.runtime.live().registered == 1
    del tensors
    assert gpu.runtime.live().registered == 0


def test_a_file_that_changes_is_an_error(gpu: Gpu, shm: Path) -> None:
    path = write(shm / "m.safetensors", LARGE)
    tensors = headrace.stream(path, device=gpu.device, in_place="require", memory_limit=0, concurrency=1)
    next(tensors)
    with path.open("r+b") as file:
        file.write(path.read_bytes()[:8])
    os.utime(path)
    with pytest.raises(SourceChangedError):
        dict(tensors)
    assert gpu.runtime.live().registered == 0
