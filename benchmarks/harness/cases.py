"""Cases, ways and goals as plain data. What is measured, against what, and what has to be reached; nothing is run here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["headrace", "floor", "peer"]
Metric = Literal[
    "speed",
    "cpu",
    "overhead_us",
    "peak_mib",
    "over_limit_mib",
    "ideal",
    "memory",
    "over_slice_mib",
    "read_share",
    "storage_share",
    "slice_share",
    "stated_share",
]
Server = Literal["", "s3", "s3-tls", "s3-counted", "gcs", "azure"]


@dataclass(frozen=True, slots=True)
class Way:
    """One implementation of a case.

    Attributes:
        name: shown, and unique in its case.
        call: `module:function` of harness.
        role: what it is.
        settings: for the function. "headrace" stands for the reads in flight that headrace chose; `spin_share` becomes `spin_s`,
            a share of the idle wall time; `folder`, where files go, "memory" (tmpfs) or "disk", becomes the path of an empty one.
        environment: variables to set for the process.
        kind: where it differs from the case's.
        pick: of all ways with the same pick, only the quickest is measured, under this name.
        here: runs in the project's own environment, not in the peers'.
        note: said under the table.
        unmeasured: why it is listed, and not run.
    """

    name: str
    call: str
    role: Role
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None
    pick: str | None = None
    here: bool = True
    note: str = ""
    unmeasured: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound that has to hold.

    Attributes:
        text: the demand in words.
        metric: 'speed': median seconds of `against` over those of `way`. 'cpu': CPU seconds of `way` over those of `against`.
            'overhead_us': microseconds per tensor that `way` takes longer than `against`. 'peak_mib': growth of peak RSS;
            'over_limit_mib': what of it lies over the memory limit that headrace chose.
            'ideal': the longer of reading and spinning, over what both took together.
            Of ranks, in the worst round: 'memory': median peak RSS of `way` over that of `against`, of the rank that has most.
            'over_slice_mib': peak RSS that lies over a rank's tensors and the rings it maps. 'read_share' and 'storage_share':
            bytes read by headrace's own count, and by that of the server or the kernel, over those of the model's tensors.
            'slice_share': bytes that the server sent, over those of the tensors handed out. 'stated_share': the same without
            the opening of files, over what the plan said.
        way: whose figure.
        against: names or globs; the quickest of them counts.
        at_least, at_most: the bound.
    """

    text: str
    metric: Metric
    at_least: float | None = None
    at_most: float | None = None
    way: str = "headrace"
    against: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table.

    Attributes:
        server: what the checkpoint is read from, "" being local files.
        connections: as many for each way, where there is a server.
        ranks: processes that load at once; 0: one that is no rank.
    """

    name: str
    title: str
    checkpoint: str
    kind: str
    cold: bool
    ways: tuple[Way, ...]
    goals: tuple[Goal, ...] = ()
    server: Server = ""
    connections: int = 0
    ranks: int = 0
