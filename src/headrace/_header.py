"""Safetensors header bytes -> checked columns: names, dtypes, shapes and where each tensor lies in the file.

Two readers, one verdict. The strict one is the standard library's json, made as strict as the format, and the only one that
refuses, because it knows which tensor and which rule to name. The fast one cuts the text at its quotes and compares: writers
repeat themselves, so between the names and the offsets stand a few texts over and over, and each is read strictly once. What it
cannot prove equal in a few passes at C speed goes to the strict one. Both hand flat columns to one check of sizes and layout.

The rules are those of safetensors 0.8.0 (serde_json and `Metadata::validate` in src/tensor.rs), found by asking the package.
Stricter on purpose: a repeated key is refused at any depth (its README disallows them; the package keeps the last), and so are
numbers in unknown fields within 1e-15 of the largest float (there serde_json's rounding overflows, correct rounding does not).
A valid tensor may be spelled in every way that the package takes.

Nothing here does I/O or knows torch; no object is made per tensor.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter, mod, sub
from reprlib import Repr
from typing import Any, NamedTuple

from headrace._dtypes import DTYPES
from headrace.errors import FormatError

MAX_HEADER_NBYTES = 100_000_000  # safetensors src/tensor.rs MAX_HEADER_SIZE

_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_BITS = {dtype.name: dtype.bits for dtype in DTYPES.values()}
_ITEMSIZES = {dtype.name: dtype.itemsize for dtype in DTYPES.values()}
_U64 = 1 << 64
_OVERFLOW = 1 << 128  # an element count that no byte range can match
_MAX_FLOAT = 1.797693134862315e308
_MAX_DEPTH = 127  # arrays and objects inside each other; serde_json's recursion limit
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_CONTROLS = bytes(range(32))  # JSON has them in no string
_OFFSETS_KEY = '"data_offsets"'
_S = r"[ \t\n\r]*"  # JSON's white space
_OFFSETS = re.compile(rf"({_S}:{_S}\[{_S})[0-9]+({_S},{_S})[0-9]+({_S}\]{_S}\}}{_S},{_S})")
_LAST_OFFSETS = re.compile(rf"{_S}:{_S}\[{_S}(0|[1-9][0-9]*){_S},{_S}(0|[1-9][0-9]*){_S}\]{_S}\}}{_S}\}}{_S}")
_BLOCK_NCHARS = 64 << 10


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Describe one tensor of a checkpoint, without its data.

    Attributes:
        name: the tensor's name, as the header spells it; not normalised, may be empty.
        dtype: the safetensors dtype, such as "BF16" (a key of the format's dtype table).
        shape: elements per dimension; () for a scalar. Elements, not bytes, also for dtypes narrower than a byte.
        nbytes: size of its data in bytes; 0 where a dimension is 0.
        shard: file name or url of the shard that holds it.
        offset: first byte of its data, counted from the start of the shard.

    Example:
        >>> TensorInfo(name="w", dtype="F32", shape=(2, 3), nbytes=24, shard="model.safetensors", offset=72).nbytes
        24
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shard: str
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header as columns, all in the order of the data: entry i of each list is about the same tensor.

    Attributes:
        url: the file.
        nbytes: size of the whole file.
        data_offset: first byte after the header.
        metadata: the `__metadata__` map; None where the header has none.
        names, dtypes, shapes: as the header spells them.
        starts, ends: byte ranges counted from the start of the file, end exclusive. They follow on each other without a gap,
            from `data_offset` to `nbytes`.
        aligned: whether every start is a multiple of its dtype's itemsize.
    """

    url: str
    nbytes: int
    data_offset: int
    metadata: dict[str, str] | None
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    starts: list[int]
    ends: list[int]
    aligned: bool


class _Form(NamedTuple):
    """What a header says of a tensor besides its name and its place. Few are different, and equal ones are one object."""

    dtype: str
    shape: tuple[int, ...]
    bits: int


@dataclass(frozen=True, slots=True)
class _Columns:
    """What the JSON says, types proven, layout not yet; offsets are those of the header, counted from its end."""

    metadata: dict[str, str] | None
    names: list[str]
    forms: list[_Form]
    starts: list[int]
    ends: list[int]


