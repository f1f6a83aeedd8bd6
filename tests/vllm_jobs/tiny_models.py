"""Tiny models with random weights, which vLLM runs on a CPU in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    XLMRobertaConfig,
    XLMRobertaModel,
)


def write_llama(folder: Path, *, tied: bool = False, seed: int = 7, shard_size: str = "200KB") -> Path:
    """A Llama of two layers in several shards, with an index and a tokenizer of bytes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard_size)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: at + 2 for at, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def add_stray(folder: Path) -> None:
    """A file of weights that the index does not name, as Mistral's folders have one: half of what is read would be wrong."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = sorted(set(index["weight_map"].values()))[0]
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / shard).items()}
    save_file(tensors, folder / "consolidated.safetensors")


def write_mixtral(folder: Path, *, seed: int = 9) -> Path:
    """A mixture of four experts, in two layers."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=1,
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="400KB")
    _write_tokenizer(folder)
    return folder


def write_in_parts(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A Llama for `models_in_parts.LlamaInParts`, beside a file that is not one of the parts; and its weights."""
    whole = write_llama(folder.parent / "whole", shard_size="1GB")
    weights = load_file(whole / "model.safetensors")
    folder.mkdir()
    (folder / "head").mkdir()
    for file in whole.glob("*.json"):
        (folder / file.name).write_text(file.read_text().replace("LlamaForCausalLM", "LlamaInParts"))
    names = sorted(name for name in weights if name != "lm_head.weight")
    for number, some in enumerate((names[::2], names[1::2])):
        save_file({name: weights[name] for name in some}, folder / f"part-{number}.safetensors")
    save_file({"weight": weights["lm_head.weight"]}, folder / "head" / "model.safetensors")
    save_file({name: torch.zeros_like(weights[name]) for name in names}, folder / "other.safetensors")
    return folder, weights


def write_bge_m3(folder: Path) -> Path:
    """A small model of embeddings with two heads, which are saved by pickle in files of their own."""
    torch.manual_seed(3)
    config = XLMRobertaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=260,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        dtype="float32",
    )
    XLMRobertaModel(config).save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text()) | {"architectures": ["BgeM3EmbeddingModel"]}
    (folder / "config.json").write_text(json.dumps(told))
    for name, size in (("sparse_linear", 1), ("colbert_linear", 64)):
        torch.save(torch.nn.Linear(64, size).state_dict(), folder / f"{name}.pt")
    _write_tokenizer(folder)
    return folder
