"""What each option changes about a load to host memory, in counts: bytes, memory, CPU time. docs/tuning.md shows the table.

`python benchmarks/tuning.py PATH` loads a checkpoint once per way, each in a process of its own, and prints a line for each.
Times are left out: counts are the same on a busy machine, and CPU time nearly so.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import Any

from harness.ending import ends_its_children

import headrace

_MIB = 1 << 20
_SMALL = 256 << 10  # norms, biases and scales
Way = tuple[str, dict[str, Any], str]  # its name, arguments of `stream`, and what the caller does with the tensors

WAYS: dict[str, list[Way]] = {
    "concurrency": [(f"concurrency={n}", {"concurrency": n}, "drops") for n in (1, 2, 4, 8, 16)],
    "memory_limit": [(f"memory_limit={n!r}", {"memory_limit": n}, "drops") for n in (0, "64MiB", "256MiB", "1GiB", -1)],
    "direct_io": [(f"direct_io={way!r}", {"direct_io": way}, "drops") for way in ("auto", "off", "on")],
    "direct_io, not cached": [(f"direct_io={way!r}", {"direct_io": way}, "evicts") for way in ("auto", "off", "on")],
    "mmap": [(f"mmap={way!r}", {"mmap": way}, "keeps all") for way in ("off", "auto")],
    "ownership": [(f"ownership={way!r}", {"ownership": way}, "keeps small") for way in ("leased", "copied")]
    + [("ownership='borrowed'", {"ownership": "borrowed"}, "drops")],
    "order": [(f"order={way!r}", {"order": way}, "drops") for way in ("ready", "file")],
    "dtype": [("as it is", {}, "keeps all"), ("dtype='F32'", {"dtype": "F32"}, "keeps all")],
    "names, slices": [("everything", {}, "drops"), ("names, a fourth of them", {"names": "*"}, "a fourth"), ("rows", {}, "rows")],
    "verify": [("without", {}, "drops"), ("verify=True", {"verify": True}, "drops")],
}


def main() -> int:
    """Measure all, or those that are named: `tuning.py PATH [OPTION ...]`."""
    path, wanted = sys.argv[1], sys.argv[2:] or [*WAYS]
    print(f"{'':30}{'read':>9}{'direct':>9}{'memory':>9}{'RSS':>9}{'CPU-s':>9}   {'caller':12}")
    for option in wanted:
        print(option)
        for number, (name, _, caller) in enumerate(WAYS[option]):
            command = [sys.executable, __file__, "--one", path, option, str(number)]
            with ends_its_children():
                done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            found = json.loads(done.stdout)
            sizes = "".join(f"{found[key] / _MIB:>9,.0f}" for key in ("read", "direct", "memory", "rss"))
            print(f"  {name:28}{sizes}{found['cpu_s']:>9.2f}   {caller:12}", flush=True)
    return 0


def one(path: str, option: str, number: int) -> dict[str, float]:
    """One load: bytes read, of them past the page cache, most memory at once, growth of peak RSS, CPU seconds."""
    _, arguments, caller = WAYS[option][number]
    opening = {name: value for name, value in arguments.items() if name in ("direct_io", "mmap")}  # of the files, once open
    with TemporaryDirectory() as folder, headrace.open(path, verify=_manifest(path, folder, arguments), **opening) as checkpoint:
        files = [header.url for header in checkpoint.headers]
        arguments = {name: value for name, value in arguments.items() if name != "verify"} | _part(checkpoint, caller)
        headrace.load(checkpoint, names=min(checkpoint, key=lambda name: checkpoint[name].nbytes))  # brings torch in
        (_evict if caller == "evicts" else _warm)(files)
        before, cpu_s = _peak_rss(), _cpu_s()
        kept = {}
        with headrace.stream(checkpoint, **arguments) as tensors:
            for name, tensor in tensors:
                if caller == "keeps all" or (caller == "keeps small" and tensor.nbytes < _SMALL):
                    kept[name] = tensor
                del tensor
        stats = tensors.stats
        return {
            "read": stats.read_nbytes,
            "direct": stats.direct_nbytes,
            "memory": stats.peak_nbytes,
            "rss": _peak_rss() - before,
            "cpu_s": _cpu_s() - cpu_s,
        }


def _manifest(path: str, folder: str, arguments: dict[str, Any]) -> str | None:
    """The manifest to verify against, where that is asked for: made here, so that nothing is put beside the checkpoint."""
    if not arguments.get("verify"):
        return None
    return headrace.verify(path, write=True, out=f"{folder}/headrace.manifest.json").written


def _part(checkpoint: headrace.Checkpoint, caller: str) -> dict[str, Any]:
    """What of the checkpoint is asked for: all of it, a fourth of its tensors, or a fourth of each one's rows."""
    if caller == "a fourth":
        return {"names": [*checkpoint][::4]}
    if caller == "rows":
        return {"slices": {name: slice(0, info.shape[0] // 4) for name, info in checkpoint.items() if info.shape[:1] > (3,)}}
    return {}


def _evict(files: list[str]) -> None:
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _warm(files: list[str]) -> None:
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.read(4 * _MIB):
                pass


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        print(json.dumps(one(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        sys.exit(main())
