"""Direct storage, on a simulated GPU with simulated libraries that go wrong on order: in the child that tries them out, when they
are opened, and in the middle of a load."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from budget import examples, rest_slow
from checkpoints import (
    KIB,
    MIB,
    Contents,
    bytes_of,
    mixed_contents,
    random_contents,
    random_entry,
    serialize,
    value_of,
    write,
    write_sparse,
    wrong,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_gpu import Gpu, needs_compiler
from typer.testing import CliRunner

import headrace
from headrace._calls import Callers
from headrace._header import parse_header
from headrace._plan import DIRECT_NBYTES, Limits, SourceAbilities, Staging
from headrace._planner import make_plan
from headrace._routes import choose_direct, choose_route, leaves_headroom
from headrace.cli import app
from headrace.errors import LoadError, OptionError, SourceChangedError, SourceError, SourceTimeoutError, TruncatedError
from headrace.sources import gds
from headrace.sources.file import FileSource
from headrace.sources.gds import _verdict as verdict_module
from headrace.sources.gds._library import MAX_IO_NBYTES, CallError, Library, Routes, find_libraries, register
from headrace.sources.gds._verdict import Gpu as GpuPlace
from headrace.sources.gds._verdict import judge, mode_of
from headrace.testing.devices import SimulatedDevice
from headrace.testing.simulated import SimulatedRuntime
from headrace.testing.simulated.cufile import SimulatedCuFile

pytestmark = [pytest.mark.timeout(60), needs_compiler]

PAGE = 4096
SMALL = random_contents(*[100 * KIB] * 20, 3 * MIB + 5, 700, 2 * MIB)


class Direct(NamedTuple):
    """A simulated GPU with a library of direct storage."""

    gpu: Gpu
    library: SimulatedCuFile

    @property
    def device(self) -> SimulatedDevice:
        return self.gpu.device

    def faults(self, **faults: Any) -> None:
        self.library.faults(**faults)


@contextmanager
def direct_gpu(folder: Path, mode: str = "manual", *, kind: str = "cuda", checks: bool = True) -> Iterator[Direct]:
    with SimulatedRuntime() as runtime:
        runtime.mode(mode)
        library = SimulatedCuFile(folder, runtime, name="libcufile.so.0" if kind == "cuda" else "libhipfile.so.0")
        device = SimulatedDevice(runtime, prefix=kind, direct=library.path)
        made = Direct(Gpu(runtime, device), library)
        yield made
        if checks:
            made.gpu.assert_clean()
            assert library.violations() == []
            assert library.counts().handles == 0


@pytest.fixture(params=["manual", "random"])
def direct(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Direct]:
    with direct_gpu(tmp_path, request.param) as made:
        yield made


@pytest.fixture
def lazy(tmp_path: Path) -> Iterator[Direct]:
    with direct_gpu(tmp_path) as made:
        yield made


def model(tmp_path: Path, contents: Contents, *, data_start: int = 0) -> Path:
    return write(tmp_path / "model.safetensors", contents, data_start=data_start)


def loaded(direct: Direct, path: Path, contents: Contents, **arguments: Any) -> headrace.Snapshot:
    """Load all, compare every byte, drop all."""
    with headrace.stream(path, device=direct.device, **({"gds": "require"} | arguments)) as tensors:
        kept = dict(tensors)
    assert kept.keys() == contents.keys()
    assert not wrong(kept, contents)
    return tensors.stats


# ---- what is decided, without any library


def ability(**fields: Any) -> SourceAbilities:
    return SourceAbilities(**({"kind": "file"} | fields))


YES = {"usable": True, "mode": "p2p", "reason": "tried out"}
CHOICES: list[tuple[str, SourceAbilities, dict[str, Any], bool]] = [
    ("auto", ability(cached=False), YES, True),
    ("require", ability(cached=False), YES, True),
    ("auto", ability(cached=True), YES, False),
    ("require", ability(cached=True), YES, True),
    ("auto", ability(cached=False), YES | {"mode": "compat"}, False),
    ("require", ability(cached=False), YES | {"mode": "compat"}, True),
    ("auto", ability(cached=False), YES | {"mode": ""}, True),
    ("auto", ability(cached=False), YES | {"mode": "mixed"}, True),
    ("auto", ability(cached=False), YES | {"usable": False}, False),
    ("require", ability(cached=False), YES | {"usable": False}, False),
    ("require", ability(kind="network"), YES, False),
    ("require", ability(kind="memory"), YES, False),
    ("require", ability(cached=False, verified="by a manifest"), YES, False),
    ("require", ability(cached=True, in_place=True), YES, False),
]


@pytest.mark.parametrize(("demand", "source", "verdict", "expected"), CHOICES)
def test_which_shards_are_read_directly(demand: str, source: SourceAbilities, verdict: dict[str, Any], expected: bool) -> None:
    used, reason = choose_direct(demand, source, **verdict)
    assert used is expected
    assert reason
    assert "\n" not in reason


def test_the_route_says_in_one_line_why_direct_storage_is_or_is_not_used() -> None:
    assert choose_route(ability(direct_nbytes=MIB, direct_reason="tried out"), 1, "cuda:0") == ("gds", "tried out")
    route, reason = choose_route(ability(cached=True, direct_reason="there is no library"), 1, "cuda:0")
    assert route == "staged"
    assert reason.endswith("not straight into cuda:0: there is no library")
    assert "straight" not in choose_route(ability(cached=True), 1, "cuda:0")[1]
    assert choose_route(ability(direct_nbytes=MIB, direct_reason="tried out"), 0, "cuda:0")[0] == "none"


HEADROOM = [
    (0, 256 * MIB, True),
    (0, 256 * MIB - 1, False),
    (100 * MIB, 356 * MIB, True),
    (100 * MIB, 356 * MIB - 1, False),
    (1024 * MIB, 1280 * MIB, True),
    (1024 * MIB, 1280 * MIB - 1, False),
    (1028 * MIB, 1284 * MIB, False),
    (1028 * MIB, 1285 * MIB, True),
    (8192 * MIB, 10240 * MIB, True),
    (8192 * MIB, 10240 * MIB - 1, False),
    (8192 * MIB, 0, False),
]


@pytest.mark.parametrize(("nbytes", "free", "expected"), HEADROOM)
def test_a_tensor_stays_on_the_device_where_256_mib_and_a_quarter_of_it_are_left(nbytes: int, free: int, expected: bool) -> None:
    assert leaves_headroom(nbytes, free) is expected


@settings(max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(0, 600 * KIB), min_size=1, max_size=12),
    data_start=st.integers(0, 7),
    most=st.sampled_from([0, PAGE, 65536, 100_000, MAX_IO_NBYTES]),
    given_count=st.integers(0, 3),
)
def test_direct_reads_are_whole_pages_and_with_the_others_cover_every_byte_once(
    sizes: list[int], data_start: int, most: int, given_count: int
) -> None:
    contents = {f"t{i}": random_entry("U8", (size,)) for i, size in enumerate(sizes)}
    data = serialize(contents, data_start=data_start)
    header = parse_header(data[8 : 8 + int.from_bytes(data[:8], "little")], url="m", nbytes=len(data))
    limits = Limits(2, MIB, Staging(4, 256 * KIB, 64 * MIB))
    chosen = frozenset(list(contents)[:given_count]) or None
    plan = make_plan([header], [None], [ability(direct_nbytes=most)], limits, given=chosen, device="cuda:0")
    covered: list[tuple[int, int]] = []
    for read in plan.reads:
        covered.append((read.offset, read.offset + read.nbytes))
        span = plan.spans[read.span]
        if read.direct:
            assert read.offset % PAGE == read.nbytes % PAGE == 0
            assert read.nbytes <= max(PAGE, most)
            assert span.offset is None or read.position % PAGE == 0, "pages of the file are pages of the memory"
    covered.sort()
    assert all(one[1] <= other[0] for one, other in pairwise(covered))
    assert sum(end - start for start, end in covered) == sum(sizes)
    if most == 0:
        assert not any(read.direct for read in plan.reads)
    for span in plan.spans:
        reads = plan.reads[span.first_read : span.last_read]
        if most and max((read.nbytes for read in reads), default=0) >= DIRECT_NBYTES + 2 * PAGE:
            assert any(read.direct for read in reads)


# ---- where the library is found


def test_a_library_is_looked_for_in_the_process_in_wheels_on_the_system_and_by_soname(tmp_path: Path) -> None:
    wheel = tmp_path / "site" / "nvidia" / "cufile" / "lib"
    system = tmp_path / "root" / "usr" / "local" / "cuda-13" / "targets" / "x86_64-linux" / "lib"
    for folder in (wheel, system):
        folder.mkdir(parents=True)
        (folder / "libcufile.so.0").touch()
        (folder / "libcufile_rdma.so.1").touch()
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00 r-xp 0 08:01 5 /opt/x/libcufile.so.1.14.1\n7f01 r-xp 0 08:01 5 /opt/x/libcufile_rdma.so.1\n7f02 rw-p 0 0 0\n"
    )
    found = find_libraries("cuda", root=tmp_path / "root", maps=maps, folders=["", str(tmp_path / "site")])
    assert found == (
        "/opt/x/libcufile.so.1.14.1",
        str(wheel / "libcufile.so.0"),
        str(system / "libcufile.so.0"),
        "libcufile.so.0",
        "libcufile.so",
    )


def test_hipfile_is_found_by_its_own_names(tmp_path: Path) -> None:
    folder = tmp_path / "opt" / "rocm-7.2.0" / "lib"
    folder.mkdir(parents=True)
    (folder / "libhipfile.so").touch()
    found = find_libraries("hip", root=tmp_path, maps=tmp_path / "none", folders=[])
    assert found == (str(folder / "libhipfile.so"), "libhipfile.so.0", "libhipfile.so")


def test_a_library_that_the_process_has_mapped_is_found(lazy: Direct) -> None:
    lazy.library.counts()  # loads it
    assert str(lazy.library.path) in find_libraries("cuda")


# ---- what the child finds out


def verdict_for(direct: Direct, path: Path, kind: str = "cuda") -> gds.Verdict:
    place = GpuPlace(str(direct.gpu.runtime.path), kind, 0, direct.device.name)
    source = FileSource(path)
    try:
        return gds.verdict_of(source, place, direct.device.direct_libraries)
    finally:
        source.close()


@pytest.mark.parametrize(("route", "mode"), rest_slow([("p2p", "p2p"), ("nvfs", "p2p"), ("posix", "compat")], quick=(0, 2)))
def test_a_library_that_reads_right_is_usable_and_its_statistics_say_how_it_reads(
    lazy: Direct, tmp_path: Path, route: str, mode: str
) -> None:
    lazy.faults(route=route)
    found = verdict_for(lazy, model(tmp_path, SMALL))
    assert (found.usable, found.mode, found.name, found.path) == (True, mode, "cuFile 1.20", str(lazy.library.path))
    assert lazy.library.counts().opens == 0, "only the child has opened it"


def test_a_library_without_statistics_is_usable(lazy: Direct, tmp_path: Path) -> None:
    lazy.faults(stats_error=5030)
    found = verdict_for(lazy, model(tmp_path, SMALL))
    assert (found.usable, found.mode) == (True, "")


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"open_error": 5033}, "NVFS_SETUP_ERROR (5033)"),
    ({"open_error": 5001}, "DRIVER_NOT_INITIALIZED (5001)"),
    ({"open_error": 5011}, "CUDA_DRIVER_ERROR (5011)"),
    ({"open_error": 5099}, "unknown error (5099)"),
    ({"open_closes_stdin": True}, "closes descriptors"),
    ({"register_error": 5027}, "/run/udev"),
    ({"register_error": 5008}, "IO_NOT_SUPPORTED"),
    ({"register_error": 5020}, "DIO_NOT_SET"),
    ({"read_error": 5030}, "INTERNAL_ERROR"),
    ({"read_error": 999}, "unknown error (999)"),
    ({"read_errno": errno.EIO}, "errno 5"),
    ({"wrong_bytes": True}, "wrong bytes"),
    ({"wrong_bytes": True, "read_after": 2}, "wrong bytes"),
    ({"read_error": 5022, "read_after": 2}, "INVALID_VALUE"),
]


@pytest.mark.parametrize(("faults", "said"), rest_slow(REFUSALS, quick=(0, 4, 5, 8, 12)), ids=str)
def test_a_library_that_fails_or_lies_is_refused_with_the_reason(
    lazy: Direct, tmp_path: Path, faults: dict[str, Any], said: str
) -> None:
    lazy.faults(**faults)
    found = verdict_for(lazy, model(tmp_path, SMALL))
    assert not found.usable
    assert said in found.reason
    assert "\n" not in found.reason
    assert lazy.library.counts().opens == 0


def probes() -> list[str]:
    """Child processes that try a library out, those included that ended and were not waited for."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread, or a child, that ends meanwhile
            for child in (task / "children").read_text().split():
                command = Path("/proc", child, "cmdline").read_text()
                found += [command] if not command or "headrace.sources.gds" in command else []
    return found


