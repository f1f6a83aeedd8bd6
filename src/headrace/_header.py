"""Safetensors header bytes -> checked columns: names, dtypes, shapes and where each tensor lies in the file.

Two readers, one verdict. The fast one parses with orjson and accepts only what it can prove right with a few passes at C speed;
that no key is repeated follows from the count of quotes. Whatever it cannot prove goes to the strict one (the standard library's
json, made as strict as the format), the only one that refuses, because it knows which tensor and which rule to name. Both hand
flat columns to one check of sizes and layout.

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
from itertools import chain
from math import prod
from operator import mod, mul, sub
from reprlib import Repr
from types import ModuleType
from typing import Any

from headrace._dtypes import DTYPES
from headrace.errors import FormatError

orjson: ModuleType | None
try:
    import orjson
except ImportError:
    orjson = None

MAX_HEADER_NBYTES = 100_000_000  # safetensors src/tensor.rs MAX_HEADER_SIZE

_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")
_BITS = {dtype.name: dtype.bits for dtype in DTYPES.values()}
_ITEMSIZES = {dtype.name: dtype.itemsize for dtype in DTYPES.values()}
_U64 = 1 << 64
_OVERFLOW = 1 << 128  # an element count that no byte range can match
_MAX_FLOAT = 1.797693134862315e308
_MAX_NDIM_UNBOUNDED = 32  # more dimensions are multiplied with a bound: the bare product of millions of them takes hours
_MAX_DEPTH = 127  # arrays and objects inside each other; serde_json's recursion limit
# Quotes can be counted if none is escaped; orjson reads -0 as 0; True is an int. What merely looks so takes the strict way.
_UNPROVABLE = (b'\\"', b"-0", b"true", b"false")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


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


@dataclass(frozen=True, slots=True)
class _Columns:
    """What the JSON says, types proven, layout not yet; offsets are those of the header, counted from its end."""

    metadata: dict[str, str] | None
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
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
        raise _refusal(url, f"{nbytes} bytes are too few for a safetensors file, which begins with 8 of header length", first)
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
    return Header(
        url=url,
        nbytes=nbytes,
        data_offset=data_offset,
        metadata=columns.metadata,
        names=columns.names,
        dtypes=columns.dtypes,
        shapes=_shared(columns.shapes),
        starts=starts,
        ends=[end + data_offset for end in columns.ends],
        aligned=not any(map(mod, starts, map(_ITEMSIZES.__getitem__, columns.dtypes))),
    )


# ---- the fast reader: prove it right, or say nothing


def _read_fast(text: bytes) -> _Columns | None:
    if orjson is None or not _is_provable(text):
        return None
    try:
        parsed = orjson.loads(text)
        if type(parsed) is not dict:
            return None
        nstrings = 5 * len(parsed) if _METADATA not in parsed else 5 * len(parsed) - 4  # name, 3 fields and dtype of each entry
        metadata = parsed.pop(_METADATA, None)
        if not _is_metadata(metadata):
            return None
        nstrings += 2 * len(metadata or ())
        # A repeated key would leave strings in the text that are not in the result.
        return _columns_of(metadata, parsed) if text.count(b'"') == 2 * nstrings else None
    except (ValueError, TypeError, KeyError, OverflowError):  # not JSON; a field missing or of another type
        return None


def _is_provable(text: bytes) -> bool:
    # The search for one byte is memchr, ten times faster than that for two, and mostly finds none.
    return not any(part[:1] in text and part in text for part in _UNPROVABLE)


def _columns_of(metadata: dict[str, str] | None, parsed: dict[str, Any]) -> _Columns | None:
    entries = parsed.values()
    dtypes = [entry["dtype"] for entry in entries]
    shapes = [entry["shape"] for entry in entries]
    ranges = [entry["data_offsets"] for entry in entries]
    starts = [start for start, _ in ranges]  # ValueError where it is no pair
    ends = [end for _, end in ranges]
    if not (set(map(len, entries)) <= {3} and set(dtypes) <= _BITS.keys() and set(map(type, shapes)) <= {list}):
        return None
    # All are integers from 0 to 2**64 - 1, else TypeError or OverflowError: a third of the time of set(map(type, ...)) and min().
    # True and False would pass; _UNPROVABLE has excluded them.
    for numbers in (starts, ends, list(chain.from_iterable(shapes))):
        array("Q", numbers)
    return _Columns(metadata, list(parsed), dtypes, shapes, starts, ends)


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
    columns = _Columns(metadata, list(parsed), [], [], [], [])
    for name, entry in parsed.items():
        fields, rule = _fields_of(entry)
        if rule:
            raise _refusal(url, rule, tensor=name)
        dtype, shape, (start, end) = fields
        columns.dtypes.append(dtype)
        columns.shapes.append(shape)
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


def _shared(shapes: list[list[int]]) -> list[tuple[int, ...]]:
    """The shapes with equal ones as one object: models have few, and the collector need not walk over one per tensor."""
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    return [known.setdefault(shape, shape) for shape in map(tuple, shapes)]


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

    names, dtypes, shapes = pick(columns.names), pick(columns.dtypes), pick(columns.shapes)
    return _Columns(columns.metadata, names, dtypes, shapes, pick(starts), pick(ends))


def _check_layout(columns: _Columns, url: str) -> None:
    bits = list(map(mul, _counts(columns.shapes), map(_BITS.__getitem__, columns.dtypes)))
    spans = [8 * nbytes for nbytes in map(sub, columns.ends, columns.starts)]
    if bits == spans and columns.starts[1:] == columns.ends[:-1] and columns.starts[:1] in ([], [0]):
        return
    end = 0
    for i, wanted in enumerate(bits):
        rule = _range_rule(columns, i, end=end) or _size_rule(columns, i, bits=wanted)
        if rule:
            raise _refusal(url, rule, tensor=columns.names[i])
        end = columns.ends[i]


def _counts(shapes: list[list[int]]) -> list[int]:
    """Elements of each tensor; `_OVERFLOW` where the package's 64-bit product, taken in order, overflows."""
    if max(map(len, shapes), default=0) <= _MAX_NDIM_UNBOUNDED:
        counts = list(map(prod, shapes))
        if 0 not in counts:  # without a zero, a product that matches a byte range never was larger on the way
            return counts
    return list(map(_bounded_product, shapes))


def _bounded_product(shape: list[int]) -> int:
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
    dtype, nbytes = columns.dtypes[i], columns.ends[i] - columns.starts[i]
    what = f"{dtype} of shape {_quote(columns.shapes[i])}"
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
