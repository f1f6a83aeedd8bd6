"""A pull fills a folder with the bytes of another one, whatever happens on the way, and writes nowhere else."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from budget import rest_slow
from http_servers import Server, fault

import headrace
from headrace._copying import PullProgress
from headrace._destination import STATE
from headrace._pull import PullReport, pull_folder
from headrace._verify import verify_folder
from headrace.errors import (
    DestinationError,
    FormatError,
    IntegrityError,
    NoSpaceError,
    OptionError,
    SourceChangedError,
    SourceError,
    SourceNotFoundError,
)
from headrace.sources.base import Folder, RemovableFolder, Tree
from headrace.sources.file import FileFolder
from headrace.sources.http import Access, Policy
from headrace.sources.memory import MemoryFolder, MemorySource
from headrace.sources.web import WebFolder
from headrace.testing import Block, Change, Fault, FaultySource, Flip, Raise, nth_read

RANGE = 4096
SHARD, INDEX = "m.safetensors", "m.safetensors.index.json"


class Watched:
    """A folder of faulty sources that counts what is read from it."""

    def __init__(self, folder: Folder, faults: Sequence[Fault] = (), *, faulty: str = SHARD) -> None:
        self.folder, self.url, self.faults, self.faulty = folder, folder.url, faults, faulty
        self.sources: list[FaultySource] = []

    def names(self) -> list[str]:
        return self.folder.walk() if isinstance(self.folder, Tree) else self.folder.names()

    def open(self, name: str) -> FaultySource:
        self.sources.append(FaultySource(self.folder.open(name), self.faults if name == self.faulty else ()))
        return self.sources[-1]

    @property
    def asked_nbytes(self) -> int:
        return sum(source.asked_nbytes for source in self.sources)


class WatchedFiles(Watched):
    """The same over local files, which may be removed."""

    def remove(self, name: str) -> None:
        assert isinstance(self.folder, RemovableFolder)
        self.folder.remove(name)


class Breaking(Watched):
    """The same, where closing the faulty source ends a read that waits, as networks' do."""

    def __init__(self, folder: Folder, block: Block, faults: Sequence[Fault]) -> None:
        super().__init__(folder, faults)
        self.block = block

    def open(self, name: str) -> FaultySource:
        source = super().open(name)
        close = source.close

        def close_and_release() -> None:
            close()
            self.block.release.set()

        if name == self.faulty:
            source.close = close_and_release  # type: ignore[method-assign]
        return source


class Digested(MemoryFolder):
    """A folder that knows what the bytes should be, as the hub does."""

    def open(self, name: str) -> MemorySource:
        source = super().open(name)
        source.sha256 = "00" * 32 if name == SHARD else None  # type: ignore[attr-defined]
        return source


def pull(folder: Folder, dst: Path, **given: Any) -> PullReport:
    """Pull in small ranges, one at a time unless told otherwise."""
    arguments = {"include": None, "exclude": None, "concurrency": 1, "move": False, "progress": None, "range_nbytes": RANGE}
    return pull_folder(folder, dst, **{**arguments, **given})


