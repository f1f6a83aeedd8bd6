"""GPU acceptance: what this machine's driver does beside what the simulator says that it does, and the machine's figures.

    scripts/gpu                  with a GPU: every probe, in a process of its own with a time limit; the tests that are marked
                                 gpu; the benchmark of loads to a device; and a table of what came of them
    scripts/gpu --simulated      the simulator alone, on any machine: what a GPU would be compared with
    --json FILE                  the answers as JSON too
    --folder FOLDER              a folder on a disk's filesystem, for the mappings of files

Exits with 0 when all answers agree, with 1 when some do not. Needs torch (any CUDA or ROCm build), a C compiler and the source of
headrace; nothing is installed, nothing is written but the file that was asked for and temporary ones. The simulator is given the
real device's attributes first. What differs then is to be corrected in headrace.testing.simulated, or in headrace.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "src"))

import _gpu_probes as probes  # noqa: E402 - beside this file

Answers = dict[str, object]


def ask(name: str, kind: str, folder: Path, limit_s: float) -> Answers:
    """Run one probe in a process of its own. What goes wrong is its answer: a hanging driver must not hang the acceptance."""
    code = f"import sys; sys.path[:0] = {[str(HERE), str(HERE.parent / 'src')]!r}; import _gpu_probes; _gpu_probes.main()"
    command = [sys.executable, "-c", code, name, kind, str(folder)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, complaint = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _abandon(child)
        return {"the probe": f"did not end within {limit_s:g} s"}
    if child.returncode:
        reason = complaint.strip().splitlines()[-1:] or ["no message"]
        return {"the probe": f"ended with {child.returncode}: {reason[0][:100]}"}
    answers: Answers = json.loads(output)
    return answers


def _abandon(child: subprocess.Popen[str]) -> None:
    child.kill()
    for pipe in (child.stdout, child.stderr):
        if pipe:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel's hands it may never end
        child.wait(timeout=2)


def compare(real: Answers, simulated: Answers) -> list[tuple[str, str, str, bool]]:
    """Rows (question, real, simulated, whether they agree), also for questions that only one of them answered."""
    questions = [*real, *(question for question in simulated if question not in real)]
    rows = []
    for question in questions:
        both = [str(answers.get(question, "not answered")) for answers in (real, simulated)]
        rows.append((question, both[0], both[1], both[0] == both[1]))
    return rows


def show(rows: Sequence[Sequence[str]], head: Sequence[str]) -> None:
    """Print a table with columns as wide as they need to be."""
    table = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def failures(answers: dict[str, Answers]) -> list[str]:
    """Names of the probes that gave no answers."""
    return [name for name, found in answers.items() if "the probe" in found]


def run_rules(kind: str, folder: Path) -> dict[str, Answers]:
    return {name: ask(name, kind, folder, limit_s) for name, (_, limit_s) in probes.RULES.items()}


def run_figures(folder: Path) -> dict[str, Answers]:
    return {name: ask(name, "real", folder, limit_s) for name, (_, limit_s) in probes.FIGURES.items()}


def show_simulated(simulated: dict[str, Answers]) -> int:
    """Print what the simulator answers; the exit status."""
    for name, answers in simulated.items():
        print(f"\n{name}: {probes.RULES[name][0].__doc__}")
        show([(question, str(answer)) for question, answer in answers.items()], ("question", "simulator"))
    broken = failures(simulated)
    print(
        f"\nsimulated only, no GPU was used: {sum(map(len, simulated.values()))} answers"
        + (f"; FAILED: {broken}" if broken else "")
    )
    return 1 if broken else 0


def show_compared(real: dict[str, Answers], simulated: dict[str, Answers], figures: dict[str, Answers]) -> int:
    """Print both, then the figures; the exit status."""
    wrong = 0
    for name in real:
        rows = compare(real[name], simulated[name])
        print(f"\n{name}: {probes.RULES[name][0].__doc__}")
        show([(*row[:3], "" if row[3] else "DIFFERS") for row in rows], ("question", "GPU", "simulator", ""))
        wrong += sum(not row[3] for row in rows)
    for name, answers in figures.items():
        print(f"\n{name}: {probes.FIGURES[name][0].__doc__}")
        show([(question, str(answer)) for question, answer in answers.items()], ("question", "GPU"))
    broken = failures(real | figures)
    print(f"\n{agreement(real, simulated)}" + (f"; without an answer: {', '.join(broken)}" if broken else ""))
    return 1 if wrong or broken else 0


def agreement(real: dict[str, Answers], simulated: dict[str, Answers]) -> str:
    """How many answers are the same."""
    rows = [row for name in real for row in compare(real[name], simulated[name])]
    return f"{sum(row[3] for row in rows)} of {len(rows)} answers agree"


def run_tests() -> tuple[str, bool]:
    """(what came of the tests that are marked gpu, whether that is well)"""
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        return f"left out: no {', '.join(missing)} for {sys.executable}", True
    files = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
    output, code = _run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "pythonpath=src", "-m", "gpu", *files]
    )
    return (output.strip().splitlines() or ["no output"])[-1], code == 0


def run_benchmark(out: Path) -> tuple[str, bool]:
    """(how many goals of `scripts/bench device` hold, whether it ran); prints its tables."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "device.py"),
        "--rounds",
        "3",
        "--out",
        str(out),
        "--data",
        str(out / "data"),
    ]
    output, code = _run(command)
    print(output)
    held, missed = (sum(line.startswith(f"  {word}") for line in output.splitlines()) for word in ("PASS", "MISS"))
    return (f"{held} of {held + missed} goals hold" if code == 0 else f"ended with {code}"), code == 0


