"""One load to several places: who goes where, each with its own limit, and tensors that the ranks of a node have in common."""

from __future__ import annotations

import gc
import os
import signal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import KIB, MIB, WatchedSource, bytes_of, random_contents, serialize
from hypothesis import given
from hypothesis import strategies as st
from ranks import Outcome, alone, error_of, prepare_ranks, run_ranks, values, write_model
from simulated_gpu import Gpu, needs_compiler, simulated_gpu

import headrace
from headrace import OptionError, Options, PeerError, SourceError, StreamError
from headrace._header import Header
from headrace._targets import divide
from headrace.testing import Fault, FaultySource, Raise, touches

RULES = {"*.weight": "shared-cpu", "file:model-1.safetensors": "cpu", "*": "shared-cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def expected(folder: Path) -> dict[str, bytes]:
    """All tensors' bytes, by a load to one place."""
    return {name: bytes_of(tensor) for name, tensor in headrace.load(folder).items()}


# ---- who goes where


def placed(targets: dict[str, str], *files: list[str]) -> dict[str, list[str]]:
    """The names of each target, for files that hold tensors of these names."""
    headers = [Header("", 0, 0, None, names, [], [], [], [], True) for names in files]
    where = {name: (shard, row) for shard, names in enumerate(files) for row, name in enumerate(names)}
    return divide(targets, "cpu", headers, [None] * len(files), where, [f"{i}.safetensors" for i in range(len(files))])


def test_a_full_name_counts_first_then_the_first_key_that_fits_then_the_cpu() -> None:
    found = placed({"*.a": "x", "file:1.safetensors": "y", "m.a": "z", "m.*": "y"}, ["m.a", "m.b", "n.b"], ["n.a", "n.c"])
    assert found == {"x": ["n.a"], "y": ["m.b", "n.c"], "z": ["m.a"], "cpu": ["n.b"]}


@pytest.mark.parametrize("key", ["file:2.safetensors", "file:", "file:*", "*.d", "m.x", "file:../0.safetensors"])
def test_a_key_that_fits_nothing_is_refused_by_name(key: str) -> None:
    with pytest.raises(OptionError) as raised:
        placed({"m.a": "x", key: "y"}, ["m.a"], ["n.a"])
    assert key.removeprefix("file:") in str(raised.value)


NAMES = st.text("ab.", min_size=1, max_size=4)
PATTERNS = st.one_of(NAMES, st.sampled_from(["*", "a*", "*b", "?", "[ab]*", "file:0.safetensors", "file:1.safetensors"]))


@given(st.lists(NAMES, min_size=2, max_size=12, unique=True), st.dictionaries(PATTERNS, st.sampled_from("xyz"), max_size=5))
def test_every_tensor_goes_to_one_place(names: list[str], targets: dict[str, str]) -> None:
    files = [names[::2], names[1::2]]

    def fits(key: str, shard: int, name: str) -> bool:
        return key == name or (key == f"file:{shard}.safetensors" if key.startswith("file:") else fnmatchcase(name, key))

    useless = [
        key for key in targets if key != "*" and not any(fits(key, i, name) for i, own in enumerate(files) for name in own)
    ]
    if useless:
        with pytest.raises(OptionError):
            placed(targets, *files)
        return
    found = placed(targets, *files)
    assert sorted(name for members in found.values() for name in members) == sorted(names)
    for target, members in found.items():
        for name in members:
            shard = 0 if name in files[0] else 1
            fitting = [targets[name]] if name in targets else [t for key, t in targets.items() if fits(key, shard, name)]
            assert target == (fitting[0] if fitting else "cpu")


def test_limits_are_looked_up_by_target_then_kind_then_star() -> None:
    options = Options(memory_limit={"cuda:1": "1MiB", "cuda": 2, "*": 3})  # type: ignore[arg-type]
    assert [options.for_target(name).memory_limit for name in ("cuda:1", "cuda:0", "cpu")] == [MIB, 2, 3]
    assert Options(memory_limits={"cpu": 5}).for_target("cuda").memory_limit is None
    assert Options(memory_limits={"cpu": 5}).merged({"memory_limit": 7}).for_target("cpu").memory_limit == 7
    assert Options(memory_limit=4).for_target("cpu").memory_limit == 4


@pytest.mark.parametrize("limit", [{"cpu": -2}, {"cpu": "much"}, {"cpu": None}])
def test_limits_that_are_none_are_refused(limit: Any) -> None:
    with pytest.raises(OptionError, match="memory_limit"):
        Options(memory_limit=limit)


def test_a_limit_for_a_place_that_nothing_goes_to_is_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match="cuda:1"):
        headrace.plan(folder, device={"*": "shared-cpu"}, memory_limit={"cuda:1": 0, "cpu": 0})


