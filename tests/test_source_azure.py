"""Azure Blob Storage against Microsoft's emulator and our own server: the contracts, all kinds of credentials, faults, errors."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

import pytest
from azure_server import ACCOUNT, KEY, AzureServer, TokenServer, emulator, error, web_token, why_no_emulator
from checkpoints import Entry as TensorEntry
from checkpoints import bytes_of, serialize
from http_servers import Certificates, fault, free_port
from hypothesis import given
from hypothesis import strategies as st
from stores import DATA, KIB, NESTED, QUICK, PrefixFolderTests, PrefixTests, Served, forget
from typer.testing import CliRunner

import headrace
from headrace._environment import AzureSettings
from headrace.cli import app
from headrace.errors import OptionError, SourceChangedError, SourceError, SourceNotFoundError, SourcePermissionError
from headrace.sources.azure import (
    AccessDeniedError,
    AccountNotFoundError,
    ArchivedBlobError,
    AzureBlobError,
    AzureCredentials,
    AzureFolder,
    AzureSource,
    AzureStore,
    BlobNotFoundError,
    ContainerNotFoundError,
    CredentialsError,
    ExpiredCredentialsError,
    open_azure,
)
from headrace.sources.azure._address import Place, Service, encode_query, normalise_sas, parse_url
from headrace.sources.azure._connection_string import parse_connection_string
from headrace.sources.azure._errors import parse_complaint
from headrace.sources.azure._identity import resolve
from headrace.sources.azure._listing import parse_page
from headrace.sources.base import Folder
from headrace.sources.http import (
    Access,
    Headers,
    HttpError,
    RefusedError,
    ThrottledError,
    Timing,
    TlsError,
    UnavailableError,
    UnknownHostError,
    WrongAnswerError,
)
from headrace.sources.objects import escape
from headrace.testing import FolderTests, SourceTests
from headrace.testing.sources import error_of, pattern, read

blob_library = pytest.importorskip("azure.storage.blob")
pytest.importorskip("azure.identity")

TOKEN = "tOkEn-0123456789-abcdefghijklmnopq"
URL = "az://models/m/a.bin"
HOUR = 3600.0
VARIABLES = [
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_STORAGE_SERVICE_ENDPOINT",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT_SUFFIX",
    "AZURE_SKIP_SIGNATURE",
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_TENANT_ID",
    "AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_AUTHORITY_HOST",
    "AZURE_POD_IDENTITY_AUTHORITY_HOST",
    "AZURE_TOKEN_CREDENTIALS",
    "IDENTITY_ENDPOINT",
    "IDENTITY_HEADER",
    "MSI_ENDPOINT",
]


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable and no login of Azure that this machine may have counts here."""
    forget(monkeypatch, VARIABLES)
    monkeypatch.setenv("HOME", str(tmp_path))


class Clock:
    """Time as a test wants it."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    @property
    def access(self) -> Access:
        return replace(QUICK, timing=Timing(now=self))


class Given(NamedTuple):
    """What a `get_token` returns."""

    token: str
    expires_on: int


class Tokens:
    """A token credential of one's own: each is given for good until `push`."""

    def __init__(self, token: str = TOKEN, *, ends_at: float = 4e9) -> None:
        self.current = Given(token, int(ends_at))
        self.scopes: list[str] = []
        self.failure: Exception | None = None

    def get_token(self, *scopes: str, **_: Any) -> Given:
        self.scopes += scopes
        if self.failure is not None:
            raise self.failure
        return self.current


@contextlib.contextmanager
def serving(content: Mapping[str, Mapping[str, bytes]] | None = None, **options: Any) -> Iterator[AzureServer]:
    with AzureServer({"models": {"m/a.bin": DATA}} if content is None else content, **options) as server:
        yield server


def keyed(server: AzureServer | None = None, **more: Any) -> AzureCredentials:
    given: dict[str, Any] = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": server and server.endpoint}
    return AzureCredentials(**(given | more))


def store(server: AzureServer, access: Access = QUICK, **more: Any) -> AzureStore:
    return AzureStore(keyed(server, **more), access=access)


@contextlib.contextmanager
def opened(server: AzureServer, url: str = URL, *, prefix_nbytes: int = KIB, **more: Any) -> Iterator[AzureSource]:
    with contextlib.closing(store(server, **more).open(url, prefix_nbytes=prefix_nbytes)) as source:
        yield source


def sas(ends_at: float, *, container: str = "models", permission: str = "rl", key: str = KEY) -> str:
    """A token as Azure's own library makes it."""
    ends = datetime.fromtimestamp(ends_at, timezone.utc)
    made = blob_library.generate_container_sas(ACCOUNT, container, account_key=key, permission=permission, expiry=ends)
    return str(made)


# ---- the contracts


class TestAzureSource(Served, SourceTests):
    def make(self, data: bytes) -> AzureSource:
        server = self.stack.enter_context(serving({"models": {"a b/größe+%20.bin": data}}))
        return store(server).open("az://models/a b/größe+%20.bin", prefix_nbytes=KIB)


MARKED = {name: data for name, data in NESTED.items() if name not in ("m/sub/", "m/old_$folder$")} | {
    "m/sub": b"",
    "m/hadoop": b"",
}
FOLDERS = {("models", "m/sub"): {"ResourceType": "directory"}, ("models", "m/hadoop"): {"Hdi_isfolder": "true"}}


class OurStore:
    scheme = "az"

    def store(self: Any, content: dict[str, bytes]) -> tuple[AzureStore, str]:
        marked = {place: told for place, told in FOLDERS.items() if place[1] in content}
        return store(self.stack.enter_context(serving({"models": content}, metadata=marked))), "models"


class TestAzureFolder(OurStore, PrefixFolderTests): ...


class TestAzureFolderThatIsAContainer(TestAzureFolder):
    prefix = ""


class TestAzurePrefix(OurStore, PrefixTests):
    nested = MARKED
    missing, of_bucket = BlobNotFoundError, "container"


# ---- folders


def test_listing_goes_on_beyond_a_page() -> None:
    content = {f"m/{index:05d}": b"" for index in range(5500)} | {"m/x/y": b""}
    with serving({"models": content}) as server:
        assert store(server).folder("az://models/m").names() == [f"{index:05d}" for index in range(5500)]
        assert server.asked_for() == ["LIST m/"] * 2
        server.page = 1000
        assert len(store(server).folder("az://models").list_keys()) == 5501


def test_a_long_index_takes_one_request() -> None:
    with serving({"models": {"m/model.safetensors.index.json": DATA}}) as server:
        with contextlib.closing(store(server).folder("az://models/m").open("model.safetensors.index.json")) as source:
            assert read(source, 0, len(DATA)) == DATA
        assert server.asked_for() == ["m/model.safetensors.index.json"]


