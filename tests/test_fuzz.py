"""Whatever arrives from outside is understood, or refused by an error of ours: files, indexes, manifests, answers, arguments.

Each property holds for anything that hypothesis can think of; `scripts/soak --fuzz` asks it for many times as many examples. No
property looks at time: what hangs is stopped by pytest's timeout.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budget import examples
from checkpoints import KIB, bytes_of, random_entry, serialize, value_of
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import headrace
from headrace._header import Header, header_nbytes, parse_header
from headrace._manifest import Manifest, manifest_of, parse_manifest
from headrace._shards import shards_of_index
from headrace.errors import FormatError, HeadraceError, OptionError, SourceError
from headrace.sources.azure._listing import parse_page as parse_azure_page
from headrace.sources.gcs._listing import parse_json_page, parse_xml_page
from headrace.sources.http import Access, Policy, open_http
from headrace.sources.huggingface import _parse_page as parse_hub_page
from headrace.sources.memory import MemoryFolder, MemorySource
from headrace.sources.s3._listing import parse_page as parse_s3_page
from headrace.testing.sources import pattern

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.just("..") | st.just("\0"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
WORDS = [b"", b'"', b"{", b"]", b"-1", b"1e400", b"9" * 40, b"\\ud800", b"NaN"]


@st.composite
def damaged(draw: st.DrawFn, texts: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with stretches that are cut out, doubled, or of something else."""
    text = bytearray(draw(texts))
    for _ in range(draw(st.integers(0, 3))):
        start, nbytes = draw(st.integers(0, len(text))), draw(st.integers(0, 12))
        other = draw(
            st.binary(max_size=12) | st.sampled_from([b"", b'"', b"{", b"]", b"-1", b"1e400", b"9" * 40, b"\\ud800", b"NaN"])
        )
        text[start : start + nbytes] = draw(st.sampled_from([other, bytes(text[start : start + nbytes]) * 2]))
    return bytes(text)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


# ---- files

ENTRIES = {"a": random_entry("F32", (3, 5)), "b.weight": random_entry("U8", (700,), 1), "c": random_entry("BF16", (2, 0), 2)}
FILE = serialize(ENTRIES)
HEADER = FILE[8 : 8 + int.from_bytes(FILE[:8], "little")]


@given(st.binary(max_size=64) | damaged(st.just(HEADER)), st.integers(0, 2**63))
def test_a_header_is_understood_or_refused(text: bytes, nbytes: int) -> None:
    with contextlib.suppress(FormatError):
        assert isinstance(parse_header(text, url="u", nbytes=nbytes), Header)
    with contextlib.suppress(FormatError):
        assert header_nbytes(text, url="u", nbytes=nbytes) + 8 <= nbytes


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3) | JSON)
def test_json_that_is_no_header_is_refused(value: Any) -> None:
    text = as_json(value)
    with contextlib.suppress(FormatError):
        assert isinstance(parse_header(text, url="u", nbytes=8 + len(text)), Header)


@given(damaged(st.just(FILE)) | st.binary(max_size=200))
def test_a_file_is_loaded_or_refused(data: bytes) -> None:
    try:
        tensors = headrace.load(MemorySource(data))
    except (FormatError, SourceError):
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) <= len(data)


# ---- indexes and manifests

SHARDS = {"a.safetensors": serialize({"a": ENTRIES["a"]}), "b.safetensors": serialize({"b": ENTRIES["a"], "c": ENTRIES["c"]})}
WEIGHT_MAP = {"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"}
WEIGHT_MAPS = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d", ""]),
    st.sampled_from(["a.safetensors", "b.safetensors", "../a.safetensors", "none.safetensors", "a.bin"]) | JSON,
)
INDEXES = damaged(st.just(as_json({"metadata": {"total_size": 1}, "weight_map": WEIGHT_MAP}))) | st.builds(
    lambda weight_map, more: as_json({"weight_map": weight_map} | more), WEIGHT_MAPS, st.dictionaries(st.text(max_size=5), JSON)
)


@given(INDEXES)
def test_an_index_is_understood_or_refused(text: bytes) -> None:
    files = MemoryFolder({**SHARDS, "model.safetensors.index.json": text})
    with contextlib.suppress(FormatError):
        assert all(isinstance(name, str) for name in shards_of_index(files, "model.safetensors.index.json"))
    with contextlib.suppress(FormatError, SourceError), headrace.open(files) as checkpoint:
        assert set(checkpoint) <= {"a", "b", "c"}


MANIFEST = {
    "format": "headrace.manifest", "version": 1, "algorithm": "sha256", "block_nbytes": 16 << 20,
    "files": {"a.safetensors": {"nbytes": 100, "sha256": "0" * 64, "blocks": ["0" * 64], "head_nbytes": 100}},
}  # fmt: skip


