"""PURE: what one load is, drawn from its number. The same number is the same case, on every machine.

A case is drawn whole before anything is done. What cannot go together (a mapped file that is truncated is SIGBUS; flipped bits
that nobody verifies) is not drawn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from _soak.troubles import CALLS, FILES, NEEDS_VERIFYING, RANKS, READS, SERVER

KIB, MIB = 1 << 10, 1 << 20
DTYPES = ["F32", "F16", "BF16", "F64", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F6_E2M3"]
TEMPERS = [  # how the caller behaves, and how often
    ("takes all", 24), ("loads", 14), ("keeps all", 8), ("leaves", 8), ("raises", 6), ("abandons", 8), ("abandons a cycle", 6),
    ("closes elsewhere", 6), ("never starts", 3), ("interrupts", 5), ("holds", 6), ("reads one by one", 4), ("two at once", 6),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the checkpoint: dtype of the format, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """A file; its data begin at an offset that is `data_start` modulo 8."""

    name: str
    tensors: tuple[Tensor, ...]
    data_start: int


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that goes wrong.

    Attributes:
        kind: its name in the tables.
        after: how many requests, reads, calls or tensors pass before.
        times: how often; -1: from then on always.
        seed: of what is left to chance about it.
    """

    kind: str
    after: int
    times: int
    seed: int


