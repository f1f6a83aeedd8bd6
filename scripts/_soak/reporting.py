"""What a soak has found, as JSON and as a table."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _soak.cases import MIB, Case
from _soak.loading import Result

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Report:
    """Adds up cases.

    Attributes:
        failures: the number of each case that did not end as it may, and what was wrong. With `--replay` it is run again.
        resident: MiB in RAM after each case.
    """

    seed: int
    began: str
    cases: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    tempers: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    tensors: int = 0
    nbytes: int = 0

    def add(self, case: Case, result: Result, resident_nbytes: int) -> None:
        """Count a case that ended as it may."""
        self._count(case, resident_nbytes)
        self.outcomes[result.outcome] += 1
        self.errors.update(result.errors)
        self.injected.update(result.injected)
        self.tensors += result.tensors
        self.nbytes += result.nbytes

    def add_failure(self, case: Case, what: str, resident_nbytes: int) -> None:
        """Count a case that did not."""
        self._count(case, resident_nbytes)
        self.outcomes["WRONG"] += 1
        self.failures.append({"seed": case.seed, "what": what, "case": str(case)})

    def _count(self, case: Case, resident_nbytes: int) -> None:
        self.cases[case.kind] += 1
        self.places[f"{case.place} to {case.device}"] += 1
        self.tempers[case.temper] += 1
        self.resident.append(round(resident_nbytes / MIB, 1))

    def trend(self) -> dict[str, float]:
        """Memory after the first tenth, when everything has been loaded once, and at the end: medians of fifths, in MiB."""
        warm = self.resident[len(self.resident) // 10 :]
        fifth = max(1, len(warm) // 5)
        if not warm:
            return {}
        first, last = statistics.median(warm[:fifth]), statistics.median(warm[-fifth:])
        slope = statistics.linear_regression(range(len(warm)), warm).slope if len(warm) > 1 else 0.0
        return {"first_mib": first, "last_mib": last, "mib_per_1000_loads": round(1000 * slope, 2)}

    def as_json(self, **more: Any) -> dict[str, Any]:
        """All of it."""
        return {
            "tree": tree(), "python": platform.python_version(), "began": self.began, "seed": self.seed,
            "loads": self.cases.total(), "by_kind": dict(self.cases), "by_place": dict(self.places.most_common()),
            "by_temper": dict(self.tempers.most_common()), "tensors": self.tensors, "checked_mib": round(self.nbytes / MIB),
            "injected": dict(self.injected.most_common()), "outcomes": dict(self.outcomes.most_common()),
            "errors": dict(self.errors.most_common()), "memory": self.trend(), **more, "failures": self.failures,
        }  # fmt: skip


def as_table(found: dict[str, Any]) -> str:
    """The report for a person."""
    lines = []
    for name, value in found.items():
        if name == "failures":
            continue
        if isinstance(value, dict):
            lines.append(name.replace("_", " "))
            lines += [f"  {key:32} {count:>10}" for key, count in value.items()]
        else:
            lines.append(f"{name.replace('_', ' '):34} {value:>10}")
    for failure in found["failures"]:
        again = failure.get("command", f"scripts/soak --replay {failure['seed']}")
        lines.append(f"WRONG: {again}\n{failure['what'].strip().splitlines()[-1][:400]}")
    return "\n".join(lines)


def tree() -> str:
    """The commit that was run, with a + where files are changed."""
    told = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=_ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or "unknown"
