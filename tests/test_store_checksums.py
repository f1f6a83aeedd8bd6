"""The checksums of whole objects that GCS and Azure tell, and the libraries that compute what Python itself does not."""

from __future__ import annotations

import base64
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from azure_server import KEY, AzureServer
from checkpoints import random_contents, serialize, wrong
from gcs_server import GcsServer
from http_servers import fault

import headrace
from headrace._digests import HASHERS, digest_of, uncomputed
from headrace.errors import IntegrityError, OptionError, SourceChangedError, SourcePermissionError
from headrace.sources.azure import AzureCredentials, AzureStore
from headrace.sources.azure._store import parse_checksums as parse_azure
from headrace.sources.gcs import GcsCredentials, GcsStore
from headrace.sources.gcs._store import parse_checksums as parse_gcs
from headrace.sources.http import Headers
from headrace.sources.memory import MemorySource
from headrace.testing.s3server.checksums import checksum

CONTENTS = random_contents(200_000, 7, 90_000)
DATA = serialize(CONTENTS)
KEY_NAME = "m/model.safetensors"
MD5 = base64.b64encode(hashlib.md5(DATA).digest()).decode()
HEX_MD5 = hashlib.md5(DATA).hexdigest()
CRC32C = checksum("crc32c", [DATA])


class Served:
    """A store with one model, whatever kind it is."""

    def __init__(self, url: str, credentials: Any, server: Any, store: Any) -> None:
        self.url, self.credentials, self.server, self.store = url, credentials, server, store

    def load(self, **given: Any) -> dict[str, Any]:
        found: dict[str, Any] = headrace.load(self.url, credentials=self.credentials, **given)
        return found

    @property
    def heads(self) -> int:
        return sum(seen.method == "HEAD" for seen in self.server.seen)


@contextmanager
def gcs(*faults: Any, told: Mapping[str, str] | None = None, data: bytes = DATA) -> Iterator[Served]:
    with GcsServer({"models": {KEY_NAME: data}}, list(faults)) as server:
        server.hashes["models", KEY_NAME] = dict(told if told is not None else {"crc32c": CRC32C, "md5": MD5})
        credentials = GcsCredentials(anonymous=True, endpoint=server.base)
        yield Served("gs://models/m", credentials, server, GcsStore(credentials))


@contextmanager
def azure(*faults: Any, told: Mapping[str, str] | None = None, data: bytes = DATA) -> Iterator[Served]:
    pytest.importorskip("azure.storage.blob")
    with AzureServer({"models": {KEY_NAME: data}}, list(faults)) as server:
        server.md5s["models", KEY_NAME] = (told if told is not None else {"md5": MD5}).get("md5", "")
        credentials = AzureCredentials(account_key=KEY, endpoint=server.endpoint)
        yield Served("az://models/m", credentials, server, AzureStore(credentials))


STORES = {"gs": gcs, "az": azure}
each_store = pytest.mark.parametrize("serve", STORES.values(), ids=STORES)


