"""Tensor-parallel slices: the ranks' parts make up the tensor, scales stay in step with weights, and only parts are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import headrace
from headrace import OptionError, Parts, Split, TensorInfo, tensor_parallel
from headrace._partition import STYLES, share


def infos(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    """A checkpoint of these tensors; `__` in a name stands for a dot."""
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: TensorInfo(name=name, dtype="F32", shape=shape, nbytes=0, shard="s", offset=0) for name, shape in names.items()}


def cut(array: np.ndarray[Any, Any], index: Any) -> np.ndarray[Any, Any]:
    """`array[index]`, parts included."""
    for dim, item in enumerate(index if isinstance(index, tuple) else (index,)):
        if isinstance(item, Parts):
            return np.concatenate([array.take(range(a, b), axis=dim) for a, b in item.stretches], axis=dim)
    return array[index]


# ---- shares


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 9))
def test_shares_cover_everything_once_in_whole_units(size: int, world: int, unit: int) -> None:
    shares = [share(size, rank, world, unit=unit) for rank in range(world)]
    assert [at for start, stop in shares for at in range(start, stop)] == list(range(size))
    assert all(start % unit == 0 or start == size for start, _ in shares)


@given(st.integers(1, 100), st.integers(1, 9))
def test_shares_are_those_of_torch_chunk(size: int, world: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(world)]
    assert [stop - start for start, stop in (share(size, rank, world) for rank in range(world))][: len(chunks)] == chunks


# ---- styles


@pytest.mark.parametrize(
    ("style", "weight", "bias"),
    [
        ("colwise", slice(3, 6), slice(3, 6)),
        ("rowwise", (slice(None), slice(2, 4)), None),
        ("embedding_rowwise", slice(3, 6), slice(3, 6)),
        ("replicate", None, None),
        ("sequence_parallel", None, None),
        (None, None, None),
        (1, (slice(None), slice(2, 4)), None),
    ],
)
def test_a_style_cuts_weight_and_bias(style: Any, weight: Any, bias: Any) -> None:
    found = tensor_parallel(infos(m__weight=(6, 4), m__bias=(6,)), 1, 2, {"m": style})
    normal = {name: index if len(index) > 1 else index[0] for name, index in found.items()}  # type: ignore[arg-type,index]
    assert normal == {name: index for name, index in (("m.weight", weight), ("m.bias", bias)) if index is not None}


def test_packed_styles_cut_each_half() -> None:
    found = tensor_parallel(infos(e__gate_up_proj=(3, 5, 16)), 1, 4, {"e.gate_up_proj": "packed_rowwise"})
    assert found == {"e.gate_up_proj": (slice(None), slice(None), Parts([(2, 4), (10, 12)]))}


def test_all_styles_can_be_asked_for() -> None:
    for style in STYLES:
        tensor_parallel(infos(m__weight=(8, 8)), 0, 2, {"m": style})


@pytest.mark.parametrize(
    "pattern", ["layers.*.q_proj", "model.layers.*.q_proj", "*.q_proj.weight", "model.layers.0.q_proj.weight"]
)
def test_patterns_fit_names_and_modules_with_any_prefix(pattern: str) -> None:
    assert tensor_parallel(infos(model__layers__0__q_proj__weight=(8, 8)), 0, 2, {pattern: "colwise"})


def test_the_first_pattern_that_fits_counts_and_a_full_name_before_all() -> None:
    checkpoint = infos(a__weight=(8, 8), b__weight=(8, 8))
    found = tensor_parallel(checkpoint, 0, 2, {"a": "rowwise", "*": "colwise", "b.weight": None})
    assert found == {"a.weight": (slice(None), slice(0, 4))}


def test_usual_rules_divide_a_llama(tmp_path: Path) -> None:
    shapes = {
        "model.embed_tokens.weight": (16, 8),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.o_proj.weight": (8, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 24),
        "model.layers.0.input_layernorm.weight": (8,),
        "lm_head.weight": (16, 8),
    }
    tensors = {name: np.random.default_rng(0).random(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    dims = {"model.layers.0.self_attn.o_proj.weight": 1, "model.layers.0.mlp.down_proj.weight": 1}
    with headrace.open(tmp_path) as checkpoint:
        loaded = [headrace.load(checkpoint, slices=tensor_parallel(checkpoint, rank, 4)) for rank in range(4)]
    for name, whole in tensors.items():
        parts = [rank[name].numpy() for rank in loaded]
        if name.endswith("layernorm.weight"):
            assert all((part == whole).all() for part in parts)
        else:
            assert (np.concatenate(parts, axis=dims.get(name, 0)) == whole).all()


def test_only_a_ranks_part_is_read(tmp_path: Path) -> None:
    save_file({"a.weight": np.zeros((64, 1024), np.float32)}, tmp_path / "model.safetensors")
    with headrace.open(tmp_path) as checkpoint:
        plan = headrace.plan(checkpoint, slices=tensor_parallel(checkpoint, 3, 8, {"a": "colwise"}))
    assert plan.read_nbytes == 64 * 1024 * 4 // 8


# ---- heads and fused projections


def test_fused_projections_give_each_rank_its_heads_of_every_part() -> None:
    checkpoint = infos(m__qkv_proj__weight=(48, 8), m__qkv_proj__bias=(48,))
    rule = {"qkv_proj": Split(0, parts=(32, 8, 8), heads=(8, 2, 2))}
    found = [tensor_parallel(checkpoint, rank, 4, rule) for rank in range(4)]
    assert [index["m.qkv_proj.weight"] for index in found] == [
        (Parts([(0, 8), (32, 36), (40, 44)]),),
        (Parts([(8, 16), (32, 36), (40, 44)]),),
        (Parts([(16, 24), (36, 40), (44, 48)]),),
        (Parts([(24, 32), (36, 40), (44, 48)]),),
    ]
    assert all(index["m.qkv_proj.bias"] == index["m.qkv_proj.weight"] for index in found)


def test_fewer_heads_than_ranks_are_shared_by_neighbours() -> None:
    found = [tensor_parallel(infos(k__weight=(8, 4)), rank, 4, {"k": Split(0, heads=2)}) for rank in range(4)]
    assert [index["k.weight"] for index in found] == [(slice(0, 4),)] * 2 + [(slice(4, 8),)] * 2


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (Split(0, heads=3), "divide evenly"),
        (Split(0, heads=5), "are not 5 heads"),
        (Split(0, parts=(4, 4)), "make up"),
        (Split(0, parts=5), "equal parts"),
        (Split(0, parts=(6, 6), heads=(1, 2, 3)), "belong together"),
        (Split(2), "no dimension 2"),
        ("sideways", "a rule is"),
        (True, "a rule is"),
    ],
)
def test_rules_that_cannot_be_carried_out_are_refused(rule: Any, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        tensor_parallel(infos(m__weight=(12, 4)), 0, 2, {"m": rule})


def test_a_rule_that_fits_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'\*\.q_prj'"):
        tensor_parallel(infos(m__q_proj__weight=(12, 4)), 0, 2, {"*.q_proj": "colwise", "*.q_prj": "colwise"})


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_of_the_world_is_refused(rank: int) -> None:
    with pytest.raises(OptionError, match="rank"):
        tensor_parallel(infos(m__weight=(12, 4)), rank, 2)


# ---- quantized weights


def test_block_scales_stay_in_step_with_their_weight() -> None:
    checkpoint = infos(m__weight=(576, 256), m__weight_scale_inv=(5, 2))
    found = [tensor_parallel(checkpoint, rank, 2, {"m": "colwise"}) for rank in range(2)]
    assert [(index["m.weight"], index["m.weight_scale_inv"]) for index in found] == [
        ((slice(0, 384),), (slice(0, 3),)),
        ((slice(384, 576),), (slice(3, 5),)),
    ]


def test_row_scales_and_group_scales_follow_the_dimension_they_extend_along() -> None:
    checkpoint = infos(m__weight=(8, 256), m__weight_scale=(8, 2), m__row_scale=(8, 1), m__input_scale=())
    columns, rows = (tensor_parallel(checkpoint, 1, 2, {"m": style}) for style in ("colwise", "rowwise"))
    assert columns == {name: (slice(4, 8),) for name in ("m.weight", "m.weight_scale", "m.row_scale")}
    assert rows == {"m.weight": (slice(None), slice(128, 256)), "m.weight_scale": (slice(None), slice(1, 2))}


def test_fused_parts_that_begin_inside_of_a_block_are_refused() -> None:
    checkpoint = infos(m__weight=(320, 128), m__weight_scale_inv=(3, 1))
    with pytest.raises(OptionError, match="middle of a block"):
        tensor_parallel(checkpoint, 0, 2, {"m": Split(0, parts=(192, 128))})


def test_layouts_with_inputs_first_ask_for_a_dimension() -> None:
    checkpoint = infos(m__qweight=(32, 64), m__scales=(2, 64))
    with pytest.raises(OptionError, match="inputs first"):
        tensor_parallel(checkpoint, 0, 2, {"m": "colwise"})
    assert tensor_parallel(checkpoint, 0, 2, {"m": Split(1)}) == {
        "m.qweight": (slice(None), slice(0, 32)),
        "m.scales": (slice(None), slice(0, 32)),
    }


@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([0, 1]),
)
@settings(max_examples=examples(200))
def test_ranks_together_have_every_element_of_every_part(world: int, parts: list[int], width: int, dim: int) -> None:
    shape = (sum(parts), width) if dim == 0 else (width, sum(parts))
    checkpoint: Mapping[str, TensorInfo] = infos(m__weight=shape)
    array = np.arange(sum(parts) * width).reshape(shape)
    rule = {"m": Split(dim, parts=tuple(parts))}
    pieces = [cut(array, tensor_parallel(checkpoint, rank, world, rule).get("m.weight", ())) for rank in range(world)]
    assert sorted(np.concatenate([piece.ravel() for piece in pieces]).tolist()) == list(range(array.size))
