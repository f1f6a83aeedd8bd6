"""The cases of `scripts/bench local`: local files, tensors in host memory. Floors, peers and goals per case."""

from __future__ import annotations

from collections.abc import Mapping

from harness.cases import Case, Goal, Way

MIB, GIB = 1 << 20, 1 << 30
_LIMIT = 256 * MIB
_SAFETENSORS = ("safetensors*",)
_STRATEGIES = ("io_uring_direct", "sync_buffered", "io_uring_buffered")
_FEW_THREADS = 2
_OURS = Way("headrace", "ours:run", "headrace")


def _floor(name: str, function: str, note: str, **settings: object) -> Way:
    return Way(name, f"floors:{function}", "floor", settings={"threads": "headrace", **settings}, note=note)


_FLOOR_INTO = _floor("floor: into the same memory", "into_given", "bare preadv, 4 MiB at a time, into the same tensors")
_FLOOR_RECYCLED = _floor(
    "floor: recycled memory",
    "into_recycled",
    "bare preadv of every tensor, 4 MiB at a time, into one buffer per tensor size, present beforehand",
)
_FLOOR_CHUNKS = _floor(
    "floor: chunks", "chunks", "bare preadv of the files, 4 MiB at a time, into one buffer of 4 MiB per thread; no tensors"
)
_FLOOR_FRESH = _floor(
    "floor: fresh memory", "into_fresh", "bare preadv, 4 MiB at a time, into fresh huge pages that the reading thread populates"
)
_FLOORS_DIRECT = (
    _floor("floor: O_DIRECT", "chunks", "bare O_DIRECT preadv, 4 MiB at a time, as many threads as headrace", direct=True),
    Way(
        "floor: O_DIRECT, 2 threads",
        "floors:chunks",
        "floor",
        settings={"threads": 2, "direct": True},
        note="the same with two threads; the quicker of both counts",
    ),
)
_DIRECT = ("floor: O_DIRECT*",)


def _peer(
    name: str,
    function: str,
    *,
    pick: str | None = None,
    environment: dict[str, str] | None = None,
    note: str = "",
    **settings: object,
) -> Way:
    return Way(
        name,
        f"peers:{function}",
        "peer",
        settings=settings,
        environment=environment or {},
        pick=pick,
        here=False,
        note=note,
    )


def _runai(name: str, *, pick: str | None = None, owned: bool = True, **variables: object) -> Way:
    environment = {f"RUNAI_STREAMER_{key.upper()}": str(value) for key, value in variables.items()}
    return _peer(name if pick is None else _settings_text(variables), "runai", pick=pick, environment=environment, owned=owned)


def _settings_text(variables: Mapping[str, object]) -> str:
    said = [str(variables["fs_strategy"])]
    if "memory_limit" in variables:
        said.append(f"limit {int(str(variables['memory_limit'])) // MIB} MiB")
    if "fs_queue_depth" in variables:
        said.append(f"depth {variables['fs_queue_depth']}")
    return ", ".join(said)


def _runai_tuned(pick: str, *, owned: bool, limit: int, strategies: tuple[str, ...] = _STRATEGIES) -> tuple[Way, ...]:
    """Candidates for Run:ai's best: how it reads, how much it may hold, and (buffered) as few threads as there are CPUs here."""
    found = []
    for strategy in strategies:
        found.append(_runai("", pick=pick, owned=owned, fs_strategy=strategy))
        found.append(_runai("", pick=pick, owned=owned, fs_strategy=strategy, memory_limit=limit))
    if "sync_buffered" in strategies:
        found.append(
            _runai("", pick=pick, owned=owned, fs_strategy="sync_buffered", memory_limit=limit, fs_queue_depth=_FEW_THREADS)
        )
    return tuple(found)


