"""Headers are accepted, refused and read as the safetensors package does it, by either reader."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors
from budget import examples
from corpus.fixtures import CorpusFolder, corpus  # noqa: F401  # a fixture
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import _header
from headrace._dtypes import DTYPES
from headrace._header import MAX_HEADER_NBYTES, Header, header_nbytes, parse_header
from headrace.errors import FormatError

URL = "file:///models/m.safetensors"
READERS: dict[str, dict[str, Any]] = {
    "fast": {},
    "fast, a tensor at a time": {"_BLOCK_NCHARS": 1},
    "strict": {"_read_fast": lambda _text: None},
}


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test once with each way of reading."""
    for name, value in READERS[request.param].items():
        monkeypatch.setattr(_header, name, value)


def read(blob: bytes) -> Header:
    length = header_nbytes(blob[:512], url=URL, nbytes=len(blob))
    return parse_header(blob[8 : 8 + length], url=URL, nbytes=len(blob))


def pack(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def dump(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


# ---- the result


@pytest.mark.usefixtures("reader")
def test_columns_are_in_order_of_the_data_with_absolute_offsets() -> None:
    text = dump({"b": entry("F32", [2], 4, 12), "__metadata__": {"format": "pt"}, "a": entry("BF16", [2, 1], 0, 4)})
    header = parse_header(text, url=URL, nbytes=8 + len(text) + 12)
    begin = 8 + len(text)
    assert (header.url, header.nbytes, header.data_offset) == (URL, begin + 12, begin)
    assert header.metadata == {"format": "pt"}
    assert (header.names, header.dtypes, header.shapes) == (["a", "b"], ["BF16", "F32"], [(2, 1), (2,)])
    assert (header.starts, header.ends) == ([begin, begin + 4], [begin + 4, begin + 12])


@pytest.mark.usefixtures("reader")
def test_empty_tensors_come_before_the_tensor_that_begins_where_they_lie() -> None:
    text = dump(
        {"d": entry("U8", [1], 4, 5), "a": entry("U8", [4], 0, 4), "c": entry("F64", [0], 4, 4), "b": entry("F32", [0, 9], 4, 4)}
    )
    assert parse_header(text, url=URL, nbytes=8 + len(text) + 5).names == ["a", "c", "b", "d"]


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(("pad", "aligned"), [(0, True), (1, False), (2, False), (4, True)])
def test_aligned_says_whether_every_start_suits_its_dtype(pad: int, aligned: bool) -> None:
    text = dump({"a": entry("F32", [1], 0, 4), "b": entry("U8", [1], 4, 5)})
    text += b" " * (-len(text) % 8 + pad)
    assert parse_header(text, url=URL, nbytes=8 + len(text) + 5).aligned is aligned


# ---- the length


@pytest.mark.parametrize("length", [1, 2, 40, 92])
def test_header_nbytes_is_the_length_where_the_file_can_hold_it(length: int) -> None:
    assert header_nbytes(struct.pack("<Q", length), url=URL, nbytes=100) == length


def test_header_of_the_largest_length_is_allowed_and_one_more_is_not() -> None:
    first = struct.pack("<Q", MAX_HEADER_NBYTES)
    assert header_nbytes(first, url=URL, nbytes=MAX_HEADER_NBYTES + 8) == MAX_HEADER_NBYTES
    with pytest.raises(FormatError):
        header_nbytes(struct.pack("<Q", MAX_HEADER_NBYTES + 1), url=URL, nbytes=1 << 40)


@pytest.mark.parametrize(
    ("first", "nbytes"),
    [
        (b"", 0),
        (b"\x10\0\0\0\0\0\0", 7),
        (struct.pack("<Q", 0), 8),
        (struct.pack("<Q", 93), 100),
        (struct.pack("<Q", (1 << 64) - 1), 100),
        (struct.pack("<Q", (1 << 64) - 8), 100),
    ],
)
def test_length_that_cannot_be_right_is_refused(first: bytes, nbytes: int) -> None:
    with pytest.raises(FormatError) as caught:
        header_nbytes(first, url=URL, nbytes=nbytes)
    assert (caught.value.url, caught.value.tensor) == (URL, None)


# ---- refusals say what is wrong; users read these, so the words that help are checked here and nowhere else


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 49\n", "Git LFS pointer"),
        (b"version ", "Git LFS pointer"),
        (b"\n <!DOCTYPE html><html>", "HTML"),
        (b"<html lang='en'>", "HTML"),
        (b"<?xml version='1.0'?><Error>", "XML"),
        (b'{"error":"not found"}', "JSON"),
        (b"PK\x03\x04\0\0\x08\x08\0\0", "zip"),
        (b"PK\x03\x04\0\0\0\0\0\0", "zip"),
        (b"\x80\x02}q\0X\x01\0\0\0", "pickle"),
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\x03", "gzip"),
    ],
)
def test_file_of_another_kind_is_named(first: bytes, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        header_nbytes(first, url=URL, nbytes=4000)


@pytest.mark.parametrize("length", [640, 1152, ord("{"), 0x0A7B])
def test_cut_file_whose_length_looks_like_another_kind_is_called_incomplete(length: int) -> None:
    with pytest.raises(FormatError, match="incomplete"):
        header_nbytes(struct.pack("<Q", length) + b'{"a"', url=URL, nbytes=100)


def test_zip_whose_first_bytes_are_a_possible_length_is_named_when_it_is_parsed() -> None:
    length = int.from_bytes(b"PK\x03\x04\0\0\0\0", "little")
    with pytest.raises(FormatError, match="zip"):
        parse_header(bytes(length), url=URL, nbytes=length + 8)


def test_cut_download_is_named() -> None:
    blob = pack(dump({"a": entry("U8", [100], 0, 100)}), bytes(100))
    for cut in (blob[:20], blob[:-1]):
        with pytest.raises(FormatError, match="incomplete"):
            read(cut)


REFUSED = [  # (header, data bytes, tensor to blame, words)
    ('{"w":{"dtype":"F128","shape":[1],"data_offsets":[0,8]}}', 8, "w", "F128"),
    ('{"w":{"shape":[1],"data_offsets":[0,8]}}', 8, "w", "lacks dtype"),
    ('{"w":{"dtype":"U8","shape":[-8],"data_offsets":[0,8]}}', 8, "w", "shape"),
    ('{"w":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', 1, "w", "shape"),
    ('{"w":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', 1, "w", "shape"),
    ('{"w":{"dtype":"U8","shape":{},"data_offsets":[0,1]}}', 1, "w", "shape"),
    ('{"w":{"dtype":"U8","shape":"","data_offsets":[0,1]}}', 1, "w", "shape"),
    ('{"w":{"dtype":"U8","shape":[0],"data_offsets":[-0,0]}}', 0, "w", "data_offsets"),
    ('{"w":{"dtype":"U8","shape":[8],"data_offsets":"08"}}', 8, "w", "data_offsets"),
    ('{"w":{"dtype":"U8","shape":[8],"data_offsets":{"0":0,"8":8}}}', 8, "w", "data_offsets"),
    ('{"w":{"dtype":["U8"],"shape":[8],"data_offsets":[0,8]}}', 8, "w", "dtype"),
    ('{"w":null}', 0, "w", "not an object"),
    ('{"w":{"dtype":"U8","shape":[9],"data_offsets":[0,8]}}', 8, "w", "needs 9 bytes"),
    ('{"w":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}', 2, "w", "12 bits"),
    ('{"w":{"dtype":"F4","shape":[8],"data_offsets":[0,8]}}', 8, "w", "elements, not bytes"),
    ('{"w":{"dtype":"U8","shape":[8],"data_offsets":[8,0]}}', 8, "w", "before they begin"),
    ('{"w":{"dtype":"U8","shape":[8],"data_offsets":[4,12]}}', 12, "w", "not 0"),
    ('{"w":{"dtype":"U8","shape":[2,9223372036854775808],"data_offsets":[0,0]}}', 0, "w", "overflows"),
    ('{"w":{"dtype":"U8","shape":[9223372036854775808,2,0],"data_offsets":[0,0]}}', 0, "w", "overflows"),
    ('{"w":["U8",[1]]}', 1, "w", "not an object"),
    ('{"v":["U8",[1],[0,1]],"w":["U8",[1],[2,3]]}', 3, "w", "hole after 'v'"),
    ('{"v":["U8",[2],[0,2]],"w":["U8",[2],[1,3]]}', 3, "w", "overlap those of 'v'"),
    ('{"w":["U8",[1],[0,1]],"w":["U8",[1],[0,1]]}', 1, "w", "twice"),
    ('{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"shape":[1]}}', 1, "w", "'shape' twice"),
    ('{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"note":[{"x":1,"x":2}]}}', 1, "w", "'x' twice"),
    ('{"__metadata__":{"a":1}}', 0, None, "__metadata__"),
    ('{"__metadata__":{"a":"1","a":"1"}}', 0, None, "'a' twice"),
    ('{"__metadata__":{},"__metadata__":{}}', 0, None, "__metadata__"),
    ('{"w":NaN}', 0, None, "not JSON"),
    ('{"\\ud800":["U8",[1],[0,1]]}', 1, None, "surrogate"),
    ("[]", 0, None, "not a JSON object"),
    ("{}", 3, None, "3 bytes follow"),
]


@pytest.mark.parametrize(("text", "nbytes", "tensor", "says"), REFUSED)
def test_refusal_names_file_tensor_and_rule(text: str, nbytes: int, tensor: str | None, says: str) -> None:
    with pytest.raises(FormatError, match=re.escape(says)) as caught:
        read(pack(text.encode(), bytes(nbytes)))
    assert (caught.value.url, caught.value.tensor) == (URL, tensor)
    assert URL in str(caught.value)


def test_message_about_an_endless_name_is_short() -> None:
    with pytest.raises(FormatError) as caught:
        read(pack(dump({"A" * 100_000: {"dtype": "B" * 100_000, "shape": [1] * 100_000, "data_offsets": [0, 1]}})))
    assert len(str(caught.value)) < 1000


def test_error_keeps_neither_the_text_nor_the_parser_error_alive() -> None:
    with pytest.raises(FormatError) as caught:
        read(pack(b'{"a":'))
    assert caught.value.__context__ is None


# ---- what the package takes although no writer makes it, and where this is stricter

ACCEPTED = [
    '{"w":["F32",[2],[0,8]]}',  # a struct as an array
    '{"w":{"dtype":{"F32":null},"shape":[2],"data_offsets":[0,8]}}',  # an enum as a map
    '{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"note":{"any":["thing",1.5,null,-0,1e-999]}}}',
    '{"w":{"d\\u0074ype":"F32","shape":[2],"data_offsets":[0,8]}}',
    ' \n\t\r{ "w" : {"dtype":"F32","shape":[ 2 ],"data_offsets":[0,8]}, "__metadata__":null}\n',
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_odd_spelling_that_the_package_takes_is_taken(text: str) -> None:
    blob = pack(text.encode(), bytes(8))
    assert [name for name, _ in safetensors.deserialize(blob)] == ["w"]
    header = read(blob)
    assert (header.names, header.dtypes, header.shapes, header.metadata) == (["w"], ["F32"], [(2,)], None)


STRICTER = [  # README of safetensors: duplicate keys are disallowed; the package keeps the last
    '{"w":["U8",[2],[0,2]],"w":["U8",[2],[0,2]]}',
    '{"w":["U8",[2],[0,2]],"\\u0077":["U8",[2],[0,2]]}',
    '{"__metadata__":{"a":"1","a":"2"},"w":["U8",[2],[0,2]]}',
    '{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"note":1,"note":2}}',
]


@pytest.mark.parametrize("text", STRICTER)
def test_repeated_key_is_refused_although_the_package_keeps_the_last(text: str) -> None:
    blob = pack(text.encode(), bytes(2))
    assert [name for name, _ in safetensors.deserialize(blob)] == ["w"]
    with pytest.raises(FormatError):
        read(blob)


def test_number_next_to_the_largest_float_is_refused() -> None:
    # The package refuses from 1.7976931348623158e308 on; the last representable digits before it are refused here as well.
    for number, ok in (("1.7976931348623e308", True), ("1.7976931348623157e308", False), ("1.7976931348623159e308", False)):
        blob = pack(b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"note":' + number.encode() + b"}}", bytes(2))
        assert (verdict_of_headrace(blob) is not None) is ok


# ---- bombs


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 500_000 + b"]" * 500_000,
        b'{"a":' * 300_000 + b"1" + b"}" * 300_000,
        b'{"a":{"dtype":"U8","shape":[' + b",".join([b"9223372036854775807"] * 300_000) + b'],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[' + b"1" * 3_000_000 + b'],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":' + b"[" * 900 + b"]" * 900 + b"}}",
    ],
    ids=["nested-arrays", "nested-objects", "product", "digits", "nested-unknown"],
)
def test_bomb_is_refused_soon(text: bytes) -> None:
    begin = time.process_time()
    with pytest.raises(FormatError):
        parse_header(text, url=URL, nbytes=8 + len(text))
    assert time.process_time() - begin < 3


# ---- against the package


def verdict_of_package(blob: bytes) -> dict[str, tuple[str, list[int], int]] | None:
    try:
        return {name: (t["dtype"], t["shape"], len(t["data"])) for name, t in safetensors.deserialize(blob)}
    except safetensors.SafetensorError:
        return None


def verdict_of_headrace(blob: bytes) -> dict[str, tuple[str, list[int], int]] | None:
    try:
        header = read(blob)
    except FormatError as exc:
        return {"twice": ("", [], 0)} if "twice" in str(exc) else None
    assert header.starts[:1] in ([], [header.data_offset])
    assert header.starts[1:] == header.ends[:-1]
    assert (header.ends or [header.data_offset])[-1] == len(blob)
    columns = zip(header.names, header.dtypes, header.shapes, header.starts, header.ends, strict=True)
    return {name: (dtype, list(shape), end - start) for name, dtype, shape, start, end in columns}


def check_against_package(blob: bytes) -> None:
    theirs = verdict_of_package(blob)
    for name, changes in READERS.items():
        with pytest.MonkeyPatch.context() as patch:
            for attribute, value in changes.items():
                patch.setattr(_header, attribute, value)
            ours = verdict_of_headrace(blob)
        if ours is None or "twice" not in ours:  # a repeated key: refused here, mostly taken there; its tests are above
            assert ours == theirs, name


NAMES = st.sampled_from(["a", "b", "layers.0.w", "é", "", "dtype", 'q"', "n\n", "true", "x-0", "\U0001f9ea", "__metadata"])
WORDS = [
    *("null", "true", "false", "0", "-0", "-1", "1", "2", "8", "1.0", "1e0", "1e999", "NaN", "18446744073709551615"),
    *("18446744073709551616", "9223372036854775808", "{}", "[]", '""', '"a"', '"__metadata__"', '"dtype"', '"shape"'),
    *('"data_offsets"', '"F32"', '"U8"', '"F4"', "[", "]", "{", "}", ",", ":", " ", "\n", '"', "\\", "\\u0061", "\\ud800"),
    *("\\udc00", '\\"', "é", "\0", '{"F32":null}', '"x":1', '"\\ud83d\\ude00"', "[0,4]", '{"a":{"b":[]}}', '["U8",[],[0,1]]'),
]
TOKEN = re.compile(rb'-?\d+|"[^"]*"|\[[^\[\]]*\]|\{[^{}]*\}|null|.', re.DOTALL)


@st.composite
def good_files(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """(header, data) as some writer might make them: any order, spacing and escapes, padding, metadata, unknown fields."""
    header: dict[str, Any] = {}
    end = 0
    for name in draw(st.lists(NAMES, max_size=4, unique=True)):
        dtype = draw(st.sampled_from(list(DTYPES)))
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), max_size=3))
        nbytes = math.prod(shape) * DTYPES[dtype].bits // 8
        header[name] = entry(dtype, shape, end, end + nbytes)
        end += nbytes
        if draw(st.integers(0, 9)) == 0:
            header[name]["x"] = draw(st.sampled_from([None, 1.5, True, "s", {"a": [{}]}]))
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.sampled_from([None, {}, {"format": "pt"}, {"q": '"true" -0'}]))
    names = draw(st.permutations(list(header)))
    spacing = draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    text = json.dumps({name: header[name] for name in names}, separators=spacing, ensure_ascii=draw(st.booleans()))
    return text.encode() + b" " * draw(st.integers(0, 8)), bytes(end)


