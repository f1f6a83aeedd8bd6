"""`headrace.verify` and `headrace verify`: what is checked, what is written, what is said, and how it ends."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoints import MIB, random_contents, random_entry, serialize
from hub_server import serving
from typer.testing import CliRunner

import headrace
from headrace import _checking
from headrace._manifest import BLOCK_NBYTES, HEAD_NBYTES, MANIFEST_NAME
from headrace.cli import app
from headrace.errors import DestinationError, FormatError, IntegrityError, OptionError, SourceNotFoundError
from headrace.sources.base import ByteSource
from headrace.sources.file import FileFolder, FileSource
from headrace.sources.s3 import S3Credentials
from headrace.testing import Fault, FaultySource, Flip, Raise, nth_read, touches
from headrace.testing.s3server import S3Server

HEADRACE = Path(sys.executable).with_name("headrace")
NAMES = ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "sub/tokenizer.json")
BIG = NAMES[1]


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    contents = random_contents(100, 15 * MIB, 3 * MIB, 17, 1000, 0)
    names = list(contents)
    parts = [{name: contents[name] for name in part} for part in (names[:3], names[3:])]
    return {"config.json": b"{}", BIG: serialize(parts[0]), NAMES[2]: serialize(parts[1]), "sub/tokenizer.json": b""}


@pytest.fixture
def model(tmp_path: Path, files: dict[str, bytes]) -> Path:
    """A folder of two shards, one of 18 MiB, and what lies beside and below them."""
    folder = tmp_path / "model"
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for hidden in (".cache/huggingface/download.lock", ".gitattributes"):
        (folder / hidden).parent.mkdir(parents=True, exist_ok=True)
        (folder / hidden).write_bytes(b"hidden")
    return folder


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> bytes:
    """What `headrace.verify` writes of the files."""
    folder = tmp_path_factory.mktemp("written")
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    assert headrace.verify(folder, write=True).ok
    return (folder / MANIFEST_NAME).read_bytes()


@pytest.fixture
def written(model: Path, manifest: bytes) -> Path:
    """The folder, with its manifest."""
    (model / MANIFEST_NAME).write_bytes(manifest)
    return model


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def statuses(report: headrace.VerifyReport) -> dict[str, str]:
    return {file.name: file.status for file in report.files}


# -- writing ---------------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_the_digests_of_every_file(model: Path, files: dict[str, bytes]) -> None:
    report = headrace.verify(model, write=True)
    assert report.ok
    assert report.written == str(model / MANIFEST_NAME)
    assert statuses(report) == dict.fromkeys(NAMES, "ok")
    whole = json.loads((model / MANIFEST_NAME).read_text())
    assert (whole["format"], whole["version"], whole["block_nbytes"]) == ("headrace.manifest", 1, BLOCK_NBYTES)
    assert whole["files"].keys() == files.keys()
    for name, data in files.items():
        entry = whole["files"][name]
        assert (entry["nbytes"], entry["head_nbytes"]) == (len(data), min(len(data), HEAD_NBYTES))
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        edges = [at for at in (0, HEAD_NBYTES, BLOCK_NBYTES) if at < len(data)]
        bounds = pairwise([*edges, len(data)])
        assert entry["blocks"] == [hashlib.sha256(data[start:end]).hexdigest() for start, end in bounds]
    assert len(whole["files"][BIG]["blocks"]) == 3


def test_what_is_written_passes_and_serves_a_load(written: Path) -> None:
    report = headrace.verify(written)
    assert report.ok
    assert report.manifest == str(written / MANIFEST_NAME)
    assert report.verified_nbytes == sum(file.nbytes for file in report.files)
    assert headrace.load(written, verify=True)


def test_writing_leaves_nothing_else_and_others_may_read_it(model: Path) -> None:
    before = sorted(path.name for path in model.iterdir())
    headrace.verify(model, write=True)
    headrace.verify(model, write=True)
    assert sorted(path.name for path in model.iterdir()) == sorted([*before, MANIFEST_NAME])
    assert (model / MANIFEST_NAME).stat().st_mode & 0o044 == 0o044


def test_a_manifest_goes_where_it_is_told(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere.json"
    assert headrace.verify(model, out=out).written == str(out)
    assert not (model / MANIFEST_NAME).exists()
    assert headrace.verify(model, manifest=out).ok
    folder = tmp_path / "manifests"
    folder.mkdir()
    assert headrace.verify(model, out=folder).written == str(folder / MANIFEST_NAME)


def test_a_long_header_is_all_in_the_head(tmp_path: Path) -> None:
    data = serialize({f"a.rather.long.name.{i}": entry for i, entry in enumerate(random_contents(*[4] * 2000).values())})
    (tmp_path / "model.safetensors").write_bytes(data)
    headrace.verify(tmp_path, write=True)
    entry = json.loads((tmp_path / MANIFEST_NAME).read_text())["files"]["model.safetensors"]
    header = 8 + int.from_bytes(data[:8], "little")
    assert header > HEAD_NBYTES
    assert header <= entry["head_nbytes"] < header + 4096
    assert headrace.verify(tmp_path).ok
    assert len(headrace.load(tmp_path, verify=True)) == 2000


def test_no_manifest_is_written_into_a_store_or_for_one_file_of_a_folder(model: Path) -> None:
    class Store:
        url = "s3://bucket/m"

        def names(self) -> list[str]:
            raise AssertionError("nothing is asked")

        def open(self, name: str) -> ByteSource:
            raise AssertionError(name)

    for url in (Store(), model / BIG):
        with pytest.raises(OptionError) as caught:
            headrace.verify(url, write=True)
        assert caught.value.option == "out"
    with pytest.raises(OptionError):
        headrace.verify(model, out="s3://bucket/m.json")
    with pytest.raises(OptionError):
        headrace.verify(model, write=True, manifest={})


def test_a_place_that_cannot_be_written_to_is_an_error(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DestinationError) as caught:
        headrace.verify(model, out=tmp_path / "none" / "m.json")
    assert caught.value.url == str(tmp_path / "none" / "m.json")


# -- checking --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "block"), [(9, 0), (HEAD_NBYTES - 1, 0), (HEAD_NBYTES, 1), (BLOCK_NBYTES - 1, 1), (BLOCK_NBYTES, 2), (-1, 2)]
)
def test_the_damaged_block_is_named(written: Path, at: int, block: int) -> None:
    path = written / BIG
    flip(path, at % path.stat().st_size)
    report = headrace.verify(written)
    assert not report.ok
    assert [(file.name, file.status, file.blocks) for file in report.failed] == [(BIG, "damaged", (block,))]


def test_every_damaged_block_and_file_is_reported(written: Path) -> None:
    for at in (0, BLOCK_NBYTES - 1, BLOCK_NBYTES):
        flip(written / BIG, at)
    flip(written / "config.json", 0)
    with (written / NAMES[2]).open("ab") as file:
        file.write(b"x")
    (written / "sub/tokenizer.json").unlink()
    (written / "stray.safetensors").write_bytes(serialize(random_contents(5)))
    (written / "README.md").write_bytes(b"new")
    report = headrace.verify(written)
    assert statuses(report) == {
        "README.md": "unlisted",
        "config.json": "damaged",
        BIG: "damaged",
        NAMES[2]: "damaged",
        "stray.safetensors": "unlisted",
        "sub/tokenizer.json": "missing",
    }
    assert next(file.blocks for file in report.files if file.name == BIG) == (0, 1, 2)
    assert {file.name for file in report.failed} == statuses(report).keys() - {"README.md"}


def test_one_file_is_checked_by_the_manifest_beside_it(written: Path) -> None:
    assert headrace.verify(written / BIG).ok
    flip(written / NAMES[2], 100)
    assert headrace.verify(written / BIG).ok
    assert not headrace.verify(written / NAMES[2]).ok


def doctored(folder: Path, name: str, **fields: Any) -> None:
    """Change the manifest's entry of a file."""
    path = folder / MANIFEST_NAME
    found = json.loads(path.read_text())
    found["files"][name] |= fields
    path.write_text(json.dumps(found))


