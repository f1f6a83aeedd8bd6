"""One measurement in a process of its own: python -m harness.child JOB, JOB being JSON; prints one JSON line.

Imports, destinations and the emptying of the page cache come before the clock starts. So does touching and freeing as much memory
as the load may need: a virtual machine hands free memory back to its host, and getting it again costs up to twenty times what the
page faults themselves do (376 MiB: 0.92 s, then 0.04 s; 2026-11-29), by chance to one way and not to another. Reported are wall
and CPU seconds (all threads of the process), the growth of peak RSS over what the process had just before the clock started, and
what the CPUs did for others meanwhile.

A rank is such a process as well: it meets the others over Gloo before the clock starts.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import checkpoints, memory, pagecache
from harness.targets import Target

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Job:
    """What a child is asked to do.

    Attributes:
        way: `module:function` of harness, a callable that takes the job and returns what is timed.
        files: the checkpoint.
        target: where a server has it; the files then are a copy to compare with.
        kind: 'stream' (tensors dropped at once), 'into' (given memory is filled) or 'load' (everything is kept).
        cold: empty the page cache first.
        verify: sum the bytes of every tensor; costs time.
        memory_nbytes: how much memory to touch and free beforehand.
        settings: of the way.
        rank, ranks: which of how many processes that load at once.
        meeting: file over which ranks find each other; empty: this is none.
    """

    way: str
    files: list[str]
    target: Target | None = None
    kind: str = "stream"
    cold: bool = False
    verify: bool = False
    memory_nbytes: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    ranks: int = 1
    meeting: str = ""
    tensors: int = 0
    checksum: int = 0

    @property
    def store(self) -> Target:
        """The target, for what reads from servers only."""
        if self.target is None:
            raise ValueError("this way needs a server")
        return self.target

    @property
    def locations(self) -> list[str]:
        """Paths or urls of the shards."""
        if self.target is None:
            return self.files
        return [self.target.url(Path(file).name) for file in self.files]

    def take(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Take all tensors and drop them at once."""
        count = 0
        if self.verify:
            for _name, tensor in pairs:
                count += 1
                self._add(tensor)
        else:
            for _name, _tensor in pairs:  # the loop variable holds each tensor until the next one, as in a caller's loop
                count += 1
        self.tensors = count

    def keep(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Count tensors that are kept."""
        self.tensors = len(tensors)
        if self.verify:
            for tensor in tensors.values():
                self._add(tensor)
        return tensors

    def keep_files(self, views: Iterable[memoryview]) -> None:
        """Look at whole files in memory, in the order of `files`."""
        if self.verify:
            import torch

            for file, view in zip(self.files, views, strict=True):
                for entry in checkpoints.read_entries(file):
                    self.tensors += 1
                    self._add(torch.frombuffer(view, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset))

    def keep_folder(self, folder: str | Path) -> None:
        """Look at files of the same names in a folder."""
        if self.verify:
            self.keep_files(memoryview(bytearray((Path(folder) / Path(file).name).read_bytes())) for file in self.files)

    def _add(self, tensor: Any) -> None:
        self.checksum = (self.checksum + byte_sum(tensor)) & 0xFFFFFFFFFFFFFFFF


def byte_sum(tensor: Any) -> int:
    """Sum of a tensor's bytes as little-endian 8-byte words, plus the tail: the same in any order of tensors."""
    import torch

    if not tensor.numel():
        return 0
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    words = flat.numel() // 8 * 8
    total = int(flat[:words].view(torch.int64).sum()) if words else 0
    return total + int(flat[words:].sum(dtype=torch.int64))


def measure(job: Job, meet: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Prepare, then time one load. `meet` waits for other ranks."""
    module, function = job.way.split(":")
    run = getattr(importlib.import_module(f"harness.{module}"), function)(job)
    memory.claim_from_host(job.memory_nbytes)
    meet()
    if job.cold and not job.rank:
        pagecache.evict(job.files)
    meet()
    resident = pagecache.resident_share(job.files)
    gc.collect()
    base_nbytes = _reset_peak()
    pids = job.target.pids if job.target is not None else ()
    device_nbytes = device_read_nbytes()
    served, busy, cpu, began = used_s(pids), busy_s(), time.process_time(), time.perf_counter()
    extra, kept = _outcome(run())
    wall, cpu, busy, served = time.perf_counter() - began, time.process_time() - cpu, busy_s() - busy, used_s(pids) - served
    peak_nbytes, device_nbytes = _peak(), device_read_nbytes() - device_nbytes
    meet()
    del kept
    return {
        "began_s": began,
        "seconds": wall,
        "cpu_s": cpu,
        "server_cpu_s": served if pids else None,
        "busy_s": busy,
        "others_cpus": max(0.0, busy - cpu - served) / wall if wall else 0.0,
        "peak_nbytes": max(0, peak_nbytes - base_nbytes),
        "device_nbytes": device_nbytes,
        "bytes": sum(map(os.path.getsize, job.files)),
        "tensors": job.tensors,
        "resident": resident,
        "checksum": f"{job.checksum:016x}" if job.verify else None,
        **extra,
    }


def _outcome(result: Any) -> tuple[dict[str, Any], Any]:
    """What a way returned: (figures of its own, tensors to keep until memory has been looked at)."""
    if isinstance(result, tuple):
        return result
    return {}, result


def _reset_peak() -> int:
    """Set the peak to the present, and return that. Where the kernel refuses, the peak so far."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return _peak()
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


def busy_s() -> float:
    """CPU seconds of the whole machine so far, idle and waiting left out."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) * _TICK_S


def used_s(pids: Iterable[int]) -> float:
    """CPU seconds of other processes so far."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            words = file.read().rpartition(")")[2].split()
        total += int(words[11]) + int(words[12])
    return total * _TICK_S


def device_read_nbytes() -> int:
    """Bytes that storage was asked for on behalf of this process so far; 0 where the kernel does not count."""
    try:
        with open("/proc/self/io") as file:
            counts = dict(line.split(": ") for line in file.read().splitlines())
    except OSError:
        return 0
    return int(counts["read_bytes"])


def _join(job: Job) -> Callable[[], None]:
    """Form the default group with the other ranks; returns what waits for all of them."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=Path(job.meeting).as_uri(), rank=job.rank, world_size=job.ranks)
    return dist.barrier


def main() -> None:
    """Measure the job on the command line."""
    fields = json.loads(sys.argv[1])
    if (target := fields.get("target")) is not None:
        fields["target"] = Target(**target)
    job = Job(**fields)
    sample = measure(job, _join(job)) if job.meeting else measure(job)
    print(json.dumps(sample), flush=True)
    if job.target is not None or job.meeting:
        os._exit(0)  # native clients of stores, and groups, hang or crash now and then when the interpreter shuts down


if __name__ == "__main__":
    main()
