"""What this machine lets the process use: CPUs and memory, as the cgroups say and not as the host boasts.

Every function takes the roots it reads, so that tests can lay out a machine in a folder. Unknown is None, never 0.
"""

from __future__ import annotations

import os
from pathlib import Path

_V1_UNLIMITED = 1 << 60  # cgroup v1 writes 'no limit' as the largest page-rounded int64
_ROOT = Path("/")
_ACCELERATORS = (0x03, 0x12)  # PCI classes: display controllers, processing accelerators
_GPU_VENDORS = (0x10DE, 0x1002)  # NVIDIA, AMD


def available_cpus(root: Path = _ROOT) -> int:
    """CPUs this process may run on at once: its affinity, cut down to the CPU quota of its cgroups (at least 1)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    for quota in _cpu_quotas(root):
        count = min(count, max(1, int(quota)))
    return count


def available_memory(root: Path = _ROOT) -> int | None:
    """Bytes that can still be allocated without swapping or being killed.

    The minimum of MemAvailable and, for every cgroup from the process's own up to the root, its limit less what it is
    charged for; reclaimable page cache (inactive_file) is taken off the charge, since reading a checkpoint fills it.
    """
    known = [room for room in (_host_available(root), *_cgroup_room(root)) if room is not None]
    return min(known) if known else None


def gpu_bus_rate(root: Path = _ROOT) -> float | None:
    """Bytes per second, in each direction, of the slowest slot that a GPU of this machine sits in; None where nobody tells.

    What the slot and the card agreed on in lanes, at the best speed of both: idle links run slower until they are used.
    """
    rates = []
    for card in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind, vendor = (int("".join(_lines(card / name)) or "0", 16) for name in ("class", "vendor"))
        if kind >> 16 not in _ACCELERATORS or vendor not in _GPU_VENDORS:
            continue
        speed = "".join(_lines(card / "max_link_speed")).split(" ")[0]  # "16.0 GT/s PCIe"
        lanes = _number(card / "current_link_width")
        try:
            rates.append(float(speed) * 1e9 * (lanes or 0) * 128 / 130 / 8)  # 128b/130b coding from PCIe 3 on
        except ValueError:
            continue
    return min(filter(None, rates), default=None)


def _host_available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_room(root: Path) -> list[int | None]:
    rooms: list[int | None] = []
    for folder, limit_name, usage_name, cache_key in _memory_cgroups(root):
        limit = _number(folder / limit_name)
        if limit is None or limit >= _V1_UNLIMITED:
            continue
        usage = _number(folder / usage_name)
        if usage is None:
            continue
        cache = _stat_value(folder / "memory.stat", cache_key) or 0
        rooms.append(max(0, limit - max(0, usage - cache)))
    return rooms


def _memory_cgroups(root: Path) -> list[tuple[Path, str, str, str]]:
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, controllers, path = line.rstrip("\n").split(":", 2)
        if hierarchy == "0":
            found += [(f, "memory.max", "memory.current", "inactive_file") for f in _ancestry(root / "sys/fs/cgroup", path)]
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += [(f, *names) for f in _ancestry(base, path)]
    return found


def _cpu_quotas(root: Path) -> list[float]:
    quotas = []
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, controllers, path = line.rstrip("\n").split(":", 2)
        if hierarchy == "0":
            for folder in _ancestry(root / "sys/fs/cgroup", path):
                fields = " ".join(_lines(folder / "cpu.max")).split()
                if len(fields) == 2 and fields[0] != "max":
                    quotas.append(int(fields[0]) / int(fields[1]))
        elif "cpu" in controllers.split(","):
            for folder in _ancestry(root / "sys/fs/cgroup/cpu", path):
                quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
                if quota is not None and period and quota > 0:
                    quotas.append(quota / period)
    return quotas


def _ancestry(base: Path, path: str) -> list[Path]:
    """The cgroup's folder and all above it. In a container the path is the host's and may not exist: the base still holds."""
    folders = [base]
    for part in Path(path).parts[1:]:
        folders.append(folders[-1] / part)
    return [folder for folder in folders if folder.is_dir()]


def _stat_value(path: Path, key: str) -> int | None:
    for line in _lines(path):
        if line.startswith(f"{key} "):
            return int(line.split()[1])
    return None


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
