"""The hub adapter against a hub on loopback: the contract, one commit for all files, who sees the token, and what errors say."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import pickle
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import bytes_of, random_contents, serialize, wrong
from http_servers import Certificates, Seen, Server, fault
from hub_server import Hub, Repo, commit_of, serving

import headrace
from headrace._environment import HUB_ENDPOINT, HubSettings
from headrace.errors import OptionError, SourceError, SourceNotFoundError, SourcePermissionError
from headrace.sources.http import Access, Policy, TlsError, WrongAnswerError
from headrace.sources.huggingface import (
    EntryNotFoundError,
    GatedRepoError,
    HubFolder,
    HubPath,
    HubSource,
    RepoNotFoundError,
    RevisionNotFoundError,
    open_hub,
)
from headrace.testing import FolderTests, SourceTests
from headrace.testing.sources import error_of, pattern, read

MIB = 1 << 20
TOKEN = "hf_notSecretAtAll0123456789"
ACCESS = Access(policy=Policy(attempts=4, backoff_s=0.0, stall_timeout_s=10.0, hedge_after_s=None))
DATA = pattern(MIB + 3)
URL = "hf://org/repo"


def folder(hub: Hub, url: str = URL, **options: Any) -> HubFolder:
    return HubFolder(url, **{"endpoint": hub.endpoint, "access": ACCESS, **options})


# ---- the contract


class TestHubFolder(FolderTests):
    repo, page = "org/repo", 2

    @pytest.fixture(autouse=True)
    def servers(self) -> Iterator[None]:
        with contextlib.ExitStack() as self.stack:
            yield

    def make(self, files: dict[str, bytes]) -> HubFolder:
        hub = self.stack.enter_context(Hub({"org/repo": Repo(files)}, page=self.page))
        return folder(hub)

    def make_missing(self) -> HubFolder:
        return folder(self.stack.enter_context(serving({"a": b"a"})), URL + "@main/below")


class TestHubFolderBelow(TestHubFolder):
    def make(self, files: dict[str, bytes]) -> HubFolder:
        moved = {f"some folder/below/{name}": data for name, data in files.items()} | {"some folder/x": b"x"}
        moved |= {} if files else {"some folder/below/deeper/x": b""}  # git keeps no empty folders
        hub = self.stack.enter_context(Hub({"org/repo": Repo(moved)}, tells_commit=False))
        return folder(hub, URL + "@main/some folder/below/")

    def make_missing(self) -> HubFolder:
        return folder(self.stack.enter_context(serving({})), "hf://org/other")


class HubSourceTests(SourceTests):
    name = "model.safetensors"

    @pytest.fixture(autouse=True)
    def servers(self) -> Iterator[None]:
        with contextlib.ExitStack() as self.stack:
            yield

    def make(self, data: bytes) -> HubSource:
        hub = self.stack.enter_context(serving({self.name: data}))
        return open_hub(f"{URL}/{self.name}", endpoint=hub.endpoint, access=ACCESS)


class TestHubSourceFromTheCdn(HubSourceTests): ...


class TestHubSourceFromTheHubItself(HubSourceTests):
    name = "some folder/config.json"


# ---- whole checkpoints


def shards() -> tuple[dict[str, bytes], dict[str, Any]]:
    contents = random_contents(*(200_000 + i for i in range(8)))
    names = list(contents)
    files, weight_map = {}, {}
    for i in range(4):
        shard = f"model-{i + 1:05}-of-00004.safetensors"
        files[shard] = serialize({name: contents[name] for name in names[2 * i : 2 * i + 2]})
        weight_map |= dict.fromkeys(names[2 * i : 2 * i + 2], shard)
    files["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return files | {"config.json": b"{}"}, contents


def test_loads_a_sharded_checkpoint_and_keeps_the_token_at_home() -> None:
    files, contents = shards()
    with Hub({"org/repo": Repo(files, access="gated")}, tokens={TOKEN: {"org/repo"}}) as hub:
        with headrace.open(folder(hub, token=TOKEN)) as checkpoint:
            assert set(checkpoint) == set(contents)
            assert not wrong(headrace.load(checkpoint), contents)
        assert not wrong(headrace.load(folder(hub, token=TOKEN)), contents)
        assert {seen.headers.get("authorization") for seen in hub.server.seen} == {f"Bearer {TOKEN}"}
        assert hub.cdn.seen
        assert not any(TOKEN in str(seen) for seen in hub.cdn.seen)
        assert len(hub.api()) == 2, "one listing each, which pins the commit as well"


def test_loads_over_tls_with_a_ca_of_ones_own(certificates: Certificates) -> None:
    files, contents = shards()
    with serving(files, tls=certificates.server_side()) as hub:
        error_of(TlsError, folder(hub).names)
        trusting = Access(policy=ACCESS.policy, tls=str(certificates.ca))
        assert not wrong(headrace.load(folder(hub, access=trusting)), contents)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("tells_commit", [True, False])
def test_folders_below_are_walked_in_one_listing_and_pulled_by_pattern(tmp_path: Path, tells_commit: bool) -> None:
    files = {f"sub/{i}/model.safetensors": bytes([i]) * 1000 for i in range(5)} | {"config.json": b"{}", "sub/x/y/z": b"z"}
    with Hub({"org/repo": Repo(files)}, page=3, tells_commit=tells_commit) as hub:
        found = folder(hub)
        assert found.walk() == sorted(files)
        pages = len(hub.api())
        assert found.names() == ["config.json"]
        with contextlib.closing(found.open("sub/3/model.safetensors")) as source:
            assert read(source, 0, 1000) == bytes([3]) * 1000
        assert found.sha256("sub/3/model.safetensors") is not None
        assert len(hub.api()) == pages, "the listing told of folders, sizes and digests"
        assert folder(hub, URL + "@main/sub/x").walk() == ["y/z"]
        assert headrace.pull(folder(hub), tmp_path / "dst", include="sub/*/model.safetensors", exclude="sub/0/*").files == 4
        assert (tmp_path / "dst/sub/4/model.safetensors").read_bytes() == bytes([4]) * 1000
        assert not (tmp_path / "dst/config.json").exists()


def test_a_listing_that_leads_back_to_itself_ends() -> None:
    def page(seen: Seen) -> tuple[int, dict[str, str], bytes]:
        cursor = "a" if seen.target.endswith("b") else "b"
        return 200, {"X-Repo-Commit": "0" * 40, "Link": f'<https://host/x?cursor={cursor}>; rel="next"'}, b"[]"

    with Server(b"", check=page) as hub:
        found = HubFolder(URL, endpoint=hub.url_of(""), access=ACCESS)
        assert "does not end" in str(error_of(WrongAnswerError, found.names))
        assert len(hub.seen) < 5


def test_a_name_that_no_url_can_hold_is_no_file() -> None:
    entry = {"type": "file", "path": "\ud800.safetensors", "size": 1}
    page = 200, {"X-Repo-Commit": "0" * 40}, json.dumps([entry]).encode()
    with Server(b"", check=lambda _: page) as hub:
        found = HubFolder(URL, endpoint=hub.url_of(""), access=ACCESS)
        error_of(EntryNotFoundError, found.open, "\ud800.safetensors")


def test_one_tensor_is_loaded_from_one_file() -> None:
    contents = random_contents(100_000)
    with serving({"model.safetensors": serialize(contents)}) as hub:
        source = open_hub(f"{URL}@main/model.safetensors", endpoint=hub.endpoint, access=ACCESS)
        with headrace.open(source) as checkpoint:
            assert bytes_of(headrace.load(checkpoint)["t000"]) == contents["t000"].data


# ---- one commit


@pytest.mark.parametrize("tells_commit", [True, False])
def test_all_files_come_from_the_commit_that_was_listed(tells_commit: bool) -> None:
    with serving({"a.safetensors": b"old", "b.safetensors": b"old b"}, tells_commit=tells_commit) as hub:
        opened = folder(hub)
        assert opened.commit is None
        assert opened.names() == ["a.safetensors", "b.safetensors"]
        before = hub.repos["org/repo"].push({"a.safetensors": b"newer"})
        assert opened.commit == before
        with contextlib.closing(opened.open("b.safetensors")) as source:
            assert read(source, 0, 5) == b"old b"
        assert folder(hub).names() == ["a.safetensors"]


def test_a_branch_that_moves_between_two_pages_is_listed_again() -> None:
    old, new = {f"old{i}": b"1" for i in range(5)}, {f"new{i}": b"22" for i in range(5)}
    with serving(old, page=2) as hub:

        def push(seen: Seen) -> None:
            if "cursor=2" in seen.target and not hub.repos["org/repo"].history:
                hub.repos["org/repo"].push(new)

        hub.before_answer = push
        opened = folder(hub)
        assert opened.names() == sorted(new)
        assert opened.commit == commit_of(new)


def test_revisions_of_every_form() -> None:
    repo = Repo({"a": b"new"})
    before = commit_of({"a": b"old"})
    repo.history[before] = {"a": b"old"}
    repo.refs |= {"v1": before, "refs/pr/7": before, "feature/x": before}
    with Hub({"org/repo": repo, "legacy": repo}) as hub:
        for revision in ("v1", "refs/pr/7", "feature%2Fx", before):
            for name in ("org/repo", "legacy"):
                opened = folder(hub, f"hf://{name}@{revision}")
                with contextlib.closing(opened.open("a")) as source:
                    assert read(source, 0, 3) == b"old"
                    assert source.url == f"hf://{name}@{revision}/a"
                assert opened.commit == before


def test_pages_are_asked_for_at_the_hub_only() -> None:
    files = {f"f{i:02}": b"x" for i in range(7)}
    with serving({"evil": b""}) as other, serving(files, page=3, next_host=other.endpoint, tokens={TOKEN: set()}) as hub:
        assert folder(hub, token=TOKEN).names() == sorted(files)
        assert not other.server.seen


def test_a_repository_that_was_renamed_is_found() -> None:
    repos = {"org/repo": Repo(moves_to="org/new"), "org/new": Repo({"a": b"a"})}
    with Hub(repos) as hub, contextlib.closing(folder(hub).open("a")) as source:
        assert read(source, 0, 1) == b"a"


def test_sizes_and_digests_are_known() -> None:
    with serving({"model.safetensors": DATA, "sub/b.safetensors": b"b", "config.json": b"{}"}) as hub:
        opened = folder(hub)
        assert opened.sha256("model.safetensors") == hashlib.sha256(DATA).hexdigest()
        assert opened.sha256("sub/b.safetensors") == hashlib.sha256(b"b").hexdigest()
        assert opened.sha256("config.json") is None
        assert (opened.nbytes("model.safetensors"), opened.nbytes("config.json")) == (len(DATA), 2)
        error_of(EntryNotFoundError, opened.sha256, "other")
        with contextlib.closing(opened.open("model.safetensors")) as source:
            assert source.sha256 == opened.sha256("model.safetensors")


def test_a_file_of_another_size_than_listed_is_refused() -> None:
    with serving({"a": b"four"}) as hub:
        opened = folder(hub)
        opened.names()
        hub.repos["org/repo"].files["a"] = b"a page to log in"
        hub.repos["org/repo"].history[opened.commit or ""] = {"a": b"a page to log in"}
        assert "4 bytes" in str(error_of(WrongAnswerError, opened.open, "a"))


# ---- the CDN


def test_a_signed_url_that_expires_in_mid_load_is_asked_for_again() -> None:
    with serving({"model.safetensors": DATA}) as hub, contextlib.closing(folder(hub).open("model.safetensors")) as source:
        half = MIB // 2
        assert read(source, 0, half) == DATA[:half]
        hub.expire()
        assert read(source, half, MIB - half) == DATA[half:MIB]
        assert len([seen for seen in hub.server.seen if "/resolve/" in seen.target]) == 2


def test_a_cdn_that_refuses_for_good_is_an_error_in_the_hubs_terms() -> None:
    faults = [fault("status", code=403, min_start=1)]
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(serving({"model.safetensors": DATA}, cdn_faults=faults))
        source = stack.enter_context(contextlib.closing(folder(hub).open("model.safetensors")))
        error = error_of(SourcePermissionError, source.read_into, 100_000, memoryview(bytearray(10)))
        assert (error.url, error.offset, error.nbytes, error.status) == (URL + "/model.safetensors", 100_000, 10, 403)
        assert "signed" not in str(error)


# ---- errors

REFUSALS: dict[str, tuple[str, str | None, type[SourceError], str]] = {
    "gated, no token": ("hf://org/gated", None, GatedRepoError, "HF_TOKEN"),
    "gated, terms not accepted": ("hf://org/gated", TOKEN, GatedRepoError, "Accept the terms at"),
    "private, no token": ("hf://org/private", None, RepoNotFoundError, "set HF_TOKEN"),
    "private, another's token": ("hf://org/private", TOKEN, RepoNotFoundError, "token that may read it"),
    "no repository": ("hf://org/nothing", None, RepoNotFoundError, "Check the name"),
    "no revision": ("hf://org/repo@v9", None, RevisionNotFoundError, "no revision v9"),
    "no folder": ("hf://org/repo/sub", None, EntryNotFoundError, "Check the name"),
    "a token that is none": ("hf://org/repo", "hf_revokedRevoked", SourcePermissionError, "expired or revoked"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_what_to_do_and_never_the_token(case: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url, token, kind, hint = REFUSALS[case]
    repos = {"org/repo": Repo({"a": b""}), "org/gated": Repo(access="gated"), "org/private": Repo(access="private")}
    with Hub(repos, tokens={TOKEN: set()}) as hub:
        calls: list[Callable[[HubFolder], object]] = [HubFolder.names, lambda opened: opened.open("a")]
        for call in calls:
            opened = folder(hub, url, token=token)
            error = error_of(kind, call, opened)
            assert hint in str(error)
            assert error.url == url
            assert url in str(error)
            assert isinstance(error, SourceNotFoundError if "NotFound" in kind.__name__ else SourcePermissionError)
            again = pickle.loads(pickle.dumps(error))
            assert (type(again), str(again), again.code) == (type(error), str(error), error.code)
            shown = "".join(traceback.format_exception(error)) + repr(opened) + repr(vars(opened)) + caplog.text
            assert token is None or token not in shown
        assert len(hub.api()) == 2, "the hub's word is final"


def test_an_endpoint_that_is_no_hub() -> None:
    with serving({}) as hub:
        hub.repos["org/repo"] = Repo()
        for body in (b"<html>log in</html>", b'{"a": 1}', b"[1]"):
            hub.server._check = lambda _, body=body: (200, {"X-Repo-Commit": "0" * 40}, body)
            assert URL in str(error_of(WrongAnswerError, folder(hub).names))
        hub.server._check = lambda _: (200, {}, b"[]")
        assert "commit of main" in str(error_of(WrongAnswerError, folder(hub).names))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://org/repo", ("org/repo", "main", "")),
        ("hf://org/repo/", ("org/repo", "main", "")),
        ("hf://gpt2", ("gpt2", "main", "")),
        ("HF://gpt2", ("gpt2", "main", "")),
        ("hf://gpt2@v1/a/b", ("gpt2", "v1", "a/b")),
        ("hf://org/repo@refs/pr/1/a", ("org/repo", "refs/pr/1", "a")),
        ("hf://org/repo@refs%2Fpr%2F1", ("org/repo", "refs/pr/1", "")),
        ("hf://org/repo.x-1@main/a@b/c", ("org/repo.x-1", "main", "a@b/c")),
    ],
)
def test_urls(url: str, expected: tuple[str, str, str]) -> None:
    found = HubPath.parse(url)
    assert (found.repo, found.revision, found.path) == expected


@pytest.mark.parametrize(
    "url",
    [
        "hf://",
        "hf:///a",
        "hf://datasets/org/d",
        "hf://spaces/org/s",
        "hf://org/repo/../x",
        "hf://org//a",
        "hf://o r/x",
        "hf://org/repo@%2e%2e",
        "hf://org/repo@a%2F..%2Fb",
        "hf://org/repo@a%0Ab",
        "s3://a/b",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    assert url in str(error_of(OptionError, HubPath.parse, url))


def test_what_cannot_be_used_is_refused_and_not_shown() -> None:
    for token in ("", "hf_a b", "hf_a\nX-Evil: 1", "hf_ü"):
        error = error_of(OptionError, lambda token=token: HubFolder(URL, token=token))
        assert not token or token not in str(error)
    for endpoint in ("huggingface", "ftp://a", "https://a?b=c", "https://[x"):
        error_of(OptionError, lambda endpoint=endpoint: HubFolder(URL, endpoint=endpoint))
    assert "secret" not in str(error_of(OptionError, HubPath.parse, "hf://me:secret@org/repo"))


# ---- the environment


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in ("TOKEN", "ENDPOINT", "HUB_DISABLE_IMPLICIT_TOKEN", "TOKEN_PATH", "HOME"):
        monkeypatch.delenv(f"HF_{name}", raising=False)
    for name in ("HUGGING_FACE_HUB_TOKEN", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return monkeypatch


def test_settings_of_the_hub(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert HubSettings.from_environment() == HubSettings(token=None, endpoint=HUB_ENDPOINT)
    default = tmp_path / ".cache" / "huggingface" / "token"
    default.parent.mkdir(parents=True)
    default.write_text("from-file\n")
    assert HubSettings.from_environment().token == "from-file"
    (tmp_path / "token").write_text("from-home")
    environment.setenv("HF_HOME", str(tmp_path))
    assert HubSettings.from_environment().token == "from-home"
    environment.setenv("HF_TOKEN_PATH", str(default))
    assert HubSettings.from_environment().token == "from-file"
    environment.setenv("HF_TOKEN", " from-variable\n")
    environment.setenv("HF_ENDPOINT", "http://mirror:8080/")
    found = HubSettings.from_environment()
    assert (found.token, found.endpoint) == ("from-variable", "http://mirror:8080")
    assert "from-variable" not in repr(found)
    environment.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert HubSettings.from_environment().token is None