# ---- in one process


def test_a_mixed_load_has_the_bytes_of_a_plain_one(folder: Path) -> None:
    found = headrace.load(folder, device=RULES)
    assert {name: bytes_of(tensor) for name, tensor in found.items()} == expected(folder)


def test_each_phase_has_its_own_limit_and_is_read_after_the_one_before(folder: Path) -> None:
    limits = {"shared-cpu": MIB, "cpu": 0}
    plan = headrace.plan(folder, device=RULES, memory_limit=limits)
    assert [(phase.device, phase.limits.memory_limit) for phase in plan.phases] == [("shared-cpu", MIB), ("cpu", 0)]  # type: ignore[attr-defined]
    assert plan.read_nbytes == headrace.plan(folder).read_nbytes
    assert len(plan.tensors) == len(expected(folder))
    assert "phase 1 of 2: to shared-cpu" in str(plan)
    with headrace.stream(folder, device=RULES, memory_limit=limits) as tensors:
        names = [name for name, _ in tensors]
    shared = [name in tensors.shared for name in names]
    assert shared == sorted(shared, reverse=True)
    assert tensors.stats.tensors == tensors.stats.total_tensors == len(names)
    assert tensors.stats.read_nbytes == tensors.stats.total_nbytes == plan.read_nbytes


def test_reading_ahead_into_shared_memory_keeps_to_the_limit() -> None:
    source = WatchedSource(serialize(random_contents(*[MIB] * 8)))
    with headrace.stream(source, device="shared-cpu", memory_limit=2 * MIB, concurrency=2) as tensors:
        next(tensors)
        next(tensors)
        read = tensors.stats.read_nbytes
    assert read <= 5 * MIB


def test_placeholders_are_known_at_once_and_become_tensors(folder: Path) -> None:
    tensors = headrace.stream(folder, device={"0.*": "shared-cpu"}, dtype={"0.layer.0.norm": "bfloat16"})
    assert list(tensors.shared) == [name for name in expected(folder) if name.startswith("0.")]
    first = tensors.shared["0.layer.0.norm"]
    assert (first.name, first.dtype, first.shape, first.nbytes) == ("0.layer.0.norm", "BF16", (129,), 258)
    assert "not read yet" in repr(first)
    with pytest.raises(StreamError, match="has not been read yet"):
        first.tensor()
    with tensors:
        found = dict(tensors)
    assert first.ready
    assert bytes_of(first.tensor()) == bytes_of(found["0.layer.0.norm"])
    assert first.tensor().data_ptr() == found["0.layer.0.norm"].data_ptr()


def test_shared_tensors_outlive_the_stream_and_its_placeholders(folder: Path) -> None:
    found = headrace.load(folder, device="shared-cpu")
    assert {name: bytes_of(tensor) for name, tensor in found.items()} == expected(folder)


def test_a_write_to_a_shared_tensor_ends_the_process_and_corrupts_nothing(folder: Path) -> None:
    tensor = headrace.load(folder, device="shared-cpu", names="0.layer.0.weight")["0.layer.0.weight"]
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        tensor.zero_()
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    assert bytes_of(tensor) == expected(folder)["0.layer.0.weight"]


def test_what_cannot_be_shared_is_refused(folder: Path) -> None:
    name = "0.layer.0.weight"
    with pytest.raises(OptionError, match="slices"):
        headrace.load(folder, device={"0.*": "shared-cpu"}, slices={name: slice(0, 2)})
    with pytest.raises(OptionError, match="fill"):
        headrace.load(folder, device={"0.*": "shared-cpu"}, into={name: torch.empty(256, 1024, dtype=torch.bfloat16)})
    with pytest.raises(OptionError, match="not supported"):
        headrace.load(folder, device={"0.*": "shard-cpu"})
    with pytest.raises(OptionError, match="keys of a mapping"):
        headrace.load(folder, device={0: "cpu"})  # type: ignore[dict-item]