def test_a_page_without_blobs_is_not_the_end() -> None:
    def replies(seen: Any) -> Any:
        body = b"<EnumerationResults><Blobs/><NextMarker>more</NextMarker></EnumerationResults>"
        return None if "marker" in seen.target else (200, {}, body)

    with serving() as server:
        checked = server._check
        server._check = lambda seen: replies(seen) or checked(replace(seen, target=seen.target.replace("&marker=more", "")))
        assert store(server).folder("az://models/m").names() == ["a.bin"]


def test_blobs_open_where_listing_is_not_allowed() -> None:
    with serving() as server:
        folder = AzureFolder(
            "az://models/m", credentials=AzureCredentials(sas_token=sas(4e9, permission="r"), endpoint=server.endpoint)
        )
        with contextlib.closing(folder.open("a.bin")) as source:
            assert read(source, 0, 100) == DATA[:100]
        assert server.asked_for() == ["m/a.bin"]
        error = error_of(AccessDeniedError, folder.names)
        assert (error.code, error.key) == ("AuthorizationPermissionMismatch", "m")
        assert "Listing" in error.hint


def test_one_store_lists_and_reads_with_one_set_of_credentials() -> None:
    with serving() as server:
        with pytest.raises(OptionError):
            AzureFolder("az://models/m", store=store(server), access=QUICK)
        with pytest.raises(OptionError):
            open_azure(URL, store=store(server), credentials=keyed(server))
        shared = store(server)
        assert AzureFolder("az://models/m", store=shared).names() == ["a.bin"]
        open_azure(URL, store=shared).close()


def test_a_page_that_is_none_is_a_wrong_answer() -> None:
    for body in (b"hello", b"<html/>", b"<EnumerationResults><Blobs><Blob><Name/></Blob></Blobs></EnumerationResults>"):
        with pytest.raises(ValueError, match="it "):
            parse_page(body, prefix="")
    with serving() as server:
        server._check = lambda _: (200, {}, b"<EnumerationResults><NextMarker>x</NextMarker></EnumerationResults>")
        error_of(WrongAnswerError, store(server).folder("az://models/m").names)
        server._check = lambda _: (200, {}, b"<html/>")
        error = error_of(WrongAnswerError, store(server).folder("az://models/m").names)
        assert error.url == "az://models/m"


# ---- addresses


@pytest.mark.parametrize(
    ("url", "container", "key", "host"),
    [
        ("az://models/llama/a?b#c%20/", "models", "llama/a?b#c%20/", None),
        ("abfs://models", "models", "", None),
        ("ABFSS://models@acct.dfs.core.windows.net/m/a", "models", "m/a", "acct.dfs.core.windows.net"),
        ("az://$web@acct.blob.core.windows.net/", "$web", "", "acct.blob.core.windows.net"),
        ("https://acct.blob.core.windows.net/models/a%20b%2Bc", "models", "a b+c", "acct.blob.core.windows.net"),
    ],
)
def test_a_url_names_container_and_blob(url: str, container: str, key: str, host: str | None) -> None:
    location = parse_url(url)
    assert (location.container, location.key, location.host) == (container, key, host)
    if not key.endswith("/") and key:
        assert parse_url(location.url) == location


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_names_survive_being_put_into_a_url(key: str) -> None:
    for url in (f"az://models/{key}", f"https://acct.blob.core.windows.net/models/{quote(key)}"):
        if "?sig=" not in url and "&sig=" not in url:
            location = parse_url(url)
            assert location.key == key
            assert parse_url(location.url).at("x").url == location.at("x").url


@pytest.mark.parametrize(
    "url",
    [
        "az:/models/m",
        "az://",
        "az:///m",
        "az://Models/m",
        "az://models:80/m",
        "az://acct.blob.core.windows.net/models",
        "az://models@/m",
        "az://models/a\0",
        "https://me:SECRET@acct.blob.core.windows.net/models/a",
        "https://acct.blob.core.windows.net/models/a?snapshot=SECRET",
        "az://models/a?sv=2020&sig=SECRET",
        "s3://models/m",
    ],
)
def test_a_url_that_is_none_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_url(url)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "host", "service"),
    [
        (Place(account="acct"), None, Service("acct", "https://acct.blob.core.windows.net")),
        (Place(account="acct", suffix="blob.core.chinacloudapi.cn"), None, Service("acct", "https://acct.blob.core.chinacloudapi.cn")),
        (Place(), "acct.dfs.core.windows.net", Service("acct", "https://acct.blob.core.windows.net")),
        (Place(account="mine"), "acct.blob.core.usgovcloudapi.net", Service("acct", "https://acct.blob.core.usgovcloudapi.net")),
        (Place(), "acct.z01.blob.storage.azure.net", Service("acct", "https://acct.z01.blob.storage.azure.net")),
        (Place(), "acct-secondary.blob.core.windows.net", Service("acct", "https://acct-secondary.blob.core.windows.net")),
        (Place(suffix="blob.cloud.example"), "acct.dfs.cloud.example", Service("acct", "https://acct.blob.cloud.example")),
        (Place(endpoint="http://127.0.0.1:10000/acct/"), None, Service("acct", "http://127.0.0.1:10000/acct")),
        (Place(account="acct", endpoint="http://[::1]:10000"), None, Service("acct", "http://[::1]:10000/acct")),
        (Place(endpoint="http://127.0.0.1:1/acct"), "acct.dfs.core.windows.net", Service("acct", "http://127.0.0.1:1/acct")),
        (Place(endpoint="http://127.0.0.1:1/acct"), "other.blob.core.windows.net", Service("other", "https://other.blob.core.windows.net")),
        (Place(account="acct", endpoint="https://models.example"), "models.example", Service("acct", "https://models.example")),
        (Place(endpoint="http://10.0.0.1:80"), None, Service(None, "http://10.0.0.1:80")),
    ],
)  # fmt: skip
def test_an_account_has_an_address(place: Place, host: str | None, service: Service) -> None:
    assert place.service(host) == service


@pytest.mark.parametrize(
    "host", ["acct.evil.example", "acct.blob.core.windows.net.evil.example", "blob.core.windows.net", "acct"]
)
def test_credentials_are_sent_to_hosts_that_are_azures_or_named(host: str) -> None:
    with pytest.raises(OptionError):
        Place(account="acct").service(host)


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": text}
        for text in ("acct.example", "ftp://acct", "https://me:pw@acct", "https://", "http://a:x", "http://a?b=c")
    ]
    + [{"account": "a/b"}, {"account": "evil.example#"}, {"suffix": "x/y"}],
)
def test_a_place_that_is_none_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(OptionError) as caught:
        Place(**wrong)
    assert "pw" not in str(caught.value)