def header_nbytes(first: bytes, *, url: str, nbytes: int) -> int:
    """Judge the length in a file's first 8 bytes, before anything is allocated or read because of it.

    Args:
        first: the first bytes of the file: 8, or all where it has fewer; more help to recognise files of another kind.
        url: the file, for the message.
        nbytes: size of the whole file.

    Returns:
        The length of the JSON text, which begins at byte 8.

    Raises:
        FormatError: no safetensors file begins like this, or the file is cut inside its header.
    """
    if nbytes < 8 or len(first) < 8:
        raise _refusal(
            url,
            f"{nbytes} bytes are too few for a safetensors file, which begins with 8 of header length; an incomplete download? "
            "Fetch it again",
            first,
        )
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_NBYTES:
        raise _refusal(url, f"the header length is {length} bytes, over the format's limit of {MAX_HEADER_NBYTES}", first)
    if length + 8 > nbytes:
        rule = f"the header ends at byte {length + 8} but the file has {nbytes}; an incomplete download? Fetch it again"
        raise _refusal(url, rule, first)
    if length == 0:
        raise _refusal(url, "the header is empty; a file that was allocated but never written? Fetch it again", first)
    return length


def parse_header(text: bytes, *, url: str, nbytes: int) -> Header:
    """Check a header completely and return it as columns.

    Args:
        text: exactly the JSON bytes, padding included: `header_nbytes` bytes from byte 8 of the file.
        url: the file, for messages and for the result.
        nbytes: size of the whole file.

    Raises:
        FormatError: the header breaks a rule of the format; `.tensor` names the entry where one is to blame.
    """
    columns = _read_fast(text)
    if columns is None:
        columns = _read_strict(text, url)
    columns = _in_order(columns)
    _check_layout(columns, url)
    data_offset = 8 + len(text)
    _check_end(columns, url, data_offset=data_offset, nbytes=nbytes)
    starts = [start + data_offset for start in columns.starts]
    dtypes = list(map(itemgetter(0), columns.forms))
    return Header(
        url=url,
        nbytes=nbytes,
        data_offset=data_offset,
        metadata=columns.metadata,
        names=columns.names,
        dtypes=dtypes,
        shapes=list(map(itemgetter(1), columns.forms)),
        starts=starts,
        ends=[*starts[1:], nbytes] if starts else [],
        aligned=not any(map(mod, starts, map(_ITEMSIZES.__getitem__, dtypes))),
    )


# ---- the fast reader: prove it right, or say nothing


def _read_fast(text: bytes) -> _Columns | None:
    if b"\\" in text:  # then a quote may be part of a string
        return None
    try:
        columns = _read_alike(text.decode("utf-8"))
        for numbers in (columns.starts, columns.ends):
            array("Q", numbers)
    except (ValueError, IndexError, OverflowError):  # FormatError is a ValueError
        return None
    distinct = set(columns.names)
    return None if len(distinct) < len(columns.names) or _METADATA in distinct else columns


def _read_alike(text: str) -> _Columns:
    """A header whose tensors are spelled alike, else ValueError or IndexError. A few hundred at a time, which stay in cache."""
    at, last = text.index(_OFFSETS_KEY), text.rindex(_OFFSETS_KEY)
    columns, forms = _read_before_offsets(text[:at]), dict[str, _Form]()
    columns.starts.clear()
    columns.ends.clear()
    while at < last:
        begin, at = at + len(_OFFSETS_KEY), text.index(_OFFSETS_KEY, min(at + _BLOCK_NCHARS, last))
        # Between two of these words: a tensor's offsets, the name of the next one, and what is said of it before its offsets.
        parts = list(map(str.split, text[begin:at].split(_OFFSETS_KEY), repeat('"'), repeat(2)))
        numbers = _read_offsets(list(map(itemgetter(0), parts)))
        names, texts = list(map(itemgetter(1), parts)), list(map(itemgetter(2), parts))
        joined = "".join(names).encode()
        if len(joined.translate(None, _CONTROLS)) < len(joined):
            raise ValueError("a control character in a name")
        forms |= {text: _read_before_offsets('{""' + text).forms[0] for text in set(texts) - forms.keys()}
        columns.names.extend(names)
        columns.forms.extend(map(forms.__getitem__, texts))
        columns.starts.extend(numbers[0::2])
        columns.ends.extend(numbers[1::2])
    final = _LAST_OFFSETS.fullmatch(text, last + len(_OFFSETS_KEY))
    if final is None:
        raise ValueError("these are no offsets")
    columns.starts.append(int(final[1]))
    columns.ends.append(int(final[2]))
    return columns


