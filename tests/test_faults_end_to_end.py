"""Whole checkpoints over a network that fails: right bytes, or the right error, and not much asked for twice.

Each fault of the test server goes through `headrace.stream`, `load` and `pull` of a checkpoint of four shards. What comes is
compared with the local files bit for bit; what does not come is an error whose fields say what was asked, of whom, and how often.
Flipped bits, and ranges that lie about what they hold, are for `verify` to find.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from budget import rest_slow
from checkpoints import KIB, MIB, Contents, bytes_of, random_contents, serialize
from typer.testing import CliRunner

import headrace
from headrace.cli import app
from headrace.errors import SourceChangedError, SourceError, SourceTimeoutError, TruncatedError
from headrace.sources.http import (
    HttpChangedError,
    HttpError,
    HttpTimeoutError,
    HttpTruncatedError,
    RedirectError,
    ThrottledError,
    UnavailableError,
    UnreachableError,
    UnsatisfiableError,
    WrongEncodingError,
    WrongRangeError,
)
from headrace.sources.s3 import AccessDeniedError, ExpiredCredentialsError, ObjectNotFoundError, S3Credentials
from headrace.testing.s3server import (
    Action,
    Bucket,
    Extra,
    Fewer,
    Gzip,
    Hangup,
    IgnoreRange,
    LyingLength,
    Redirect,
    Replaced,
    Request,
    Reset,
    Rule,
    S3Server,
    Short,
    SlowStart,
    Stall,
    Status,
    Trickle,
    WrongRange,
)

pytest.importorskip("botocore")
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("aws_says_nothing")]

SHARDS, TENSORS, TENSOR_NBYTES = 4, 4, MIB
LARGE_NBYTES = 3 * TENSOR_NBYTES  # shards of more than a pull asks for at once
PREFIX = "llama/8b"
URL = f"s3://models/{PREFIX}"
PAST_OPENING = 64 * KIB  # an object is opened with a request for this much
LEAN = {"memory_limit": 0}  # a request for each tensor
VERBS = ["stream", pytest.param("load", marks=pytest.mark.slow), pytest.param("pull", marks=pytest.mark.slow)]


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk, in a folder of buckets."""

    root: Path
    contents: Contents

    @property
    def folder(self) -> Path:
        return self.root / "models" / PREFIX

    @property
    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))