def test_no_account_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(OptionError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        AzureStore(AzureCredentials(anonymous=True)).open(URL)


def test_names_are_taken_as_they_are() -> None:
    assert escape("a b/ü%+~", safe="/") == "a%20b/%C3%BC%25%2B~"
    assert encode_query({"prefix": "a/b", "delimiter": "/"}) == "prefix=a%2Fb&delimiter=%2F"
    odd = {"m/a?b#c%20": b"1", "m//b": b"2", "m/ä\x01+ ": b"4", "m/&=;:@!$'()*,<>": b"5", "m/é%2Fx": b"6"}
    with serving({"models": odd}) as server:
        for key, data in odd.items():
            with opened(server, f"az://models/{key}") as source:
                assert read(source, 0, 1) == data, key
        assert {entry.key for entry in store(server).folder("az://models").list_keys()} == set(odd)


# ---- credentials


def test_an_account_key_signs_and_does_not_travel() -> None:
    with serving() as server:
        shared = store(server)
        assert shared.folder("az://models/m").names() == ["a.bin"]
        with contextlib.closing(shared.open(URL, prefix_nbytes=KIB)) as source:
            assert read(source, 0, len(DATA)) == DATA
        assert {seen.headers.get("authorization") for seen in server.seen} == {None}
        assert all("sig=" in seen.target and KEY not in seen.target for seen in server.seen)


def test_what_an_account_key_signed_is_renewed_in_time() -> None:
    clock = Clock()
    with serving(clock=clock) as server:
        source = store(server, clock.access).open(URL, prefix_nbytes=KIB)
        with contextlib.closing(source):
            for _ in range(5):
                assert read(source, 2 * KIB, 100) == DATA[2 * KIB : 2 * KIB + 100]
                clock.now += 0.4 * HOUR
        assert source.traffic.failed == 0
        signatures = [seen.target.partition("sig=")[2] for seen in server.seen]
        assert len(set(signatures)) == 3


@pytest.mark.parametrize("form", ["{}", "?{}", " &{}&"])
def test_a_sas_token_in_any_form(form: str) -> None:
    token = sas(4e9)
    with serving() as server:
        for text in (token, token.replace("%3D", "=").replace("%2B", "+").replace("%2F", "/").replace("%3A", ":")):
            credentials = AzureCredentials(sas_token=form.format(text), endpoint=server.endpoint)
            with contextlib.closing(AzureStore(credentials, access=QUICK).open(URL, prefix_nbytes=KIB)) as source:
                assert read(source, 0, len(DATA)) == DATA


@given(st.dictionaries(st.text("ab?%+ é&=", min_size=1), st.text("ab?%+ é&=/"), max_size=5))
def test_sas_tokens_mean_the_same_once_they_are_normal(values: dict[str, str]) -> None:
    encoded = "&".join(f"{quote(name)}={quote(value)}" for name, value in values.items())
    assert dict(parse_qsl(normalise_sas(f"?{encoded}"), keep_blank_values=True)) == values
    assert normalise_sas(normalise_sas(encoded)) == normalise_sas(encoded)


def test_a_tampered_sas_token_is_refused_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = sas(4e9, permission="r").replace("sp=r", "sp=rl")
    with serving() as server:
        credentials = AzureCredentials(sas_token=token, endpoint=server.endpoint)
        error = error_of(CredentialsError, AzureStore(credentials, access=QUICK).open, URL)
        assert (error.code, error.status, error.attempts, error.request_id) == ("AuthenticationFailed", 403, 1, "r-42")
        assert not isinstance(error, ExpiredCredentialsError)
        signature = token.partition("sig=")[2]
        for text in (str(error), repr(vars(error)), repr(error.__cause__), repr(credentials), caplog.text):
            assert signature not in text
            assert normalise_sas(f"x={signature}") not in text


def test_an_expired_sas_token_that_nobody_renews_is_an_error_at_once() -> None:
    clock = Clock()
    with serving(clock=clock) as server:
        credentials = AzureCredentials(sas_token=sas(clock.now + HOUR), endpoint=server.endpoint)
        with contextlib.closing(AzureStore(credentials, access=clock.access).open(URL, prefix_nbytes=KIB)) as source:
            clock.now += 2 * HOUR
            error = error_of(ExpiredCredentialsError, read, source, 2 * KIB, 10)
        assert isinstance(error, SourcePermissionError)
        assert (error.url, error.offset, error.nbytes, error.attempts) == (URL, 2 * KIB, 10, 1)
        assert "time frame" in str(error)


def test_a_function_gives_a_new_sas_token_before_the_old_one_ends_and_when_it_is_refused() -> None:
    clock = Clock()
    given: list[str] = []

    def give() -> AzureCredentials:
        given.append(sas(clock.now + HOUR, key=server.key))
        return AzureCredentials(sas_token=given[-1], endpoint=server.endpoint)

    with serving(clock=clock) as server:
        source = open_azure(URL, credentials=give, access=clock.access, prefix_nbytes=KIB)
        with contextlib.closing(source):
            clock.now += 0.95 * HOUR
            assert read(source, 2 * KIB, 10) == DATA[2 * KIB : 2 * KIB + 10]
            assert (len(given), source.traffic.failed) == (2, 0)
            server.key = base64.b64encode(b"another key, after a rotation").decode()
            assert read(source, 3 * KIB, 10) == DATA[3 * KIB : 3 * KIB + 10]
            assert (len(given), source.traffic.failed) == (3, 1)


def test_connection_strings() -> None:
    with serving() as server:
        parts = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};BlobEndpoint={server.endpoint};"
        for text in (f"{parts}AccountKey={KEY}", f"SharedAccessSignature={sas(4e9)};BlobEndpoint={server.endpoint}"):
            credentials = AzureCredentials(connection_string=text)
            assert AzureStore(credentials, access=QUICK).folder("az://models/m").names() == ["a.bin"]


@pytest.mark.parametrize(
    ("text", "account", "endpoint", "key", "token"),
    [
        (f"AccountName=acct;AccountKey={KEY}", "acct", "https://acct.blob.core.windows.net", KEY, None),
        (" accountname = acct ; AccountKey=a2V5 ;", "acct", "https://acct.blob.core.windows.net", "a2V5", None),
        (
            "DefaultEndpointsProtocol=http;AccountName=acct;AccountKey=a2V5;EndpointSuffix=core.chinacloudapi.cn",
            "acct", "http://acct.blob.core.chinacloudapi.cn", "a2V5", None,
        ),
        ("BlobEndpoint=https://x.example;SharedAccessSignature=sv=1&sig=2%3D", None, "https://x.example", None, "sv=1&sig=2%3D"),
        ("AccountName=a1;AccountKey=a2V5;SharedAccessSignature=sig", "a1", "https://a1.blob.core.windows.net", "a2V5", None),
        ("BlobEndpoint=https://x.example/", None, "https://x.example/", None, None),
    ],
)  # fmt: skip
def test_a_connection_string_is_read(text: str, account: str | None, endpoint: str, key: str | None, token: str | None) -> None:
    found = parse_connection_string(text)
    assert (found.account_name, found.endpoint, found.account_key, found.sas_token) == (account, endpoint, key, token)
    if account is not None and " " not in text:
        theirs = blob_library.BlobServiceClient.from_connection_string(text)
        assert theirs.url.rstrip("/") == endpoint
        theirs.close()


