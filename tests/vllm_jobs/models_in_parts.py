"""Models whose weights are in several places, as vLLM has a few, large ones: a Llama that says the same of itself."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.llama import LlamaForCausalLM


class LlamaInParts(LlamaForCausalLM):
    """Its own checkpoint is in files called part-*; its head is below, in head/, without the first part of its name."""

    allow_patterns_overrides: ClassVar = ["part-*.safetensors"]

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config
        self.secondary_weights = [
            DefaultModelLoader.Source(model_or_path=config.model, revision=config.revision, subfolder="head", prefix="lm_head.")
        ]
