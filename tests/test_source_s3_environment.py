"""The environment that vLLM and Run:ai's streamer document for S3, one variable at a time, against a server on loopback.

docs/stores/s3.md lists those that have no meaning here, and why; a test keeps the two lists complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from budget import rest_slow
from checkpoints import KIB, MIB, bytes_of, random_contents, serialize

import headrace
from headrace._environment import S3Settings
from headrace._options import Options
from headrace.errors import OptionError, SourceError, SourceTimeoutError
from headrace.sources.http import TlsError
from headrace.sources.s3 import CredentialsError
from headrace.testing.s3server import Bucket, Rule, S3Server, Stall, Status, make_certificates

pytest.importorskip("botocore")

CONTENTS = random_contents(*[2 * MIB + i for i in range(8)])
FILES = {"llama/model.safetensors": serialize(CONTENTS)}
EXPECTED = {name: entry.data for name, entry in CONTENTS.items()}
URL = "s3://models/llama"
DOCS = Path(__file__).parent.parent / "docs/stores/s3.md"


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing that this machine may have set counts here."""
    for line in Path("/proc/self/environ").read_text().split("\0"):
        name = line.partition("=")[0]
        if name.startswith(("AWS_", "RUNAI_", "HEADRACE_")) or name.lower().endswith(("_proxy", "_bundle", "_cert_file")):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


class Around(NamedTuple):
    """What a case has at hand."""

    server: S3Server
    setenv: Callable[[str, str], None]
    folder: Path


@contextlib.contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **options: Any) -> Iterator[Around]:
    """A server that the environment leads to, as the documented commands have it."""
    with S3Server({"models": FILES}, **options) as server:
        surroundings = {
            "AWS_ACCESS_KEY_ID": "AKTEST",
            "AWS_SECRET_ACCESS_KEY": "SKTESTSECRET",
            "AWS_ENDPOINT_URL": server.url,
            "AWS_REGION": "us-east-1",
        }
        for name, text in surroundings.items():
            monkeypatch.setenv(name, text)
        yield Around(server, monkeypatch.setenv, tmp_path)


def loads(**options: Any) -> headrace.Snapshot:
    """Load all and compare it."""
    with headrace.stream(URL, **options) as stream:
        assert {name: bytes_of(tensor) for name, tensor in stream} == EXPECTED
    return stream.stats


# ---- what each variable does


def endpoint_of_s3(it: Around) -> None:
    it.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    it.setenv("AWS_ENDPOINT_URL_S3", it.server.url)
    loads()


def endpoint_of_the_streamer(it: Around) -> None:
    it.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    it.setenv("RUNAI_STREAMER_S3_ENDPOINT", it.server.url)
    loads()


def endpoint(it: Around) -> None:
    loads()
    assert {request.headers["host"] for request in it.server.requests} == {f"127.0.0.1:{it.server.port}"}


def access_key(it: Around) -> None:
    loads()
    assert all("Credential=AKTEST/" in request.headers["authorization"] for request in it.server.requests)
    it.setenv("AWS_ACCESS_KEY_ID", "NOBODY")
    with pytest.raises(CredentialsError):
        loads()


def secret_key(it: Around) -> None:
    it.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(CredentialsError):
        loads()


def session_token(it: Around) -> None:
    it.server.rotate(access_key="AKTEST", secret_key="SKTESTSECRET", token="the-token")
    it.setenv("AWS_SESSION_TOKEN", "the-token")
    loads()
    assert {request.headers["x-amz-security-token"] for request in it.server.requests} == {"the-token"}


def region(name: str) -> Callable[[Around], None]:
    def case(it: Around) -> None:
        it.setenv("AWS_REGION", "")
        it.setenv(name, "us-east-1")
        loads()
        assert all("/us-east-1/s3/" in request.headers["authorization"] for request in it.server.requests)
        assert not [request for request in it.server.requests if request.error and request.error != "NoSuchKey"]

    return case


def profile(it: Around) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        it.setenv(name, "")
    (it.folder / "credentials").write_text("[work]\naws_access_key_id=AKTEST\naws_secret_access_key=SKTESTSECRET\n")
    it.setenv("AWS_PROFILE", "work")
    loads()