@dataclass(frozen=True, slots=True)
class Case:
    """One load.

    Attributes:
        kind: "load", "pull" or "group".
        place: where the checkpoint lies: "file", "shm", "memory", "s3" or "http".
        temper: how the caller behaves.
        step: after how many tensors it does so.
        device: "cpu", "gpu" (a simulated one) or "shared-cpu".
        arguments, options: of `headrace.stream`.
        collects: the garbage collector runs all the time.
        ranks: how many, of a group.
    """

    seed: int
    kind: str
    shards: tuple[Shard, ...]
    place: str
    temper: str
    step: int
    device: str
    troubles: tuple[Trouble, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    collects: bool = False
    keeps: float = 0.0
    ranks: int = 1

    @property
    def verifies(self) -> bool:
        """Whether bytes are checked before they are handed out."""
        return bool(self.arguments.get("verify"))


def draw_case(seed: int) -> Case:
    """The case of this number."""
    draw = random.Random(seed)
    kind = draw.choices(["load", "pull", "group"], [88, 7, 5])[0]
    shards = _draw_shards(draw)
    if kind == "group":
        return _draw_group(draw, seed, shards)
    place = draw.choices(["file", "shm", "memory", "s3", "http"], [20, 15, 10, 35, 20])[0]
    if kind == "pull":
        place = draw.choice(["file", "s3", "http"])
        troubles = _draw_troubles(draw, place, False, 0.6) if place != "file" else ()
        return Case(seed, kind, shards, place, "pulls", 0, "cpu", troubles)
    device = draw.choices(["cpu", "gpu"], [70, 30])[0]
    temper = draw.choices([name for name, _ in TEMPERS], [weight for _, weight in TEMPERS])[0]
    arguments, options = _draw_arguments(draw, shards, temper, device), _draw_options(draw, place, device)
    troubles = _draw_troubles(draw, place, bool(arguments.get("verify")), 0.7)
    if place in ("file", "shm") and draw.random() < 0.35 and temper not in ("holds", "two at once", "loads"):
        troubles += (Trouble(draw.choice(list(FILES)), draw.randrange(12), 1, draw.getrandbits(32)),)
        options = {name: value for name, value in options.items() if name not in ("mmap", "in_place")}
    if device == "gpu" and draw.random() < 0.4:
        troubles += (Trouble(draw.choice(list(CALLS)), draw.randrange(6), draw.choice([1, 1, 3, -1]), draw.getrandbits(32)),)
    if temper == "reads one by one":  # to host memory, whose page-locking needs a GPU of torch's
        options.pop("pin", None)
    if "ownership" in arguments:  # of which a view of a file knows nothing
        options.pop("mmap", None)
    if any(trouble.kind in SERVER and SERVER[trouble.kind].brisk for trouble in troubles):
        options |= {"stall_timeout_s": 0.3, "deadline_s": 2.0}
    return Case(
        seed, kind, shards, place, temper, draw.randrange(12), device, troubles, arguments, options,
        collects=draw.random() < 0.1, keeps=draw.choice([0.0, 0.1, 0.5]),
    )  # fmt: skip


def _draw_shards(draw: random.Random) -> tuple[Shard, ...]:
    count, prefix = draw.choices([1, 2, 3, 5], [40, 30, 20, 10])[0], draw.choice(["", "model."])
    largest = draw.choice([4 * KIB, 64 * KIB, MIB, 3 * MIB])
    shards = []
    for index in range(count):
        name = "model.safetensors" if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"
        tensors = tuple(
            Tensor(f"{prefix}{index}.{number}.{draw.choice(['weight', 'bias', 'scale', 'table'])}", dtype, shape)
            for number in range(draw.choice([1, 3, 8, 20]))
            for dtype, shape in [_draw_tensor(draw, largest)]
        )
        shards.append(Shard(name, tensors, draw.randrange(8)))
    return tuple(shards)


def _draw_tensor(draw: random.Random, largest: int) -> tuple[str, tuple[int, ...]]:
    dtype = draw.choice(DTYPES)
    nbytes = draw.choice([0, draw.randrange(1, 4 * KIB), draw.randrange(1, largest), largest])
    count = max(1, nbytes // 4)
    if dtype.startswith("F6"):
        return dtype, (max(1, count // 4), 4)
    shape = draw.choice([(count,), (max(1, count // 64), 64), (draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 9))])
    return dtype, draw.choices([shape, (), (3, 0)], [90, 5, 5])[0]


def _draw_arguments(draw: random.Random, shards: tuple[Shard, ...], temper: str, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if draw.random() < 0.25:
        found["dtype"] = draw.choice(["bfloat16", "float32", "float16", {"*.weight": "bfloat16"}, {"*.bias": "float32"}])
    names = [tensor.name for shard in shards for tensor in shard.tensors]
    if draw.random() < 0.15:
        found["names"] = draw.sample(names, draw.randint(1, len(names)))
    if draw.random() < 0.2 and device == "cpu" and temper not in ("holds", "reads one by one"):
        found["into"] = draw.choice(["same", "other"])
    elif draw.random() < 0.3:
        found["slices"] = draw.getrandbits(32)
    if draw.random() < 0.3 and temper != "holds":
        found["ownership"] = draw.choice(["copied", "borrowed"] if temper in ("takes all", "leaves") else ["copied"])
    if draw.random() < 0.3:
        found["order"] = "file"
    if draw.random() < 0.3:
        found["verify"] = True
    return found


def _draw_options(draw: random.Random, place: str, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"attempts": draw.choice([2, 3, 5])}
    if draw.random() < 0.5:
        found["concurrency"] = draw.choice([1, 2, 3, 8, 32])
    if draw.random() < 0.6:
        found["memory_limit"] = draw.choice([0, 1, 64 * KIB, MIB, 8 * MIB, -1])
    if draw.random() < 0.3:
        found["network_chunk_nbytes"] = draw.choice([64 * KIB, 100_000, MIB])
    if place == "file" and draw.random() < 0.4:
        found["direct_io"] = draw.choice(["on", "off"])
    if place in ("file", "shm") and device == "cpu" and draw.random() < 0.2:
        found["mmap"] = "auto"
    if device == "gpu":
        found |= draw.choice([{}, {"pin": "off"}, {"pin": "require"}, {"cast_at": "host"}, {"cast_at": "device"}])
        found |= draw.choice([{}, {"in_place": "auto"}]) if place == "shm" else {}
    return found


def _draw_troubles(draw: random.Random, place: str, verifies: bool, chance: float) -> tuple[Trouble, ...]:
    if draw.random() > chance:
        return ()
    table = list(SERVER) if place in ("s3", "http") else list(READS) if place != "shm" else []
    table = [kind for kind in table if verifies or kind not in NEEDS_VERIFYING]
    if not table:
        return ()
    return tuple(
        Trouble(draw.choice(table), draw.choice([0, 1, 2, 5, 9]), draw.choice([1, 1, 1, 2, 4, -1]), draw.getrandbits(32))
        for _ in range(draw.choice([1, 1, 2, 3]))
    )


def _draw_group(draw: random.Random, seed: int, shards: tuple[Shard, ...]) -> Case:
    troubles = ()
    if draw.random() < 0.8:
        troubles = (Trouble(draw.choice(RANKS), draw.randrange(8), 1, draw.getrandbits(32)),)
    arguments: dict[str, Any] = {} if draw.random() < 0.7 else {"dtype": "bfloat16"}
    options: dict[str, Any] = {"partition": draw.choice(["spans", "chunks", "files"])}
    if draw.random() < 0.6:
        options["memory_limit"] = draw.choice([0, 64 * KIB, MIB])
    device = draw.choices(["cpu", "gpu", "shared-cpu"], [60, 20, 20])[0]
    ranks = draw.choice([2, 2, 3, 4])
    return Case(seed, "group", shards, "file", "takes all", 0, device, troubles, arguments, options, ranks=ranks)
