"""Google Cloud Storage against a server of our own and fake-gcs-server: contracts, tokens of all kinds, generations, errors."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from checkpoints import Entry as TensorEntry
from checkpoints import bytes_of, serialize
from gcs_emulator import Emulator, running
from gcs_server import (
    ACCOUNT,
    CLIENT_SECRET,
    REFRESH_TOKEN,
    SUBJECT_TOKEN,
    GcsServer,
    write_federated,
    write_service_account,
    write_user,
)
from http_servers import Certificates, ProxyServer, fault, free_port
from hypothesis import given
from hypothesis import strategies as st
from stores import DATA, KIB, NESTED, QUICK, PrefixFolderTests, PrefixTests, Served, forget

import headrace
from headrace._environment import GcsSettings
from headrace._options import Options
from headrace._remote import Remote
from headrace.errors import OptionError, SourceChangedError, SourceError, SourceNotFoundError
from headrace.sources.gcs import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    ExpiredCredentialsError,
    GcsCredentials,
    GcsError,
    GcsFolder,
    GcsSource,
    GcsStore,
    ObjectNotFoundError,
    open_gcs,
)
from headrace.sources.gcs._address import Place, parse_url
from headrace.sources.gcs._errors import parse_complaint
from headrace.sources.gcs._listing import parse_json_page, parse_xml_page
from headrace.sources.gcs._transport import Transport
from headrace.sources.http import (
    HttpError,
    RefusedError,
    ThrottledError,
    WrongAnswerError,
    WrongEncodingError,
)
from headrace.testing import SourceTests
from headrace.testing.s3server import S3Server
from headrace.testing.sources import error_of, pattern, read

pytest.importorskip("google.auth")

HEADRACE = Path(sys.executable).parent / "headrace"
HMAC_ID, HMAC_SECRET = "GOOGTESTTESTTEST0001", "hmac-secret-0123456789abcdefABCDEF0123456"
VARIABLES = [
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_CLOUD_PROJECT",
    "GOOGLE_CLOUD_QUOTA_PROJECT",
    "GOOGLE_CLOUD_UNIVERSE_DOMAIN",
    "GCE_METADATA_HOST",
    "GCE_METADATA_IP",
    "RUNAI_STREAMER_GCS_CREDENTIAL_FILE",
    "RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS",
    "STORAGE_EMULATOR_HOST",
]


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no file of Google's that this machine may have counts here."""
    forget(monkeypatch, VARIABLES)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    with running(tmp_path_factory.mktemp("emulator")) as started:
        yield started


@pytest.fixture(scope="session")
def key_pair() -> tuple[str, bytes]:
    """(private, public) key of a service account, as PEM."""
    rsa = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.rsa")
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private.decode(), key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)


@contextlib.contextmanager
def serving(content: Any = None, **options: Any) -> Iterator[GcsServer]:
    with GcsServer({"models": {"m/a.bin": DATA}} if content is None else content, **options) as server:
        yield server


def nobody(server: GcsServer | Emulator, **more: Any) -> GcsStore:
    endpoint = server.base if isinstance(server, GcsServer) else server.url
    return GcsStore(GcsCredentials(anonymous=True, endpoint=endpoint, **more), access=QUICK)


def store(server: GcsServer, **more: Any) -> GcsStore:
    """A store that has a token of the server's, unless credentials say otherwise."""
    given = more or {"token": server.issue()}
    return GcsStore(GcsCredentials(endpoint=server.base, **given), access=QUICK)


@contextlib.contextmanager
def opened(where: GcsStore, url: str = "gs://models/m/a.bin", *, prefix_nbytes: int = KIB) -> Iterator[GcsSource]:
    with contextlib.closing(where.open(url, prefix_nbytes=prefix_nbytes)) as source:
        yield source


# ---- the contracts, against both servers


class TestGcsSource(Served, SourceTests):
    def make(self, data: bytes) -> GcsSource:
        server = self.stack.enter_context(serving({"models": {"a b/größe+%20#?.bin": data}}, private=True))
        return store(server).open("gs://models/a b/größe+%20#?.bin", prefix_nbytes=KIB)


class OurStore:
    scheme = "gs"

    def store(self: Any, content: dict[str, bytes]) -> tuple[GcsStore, str]:
        return nobody(self.stack.enter_context(serving({"models": content}))), "models"


class TestGcsFolder(OurStore, PrefixFolderTests): ...


class TestGcsFolderThatIsABucket(TestGcsFolder):
    prefix = ""


class TestGcsPrefix(OurStore, PrefixTests):
    missing = ObjectNotFoundError


class InTheEmulator:
    scheme = "gs"

    @pytest.fixture(autouse=True)
    def servers(self, emulator: Emulator) -> None:
        self.emulator = emulator

    def store(self, content: dict[str, bytes]) -> tuple[GcsStore, str]:
        return nobody(self.emulator), self.emulator.bucket(content)


class TestEmulatedSource(InTheEmulator, SourceTests):
    def make(self, data: bytes) -> GcsSource:
        where, bucket = self.store({"a b/größe+%20#?.bin": data})
        return where.open(f"gs://{bucket}/a b/größe+%20#?.bin", prefix_nbytes=KIB)


class TestEmulatedFolder(InTheEmulator, PrefixFolderTests): ...