@pytest.mark.parametrize("concurrency", [1, 16])
def test_a_manifest_that_contradicts_itself_is_found(written: Path, concurrency: int) -> None:
    doctored(written, BIG, sha256="0" * 64)
    report = headrace.verify(written, concurrency=concurrency)
    (file,) = report.failed
    assert (file.name, file.status, file.blocks) == (BIG, "damaged", ())
    assert "contradicts itself" in file.detail
    result = run(written)
    assert result.exit_code == 1


def test_a_damaged_block_is_not_called_a_contradiction(written: Path) -> None:
    flip(written / BIG, 17 * MIB)
    (file,) = headrace.verify(written).failed
    assert file.blocks == (2,)
    assert "contradicts" not in file.detail


def test_digests_of_one_block_that_differ_make_no_manifest(written: Path) -> None:
    doctored(written, "config.json", sha256="0" * 64)
    with pytest.raises(FormatError, match="contradicts itself"):
        headrace.verify(written)


def test_an_empty_file_has_the_digest_of_nothing(written: Path) -> None:
    doctored(written, "sub/tokenizer.json", sha256="0" * 64)
    with pytest.raises(FormatError, match="contradicts itself"):
        headrace.verify(written)


def test_nothing_to_check_against_is_an_option_error(model: Path) -> None:
    with pytest.raises(OptionError) as caught:
        headrace.verify(model)
    assert caught.value.option == "verify"


