"""Whether a library may be used for the files of a filesystem: asked of a child process, once.

The child may hang, die or find that the library lies; each is a reason in one line. A verdict is kept for the life of the
process, per device, libraries and filesystem.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace._environment import environment_with
from headrace.sources.base import LocalSource
from headrace.sources.gds._library import MAX_IO_NBYTES, Routes
from headrace.sources.gds._probe import PAGE

PROBE_LIMIT_S: Final = 15.0  # starting a driver for eight GPUs takes seconds; what hangs hangs for ever
_REAP_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device, as the library and a child process need to know it.

    Attributes:
        runtime: path of its runtime library. `prefix`: of that library's functions, "cuda" or "hip".
        index: number of the device.
        name: as the caller writes it.
    """

    runtime: str
    prefix: str
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a child process found.

    Attributes:
        usable: whether the library may be used.
        reason: why, or why not, in one line.
        path, name: of the library; empty where none could be loaded.
        mode: 'p2p', 'compat' (by way of host memory), 'mixed', or '' where the library does not tell.
        max_nbytes: the longest request.
        is_fallback: whether going another way is worth a warning; it is not where the file is too short.
    """

    usable: bool
    reason: str
    path: str = ""
    name: str = ""
    mode: str = ""
    max_nbytes: int = MAX_IO_NBYTES
    is_fallback: bool = True


class _Verdicts:
    """Those of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[object, ...], Verdict] = {}

    def get(self, source: LocalSource, gpu: Gpu, libraries: tuple[str, ...]) -> Verdict:
        descriptor = source.reopen(os.O_RDONLY)
        try:
            key = (gpu, libraries, os.fstat(descriptor).st_dev)
            with self._lock:  # two threads that want the same wait for one child
                if key not in self._known:
                    self._known[key] = _ask_child(descriptor, gpu, libraries)
                return self._known[key]
        finally:
            os.close(descriptor)


_verdicts = _Verdicts()


def verdict_of(source: LocalSource, gpu: Gpu, libraries: Sequence[str]) -> Verdict:
    """Whether files like this one can be read straight into the memory of a GPU. Takes seconds where it is asked first.

    Args:
        source: an open local file. What is found holds for all files of its filesystem.
        gpu: the device.
        libraries: paths or names, the best first.
    """
    if source.nbytes < PAGE:
        return Verdict(False, "the file is shorter than a page", is_fallback=False)
    return _verdicts.get(source, gpu, tuple(libraries))


def _ask_child(descriptor: int, gpu: Gpu, libraries: Sequence[str]) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="headrace-direct-") as folder:
        report = Path(folder, "report")
        task = {
            "libraries": list(libraries),
            "runtime": gpu.runtime,
            "prefix": gpu.prefix,
            "device": gpu.index,
            "descriptor": descriptor,
            "report": str(report),
        }
        ending = _run(json.dumps(task), descriptor, folder)
        return judge(_facts(report), ending, gpu)


def _run(task: str, descriptor: int, folder: str) -> str:
    """Run the child in a folder of its own: how it ended, in words; empty where it ended well."""
    root = str(Path(__file__).parents[3])
    environment = environment_with({"CUFILE_LOGFILE_PATH": os.path.join(folder, "cufile.log")}, python_path=root)
    command = [sys.executable, "-m", "headrace.sources.gds._probe", task]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            cwd=folder,
            env=environment,
        )
    except (OSError, ValueError) as exc:
        return f"it could not be tried out: {sys.executable} did not start ({exc})"
    try:
        code = child.wait(PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"did not come back within {PROBE_LIMIT_S:g} s"
    finally:
        _end(child)
    if code < 0:
        with suppress(ValueError):
            return f"ended the process that tried it out ({signal.Signals(-code).name})"
    return f"ended the process that tried it out (exit code {code})" if code else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # in an uninterruptible sleep; it goes when the disk or the driver answers
            child.wait(_REAP_S)


def _facts(report: Path) -> dict[str, Any]:
    """What the child said, the last word on each."""
    facts: dict[str, Any] = {}
    try:
        lines = report.read_text(encoding="utf-8").splitlines()
    except OSError:
        return facts
    for line in lines:
        with suppress(ValueError):  # the last line of a child that died
            facts |= json.loads(line)
    return facts


def judge(facts: Mapping[str, Any], ending: str, gpu: Gpu) -> Verdict:
    """PURE: the verdict from what a child said and how it ended."""
    path, name = str(facts.get("library", "")), str(facts.get("name", ""))
    kind = name or ("cuFile" if gpu.prefix == "cuda" else "hipFile")
    if ending.startswith("it could not"):
        return Verdict(False, f"{kind}: {ending}")
    if "refused" in facts:
        return Verdict(False, f"{kind}: {facts['refused']}", path, name)
    if ending or not facts.get("usable"):
        step = facts.get("step", "starting a process for it")
        return Verdict(False, f"{kind}: {step} {ending or 'came to no end'}", path, name)
    routes = facts.get("routes")
    mode = mode_of(Routes(*routes)) if routes is not None else ""
    how = {
        "p2p": "from the disk to the device",
        "compat": "by way of host memory (compatibility mode)",
        "mixed": "partly from the disk to the device and partly by way of host memory",
    }.get(mode, "which way they take it does not tell")
    return Verdict(True, f"{kind}, tried out: reads go {how}" if mode else f"{kind}, tried out; {how}", path, name, mode,
                   int(facts["max_nbytes"]))  # fmt: skip


def mode_of(routes: Routes) -> str:
    """PURE: 'p2p', 'compat', 'mixed', or '' where there were no reads."""
    direct = routes.p2p + routes.nvfs
    if direct and routes.posix:
        return "mixed"
    return "p2p" if direct else "compat" if routes.posix else ""
