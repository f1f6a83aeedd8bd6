"""The contract suites catch sources that are wrong, and the faults do what they say."""

from __future__ import annotations

import itertools
import mmap
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.errors import SourceChangedError, SourceError, SourceTimeoutError, TruncatedError
from headrace.sources.file import FileSource
from headrace.sources.memory import MemoryFolder, MemorySource
from headrace.testing import (
    AlignedSourceTests,
    Block,
    Change,
    Fault,
    FaultyAlignedSource,
    FaultySource,
    Flip,
    FolderTests,
    Raise,
    SourceTests,
    every_read,
    nth_read,
    touches,
)
from headrace.testing.sources import read


class TestFaultySourceWithoutFaults(SourceTests):
    def make(self, data: bytes) -> FaultySource:
        return FaultySource(MemorySource(data))


class TestFaultyAlignedSourceWithoutFaults(AlignedSourceTests):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, data: bytes) -> FaultyAlignedSource:
        path = self.folder / f"{len(data)}.safetensors"
        if not path.exists():
            path.write_bytes(data)
        return FaultyAlignedSource(FileSource(path))


# ---- sources that are wrong, each in one way


class ShortSource(MemorySource):
    """Fills what there is and says nothing, as a bare `readinto` does."""

    def read_into(self, offset, buffer):
        if self._data is None or offset < 0:
            super().read_into(offset, buffer)
        part = self._data[offset : offset + len(buffer)]
        buffer[: len(part)] = part


class SeekingSource(MemorySource):
    """Keeps a position between seek and read, as a file object does, and another thread comes in between."""

    def __init__(self, data):
        super().__init__(data)
        self.turns = itertools.count()
        self.meet = threading.Barrier(2)  # the first two readers wait for each other, with their positions set

    def read_into(self, offset, buffer):
        self.position = offset
        if threading.current_thread() is not threading.main_thread() and next(self.turns) < 2:
            self.meet.wait(timeout=30)
        super().read_into(self.position, buffer)


class UndeadSource(MemorySource):
    """Goes on reading after it was closed."""

    def close(self):
        pass


class BareErrorSource(MemorySource):
    """Lets the errors of what lies below through."""

    def read_into(self, offset, buffer):
        try:
            super().read_into(offset, buffer)
        except SourceError as error:
            raise OSError("read failed") from error


class NamelessErrorSource(MemorySource):
    """Raises the right error without its fields."""

    def read_into(self, offset, buffer):
        try:
            super().read_into(offset, buffer)
        except SourceError as error:
            raise type(error)("read failed") from error


class WholeMemorySource(MemorySource):
    """Writes to the memory that the view was cut from, at its start."""

    def read_into(self, offset, buffer):
        super().read_into(offset, buffer)
        if isinstance(buffer.obj, bytearray):
            memoryview(buffer.obj)[: len(buffer)] = bytes(buffer)


class KeepingSource(MemorySource):
    """Keeps the buffers it was given."""

    def read_into(self, offset, buffer):
        super().read_into(offset, buffer)
        self.last = buffer


class PrivateError(TruncatedError):
    def __init__(self, why, number, **fields):
        super().__init__(f"{why} {number}", **fields)

    def __reduce__(self):
        return type(self), self.args


class UnpicklableErrorSource(MemorySource):
    """Raises errors of its own that do not come out of a pickle."""

    def read_into(self, offset, buffer):
        try:
            super().read_into(offset, buffer)
        except TruncatedError as error:
            raise PrivateError(str(error), 1, url=error.url, offset=error.offset, nbytes=error.nbytes) from error


PAST_THE_END = "test_read_past_the_end_raises_truncated_with_its_range"


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (ShortSource, {PAST_THE_END}),
        (SeekingSource, {"test_reads_from_many_threads_at_once"}),
        (UndeadSource, {"test_read_after_close_raises_with_its_range"}),
        (
            BareErrorSource,
            {PAST_THE_END, "test_read_after_close_raises_with_its_range"},
        ),
        (NamelessErrorSource, {PAST_THE_END, "test_errors_survive_pickling"}),
        (WholeMemorySource, {"test_fills_the_buffer_and_nothing_beside_it"}),
        (KeepingSource, {"test_lets_go_of_the_buffer"}),
        (UnpicklableErrorSource, {"test_errors_survive_pickling"}),
    ],
)
def test_suite_catches_a_source_that_is_wrong(broken, expected):
    suite = suite_of(SourceTests, broken)
    assert expected <= failures(suite)


def test_suite_passes_a_source_that_is_right():
    suite = suite_of(SourceTests, MemorySource)
    assert failures(suite) == set()


class UnsortedFolder(MemoryFolder):
    def names(self):
        return sorted(self._files, reverse=True)


class KeyErrorFolder(MemoryFolder):
    def open(self, name):
        return MemorySource(self._files[name], url=f"{self.url}/{name}")


