"""The simulated cuFile and hipFile: they read right, and go wrong on order, in this process and in children."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.testing.simulated import SimulatedRuntime, find_compiler
from headrace.testing.simulated.cufile import Counts, SimulatedCuFile

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler on this machine")

PAGE = 4096
DATA = random.Random(6).randbytes(5 * PAGE + 1001)
OK, NOT_OPEN, RANGE, BAD_FILE, BAD_FLAG = 0, 5001, 5014, 5018, 5019
INVALID, BUFFER_TWICE, BUFFER_UNKNOWN, HANDLE_UNKNOWN, HANDLE_TWICE = 5022, 5023, 5024, 5027, 5028


class Status(ctypes.Structure):
    _fields_ = (("code", ctypes.c_int), ("cuda", ctypes.c_int))


class Target(ctypes.Union):
    _fields_ = (("fd", ctypes.c_int), ("handle", ctypes.c_void_p))


class Description(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("target", Target), ("operations", ctypes.c_void_p))


class GpuStats(ctypes.Structure):
    _fields_ = (("uuid", ctypes.c_char * 16), ("words", ctypes.c_uint64 * 29))


class StatsLevel3(ctypes.Structure):
    _fields_ = (("levels", ctypes.c_uint64 * 128), ("gpus", ctypes.c_uint32), ("each", GpuStats * 16))


class CuFile:
    """libcufile as a program binds it."""

    def __init__(self, path: Path, prefix: str = "cuFile") -> None:
        library = ctypes.CDLL(str(path), use_errno=True)

        def bound(name: str, result: Any, *arguments: Any) -> Any:
            function = getattr(library, prefix + name)
            function.restype, function.argtypes = result, arguments
            return function

        pointer, size, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        self._open = bound("DriverOpen", Status)
        self._close = bound("DriverClose", Status)
        self._register = bound("HandleRegister", Status, ctypes.POINTER(pointer), ctypes.POINTER(Description))
        self.deregister = bound("HandleDeregister", None, pointer)
        self._register_buffer = bound("BufRegister", Status, pointer, size, ctypes.c_int)
        self._deregister_buffer = bound("BufDeregister", Status, pointer)
        self.read = bound("Read", ctypes.c_ssize_t, pointer, pointer, size, offset, offset)
        self._set_level = bound("SetStatsLevel", Status, ctypes.c_int)
        self._stats = bound("GetStatsL3", Status, ctypes.POINTER(StatsLevel3))

    def open(self) -> int:
        return int(self._open().code)

    def close(self) -> int:
        return int(self._close().code)

    def register(self, descriptor: int, kind: int = 1) -> tuple[int, int | None]:
        handle = ctypes.c_void_p()
        description = Description(kind, Target(fd=descriptor), None)
        code = self._register(ctypes.byref(handle), ctypes.byref(description)).code
        return int(code), handle.value

    def register_buffer(self, address: int, nbytes: int) -> int:
        return int(self._register_buffer(address, nbytes, 0).code)

    def deregister_buffer(self, address: int) -> int:
        return int(self._deregister_buffer(address).code)

    def stats(self, level: int = 3) -> tuple[int, dict[str, int]]:
        found = StatsLevel3()
        code = self._set_level(level).code or self._stats(ctypes.byref(found)).code
        words = found.each[0].words
        names = {"total": 4, "p2p": 5, "nvfs": 6, "posix": 7, "unaligned": 8, "errors": 12}
        return int(code), {name: words[index] for name, index in names.items()} if not code else {}


@pytest.fixture
def runtime() -> Iterator[SimulatedRuntime]:
    with SimulatedRuntime() as made:
        yield made


@pytest.fixture
def direct(tmp_path: Path, runtime: SimulatedRuntime) -> SimulatedCuFile:
    return SimulatedCuFile(tmp_path, runtime)


@pytest.fixture
def cufile(direct: SimulatedCuFile) -> CuFile:
    made = CuFile(direct.path)
    assert made.open() == OK
    return made


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


@pytest.fixture
def handle(cufile: CuFile, descriptor: int) -> int:
    code, made = cufile.register(descriptor)
    assert (code, made is not None) == (OK, True)
    assert made is not None
    return made


@pytest.fixture
def memory(runtime: SimulatedRuntime) -> int:
    """Device memory for all of the file."""
    found = ctypes.c_void_p()
    assert runtime.library.cudaMalloc(ctypes.byref(found), ctypes.c_size_t(8 * PAGE)) == OK
    assert found.value is not None
    return found.value


def errors_of(direct: SimulatedCuFile) -> tuple[list[str], int]:
    return direct.violations(), direct.counts().failed_reads


class TestReading:
    def test_into_device_memory_at_offsets(
        self, cufile: CuFile, handle: int, memory: int, runtime: SimulatedRuntime, direct: SimulatedCuFile
    ) -> None:
        assert cufile.read(handle, memory, 2 * PAGE, PAGE, 4 * PAGE) == 2 * PAGE
        assert bytes(runtime.device_bytes(memory + 4 * PAGE, 2 * PAGE)) == DATA[PAGE : 3 * PAGE]
        assert bytes(runtime.device_bytes(memory, 4 * PAGE)) == b"\xcd" * 4 * PAGE
        assert cufile.read(handle, memory + 3, 1000, 13, 0) == 1000
        assert bytes(runtime.device_bytes(memory + 3, 1000)) == DATA[13:1013]
        assert errors_of(direct) == ([], 0)

    def test_into_host_memory(self, cufile: CuFile, handle: int) -> None:
        buffer = ctypes.create_string_buffer(100)
        assert cufile.read(handle, ctypes.addressof(buffer), 100, 7, 0) == 100
        assert buffer.raw == DATA[7:107]

    def test_ends_where_the_file_ends(self, cufile: CuFile, handle: int, memory: int, runtime: SimulatedRuntime) -> None:
        assert cufile.read(handle, memory, 2 * PAGE, 5 * PAGE, 0) == 1001
        assert bytes(runtime.device_bytes(memory, 1002)) == DATA[5 * PAGE :] + b"\xcd"
        assert cufile.read(handle, memory, PAGE, 100 * PAGE, 0) == 0

    def test_past_the_end_of_device_memory_is_refused(self, cufile: CuFile, handle: int, memory: int) -> None:
        assert cufile.read(handle, memory, PAGE, 0, 7 * PAGE + 1) == -RANGE
        assert cufile.read(handle, None, PAGE, 0, 0) == -5012

    def test_needs_an_open_driver_and_a_registered_handle(self, direct: SimulatedCuFile, descriptor: int, memory: int) -> None:
        cufile = CuFile(direct.path)
        assert cufile.register(descriptor)[0] == NOT_OPEN
        assert cufile.register_buffer(memory, PAGE) == NOT_OPEN
        assert cufile.close() == NOT_OPEN
        cufile.open()
        _, handle = cufile.register(descriptor)
        cufile.deregister(handle)
        assert cufile.read(handle, memory, PAGE, 0, 0) == -HANDLE_UNKNOWN
        assert "deregistered" in direct.violations()[0]
        assert cufile.read(None, memory, PAGE, 0, 0) == -HANDLE_UNKNOWN


class TestRegistering:
    def test_one_handle_for_each_descriptor(self, cufile: CuFile, handle: int, descriptor: int, direct: SimulatedCuFile) -> None:
        assert cufile.register(descriptor)[0] == HANDLE_TWICE
        cufile.deregister(handle)
        assert cufile.register(descriptor)[0] == OK
        assert direct.counts().handles == 1

    def test_only_open_descriptors_with_usual_flags(self, cufile: CuFile, descriptor: int, tmp_path: Path) -> None:
        assert cufile.register(descriptor, kind=3)[0] == BAD_FILE
        assert cufile.register(9999)[0] == BAD_FILE
        other = os.open(tmp_path / "model.safetensors", os.O_RDONLY | os.O_NOFOLLOW)
        assert cufile.register(other)[0] == BAD_FLAG
        os.close(other)

    def test_a_descriptor_stays_open_until_its_handle_is_gone(
        self, cufile: CuFile, direct: SimulatedCuFile, tmp_path: Path
    ) -> None:
        path = tmp_path / "other"
        path.write_bytes(DATA)
        opened = os.open(path, os.O_RDONLY)
        _, handle = cufile.register(opened)
        os.close(opened)
        cufile.deregister(handle)
        assert "closed before" in direct.violations()[0]
        cufile.deregister(handle)
        assert len(direct.violations()) == 2

    def test_buffers_once(self, cufile: CuFile, memory: int, direct: SimulatedCuFile) -> None:
        assert cufile.register_buffer(memory, 0) == INVALID
        assert cufile.register_buffer(memory, PAGE) == OK
        assert cufile.register_buffer(memory, PAGE) == BUFFER_TWICE
        assert direct.counts().buffers == 1
        assert cufile.deregister_buffer(memory) == OK
        assert cufile.deregister_buffer(memory) == BUFFER_UNKNOWN

    @pytest.mark.usefixtures("handle")
    def test_closing_with_files_registered_is_a_violation(self, cufile: CuFile, direct: SimulatedCuFile) -> None:
        assert cufile.close() == OK
        assert "registered" in direct.violations()[0]


class TestFaults:
    @pytest.mark.parametrize("code", [*range(5001, 5021), *range(5022, 5032), *range(5033, 5051)])
    def test_every_code_at_every_call(
        self, direct: SimulatedCuFile, cufile: CuFile, descriptor: int, memory: int, code: int
    ) -> None:
        direct.faults(open_error=code, register_error=code, buffer_error=code, stats_error=code)
        assert cufile.open() == code
        assert cufile.register(descriptor) == (code, None)
        assert cufile.register_buffer(memory, PAGE) == code
        assert cufile.stats()[0] == code
        direct.faults(read_error=code)
        _, handle = cufile.register(descriptor)
        assert cufile.read(handle, memory, PAGE, 0, 0) == -code
        direct.faults()
        assert cufile.read(handle, memory, PAGE, 0, 0) == PAGE

    def test_errno(self, direct: SimulatedCuFile, cufile: CuFile, handle: int, memory: int) -> None:
        direct.faults(read_errno=errno.EIO)
        assert cufile.read(handle, memory, PAGE, 0, 0) == -1
        assert ctypes.get_errno() == errno.EIO
        assert direct.counts().failed_reads == 1

    def test_short_reads(
        self, direct: SimulatedCuFile, cufile: CuFile, handle: int, memory: int, runtime: SimulatedRuntime
    ) -> None:
        direct.faults(read_at_most=100)
        assert cufile.read(handle, memory, PAGE, 0, 0) == 100
        assert bytes(runtime.device_bytes(memory, 101)) == DATA[:100] + b"\xcd"

    def test_wrong_bytes(
        self, direct: SimulatedCuFile, cufile: CuFile, handle: int, memory: int, runtime: SimulatedRuntime
    ) -> None:
        direct.faults(wrong_bytes=True)
        assert cufile.read(handle, memory, PAGE, 0, 0) == PAGE
        found = bytes(runtime.device_bytes(memory, PAGE))
        assert sum(found[place] != DATA[place] for place in range(PAGE)) == 1

    def test_begin_after_some_reads(self, direct: SimulatedCuFile, cufile: CuFile, handle: int, memory: int) -> None:
        direct.faults(read_error=5030, read_after=2)
        assert [cufile.read(handle, memory, PAGE, 0, 0) for _ in range(4)] == [PAGE, PAGE, -5030, -5030]

    def test_on_some_filesystems_only(
        self, direct: SimulatedCuFile, cufile: CuFile, handle: int, memory: int, tmp_path: Path
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        path = tmp_path / "elsewhere" / "model.safetensors"
        path.write_bytes(DATA)
        direct.faults(register_error=5027, read_error=5008, only_under=tmp_path / "elsewhere")
        assert cufile.read(handle, memory, PAGE, 0, 0) == PAGE
        opened = os.open(path, os.O_RDONLY)
        assert cufile.register(opened)[0] == 5027
        direct.faults(read_error=5008, only_under=tmp_path / "elsewhere")
        _, other = cufile.register(opened)
        assert cufile.read(other, memory, PAGE, 0, 0) == -5008
        cufile.deregister(other)
        os.close(opened)

    def test_belong_to_one_copy_of_the_library(self, direct: SimulatedCuFile, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        other = SimulatedCuFile(tmp_path / "other")
        direct.faults(open_error=5033)
        assert (CuFile(direct.path).open(), CuFile(other.path).open()) == (5033, OK)
        assert (direct.counts().opens, other.counts().opens) == (1, 1)


class TestChildren:
    """A child process that loads the library has the same faults: what a probe in a child is tested with."""

    OPEN = """
