"""What of a range is asked of the kernel: samples where they agree, all of it where they do not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.sources.base import is_in_memory
from headrace.sources.file import FileSource, _residency
from headrace.sources.memory import MemorySource

MIB = 1 << 20
RANGE = 64 * MIB


def kernel(cached: Callable[[int], bool], asked: list[tuple[int, int]]) -> Callable[[int, int, int], float | None]:
    """A page cache in which each page is or is not, and which notes what it is asked."""

    def share(_fd: int, offset: int, nbytes: int) -> float:
        asked.append((offset, nbytes))
        pages = range(offset // 4096, (offset + nbytes) // 4096)
        return sum(map(cached, pages)) / len(pages)

    return share


@pytest.mark.parametrize("everything", [True, False])
def test_where_all_samples_agree_nothing_else_is_asked(everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(_residency, "_cachestat_share", kernel(lambda _: everything, asked))
    assert _residency._range_share(3, RANGE, RANGE) == float(everything)
    assert sum(nbytes for _, nbytes in asked) == MIB // 2
    assert all(offset >= RANGE and offset + nbytes <= 2 * RANGE and not offset % 4096 for offset, nbytes in asked)


@pytest.mark.parametrize(
    ("cached", "share"),
    [
        (lambda page: page < 8192, 0.5),  # the first half
        (lambda page: page >= 2048, 0.875),  # all but the first eighth
        (lambda page: page // 2048 % 2 == 0, 0.5),  # every second eighth
        (lambda page: page % 8 != 0, 0.875),  # holes in every sample
    ],
)
def test_where_they_do_not_every_page_counts(
    cached: Callable[[int], bool], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(_residency, "_cachestat_share", kernel(cached, asked))
    assert _residency._range_share(3, 0, RANGE) == share
    assert asked[-1] == (0, RANGE)


def test_a_short_range_is_asked_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(_residency, "_cachestat_share", kernel(lambda _: True, asked))
    assert _residency._range_share(3, 4096, MIB) == 1.0
    assert asked == [(4096, MIB)]


def test_a_kernel_without_cachestat_is_not_taken_for_one_with_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_residency, "_cachestat_share", lambda *_: None)
    assert _residency._range_share(3, 0, RANGE) is None


def test_a_range_is_known_once_it_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(_residency, "_cachestat_share", kernel(lambda page: page < 16384, asked))  # the first 64 MiB
    residency = _residency.Residency(3 * RANGE, cachestat=True, mincore=False)
    assert residency.known(0, MIB) is None
    assert residency.mostly_cached(3, 0, MIB)
    assert not residency.mostly_cached(3, RANGE, MIB)
    seen = len(asked)
    assert (residency.known(RANGE - MIB, MIB), residency.known(RANGE, RANGE)) == (True, False)
    assert residency.known(RANGE - MIB, 2 * MIB) is None, "it lies in two"
    assert residency.known(2 * RANGE, MIB) is None
    assert len(asked) == seen


@pytest.mark.parametrize(
    ("cached", "all_of_it"),
    [(lambda _: True, True), (lambda page: page < 40_000, True), (lambda page: page < 32_768, False), (lambda _: False, False)],
    ids=["all", "nearly all", "two of three ranges", "nothing"],
)
def test_a_file_is_cached_where_every_range_is(
    cached: Callable[[int], bool], all_of_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_residency, "_cachestat_share", kernel(cached, []))
    residency = _residency.Residency(2 * RANGE + 32 * MIB, cachestat=True, mincore=False)
    assert residency.known_cached(3) is all_of_it


@pytest.mark.parametrize("first", [True, False], ids=["asked first", "known before"])
def test_a_file_of_which_the_kernel_does_not_say_is_not_known_to_be_cached(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_residency, "_cachestat_share", lambda *_: None)
    monkeypatch.setattr(_residency, "_nowait_share", lambda *_: None)
    residency = _residency.Residency(RANGE, cachestat=True, mincore=False)
    if not first:
        assert residency.mostly_cached(3, 0, MIB), "it is read the usual way"
    assert not residency.known_cached(3)


def test_files_on_tmpfs_and_files_just_written_are_in_memory(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(bytes(MIB))
        file.flush()
        assert is_in_memory(FileSource(file.name))
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    source = FileSource(path)
    known = source._residency._ask_cachestat and _residency._cachestat_share(source._descriptor.fd, 0, MIB) == 1.0
    assert is_in_memory(source) is known
    assert not is_in_memory(FileSource(path, direct_io="on"))
    assert is_in_memory(MemorySource(b"abc"))
    source.close()
    assert not is_in_memory(source)