def test_given_tensors_of_other_places_are_filled_and_slices_are_cut(folder: Path) -> None:
    given = torch.zeros(256, 1024, dtype=torch.bfloat16)
    found = headrace.load(
        folder, device={"0.*.table": "shared-cpu"}, into={"0.layer.0.weight": given}, slices={"0.layer.1.weight": slice(2, 4)}
    )
    assert found["0.layer.0.weight"] is given
    assert bytes_of(given) == expected(folder)["0.layer.0.weight"]
    assert found["0.layer.1.weight"].shape == (2, 1024)


def test_an_error_in_any_phase_ends_the_load() -> None:
    source = FaultySource(
        headrace.sources.memory.MemorySource(serialize(random_contents(MIB, MIB))),  # type: ignore[attr-defined]
        [Fault(touches(MIB + 64 * KIB, 2 * MIB), Raise(SourceError))],
    )
    for device in ({"t000": "shared-cpu"}, {"t001": "shared-cpu"}):
        with pytest.raises(SourceError), headrace.stream(source, device=device) as tensors:
            dict(tensors)
        with pytest.raises(StreamError):
            next(tensors)
    del tensors  # its placeholders keep the pages
    gc.collect()


def test_progress_is_that_of_the_whole_load(folder: Path) -> None:
    seen: list[headrace.Snapshot] = []
    headrace.load(folder, device=RULES, progress=seen.append)
    assert {snapshot.total_nbytes for snapshot in seen} == {headrace.plan(folder).read_nbytes}
    assert [snapshot.tensors for snapshot in seen] == sorted(snapshot.tensors for snapshot in seen)


def test_a_stream_that_is_left_early_stops_all_phases(folder: Path) -> None:
    with headrace.stream(folder, device=RULES) as tensors:
        next(tensors)
    with pytest.raises(StreamError):
        next(tensors)


def target_of(name: str) -> str | None:
    """Where a tensor goes that is called so, by its name alone."""
    return "shared-cpu" if name.endswith("table") else None


def test_a_callable_says_where_each_tensor_goes(folder: Path) -> None:
    plan = headrace.plan(folder, device=target_of, memory_limit={"shared-cpu": MIB, "cpu": 0})
    assert [(phase.device, phase.limits.memory_limit) for phase in plan.phases] == [("cpu", 0), ("shared-cpu", MIB)]  # type: ignore[attr-defined]
    with headrace.stream(folder, device=target_of) as tensors:
        found = {name: bytes_of(tensor) for name, tensor in tensors}
    assert found == expected(folder)
    assert sorted(tensors.shared) == sorted(name for name in found if name.endswith("table"))


def test_a_callable_that_knows_one_place_makes_a_plain_load(folder: Path) -> None:
    plan = headrace.plan(folder, device=lambda _: torch.device("cpu"), names="*.norm")
    assert not hasattr(plan, "phases")
    assert plan.device == "cpu"
    assert plan.tensors.names == headrace.plan(folder, names="*.norm").tensors.names


def test_what_a_callable_answers_is_checked_before_anything_is_read(folder: Path) -> None:
    with pytest.raises(OptionError, match="not supported"):
        headrace.load(folder, device=lambda name: "gpu" if name.startswith("1") else None)
    with pytest.raises(OptionError, match="cuda:1"):
        headrace.plan(folder, device=target_of, memory_limit={"cuda:1": 0})
    with pytest.raises(KeyError, match="mine"):
        headrace.load(folder, device=lambda _: {}["mine"])


PLACES = {"*.table": "shared-cpu", "file:model-1.safetensors": "cpu"}


def on_device(tensors: dict[str, torch.Tensor], gpu: Gpu) -> set[str]:
    """Those with bytes that lie on a simulated device."""
    return {name for name, tensor in tensors.items() if tensor.nbytes and gpu.device.allocator.holds(tensor)}


def belong_on_device(tensors: dict[str, torch.Tensor]) -> set[str]:
    """Those that `PLACES` leaves to the rest."""
    return {name for name, tensor in tensors.items() if tensor.nbytes and name.startswith("0.") and not name.endswith("table")}


