"""PURE: which tensors are wanted, and which of them change their dtype.

Names are taken as written, as globs (fnmatch, case-sensitive) or from a predicate. A dtype rule is one dtype, a mapping
by name or glob, or a callable. Quantized data is never cast unless it is named exactly, and neither is what belongs to
it: most scales are plain F32 that must arrive bit by bit, so a blanket rule keeps its hands off every module that holds
packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import compress
from typing import TypeAlias

from headrace._dtypes import DTYPES, find_dtype
from headrace._header import Header, TensorInfo
from headrace.errors import OptionError, TensorNotFoundError

Names: TypeAlias = "str | Iterable[str] | Callable[[TensorInfo], bool] | None"
DTypeRule: TypeAlias = "object | Mapping[str, object] | Callable[[TensorInfo], object] | None"
Row: TypeAlias = tuple[int, int]  # (shard, row of the shard's header)

# Names that quantization formats give to what must stay bit-exact beside the weights: compressed-tensors, GPTQ, AWQ,
# FP8, MXFP4 (all "scale"), bitsandbytes (absmax, quant_map, SCB), ModelOpt (amax).
QUANTIZATION_PATTERNS = ("*scale*", "*zero_point*", "*absmax*", "*quant_map*", "*amax*", "*.SCB")

_PACKED = frozenset(name for name, dtype in DTYPES.items() if name[0] == "F" and dtype.bits <= 8)
_INTEGERS = frozenset(name for name in DTYPES if name[0] in "IU")


def info_at(header: Header, row: int) -> TensorInfo:
    """The `TensorInfo` of one row of a header."""
    start = header.starts[row]
    return TensorInfo(
        name=header.names[row],
        dtype=header.dtypes[row],
        shape=tuple(header.shapes[row]),
        nbytes=header.ends[row] - start,
        shard=header.url,
        offset=start,
    )


def select(
    names: Names, headers: Sequence[Header], rows: Sequence[Sequence[int] | None], where: Mapping[str, Row]
) -> list[list[int] | None]:
    """The wanted rows of every header, in file order. None stands for all rows of a header.

    Args:
        names: None for all; a name or glob, several of them, or a predicate.
        headers: the shards' headers.
        rows: the rows that belong to the checkpoint (the index may leave some out); None for all.
        where: every tensor of the checkpoint.

    Raises:
        TensorNotFoundError: a name or a glob that fits no tensor, with the names that are spelled alike.
        OptionError: what are no names.
    """
    if names is None:
        return [None if kept is None else list(kept) for kept in rows]
    if callable(names):
        return [
            [row for row in (range(len(header.names)) if kept is None else kept) if names(info_at(header, row))]
            for header, kept in zip(headers, rows, strict=True)
        ]
    is_one = isinstance(names, (str, bytes)) or not isinstance(names, Iterable)
    patterns: Sequence[object] = [names] if is_one else list(names)
    wanted: set[Row] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise OptionError(f"names: {pattern!r} is no name; give str, or a predicate of `TensorInfo`", option="names")
        wanted.update(_fitting(pattern, where))
    chosen: list[list[int] | None] = [[] for _ in headers]
    for shard, row in sorted(wanted):
        found = chosen[shard]
        assert found is not None
        found.append(row)
    return chosen


def _fitting(pattern: str, where: Mapping[str, Row]) -> list[Row]:
    if pattern in where:
        return [where[pattern]]
    found = [row for name, row in where.items() if fnmatchcase(name, pattern)] if any(c in pattern for c in "*?[") else []
    if not found:
        raise unknown_tensor(pattern, where)
    return found


def unknown_tensor(name: str, where: Iterable[str]) -> TensorNotFoundError:
    """The error for a name or glob that fits nothing, with what was perhaps meant."""
    near = tuple(get_close_matches(name, list(where)[:20_000], n=3, cutoff=0.6))
    hint = f"; did you mean {', '.join(map(repr, near))}?" if near else "; `headrace inspect` lists the names"
    return TensorNotFoundError(f"no tensor is called, or matches, {name!r}{hint}", name=name, close_matches=near)


def choose_casts(
    rule: DTypeRule, headers: Sequence[Header], chosen: Sequence[Sequence[int] | None], where: Mapping[str, Row]
) -> tuple[list[dict[int, str]], list[tuple[str, str]]]:
    """Which rows change their dtype, and which a blanket rule left alone.

    Returns:
        Per shard {row: dtype of the format}, rows that keep their dtype left out; and (name, reason) of every floating
        tensor that a blanket rule would have cast were it not for its quantized neighbours or its name.

    Raises:
        OptionError: a dtype that is none, or an exact name that is not in the checkpoint.
    """
    if rule is None:
        return [{} for _ in headers], []
    decide = _Decision(rule, headers, where)
    casts: list[dict[int, str]] = []
    for header, rows in zip(headers, chosen, strict=True):
        found: dict[int, str] = {}
        for row in range(len(header.names)) if rows is None else rows:
            target = decide(header, row)
            if target is not None and target != header.dtypes[row]:
                found[row] = _convertible(header.dtypes[row], target, header.names[row])
        casts.append(found)
    return casts, decide.left_alone


class _Decision:
    """A dtype rule, ready to be asked about rows."""

    def __init__(self, rule: object, headers: Sequence[Header], where: Mapping[str, Row]) -> None:
        self.left_alone: list[tuple[str, str]] = []
        self._function = rule if callable(rule) and find_dtype(rule) is None else None
        entries = dict(rule) if isinstance(rule, Mapping) else {} if self._function else {"*": rule}
        self._exact = {name: _target(dtype, name) for name, dtype in entries.items() if name in where}
        self._globs = [(name, _target(dtype, name)) for name, dtype in entries.items() if name not in where]
        for pattern, _ in self._globs:
            if not any(c in pattern for c in "*?["):
                error = unknown_tensor(pattern, where)
                raise OptionError(f"dtype: {error}", option="dtype") from error
        self._quantized = _quantized_modules(headers) if self._globs else frozenset()

    def __call__(self, header: Header, row: int) -> str | None:
        if self._function is not None:
            return _target(self._function(info_at(header, row)), header.names[row])
        name = header.names[row]
        if name in self._exact:
            return self._exact[name]
        for pattern, target in self._globs:
            if fnmatchcase(name, pattern):
                return self._blanket(name, header.dtypes[row], target)
        return None

    def _blanket(self, name: str, dtype: str, target: str | None) -> str | None:
        if target is None or not DTYPES[dtype].floating:
            return None
        reason = ""
        if name.rpartition(".")[0] in self._quantized:
            reason = "its module holds quantized data"
        else:
            pattern = next((p for p in QUANTIZATION_PATTERNS if fnmatchcase(name, p)), None)
            reason = f"its name matches {pattern!r}" if pattern else ""
        if reason and target != dtype:
            self.left_alone.append((name, reason))
        return None if reason else target


def _quantized_modules(headers: Sequence[Header]) -> frozenset[str]:
    """Modules (names up to the last dot) with an fp8 or narrower tensor, or an integer tensor of two or more dimensions."""
    found: set[str] = set()
    for header in headers:
        packed = [
            dtype in _PACKED or (dtype in _INTEGERS and len(shape) > 1)
            for dtype, shape in zip(header.dtypes, header.shapes, strict=True)
        ]
        found.update(name.rpartition(".")[0] for name in compress(header.names, packed))
    return frozenset(found)


def _convertible(source: str, target: str, name: str) -> str:
    dtype = DTYPES[source]
    if dtype.torch is None or dtype.bits < 8:
        raise OptionError(f"dtype for {name!r}: {source} is packed data that torch cannot convert", option="dtype")
    if source == "C64" and target != "C64":
        raise OptionError(f"dtype for {name!r}: converting C64 to {target} would drop the imaginary part", option="dtype")
    return target


def _target(dtype: object, name: str) -> str | None:
    if dtype is None:
        return None
    found = find_dtype(dtype)
    if found is None or found.torch is None or found.bits < 8:
        place = "" if name == "*" else f" for {name!r}"
        raise OptionError(
            f"dtype{place}: {dtype!r} is no dtype that tensors can be cast to, such as 'bfloat16' or torch.float16",
            option="dtype",
        )
    return found.name
