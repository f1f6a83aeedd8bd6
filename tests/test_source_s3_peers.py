"""S3 as others speak it: rclone and moto, as processes of their own.

rclone answers ranges with 200 and a right Content-Range, does not look at If-Match, and lists ETags without quotes. moto checks
no signatures, and answers as S3 does otherwise.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from checkpoints import KIB, MIB, bytes_of, random_contents, serialize
from http_servers import free_port

import headrace
from headrace.errors import SourceChangedError, SourceError
from headrace.sources.base import Folder
from headrace.sources.s3 import (
    BucketNotFoundError,
    CredentialsError,
    ObjectNotFoundError,
    S3Credentials,
    S3Folder,
    S3Source,
    S3Store,
    open_s3,
)
from headrace.testing import FolderTests, SourceTests
from headrace.testing.sources import error_of, pattern, read

botocore = pytest.importorskip("botocore.session")
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

ACCESS_KEY, SECRET = "AKTEST", "SKTESTSECRET"
_BIN = Path(sys.executable).parent
_PATIENCE_S, _TICK_S = 60.0, 0.05


class Peer(ABC):
    """Another server, with buckets that tests fill.

    Attributes:
        url: its endpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._buckets = iter(range(1 << 30))

    @abstractmethod
    def command(self) -> list[str]:
        """What starts it."""

    @abstractmethod
    def put(self, bucket: str, content: Mapping[str, bytes]) -> None:
        """Write objects."""

    @abstractmethod
    def make(self, bucket: str) -> None:
        """Make a bucket."""

    def bucket(self, content: Mapping[str, bytes]) -> str:
        """Make a bucket with these objects; returns its name."""
        name = f"bucket-{next(self._buckets)}"
        self.make(name)
        self.put(name, content)
        return name

    @property
    def keys(self) -> S3Credentials:
        return S3Credentials(access_key_id=ACCESS_KEY, secret_access_key=SECRET, endpoint=self.url, region="us-east-1")


class Rclone(Peer):
    """Serves a folder of buckets; what is written there shows at once."""

    def command(self) -> list[str]:
        options = ["--auth-key", f"{ACCESS_KEY},{SECRET}", "--vfs-cache-mode", "off", "--dir-cache-time", "0s", "--config", ""]
        return [str(_BIN / "rclone"), "serve", "s3", str(self.folder), "--addr", f"127.0.0.1:{self.port}", *options]

    def make(self, bucket: str) -> None:
        (self.folder / bucket).mkdir()

    def put(self, bucket: str, content: Mapping[str, bytes]) -> None:
        for key, data in content.items():
            path = self.folder / bucket / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


class Moto(Peer):
    """Keeps all in memory."""

    def command(self) -> list[str]:
        return [str(_BIN / "moto_server"), "-H", "127.0.0.1", "-p", str(self.port)]

    def _client(self) -> Any:
        given = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        return contextlib.closing(botocore.Session().create_client("s3", endpoint_url=self.url, **given))

    def make(self, bucket: str) -> None:
        with self._client() as client:
            client.create_bucket(Bucket=bucket)

    def put(self, bucket: str, content: Mapping[str, bytes]) -> None:
        with self._client() as client:
            for key, data in content.items():
                client.put_object(Bucket=bucket, Key=key, Body=data)