_RUNAI = _runai("Run:ai default")
_RUNAI_DIRECT = (
    _runai("Run:ai io_uring_direct", fs_strategy="io_uring_direct"),
    *_runai_tuned("Run:ai io_uring_direct, best borrowed", owned=False, limit=GIB, strategies=("io_uring_direct",)),
)
_FAST_WARM = _peer("fastsafetensors", "fastsafetensors", environment={"FASTSAFETENSORS_ODIRECT": "0"}, note="nogds, buffered")
_FAST_COLD = _peer("fastsafetensors", "fastsafetensors", note="nogds, its default: O_DIRECT")
_LOAD_FILE = _peer("safetensors load_file + copy", "safetensors_load_file")
_LOAD_FILE_OWN = _peer("safetensors load_file + clone", "safetensors_load_file", clone=True)
_LOAD_FILE_CAST = _peer("safetensors load_file + to(bfloat16)", "safetensors_load_file", cast="bfloat16")
_LOAD_FILE_VIEWS = _peer("safetensors load_file, views", "safetensors_load_file", note="views of the mapping; reads nothing")
_SAFE_OPEN_PREAD = _peer("safetensors safe_open, pread", "safetensors_safe_open", backend="pread")
_INSTANT = _peer("instanttensor", "instanttensor", note="serves CUDA devices only")
_FLASHPACK = _peer(
    "flashpack",
    "flashpack",
    environment={"FLASHPACK_CPU_PARALLEL_READ": "1"},
    note="own format; parallel reads",
)
_TENSORIZER = _peer("tensorizer", "tensorizer", note="own format; 4 readers")


def _warm_peers(limit: int) -> tuple[Way, ...]:
    return (
        _RUNAI,
        *_runai_tuned("Run:ai best owned", owned=True, limit=limit),
        *_runai_tuned("Run:ai best borrowed", owned=False, limit=limit),
        _FAST_WARM,
    )


