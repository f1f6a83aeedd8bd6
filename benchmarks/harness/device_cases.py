"""The cases of `scripts/bench device` as plain data: what is copied to a GPU, how, and what has to be reached.

A figure on a GPU is source bytes over time. A simulated one has no speed: there it is the share of the simulated bus that was in
use, and what was copied. Goals of the one say nothing of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FLOOR = "bare copies, page-locked"


@dataclass(frozen=True, slots=True)
class DeviceWay:
    """One way to the device.

    Attributes:
        name: shown, and unique in its case.
        call: a function of `device_child`.
        role: what it is.
        arguments: for the function.
        on_gpu_only: why it is not run on a simulated one; empty where it is.
    """

    name: str
    call: str
    role: Literal["headrace", "floor", "peer"]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    on_gpu_only: str = ""


@dataclass(frozen=True, slots=True)
class DeviceGoal:
    """A bound. On a GPU `metric` is 'speed': source bytes per second of `way` over those of `against`. On a simulated one it is
    'bus': the share of the bus that was in use; 'sent': bytes that crossed it over source bytes; 'pageable': of them not
    page-locked. On both, 'python': microseconds of CPU a chunk; 'reads': bytes per second of `way` over those of `against`, where
    nothing is copied to a device."""

    text: str
    metric: Literal["speed", "bus", "sent", "pageable", "python", "reads"]
    way: str
    against: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def counts(self, *, simulated: bool) -> bool:
        """Whether it is one for such a device."""
        return self.metric in ("python", "reads") or (self.metric != "speed") == simulated


@dataclass(frozen=True, slots=True)
class DeviceCase:
    """A row of the table."""

    name: str
    title: str
    checkpoint: str
    ways: tuple[DeviceWay, ...]
    goals: tuple[DeviceGoal, ...]

    @property
    def is_of(self) -> str:
        """'python' or 'reads' where its ways know no device, but a runtime that does nothing; else 'device'."""
        return next((goal.metric for goal in self.goals if goal.metric in ("python", "reads")), "device")


_BARE = DeviceWay(FLOOR, "bare", "floor", {"pinned": True})
_BARE_PAGEABLE = DeviceWay("bare copies, pageable", "bare", "peer", {"pinned": False})
_OURS = DeviceWay("headrace", "ours", "headrace", {"pin": "require"})
_HELD = DeviceWay("headrace, held in page-locked memory", "held", "headrace")
_PAGEABLE = DeviceWay('headrace, pin="off"', "ours", "headrace", {"pin": "off"})
_FUSED = DeviceWay("headrace, cast on the way", "ours", "headrace", {"pin": "require", "dtype": "bfloat16", "cast_at": "host"})
_ON_DEVICE = DeviceWay(
    "headrace, cast on the device", "ours", "headrace", {"pin": "require", "dtype": "bfloat16", "cast_at": "device"}
)
_TORCHS = "a copy of torch's own, which is not simulated"
_BLOCKING = DeviceWay("torch, converting copy_ out of page-locked memory", "converting", "peer", {}, _TORCHS)
_LATE = DeviceWay("torch, the same with non_blocking=True", "converting", "peer", {"non_blocking": True}, _TORCHS)

CASES = (
    DeviceCase(
        "pinned",
        "page-locked against pageable memory, cached BF16 files",
        "shards",
        (_OURS, _HELD, _PAGEABLE, _BARE, _BARE_PAGEABLE),
        (
            DeviceGoal("0.95 × bare copies", "speed", _OURS.name, FLOOR, at_least=0.95),
            DeviceGoal("page-locked is worth it", "speed", _OURS.name, _PAGEABLE.name, at_least=1.0),
            DeviceGoal("0.95 of the bus in use", "bus", _OURS.name, at_least=0.95),
            DeviceGoal("no pageable byte", "pageable", _OURS.name, at_most=0),
            DeviceGoal("no pageable byte, held", "pageable", _HELD.name, at_most=0),
        ),
    ),
    DeviceCase(
        "cast",
        "F32 files, cached, to BF16: cast on the way against copies that convert",
        "f32",
        (_FUSED, _ON_DEVICE, _BARE, _BLOCKING, _LATE),
        (
            DeviceGoal("1.8 × bare copies, in source bytes", "speed", _FUSED.name, FLOOR, at_least=1.8),
            DeviceGoal("quicker than torch's converting copy_", "speed", _ON_DEVICE.name, _BLOCKING.name, at_least=1.0),
            DeviceGoal("half of the bytes cross the bus", "sent", _FUSED.name, at_most=0.51),
            DeviceGoal("no pageable byte", "pageable", _FUSED.name, at_most=0),
        ),
    ),
)

_COPYING = "slot taken, copy queued, event recorded"
_WHOLE = "all threads of a load that reads nothing, plan included"

_PYTHON = DeviceCase(
    "python",
    "CPU time of a chunk in microseconds, over a runtime that does nothing; cold: 8 MiB are copied before each",
    "shards",
    (
        DeviceWay(_COPYING, "chunk", "headrace", {"of": "copying", "cold": False}),
        DeviceWay("its three calls alone", "chunk", "floor", {"of": "calls", "cold": False}),
        DeviceWay(f"{_COPYING}, cold", "chunk", "headrace", {"of": "copying", "cold": True}),
        DeviceWay("its three calls alone, cold", "chunk", "floor", {"of": "calls", "cold": True}),
        DeviceWay(_WHOLE, "chunk", "headrace", {"of": "whole"}),
    ),
    (
        DeviceGoal("12 µs a chunk to its copy, calls included", "python", _COPYING, at_most=12),
        DeviceGoal("150 µs a chunk in all: 55 GB/s are 6,500 chunks a second", "python", _WHOLE, at_most=150),
    ),
)

_READS = "bare reads into memory that is there"
_TO_NOWHERE = "headrace, to a device that takes no time"

_READING = DeviceCase(
    "reading",
    "cached files to a device that takes no time, against bare reads by as many threads: what the pipeline makes of its readers",
    "shards",
    (
        DeviceWay(_TO_NOWHERE, "to_nowhere", "headrace"),
        DeviceWay(f"{_TO_NOWHERE}, its ring kept", "to_nowhere", "headrace", {"keep_staging": "on"}),
        DeviceWay(_READS, "reads", "floor"),
    ),
    (DeviceGoal("0.95 × bare reads", "reads", f"{_TO_NOWHERE}, its ring kept", _READS, at_least=0.95),),
)

_LIBRARIES = {
    "safetensors": "safetensors, safe_open on the device",
    "runai": "Run:ai, on the device",
    "fastsafetensors": "fastsafetensors, without GDS",
    "instanttensor": "InstantTensor",
}
_BESIDE_A_GPU = "a library that needs a GPU"

ON_REQUEST = (
    _PYTHON,
    _READING,
    DeviceCase(
        "peers",
        "a cached Llama of BF16 files, streamed, each tensor dropped at once",
        "llama",
        (
            _OURS,
            _BARE,
            *(DeviceWay(title, "peer", "peer", {"library": name}, _BESIDE_A_GPU) for name, title in _LIBRARIES.items()),
        ),
        (DeviceGoal("0.95 × bare copies", "speed", _OURS.name, FLOOR, at_least=0.95),),
    ),
    DeviceCase(
        "sweep",
        "slots of the ring and readers, the same files",
        "llama",
        tuple(
            DeviceWay(
                f"{chunk} MiB, {readers} readers",
                "tuned",
                "headrace",
                {"chunk_nbytes": chunk << 20, "concurrency": readers},
            )
            for chunk in (4, 8, 16)
            for readers in (8, 12, 16)
        ),
        (),
    ),
)
"""Cases that are run only where they are asked for by name."""

QUICK_SETS = {"shards": "short-shards", "f32": "tiny", "llama": "short-shards"}
