"""Processes of one node share `concurrency` and `memory_limit`: the arithmetic, what is said about it, and the proof."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import MIB, random_contents, serialize
from hypothesis import given
from hypothesis import strategies as st

import headrace
from headrace._limits import abilities_of, resolve_limits, resolve_staging, share_of_node
from headrace._options import Options
from headrace._plan import SLOT_SLACK_NBYTES, Limits, NodeLimits, SourceAbilities
from headrace.errors import OptionError
from headrace.sources.memory import MemorySource
from headrace.testing.s3server import Bucket, S3Server

CACHED, NETWORK = SourceAbilities("file", cached=True), SourceAbilities("network")


@pytest.fixture(autouse=True)
def no_budgets_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "RUNAI_STREAMER_PROCESS_GROUP_SIZE", "HEADRACE_LOCAL_RANKS"):
        monkeypatch.delenv(name, raising=False)


# ---- the arithmetic


@pytest.mark.parametrize(
    ("node", "ranks", "expected"),
    [
        ((16, 128 * MIB), 1, (16, 128 * MIB)),
        ((16, 128 * MIB), 4, (4, 32 * MIB)),
        ((16, 128 * MIB), 5, (3, 128 * MIB // 5)),
        ((4, 128 * MIB), 8, (1, 16 * MIB)),
        ((1, 0), 8, (1, 0)),
    ],
)
def test_a_process_takes_its_part_and_at_least_one_read(node: tuple[int, int], ranks: int, expected: tuple[int, int]) -> None:
    share = share_of_node(Limits(*node), ranks)
    assert (share.concurrency, share.memory_limit) == expected
    assert share.node == (NodeLimits(ranks, *node) if ranks > 1 else None)


@given(st.integers(1, 256), st.integers(0, 1 << 40), st.integers(1, 300))
def test_all_parts_together_are_within_the_total(concurrency: int, memory_limit: int, ranks: int) -> None:
    share = share_of_node(Limits(concurrency, memory_limit), ranks)
    assert share.concurrency >= 1
    assert ranks * share.concurrency <= max(concurrency, ranks)
    assert ranks * share.memory_limit <= memory_limit


@pytest.mark.parametrize("ability", [CACHED, NETWORK])
def test_automatic_limits_are_divided_as_well(ability: SourceAbilities) -> None:
    alone, four = (
        resolve_limits(Options(local_ranks=ranks), [ability], largest=[MIB, MIB], nbytes=1 << 30) for ranks in (None, 4)
    )
    assert four.concurrency == max(1, alone.concurrency // 4)
    assert four.memory_limit == alone.memory_limit // 4


def test_no_limit_stays_none_and_one_that_is_given_is_divided() -> None:
    unlimited = resolve_limits(Options(memory_limit=-1, local_ranks=4), [CACHED], largest=[MIB], nbytes=100 * MIB)
    assert unlimited.memory_limit == 200 * MIB
    assert unlimited.node is not None
    assert unlimited.node.memory_limit is None
    given = resolve_limits(Options(memory_limit=80 * MIB, concurrency=6, local_ranks=4), [CACHED], largest=[MIB], nbytes=0)
    assert (given.concurrency, given.memory_limit) == (1, 20 * MIB)


def test_the_ring_to_a_device_is_divided_and_the_devices_own_memory_is_not() -> None:
    def resolved(ranks: int | None) -> Limits:
        options = Options(memory_limit=640 * MIB, concurrency=16, local_ranks=ranks)
        return resolve_staging(options, [CACHED], largest=[MIB], nbytes=1 << 32, cast_at="device")

    alone, four = resolved(None), resolved(4)
    assert alone.node is None
    assert four.node == NodeLimits(4, 16, 640 * MIB)
    assert 4 * four.memory_limit <= 640 * MIB
    assert 4 * four.concurrency <= 16
    assert alone.staging is not None
    assert four.staging is not None
    assert four.staging.ahead_nbytes == alone.staging.ahead_nbytes


@pytest.mark.parametrize(
    ("cached", "nbytes", "alone", "together"),
    [
        (True, 1 << 30, 8 * MIB, 8 * MIB),
        (True, 1 << 32, 8 * MIB, 16 * MIB),
        (False, 1 << 30, 16 * MIB, 8 * MIB),
        (False, 1 << 32, 16 * MIB, 16 * MIB),
    ],
)
def test_ranks_that_load_together_have_long_slots_for_large_models(cached: bool, nbytes: int, alone: int, together: int) -> None:
    ability = SourceAbilities("file", cached=cached)
    for shared, expected in ((False, alone), (True, together)):
        staging = resolve_staging(
            Options(local_ranks=4), [ability], largest=[MIB], nbytes=nbytes, cast_at="device", shared=shared
        ).staging
        assert staging is not None
        assert staging.slot_nbytes == expected + SLOT_SLACK_NBYTES


def test_the_length_of_requests_is_an_option_for_networks_only() -> None:
    source = MemorySource(b"1234", url="memory")
    assert abilities_of(source, mapped=False, network_chunk_nbytes=MIB) == abilities_of(source, mapped=False)


# ---- where the number comes from


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"RUNAI_STREAMER_PROCESS_GROUP_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, 2),
        ({"HEADRACE_LOCAL_RANKS": "1", "RUNAI_STREAMER_PROCESS_GROUP_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, 1),
        ({"LOCAL_WORLD_SIZE": ""}, None),
    ],
)
def test_launchers_say_how_many_processes_there_are(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int | None
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert Options.from_environment().local_ranks == expected


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "RUNAI_STREAMER_PROCESS_GROUP_SIZE", "HEADRACE_LOCAL_RANKS"])
@pytest.mark.parametrize("text", ["0", "-1", "many", "2.5"])
def test_what_is_no_number_of_processes_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError, match=variable) as caught:
        headrace.plan(MemorySource(serialize(random_contents(1000)), url="m"))
    assert caught.value.option == "local_ranks"
    assert text in str(caught.value)


# ---- what is said


def test_plan_and_statistics_name_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    data = serialize(random_contents(*[MIB] * 8))
    given: dict[str, object] = {"concurrency": 16, "memory_limit": "512MiB"}
    plan = headrace.plan(MemorySource(data, url="m"), **given)  # type: ignore[arg-type]
    assert (plan.limits.concurrency, plan.limits.memory_limit) == (4, 128 * MIB)
    assert "1/4 of the node's 16 reads and 512 MiB" in str(plan)
    with headrace.stream(MemorySource(data, url="m"), **given) as stream:  # type: ignore[arg-type]
        for item in stream:
            del item
    assert (stream.stats.concurrency, stream.stats.memory_limit) == (4, 128 * MIB)
    assert stream.stats.node_share == "1/4 of the node's 16 reads and 512 MiB"
    assert headrace.plan(MemorySource(data, url="m"), local_ranks=1).limits.node is None


# ---- the proof


RANK = """
import sys
import headrace
from headrace.sources.s3 import S3Credentials

