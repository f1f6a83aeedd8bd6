"""PURE: who needs what: the part of each tensor that one of several tensor-parallel ranks computes with.

A rule says along which dimension a module's weight is cut; its bias and its scales follow. A rank's share is what
torch.chunk gives it: as many whole units as every rank but the last ones, a unit being an element, a head or a block of a
quantized weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from headrace._header import TensorInfo
from headrace._slices import Index, Parts
from headrace.errors import OptionError

Rule: TypeAlias = "Split | str | int | None"


@dataclass(frozen=True, slots=True)
class Split:
    """How a weight is divided among ranks.

    Attributes:
        dim: the dimension that is cut; negative ones count from the end.
        parts: of a fused projection, each of which is cut on its own: how many equal ones, or the elements of each.
        heads: heads along `dim`, for each part where there are several. Heads are not cut, and divide evenly among the ranks;
            where there are fewer than ranks (key and value heads), neighbouring ranks get the same one.
        block: elements that stay together. Blocks of quantized weights are found by the shape of their scales.

    Example:
        >>> Split(0, parts=(4096, 1024, 1024), heads=(32, 8, 8))  # a fused query, key and value projection
        Split(dim=0, parts=(4096, 1024, 1024), heads=(32, 8, 8), block=1)
    """

    dim: int
    parts: int | tuple[int, ...] = 1
    heads: int | tuple[int, ...] | None = None
    block: int = 1


class _Style(NamedTuple):
    """A named way to cut: the dimension of a weight, and of a parameter with one dimension; None: that is left whole."""

    weight: int | None
    vector: int | None
    parts: int = 1


_COLUMNS, _ROWS, _WHOLE = _Style(-2, 0), _Style(-1, None), _Style(None, None)

# The names are those of transformers' tp_plan. What concerns activations only leaves weights whole.
STYLES: Final[Mapping[str, _Style]] = MappingProxyType(
    {
        "colwise": _COLUMNS,
        "colwise_rep": _COLUMNS,
        "colwise_gather_output": _COLUMNS,
        "local_colwise": _COLUMNS,
        "rowwise": _ROWS,
        "rowwise_rep": _ROWS,
        "rowwise_split_input": _ROWS,
        "local_rowwise": _ROWS,
        "packed_colwise": _Style(-2, 0, parts=2),
        "local_packed_colwise": _Style(-2, 0, parts=2),
        "packed_rowwise": _Style(-1, None, parts=2),
        "local_packed_rowwise": _Style(-1, None, parts=2),
        "embedding_rowwise": _Style(0, 0),
        "vocab_parallel_rowwise": _Style(0, 0),
        "embedding_colwise": _Style(1, None),
        "grouped_gemm": _Style(0, 0),
        "replicate": _WHOLE,
        "sequence_parallel": _WHOLE,
        "replicated_with_grad_allreduce": _WHOLE,
        "mla_kv_a_proj": _WHOLE,
        "moe_tp_experts": _WHOLE,
        "ep_router": _WHOLE,
        "gather": _WHOLE,
        "local": _WHOLE,
        "all_reduce": _WHOLE,
    }
)

# Modules of Llama and the many models that name theirs alike.
USUAL_RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "*.[qkv]_proj": "colwise",
        "*.gate_proj": "colwise",
        "*.up_proj": "colwise",
        "*.o_proj": "rowwise",
        "*.down_proj": "rowwise",
        "*embed_tokens": "embedding_rowwise",
        "*lm_head": "colwise",
    }
)

_TRANSPOSED: Final = frozenset({"qweight", "qzeros", "g_idx"})  # GPTQ and AWQ: inputs first, several elements to an integer


def tensor_parallel(
    checkpoint: Mapping[str, TensorInfo], rank: int, world: int, rules: Mapping[str, Rule] = USUAL_RULES
) -> dict[str, Index]:
    """The `slices=` of one rank: of each tensor the part that it computes with.

    Args:
        checkpoint: an open checkpoint.
        rank: whose part, from 0 on. `world`: among how many.
        rules: {pattern: rule}, the first that fits counts. A pattern is a glob (* ? [abc]) of a tensor's name or of its module's
            (the name up to the last dot, with or without what comes before: "layers.*.q_proj" is that of every model prefix). A
            rule is a style of transformers' tp_plan ("colwise", "rowwise", ...), a dimension, a `Split`, or None for a tensor
            that every rank needs whole. What no pattern fits is whole as well.

    Returns:
        {name: index} of the tensors that are not needed whole. A rank that gets nothing of a tensor gets a slice of no elements.

    Raises:
        OptionError: a rule that is none, that fits nothing, or that cannot be carried out; the message names the tensor.

    Example:
        >>> with headrace.open("models/llama") as checkpoint:
        ...     slices = headrace.tensor_parallel(checkpoint, rank=0, world=8)
        ...     weights = headrace.load(checkpoint, slices=slices)
    """
    if not 0 <= rank < world:
        raise OptionError(f"rank is from 0 to {world - 1}, among {world}, and not {rank}", option="rank")
    found: dict[str, Index] = {}
    for module, names in _modules(checkpoint).items():
        chosen = {name: pattern for name in names if (pattern := _pattern_for(name, module, rules)) is not None}
        if chosen:
            infos = [checkpoint[name] for name in chosen]
            found |= _cut_module(infos, {name: rules[pattern] for name, pattern in chosen.items()}, rank, world)
    if rules is not USUAL_RULES:
        _check_all_fit(rules, checkpoint)
    return {name: index for name, index in found.items() if index != ()}


def share(size: int, rank: int, world: int, *, unit: int = 1) -> tuple[int, int]:
    """(start, stop) of a rank's part of `size` elements, `unit` of which stay together; as torch.chunk divides."""
    units = -(-size // unit)
    step = -(-units // world) * unit
    return min(rank * step, size), min((rank + 1) * step, size)


def assign_owners(keys: Sequence[int], sizes: Sequence[int], world: int) -> list[int]:
    """Which rank reads what, so that all read nearly as much, at any point of the order.

    Args:
        keys: what has one key goes to one rank.
        sizes: bytes of each.
        world: how many ranks.

    Returns:
        A rank for each: that which has least to read when a key first comes, the lower one of equals.
    """
    loads, chosen, owners = [0] * world, dict[int, int](), []
    totals: dict[int, int] = {}
    for key, size in zip(keys, sizes, strict=True):
        totals[key] = totals.get(key, 0) + size
    for key in keys:
        if key not in chosen:
            chosen[key] = min(range(world), key=loads.__getitem__)
            loads[chosen[key]] += totals[key]
        owners.append(chosen[key])
    return owners


# ---- which rule


def _modules(checkpoint: Iterable[str]) -> dict[str, list[str]]:
    modules: dict[str, list[str]] = {}
    for name in checkpoint:
        modules.setdefault(_module(name), []).append(name)
    return modules


def _pattern_for(name: str, module: str, rules: Mapping[str, Rule]) -> str | None:
    if name in rules:
        return name
    return next((pattern for pattern in rules if _fits(pattern, name) or _fits(pattern, module)), None)


def _check_all_fit(rules: Iterable[str], checkpoint: Mapping[str, TensorInfo]) -> None:
    """A rule that is meant for nothing is a slip of the pen, and the ranks' parts would be wrong."""
    for pattern in rules:
        if pattern not in checkpoint and not any(_fits(pattern, name) or _fits(pattern, _module(name)) for name in checkpoint):
            raise OptionError(f"no tensor fits the rule for {pattern!r}; patterns are globs of names or modules", option="rules")


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _fits(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


# ---- one module: its weight is cut, and what belongs to the weight is cut alike


def _cut_module(infos: Sequence[TensorInfo], rules: Mapping[str, Rule], rank: int, world: int) -> dict[str, Index]:
    """The slices of a module's tensors. () stands for all of a tensor."""
    weight = max(infos, key=lambda info: (len(info.shape), math.prod(info.shape)))
    split = _as_split(rules[weight.name], weight)
    if split is None:
        return {}
    if weight.name.rpartition(".")[2] in _TRANSPOSED and not isinstance(rules[weight.name], (int, Split)):
        raise _refusal(
            weight, "its layout has the inputs first; give a Split with its dimension for each of the module's tensors"
        )
    dim = _dimension(split.dim, weight)
    followers = [info for info in infos if info.name != weight.name and rules[info.name] == rules[weight.name]]
    blocks = {info.name: _block(weight.shape[dim], _size_at(info, weight, dim)) for info in followers}
    unit = math.lcm(split.block, *(block for block in blocks.values() if block))
    stretches = _stretches(split, weight, dim, unit, rank, world)
    found = {weight.name: _index(stretches, dim, weight)}
    for info in followers:
        block = blocks[info.name]
        if block:
            at = 0 if len(info.shape) == 1 else dim - len(weight.shape) + len(info.shape)
            found[info.name] = _index([(start // block, -(-stop // block)) for start, stop in stretches], at, info)
    for info in infos:  # rules of their own
        if rules[info.name] != rules[weight.name]:
            found |= _cut_module([info], rules, rank, world)
    return found


def _as_split(rule: Rule, info: TensorInfo) -> Split | None:
    if rule is None or isinstance(rule, Split):
        return rule
    if isinstance(rule, int) and not isinstance(rule, bool):
        return Split(rule)
    if not isinstance(rule, str) or rule not in STYLES:
        raise OptionError(f"a rule is a Split, a dimension, None, or one of {', '.join(STYLES)}, not {rule!r}", option="rules")
    style = STYLES[rule]
    dim = style.weight if len(info.shape) > 1 else style.vector
    return None if dim is None or not info.shape else Split(dim, parts=style.parts)


def _dimension(dim: int, info: TensorInfo) -> int:
    if not -len(info.shape) <= dim < len(info.shape):
        raise _refusal(info, f"it has no dimension {dim}")
    return dim % len(info.shape)


def _size_at(info: TensorInfo, weight: TensorInfo, dim: int) -> int:
    """Elements along the weight's `dim`; 1 where the tensor does not extend along it: the inputs of a bias, say."""
    if len(info.shape) == len(weight.shape):
        return info.shape[dim]
    if len(info.shape) == 1 and dim == max(0, len(weight.shape) - 2):
        return info.shape[0]
    return 1


def _block(size: int, count: int) -> int:
    """Elements of a weight for one of its `count` scales; 0 where the tensor is not cut with the weight."""
    if count == size:
        return 1
    if count <= 1:
        return 0
    block = -(-size // count)
    rounded = 1 << (block - 1).bit_length()  # the last block may be short: 7168 + 64 elements have 57 scales
    return next((candidate for candidate in (rounded, block) if -(-size // candidate) == count), 0)


def _stretches(split: Split, info: TensorInfo, dim: int, unit: int, rank: int, world: int) -> list[tuple[int, int]]:
    sizes = _part_sizes(split.parts, info.shape[dim], info)
    heads = split.heads if isinstance(split.heads, tuple) else (split.heads,) * len(sizes)
    if len(heads) != len(sizes):
        raise _refusal(info, f"{len(sizes)} parts and {len(heads)} numbers of heads do not belong together")
    begins = accumulate(sizes, initial=0)
    found = []
    for begin, size, count in zip(begins, sizes, heads, strict=False):
        if unit > 1 and len(sizes) > 1 and begin % unit:
            raise _refusal(info, f"a part begins at {begin}, in the middle of a block of {unit}")
        start, stop = _head_share(info, size, count, unit, rank, world) if count else share(size, rank, world, unit=unit)
        found.append((begin + start, begin + stop))
    return found


def _part_sizes(parts: int | tuple[int, ...], size: int, info: TensorInfo) -> tuple[int, ...]:
    if isinstance(parts, tuple):
        if sum(parts) != size or min(parts, default=0) < 0:
            raise _refusal(info, f"parts {parts} do not make up the {size} elements of its dimension")
        return parts
    if parts < 1 or size % parts:
        raise _refusal(info, f"its {size} elements are not {parts} equal parts")
    return (size // parts,) * parts


def _head_share(info: TensorInfo, size: int, heads: int, unit: int, rank: int, world: int) -> tuple[int, int]:
    if size % heads:
        raise _refusal(info, f"{size} elements are not {heads} heads")
    if max(heads, world) % min(heads, world):
        raise _refusal(info, f"{heads} heads do not divide evenly among {world} ranks")
    head = size // heads
    start, stop = (
        (rank * heads // world * head, (rank + 1) * heads // world * head)
        if heads >= world
        else (rank * heads // world * head, (rank * heads // world + 1) * head)
    )
    if start % unit or stop % unit:
        raise _refusal(info, f"heads of {head} elements end inside of a block of {unit}")
    return start, stop


def _index(stretches: Sequence[tuple[int, int]], dim: int, info: TensorInfo) -> Index:
    parts = Parts(stretches)
    if parts.stretches == ((0, info.shape[dim]),):
        return ()
    if len(parts.stretches) > 1:
        return (*[slice(None)] * dim, parts)
    return (*[slice(None)] * dim, slice(*parts.stretches[0]) if parts.stretches else slice(0, 0))


def _refusal(info: TensorInfo, reason: str) -> OptionError:
    return OptionError(f"{info.name!r} of shape {list(info.shape)} cannot be divided so: {reason}", option="rules")
