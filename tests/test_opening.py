"""Opening: no more at once than was asked for, checked where asked for, mapped only where that can be, and ended at once.

Ended: where one of many openings fails, or the caller is interrupted, the others end too, whatever they wait for.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from budget import rest_slow
from checkpoints import random_contents, serialize, wrong
from http_servers import Seen, Server
from typer.testing import CliRunner

import headrace
from headrace._manifest import MANIFEST_NAME
from headrace.cli import app
from headrace.errors import IntegrityError, OptionError, SourceError, SourceNotFoundError
from headrace.sources.openings import Openings, endable

SHARDS = 8
CONTENTS = random_contents(*[3000] * SHARDS)
INDEX = "model.safetensors.index.json"


def shard(part: int) -> str:
    return f"model-{part + 1:05}-of-{SHARDS:05}.safetensors"


FILES = {shard(i): serialize({name: entry}) for i, (name, entry) in enumerate(CONTENTS.items())} | {
    INDEX: json.dumps({"weight_map": {name: shard(i) for i, name in enumerate(CONTENTS)}}).encode()
}


class Counting(Server):
    """Counts requests that wait for their answer at the same time; each waits so long that all that may come have come."""

    def __init__(self) -> None:
        self.most = self._waiting = 0
        self._count = threading.Lock()
        super().__init__({f"/m/{name}": data for name, data in FILES.items()}, check=self._hold)

    def _hold(self, _: Seen) -> None:
        with self._count:
            self._waiting += 1
            self.most = max(self.most, self._waiting)
        self.released.wait(0.05)
        with self._count:
            self._waiting -= 1


def load_it(url: str, tmp_path: Path, concurrency: int) -> None:
    del tmp_path
    assert not wrong(headrace.load(url, concurrency=concurrency), CONTENTS)


def pull_it(url: str, tmp_path: Path, concurrency: int) -> None:
    headrace.pull(url, tmp_path / "copy", concurrency=concurrency)


def verify_it(url: str, tmp_path: Path, concurrency: int) -> None:
    assert headrace.verify(url, out=tmp_path / "manifest.json", concurrency=concurrency).ok


@pytest.mark.parametrize("do", [load_it, pull_it, verify_it])
@pytest.mark.parametrize("concurrency", rest_slow([1, 3], quick=(1,)))
def test_no_more_requests_are_made_at_once_than_were_asked_for(
    tmp_path: Path, do: Callable[[str, Path, int], None], concurrency: int
) -> None:
    with Counting() as server:
        do(server.url_of(f"/m/{INDEX}"), tmp_path, concurrency)
        assert server.most <= concurrency


def test_many_shards_are_opened_at_once_where_nothing_was_asked_for() -> None:
    with Counting() as server:
        headrace.open(server.url_of(f"/m/{INDEX}")).close()
        assert server.most > 3


def test_what_is_behind_a_url_is_not_advised_to_be_mapped() -> None:
    with Server(serialize(CONTENTS)) as server, pytest.raises(SourceError, match="only local files") as caught:
        headrace.load(server.url, mmap="require")
    assert "open it with mmap" not in str(caught.value)


def test_a_checkpoint_that_was_opened_without_is_told_where_to_ask_for_mmap(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(serialize(CONTENTS))
    with (
        headrace.open(tmp_path / "m.safetensors") as checkpoint,
        pytest.raises(SourceError, match="mmap='require' where it is opened"),
    ):
        headrace.load(checkpoint, mmap="require")


# ---- verified


@pytest.fixture
def divided(tmp_path: Path) -> Path:
    """A folder with the files of two ranks and a manifest."""
    folder = tmp_path / "divided"
    for rank in range(2):
        headrace.save_sharded({"w": torch.arange(rank, rank + 50_000)}, folder, rank=rank)
    assert headrace.verify(folder, write=True).ok
    return folder


def flip_end(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("verify", [True, "require", "auto", MANIFEST_NAME])
def test_a_ranks_part_is_checked_as_it_is_loaded(divided: Path, verify: Any) -> None:
    verify = divided / verify if verify == MANIFEST_NAME else verify
    with headrace.open_sharded(divided, rank=1, verify=verify) as checkpoint:
        with headrace.stream(checkpoint) as stream:
            assert dict(stream)["w"][0] == 1
        assert stream.stats.verified_nbytes > 0
    flip_end(divided / "model-rank-1-part-0.safetensors")
    with headrace.open_sharded(divided, rank=1, verify=verify) as checkpoint, pytest.raises(IntegrityError) as caught:
        headrace.load(checkpoint)
    assert caught.value.tensors == ("w",)
    with headrace.open_sharded(divided, rank=0, verify=verify) as checkpoint:
        assert headrace.load(checkpoint)["w"][0] == 0


def test_a_rank_without_anything_to_check_it_against_is_refused(divided: Path) -> None:
    (divided / MANIFEST_NAME).unlink()
    with pytest.raises(OptionError):
        headrace.open_sharded(divided, rank=0, verify=True)
    with headrace.open_sharded(divided, rank=0, verify="auto") as checkpoint:
        assert checkpoint.unverified == (str(divided / "model-rank-0-part-0.safetensors"),)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_commands_check_what_they_read(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(serialize(CONTENTS))
    assert run("load", tmp_path, "--verify", "require").exit_code == 2
    assert run("load", tmp_path, "--verify", "auto").exit_code == 0
    manifest = tmp_path / "elsewhere.json"
    headrace.verify(tmp_path, out=manifest)
    planned = run("plan", tmp_path, "--verify", manifest)
    assert planned.exit_code == 0
    assert "verified: SHA-256 of blocks" in planned.stdout.replace("\n", " ")
    assert run("load", tmp_path, "--verify", manifest).exit_code == 0
    flip_end(tmp_path / "m.safetensors")
    assert run("load", tmp_path, "--verify", manifest).exit_code == 1


# ---- what fails, and what is interrupted


class Stuck(Server):
    """Never answers for what lies at one path, until it is stopped; what is missing is missed once that is asked for."""

    def __init__(self, stuck: str, *, missing: str = "") -> None:
        self._stuck, self._missing = f"/m/{stuck}", f"/m/{missing}"
        self.is_stuck = threading.Event()
        super().__init__({f"/m/{name}": data for name, data in FILES.items()}, check=self._hold)

    def _hold(self, seen: Seen) -> tuple[int, dict[str, str], bytes] | None:
        if seen.target == self._stuck:
            self.is_stuck.set()
            self.released.wait()
        if seen.target == self._missing:
            self.is_stuck.wait()
            return 404, {}, b""
        return None

    def times_asked(self) -> int:
        return sum(seen.target == self._stuck for seen in self.seen)


VERBS: dict[str, Callable[[str, Path], object]] = {
    "open": lambda url, _: headrace.open(url),
    "load": lambda url, _: headrace.load(url),
    "pull": lambda url, tmp_path: headrace.pull(url, tmp_path / "copy"),
    "verify": lambda url, tmp_path: headrace.verify(url, out=tmp_path / "manifest.json"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("verb", ["open", "load", "pull"])
def test_a_shard_that_is_missing_is_told_of_while_another_one_is_stuck(verb: str, tmp_path: Path) -> None:
    with Stuck(shard(1), missing=shard(5)) as server:
        with pytest.raises(SourceNotFoundError, match=shard(5)):
            VERBS[verb](server.url_of(f"/m/{INDEX}"), tmp_path)
        assert server.times_asked() == 1


Interrupt: TypeAlias = "Callable[[Callable[[], object]], None]"


@pytest.fixture
def interrupted() -> Iterator[Interrupt]:
    """Interrupts the test once, when a wait is over."""
    threads: list[threading.Thread] = []
    left = [KeyboardInterrupt]

    def handle(*_: object) -> None:
        if left:
            raise left.pop()

    def interrupt(wait: Callable[[], object]) -> None:
        wait()
        os.kill(os.getpid(), signal.SIGINT)

    def start(wait: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=interrupt, args=(wait,)))
        threads[-1].start()

    handler = signal.signal(signal.SIGINT, handle)
    try:
        yield start
    finally:
        for thread in threads:
            thread.join(30)
        signal.signal(signal.SIGINT, handler)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("stuck", [shard(1), INDEX])
def test_an_interrupt_ends_openings_that_are_stuck(stuck: str, verb: str, tmp_path: Path, interrupted: Interrupt) -> None:
    with Stuck(stuck) as server:
        interrupted(server.is_stuck.wait)
        with pytest.raises(KeyboardInterrupt):
            VERBS[verb](server.url_of(f"/m/{INDEX}"), tmp_path)
        assert server.times_asked() == 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("rule", [{"method": "LIST"}, {"key": f"*{INDEX}"}], ids=["the listing", "the index"])
def test_an_interrupt_ends_a_listing_that_is_stuck(rule: dict[str, str], interrupted: Interrupt) -> None:
    pytest.importorskip("botocore")
    from headrace.sources.s3 import S3Credentials
    from headrace.testing.s3server import Rule, S3Server, Stall

    def until_it_stalls() -> None:
        while not any(request.action is not None for request in server.requests):
            threading.Event().wait(0.02)

    with S3Server({"models": {f"m/{name}": data for name, data in FILES.items()}}, faults=[Rule(Stall(0), **rule)]) as server:
        interrupted(until_it_stalls)
        credentials = S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)
        with pytest.raises(KeyboardInterrupt):
            headrace.open("s3://models/m", credentials=credentials)


class TestOpenings:
    def test_end_calls_what_is_under_way_and_nothing_that_is_over(self) -> None:
        openings, ended = Openings(), list[str]()
        with openings.here():
            with endable(lambda: ended.append("over")):
                pass
            with endable(lambda: ended.append("outer")), endable(lambda: ended.append("inner")):
                openings.end()
        assert sorted(ended) == ["inner", "outer"]

    def test_what_begins_after_the_end_is_ended_as_it_begins(self) -> None:
        openings, ended = Openings(), list[str]()
        openings.end()
        with openings.here(), endable(lambda: ended.append("late")):
            assert ended == ["late"]

    def test_other_threads_and_what_comes_after_are_left_alone(self) -> None:
        openings, ended = Openings(), list[str]()
        with openings.here():
            inner = Openings()
            with inner.here(), endable(lambda: ended.append("inner")):
                openings.end()

            def elsewhere() -> None:
                with endable(lambda: ended.append("elsewhere")):
                    openings.end()

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        with endable(lambda: ended.append("after")):
            openings.end()
        assert ended == []
