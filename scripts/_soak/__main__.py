"""Run loads with random faults for a time, or one of them again.

Usage:
  scripts/soak [--minutes 60] [--seed N] [--json FILE]
  scripts/soak --replay SEED [--times N]
  scripts/soak --fuzz [--minutes 60] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

from ranks import prepare_ranks

from _soak.cases import Case, draw_case
from _soak.fuzzing import fuzz
from _soak.grouping import run_group
from _soak.judging import WrongError
from _soak.keeping import Keeper
from _soak.loading import Result, run_load
from _soak.pulling import run_pull
from _soak.reporting import Report, as_table
from _soak.watching import Watch, Watchdog, peak_resident_nbytes, resident_nbytes
from headrace.testing.simulated import find_compiler, library_path

_CASE_LIMIT_S = 180.0


class Soak:
    """Runs cases, one after the other, and looks at what each leaves. A context manager.

    Args:
        seed: of the first case; the next ones follow.
        talks: whether to say so where something is wrong, at once.
    """

    def __init__(self, seed: int, *, talks: bool = True) -> None:
        self.report = Report(seed, datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))
        self.keeper = Keeper()
        self._talks = talks
        self._own = ExitStack()
        prepare_ranks()
        folder = self._own.enter_context(tempfile.TemporaryDirectory(prefix="headrace-soak-"))
        self._own.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = folder  # so that whatever appears there is ours
        log = logging.getLogger("headrace")
        self._own.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)  # fallbacks are warned about, and are not what is looked for
        if find_compiler() is not None:
            library_path()  # it is compiled to where temporary files are
        self._watch = self._own.enter_context(Watch())

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_: object) -> None:
        self._own.close()

    def run(self, seed: int) -> bool:
        """Run the case of this number; return whether it ended as it may and left nothing."""
        case = draw_case(seed)
        self._watch.begin()
        try:
            with Watchdog(_CASE_LIMIT_S, lambda: _hung(case)):
                result = self._carry_out(case)
            self.keeper.check()
            self.keeper.drop_some(random.Random(seed))
            self._watch.check(seed)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it goes into the report
            what = "".join(traceback.format_exception(exc)) if not isinstance(exc, WrongError) or exc.__cause__ else str(exc)
            self.report.add_failure(case, what, resident_nbytes())
            if self._talks:
                print(f"case {seed} is wrong: {case}\n{what}", file=sys.stderr, flush=True)
            return False
        self.report.add(case, result, resident_nbytes())
        return True

    def summary(self) -> dict[str, Any]:
        """What was found, as JSON."""
        return self.report.as_json(
            peak_rss_mib=peak_resident_nbytes() >> 20,
            kept_tensors_checked=self.keeper.checks,
            left_in_shared_memory=self._watch.shared_memory_left(),
        )

    def _carry_out(self, case: Case) -> Result:
        root = Path(tempfile.mkdtemp(prefix="headrace-soak-", dir="/dev/shm" if case.place == "shm" else None))
        try:
            if case.kind == "group":
                return run_group(case, root)
            return run_pull(case, root) if case.kind == "pull" else run_load(case, root, self.keeper)
        finally:
            shutil.rmtree(root)


def _hung(case: Case) -> None:
    print(f"case {case.seed} hangs: {case}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(3)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status: 1 where something was wrong, 3 where a case hung."""
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, help="number of the first case; without one, any")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this case, and no other")
    parser.add_argument("--times", type=int, default=1, help="how often to replay it")
    parser.add_argument("--fuzz", action="store_true", help="the properties of the tests instead, on many more examples")
    parser.add_argument("--json", type=Path, help="write the report there")
    given = parser.parse_args(arguments)
    first = given.replay if given.replay is not None else given.seed
    first = random.SystemRandom().randrange(1 << 40) if first is None else first
    if given.fuzz:
        return _report(fuzz(given.minutes, first), given.json)
    deadline = time.monotonic() + 60 * given.minutes
    with Soak(first) as soak:
        for number in count(first) if given.replay is None else [given.replay] * given.times:
            if time.monotonic() >= deadline or (given.cases is not None and number >= first + given.cases):
                break
            soak.run(number)
        found = soak.summary()
    return _report(found, given.json)


def _report(found: dict[str, Any], path: Path | None) -> int:
    if path is not None:
        path.write_text(json.dumps(found, indent=1))
    print(as_table(found))
    return 1 if found["failures"] or found.get("left_in_shared_memory") else 0


if __name__ == "__main__":
    sys.exit(main())