class TestEmulatedPrefix(InTheEmulator, PrefixTests):
    missing = ObjectNotFoundError


# ---- folders

WEIRD = {
    "m/a b": b"1",
    "m/100%": b"2",
    "m/a+b": b"3",
    "m/é": b"4",
    "m/#": b"5",
    "m/?": b"6",
    "m/%20": b"7",
    "m/&=;:@!$'()*,": b"8",
}


@pytest.fixture(params=["ours", "emulator"])
def place(request: pytest.FixtureRequest) -> Iterator[Callable[[dict[str, bytes]], tuple[GcsStore, str]]]:
    """Makes (store, name of a bucket) of objects; at a server of our own, and at the emulator."""
    with contextlib.ExitStack() as stack:

        def make(content: dict[str, bytes]) -> tuple[GcsStore, str]:
            if request.param == "ours":
                return nobody(stack.enter_context(serving({"models": content}))), "models"
            found: Emulator = request.getfixturevalue("emulator")
            return nobody(found), found.bucket(content)

        yield make


def test_a_listing_tells_the_generation_that_is_opened(place: Any) -> None:
    where, bucket = place(NESTED)
    folder = where.folder(f"gs://{bucket}/m")
    entries = {entry.name: entry for entry in folder.list_keys()}
    with contextlib.closing(folder.open("sub/b.bin")) as source:
        assert source.version.generation == entries["sub/b.bin"].generation


def test_keys_are_taken_as_they_are(place: Any) -> None:
    where, bucket = place(WEIRD)
    assert {entry.key for entry in where.folder(f"gs://{bucket}/m").list_keys()} == set(WEIRD)
    for key, data in WEIRD.items():
        with opened(where, f"gs://{bucket}/{key}") as source:
            assert read(source, 0, 1) == data, key
            assert source.url == f"gs://{bucket}/{key}"


def test_listing_goes_on_beyond_a_page() -> None:
    content = {f"m/{index:05d}": b"" for index in range(2500)} | {"m/x/y": b""}
    with serving({"models": content}) as server:
        assert nobody(server).folder("gs://models/m").names() == [f"{index:05d}" for index in range(2500)]
        assert len(server.seen) == 3
        assert len(nobody(server).folder("gs://models").list_keys()) == 2501


@pytest.mark.slow
def test_listing_goes_on_beyond_a_page_of_the_emulator(emulator: Emulator) -> None:
    bucket = emulator.bucket({f"m/{index:05d}": b"" for index in range(1003)})
    assert nobody(emulator).folder(f"gs://{bucket}/m").names() == [f"{index:05d}" for index in range(1003)]


def test_a_long_index_takes_one_request() -> None:
    with serving({"models": {"m/model.safetensors.index.json": DATA}}) as server:
        with contextlib.closing(nobody(server).folder("gs://models/m").open("model.safetensors.index.json")) as source:
            assert read(source, 0, len(DATA)) == DATA
        assert len(server.seen) == 1


def test_a_missing_bucket_is_told_from_a_missing_object(place: Any) -> None:
    where, bucket = place({"m/a.bin": b"a"})
    error_of(BucketNotFoundError, where.folder("gs://absent/m").names)
    error = error_of(ObjectNotFoundError, where.open, f"gs://{bucket}/m/b.bin")
    assert (error.bucket, error.key, error.status) == (bucket, "m/b.bin", 404)


def test_objects_open_where_listing_is_not_allowed() -> None:
    with serving(private=True, listable=False) as server:
        folder = store(server).folder("gs://models/m")
        with contextlib.closing(folder.open("a.bin")) as source:
            assert read(source, 0, 100) == DATA[:100]
        assert [seen.method for seen in server.seen] == ["GET"]
        error = error_of(AccessDeniedError, folder.names)
        assert "storage.objects.list" in error.hint
        assert ACCOUNT in str(error)


def test_one_store_lists_and_reads_with_one_set_of_credentials() -> None:
    with serving(private=True) as server:
        shared = store(server)
        with pytest.raises(OptionError):
            GcsFolder("gs://models/m", store=shared, access=QUICK)
        with pytest.raises(OptionError):
            open_gcs("gs://models/m", store=shared, credentials=GcsCredentials())
        assert GcsFolder("gs://models/m", store=shared).names() == ["a.bin"]
        open_gcs("gs://models/m/a.bin", store=shared).close()


@pytest.mark.parametrize(
    "body",
    [b"hello", b"[]", b'"x"', b'{"items": 3}', b'{"items": [{"name": "a"}]}', b'{"items": [{"name": "a", "size": "-1"}]}',
     b'{"items": [7]}', b'{"prefixes": {}}', b'{"nextPageToken": 1}'],
)  # fmt: skip
def test_a_json_page_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="it"):
        parse_json_page(body, prefix="")


