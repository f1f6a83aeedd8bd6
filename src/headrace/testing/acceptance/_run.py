"""Ask all probes, compare what the driver and the simulator answer, show it, and say what came of it."""

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.testing.acceptance import _probes as probes
from headrace.testing.simulated.building import find_compiler

Answers = dict[str, object]
Say = Callable[[str], object]
_HERE = Path(__file__).resolve()
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))


def accept(folder: Path, say: Say, *, simulated: bool = False) -> tuple[dict[str, Any], int]:
    """Run the acceptance.

    Args:
        folder: on a disk's filesystem; temporary files of up to 1 GiB are made in it.
        say: takes each line of the report.
        simulated: show what the simulator answers, on any machine.

    Returns:
        The answers, for JSON, and the exit status: 0 where all is well or there was nothing to test, else 1.
    """
    started = time.monotonic()
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    found: dict[str, Any]
    if simulated:
        found = {"simulated": run_rules("simulated", folder)}
        status = show_simulated(found["simulated"], say)
    elif reason := gpu_is_missing():
        say(f"{reason}: nothing was tested")
        return {"date": today, "not tested": reason}, 0
    else:
        found, status = _compared(folder, say)
    say(f"{today}, {time.monotonic() - started:.0f} s")
    return {"date": today, **found}, status


def _compared(folder: Path, say: Say) -> tuple[dict[str, Any], int]:
    figures = run_figures(folder)
    simulated = run_rules(simulated_like(figures["machine"]), folder) if find_compiler() else {}
    found: dict[str, Any] = {"real": run_rules("real", folder), "simulated": simulated, "figures": figures}
    status = show_compared(found["real"], simulated, figures, say)
    tree = source_tree()
    benchmark = tests = ("left out: only in the source tree, by scripts/gpu", True)
    if tree is not None:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            benchmark, tests = run_benchmark(tree, Path(out), say), run_tests(tree)
            if (path := Path(out, "device.json")).exists():
                found["benchmark"] = json.loads(path.read_text())
    say("\nin all")
    rows = [
        ("probes", agreement(found["real"], simulated)),
        ("tests marked gpu", tests[0]),
        ("scripts/bench device", benchmark[0]),
    ]
    show(rows, ("what", "came of it"), say)
    return found, status if tests[1] and benchmark[1] else 1


