"""Tiny models with random weights, which vLLM runs on a CPU in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


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
    from safetensors.torch import load_file, save_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = sorted(set(index["weight_map"].values()))[0]
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / shard).items()}
    save_file(tensors, folder / "consolidated.safetensors")