@pytest.mark.parametrize(("fault", "step"), [("open_hangs", "opening it"), ("read_hangs", "reading")])
@pytest.mark.slow
def test_a_library_that_hangs_is_refused_within_the_limit_and_the_child_is_gone(
    lazy: Direct, tmp_path: Path, fault: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict_module, "PROBE_LIMIT_S", 3.0)
    lazy.faults(**{fault: True})
    found = verdict_for(lazy, model(tmp_path, SMALL))
    assert not found.usable
    assert f"{step} did not come back within 3 s" in found.reason
    assert not probes()


def test_a_verdict_is_kept_for_the_filesystem_and_the_library(lazy: Direct, tmp_path: Path) -> None:
    path = model(tmp_path, SMALL)
    first = verdict_for(lazy, path)
    lazy.faults(open_error=5033)
    (tmp_path / "other").mkdir()
    assert verdict_for(lazy, write(tmp_path / "other" / "m.safetensors", SMALL)) is first
    another = SimulatedCuFile(tmp_path / "other", lazy.gpu.runtime)
    another.faults(open_error=5033)
    lazy.device.direct_libraries = (str(another.path),)
    assert not verdict_for(lazy, path).usable


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a second filesystem")
def test_a_library_may_fail_on_one_filesystem_only(lazy: Direct, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if os.stat(folder).st_dev == os.stat(tmp_path).st_dev:
            pytest.skip("both are one filesystem here")
        elsewhere = write(Path(folder, "m.safetensors"), SMALL)
        lazy.faults(read_error=5008, only_under=folder)
        assert verdict_for(lazy, model(tmp_path, SMALL)).usable
        assert not verdict_for(lazy, elsewhere).usable
        assert loaded(lazy, tmp_path / "model.safetensors", SMALL).gds.startswith("gds(p2p)")
        with pytest.raises(OptionError):
            headrace.load(elsewhere, device=lazy.device, gds="require")


def test_a_child_that_dies_or_says_nothing_is_a_reason() -> None:
    place = GpuPlace("libcudart.so", "cuda", 0, "cuda:0")
    facts = {"library": "/x/libcufile.so.0", "name": "cuFile 1.20", "step": "opening it"}
    ending = f"ended the process that tried it out ({signal.SIGSEGV.name})"
    assert judge(facts, ending, place).reason == f"cuFile 1.20: opening it {ending}"
    assert not judge({}, "", place).usable
    assert not judge(facts | {"usable": True, "routes": None, "max_nbytes": MIB}, ending, place).usable, "it died afterwards"
    assert judge(facts | {"usable": True, "routes": [0, 3, 0], "max_nbytes": MIB}, "", place).mode == "p2p"


@pytest.mark.parametrize(
    ("routes", "mode"), [((0, 0, 0), ""), ((2, 0, 0), "p2p"), ((0, 2, 0), "p2p"), ((0, 0, 2), "compat"), ((1, 1, 1), "mixed")]
)
def test_the_mode_is_what_the_statistics_say(routes: tuple[int, int, int], mode: str) -> None:
    assert mode_of(Routes(*routes)) == mode


@pytest.mark.slow
def test_a_runtime_that_cannot_be_used_and_a_library_that_is_not_there_are_reasons(lazy: Direct, tmp_path: Path) -> None:
    source = FileSource(model(tmp_path, SMALL))
    nothing = gds.verdict_of(source, GpuPlace(str(lazy.gpu.runtime.path), "cuda", 0, "x"), [str(tmp_path / "none.so")])
    assert not nothing.usable
    assert "no library was found" in nothing.reason
    beyond = gds.verdict_of(source, GpuPlace(str(lazy.gpu.runtime.path), "cuda", 7, "x"), lazy.device.direct_libraries)
    assert "cudaSetDevice" in beyond.reason
    broken = gds.verdict_of(source, GpuPlace(str(tmp_path / "none.so"), "cuda", 0, "x"), lazy.device.direct_libraries)
    assert not broken.usable
    source.close()


@pytest.mark.slow
def test_the_child_leaves_no_log_behind_and_needs_no_torch(lazy: Direct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert verdict_for(lazy, model(tmp_path, SMALL)).usable
    assert os.listdir() == []
    code = "import sys, headrace.sources.gds._probe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# ---- loads


@pytest.mark.parametrize("data_start", [0, 1, 4])
@pytest.mark.parametrize("arguments", [{}, {"memory_limit": 0, "concurrency": 4}, {"ownership": "copied"}], ids=str)
@pytest.mark.slow
def test_bytes_arrive_right_and_most_of_them_straight(
    direct: Direct, tmp_path: Path, data_start: int, arguments: dict[str, Any]
) -> None:
    contents = mixed_contents() | random_contents(5 * MIB + 1, 9 * MIB + 4095, 77)
    stats = loaded(direct, model(tmp_path, contents, data_start=data_start), contents, **arguments)
    assert stats.gds.startswith("gds(p2p): cuFile 1.20, reads: p2p ")
    assert stats.gds_nbytes > 0.9 * stats.read_nbytes
    assert stats.gds_nbytes + stats.sent_nbytes == stats.read_nbytes
    assert stats.degraded == ()
    assert [route for _, route, _ in stats.routes] == ["gds"]
    assert direct.library.counts().unaligned_reads == 0


def test_requests_are_as_long_as_the_library_takes_and_several_are_in_flight(lazy: Direct, tmp_path: Path) -> None:
    contents = random_contents(40 * MIB + 3)
    path = model(tmp_path, contents)
    plan = headrace.plan(path, device=lazy.device, gds="require")
    longest = max(read.nbytes for read in plan.reads if read.direct)
    assert longest == MAX_IO_NBYTES
    loaded(lazy, path, contents, concurrency=3)
    assert lazy.library.counts().reads == sum(read.direct for read in plan.reads) == 3


def test_short_reads_are_gone_on_with(lazy: Direct, tmp_path: Path) -> None:
    path = model(tmp_path, SMALL)
    verdict_for(lazy, path)
    lazy.faults(read_at_most=300_000)
    stats = loaded(lazy, path, SMALL)
    assert stats.gds_nbytes > 4 * MIB
    assert lazy.library.counts().reads > 10


def test_hipfile_reads_the_same(tmp_path: Path) -> None:
    with direct_gpu(tmp_path, kind="hip") as direct:
        stats = loaded(direct, model(tmp_path, SMALL), SMALL)
        assert stats.gds.startswith("gds(p2p): hipFile 0.4.0")
        direct.faults(read_error=5011)
        with pytest.raises(SourceError, match="HIP_DRIVER_ERROR"):
            headrace.load(tmp_path / "model.safetensors", device=direct.device, gds="require")


def test_casts_slices_and_selections_come_right(lazy: Direct, tmp_path: Path) -> None:
    contents = {f"t{i}": random_entry("F32", (300, 1024), seed=i) for i in range(4)} | {"h": random_entry("BF16", (500, 512))}
    path = model(tmp_path, contents)
    arguments: dict[str, Any] = {
        "names": ["t*", "h"],
        "dtype": {"t1": "BF16", "h": "F32"},
        "slices": {"t2": slice(10, 200), "t3": (slice(None), slice(3, 90))},
    }
    expected = headrace.load(path, **arguments)
    with headrace.stream(path, device=lazy.device, gds="require", **arguments) as tensors:
        found = dict(tensors)
    for name, tensor in expected.items():
        assert bytes_of(found[name].view(torch.uint8)) == bytes_of(tensor.view(torch.uint8)), name
    assert tensors.stats.gds_nbytes > 0
    assert lazy.gpu.runtime.stats().kernels == 2, "one conversion for each run of a dtype"


def test_into_reads_straight_into_given_tensors_before_any_staging(lazy: Direct, tmp_path: Path) -> None:
    contents = random_contents(3 * MIB, 300 * KIB, 500, 20 * KIB)
    given = {name: lazy.device.tensor(torch.zeros_like(value_of(entry))) for name, entry in contents.items()}
    before = lazy.gpu.runtime.stats().device_allocations
    path = model(tmp_path, contents)
    headrace.load(path, device=lazy.device, gds="require", into=lambda info: given[info.name])
    with headrace.stream(path, device=lazy.device, gds="require", into=given) as tensors:
        kept = dict(tensors)
    assert all(kept[name] is given[name] for name in contents)
    assert not wrong(given, contents)
    assert tensors.stats.gds_nbytes > 3 * MIB
    assert lazy.gpu.runtime.stats().device_allocations == before


def test_a_read_waits_for_what_was_queued_for_its_memory_before(lazy: Direct, tmp_path: Path) -> None:
    """Both the caller's own work on a given tensor and conversions out of memory that is used again."""
    entry = random_entry("U8", (MIB,))
    given = lazy.device.tensor(torch.zeros(MIB, dtype=torch.uint8))

    def spoil(memory: memoryview) -> None:
        memory[:] = bytes(memory.nbytes)

    assert lazy.gpu.runtime.launch(0, spoil, (given.data_ptr(), MIB)) == 0
    headrace.load(model(tmp_path, {"t": entry}), device=lazy.device, gds="require", into={"t": given})
    assert bytes_of(given) == entry.data
    contents = {f"t{i}": random_entry("BF16", (300, 1024), seed=i) for i in range(12)}
    path = model(tmp_path, contents)
    with headrace.stream(
        path, device=lazy.device, gds="require", dtype="F32", memory_limit=0, concurrency=4, order="file"
    ) as tensors:
        for name, tensor in tensors:
            assert bytes_of(tensor) == bytes_of(value_of(contents[name]).float())
            del tensor


def test_several_shards_on_one_filesystem_need_one_child(lazy: Direct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[object] = []
    original = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: children.append(a) or original(*a, **k))
    paths = [write(tmp_path / f"{i}.safetensors", {f"{i}.{n}": e for n, e in SMALL.items()}) for i in range(3)]
    contents = {f"{i}.{name}": entry for i in range(3) for name, entry in SMALL.items()}
    with headrace.stream([str(path) for path in paths], device=lazy.device, gds="require") as tensors:
        assert not wrong(dict(tensors), contents)
    assert len(children) == 1


def test_files_shorter_than_a_page_are_staged_and_no_reason_to_refuse(lazy: Direct, tmp_path: Path) -> None:
    stats = loaded(lazy, model(tmp_path, random_contents(10, 20)), random_contents(10, 20))
    assert stats.gds.startswith("staged: ")
    assert stats.degraded == ()


def test_off_touches_no_library_and_is_the_default(lazy: Direct, tmp_path: Path) -> None:
    path = model(tmp_path, SMALL)
    for arguments in ({}, {"gds": "off"}):
        with headrace.stream(path, device=lazy.device, **arguments) as tensors:
            assert not wrong(dict(tensors), SMALL)
        assert (tensors.stats.gds, tensors.stats.gds_nbytes) == ("", 0)
    assert "gds" not in str(headrace.plan(path, device=lazy.device))
    assert lazy.library.counts().opens == 0


# ---- what falls back, and what does not


def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files seem to be on the disk, and nowhere else."""
    monkeypatch.setattr(FileSource, "prefers_direct", lambda *_: True)


@pytest.mark.parametrize("faults", rest_slow([{"open_error": 5033}, {"wrong_bytes": True}, {"register_error": 5027}]), ids=str)
def test_auto_takes_the_ring_with_one_warning_and_require_raises_with_the_reason(
    lazy: Direct, tmp_path: Path, faults: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cold(monkeypatch)
    lazy.faults(**faults)
    path = model(tmp_path, SMALL)
    stats = loaded(lazy, path, SMALL, gds="auto")
    assert stats.gds_nbytes == 0
    assert stats.gds.startswith("staged: cuFile 1.20: ")
    assert len(stats.degraded) == len(caplog.records) == 1
    assert stats.degraded[0].startswith("gds='auto': ")
    text = str(headrace.plan(path, device=lazy.device, gds="auto"))
    assert "not straight into simulated:0: cuFile 1.20: " in text
    for verb in (headrace.load, headrace.plan):
        with pytest.raises(OptionError) as caught:
            verb(path, device=lazy.device, gds="require")
        assert caught.value.option == "gds"
        assert "cuFile 1.20: " in str(caught.value)


def test_auto_reads_directly_what_is_not_cached(lazy: Direct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(tmp_path, SMALL)
    stats = loaded(lazy, path, SMALL, gds="auto", direct_io="off")
    assert stats.gds == "staged: the page cache is quicker than the disk"
    assert stats.degraded == ()
    cold(monkeypatch)
    assert loaded(lazy, path, SMALL, gds="auto").gds.startswith("gds(p2p)")


def test_auto_leaves_compatibility_mode_to_the_ring(lazy: Direct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold(monkeypatch)
    lazy.faults(route="posix")
    stats = loaded(lazy, model(tmp_path, SMALL), SMALL, gds="auto")
    assert stats.gds_nbytes == 0
    assert "compatibility mode" in stats.gds
    assert len(stats.degraded) == 1
    assert loaded(lazy, tmp_path / "model.safetensors", SMALL).gds.startswith("gds(compat): ")


def test_the_statistics_of_the_load_decide_and_not_those_of_the_child(lazy: Direct, tmp_path: Path) -> None:
    path = model(tmp_path, SMALL)
    assert verdict_for(lazy, path).mode == "p2p"
    lazy.faults(route="posix")
    assert loaded(lazy, path, SMALL).gds.startswith("gds(compat): ")
    lazy.faults(stats_error=5030)
    assert loaded(lazy, path, SMALL).gds == "gds: cuFile 1.20 does not tell which way its reads took"


@pytest.mark.slow
def test_what_refuses_in_this_process_though_not_in_the_child_falls_back_too(
    lazy: Direct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold(monkeypatch)
    path = model(tmp_path, SMALL)
    assert verdict_for(lazy, path).usable
    lazy.faults(register_error=5008)
    stats = loaded(lazy, path, SMALL, gds="auto")
    assert stats.gds.startswith("staged: cannot read ")
    assert len(stats.degraded) == 1
    lazy.faults(open_error=5001)
    (tmp_path / "other").mkdir()
    other = SimulatedCuFile(tmp_path / "other", lazy.gpu.runtime)
    lazy.device.direct_libraries = (str(other.path),)
    assert verdict_for(lazy, path).usable
    other.faults(open_error=5001)
    assert "DRIVER_NOT_INITIALIZED" in loaded(lazy, path, SMALL, gds="auto").gds


@pytest.mark.leaky_ok(reason="the thread that opens the library never comes back")
@pytest.mark.slow
def test_opening_and_registering_cannot_hang_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold(monkeypatch)
    with direct_gpu(tmp_path) as direct:
        path = model(tmp_path, SMALL)
        assert verdict_for(direct, path).usable
        monkeypatch.setattr(verdict_module, "PROBE_LIMIT_S", 0.3)
        direct.faults(open_hangs=True)
        for _ in range(2):
            assert "did not come back within 0.3 s" in loaded(direct, path, SMALL, gds="auto").gds


@pytest.mark.parametrize(
    ("what", "gpu", "reason"),
    [
        ("a device without a runtime", False, ""),
        ("verified bytes", True, "verified"),
        ("network and memory", True, "local files"),
    ],
)
def test_what_cannot_be_read_directly_says_so(lazy: Direct, tmp_path: Path, what: str, gpu: bool, reason: str) -> None:
    path = model(tmp_path, SMALL)
    if what == "verified bytes":
        headrace.verify(path, write=True, out=tmp_path / "headrace.manifest.json")
        stats = loaded(lazy, path, SMALL, gds="auto", verify=True)
        assert reason in stats.gds
        return
    if gpu:
        from headrace.sources.memory import MemorySource

        tensors = headrace.stream(MemorySource(path.read_bytes()), device=lazy.device, gds="auto")
        assert not wrong(dict(tensors), SMALL)
        assert reason in tensors.stats.gds
        with pytest.raises(OptionError):
            headrace.load(MemorySource(path.read_bytes()), device=lazy.device, gds="require")
        return
    with pytest.raises(OptionError) as caught:
        headrace.load(path, gds="require")
    assert caught.value.option == "gds"


def test_a_plan_for_a_gpu_that_is_not_there_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():  # noqa: TID251
        pytest.skip("there is a GPU")
    cold(monkeypatch)
    text = str(headrace.plan(model(tmp_path, SMALL), device="cuda", gds="auto"))
    assert "not straight into cuda: cannot load to a GPU" in text


# ---- reads that fail in the middle


FAILURES: list[tuple[dict[str, Any], type[Exception], int]] = [
    ({"read_error": 5030}, SourceError, 5030),
    ({"read_error": 5010}, SourceError, 5010),
    ({"read_error": 5012}, SourceError, 5012),
    ({"read_error": 5036}, SourceError, 5036),
    ({"read_error": 999}, SourceError, 999),
    ({"read_errno": errno.EIO}, SourceError, errno.EIO),
    ({"read_errno": errno.EINVAL}, SourceError, errno.EINVAL),
]


@pytest.mark.parametrize(("faults", "kind", "status"), rest_slow(FAILURES, quick=(0, 5)), ids=str)
@pytest.mark.parametrize("after", rest_slow([0, 1], quick=(1,)))
def test_a_read_that_fails_in_the_middle_of_a_tensor_ends_the_load_and_nothing_of_it_is_handed_out(
    lazy: Direct, tmp_path: Path, faults: dict[str, Any], kind: type[Exception], status: int, after: int
) -> None:
    path = write_sparse(tmp_path / "model.safetensors", {"t": 40 * MIB})
    assert verdict_for(lazy, path).usable
    lazy.faults(**faults, read_after=after)
    taken: dict[str, torch.Tensor] = {}
    with pytest.raises(kind) as caught, headrace.stream(path, device=lazy.device, gds="require", concurrency=2) as tensors:
        taken.update(tensors)
    assert isinstance(caught.value, SourceError)
    assert (caught.value.status, caught.value.url) == (status, str(path))
    assert caught.value.offset is not None
    assert taken == {}
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-")]
    assert tensors.stats.gds.startswith(("gds(p2p)", "staged"))


def test_a_failed_load_into_given_tensors_says_what_was_filled(lazy: Direct, tmp_path: Path) -> None:
    contents = random_contents(*[MIB] * 8)
    path = model(tmp_path, contents)
    assert verdict_for(lazy, path).usable
    given = {name: lazy.device.tensor(torch.zeros(MIB, dtype=torch.uint8)) for name in contents}
    lazy.faults(read_error=5030, read_after=4)
    with pytest.raises(LoadError) as caught:
        headrace.load(path, device=lazy.device, gds="require", into=given, concurrency=1)
    right = [name for name in contents if bytes_of(given[name]) == contents[name].data]
    assert isinstance(caught.value.__cause__, SourceError)
    assert sorted(caught.value.filled) == right == ["t000", "t001", "t002", "t003"]


def test_a_file_that_ends_early_or_changes_is_an_error(lazy: Direct, tmp_path: Path) -> None:
    contents = random_contents(40 * MIB)
    path = model(tmp_path, contents)
    assert verdict_for(lazy, path).usable
    tensors = headrace.stream(path, device=lazy.device, gds="require")
    os.truncate(path, 20 * MIB)
    with pytest.raises((TruncatedError, SourceChangedError)):
        dict(tensors)


@pytest.mark.leaky_ok(reason="the thread of a read that never comes back is left behind")
@pytest.mark.slow
def test_a_read_past_its_deadline_raises_and_its_thread_and_memory_are_never_used_again(tmp_path: Path) -> None:
    contents = random_contents(*[2 * MIB] * 6)
    with direct_gpu(tmp_path, checks=False) as direct:
        path = model(tmp_path, contents)
        assert verdict_for(direct, path).usable
        direct.faults(read_hangs=True, read_after=1)
        before = {thread.ident for thread in threading.enumerate()}
        with pytest.raises(SourceTimeoutError) as caught:
            headrace.load(path, device=direct.device, gds="require", concurrency=1, memory_limit=0, stall_timeout_s=0.5)
        assert caught.value.url == str(path)
        assert caught.value.nbytes
        del caught
        gc.collect()
        lost = [thread for thread in threading.enumerate() if thread.ident not in before]
        assert [thread.name.rpartition("-")[0] for thread in lost] == ["lost headrace-direct"]
        direct.device.allocator.collect()
        assert len(direct.device.allocator.blocks) == 1, "the memory that the call may still write to"
        assert direct.library.counts().handles == 1, "the handle that it uses"
        direct.faults()
        stats = loaded(direct, path, contents, stall_timeout_s=30)
        assert stats.gds.startswith("gds(p2p)")
        direct.device.allocator.collect()
        assert len(direct.device.allocator.blocks) == 1
        assert lost[0].is_alive()
        assert direct.library.violations() == []


def test_an_abandoned_stream_gives_files_and_threads_back(direct: Direct, tmp_path: Path) -> None:
    contents = random_contents(*[MIB] * 20)
    tensors = headrace.stream(model(tmp_path, contents), device=direct.device, gds="require", memory_limit=0)
    next(tensors)
    del tensors
    gc.collect()
    assert direct.library.counts().handles == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("headrace-")]


def test_a_load_that_fails_before_it_begins_gives_files_and_threads_back(lazy: Direct, tmp_path: Path) -> None:
    path = model(tmp_path, SMALL)
    with pytest.raises(OptionError):
        headrace.stream(path, device=lazy.device, gds="require", into={"t000": torch.zeros(3)})
    with pytest.raises(OptionError):
        headrace.stream(path, device=lazy.device, gds="require", slices={"t000": (slice(None), 3, 4)})
    gc.collect()
    assert lazy.library.counts().handles == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_does_not_use_the_parents_library(lazy: Direct, tmp_path: Path) -> None:
    path = model(tmp_path, SMALL)
    loaded(lazy, path, SMALL)
    child = os.fork()
    if not child:
        code = 1
        try:
            with pytest.raises(OptionError, match="forked"):
                headrace.stream(path, device=lazy.device, gds="require")
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# ---- device memory that runs out


@pytest.mark.parametrize("after", range(0, 8, 2))
@pytest.mark.slow
def test_an_allocation_that_fails_changes_no_byte(direct: Direct, tmp_path: Path, after: int) -> None:
    contents = mixed_contents()
    path = model(tmp_path, contents, data_start=1)
    direct.gpu.runtime.fail("cudaMalloc", after=after, code=2, times=2)
    loaded(direct, path, contents, memory_limit=2 * MIB)


def test_tensors_that_find_no_room_are_assembled_on_the_host(
    direct: Direct, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    contents = random_contents(*[700 * KIB] * 30)
    direct.gpu.runtime.device_memory(9 * MIB)
    with headrace.stream(model(tmp_path, contents), device=direct.device, gds="require") as tensors:
        kept = dict(tensors)
    assert not wrong(kept, contents)
    there = [name for name, tensor in kept.items() if direct.device.allocator.holds(tensor)]
    assert 0 < len(there) < len(contents)
    assert len(tensors.stats.degraded) == len(caplog.records) == 1
    assert tensors.stats.gds.startswith("staged: "), "a request for several tensors that are not neighbours any more"


MODES = [("p2p", 300, True), ("posix", 300, False), ("posix", 700, True)]


@pytest.mark.parametrize(("route", "room", "stays"), MODES)
@pytest.mark.slow
def test_in_compatibility_mode_an_oversized_tensor_stays_on_the_device_where_it_leaves_room_and_p2p_is_left_alone(
    tmp_path: Path, route: str, room: int, stays: bool
) -> None:
    contents = random_contents(70 * MIB, 5 * MIB)
    with direct_gpu(tmp_path) as direct:
        direct.faults(route=route)
        direct.gpu.runtime.device_memory(room * MIB)
        with headrace.stream(model(tmp_path, contents), device=direct.device, gds="require", order="file") as tensors:
            kept = dict(tensors)
        assert not wrong(kept, contents)
        assert direct.device.allocator.holds(kept["t000"]) is stays
        assert direct.device.allocator.holds(kept["t001"])
        assert bool(tensors.stats.degraded) is not stays
        assert tensors.stats.device_peak_nbytes > 0
        del kept


# ---- the parts


def test_calls_that_come_back_give_their_result_or_error_and_threads_are_used_again() -> None:
    callers = Callers()
    assert {callers.call(threading.get_ident, limit_s=30) for _ in range(5)}.__len__() == 1

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        callers.call(fail, limit_s=30)
    callers.close()
    callers.close()


def test_a_call_that_is_overdue_keeps_what_it_was_given_until_it_is_over() -> None:
    import weakref

    class Owner:
        pass

    release, ended = threading.Event(), threading.Event()

    def wait(owner: object) -> None:
        release.wait(30)
        del owner
        ended.set()

    others = threading.enumerate()
    callers, owner = Callers(), Owner()
    alive = weakref.ref(owner)
    with pytest.raises(TimeoutError):
        callers.call(wait, owner, limit_s=0.05)
    del owner
    gc.collect()
    assert alive() is not None
    assert callers.call(int, limit_s=30) == 0, "by another thread"
    release.set()
    assert ended.wait(30)
    callers.close()
    for thread in threading.enumerate():
        if thread not in others:
            thread.join(30)
    assert alive() is None


def test_a_thread_that_cannot_enter_fails_its_calls() -> None:
    def enter() -> None:
        raise RuntimeError("no device")

    callers = Callers(enter)
    with pytest.raises(RuntimeError, match="no device"):
        callers.call(int, limit_s=30)
    callers.close()


def test_a_file_is_registered_once_more_past_the_page_cache_where_the_library_demands_that() -> None:
    flags: list[int] = []

    class Old:
        """cuFile before CUDA 12.2."""

        def register(self, descriptor: int) -> int:
            if len(flags) == 1:
                raise CallError("DIO_NOT_SET", code=5020)
            return descriptor

        def deregister(self, handle: int) -> None:
            del handle

    def reopen(wanted: int) -> int:
        flags.append(wanted)
        return os.open("/dev/null", os.O_RDONLY)

    handle = register(Old(), reopen)  # type: ignore[arg-type]
    assert flags == [os.O_RDONLY, os.O_RDONLY | os.O_DIRECT]
    del handle


def test_another_library_is_no_library_of_direct_storage(lazy: Direct) -> None:
    with pytest.raises(AttributeError):
        Library(str(lazy.gpu.runtime.path), "cuda")
    with pytest.raises(OSError, match="cannot open"):
        Library("/none.so", "cuda")


def test_reopening_gives_the_same_inode_whatever_lies_at_the_path(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"first")
    source = FileSource(path)
    path.unlink()
    path.write_bytes(b"other")
    descriptor = source.reopen(os.O_RDONLY)
    assert os.pread(descriptor, 9, 0) == b"first"
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)
    source.close()
    with pytest.raises(SourceError):
        source.reopen(os.O_RDONLY)


@pytest.mark.slow
def test_the_acceptance_on_a_gpu_compares_loads_by_both_routes(
    lazy: Direct, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.testing.acceptance import _loads as probe

    monkeypatch.setattr(probe, "NBYTES", 4 * MIB)
    answers = probe.measured(tmp_path, lazy.device)
    for state in ("cold", "cached"):
        assert answers[f"{state}, gds=off"].startswith("equal, ")
        assert answers[f"{state}, gds=require"].startswith("equal, ")
        assert (answers[f"{state}, gds=off, route"], answers[f"{state}, gds=require, route"][:8]) == ("staged", "gds(p2p)")
        assert answers[f"{state}: use"] in ("gds", "the ring")
    another = SimulatedCuFile(tmp_path, lazy.gpu.runtime, name="libcufile.so.9")
    another.faults(open_error=5033)
    lazy.device.direct_libraries = (str(another.path),)
    assert "NVFS_SETUP_ERROR" in probe.measured(tmp_path, lazy.device)["cold, gds=require"]


def test_the_command_line_takes_gds(tmp_path: Path) -> None:
    path = str(model(tmp_path, SMALL))
    result = CliRunner().invoke(app, ["plan", path, "--gds", "require"])
    assert result.exit_code == 2
    assert CliRunner().invoke(app, ["plan", path, "--gds", "auto"]).exit_code == 0


def test_a_trace_shows_reads_that_went_straight(lazy: Direct, tmp_path: Path) -> None:
    path = model(tmp_path, SMALL)
    loaded(lazy, path, SMALL, trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    direct = [event["args"] for event in events if event["name"] == "read" and event["args"].get("direct")]
    plan = headrace.plan(path, device=lazy.device, gds="require")
    assert sorted((read["offset"], read["nbytes"]) for read in direct) == [(r.offset, r.nbytes) for r in plan.reads if r.direct]


def test_shards_of_which_nothing_is_wanted_are_no_reason_to_refuse(lazy: Direct, tmp_path: Path) -> None:
    other = write(tmp_path / "other.safetensors", {f"other.{name}": entry for name, entry in SMALL.items()})
    shards = [str(other), str(model(tmp_path, SMALL))]
    with headrace.stream(shards, device=lazy.device, gds="require", names="t*") as tensors:
        assert not wrong(dict(tensors), SMALL)
    assert [route for _, route, _ in tensors.stats.routes] == ["none", "gds"]
    assert tensors.stats.gds.startswith("gds(p2p)")
