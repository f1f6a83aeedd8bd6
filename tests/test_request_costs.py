"""What a request costs beside its bytes: heads that are read without http.client, signatures that serve more than one range."""

from __future__ import annotations

import http.client
import io
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_contents, write
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.sources.http import Headers
from headrace.sources.http._connection import _PLAIN_FIELDS, _parse_head, encode_request
from headrace.sources.http._failures import Failure
from headrace.testing.s3server import Rule, S3Server, Status

pytest.importorskip("botocore")

from headrace._environment import S3Settings
from headrace.sources.s3 import S3Credentials, S3Store
from headrace.sources.s3 import _identity as identity_module
from headrace.sources.s3._identity import Identity

# ---- heads

TOKEN = st.text("!#$%&'*+.^_`|~-0123456789abcdefXYZ", min_size=1, max_size=12)
VALUE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E) | st.just("\t"), max_size=30)
FIELDS = st.lists(st.tuples(TOKEN, VALUE), max_size=8)


def by_the_library(raw: bytes) -> list[tuple[str, str]]:
    return [(name, value.strip(" \t")) for name, value in http.client.parse_headers(io.BytesIO(raw)).items()]


def found(headers: Headers, names: list[str]) -> list[list[str]]:
    return [[value.strip(" \t") for value in headers.get_all(name)] for name in names]


@given(FIELDS, st.sampled_from(["\r\n", "\n"]))
@example([("Content-Length", " 5"), ("content-length", "5 "), ("ETag", '"a:b"')], "\r\n")
def test_plain_heads_are_read_as_the_library_reads_them(fields: list[tuple[str, str]], end: str) -> None:
    raw = "".join(f"{name}:{value}{end}" for name, value in fields).encode() + end.encode()
    assert _PLAIN_FIELDS.fullmatch(raw)
    status, is_new, headers = _parse_head(b"HTTP/1.1 206 Partial Content\r\n" + raw)
    names = [name for name, _ in fields]
    assert (status, is_new) == (206, True)
    assert found(headers, names) == found(Headers(by_the_library(raw)), names)


@pytest.mark.parametrize(
    "raw",
    [b"A: b\r\n c\r\n\r\n", b"A : b\r\n\r\n", b"A: \xe9\r\n\r\n", b"A: b\x00\r\n\r\n", b"A: b\rC: d\r\n\r\n", b" A: b\r\n\r\n"],
)
def test_what_is_not_plain_is_left_to_the_library(raw: bytes) -> None:
    assert not _PLAIN_FIELDS.fullmatch(raw)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_head_or_a_failure(raw: bytes) -> None:
    with suppress(Failure):
        status, _, headers = _parse_head(b"HTTP/1.1 200 OK\r\n" + raw + b"\r\n\r\n")
        assert status == 200
        assert headers.get("no-such-field") is None


@given(FIELDS, st.integers(0, 7), st.sampled_from("\r\n\0"), st.booleans())
def test_no_field_smuggles_another_one(fields: list[tuple[str, str]], at: int, end: str, in_name: bool) -> None:
    fields = [*fields, ("X", "y")]
    name, value = fields[at % len(fields)]
    broken = dict(fields) | ({f"{name}{end}": value} if in_name else {name: f"{value}{end}Evil: 1"})
    with pytest.raises(Failure):
        encode_request("GET", "/m", broken)
    assert encode_request("GET", "/m", dict(fields)).count(b"\n") == 2 + len(dict(fields))


# ---- signatures

