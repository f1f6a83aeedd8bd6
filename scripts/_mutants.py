"""Seed the ways to devices and between ranks with bugs, one at a time; tests have to notice: scripts/check --mutants [NAME ...].

A mutant is a piece of source and what is put in its place, in a copy of the tree, and the tests that have to fail then. The piece
has to occur exactly once, so that a mutant whose target has moved is an error and not a bug that was not caught. What is caught
by a crash of the test run counts as caught.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 300
_PIPELINE = "tests/test_pipeline.py"
_INPLACE = "tests/test_inplace.py"
_RELAY = "tests/test_relay.py"
_EXCHANGE = "tests/test_exchange.py"
_SUITES = f"{_PIPELINE} tests/test_device_cuda.py {_INPLACE} {_RELAY} {_EXCHANGE}"


@dataclass(frozen=True)
class Mutant:
    """One bug.

    Attributes:
        name: what is wrong.
        file: below src/headrace.
        old, new: what is replaced, and by what.
        tests: pytest's -k expression for the tests that have to notice.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    suite: str = _PIPELINE


MUTANTS = (
    Mutant(
        "slot reused before its event",
        "_ring.py",
        "while self._flying and self._device.is_done(self._flying[0].event):",
        "while self._flying:",
        "larger_than_the_ring or unaligned",
    ),
    Mutant(
        "slot reused without waiting for the oldest copy",
        "_ring.py",
        "                self._device.synchronize(oldest.event)\n",
        "                pass\n",
        "larger_than_the_ring or unaligned",
    ),
    Mutant(
        "memory reclaimed while the caller's own copy is under way",
        "devices/cuda/_device.py",
        "self.allocator.use([_tensor_of(buffer) for buffer in buffers])",
        "self.allocator.use([])",
        "memory_is_not_used_again",
    ),
    Mutant(
        "unregistered while copies are under way",
        "_pinned.py",
        "            for event in events:\n                self.device.synchronize(event)\n",
        "",
        "close_with_copies or stops_early",
    ),
    Mutant(
        "a copy without an event is not waited for",
        "_pinned.py",
        "            if self.untracked or self.outside:\n",
        "            if self.outside:\n",
        "a_call_that_fails",
    ),
    Mutant(
        "files are let go while they are copied from",
        "_pinned.py",
        "            if self.untracked or self.outside:\n",
        "            if self.untracked:\n",
        "leaving_early",
        suite=_INPLACE,
    ),
    Mutant(
        "a file that was page-locked before one was refused stays so",
        "_inplace.py",
        "        except BaseException as exc:\n            self.close()\n",
        "        except BaseException as exc:\n            self._finalizer.detach()\n",
        "refused",
        suite=_INPLACE,
    ),
    Mutant(
        "the last error is left behind",
        "devices/cuda/_runtime.py",
        "        self._GetLastError()  # else the next call of torch's on this thread would raise it\n",
        "",
        "unregistration_that_fails or failure_takes_the_last_error_back",
        suite=_SUITES,
    ),
    Mutant("a registration leaks", "_pinned.py", "for address in pins:", "for address in pins[1:]:", "stops_early"),
    Mutant(
        "unmapped before it was unregistered",
        "_pinned.py",
        "        with self._pinning:\n            pins, self._pins = self._pins, []\n",
        "        with self._pinning:\n            pins, self._pins = self._pins, []\n"
        "        _libc.munmap(ctypes.c_void_p(self.region.address), ctypes.c_size_t(self.region.nbytes))\n",
        "stops_early",
    ),
    Mutant(
        "one copy per tensor",
        "_pipeline.py",
        "            self._device.copy_async("
        "part.address + begin - part.start, source + begin - start, stop - begin, pinned=pinned)\n",
        "            for at in range(begin, stop, 40_000):\n"
        "                self._device.copy_async(part.address + at - part.start, source + at - start, min(40_000, stop - at))\n",
        "each_chunk_is_one_copy",
    ),
    Mutant(
        "a scale is converted",
        "_selection.py",
        "return None if reason else target",
        "return target",
        "scales_of_quantized",
    ),
    Mutant(
        "a thread works on the wrong device",
        "devices/cuda/_device.py",
        "self.runtime.set_device(self.index)  # a thread",
        "self.runtime.set_device(0)  # a thread",
        "no_thread_works",
    ),
    Mutant(
        "siblings share a version counter",
        "devices/cuda/_device.py",
        "made.append(blanks[kind].pop().set_(own, 0, dimensions, _strides(dimensions)))",
        "made.append(_tensor_of(buffer)[position : position + nbytes].view(kind).view(dimensions))",
        "storage_and_a_version",
    ),
    Mutant(
        "handed over without waiting",
        "devices/cuda/_device.py",
        "            self.runtime.wait(self.allocator.current_stream(), event)\n",
        "",
        "unaligned or what_is_held",
    ),
    Mutant(
        "a stream that the caller turns to does not wait",
        "_pipeline.py",
        "if handed is not None and (stream := self._device.callers_stream()) not in handed.streams:",
        "if handed is None and (stream := self._device.callers_stream()):",
        "changes_its_stream",
    ),
    Mutant(
        "the event is recorded before the copy",
        "_ring.py",
        "                self._device.record(slot.event)\n            except",
        "                pass\n            except",
        "larger_than_the_ring or unaligned",
    ),
    Mutant(
        "given tensors are written before the caller's work on them",
        "_pipeline.py",
        "            self._device.await_caller()\n",
        "            pass\n",
        "into_waits_for",
    ),
    Mutant(
        "tensors lie where vector loads may not",
        "_planner.py",
        "            if position % unit and self.sizes[row]:",
        "            if False:",
        "vector_loads",
    ),
    Mutant(
        "narrowing conversions send all bytes",
        "_routes.py",
        "return DTYPES[target].itemsize >= DTYPES[source].itemsize",
        "return True",
        "half_the_bytes",
    ),
    Mutant(
        "memory of the allocator is used without the bytes that were read",
        "_ring.py",
        "                move(target, data)\n",
        "",
        "refused",
    ),
    Mutant(
        "page-locked memory that was demanded is missing",
        "_ring.py",
        'if not slot.pinned and self._pin == "require":',
        "if False:",
        "require_raises",
    ),
    Mutant(
        "the memory ahead of the caller is not bounded",
        "_pipeline.py",
        "return self._ahead_nbytes + nbytes <= self._staging.ahead_nbytes and self._space.has_room(nbytes)",
        "return True",
        "ahead_of_the_caller",
    ),
    Mutant(
        "a source that changed is handed out",
        "_engine.py",
        "        self.job.sources[read.shard].check_unchanged()\n",
        "",
        "source_that_changed",
    ),
    Mutant(
        "a shared slot is filled while this rank copies out of it",
        "_relay.py",
        "            self._await_own_copy(before)\n",
        "            pass\n",
        "filled_again_only",
        _RELAY,
    ),
    Mutant(
        "a shared slot is given back while it is copied out of",
        "_relay.py",
        "                    self._device.synchronize(event)\n                elif",
        "                    pass\n                elif",
        "filled_again_only",
        _RELAY,
    ),
    Mutant(
        "a rank that has not passed on everything ends silently",
        "_relay.py",
        "if not self._left and (self._to_come or self._announced < len(self._own_rounds)):",
        "if not self._left and self._announced < len(self._own_rounds):",
        "reads_nothing_for_others",
        _RELAY,
    ),
    Mutant(
        "parts of blocks have the file's dtype",
        "_wire.py",
        "convert = Copy(self._blocks.sources[read.span], packing.dtype)",
        "convert = Copy(self._blocks.sources[read.span], self._blocks.sources[read.span])",
        "overlap_in_the_file",
        _RELAY,
    ),
    Mutant(
        "parts of blocks are not converted where they arrive",
        "_exchange.py",
        "packing.unpack(), Copy(packing.dtype, self.part.copy.target))",
        "packing.unpack(), Copy(packing.dtype, packing.dtype))",
        "overlap_in_the_file",
        _EXCHANGE,
    ),
    Mutant(
        "ranks decide each for itself whether they need the others",
        "_terms.py",
        "all(theirs.needs_no_others for theirs in offers)",
        "offer.needs_no_others",
        "that_saves_reading",
        _EXCHANGE,
    ),
)