@pytest.fixture(autouse=True)
def nothing_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library that this machine may have."""
    for name in ("awscrt.checksums", "google_crc32c", "anycrc"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


@each_store
def test_the_md5_of_the_store_serves_a_load(serve: Any) -> None:
    with serve() as served:
        assert not wrong(served.load(verify=True), CONTENTS)
        assert served.heads == 1
        route = headrace.plan(served.url, credentials=served.credentials, verify=True).routes[0].reason
        assert "md5 of the whole file, in order, from the store" in route


@each_store
def test_a_bit_that_flips_on_the_way_is_found(serve: Any) -> None:
    with serve(fault("flip", min_start=65_536)) as served:
        with pytest.raises(IntegrityError) as caught:
            served.load(verify=True)
        assert (caught.value.expected, len(caught.value.found or "")) == (HEX_MD5, 32)


@each_store
def test_a_folder_is_verified_by_what_the_store_tells(serve: Any) -> None:
    with serve() as served:
        report = headrace.verify(served.url, credentials=served.credentials)
        assert (report.ok, [file.checked_by for file in report.files]) == (True, ["md5 from the store"])
    with serve(data=DATA[:-1] + b"\0") as served:
        assert not headrace.verify(served.url, credentials=served.credentials).ok


@each_store
def test_a_store_that_tells_nothing_is_not_verified(serve: Any) -> None:
    with serve(told={}) as served:
        with pytest.raises(OptionError):
            served.load(verify=True)
        assert not wrong(served.load(verify="auto"), CONTENTS)


@each_store
def test_without_verification_nothing_is_asked(serve: Any) -> None:
    with serve() as served:
        served.load()
        assert served.heads == 0


@each_store
def test_checksums_are_asked_for_once(serve: Any) -> None:
    with serve() as served:
        source = served.store.open(f"{served.url}/model.safetensors")
        assert source.checksums == source.checksums
        assert source.checksums["md5"] == HEX_MD5
        assert served.heads == 1
        source.close()


@each_store
def test_an_object_replaced_before_its_checksum_was_asked_for_is_found(serve: Any) -> None:
    with serve() as served:
        source = served.store.open(f"{served.url}/model.safetensors")
        other = serialize(random_contents(200_000, 7, 90_001))
        if serve is gcs:
            served.server.put("models", KEY_NAME, other)
        else:
            for path in served.server.files:
                served.server.files[path] = other
        with pytest.raises(SourceChangedError):
            digest_of(source)
        source.close()


@each_store
def test_a_head_that_is_refused_is_an_error_of_the_store(serve: Any) -> None:
    with serve() as served:
        source = served.store.open(f"{served.url}/model.safetensors")
        served.server.faults.append(fault("status", code=403))
        with pytest.raises(SourcePermissionError) as caught:
            digest_of(source)
        assert caught.value.url == f"{served.url}/model.safetensors"
        source.close()


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([("x-goog-hash", f"crc32c=AAAAAA==,md5={MD5}")], {"crc32c": "00000000", "md5": HEX_MD5}),
        ([("x-goog-hash", "crc32c=AAAAAA=="), ("x-goog-hash", f"md5={MD5}")], {"crc32c": "00000000", "md5": HEX_MD5}),
        ([("x-goog-hash", "crc32c=AAAAAAAA")], {}),
        ([("x-goog-hash", "crc32c=?,md5=,sha9=AAAA")], {}),
        ([("x-goog-hash", "")], {}),
        ([], {}),
    ],
)
def test_what_google_tells_is_read_exactly(headers: list[tuple[str, str]], found: dict[str, str]) -> None:
    assert parse_gcs(Headers(headers)) == found


def test_what_azure_tells_is_read_exactly() -> None:
    assert parse_azure(Headers([("Content-MD5", MD5)])) == {"md5": HEX_MD5}
    assert parse_azure(Headers([("Content-MD5", "AAAA")])) == parse_azure(Headers([])) == {}


# ---- what computes them


def slow_crc(name: str) -> Any:
    """A checksum bit by bit, that goes on from the last value."""
    polynomial, bits = {"crc32c": (0x82F63B78, 32), "crc64nvme": (0x9A6C9329AC4BC9B5, 64)}[name]
    ones = (1 << bits) - 1

    def go_on(data: Any, value: int = 0) -> int:
        value ^= ones
        for byte in data:
            value ^= byte
            for _ in range(8):
                value = (value >> 1) ^ (polynomial if value & 1 else 0)
        return value ^ ones

    return go_on


def play(monkeypatch: pytest.MonkeyPatch, library: str, implementation: str = "c") -> None:
    """A stand-in for a library, with the function that headrace uses and its peculiarities."""
    module: Any = types.ModuleType(library)
    if library == "google_crc32c":

        def extend(value: int, data: bytes) -> int:
            assert type(data) is bytes, "the library takes nothing that can change"
            found: int = slow_crc("crc32c")(data, value)
            return found

        module.extend, module.implementation = extend, implementation
    elif library == "anycrc":
        module.Model = lambda name: types.SimpleNamespace(calc=slow_crc({"CRC32C": "crc32c", "CRC64-NVME": "crc64nvme"}[name]))
    else:
        monkeypatch.setitem(sys.modules, "awscrt", types.ModuleType("awscrt"))
        module.crc32c, module.crc64nvme = slow_crc("crc32c"), slow_crc("crc64nvme")
    monkeypatch.setitem(sys.modules, library, module)


@pytest.mark.parametrize(
    ("algorithm", "library"),
    [
        ("crc32c", "awscrt.checksums"),
        ("crc32c", "google_crc32c"),
        ("crc32c", "anycrc"),
        ("crc64nvme", "awscrt.checksums"),
        ("crc64nvme", "anycrc"),
    ],
)
def test_any_library_that_computes_a_checksum_serves(monkeypatch: pytest.MonkeyPatch, algorithm: str, library: str) -> None:
    with pytest.raises(ImportError):
        HASHERS[algorithm]()
    play(monkeypatch, library)
    hasher = HASHERS[algorithm]()
    hasher.update(memoryview(bytearray(b"12345")))
    hasher.update(memoryview(b"6789"))
    assert hasher.hexdigest() == {"crc32c": "e3069283", "crc64nvme": "ae8b14860a799888"}[algorithm]  # of the catalogue of CRCs


def test_a_library_without_its_quick_part_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "google_crc32c", implementation="python")
    with pytest.raises(ImportError):
        HASHERS["crc32c"]()


def test_a_composed_object_of_google_is_checked_by_its_crc32c(monkeypatch: pytest.MonkeyPatch) -> None:
    with gcs(told={"crc32c": CRC32C}) as served:
        with pytest.raises(OptionError, match=r"headrace\[checksums\]"):
            served.load(verify=True)
        with pytest.raises(OptionError, match=r"headrace\[checksums\]"):
            headrace.verify(served.url, credentials=served.credentials)
        play(monkeypatch, "anycrc")
        assert not wrong(served.load(verify=True), CONTENTS)


def test_what_is_told_and_cannot_be_computed_is_named() -> None:
    class Told(MemorySource):
        checksums = {"crc32c": "00000000", "crc64nvme": "0", "new": "0"}  # noqa: RUF012

    assert uncomputed(Told(b"")) == ("crc64nvme", "crc32c")
    assert uncomputed(MemorySource(b"")) == ()
