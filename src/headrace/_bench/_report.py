"""PURE: the figures of a bench as values, and as plain data for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace._progress import Snapshot


@dataclass(frozen=True, slots=True)
class Figure:
    """A rate that was measured, or why it was not.

    Attributes:
        kind: 'disk', 'cache', 'network', 'touch', 'copy', 'cast', 'pinned' or 'pageable'.
        what: in words.
        nbytes, seconds: what was moved, in which time; of a cast, bytes before it.
        threads: how many moved it.
        note: what else there is to know.
        skipped: why there is no figure.
    """

    kind: str
    what: str
    nbytes: int = 0
    seconds: float = 0.0
    threads: int = 0
    note: str = ""
    skipped: str = ""

    @property
    def rate(self) -> float:
        """Bytes per second; 0 where nothing was measured."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """One load, by headrace or another loader.

    Attributes:
        name: how, in words.
        nbytes, seconds: what was read, in which time, opening included.
        ceiling: bytes per second that the parts allow; 0 where that is not known.
        stats: of headrace's.
        cpus: CPUs that the process used on average.
        stages: seconds of each stage of the trace, summed over the readers.
        cut_short: whether the time was up before its end.
        skipped: why it did not run.
    """

    name: str
    nbytes: int = 0
    seconds: float = 0.0
    ceiling: float = 0.0
    stats: Snapshot | None = None
    cpus: float = 0.0
    stages: Mapping[str, float] = field(default_factory=dict)
    cut_short: bool = False
    skipped: str = ""

    @property
    def rate(self) -> float:
        """Bytes per second; 0 where it did not run."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def share(self) -> float:
        """Of the ceiling; 0 where that is not known."""
        return self.rate / self.ceiling if self.ceiling else 0.0

    @property
    def share_text(self) -> str:
        """'57%'. What is far above the ceiling was measured in a quieter moment than the parts were."""
        return f"{self.share:.0%}" if self.share <= 1.2 else "over 100%"


@dataclass(frozen=True, slots=True)
class Report:
    """All that a bench found.

    Attributes:
        url: of the checkpoint, without what may be secret.
        machine: CPUs, memory and system, in words; `cpus` of them may be used.
        total_nbytes, used_nbytes: bytes that a whole load reads, and how many of them the bench used.
        is_remote: whether the source is behind a network.
        figures, runs, rivals: in the order in which they were measured.
        timeline: events of the first run, as of a trace file.
        bottleneck: one word; `verdict`: a paragraph on it, and what would help.
    """

    url: str
    machine: str
    cpus: int
    total_nbytes: int
    used_nbytes: int
    is_remote: bool
    figures: Sequence[Figure]
    runs: Sequence[Run]
    rivals: Sequence[Run] = ()
    timeline: Sequence[Mapping[str, Any]] = ()
    bottleneck: str = ""
    verdict: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, the timeline left out. Names are stable; new ones may be added. See docs/bench.md."""
        return {
            "url": self.url,
            "machine": self.machine,
            "cpus": self.cpus,
            "total_nbytes": self.total_nbytes,
            "used_nbytes": self.used_nbytes,
            "is_remote": self.is_remote,
            "figures": [{**asdict(figure), "rate": figure.rate} for figure in self.figures],
            "runs": [_run_dict(run) for run in self.runs],
            "rivals": [_run_dict(run) for run in self.rivals],
            "bottleneck": self.bottleneck,
            "verdict": self.verdict,
        }


def as_trace(report: Report) -> dict[str, Any]:
    """The timeline as the content of a trace file."""
    return {"traceEvents": list(report.timeline), "displayTimeUnit": "ms"}


def best(figures: Sequence[Figure], *kinds: str) -> Figure | None:
    """The quickest figure of these kinds; None where there is none."""
    found = [figure for figure in figures if figure.kind in kinds and figure.rate]
    return max(found, key=lambda figure: figure.rate, default=None)


def _run_dict(run: Run) -> dict[str, Any]:
    stats = run.stats.as_dict() if run.stats is not None else None
    return {
        "name": run.name,
        "nbytes": run.nbytes,
        "seconds": run.seconds,
        "rate": run.rate,
        "ceiling": run.ceiling,
        "cpus": run.cpus,
        "stages": dict(run.stages),
        "cut_short": run.cut_short,
        "skipped": run.skipped,
        "stats": stats,
    }