def config_file(it: Around) -> None:
    (it.folder / "other").write_text(f"[default]\nendpoint_url={it.server.url}\nregion=us-east-1\n")
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION"):
        it.setenv(name, "")
    it.setenv("AWS_CONFIG_FILE", str(it.folder / "other"))
    loads()


def credentials_file(it: Around) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        it.setenv(name, "")
    (it.folder / "other").write_text("[default]\naws_access_key_id=AKTEST\naws_secret_access_key=SKTESTSECRET\n")
    it.setenv("AWS_SHARED_CREDENTIALS_FILE", str(it.folder / "other"))
    loads()


def no_metadata(it: Around) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        it.setenv(name, "")
    it.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{it.server.url}/")
    it.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(CredentialsError, match="no AWS credentials"):
        loads()
    assert not it.server.requests


def unsigned(it: Around) -> None:
    for text, signed in (("0", True), ("1", False), ("true", False), ("false", True)):
        it.server.forget()
        it.setenv("AWS_ACCESS_KEY_ID", "AKTEST")
        it.setenv("RUNAI_STREAMER_S3_UNSIGNED", text)
        loads()
        assert {"authorization" in request.headers for request in it.server.requests} == {signed}
    it.setenv("RUNAI_STREAMER_S3_UNSIGNED", "perhaps")
    with pytest.raises(OptionError, match="RUNAI_STREAMER_S3_UNSIGNED"):
        loads()


