"""Bytes are checked before they are handed out: the manifest, the sources that check, and loads from files, a hub and S3."""

from __future__ import annotations

import base64
import hashlib
import json
import mmap
import os
import pickle
import sys
import threading
import types
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from budget import examples, rest_slow
from checkpoints import KIB, MIB, Contents, bytes_of, random_contents, random_entry, serialize, value_of, wrong
from hub_server import serving
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace._block_cache import BlockCache
from headrace._digests import Digest, digest_of
from headrace._integrity import VerifiedSource, verified
from headrace._ledgers import KnownBlocks, LearnedBlocks, Subject
from headrace._limits import NETWORK_CHUNK_NBYTES, abilities_of, resolve_limits
from headrace._manifest import (
    HEAD_NBYTES,
    MANIFEST_NAME,
    PAGE_NBYTES,
    Blocks,
    FileDigests,
    Manifest,
    head_nbytes_of,
    manifest_of,
    parse_manifest,
)
from headrace._options import Options
from headrace._plan import CHUNK_NBYTES, LARGE_NBYTES, PAGE, SourceAbilities
from headrace._routes import choose_route, read_unit
from headrace._verification import Verification
from headrace.errors import (
    FormatError,
    HeadraceError,
    IntegrityError,
    LoadError,
    OptionError,
    SourceChangedError,
    SourceError,
    SourceNotFoundError,
    SourceTimeoutError,
)
from headrace.sources.base import ByteSource, aligned_source, is_remote
from headrace.sources.file import FileSource
from headrace.sources.http import Headers
from headrace.sources.memory import MemorySource
from headrace.sources.s3 import S3Credentials, open_s3
from headrace.sources.s3._store import parse_checksums
from headrace.testing import AlignedSourceTests, Fault, FaultySource, Flip, Raise, SourceTests, nth_read, touches
from headrace.testing.s3server import Bucket, LyingRange, Replaced, Rule, S3Server, Status
from headrace.testing.s3server import Flip as ServerFlip
from headrace.testing.sources import pattern, read

BLOCK, HEAD = 16 * KIB, 8 * KIB
NAME = "model.safetensors"


# -- made by other means than headrace's own -------------------------------------------------------------------------------------


def edges_of(nbytes: int, block: int = BLOCK, head: int = HEAD) -> list[int]:
    """Where blocks begin, and the end of the file."""
    inner = [at for at in range(0, nbytes, block) if at > head]
    return [0, *([head] if head < nbytes else []), *inner, nbytes] if nbytes else [0]


def entry_of(data: bytes, block: int = BLOCK, head: int = HEAD) -> dict[str, Any]:
    edges = edges_of(len(data), block, head)
    blocks = [hashlib.sha256(data[start:end]).hexdigest() for start, end in pairwise(edges)]
    whole = hashlib.sha256(data).hexdigest()
    return {"nbytes": len(data), "head_nbytes": min(head, len(data)), "sha256": whole, "blocks": blocks}


def manifest_for(files: Mapping[str, bytes], block: int = BLOCK, head: int = HEAD) -> dict[str, Any]:
    entries = {name: entry_of(data, block, head) for name, data in files.items()}
    return {"format": "headrace.manifest", "version": 1, "block_nbytes": block, "files": entries}


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0x10
    return bytes(changed)


def known(source: ByteSource, data: bytes, cache: BlockCache | None = None, **cut: int) -> VerifiedSource:
    """A source that is checked against the blocks of `data`."""
    entry = entry_of(data, **cut)
    blocks = Blocks(len(data), entry["head_nbytes"], cut.get("block", BLOCK))
    ledger = KnownBlocks(Subject(source.url, "a manifest"), blocks, tuple(entry["blocks"]))
    return verified(source, ledger, cache or BlockCache(), checked_by="blocks")


def learned(source: ByteSource, data: bytes, cache: BlockCache | None = None, algorithm: str = "sha256") -> VerifiedSource:
    """A source that is checked against the digest of all of `data`."""
    digest = Digest(algorithm, hashlib.new(algorithm, data).hexdigest(), "the hub")
    ledger = LearnedBlocks(Subject(source.url, "the hub"), Blocks(source.nbytes, min(HEAD, source.nbytes), BLOCK), digest)
    return verified(source, ledger, cache or BlockCache(), checked_by="the whole file")


KINDS = {"known": known, "learned": learned}


# -- manifests -------------------------------------------------------------------------------------------------------------------


@given(nbytes=st.integers(0, 400_000), pages=st.integers(1, 16), head=st.integers(1, 24).map(lambda pages: pages * PAGE_NBYTES))
def test_blocks_cover_every_byte_once_and_end_at_multiples(nbytes: int, pages: int, head: int) -> None:
    cut = Blocks(nbytes, min(head, nbytes), pages * PAGE_NBYTES)
    bounds = [cut.bounds(block) for block in range(cut.count)]
    edges = edges_of(nbytes, cut.block_nbytes, min(head, nbytes))
    assert bounds == list(pairwise(edges))
    for block, (start, end) in enumerate(bounds):
        assert cut.at(start) == cut.at(end - 1) == block


@pytest.mark.parametrize(
    ("first", "nbytes", "is_shard", "head"),
    [
        (b"", 0, True, 0),
        (b"\x05", 1, True, 1),
        ((100).to_bytes(8, "little"), 1 << 20, True, HEAD_NBYTES),
        ((70_000).to_bytes(8, "little"), 1 << 20, True, 73_728),
        ((70_000).to_bytes(8, "little"), 1 << 20, False, HEAD_NBYTES),
        ((70_000).to_bytes(8, "little"), 70_008, True, 70_008),
        (b"\xff" * 8, 1 << 20, True, HEAD_NBYTES),
    ],
)
def test_head_holds_the_whole_header(first: bytes, nbytes: int, is_shard: bool, head: int) -> None:
    assert head_nbytes_of(first, nbytes=nbytes, is_shard=is_shard) == head