def test_the_emulator_has_a_connection_string_of_its_own() -> None:
    found = parse_connection_string("UseDevelopmentStorage=true")
    assert (found.account_name, found.endpoint) == ("devstoreaccount1", "http://127.0.0.1:10000/devstoreaccount1")
    assert found.account_key
    proxied = parse_connection_string("UseDevelopmentStorage=true;DevelopmentStorageProxyUri=http://azurite")
    assert proxied.endpoint == "http://azurite:10000/devstoreaccount1"


@given(st.text(max_size=60))
def test_what_is_no_connection_string_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_connection_string(f"{text};zzSECRETzz")
    assert "SECRET" not in str(caught.value)


def test_any_token_credential_is_asked_and_asked_again_when_its_token_is_refused() -> None:
    tokens = Tokens()
    with serving(tokens=[TOKEN]) as server:
        credentials = AzureCredentials(token_credential=tokens, endpoint=server.endpoint)
        source = open_azure(URL, credentials=credentials, access=QUICK, prefix_nbytes=KIB)
        with contextlib.closing(source):
            assert read(source, 0, 200_000) == DATA[:200_000]
            assert tokens.scopes == ["https://storage.azure.com/.default"]
            tokens.current = Given("another-token-0123456789", int(4e9))
            server.tokens = {"another-token-0123456789"}
            assert read(source, 100_000, 200_000) == DATA[100_000:300_000]
            assert len(tokens.scopes) == 2
            assert source.traffic.failed == 1


def test_a_token_is_renewed_shortly_before_its_end() -> None:
    clock = Clock()
    tokens = Tokens(ends_at=clock.now + HOUR)
    with serving(tokens=[TOKEN, "second-token"]) as server:
        credentials = AzureCredentials(token_credential=tokens, endpoint=server.endpoint)
        with contextlib.closing(open_azure(URL, credentials=credentials, access=clock.access, prefix_nbytes=KIB)) as source:
            clock.now += 0.9 * HOUR
            read(source, 2 * KIB, 10)
            assert len(tokens.scopes) == 1
            clock.now += 0.05 * HOUR
            tokens.failure = OSError("the endpoint of tokens is away for a moment")
            read(source, 2 * KIB, 10)  # the old one counts yet
            assert len(tokens.scopes) == 2
            read(source, 2 * KIB, 10)
            assert len(tokens.scopes) == 2
            clock.now += 0.02 * HOUR
            tokens.failure, tokens.current = None, Given("second-token", int(clock.now + HOUR))
            read(source, 2 * KIB, 10)
            assert len(tokens.scopes) == 3
        assert source.traffic.failed == 0
        assert server.seen[-1].headers["authorization"] == "Bearer second-token"


def test_many_threads_renew_a_refused_token_once() -> None:
    tokens, data = Tokens(), pattern(1 << 20)

    def read_stripe(index: int) -> bool:
        start.wait()
        offsets = range(index * 64 * KIB, (index + 1) * 64 * KIB, 4 * KIB)
        return all(read(source, offset, 4 * KIB) == data[offset : offset + 4 * KIB] for offset in offsets)

    start = threading.Barrier(16)
    with serving({"models": {"a": data}}, tokens=[TOKEN]) as server, ThreadPoolExecutor(16) as threads:
        credentials = AzureCredentials(token_credential=tokens, endpoint=server.endpoint)
        source = open_azure("az://models/a", credentials=credentials, access=QUICK, prefix_nbytes=KIB)
        tokens.current, server.tokens = Given("second-token", int(4e9)), {"second-token"}
        assert all(threads.map(read_stripe, range(16)))
        source.close()
    assert len(tokens.scopes) == 2


def test_a_token_that_is_refused_again_is_an_error() -> None:
    with serving() as server:
        error = error_of(
            CredentialsError, AzureStore(Tokens(), access=QUICK, settings=AzureSettings(endpoint=server.endpoint)).open, URL
        )
        assert (error.code, error.status, error.attempts) == ("InvalidAuthenticationInfo", 401, 2)
        assert TOKEN not in str(error)


def test_a_credential_that_has_no_token_is_an_error_that_says_why() -> None:
    tokens = Tokens()
    tokens.failure = ValueError("no   tenant\nwas given")
    with serving() as server:
        error = error_of(
            CredentialsError, AzureStore(tokens, access=QUICK, settings=AzureSettings(endpoint=server.endpoint)).open, URL
        )
        assert "no tenant; was given" in str(error)
        assert "az login" in error.hint
        assert (error.url, error.container) == (URL, "models")
        assert not server.seen


def test_a_bearer_token_is_not_sent_without_tls() -> None:
    credentials = AzureCredentials(token_credential=Tokens(), endpoint="http://store.example/acct")
    with pytest.raises(OptionError, match="TLS"):
        AzureStore(credentials, access=QUICK).open(URL)


def test_anonymous_requests_carry_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(public=["models"]) as server:
        credentials = AzureCredentials(anonymous=True, endpoint=server.endpoint)
        assert AzureStore(credentials, access=QUICK).folder("az://models/m").names() == ["a.bin"]
        monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "true")
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.endpoint)
        open_azure(URL).close()
        assert all("authorization" not in seen.headers and "sig=" not in seen.target for seen in server.seen)
    with serving() as server:
        shared = AzureStore(AzureCredentials(anonymous=True, endpoint=server.endpoint), access=QUICK)
        error_of(CredentialsError, shared.open, URL)
        server.denied = (409, "PublicAccessNotPermitted")
        error_of(AccessDeniedError, shared.open, URL)
        server.denied = (404, "ResourceNotFound")
        assert "not public" in error_of(BlobNotFoundError, shared.open, URL).hint
        error_of(ContainerNotFoundError, shared.folder("az://models").names)