@needs_compiler
@pytest.mark.parametrize("by", ["mapping", "callable"])
def test_a_device_is_one_of_several_places(folder: Path, by: str) -> None:
    with simulated_gpu("random") as gpu:

        def place(name: str) -> object:
            return "shared-cpu" if name.endswith("table") else "cpu" if name.startswith("1.") else gpu.device

        device: Any = place if by == "callable" else {**PLACES, "*": gpu.device}
        limits = {"shared-cpu": MIB, "cpu": MIB, gpu.device.name: 4 * MIB}
        with headrace.stream(folder, device=device, memory_limit=limits) as tensors:
            kept = dict(tensors)
        assert {name: bytes_of(tensor) for name, tensor in kept.items()} == expected(folder)
        assert on_device(kept, gpu) == belong_on_device(kept)
        assert tensors.stats.sent_nbytes == sum(kept[name].nbytes for name in on_device(kept, gpu))
        del kept, tensors
        gc.collect()


# ---- among ranks


@pytest.fixture(scope="module")
def ranks() -> None:
    """The server that ranks are forked from."""
    prepare_ranks()


def load_mixed(rank: int, path: Path, one_node: bool) -> tuple[dict[str, bytes], int, int, str]:
    """Load with all ranks, meeting others in between as a caller may."""
    if not one_node:
        alone()
    with headrace.stream(path, group=True, device=RULES, memory_limit={"*": 2 * MIB}) as tensors:
        assert (tensors.stats.rank, tensors.stats.ranks) == (rank, dist.get_world_size())
        dist.barrier()
        found = {name: bytes_of(tensor) for name, tensor in tensors}
        assert all(bytes_of(each.tensor()) == found[name] for name, each in tensors.shared.items())
        dist.barrier()
    return found, tensors.stats.read_nbytes, tensors.stats.from_peers_nbytes, tensors.stats.exchange


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("one_node", [True, False], ids=["one node", "several nodes"])
def test_shared_tensors_are_read_once_per_node_and_the_others_once_in_all(folder: Path, one_node: bool) -> None:
    found = values(run_ranks(3, load_mixed, folder, one_node))
    whole, plan = expected(folder), headrace.plan(folder, device=RULES)
    shared, rest = (phase.read_nbytes for phase in plan.phases)  # type: ignore[attr-defined]
    assert all(tensors == whole for tensors, _, _, _ in found)
    assert sum(read for _, read, _, _ in found) == shared * (1 if one_node else 3) + rest
    assert sum(received for _, _, received, _ in found) == 2 * rest
    assert all("have in common, read by rank" in exchange for _, _, _, exchange in found)


def load_to_devices(rank: int, path: Path, by: str) -> tuple[dict[str, bytes], int]:
    """Tables to shared memory, one file to the host, the rest to a simulated device of each rank."""
    del rank
    with simulated_gpu("random") as gpu:

        def place(name: str) -> object:
            return "shared-cpu" if name.endswith("table") else "cpu" if name.startswith("1.") else gpu.device

        device: Any = place if by == "callable" else {**PLACES, "*": gpu.device}
        with headrace.stream(path, group=True, device=device, memory_limit={"*": 4 * MIB}) as tensors:
            dist.barrier()
            kept = dict(tensors)
        assert on_device(kept, gpu) == belong_on_device(kept)
        found, read = {name: bytes_of(tensor) for name, tensor in kept.items()}, tensors.stats.read_nbytes
        del kept, tensors
        gc.collect()
        return found, read


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("by", ["mapping", "callable"])
def test_ranks_load_to_several_places_with_devices_and_each_byte_is_read_once(folder: Path, by: str) -> None:
    found = values(run_ranks(3, load_to_devices, folder, by))
    assert all(tensors == expected(folder) for tensors, _ in found)
    assert sum(read for _, read in found) == headrace.plan(folder).read_nbytes


def load_by_other_functions(rank: int, path: Path) -> None:
    """Rank 1 means other places."""
    headrace.load(path, group=True, device=target_of if rank != 1 else (lambda _: "cpu"))