URL = "http://store/models/m/model.safetensors"
RANGE = {"Host": "store", "Range": "bytes=0-9", "If-Match": '"x"'}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Urls for which a signature was made."""
    urls: list[str] = []
    make = Identity._signature

    def note(url: str, *args: Any, **given: Any) -> dict[str, str]:
        urls.append(url)
        return make(url, *args, **given)

    monkeypatch.setattr(Identity, "_signature", staticmethod(note))
    return urls


def identity(give: Any = None) -> Identity:
    keys = S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", session_token="T")
    return Identity(give or keys, S3Settings())


def test_one_signature_serves_all_ranges_of_an_object(made: list[str]) -> None:
    signer = identity()
    first = signer.sign(URL, RANGE, region="us-east-1")
    assert signer.sign(URL, RANGE | {"Range": "bytes=10-19"}, region="us-east-1") == first
    assert len(made) == 1


def test_what_is_signed_is_signed_for_itself(made: list[str]) -> None:
    signer = identity()
    signer.sign(URL, RANGE, region="us-east-1")
    signer.sign(f"{URL}?x=1", RANGE, region="us-east-1")
    signer.sign(URL, RANGE, region="eu-west-1")
    signer.sign(URL, RANGE, region="us-east-1", method="HEAD")
    signer.sign(URL, RANGE | {"Host": "elsewhere"}, region="us-east-1")
    signer.sign(URL, RANGE | {"x-amz-request-payer": "requester"}, region="us-east-1")
    assert len(made) == 6


def test_an_answer_may_be_changed_by_who_gets_it(made: list[str]) -> None:
    signer = identity()
    signer.sign(URL, RANGE, region="us-east-1").clear()
    assert "Authorization" in signer.sign(URL, RANGE, region="us-east-1")
    assert len(made) == 1


def test_a_signature_grows_old(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, signer = Clock(), identity()
    monkeypatch.setattr(identity_module, "time", clock)
    for seconds in (0, 59, 2, 59, 2):
        clock.now += seconds
        signer.sign(URL, RANGE, region="us-east-1")
    assert len(made) == 3


def test_newer_keys_are_never_signed_with_by_an_older_signature(made: list[str]) -> None:
    numbers = iter(range(10))
    signer = identity(lambda: S3Credentials(access_key_id=f"AK{next(numbers)}", secret_access_key="S"))
    before = signer.sign(URL, RANGE, region="us-east-1")
    signer.note_refusal()
    after = signer.sign(URL, RANGE, region="us-east-1")
    assert before["Authorization"] != after["Authorization"]
    assert len(made) == 2


def test_signatures_of_many_objects_do_not_pile_up(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "_SIGNATURES", 8)
    signer = identity()
    for i in range(50):
        signer.sign(f"{URL}{i}", RANGE, region="us-east-1")
        assert len(signer._signatures) <= 8
    assert len(made) == 50


def test_the_server_takes_one_signature_for_many_ranges_from_many_threads(made: list[str]) -> None:
    data = bytes(range(256)) * 4096
    with S3Server({"models": {"a.bin": data}}) as server:
        store = S3Store(S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url))
        source = store.open("s3://models/a.bin", prefix_nbytes=1)
        ready = threading.Barrier(8)

        def read(i: int) -> bool:
            ready.wait(30)
            buffer = bytearray(10_000)
            source.read_into(i * 10_000, memoryview(buffer))
            return bytes(buffer) == data[i * 10_000 : (i + 1) * 10_000]

        with ThreadPoolExecutor(8) as threads:
            assert all(threads.map(read, range(8)))
        assert len(made) == 1
        source.close()


def test_a_refusal_has_the_next_try_signed_anew(made: list[str]) -> None:
    data = bytes(1000)
    refusal = Rule(Status(403, "ExpiredToken"), times=1, min_start=1)
    keys = S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET")
    with S3Server({"models": {"a.bin": data}}, faults=[refusal]) as server:
        store = S3Store(lambda: S3Credentials(**{**_fields(keys), "endpoint": server.url}))
        source = store.open("s3://models/a.bin", prefix_nbytes=1)
        buffer = bytearray(500)
        source.read_into(100, memoryview(buffer))
        assert bytes(buffer) == data[100:600]
        assert len(made) == 2
        source.close()


def _fields(credentials: S3Credentials) -> dict[str, Any]:
    return {name: getattr(credentials, name) for name in ("access_key_id", "secret_access_key")}


# ---- before the first request


def test_keys_in_the_environment_take_no_session_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    session = pytest.importorskip("botocore.session")
    made: list[bool] = []
    make = session.Session

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs.get("include_builtin_handlers", True))
        return make(*args, **kwargs)

    monkeypatch.setattr(session, "Session", counted)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "aSecretThatNobodySees")
    identity = Identity(None, S3Settings())
    assert (
        "Credential=AK/"
        in identity.sign("https://b.example.org/k", {"Host": "b.example.org"}, region=identity.region())["Authorization"]
    )
    assert made == [False]


@pytest.mark.slow
def test_a_load_to_host_memory_does_not_wait_for_the_modules_of_devices(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", random_contents(1000))
    program = (
        "import sys, headrace; headrace.load(sys.argv[1]);"
        "print([name for name in ('_pipeline', '_ring', '_pinned') if f'headrace.{name}' in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "m.safetensors")]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "[]"