def test_a_managed_identity_is_taken_and_renewed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(tokens=["first-token-0123456789"]) as server, TokenServer("first-token-0123456789", "second-token") as machine:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", machine.url)
        monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "ManagedIdentityCredential")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.endpoint)
        source = open_azure(URL, access=QUICK, prefix_nbytes=KIB)
        with contextlib.closing(source):
            assert read(source, 0, 100_000) == DATA[:100_000]
            server.tokens = {"second-token"}
            assert read(source, 0, len(DATA)) == DATA
        assert len(machine.seen) == 2
        assert "resource=https://storage.azure.com" in unquote(machine.seen[0][0])
        assert machine.seen[0][1]["metadata"] == "true"
        assert "first-token-0123456789" not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates")
def test_a_workload_identity_is_exchanged_for_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Certificates.make(tmp_path)
    (tmp_path / "identity").write_text("who-i-am")
    with serving(tokens=[TOKEN]) as server, TokenServer(TOKEN, tls=made.server_side()) as entra:
        for name, value in {
            "AZURE_FEDERATED_TOKEN_FILE": str(tmp_path / "identity"),
            "AZURE_CLIENT_ID": "11111111-2222-3333-4444-555555555555",
            "AZURE_TENANT_ID": "66666666-7777-8888-9999-000000000000",
            "AZURE_AUTHORITY_HOST": entra.url,
            "AZURE_TOKEN_CREDENTIALS": "WorkloadIdentityCredential",
            "REQUESTS_CA_BUNDLE": str(made.ca),
            "AZURE_STORAGE_ENDPOINT": server.endpoint,
        }.items():
            monkeypatch.setenv(name, value)
        with contextlib.closing(open_azure(URL, access=QUICK, prefix_nbytes=KIB)) as source:
            assert read(source, 0, len(DATA)) == DATA
        path, _, body = entra.seen[0]
        assert path == "/66666666-7777-8888-9999-000000000000/oauth2/v2.0/token"
        assert "client_assertion=who-i-am" in body
        assert "storage.azure.com" in body


def test_a_login_of_the_azure_command_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"accessToken": TOKEN, "expires_on": 4_000_000_000, "expiresOn": "2096-10-02 07:06:40.000000", "tenant": "t"}
    command = tmp_path / "bin" / "az"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\nprint({json.dumps(answer)!r})\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=os.pathsep)
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "AzureCliCredential")
    with serving(tokens=[TOKEN]) as server:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.endpoint)
        assert AzureStore(access=QUICK).folder("az://models/m").names() == ["a.bin"]


# ---- the environment