@st.composite
def manifests(draw: st.DrawFn) -> Any:
    """A manifest in which some values are of another kind, or gone."""
    found = json.loads(json.dumps(MANIFEST))
    files = found["files"]
    file = files["a.safetensors"]
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from([found, files, file]))
        if place:
            key = draw(st.sampled_from(sorted(place)))
            place[key] = draw(JSON | st.sampled_from([0, -1, 1 << 70, [], {}, "f" * 64, ["f" * 63], True]))
            if draw(st.booleans()):
                place[draw(st.text(max_size=4))] = place.pop(key)
    return found


@given(manifests() | JSON)
def test_a_manifest_is_understood_or_refused(value: Any) -> None:
    for parse in (lambda: parse_manifest(as_json(value), url="m"), lambda: manifest_of(value, url="m")):
        with contextlib.suppress(FormatError):
            assert isinstance(parse(), Manifest)


@given(damaged(st.just(as_json(MANIFEST))) | st.binary(max_size=60))
def test_bytes_are_a_manifest_or_refused(text: bytes) -> None:
    with contextlib.suppress(FormatError):
        assert isinstance(parse_manifest(text, url="m"), Manifest)


@given(manifests() | JSON)
def test_a_load_against_any_manifest_is_right_or_refused(value: Any) -> None:
    source = MemorySource(SHARDS["a.safetensors"], url="memory:/a.safetensors")
    with contextlib.suppress(HeadraceError):
        assert bytes_of(headrace.load(source, verify=value)["a"]) == ENTRIES["a"].data


# ---- what the stores say

S3_PAGE = (
    b'<?xml version="1.0"?><ListBucketResult xmlns="http://s3"><IsTruncated>true</IsTruncated><EncodingType>url</EncodingType>'
    b"<NextContinuationToken>t</NextContinuationToken><CommonPrefixes><Prefix>m/x/</Prefix></CommonPrefixes>"
    b"<Contents><Key>m/a%2B</Key><Size>12</Size><ETag>&quot;e&quot;</ETag></Contents></ListBucketResult>"
)
AZURE_PAGE = (
    b'<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs><Blob><Name Encoded="true">m/a%20b</Name><Properties>'
    b"<Content-Length>12</Content-Length><Etag>e</Etag></Properties></Blob><BlobPrefix><Name>m/x/</Name></BlobPrefix></Blobs>"
    b"<NextMarker>t</NextMarker></EnumerationResults>"
)