def test_what_is_no_manifest_or_no_folder_is_refused(model: Path, tmp_path: Path) -> None:
    (model / MANIFEST_NAME).write_text("{}")
    with pytest.raises(FormatError):
        headrace.verify(model)
    with pytest.raises(SourceNotFoundError):
        headrace.verify(tmp_path / "nowhere", write=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceNotFoundError):
        headrace.verify(tmp_path / "empty", write=True)


class FaultyFolder:
    """A local folder whose files fail."""

    def __init__(self, path: Path, faults: dict[str, list[Fault]]) -> None:
        self.url = str(path)
        self._folder, self._faults = FileFolder(path), faults

    def names(self) -> list[str]:
        return self._folder.names()

    def walk(self) -> list[str]:
        return self._folder.walk()

    def open(self, name: str) -> ByteSource:
        return FaultySource(self._folder.open(name), self._faults.get(name, []))


def test_a_file_that_cannot_be_read_does_not_end_it(written: Path) -> None:
    faults = [Fault(touches(BLOCK_NBYTES, BLOCK_NBYTES + 1), Raise(headrace.SourceTimeoutError))]
    report = headrace.verify(FaultyFolder(written, {BIG: faults}))
    assert {name: status for name, status in statuses(report).items() if status != "ok"} == {BIG: "unreadable"}
    assert not report.ok


def test_a_bit_that_flips_while_writing_is_not_hidden(model: Path) -> None:
    report = headrace.verify(
        FaultyFolder(model, {BIG: [Fault(nth_read(3), Raise(headrace.SourceTimeoutError))]}), out=model / "m.json"
    )
    assert not report.ok
    assert report.written is None
    assert not (model / "m.json").exists()


