"""The contract of sources and folders as tests that every adapter passes, those of other packages too.

Subclass a suite in a test module, say in `make` how to get a source that holds given bytes, and pytest runs it:

    class TestMemorySource(SourceTests):
        def make(self, data):
            return MemorySource(data)

The suites need no pytest themselves. They look at classes and fields of errors, never at their text, and compare every byte.
`pytest.register_assert_rewrite("headrace.testing.sources")` in a conftest makes pytest show the values of a failed comparison.
"""

from __future__ import annotations

import contextlib
import mmap
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from headrace.errors import SourceError, SourceNotFoundError, TruncatedError
from headrace.sources.base import AlignedSource, ByteSource, Folder, MappableSource, read_into_each

_E = TypeVar("_E", bound=BaseException)

THREADS = 8
_MARK = 0xA5


def pattern(nbytes: int) -> bytes:
    """Make bytes in which every misplaced run shows: the position, four bytes at a time."""
    return b"".join(index.to_bytes(4, "little") for index in range((nbytes + 3) // 4))[:nbytes]


def error_of(kind: type[_E], call: Callable[..., object], *args: Any) -> _E:
    """Call, and return the error of this kind that the call must raise.

    Raises:
        AssertionError: it raised nothing, or something else (which is the cause).
    """
    try:
        call(*args)
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"expected {kind.__name__}, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"expected {kind.__name__}, nothing was raised")


def read(source: ByteSource, offset: int, nbytes: int) -> bytes:
    """Read a range into memory of its own."""
    buffer = bytearray(nbytes)
    source.read_into(offset, memoryview(buffer))
    return bytes(buffer)


class SourceTests:
    """What every `ByteSource` does. Subclasses override `make`."""

    data = pattern(300_007)  # no multiple of a page, a sector or four

    def make(self, data: bytes) -> ByteSource:
        """Open a source that holds `data`; the suite closes it."""
        raise NotImplementedError

    def opened(self, data: bytes | None = None) -> contextlib.closing[ByteSource]:
        """A source to be used in a `with`, closed at its end."""
        return contextlib.closing(self.make(self.data if data is None else data))

    def test_says_what_it_is(self) -> None:
        with self.opened() as source:
            assert isinstance(source.url, str)
            assert source.url
            assert source.nbytes == len(self.data)
            assert source.version is not None
            assert source.version == source.version
            source.check_unchanged()

    def test_reads_all_at_once(self) -> None:
        with self.opened() as source:
            assert read(source, 0, len(self.data)) == self.data

    def test_reads_any_range(self) -> None:
        end = len(self.data)
        ranges = [(0, 1), (end - 1, 1), (1, 4096), (4095, 2), (4096, 4096), (8191, 70_001), (end - 5000, 5000)]
        with self.opened() as source:
            for offset, nbytes in ranges + ranges[::-1]:
                assert read(source, offset, nbytes) == self.data[offset : offset + nbytes], (offset, nbytes)

    def test_fills_several_buffers_one_after_another(self) -> None:
        data = pattern(100_000)
        buffers = [bytearray(nbytes) for nbytes in (10_000, 0, 1, 60_000, 77)]
        with contextlib.closing(self.make(data)) as source:
            read_into_each(source, 4321, [memoryview(buffer) for buffer in buffers])
        assert b"".join(buffers) == data[4321 : 4321 + sum(map(len, buffers))]

    def test_reads_nothing_into_an_empty_buffer(self) -> None:
        with self.opened() as source:
            for offset in (0, 17, len(self.data)):
                source.read_into(offset, memoryview(bytearray()))

    def test_an_empty_source_has_no_bytes(self) -> None:
        with self.opened(b"") as source:
            assert source.nbytes == 0
            source.read_into(0, memoryview(bytearray()))
            error_of(TruncatedError, source.read_into, 0, memoryview(bytearray(1)))

    def test_fills_the_buffer_and_nothing_beside_it(self) -> None:
        with self.opened() as source:
            for start, nbytes in ((0, 5), (1, 4096), (4097, 10_001)):
                memory = bytearray([_MARK]) * (start + nbytes + 64)
                source.read_into(4000, memoryview(memory)[start : start + nbytes])
                assert memory[start : start + nbytes] == self.data[4000 : 4000 + nbytes]
                assert set(memory[:start]) | set(memory[start + nbytes :]) == {_MARK}

    def test_fills_memory_that_is_mapped(self) -> None:
        with self.opened() as source, mmap.mmap(-1, 16384, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            with memoryview(memory) as whole, whole[100:9000] as part:
                source.read_into(33, part)
            assert memory[100:9000] == self.data[33:8933]

    def test_lets_go_of_the_buffer(self) -> None:
        with self.opened() as source:
            buffer = bytearray(1000)
            source.read_into(0, memoryview(buffer))
            buffer.extend(b"x")  # BufferError while anything still refers to the memory

    def test_read_past_the_end_raises_truncated_with_its_range(self) -> None:
        end = len(self.data)
        with self.opened() as source:
            for offset, nbytes in ((end - 10, 11), (end, 1), (end + 4096, 1), (0, end + 1), (end + 1, 0)):
                error = error_of(TruncatedError, source.read_into, offset, memoryview(bytearray(nbytes)))
                self.check_fields(error, source, offset, nbytes)

    def test_read_at_a_negative_offset_raises_with_its_range(self) -> None:
        with self.opened() as source:
            error = error_of(SourceError, source.read_into, -1, memoryview(bytearray(2)))
            self.check_fields(error, source, -1, 2)

    def test_is_usable_after_an_error(self) -> None:
        with self.opened() as source:
            error_of(TruncatedError, source.read_into, len(self.data), memoryview(bytearray(1)))
            assert read(source, 3, 500) == self.data[3:503]

    def test_reads_from_many_threads_at_once(self) -> None:
        with self.opened() as source, ThreadPoolExecutor(THREADS) as threads:
            start = threading.Barrier(THREADS)

            def read_stripe(thread: int) -> bool:
                start.wait()
                ranges = [(thread * 31 + turn * 7919, 20_000 + thread) for turn in range(32)]
                return all(read(source, offset, nbytes) == self.data[offset : offset + nbytes] for offset, nbytes in ranges)

            assert list(threads.map(read_stripe, range(THREADS))) == [True] * THREADS

    def test_two_sources_of_the_same_bytes_are_independent(self) -> None:
        with self.opened() as source:
            self.make(self.data[:10]).close()
            assert read(source, 5, 5) == self.data[5:10]

    def test_closes_twice(self) -> None:
        source = self.make(self.data)
        source.close()
        source.close()

    def test_read_after_close_raises_with_its_range(self) -> None:
        source = self.make(self.data)
        source.close()
        for offset, nbytes in ((7, 9), (0, 0)):
            error = error_of(SourceError, source.read_into, offset, memoryview(bytearray(nbytes)))
            assert not isinstance(error, TruncatedError), "a closed source says that it is closed, not that it ends early"
            self.check_fields(error, source, offset, nbytes)

    def test_close_while_others_read_lets_them_finish_or_raise(self) -> None:
        source = self.make(self.data)
        start = threading.Barrier(THREADS)

        def read_until_closed(thread: int) -> bool:
            start.wait()
            if thread == 0:
                source.close()
            try:
                return all(read(source, turn, 4096) == self.data[turn : turn + 4096] for turn in range(64))
            except SourceError:
                return True

        with ThreadPoolExecutor(THREADS) as threads:
            assert list(threads.map(read_until_closed, range(THREADS))) == [True] * THREADS

    def test_errors_survive_pickling(self) -> None:
        with self.opened() as source:
            error = error_of(TruncatedError, source.read_into, len(self.data), memoryview(bytearray(3)))
            again = pickle.loads(pickle.dumps(error))
            assert type(again) is type(error)
            assert str(again) == str(error)
            self.check_fields(again, source, len(self.data), 3)

    def check_fields(self, error: SourceError, source: ByteSource, offset: int, nbytes: int) -> None:
        """Compare the fields of an error with the read that raised it."""
        found = (error.url, error.offset, error.nbytes)
        assert found == (source.url, offset, nbytes), f"{type(error).__name__} carries {found}"
        assert error.attempts >= 1
        assert source.url in str(error), "the message names the source"


class AlignedSourceTests(SourceTests):
    """What every `AlignedSource` does as well, wherever its bytes really come from."""

    def make(self, data: bytes) -> AlignedSource:
        """Open a source that holds `data`; the suite closes it."""
        raise NotImplementedError

    def aligned(self, data: bytes | None = None) -> contextlib.closing[AlignedSource]:
        """As `opened`, with the type of the wider interface."""
        return contextlib.closing(self.make(self.data if data is None else data))

    def test_is_recognised_as_aligned(self) -> None:
        with self.aligned() as source:
            assert isinstance(source, AlignedSource)
            assert source.block_nbytes > 0
            assert source.block_nbytes & (source.block_nbytes - 1) == 0

    def test_prefers_one_way_or_the_other(self) -> None:
        with self.aligned() as source:
            for offset, nbytes in ((0, 1), (0, len(self.data)), (4096, 4096), (len(self.data) - 1, 1)):
                assert source.prefers_direct(offset, nbytes) in (True, False)
                assert source.prefers_direct(offset, nbytes) == source.prefers_direct(offset, nbytes)

    def test_direct_read_gives_the_same_bytes(self) -> None:
        with self.aligned() as source:
            block = source.block_nbytes
            for start, blocks in ((0, 1), (1, 3), (2, 8)):
                with _AlignedMemory(blocks * block) as memory:
                    source.read_direct_into(start * block, memory)
                    assert bytes(memory) == self.data[start * block : (start + blocks) * block]

    def test_direct_read_leaves_what_lies_past_the_end(self) -> None:
        with self.aligned() as source:
            block = source.block_nbytes
            start = max(0, len(self.data) // block - 2) * block
            wanted = len(self.data) - start
            with _AlignedMemory(-(-wanted // block) * block) as memory:
                source.read_direct_into(start, memory)
                assert bytes(memory[:wanted]) == self.data[start:]
                assert set(memory[wanted:]) == {_MARK}, "bytes past the end of the source were written"

    def test_direct_read_past_the_end_raises_truncated(self) -> None:
        with self.aligned() as source:
            block = source.block_nbytes
            start = len(self.data) // block * block
            with _AlignedMemory(2 * block) as memory:
                self.check_fields(error_of(TruncatedError, source.read_direct_into, start, memory), source, start, 2 * block)
                start += 16 * block
                self.check_fields(error_of(TruncatedError, source.read_direct_into, start, memory), source, start, 2 * block)

    def test_direct_read_after_close_raises(self) -> None:
        source = self.make(self.data)
        block = source.block_nbytes
        source.close()
        with _AlignedMemory(block) as memory:
            self.check_fields(error_of(SourceError, source.read_direct_into, 0, memory), source, 0, block)

    def test_direct_reads_from_many_threads_at_once(self) -> None:
        with self.aligned() as source, ThreadPoolExecutor(THREADS) as threads:
            block = source.block_nbytes
            count = len(self.data) // block

            def read_blocks(thread: int) -> bool:
                with _AlignedMemory(block) as memory:
                    for turn in range(16):
                        offset = (thread * 5 + turn * 7) % count * block
                        source.read_direct_into(offset, memory)
                        if memory != self.data[offset : offset + block]:
                            return False
                return True

            assert list(threads.map(read_blocks, range(THREADS))) == [True] * THREADS


class MappableSourceTests(SourceTests):
    """What every `MappableSource` does as well."""

    def make(self, data: bytes) -> MappableSource:
        """Open a source that holds `data`; the suite closes it."""
        raise NotImplementedError

    def mappable(self, data: bytes | None = None) -> contextlib.closing[MappableSource]:
        """As `opened`, with the type of the wider interface."""
        return contextlib.closing(self.make(self.data if data is None else data))

    def test_maps_all_bytes_copy_on_write(self) -> None:
        with self.mappable() as source:
            assert isinstance(source, MappableSource)
            view = source.map()
            assert view == self.data
            view[0] ^= 0xFF
            again = bytearray(len(self.data))
            source.read_into(0, memoryview(again))
            assert again == self.data
            del view

    def test_maps_nothing_of_an_empty_source(self) -> None:
        with self.mappable(b"") as source:
            assert source.map().nbytes == 0

    def test_a_slice_of_the_mapping_outlives_source_and_view(self) -> None:
        with self.mappable() as source:
            part = source.map()[4000:9000]
        assert part == self.data[4000:9000]

    def test_map_after_close_raises(self) -> None:
        source = self.make(self.data)
        source.close()
        assert error_of(SourceError, source.map).url == source.url


class FolderTests:
    """What every `Folder` does. Subclasses override `make` and `make_missing`."""

    def make(self, files: dict[str, bytes]) -> Folder:
        """Make a folder with these files and nothing else."""
        raise NotImplementedError

    def make_missing(self) -> Folder | None:
        """Make a folder whose place does not exist; None where every place exists."""
        return None

    def test_lists_its_files_sorted(self) -> None:
        folder = self.make({"b.safetensors": b"b", "a.safetensors": b"a", "config.json": b"{}", "B": b""})
        assert folder.names() == ["B", "a.safetensors", "b.safetensors", "config.json"]
        assert folder.url

    def test_lists_nothing_in_an_empty_folder(self) -> None:
        assert self.make({}).names() == []

    def test_opens_what_it_lists(self) -> None:
        files = {"model-00001-of-00002.safetensors": pattern(9000), "with space.bin": b"x", "größe#1%20.bin": b"y", "empty": b""}
        folder = self.make(files)
        for name in folder.names():
            with contextlib.closing(folder.open(name)) as source:
                assert source.nbytes == len(files[name])
                assert read(source, 0, source.nbytes) == files[name]
                assert source.url.startswith(folder.url)

    def test_opens_a_file_again(self) -> None:
        folder = self.make({"a": b"bytes"})
        with contextlib.closing(folder.open("a")) as first:
            with contextlib.closing(folder.open("a")) as second:
                assert first.version == second.version
                assert first.url == second.url
            assert read(first, 0, 5) == b"bytes"

    def test_a_missing_file_is_not_found(self) -> None:
        folder = self.make({"a": b""})
        error = error_of(SourceNotFoundError, folder.open, "b")
        assert isinstance(error, FileNotFoundError)
        assert error.url is not None
        assert error.url.startswith(folder.url)
        assert type(pickle.loads(pickle.dumps(error))) is type(error)

    def test_names_do_not_lead_out_of_it(self) -> None:
        folder = self.make({"a": b""})
        for name in ("", "..", "../a", "x/../../a", "/etc/passwd", "a\0", "a/b"):
            error_of(SourceError, folder.open, name)

    def test_a_missing_place_is_not_found(self) -> None:
        folder = self.make_missing()
        if folder is not None:
            assert error_of(SourceNotFoundError, folder.names).url
            error_of(SourceNotFoundError, folder.open, "a")


class _AlignedMemory:
    """Marked memory on a page boundary, for direct reads."""

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, max(nbytes, 1))
        self._view = memoryview(self._mapping)[:nbytes]
        self._view[:] = bytes([_MARK]) * nbytes

    def __enter__(self) -> memoryview:
        return self._view

    def __exit__(self, *_: object) -> None:
        self._view.release()
        # The mapping goes with its last reference: a failed test's traceback may still show a slice of it.