@pytest.mark.parametrize("parse", [parse_s3_page, parse_azure_page, parse_xml_page])
@given(text=damaged(st.sampled_from([S3_PAGE, AZURE_PAGE])) | st.binary(max_size=60))
def test_a_listing_in_xml_is_understood_or_refused(parse: Callable[..., Any], text: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert all(entry.nbytes >= 0 for entry in parse(text, prefix="m/").entries)


GCS_PAGE = {"items": [{"name": "m/a", "size": "12", "generation": "3"}], "prefixes": ["m/x/"], "nextPageToken": "t"}
HUB_PAGE = [{"type": "file", "path": "m/a", "size": 12, "lfs": {"oid": "0" * 64}}, {"type": "directory", "path": "m/x"}]
NEARLY_GCS = st.dictionaries(st.sampled_from(list(GCS_PAGE)), JSON)
NEARLY_HUB = st.lists(st.dictionaries(st.sampled_from(["type", "path", "size", "lfs"]), JSON))


@given(damaged(st.just(as_json(GCS_PAGE))) | (JSON | NEARLY_GCS).map(as_json))
def test_a_listing_of_google_is_understood_or_refused(text: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert all(entry.nbytes >= 0 for entry in parse_json_page(text, prefix="m/").entries)


@given(damaged(st.just(as_json(HUB_PAGE))) | (JSON | NEARLY_HUB).map(as_json))
def test_a_listing_of_the_hub_is_understood_or_refused(text: bytes) -> None:
    with contextlib.suppress(SourceError):
        assert all(file.nbytes == int(file.nbytes) for file in parse_hub_page(text, "m", "u", True).values())


# ---- answers over HTTP

DATA = pattern(40 * KIB)
STATUSES = [
    b"HTTP/1.1 206 Partial Content",
    b"HTTP/1.1 200 OK",
    b"HTTP/1.0 206",
    b"HTTP/1.1 404 x",
    b"HTTP/2 206",
    b"HTTP/1.1 100 C",
    b"",
]
PATIENCE = Policy(attempts=2, backoff_s=0.0, stall_timeout_s=5.0, connect_timeout_s=5.0, hedge_after_s=None)


class Scripted:
    """A server that gives each connection's first request these bytes and closes, whatever was asked for.

    Attributes:
        answer: the bytes; {start} and {end} of the range are filled in.
    """

    def __init__(self) -> None:
        self.answer: Callable[[int, int], bytes] = lambda _start, _end: b""
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/model.safetensors"
        self._thread = threading.Thread(target=self._serve, name="test-scripted", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), sock:
                head = b""
                while b"\r\n\r\n" not in head and (more := sock.recv(65536)):
                    head += more
                _, _, told = head.lower().partition(b"range: bytes=")
                start, _, end = told.partition(b"\r\n")[0].partition(b"-")
                sock.sendall(self.answer(int(start or 0), int(end or len(DATA) - 1) + 1))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.stop()


@st.composite
def answers(draw: st.DrawFn) -> Callable[[int, int], bytes]:
    """What is nearly an answer. Bytes are wrong only where something in the head gives it away."""
    status = draw(st.sampled_from(STATUSES[:1] * 6 + STATUSES))
    shift, fewer, more, total = (draw(st.sampled_from([0, 0, 0, 0, other])) for other in (7, 300, 9, -1))
    fields = draw(
        st.lists(
            st.sampled_from([b"ETag: \"e\"", b"Connection: close", b"Content-Encoding: gzip", b"Content-Range: bytes 0-0/1",
                             b"Transfer-Encoding: chunked", b"Content-Length: 5", b"Content-Length: -1", b"X: \xff", b" folded",
                             b"no colon", b": empty", b"Content-Length: 99999999999999999999", b"Retry-After: soon"])
            | st.binary(min_size=1, max_size=20).filter(lambda text: b"\n" not in text and b"\r" not in text),
            max_size=3,
        )
    )  # fmt: skip
    chunked, separator = draw(st.booleans()), draw(st.sampled_from([b"\r\n"] * 5 + [b"\n", b"\r"]))
    drop = draw(st.sampled_from([b"", b"", b"content-range", b"content-length"]))
    damage = draw(damaged(st.just(b"")))
    cut = draw(st.integers(0, 2000) | st.none())

    def answer(start: int, end: int) -> bytes:
        first, last = start + shift, max(start + shift, end - fewer)
        body = DATA[first:last] + bytes(more)
        head = [status, b"Content-Range: bytes %d-%d/%d" % (first, last - 1, len(DATA) + total), *fields]
        if chunked:
            body = (
                b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:100], body[100:]) if part) + damage + b"0\r\n\r\n"
            )
            head.append(b"Transfer-Encoding: chunked")
        else:
            head.append(b"Content-Length: %d" % len(body))
        head = [line for line in head if not drop or not line.lower().startswith(drop)]
        return (separator.join([*head, b"", b""]) + body)[:cut]

    return answer


@given(answer=answers() | st.binary(max_size=300).map(lambda text: lambda _start, _end: text))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@pytest.mark.slow
def test_an_answer_is_right_or_refused(scripted: Scripted, answer: Callable[[int, int], bytes]) -> None:
    """Also one that comes after the file was opened well."""
    access = Access(policy=PATIENCE)
    scripted.answer = answer
    with (
        contextlib.suppress(SourceError),
        contextlib.closing(open_http(scripted.url, access=access, prefix_nbytes=KIB)) as source,
    ):
        read_right_or_refused(source)
    scripted.answer = right_answer
    with contextlib.closing(open_http(scripted.url, access=access, prefix_nbytes=KIB)) as source:
        scripted.answer = answer
        read_right_or_refused(source)


def right_answer(start: int, end: int) -> bytes:
    head = b"HTTP/1.1 206 P\r\nContent-Range: bytes %d-%d/%d\r\nContent-Length: %d\r\n\r\n"
    return head % (start, end - 1, len(DATA), end - start) + DATA[start:end]


def read_right_or_refused(source: Any) -> None:
    assume(source.nbytes == len(DATA))  # another size is what the answer says of itself
    for offset, nbytes in ((0, 100), (2 * KIB, 30 * KIB), (len(DATA) - 5, 5)):
        buffer = bytearray(nbytes)
        with contextlib.suppress(SourceError):
            source.read_into(offset, memoryview(buffer))
            assert bytes(buffer) == DATA[offset : offset + nbytes]


# ---- what callers ask for

CONTENTS = {
    "m.weight": random_entry("BF16", (12, 7), 1), "m.bias": random_entry("F32", (12,), 2), "m.scale": random_entry("F32", (), 3),
    "n.weight": random_entry("I32", (3, 4, 5), 4), "n.empty": random_entry("F64", (0, 3), 5),
    "q": random_entry("F6_E2M3", (4, 4), 6),
}  # fmt: skip
SOURCE = serialize(CONTENTS, data_start=3)
NUMBERS = st.integers(-15, 15) | st.none()
INDEX = st.one_of(st.integers(-15, 15), st.builds(slice, NUMBERS, NUMBERS, NUMBERS), st.just(...))
INDICES = INDEX | st.lists(INDEX, max_size=4).map(tuple)
STRANGE = (
    JSON
    | st.binary(max_size=4)
    | st.builds(slice, st.text(max_size=2))
    | st.sampled_from([object(), 1.5, {1, 2}, np.int64(1), 10**30])
)