CASES = (
    Case(
        "warm_stream",
        "cached, streamed, dropped at once",
        "llama",
        "stream",
        False,
        (_OURS, _FLOOR_RECYCLED, _FLOOR_CHUNKS, *_warm_peers(GIB), _INSTANT),
        (
            Goal("0.85 × a bare loop into recycled memory", "speed", at_least=0.85, against=(_FLOOR_RECYCLED.name,)),
            Goal("5 × Run:ai's default", "speed", at_least=5, against=("Run:ai default",)),
            Goal("2.5 × Run:ai's best owned", "speed", at_least=2.5, against=("Run:ai best owned*",)),
            Goal("not slower than Run:ai's best borrowed", "speed", at_least=1.0, against=("Run:ai best borrowed*",)),
        ),
    ),
    Case(
        "warm_into",
        "cached, into given tensors",
        "llama",
        "into",
        False,
        (_OURS, _FLOOR_INTO, _LOAD_FILE, *_warm_peers(GIB)),
        (
            Goal("0.95 × bare preadv into the same memory", "speed", at_least=0.95, against=(_FLOOR_INTO.name,)),
            Goal("faster than safetensors load_file + copy", "speed", at_least=1.0, against=_SAFETENSORS),
        ),
    ),
    Case(
        "own_formats",
        "loaders with formats of their own, cached, streamed",
        "llama",
        "stream",
        False,
        (_OURS, _FLOOR_RECYCLED, _FLASHPACK, _TENSORIZER),
    ),
    Case(
        "warm_load",
        "cached, all kept",
        "llama",
        "load",
        False,
        (_OURS, _FLOOR_FRESH, _LOAD_FILE_OWN, _RUNAI, _FAST_WARM),
    ),
    Case(
        "cold_stream",
        "not cached, streamed",
        "llama",
        "stream",
        True,
        (_OURS, *_FLOORS_DIRECT, _RUNAI, *_RUNAI_DIRECT, _FAST_COLD),
        (
            Goal("0.97 × bare O_DIRECT loop", "speed", at_least=0.97, against=_DIRECT),
            Goal("not slower than Run:ai io_uring_direct", "speed", at_least=1.0, against=("Run:ai io_uring_direct*",)),
            Goal("no more CPU than Run:ai io_uring_direct", "cpu", at_most=1.0, against=("Run:ai io_uring_direct*",)),
        ),
    ),
    Case(
        "cold_into",
        "not cached, into given tensors",
        "llama",
        "into",
        True,
        (_OURS, *_FLOORS_DIRECT, _LOAD_FILE, _RUNAI, _FAST_COLD),
        (Goal("0.9 × bare O_DIRECT loop", "speed", at_least=0.9, against=_DIRECT),),
    ),
    Case(
        "cold_load",
        "not cached, all kept",
        "llama",
        "load",
        True,
        (_OURS, *_FLOORS_DIRECT, _LOAD_FILE_OWN, _RUNAI, _FAST_COLD),
        (Goal("0.9 × bare O_DIRECT loop", "speed", at_least=0.9, against=_DIRECT),),
    ),
    Case(
        "small_stream",
        "60,000 small tensors, cached, streamed",
        "moe",
        "stream",
        False,
        (_OURS, _FLOOR_CHUNKS, _LOAD_FILE_VIEWS, _SAFE_OPEN_PREAD, *_warm_peers(_LIMIT)),
        (
            Goal("3.5 µs per tensor over the bytes", "overhead_us", at_most=3.5, against=(_FLOOR_CHUNKS.name,)),
            Goal("2 × the quickest peer", "speed", at_least=2.0, against=("safetensors*", "Run:ai*", "fastsafetensors*")),
            Goal("4 × Run:ai", "speed", at_least=4.0, against=("Run:ai*",)),
        ),
    ),
    Case(
        "cast_f32_bf16",
        "F32 to BF16 while loading, cached, streamed",
        "f32",
        "stream",
        False,
        (
            Way("headrace", "ours:run", "headrace", settings={"arguments": {"dtype": "bfloat16"}}),
            Way("headrace, no cast", "ours:run", "floor", note="the same load without a cast"),
            _LOAD_FILE_CAST,
            _peer("Run:ai default + to(bfloat16)", "runai", owned=True, cast="bfloat16"),
        ),
        (Goal("0.95 × the same load without a cast", "speed", at_least=0.95, against=("headrace, no cast",)),),
    ),
    Case(
        "busy_caller",
        "caller spins bytecode for half of the idle wall time",
        "llama",
        "stream",
        False,
        (
            Way("headrace", "ours:run", "headrace", settings={"spin_share": 0.5}),
            Way("headrace, idle caller", "ours:run", "floor", note="the same load, the caller drops each tensor at once"),
        ),
        (Goal("0.6 × max(read, spin)", "ideal", at_least=0.6, against=("headrace, idle caller",)),),
    ),
    Case(
        "busy_caller_cold",
        "the same, not cached",
        "llama",
        "stream",
        True,
        (
            Way("headrace", "ours:run", "headrace", settings={"spin_share": 0.5}),
            Way("headrace, idle caller", "ours:run", "floor", note="the same load, the caller drops each tensor at once"),
        ),
        (Goal("0.6 × max(read, spin)", "ideal", at_least=0.6, against=("headrace, idle caller",)),),
    ),
    *(
        Case(
            f"rss_{name}",
            f"memory_limit=256 MiB, largest tensor {largest} MiB, {'not ' if cold else ''}cached",
            "llama",
            "stream",
            cold,
            (
                Way(
                    "headrace",
                    "ours:run",
                    "headrace",
                    settings={
                        "arguments": {"memory_limit": _LIMIT},
                        **({"largest_nbytes": 64 * MIB} if largest == 48 else {}),
                    },
                ),
            ),
            (
                Goal(
                    f"peak RSS ≤ max(limit, largest) + 64 MiB = {max(256, largest) + 64}",
                    "peak_mib",
                    at_most=max(256, largest) + 64,
                ),
            ),
        )
        for name, cold, largest in (("256", False, 48), ("256_cold", True, 48), ("256_large", False, 376))
    ),
)

ON_REQUEST = {"own_formats"}  # left out unless --cases asks for them
QUICK = {"warm_stream", "warm_into", "cold_load"}
