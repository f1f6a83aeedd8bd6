"""Where urls lead: which file and folder they name, whatever is in a key, and what of them may be shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from checkpoints import random_contents, serialize, wrong
from http_servers import Seen, Server

import headrace
from headrace._manifest import MANIFEST_NAME
from headrace._remote import split_url
from headrace.errors import OptionError, SourceNotFoundError
from headrace.sources.s3 import S3Credentials
from headrace.testing.s3server import Bucket, S3Server

CONTENTS = random_contents(1_000, 2_000)
SHARD = serialize(CONTENTS)
INDEX = json.dumps({"weight_map": dict.fromkeys(CONTENTS, "x.safetensors")}).encode()
NAMES = [
    "what?",
    "a#b",
    "100%",
    "100%41",
    "a b",
    "ü漢",
    "a+b",
    "it's",
    "[x]*",
    "a;b&c=d",
    "tab\t",
    "line\n",
    ":c",
    "~",
    "q?x/in",
    "h#x/in",
]
PASSWORD, SIGNATURE = "passwordOfNobody", "signatureOfNothing"


class SignedServer(Server):
    """Knows only requests that are signed; paths with other escapes mean the same."""

    def answer(self, sock: Any, seen: Seen) -> bool:
        path, _, query = seen.target.partition("?")
        target = quote(unquote(path)) if query == f"sig={SIGNATURE}" else "/unsigned"
        return super().answer(sock, Seen(seen.index, seen.connection, seen.method, target, seen.headers, seen.start, seen.end))


def signed(server: Server, path: str) -> str:
    return f"http://user:{PASSWORD}@127.0.0.1:{server.port}{path}?sig={SIGNATURE}"


def store_of(folder: Path, files: dict[str, bytes], *, listable: bool = True) -> tuple[S3Server, S3Credentials]:
    for name, data in files.items():
        path = folder / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    buckets = {"models": Bucket(listable=listable)}
    server = S3Server(folder, access_key="AK", secret_key="SK", buckets=buckets)
    return server, S3Credentials(access_key_id="AK", secret_access_key="SK", endpoint=server.url, region="us-east-1")


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("s3://b/m/a.safetensors", "s3://b/m", "a.safetensors"),
        ("s3://b/m/a?b#c%41.safetensors", "s3://b/m", "a?b#c%41.safetensors"),
        ("s3://b/m?x/#/a.safetensors", "s3://b/m?x/#", "a.safetensors"),
        ("gs://b/m/a\t\n.safetensors", "gs://b/m", "a\t\n.safetensors"),
        ("https://h/m/a%20b%23.safetensors", "https://h/m", "a b#.safetensors"),
        ("https://h/m/a.safetensors?sig=a/b#c", "https://h/m?sig=a/b#c", "a.safetensors"),
        ("HTTP://h/a.safetensors", "http://h", "a.safetensors"),
    ],
)
def test_the_last_part_of_a_url_is_the_file(url: str, folder: str, name: str) -> None:
    assert split_url(url) == (folder, name)


def test_any_key_of_a_store_is_a_file_by_its_url(tmp_path: Path) -> None:
    server, keys = store_of(tmp_path, {f"m/{name}.safetensors": SHARD for name in NAMES})
    with server:
        for name in NAMES:
            url = f"s3://models/m/{name}.safetensors"
            assert not wrong(headrace.load(url, credentials=keys), CONTENTS), url
            headrace.pull(url, tmp_path / "pulled", credentials=keys)
            base = url.rpartition("/")[2]
            assert (tmp_path / "pulled" / base).read_bytes() == SHARD
            assert headrace.verify(url, credentials=keys, out=tmp_path / "manifest").files[0].name == base


def test_a_name_on_the_web_is_unescaped_and_escaped_once(tmp_path: Path) -> None:
    names = [name for name in NAMES if "/" not in name]
    with SignedServer({quote(f"/m/{name}.safetensors"): SHARD for name in names}) as server:
        for name in names:
            url = signed(server, f"/m/{quote(name)}.safetensors")
            assert not wrong(headrace.load(url), CONTENTS), url
            headrace.pull(url, tmp_path / "pulled")
            assert (tmp_path / "pulled" / f"{name}.safetensors").read_bytes() == SHARD
            assert headrace.verify(url, out=tmp_path / "manifest").files[0].name == f"{name}.safetensors"


def test_keys_that_differ_by_slashes_are_not_taken_for_each_other(tmp_path: Path) -> None:
    server, keys = store_of(tmp_path, {"m/x.safetensors": SHARD})
    with server, pytest.raises(SourceNotFoundError):
        headrace.pull("s3://models/m//x.safetensors", tmp_path / "pulled", credentials=keys)


def test_one_object_is_pulled_and_verified_without_the_permission_to_list(tmp_path: Path) -> None:
    server, keys = store_of(tmp_path, {"m/x.safetensors": SHARD}, listable=False)
    with server:
        url = "s3://models/m/x.safetensors"
        assert headrace.pull(url, tmp_path / "pulled", credentials=keys).files == 1
        assert headrace.verify(url, credentials=keys, out=tmp_path / "manifest").ok
        assert not [request for request in server.requests if "list-type" in request.target]


def test_the_query_that_signs_an_index_signs_its_shards_and_manifest(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(SHARD)
    headrace.verify(tmp_path, write=True)
    files = {"x.safetensors": SHARD, "model.safetensors.index.json": INDEX}
    files[MANIFEST_NAME] = (tmp_path / MANIFEST_NAME).read_bytes()
    with SignedServer({f"/m/{name}": data for name, data in files.items()}) as server:
        assert not wrong(headrace.load(signed(server, "/m/model.safetensors.index.json"), verify="auto"), CONTENTS)
        assert not wrong(headrace.load(signed(server, "/m/x.safetensors"), verify=True), CONTENTS)
        assert not wrong(headrace.load([signed(server, "/m/x.safetensors")], verify=True), CONTENTS)


def test_what_a_checkpoint_is_called_holds_no_secret() -> None:
    with SignedServer({"/m/x.safetensors": SHARD}) as server:
        url = signed(server, "/m/x.safetensors")
        for given in (url, [url]):
            with headrace.open(given) as checkpoint:
                text = f"{checkpoint!r} {checkpoint.url}"
                assert "x.safetensors" in text
                assert PASSWORD not in text
                assert SIGNATURE not in text


def test_a_file_where_a_divided_checkpoint_should_be_is_named_without_secrets() -> None:
    with SignedServer({"/m/x.safetensors": SHARD}) as server:
        with pytest.raises(OptionError, match=r"/m/x\.safetensors: ") as caught:
            headrace.open_sharded(signed(server, "/m/x.safetensors"), rank=0)
        assert PASSWORD not in str(caught.value)
        assert SIGNATURE not in str(caught.value)


@pytest.mark.parametrize("use", ["load", "pull", "pull to", "verify to", "manifest"])
@pytest.mark.parametrize("scheme", ["htps", "sftp", "https", "http://["])
def test_urls_that_are_refused_are_shown_without_secrets(use: str, scheme: str, tmp_path: Path) -> None:
    url = f"{scheme.partition(':')[0]}://{scheme.partition('//')[2]}user:{PASSWORD}@host:1x/m/a.safetensors?sig={SIGNATURE}"
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: headrace.load(url),
        "pull": lambda: headrace.pull(url, tmp_path),
        "pull to": lambda: headrace.pull(tmp_path, url),
        "verify to": lambda: headrace.verify(tmp_path, out=url),
        "manifest": lambda: headrace.load(tmp_path, verify=url),
    }
    with pytest.raises((OptionError, headrace.SourceError)) as caught:
        calls[use]()
    assert PASSWORD not in str(caught.value)
    assert SIGNATURE not in str(caught.value)