def expected(name: str, index: Any) -> bytes:
    """A slice's bytes, by numpy; raises as numpy does."""
    raw = value_of(CONTENTS[name])
    rows = np.arange(raw.numel()).reshape(tuple(raw.shape))[index]
    width = raw.element_size()
    return b"".join(CONTENTS[name].data[i * width : (i + 1) * width] for i in np.ravel(rows).tolist())


@given(
    st.dictionaries(st.sampled_from([name for name in CONTENTS if name != "q"]), INDICES, max_size=3),
    st.none() | st.lists(st.sampled_from([*CONTENTS, "m.*", "*weight", "?"]), min_size=1, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "memory_limit": st.sampled_from([-1, 0, 1, 100, 4096]),
            "concurrency": st.integers(1, 4),
            "order": st.sampled_from(["ready", "file"]),
        },
    ),
)
def test_any_selection_is_loaded_as_numpy_would_or_refused(slices: dict[str, Any], names: Any, options: dict[str, Any]) -> None:
    try:
        found = headrace.load(MemorySource(SOURCE), slices=slices, names=names, **options)
    except HeadraceError:
        return
    for name, tensor in found.items():
        assert bytes_of(tensor) == (expected(name, slices[name]) if name in slices else CONTENTS[name].data), name


@given(st.fixed_dictionaries({}, optional={
    "names": st.text(max_size=5) | st.lists(st.text(max_size=4), max_size=3) | STRANGE,
    "slices": st.dictionaries(st.sampled_from([*CONTENTS, "none"]), INDICES | STRANGE | st.lists(STRANGE, max_size=3).map(tuple)),
    "dtype": st.text(max_size=9) | st.just("bfloat16") | st.dictionaries(st.text(max_size=3), STRANGE) | STRANGE,
    "device": st.text(max_size=6) | st.dictionaries(st.text(max_size=3), st.sampled_from(["cpu", "shared-cpu", "gpu", ""])),
    "verify": st.booleans() | st.sampled_from(["auto", "no"]),
    "memory_limit": st.integers() | st.text(max_size=6) | STRANGE,
    "concurrency": STRANGE,
    "direct_io": st.sampled_from(["on", "off", "auto"]) | STRANGE,
    "stall_timeout_s": st.floats() | STRANGE,
}))  # fmt: skip
def test_any_arguments_are_planned_or_refused(arguments: dict[str, Any]) -> None:
    with contextlib.suppress(HeadraceError):
        assert str(headrace.plan(MemorySource(SOURCE), **arguments))


@given(
    st.sampled_from(
        ["memory_limit", "concurrency", "pin", "attempts", "stall_timeout_s", "memory_limits", "network_chunk_nbytes"]
    ),
    st.text(),
)
def test_any_text_is_an_option_or_refused(name: str, text: str) -> None:
    with contextlib.suppress(OptionError):
        headrace.Options(**{name: text})  # type: ignore[arg-type]


# ---- what an earlier program has left


@given(
    st.lists(damaged(st.just(b'{"name": "a", "key": "b", "nbytes": 1}\n')) | st.binary(max_size=40), max_size=3),
    st.binary(max_size=30),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(30))
def test_a_pull_gets_over_any_state_of_an_earlier_one(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes], part: bytes
) -> None:
    src, dst = tmp_path_factory.mktemp("src"), tmp_path_factory.mktemp("dst")
    (src / "a.safetensors").write_bytes(SHARDS["a.safetensors"])
    state = dst / ".headrace-pull"
    state.mkdir()
    (state / "pulled").write_bytes(b"".join(records))
    (state / "a.safetensors").write_bytes(part)
    headrace.pull(src, dst)
    assert (dst / "a.safetensors").read_bytes() == SHARDS["a.safetensors"]


@given(
    st.dictionaries(
        st.sampled_from(["a.safetensors", "b.safetensors", "headrace.versions.json", "model.safetensors.index.json"]),
        st.binary(max_size=30) | damaged(st.sampled_from([*SHARDS.values(), b'{"a.safetensors": {"version": "1"}}'])),
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(50))
def test_any_saved_metadata_is_right_or_refused(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    folder: Path = tmp_path_factory.mktemp("metadata")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    with contextlib.suppress(HeadraceError), headrace.open(MemoryFolder(SHARDS), metadata=folder) as checkpoint:
        assert set(checkpoint) <= {"a", "b", "c"}
