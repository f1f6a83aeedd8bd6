"""How many round trips a load takes before it hands out its first tensor, counted in requests that wait for answers to others.

The server holds every request back, and lets all that wait go on at once: what is asked for only after an answer comes a round
later. Where a client takes one more round than it should, a round here is short of requests and never full.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from checkpoints import KIB, MIB, Contents, bytes_of, random_contents, random_entry, serialize
from hub_server import Hub, Repo

import headrace
from headrace.sources.s3 import S3Credentials
from headrace.testing.s3server import S3Server

pytest.importorskip("botocore")

SHARDS, READERS = 4, 8
INDEX = "model.safetensors.index.json"


def shard(part: int) -> str:
    return f"model-{part + 1:05}-of-{SHARDS:05}.safetensors"


def tiny(count: int) -> Contents:
    """Tensors whose names fill a header."""
    return {f"{i:06}.{'x' * 100}": random_entry("U8", (1,), seed=i) for i in range(count)}


def model(contents: Contents) -> dict[str, bytes]:
    """Four shards."""
    names = list(contents)
    return {shard(part): serialize({name: contents[name] for name in names[part::SHARDS]}) for part in range(SHARDS)}


def index_of(contents: Contents) -> bytes:
    return json.dumps({"weight_map": {name: shard(i % SHARDS) for i, name in enumerate(contents)}}).encode()


class FirstTensor(threading.Thread):
    """Streams until the first tensor is there; then waits for `go_on`, so that what is asked for meanwhile can be looked at."""

    def __init__(self, url: Any, **options: Any) -> None:
        super().__init__(name="test-first-tensor")
        self.url, self.options = url, options
        self.arrived, self.go_on = threading.Event(), threading.Event()
        self.first: tuple[str, bytes] | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with headrace.stream(self.url, **self.options) as stream:
                name, tensor = next(stream)
                self.first = name, bytes_of(tensor)
                del tensor
                self.arrived.set()
                self.go_on.wait(60)
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error
            self.arrived.set()


def rounds_to_first_tensor(files: Mapping[str, bytes], requests: Sequence[int], contents: Contents, url: str) -> None:
    """Assert that the load makes these many requests in each round, and that the first tensor is there after the last of them."""
    with S3Server({"models": {f"m/{name}": data for name, data in files.items()}}) as server:
        server.hold()
        keys = S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)
        load = FirstTensor(url, credentials=keys, concurrency=READERS, memory_limit=64 * MIB)
        load.start()
        try:
            for number, waiting in enumerate(requests):
                assert server.wait_until(lambda waiting=waiting: server.held >= waiting, 30), (number, server.held)  # type: ignore[misc]
                assert not load.arrived.is_set()
                server.release()
            assert load.arrived.wait(30)
            assert load.error is None
            assert load.first is not None
            assert load.first[1] == contents[load.first[0]].data
            assert server.rounds == len(requests)
        finally:
            server.let_go()
            load.go_on.set()
            load.join()


CONTENTS = random_contents(*[MIB + i for i in range(16)])
LONG = tiny(4 * 700) | random_contents(*[MIB + i for i in range(16)])  # headers of some 100 KiB


@pytest.mark.parametrize(
    ("index", "contents", "requests"),
    [
        pytest.param(INDEX, CONTENTS, [2, SHARDS, READERS], id="usual index"),
        pytest.param(None, CONTENTS, [2, SHARDS, READERS], id="no index"),
        pytest.param("other.safetensors.index.json", CONTENTS, [2, 1, SHARDS, READERS], id="index of another name"),
        pytest.param(INDEX, LONG, [2, SHARDS, SHARDS, 1], id="long headers"),
    ],
)
def test_the_first_tensor_of_four_shards_comes_within_four_round_trips(
    index: str | None, contents: Contents, requests: list[int]
) -> None:
    files = model(contents) | ({index: index_of(contents)} if index else {})
    assert len(requests) <= 4
    rounds_to_first_tensor(files, requests, contents, "s3://models/m")


def test_one_file_takes_two_round_trips() -> None:
    rounds_to_first_tensor({"a.safetensors": serialize(CONTENTS)}, [1, 6], CONTENTS, "s3://models/m/a.safetensors")


def test_small_tensors_that_came_with_the_header_take_one() -> None:
    contents = random_contents(*[KIB] * 10)
    rounds_to_first_tensor({"a.safetensors": serialize(contents)}, [1], contents, "s3://models/m/a.safetensors")


def test_all_headers_are_one_round_and_nobody_is_asked_for_sizes() -> None:
    with S3Server({"models": {f"m/{name}": data for name, data in model(CONTENTS).items()}}) as server:
        keys = S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)
        with headrace.open("s3://models/m", credentials=keys) as checkpoint:
            assert set(checkpoint) == set(CONTENTS)
        assert [request.method for request in server.requests] == ["GET"] * (2 + SHARDS)


def test_a_repository_of_the_hub_is_listed_once_and_each_file_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Hub({"org/repo": Repo(model(CONTENTS) | {INDEX: index_of(CONTENTS)})}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        with headrace.open("hf://org/repo") as checkpoint:
            assert set(checkpoint) == set(CONTENTS)
        assert len(hub.api()) == 1
        assert len(hub.cdn.seen) == SHARDS