def main(names: list[str]) -> int:
    """Run the mutants whose names contain one of `names`, or all."""
    chosen = [mutant for mutant in MUTANTS if not names or any(name in mutant.name for name in names)]
    sound = replace(chosen[0], old="", new="", tests=" or ".join(mutant.tests for mutant in chosen), suite=_SUITES)
    if _verdict(sound) != "survived":
        print("mutants: the tests fail without a bug; nothing can be said")
        return 1
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        results = list(pool.map(_verdict, chosen))
    for mutant, verdict in zip(chosen, results, strict=True):
        print(f"  {verdict:<10} {mutant.name}")
    caught = results.count("caught")
    print(f"mutants: {caught}/{len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


def _verdict(mutant: Mutant) -> str:
    """'caught', 'survived', or 'stale' where there is nothing to replace."""
    with tempfile.TemporaryDirectory(prefix="headrace-mutant-") as folder:
        tree = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        file = tree / "src" / "headrace" / mutant.file
        text = file.read_text()
        if mutant.old:
            if text.count(mutant.old) != 1:
                return "stale"
            file.write_text(text.replace(mutant.old, mutant.new))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            *mutant.suite.split(),
            "-k",
            mutant.tests,
        ]
        environment = {**_surroundings(), "PYTHONPATH": str(tree / "src")}
        try:
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return "caught"
    return "survived" if done.returncode == 0 else "stale" if done.returncode in (4, 5) else "caught"


def _surroundings() -> dict[str, str]:
    return dict(os.environ)  # noqa: TID251 - a child gets what this program got


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