def fill(folder: Path, files: dict[str, bytes]) -> FileFolder:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return FileFolder(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, those of the pull itself left out."""
    walked = FileFolder(folder).walk()
    return {name: (folder / name).read_bytes() for name in walked if not name.startswith(STATE)}


def state(dst: Path) -> set[str]:
    return {path.name for path in (dst / STATE).iterdir()}


def model(seed: int = 0) -> dict[str, bytes]:
    """A shard of ten ranges, small files, a folder."""
    data = bytes((i * 7 + seed + i // RANGE) % 256 for i in range(9 * RANGE + 17))
    return {SHARD: data, INDEX: b"{}", "config.json": b'{"a": 1}', "sub/deep/er.bin": data[:RANGE], "empty": b""}


@pytest.fixture
def dst(tmp_path: Path) -> Path:
    return tmp_path / "dst"


# -- bytes -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [None, 1, 7])
def test_fills_a_folder_with_equal_bytes(tmp_path: Path, dst: Path, concurrency: int | None) -> None:
    sizes = [0, 1, RANGE - 1, RANGE, RANGE + 1, 3 * RANGE + 5]
    files = model() | {f"sizes/{nbytes}": os.urandom(nbytes) for nbytes in sizes}
    report = pull(fill(tmp_path / "src", files), dst / "made" / "too", concurrency=concurrency)
    assert contents(dst / "made" / "too") == files == contents(tmp_path / "src")
    assert report.files == len(files)
    assert report.nbytes == report.copied_nbytes == sum(map(len, files.values()))
    assert report.resumed_nbytes == report.skipped_files == 0
    assert state(dst / "made" / "too") == {"lock", "pulled"}


def test_pulls_a_folder_without_walk_by_its_names(dst: Path) -> None:
    files = {"a": b"1", "b": b"22"}
    assert pull(MemoryFolder(files), dst).files == 2
    assert contents(dst) == files


def test_opens_files_again_where_there_are_too_many(dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace._copying.KEPT_OPEN", 2)
    folder = Watched(MemoryFolder(model()))
    pull(folder, dst, concurrency=3)
    assert contents(dst) == model()
    assert all(source.closed for source in folder.sources)


def test_places_the_index_last(dst: Path) -> None:
    pull(MemoryFolder(model() | {"z.safetensors": b"z"}), dst, concurrency=4)
    placed = [json.loads(line)["name"] for line in (dst / STATE / "pulled").read_text().splitlines() if line]
    assert placed[-1] == INDEX


def test_does_not_pull_what_another_pull_left_in_the_source(tmp_path: Path, dst: Path) -> None:
    pull(MemoryFolder(model()), tmp_path / "src")
    pull(FileFolder(tmp_path / "src"), dst)
    assert contents(dst) == model()


def test_reports_progress_on_the_calling_thread(dst: Path) -> None:
    seen: list[PullProgress] = []
    threads = set()

    def progress(snapshot: PullProgress) -> None:
        seen.append(snapshot)
        threads.add(threading.get_ident())

    pull(MemoryFolder(model()), dst, progress=progress, concurrency=3)
    counted = [snapshot.nbytes for snapshot in seen]
    assert counted == sorted(counted)
    assert threads == {threading.get_ident()}
    last = seen[-1]
    assert (last.nbytes, last.files) == (last.total_nbytes, last.total_files) == (sum(map(len, model().values())), len(model()))
    assert last.rate > 0


# -- what is there already -------------------------------------------------------------------------------------------------------


def test_skips_what_is_there(tmp_path: Path, dst: Path) -> None:
    folder = Watched(fill(tmp_path / "src", model()))
    pull(folder, dst)
    before = folder.asked_nbytes
    again = pull(folder, dst)
    assert folder.asked_nbytes == before
    assert (again.copied_nbytes, again.skipped_files) == (0, len(model()))


def test_copies_anew_what_was_changed_here(tmp_path: Path, dst: Path) -> None:
    folder = fill(tmp_path / "src", model())
    pull(folder, dst)
    (dst / SHARD).write_bytes(b"x" * len(model()[SHARD]))
    (dst / "config.json").unlink()
    assert pull(folder, dst).skipped_files == len(model()) - 2
    assert contents(dst) == model()


def test_copies_anew_what_was_changed_there(tmp_path: Path, dst: Path) -> None:
    folder = fill(tmp_path / "src", model())
    pull(folder, dst)
    fill(tmp_path / "src", {SHARD: model(1)[SHARD]})
    assert pull(folder, dst).skipped_files == len(model()) - 1
    assert contents(dst) == model() | {SHARD: model(1)[SHARD]}


def test_a_file_of_another_origin_is_replaced(tmp_path: Path, dst: Path) -> None:
    fill(dst, {SHARD: b"x" * len(model()[SHARD])})
    pull(fill(tmp_path / "src", model()), dst)
    assert contents(dst) == model()


# -- stopped on the way ----------------------------------------------------------------------------------------------------------


@contextmanager
def child(src: Path, dst: Path, *, block_at: int) -> Iterator[subprocess.Popen[str]]:
    """A process that pulls; it says 'blocked' at the shard's read of that number, and goes on when told to."""
    command = [sys.executable, __file__, str(src), str(dst), str(block_at)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill_at(src: Path, dst: Path, block_at: int) -> None:
    with child(src, dst, block_at=block_at) as process:
        assert read_line(process) == "blocked"
    assert process.returncode == -signal.SIGKILL


def run_child(src: str, dst: str, block_at: str) -> None:
    """What the child process does."""
    block = Block()
    folder = Breaking(FileFolder(src), block, [Fault(nth_read(int(block_at)), block)] if int(block_at) >= 0 else [])

    def tell() -> None:
        block.entered.wait()
        print("blocked", flush=True)  # noqa: T201
        sys.stdin.readline()
        block.release.set()

    threading.Thread(target=tell, daemon=True).start()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    report = pull(folder, Path(dst))
    print(json.dumps([report.copied_nbytes, report.skipped_files, folder.asked_nbytes]), flush=True)  # noqa: T201


@pytest.mark.parametrize("block_at", [0, 5, 9])
def test_resumes_after_a_kill(tmp_path: Path, dst: Path, block_at: int) -> None:
    src = fill(tmp_path / "src", model())
    kill_at(tmp_path / "src", dst, block_at)
    assert SHARD not in contents(dst)
    folder = Watched(src)
    report = pull(folder, dst)
    assert contents(dst) == model()
    assert report.resumed_nbytes == block_at * RANGE
    assert folder.asked_nbytes == report.copied_nbytes
    assert report.skipped_files == 2  # config.json and empty come before the shard
    assert state(dst) == {"lock", "pulled"}


def test_resumes_after_an_interrupt_that_came_while_it_waited(tmp_path: Path, dst: Path) -> None:
    src = fill(tmp_path / "src", model())
    with child(tmp_path / "src", dst, block_at=5) as process:
        assert read_line(process) == "blocked"
        process.send_signal(signal.SIGINT)
        process.wait()
    assert process.returncode == -signal.SIGINT
    assert pull(src, dst).resumed_nbytes == 5 * RANGE
    assert contents(dst) == model()


def test_starts_over_after_a_kill_where_the_source_changed(tmp_path: Path, dst: Path) -> None:
    src = fill(tmp_path / "src", model())
    kill_at(tmp_path / "src", dst, 5)
    fill(tmp_path / "src", {SHARD: model(1)[SHARD]})
    assert pull(src, dst).resumed_nbytes == 0
    assert contents(dst)[SHARD] == model(1)[SHARD]


def test_starts_over_after_the_machine_did(tmp_path: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = fill(tmp_path / "src", model())
    kill_at(tmp_path / "src", dst, 5)
    monkeypatch.setattr("headrace._destination._boot_id", lambda: "another")
    assert pull(src, dst).resumed_nbytes == 0
    assert contents(dst) == model()


def test_a_torn_line_of_the_journal_costs_its_range_only(tmp_path: Path, dst: Path) -> None:
    src = fill(tmp_path / "src", model())
    kill_at(tmp_path / "src", dst, 5)
    [journal] = (dst / STATE).glob("*.ranges")
    journal.write_bytes(journal.read_bytes()[:-4])
    assert pull(src, dst).resumed_nbytes == 4 * RANGE
    assert contents(dst) == model()


@pytest.mark.parametrize("text", [b"\xff{}", b"[1]\nnull\n3", b'{"name": [1]}', b'{"name": {}}', b"[" * 100_000, b"9" * 5000])
def test_records_that_are_none_count_for_nothing(tmp_path: Path, dst: Path, text: bytes) -> None:
    src = fill(tmp_path / "src", model())
    pull(src, dst)
    records = dst / STATE / "pulled"
    records.write_bytes(text + b"\n" + records.read_bytes())
    assert pull(src, dst).skipped_files == len(model())


def test_a_pipe_among_the_records_is_not_waited_for(dst: Path) -> None:
    (dst / STATE).mkdir(parents=True)
    os.mkfifo(dst / STATE / "pulled")
    with pytest.raises(DestinationError, match="pipe"):
        pull(MemoryFolder(model()), dst)


def test_nothing_is_resumed_or_skipped_where_versions_cannot_be_told_apart(dst: Path) -> None:
    quick = Access(policy=Policy(attempts=1, backoff_s=0.0, hedge_after_s=None))
    old, new = (model(seed)[SHARD] * 3 for seed in (1, 2))
    with Server({f"/m/{SHARD}": old}, etag=False) as server:
        folder = WebFolder(server.url_of("/m"), [SHARD], access=quick)
        server.faults.append(fault("hangup", min_start=25 * RANGE))
        with pytest.raises(SourceError):
            pull(folder, dst)
        server.faults.clear()
        for data in (new, old):
            server.files[f"/m/{SHARD}"] = data
            pull(folder, dst)
            assert contents(dst) == {SHARD: data}


def test_a_whole_part_is_placed_without_reading(tmp_path: Path, dst: Path) -> None:
    src = fill(tmp_path / "src", {SHARD: model()[SHARD]})
    (dst / SHARD).mkdir(parents=True)
    with pytest.raises(DestinationError, match="folder is in the way"):
        pull(src, dst)
    (dst / SHARD).rmdir()
    report = pull(src, dst)
    assert (report.copied_nbytes, report.resumed_nbytes) == (0, len(model()[SHARD]))
    assert contents(dst) == {SHARD: model()[SHARD]}


def test_parts_of_files_that_are_no_more_are_removed(tmp_path: Path, dst: Path) -> None:
    src = fill(tmp_path / "src", model())
    kill_at(tmp_path / "src", dst, 5)
    (tmp_path / "src" / SHARD).unlink()
    pull(src, dst, exclude=[SHARD])
    assert len(state(dst)) == 4
    pull(src, dst)
    assert state(dst) == {"lock", "pulled"}


@pytest.mark.slow
def test_two_processes_do_the_work_once(tmp_path: Path, dst: Path) -> None:
    fill(tmp_path / "src", model())
    with child(tmp_path / "src", dst, block_at=5) as first:
        assert read_line(first) == "blocked"
        with child(tmp_path / "src", dst, block_at=-1) as second:
            assert "waiting" in read_line(second)
            assert first.stdin is not None
            first.stdin.write("go on\n")
            first.stdin.flush()
            nbytes = sum(map(len, model().values()))
            assert json.loads(read_line(first)) == [nbytes, 0, nbytes]
            assert json.loads(read_line(second)) == [0, len(model()), 0]
    assert contents(dst) == model()


class SlowToOpen(MemoryFolder):
    """A folder of a network that does not answer: nothing ends `open` but `release`."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.release = threading.Event()
        self.opened: list[MemorySource] = []

    def open(self, name: str) -> MemorySource:
        self.release.wait()
        self.opened.append(super().open(name))
        return self.opened[-1]


@pytest.mark.parametrize("verb", rest_slow(["pull", "verify"]))
def test_an_interrupt_is_not_kept_waiting_by_files_that_are_being_opened(dst: Path, verb: str) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    folder = SlowToOpen(model())
    calls: dict[str, Callable[[], object]] = {
        "pull": lambda: pull(folder, dst, progress=interrupt),
        "verify": lambda: verify_folder(folder, None, manifest=None, out=dst / "m", concurrency=2, progress=interrupt),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[verb]()
    folder.release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("headrace-"):
            thread.join()
    assert 0 < len(folder.opened) <= len(model())
    for source in folder.opened:
        with pytest.raises(SourceError, match="closed"):
            source.check_unchanged()
    if verb == "pull":
        assert state(dst) == {"lock"}


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_read_that_fails_leaves_the_rest_to_the_next_pull(tmp_path: Path, dst: Path, concurrency: int) -> None:
    src = fill(tmp_path / "src", model())
    folder = Watched(src, [Fault(nth_read(6), Raise(SourceError))])
    with pytest.raises(SourceError) as error:
        pull(folder, dst, concurrency=concurrency)
    assert error.value.url is not None
    assert error.value.url.endswith(SHARD)
    assert all(source.closed for source in folder.sources)
    assert INDEX not in contents(dst)
    assert pull(src, dst).resumed_nbytes > 0
    assert contents(dst) == model()


def test_a_source_that_changes_meanwhile_is_started_over(tmp_path: Path, dst: Path) -> None:
    src = fill(tmp_path / "src", model())
    with pytest.raises(SourceChangedError):
        pull(Watched(src, [Fault(nth_read(4), Change())]), dst)
    assert pull(src, dst).resumed_nbytes == 0
    assert contents(dst) == model()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_error_of_the_callback_stops_the_pull(tmp_path: Path, dst: Path, error: type[BaseException]) -> None:
    src = fill(tmp_path / "src", model())

    def progress(snapshot: PullProgress) -> None:
        if snapshot.copied_nbytes > 3 * RANGE:
            raise error

    with pytest.raises(error):
        pull(src, dst, progress=progress, concurrency=3)
    pull(src, dst)
    assert contents(dst) == model()


def test_bytes_that_are_not_those_of_the_digest_get_no_name(dst: Path) -> None:
    with pytest.raises(IntegrityError) as error:
        pull(Digested(model()), dst)
    assert error.value.url == f"memory:/{SHARD}"
    assert SHARD not in contents(dst)
    assert not [name for name in state(dst) if name.endswith(".part")]


# -- which files -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, {SHARD, INDEX, "config.json", "empty", "sub/deep/er.bin"}),
        ("*.json", None, {INDEX, "config.json"}),
        (["*.json", "sub/"], None, {INDEX, "config.json", "sub/deep/er.bin"}),
        (None, ["*.json", "empty"], {SHARD, "sub/deep/er.bin"}),
        (["*.bin"], None, {"sub/deep/er.bin"}),
        (["*.json"], ["*.index.json"], {"config.json"}),
        ([], [], {SHARD, INDEX, "config.json", "empty", "sub/deep/er.bin"}),
    ],
)
def test_patterns_choose(dst: Path, include: Any, exclude: Any, expected: set[str]) -> None:
    assert pull(MemoryFolder(model()), dst, include=include, exclude=exclude).files == len(expected)
    assert contents(dst).keys() == expected


def test_patterns_that_are_none_are_refused(dst: Path) -> None:
    for patterns in (3, [3], b"a"):
        with pytest.raises(OptionError):
            pull(MemoryFolder(model()), dst, include=patterns)


@pytest.mark.parametrize(("files", "include"), [({}, None), (model(), ["*.gguf"])])
def test_nothing_to_pull_is_an_error(dst: Path, files: dict[str, bytes], include: Any) -> None:
    with pytest.raises(SourceNotFoundError) as error:
        pull(MemoryFolder(files), dst, include=include)
    assert error.value.url == "memory:"


@pytest.mark.parametrize(
    "name",
    [
        "../out",
        "a/../../out",
        "..",
        "/out",
        "a//b",
        "a/",
        "./a",
        "",
        "a\\..\\b",
        "nul\0",
        "half \ud800",
        "C:/out",
        "config.json/a",
        "é" * 128,
        "d/" * 2050 + "a",
    ],
)
def test_names_that_cannot_be_are_refused_before_anything_is_written(tmp_path: Path, dst: Path, name: str) -> None:
    with pytest.raises(FormatError) as error:
        pull(MemoryFolder({"config.json": b"{}", name: b"out"}), dst)
    assert error.value.url == "memory:"
    assert not list(tmp_path.iterdir())


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path, dst: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    dst.mkdir()
    (dst / "sub").symlink_to(outside)
    with pytest.raises(DestinationError) as error:
        pull(MemoryFolder(model()), dst)
    assert error.value.url == str(dst / "sub/deep/er.bin")
    assert not list(outside.iterdir())


def test_a_link_to_a_file_is_replaced(tmp_path: Path, dst: Path) -> None:
    fill(tmp_path, {"outside": b"untouched"})
    dst.mkdir()
    (dst / SHARD).symlink_to(tmp_path / "outside")
    pull(MemoryFolder(model()), dst)
    assert contents(dst) == model()
    assert not (dst / SHARD).is_symlink()
    assert (tmp_path / "outside").read_bytes() == b"untouched"


def test_a_link_in_place_of_the_state_is_refused(tmp_path: Path, dst: Path) -> None:
    dst.mkdir()
    (tmp_path / "outside").mkdir()
    (dst / STATE).symlink_to(tmp_path / "outside")
    with pytest.raises(DestinationError):
        pull(MemoryFolder(model()), dst)
    assert not list((tmp_path / "outside").iterdir())


def test_links_to_files_of_the_source_are_pulled_as_files(tmp_path: Path, dst: Path) -> None:
    fill(tmp_path, {"blob": b"bytes"})
    fill(tmp_path / "src", {"a": b"a"})
    (tmp_path / "src" / "link").symlink_to(tmp_path / "blob")
    (tmp_path / "src" / "circle").symlink_to(tmp_path / "src")
    pull(FileFolder(tmp_path / "src"), dst)
    assert contents(dst) == {"a": b"a", "link": b"bytes"}


# -- over a network -------------------------------------------------------------------------------------------------------------


def test_pulls_from_a_web_server_that_fails_now_and_then(dst: Path) -> None:
    files = {name: data for name, data in model().items() if data}
    faults = [fault("status", code=503, every=7), fault("reset", every=11)]
    access = Access(policy=Policy(backoff_s=0.0))
    with Server({f"/m/{name}": data for name, data in files.items()}, faults) as server:
        folder = WebFolder(server.url_of("/m"), list(files), access=access)
        assert pull(folder, dst, concurrency=4).copied_nbytes == sum(map(len, files.values()))
        assert contents(dst) == files
        assert pull(folder, dst, concurrency=4).skipped_files == len(files)


def test_resumes_and_pulls_folders_from_s3(dst: Path) -> None:
    pytest.importorskip("botocore")
    from headrace.sources.s3 import S3Credentials, S3Store
    from headrace.testing.s3server import S3Server

    content = {"models": {f"m/{name}": data for name, data in model().items()} | {"m2/other": b"x", "m/sub/": b""}}
    with S3Server(content, access_key="AK", secret_key="SK") as server:
        keys = S3Credentials(access_key_id="AK", secret_access_key="SK", endpoint=server.url, region="us-east-1")
        faulty = Watched(S3Store(keys).folder("s3://models/m"), [Fault(nth_read(5), Raise(SourceError))])
        with pytest.raises(SourceError):
            pull(faulty, dst)
        report = pull(S3Store(keys).folder("s3://models/m"), dst, concurrency=4)
    assert report.resumed_nbytes == 5 * RANGE
    assert contents(dst) == model()


# -- the destination -------------------------------------------------------------------------------------------------------------


def test_too_little_space_is_found_first(tmp_path: Path, dst: Path) -> None:
    src = fill(tmp_path / "src", model())
    folder = Watched(src)
    with pytest.raises(NoSpaceError) as error:
        pull(folder, dst, free_nbytes=lambda _: 100)
    assert (error.value.needed, error.value.free) == (sum(map(len, model().values())), 100)
    assert folder.asked_nbytes == 0
    assert contents(dst) == {}


def test_space_that_a_part_takes_is_not_asked_for_again(tmp_path: Path, dst: Path) -> None:
    src = fill(tmp_path / "src", model())
    kill_at(tmp_path / "src", dst, 5)
    missing = len(model()[SHARD]) - 5 * RANGE + RANGE + 2
    pull(src, dst, free_nbytes=lambda _: missing)
    assert contents(dst) == model()


def test_a_filesystem_that_fills_up_is_told_apart(tmp_path: Path, dst: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = fill(tmp_path / "src", model())
    written = 0

    def write(fd: int, data: Any, offset: int, _pwrite: Any = os.pwrite) -> int:
        nonlocal written
        written += 1
        if written == 6:
            raise OSError(28, "No space left on device")
        return int(_pwrite(fd, data[:1000], offset))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", write)
        with pytest.raises(NoSpaceError) as error:
            pull(src, dst, include=SHARD)
    assert error.value.status == 28
    assert pull(src, dst).resumed_nbytes == RANGE
    assert contents(dst) == model()


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/headrace"])
def test_a_destination_that_cannot_be_written_is_named(tmp_path: Path, place: str) -> None:
    fill(tmp_path, {"file": b""})
    with pytest.raises(DestinationError) as error:
        pull(MemoryFolder(model()), tmp_path / place)
    assert error.value.url == str(tmp_path / place)
    assert error.value.status is not None


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_read_only_destination_is_named(dst: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    dst.mkdir()
    with monkeypatch.context() as patched:  # root, who may write anywhere, runs tests too
        patched.setattr(os, "mkdir", refuse)
        with pytest.raises(DestinationError) as error:
            pull(MemoryFolder(model()), dst)
    assert (error.value.url, error.value.status) == (str(dst), number)


@pytest.mark.parametrize("inside", ["", "sub", "new/er"])
def test_a_destination_inside_the_source_is_refused(tmp_path: Path, inside: str) -> None:
    with pytest.raises(OptionError) as error:
        pull(fill(tmp_path, model()), tmp_path / inside)
    assert error.value.option == "dst"
    assert contents(tmp_path) == model()


# -- moving ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pulled_before", [False, True])
def test_move_removes_the_source(tmp_path: Path, dst: Path, pulled_before: bool) -> None:
    src = fill(tmp_path / "src", model())
    if pulled_before:
        pull(src, dst)
    seen: list[PullProgress] = []
    assert pull(src, dst, move=True, concurrency=3, progress=seen.append).moved
    assert contents(dst) == model()
    assert contents(tmp_path / "src") == {}
    assert seen[-1].compared_nbytes == sum(map(len, model().values()))


def test_move_of_a_link_leaves_what_it_names(tmp_path: Path, dst: Path) -> None:
    fill(tmp_path, {"blob": b"bytes"})
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "link").symlink_to(tmp_path / "blob")
    pull(FileFolder(tmp_path / "src"), dst, move=True)
    assert contents(dst) == {"link": b"bytes"}
    assert (tmp_path / "blob").read_bytes() == b"bytes"


def test_move_is_refused_for_stores(dst: Path) -> None:
    with pytest.raises(OptionError) as error:
        pull(MemoryFolder(model()), dst, move=True)
    assert error.value.option == "move"
    assert not dst.exists()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(Fault(nth_read(3), Flip()), IntegrityError, id="wrong-when-copied"),
        pytest.param(Fault(nth_read(0), Raise(SourceError)), SourceError, id="unreadable"),
        pytest.param(Fault(nth_read(9), Change()), SourceChangedError, id="changed"),
    ],
)
def test_move_removes_nothing_where_something_is_wrong(
    tmp_path: Path, dst: Path, fault: Fault, expected: type[Exception]
) -> None:
    folder = WatchedFiles(fill(tmp_path / "src", model()), [fault])
    first = folder.open

    def open_faulty_once(name: str) -> FaultySource:
        source = first(name)
        folder.faulty = "" if name == SHARD else folder.faulty
        return source

    folder.open = open_faulty_once  # type: ignore[method-assign]
    with pytest.raises(expected):
        pull(folder, dst, move=True)
    assert contents(tmp_path / "src") == model()


# -- the public call -------------------------------------------------------------------------------------------------------------


def test_a_folder_a_file_and_a_file_url_are_pulled(tmp_path: Path, dst: Path) -> None:
    fill(tmp_path / "src", model())
    name = next(name for name in sorted(model()) if "/" not in name)
    report = headrace.pull((tmp_path / "src" / name).as_uri(), dst)
    assert contents(dst) == {name: model()[name]}
    assert report.files == 1
    assert headrace.pull(tmp_path / "src", dst).skipped_files == 1
    assert contents(dst) == model()


def test_an_s3_prefix_is_pulled(dst: Path) -> None:
    from headrace.sources.s3 import S3Credentials
    from headrace.testing.s3server import S3Server

    with S3Server({"bucket": {f"m/{name}": data for name, data in model().items()} | {"m2/other": b"x"}}) as server:
        credentials = S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)
        headrace.pull("s3://bucket/m", dst, credentials=credentials)
    assert contents(dst) == model()


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path) -> None:
    for src, dst in (("", tmp_path), (tmp_path, "")):
        with pytest.raises(OptionError, match="empty"):
            headrace.pull(src, dst)


def test_a_destination_that_is_no_local_path_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "src", model())
    with pytest.raises(OptionError):
        headrace.pull(tmp_path / "src", "s3://bucket/m")


# -- the command line ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def command() -> Any:
    from typer.testing import CliRunner

    from headrace.cli import app

    return lambda *arguments: CliRunner().invoke(app, ["pull", *map(str, arguments)])


def test_command_pulls_and_says_so(tmp_path: Path, dst: Path, command: Any) -> None:
    fill(tmp_path / "src", model())
    result = command(tmp_path / "src", dst, "--exclude", "sub/*", "--concurrency", 2)
    assert result.exit_code == 0, result.output
    assert contents(dst).keys() == model().keys() - {"sub/deep/er.bin"}
    assert "headrace: pulling 4 files, 36 KiB to copy" in result.stderr
    assert "headrace: pulled 4 files in " in result.stderr
    assert result.stdout.startswith(f"files   4 in {dst}, 36 KiB\n")


def test_command_answers_in_json(tmp_path: Path, dst: Path, command: Any) -> None:
    fill(tmp_path / "src", model())
    result = command(tmp_path / "src", dst, "--include", "*.json", "--move", "--json")
    assert json.loads(result.stdout)["files"] == 2
    assert result.stderr == ""
    assert contents(tmp_path / "src").keys() == model().keys() - {INDEX, "config.json"}


def test_command_fails_in_one_line(tmp_path: Path, dst: Path, command: Any) -> None:
    result = command(tmp_path / "nowhere", dst)
    assert result.exit_code == 1
    assert result.stderr.startswith("headrace: error: cannot list ")


if __name__ == "__main__":
    run_child(*sys.argv[1:])
