"""Local files to host memory: headrace against bare loops and other loaders."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import chart
from harness.command import Benchmark
from harness.local_cases import CASES, ON_REQUEST, QUICK


def _draw(data: Mapping[str, Any], out: Path) -> list[Path]:
    return chart.draw(data, out / "local.png", "headrace, local files to host memory", leave_out="rss_")


if __name__ == "__main__":
    benchmark = Benchmark(name="local", about=__doc__ or "", cases=CASES, draw=_draw, on_request=ON_REQUEST, quick=QUICK)
    sys.exit(benchmark.main())