FILES = st.dictionaries(
    st.sampled_from(["a.safetensors", "sub/b.bin", "c", "ü重み.json"]), st.binary(max_size=3 * BLOCK // 2), max_size=3
)


@given(files=FILES)
@settings(max_examples=examples(30))
def test_manifest_reads_what_it_writes(files: dict[str, bytes]) -> None:
    given_ = manifest_of(manifest_for(files), url="m")
    assert parse_manifest(given_.to_json(), url="m") == given_
    assert json.loads(given_.to_json()) == manifest_for(files)


def _changed(path: str, value: Any) -> bytes:
    whole: Any = manifest_for({NAME: b"x" * (BLOCK + 1)})
    *parents, last = path.split("/")
    at = whole
    for key in parents:
        at = at[key]
    if value is KeyError:
        del at[last]
    else:
        at[last] = value
    return json.dumps(whole).encode()


def _in_file(key: str, value: Any) -> bytes:
    return _changed(f"files/{NAME}/{key}", value)


VALID = json.dumps(manifest_for({NAME: b"x" * (BLOCK + 1)})).encode()
DIGEST = "0" * 64
NONSENSE = {
    "nothing": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"format": "\xff"}',
    "deep": b"[" * 100_000,
    "NaN": VALID.replace(b'"version": 1', b'"version": NaN'),
    "a list": b"[]",
    "another format": _changed("format", "headrace.index"),
    "no format": _changed("format", KeyError),
    "a newer version": _changed("version", 2),
    "true as version": _changed("version", True),
    "a float as version": _changed("version", 1.0),
    "a huge number": VALID.replace(b'"version": 1', b'"version": ' + b"1" * 5000),
    "an unknown key": _changed("comment", "x"),
    "no files": _changed("files", KeyError),
    "a list of files": _changed("files", []),
    "block of 0": _changed("block_nbytes", 0),
    "negative block": _changed("block_nbytes", -4096),
    "block of odd length": _changed("block_nbytes", 4097),
    "block too long": _changed("block_nbytes", 1 << 40),
    "block as text": _changed("block_nbytes", "4096"),
    "blocks of another length": _changed("block_nbytes", 4 * KIB),
    "key twice": VALID.replace(b'"version": 1', b'"version": 1, "version": 1'),
    "file twice": VALID.replace(b'"files": {', f'"files": {{"{NAME}": 1, '.encode()),
    "entry no object": _changed(f"files/{NAME}", 5),
    "unknown key of a file": _in_file("mtime", 1),
    "no size": _in_file("nbytes", KeyError),
    "negative size": _in_file("nbytes", -1),
    "true as size": _in_file("nbytes", True),
    "float as size": _in_file("nbytes", float(BLOCK + 1)),
    "another size": _in_file("nbytes", 3 * BLOCK),
    "no head": _in_file("head_nbytes", 0),
    "head past the end": _in_file("head_nbytes", 2 * BLOCK),
    "head of odd length": _in_file("head_nbytes", 4095),
    "one block less": _in_file("blocks", [DIGEST] * 2),
    "one block more": _in_file("blocks", [DIGEST] * 4),
    "blocks no list": _in_file("blocks", DIGEST),
    "digest too short": _in_file("blocks", [DIGEST, DIGEST, DIGEST[1:]]),
    "digest in capitals": _in_file("blocks", [DIGEST, DIGEST, "A" * 64]),
    "digest a number": _in_file("blocks", [DIGEST, DIGEST, 7]),
    "no digest": _in_file("sha256", None),
    "digest with a line end": _in_file("sha256", DIGEST + "\n"),
    **{
        f"name {name!r}": VALID.replace(json.dumps(NAME).encode(), json.dumps(name).encode())
        for name in ("", ".", "..", "/etc/passwd", "../x", "a//b", "a/../b", "a\\b", "a\0b", "C:x", "\ud800", MANIFEST_NAME)
    },
}


def test_the_valid_manifest_of_the_table_is_valid() -> None:
    assert parse_manifest(VALID, url="m").files[NAME].cut == Blocks(BLOCK + 1, HEAD, BLOCK)


@pytest.mark.parametrize("text", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused(text: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        parse_manifest(text, url="there/manifest")
    assert caught.value.url == "there/manifest"
    assert len(str(caught.value)) < 400


@given(at=st.integers(0, len(VALID) - 1), byte=st.integers(0, 255))
@settings(max_examples=examples(300))
def test_a_damaged_manifest_is_refused_or_still_a_manifest(at: int, byte: int) -> None:
    text = VALID[:at] + bytes([byte]) + VALID[at + 1 :]
    try:
        found = parse_manifest(text, url="m")
    except FormatError:
        return
    assert isinstance(found, Manifest)
    for digests in found.files.values():
        assert isinstance(digests, FileDigests)
        assert len(digests.blocks) == digests.cut.count


# -- planning --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "block", "nbytes", "unit"),
    [
        (CHUNK_NBYTES, 0, MIB, (CHUNK_NBYTES, PAGE)),
        (CHUNK_NBYTES, 0, LARGE_NBYTES, (2 * CHUNK_NBYTES, PAGE)),
        (CHUNK_NBYTES, 16 * MIB, LARGE_NBYTES, (16 * MIB, 16 * MIB)),
        (NETWORK_CHUNK_NBYTES, 4 * MIB, MIB, (NETWORK_CHUNK_NBYTES, 4 * MIB)),
        (NETWORK_CHUNK_NBYTES, 3 * MIB, LARGE_NBYTES, (6 * MIB, 3 * MIB)),
    ],
)
def test_reads_are_whole_blocks_where_they_are_verified(chunk: int, block: int, nbytes: int, unit: tuple[int, int]) -> None:
    assert read_unit(SourceAbilities("file", chunk_nbytes=chunk, block_nbytes=block), nbytes) == unit


def test_planned_reads_end_at_blocks(tmp_path: Path) -> None:
    data = serialize(random_contents(300_000, 9 * MIB, 100))
    (tmp_path / NAME).write_bytes(data)
    plan = headrace.plan(tmp_path, verify=manifest_for({NAME: data}, block=MIB))
    for span in plan.spans:
        ends = [read.offset + read.nbytes for read in plan.reads[span.first_read : span.last_read - 1]]
        assert all(end % MIB == 0 for end in ends)
    assert max(span.last_read - span.first_read for span in plan.spans) > 1


def test_what_is_in_flight_over_a_network_has_room() -> None:
    abilities = [SourceAbilities("network", block_nbytes=16 * MIB)]
    limits = resolve_limits(Options(), abilities, largest=[MIB, MIB], nbytes=MIB)
    assert limits.memory_limit >= limits.concurrency * 16 * MIB


def test_route_says_how_it_is_verified() -> None:
    assert choose_route(SourceAbilities("memory", verified="by hand"), 1)[1].endswith("; verified: by hand")
    assert "verified" not in choose_route(SourceAbilities("memory"), 1)[1]


# -- sources that check ----------------------------------------------------------------------------------------------------------


class TestKnownBlocks(SourceTests):
    def make(self, data: bytes) -> ByteSource:
        return known(MemorySource(data), data)


class TestLearnedBlocks(SourceTests):
    def make(self, data: bytes) -> ByteSource:
        return learned(MemorySource(data), data)


class _OnDisk(AlignedSourceTests):
    kind = staticmethod(known)

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, data: bytes) -> Any:
        path = self.folder / f"{len(data)}"
        if not path.exists():
            path.write_bytes(data)
        return self.kind(FileSource(path, direct_io="on"), data)


class TestKnownBlocksOnDisk(_OnDisk): ...


class TestLearnedBlocksOnDisk(_OnDisk):
    kind = staticmethod(learned)


DATA = pattern(5 * BLOCK + 777)
POSITIONS = sorted({0, 7, HEAD - 1, len(DATA) - 1, *(edge + step for edge in edges_of(len(DATA))[1:-1] for step in (-1, 0, 1))})


