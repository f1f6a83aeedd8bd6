"""S3 against the test server, with real signatures: the contracts, credentials that rotate, regions, faults, errors."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Entry as TensorEntry
from checkpoints import bytes_of, serialize
from http_servers import free_port
from stores import DATA, KIB, NESTED, QUICK, PrefixFolderTests, PrefixTests, Served, forget
from typer.testing import CliRunner

import headrace
from headrace._environment import S3Settings
from headrace.cli import app
from headrace.errors import OptionError, SourceChangedError, SourceError, SourceNotFoundError, SourcePermissionError
from headrace.sources.http import (
    Headers,
    HttpError,
    RedirectError,
    RefusedError,
    ThrottledError,
    TlsError,
    UnknownHostError,
    WrongAnswerError,
)
from headrace.sources.objects import escape
from headrace.sources.s3 import (
    AccessDeniedError,
    ArchivedObjectError,
    BucketNotFoundError,
    CredentialsError,
    ExpiredCredentialsError,
    ObjectNotFoundError,
    S3Credentials,
    S3Error,
    S3Folder,
    S3Source,
    S3Store,
    open_s3,
)
from headrace.sources.s3._address import Place, encode_query, parse_url
from headrace.sources.s3._errors import parse_complaint
from headrace.sources.s3._listing import parse_page
from headrace.testing import SourceTests
from headrace.testing.s3server import (
    Bucket,
    Replaced,
    Reset,
    Rule,
    S3Server,
    Status,
    make_certificates,
)
from headrace.testing.sources import error_of, pattern, read

pytest.importorskip("botocore")

ACCESS_KEY, SECRET, TOKEN = (
    "AKIATESTTESTTEST0001",
    "sEcReTsEcReTsEcReT0123456789abcdefABCDEF",
    "tOkEn-0123456789-abcdefghijklmnopq",
)
VARIABLES = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CA_BUNDLE",
    "AWS_ROLE_ARN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_USE_FIPS_ENDPOINT",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
    "RUNAI_STREAMER_S3_ENDPOINT",
    "RUNAI_STREAMER_S3_UNSIGNED",
    "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING",
]


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no file of AWS that this machine may have counts here."""
    forget(monkeypatch, VARIABLES)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@contextlib.contextmanager
def serving(content: Any = None, **options: Any) -> Iterator[S3Server]:
    given = {"access_key": ACCESS_KEY, "secret_key": SECRET, **options}
    with S3Server({"models": {"m/a.bin": DATA}} if content is None else content, **given) as server:
        yield server


def keys(server: S3Server | None = None, **more: Any) -> S3Credentials:
    given: dict[str, Any] = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET, "endpoint": server and server.url}
    return S3Credentials(**(given | more))


def store(server: S3Server, **more: Any) -> S3Store:
    return S3Store(keys(server, **more), access=QUICK)


@contextlib.contextmanager
def opened(server: S3Server, url: str = "s3://models/m/a.bin", *, prefix_nbytes: int = KIB, **more: Any) -> Iterator[S3Source]:
    with contextlib.closing(open_s3(url, credentials=keys(server, **more), access=QUICK, prefix_nbytes=prefix_nbytes)) as source:
        yield source


# ---- the contracts


class TestS3Source(Served, SourceTests):
    def make(self, data: bytes) -> S3Source:
        server = self.stack.enter_context(serving({"models": {"a b/größe+%20.bin": data}}))
        return open_s3("s3://models/a b/größe+%20.bin", credentials=keys(server), access=QUICK, prefix_nbytes=KIB)


class OurStore:
    scheme = "s3"

    def store(self: Any, content: dict[str, bytes]) -> tuple[S3Store, str]:
        return store(self.stack.enter_context(serving({"models": content}))), "models"


class TestS3Folder(OurStore, PrefixFolderTests): ...


class TestS3FolderThatIsABucket(TestS3Folder):
    prefix = ""


class TestS3Prefix(OurStore, PrefixTests):
    missing = ObjectNotFoundError


# ---- folders