def test_an_error_that_is_no_source_error_ends_it(written: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        headrace.verify(FaultyFolder(written, {BIG: [Fault(touches(BLOCK_NBYTES, BLOCK_NBYTES + 1), Raise(ZeroDivisionError))]}))


def test_more_files_than_are_kept_open_are_opened_again(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checking, "KEPT_OPEN", 1)
    report = headrace.verify(written, concurrency=3)
    assert report.ok
    assert report.verified_nbytes == sum(file.nbytes for file in report.files)
    assert headrace.verify(written, write=True).ok
    assert headrace.verify(written).ok


@pytest.mark.parametrize("concurrency", [1, 2, 7])
@pytest.mark.parametrize("direct_io", ["on", "off"])
def test_any_number_of_threads_finds_the_same(written: Path, concurrency: int, direct_io: str) -> None:
    text = (written / MANIFEST_NAME).read_bytes()
    headrace.verify(written, write=True, concurrency=concurrency, direct_io=direct_io)
    assert (written / MANIFEST_NAME).read_bytes() == text
    flip(written / BIG, BLOCK_NBYTES + 5)
    report = headrace.verify(written, concurrency=concurrency, direct_io=direct_io)
    assert [file.blocks for file in report.failed] == [(2,)]


def test_progress_counts_up_to_the_whole_on_the_calling_thread(written: Path) -> None:
    seen: list[headrace.VerifyProgress] = []
    report = headrace.verify(written, progress=seen.append)
    assert seen[-1].nbytes == seen[-1].total_nbytes == report.verified_nbytes
    assert seen[-1].files == seen[-1].total_files == len(NAMES)
    assert all(one.nbytes <= other.nbytes for one, other in pairwise(seen))
    with pytest.raises(KeyboardInterrupt):
        headrace.verify(written, progress=_interrupt)


def _interrupt(snapshot: headrace.VerifyProgress) -> None:
    if snapshot.nbytes:
        raise KeyboardInterrupt


def test_an_interrupt_ends_reads_that_are_stuck(written: Path) -> None:
    class Stuck(FileSource):
        """Falls silent after the head, until it is closed."""

        ended = threading.Event()

        def read_into(self, offset: int, buffer: memoryview) -> None:
            if offset:
                self.ended.wait()
                raise headrace.SourceError("closed", url=self.url)
            super().read_into(offset, buffer)

        def close(self) -> None:
            self.ended.set()
            super().close()

    class Folder(FaultyFolder):
        def open(self, name: str) -> ByteSource:
            return Stuck(written / name, direct_io="off") if name == BIG else super().open(name)

    with pytest.raises(KeyboardInterrupt):
        headrace.verify(Folder(written, {}), progress=_interrupt)


# -- stores ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


def test_the_hub_is_checked_by_its_own_digests(quiet: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shards = {name: serialize({name: random_entry("U8", (100_000,))}) for name in NAMES[1:3]}
    with serving({"config.json": b"{}", **shards}) as hub:
        quiet.setenv("HF_ENDPOINT", hub.endpoint)
        report = headrace.verify("hf://org/repo")
        assert report.ok
        assert statuses(report) == {"config.json": "unchecked", BIG: "ok", NAMES[2]: "ok"}
        assert headrace.verify("hf://org/repo", out=tmp_path / "m.json").ok
        assert headrace.load("hf://org/repo", verify=tmp_path / "m.json")

        class Corrupting(dict[str, bytes]):
            def __setitem__(self, key: str, value: bytes) -> None:
                super().__setitem__(key, value[:-1] + bytes([value[-1] ^ 4]))

        hub.cdn.files = Corrupting()
        report = headrace.verify("hf://org/repo")
        assert statuses(report) == {"config.json": "unchecked", BIG: "damaged", NAMES[2]: "damaged"}
        report = headrace.verify("hf://org/repo", out=tmp_path / "bad.json")
        assert not report.ok
        assert not (tmp_path / "bad.json").exists()


def test_a_bucket_is_checked_by_the_manifest_in_it(quiet: pytest.MonkeyPatch, written: Path) -> None:
    pytest.importorskip("botocore")
    content = {f"m/{name}": (written / name).read_bytes() for name in (*NAMES, MANIFEST_NAME)}
    with S3Server({"models": content}) as server:
        quiet.setenv("AWS_ENDPOINT_URL_S3", server.url)
        keys = S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)
        assert headrace.verify("s3://models/m", credentials=keys).ok
        with pytest.raises(OptionError):
            headrace.verify("s3://models/m", credentials=keys, write=True)
    content[f"m/{BIG}"] = content[f"m/{BIG}"][:-1] + b"!"
    with S3Server({"models": content}) as server:
        keys = S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)
        assert [file.blocks for file in headrace.verify("s3://models/m", credentials=keys).failed] == [(2,)]


def test_a_pull_carries_the_manifest_along(written: Path, tmp_path: Path) -> None:
    headrace.pull(written, tmp_path / "copy")
    assert headrace.verify(tmp_path / "copy").ok
    assert headrace.load(tmp_path / "copy", verify=True)


# -- the command -----------------------------------------------------------------------------------------------------------------