def fail_to_say(rank: int, path: Path) -> None:
    """Rank 1's function breaks."""

    def place(name: str) -> str | None:
        if rank == 1 and name.startswith("1."):
            raise KeyError("no such place")
        return target_of(name)

    headrace.load(path, group=True, device=place)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_ranks_whose_functions_differ_or_fail_hear_so_at_once(folder: Path) -> None:
    for outcome in run_ranks(3, load_by_other_functions, folder):
        assert isinstance(error_of(outcome), PeerError)
    outcomes = run_ranks(3, fail_to_say, folder)
    assert isinstance(error_of(outcomes[1]), KeyError)
    assert [error_of(outcomes[rank]).rank for rank in (0, 2)] == [1, 1]  # type: ignore[attr-defined]


def load_one_shared(_rank: int, path: Path) -> tuple[int, int]:
    """The shared pages of this process, in KiB, and what this rank has read."""
    with headrace.stream(path, group=True, device="shared-cpu") as tensors:
        kept = dict(tensors)
    assert {name: bytes_of(tensor) for name, tensor in kept.items()} == expected(path)
    dist.barrier()
    rollup = Path("/proc/self/smaps").read_text()
    mapped = rollup.split("memfd:headrace")[1]
    return int(mapped.split("Pss:")[1].split()[0]), tensors.stats.read_nbytes


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_all_ranks_use_the_same_pages(folder: Path) -> None:
    found = values(run_ranks(3, load_one_shared, folder))
    nbytes = headrace.plan(folder).read_nbytes
    assert [read for _, read in found] == [nbytes, 0, 0]
    assert sum(pss for pss, _ in found) * KIB < 1.2 * nbytes


def stop_early(rank: int, path: Path) -> int:
    """Rank 0, which reads for all, takes three tensors."""
    taken = 0
    with headrace.stream(path, group=True, device="shared-cpu", memory_limit=0) as tensors:
        for _ in tensors:
            taken += 1
            if rank == 0 and taken == 3:
                break
    return taken


def fail_reading(rank: int, path: Path) -> None:
    """Rank 0's disk breaks."""
    files = sorted(path.glob("*.safetensors"))
    sources: list[Any] = [headrace.open(file).sources[0] for file in files]
    if rank == 0:
        sources[1] = FaultySource(sources[1], [Fault(touches(2 * MIB, 3 * MIB), Raise(SourceError))])
    for _ in headrace.stream(sources, group=True, device="shared-cpu"):
        pass


def die(rank: int, path: Path) -> None:
    """Rank 0 is killed in the middle."""
    for count, _ in enumerate(headrace.stream(path, group=True, device="shared-cpu", memory_limit=0)):
        if rank == 0 and count == 5:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("ending", [stop_early, fail_reading, die])
def test_the_rank_that_reads_for_all_is_named_when_it_ends_early(folder: Path, ending: Any) -> None:
    outcomes: list[Outcome | None] = run_ranks(3, ending, folder)
    for rank in (1, 2):
        error = error_of(outcomes[rank])
        assert isinstance(error, PeerError)
        assert error.rank == 0


def leave_early(rank: int, path: Path) -> int:
    """Rank 1, which waits for another one's reading, takes three tensors and goes."""
    taken = 0
    with headrace.stream(path, group=True, device="shared-cpu", memory_limit=0) as tensors:
        for _ in tensors:
            taken += 1
            if rank == 1 and taken == 3:
                break
    return taken


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_a_rank_that_only_waits_may_leave_without_harm(folder: Path) -> None:
    assert values(run_ranks(3, leave_early, folder)) == [112, 3, 112]


def disagree(rank: int, path: Path) -> None:
    """Rank 0 shares other tensors than rank 1."""
    headrace.load(path, group=True, device={"0.*" if rank else "1.*": "shared-cpu"})


def open_nothing(rank: int, path: Path) -> None:
    """Rank 1 has no such folder."""
    headrace.load(path if rank != 1 else path / "missing", group=True, device=RULES)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_ranks_that_disagree_or_cannot_begin_are_known_before_the_first_byte(folder: Path) -> None:
    for outcome in run_ranks(2, disagree, folder):
        assert isinstance(error_of(outcome), PeerError)
    outcomes = run_ranks(3, open_nothing, folder)
    assert isinstance(error_of(outcomes[1]), FileNotFoundError)
    assert [error_of(outcomes[rank]).rank for rank in (0, 2)] == [1, 1]  # type: ignore[attr-defined]
