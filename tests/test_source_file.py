"""Local files: the contract, files that change while open, direct reads, and what the page cache is asked."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import mmap
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from budget import rest_slow

from headrace.errors import (
    OptionError,
    SourceChangedError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
    SourceTimeoutError,
    TruncatedError,
)
from headrace.sources.file import DirectIO, FileFolder, FileSource, _residency, filesystem_name
from headrace.sources.file._filesystem import BLOCK_FILESYSTEMS
from headrace.testing import AlignedSourceTests, FolderTests
from headrace.testing.sources import pattern, read

MIB = 1 << 20
DATA = pattern(100_003)


class FileSourceTests(AlignedSourceTests):
    direct_io: DirectIO = "auto"

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, data: bytes) -> FileSource:
        path = self.folder / f"{len(data)}.safetensors"
        if not path.exists():
            path.write_bytes(data)
        return FileSource(path, direct_io=self.direct_io)


class TestFileSource(FileSourceTests): ...


class TestFileSourceDirectOn(FileSourceTests):
    direct_io: DirectIO = "on"


class TestFileSourceDirectOff(FileSourceTests):
    direct_io: DirectIO = "off"


class TestFileSourceInMemory(FileSourceTests):
    direct_io: DirectIO = "on"

    @pytest.fixture(autouse=True)
    def place(self, shm: Path) -> None:
        self.folder = shm


class TestFileFolder(FolderTests):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make(self, files: dict[str, bytes]) -> FileFolder:
        for name, data in files.items():
            (self.path / name).write_bytes(data)
        return FileFolder(self.path)

    def make_missing(self) -> FileFolder:
        return FileFolder(self.path / "missing")


@pytest.fixture
def shm() -> Iterator[Path]:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    path = Path(f"/dev/shm/headrace-test-{os.getpid()}")
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def source(path: Path) -> Iterator[FileSource]:
    source = FileSource(path)
    yield source
    source.close()


def aligned_memory(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


# ---- what is refused at open


def make_folder(path: Path) -> None:
    path.mkdir()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        os.chdir(path.parent)  # a socket's path has 108 bytes at most
        bound.bind(path.name)


@pytest.mark.parametrize(
    ("make", "status"),
    [
        (make_folder, errno.EISDIR),
        (os.mkfifo, errno.EINVAL),
        (make_socket, errno.ENXIO),
        (lambda path: path.symlink_to("/dev/null"), errno.EINVAL),
        (lambda path: path.symlink_to(path), errno.ELOOP),
    ],
    ids=["folder", "fifo", "socket", "device", "circle"],
)
def test_what_is_no_regular_file_is_refused_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], status: int
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a")
    with pytest.raises(SourceError) as caught:
        FileSource(tmp_path / "a")
    assert (caught.value.url, caught.value.status) == (str(tmp_path / "a"), status)


@pytest.mark.parametrize("name", ["missing", "missing/a", "model.safetensors/a"])
def test_a_missing_file_is_not_found(path: Path, name: str) -> None:
    with pytest.raises(SourceNotFoundError) as caught:
        FileSource(path.parent / name)
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.status in (errno.ENOENT, errno.ENOTDIR)
    assert pickle.loads(pickle.dumps(caught.value)).status == caught.value.status


@pytest.mark.parametrize("name", ["a\0b", "n" * 300])
def test_a_name_that_cannot_be_is_a_source_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(SourceError):
        FileSource(tmp_path / name)


def test_a_dangling_link_is_not_found_and_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("../blobs/0123")
    with pytest.raises(SourceNotFoundError, match="blobs/0123"):
        FileSource(tmp_path / "a")


def test_an_unknown_direct_io_is_refused_by_name(path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        FileSource(path, direct_io="yes")  # type: ignore[arg-type]
    assert caught.value.option == "direct_io"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EIO, SourceError),
        (errno.ETIMEDOUT, SourceTimeoutError),
        (errno.ESTALE, SourceChangedError),
        (errno.EACCES, SourcePermissionError),
    ],
)
@pytest.mark.parametrize("direct", [False, True])
def test_errors_of_the_storage_carry_the_range(
    source: FileSource, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[SourceError], direct: bool
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    source.prefers_direct(0, 1)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(kind) as caught:
        (source.read_direct_into if direct else source.read_into)(4096, aligned_memory(8192))
    assert (caught.value.offset, caught.value.nbytes, caught.value.status) == (4096, 8192, number)
    assert isinstance(caught.value.__cause__, OSError)


def test_running_out_of_descriptors_is_said(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(SourceError) as caught:
            FileSource(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.status == errno.EMFILE


# ---- reads


def test_short_reads_go_on(source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:1000]], offset))
    assert read(source, 5, 50_000) == DATA[5:50_005]


def test_short_direct_reads_go_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FileSource(path, direct_io="on")
    preadv = os.preadv
    for step in (4096, 512, 100):  # below a block the rest comes buffered
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset, step=step: preadv(fd, [buffers[0][: step * 8]], offset))
        memory = aligned_memory(65536)
        source.read_direct_into(4096, memory)
        assert memory == DATA[4096 : 4096 + 65536]
    source.close()


def test_signals_do_not_disturb_a_read(source: FileSource) -> None:
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for _ in range(500):
            assert read(source, 1, 100_000) == DATA[1:100_001]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def repeated_memory(nbytes: int, piece_nbytes: int) -> tuple[memoryview, Callable[[], None]]:
    """Address space of any size backed by one piece of memory, mapped again and again; and what unmaps it."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    piece = os.memfd_create("piece")
    os.ftruncate(piece, piece_nbytes)
    space, flags = ctypes.c_size_t(nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = libc.mmap(None, space, 0, flags, -1, ctypes.c_long(0))
    for start in range(0, nbytes, piece_nbytes):
        address, length = ctypes.c_void_p(base + start), ctypes.c_size_t(min(piece_nbytes, nbytes - start))
        fixed = mmap.MAP_SHARED | 0x10  # MAP_FIXED
        assert libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, fixed, piece, ctypes.c_long(0)) == base + start
    os.close(piece)
    view = memoryview((ctypes.c_ubyte * nbytes).from_address(base)).cast("B")
    return view, lambda: libc.munmap(ctypes.c_void_p(base), space)