def test_listing_goes_on_beyond_a_page() -> None:
    content = {f"m/{index:05d}": b"" for index in range(2500)} | {"m/x/y": b""}
    with serving({"models": content}) as server:
        assert store(server).folder("s3://models/m").names() == [f"{index:05d}" for index in range(2500)]
        assert len(server.requests) == 3
        assert len(store(server).folder("s3://models").list_keys()) == 2501


def test_folders_below_a_prefix_are_pulled_by_pattern_and_its_siblings_are_not(tmp_path: Path) -> None:
    with serving({"models": NESTED}) as server:
        report = headrace.pull(
            "s3://models/m", tmp_path / "some", credentials=keys(server), include=["sub/*"], exclude="*/deep/*"
        )
        assert (report.files, (tmp_path / "some/sub/b.bin").read_bytes()) == (1, b"bb")
        headrace.pull("s3://models/m/", tmp_path / "all", credentials=keys(server))
        pulled = {str(path.relative_to(tmp_path / "all")) for path in (tmp_path / "all").rglob("*") if path.is_file()}
        assert {name for name in pulled if not name.startswith(".")} == {"a.safetensors", "empty", "sub/b.bin", "sub/deep/c"}
        command = ["pull", "s3://models/m", str(tmp_path / "told"), "--include", "sub/deep/*"]
        surroundings = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": server.url}
        assert CliRunner(env=surroundings).invoke(app, command).exit_code == 0
        assert (tmp_path / "told/sub/deep/c").read_bytes() == b"c"


def test_keys_given_by_name_load_where_listing_is_not_allowed() -> None:
    contents = {name: TensorEntry("U8", (10_000,), pattern(10_000)) for name in ("a", "b")}
    files = {f"m/{name}.safetensors": serialize({name: entry}) for name, entry in contents.items()}
    index = {
        "m/model.safetensors.index.json": json.dumps({"weight_map": {name: f"{name}.safetensors" for name in contents}}).encode()
    }
    with serving({"models": files | index}, buckets={"models": Bucket(listable=False)}) as server:
        found = headrace.load([f"s3://models/{key}" for key in files], credentials=keys(server))
        assert {name: bytes_of(tensor) for name, tensor in found.items()} == {
            name: entry.data for name, entry in contents.items()
        }
        assert [request.status for request in server.requests if request.status != 206] == []
        error = error_of(AccessDeniedError, lambda: headrace.load("s3://models/m", credentials=keys(server)))
        assert "s3:ListBucket" in error.hint


def test_objects_open_where_listing_is_not_allowed() -> None:
    with serving(buckets={"models": Bucket(listable=False)}) as server:
        folder = store(server).folder("s3://models/m")
        with contextlib.closing(folder.open("a.bin")) as source:
            assert read(source, 0, 100) == DATA[:100]
        assert [request.method for request in server.requests] == ["GET"]
        error = error_of(AccessDeniedError, folder.names)
        assert "s3:ListBucket" in error.hint
        error = error_of(AccessDeniedError, folder.open, "absent")
        assert "may not list" in error.hint


def test_one_store_lists_and_reads_with_one_set_of_credentials() -> None:
    with serving() as server:
        with pytest.raises(OptionError):
            S3Folder("s3://models/m", store=store(server), access=QUICK)
        with pytest.raises(OptionError):
            open_s3("s3://models/m", store=store(server), credentials=keys(server))
        shared = store(server)
        assert S3Folder("s3://models/m", store=shared).names() == ["a.bin"]
        open_s3("s3://models/m/a.bin", store=shared).close()


@pytest.mark.parametrize("given", [None, 3, {"access_key_id": "AK"}])
def test_a_function_that_gives_no_credentials_is_refused(given: Any) -> None:
    with pytest.raises(OptionError, match="S3Credentials"):
        S3Store(lambda: given)