def test_the_command_lists_files_and_ends_well(written: Path) -> None:
    result = run(written)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["file", "size", "result", "checked", "by"]
    assert [line.split()[0] for line in lines[1:5]] == list(NAMES)
    assert all(" ok " in line for line in lines[1:5])
    assert any(line.startswith("result") for line in lines)
    assert "verifying 4 files" in result.stderr


def test_the_command_writes(model: Path, tmp_path: Path) -> None:
    result = run("--write", model)
    assert result.exit_code == 0, result.output
    assert f"written  {model / MANIFEST_NAME}" in result.stdout
    assert run(model, "--out", tmp_path / "m.json").exit_code == 0
    assert run(model, "--manifest", tmp_path / "m.json").exit_code == 0


def test_damage_is_named_and_ends_with_1(written: Path) -> None:
    flip(written / BIG, BLOCK_NBYTES)
    result = run(written)
    assert result.exit_code == 1
    (line,) = (line for line in result.stdout.splitlines() if "DAMAGED" in line)
    assert line.startswith(BIG)
    assert "block 2" in result.stdout
    assert f"headrace: error: 1 file of 4 failed: {BIG}" in result.stderr
    assert re.search(r"^headrace: [\d.]+ [KM]?i?B were right in ", result.stderr, re.MULTILINE)


def test_json_has_all_of_it_and_nothing_else_is_printed(written: Path) -> None:
    result = run(written, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert [file["name"] for file in found["files"]] == list(NAMES)
    assert result.stderr == ""
    flip(written / BIG, 0)
    result = run(written, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["ok"] is False
    assert next(file for file in found["files"] if file["name"] == BIG)["blocks"] == [0]


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        ([], 2, "there is nothing to check"),
        (["--manifest", "s3x://nowhere/m.json"], 2, "s3x"),
        (["--write", "--manifest", "m.json"], 2, "write"),
        (["--manifest", "/nowhere/m.json"], 1, "/nowhere/m.json"),
    ],
)
def test_mistakes_are_explained(model: Path, arguments: list[str], code: int, part: str) -> None:
    result = run(model, *arguments)
    assert result.exit_code == code, result.output
    assert part in result.stderr
    assert result.stderr.count("error:") == 1


def test_names_in_the_table_are_printable(tmp_path: Path) -> None:
    (tmp_path / "line\nforged \x1b[31m.bin").write_bytes(b"x")
    result = run("--write", tmp_path)
    assert result.exit_code == 0
    assert r"line\nforged \x1b[31m.bin" in result.stdout


def test_verifying_needs_no_torch(written: Path) -> None:
    code = "import sys, headrace; assert headrace.verify(sys.argv[1]).ok; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, written], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_the_report_fails_where_a_shard_was_not_checked() -> None:
    assert headrace.FileCheck("a.safetensors", 1, "unchecked").failed
    assert not headrace.FileCheck("config.json", 1, "unchecked").failed
    assert headrace.FileCheck("config.json", 1, "missing").failed


def test_files_stay_as_they_were(written: Path, files: dict[str, bytes]) -> None:
    before = {name: os.stat(written / name).st_mtime_ns for name in NAMES}
    headrace.verify(written)
    headrace.verify(written, write=True)
    assert {name: os.stat(written / name).st_mtime_ns for name in NAMES} == before
    assert {name: (written / name).read_bytes() for name in NAMES} == files


def test_a_file_that_changes_meanwhile_is_unreadable(written: Path) -> None:
    class Changing(FileSource):
        def check_unchanged(self) -> None:
            raise headrace.SourceChangedError("changed", url=self.url)

    class Folder(FaultyFolder):
        def open(self, name: str) -> ByteSource:
            return Changing(written / name) if name == BIG else super().open(name)

    assert [(file.name, file.status) for file in headrace.verify(Folder(written, {})).failed] == [(BIG, "unreadable")]


def test_a_flip_in_transit_is_damage(written: Path) -> None:
    report = headrace.verify(FaultyFolder(written, {BIG: [Fault(touches(BLOCK_NBYTES, BLOCK_NBYTES + 1), Flip(position=-1))]}))
    assert [(file.name, file.status, file.blocks) for file in report.failed] == [(BIG, "damaged", (2,))]
    assert issubclass(IntegrityError, OSError)
