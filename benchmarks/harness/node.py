"""Several ranks of one node that load at once: a process each, started together, and one sample made of theirs.

They get the variables that torchrun sets, one OpenMP thread each among them, and find each other over a file. Wall time is from
when the first one starts to when the last one is done; the clock is the machine's. When one fails the others are ended.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.cases import Way
from harness.failures import FailedError
from harness.servers import Traffic

TIMEOUT_S = 240
# How headrace's usual rules cut a Llama, said once more so that it is not its own judge.
_USUAL_CUT = {
    **dict.fromkeys(("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", "*.gate_proj.weight", "*.up_proj.weight"), 0),
    **dict.fromkeys(("*.o_proj.weight", "*.down_proj.weight"), 1),
    "*embed_tokens.weight": 0,
}
_SUMS = ("cpu_s", "bytes", "tensors", "device_nbytes")


def cut_of(way: Way) -> dict[str, int]:
    """{glob: dimension} of the tensors that a way's rules cut."""
    rules = way.settings.get("rules")
    return dict(_USUAL_CUT) if rules == "usual" else dict(rules or {})


def jobs_of(job: Mapping[str, Any], ranks: int, folder: str) -> list[dict[str, Any]]:
    """The job of each rank. They meet over a file in an empty folder."""
    meeting = str(Path(folder) / "meeting")
    return [{**job, "rank": rank, "ranks": ranks, "meeting": meeting} for rank in range(ranks)]


def variables_of(job: Mapping[str, Any]) -> dict[str, str]:
    """As torchrun sets them on one node."""
    rank, ranks = str(job["rank"]), str(job["ranks"])
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": "1"}


def run_together(commands: Sequence[Sequence[str]], cwd: Path, folder: Path) -> list[dict[str, Any]]:
    """Run all at once and return what each printed last, as JSON. None of them is left behind.

    Raises:
        FailedError: one failed, or took too long; with the last line that it said.
    """
    with ExitStack() as stack:
        processes = []
        for rank, command in enumerate(commands):
            said, troubles = (stack.enter_context((folder / f"{name}-{rank}").open("w+")) for name in ("said", "troubles"))
            process = subprocess.Popen(command, cwd=cwd, stdout=said, stderr=troubles)
            stack.callback(_end, process)
            processes.append(process)
        _wait_for_all(processes, folder)
    return [dict(json.loads((folder / f"said-{rank}").read_text().strip().splitlines()[-1])) for rank in range(len(commands))]


def summed(samples: Sequence[Mapping[str, Any]], model_nbytes: int, traffic: Traffic | None) -> dict[str, Any]:
    """One sample for all ranks. Shares are of the bytes of the model's tensors, or of those that were handed out."""
    total = {key: sum(sample[key] for sample in samples) for key in _SUMS}
    wall = max(sample["began_s"] + sample["seconds"] for sample in samples) - min(sample["began_s"] for sample in samples)
    served = max(sample["server_cpu_s"] or 0.0 for sample in samples)
    busy = max(sample["busy_s"] for sample in samples)
    stats = [sample["stats"] for sample in samples if "stats" in sample]
    storage_nbytes = total["device_nbytes"] if traffic is None else traffic.data_nbytes
    over = [sample["peak_nbytes"] - sample["bytes"] - sample.get("rings_nbytes", 0) for sample in samples]
    planned_nbytes = sum(one["total_nbytes"] for one in stats)
    return {
        **total,
        "seconds": wall,
        "ranks": len(samples),
        "server_cpu_s": served if traffic is not None else None,
        "others_cpus": max(0.0, busy - total["cpu_s"] - served) / wall if wall else 0.0,
        "peak_nbytes": max(sample["peak_nbytes"] for sample in samples),
        "peaks_nbytes": [sample["peak_nbytes"] for sample in samples],
        "rings_nbytes": max(sample.get("rings_nbytes", 0) for sample in samples),
        "over_slice_nbytes": max(over),
        "model_nbytes": model_nbytes,
        "read_share": sum(one["read_nbytes"] for one in stats) / model_nbytes if stats else None,
        "storage_share": storage_nbytes / model_nbytes,
        "slice_share": (traffic.opening_nbytes + traffic.data_nbytes) / total["bytes"] if traffic is not None else None,
        "stated_share": traffic.data_nbytes / planned_nbytes if traffic is not None and planned_nbytes else None,
        "traffic": traffic._asdict() if traffic is not None else None,
        "checksum": [sample["checksum"] for sample in samples] if samples[0]["checksum"] is not None else None,
        "stats": stats,
    }


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all have ended well. The first that did not is the one to blame."""
    until, waited = time.monotonic() + TIMEOUT_S, select.poll()
    with ExitStack() as stack:
        ranks = {}
        for rank, process in enumerate(processes):
            fd = os.pidfd_open(process.pid)
            stack.callback(os.close, fd)
            waited.register(fd, select.POLLIN)
            ranks[fd] = rank
        while ranks:
            ended = waited.poll(max(0.0, until - time.monotonic()) * 1000)
            if not ended:
                raise FailedError(f"took longer than {TIMEOUT_S} s")
            for fd, _ in ended:
                waited.unregister(fd)
                rank = ranks.pop(fd)
                if status := processes[rank].wait():
                    raise FailedError(f"rank {rank}: {_last_words(folder / f'troubles-{rank}', status)}")


def _last_words(path: Path, status: int) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"exit status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