def test_the_environment_says_who_asks_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.url_of(""))
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=wrong")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        open_azure(URL).close()
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"wrong").decode())
        text = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={server.endpoint}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
        open_azure(URL).close()
        monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", sas(4e9))
        open_azure(URL).close()
        assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("AZURE_STORAGE_ACCOUNT", "a1", AzureSettings(account_name="a1")),
        ("AZURE_STORAGE_KEY", "k", AzureSettings(account_key="k")),
        ("AZURE_STORAGE_SERVICE_ENDPOINT", "https://e", AzureSettings(endpoint="https://e")),
        ("AZURE_STORAGE_ENDPOINT_SUFFIX", "blob.x.example", AzureSettings(endpoint_suffix="blob.x.example")),
        ("AZURE_STORAGE_ENDPOINT_SUFFIX", ".core.windows.net", AzureSettings(endpoint_suffix="blob.core.windows.net")),
        ("AZURE_SKIP_SIGNATURE", "0", AzureSettings()),
    ],
)  # fmt: skip
def test_names_of_other_programs_are_read(name: str, value: str, found: AzureSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert AzureSettings.from_environment() == found
    assert "'k'" not in repr(found)
    monkeypatch.setenv("AZURE_SKIP_SIGNATURE", "perhaps")
    with pytest.raises(OptionError):
        AzureSettings.from_environment()


OTHER = "https://other.blob.core.windows.net"
CONNECTION = "AccountName=other;AccountKey=eDE="
MINE = AzureSettings(account_name="mine", account_key="bWluZQ==", endpoint="https://mine.example")


@pytest.mark.parametrize(
    ("given_", "settings", "way", "place"),
    [
        (AzureCredentials(), AzureSettings(account_name="a1"), "default", Place(account="a1")),
        (AzureCredentials(), MINE, "key", Place(account="mine", endpoint="https://mine.example")),
        (AzureCredentials(account_name="mine"), MINE, "key", Place(account="mine", endpoint="https://mine.example")),
        (AzureCredentials(account_name="other"), MINE, "default", Place(account="other")),
        (AzureCredentials(endpoint=OTHER), MINE, "default", Place(endpoint=OTHER)),
        (AzureCredentials(endpoint="https://own.example"), MINE, "key", Place(account="mine", endpoint="https://own.example")),
        (AzureCredentials(endpoint="http://127.0.0.1:1"), MINE, "key", Place(account="mine", endpoint="http://127.0.0.1:1")),
        (AzureCredentials(anonymous=True), MINE, "anonymous", Place(account="mine", endpoint="https://mine.example")),
        (AzureCredentials(sas_token="sig=1"), MINE, "sas", Place(account="mine", endpoint="https://mine.example")),
        (AzureCredentials(connection_string=CONNECTION), MINE, "key", Place(account="other", endpoint=OTHER)),
        (AzureCredentials(), AzureSettings(connection_string=f"BlobEndpoint={OTHER}"), "anonymous", Place(endpoint=OTHER)),
        (AzureCredentials(), AzureSettings(endpoint_suffix="x.example", anonymous=True), "anonymous", Place(suffix="x.example")),
    ],
)  # fmt: skip
def test_arguments_come_before_the_environment(given_: AzureCredentials, settings: AzureSettings, way: str, place: Place) -> None:
    found = resolve(given_, settings)
    assert (found.way, found.place) == (way, place)


def test_a_key_counts_for_its_own_account_only() -> None:
    shared = AzureStore(AzureCredentials(account_name=ACCOUNT, account_key=KEY), access=QUICK)
    with pytest.raises(OptionError, match="belongs to account acct"):
        shared.open("abfss://models@other.dfs.core.windows.net/m/a.bin")


def test_an_account_that_a_url_names_is_found_at_the_endpoint() -> None:
    with serving() as server:
        folder = store(server).folder(f"abfss://models@{ACCOUNT}.dfs.core.windows.net/m")
        assert folder.names() == ["a.bin"]
        with contextlib.closing(folder.open("a.bin")) as source:
            assert source.url == f"abfss://models@{ACCOUNT}.dfs.core.windows.net/m/a.bin"
        url = f"https://{ACCOUNT}.blob.core.windows.net/models/m/a.bin"
        with contextlib.closing(store(server).open(url)) as source:
            assert source.url == url


def test_what_are_no_credentials_is_refused() -> None:
    for wrong in ("token", lambda: "token", 7):
        with pytest.raises(OptionError, match="AzureCredentials"):
            AzureStore(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "several",
    [
        {"account_key": KEY, "sas_token": "sig=SECRET"},
        {"account_key": KEY, "anonymous": True},
        {"token_credential": Tokens(), "connection_string": "AccountName=a1;AccountKey=SECRET"},
        {"account_key": "no base64: SECRET"},
        {"connection_string": "SECRET"},
        {"sas_token": ""},
        {"sas_token": "SECRET"},
        {"sas_token": "?sv=1&sig=&se=SECRET"},
    ],
)
def test_credentials_that_cannot_be_meant_are_refused(several: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        AzureCredentials(**several)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "credentials"), [("azure.storage.blob", keyed()), ("azure.identity", AzureCredentials(account_name=ACCOUNT))]
)
def test_a_missing_library_says_what_to_install(
    module: str, credentials: AzureCredentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    error = error_of(OptionError, lambda: open_azure(URL, credentials=credentials))
    assert "pip install 'headrace[azure]'" in str(error)


def test_the_libraries_are_imported_when_they_are_needed() -> None:
    code = "import sys, headrace.sources.azure; sys.exit(any(name.partition('.')[0] == 'azure' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_secrets_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = base64.b64encode(b"a key that is wrong and secret").decode()
    with serving() as server:
        shared = AzureStore(keyed(server, account_key=wrong), access=QUICK)
        error = error_of(CredentialsError, shared.open, URL)
        signature = server.seen[-1].target.partition("sig=")[2]
        shown = [
            repr(keyed()),
            repr(shared),
            repr(vars(shared)),
            repr(vars(error)),
            str(error),
            repr(error.__cause__),
            caplog.text,
        ]
        shown += [repr(resolve(keyed(), AzureSettings())), repr(parse_connection_string(f"AccountName=a1;AccountKey={KEY}"))]
    for text in shown:
        assert KEY not in text
        assert wrong not in text
        assert signature not in text


# ---- faults


@pytest.mark.parametrize(
    "bad",
    [
        {"do": "status", "code": 503, "headers": {"x-ms-error-code": "ServerBusy"}, "body": error(503, "ServerBusy")[2]},
        {"do": "status", "code": 500, "headers": {"x-ms-error-code": "OperationTimedOut"}, "body": b""},
        {"do": "status", "code": 429},
        {"do": "reset", "after": 1000},
        {"do": "short", "after": 1000},
    ],
    ids=lambda bad: f"{bad['do']} {bad.get('code', '')}".strip(),
)
def test_what_is_transient_is_tried_again(bad: dict[str, Any]) -> None:
    with serving(faults=[fault(skip=1, times=1, **bad)]) as server, opened(server) as source:
        assert read(source, 0, len(DATA)) == DATA
        assert source.traffic.failed == 1
        assert server.seen[-1].start == KIB + bad.get("after", 0)  # it goes on at the byte


def test_a_listing_is_tried_again() -> None:
    with serving() as server:
        server.listings = [(503, "ServerBusy"), (500, "InternalError")]
        assert store(server).folder("az://models/m").names() == ["a.bin"]


@pytest.mark.parametrize("ignores", [False, True])
def test_a_replaced_blob_is_an_error(ignores: bool) -> None:
    with serving(faults=[fault("replaced", skip=1, ignore_if_match=ignores)]) as server, opened(server) as source:
        error = error_of(SourceChangedError, read, source, 2 * KIB, 1000)
        assert (error.url, error.offset, error.nbytes) == (URL, 2 * KIB, 1000)
        assert server.seen[-1].headers["if-match"] == source.version.etag  # type: ignore[attr-defined]


def test_an_empty_blob_opens_where_a_range_of_it_is_refused_without_size() -> None:
    with serving({"models": {"empty": b"", "full": b"x"}}) as server:
        for key in ("empty", "full"):
            server.faults = [fault("status", code=416, times=2, body=error(416, "InvalidRange")[2])]
            if key == "empty":
                with contextlib.closing(store(server).open("az://models/empty")) as source:
                    assert source.nbytes == 0
                    assert source.version is not None
            else:
                error_of(WrongAnswerError, store(server).open, "az://models/full")


def raised(opening: Callable[[], object]) -> SourceError:
    return error_of(SourceError, opening)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates")
def test_each_failure_has_its_own_class_and_text(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path)
    busy, failing = (
        [fault("status", code=code, headers={"x-ms-error-code": name})]
        for code, name in ((503, "ServerBusy"), (500, "InternalError"))
    )
    cold = {("models", "cold"): "BlobArchived", ("models", "thawing"): "BlobBeingRehydrated"}
    content = {"models": {"m/a.bin": DATA, "cold": b"x", "thawing": b"x"}}
    with contextlib.ExitStack() as stack:
        server, secure, busy_server, failing_server = (
            stack.enter_context(serving(content, **options))
            for options in ({"tiers": cold}, {"tls": made.server_side()}, {"faults": busy}, {"faults": failing})
        )
        found = [
            (RefusedError, raised(lambda: open_azure(URL, credentials=keyed(endpoint=f"http://127.0.0.1:{free_port()}/acct")))),
            (TlsError, raised(lambda: store(secure).open(URL))),
            (CredentialsError, raised(lambda: store(server, account_key=base64.b64encode(b"wrong").decode()).open(URL))),
            (ContainerNotFoundError, raised(lambda: store(server).open("az://absent/m/a.bin"))),
            (BlobNotFoundError, raised(lambda: store(server).open("az://models/m/b.bin"))),
            (ThrottledError, raised(lambda: store(busy_server).open(URL))),
            (UnavailableError, raised(lambda: store(failing_server).open(URL))),
            (ArchivedBlobError, raised(lambda: store(server).open("az://models/cold"))),
        ]
        assert type(raised(lambda: store(server).open("az://models/thawing"))) is ArchivedBlobError
    for kind, exc in found:
        assert type(exc) is kind, exc
        assert isinstance(exc, HttpError)
        assert exc.hint
        assert exc.url is not None
        assert exc.url in str(exc)
        assert KEY not in str(exc)
        again = pickle.loads(pickle.dumps(exc))
        assert vars(again) == vars(exc)
    assert len({exc.hint for _, exc in found}) == len(found)  # type: ignore[attr-defined]
    missing = found[4][1]
    assert isinstance(missing, (AzureBlobError, SourceNotFoundError))
    assert (missing.account, missing.container, missing.key) == (ACCOUNT, "models", "m/b.bin")  # type: ignore[attr-defined]
    assert (missing.code, missing.status, missing.request_id) == ("BlobNotFound", 404, "r-42")  # type: ignore[attr-defined]


def test_an_account_without_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    error = error_of(AccountNotFoundError, lambda: open_azure(URL, credentials=keyed(), access=QUICK))
    assert error.account == ACCOUNT
    error = error_of(
        UnknownHostError, lambda: open_azure(URL, credentials=keyed(endpoint="http://nowhere.invalid/acct"), access=QUICK)
    )
    assert not isinstance(error, AccountNotFoundError)


def test_complaints_are_read_from_headers_and_xml() -> None:
    assert parse_complaint(Headers(), b"<html>no</html").code == ""
    assert parse_complaint(Headers(), b"<Other><Code>BlobNotFound</Code></Other>").code == ""
    _, headers, body = error(404, "BlobNotFound")
    assert parse_complaint(Headers(), body).code == "BlobNotFound"
    assert parse_complaint(Headers(headers.items()), b"").code == "BlobNotFound"
    assert parse_complaint(Headers(headers.items()), body).message == "This is BlobNotFound."


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates")
def test_tls_with_a_ca_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Certificates.make(tmp_path)
    with serving(tls=made.server_side()) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(made.ca))
        with contextlib.closing(open_azure(URL, credentials=keyed(server))) as source:
            assert read(source, 0, len(DATA)) == DATA
        assert all("spr=https" in seen.target for seen in server.seen)


