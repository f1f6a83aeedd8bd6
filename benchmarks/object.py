"""Object stores on loopback to host memory: headrace against a bare http.client loop and other clients."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import chart, curve
from harness.command import Benchmark
from harness.object_cases import CASES, CURVE, ON_REQUEST, QUICK_SETS


def _draw(data: Mapping[str, Any], out: Path) -> list[Path]:
    bars = chart.draw(data, out / "object.png", "headrace, object stores on loopback to host memory", cpu=True)
    return [*bars, *curve.draw(data, out / "object-tls.png", "headrace, S3 over TLS on loopback", CURVE)]


if __name__ == "__main__":
    benchmark = Benchmark(
        name="object",
        about=__doc__ or "",
        cases=CASES,
        draw=_draw,
        on_request=ON_REQUEST,
        quick_sets=QUICK_SETS,
        quick_peers=True,
    )
    sys.exit(benchmark.main())