class EmptyForMissingFolder(MemoryFolder):
    def open(self, name):
        return MemorySource(self._files.get(name, b""), url=f"{self.url}/{name}")


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (UnsortedFolder, "test_lists_its_files_sorted"),
        (KeyErrorFolder, "test_a_missing_file_is_not_found"),
        (EmptyForMissingFolder, "test_names_do_not_lead_out_of_it"),
    ],
)
def test_suite_catches_a_folder_that_is_wrong(broken, expected):
    suite = suite_of(FolderTests, broken)
    assert expected in failures(suite)


def test_suite_catches_direct_reads_that_write_past_the_end(tmp_path):
    class Overwriting(FileSource):
        def read_direct_into(self, offset, buffer):
            super().read_direct_into(offset, buffer)
            buffer[self.nbytes - offset :] = bytes(max(0, len(buffer) - (self.nbytes - offset)))

    (tmp_path / "a").write_bytes(AlignedSourceTests.data)
    suite = suite_of(AlignedSourceTests, lambda _: Overwriting(tmp_path / "a"))
    assert "test_direct_read_leaves_what_lies_past_the_end" in failures(suite)


def suite_of(tests, make):
    """The suite for what `make` returns."""
    suite = tests()
    suite.make = make
    return suite


def failures(suite):
    """Names of the tests of a suite that fail."""
    failed = set()
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except Exception:  # noqa: BLE001  # whatever a broken source raises
                failed.add(name)
    return failed


def test_import_needs_no_pytest_and_no_torch():
    code = "import sys, headrace.testing; print({'pytest', 'torch', 'numpy', '_pytest'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- faults

DATA = bytes(range(200))


def test_reads_are_counted_and_kept():
    source = FaultySource(MemorySource(DATA))
    read(source, 3, 5)
    read(source, 100, 50)
    assert (source.read_count, source.asked_nbytes) == (2, 55)
    assert [(call.index, call.offset, call.nbytes) for call in source.calls] == [(0, 3, 5), (1, 100, 50)]


def test_nth_read_raises_with_the_fields_of_the_read():
    source = FaultySource(MemorySource(DATA, url="memory:x"), [Fault(nth_read(1), Raise(SourceTimeoutError))])
    assert read(source, 3, 5) == DATA[3:8]
    with pytest.raises(SourceTimeoutError) as caught:
        read(source, 4, 5)
    assert (caught.value.url, caught.value.offset, caught.value.nbytes) == ("memory:x", 4, 5)
    assert read(source, 4, 5) == DATA[4:9]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError("none left")])
def test_any_exception_can_be_raised(error):
    source = FaultySource(MemorySource(DATA), [Fault(every_read, Raise(error))])
    with pytest.raises((KeyboardInterrupt, MemoryError)):
        read(source, 0, 1)


@pytest.mark.parametrize(("offset", "nbytes", "hit"), [(0, 10, False), (0, 11, True), (19, 1, True), (20, 5, False)])
def test_touches_matches_by_range(offset, nbytes, hit):
    source = FaultySource(MemorySource(DATA), [Fault(touches(10, 20), Flip())])
    assert (read(source, offset, nbytes) != DATA[offset : offset + nbytes]) == hit


def test_flip_changes_one_byte_by_its_mask():
    source = FaultySource(MemorySource(DATA), [Fault(every_read, Flip(-1, 0x01))])
    assert read(source, 0, 3) == bytes([0, 1, 3])


def test_change_is_noticed_by_the_check_and_in_the_version():
    source = FaultySource(MemorySource(DATA), [Fault(nth_read(1), Change())])
    before = source.version
    read(source, 0, 1)
    source.check_unchanged()
    assert read(source, 0, 3) == DATA[:3]
    assert source.version != before
    with pytest.raises(SourceChangedError):
        source.check_unchanged()


def test_blocked_read_waits_for_its_release():
    block = Block()
    source = FaultySource(MemorySource(DATA), [Fault(nth_read(0), block)])
    with ThreadPoolExecutor(1) as threads:
        blocked = threads.submit(read, source, 0, 4)
        assert block.entered.wait(10)
        assert not blocked.done()
        assert read(source, 4, 4) == DATA[4:8]
        block.release.set()
        assert blocked.result(10) == DATA[:4]


def test_direct_reads_meet_faults_too(tmp_path):
    (tmp_path / "a").write_bytes(bytes(8192))
    source = FaultyAlignedSource(FileSource(tmp_path / "a"), [Fault(touches(4096, 8192), Raise(SourceError))])
    memory = memoryview(mmap.mmap(-1, 4096))
    source.read_direct_into(0, memory)
    with pytest.raises(SourceError):
        source.read_direct_into(4096, memory)
    assert [call.direct for call in source.calls] == [True, True]
    source.close()
    assert source.closed