@pytest.mark.parametrize("at", POSITIONS)
def test_a_flipped_bit_is_found_and_its_block_named(at: int) -> None:
    source = known(MemorySource(flipped(DATA, at), url="there"), DATA)
    edges = edges_of(len(DATA))
    block = max(i for i, edge in enumerate(edges[:-1]) if edge <= at)
    with pytest.raises(IntegrityError) as caught:
        read(source, 0, len(DATA))
    error = caught.value
    start, end = edges[block], edges[block + 1]
    assert (error.url, error.block, error.offset, error.nbytes) == ("there", block, start, end - start)
    assert error.expected == hashlib.sha256(DATA[start:end]).hexdigest()
    assert error.found == hashlib.sha256(flipped(DATA, at)[start:end]).hexdigest()
    assert pickle.loads(pickle.dumps(error)).block == block
    assert read(source, 0, start) == DATA[:start]
    assert read(source, end, len(DATA) - end) == DATA[end:]


@pytest.mark.parametrize("at", POSITIONS)
def test_a_flipped_bit_is_found_by_the_digest_of_the_file(at: int) -> None:
    source = learned(MemorySource(flipped(DATA, at), url="there"), DATA)
    with pytest.raises(IntegrityError) as caught:
        read(source, 0, len(DATA))
    error = caught.value
    assert (error.url, error.block, error.offset, error.nbytes) == ("there", None, 0, len(DATA))
    assert error.expected == hashlib.sha256(DATA).hexdigest()
    assert error.found == hashlib.sha256(flipped(DATA, at)).hexdigest()
    with pytest.raises(IntegrityError):
        source.confirm()
    with pytest.raises(IntegrityError):
        read(source, 5, 5)


@given(
    at=st.integers(0, len(DATA) - 1),
    ranges=st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, 3 * BLOCK)), min_size=1, max_size=6),
    keep=st.sampled_from([0, BLOCK, 1 << 20]),
)
@settings(max_examples=examples(150))
def test_reads_raise_if_and_only_if_they_touch_a_damaged_block(at: int, ranges: list[tuple[int, int]], keep: int) -> None:
    source = known(MemorySource(flipped(DATA, at)), DATA, BlockCache(keep))
    edges = edges_of(len(DATA))
    block = max(i for i, edge in enumerate(edges[:-1]) if edge <= at)
    for offset, length in ranges:
        nbytes = min(length, len(DATA) - offset)
        if nbytes and offset < edges[block + 1] and offset + nbytes > edges[block]:
            with pytest.raises(IntegrityError):
                read(source, offset, nbytes)
        else:
            assert read(source, offset, nbytes) == DATA[offset : offset + nbytes]


