"""`headrace.local_view`: what lies in the folder, when it is copied again, and who may have it at the same time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hub_server import Hub, Repo

import headrace
from headrace._environment import cache_folder
from headrace.errors import DestinationError, FormatError, OptionError, SourceNotFoundError
from headrace.integrations.views import is_store_url
from headrace.sources.base import ByteSource
from headrace.sources.memory import MemorySource
from headrace.sources.s3 import S3Credentials
from headrace.testing.s3server import S3Server

MODEL = {
    "m/config.json": b"{}",
    "m/tokenizer.json": b"tokens",
    "m/model.safetensors.index.json": b'{"weight_map": {}}',
    "m/sub/config.json": b"below",
    "m/model-00001-of-00001.safetensors": b"weights",
    "m/pytorch_model.bin": b"weights",
    "m/sub/model.onnx": b"weights",
    "mm/config.json": b"another",
}
SMALL = {"config.json", "tokenizer.json", "model.safetensors.index.json", "sub/config.json"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def keys(server: S3Server) -> S3Credentials:
    return S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)


def files(view: str) -> set[str]:
    found = {str(path.relative_to(view)) for path in Path(view).rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith(".headrace-pull")}


def objects_read(server: S3Server) -> list[str]:
    return [request.key for request in server.requests if request.method == "GET" and request.key and request.status == 206]


def test_the_small_files_are_there_and_the_weights_are_not(cache: Path) -> None:
    with S3Server({"models": MODEL}) as server:
        view = headrace.local_view("s3://models/m", credentials=keys(server))
        assert files(view) == SMALL
        assert Path(view, "sub", "config.json").read_bytes() == b"below"
        assert Path(view).is_relative_to(cache)
        assert not {"m/pytorch_model.bin", "m/model-00001-of-00001.safetensors"} & set(objects_read(server))


def test_a_second_call_gives_the_same_folder_and_copies_what_has_changed_only() -> None:
    content = {"models": dict(MODEL)}
    with S3Server(content) as server:
        view = headrace.local_view("s3://models/m", credentials=keys(server))
        kept = os.stat(f"{view}/tokenizer.json").st_ino
        server.put("models", "m/config.json", b'{"new": 1}')
        assert headrace.local_view("s3://models/m/", credentials=keys(server)) == view
        assert Path(view, "config.json").read_bytes() == b'{"new": 1}'
        assert os.stat(f"{view}/tokenizer.json").st_ino == kept


def test_what_is_no_longer_in_the_store_goes() -> None:
    with S3Server({"models": MODEL}) as server:
        view = headrace.local_view("s3://models/m", credentials=keys(server))
        server.delete("models", "m/model.safetensors.index.json")
        headrace.local_view("s3://models/m", credentials=keys(server))
        assert files(view) == SMALL - {"model.safetensors.index.json"}


def test_buckets_of_one_name_in_two_stores_have_a_folder_each() -> None:
    with S3Server({"models": MODEL}) as one, S3Server({"models": {"m/config.json": b"other"}}) as other:
        views = [headrace.local_view("s3://models/m", credentials=keys(server)) for server in (one, other, one)]
    assert views[0] == views[2] != views[1]
    assert [Path(view, "config.json").read_bytes() for view in views] == [b"{}", b"other", b"{}"]


def test_many_at_once_get_one_whole_folder() -> None:
    with S3Server({"models": MODEL}) as server, ThreadPoolExecutor(8) as pool:

        def look(_: int) -> tuple[str, bool]:
            view = headrace.local_view("s3://models/m", credentials=keys(server))
            return view, files(view) == SMALL

        ((_, is_whole),) = set(pool.map(look, range(16)))
        assert is_whole


def test_a_model_of_the_hub_has_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    repo = Repo({name.removeprefix("m/"): data for name, data in MODEL.items() if name.startswith("m/")})
    with Hub({"org/repo": repo}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert files(headrace.local_view("hf://org/repo")) == SMALL


def test_a_local_folder_is_its_own_view(tmp_path: Path, cache: Path) -> None:
    assert headrace.local_view(tmp_path) == str(tmp_path)
    assert not cache.exists()


def test_a_model_of_weights_only_has_an_empty_view() -> None:
    with S3Server({"models": {"m/model.safetensors": b"weights"}}) as server:
        assert files(headrace.local_view("s3://models/m", credentials=keys(server))) == set()


def test_a_model_that_is_not_there_leaves_nothing(cache: Path) -> None:
    with S3Server({"models": MODEL}) as server, pytest.raises(SourceNotFoundError):
        headrace.local_view("s3://models/nothing", credentials=keys(server))
    assert not cache.exists()


@pytest.mark.parametrize("name", ["../config.json", "/etc/config.json", "a//b.json", "a/./b.json", ".headrace-pull/x", "a\0b"])
def test_a_name_that_leads_out_is_refused_before_anything_is_written(name: str, cache: Path) -> None:
    class Odd:
        url = "odd://place"

        def names(self) -> list[str]:
            return ["config.json", f"sub/../{name}" if name.startswith("..") else name]

        def open(self, name: str) -> ByteSource:
            return MemorySource(name.encode())

    if name == ".headrace-pull/x":  # hidden files stay where they are
        assert files(headrace.local_view(Odd())) == {"config.json"}  # type: ignore[arg-type]
        return
    with pytest.raises(FormatError, match="leads out"):
        headrace.local_view(Odd())  # type: ignore[arg-type]
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_to_is_an_error_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with S3Server({"models": MODEL}) as server, pytest.raises(DestinationError, match="HEADRACE_CACHE"):
        headrace.local_view("s3://models/m", credentials=keys(server))


def test_a_url_without_a_source_is_refused() -> None:
    with pytest.raises(OptionError, match="gopher"):
        headrace.local_view("gopher://models/m")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HEADRACE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/headrace"),
        ({"HOME": "/c"}, "/c/.cache/headrace"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEADRACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("s3://b/m", True), ("gs://b/m", True), ("az://a/m", True), ("abfss://c@a/m", True), ("hf://org/repo@rev", True),
        ("https://host/m.safetensors", False), ("org/repo", False), ("/s3://b", False), (Path("s3:/b"), False), (None, False),
    ],
)  # fmt: skip
def test_names_in_stores_are_told_from_others(name: object, expected: bool) -> None:
    assert is_store_url(name) is expected