@given(good_files())
@settings(max_examples=examples(100))
def test_good_and_nearly_good_files_are_read_as_by_the_package(file: tuple[bytes, bytes]) -> None:
    check_against_package(pack(*file))


@given(good_files(), st.data())
@settings(max_examples=examples(250))
def test_tokens_changed_at_random_are_judged_as_by_the_package(file: tuple[bytes, bytes], data: st.DataObject) -> None:
    text, payload = file
    tokens = TOKEN.findall(text)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(tokens)))
        drop = data.draw(st.integers(0, 2))
        tokens[at : at + drop] = [word.encode() for word in data.draw(st.lists(st.sampled_from(WORDS), max_size=2))]
    check_against_package(pack(b"".join(tokens), payload))


@given(good_files(), st.data())
@settings(max_examples=examples(150))
def test_bytes_changed_at_random_are_judged_as_by_the_package(file: tuple[bytes, bytes], data: st.DataObject) -> None:
    blob = bytearray(pack(*file))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(blob)))
        blob[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    check_against_package(bytes(blob))


@given(st.integers(1, 5), st.sampled_from([None, 1]), st.data())
@settings(max_examples=examples(300))
def test_digits_and_brackets_out_of_place_are_judged_as_by_the_package(
    count: int, indent: int | None, data: st.DataObject
) -> None:
    header = {f"t{i}": entry("U8", [1], i, i + 1) for i in range(count)}
    text = bytearray(json.dumps(header, indent=indent).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 2))] = bytes(data.draw(st.lists(st.sampled_from(b'01[]{},: "'), max_size=2)))
    check_against_package(pack(bytes(text), bytes(count)))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_entry_spelled_as_a_list_among_others_is_judged_as_by_the_package(place: int) -> None:
    entries: list[Any] = [entry("U8", [1], i, i + 1) for i in range(3)]
    entries[place] = list(entries[place].values())
    check_against_package(pack(dump({f"t{i}": each for i, each in enumerate(entries)}), bytes(3)))


