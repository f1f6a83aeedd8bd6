"""Page cache to a GPU: page-locked against pageable memory, fused casts against converting copies, all against bare copies."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import checkpoints, device_report
from harness.device_cases import CASES, ON_REQUEST, QUICK_SETS, DeviceCase
from harness.ending import ends_its_children

_ROOT = Path(__file__).resolve().parent.parent
_CACHE = _ROOT / ".cache"
_LIMIT_S = 150


def main() -> int:
    """Measure and report. Returns 0 also where a goal is missed, or where there is no GPU and nothing was measured."""
    with ends_its_children():
        return _run(_arguments())


def _run(wanted: argparse.Namespace) -> int:
    if not wanted.simulated and (reason := _gpu_is_missing()):
        print(f"{reason}: nothing was measured on a GPU; --simulated counts copies on a simulated one")
        return 0
    cases = [case for case in (*CASES, *ON_REQUEST) if case.name in wanted.cases.split(",")]
    if not cases:
        print(f"no case is called {wanted.cases}", file=sys.stderr)
        return 2
    names = {QUICK_SETS[case.checkpoint] if wanted.quick else case.checkpoint for case in cases}
    checkpoints.ensure(wanted.data, sorted(names))
    data: dict[str, Any] = {
        "name": "device",
        "simulated": wanted.simulated,
        "command": shlex.join(["scripts/bench", "device", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": device_report.machine(),
        "cases": {},
    }
    with TemporaryDirectory() as source:
        shutil.copytree(_ROOT / "src", source, dirs_exist_ok=True)  # one run measures one state of it
        for case in cases:
            found = _measure(case, wanted, Path(source))
            data["device"] = found.pop("device", data.get("device", ""))
            data["cases"][case.name] = {"title": case.title, "is_of": case.is_of, **found}
            device_report.show(case, found, simulated=wanted.simulated)
    wanted.out.mkdir(parents=True, exist_ok=True)
    path = wanted.out / ("device-simulated.json" if wanted.simulated else "device.json")
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{data['machine']['summary']}; {data['device']}", path, *device_report.draw(data, path.with_suffix(".png")), sep="\n")
    return 0


def _measure(case: DeviceCase, wanted: argparse.Namespace, source: Path) -> dict[str, Any]:
    """All ways of a case, in a process of its own: a driver that hangs, or a crash, costs that case alone."""
    name = QUICK_SETS[case.checkpoint] if wanted.quick else case.checkpoint
    job = {
        "case": case.name,
        "files": checkpoints.files_of(wanted.data / name),
        "rounds": wanted.rounds,
        "simulated": wanted.simulated,
    }
    code = (
        f"import sys; sys.path[:0] = {[str(source), str(_ROOT / 'benchmarks')]!r}; from harness.device_child import main; main()"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(job)], stdout=subprocess.PIPE, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"ways": {}, "failed": f"did not end within {_LIMIT_S} s"}
    if done.returncode:
        return {"ways": {}, "failed": f"ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _gpu_is_missing() -> str | None:
    """Why nothing can be measured. Asked in a child: it would make a context."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return "torch does not answer within two minutes"
    return "torch finds no GPU" if done.returncode else None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench device", description=__doc__)
    parser.add_argument("--simulated", action="store_true", help="on a simulated GPU: the use of its bus and copies, no speed")
    parser.add_argument(
        "--cases",
        default=",".join(case.name for case in CASES),
        metavar="NAMES",
        help=f"which of {', '.join(case.name for case in (*CASES, *ON_REQUEST))} (%(default)s)",
    )
    parser.add_argument("--rounds", type=int, help="measurements of each way (5; simulated 3, with --quick 2)")
    parser.add_argument(
        "--data", type=Path, default=_CACHE / "bench", metavar="DIR", help="where the checkpoints are, or will be"
    )
    parser.add_argument("--out", type=Path, default=_CACHE / "bench-results", metavar="DIR", help="where JSON and chart go")
    parser.add_argument("--quick", action="store_true", help="a smoke run: short checkpoints, two rounds")
    wanted = parser.parse_args()
    if wanted.rounds is None:
        wanted.rounds = 2 if wanted.quick else 3 if wanted.simulated else 5
    wanted.data, wanted.out = wanted.data.resolve(), wanted.out.resolve()
    return wanted


if __name__ == "__main__":
    sys.exit(main())