def _run(command: Sequence[str]) -> tuple[str, int]:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "did not end within 120 s", 124
    return done.stdout, done.returncode


def simulated_like(machine: Answers) -> str:
    """The simulator with the attributes that decide what a device registers: "simulated 99=1 113=0"."""
    found = {question.split()[1].rstrip(":"): answer for question, answer in machine.items() if question.startswith("attribute ")}
    return " ".join(["simulated", *(f"{number}={value}" for number, value in found.items())])


def gpu_is_missing() -> str | None:
    """Why there is nothing to test; None where there is a GPU. Asked in a child, since it would make a context."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import _gpu_runtime; _gpu_runtime.real()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulated", action="store_true", help="the simulator alone")
    parser.add_argument("--json", type=Path, help="write the answers here too")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on a disk's filesystem")
    wanted = parser.parse_args()
    if not wanted.simulated and (reason := gpu_is_missing()):
        print(f"{reason}: nothing was tested")
        return 0
    started = time.monotonic()
    found: dict[str, Any]
    if wanted.simulated:
        found = {"simulated": run_rules("simulated", wanted.folder)}
        status = show_simulated(found["simulated"])
    else:
        figures = run_figures(wanted.folder)
        simulated = run_rules(simulated_like(figures["machine"]), wanted.folder)
        found = {"real": run_rules("real", wanted.folder), "simulated": simulated, "figures": figures}
        status = show_compared(found["real"], simulated, figures)
        with tempfile.TemporaryDirectory(dir=wanted.folder) as out:
            benchmark, tests = run_benchmark(Path(out)), run_tests()
            if (path := Path(out, "device.json")).exists():
                found["benchmark"] = json.loads(path.read_text())
        print("\nin all")
        show(
            [
                ("probes", agreement(found["real"], simulated)),
                ("tests marked gpu", tests[0]),
                ("scripts/bench device", benchmark[0]),
            ],
            ("what", "came of it"),
        )
        status = status if tests[1] and benchmark[1] else 1
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    print(f"{today}, {time.monotonic() - started:.0f} s")
    if wanted.json:
        wanted.json.write_text(json.dumps({"date": today, **found}, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
