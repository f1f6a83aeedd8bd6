"""Files and folders on plain web servers: the contract, redirects, what is found without a listing, and who sees credentials."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from checkpoints import random_contents, serialize, wrong
from http_servers import Certificates, Seen, Server, fault

import headrace
from headrace._environment import NetworkSettings
from headrace.errors import FormatError, OptionError, SourceNotFoundError, SourcePermissionError
from headrace.sources.base import ByteSource
from headrace.sources.http import Access, Policy, RedirectError
from headrace.sources.web import INDEX_NAME, WebFolder, open_web
from headrace.testing import FolderTests, SourceTests
from headrace.testing.sources import error_of, pattern, read

ACCESS = Access(policy=Policy(attempts=4, backoff_s=0.0, stall_timeout_s=10.0, hedge_after_s=None))
DATA = pattern(300_000)
SECRET = "notSecretAtAll0123456789"


class WebServer(Server):
    """Takes percent-encoded paths for what they mean."""

    def answer(self, sock: Any, seen: Seen) -> bool:
        meant = Seen(seen.index, seen.connection, seen.method, unquote(seen.target), seen.headers, seen.start, seen.end)
        return super().answer(sock, meant)


class TestWebSource(SourceTests):
    @pytest.fixture(autouse=True)
    def servers(self) -> Iterator[None]:
        with contextlib.ExitStack() as self.stack:
            yield

    def make(self, data: bytes) -> ByteSource:
        return open_web(self.stack.enter_context(Server(data)).url, access=ACCESS)


class TestWebSourceElsewhere(TestWebSource):
    def make(self, data: bytes) -> ByteSource:
        there = self.stack.enter_context(Server(data))
        here = self.stack.enter_context(Server(b"", [fault("redirect", code=302, to=there.url)]))
        return open_web(here.url, access=ACCESS)


class TestWebFolder(FolderTests):
    @pytest.fixture(autouse=True)
    def servers(self) -> Iterator[None]:
        with contextlib.ExitStack() as self.stack:
            yield

    def make(self, files: dict[str, bytes]) -> WebFolder:
        server = self.stack.enter_context(WebServer({f"/models/a/{name}": data for name, data in files.items()}))
        return WebFolder(server.url_of("/models/a/"), files, access=ACCESS)

    def make_missing(self) -> WebFolder:
        return WebFolder(self.stack.enter_context(Server(b"")).url_of("/none"), access=ACCESS)


# ---- folders that cannot be listed


def shards(at: str = "/m") -> tuple[dict[str, bytes], dict[str, Any]]:
    contents = random_contents(100_000, 100_001, 7)
    names = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    files = {f"{at}/{shard}": serialize({name: contents[name]}) for shard, name in zip(names, contents, strict=True)}
    files[f"{at}/{INDEX_NAME}"] = json.dumps({"weight_map": dict(zip(contents, names, strict=True))}).encode()
    return files, contents


def test_the_index_names_the_files_and_is_fetched_once() -> None:
    files, contents = shards()
    with Server(files) as server:
        folder = WebFolder(server.url_of("/m"), access=ACCESS)
        assert folder.names() == sorted(path[3:] for path in files)
        assert not wrong(headrace.load(folder), contents)
        assert [seen.target for seen in server.seen].count(f"/m/{INDEX_NAME}") == 1


def test_a_single_file_is_found_without_an_index() -> None:
    contents = random_contents(50_000)
    with Server({"/m/model.safetensors": serialize(contents)}) as server:
        folder = WebFolder(server.url_of("/m"), access=ACCESS)
        assert folder.names() == ["model.safetensors"]
        assert not wrong(headrace.load(folder), contents)


def test_shards_in_folders_below_are_walked_opened_and_pulled(tmp_path: Path) -> None:
    contents = random_contents(50_000, 60_000)
    shards = {
        "a.safetensors": serialize({"t000": contents["t000"]}),
        "deep/er/b.safetensors": serialize({"t001": contents["t001"]}),
    }
    index = json.dumps({"weight_map": dict(zip(contents, shards, strict=True))}).encode()
    with Server({f"/m/{name}": data for name, data in shards.items()} | {f"/m/{INDEX_NAME}": index}) as server:
        folder = WebFolder(server.url_of("/m"), access=ACCESS)
        assert folder.names() == ["a.safetensors", INDEX_NAME]
        assert folder.walk() == ["a.safetensors", "deep/er/b.safetensors", INDEX_NAME]
        assert WebFolder(server.url_of("/m"), ["x/y", "b"], access=ACCESS).walk() == ["b", "x/y"]
        assert headrace.pull(folder, tmp_path / "dst").files == 3
        assert (tmp_path / "dst/deep/er/b.safetensors").read_bytes() == shards["deep/er/b.safetensors"]
        assert headrace.pull(folder, tmp_path / "part", include="deep/*").files == 1


def test_an_index_that_leads_out_of_the_folder_pulls_nothing(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"t": "../../outside.safetensors"}}).encode()
    with Server({f"/m/{INDEX_NAME}": index, "/outside.safetensors": b"x"}) as server:
        error_of(FormatError, headrace.pull, WebFolder(server.url_of("/m"), access=ACCESS), tmp_path / "dst")
        assert not (tmp_path / "outside.safetensors").exists()


def test_given_names_are_not_asked_for() -> None:
    with Server({"/m/b": b"b"}) as server:
        folder = WebFolder(server.url_of("/m"), (name for name in ("b", "a")), access=ACCESS)
        assert folder.names() == ["a", "b"]
        assert not server.seen


def test_a_folder_with_neither_says_what_to_give() -> None:
    with Server({"/m/other.safetensors": b""}) as server:
        error = error_of(SourceNotFoundError, WebFolder(server.url_of("/m"), access=ACCESS).names)
        assert (error.url, error.status) == (server.url_of("/m"), 404)
        assert "as a list" in str(error)


def test_a_refusal_is_not_taken_for_a_missing_file() -> None:
    with Server(b"", [fault("status", code=403)]) as server:
        error_of(SourcePermissionError, WebFolder(server.url_of("/m"), access=ACCESS).names)


@pytest.mark.parametrize("index", [b"<html>welcome</html>", b"\xff", b"[" * 100_000])
def test_an_index_that_is_none_is_named(index: bytes) -> None:
    with Server({f"/m/{INDEX_NAME}": index}) as server:
        error = error_of(FormatError, WebFolder(server.url_of("/m"), access=ACCESS).names)
        assert error.url == server.url_of(f"/m/{INDEX_NAME}")


def test_a_query_goes_with_every_file_and_is_not_shown() -> None:
    files, contents = shards()
    with Server(files) as server:
        folder = WebFolder(f"{server.url_of('/m/')}?sig={SECRET}#part", access=ACCESS)
        assert folder.url == server.url_of("/m")
        assert not wrong(headrace.load(folder), contents)
        assert all(seen.target.endswith(f"?sig={SECRET}") for seen in server.seen)
        assert SECRET not in str(error_of(SourceNotFoundError, folder.open, "none")) + folder.url


@pytest.mark.parametrize("url", ["ftp://host/a", "models/a", "https://", "http://[x/a"])
def test_what_is_no_web_url_is_refused(url: str) -> None:
    error_of(OptionError, WebFolder, url)


# ---- credentials and redirects


def test_credentials_stay_at_the_host_they_were_given_for() -> None:
    login = "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()
    bearer = Access(policy=ACCESS.policy, headers={"Authorization": f"Bearer {SECRET}"})
    with Server(DATA) as there, Server(DATA, [fault("redirect", code=302, to=there.url)]) as here:
        for url, access, expected in (
            (here.url.replace("//", f"//me:{SECRET}@"), ACCESS, login),
            (here.url, bearer, f"Bearer {SECRET}"),
        ):
            with contextlib.closing(open_web(url, access=access)) as source:
                assert read(source, 100_000, 1000) == DATA[100_000:101_000]
                assert source.url == here.url
            assert here.seen[-1].headers["authorization"] == expected
        assert there.seen
        assert not any("authorization" in seen.headers or SECRET in str(seen) for seen in there.seen)


def test_credentials_go_along_on_the_same_host() -> None:
    bearer = Access(policy=ACCESS.policy, headers={"Authorization": f"Bearer {SECRET}"})
    with Server({"/a": DATA, "/b": DATA}, [fault("redirect", times=1, to="/b")]) as server:
        open_web(server.url_of("/a"), access=bearer).close()
        assert [seen.headers["authorization"] for seen in server.seen] == [f"Bearer {SECRET}"] * 2


def test_redirects_are_followed_only_where_the_caller_allows_it() -> None:
    refusing = Access(policy=ACCESS.policy, allow_redirect=lambda *_: False)
    with Server(DATA) as there, Server(DATA, [fault("redirect", to=there.url)]) as here:
        error_of(RedirectError, lambda: open_web(here.url, access=refusing))
        assert not there.seen


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


def test_loads_over_tls_and_never_leaves_it(certificates: Certificates) -> None:
    trusting = Access(policy=ACCESS.policy, tls=str(certificates.ca))
    files, contents = shards()
    with Server(files, tls=certificates.server_side()) as server:
        assert not wrong(headrace.load(WebFolder(server.url_of("/m"), access=trusting)), contents)
    with Server(DATA) as plain, Server(DATA, [fault("redirect", to=plain.url)], tls=certificates.server_side()) as server:
        error_of(RedirectError, lambda: open_web(server.url, access=trusting))
        assert not plain.seen


# ---- the environment

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, NetworkSettings()),
        ({"HTTP_PROXY": "http://p:1"}, NetworkSettings(proxies={"http": "http://p:1"})),
        ({"HTTP_PROXY": "http://p:1", "http_proxy": "http://q:1"}, NetworkSettings(proxies={"http": "http://q:1"})),
        ({"HTTP_PROXY": "http://evil:1", "REQUEST_METHOD": "GET"}, NetworkSettings()),
        ({"https_proxy": "p:1", "NO_PROXY": "a,b"}, NetworkSettings(proxies={"https": "p:1"}, no_proxy="a,b")),
        ({"no_proxy": "a", "NO_PROXY": "b"}, NetworkSettings(no_proxy="a")),
        ({"ALL_PROXY": "p:1", "HTTPS_PROXY": "q:1"}, NetworkSettings(proxies={"http": "p:1", "https": "q:1"})),
        ({"SSL_CERT_FILE": "s", "AWS_CA_BUNDLE": "a"}, NetworkSettings(ca_bundle="s")),
        ({"SSL_CERT_FILE": "s", "REQUESTS_CA_BUNDLE": "r"}, NetworkSettings(ca_bundle="r")),
    ],
)
def test_settings_of_the_network(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: NetworkSettings) -> None:
    for name in (*VARIABLES, *map(str.lower, VARIABLES), *BUNDLES, "REQUEST_METHOD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert NetworkSettings.from_environment() == expected
    assert NetworkSettings.from_environment(aws=True).ca_bundle == given.get("AWS_CA_BUNDLE", expected.ca_bundle)


def test_passwords_of_proxies_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", f"http://me:{SECRET}@proxy:3128")
    assert SECRET not in repr(NetworkSettings.from_environment())