import ctypes, os, sys
class Status(ctypes.Structure): _fields_ = (("code", ctypes.c_int), ("cuda", ctypes.c_int))
library = ctypes.CDLL(sys.argv[1])
library.cuFileDriverOpen.restype = Status
print("loaded", flush=True)
print(library.cuFileDriverOpen().code, os.path.exists("/proc/self/fd/0"), flush=True)
"""

    def command(self, direct: SimulatedCuFile) -> list[str]:
        return [sys.executable, "-c", self.OPEN, str(direct.path)]

    def test_have_the_faults_of_their_parent(self, direct: SimulatedCuFile) -> None:
        for faults, expected in (({}, "0 True"), ({"open_error": 5033}, "5033 True"), ({"open_closes_stdin": True}, "0 False")):
            direct.faults(**faults)
            done = subprocess.run(
                self.command(direct), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True
            )
            assert done.stdout.splitlines() == ["loaded", expected]

    def test_hang_where_opening_hangs(self, direct: SimulatedCuFile) -> None:
        direct.faults(open_hangs=True)
        with subprocess.Popen(self.command(direct), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "loaded\n"
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(timeout=0.2)
            child.kill()


class TestStatistics:
    @pytest.mark.parametrize("route", ["p2p", "nvfs", "posix"])
    def test_tell_the_route(self, direct: SimulatedCuFile, cufile: CuFile, handle: int, memory: int, route: str) -> None:
        direct.faults(route=route)
        cufile.read(handle, memory, PAGE, 0, 0)
        cufile.read(handle, memory, PAGE, PAGE, 0)
        code, found = cufile.stats()
        assert (code, found["total"], found[route], found["unaligned"]) == (OK, 2, 2, 0)
        assert sum(found[name] for name in ("p2p", "nvfs", "posix")) == 2

    def test_unaligned_reads_go_through_the_host(self, cufile: CuFile, handle: int, memory: int) -> None:
        for nbytes, offset, place in ((1000, 0, 0), (PAGE, 13, 0), (PAGE, 0, 5)):
            cufile.read(handle, memory, nbytes, offset, place)
        assert cufile.stats()[1] == {"total": 3, "p2p": 0, "nvfs": 0, "posix": 3, "unaligned": 3, "errors": 0}

    def test_need_level_3(self, cufile: CuFile) -> None:
        assert cufile.stats(level=1)[0] == INVALID
        assert cufile.stats(level=4)[0] == INVALID

    def test_counts_are_this_process_s(self, direct: SimulatedCuFile, cufile: CuFile, handle: int, memory: int) -> None:
        before = direct.counts()
        cufile.read(handle, memory, PAGE, 0, 0)
        direct.faults(read_error=5030)
        cufile.read(handle, memory, PAGE, 0, 0)
        assert direct.counts() == replace(before, reads=2, read_nbytes=PAGE, p2p_reads=1, failed_reads=1)
        assert isinstance(before, Counts)


class TestHip:
    def test_has_the_same_under_its_own_names(
        self, tmp_path: Path, runtime: SimulatedRuntime, descriptor: int, memory: int
    ) -> None:
        direct = SimulatedCuFile(tmp_path, runtime, name="libhipfile.so.0")
        hip = CuFile(direct.path, "hipFile")
        assert hip.open() == OK
        code, handle = hip.register(descriptor)
        assert code == OK
        assert hip.read(handle, memory, PAGE, 0, 0) == PAGE
        assert bytes(runtime.device_bytes(memory, PAGE)) == DATA[:PAGE]
        assert hip.stats()[1]["p2p"] == 1
        hip.deregister(handle)
        assert (hip.close(), direct.violations()) == (OK, [])


class TestAcceptance:
    """The probe of scripts/gpu, against the simulated library."""

    def answers(self, direct: SimulatedCuFile, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
        from headrace.testing.acceptance import _cufile as probe
        from headrace.testing.acceptance import _runtime as runtimes

        monkeypatch.setattr(probe, "NBYTES", 1 << 20)
        monkeypatch.setattr(probe, "READS", ((0, 1 << 20), (4096, 1 << 16), (13, 10_001)))
        answers: dict[str, object] = probe.direct_storage(runtimes.simulated(), folder, str(direct.path))
        return answers

    def test_shows_what_the_library_does(self, direct: SimulatedCuFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = self.answers(direct, tmp_path, monkeypatch)
        assert (found["open"], found["disk: register"], found["descriptor 0 is still there"]) == ("0", "0", True)
        assert str(found["disk: 1048576 bytes at 0"]).startswith("equal, ")
        assert str(found["disk: 10001 bytes at 13"]).startswith("equal, ")
        assert str(found["routes"]).startswith("p2p ")
        assert (direct.violations(), direct.counts().handles) == ([], 0)

    def test_shows_a_library_that_lies_or_fails(
        self, direct: SimulatedCuFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        direct.faults(wrong_bytes=True, stats_error=5030)
        found = self.answers(direct, tmp_path, monkeypatch)
        assert str(found["disk: 65536 bytes at 4096"]).startswith("WRONG BYTES")
        assert found["routes"] == "not told: 5030"
        direct.faults(read_errno=errno.EIO, open_error=5033)
        found = self.answers(direct, tmp_path, monkeypatch)
        assert (found["open"], found["disk: 65536 bytes at 4096"]) == ("5033", f"-1, errno {errno.EIO}")