def make(root: Path, tensor_nbytes: int) -> Model:
    """Four shards with an index; every tensor differs from every other."""
    found = Model(root, random_contents(*[tensor_nbytes + i for i in range(SHARDS * TENSORS)]))
    found.folder.mkdir(parents=True)
    names, weight_map = list(found.contents), dict[str, str]()
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        own = names[shard * TENSORS : (shard + 1) * TENSORS]
        (found.folder / file).write_bytes(serialize({name: found.contents[name] for name in own}))
        weight_map |= dict.fromkeys(own, file)
    (found.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (found.folder / "config.json").write_text("{}")
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(tmp_path_factory.mktemp("buckets"), TENSOR_NBYTES)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make(tmp_path_factory.mktemp("large"), LARGE_NBYTES)


@pytest.fixture
def aws_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no file of AWS that this machine may have counts here."""
    for name in [name for name in _environment() if name.startswith(("AWS_", "RUNAI_", "HEADRACE_")) or "PROXY" in name.upper()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def _environment() -> list[str]:
    return [line.partition("=")[0] for line in Path("/proc/self/environ").read_text().split("\0")]


@contextlib.contextmanager
def serving(model: Model, *rules: Rule, **options: Any) -> Iterator[S3Server]:
    with S3Server(model.root, faults=rules, **options) as server:
        yield server


def credentials(server: S3Server, **more: Any) -> S3Credentials:
    return S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url, **more)


def model_for(verb: str, request: pytest.FixtureRequest) -> Model:
    found = request.getfixturevalue("large" if verb == "pull" else "model")
    assert isinstance(found, Model)
    return found


def run(verb: str, model: Model, server: S3Server, dst: Path, *, url: str = URL, **options: Any) -> headrace.Snapshot | None:
    """Stream, load or pull the checkpoint, and compare every byte of it. Returns the statistics of a stream."""
    given = {"credentials": credentials(server), **options} if url.startswith("s3:") else options
    if verb == "pull":
        headrace.pull(url, dst, **given)
        assert {path.name: path.read_bytes() for path in dst.iterdir() if path.is_file()} == model.files
        return None
    if verb == "load":
        found = headrace.load(url, **LEAN, **given)
        assert list(found) == list(model.contents)
        assert_equal(found.items(), model)
        return None
    with headrace.stream(url, **LEAN, **given) as stream:
        assert assert_equal(stream, model) == len(model.contents)
    return stream.stats


def assert_equal(tensors: Any, model: Model) -> int:
    """Compare tensors as they come, and drop each; returns how many there were."""
    count = 0
    for name, tensor in tensors:
        assert bytes_of(tensor) == model.contents[name].data, name
        count += 1
    return count


# ---- right bytes


BRISK = {"stall_timeout_s": 0.3}
CURED: dict[str, tuple[Action, dict[str, Any]]] = {
    "503": (Status(503), {}),
    "503 with a pause": (Status(503, "SlowDown", {"Retry-After": "0.01"}), {}),
    "429 with a pause": (Status(429, "TooManyRequests", {"Retry-After": "0.01"}), {}),
    "500": (Status(500, "InternalError"), {}),
    "400 RequestTimeout": (Status(400, "RequestTimeout", {"Connection": "close"}), {}),
    "reset": (Reset(), {}),
    "reset at once": (Reset(after=0), {}),
    "short": (Short(), {}),
    "short by one": (Short(after=TENSOR_NBYTES - 1), {}),
    "hangup": (Hangup(), {}),
    "stall": (Stall(), BRISK),
    "stall at once": (Stall(after=0), BRISK),
    "slow start": (SlowStart(60.0), BRISK),
    "slow start in time": (SlowStart(0.05), {}),
    "trickle": (Trickle(30.0 * MIB), {}),
    "fewer": (Fewer(1000), {}),
    "ignored range": (IgnoreRange(), {}),
    "wrong range": (WrongRange(by=4096), {}),
    "wrong range before": (WrongRange(by=-4096), {}),
    "extra": (Extra(10), {}),
    "length too long": (LyingLength(10), {}),
    "length too short": (LyingLength(-10), {}),
    "gzip": (Gzip(), {}),
    "416": (Status(416, "InvalidRange"), {}),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("fault", rest_slow(CURED, quick=range(1, 24, 3)))
def test_a_request_that_fails_once_costs_little_and_ends_in_right_bytes(
    fault: str, verb: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    action, options = CURED[fault]
    model = model_for(verb, request)
    with serving(model, Rule(action, key="*.safetensors", min_start=PAST_OPENING, skip=1, times=1)) as server:
        run(verb, model, server, tmp_path / "dst", **options)
        assert sum(request.action is not None for request in server.requests) == 1
        assert model.nbytes <= server.bytes_asked < 1.2 * model.nbytes


@pytest.mark.parametrize(
    "fault",
    rest_slow(
        [name for name, (action, _) in CURED.items() if not isinstance(action, (Trickle, IgnoreRange))], quick=range(0, 22, 3)
    ),
)
def test_an_opening_that_fails_once_is_made_again(fault: str, model: Model, tmp_path: Path) -> None:
    action, options = CURED[fault]
    with serving(model, Rule(action, key="*.safetensors", times=1)) as server:
        run("stream", model, server, tmp_path, **options)
        assert server.requests[0].action or sum(request.action is not None for request in server.requests) == 1
        assert server.bytes_asked < 1.2 * model.nbytes


@pytest.mark.parametrize("fault", ["503", "500", "reset at once", "hangup", "stall at once", "400 RequestTimeout"])
def test_a_listing_that_fails_is_made_again(fault: str, model: Model, tmp_path: Path) -> None:
    action, options = CURED[fault]
    with serving(model, Rule(action, method="LIST", times=2)) as server:
        run("stream", model, server, tmp_path, **options)
        assert sum(request.action is not None for request in server.requests) == 2


@pytest.mark.parametrize("verb", VERBS)
def test_many_kinds_of_failures_at_once_end_in_right_bytes(verb: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model = model_for(verb, request)
    kinds = [Status(503), Reset(), Short(), Hangup(), Status(500, "InternalError"), WrongRange(by=64), Fewer(5)]
    rules = [Rule(kind, key="*.safetensors", skip=2 * index, times=1) for index, kind in enumerate(kinds)]
    with serving(model, *rules) as server:
        run(verb, model, server, tmp_path / "dst", attempts=6)
        assert sum(request.action is not None for request in server.requests) >= 4


@pytest.mark.slow
def test_a_slow_range_is_asked_for_twice_and_the_rest_is_not(large: Model, tmp_path: Path) -> None:
    with serving(large, Rule(Trickle(200.0), key="*.safetensors", min_start=PAST_OPENING, skip=9, times=1)) as server:
        stats = run("stream", large, server, tmp_path)
        assert stats is not None
        assert stats.hedged >= 1
        assert stats.hedged_nbytes <= LARGE_NBYTES + SHARDS * TENSORS
        assert server.bytes_asked < 1.2 * large.nbytes
        assert sum(request.left_early for request in server.requests) == 1


@pytest.mark.parametrize("verb", VERBS)
def test_keys_that_expire_in_mid_load_are_renewed(verb: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model = model_for(verb, request)
    tokens = ["token-number-one"]

    def give() -> S3Credentials:
        return credentials(server, session_token=tokens[-1])

    with serving(model, require_token=tokens[-1]) as server:
        server.hold()
        done = threading.Thread(target=rotate_after, args=(server, tokens, 5))
        done.start()
        try:
            run(verb, model, server, tmp_path / "dst", credentials=give)
        finally:
            server.let_go()
            done.join()
        refused = [request for request in server.requests if request.error == "ExpiredToken"]
        assert refused
        assert server.bytes_asked < 1.2 * model.nbytes


def rotate_after(server: S3Server, tokens: list[str], requests: int) -> None:
    """When so many requests have been answered, take another token; those that wait are held against it."""
    while len([request for request in server.requests if request.status]) < requests:
        if not server.wait_until(lambda: server.held > 0, 30):
            return
        server.release()
        server.wait_until(lambda: all(request.status for request in server.requests if request.took_s is not None), 30)
    server.wait_until(lambda: server.held > 0, 30)
    tokens.append("token-number-two")
    server.rotate(access_key="AKTEST", secret_key="SKTESTSECRET", token=tokens[-1])
    server.let_go()


@pytest.mark.parametrize("code", [301, 302, 307, 308])
def test_redirects_of_a_web_server_are_followed(code: int, model: Model, tmp_path: Path) -> None:
    public = {"models": Bucket(public=True)}
    with serving(model, buckets=public) as elsewhere, serving(model, buckets=public) as server:
        file = "model-00002-of-00004.safetensors"
        server.fail(Rule(Redirect(f"{elsewhere.url}/models/{PREFIX}/{file}", code), key=f"*/{file}"))
        run("load", model, server, tmp_path, url=f"{server.url}/models/{PREFIX}/")
        assert {request.key for request in elsewhere.requests} == {f"{PREFIX}/{file}"}


# ---- the right error


@dataclass(frozen=True)
class Ending:
    """How a load ends when a fault does not go away."""

    action: Action
    error: type[SourceError]
    status: int | None = None
    code: str | None = None
    attempts: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    is_also: type[BaseException] = OSError
    has_request: bool = True  # there is an answer, whose request the store's operators can look up


ENDINGS = {
    "503": Ending(Status(503), ThrottledError, 503, "SlowDown"),
    "429": Ending(Status(429, "TooManyRequests", {"Retry-After": "0"}), ThrottledError, 429, "TooManyRequests"),
    "500": Ending(Status(500, "InternalError"), UnavailableError, 500, "InternalError"),
    "502": Ending(Status(502, "BadGateway"), UnavailableError, 502, "BadGateway"),
    "400 RequestTimeout": Ending(Status(400, "RequestTimeout"), HttpTimeoutError, 400, "RequestTimeout", is_also=TimeoutError),
    "reset": Ending(Reset(after=1), UnreachableError, 206, is_also=ConnectionError),
    "hangup": Ending(Hangup(), UnreachableError, is_also=ConnectionError, has_request=False),
    "short": Ending(Short(after=0), HttpTruncatedError, 206, is_also=TruncatedError),
    "stall": Ending(Stall(after=0), HttpTimeoutError, 206, options=BRISK, is_also=SourceTimeoutError),
    "slow start": Ending(SlowStart(60.0), HttpTimeoutError, options=BRISK, is_also=TimeoutError, has_request=False),
    "trickle": Ending(Trickle(2000.0), HttpTimeoutError, 206, attempts=1, options={"deadline_s": 1.5}, is_also=TimeoutError),
    "fewer": Ending(Fewer(LARGE_NBYTES * 4), HttpTruncatedError, is_also=TruncatedError, has_request=False),
    "ignored range": Ending(IgnoreRange(), WrongRangeError, 200, attempts=2),
    "wrong range": Ending(WrongRange(by=-4096), WrongRangeError, 206, attempts=2),
    "extra": Ending(Extra(10), WrongRangeError, 206, attempts=2),
    "length too long": Ending(LyingLength(10), WrongRangeError, 206, attempts=2),
    "length too short": Ending(LyingLength(-10), WrongRangeError, 206, attempts=2),
    "gzip": Ending(Gzip(), WrongEncodingError, 200, attempts=2),
    "replaced": Ending(Replaced(), HttpChangedError, 412, "PreconditionFailed", attempts=1, is_also=SourceChangedError),
    "redirect": Ending(Redirect("http://127.0.0.1:9/x"), RedirectError, 307, "TemporaryRedirect", attempts=1),
    "expired": Ending(Status(400, "ExpiredToken"), ExpiredCredentialsError, 400, "ExpiredToken", 1, is_also=PermissionError),
    "403": Ending(Status(403, "AccessDenied"), AccessDeniedError, 403, "AccessDenied", 1, is_also=PermissionError),
    "404": Ending(Status(404, "NoSuchKey"), ObjectNotFoundError, 404, "NoSuchKey", 1, is_also=FileNotFoundError),
    "416": Ending(Status(416, "InvalidRange"), UnsatisfiableError, 416, "InvalidRange", 2),
}  # fmt: skip
FAILING = "model-00003-of-00004.safetensors"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("fault", rest_slow(ENDINGS, quick=range(0, 24, 3)))
def test_a_fault_that_stays_is_the_right_error(fault: str, verb: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    ending, model = ENDINGS[fault], model_for(verb, request)
    with serving(model, Rule(ending.action, key=f"*/{FAILING}", min_start=2 * MIB)) as server:
        with pytest.raises(ending.error) as caught:
            run(verb, model, server, tmp_path / "dst", attempts=3, **ending.options)
        assert_tells(caught.value, ending, server)
        assert server.bytes_asked < 2 * model.nbytes
    assert_nothing_wrong_in(tmp_path / "dst", model)


def assert_tells(error: SourceError, ending: Ending, server: S3Server) -> None:
    """All that is known of the failure is in the error, as fields and in words."""
    assert isinstance(error, ending.is_also)
    assert error.url == f"{URL}/{FAILING}"
    assert isinstance(error, HttpError)
    if ending.action == Reset(after=1) and error.status is None:  # what comes just before a reset may be lost with it
        ending = replace(ending, status=None, has_request=False)
    assert (error.status, error.code, error.attempts) == (ending.status, ending.code, ending.attempts)
    assert error.offset is not None
    assert error.nbytes is not None
    failed = [request for request in server.requests if request.action or request.status >= 400]
    failed = [request for request in failed if request.end == error.offset + error.nbytes and request.key.endswith(FAILING)]
    assert len(failed) >= ending.attempts
    assert all(request.start is not None and request.start >= error.offset for request in failed)
    assert error.request_id == (failed[-1].request_id if ending.has_request else None)
    assert error.hint
    assert error.hint in str(error)
    for told in (error.url, server.url, str(error.offset), str(error.nbytes), ending.code, error.request_id):
        assert told is None or told in str(error)
    assert ending.attempts == 1 or f"after {ending.attempts} tries" in str(error)
    assert "SKTESTSECRET" not in str(error)


def assert_nothing_wrong_in(dst: Path, model: Model) -> None:
    """A pull that failed leaves whole files only under their names, and never the one that could not be read."""
    files = model.files
    left = {path.name: path.read_bytes() for path in dst.iterdir() if path.is_file()} if dst.is_dir() else {}
    assert FAILING not in left
    assert all(data == files[name] for name, data in left.items())


@pytest.mark.parametrize("verb", ["stream", pytest.param("pull", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["503", "reset", "short", "stall", "wrong range", "gzip", "403", "404", "expired", "redirect"])
def test_an_opening_that_keeps_failing_is_the_right_error(fault: str, verb: str, model: Model, tmp_path: Path) -> None:
    ending = ENDINGS[fault]
    with serving(model, Rule(ending.action, key=f"*/{FAILING}")) as server:
        with pytest.raises(ending.error) as caught:
            run(verb, model, server, tmp_path / "dst", attempts=3, **ending.options)
        error = caught.value
        assert isinstance(error, HttpError)
        assert (error.url, error.code, error.attempts) == (f"{URL}/{FAILING}", ending.code, ending.attempts)
        assert error.status == ending.status or (fault, error.status) == ("reset", None)
        assert error.hint


def test_a_pull_that_failed_goes_on_where_it_was(large: Model, tmp_path: Path) -> None:
    with serving(large, Rule(Status(403, "AccessDenied"), key=f"*/{FAILING}", min_start=2 * MIB)) as server:
        with pytest.raises(AccessDeniedError):
            run("pull", large, server, tmp_path / "dst", concurrency=2)  # what is in flight is asked for again
        server.fail()
        run("pull", large, server, tmp_path / "dst", concurrency=2)
        assert server.bytes_asked < 1.5 * large.nbytes


# ---- what the statistics say


def test_statistics_are_what_the_server_counted(model: Model, tmp_path: Path) -> None:
    rules = [
        Rule(Status(503), key="*.safetensors", min_start=PAST_OPENING, skip=2, times=2),
        Rule(Short(after=TENSOR_NBYTES // 3), key="*.safetensors", min_start=PAST_OPENING, skip=6, times=1),
    ]
    with serving(model, *rules) as server:
        stats = run("stream", model, server, tmp_path)
        assert stats is not None
        asked = [request for request in server.requests if request.key.endswith(".safetensors")]
        assert stats.requests == len(asked)
        assert (stats.retried, stats.throttled, stats.hedged, stats.hedged_nbytes) == (3, 2, 0, 0)
        assert stats.received_nbytes == sum(request.sent for request in asked if request.status == 206)
        assert stats.received_nbytes == model.nbytes


def test_a_load_counts_its_own_traffic_and_not_that_of_others(model: Model) -> None:
    with serving(model) as server, headrace.open(URL, credentials=credentials(server)) as checkpoint:
        for _ in range(2):
            server.forget()
            with headrace.stream(checkpoint, **LEAN) as stream:
                assert stream.stats.requests == 0 or not stream.stats.tensors
                assert_equal(stream, model)
            assert stream.stats.requests == len(server.requests)
            assert stream.stats.received_nbytes == server.bytes_sent
        before = stream.stats
        headrace.load(checkpoint)
        assert stream.stats == before


def test_the_command_tells_of_the_network_where_there_is_one(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model, Rule(Status(503), key="*.safetensors", times=2)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKTEST")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SKTESTSECRET")
        told = " ".join(CliRunner().invoke(app, ["load", URL]).stdout.split())
        assert f"network {len([r for r in server.requests if r.key.endswith('.safetensors')])} requests, 2 made again" in told
        assert "2 of them put off by the store; 16 MiB received" in told
    local = CliRunner().invoke(app, ["load", str(model.folder)]).stdout
    assert "tensors" in local
    assert "network" not in local


# ---- and nothing is left


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    threads: int
    descriptors: int
    resident_nbytes: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        ours = [thread for thread in threading.enumerate() if not thread.name.startswith("headrace-s3server")]
        return cls(len(ours), len(os.listdir("/proc/self/fd")), resident)


def settled(server: S3Server) -> Held:
    """What is held once the server has seen the client's connections go."""
    assert server.wait_until(lambda: server.open_connections == 0)
    return Held.now()


NOW_AND_THEN = [
    Rule(kind, key="*.safetensors", skip=3 * index, every=29)
    for index, kind in enumerate([Status(503), Reset(), Short(), Hangup(), WrongRange(by=64)])
]


@pytest.mark.slow
@pytest.mark.parametrize("rules", [[], NOW_AND_THEN], ids=["well", "with faults"])
def test_twenty_loads_hold_no_more_than_three(rules: list[Rule], large: Model, tmp_path: Path) -> None:
    with serving(large, *rules) as server:
        for _ in range(3):
            run("stream", large, server, tmp_path, attempts=6)
            run("load", large, server, tmp_path, attempts=6)
        before = settled(server)
        for _ in range(10):
            run("stream", large, server, tmp_path, attempts=6)
            run("load", large, server, tmp_path, attempts=6)
        after = settled(server)
        assert (after.threads, after.descriptors) == (before.threads, before.descriptors)
        assert after.resident_nbytes - before.resident_nbytes < 16 * MIB
        assert bool(rules) == any(request.action for request in server.requests)


def leave(stream: headrace.TensorStream) -> None:
    next(stream)


def close(stream: headrace.TensorStream) -> None:
    next(stream)
    stream.close()


@pytest.mark.slow
@pytest.mark.parametrize("end", [leave, close])
@pytest.mark.parametrize("action", [None, Stall(after=1000), SlowStart(60.0), Trickle(1000.0)])
def test_a_load_that_is_abandoned_leaves_nothing(
    action: Action | None, end: Callable[[headrace.TensorStream], None], large: Model
) -> None:
    rules = [Rule(action, key="*.safetensors", min_start=PAST_OPENING, skip=4)] if action else []
    with serving(large) as server:
        before = Held.now()
        for _ in range(3):
            server.fail(*rules)
            end(headrace.stream(URL, credentials=credentials(server), concurrency=3, memory_limit=8 * MIB))
            after = settled(server)
            assert (after.threads, after.descriptors) == (before.threads, before.descriptors)
        assert answered(server.requests) >= 3


def answered(requests: list[Request]) -> int:
    return sum(request.status == 206 for request in requests)
