"""What the commands share: arguments, and the way from cases to tables, JSON and charts."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness import checkpoints, report
from harness.cases import Case
from harness.ending import ends_its_children
from harness.runner import Runner
from harness.servers import Servers

_ROOT = Path(__file__).resolve().parent.parent.parent
_CACHE = _ROOT / ".cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One command.

    Attributes:
        name: of the command and its output.
        about: a line for its help.
        cases: in order.
        draw: makes charts of the JSON data in a folder, and returns their paths.
        on_request: left out unless --cases names them.
        quick: cases of a smoke run; None: all.
        quick_sets: {checkpoint: the one of a smoke run}; "short" for others.
        quick_peers: whether a smoke run has the other loaders in it.
    """

    name: str
    about: str
    cases: Sequence[Case]
    draw: Callable[[Mapping[str, Any], Path], Sequence[Path]]
    on_request: Set[str] = frozenset()
    quick: Set[str] | None = None
    quick_sets: Mapping[str, str] = field(default_factory=dict)
    quick_peers: bool = False

    def main(self) -> int:
        """Measure and report. Returns 0 also where a goal is missed: a shared machine decides no merge."""
        with ends_its_children():
            return self._run(self._arguments())

    def _run(self, arguments: argparse.Namespace) -> int:
        cases = [case for case in self.cases if self._wanted(case.name, arguments)]
        if not cases:
            print(f"no case fits {arguments.cases!r}; there are: {', '.join(case.name for case in self.cases)}", file=sys.stderr)
            return 2
        if arguments.quick:
            cases = [replace(case, checkpoint=self.quick_sets.get(case.checkpoint, "short")) for case in cases]
        names = sorted({case.checkpoint for case in cases})
        checkpoints.ensure(arguments.data, names)
        files = {name: checkpoints.files_of(arguments.data / name) for name in names}
        peers = self._peers(arguments)
        command = shlex.join(["scripts/bench", self.name, *sys.argv[1:]])
        run = report.Run(name=self.name, draw=self.draw, command=command, files=files, peers=peers)
        with TemporaryDirectory() as source:
            shutil.copytree(_ROOT / "src", source, dirs_exist_ok=True)
            servers = Servers(arguments.data, Path(source), _CACHE / "azurite")
            runner = Runner(files, arguments.rounds, Path(source), peers, _say, servers.serve, arguments.retakes, servers.traffic)
            for case in cases:
                run.add(case, runner.run(case))
                run.save(arguments.out)
                run.print_case(case)
        run.finish(arguments.out)
        return 0

    def _wanted(self, name: str, arguments: argparse.Namespace) -> bool:
        if name in self.on_request:
            return name in arguments.cases.split(",")
        left_out = arguments.quick and self.quick is not None and name not in self.quick
        return not left_out and any(fnmatch(name, glob) for glob in arguments.cases.split(","))

    def _peers(self, arguments: argparse.Namespace) -> Path | str:
        if arguments.no_peers or (arguments.quick and not self.quick_peers):
            return "left out"
        from harness.peer_environment import ensure

        return ensure(_CACHE / "bench-peers", _say)

    def _arguments(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(prog=f"scripts/bench {self.name}", description=self.about)
        parser.add_argument("--rounds", type=int, help="measurements of each way (5; with --quick 2)")
        parser.add_argument("--cases", default="*", metavar="GLOB", help=f"which cases: {self._examples()}")
        parser.add_argument(
            "--data", type=Path, default=_CACHE / "bench", metavar="DIR", help="where the checkpoints are, or will be"
        )
        parser.add_argument("--out", type=Path, default=_CACHE / "bench-results", metavar="DIR", help="where JSON and charts go")
        parser.add_argument("--retakes", type=int, help="how often a disturbed measurement is taken again (1; with --quick 0)")
        parser.add_argument("--no-peers", action="store_true", help="headrace and floors only")
        without = "" if self.quick_peers else ", no peers"
        parser.add_argument("--quick", action="store_true", help=f"a smoke run: a short checkpoint, two rounds{without}")
        arguments = parser.parse_args()
        if arguments.rounds is None:
            arguments.rounds = 2 if arguments.quick else 5
        if arguments.retakes is None:
            arguments.retakes = 0 if arguments.quick else 1
        arguments.data, arguments.out = arguments.data.resolve(), arguments.out.resolve()
        return arguments

    def _examples(self) -> str:
        first, *_, last = [case.name for case in self.cases]
        return f"names or patterns with commas between them, e.g. '{first}' or '{first.partition('_')[0]}_*,{last}'"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
