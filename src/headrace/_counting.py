"""What a load counts, from the start on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from headrace._integrity import VerifiedSource
from headrace._plan import Plan
from headrace._progress import Progress
from headrace.sources.base import ByteSource, is_remote

log = logging.getLogger("headrace")

# Fields of a snapshot, and what sources call them.
_TRAFFIC = {
    "requests": "requests",
    "retried": "failed",
    "throttled": "throttled",
    "hedged": "hedges",
    "hedged_nbytes": "hedged_nbytes",
    "received_nbytes": "received_nbytes",
}


def new_progress(plan: Plan, degraded: list[str], sources: Sequence[ByteSource], *, opened_here: bool) -> Progress:
    """Counters at 0, and a warning for every fallback that is known by now. `opened_here` as of `Request.engine`."""
    for fallback in degraded:
        log.warning("%s", fallback)
    verified = [source for source in sources if isinstance(source, VerifiedSource)]
    return Progress(
        degraded=degraded,
        count_verified=lambda: sum(source.verified_nbytes for source in verified),
        total_nbytes=plan.read_nbytes,
        surplus_nbytes=plan.surplus_nbytes,
        total_tensors=len(plan.tensors),
        concurrency=plan.limits.concurrency,
        memory_limit=plan.limits.memory_limit,
        device=plan.device,
        node_share=str(plan.limits.node or ""),
        routes=tuple((route.url, route.route, route.reason) for route in plan.routes),
        left_alone=plan.left_alone,
        count_traffic=_traffic_counter(sources, opened_here=opened_here),
    )


def _traffic_counter(sources: Sequence[ByteSource], *, opened_here: bool) -> Callable[[], Mapping[str, int]]:
    """Counts what a load asks of the network; of sources that were open before, what they have asked for since."""
    remote = [source for source in sources if is_remote(source)]

    def now() -> dict[str, int]:
        counts = [cast(Any, source).traffic for source in remote]
        return {ours: sum(getattr(count, theirs) for count in counts) for ours, theirs in _TRAFFIC.items()}

    before = dict.fromkeys(_TRAFFIC, 0) if opened_here else now()
    return lambda: {name: count - before[name] for name, count in now().items()}