@pytest.mark.parametrize("body", [b"hello", b"<html/>", b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"])
def test_an_xml_page_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="it is"):
        parse_xml_page(body, prefix="")


@given(st.lists(st.text(min_size=1).map(lambda rest: f"m/{rest}"), unique=True), st.one_of(st.none(), st.text(min_size=1)))
def test_a_json_page_gives_back_what_was_put_in(keys: list[str], token: str | None) -> None:
    items = [{"name": key, "size": str(index), "generation": "7"} for index, key in enumerate([*keys, "other"])]
    page = parse_json_page(json.dumps({"items": items, "nextPageToken": token}).encode(), prefix="m/")
    assert [(entry.key, entry.name, entry.nbytes) for entry in page.entries] == [(k, k[2:], i) for i, k in enumerate(keys)]
    assert page.token == token


@given(st.binary())
def test_complaints_of_any_bytes_are_read_without_an_error(body: bytes) -> None:
    for begin in (b"", b"<Error>", b"{", b'{"error":'):
        assert parse_complaint(begin + body).message is not None


def test_complaints_are_read_from_xml_and_json() -> None:
    assert parse_complaint(b"<html>no</html").code == ""
    xml = parse_complaint(b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code><Message>No.</Message><Details>x</Details></Error>")
    assert (xml.code, xml.message) == ("NoSuchKey", "No. x")
    answer = {"error": {"message": "Bucket is a requester pays bucket", "errors": [{"reason": "required"}]}}
    assert parse_complaint(json.dumps(answer).encode()).code == "UserProjectMissing"
    assert parse_complaint(b'{"error": "text"}').code == ""


# ---- addresses


@pytest.mark.parametrize(
    "url", ["gs:/b/k", "b/k", "gs://", "gs:///k", "gs://ya29.SECRET@b/k", "http://b/k", "gs://b:80/k", "gs://bk/a\0"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_url(url)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    ["store.example", "ftp://store", "https://me:pw@store", "https://", "http://store:x", "http://a?b=c", "http://a#b"],
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(OptionError) as caught:
        GcsStore(GcsCredentials(anonymous=True, endpoint=endpoint))
    assert "pw" not in str(caught.value)


def test_objects_and_listings_have_addresses() -> None:
    place = Place("https://storage.googleapis.com/")
    assert place.object_url("b", "a b/é%#?+~", {}) == "https://storage.googleapis.com/b/a%20b/%C3%A9%25%23%3F%2B~"
    assert place.json_list_url("b", {"prefix": "a/"}) == "https://storage.googleapis.com/storage/v1/b/b/o?prefix=a%2F"
    assert place.xml_list_url("b", {"prefix": "a b/"}) == "https://storage.googleapis.com/b?prefix=a%20b%2F"


@given(st.text(st.characters(blacklist_categories=["Cs"]), min_size=1))
def test_a_key_survives_its_address(key: str) -> None:
    parts = urlsplit(Place("http://store").object_url("models", key, {"userProject": "p"}))
    assert (unquote(parts.path), parts.query) == (f"/models/{key}", "userProject=p")


def test_the_service_is_where_the_environment_says() -> None:
    def endpoint(settings: GcsSettings, given: GcsCredentials | None = None) -> str:
        return GcsStore(given, access=QUICK, settings=settings)._place.endpoint

    assert endpoint(GcsSettings()) == "https://storage.googleapis.com"
    assert endpoint(GcsSettings(universe="cloud.example")) == "https://storage.cloud.example"
    assert endpoint(GcsSettings(endpoint="http://emulator")) == "http://emulator"
    assert endpoint(GcsSettings(endpoint="http://emulator"), GcsCredentials(endpoint="http://own")) == "http://own"


# ---- generations


def test_every_range_demands_the_generation_that_was_opened() -> None:
    with serving() as server, opened(nobody(server)) as source:
        assert read(source, 0, len(DATA)) == DATA
        first, second = server.seen
        generation = str(server.objects["models"]["m/a.bin"].generation)
        assert "x-goog-if-generation-match" not in first.headers
        assert second.headers["x-goog-if-generation-match"] == generation == source.version.generation  # type: ignore[attr-defined]


@pytest.mark.parametrize("checks_conditions", [True, False], ids=["refused", "compared"])
@pytest.mark.parametrize("data", [DATA, DATA[::-1]], ids=["same bytes", "other bytes"])
def test_a_replaced_object_is_an_error(checks_conditions: bool, data: bytes) -> None:
    with serving(checks_conditions=checks_conditions) as server, opened(nobody(server)) as source:
        assert read(source, 0, 2 * KIB) == DATA[: 2 * KIB]
        server.put("models", "m/a.bin", data)
        error = error_of(SourceChangedError, read, source, 2 * KIB, 1000)
        assert (error.url, error.offset, error.nbytes) == ("gs://models/m/a.bin", 2 * KIB, 1000)
        if checks_conditions:
            assert error.status == 412


def test_the_emulators_replaced_object_is_an_error(emulator: Emulator) -> None:
    bucket = emulator.bucket({"a": DATA})
    with opened(nobody(emulator), f"gs://{bucket}/a") as source:
        emulator.put(bucket, "a", DATA)
        error_of(SourceChangedError, read, source, 2 * KIB, 1000)


def test_an_object_stored_compressed_is_refused_and_not_decompressed() -> None:
    with serving() as server:
        server.put("models", "c.json", b"\x1f\x8b not really", encoding="gzip")
        error = error_of(WrongEncodingError, nobody(server).open, "gs://models/c.json")
        assert "Content-Encoding" in error.hint
        assert {seen.headers["accept-encoding"] for seen in server.seen} == {"gzip"}


# ---- credentials

Make = Callable[[GcsServer, Path, str], dict[str, Any]]


def _object(server: GcsServer, _: Path, __: str) -> dict[str, Any]:
    from google.oauth2.credentials import Credentials

    given = {"refresh_token": REFRESH_TOKEN, "client_id": "client", "client_secret": CLIENT_SECRET}
    return {"google_credentials": Credentials(None, token_uri=server.url_of("/token"), **given)}


KINDS: dict[str, Make] = {
    "service account": lambda server, path, key: {"credential_file": write_service_account(path, server, key)},
    "user": lambda _, path, __: {"credential_file": write_user(path)},
    "federated": lambda server, path, _: {"credential_file": write_federated(path, server)},
    "federated, impersonating": lambda server, path, _: {"credential_file": write_federated(path, server, impersonating=True)},
    "federated by a url": lambda server, path, _: {"credential_file": write_federated(path, server, by_url=True)},
    "object": _object,
}


@pytest.mark.parametrize("kind", KINDS)
def test_credentials_of_each_kind_list_read_and_renew_in_mid_load(
    kind: str, tmp_path: Path, key_pair: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(private=True, public_key=key_pair[1]) as server:
        monkeypatch.setattr("google.oauth2.credentials._GOOGLE_OAUTH2_TOKEN_ENDPOINT", server.url_of("/token"))
        where = store(server, **KINDS[kind](server, tmp_path / "who.json", key_pair[0]))
        assert where.folder("gs://models/m").names() == ["a.bin"]
        with opened(where) as source:
            assert read(source, 0, 100_000) == DATA[:100_000]
            had = len(server.issued)
            server.expire()
            assert read(source, 0, len(DATA)) == DATA
        assert had == (2 if "impersonating" in kind else 1)
        assert len(server.issued) == 2 * had
        assert len(server.asked("/storage/")) == 1
        assert len(server.asked("/models/")) == 4  # one of them was refused


def test_a_federated_token_is_had_for_a_subject_token(tmp_path: Path) -> None:
    with serving(private=True) as server:
        file = write_federated(tmp_path / "who.json", server)
        open_gcs("gs://models/m/a.bin", credentials=GcsCredentials(credential_file=file, endpoint=server.base)).close()
        body = server.bodies[server.asked("/sts")[0].index]
        assert SUBJECT_TOKEN in body
        assert "devstorage.read_only" in body


def test_another_account_is_impersonated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(private=True) as server:
        monkeypatch.setattr("google.auth.iam._IAM_ENDPOINT", server.url_of("/iam/{}:generateAccessToken"))
        who = write_federated(tmp_path / "who.json", server)
        with opened(store(server, credential_file=who, impersonate=ACCOUNT)) as source:
            assert read(source, 0, len(DATA)) == DATA
        assert len(server.issued) == 2
        error = error_of(CredentialsError, store(server, credential_file=who, impersonate="other@x").open, "gs://models/m/a.bin")
        assert "getAccessToken" in str(error)


def test_the_metadata_server_gives_a_token_past_any_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = pytest.importorskip("google.auth.compute_engine._metadata")
    with serving(private=True) as server:
        host = f"127.0.0.1:{server.port}"
        monkeypatch.setattr(metadata, "_GCE_METADATA_HOST", host)
        monkeypatch.setattr(metadata, "_NO_GCE_CHECK", False)
        monkeypatch.setenv("GCE_METADATA_IP", host)
        with ProxyServer() as proxy:
            access = replace(QUICK, proxies={"http": f"http://{proxy.address}"})
            where = GcsStore(GcsCredentials(endpoint=server.base), access=access)
            with opened(where) as source:
                server.expire()
                assert read(source, 0, len(DATA)) == DATA
            assert all("/computeMetadata/" not in seen.target for seen in proxy.seen)
            assert proxy.seen  # objects come by way of it
        assert len(server.issued) == 2


def test_an_expired_token_that_nobody_renews_is_an_error_at_once() -> None:
    with serving(private=True) as server, opened(store(server)) as source:
        server.expire()
        error = error_of(ExpiredCredentialsError, read, source, 2 * KIB, 10)
        assert (error.offset, error.nbytes, error.status, error.attempts) == (2 * KIB, 10, 401, 1)
        assert server.issued[0] not in str(error)  # although the server quotes it


def test_many_threads_renew_a_refused_token_once(tmp_path: Path) -> None:
    start = threading.Barrier(16)

    def read_stripe(index: int) -> bool:
        start.wait()
        offsets = range(index * 16 * KIB, (index + 1) * 16 * KIB, 4 * KIB)
        return all(read(source, offset, 4 * KIB) == DATA[offset : offset + 4 * KIB] for offset in offsets)

    with serving(private=True) as server, ThreadPoolExecutor(16) as threads:
        with opened(store(server, credential_file=write_federated(tmp_path / "who.json", server))) as source:
            server.expire()
            assert all(threads.map(read_stripe, range(16)))
        assert len(server.issued) == 2


def test_a_function_gives_newer_tokens() -> None:
    given: list[str] = []

    def give() -> GcsCredentials:
        given.append(server.issue())
        return GcsCredentials(token=given[-1], endpoint=server.base)

    with serving(private=True) as server, opened(GcsStore(give, access=QUICK)) as source:
        server.expire()
        assert read(source, 0, len(DATA)) == DATA
        assert len(given) == 2


def test_a_token_is_renewed_before_its_end_and_counts_while_it_cannot_be(tmp_path: Path) -> None:
    with serving(private=True, lifetime_s=100) as server:  # google-auth renews within the last 225 s
        where = store(server, credential_file=write_federated(tmp_path / "who.json", server))
        with opened(where) as source:
            read(source, 2 * KIB, KIB)
            assert len(server.issued) == 2
            server.refuses_tokens = True
            for offset in range(4 * KIB, 8 * KIB, KIB):
                assert read(source, offset, KIB) == DATA[offset : offset + KIB]
            assert len(server.asked("/sts")) == 3  # asked again after a pause only


def test_a_rotated_file_is_read_again(tmp_path: Path) -> None:
    with serving(private=True) as server, serving() as other:
        file = tmp_path / "who.json"
        write_federated(file, server)
        with opened(store(server, credential_file=str(file))) as source:
            server.expire()
            write_federated(file, other)
            error_of(ExpiredCredentialsError, read, source, 2 * KIB, 10)  # the other's tokens are none here
            assert len(other.issued) == 1


def test_whoever_asks_pays() -> None:
    with serving(private=True, payer="billed-project") as server:
        token = server.issue()
        error = error_of(AccessDeniedError, store(server, token=token).open, "gs://models/m/a.bin")
        assert "user_project" in error.hint
        error = error_of(AccessDeniedError, store(server, token=token).folder("gs://models/m").names)
        assert "user_project" in error.hint
        error_of(AccessDeniedError, store(server, token=token, user_project="other").open, "gs://models/m/a.bin")
        where = store(server, token=token, user_project="billed-project")
        assert where.folder("gs://models/m").names() == ["a.bin"]
        with opened(where) as source:
            assert read(source, 0, len(DATA)) == DATA


def test_the_quota_project_of_a_user_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_CLOUD_QUOTA_PROJECT", "billed-project")
    with serving(private=True, payer="billed-project") as server:
        store(server, credential_file=write_federated(tmp_path / "who.json", server)).open("gs://models/m/a.bin").close()


def test_anonymous_requests_say_nothing_about_who_asks() -> None:
    with serving() as server:
        nobody(server).folder("gs://models/m").names()
        assert all("authorization" not in seen.headers for seen in server.seen)
    with serving(private=True) as server:
        assert "anonymous" in error_of(AccessDeniedError, nobody(server).open, "gs://models/m/a.bin").hint
        assert "anonymous" in error_of(CredentialsError, nobody(server).folder("gs://models/m").names).hint


# ---- HMAC keys, against a server that checks signatures of S3


def hmac_store(server: S3Server, **more: Any) -> GcsStore:
    given: dict[str, Any] = {"access_key_id": HMAC_ID, "secret_access_key": HMAC_SECRET, "endpoint": server.url}
    return GcsStore(GcsCredentials(**(given | more)), access=QUICK)


def signing(content: dict[str, bytes]) -> S3Server:
    return S3Server({"models": content}, access_key=HMAC_ID, secret_key=HMAC_SECRET, region=None)


def test_hmac_keys_sign_reading_and_listing() -> None:
    with signing(WEIRD | {"m/a.bin": DATA}) as server:
        where = hmac_store(server, user_project="billed-project")
        assert {entry.key for entry in where.folder("gs://models/m").list_keys()} == {*WEIRD, "m/a.bin"}
        for key, data in WEIRD.items():
            with opened(where, f"gs://models/{key}") as source:
                assert read(source, 0, 1) == data, key
        with opened(where) as source:
            assert read(source, 0, len(DATA)) == DATA
        assert not [name for seen in server.requests for name in seen.headers if name.lower().startswith("x-goog-")]
        assert "if-match" in server.requests[-1].headers
        assert all("userProject=billed-project" in seen.target for seen in server.requests)


def test_hmac_listing_goes_on_beyond_a_page() -> None:
    with signing({f"m/{index:05d}": b"" for index in range(1500)}) as server:
        assert len(hmac_store(server).folder("gs://models/m").names()) == 1500
        assert len(server.requests) == 2


def test_a_wrong_hmac_key_is_an_error() -> None:
    with signing({"m/a.bin": DATA}) as server:
        for wrong in ({"secret_access_key": "wrong-secret-of-this-test"}, {"access_key_id": "GOOGUNKNOWN"}):
            error = error_of(CredentialsError, hmac_store(server, **wrong).open, "gs://models/m/a.bin")
            assert "HMAC" in error.hint
            assert "wrong-secret" not in str(error)


# ---- what the environment says


def test_a_file_of_the_environment_says_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_pair: tuple[str, bytes]
) -> None:
    with serving(private=True, public_key=key_pair[1]) as server:
        good, bad = write_service_account(tmp_path / "good.json", server, key_pair[0]), str(tmp_path / f"{'absent' * 5}.json")
        here = GcsCredentials(endpoint=server.base)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", good)
        GcsStore(here, access=QUICK).open("gs://models/m/a.bin").close()
        monkeypatch.setenv("RUNAI_STREAMER_GCS_CREDENTIAL_FILE", bad)
        assert bad in str(error_of(CredentialsError, GcsStore(here, access=QUICK).open, "gs://models/m/a.bin"))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", bad)
        monkeypatch.setenv("RUNAI_STREAMER_GCS_CREDENTIAL_FILE", good)
        GcsStore(here, access=QUICK).open("gs://models/m/a.bin").close()
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.base)
        GcsStore(access=QUICK).open("gs://models/m/a.bin").close()


def test_what_gcloud_has_left_says_who_asks(tmp_path: Path) -> None:
    with serving(private=True) as server:
        (tmp_path / "gcloud").mkdir()
        file = write_federated(tmp_path / "gcloud" / "application_default_credentials.json", server)
        assert GcsSettings.from_environment() == GcsSettings(default_file=file)
        GcsStore(GcsCredentials(endpoint=server.base), access=QUICK).open("gs://models/m/a.bin").close()


def test_an_emulator_does_not_see_the_tokens_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", write_federated(tmp_path / "who.json", server))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"127.0.0.1:{server.port}")
        GcsStore(access=QUICK).open("gs://models/m/a.bin").close()
        assert ["authorization" in seen.headers for seen in server.seen] == [False]


def test_the_environment_is_read_as_it_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GcsSettings.from_environment() == GcsSettings()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "localhost:9023")
    monkeypatch.setenv("RUNAI_STREAMER_GCS_CREDENTIAL_FILE", "/etc/key.json")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/etc/other.json")
    monkeypatch.setenv("RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS", "true")
    monkeypatch.setenv("GOOGLE_CLOUD_UNIVERSE_DOMAIN", "cloud.example")
    wanted = GcsSettings(
        endpoint="http://localhost:9023",
        credential_file="/etc/key.json",
        default_file="/etc/other.json",
        anonymous=True,
        universe="cloud.example",
    )
    assert GcsSettings.from_environment() == wanted
    monkeypatch.setenv("RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS", "perhaps")
    with pytest.raises(OptionError):
        GcsSettings.from_environment()


def test_nobody_to_ask_as_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("google.auth.compute_engine._metadata._NO_GCE_CHECK", True)
    with serving() as server:
        opening = GcsStore(GcsCredentials(endpoint=server.base), access=QUICK).open
        error = error_of(CredentialsError, opening, "gs://models/m/a.bin")
        assert (error.bucket, error.key, error.url) == ("models", "m/a.bin", "gs://models/m/a.bin")
        assert "anonymous" in str(error)
        assert not server.seen


@pytest.mark.parametrize(
    "given",
    [
        {"access_key_id": "A"},
        {"secret_access_key": HMAC_SECRET},
        {"token": "t" * 20, "anonymous": True},
        {"token": "t" * 20, "impersonate": ACCOUNT},
        {"credential_file": "a", "access_key_id": "A", "secret_access_key": HMAC_SECRET},
        {"token": "two words of SECRET"},
        {"google_credentials": "SECRET"},
    ],
)
def test_credentials_that_cannot_be_meant_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        GcsCredentials(**given)
    assert HMAC_SECRET not in str(caught.value)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("content", ["no JSON", "{}", '{"type": "service_account"}', '{"type": "unheard of"}', "[]"])
def test_a_file_that_is_none_of_googles_is_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "who.json").write_text(content)
    with serving() as server:
        error_of(CredentialsError, store(server, credential_file=str(tmp_path / "who.json")).open, "gs://models/m/a.bin")


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth.exceptions", None)
    error = error_of(OptionError, lambda: open_gcs("gs://models/m/a.bin"))
    assert "pip install 'headrace[gcs]'" in str(error)
    monkeypatch.setitem(sys.modules, "botocore.credentials", None)
    keys = GcsCredentials(access_key_id=HMAC_ID, secret_access_key=HMAC_SECRET)
    error = error_of(OptionError, lambda: open_gcs("gs://models/m/a.bin", credentials=keys))
    assert "pip install 'headrace[gcs]'" in str(error)


def test_libraries_are_imported_when_they_are_needed() -> None:
    code = "import sys, headrace.sources.gcs; sys.exit('google.auth' in sys.modules or 'botocore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# ---- how token services are reached


def test_token_services_are_reached_with_our_cas_and_proxies(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path)
    with serving(private=True, tls=made.server_side()) as server:
        who = {"credential_file": write_federated(tmp_path / "who.json", server), "endpoint": server.base}
        for login in (None, "Basic bWU6cHc="):
            with ProxyServer(login=login) as proxy:
                at = f"http://{'me:pw@' if login else ''}{proxy.address}"
                access = replace(QUICK, tls=str(made.ca), proxies={"https": at})
                GcsStore(GcsCredentials(**who), access=access).open("gs://models/m/a.bin").close()
                assert {seen.target for seen in proxy.seen} == {f"127.0.0.1:{server.port}"}
                assert len(proxy.seen) == 2  # for the token, and for the object
        access = replace(QUICK, tls=str(made.ca), proxies={"https": "http://127.0.0.1:9"}, no_proxy="127.0.0.1")
        GcsStore(GcsCredentials(**who), access=access).open("gs://models/m/a.bin").close()


def test_the_transport_sends_plain_requests_through_a_proxy() -> None:
    with serving() as server, ProxyServer(login="Basic bWU6cHc=") as proxy:
        transport = Transport(replace(QUICK, proxies={"http": f"http://me:pw@{proxy.address}"}))
        answer = transport(server.url_of("/storage/v1/b/absent/o?x=1"), headers={"a": "b"})
        assert (answer.status, answer.headers["content-type"]) == (404, "application/json")
        assert json.loads(answer.data)["error"]["code"] == 404
        assert (server.seen[0].target, server.seen[0].headers["a"]) == ("/storage/v1/b/absent/o?x=1", "b")


def test_a_token_service_that_cannot_be_reached_is_an_error() -> None:
    from google.auth.exceptions import TransportError

    url = f"http://127.0.0.1:{free_port()}/token"
    with pytest.raises(TransportError):
        Transport(QUICK)(url)
    with pytest.raises(TransportError):
        Transport(QUICK)("ftp://x/token")
    with pytest.raises(TransportError):
        Transport(QUICK)("https://127.0.0.1/token", cert=("cert", "key"))


def test_a_token_service_that_hangs_up_is_asked_again(tmp_path: Path) -> None:
    with serving(private=True) as server:
        where = store(server, credential_file=write_federated(tmp_path / "who.json", server))
        server.hangups = 2
        where.open("gs://models/m/a.bin").close()
        assert len(server.asked("/sts")) == 3
        server.expire()
        server.hangups = 3
        assert "cannot reach" in str(error_of(CredentialsError, where.open, "gs://models/m/a.bin"))


def test_a_token_service_that_refuses_is_an_error_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(private=True) as server:
        server.refuses_tokens = True
        monkeypatch.setattr("google.oauth2.credentials._GOOGLE_OAUTH2_TOKEN_ENDPOINT", server.url_of("/token"))
        for file in (write_user(tmp_path / "user.json"), write_federated(tmp_path / "who.json", server)):
            error = error_of(CredentialsError, store(server, credential_file=file).open, "gs://models/m/a.bin")
            assert "invalid_grant" in str(error)
            for secret in (CLIENT_SECRET, REFRESH_TOKEN, SUBJECT_TOKEN):
                assert secret not in str(error)  # although the service quotes all it was sent


# ---- faults


@pytest.mark.parametrize(
    "found", [fault("status", code=503), fault("status", code=429), fault("reset", after=1000), fault("short")]
)
def test_what_is_transient_is_tried_again(found: Any) -> None:
    with serving(faults=[replace(found, skip=1, times=2)]) as server, opened(nobody(server)) as source:
        assert read(source, 0, len(DATA)) == DATA
        assert source.traffic.failed == 2


def test_a_listing_is_tried_again_and_a_page_that_is_none_is_an_error() -> None:
    with serving() as server:
        answers = [(503, {}, b""), (429, {"Retry-After": "0"}, b"")]
        usual = server._check
        server._check = lambda seen: answers.pop(0) if answers else usual(seen) if usual else None
        assert nobody(server).folder("gs://models/m").names() == ["a.bin"]
        server._check = lambda _: (200, {}, b'{"nextPageToken": "again"}')
        assert "names itself" in str(error_of(WrongAnswerError, nobody(server).folder("gs://models/m").names))


def test_an_empty_object_opens_where_a_range_of_it_is_refused_without_size(emulator: Emulator) -> None:
    bucket = emulator.bucket({"empty": b"", "full": b"x"})
    with opened(nobody(emulator), f"gs://{bucket}/empty") as source:
        assert source.nbytes == 0
        assert source.version is not None
        source.check_unchanged()
    with serving({"models": {"full": b"x"}}, faults=[fault("status", code=416, body=b"", times=2)]) as server:
        error_of(WrongAnswerError, nobody(server).open, "gs://models/full")


def test_each_failure_has_its_own_class_and_text() -> None:
    key = "gs://models/m/a.bin"
    refused = GcsCredentials(anonymous=True, endpoint=f"http://127.0.0.1:{free_port()}")
    with serving(private=True) as server, serving(faults=[fault("status", code=503)]) as busy, serving(payer="p") as paid:
        found: list[tuple[type[HttpError], SourceError]] = [
            (RefusedError, error_of(SourceError, lambda: open_gcs(key, credentials=refused))),
            (ExpiredCredentialsError, error_of(SourceError, store(server, token="ya29.unknown-token-01234").open, key)),
            (BucketNotFoundError, error_of(SourceError, store(server).open, "gs://absent/m/a.bin")),
            (ObjectNotFoundError, error_of(SourceError, store(server).open, "gs://models/m/b.bin")),
            (AccessDeniedError, error_of(SourceError, nobody(server).open, key)),
            (AccessDeniedError, error_of(SourceError, nobody(paid).open, key)),
            (ThrottledError, error_of(SourceError, nobody(busy).open, key)),
        ]
    for kind, error in found:
        assert type(error) is kind, error
        assert isinstance(error, HttpError)
        assert error.hint
        assert error.url is not None
        assert error.url in str(error)
        assert "unknown-token" not in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert vars(again) == vars(error)
    assert len({error.hint for _, error in found}) == len(found)  # type: ignore[attr-defined]
    missing = found[3][1]
    assert isinstance(missing, GcsError)
    assert isinstance(missing, SourceNotFoundError)
    assert (missing.bucket, missing.key, missing.code, missing.status) == ("models", "m/b.bin", "NoSuchKey", 404)
    assert missing.request_id == "upload-refused"


def test_secrets_are_never_shown(caplog: pytest.LogCaptureFixture, tmp_path: Path, key_pair: tuple[str, bytes]) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(private=True, public_key=key_pair[1]) as server:
        who = write_service_account(tmp_path / "who.json", server, key_pair[0])
        where = store(server, credential_file=who)
        with opened(where):
            server.expire()
        secret = GcsCredentials(token=server.issued[0], endpoint=server.base)
        error = error_of(CredentialsError, GcsStore(secret, access=QUICK).open, "gs://models/m/a.bin")
        keys = GcsCredentials(access_key_id=HMAC_ID, secret_access_key=HMAC_SECRET, endpoint=server.base)
        refused = error_of(SourceError, GcsStore(keys, access=QUICK).open, "gs://models/m/a.bin")
        shown = [repr(value) for value in (where, secret, keys, vars(error), error.__cause__, vars(refused), refused.__cause__)]
        shown += [str(error), str(refused), caplog.text]
    for text in shown:
        for word in (*server.issued, HMAC_SECRET, key_pair[0].splitlines()[1]):
            assert word not in text


# ---- checkpoints, end to end

CONTENTS = {
    f"layer.{index}.weight": TensorEntry("F32", (64, 1000 + index), pattern(64 * (1000 + index) * 4)) for index in range(8)
}
SHARDS = {
    f"llama/model-{part + 1:05d}-of-00004.safetensors": serialize({name: CONTENTS[name] for name in list(CONTENTS)[part::4]})
    for part in range(4)
}


def test_a_whole_checkpoint_is_streamed_from_both_servers(place: Any) -> None:
    where, bucket = place(SHARDS | {"llama/config.json": b"{}", "llama2/model.safetensors": b"not this one"})
    with headrace.open(where.folder(f"gs://{bucket}/llama")) as checkpoint:
        assert sorted(checkpoint) == sorted(CONTENTS)
        tensors = headrace.load(checkpoint)
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == {name: CONTENTS[name].data for name in CONTENTS}


def test_opening_asks_once_for_the_listing_and_once_for_each_shard() -> None:
    with serving({"models": SHARDS}) as server:
        with headrace.open("gs://models/llama", credentials=GcsCredentials(anonymous=True, endpoint=server.base)) as checkpoint:
            assert len(checkpoint) == len(CONTENTS)
            assert len(server.asked("/models/llama/model-0")) == len(SHARDS)
            assert len(server.asked("/storage/v1/b/models/o")) == 1
            headrace.load(checkpoint)
        asked = sum(seen.asked_nbytes for seen in server.asked("/models/llama/model-0"))
        assert asked < 1.2 * sum(map(len, SHARDS.values()))


def test_a_token_that_ends_in_mid_load_costs_no_tensor(tmp_path: Path) -> None:
    with serving({"models": SHARDS}, private=True) as server:
        who = GcsCredentials(credential_file=write_federated(tmp_path / "who.json", server), endpoint=server.base)
        found = {}
        with headrace.stream("gs://models/llama", credentials=who, memory_limit=1 << 20) as stream:
            for name, tensor in stream:
                if not found:
                    server.expire()
                found[name] = bytes_of(tensor)
        assert found == {name: CONTENTS[name].data for name in CONTENTS}
        assert len(server.issued) == 2


def test_a_checkpoint_is_pulled(place: Any, tmp_path: Path) -> None:
    where, bucket = place(SHARDS | {"llama/config.json": b"{}", "llama/tokenizer/vocab é.txt": b"abc"})
    headrace.pull(where.folder(f"gs://{bucket}/llama"), tmp_path / "there")
    for key, data in (SHARDS | {"llama/config.json": b"{}", "llama/tokenizer/vocab é.txt": b"abc"}).items():
        assert (tmp_path / "there" / key.removeprefix("llama/")).read_bytes() == data


@pytest.mark.slow
def test_the_commands_work_with_the_variables_of_other_loaders(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = emulator.bucket(SHARDS | {"llama/config.json": b"{}"})
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", emulator.url)
    monkeypatch.setenv("RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS", "true")
    monkeypatch.setenv("RUNAI_STREAMER_CONCURRENCY", "4")
    for command in (["inspect"], ["load"]):
        done = subprocess.run(
            [str(HEADRACE), *command, f"gs://{bucket}/llama"],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    for url in (f"gs://{bucket}/llama/", f"gs://{bucket}/{next(iter(SHARDS))}"):
        assert {name: bytes_of(tensor) for name, tensor in headrace.load(url).items()}.items() <= {
            name: entry.data for name, entry in CONTENTS.items()
        }.items()
    headrace.pull(f"gs://{bucket}/llama", tmp_path / "there")
    assert (tmp_path / "there" / "config.json").read_bytes() == b"{}"


def test_credentials_of_another_kind_are_refused() -> None:
    with pytest.raises(OptionError) as caught:
        Remote(Options(), "a-token-0123456789").open("gs://models/m/a.bin")
    assert "GcsCredentials" in str(caught.value)
    assert "a-token" not in str(caught.value)
