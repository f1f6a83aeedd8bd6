"""The real load, as a program would run it: through the public API, with a trace, stopped when its time is up."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace._api import stream
from headrace._bench._report import Run
from headrace._progress import Snapshot

Events = Sequence[Mapping[str, Any]]


def load(
    name: str,
    arguments: Mapping[str, Any],
    *,
    keep: bool,
    seconds: float,
    progress: Callable[[Snapshot], None] | None,
) -> tuple[Run, Events]:
    """Load once, and drop or keep the tensors. Returns the run and the events of its trace."""
    import headrace._engine  # imported before the clock starts: a program that loads has done so
    import headrace.devices.cpu  # noqa: F401

    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        run = _timed(name, {**arguments, "progress": progress, "trace": path}, keep, seconds)
        events = json.loads(path.read_text())["traceEvents"]
    return _with_stages(run, events), events


def evict(files: Sequence[str]) -> None:
    """Drop these files, and no others, from the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _timed(name: str, arguments: Mapping[str, Any], keep: bool, seconds: float) -> Run:
    kept: list[Any] = []
    cpu, began, cut_short = time.process_time(), time.perf_counter(), False
    with stream(**arguments) as tensors:
        for pair in tensors:
            if keep:
                kept.append(pair)
            if time.perf_counter() - began > seconds:
                cut_short = tensors.stats.tensors < tensors.stats.total_tensors - 1
                break
    took = time.perf_counter() - began
    stats = tensors.stats
    cpus = (time.process_time() - cpu) / took
    return Run(name, stats.read_nbytes, took, stats=stats, cpus=cpus, cut_short=cut_short)


def _with_stages(run: Run, events: Events) -> Run:
    readers = {event["tid"] for event in events if event["name"] == "thread_name" and event["args"]["name"] != "caller"}
    stages: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X" and event["tid"] in readers:
            stages[event["name"]] += event["dur"] / 1e6
    return Run(run.name, run.nbytes, run.seconds, stats=run.stats, cpus=run.cpus, stages=stages, cut_short=run.cut_short)