def ask(name: str, kind: str, folder: Path, limit_s: float) -> Answers:
    """Run one probe in a process of its own. What goes wrong is its answer: a hanging driver must not hang the acceptance."""
    child = subprocess.Popen(
        _python("from headrace.testing.acceptance._probes import main; main()", name, kind, str(folder)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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


def _python(code: str, *arguments: str) -> list[str]:
    """A command that runs this code where this process finds its modules."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}", *arguments]


def _abandon(child: subprocess.Popen[str]) -> None:
    child.kill()
    for pipe in (child.stdout, child.stderr):
        if pipe:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel's hands it may never end
        child.wait(timeout=2)


def run_rules(kind: str, folder: Path) -> dict[str, Answers]:
    return {name: ask(name, kind, folder, limit_s) for name, (_, limit_s) in probes.RULES.items()}


def run_figures(folder: Path) -> dict[str, Answers]:
    return {name: ask(name, "real", folder, limit_s) for name, (_, limit_s) in probes.FIGURES.items()}


# -- what came of it -------------------------------------------------------------------------------------------------------------


def compare(real: Answers, simulated: Answers) -> list[tuple[str, str, str, bool]]:
    """Rows (question, real, simulated, whether they agree), also for questions that only one of them answered."""
    questions = [*real, *(question for question in simulated if question not in real)]
    rows = []
    for question in questions:
        both = [str(answers.get(question, "not answered")) for answers in (real, simulated)]
        rows.append((question, both[0], both[1], both[0] == both[1]))
    return rows


def expected(name: str, real: Answers, simulated: dict[str, Answers]) -> Answers:
    """What a probe should have answered: what the simulator does; without one, loads still have to bring the right bytes."""
    if simulated:
        return simulated[name]
    return dict.fromkeys(real, "equal") if name == "load bytes" else real


def show(rows: Sequence[Sequence[str]], head: Sequence[str], say: Say) -> None:
    """A table with columns as wide as they need to be."""
    table = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        say("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def failures(answers: dict[str, Answers]) -> list[str]:
    """Names of the probes that gave no answers."""
    return [name for name, found in answers.items() if "the probe" in found]


def show_simulated(simulated: dict[str, Answers], say: Say) -> int:
    """Show what the simulator answers; the exit status."""
    for name, answers in simulated.items():
        say(f"\n{name}: {probes.RULES[name][0].__doc__}")
        show([(question, str(answer)) for question, answer in answers.items()], ("question", "simulator"), say)
    broken = failures(simulated)
    count = sum(map(len, simulated.values()))
    say(f"\nsimulated only, no GPU was used: {count} answers" + (f"; FAILED: {broken}" if broken else ""))
    return 1 if broken else 0


def show_compared(real: dict[str, Answers], simulated: dict[str, Answers], figures: dict[str, Answers], say: Say) -> int:
    """Show both, then the figures; the exit status."""
    wrong = 0
    for name in real:
        rows = compare(real[name], expected(name, real[name], simulated))
        say(f"\n{name}: {probes.RULES[name][0].__doc__}")
        head = ("question", "GPU", "simulator" if simulated else "expected", "")
        show([(*row[:3], "" if row[3] else "DIFFERS") for row in rows], head, say)
        wrong += sum(not row[3] for row in rows)
    for name, answers in figures.items():
        say(f"\n{name}: {probes.FIGURES[name][0].__doc__}")
        show([(question, str(answer)) for question, answer in answers.items()], ("question", "GPU"), say)
    broken = failures(real | figures)
    say(f"\n{agreement(real, simulated)}" + (f"; without an answer: {', '.join(broken)}" if broken else ""))
    return 1 if wrong or broken else 0


def agreement(real: dict[str, Answers], simulated: dict[str, Answers]) -> str:
    """How many answers are the same."""
    if not simulated:
        rows = compare(real["load bytes"], expected("load bytes", real["load bytes"], simulated))
        return f"{sum(row[3] for row in rows)} of {len(rows)} loads are equal; no C compiler, so nothing to compare the rest with"
    rows = [row for name in real for row in compare(real[name], simulated[name])]
    return f"{sum(row[3] for row in rows)} of {len(rows)} answers agree"


def simulated_like(machine: Answers) -> str:
    """The simulator with the attributes that decide what a device registers: "simulated 99=1 113=0"."""
    found = {question.split()[1].rstrip(":"): answer for question, answer in machine.items() if question.startswith("attribute ")}
    return " ".join(["simulated", *(f"{number}={value}" for number, value in found.items())])


def gpu_is_missing() -> str | None:
    """Why there is nothing to test; None where there is a GPU. Asked in a child, since it would make a context."""
    if not any(node.exists() for node in _DRIVERS):
        return "no GPU found on this machine"
    command = _python("from headrace.testing.acceptance import _runtime; _runtime.real()")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else None


# -- what only the source tree has -----------------------------------------------------------------------------------------------


def source_tree() -> Path | None:
    """Where this package lies in its source tree; None where it was installed by itself."""
    root = _HERE.parents[4]
    return root if _HERE.parents[3].name == "src" and (root / "benchmarks" / "device.py").exists() else None


def run_tests(tree: Path) -> tuple[str, bool]:
    """(what came of the tests that are marked gpu, whether that is well)"""
    missing = [name for name in ("pytest", "pytest_timeout", "hypothesis", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        return f"left out: no {', '.join(missing)} for {sys.executable}", True
    files = [str(path) for path in sorted((tree / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
    options = ["-q", "-p", "no:cacheprovider", "-o", "pythonpath=src", "-m", "gpu"]
    output, code = _run([sys.executable, "-m", "pytest", *options, *files], tree)
    return (output.strip().splitlines() or ["no output"])[-1], code == 0


def run_benchmark(tree: Path, out: Path, say: Say) -> tuple[str, bool]:
    """(how many goals of `scripts/bench device` hold, whether it ran); shows its tables."""
    options = ["--rounds", "3", "--out", str(out), "--data", str(out / "data")]
    output, code = _run([sys.executable, str(tree / "benchmarks" / "device.py"), *options], tree)
    say(output)
    held, missed = (sum(line.startswith(f"  {word}") for line in output.splitlines()) for word in ("PASS", "MISS"))
    return (f"{held} of {held + missed} goals hold" if code == 0 else f"ended with {code}"), code == 0


def _run(command: Sequence[str], tree: Path) -> tuple[str, int]:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tree,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "did not end within 120 s", 124
    return done.stdout, done.returncode


# -- as a program ----------------------------------------------------------------------------------------------------------------


def main() -> int:
    """`scripts/gpu`: the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description="What this machine's GPU does, beside what the simulated one says; and the machine's figures.",
        epilog="Exits with 0 when all answers agree, or where there is no GPU and nothing was tested; with 1 when some do not.",
    )
    parser.add_argument("--simulated", action="store_true", help="the simulator alone, on any machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answers here too")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on a disk's filesystem (%(default)s)")
    wanted = parser.parse_args()
    found, status = accept(wanted.folder, _print, simulated=wanted.simulated)
    if wanted.json and "not tested" not in found:
        wanted.json.write_text(json.dumps(found, indent=1) + "\n")
    return status


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