def _read_before_offsets(text: str) -> _Columns:
    """A header that is cut before the offsets of its first tensor: one tensor, perhaps metadata. Offsets have one form only."""
    columns = _read_strict((text + _OFFSETS_KEY + ":[0,0]}}").encode(), "")
    if len(columns.names) != 1:
        raise ValueError("it says something of several tensors")
    return columns


def _read_offsets(texts: list[str]) -> list[int]:
    """Starts and ends in turn, of texts that are spelled alike.

    Without its digits each is what the first one is. The digits stand where numbers belong: with one elsewhere, a brace is left
    when what stands between two tensors is gone, or the numbers are none, and either is not JSON.
    """
    first = _OFFSETS.fullmatch(texts[0])
    if first is None:
        raise ValueError("these are no offsets")
    opening, comma, closing = first.groups()
    joined = "".join(texts)
    if joined.encode().translate(None, b"0123456789") != (opening + comma + closing).encode() * len(texts):
        raise ValueError("offsets are spelled in several ways")
    listed = joined.replace(closing + opening, comma)
    numbers: list[int] = json.loads("[" + listed[len(opening) : -len(closing)] + "]")
    return numbers


def _is_metadata(value: Any) -> bool:
    return value is None or (type(value) is dict and set(map(type, value.values())) <= {str})


# ---- the strict reader: find the entry and the rule to blame


class _Repeated(dict[str, Any]):
    """A JSON object that has a key twice."""

    __slots__ = ("key",)
    key: str


def _read_strict(text: bytes, url: str) -> _Columns:
    parsed, complaint = _decode(text)
    if complaint:
        raise _refusal(url, f"the header is not JSON: {complaint}", len(text).to_bytes(8, "little") + text[:512])
    if not isinstance(parsed, dict):
        raise _refusal(url, f"the header is not a JSON object but {_quote(parsed)}")
    if isinstance(parsed, _Repeated):
        name = parsed.key
        raise _refusal(url, f"the header has {_quote(name)} twice", tensor=None if name == _METADATA else name)
    metadata = parsed.pop(_METADATA, None)
    if isinstance(metadata, _Repeated):
        raise _refusal(url, f"{_METADATA} has the key {_quote(metadata.key)} twice")
    if not _is_metadata(metadata):
        raise _refusal(url, f"{_METADATA} is not a map from strings to strings but {_quote(metadata)}")
    columns = _Columns(metadata, list(parsed), [], [], [])
    forms: dict[tuple[str, tuple[int, ...]], _Form] = {}
    for name, entry in parsed.items():
        fields, rule = _fields_of(entry)
        if rule:
            raise _refusal(url, rule, tensor=name)
        dtype, shape, (start, end) = fields
        key = (dtype, tuple(shape))
        if key not in forms:
            forms[key] = _Form(*key, _BITS[dtype] * _bounded_product(shape))
        columns.forms.append(forms[key])
        columns.starts.append(start)
        columns.ends.append(end)
    return columns