@pytest.mark.parametrize("spelling", [{}, {"separators": (",", ":")}, {"indent": 1}])
@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {"format": "pt"}}])
def test_what_writers_write_is_read_fast(spelling: dict[str, Any], metadata: dict[str, Any]) -> None:
    header = {**metadata, **{f"layers.{i}.é": entry("BF16", [i % 3, 2], 0, 12) for i in range(3000)}}
    columns = _header._read_fast(json.dumps(header, ensure_ascii=False, **spelling).encode() + b"   ")
    assert columns == _header._read_strict(json.dumps(header).encode(), URL)


# ---- the corpus


@pytest.mark.slow  # makes the files
def test_corpus_files_get_the_verdict_of_their_record(corpus: CorpusFolder) -> None:  # noqa: F811  # the fixture
    wrong = []
    for case in corpus.cases:
        if case["kind"] == "file":
            got = judge(corpus.path(case))
            refused = isinstance(got, FormatError)
            if refused and (case["expect"] == "error" or case["stricter"]):
                continue
            if refused or case["expect"] == "error":
                wrong.append(f"{case['id']}: expects {case['expect']}, got {got}"[:300])
            elif not agrees(got, case, corpus.expected(case)):
                wrong.append(f"{case['id']}: the columns differ")
    assert not wrong


def judge(path: Path) -> Header | FormatError:
    nbytes = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = header_nbytes(file.read(512), url=str(path), nbytes=nbytes)
            file.seek(8)
            return parse_header(file.read(length), url=str(path), nbytes=nbytes)
    except FormatError as exc:
        return exc


def agrees(header: Header, case: dict[str, Any], expected: dict[str, dict[str, Any]]) -> bool:
    columns = zip(header.names, header.dtypes, header.shapes, header.starts, header.ends, strict=True)
    got = {name: (dtype, list(shape), end - start) for name, dtype, shape, start, end in columns}
    want = {name: (t["dtype"], t["shape"], t["nbytes"]) for name, t in expected.items()}
    return got == want and header.metadata == case["metadata"]


def test_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from headrace import _header\n"
        "assert _header.parse_header(b'{}', url='u', nbytes=10).names == []\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
