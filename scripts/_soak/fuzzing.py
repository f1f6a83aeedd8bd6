"""The properties of the tests on many more examples, with another seed each time, until the time is over."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

from _soak.reporting import tree

_ROOT = Path(__file__).resolve().parents[2]
FILES = [
    "test_fuzz.py", "test_header.py", "test_plan.py", "test_slices.py", "test_partition.py", "test_blocks.py",
    "test_integrity.py", "test_source_http.py", "test_request_costs.py", "test_source_gcs.py", "test_source_azure.py",
    "test_node_budgets.py",
]  # fmt: skip
_COUNTED = re.compile(r"(\d+) passing(?: examples)?, (\d+) failing(?: examples)?, (?:and )?(\d+) invalid")


def fuzz(minutes: float, seed: int) -> dict[str, Any]:
    """Run the properties of one file after the other, in any order, round and round. What a failure says is printed and kept."""
    counts, failures, rounds = Counter[str](), list[dict[str, Any]](), 0
    deadline, draw = time.monotonic() + 60 * minutes, random.Random(seed)
    for name in cycle(draw.sample(FILES, len(FILES))):
        if rounds and time.monotonic() >= deadline:
            break
        chosen, rounds = draw.getrandbits(32), rounds + 1
        command = _command(name, chosen)
        ended = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        counts.update(count_examples(ended.stdout))
        if ended.returncode:
            print(ended.stdout[-8000:], file=sys.stderr, flush=True)
            failures.append({"seed": chosen, "what": _last_lines(ended.stdout), "command": " ".join(command)})
    return {
        "tree": tree(),
        "seed": seed,
        "runs": rounds,
        "examples": counts.total(),
        "by_property": dict(counts),
        "failures": failures,
    }


def count_examples(told: str) -> Counter[str]:
    """Examples of each property that were tried and were no waste, out of what hypothesis tells pytest."""
    counts, name = Counter[str](), ""
    for line in told.splitlines():
        if line.startswith("tests/") and line.endswith(":"):
            name = line.rpartition("::")[2].rstrip(":").partition("[")[0]
        elif found := _COUNTED.search(line):
            counts[name] += int(found[1]) + int(found[2])
    return counts


def _command(name: str, seed: int) -> list[str]:
    told = ["--hypothesis-profile=soak", f"--hypothesis-seed={seed}", "--hypothesis-show-statistics", "--timeout=1200"]
    return [sys.executable, "-m", "pytest", f"tests/{name}", "-m", "hypothesis", "-q", "-p", "no:cacheprovider", *told]


def _last_lines(told: str) -> str:
    return "\n".join(line for line in told.splitlines() if line.startswith(("FAILED", "ERROR"))) or told[-500:]