def _decode(text: bytes) -> tuple[Any, str]:
    """The value, or a complaint. Complaints are returned: a JSONDecodeError would keep a hundred megabytes of text alive."""
    try:
        parsed = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_constant,
        )
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")  # fails at a lone surrogate, wherever it is
    except RecursionError:
        return None, "it is nested too deeply"
    except UnicodeEncodeError:
        return None, "half of a surrogate pair in a string"
    except ValueError as exc:
        return None, str(exc)
    return parsed, ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    repeated = _Repeated(value)
    repeated.key = next(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
    return repeated


def _integer(digits: str) -> int | float:
    # As serde_json: what does not fit 64 bits is a float, and so is -0. int() of 5,000 digits would raise.
    return int(digits) if len(digits) <= 20 and digits != "-0" else _float(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if abs(value) > _MAX_FLOAT:
        raise ValueError(f"the number {digits[:40]} is out of range")
    return value


def _constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _fields_of(entry: Any) -> tuple[Any, str]:
    """(dtype, shape, data_offsets) of one entry, or the rule that it breaks."""
    if type(entry) is list and len(entry) == 3:  # serde takes a struct's fields in order as well
        entry = dict(zip(_FIELDS, entry, strict=True))
    if isinstance(entry, _Repeated):
        return None, f"its entry has {_quote(entry.key)} twice"
    if type(entry) is not dict:
        return None, f"its entry is not an object with dtype, shape and data_offsets but {_quote(entry)}"
    missing = [field for field in _FIELDS if field not in entry]
    if missing:
        return None, f"its entry lacks {', '.join(missing)}"
    dtype, shape, offsets = (entry[field] for field in _FIELDS)
    if type(dtype) is dict and list(dtype.values()) == [None]:  # serde takes an enum as {"F32": null} as well
        (dtype,) = dtype
    if type(dtype) is not str or dtype not in _BITS:
        return None, f"its dtype {_quote(dtype)} is unknown; the format has {', '.join(_BITS)}"
    if type(shape) is not list or not all(map(_is_u64, shape)):
        return None, f"its shape is not a list of integers from 0 to 2**64 - 1 but {_quote(shape)}"
    if type(offsets) is not list or len(offsets) != 2 or not all(map(_is_u64, offsets)):
        return None, f"its data_offsets are not two integers from 0 to 2**64 - 1 but {_quote(offsets)}"
    return (dtype, shape, offsets), _unknown_fields_rule(entry) if len(entry) > 3 else ""


def _is_u64(value: Any) -> bool:
    return type(value) is int and 0 <= value < _U64


def _unknown_fields_rule(entry: dict[str, Any]) -> str:
    # Level by level and not recursive: json.loads stops at the interpreter's limit, which may be far above the format's.
    level = _containers([value for field, value in entry.items() if field not in _FIELDS])
    for _ in range(_MAX_DEPTH - 2):  # the header and the entry are two of them
        repeated = next((value for value in level if isinstance(value, _Repeated)), None)
        if repeated is not None:
            return f"its entry has {_quote(repeated.key)} twice"
        level = _containers(chain.from_iterable(v.values() if isinstance(v, dict) else v for v in level))
    return "its entry is nested too deeply" if level else ""


def _containers(values: Iterable[Any]) -> list[dict[str, Any] | list[Any]]:
    return [value for value in values if isinstance(value, (dict, list))]


# ---- sizes and layout


def _in_order(columns: _Columns) -> _Columns:
    starts, ends = columns.starts, columns.ends
    if starts[1:] == ends[:-1]:
        return columns
    # By (start, end), so that an empty tensor comes before the one that begins where it lies.
    # Two sorts by int take half the time of one by pairs.
    order = sorted(range(len(starts)), key=ends.__getitem__)
    order.sort(key=starts.__getitem__)

    def pick(column: list[Any]) -> list[Any]:
        return [column[i] for i in order]

    return _Columns(columns.metadata, pick(columns.names), pick(columns.forms), pick(starts), pick(ends))


def _check_layout(columns: _Columns, url: str) -> None:
    bits = list(map(itemgetter(2), columns.forms))
    spans = [8 * nbytes for nbytes in map(sub, columns.ends, columns.starts)]
    if bits == spans and columns.starts[1:] == columns.ends[:-1] and columns.starts[:1] in ([], [0]):
        return
    end = 0
    for i, wanted in enumerate(bits):
        rule = _range_rule(columns, i, end=end) or _size_rule(columns, i, bits=wanted)
        if rule:
            raise _refusal(url, rule, tensor=columns.names[i])
        end = columns.ends[i]


def _bounded_product(shape: list[int]) -> int:
    """Elements; `_OVERFLOW` where the package's 64-bit product, taken in order, overflows."""
    count = 1
    for dimension in shape:
        count *= dimension
        if count >= _U64:
            return _OVERFLOW
    return count


def _range_rule(columns: _Columns, i: int, *, end: int) -> str:
    start, stop = columns.starts[i], columns.ends[i]
    if stop < start:
        return f"its data_offsets [{start}, {stop}] end before they begin"
    if start < end:
        return f"its data_offsets [{start}, {stop}] overlap those of {_quote(columns.names[i - 1])}, which end at {end}"
    if start > end and i == 0:
        return f"it is the first by offset but begins at {start}, not 0; data_offsets count from the end of the header"
    if start > end:
        return f"its data_offsets [{start}, {stop}] leave a hole after {_quote(columns.names[i - 1])}, which ends at {end}"
    return ""


def _size_rule(columns: _Columns, i: int, *, bits: int) -> str:
    dtype, shape, _ = columns.forms[i]
    nbytes = columns.ends[i] - columns.starts[i]
    what = f"{dtype} of shape {_quote(list(shape))}"
    if bits == 8 * nbytes:
        return ""
    if bits >= _U64:
        return f"{what} overflows 64 bits"
    if bits % 8:
        return f"{what} is {bits} bits, which do not end on a byte"
    hint = "; shapes count elements, not bytes" if _BITS[dtype] < 8 else ""
    return f"{what} needs {bits // 8} bytes, its data_offsets span {nbytes}{hint}"


def _check_end(columns: _Columns, url: str, *, data_offset: int, nbytes: int) -> None:
    end = data_offset + (columns.ends[-1] if columns.ends else 0)
    if end > nbytes:
        rule = f"the last tensor ends at byte {end} but the file has {nbytes}; an incomplete download? Fetch it again"
        raise _refusal(url, rule)
    if end < nbytes:
        raise _refusal(url, f"{nbytes - end} bytes follow the last tensor, which ends at byte {end}")


# ---- messages


def _refusal(url: str, rule: str, first: bytes = b"", *, tensor: str | None = None) -> FormatError:
    where = url if tensor is None else f"{url}: tensor {_quote(tensor)}"
    return FormatError(f"{where}: {_other_kind(first) or rule}", url=url, tensor=tensor)


class _Short(Repr):
    """Names and shapes come from the file and may be millions long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxlist, self.maxlevel = 100, 8, 2


def _quote(value: object) -> str:
    return _Short().repr(value)


_CONVERT = "convert it (torch.load with weights_only=True, safetensors.torch.save_file)"
_OTHER_KINDS = (  # (what files of that kind begin with, of at most the 8 bytes that are always there; what to say)
    (b"version ", "it is a Git LFS pointer, not the file itself; run `git lfs pull`, or download it again"),
    (b"<!doctyp", "it is an HTML page, not a safetensors file; the download met a login or error page"),
    (b"<html", "it is an HTML page, not a safetensors file; the download met a login or error page"),
    (b"<?xml", "it is an XML document, not a safetensors file; the store's error message was saved in its place"),
    (b"<error", "it is an XML document, not a safetensors file; the store's error message was saved in its place"),
    (b"pk\x03\x04", f"it is a zip archive, not a safetensors file; torch writes .pt, .pth and .bin so: {_CONVERT}"),
    (b"\x80\x02", f"it is a Python pickle, not a safetensors file; {_CONVERT}"),
    (b"\x80\x04", f"it is a Python pickle, not a safetensors file; {_CONVERT}"),
    (b"gguf", "it is a GGUF file, not a safetensors file"),
    (b"\x89hdf", "it is an HDF5 file, not a safetensors file"),
    (b"\x93numpy", "it is a NumPy file, not a safetensors file"),
    (b"\x1f\x8b\x08", "it is gzip-compressed; decompress it first"),
    (b"\x28\xb5\x2f\xfd", "it is zstd-compressed; decompress it first"),
    (b"{", "it is a JSON document, not a safetensors file; an index, or a server's error message"),
)


_LIKE_LENGTHS = (b"PK\x03\x04", b"\x1f\x8b\x08")  # kinds whose first bytes can also be read as a possible header length


def _other_kind(first: bytes) -> str:
    """What a file that is no safetensors file seems to be; '' where its first bytes do not tell."""
    is_length = len(first) >= 8 and int.from_bytes(first[:8], "little") <= MAX_HEADER_NBYTES
    if is_length and not first.startswith(_LIKE_LENGTHS):  # a cut file with a header of 640 bytes begins like a pickle
        return ""
    begin = first.lstrip(b" \t\r\n\xef\xbb\xbf")[:8].lower()
    return next((message for magic, message in _OTHER_KINDS if begin.startswith(magic)), "")
