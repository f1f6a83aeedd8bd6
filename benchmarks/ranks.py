"""Ranks of one node that load a checkpoint together: headrace against as many independent loads and Run:ai's distributed mode."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import chart
from harness.command import Benchmark
from harness.rank_cases import CASES, QUICK_SETS


def _draw(data: Mapping[str, Any], out: Path) -> list[Path]:
    title = "headrace, ranks of one node to host memory: all ranks together"
    return chart.draw(data, out / "ranks.png", title, cpu=True, share=True)


if __name__ == "__main__":
    benchmark = Benchmark(name="ranks", about=__doc__ or "", cases=CASES, draw=_draw, quick_sets=QUICK_SETS, quick_peers=True)
    sys.exit(benchmark.main())