def virtual_addressing(it: Around) -> None:
    it.setenv("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "0")
    loads()
    assert {request.headers["host"] for request in it.server.requests} == {f"127.0.0.1:{it.server.port}"}
    it.server.forget()
    it.setenv("http_proxy", it.server.url)  # so that no DNS is needed
    it.setenv("AWS_ENDPOINT_URL", f"http://s3.localhost:{it.server.port}")
    it.setenv("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "1")
    loads()
    assert {request.headers["host"] for request in it.server.requests} == {f"models.s3.localhost:{it.server.port}"}


def concurrency(it: Around) -> None:
    it.setenv("RUNAI_STREAMER_CONCURRENCY", "3")
    assert loads(memory_limit="1GiB").concurrency == 3
    data = [request for request in it.server.requests if (request.start or 0) >= 64 * KIB]
    assert max(request.inflight for request in data) <= 3
    it.setenv("RUNAI_STREAMER_CONCURRENCY", "0")
    with pytest.raises(OptionError, match="RUNAI_STREAMER_CONCURRENCY"):
        loads()


def memory_limit(it: Around) -> None:
    for text, peak in (("0", 2 * MIB + 64 * KIB), (str(6 * MIB), 6 * MIB + 64 * KIB), ("-1", 64 * MIB)):
        it.setenv("RUNAI_STREAMER_MEMORY_LIMIT", text)
        with headrace.stream(URL) as stream:
            for item in stream:
                del item
        assert stream.stats.peak_nbytes <= peak, text


def chunk(it: Around) -> None:
    it.setenv("RUNAI_STREAMER_CHUNK_BYTESIZE", str(6 * MIB))
    with headrace.open(URL) as checkpoint:
        assert headrace.plan(checkpoint).reads[0].nbytes <= 6 * MIB
        assert checkpoint.options.network_chunk_nbytes == 6 * MIB
    it.setenv("RUNAI_STREAMER_CHUNK_BYTESIZE", str(2 * MIB))  # fewer than Run:ai allows for stores
    assert Options.from_environment().network_chunk_nbytes == 5 * MIB
    loads()


def process_group(it: Around) -> None:
    it.setenv("RUNAI_STREAMER_PROCESS_GROUP_SIZE", "4")
    it.setenv("RUNAI_STREAMER_CONCURRENCY", "16")
    assert loads().concurrency == 4


def retries(it: Around) -> None:
    it.server.fail(Rule(Status(500, "InternalError"), key="*.safetensors"))
    it.setenv("RUNAI_STREAMER_S3_MAX_RETRIES", "2")
    with pytest.raises(SourceError) as caught:
        loads()
    assert caught.value.attempts == 3
    it.setenv("RUNAI_STREAMER_S3_MAX_RETRIES", "0")
    assert Options.from_environment().attempts is None


def request_timeout(it: Around) -> None:
    it.server.fail(Rule(Stall(after=0), key="*.safetensors"))
    it.setenv("RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS", "100")
    with pytest.raises(SourceTimeoutError, match=r"0\.1 s"):
        loads(attempts=2)


CASES: Mapping[str, Callable[[Around], None]] = {
    "AWS_ACCESS_KEY_ID": access_key,
    "AWS_SECRET_ACCESS_KEY": secret_key,
    "AWS_SESSION_TOKEN": session_token,
    "AWS_ENDPOINT_URL": endpoint,
    "AWS_ENDPOINT_URL_S3": endpoint_of_s3,
    "AWS_REGION": region("AWS_REGION"),
    "AWS_DEFAULT_REGION": region("AWS_DEFAULT_REGION"),
    "AWS_PROFILE": profile,
    "AWS_CONFIG_FILE": config_file,
    "AWS_SHARED_CREDENTIALS_FILE": credentials_file,
    "AWS_EC2_METADATA_DISABLED": no_metadata,
    "RUNAI_STREAMER_S3_ENDPOINT": endpoint_of_the_streamer,
    "RUNAI_STREAMER_S3_UNSIGNED": unsigned,
    "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": virtual_addressing,
    "RUNAI_STREAMER_CONCURRENCY": concurrency,
    "RUNAI_STREAMER_MEMORY_LIMIT": memory_limit,
    "RUNAI_STREAMER_CHUNK_BYTESIZE": chunk,
    "RUNAI_STREAMER_PROCESS_GROUP_SIZE": process_group,
    "RUNAI_STREAMER_S3_MAX_RETRIES": retries,
    "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS": request_timeout,
}


@pytest.mark.parametrize("variable", rest_slow(CASES, quick=range(0, 20, 2)))
def test_a_variable_means_here_what_it_means_there(variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving(monkeypatch, tmp_path, buckets={"models": Bucket(public=True)}) as it:
        CASES[variable](it)


def test_the_bundle_of_aws_is_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    with serving(monkeypatch, tmp_path, tls=(made.cert, made.key)) as it:
        with pytest.raises(TlsError):
            loads()
        it.setenv("AWS_CA_BUNDLE", str(made.ca))
        loads()


UNUSED = {
    "RUNAI_STREAMER_OBJ_CONCURRENCY": "7",
    "RUNAI_STREAMER_S3_MAX_CONNECTIONS": "2",
    "RUNAI_STREAMER_S3_TIMEOUT": "1",
    "RUNAI_STREAMER_S3_LOW_SPEED_LIMIT": "1000000",
    "RUNAI_STREAMER_S3_TARGET_GBPS": "1",
    "RUNAI_STREAMER_S3_MAX_INFLIGHT_MIB": "1",
    "RUNAI_STREAMER_INFLIGHT_WINDOW_MARGIN": "1",
    "RUNAI_STREAMER_S3_CLIENT_PART_SIZE": "1",
    "RUNAI_STREAMER_S3_TRACE": "1",
    "RUNAI_STREAMER_OVERRIDE_ENDPOINT_URL": "false",
    "RUNAI_STREAMER_NO_BOTO3_SESSION": "1",
    "RUNAI_STREAMER_RING_BUFFERS": "1",
}


def test_variables_without_a_meaning_here_change_nothing_and_are_in_the_docs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = DOCS.read_text()
    for variable, value in UNUSED.items():
        monkeypatch.setenv(variable, value)
        assert variable.removeprefix("RUNAI_STREAMER_") in text, variable
    assert Options.from_environment() == Options()
    with serving(monkeypatch, tmp_path) as it:
        assert S3Settings.from_environment() == S3Settings(endpoint=it.server.url, region="us-east-1")
        loads()


def test_the_docs_name_every_variable_that_means_something() -> None:
    text = DOCS.read_text()
    assert [name for name in CASES if name not in text and name.removeprefix("RUNAI_STREAMER_") not in text] == []
