"""Any filesystem of fsspec's: the contract, real ones in memory, on disk, in archives and over HTTP, and a grudging one."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import sys
import threading
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
import pytest
from checkpoints import random_contents, serialize, wrong
from fsspec.spec import AbstractBufferedFile
from http_servers import Server, fault

import headrace
from headrace._remote import split_url
from headrace.errors import (
    OptionError,
    SourceChangedError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
    SourceTimeoutError,
    TruncatedError,
)
from headrace.sources.base import ByteSource, is_remote, read_into_each
from headrace.sources.fsspec import FsspecFolder, open_fsspec, shown_chain
from headrace.testing import FolderTests, SourceTests
from headrace.testing.sources import error_of, pattern, read

SECRET = "notSecretAtAll0123456789"
CONTENTS = random_contents(50_000, 60_001, 7)


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[None]:
    """fsspec's one loop for all asynchronous filesystems stays for as long as the process does."""
    fsspec.asyn.get_loop()
    yield
    fsspec.filesystem("memory").store.clear()


_numbers = itertools.count()


def in_memory(files: dict[str, bytes]) -> str:
    """A place of its own in fsspec's memory, which all of a process have in common."""
    filesystem, place = fsspec.filesystem("memory"), f"place{next(_numbers)}"
    filesystem.mkdir(f"/{place}")
    for name, data in files.items():
        filesystem.pipe_file(f"/{place}/{name}", data)
    return f"memory://{place}"


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/", b"")
        for name, data in files.items():
            archive.writestr(f"m/{name}", data, zipfile.ZIP_DEFLATED)
    return path


def checkpoint_files() -> dict[str, bytes]:
    """Three shards and their index."""
    names = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    files = {shard: serialize({name: CONTENTS[name]}) for shard, name in zip(names, CONTENTS, strict=True)}
    return files | {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip(CONTENTS, names, strict=True))}).encode()}


class GrudgingFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A file as most of fsspec's own are: fetched in ranges, by way of a cache."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs.fetched.append((start, end))
        with self.fs.alone():
            return bytes(self.fs.files[self.path][start:end])


class GrudgingFilesystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Raises where two calls are made at once, as one connection for all would mix their bytes; tells what it is told to."""

    protocol = "grudging"
    cachable = False

    def __init__(self, files: dict[str, bytes], **told: object) -> None:
        super().__init__()
        self.files, self.told = files, told
        self.fetched: list[tuple[int, int]] = []
        self.calls: list[str] = []
        self._busy = threading.Lock()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("two calls at once")
        try:
            yield
        finally:
            self._busy.release()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.calls.append("info")
        with self.alone():
            if path not in self.files:
                raise FileNotFoundError(path)
            return {"name": path, "type": "file", "size": len(self.files[path]), **self.told}

    def ls(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return [{"name": name, "type": "file", "size": len(data), **self.told} for name, data in self.files.items()]

    def _open(self, path: str, mode: str = "rb", **_: Any) -> GrudgingFile:
        return GrudgingFile(self, path, mode, size=len(self.files[path]))


# ---- the contract


class TestMemoryFilesystem(SourceTests):
    def make(self, data: bytes) -> ByteSource:
        return open_fsspec(f"{in_memory({'model.safetensors': data})}/model.safetensors")


class TestLocalFilesystem(SourceTests):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "a b#1%20.safetensors"

    def make(self, data: bytes) -> ByteSource:
        self.path.write_bytes(data)
        return open_fsspec(f"local://{self.path}")


class TestZipFilesystem(SourceTests):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.numbers, self.tmp_path = itertools.count(), tmp_path

    def make(self, data: bytes) -> ByteSource:
        path = zipped(self.tmp_path / f"{next(self.numbers)}.zip", {"a.safetensors": data})
        return open_fsspec(f"zip://m/a.safetensors::file://{path}")


class TestGrudgingFilesystem(SourceTests):
    def make(self, data: bytes) -> ByteSource:
        return FsspecFolder("", filesystem=GrudgingFilesystem({"a": data}, mtime=1)).open("a")


class TestHttpFilesystem(SourceTests):
    @pytest.fixture(autouse=True)
    def servers(self) -> Iterator[None]:
        with contextlib.ExitStack() as self.stack:
            yield

    def make(self, data: bytes) -> ByteSource:
        server = self.stack.enter_context(Server(data))
        return FsspecFolder(server.url_of(""), filesystem=http()).open("model.safetensors")


class TestMemoryFolder(FolderTests):
    def make(self, files: dict[str, bytes]) -> FsspecFolder:
        return FsspecFolder(in_memory(files))

    def make_missing(self) -> FsspecFolder:
        return FsspecFolder("memory://nowhere/at/all")


class TestLocalFolder(FolderTests):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "m"

    def make(self, files: dict[str, bytes]) -> FsspecFolder:
        self.path.mkdir()
        for name, data in files.items():
            (self.path / name).write_bytes(data)
        return FsspecFolder(str(self.path), filesystem=fsspec.filesystem("local"))

    def make_missing(self) -> FsspecFolder:
        return FsspecFolder(f"local://{self.path}")


class TestZipFolder(FolderTests):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "m.zip"

    def make(self, files: dict[str, bytes]) -> FsspecFolder:
        return FsspecFolder(f"zip://m::file://{zipped(self.path, files)}")

    def make_missing(self) -> FsspecFolder:
        return FsspecFolder(f"zip://n::file://{zipped(self.path, {})}")


def http() -> Any:
    return fsspec.filesystem("http", skip_instance_cache=True)


# ---- loads


def test_an_index_and_its_shards_are_loaded_and_pulled(tmp_path: Path) -> None:
    files = checkpoint_files()
    archive = zipped(tmp_path / "m.zip", files)
    for url in (in_memory(files), f"zip://m::file://{archive}", f"simplecache::{in_memory(files)}"):
        assert not wrong(headrace.load(url), CONTENTS), url
        index = "zip://m/model.safetensors.index.json::" + f"file://{archive}"
        assert not wrong(headrace.load(index if url.startswith("zip") else f"{url}/model.safetensors.index.json"), CONTENTS)
        folder = tmp_path / url.partition(":")[0]
        assert headrace.pull(url, folder).files == len(files)
        assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == files


def test_a_list_of_files_and_single_ones_are_loaded() -> None:
    files = checkpoint_files()
    place = in_memory(files)
    urls = [f"{place}/{name}" for name in files if name.endswith(".safetensors")]
    assert not wrong(headrace.load(urls), CONTENTS)
    assert list(headrace.load(urls[1])) == ["t001"]


def test_an_archive_on_a_web_server_is_loaded_by_a_chained_url(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "m.zip", checkpoint_files()).read_bytes()
    with Server({"/m.zip": archive}) as server:
        assert not wrong(headrace.load(f"zip://m::{server.url_of('/m.zip')}"), CONTENTS)


def test_a_filesystem_that_is_open_already_is_loaded_from() -> None:
    filesystem = fsspec.filesystem("dir", path=in_memory(checkpoint_files()).partition("//")[2], target_protocol="memory")
    assert not wrong(headrace.load(FsspecFolder("", filesystem=filesystem)), CONTENTS)


def test_options_of_the_filesystem_are_its_credentials() -> None:
    place = in_memory(checkpoint_files()).partition("//")[2]
    options = {"path": f"/{place}", "target_protocol": "memory"}
    assert not wrong(headrace.load("dir://", credentials=options), CONTENTS)
    error_of(OptionError, lambda: headrace.load("dir://", credentials="token"))


def test_a_prefix_is_the_folder_and_not_what_else_begins_with_it() -> None:
    place = in_memory({"m/a": b"a", "m/deep/er/b": b"b", "m2/c": b"c", "m.safetensors": b"d"})
    folder = FsspecFolder(f"{place}/m")
    assert folder.names() == ["a"]
    assert folder.walk() == ["a", "deep/er/b"]
    assert read(folder.open("deep/er/b"), 0, 1) == b"b"
    for missing in (f"{place}/m/a", f"{place}/m1", f"{place}/m/dee"):
        error_of(SourceNotFoundError, FsspecFolder(missing).names)
        error_of(SourceNotFoundError, FsspecFolder(missing).walk)
    error_of(SourceError, folder.open, "deep")


def test_only_what_may_be_a_round_trip_is_remote(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    near = [open_fsspec(f"local://{tmp_path}/a"), open_fsspec(f"{in_memory({'a': b'abc'})}/a")]
    far = FsspecFolder("", filesystem=GrudgingFilesystem({"a": b"abc"}, etag="1")).open("a")
    assert [is_remote(source) for source in (*near, far)] == [False, False, True]
    read(far, 0, 2)
    far.check_unchanged()
    error_of(TruncatedError, far.read_into, 2, memoryview(bytearray(2)))
    assert is_remote(far)
    assert far.traffic.requests == 4  # type: ignore[attr-defined]
    assert (far.traffic.received_nbytes, far.traffic.failed) == (2, 1)  # type: ignore[attr-defined]


# ---- reads


def test_no_byte_is_fetched_that_was_not_asked_for() -> None:
    data = pattern(300_000)
    filesystem = GrudgingFilesystem({"a": data})
    source = FsspecFolder("", filesystem=filesystem).open("a")
    assert read(source, 100_000, 5000) == data[100_000:105_000]
    assert filesystem.fetched == [(100_000, 105_000)]


def test_several_places_are_fetched_at_once() -> None:
    data = pattern(300_000)
    filesystem = GrudgingFilesystem({"a": data})
    source = FsspecFolder("", filesystem=filesystem).open("a")
    buffers = [bytearray(nbytes) for nbytes in (5000, 1, 20_000)]
    read_into_each(source, 100_000, [memoryview(buffer) for buffer in buffers])
    assert b"".join(buffers) == data[100_000:125_001]
    assert filesystem.fetched == [(100_000, 125_001)]
    assert source.traffic.requests == 2  # type: ignore[attr-defined]  # that of opening it


def test_several_places_over_http_are_one_request() -> None:
    data = pattern(100_000)
    with Server(data) as server:
        source = FsspecFolder(server.url_of(""), filesystem=http()).open("model.safetensors")
        before = len(server.seen)
        buffers = [bytearray(500), bytearray(70)]
        read_into_each(source, 1000, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == data[1000:1570]
        assert [(seen.start, seen.end) for seen in server.seen[before:]] == [(1000, 1570)]


def test_a_file_that_ends_in_one_of_several_places_is_truncated() -> None:
    filesystem = GrudgingFilesystem({"a": pattern(1000)})
    source = FsspecFolder("", filesystem=filesystem).open("a")
    filesystem.files["a"] = pattern(700)
    places = [memoryview(bytearray(600)), memoryview(bytearray(400))]
    error = error_of(TruncatedError, read_into_each, source, 0, places)
    assert (error.offset, error.nbytes) == (0, 1000)


def test_a_load_of_small_and_large_tensors_takes_few_calls() -> None:
    contents = random_contents(*[nbytes for _ in range(20) for nbytes in (40_000, 7, 100)])
    filesystem = GrudgingFilesystem({"m.safetensors": serialize(contents)}, etag="1")
    assert not wrong(headrace.load(FsspecFolder("", filesystem=filesystem)), contents)
    assert len(filesystem.fetched) < 6  # the header, and a request for all that lies behind it


def test_a_local_file_is_read_into_place(tmp_path: Path) -> None:
    """Not by way of bytes of the same size."""
    data = random.Random(0).randbytes(2 << 20)
    (tmp_path / "a").write_bytes(data)
    source, buffer = open_fsspec(f"local://{tmp_path}/a"), bytearray(len(data))
    tracemalloc.start()
    try:
        source.read_into(0, memoryview(buffer))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert buffer == data
    assert peak < len(data) // 2


def test_a_server_without_ranges_is_an_error_and_no_wrong_bytes() -> None:
    with Server(pattern(100_000), ranges=False) as server:
        source = FsspecFolder(server.url_of(""), filesystem=http()).open("model.safetensors")
        error = error_of(SourceError, source.read_into, 10, memoryview(bytearray(20)))
        assert (error.offset, error.nbytes) == (10, 20)
        assert not isinstance(error, TruncatedError)


# ---- versions


def test_a_file_that_is_replaced_is_noticed(tmp_path: Path) -> None:
    place = in_memory({"a": b"abc"})
    (tmp_path / "a").write_bytes(b"abc")
    sources = {open_fsspec(f"{place}/a"): lambda: fsspec.filesystem("memory").pipe_file(f"{place}/a", b"abd")}
    sources[open_fsspec(f"local://{tmp_path}/a")] = lambda: (tmp_path / "a").write_bytes(b"abcd")
    for source, replace in sources.items():
        source.check_unchanged()
        replace()
        assert error_of(SourceChangedError, source.check_unchanged).url == source.url


def test_a_file_that_vanishes_has_changed() -> None:
    place = in_memory({"a": b"abc"})
    source = open_fsspec(f"{place}/a")
    fsspec.filesystem("memory").rm(f"{place}/a")
    error_of(SourceChangedError, source.check_unchanged)


def test_a_file_that_changes_over_http_is_noticed_by_its_etag() -> None:
    with Server(pattern(1000), [fault("replace", skip=1, with_range=False)]) as server:
        source = FsspecFolder(server.url_of(""), filesystem=http()).open("model.safetensors")
        server.files["/model.safetensors"] = pattern(1000)[::-1]
        error_of(SourceChangedError, source.check_unchanged)


@pytest.mark.parametrize(
    "mark", ["mtime", "ETag", "e_tag", "LastModified", "last-modified", "Content-MD5", "generation", "version_id", "CRC", "sha"]
)
def test_whatever_tells_bytes_apart_is_the_version(mark: str) -> None:
    def version(value: str) -> object:
        return FsspecFolder("", filesystem=GrudgingFilesystem({"a": b"abc"}, **{mark: value})).open("a").version

    assert version("1") == version("1")
    assert version("1") != version("2")
    assert version("1").tells_apart  # type: ignore[attr-defined]


def test_times_of_access_and_signed_urls_are_no_version() -> None:
    filesystem = GrudgingFilesystem({"a": b"abc"}, atime=1, url="https://host/a?sig=1", mtime=3)
    source = FsspecFolder("", filesystem=filesystem).open("a")
    filesystem.told |= {"atime": 2, "url": "https://host/a?sig=2"}
    source.check_unchanged()


def test_where_only_the_size_is_told_nothing_is_asked_again() -> None:
    filesystem = GrudgingFilesystem({"a": b"abc"})
    source = FsspecFolder("", filesystem=filesystem).open("a")
    calls = len(filesystem.calls)
    source.check_unchanged()
    assert len(filesystem.calls) == calls
    assert not source.version.tells_apart
    filesystem.files["a"] = b"ab"
    error_of(TruncatedError, source.read_into, 0, memoryview(bytearray(3)))


# ---- what goes wrong


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (FileNotFoundError("a"), SourceNotFoundError),
        (NotADirectoryError("a"), SourceNotFoundError),
        (PermissionError(13, "no"), SourcePermissionError),
        (TimeoutError(), SourceTimeoutError),
        (fsspec.exceptions.FSTimeoutError(), SourceTimeoutError),
        (ValueError("x"), SourceError),
        (KeyError("x"), SourceError),
        (OSError(5, "broken"), SourceError),
    ],
    ids=repr,
)
def test_whatever_a_filesystem_raises_is_translated(raised: Exception, kind: type[SourceError]) -> None:
    class Failing(GrudgingFilesystem):
        def cat_file(self, *_: Any, **__: Any) -> bytes:
            raise raised

    source = FsspecFolder("", filesystem=Failing({"a": b"abc"})).open("a")
    error = error_of(kind, source.read_into, 1, memoryview(bytearray(2)))
    assert type(error) is kind
    assert (error.url, error.offset, error.nbytes, error.status) == (source.url, 1, 2, getattr(raised, "errno", None))
    assert error.__cause__ is raised


def test_a_refusal_over_http_is_one_of_permission() -> None:
    with Server(pattern(1000), [fault("status", code=403, min_start=1)]) as server:
        source = FsspecFolder(server.url_of(""), filesystem=http()).open("model.safetensors")
        error = error_of(SourcePermissionError, source.read_into, 5, memoryview(bytearray(2)))
        assert error.status == 403


def test_secrets_are_not_shown() -> None:
    class Talkative(GrudgingFilesystem):
        def cat_file(self, *_: Any, **__: Any) -> bytes:
            raise RuntimeError(f"login {SECRET} at https://me:{SECRET}@host/a?sig={SECRET} failed")

    talkative = Talkative({"a": b"abc"})
    source = FsspecFolder("", filesystem=talkative, options={"password": SECRET}).open("a")
    error = error_of(SourceError, source.read_into, 0, memoryview(bytearray(2)))
    assert SECRET not in str(error)
    assert error.__cause__ is None
    for url in (f"dir://x::sftp://me:{SECRET}@host/a", f"zip://m::file:///none?sig={SECRET}", f"sftp://me:a::{SECRET}@h/a"):
        assert SECRET not in shown_chain(url)
        with pytest.raises(headrace.HeadraceError) as caught:
            headrace.load(url)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["gopher://host/m", "zip://m::gopher://host/m", "sftp://host/m", "memory::", "libarchive://a::x"])
def test_what_there_is_no_filesystem_for_is_refused_with_what_to_install(url: str) -> None:
    error = error_of((OptionError, SourceError) if url == "memory::" else OptionError, headrace.load, url)
    assert url.partition(":")[0] in str(error)


@pytest.mark.parametrize("is_installed", [True, False], ids=["fsspec", "no-fsspec"])
@pytest.mark.parametrize(
    ("url", "form"),
    [
        ("gcs://models/m", "gs://bucket/"),
        ("s3a://models/m", "s3://bucket/"),
        ("S3N://models/m/a.safetensors", "s3://bucket/"),
        ("adl://models/m", "az://container/"),
        ("wasb://models@me.blob.core.windows.net/m", "az://container/"),
        ("wasbs://models@me.blob.core.windows.net/m", "az://container/"),
    ],
)
def test_another_name_of_a_store_that_has_a_source_leads_to_it(
    url: str, form: str, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("gcsfs", "s3fs", "adlfs", *(() if is_installed else ("fsspec", "fsspec.core"))):
        monkeypatch.setitem(sys.modules, module, None)
    assert f"write {form}..." in str(error_of(OptionError, headrace.load, url))


def test_inside_a_chain_a_store_is_fsspecs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert "gs://" not in str(error_of(OptionError, headrace.load, "zip://m::gcs://models/m.zip"))


def test_without_fsspec_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, module, None)
    for call in (lambda: headrace.load("memory://m"), lambda: FsspecFolder("memory://m")):
        assert "headrace[fsspec]" in str(error_of(OptionError, call))


def test_no_archive_and_a_broken_one_are_told_apart(tmp_path: Path) -> None:
    error_of(SourceNotFoundError, headrace.load, f"zip://m::file://{tmp_path}/none.zip")
    (tmp_path / "broken.zip").write_bytes(b"PK")
    error = error_of(SourceError, headrace.load, f"zip://m::file://{tmp_path}/broken.zip")
    assert "broken.zip" in str(error)


@pytest.mark.parametrize(
    ("url", "folder", "name"),
    [
        ("memory://m/a.safetensors", "memory://m", "a.safetensors"),
        ("memory://a.safetensors", "memory://", "a.safetensors"),
        ("zip://m/a.safetensors::s3://b/m.zip", "zip://m::s3://b/m.zip", "a.safetensors"),
        ("zip://a.safetensors::s3://b/m.zip", "zip://::s3://b/m.zip", "a.safetensors"),
        ("simplecache::gcs://b/m/a.safetensors", "simplecache::gcs://b/m", "a.safetensors"),
        ("s3://b/m::x/a.safetensors", "s3://b/m::x", "a.safetensors"),
    ],
)
def test_the_last_part_of_the_first_path_is_the_file(url: str, folder: str, name: str) -> None:
    assert split_url(url) == (folder, name)