def test_a_page_that_is_none_is_a_wrong_answer() -> None:
    unsized = b"<ListBucketResult><Contents><Key>a</Key><Size>%s</Size></Contents></ListBucketResult>"
    pages = [b"hello", b"<html/>", b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>", unsized % b"-1"]
    for body in (*pages, unsized % (b"9" * 5000), unsized % "²".encode()):
        with pytest.raises(ValueError, match="it "):
            parse_page(body, prefix="")
    page = parse_page(b"<ListBucketResult><Contents><Key>a+b</Key><Size>3</Size></Contents></ListBucketResult>", prefix="")
    assert [entry.key for entry in page.entries] == ["a+b"]  # not encoded, as it does not say so


# ---- addresses


@pytest.mark.parametrize(
    ("place", "bucket", "region", "base"),
    [
        (Place(), "models", "eu-west-1", "https://models.s3.eu-west-1.amazonaws.com"),
        (Place(), "my.models", "eu-west-1", "https://s3.eu-west-1.amazonaws.com/my.models"),
        (Place(), "My_Models", "us-east-1", "https://s3.us-east-1.amazonaws.com/My_Models"),
        (Place(virtual=False), "models", "us-east-1", "https://s3.us-east-1.amazonaws.com/models"),
        (Place(), "models", "cn-north-1", "https://models.s3.cn-north-1.amazonaws.com.cn"),
        (
            Place(fips=True, dualstack=True),
            "models",
            "us-gov-west-1",
            "https://models.s3-fips.dualstack.us-gov-west-1.amazonaws.com",
        ),
        (Place(endpoint="http://10.0.0.1:9000/"), "models", "x", "http://10.0.0.1:9000/models"),
        (Place(endpoint="https://store.example/s3/"), "models", "x", "https://store.example/s3/models"),
        (Place(endpoint="https://store.example", virtual=True), "models", "x", "https://models.store.example"),
        (Place(endpoint="https://s3.eu-west-1.amazonaws.com"), "models", "x", "https://models.s3.eu-west-1.amazonaws.com"),
        (Place(endpoint="http://[::1]:9000"), "models", "x", "http://[::1]:9000/models"),
    ],
)
def test_a_bucket_has_an_address(place: Place, bucket: str, region: str, base: str) -> None:
    assert place.base(bucket, region) == base


@pytest.mark.parametrize(
    "endpoint",
    ["store.example", "ftp://store", "https://me:pw@store", "https://", "http://store:x", "http://a?b=c", "http://a#b"],
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(OptionError) as caught:
        Place(endpoint=endpoint)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3:/b/k", "b/k", "s3://", "s3:///k", "s3://AK:SKSECRET@b/k", "http://b/k", "s3://b:80/k", "s3://bk/a\0"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_url(url)
    assert "SKSECRET" not in str(caught.value)


def test_keys_are_taken_as_they_are() -> None:
    assert parse_url("s3://models/a?b#c%20/") == ("models", "a?b#c%20/")
    assert escape("a b/ü%+~", safe="/") == "a%20b/%C3%BC%25%2B~"
    assert encode_query({"prefix": "a/b", "delimiter": "/"}) == "delimiter=%2F&prefix=a%2Fb"
    odd = {"m/a?b#c%20": b"1", "m//b": b"2", "m/./c": b"3", "m/ä\x01+ ": b"4", "m/&=;:@!$'()*,": b"5"}
    with serving({"models": odd}) as server:
        for key, data in odd.items():
            with opened(server, f"s3://models/{key}") as source:
                assert read(source, 0, 1) == data, key
        assert {entry.key for entry in store(server).folder("s3://models").list_keys()} == set(odd)


def test_bucket_in_the_hosts_name() -> None:
    with serving() as server:
        endpoint = f"http://s3.localhost:{server.port}"
        access = replace(QUICK, proxies={"http": server.url})  # so that no DNS is needed
        shared = S3Store(keys(endpoint=endpoint, virtual_hosted=True), access=access)
        assert shared.folder("s3://models/m").names() == ["a.bin"]
        assert shared.folder("s3://models").list_keys()[0].key == "m/a.bin"
        with contextlib.closing(shared.open("s3://models/m/a.bin")) as source:
            assert read(source, 0, len(DATA)) == DATA
        assert {request.headers["host"] for request in server.requests} == {f"models.s3.localhost:{server.port}"}


# ---- regions


@pytest.mark.parametrize("region", ["us-east-1", "ap-south-1"], ids=["moved", "malformed"])
def test_the_region_of_a_bucket_is_found_and_remembered(region: str) -> None:
    with serving(buckets={"models": Bucket(region="eu-central-1")}) as server:
        shared = store(server, region=region)
        with contextlib.closing(shared.open("s3://models/m/a.bin", prefix_nbytes=KIB)) as source:
            assert read(source, 0, len(DATA)) == DATA
        assert shared.folder("s3://models/m").names() == ["a.bin"]
        shared.open("s3://models/m/a.bin").close()
        assert [request.status for request in server.requests] == [301 if region == "us-east-1" else 400, 206, 206, 200, 206]


def test_a_bucket_in_another_region_is_asked_at_its_own_host() -> None:
    with serving(region=None) as server:
        redirect = Status(301, "PermanentRedirect", headers={"x-amz-bucket-region": "us-east-1"})
        server.fail(Rule(redirect, times=1))
        access = replace(QUICK, proxies={"http": server.url})
        shared = S3Store(keys(region="eu-west-1"), access=access)
        # The test server has no certificate for Amazon; all but the scheme is as it would be.
        shared._place = _PlainPlace()
        with contextlib.closing(shared.open("s3://models/m/a.bin")) as source:
            assert read(source, 0, 10) == DATA[:10]
        assert [request.headers["host"] for request in server.requests] == [
            "models.s3.localhost",
            "models.localhost",
        ]


def test_a_bucket_elsewhere_whose_keys_have_expired_is_found_with_new_ones() -> None:
    tokens = ["token-number-one"]

    def give() -> S3Credentials:
        return keys(server, session_token=tokens[-1])

    with serving(buckets={"models": Bucket(region="eu-central-1")}, require_token=tokens[-1]) as server:
        shared = S3Store(give, access=QUICK)
        tokens.append("token-number-two")
        server.rotate(access_key=ACCESS_KEY, secret_key=SECRET, token=tokens[-1])
        with contextlib.closing(shared.open("s3://models/m/a.bin", prefix_nbytes=KIB)) as source:
            assert read(source, 0, len(DATA)) == DATA
        assert [request.error for request in server.requests] == ["PermanentRedirect", "ExpiredToken", None, None]


class _PlainPlace(Place):
    """Two regions, each with a host."""

    __slots__ = ()

    def base(self, bucket: str, region: str) -> str:
        return f"http://{bucket}.{'localhost' if region == 'us-east-1' else 's3.localhost'}"


def test_a_bucket_that_is_always_elsewhere_is_an_error() -> None:
    with serving() as server:
        server.fail(Rule(Status(301, "PermanentRedirect", headers={"x-amz-bucket-region": "us-east-1"})))
        error = error_of(RedirectError, store(server).open, "s3://models/m/a.bin")
        assert error.code == "PermanentRedirect"
        assert len(server.requests) == 2


# ---- credentials


def test_anonymous_requests_are_not_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(buckets={"models": Bucket(public=True)}) as server:
        shared = S3Store(S3Credentials(anonymous=True, endpoint=server.url), access=QUICK)
        assert shared.folder("s3://models/m").names() == ["a.bin"]
        monkeypatch.setenv("RUNAI_STREAMER_S3_UNSIGNED", "1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        open_s3("s3://models/m/a.bin").close()
        assert all("authorization" not in request.headers for request in server.requests)
    with serving() as server:
        error_of(AccessDeniedError, S3Store(S3Credentials(anonymous=True, endpoint=server.url)).open, "s3://models/m/a.bin")


def test_requester_pays() -> None:
    with serving(buckets={"models": Bucket(requester_pays=True)}) as server:
        error_of(AccessDeniedError, store(server).open, "s3://models/m/a.bin")
        with opened(server, requester_pays=True) as source:
            assert read(source, 0, len(DATA)) == DATA
        assert store(server, requester_pays=True).folder("s3://models/m").names() == ["a.bin"]


def test_an_expired_token_is_renewed_in_mid_load() -> None:
    tokens = ["token-number-one", "token-number-two"]
    given: list[str] = []

    def give() -> S3Credentials:
        given.append(tokens[0])
        return keys(server, session_token=tokens[0])

    with serving(require_token=tokens[0]) as server:
        source = open_s3("s3://models/m/a.bin", credentials=give, access=QUICK, prefix_nbytes=KIB)
        with contextlib.closing(source):
            assert read(source, 0, 200_000) == DATA[:200_000]
            del tokens[0]
            server.rotate(access_key=ACCESS_KEY, secret_key=SECRET, token=tokens[0])
            assert read(source, 100_000, 200_000) == DATA[100_000:300_000]
            assert read(source, KIB, 10) == DATA[KIB : KIB + 10]
        assert [request.error for request in server.requests if request.status >= 400] == ["ExpiredToken"]
        assert given == ["token-number-one", "token-number-two"]


def test_many_threads_renew_an_expired_token_once() -> None:
    tokens = ["token-number-one"]
    given: list[str] = []

    def give() -> S3Credentials:
        given.append(tokens[-1])
        return keys(server, session_token=tokens[-1])

    data = pattern(1 << 20)

    def read_stripe(index: int) -> bool:
        start.wait()
        offsets = range(index * 64 * KIB, (index + 1) * 64 * KIB, 4 * KIB)
        return all(read(source, offset, 4 * KIB) == data[offset : offset + 4 * KIB] for offset in offsets)

    start = threading.Barrier(16)
    with serving({"models": {"a": data}}, require_token=tokens[-1]) as server, ThreadPoolExecutor(16) as threads:
        source = open_s3("s3://models/a", credentials=give, access=QUICK, prefix_nbytes=KIB)
        tokens.append("token-number-two")
        server.rotate(access_key=ACCESS_KEY, secret_key=SECRET, token=tokens[-1])
        assert all(threads.map(read_stripe, range(16)))
        source.close()
    assert given == ["token-number-one", "token-number-two"]


def test_a_clock_that_is_wrong_is_named() -> None:
    with serving(clock=lambda: time.time() + 3600) as server:
        error = error_of(CredentialsError, store(server).open, "s3://models/m/a.bin")
        assert error.code == "RequestTimeTooSkewed"
        assert "clock" in error.hint


def test_a_listing_is_tried_again() -> None:
    with serving() as server:
        server.fail(Rule(Status(503), method="LIST", times=2))
        assert store(server).folder("s3://models/m").names() == ["a.bin"]


def test_the_library_is_imported_when_it_is_needed() -> None:
    code = "import sys, headrace.sources.s3; sys.exit('botocore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_an_expired_token_that_nobody_renews_is_an_error_at_once() -> None:
    with serving(require_token=TOKEN) as server, opened(server, session_token=TOKEN) as source:
        server.rotate(access_key=ACCESS_KEY, secret_key=SECRET, token="another")
        server.forget()
        error = error_of(ExpiredCredentialsError, read, source, 2 * KIB, 10)
        assert isinstance(error, SourcePermissionError)
        assert (error.offset, error.nbytes, error.code, error.attempts) == (2 * KIB, 10, "ExpiredToken", 1)
        assert len(server.requests) == 1


def test_files_are_read_again_when_their_keys_have_expired(tmp_path: Path) -> None:
    def write(token: str) -> None:
        lines = (f"aws_access_key_id={ACCESS_KEY}", f"aws_secret_access_key={SECRET}", f"aws_session_token={token}")
        (tmp_path / "credentials").write_text("\n".join(("[default]", *lines)))

    write("first-token")
    with serving(require_token="first-token") as server:
        source = open_s3("s3://models/m/a.bin", credentials=S3Credentials(endpoint=server.url), access=QUICK, prefix_nbytes=KIB)
        with contextlib.closing(source):
            server.rotate(access_key=ACCESS_KEY, secret_key=SECRET, token="second-token")
            write("second-token")
            assert read(source, 0, len(DATA)) == DATA


def test_profiles_have_keys_region_endpoint_and_addressing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(region="eu-north-1") as server:
        (tmp_path / "config").write_text(
            f"[profile work]\nregion=eu-north-1\nservices=local\nendpoint_url=http://127.0.0.1:9\n"
            f"aws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET}\n"
            f"[services local]\ns3 =\n  endpoint_url={server.url}\n"
        )
        open_s3("s3://models/m/a.bin", credentials=S3Credentials(profile="work"), access=QUICK).close()
        monkeypatch.setenv("AWS_PROFILE", "work")
        open_s3("s3://models/m/a.bin", access=QUICK).close()
        assert [request.status for request in server.requests] == [206, 206]
        monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
        assert S3Store(access=QUICK)._place == Place()
    error = error_of(CredentialsError, S3Store, S3Credentials(profile="absent"))
    assert "absent" in str(error)


def test_a_process_gives_credentials_and_its_complaint_is_not_shown(tmp_path: Path) -> None:
    script = tmp_path / "keys.py"
    answer = {"Version": 1, "AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET}
    with serving() as server:
        (tmp_path / "config").write_text(f"[default]\nendpoint_url={server.url}\ncredential_process={sys.executable} {script}\n")
        script.write_text(f"print({json.dumps(answer)!r})")
        open_s3("s3://models/m/a.bin", access=QUICK).close()
        script.write_text(f"import sys; sys.exit({SECRET!r})")
        error = error_of(CredentialsError, lambda: open_s3("s3://models/m/a.bin", access=QUICK))
        assert SECRET not in str(error)


class Giver(ThreadingHTTPServer):
    """Plays the services that hand out credentials: answers everything with the next of its bodies, the last one for good."""

    def __init__(self, *bodies: str) -> None:
        super().__init__(("127.0.0.1", 0), GiverHandler)
        self.bodies = list(bodies)
        self.seen: list[str] = []
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


class GiverHandler(BaseHTTPRequestHandler):
    server: Giver

    def do_GET(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.server.seen.append(f"{self.path} {asked}")
        body = (self.server.bodies.pop(0) if len(self.server.bodies) > 1 else self.server.bodies[0]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - the base class's name

    def log_message(self, *_: object) -> None: ...


def test_the_role_of_a_container_is_taken_and_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(token: str) -> str:
        given = {"AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET, "Token": token, "Expiration": "2099-01-01T00:00:00Z"}
        return json.dumps(given)

    with serving(require_token="first-token") as server, Giver(answer("first-token"), answer("second-token")) as giver:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{giver.url}/role")
        source = open_s3("s3://models/m/a.bin", credentials=S3Credentials(endpoint=server.url), access=QUICK, prefix_nbytes=KIB)
        with contextlib.closing(source):
            assert read(source, 0, 100_000) == DATA[:100_000]
            server.rotate(access_key=ACCESS_KEY, secret_key=SECRET, token="second-token")
            assert read(source, 0, len(DATA)) == DATA
        assert len(giver.seen) == 2


def test_a_web_identity_is_exchanged_for_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "identity").write_text("who-i-am")
    body = (
        '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleWithWebIdentityResult>'
        f"<Credentials><AccessKeyId>{ACCESS_KEY}</AccessKeyId><SecretAccessKey>{SECRET}</SecretAccessKey>"
        f"<SessionToken>{TOKEN}</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>"
        "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
    )
    with serving(require_token=TOKEN) as server, Giver(body) as giver:
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/reader")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "identity"))
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", giver.url)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with contextlib.closing(open_s3("s3://models/m/a.bin", access=QUICK)) as source:
            assert read(source, 0, len(DATA)) == DATA
        assert "who-i-am" in giver.seen[0]


def test_the_environment_says_who_asks_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(region="eu-west-3") as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_REGION", "eu-west-3")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        monkeypatch.setenv("RUNAI_STREAMER_S3_ENDPOINT", server.url)
        monkeypatch.setenv("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING", "0")
        open_s3("s3://models/m/a.bin").close()
        assert [request.status for request in server.requests] == [206]
        monkeypatch.setenv("RUNAI_STREAMER_S3_ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        assert S3Settings.from_environment() == S3Settings(endpoint=server.url, region="eu-west-3", virtual_hosted=False)
        open_s3("s3://models/m/a.bin").close()
        monkeypatch.setenv("RUNAI_STREAMER_S3_UNSIGNED", "perhaps")
        with pytest.raises(OptionError):
            S3Settings.from_environment()


def test_nobody_to_sign_is_an_error_that_says_what_to_do() -> None:
    with serving() as server:
        opening = S3Store(S3Credentials(endpoint=server.url), access=QUICK).open
        error = error_of(CredentialsError, opening, "s3://models/m/a.bin")
        assert (error.bucket, error.key, error.url) == ("models", "m/a.bin", "s3://models/m/a.bin")
        assert "anonymous" in str(error)
        assert not server.requests


@pytest.mark.parametrize(
    "half",
    [
        {"access_key_id": "A"},
        {"secret_access_key": SECRET},
        {"session_token": TOKEN},
        {"access_key_id": "A", "secret_access_key": SECRET, "anonymous": True},
    ],
)
def test_half_a_set_of_credentials_is_refused(half: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        S3Credentials(**half)
    assert SECRET not in str(caught.value)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    error = error_of(OptionError, lambda: open_s3("s3://models/m/a.bin"))
    assert "pip install 'headrace[s3]'" in str(error)


def test_tls_with_the_profiles_ca(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    with serving(tls=(made.cert, made.key)) as server:
        (tmp_path / "config").write_text(f"[default]\nca_bundle={made.ca}\n")
        with contextlib.closing(open_s3("s3://models/m/a.bin", credentials=keys(server))) as source:
            assert read(source, 0, len(DATA)) == DATA


# ---- faults


@pytest.mark.parametrize("fault", [Status(503), Status(500, "InternalError"), Status(400, "RequestTimeout"), Reset(after=1000)])
def test_what_is_transient_is_tried_again(fault: Any) -> None:
    with serving() as server:
        server.fail(Rule(fault, skip=1, times=2))
        with opened(server) as source:
            assert read(source, 0, len(DATA)) == DATA
            assert source.traffic.failed == 2


def test_a_replaced_object_is_an_error() -> None:
    with serving() as server, opened(server) as source:
        server.fail(Rule(Replaced(), times=1))
        error = error_of(SourceChangedError, read, source, 2 * KIB, 1000)
        assert (error.url, error.offset, error.nbytes) == ("s3://models/m/a.bin", 2 * KIB, 1000)


def test_an_empty_object_opens_where_a_range_of_it_is_refused_without_size() -> None:
    with serving({"models": {"empty": b"", "full": b"x"}}) as server:
        server.fail(Rule(Status(416, "InvalidRange"), times=2))
        with opened(server, "s3://models/empty") as source:
            assert source.nbytes == 0
            assert source.version is not None
        server.fail(Rule(Status(416, "InvalidRange"), times=2))
        error_of(WrongAnswerError, store(server).open, "s3://models/full")


def raised(opening: Callable[[], object]) -> SourceError:
    return error_of(SourceError, opening)


def test_each_failure_has_its_own_class_and_text(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    key = "s3://models/m/a.bin"
    with serving() as server, serving(tls=(made.cert, made.key)) as secure, serving() as busy, serving() as cold:
        busy.fail(Rule(Status(503)))
        cold.fail(Rule(Status(403, "InvalidObjectState")))
        found = [
            (RefusedError, raised(lambda: open_s3(key, credentials=keys(endpoint=f"http://127.0.0.1:{free_port()}")))),
            (TlsError, raised(lambda: store(secure).open(key))),
            (CredentialsError, raised(lambda: store(server, secret_access_key="wrong-secret-of-this-test").open(key))),
            (CredentialsError, raised(lambda: store(server, access_key_id="AKIAUNKNOWN").open(key))),
            (BucketNotFoundError, raised(lambda: store(server).open("s3://absent/m/a.bin"))),
            (ObjectNotFoundError, raised(lambda: store(server).open("s3://models/m/b.bin"))),
            (ThrottledError, raised(lambda: store(busy).open(key))),
            (ArchivedObjectError, raised(lambda: store(cold).open(key))),
        ]
    for kind, error in found:
        assert type(error) is kind, error
        assert isinstance(error, HttpError)
        assert error.hint
        assert error.url is not None
        assert error.url in str(error)
        assert SECRET not in str(error)
        assert "wrong-secret" not in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert vars(again) == vars(error)
    assert len({error.hint for _, error in found}) == len(found)  # type: ignore[attr-defined]
    missing = found[5][1]
    assert isinstance(missing, (S3Error, SourceNotFoundError))
    assert (missing.bucket, missing.key, missing.code, missing.status) == ("models", "m/b.bin", "NoSuchKey", 404)  # type: ignore[attr-defined]
    assert missing.request_id  # type: ignore[attr-defined]


def test_a_host_without_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    error_of(
        UnknownHostError, lambda: open_s3("s3://models/a", credentials=keys(endpoint="http://nowhere.invalid"), access=QUICK)
    )


def test_secrets_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    credentials = keys(session_token=TOKEN)
    with serving(require_token="another-token") as server:
        shared = S3Store(replace(credentials, endpoint=server.url), access=QUICK)
        error = error_of(CredentialsError, shared.open, "s3://models/m/a.bin")
        shown = [
            repr(credentials),
            str(credentials),
            repr(shared),
            repr(vars(error)),
            str(error),
            repr(error.__cause__),
            caplog.text,
        ]
    assert "REDACTED" in caplog.text  # what botocore would log
    for text in shown:
        assert SECRET not in text
        assert TOKEN not in text


def test_complaints_are_read_from_xml_only() -> None:
    assert parse_complaint(Headers(), b"<html>no</html").code == ""
    assert parse_complaint(Headers(), b"<Error xmlns='x'><Code>NoSuchKey</Code></Error>").code == "NoSuchKey"
    moved = b"<Error><Code>PermanentRedirect</Code><Endpoint>models.s3.eu-west-1.amazonaws.com</Endpoint></Error>"
    assert parse_complaint(Headers(), moved).region == "eu-west-1"
    assert parse_complaint(Headers([("X-Amz-Bucket-Region", "us-west-2")]), moved).region == "us-west-2"


# ---- checkpoints


def test_a_whole_checkpoint_is_streamed() -> None:
    contents = {
        f"layer.{index}.weight": TensorEntry("F32", (64, 1000 + index), pattern(64 * (1000 + index) * 4)) for index in range(8)
    }
    names = list(contents)
    shards = {
        f"llama/model-{part + 1:05d}-of-00004.safetensors": serialize({name: contents[name] for name in names[part::4]})
        for part in range(4)
    }
    with serving({"models": shards | {"llama/config.json": b"{}"}}) as server:
        folder = store(server).folder("s3://models/llama")
        with headrace.open(folder) as checkpoint:
            assert sorted(checkpoint) == sorted(names)
            assert len(server.requests) == 5  # one listing, and one request a shard
            tensors = headrace.load(checkpoint)
        assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == {name: contents[name].data for name in names}
        model_nbytes = sum(map(len, shards.values()))
        assert server.bytes_asked < 1.2 * model_nbytes


def test_the_variables_of_other_loaders_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"w": TensorEntry("F32", (3, 100), pattern(1200))}
    with serving({"models": {"llama/model.safetensors": serialize(contents)}}) as server:
        for name, value in {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": server.url,
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
            "RUNAI_STREAMER_CONCURRENCY": "4",
        }.items():
            monkeypatch.setenv(name, value)
        for url in ("s3://models/llama", "s3://models/llama/", "s3://models/llama/model.safetensors"):
            assert {name: bytes_of(tensor) for name, tensor in headrace.load(url).items()} == {"w": contents["w"].data}