@pytest.fixture(scope="module", params=[Rclone, Moto])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    """A running server, for all tests of this file."""
    kind: type[Peer] = request.param
    if not Path(kind.command(kind(Path()))[0]).exists():
        pytest.skip(f"{kind.__name__.lower()} is not installed")
    found = kind(tmp_path_factory.mktemp("served"))
    with (tmp_path_factory.mktemp("log") / "log").open("wb") as log:
        process = subprocess.Popen(found.command(), stdout=log, stderr=log)
    try:
        _wait_for(found.port, process)
        yield found
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    never = threading.Event()
    for _ in range(int(_PATIENCE_S / _TICK_S)):
        if process.poll() is not None:
            raise RuntimeError("the server ended at once")
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        never.wait(_TICK_S)
    raise RuntimeError("the server does not listen")


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file of AWS that this machine may have counts here."""
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


# ---- the contracts


class TestPeerSource(SourceTests):
    @pytest.fixture(autouse=True)
    def server(self, peer: Peer) -> None:
        self.peer = peer

    def make(self, data: bytes) -> S3Source:
        bucket = self.peer.bucket({"a b/größe+.bin": data})
        return open_s3(f"s3://{bucket}/a b/größe+.bin", credentials=self.peer.keys, prefix_nbytes=KIB)


class TestPeerFolder(FolderTests):
    @pytest.fixture(autouse=True)
    def server(self, peer: Peer) -> None:
        self.peer = peer

    def make(self, files: dict[str, bytes]) -> Folder:
        bucket = self.peer.bucket({f"llama/8b/{name}": data for name, data in files.items()} | {"llama/8b-other/x": b""})
        if not files:
            return S3Folder(f"s3://{self.peer.bucket({})}", credentials=self.peer.keys)
        return S3Folder(f"s3://{bucket}/llama/8b", credentials=self.peer.keys)

    def make_missing(self) -> Folder:
        return S3Folder("s3://absent-bucket/m", credentials=self.peer.keys)


# ---- whole checkpoints


def model() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """(files of a checkpoint of four shards, bytes by tensor)."""
    contents = random_contents(*[MIB + i for i in range(8)])
    names = list(contents)
    files, weight_map = dict[str, bytes](), dict[str, str]()
    for part in range(4):
        file = f"model-{part + 1:05}-of-00004.safetensors"
        files[file] = serialize({name: contents[name] for name in names[part::4]})
        weight_map |= dict.fromkeys(names[part::4], file)
    files |= {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(), "sub/config.json": b"{}"}
    return files, {name: entry.data for name, entry in contents.items()}


def test_a_checkpoint_is_listed_opened_streamed_loaded_and_pulled(peer: Peer, tmp_path: Path) -> None:
    files, expected = model()
    bucket = peer.bucket({f"m/{name}": data for name, data in files.items()} | {"m2/other.safetensors": b"x"})
    url = f"s3://{bucket}/m"
    folder = S3Folder(url, credentials=peer.keys)
    assert folder.walk() == sorted(files)
    assert {entry.name: entry.nbytes for entry in folder.list_keys()} == {name: len(data) for name, data in files.items()}
    assert not any('"' in entry.etag for entry in folder.list_keys())
    with headrace.open(url, credentials=peer.keys) as checkpoint:
        assert set(checkpoint) == set(expected)
    with headrace.stream(url, credentials=peer.keys, memory_limit=0) as stream:
        assert {name: bytes_of(tensor) for name, tensor in stream} == expected
    assert (stream.stats.retried, stream.stats.received_nbytes) == (0, sum(len(files[name]) for name in files if "-of-" in name))
    assert {name: bytes_of(tensor) for name, tensor in headrace.load(url, credentials=peer.keys).items()} == expected
    assert headrace.pull(url, tmp_path / "dst", credentials=peer.keys).files == len(files)
    assert all((tmp_path / "dst" / name).read_bytes() == data for name, data in files.items())


def test_connections_are_used_again(peer: Peer) -> None:
    bucket = peer.bucket({"a": pattern(MIB)})
    with contextlib.closing(open_s3(f"s3://{bucket}/a", credentials=peer.keys, prefix_nbytes=KIB)) as source:
        for offset in range(0, MIB, 128 * KIB):
            assert read(source, offset, 128 * KIB) == pattern(MIB)[offset : offset + 128 * KIB]
        assert source.traffic.failed == 0


def test_an_object_that_is_replaced_is_noticed_whoever_compares(peer: Peer) -> None:
    bucket = peer.bucket({"a": pattern(MIB)})
    with contextlib.closing(open_s3(f"s3://{bucket}/a", credentials=peer.keys, prefix_nbytes=KIB)) as source:
        assert read(source, 2 * KIB, 100) == pattern(MIB)[2 * KIB : 2 * KIB + 100]
        peer.put(bucket, {"a": bytes(byte ^ 0x55 for byte in pattern(MIB))})
        error = error_of(SourceChangedError, read, source, 4 * KIB, 100)
        assert (error.url, error.offset, error.nbytes) == (f"s3://{bucket}/a", 4 * KIB, 100)
        assert error.status in (200, 206, 412)


def test_an_object_that_is_cut_short_is_noticed(peer: Peer) -> None:
    bucket = peer.bucket({"a": pattern(MIB)})
    with contextlib.closing(open_s3(f"s3://{bucket}/a", credentials=peer.keys, prefix_nbytes=KIB)) as source:
        peer.put(bucket, {"a": b"short"})
        error_of(SourceError, read, source, 512 * KIB, 100)


def test_what_is_missing_is_told_apart(peer: Peer) -> None:
    bucket = peer.bucket({"a": b"a"})
    store = S3Store(peer.keys)
    error = error_of(ObjectNotFoundError, store.open, f"s3://{bucket}/absent.safetensors")
    assert (error.bucket, error.key, error.status) == (bucket, "absent.safetensors", 404)
    assert error_of(BucketNotFoundError, store.open, "s3://absent-bucket/a").bucket == "absent-bucket"
    error_of(ObjectNotFoundError, store.folder(f"s3://{bucket}/nothing").names)


def test_who_is_not_known_is_refused(peer: Peer) -> None:
    bucket = peer.bucket({"a": b"a"})
    if isinstance(peer, Moto):
        pytest.skip("moto takes any signature")
    for keys in ({"secret_access_key": "wrong"}, {"access_key_id": "NOBODY"}):
        given = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET, "endpoint": peer.url} | keys
        error = error_of(CredentialsError, S3Store(S3Credentials(**given)).open, f"s3://{bucket}/a")  # type: ignore[arg-type]
        assert error.status == 403
        assert error.code in ("SignatureDoesNotMatch", "InvalidAccessKeyId")
        assert "wrong" not in str(error)


@pytest.mark.slow
def test_more_keys_than_fit_a_page_are_listed(peer: Peer) -> None:
    names = [f"{i:05}" for i in range(1203)]
    bucket = peer.bucket({f"m/{name}": b"" for name in names})
    assert S3Folder(f"s3://{bucket}/m", credentials=peer.keys).names() == names