@given(ranges=st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, 3 * BLOCK)), min_size=1, max_size=6))
@settings(max_examples=examples(100))
def test_any_order_of_reads_learns_the_same_file(ranges: list[tuple[int, int]]) -> None:
    source = learned(MemorySource(DATA), DATA)
    for offset, length in ranges:
        nbytes = min(length, len(DATA) - offset)
        assert read(source, offset, nbytes) == DATA[offset : offset + nbytes]
    source.confirm()
    assert isinstance(source.ledger, LearnedBlocks)
    assert source.ledger.found == hashlib.sha256(DATA).hexdigest()
    assert source.ledger.digests == entry_of(DATA)["blocks"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_many_threads_get_the_right_bytes(kind: Any) -> None:
    behind = FaultySource(MemorySource(DATA))
    source = kind(behind, DATA, BlockCache(BLOCK))
    ranges = [(i * 1777 % len(DATA), 1 + i * 7919 % (2 * BLOCK)) for i in range(200)]
    ranges = [(offset, min(nbytes, len(DATA) - offset)) for offset, nbytes in ranges]
    with ThreadPoolExecutor(8, thread_name_prefix="headrace-test") as pool:
        found = list(pool.map(lambda pair: read(source, *pair), ranges))
    assert found == [DATA[offset : offset + nbytes] for offset, nbytes in ranges]
    source.confirm()


def test_whole_blocks_are_checked_where_they_land_and_edges_are_read_once() -> None:
    behind = FaultySource(MemorySource(DATA))
    source = known(behind, DATA)
    read(source, 2 * BLOCK, 2 * BLOCK)
    assert [(call.offset, call.nbytes) for call in behind.calls] == [(2 * BLOCK, 2 * BLOCK)]
    for offset in range(BLOCK + 5, 2 * BLOCK - 100, 1000):
        read(source, offset, 100)
    assert [(call.offset, call.nbytes) for call in behind.calls[1:]] == [(BLOCK, BLOCK)]


def test_the_head_is_kept() -> None:
    behind = FaultySource(MemorySource(DATA))
    source = known(behind, DATA, BlockCache(0))
    for _ in range(3):
        read(source, 0, 100)
        read(source, BLOCK, BLOCK)
        read(source, 3 * BLOCK + 1, 1)
    assert sum(call.offset == 0 for call in behind.calls) == 1


def test_the_cache_keeps_no_more_than_it_may() -> None:
    cache = BlockCache(2 * BLOCK)
    behind = FaultySource(MemorySource(DATA))
    source = known(behind, DATA, cache)
    for block in (1, 2, 3, 4):
        read(source, block * BLOCK + 1, 1)
    before = behind.read_count
    read(source, 4 * BLOCK + 9, 1)
    assert behind.read_count == before
    read(source, 1 * BLOCK + 9, 1)
    assert behind.read_count == before + 1


def test_a_closed_source_leaves_nothing_in_the_cache() -> None:
    cache = BlockCache()
    source = known(MemorySource(DATA), DATA, cache)
    read(source, BLOCK + 1, 1)
    source.close()
    assert not cache._entries


def test_a_block_that_could_not_be_read_is_read_again() -> None:
    behind = FaultySource(MemorySource(DATA), [Fault(nth_read(0), Raise(SourceTimeoutError)), Fault(nth_read(1), Flip())])
    source = known(behind, DATA)
    with pytest.raises(SourceTimeoutError):
        read(source, BLOCK + 1, 1)
    with pytest.raises(IntegrityError):
        read(source, BLOCK + 1, 1)
    assert read(source, BLOCK + 1, 1) == DATA[BLOCK + 1 : BLOCK + 2]


def test_what_nobody_reads_is_read_for_the_digest_once() -> None:
    behind = FaultySource(MemorySource(DATA))
    source = learned(behind, DATA)
    assert read(source, 3 * BLOCK, BLOCK) == DATA[3 * BLOCK : 4 * BLOCK]
    source.confirm()
    assert behind.asked_nbytes == len(DATA)
    source.confirm()
    assert behind.asked_nbytes == len(DATA)


@pytest.mark.parametrize("offset", [0, 3 * BLOCK, BLOCK + 17], ids=["head", "whole block", "part of a block"])
def test_what_is_read_again_has_to_be_the_same(offset: int) -> None:
    behind = FaultySource(MemorySource(DATA))
    source = learned(behind, DATA, BlockCache(0))
    source.confirm()
    source._head = None
    behind._faults = (Fault(lambda _: True, Flip(position=-1)),)
    with pytest.raises(IntegrityError):
        read(source, offset, BLOCK)


def test_a_failed_read_does_not_stop_those_that_wait_for_their_turn() -> None:
    behind = FaultySource(MemorySource(DATA), [Fault(nth_read(0), Raise(SourceTimeoutError))])
    source = learned(behind, DATA)
    with pytest.raises(SourceTimeoutError):
        read(source, 0, BLOCK)
    assert read(source, BLOCK, BLOCK) == DATA[BLOCK : 2 * BLOCK]


def test_closing_wakes_those_that_wait_for_their_turn() -> None:
    started, release = threading.Event(), threading.Event()

    class Held(MemorySource):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            if offset == 0:
                started.set()
                release.wait()
            super().read_into(offset, buffer)

    source = learned(Held(DATA), DATA)
    with ThreadPoolExecutor(2, thread_name_prefix="headrace-test") as pool:
        first = pool.submit(read, source, 0, HEAD)
        started.wait()
        second = pool.submit(read, source, BLOCK, BLOCK)
        source.close()
        assert isinstance(second.exception(timeout=30), SourceError)
        release.set()
        assert isinstance(first.exception(timeout=30), SourceError)


@pytest.mark.parametrize("nbytes", [0, 1, HEAD - 1, HEAD, HEAD + 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_files_of_every_length_are_checked(kind: Any, nbytes: int) -> None:
    data = DATA[:nbytes]
    good = kind(MemorySource(data), data)
    assert read(good, 0, nbytes) == data
    good.confirm()
    if nbytes:
        with pytest.raises(IntegrityError):
            read(kind(MemorySource(flipped(data, nbytes - 1)), data), 0, nbytes)


def test_an_empty_file_that_should_not_be_one_is_found() -> None:
    with pytest.raises(IntegrityError):
        learned(MemorySource(b""), b"x")


@pytest.mark.parametrize("algorithm", ["sha256", "sha1", "md5"])
def test_other_digests_of_whole_files_serve_as_well(algorithm: str) -> None:
    read(learned(MemorySource(DATA), DATA, algorithm=algorithm), 0, len(DATA))
    with pytest.raises(IntegrityError):
        read(learned(MemorySource(flipped(DATA, 5)), DATA, algorithm=algorithm), 0, len(DATA))


class Summed(MemorySource):
    """A source whose store tells checksums."""

    def __init__(self, data: bytes, checksums: dict[str, str]) -> None:
        super().__init__(data, url="s3://bucket/model.safetensors")
        self.checksums = checksums


def test_the_best_checksum_that_can_be_computed_counts() -> None:
    assert digest_of(Summed(b"", {"crc64nvme": "00" * 8})) is None
    assert digest_of(Summed(b"", {"crc32": "DEADBEEF", "crc32c": "0"})) == Digest("crc32", "deadbeef", "the store")
    assert digest_of(Summed(b"", {"crc32": "0", "sha256": "1"})) == Digest("sha256", "1", "the store")
    assert digest_of(MemorySource(b"")) is None


def test_crc32_of_the_store_is_checked() -> None:
    contents = random_contents(100_000, 5)
    data = serialize(contents)
    sums = {"crc32": f"{zlib.crc32(data):08x}"}
    assert not wrong(headrace.load(Summed(data, sums), verify=True), contents)
    with pytest.raises(IntegrityError) as caught:
        headrace.load(Summed(flipped(data, len(data) - 1), sums), verify=True)
    assert caught.value.expected == sums["crc32"]


def test_abilities_are_those_of_the_source_behind(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(DATA)

    class Remote(MemorySource):
        traffic = "counted"

    disk = known(FileSource(tmp_path / "f"), DATA)
    assert aligned_source(disk) is not None
    assert not is_remote(disk)
    remote = known(Remote(DATA), DATA)
    assert is_remote(remote)
    assert aligned_source(remote) is None
    assert remote.traffic == "counted"  # type: ignore[attr-defined]
    assert abilities_of(remote, mapped=False).kind == "network"
    ability = abilities_of(disk, mapped=False)
    assert (ability.kind, ability.verified, ability.block_nbytes) == ("file", "blocks", BLOCK)
    assert aligned_source(known(MemorySource(DATA), DATA)) is None
    disk.close()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("at", [HEAD, 2 * BLOCK + 1, len(DATA) - 1])
def test_direct_reads_are_checked_where_they_land(tmp_path: Path, kind: Any, at: int) -> None:
    (tmp_path / "f").write_bytes(flipped(DATA, at))
    source = kind(FileSource(tmp_path / "f", direct_io="on"), DATA)
    with mmap.mmap(-1, 6 * BLOCK) as memory:
        view = memoryview(memory)
        with pytest.raises(IntegrityError):
            source.read_direct_into(0, view[: -(-len(DATA) // PAGE) * PAGE])
        if kind is known:
            source.read_direct_into(3 * BLOCK + PAGE, view[: 2 * PAGE])
            assert view[: 2 * PAGE] == DATA[3 * BLOCK + PAGE :][: 2 * PAGE]
            with pytest.raises(IntegrityError):
                source.read_direct_into(at // PAGE * PAGE, view[:PAGE])
        view.release()
    source.close()


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_file_that_was_rewritten_is_said_to_have_changed(tmp_path: Path, kind: Any, direct: bool) -> None:
    # Found by the soak: what was wrong was the version, and the digest of a block was named.
    (tmp_path / "f").write_bytes(DATA)
    source = kind(FileSource(tmp_path / "f", direct_io="on"), DATA)
    (tmp_path / "f").write_bytes(flipped(DATA, len(DATA) - 1))
    os.utime(tmp_path / "f", (0, 0))

    view = memoryview(mmap.mmap(-1, -(-len(DATA) // PAGE) * PAGE))

    def read_all() -> None:
        if direct:
            source.read_direct_into(0, view)
        else:
            source.read_into(0, view[: len(DATA)])
        source.confirm()

    with pytest.raises(SourceChangedError) as raised:
        read_all()
    assert isinstance(raised.value.__cause__, IntegrityError)
    source.close()


def test_no_direct_reads_where_blocks_do_not_begin_at_their_units(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(DATA)

    class Coarse(FileSource):
        block_nbytes = 2 * BLOCK  # type: ignore[assignment]

    fine, coarse = (known(kind(tmp_path / "f", direct_io="on"), DATA) for kind in (FileSource, Coarse))
    assert not coarse.prefers_direct(0, 100)  # type: ignore[attr-defined]
    fine.close()
    coarse.close()


# -- loads -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def contents() -> Contents:
    """Tensors of all sizes around a block of 16 KiB."""
    found = random_contents(100, 20_000, 5, 70_000, 300, 0, 50_001)
    found["matrix"] = random_entry("F32", (300, 64), seed=50)
    found["last"] = random_entry("F32", (77,), seed=51)
    return found


class Model:
    """A folder of two shards with an index and a manifest."""

    def __init__(self, folder: Path, contents: Contents, *, block: int = BLOCK, head: int = HEAD) -> None:
        self.folder, self.contents = folder, contents
        folder.mkdir()
        names = list(contents)
        self.parts = {
            f"model-0000{i + 1}-of-00002.safetensors": {name: contents[name] for name in part}
            for i, part in enumerate((names[:4], names[4:]))
        }
        self.files = {file: serialize(part) for file, part in self.parts.items()}
        weight_map = {name: file for file, part in self.parts.items() for name in part}
        self.files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        self.manifest = manifest_for(self.files, block, head)
        (folder / MANIFEST_NAME).write_text(json.dumps(self.manifest))

    @property
    def shards(self) -> list[str]:
        return list(self.parts)

    def flip(self, name: str, at: int) -> None:
        (self.folder / name).write_bytes(flipped(self.files[name], at))


@pytest.fixture
def model(tmp_path: Path, contents: Contents) -> Model:
    return Model(tmp_path / "model", contents)


def test_a_verified_load_is_right_and_says_so(model: Model) -> None:
    with headrace.stream(model.folder, verify=True) as stream:
        tensors = dict(stream)
    assert not wrong(tensors, model.contents)
    total = sum(len(data) for name, data in model.files.items() if name.endswith(".safetensors"))
    assert stream.stats.verified_nbytes >= total
    assert all("verified: SHA-256 of blocks of 16 KiB" in reason for _, _, reason in stream.stats.routes)
    assert "verified: SHA-256" in str(headrace.plan(model.folder, verify=True))
    assert headrace.Snapshot(**stream.stats.as_dict()).verified_nbytes == stream.stats.verified_nbytes


def test_without_verify_nothing_is_checked(model: Model) -> None:
    model.flip(model.shards[0], len(model.files[model.shards[0]]) - 1)
    with headrace.stream(model.folder) as stream:
        assert wrong(dict(stream), model.contents)
    assert stream.stats.verified_nbytes == 0
    assert not any("verified" in reason for _, _, reason in stream.stats.routes)


def test_a_flip_anywhere_in_a_shard_ends_the_load(model: Model) -> None:
    for shard in model.shards:
        data = model.files[shard]
        for at in {0, 9, HEAD - 1, *(edge + step for edge in edges_of(len(data))[1:-1] for step in (-1, 0)), len(data) - 1}:
            model.flip(shard, at)
            with pytest.raises((IntegrityError, FormatError)) as caught:
                headrace.load(model.folder, verify=True)
            assert isinstance(caught.value, IntegrityError), at
            assert caught.value.url == str(model.folder / shard)
        (model.folder / shard).write_bytes(data)
    assert not wrong(headrace.load(model.folder, verify=True), model.contents)


def test_no_wrong_tensor_is_handed_out_and_those_of_the_block_are_named(model: Model) -> None:
    shard = model.shards[0]
    info = headrace.open(model.folder)["t003"]
    model.flip(shard, info.offset + info.nbytes - 1)
    got: dict[str, torch.Tensor] = {}
    with pytest.raises(IntegrityError) as caught, headrace.stream(model.folder, verify=True) as stream:
        got.update(stream)
    assert "t003" not in got
    assert not wrong(got, model.contents)
    assert caught.value.tensors == ("t003",)
    assert "'t003'" in str(caught.value)


def test_the_index_is_checked_as_well(model: Model) -> None:
    text = model.files["model.safetensors.index.json"]
    (model.folder / "model.safetensors.index.json").write_bytes(text.replace(b'"t003"', b'"t0O3"'))
    with pytest.raises(IntegrityError) as caught:
        headrace.open(model.folder, verify=True)
    assert str(caught.value.url).endswith("index.json")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: data[:-1], id="truncated"),
        pytest.param(lambda data: data + b"\0", id="longer"),
        pytest.param(lambda _: b"", id="empty"),
        pytest.param(
            lambda data: data[:BLOCK] + data[2 * BLOCK : 3 * BLOCK] + data[BLOCK : 2 * BLOCK] + data[3 * BLOCK :], id="swapped"
        ),
    ],
)
def test_a_file_of_another_size_or_order_is_refused(model: Model, change: Any) -> None:
    path = model.folder / model.shards[0]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(IntegrityError):
        headrace.load(model.folder, verify=True)


def test_a_tampered_manifest_does_not_pass_for_the_right_one(model: Model) -> None:
    path = model.folder / MANIFEST_NAME
    entry = model.manifest["files"][model.shards[1]]
    entry["blocks"][2] = "0" * 64
    path.write_text(json.dumps(model.manifest))
    with pytest.raises(IntegrityError) as caught:
        headrace.load(model.folder, verify=True)
    assert (caught.value.block, caught.value.expected) == (2, "0" * 64)
    path.write_text("{}")
    with pytest.raises(FormatError):
        headrace.load(model.folder, verify="auto")


def test_a_shard_that_the_manifest_does_not_list_is_refused(model: Model) -> None:
    del model.manifest["files"][model.shards[0]]
    with pytest.raises(IntegrityError):
        headrace.open(model.folder, verify=model.manifest)


def test_a_shard_that_the_manifest_lists_and_is_gone_is_missed(tmp_path: Path) -> None:
    files = {name: serialize(random_contents(10)) for name in ("a.safetensors", "b.safetensors")}
    (tmp_path / "a.safetensors").write_bytes(files["a.safetensors"])
    headrace.open(tmp_path).close()
    with pytest.raises(IntegrityError):
        headrace.open(tmp_path, verify=manifest_for(files))


@pytest.mark.parametrize("ownership", ["leased", "copied", "borrowed"])
@pytest.mark.parametrize("memory_limit", [0, None, -1])
@pytest.mark.parametrize("direct_io", ["off", "on"])
def test_every_way_of_loading_is_verified(model: Model, ownership: Any, memory_limit: int | None, direct_io: str) -> None:
    options = {"memory_limit": memory_limit, "direct_io": direct_io, "concurrency": 3}
    with headrace.stream(model.folder, verify=True, ownership=ownership, **options) as stream:
        for name, tensor in stream:
            assert bytes_of(tensor) == model.contents[name].data
            del tensor


def test_slices_casts_given_memory_and_subsets_are_right_and_checked(model: Model) -> None:
    whole = value_of(model.contents["matrix"])
    given_ = {"matrix": torch.zeros(300, 64), "last": torch.zeros(77, dtype=torch.float64)}
    requests: list[dict[str, Any]] = [
        {"slices": {"matrix": (slice(None), slice(0, 8))}, "names": "matrix"},
        {"slices": {"matrix": slice(100, 200)}, "names": "matrix"},
        {"slices": {"matrix": slice(None, None, -3)}, "names": ["matrix", "last"]},
        {"dtype": "bfloat16"},
        {"into": given_, "names": ["matrix", "last"]},
        {"names": "t00*"},
    ]
    expected = [
        {"matrix": whole[:, 0:8]},
        {"matrix": whole[100:200]},
        {"matrix": whole[torch.arange(299, -1, -3)], "last": value_of(model.contents["last"])},
        {"matrix": whole.bfloat16()},
        {"matrix": whole, "last": value_of(model.contents["last"]).double()},
        {"t001": value_of(model.contents["t001"])},
    ]
    for request, tensors in zip(requests, expected, strict=True):
        found = headrace.load(model.folder, verify=True, **request)
        for name, tensor in tensors.items():
            assert bytes_of(found[name]) == bytes_of(tensor), request
    info = headrace.open(model.folder)["matrix"]
    model.flip(model.shards[1], info.offset + info.nbytes // 2)
    for request in requests[:5]:
        with pytest.raises((IntegrityError, LoadError)) as caught:
            headrace.load(model.folder, verify=True, **request)
        assert isinstance(caught.value if isinstance(caught.value, IntegrityError) else caught.value.__cause__, IntegrityError)
    assert not wrong(headrace.load(model.folder, verify=True, names="t00[0-3]"), model.contents)


def test_one_tensor_is_read_checked(model: Model) -> None:
    with headrace.open(model.folder, verify=True) as checkpoint:
        assert bytes_of(headrace.read(checkpoint, "t003")) == model.contents["t003"].data
    info = headrace.open(model.folder)["t003"]
    model.flip(model.shards[0], info.offset + info.nbytes - 1)
    with headrace.open(model.folder, verify=True) as checkpoint, pytest.raises(IntegrityError):
        headrace.read(checkpoint, "t003")


def test_an_open_checkpoint_is_verified_or_not_since_it_was_opened(model: Model) -> None:
    with headrace.open(model.folder, verify=True) as checkpoint:
        for verify in (None, True, "require", "auto"):
            assert not wrong(headrace.load(checkpoint, verify=verify), model.contents)
        with pytest.raises(OptionError):
            headrace.load(checkpoint, verify=model.manifest)
    with headrace.open(model.folder) as checkpoint, pytest.raises(OptionError) as caught:
        headrace.load(checkpoint, verify=True)
    assert caught.value.option == "verify"


def test_a_single_file_and_a_list_find_the_manifest_beside_them(model: Model) -> None:
    first, second = (model.folder / shard for shard in model.shards)
    assert not wrong(headrace.load(first, verify=True), model.contents)
    assert len(headrace.load([first, second], verify=True)) == len(model.contents)
    model.flip(model.shards[1], len(model.files[model.shards[1]]) - 1)
    assert not wrong(headrace.load(first, verify=True), model.contents)
    for url in (second, [first, second]):
        with pytest.raises(IntegrityError):
            headrace.load(url, verify=True)


def test_verify_takes_a_manifest_in_every_form(model: Model, tmp_path: Path) -> None:
    path = model.folder / MANIFEST_NAME
    elsewhere = tmp_path / "m.json"
    path.rename(elsewhere)
    for verify in (elsewhere, str(elsewhere), elsewhere.as_uri(), json.loads(elsewhere.read_text())):
        assert not wrong(headrace.load(model.folder, verify=verify), model.contents)
    elsewhere.rename(tmp_path / MANIFEST_NAME)
    assert not wrong(headrace.load(model.folder, verify=tmp_path), model.contents)
    for verify in (None, False):
        assert headrace.load(model.folder, verify=verify)


@pytest.mark.parametrize("verify", [7, b"x", 1.5, ["a"]], ids=str)
def test_what_verify_does_not_take_is_an_option_error(model: Model, verify: Any) -> None:
    with pytest.raises(OptionError) as caught:
        headrace.open(model.folder, verify=verify)
    assert caught.value.option == "verify"


def test_a_manifest_that_is_not_there_is_not_found(model: Model, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError):
        headrace.open(model.folder, verify=tmp_path / "none.json")


@pytest.mark.parametrize("verify", [True, "require"])
@pytest.mark.parametrize("verb", [headrace.open, headrace.plan, headrace.stream, headrace.load])
def test_nothing_to_check_against_is_refused_where_it_is_required(model: Model, verify: Any, verb: Any) -> None:
    (model.folder / MANIFEST_NAME).unlink()
    with pytest.raises(OptionError) as caught:
        verb(model.folder, verify=verify)
    assert caught.value.option == "verify"
    assert "headrace verify --write" in str(caught.value)


def test_auto_checks_what_it_can_and_says_what_it_cannot(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with headrace.stream(model.folder, verify="auto") as stream:
        assert not wrong(dict(stream), model.contents)
    assert stream.stats.verified_nbytes
    assert not stream.stats.degraded
    (model.folder / MANIFEST_NAME).unlink()
    with headrace.stream(model.folder, verify="auto") as stream:
        assert not wrong(dict(stream), model.contents)
    assert [text.partition(":")[0] for text in stream.stats.degraded] == [str(model.folder / shard) for shard in model.shards]
    assert "not verified" in caplog.text
    assert stream.stats.verified_nbytes == 0


def test_a_mapping_cannot_be_verified(model: Model) -> None:
    with pytest.raises(OptionError):
        headrace.load(model.folder, verify=True, mmap="require")
    with headrace.stream(model.folder, verify=True, mmap="auto") as stream:
        assert not wrong(dict(stream), model.contents)
    assert len(stream.stats.degraded) == 2
    assert stream.stats.verified_nbytes


def test_a_source_and_a_folder_of_ones_own_are_checked(contents: Contents) -> None:
    data = serialize(contents)
    manifest = manifest_for({NAME: data})

    class Folder:
        url = "own:"

        def __init__(self, data: bytes) -> None:
            self.data = data

        def names(self) -> list[str]:
            return [NAME]

        def open(self, name: str) -> ByteSource:
            if name != NAME:
                raise SourceNotFoundError(name)
            return MemorySource(self.data, url=f"own:/{name}")

    good, bad = ((MemorySource(d, url=f"own:/{NAME}"), Folder(d)) for d in (data, flipped(data, len(data) // 2)))
    for url in good:
        assert not wrong(headrace.load(url, verify=manifest), contents)
    for url in bad:
        with pytest.raises(IntegrityError):
            headrace.load(url, verify=manifest)


def test_a_bit_that_flips_on_the_way_is_found(contents: Contents) -> None:
    data = serialize(contents)
    behind = FaultySource(MemorySource(data, url=NAME), [Fault(touches(len(data) - 10, len(data)), Flip(position=-1, mask=1))])
    with pytest.raises(IntegrityError) as caught:
        headrace.load(behind, verify=manifest_for({NAME: data}))
    assert "last" in caught.value.tensors


# -- whole-file digests ----------------------------------------------------------------------------------------------------------


class Hashed(MemorySource):
    """A source that knows its SHA-256, as those of the hub do."""

    def __init__(self, data: bytes, right: bytes | None = None) -> None:
        super().__init__(data, url="hub/model.safetensors")
        self.sha256 = hashlib.sha256(right if right is not None else data).hexdigest().upper()


def test_a_load_against_the_digest_of_the_file_is_right(contents: Contents) -> None:
    data = serialize(contents)
    with headrace.stream(Hashed(data), verify=True) as stream:
        assert not wrong(dict(stream), contents)
    assert "sha256 of the whole file" in stream.stats.routes[0][2]
    assert stream.stats.verified_nbytes == len(data)


@pytest.mark.parametrize("names", [None, ["t001"], ["t005"], ["last"]], ids=["all", "some", "empty", "last"])
@pytest.mark.parametrize("where", ["header", "first", "last"])
def test_a_load_raises_before_it_returns(names: Any, where: str) -> None:
    contents = random_contents(100, 20_000, 5, 3 * MIB, 300, 0, 50_001)
    contents["last"] = random_entry("F32", (77,), seed=51)
    data = serialize(contents)
    header = int.from_bytes(data[:8], "little")
    at = {"header": data.index(b"t003") + 3, "first": 8 + header, "last": len(data) - 1}[where]
    changed = bytearray(data)
    changed[at] ^= 0x01
    # A header is used before the end of the file is known, so it may break a rule, or lack a name, first.
    with pytest.raises(HeadraceError if where == "header" else IntegrityError):
        headrace.load(Hashed(bytes(changed), data), verify=True, names=names)
    tensors = headrace.load(Hashed(data), verify=True, names=names)
    assert not wrong(tensors, contents)


def test_the_last_tensor_is_withheld_until_the_file_is_known_to_be_right() -> None:
    contents = random_contents(9 * MIB, 9 * MIB, 9 * MIB, 9 * MIB)
    data = serialize(contents)
    start = len(data) - 36 * MIB
    got: list[str] = []
    source = Hashed(flipped(data, start), data)
    with pytest.raises(IntegrityError), headrace.stream(source, verify=True, memory_limit=0, concurrency=1) as stream:
        got.extend(name for name, _ in stream)
    assert "t000" in got
    assert "t003" not in got


def test_the_last_wanted_tensor_is_withheld_where_it_is_not_the_files_last() -> None:
    contents = random_contents(MIB, MIB, 40 * MIB, MIB)
    data = serialize(contents)
    source = Hashed(flipped(data, len(data) - 1), data)
    got: list[str] = []
    with pytest.raises(IntegrityError), headrace.stream(source, verify=True, names=["t000", "t001"]) as stream:
        got.extend(name for name, _ in stream)
    assert "t001" not in got


def test_one_tensor_read_by_itself_waits_for_the_whole_file(contents: Contents) -> None:
    data = serialize(contents)
    with headrace.open(Hashed(data), verify=True) as checkpoint:
        assert bytes_of(headrace.read(checkpoint, "t001")) == contents["t001"].data
        assert bytes_of(headrace.read(checkpoint, "t000")) == contents["t000"].data
    with headrace.open(Hashed(flipped(data, len(data) - 1), data), verify=True) as checkpoint, pytest.raises(IntegrityError):
        headrace.read(checkpoint, "t001")


def test_a_second_load_is_checked_by_what_the_first_has_learned(contents: Contents) -> None:
    data = serialize(contents)
    behind = FaultySource(MemorySource(data, url=NAME))
    behind.sha256 = hashlib.sha256(data).hexdigest()  # type: ignore[attr-defined]
    with headrace.open(behind, verify=True) as checkpoint:
        assert not wrong(headrace.load(checkpoint), contents)
        behind._faults = (Fault(touches(HEAD_NBYTES, len(data)), Flip(position=-1)),)
        checkpoint.sources[0]._cache = BlockCache(0)  # type: ignore[attr-defined]  # what is kept is not read again
        with pytest.raises(IntegrityError):
            headrace.load(checkpoint)


@pytest.mark.parametrize("concurrency", [1, 2, 8])
@pytest.mark.parametrize("memory_limit", rest_slow([0, MIB, -1]))
def test_waiting_for_ones_turn_ends_with_any_number_of_readers(concurrency: int, memory_limit: int) -> None:
    contents = random_contents(*[MIB + i for i in range(12)], 17 * MIB, *[KIB] * 20)
    shards = [serialize(contents), serialize({f"other.{name}": entry for name, entry in contents.items()})]
    with headrace.stream(
        [Hashed(shard) for shard in shards], verify=True, concurrency=concurrency, memory_limit=memory_limit
    ) as stream:
        kept = dict(stream)
    assert not wrong({name: tensor for name, tensor in kept.items() if name in contents}, contents)
    assert len(kept) == 2 * len(contents)


def test_a_manifest_about_another_version_than_the_hubs_is_found(contents: Contents) -> None:
    data = serialize(contents)
    manifest = manifest_for({NAME: flipped(data, len(data) - 1)})
    with pytest.raises(IntegrityError) as caught:
        headrace.open(Hashed(data), verify=manifest)
    assert caught.value.found == hashlib.sha256(data).hexdigest()


# -- over networks ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return monkeypatch


class Corrupting(dict[str, bytes]):
    """What a CDN sends: the right bytes, but for one."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def __setitem__(self, key: str, value: bytes) -> None:
        super().__setitem__(key, flipped(value, self.at % len(value)) if len(value) > 1000 else value)


def test_files_of_the_hub_are_checked_by_its_sha256(environment: pytest.MonkeyPatch, contents: Contents) -> None:
    files = {NAME: serialize(contents), "config.json": b"{}"}
    with serving(files) as hub:
        environment.setenv("HF_ENDPOINT", hub.endpoint)
        for verify in (True, "auto"):
            with headrace.stream("hf://org/repo", verify=verify) as stream:
                assert not wrong(dict(stream), contents)
            assert "from the hub" in stream.stats.routes[0][2]
        assert not wrong(headrace.load(f"hf://org/repo/{NAME}", verify=True), contents)


@pytest.mark.parametrize("at", [10, -1, 30_000])
@pytest.mark.parametrize("names", [None, ["t000"]], ids=["all", "some"])
def test_a_corrupting_cdn_is_found_out(environment: pytest.MonkeyPatch, contents: Contents, at: int, names: Any) -> None:
    with serving({NAME: serialize(contents)}) as hub:
        hub.cdn.files = Corrupting(at)
        environment.setenv("HF_ENDPOINT", hub.endpoint)
        with pytest.raises(HeadraceError) as caught:
            headrace.load("hf://org/repo", verify=True, names=names)
        assert isinstance(caught.value, IntegrityError) or at == 10  # a header is used before the end of the file is known


@pytest.fixture
def bucket(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, bytes]]:
    pytest.importorskip("botocore")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return {"models": {f"m/{path.name}": path.read_bytes() for path in model.folder.iterdir()}}


def keys_of(server: S3Server) -> S3Credentials:
    return S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)


def test_a_manifest_in_a_bucket_is_found(bucket: Any, model: Model) -> None:
    with S3Server(bucket) as server:
        for url in ("s3://models/m", "s3://models/m/model.safetensors.index.json"):
            with headrace.stream(url, verify=True, credentials=keys_of(server)) as stream:
                assert not wrong(dict(stream), model.contents)
            assert stream.stats.verified_nbytes
        single = headrace.load(f"s3://models/m/{model.shards[0]}", verify=True, credentials=keys_of(server))
        assert not wrong(single, model.contents)
        manifest = f"s3://models/m/{MANIFEST_NAME}"
        assert not wrong(headrace.load("s3://models/m", verify=manifest, credentials=keys_of(server)), model.contents)


@pytest.mark.parametrize("rule", [ServerFlip(at=1), ServerFlip(at=12_345), LyingRange(by=-16)], ids=str)
def test_flipped_bits_and_lying_ranges_are_found(bucket: Any, model: Model, rule: Any) -> None:
    faults = [Rule(rule, key="*.safetensors", min_start=1)]
    with S3Server(bucket, faults=faults) as server:
        assert wrong(headrace.load("s3://models/m", credentials=keys_of(server)), model.contents)
        got: dict[str, torch.Tensor] = {}
        with (
            pytest.raises(IntegrityError) as caught,
            headrace.stream("s3://models/m", verify=True, credentials=keys_of(server)) as stream,
        ):
            got.update(stream)
        assert str(caught.value.url).startswith("s3://models/m/model-0000")
        assert not wrong(got, model.contents)
        with pytest.raises(IntegrityError):
            headrace.load("s3://models/m", verify=True, credentials=keys_of(server))


def test_a_bucket_without_manifest_is_refused_or_read_unchecked(bucket: Any, model: Model) -> None:
    del bucket["models"][f"m/{MANIFEST_NAME}"]
    with S3Server(bucket, buckets={"models": Bucket(checksum=None)}) as server:
        with pytest.raises(OptionError):
            headrace.load("s3://models/m", verify=True, credentials=keys_of(server))
        with headrace.stream("s3://models/m", verify="auto", credentials=keys_of(server)) as stream:
            assert not wrong(dict(stream), model.contents)
        assert len(stream.stats.degraded) == 2


@pytest.mark.parametrize("algorithm", ["crc32", "sha1", "sha256", "crc32c", "crc64nvme"])
def test_the_checksums_of_the_store_serve(bucket: Any, model: Model, monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    del bucket["models"][f"m/{MANIFEST_NAME}"]
    needs_crt = algorithm in ("crc32c", "crc64nvme")
    how = {"buckets": {"models": Bucket(checksum=algorithm)}}
    with S3Server(bucket, **how) as server:
        if needs_crt:
            with monkeypatch.context() as without:
                without.setitem(sys.modules, "awscrt.checksums", None)
                with pytest.raises(OptionError):
                    headrace.load("s3://models/m", verify=True, credentials=keys_of(server))
            play_crt(monkeypatch)
        with headrace.stream("s3://models/m", verify=True, credentials=keys_of(server)) as stream:
            assert not wrong(dict(stream), model.contents)
        assert f"{algorithm} of the whole file, in order, from the store" in stream.stats.routes[0][2]
        assert sum(request.method == "HEAD" for request in server.requests) >= 2
    with S3Server(bucket, faults=[Rule(ServerFlip(at=12_345), key="*.safetensors", min_start=1)], **how) as server:
        with pytest.raises(IntegrityError) as caught:
            headrace.load("s3://models/m", verify=True, credentials=keys_of(server))
        assert len(caught.value.expected or "") == {"crc32": 8, "crc32c": 8, "crc64nvme": 16, "sha1": 40, "sha256": 64}[algorithm]


def play_crt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two functions of the AWS runtime, slowly."""
    crt = types.ModuleType("awscrt.checksums")
    for name, polynomial, bits in (("crc32c", 0x82F63B78, 32), ("crc64nvme", 0x9A6C9329AC4BC9B5, 64)):
        ones, table = (1 << bits) - 1, []
        for value in range(256):
            for _ in range(8):
                value = (value >> 1) ^ (polynomial if value & 1 else 0)
            table.append(value)

        def go_on(data: memoryview, previous: int = 0, *, ones: int = ones, table: list[int] = table) -> int:
            value = previous ^ ones
            for byte in data:
                value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
            return value ^ ones

        setattr(crt, name, go_on)
    monkeypatch.setitem(sys.modules, "awscrt", types.ModuleType("awscrt"))
    monkeypatch.setitem(sys.modules, "awscrt.checksums", crt)


def test_checksums_of_parts_say_nothing_about_the_object() -> None:
    crc = base64.b64encode(b"\0\1\2\3").decode()
    assert parse_checksums(Headers([("x-amz-checksum-crc32", crc)])) == {"crc32": "00010203"}
    assert parse_checksums(Headers([("x-amz-checksum-crc32", crc), ("x-amz-checksum-type", "FULL_OBJECT")]))
    for headers in (
        [("x-amz-checksum-crc32", crc), ("x-amz-checksum-type", "COMPOSITE")],
        [("x-amz-checksum-crc32", f"{crc}-3")],
        [("x-amz-checksum-sha256", crc)],
        [("x-amz-checksum-sha256", "")],
        [],
    ):
        assert parse_checksums(Headers(headers)) == {}


def test_an_object_replaced_before_its_checksum_was_asked_for_is_found(bucket: Any) -> None:
    with S3Server(bucket, faults=[Rule(Replaced(), method="HEAD", key="*.safetensors")]) as server:
        source = open_s3("s3://models/m/model-00001-of-00002.safetensors", credentials=keys_of(server))
        with pytest.raises(headrace.SourceChangedError):
            digest_of(source)
        source.close()


def test_a_head_that_is_refused_is_an_error(bucket: Any) -> None:
    del bucket["models"][f"m/{MANIFEST_NAME}"]
    refusal = Rule(Status(403, "AccessDenied"), method="HEAD", key="*.safetensors")
    with S3Server(bucket, faults=[refusal]) as server, pytest.raises(headrace.SourcePermissionError):
        headrace.load("s3://models/m", verify=True, credentials=keys_of(server))


def test_with_a_manifest_the_store_is_not_asked_for_checksums(bucket: Any) -> None:
    with S3Server(bucket) as server:
        headrace.load("s3://models/m", verify=True, credentials=keys_of(server))
        assert not any(request.method == "HEAD" for request in server.requests)


def test_opening_many_shards_reads_their_heads_only(bucket: Any) -> None:
    with S3Server(bucket) as server:
        before = server.requests
        headrace.open("s3://models/m", verify=True, credentials=keys_of(server)).close()
        gets = [request for request in server.requests[len(before) :] if str(request.key).endswith(".safetensors")]
        assert len(gets) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["manifest", "digest"])
def test_twenty_loads_stay_flat(tmp_path: Path, kind: str) -> None:
    contents = random_contents(*[MIB] * 24)
    data = serialize(contents)
    (tmp_path / NAME).write_bytes(data)
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest_for({NAME: data}, block=4 * MIB)))
    process, sizes = psutil.Process(), []
    for _ in range(20):
        url: Any = tmp_path if kind == "manifest" else Hashed(data)
        assert not wrong(headrace.load(url, verify=True), contents)
        sizes.append(process.memory_info().rss)
    assert max(sizes[5:]) - sizes[4] < 24 * MIB


def test_a_verification_reads_each_manifest_once(model: Model) -> None:
    class Counting:
        def __init__(self) -> None:
            self.opened: list[str] = []
            self.url = str(model.folder)

        def names(self) -> list[str]:
            return sorted(path.name for path in model.folder.iterdir())

        def open(self, name: str) -> ByteSource:
            self.opened.append(name)
            return FileSource(model.folder / name)

    folder = Counting()
    checked = Verification().folder(folder)
    for name in model.shards:
        checked.open(name).close()
    assert folder.opened.count(MANIFEST_NAME) == 1