with headrace.stream(sys.argv[1], credentials=S3Credentials(anonymous=True, endpoint=sys.argv[2])) as stream:
    nbytes = sum(tensor.nbytes for _, tensor in stream)
print(nbytes, stream.stats.concurrency)
"""


@pytest.mark.slow
def test_four_processes_together_have_no_more_requests_than_one_may_have() -> None:
    ranks, reads, shards = 4, 16, 4
    contents = random_contents(*[3 * MIB] * 24)
    names = list(contents)
    files: dict[str, bytes] = {}
    for shard in range(shards):
        part = {name: contents[name] for name in names[shard::shards]}
        files[f"m/model-{shard + 1:05}-of-{shards:05}.safetensors"] = serialize(part)
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    files["m/model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    surroundings = dict(
        line.split("=", 1) for line in Path("/proc/self/environ").read_text().split("\0") if line.startswith(("PATH=", "HOME="))
    )
    surroundings |= {"LOCAL_WORLD_SIZE": str(ranks), "HEADRACE_CONCURRENCY": str(reads), "HEADRACE_MEMORY_LIMIT": "80MiB"}
    surroundings |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull}
    with S3Server({"models": files}, buckets={"models": Bucket(public=True)}) as server:
        server.hold()
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, "s3://models/m", server.url],
                env=surroundings,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(ranks)
        ]
        try:
            for waiting in (2 * ranks, shards * ranks, reads):  # listings and indexes; all headers; data
                assert server.wait_until(lambda waiting=waiting: server.held == waiting, 90), (waiting, server.held)  # type: ignore[misc]
                server.release()
            server.let_go()
            told = [process.communicate(timeout=60)[0].split() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        assert told == [[str(24 * 3 * MIB), "4"]] * ranks
        assert server.peak_inflight == reads
        assert server.peak_connections == reads
