"""Local files to host memory: headrace against bare loops and other loaders."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from harness import checkpoints, report
from harness.local_cases import CASES, ON_REQUEST, QUICK
from harness.runner import Runner

_ROOT = Path(__file__).resolve().parent.parent
_CACHE = _ROOT / ".cache"


def main() -> int:
    """Measure and report. Returns 0 also where a goal is missed: a shared machine decides no merge."""
    arguments = _arguments()
    cases = [case for case in CASES if _wanted(case.name, arguments)]
    if not cases:
        print(f"no case fits {arguments.cases!r}; there are: {', '.join(case.name for case in CASES)}", file=sys.stderr)
        return 2
    if arguments.quick:
        cases = [replace(case, checkpoint="short") for case in cases]
    names = sorted({case.checkpoint for case in cases})
    checkpoints.ensure(arguments.data, names)
    files = {name: checkpoints.files_of(arguments.data / name) for name in names}
    peers = _peers(arguments)
    run = report.Run(command=shlex.join(["scripts/bench", "local", *sys.argv[1:]]), files=files, peers=peers)
    with TemporaryDirectory() as source:
        shutil.copytree(_ROOT / "src", source, dirs_exist_ok=True)
        runner = Runner(files, arguments.rounds, Path(source), peers, _say, arguments.retakes)
        for case in cases:
            run.add(case, runner.run(case))
            run.save(arguments.out)
            run.print_case(case)
    run.finish(arguments.out)
    return 0


def _wanted(name: str, arguments: argparse.Namespace) -> bool:
    if name in ON_REQUEST:
        return name in arguments.cases.split(",")
    return any(fnmatch(name, glob) for glob in arguments.cases.split(",")) and (not arguments.quick or name in QUICK)


def _peers(arguments: argparse.Namespace) -> Path | str:
    if arguments.no_peers or arguments.quick:
        return "left out"
    from harness.peer_environment import ensure

    return ensure(_CACHE / "bench-peers", _say)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench local", description=__doc__)
    parser.add_argument("--rounds", type=int, help="measurements of each way (5; with --quick 2)")
    parser.add_argument("--cases", default="*", metavar="GLOB", help="which cases, e.g. 'warm_*' or 'cold_*,rss_*'")
    parser.add_argument(
        "--data", type=Path, default=_CACHE / "bench", metavar="DIR", help="where the checkpoints are, or will be"
    )
    parser.add_argument("--out", type=Path, default=_CACHE / "bench-results", metavar="DIR", help="where JSON and chart go")
    parser.add_argument("--retakes", type=int, help="how often a disturbed measurement is taken again (1; with --quick 0)")
    parser.add_argument("--no-peers", action="store_true", help="headrace and floors only")
    parser.add_argument("--quick", action="store_true", help="a smoke run: a short checkpoint, two rounds, no peers")
    arguments = parser.parse_args()
    if arguments.rounds is None:
        arguments.rounds = 2 if arguments.quick else 5
    if arguments.retakes is None:
        arguments.retakes = 0 if arguments.quick else 1
    arguments.data, arguments.out = arguments.data.resolve(), arguments.out.resolve()
    return arguments


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
