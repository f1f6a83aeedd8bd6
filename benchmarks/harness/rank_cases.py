"""The cases of `scripts/bench ranks`: processes of one node that load one checkpoint at once.

Ranks that load together have each byte read once; against them stand as many loads that know nothing of each other, and Run:ai's
distributed mode over Gloo.
"""

from __future__ import annotations

from harness.cases import Case, Goal, Server, Way

_RANKS = 4
_EIGHTH = {"part": 3, "of": 8}
_GROUP: dict[str, object] = {"group": True}
_SPANS = {"group": True, "arguments": {"partition": "spans"}}
_FILES = {"group": True, "arguments": {"partition": "files"}}
_OURS = Way("headrace", "ours:ranks", "headrace", settings=_GROUP)
_ALONE = Way("headrace, each for itself", "ours:ranks", "headrace")
_BY_CHUNKS = Way("headrace, by chunks", "ours:ranks", "headrace", settings={"group": True, "arguments": {"partition": "chunks"}})
_POLICIES = (
    Way("headrace, by spans", "ours:ranks", "headrace", settings=_SPANS),
    Way("headrace, by files", "ours:ranks", "headrace", settings=_FILES),
)


def _runai(name: str, **variables: str) -> Way:
    environment = {f"RUNAI_STREAMER_{key.upper()}": value for key, value in {"dist": "1", **variables}.items()}
    return Way(
        name,
        "peers:runai_distributed",
        "peer",
        settings={"owned": True},
        environment=environment,
        here=False,
        note="Gloo, forced on; whole tensors are broadcast",
    )


_RUNAI = (_runai("Run:ai distributed"), _runai("Run:ai distributed, buffered", fs_strategy="sync_buffered"))
_READ_ONCE = Goal("each byte read once, by headrace's count", "read_share", at_most=1.001)
_AGAINST_RUNAI = (
    Goal("2 × Run:ai distributed", "speed", at_least=2.0, against=("Run:ai*",)),
    Goal("no more memory than Run:ai distributed", "memory", at_most=1.0, against=("Run:ai*",)),
)


def _full(
    name: str,
    title: str,
    *,
    cold: bool,
    server: Server = "",
    goals: tuple[Goal, ...],
    runai: tuple[Way, ...],
    ways: tuple[Way, ...] = (_OURS, *_POLICIES, _ALONE),
) -> Case:
    return Case(
        name,
        f"{_RANKS} ranks, the full model each, {title}, streamed",
        "shards",
        "stream",
        cold,
        (*ways, *runai),
        (*goals, *_AGAINST_RUNAI),
        server=server,
        ranks=_RANKS,
    )


def _slice(name: str, title: str, dim: int, *goals: Goal) -> Case:
    return Case(
        name,
        f"an eighth of every tensor of an object at S3, {title}, kept",
        "object",
        "load",
        False,
        (
            Way("headrace", "ours:ranks", "headrace", settings={**_EIGHTH, "rules": {"*": dim}}),
            Way("headrace, whole tensors", "ours:ranks", "headrace"),
        ),
        goals,
        server="s3-counted",
        ranks=1,
    )


CASES = (
    _full(
        "cold_full",
        "from a cold disk",
        cold=True,
        goals=(_READ_ONCE, Goal("1.00 × the model from the disk, and headers", "storage_share", at_most=1.01)),
        runai=_RUNAI,
    ),
    _full(
        "s3_full",
        "from S3 over HTTP",
        cold=False,
        server="s3-counted",
        goals=(_READ_ONCE, Goal("1.00 × the model from the server, headers apart", "storage_share", at_most=1.001)),
        runai=_RUNAI[:1],
    ),
    Case(
        "cold_full_8",
        "8 ranks, the full model each, from a cold disk, streamed",
        "shards",
        "stream",
        True,
        (_OURS, _ALONE),
        (_READ_ONCE, Goal("1.00 × the model from the disk, and headers", "storage_share", at_most=1.01)),
        ranks=8,
    ),
    _full(
        "warm_full",
        "cached: each takes it from memory, unless it is said who reads what",
        cold=False,
        goals=(Goal("as quick as reading for each other", "speed", at_least=1.0, against=("headrace, by*",)),),
        runai=_RUNAI,
        ways=(_OURS, _BY_CHUNKS, *_POLICIES, _ALONE),
    ),
    Case(
        "cold_slices",
        f"{_RANKS} ranks, tensor-parallel slices (rows and columns), from a cold disk, kept",
        "shards",
        "load",
        True,
        (
            Way("headrace", "ours:ranks", "headrace", settings={"group": True, "rules": "usual"}),
            Way("headrace, each for itself", "ours:ranks", "headrace", settings={"rules": "usual"}),
        ),
        (
            Goal("1.02 × the model read per node, by headrace's count", "read_share", at_most=1.02),
            Goal("1.02 × the model per node from the disk", "storage_share", at_most=1.02),
            Goal("a rank's memory: its slice, the rings, 64 MiB", "over_slice_mib", at_most=64),
        ),
        ranks=_RANKS,
    ),
    Case(
        "warm_devices",
        f"{_RANKS} ranks with simulated devices, cached, the ring used in place",
        "llama",
        "stream",
        False,
        (
            Way("headrace", "ours:ranks", "headrace", settings={"group": True, "simulated": True}),
            Way(_ALONE.name, "ours:ranks", "headrace", settings={"simulated": True}),
        ),
        (_READ_ONCE, Goal("0.4 × the CPU of independent loads", "cpu", at_most=0.4, against=(_ALONE.name,))),
        ranks=_RANKS,
    ),
    _slice(
        "s3_slice_rows",
        "by rows",
        0,
        Goal("1.05 × the slice received", "slice_share", at_most=1.05),
    ),
    _slice(
        "s3_slice_columns",
        "by columns",
        1,
        Goal("what the plan says received", "stated_share", at_most=1.01),
    ),
)

QUICK_SETS = {"object": "short-object", "shards": "short-shards", "llama": "short"}