# ---- checkpoints


def shards_of(contents: dict[str, TensorEntry]) -> dict[str, bytes]:
    names = list(contents)
    parts = [serialize({name: contents[name] for name in names[part::4]}) for part in range(4)]
    return {f"llama/model-{part + 1:05d}-of-00004.safetensors": data for part, data in enumerate(parts)}


CONTENTS = {
    f"layer.{index}.weight": TensorEntry("F32", (64, 1000 + index), pattern(64 * (1000 + index) * 4)) for index in range(8)
}


def test_a_whole_checkpoint_is_streamed() -> None:
    shards = shards_of(CONTENTS)
    with serving({"models": shards | {"llama/config.json": b"{}"}}) as server:
        with headrace.open(store(server).folder("az://models/llama")) as checkpoint:
            assert sorted(checkpoint) == sorted(CONTENTS)
            assert len(server.seen) == 5  # one listing, and one request a shard
            tensors = headrace.load(checkpoint)
        assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == {name: CONTENTS[name].data for name in CONTENTS}
        assert server.asked_nbytes < 1.2 * sum(map(len, shards.values())) + 4 * 64 * KIB


@pytest.mark.parametrize("way", ["tokens", "sas"])
def test_credentials_end_while_a_checkpoint_is_loaded(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens()

    def give() -> AzureCredentials:
        return AzureCredentials(sas_token=sas(4e9, key=server.key))

    with serving({"models": shards_of(CONTENTS)}, tokens=[TOKEN]) as server:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.endpoint)
        found = {}
        given: Any = tokens if way == "tokens" else give
        with headrace.stream("az://models/llama", credentials=given, concurrency=1, memory_limit=0) as stream:
            for name, tensor in stream:
                found[name] = bytes_of(tensor)
                tokens.current, server.tokens = Given("second-token", int(4e9)), {"second-token"}
                server.key = base64.b64encode(b"another key, after a rotation").decode()
        assert found == {name: entry.data for name, entry in CONTENTS.items()}
        statuses = [seen.headers.get("authorization") or seen.target.partition("sig=")[2] for seen in server.seen]
        assert len(set(statuses)) == 2


def test_the_variables_of_other_loaders_are_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    contents = {"w": TensorEntry("F32", (3, 100), pattern(1200))}
    files = {"llama/model.safetensors": serialize(contents), "llama/sub/x.json": b"{}"}
    with serving({"models": files}) as server:
        for name, value in {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": server.endpoint,
            "RUNAI_STREAMER_CONCURRENCY": "4",
        }.items():
            monkeypatch.setenv(name, value)
        host = f"{ACCOUNT}.dfs.core.windows.net"
        for url in (
            "az://models/llama",
            "az://models/llama/",
            "abfs://models/llama/model.safetensors",
            f"abfss://models@{host}/llama",
        ):
            assert {name: bytes_of(tensor) for name, tensor in headrace.load(url).items()} == {"w": contents["w"].data}
        headrace.pull("az://models/llama", tmp_path / "copy")
        assert (tmp_path / "copy/model.safetensors").read_bytes() == files["llama/model.safetensors"]
        with pytest.raises(OptionError, match="AzureCredentials"):
            headrace.load("az://models/llama", credentials="token")
        shown = CliRunner().invoke(app, ["inspect", "az://models/llama"])
        assert (shown.exit_code, "[3, 100]" in shown.output) == (0, True)


# ---- against Microsoft's emulator


needs_emulator = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator() or "it is here")