@pytest.mark.slow
def test_read_beyond_two_gib_in_one_call_is_whole(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A hole on tmpfs takes no memory to read, and the buffer is 64 MiB mapped many times over.
    nbytes, calls, preadv = (2 << 30) + 12_345, [], os.preadv

    def noting(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = preadv(fd, buffers, offset)
        calls.append((offset, got))
        return got

    with open(shm / "sparse", "wb") as file:
        file.truncate(nbytes)
        file.seek(nbytes - 5)
        file.write(b"tails")
    source = FileSource(shm / "sparse")
    view, unmap = repeated_memory(nbytes, 64 * MIB)
    monkeypatch.setattr(os, "preadv", noting)
    source.read_into(0, view)
    assert bytes(view[-6:]) == b"\0tails"
    assert calls == [(0, 0x7FFFF000), (0x7FFFF000, nbytes - 0x7FFFF000)]
    source.close()
    view.release()
    unmap()


def test_bytes_read_are_counted_by_way(path: Path) -> None:
    source = FileSource(path, direct_io="on")
    assert source.read_nbytes == {"buffered": 0, "direct": 0}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda turn: read(source, turn, 1000), range(100)))
    assert source.read_nbytes == {"buffered": 100_000, "direct": 0}
    works = source.prefers_direct(0, 8192)
    source.read_direct_into(0, aligned_memory(8192))
    assert source.read_nbytes == ({"buffered": 100_000, "direct": 8192} if works else {"buffered": 108_192, "direct": 0})
    source.close()


# ---- close


