"""Every benchmark, one after another, and one page of what came out."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.ending import ends_its_children
from harness.page import page

HERE = Path(__file__).resolve().parent
_RESULTS = HERE.parent / ".cache" / "bench-results"
_ALL = ("local", "object", "ranks", "device")


def main() -> int:
    """Run what is wanted, and write the page. Returns 1 where a benchmark did not run."""
    wanted = _arguments()
    failed = []
    for name in [] if wanted.render else wanted.only.split(","):
        more = ["--simulated"] if name == "device" and not _has_gpu() else []
        quick = ["--quick"] if wanted.quick else []
        command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(wanted.out), *more, *quick]
        with ends_its_children():
            if subprocess.run(command, check=False).returncode:
                failed.append(name)
    found = wanted.render or [wanted.out / f"{name}.json" for name in (*_ALL, "device-simulated")]
    runs: list[dict[str, Any]] = [json.loads(path.read_text()) for path in found if path.exists()]
    wanted.page.parent.mkdir(parents=True, exist_ok=True)
    wanted.page.write_text(page(runs))
    print(f"{len(runs)} runs on {wanted.page}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed or not runs else 0


def _has_gpu() -> bool:
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench all", description=__doc__)
    parser.add_argument("--only", default=",".join(_ALL), metavar="NAMES", help="which benchmarks (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="smoke runs of all: minutes; without it, hours")
    parser.add_argument("--out", type=Path, default=_RESULTS, metavar="DIR", help="where JSON and charts go, and are looked for")
    parser.add_argument("--page", type=Path, default=_RESULTS / "results.md", metavar="FILE", help="the page")
    parser.add_argument("--render", type=Path, nargs="+", metavar="JSON", help="measure nothing; the page of these results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