class Emulated:
    """The emulator, and what puts blobs into it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._count = 0

    def upload(self, blobs: Mapping[str, bytes], metadata: Mapping[str, Mapping[str, str]] | None = None) -> str:
        """Make a container with these blobs; gives its name."""
        self._count += 1
        container = f"models-{self._count}"
        with self.client() as client:
            client.create_container(container)
            for name, data in blobs.items():
                self.put(container, name, data, dict((metadata or {}).get(name, {})))
        return container

    def put(self, container: str, name: str, data: bytes, metadata: dict[str, str] | None = None) -> None:
        with self.client() as client:
            client.get_blob_client(container, name).upload_blob(data, overwrite=True, metadata=metadata or None)

    def client(self) -> Any:
        return blob_library.BlobServiceClient(self.endpoint, credential={"account_name": ACCOUNT, "account_key": KEY})

    def store(self) -> AzureStore:
        return AzureStore(AzureCredentials(account_key=KEY, endpoint=self.endpoint), access=QUICK)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    with emulator(tmp_path_factory.mktemp("azurite")) as endpoint:
        yield Emulated(endpoint)


@pytest.mark.slow
@needs_emulator
class TestEmulatedSource(SourceTests):
    @pytest.fixture(autouse=True)
    def there(self, emulated: Emulated) -> None:
        self.emulated = emulated

    def make(self, data: bytes) -> AzureSource:
        container = self.emulated.upload({"a b/größe+%20.bin": data})
        return self.emulated.store().open(f"az://{container}/a b/größe+%20.bin", prefix_nbytes=KIB)


@pytest.mark.slow
@needs_emulator
class TestEmulatedFolder(FolderTests):
    @pytest.fixture(autouse=True)
    def there(self, emulated: Emulated) -> None:
        self.emulated = emulated

    def make(self, files: dict[str, bytes]) -> Folder:
        container = self.emulated.upload({"llama/8b/": b""} | {f"llama/8b/{name}": data for name, data in files.items()})
        return self.emulated.store().folder(f"az://{container}/llama/8b")

    def make_missing(self) -> Folder:
        return self.emulated.store().folder("az://absent/m")


@pytest.mark.slow
@needs_emulator
def test_the_emulator_takes_every_kind_of_credentials(emulated: Emulated) -> None:
    container = emulated.upload({"m/a.bin": DATA})
    token = sas(4e9, container=container)
    connection = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={emulated.endpoint}"
    for credentials in (
        AzureCredentials(account_key=KEY, endpoint=emulated.endpoint),
        AzureCredentials(account_key=KEY, account_name=ACCOUNT, endpoint=emulated.endpoint.rpartition("/")[0]),
        AzureCredentials(sas_token=token, endpoint=emulated.endpoint),
        AzureCredentials(connection_string=connection),
    ):
        shared = AzureStore(credentials, access=QUICK)
        assert shared.folder(f"az://{container}/m").names() == ["a.bin"]
        with contextlib.closing(shared.open(f"az://{container}/m/a.bin", prefix_nbytes=KIB)) as source:
            assert read(source, 0, len(DATA)) == DATA
    tampered = AzureCredentials(sas_token=token.replace("sp=rl", "sp=rwl"), endpoint=emulated.endpoint)
    error = raised(lambda: AzureStore(tampered, access=QUICK).open(f"az://{container}/m/a.bin"))
    assert isinstance(error, SourcePermissionError)
    assert token.partition("sig=")[2] not in str(error)
    expired = AzureCredentials(sas_token=sas(1e9, container=container), endpoint=emulated.endpoint)
    error_of(ExpiredCredentialsError, AzureStore(expired, access=QUICK).open, f"az://{container}/m/a.bin")


@pytest.mark.slow
@needs_emulator
def test_the_emulator_lists_folders_and_odd_names(emulated: Emulated) -> None:
    odd = {f"m/{name}": b"1" for name in ("a b", "50%25", "x+y", "é", "a#b", "a?b", "&=;:@!$'()*,")}
    container = emulated.upload(MARKED | odd, {"m/sub": {"hdi_isfolder": "true"}, "m/hadoop": {"hdi_isfolder": "true"}})
    folder = emulated.store().folder(f"az://{container}/m")
    assert folder.names() == sorted(["a.safetensors", "empty", *(name.removeprefix("m/") for name in odd)])
    assert set(folder.walk()) - set(folder.names()) == {"sub/b.bin", "sub/deep/c"}
    for name in odd:
        with contextlib.closing(folder.open(name.removeprefix("m/"))) as source:
            assert read(source, 0, 1) == b"1", name


@pytest.mark.slow
@needs_emulator
def test_the_emulator_tells_a_replaced_blob(emulated: Emulated) -> None:
    container = emulated.upload({"a": DATA})
    with contextlib.closing(emulated.store().open(f"az://{container}/a", prefix_nbytes=KIB)) as source:
        assert read(source, 0, len(DATA)) == DATA
        emulated.put(container, "a", DATA[::-1])
        error = error_of(SourceChangedError, read, source, 2 * KIB, 1000)
        assert error.status == 412


@pytest.mark.slow
@needs_emulator
def test_the_emulators_errors_have_their_classes(emulated: Emulated) -> None:
    container = emulated.upload({"a": b"x"})
    shared = emulated.store()
    error_of(BlobNotFoundError, shared.open, f"az://{container}/b")
    error_of(ContainerNotFoundError, shared.open, "az://absent/b")
    error_of(ContainerNotFoundError, shared.folder("az://absent/b").names)
    error_of(BlobNotFoundError, shared.folder(f"az://{container}/b").names)
    wrong = AzureCredentials(account_key=base64.b64encode(b"wrong").decode(), endpoint=emulated.endpoint)
    error_of(SourcePermissionError, AzureStore(wrong, access=QUICK).open, f"az://{container}/a")
    anonymous = AzureCredentials(anonymous=True, endpoint=emulated.endpoint)
    error_of(SourcePermissionError, AzureStore(anonymous, access=QUICK).folder(f"az://{container}").names)


@pytest.mark.slow
@needs_emulator
def test_checkpoints_are_loaded_and_pulled_from_the_emulator(
    emulated: Emulated, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shards = shards_of(CONTENTS)
    container = emulated.upload(shards | {"llama/config.json": b"{}"})
    connection = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={emulated.endpoint}"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection)
    expected = {name: entry.data for name, entry in CONTENTS.items()}
    assert {name: bytes_of(tensor) for name, tensor in headrace.load(f"az://{container}/llama").items()} == expected
    with headrace.stream(f"abfss://{container}@{ACCOUNT}.dfs.core.windows.net/llama") as stream:
        assert {name: bytes_of(tensor) for name, tensor in stream} == expected
    with headrace.open(f"az://{container}/llama/model-00001-of-00004.safetensors") as checkpoint:
        assert len(checkpoint) == 2
    assert headrace.pull(f"az://{container}/llama", tmp_path / "copy").skipped_files == 0
    assert headrace.pull(f"az://{container}/llama", tmp_path / "copy").skipped_files == 5
    assert {f"llama/{path.name}": path.read_bytes() for path in (tmp_path / "copy").glob("*.safetensors")} == shards


@pytest.mark.slow
@needs_emulator
@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make certificates")
def test_the_emulator_takes_bearer_tokens_and_refuses_them_when_they_have_ended(tmp_path: Path) -> None:
    made = Certificates.make(tmp_path)
    clock, tokens = Clock(), Tokens(web_token())
    with emulator(tmp_path, tls=made) as endpoint:
        client = blob_library.BlobServiceClient(
            endpoint, credential={"account_name": ACCOUNT, "account_key": KEY}, connection_verify=str(made.ca)
        )
        with client:
            client.create_container("models").upload_blob("m/a.bin", DATA)
        credentials = AzureCredentials(token_credential=tokens, endpoint=endpoint)
        access = replace(clock.access, tls=str(made.ca))
        shared = AzureStore(credentials, access=access)
        assert shared.folder("az://models/m").names() == ["a.bin"]
        with contextlib.closing(shared.open(URL, prefix_nbytes=KIB)) as source:
            assert read(source, 0, len(DATA)) == DATA
        tokens.current = Given(web_token(exp=1_600_000_000), 1_600_000_000)
        error = error_of(ExpiredCredentialsError, AzureStore(credentials, access=access).open, URL)
        assert (error.code, error.attempts) == ("AuthenticationFailed", 2)
        elsewhere = Tokens(web_token(aud="https://management.azure.com"))
        error_of(CredentialsError, AzureStore(replace(credentials, token_credential=elsewhere), access=access).open, URL)