def test_close_during_a_read_keeps_the_descriptor_number_until_it_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FileSource(path)
    entered, release, preadv = threading.Event(), threading.Event(), os.preadv

    def held_up(fd: int, buffers: list[memoryview], offset: int) -> int:
        entered.set()
        assert release.wait(10)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", held_up)
    with ThreadPoolExecutor(1) as threads, open(path.with_name("other"), "w+b") as file:
        reading = threads.submit(read, source, 10, 1000)
        assert entered.wait(10)
        source.close()
        file.write(b"\xff" * len(DATA))  # would take the number of the closed descriptor, were it free
        file.flush()
        others = [os.open(file.name, os.O_RDONLY) for _ in range(8)]
        release.set()
        try:
            assert reading.result(10) == DATA[10:1010]
        finally:
            for number in others:
                os.close(number)


def test_descriptors_go_at_close_even_while_an_error_lives(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    source = FileSource(path, direct_io="on")
    source.prefers_direct(0, 1)
    with pytest.raises(TruncatedError) as caught:
        read(source, len(DATA), 1)
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert caught.value.__traceback__ is not None


def test_everything_after_close_raises_or_declines(source: FileSource) -> None:
    source.close()
    assert not source.prefers_direct(0, 4096)
    with pytest.raises(SourceError) as caught:
        source.check_unchanged()
    assert not isinstance(caught.value, SourceChangedError)


# ---- files that change


def rewrite_in_place(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(b"other")


def copy_over_with_times(path: Path) -> None:
    """As `cp -p other path`, where both have the same size and mtime."""
    before = os.stat(path)
    other = path.with_name("other")
    other.write_bytes(bytes(len(DATA)))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    # Before kernel 6.13 ctime moves in ticks of some ms; so copy until it has moved.
    while os.stat(path).st_ctime_ns == before.st_ctime_ns:
        subprocess.run(["cp", "-p", other, path], check=True)
    assert os.stat(path).st_mtime_ns == before.st_mtime_ns


def rename_over(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")
    os.replace(other, path)


CHANGES = [lambda path: os.truncate(path, 50_000), lambda path: os.truncate(path, 0), lambda path: os.truncate(path, 200_000),
           rewrite_in_place, copy_over_with_times]  # fmt: skip
HARMLESS = [os.unlink, rename_over, lambda path: os.link(path, path.with_name("second")), lambda path: path.read_bytes()]


@pytest.mark.parametrize("change", CHANGES, ids=["shrunk", "emptied", "grown", "rewritten", "cp -p"])
def test_a_file_that_changes_is_noticed(path: Path, source: FileSource, change: Callable[[Path], None]) -> None:
    before = os.stat(path)
    source.check_unchanged()
    while (now := os.stat(path)).st_ctime_ns == before.st_ctime_ns and now.st_mtime_ns == before.st_mtime_ns:
        change(path)
    with pytest.raises(SourceChangedError) as caught:
        source.check_unchanged()
    assert caught.value.url == str(path)
    assert source.nbytes == len(DATA)
    with_it = FileSource(path)
    assert with_it.version != source.version or change is copy_over_with_times
    with_it.close()


@pytest.mark.parametrize("change", HARMLESS, ids=["unlinked", "renamed over", "linked", "read"])
def test_a_path_that_goes_elsewhere_does_no_harm(path: Path, source: FileSource, change: Callable[[Path], object]) -> None:
    change(path)
    source.check_unchanged()
    assert read(source, 3, 90_000) == DATA[3:90_003]
    memory = aligned_memory(8192)
    source.read_direct_into(4096, memory)  # opens its own descriptor only now, and of the same file
    assert memory == DATA[4096:12288]


def test_unlinked_and_then_rewritten_is_noticed(path: Path, source: FileSource) -> None:
    with open(path, "r+b") as file:
        path.unlink()
        source.check_unchanged()
        file.write(b"other")
        file.truncate(99)
        file.flush()
        with pytest.raises(SourceChangedError):
            source.check_unchanged()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("nbytes_left", [0, 4095, 4096, 8192, 10_000])
def test_read_of_a_file_that_shrank_says_so(path: Path, nbytes_left: int, direct: bool) -> None:
    source = FileSource(path, direct_io="on")
    os.truncate(path, nbytes_left)
    with pytest.raises(SourceChangedError) as caught:
        (source.read_direct_into if direct else source.read_into)(4096, aligned_memory(16384))
    assert caught.value.url == str(path)
    assert caught.value.offset is not None
    source.close()


def test_read_of_a_file_that_grew_stays_within_the_size_at_open(path: Path, source: FileSource) -> None:
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(TruncatedError):
        read(source, len(DATA), 4)


def test_early_end_without_a_change_is_truncated(source: FileSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(TruncatedError) as caught:
        read(source, 7, 9)
    assert (caught.value.offset, caught.value.nbytes) == (7, 9)


# ---- direct reads


@pytest.mark.parametrize(("offset", "nbytes"), [(1, 4096), (0, 4095), (512, 4096)])
def test_unaligned_direct_reads_are_a_mistake_of_the_caller(source: FileSource, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="aligned"):
        source.read_direct_into(offset, aligned_memory(nbytes))


def test_off_never_opens_a_direct_descriptor(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    source = FileSource(path, direct_io="off")
    assert not source.prefers_direct(0, 4096)
    source.read_direct_into(0, aligned_memory(4096))
    assert source.read_nbytes == {"buffered": 4096, "direct": 0}
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert source.direct_refused is None
    source.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_refusal_at_the_first_read_is_remembered(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    source = FileSource(path, direct_io="on")
    if not source.prefers_direct(0, 4096):
        pytest.skip(f"no direct reads here: {source.direct_refused}")
    preadv, refused = os.preadv, []

    def refuse(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd == source._direct.fd and not (refused and offset < 4096):
            refused.append(offset)
            raise OSError(number, os.strerror(number))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    for offset in (0, 8192):
        memory = aligned_memory(8192)
        source.read_direct_into(offset, memory)
        assert memory == DATA[offset : offset + 8192]
    assert refused == [0]
    assert source.direct_refused
    assert not source.prefers_direct(0, 4096)
    assert source.read_nbytes == {"buffered": 16384, "direct": 0}
    source.close()


def test_refusal_at_open_is_remembered(path: Path) -> None:
    source = FileSource(path, direct_io="on")

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert not source.prefers_direct(0, 4096)
    assert source.direct_refused
    assert not source.prefers_direct(0, 4096)
    source.close()


def test_a_misplaced_address_is_not_taken_for_a_refusal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FileSource(path, direct_io="on")
    if not source.prefers_direct(0, 4096):
        pytest.skip(f"no direct reads here: {source.direct_refused}")

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.raises(ValueError, match="address"):
        source.read_direct_into(0, aligned_memory(8192)[1:4097])
    assert source.direct_refused is None
    source.close()


def test_files_in_memory_are_never_read_directly(shm: Path) -> None:
    (shm / "a").write_bytes(DATA)
    for direct_io in ("auto", "on"):
        source = FileSource(shm / "a", direct_io=direct_io)
        assert not source.prefers_direct(0, 4096)
        source.read_direct_into(0, aligned_memory(4096))
        assert source.read_nbytes == {"buffered": 4096, "direct": 0}
        source.close()


# ---- what the page cache holds


@pytest.fixture
def big(tmp_path: Path) -> Iterator[Path]:
    """192 MiB and a little on a disk whose page cache can be emptied."""
    path = tmp_path / "big"
    with open(path, "wb") as file:
        for index in range(192):
            file.write(bytes([index]) * MIB)
        file.write(b"tail")
        file.flush()
        os.fsync(file.fileno())
        if filesystem_name(file.fileno()) not in BLOCK_FILESYSTEMS.values():
            pytest.skip(f"{tmp_path} is on {filesystem_name(file.fileno())}, whose page cache cannot be emptied")
    yield path
    path.unlink()


def evict(path: Path, start: int = 0, nbytes: int = 0) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # what is not written yet cannot be dropped
        os.posix_fadvise(file.fileno(), start, nbytes, os.POSIX_FADV_DONTNEED)


def choices(path: Path) -> list[bool]:
    source = FileSource(path)
    try:
        return [source.prefers_direct(index * 64 * MIB, 4 * MIB) for index in range(3)]
    finally:
        source.close()


def no_cachestat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_residency, "_cachestat_share", lambda *_: None)


def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_residency, "_nowait_share", lambda *_: None)


def test_evicted_ranges_are_read_directly_and_cached_ones_are_not(big: Path) -> None:
    assert choices(big) == [False, False, False]
    evict(big, 64 * MIB, 64 * MIB)
    assert choices(big) == [False, True, False]
    evict(big)
    assert choices(big) == [True, True, True]


def test_a_range_with_few_holes_counts_as_cached(big: Path) -> None:
    evict(big, 0, 8 * MIB)
    evict(big, 64 * MIB, 24 * MIB)
    assert choices(big) == [False, True, False]


def test_the_first_answer_for_a_range_is_kept(big: Path) -> None:
    evict(big)
    source = FileSource(big)
    assert source.prefers_direct(0, 4 * MIB)
    read(source, 0, 64 * MIB)
    assert source.prefers_direct(MIB, 4 * MIB)
    assert choices(big) == [False, True, True]
    source.close()


def test_reading_directly_leaves_the_page_cache_alone(big: Path) -> None:
    evict(big)
    source = FileSource(big)
    memory = aligned_memory(64 * MIB)
    source.read_direct_into(64 * MIB, memory)
    assert memory[::MIB] == bytes(range(64, 128))
    assert source.read_nbytes == {"buffered": 0, "direct": 64 * MIB}
    assert choices(big) == [True, True, True]
    source.close()


def test_a_range_over_a_border_goes_by_most_of_what_it_touches(big: Path) -> None:
    evict(big, 64 * MIB, 64 * MIB)
    source = FileSource(big)
    assert not source.prefers_direct(62 * MIB, 4 * MIB)
    assert not source.prefers_direct(0, source.nbytes)
    assert source.prefers_direct(64 * MIB, 64 * MIB)
    source.close()


def test_probes_answer_for_the_whole_file_where_cachestat_does_not(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_cachestat(monkeypatch)
    assert choices(big) == [False, False, False]
    evict(big)
    assert choices(big) == [True, True, True]


def test_a_probe_that_was_read_from_the_disk_found_nothing_cached(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Found on a busy virtual machine: the page that a probe misses is read before the call returns, as if it had been cached.
    no_cachestat(monkeypatch)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset, flags=0: preadv(fd, buffers, offset, flags & ~os.RWF_NOWAIT))
    assert choices(big) == [False, False, False]
    evict(big)
    assert choices(big) == [True, True, True]


def test_probes_are_few_and_sent_once(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_cachestat(monkeypatch)
    preadv, probes = os.preadv, []

    def counting(*args: object) -> int:
        probes.append(args[2])
        return preadv(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", counting)
    assert choices(big) == [False, False, False]
    assert len(probes) == len(set(probes)) == 64


def test_mincore_answers_for_the_owner_where_nothing_else_does(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_cachestat(monkeypatch)
    no_probes(monkeypatch)
    assert choices(big) == [False, False, False]
    evict(big, 64 * MIB, 64 * MIB)
    assert choices(big) == [False, True, False]


def test_without_any_answer_the_file_counts_as_cached(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_cachestat(monkeypatch)
    no_probes(monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 4_294_967_294)
    evict(big)
    assert choices(big) == [False, False, False]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
@pytest.mark.parametrize("hide", rest_slow(["", "_cachestat_share", "_cachestat_share _nowait_share"]))
def test_another_users_cold_file_is_not_taken_for_cached_by_mincore(big: Path, hide: str) -> None:
    # The kernel shows mincore everything as cached to who neither owns the file nor may write to it.
    evict(big)
    for folder in [big, *big.parents]:
        if folder in (Path("/"), Path("/tmp")):
            break
        os.chmod(folder, 0o755)
    script = """
        import os, sys
        from headrace.sources.file import FileSource, _residency
        os.setegid(65534); os.seteuid(65534)
        for name in sys.argv[2:]:
            setattr(_residency, name, lambda *_: None)
        def never(*_): raise SystemExit("mincore was asked")
        _residency._mincore_share = never
        source = FileSource(sys.argv[1])
        print([source.prefers_direct(n << 26, 4096) for n in range(3)], source.direct_refused)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(big), *hide.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [False] * 3 if "_nowait" in hide else [True] * 3
    assert done.stdout.strip() == f"{expected} None"


@pytest.mark.skipif(os.geteuid() != 0, reason="root may read everything; needs root to become somebody else")
def test_a_file_of_another_user_is_refused_by_permission(path: Path) -> None:
    path.chmod(0o600)
    script = """
        import os, sys
        from headrace.errors import SourcePermissionError
        from headrace.sources.file import FileFolder, FileSource
        os.setegid(65534); os.seteuid(65534)
        for call in (lambda: FileSource(sys.argv[1]), FileFolder(os.path.dirname(sys.argv[1])).names):
            try: call()
            except SourcePermissionError as error: print(error.status)
    """
    path.parent.chmod(0o700)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(errno.EACCES)] * 2


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    folders = {name: tmp_path / name for name in ("lower", "upper", "work", "merged")}
    for folder in folders.values():
        folder.mkdir()
    options = f"lowerdir={folders['lower']},upperdir={folders['upper']},workdir={folders['work']}"
    done = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, folders["merged"]], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip("cannot mount an overlay here")
    yield folders["merged"]
    subprocess.run(["umount", folders["merged"]], check=True)


def test_overlayfs_is_not_taken_for_cold_when_it_is_cached(overlay: Path) -> None:
    # cachestat answers 0 for every file on overlayfs, cached or not (kernel 6.18): image layers of containers are overlays.
    path = overlay / "big"
    with open(path, "wb") as file:
        file.write(bytes(8 * MIB))
        file.flush()
        os.fsync(file.fileno())
    source = FileSource(path)
    assert not source.prefers_direct(0, 4 * MIB)
    source.close()
    for folder in (overlay, overlay.parent / "upper"):
        evict(folder / "big")
    source = FileSource(path)
    assert source.prefers_direct(0, 4 * MIB)
    source.read_direct_into(0, aligned_memory(MIB))
    assert source.read_nbytes["direct"] == MIB
    source.close()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_half_a_duplicate_closes_nothing(path: Path, duplicate: Callable[[object], object]) -> None:
    source = FileSource(path)
    with pytest.raises(TypeError):
        duplicate(source)
    gc.collect()
    assert read(source, 0, 5) == DATA[:5]
    source.close()


# ---- folders


def test_a_folder_lists_files_and_links_to_files_only(path: Path) -> None:
    folder = path.parent
    (folder / "sub").mkdir()
    (folder / "link.safetensors").symlink_to(path.name)
    (folder / "dangling").symlink_to("nothing")
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "fifo")
    assert FileFolder(folder).names() == ["link.safetensors", "model.safetensors"]


def test_a_file_in_a_folder_below_can_be_opened(path: Path) -> None:
    (path.parent / "sub").mkdir()
    (path.parent / "sub" / "a").write_bytes(b"bytes")
    source = FileFolder(path.parent).open("sub/a")
    assert read(source, 0, 5) == b"bytes"
    source.close()


def test_a_folder_that_is_a_file_is_not_found(path: Path) -> None:
    with pytest.raises(SourceNotFoundError):
        FileFolder(path).names()


def test_a_folder_hands_its_direct_io_on(path: Path) -> None:
    source = FileFolder(path.parent, direct_io="off").open(path.name)
    assert not source.prefers_direct(0, 4096)
    source.close()
