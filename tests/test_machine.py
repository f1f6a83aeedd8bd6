"""CPUs and memory of machines laid out in folders: cgroup v2, v1, containers, and files that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace._machine import available_cpus, available_memory, gpu_bus_rate

GIB = 1 << 30
KIB = 1 << 10
V1_SENTINEL = 9223372036854771712  # what cgroup v1 writes where there is no limit
OWN_CPUS = len(os.sched_getaffinity(0))

V2 = "sys/fs/cgroup"
V1_MEMORY = "sys/fs/cgroup/memory"
V1_CPU = "sys/fs/cgroup/cpu"


def lay_out(root: Path, files: dict[str, str | int]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def meminfo(available: int) -> dict[str, str | int]:
    return {
        "proc/meminfo": f"MemTotal:       99999999 kB\nMemFree:        1 kB\nMemAvailable:   {available // KIB} kB\nBuffers: 5 kB"
    }


def v2(path: str, *, limit: str | int, usage: int, inactive: int | None = 0) -> dict[str, str | int]:
    folder = f"{V2}{path.rstrip('/')}"
    files: dict[str, str | int] = {f"{folder}/memory.max": limit, f"{folder}/memory.current": usage}
    if inactive is not None:
        files[f"{folder}/memory.stat"] = f"anon 12345\nfile 999\ninactive_anon 7\ninactive_file {inactive}\nactive_file 5"
    return files


def v1(path: str, *, limit: int, usage: int, inactive: int) -> dict[str, str | int]:
    folder = f"{V1_MEMORY}{path.rstrip('/')}"
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": usage,
        f"{folder}/memory.stat": f"cache 1\ninactive_file 1\ntotal_cache 9\ntotal_inactive_file {inactive}",
    }


OWN_V2 = {"proc/self/cgroup": "0::/jobs/load"}
OWN_V1 = {"proc/self/cgroup": "12:cpu,cpuacct:/docker/abc\n5:memory:/docker/abc\n1:name=systemd:/docker/abc"}


# ---- memory


def test_without_cgroups_it_is_what_the_kernel_says_is_available(tmp_path: Path) -> None:
    assert available_memory(lay_out(tmp_path, meminfo(6 * GIB))) == 6 * GIB


def test_a_machine_that_says_nothing_is_unknown_and_not_zero(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


def test_an_old_kernel_without_memavailable_is_unknown(tmp_path: Path) -> None:
    assert available_memory(lay_out(tmp_path, {"proc/meminfo": "MemTotal: 100 kB\nMemFree: 50 kB"})) is None


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([("/jobs/load", 4 * GIB, GIB)], 3 * GIB),
        ([("/jobs/load", "max", GIB)], 6 * GIB),
        ([("/jobs/load", "max", GIB), ("/jobs", 2 * GIB, GIB)], GIB),
        ([("/jobs/load", 4 * GIB, GIB), ("/jobs", 2 * GIB, GIB)], GIB),
        ([("/jobs/load", 2 * GIB, GIB), ("/jobs", 16 * GIB, GIB)], GIB),
        ([("/jobs/load", "max", GIB), ("/jobs", "max", GIB), ("/", 3 * GIB, GIB)], 2 * GIB),
        ([("/", 3 * GIB, GIB)], 2 * GIB),
        ([("/jobs/load", 64 * GIB, GIB)], 6 * GIB),
        ([("/jobs/load", GIB, GIB)], 0),
        ([("/jobs/load", GIB, 2 * GIB)], 0),
        ([("/jobs/other", 1, 1), ("/jobs/load/child", 1, 1)], 6 * GIB),
    ],
    ids=[
        "own limit",
        "no limit",
        "limit of the parent over a leaf without one",
        "parent is tighter",
        "leaf is tighter",
        "limit at the root of the container",
        "path of the host, seen from inside a container",
        "host is tighter",
        "full",
        "over its limit",
        "not ours",
    ],
)
def test_it_is_the_least_room_of_host_and_cgroup_ancestry(
    tmp_path: Path, groups: list[tuple[str, str | int, int]], expected: int
) -> None:
    files = {**meminfo(6 * GIB), **OWN_V2}
    for path, limit, usage in groups:
        files |= v2(path, limit=limit, usage=usage)
    assert available_memory(lay_out(tmp_path, files)) == expected


def test_page_cache_that_can_be_reclaimed_is_taken_off_the_charge(tmp_path: Path) -> None:
    files = {**meminfo(6 * GIB), **OWN_V2, **v2("/jobs/load", limit=4 * GIB, usage=4 * GIB, inactive=3 * GIB)}
    assert available_memory(lay_out(tmp_path, files)) == 3 * GIB


def test_more_cache_than_charge_is_no_more_than_the_limit(tmp_path: Path) -> None:
    files = {**meminfo(6 * GIB), **OWN_V2, **v2("/jobs/load", limit=4 * GIB, usage=GIB, inactive=3 * GIB)}
    assert available_memory(lay_out(tmp_path, files)) == 4 * GIB


def test_a_charge_without_statistics_counts_in_full(tmp_path: Path) -> None:
    files = {**meminfo(6 * GIB), **OWN_V2, **v2("/jobs/load", limit=4 * GIB, usage=3 * GIB, inactive=None)}
    assert available_memory(lay_out(tmp_path, files)) == GIB


@pytest.mark.parametrize("missing", ["memory.max", "memory.current"])
def test_a_cgroup_file_that_is_missing_is_unknown_and_the_rest_decides(tmp_path: Path, missing: str) -> None:
    files = {**meminfo(6 * GIB), **OWN_V2}
    files |= v2("/jobs/load", limit=GIB, usage=GIB) | v2("/jobs", limit=4 * GIB, usage=GIB)
    del files[f"{V2}/jobs/load/{missing}"]
    assert available_memory(lay_out(tmp_path, files)) == 3 * GIB


@pytest.mark.parametrize("content", ["", "garbage", "-"])
@pytest.mark.parametrize("name", ["memory.max", "memory.current"])
def test_a_cgroup_file_with_nonsense_is_unknown(tmp_path: Path, name: str, content: str) -> None:
    files = {**meminfo(6 * GIB), **OWN_V2, **v2("/jobs/load", limit=GIB, usage=GIB)}
    files[f"{V2}/jobs/load/{name}"] = content
    assert available_memory(lay_out(tmp_path, files)) == 6 * GIB


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    lay_out(tmp_path, {**OWN_V2, **v2("/jobs/load", limit=4 * GIB, usage=GIB)})
    (tmp_path / V2 / "jobs/load/memory.current").unlink()
    (tmp_path / V2 / "jobs/load/memory.current").mkdir()  # reading a folder fails for root as well
    (tmp_path / "proc/meminfo").mkdir()
    assert available_memory(tmp_path) is None


def test_only_the_cgroup_is_known(tmp_path: Path) -> None:
    assert available_memory(lay_out(tmp_path, {**OWN_V2, **v2("/jobs/load", limit=4 * GIB, usage=GIB)})) == 3 * GIB


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([("/docker/abc", 4 * GIB, GIB, 0)], 3 * GIB),
        ([("/docker/abc", V1_SENTINEL, GIB, 0)], 6 * GIB),
        ([("/docker/abc", V1_SENTINEL, GIB, 0), ("/docker", 2 * GIB, GIB, 0)], GIB),
        ([("/docker/abc", 4 * GIB, 4 * GIB, 3 * GIB)], 3 * GIB),
        ([("/", 3 * GIB, GIB, 0)], 2 * GIB),
    ],
    ids=["own limit", "no limit", "limit of the parent", "total_inactive_file", "seen from inside a container"],
)
def test_cgroup_v1_has_other_names_and_another_word_for_no_limit(
    tmp_path: Path, groups: list[tuple[str, int, int, int]], expected: int
) -> None:
    files = {**meminfo(6 * GIB), **OWN_V1}
    for path, limit, usage, inactive in groups:
        files |= v1(path, limit=limit, usage=usage, inactive=inactive)
    assert available_memory(lay_out(tmp_path, files)) == expected


def test_in_a_mixed_hierarchy_both_count(tmp_path: Path) -> None:
    files = {**meminfo(6 * GIB), "proc/self/cgroup": "5:memory:/a\n0::/b"}
    files |= v1("/a", limit=3 * GIB, usage=GIB, inactive=0) | v2("/b", limit=2 * GIB, usage=GIB)
    assert available_memory(lay_out(tmp_path, files)) == GIB


# ---- CPUs


def test_without_a_quota_it_is_the_affinity(tmp_path: Path) -> None:
    assert available_cpus(tmp_path) == OWN_CPUS


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({"/jobs/load": "max 100000"}, OWN_CPUS),
        ({"/jobs/load": "100000 100000"}, 1),
        ({"/jobs/load": "50000 100000"}, 1),
        ({"/jobs/load": "1000 100000"}, 1),
        ({"/jobs/load": "max 100000", "/jobs": "100000 100000"}, 1),
        ({"/jobs/load": "99999900000 100000", "/jobs": "100000 100000"}, 1),
        ({"/": "100000 100000"}, 1),
        ({"/jobs/load": "200000 100000"}, min(2, OWN_CPUS)),
        ({"/jobs/load": "99999900000 100000"}, OWN_CPUS),
        ({"/jobs/load": ""}, OWN_CPUS),
        ({"/jobs/other": "1000 100000"}, OWN_CPUS),
    ],
    ids=str,
)
def test_cpu_max_of_the_cgroup_ancestry_is_a_limit(tmp_path: Path, quotas: dict[str, str], expected: int) -> None:
    files = {f"{V2}{path.rstrip('/')}/cpu.max": quota for path, quota in quotas.items()}
    (tmp_path / V2 / "jobs/load").mkdir(parents=True)
    assert available_cpus(lay_out(tmp_path, {**OWN_V2, **files})) == expected


@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [(100_000, 100_000, 1), (-1, 100_000, OWN_CPUS), (10**10, 100_000, OWN_CPUS), (25_000, 50_000, 1), ("", 100_000, OWN_CPUS)],
)
def test_cgroup_v1_has_quota_and_period_in_two_files(tmp_path: Path, quota: str | int, period: int, expected: int) -> None:
    folder = f"{V1_CPU}/docker/abc"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}
    assert available_cpus(lay_out(tmp_path, {**OWN_V1, **files})) == expected


# ---- this machine


def test_this_machine_has_cpus_and_memory() -> None:
    assert 1 <= available_cpus() <= OWN_CPUS
    memory = available_memory()
    assert memory is None or memory > 0


# ---- the bus


def slot(
    address: str, *, kind: str = "0x030200", vendor: str = "0x10de", speed: str = "32.0 GT/s PCIe", lanes: int = 16
) -> dict[str, str | int]:
    folder = f"sys/bus/pci/devices/{address}"
    return {
        f"{folder}/class": kind,
        f"{folder}/vendor": vendor,
        f"{folder}/max_link_speed": speed,
        f"{folder}/current_link_width": lanes,
    }


def test_the_slowest_slot_of_a_gpu_counts(tmp_path: Path) -> None:
    lay_out(tmp_path, slot("0000:01:00.0") | slot("0000:02:00.0", vendor="0x1002", kind="0x038000", speed="8.0 GT/s PCIe"))
    assert gpu_bus_rate(tmp_path) == pytest.approx(15.75e9, rel=0.01)


@pytest.mark.parametrize(
    "other",
    [
        slot("0000:03:00.0", kind="0x020000", speed="2.5 GT/s PCIe", lanes=1),
        slot("0000:03:00.0", vendor="0x1a03", speed="2.5 GT/s PCIe", lanes=1),
        slot("0000:03:00.0", speed="Unknown", lanes=16),
        slot("0000:03:00.0", lanes=0),
    ],
    ids=["a network card", "the console's graphics", "unknown speed", "no link"],
)
def test_what_is_no_gpu_or_has_no_known_link_does_not(tmp_path: Path, other: dict[str, str | int]) -> None:
    lay_out(tmp_path, slot("0000:01:00.0") | other)
    assert gpu_bus_rate(tmp_path) == pytest.approx(63.0e9, rel=0.01)


def test_a_machine_that_does_not_tell_has_no_bus_rate(tmp_path: Path) -> None:
    assert gpu_bus_rate(tmp_path) is None
