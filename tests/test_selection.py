"""Which tensors are wanted, and that quantized data keeps its bits unless it is named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

from headrace._dtypes import DTYPES
from headrace._header import Header, TensorInfo
from headrace._selection import QUANTIZATION_PATTERNS, choose_casts, info_at, select, unknown_tensor
from headrace.errors import OptionError, TensorNotFoundError

Tensors = Mapping[str, tuple[str, Sequence[int]]]  # {name: (dtype, shape)}


def make_header(tensors: Tensors, *, url: str = "m.safetensors", data_offset: int = 64) -> Header:
    sizes = [math.prod(shape) * DTYPES[dtype].bits // 8 for dtype, shape in tensors.values()]
    ends = list(accumulate(sizes, initial=data_offset))
    return Header(
        url=url,
        nbytes=ends[-1],
        data_offset=data_offset,
        metadata=None,
        names=list(tensors),
        dtypes=[dtype for dtype, _ in tensors.values()],
        shapes=[tuple(shape) for _, shape in tensors.values()],
        starts=ends[:-1],
        ends=ends[1:],
        aligned=True,
    )


def locate(headers: Sequence[Header]) -> dict[str, tuple[int, int]]:
    return {name: (shard, row) for shard, header in enumerate(headers) for row, name in enumerate(header.names)}


# ---- names

LAYERS: Tensors = {
    "embed.weight": ("BF16", [8, 4]),
    "layers.0.q.weight": ("BF16", [4, 4]),
    "layers.0.q.bias": ("F32", [4]),
    "layers.1.q.weight": ("BF16", [4, 4]),
    "layers.1.q.bias": ("F32", [4]),
}
HEAD: Tensors = {"Head.weight": ("BF16", [8, 4]), "odd[0].weight": ("F32", [1]), "odd*": ("F32", [1]), "": ("U8", [1])}


def selected(names: Any, rows: Sequence[Sequence[int] | None] = (None, None)) -> list[list[str]]:
    """Names per shard."""
    headers = [make_header(LAYERS), make_header(HEAD, url="h.safetensors")]
    where = {
        name: (shard, row) for name, (shard, row) in locate(headers).items() if rows[shard] is None or row in (rows[shard] or ())
    }
    chosen = select(names, headers, rows, where)
    return [
        list(header.names) if kept is None else [header.names[row] for row in kept]
        for header, kept in zip(headers, chosen, strict=True)
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, [list(LAYERS), list(HEAD)]),
        ("*", [list(LAYERS), list(HEAD)]),
        ("embed.weight", [["embed.weight"], []]),
        (["layers.1.q.bias", "embed.weight"], [["embed.weight", "layers.1.q.bias"], []]),
        ("layers.?.q.bias", [["layers.0.q.bias", "layers.1.q.bias"], []]),
        ("layers.[!0].*", [["layers.1.q.weight", "layers.1.q.bias"], []]),
        (["layers.0.*", "*.bias", "Head.weight"], [["layers.0.q.weight", "layers.0.q.bias", "layers.1.q.bias"], ["Head.weight"]]),
        (["embed.weight", "embed.weight", "embed*"], [["embed.weight"], []]),
        ("head*", None),
        ("Head*", [[], ["Head.weight"]]),
        ("odd[0].weight", [[], ["odd[0].weight"]]),
        ("odd*", [[], ["odd*"]]),
        ("", [[], [""]]),
        ([], [[], []]),
        (iter(["embed.weight"]), [["embed.weight"], []]),
        ({"Head.weight"}, [[], ["Head.weight"]]),
        (lambda info: info.dtype == "F32", [["layers.0.q.bias", "layers.1.q.bias"], ["odd[0].weight", "odd*"]]),
        (lambda info: info.nbytes > 32, [["embed.weight"], ["Head.weight"]]),
        (lambda _: False, [[], []]),
    ],
)
def test_names_globs_and_predicates_choose_rows_in_file_order(names: Any, expected: list[list[str]] | None) -> None:
    if expected is None:  # case counts
        with pytest.raises(TensorNotFoundError):
            selected(names)
    else:
        assert selected(names) == expected


@pytest.mark.parametrize("names", [None, "*", lambda _: True], ids=["all", "glob", "predicate"])
def test_rows_that_the_index_leaves_out_are_never_chosen(names: Any) -> None:
    assert selected(names, [[0, 2], []]) == [["embed.weight", "layers.0.q.bias"], []]


def test_a_name_that_the_index_leaves_out_is_unknown() -> None:
    with pytest.raises(TensorNotFoundError):
        selected("Head.weight", [None, []])


def test_choosing_all_rows_is_said_without_a_list() -> None:
    assert select(None, [make_header(LAYERS)], [None], {}) == [None]


@pytest.mark.parametrize("name", ["layers.0.q.wieght", "layers.0.q.weights", "Layers.0.q.weight"])
def test_an_unknown_name_comes_with_those_that_are_spelled_alike(name: str) -> None:
    with pytest.raises(TensorNotFoundError) as caught:
        selected(["embed.weight", name])
    assert caught.value.name == name
    assert "layers.0.q.weight" in caught.value.close_matches


@pytest.mark.parametrize("name", ["zzz", "zzz*", "", "layers.2.*"])
def test_a_glob_or_name_that_fits_nothing_is_an_error(name: str) -> None:
    headers = [make_header(LAYERS)]
    with pytest.raises(TensorNotFoundError) as caught:
        select(name, headers, [None], locate(headers))
    assert caught.value.name == name


def test_unknown_names_are_key_errors_with_a_readable_message() -> None:
    error = unknown_tensor("embed.wait", LAYERS)
    assert isinstance(error, KeyError)
    assert str(error).startswith("no tensor")


def test_an_error_of_the_predicate_reaches_the_caller() -> None:
    def fail(info: TensorInfo) -> bool:
        raise ZeroDivisionError(info.name)

    with pytest.raises(ZeroDivisionError):
        selected(fail)


def test_info_of_a_row_is_that_of_the_header() -> None:
    header = make_header(LAYERS)
    assert info_at(header, 2) == TensorInfo("layers.0.q.bias", "F32", (4,), 16, "m.safetensors", header.starts[2])


# ---- dtypes


def cast(rule: Any, tensors: Tensors, names: Any = None) -> tuple[dict[str, str], dict[str, str]]:
    """({name: new dtype}, {name left alone: reason}) of one shard."""
    header = make_header(tensors)
    where = locate([header])
    chosen = select(names, [header], [None], where)
    casts, left_alone = choose_casts(rule, [header], chosen, where)
    assert len(dict(left_alone)) == len(left_alone)
    return {header.names[row]: target for row, target in casts[0].items()}, dict(left_alone)


@pytest.mark.parametrize(
    "spelling",
    ["BF16", "bf16", "bfloat16", "torch.bfloat16", torch.bfloat16],
    ids=lambda value: f"{type(value).__name__} {value}",
)
def test_a_dtype_may_be_spelled_as_torch_or_the_format_does(spelling: object) -> None:
    assert cast(spelling, {"w": ("F32", [4, 4])}) == ({"w": "BF16"}, {})


@pytest.mark.parametrize("source", ["F64", "F32", "F16", "BF16"])
@pytest.mark.parametrize("target", ["F64", "F32", "F16", "BF16"])
def test_a_blanket_dtype_casts_wide_floats(source: str, target: str) -> None:
    expected = {} if source == target else {"w": target}
    assert cast(target, {"w": (source, [4, 4])}) == (expected, {})


@pytest.mark.parametrize("dtype", sorted(name for name, dtype in DTYPES.items() if not dtype.floating))
@pytest.mark.parametrize("rule", ["bfloat16", {"*": "bfloat16"}], ids=str)
def test_a_blanket_dtype_leaves_what_is_no_wide_float(dtype: str, rule: object) -> None:
    assert cast(rule, {"w": (dtype, [4]), "other.w": ("F32", [4])})[0] == {"other.w": "BF16"}


NORM: Tensors = {"model.norm.weight": ("F32", [64]), "model.layers.0.input_layernorm.weight": ("F32", [64])}
QUANTIZED: dict[str, tuple[Tensors, set[str]]] = {  # {format: (a layer as it is published, its floats that keep their bits)}
    "AWQ": (
        {
            "l.q_proj.qweight": ("I32", [64, 8]),
            "l.q_proj.qzeros": ("I32", [1, 8]),
            "l.q_proj.scales": ("F32", [1, 64]),
            "l.q_proj.bias": ("F32", [64]),
        },
        {"l.q_proj.scales", "l.q_proj.bias"},
    ),
    "GPTQ": (
        {
            "l.q_proj.qweight": ("I32", [8, 64]),
            "l.q_proj.qzeros": ("I32", [1, 8]),
            "l.q_proj.g_idx": ("I32", [64]),
            "l.q_proj.scales": ("F32", [1, 64]),
            "l.q_proj.bias": ("F32", [64]),
        },
        {"l.q_proj.scales", "l.q_proj.bias"},
    ),
    "FP8 blocks (DeepSeek)": (
        {
            "l.mlp.gate_proj.weight": ("F8_E4M3", [128, 128]),
            "l.mlp.gate_proj.weight_scale_inv": ("F32", [1, 1]),
            "l.mlp.gate.e_score_correction_bias": ("F32", [8]),
        },
        {"l.mlp.gate_proj.weight_scale_inv"},
    ),
    "FP8 tensors (compressed-tensors)": (
        {
            "l.q_proj.weight": ("F8_E4M3", [64, 64]),
            "l.q_proj.weight_scale": ("F32", [1]),
            "l.q_proj.input_scale": ("F32", [1]),
            "l.attn.k_scale": ("F32", [1]),
        },
        {"l.q_proj.weight_scale", "l.q_proj.input_scale", "l.attn.k_scale"},
    ),
    "INT8 (compressed-tensors)": (
        {
            "l.q_proj.weight": ("I8", [64, 64]),
            "l.q_proj.weight_scale": ("F32", [64, 1]),
            "l.q_proj.weight_zero_point": ("F32", [64, 1]),
        },
        {"l.q_proj.weight_scale", "l.q_proj.weight_zero_point"},
    ),
    "MXFP4 (gpt-oss)": (
        {
            "l.mlp.experts.down_proj_blocks": ("U8", [2, 64, 2, 16]),
            "l.mlp.experts.down_proj_scales": ("U8", [2, 64, 2]),
            "l.mlp.experts.down_proj_bias": ("F32", [2, 64]),
            "l.mlp.router.weight": ("F32", [2, 64]),
        },
        {"l.mlp.experts.down_proj_bias"},
    ),
    "MXFP4 (packed by the format)": (
        {"l.q_proj.weight": ("F4", [64, 64]), "l.q_proj.block": ("F8_E8M0", [64, 2]), "l.q_proj.bias": ("F32", [64])},
        {"l.q_proj.bias"},
    ),
    "NVFP4 (ModelOpt)": (
        {
            "l.q_proj.weight": ("U8", [64, 32]),
            "l.q_proj.weight_scale": ("F8_E4M3", [64, 4]),
            "l.q_proj.weight_scale_2": ("F32", []),
            "l.q_proj.input_scale": ("F32", []),
            "l.attn.input_quantizer._amax": ("F32", []),
        },
        {"l.q_proj.weight_scale_2", "l.q_proj.input_scale", "l.attn.input_quantizer._amax"},
    ),
    "bitsandbytes NF4": (
        {
            "l.q_proj.weight": ("U8", [2048, 1]),
            "l.q_proj.weight.absmax": ("F32", [64]),
            "l.q_proj.weight.nested_absmax": ("F32", [1]),
            "l.q_proj.weight.quant_map": ("F32", [16]),
            "l.q_proj.weight.nested_quant_map": ("F32", [256]),
            "l.q_proj.weight.quant_state.bitsandbytes__nf4": ("U8", [90]),
        },
        {
            "l.q_proj.weight.absmax",
            "l.q_proj.weight.nested_absmax",
            "l.q_proj.weight.quant_map",
            "l.q_proj.weight.nested_quant_map",
        },
    ),
    "bitsandbytes INT8": (
        {"l.q_proj.weight": ("I8", [64, 64]), "l.q_proj.SCB": ("F32", [64]), "l.q_proj.weight_format": ("U8", [])},
        {"l.q_proj.SCB"},
    ),
    "a scale whose weights lie elsewhere": (
        {"l.kv.scale": ("F32", [1]), "l.attn.logit_scale": ("F32", []), "l.kv.zero_points": ("F32", [1])},
        {"l.kv.scale", "l.attn.logit_scale", "l.kv.zero_points"},
    ),
    "nothing quantized": (
        {"l.position_ids": ("I64", [512]), "l.weight": ("F32", [8, 8]), "l.mask": ("BOOL", [8, 8])},
        set(),
    ),
}


@pytest.mark.parametrize("rule", ["bfloat16", {"*": torch.bfloat16}], ids=["dtype", "glob"])
@pytest.mark.parametrize("layer", QUANTIZED)
def test_a_blanket_dtype_keeps_quantized_modules_bit_by_bit_and_lists_them(layer: str, rule: object) -> None:
    tensors, kept = QUANTIZED[layer]
    everything = {**tensors, **NORM}
    casts, left_alone = cast(rule, everything)
    floats = {name for name, (dtype, _) in everything.items() if DTYPES[dtype].floating}
    assert casts == dict.fromkeys(floats - kept, "BF16")
    assert set(left_alone) == kept
    assert all(left_alone.values())


def test_the_reason_tells_the_module_from_the_name() -> None:
    _, left_alone = cast("bfloat16", {"a.weight": ("F8_E4M3", [4, 4]), "a.bias": ("F32", [4]), "b.scale": ("F32", [1])})
    assert "module" in left_alone["a.bias"]
    assert "*scale*" in left_alone["b.scale"]


@pytest.mark.parametrize("pattern", QUANTIZATION_PATTERNS)
def test_every_published_pattern_protects_a_name(pattern: str) -> None:
    name = pattern.replace("*", "x")
    casts, left_alone = cast("bfloat16", {name: ("F32", [1])})
    assert (casts, list(left_alone)) == ({}, [name])


def test_weights_in_one_shard_protect_the_scales_in_another() -> None:
    headers = [make_header({"l.weight": ("F8_E4M3", [4, 4])}), make_header({"l.bias": ("F32", [4])})]
    casts, left_alone = choose_casts("bfloat16", headers, [[], None], locate(headers))
    assert casts == [{}, {}]
    assert [name for name, _ in left_alone] == ["l.bias"]


def test_weights_that_are_not_chosen_protect_their_scales() -> None:
    tensors: Tensors = {"l.weight": ("F8_E4M3", [4, 4]), "l.bias": ("F32", [4])}
    assert cast("bfloat16", tensors, names="l.bias") == ({}, {"l.bias": "its module holds quantized data"})


def test_one_dimensional_integers_do_not_make_a_module_quantized() -> None:
    assert cast("bfloat16", {"bn.weight": ("F32", [4]), "bn.num_batches_tracked": ("I64", [1])})[0] == {"bn.weight": "BF16"}


def test_only_the_module_itself_is_protected() -> None:
    tensors: Tensors = {"a.b.weight": ("I8", [4, 4]), "a.weight": ("F32", [4]), "a.b.c.weight": ("F32", [4])}
    assert cast("bfloat16", tensors) == ({"a.weight": "BF16", "a.b.c.weight": "BF16"}, {})


def test_what_already_has_the_dtype_is_not_listed_as_left_alone() -> None:
    assert cast("bfloat16", {"l.weight": ("I8", [4, 4]), "l.scale": ("BF16", [4])}) == ({}, {})


@pytest.mark.parametrize(
    ("name", "dtype"), [("l.weight", "F8_E4M3"), ("l.scale", "F32"), ("l.ids", "I64"), ("l.mask", "BOOL"), ("l.packed", "U8")]
)
def test_an_exact_name_is_obeyed(name: str, dtype: str) -> None:
    tensors: Tensors = {name: (dtype, [4, 4]), "l.other": ("I8", [4, 4])}
    assert cast({name: "float16"}, tensors) == ({name: "F16"}, {})
    assert cast({"*": "bfloat16", name: "float16"}, tensors) == ({name: "F16"}, {})


def test_an_exact_name_may_keep_its_dtype_under_a_glob() -> None:
    tensors: Tensors = {"a": ("F32", [4]), "b": ("F32", [4])}
    assert cast({"*": "bfloat16", "a": None}, tensors) == ({"b": "BF16"}, {})
    assert cast({"*": "bfloat16", "a": "float32"}, tensors) == ({"b": "BF16"}, {})


def test_a_mapping_touches_only_what_it_names() -> None:
    tensors: Tensors = {"enc.w": ("F32", [4]), "dec.w": ("F32", [4]), "dec.v": ("F16", [4])}
    assert cast({"dec.*": "bfloat16"}, tensors)[0] == {"dec.w": "BF16", "dec.v": "BF16"}
    assert cast({}, tensors) == ({}, {})


def test_the_first_glob_that_fits_decides() -> None:
    tensors: Tensors = {"a.w": ("F32", [4]), "b.w": ("F32", [4])}
    assert cast({"a.*": "float16", "*": "bfloat16"}, tensors)[0] == {"a.w": "F16", "b.w": "BF16"}
    assert cast({"a.*": None, "*": "bfloat16"}, tensors)[0] == {"b.w": "BF16"}


def test_a_name_with_brackets_is_a_name_where_the_checkpoint_has_it() -> None:
    assert cast({"w[0]": "float16"}, {"w[0]": ("I8", [4, 4]), "w0": ("F32", [4])})[0] == {"w[0]": "F16"}


def test_a_callable_is_obeyed() -> None:
    tensors: Tensors = {"l.weight": ("F8_E4M3", [4, 4]), "l.scale": ("F32", [4]), "ids": ("I64", [4]), "norm": ("F32", [4])}

    def widen(info: TensorInfo) -> object:
        return {"l.weight": torch.float32, "l.scale": "float16", "ids": "int32"}.get(info.name)

    assert cast(widen, tensors) == ({"l.weight": "F32", "l.scale": "F16", "ids": "I32"}, {})


def test_no_rule_casts_nothing() -> None:
    assert cast(None, {"w": ("F32", [4])}) == ({}, {})


@pytest.mark.parametrize(
    "rule",
    ["floaty", "F6_E2M3", "F4", {"w": "nonsense"}, {"w": 16}, {"*": "F4"}, 16, lambda _: "nonsense", lambda _: "F4"],
    ids=lambda rule: "callable" if callable(rule) else str(rule),
)
def test_a_dtype_that_nothing_can_be_cast_to_names_the_option(rule: object) -> None:
    with pytest.raises(OptionError) as caught:
        cast(rule, {"w": ("F32", [4])})
    assert caught.value.option == "dtype"


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
@pytest.mark.parametrize("rule", [{"w": "float32"}, lambda _: "float32"], ids=["name", "callable"])
def test_a_dtype_that_nothing_can_be_cast_from_names_the_option(rule: object, dtype: str) -> None:
    with pytest.raises(OptionError) as caught:
        cast(rule, {"w": (dtype, [4, 4])})
    assert caught.value.option == "dtype"


def test_a_rule_for_an_unknown_name_says_what_was_perhaps_meant() -> None:
    with pytest.raises(OptionError) as caught:
        cast({"wieght": "float16"}, {"weight": ("F32", [4])})
    assert isinstance(caught.value.__cause__, TensorNotFoundError)
    assert caught.value.__cause__.close_matches == ("weight",)


def test_a_glob_rule_may_fit_nothing() -> None:
    assert cast({"vision.*": "float16"}, {"weight": ("F32", [4])}) == ({}, {})
