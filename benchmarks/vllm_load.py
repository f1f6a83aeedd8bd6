"""What loading weights costs a process of vLLM's: seconds, CPU and memory, with headrace's loader or with vLLM's own.

    .cache/vllm/venv/bin/python benchmarks/vllm_load.py --load-format headrace [--gib 1] [--model FOLDER or URL]

vLLM comes from `scripts/test --vllm`, which makes its environment. A Llama of random weights is written where no model is given;
run it once before anything is compared. Measured is the loader's `load_weights` alone. `anonymous` is memory that the process has
for itself, parameters included, as these are touched for the first time; `mapped` are pages of files in it; `kept` is what of the
first is still there afterwards.
"""

from __future__ import annotations

import argparse
import json
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
TICK_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--load-format", default="headrace")
    parser.add_argument("--extra", default="{}", help="JSON, as of --model-loader-extra-config")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model that is written")
    parser.add_argument("--model", help="a folder or url; left out: one is written to --folder")
    parser.add_argument("--folder", type=Path, default=Path(".cache/vllm/models"))
    given = parser.parse_args()
    model = given.model or str(written(given.folder / f"llama-{given.gib:g}", given.gib))
    print(
        json.dumps(
            {"load_format": given.load_format, "model": model} | measured(model, given.load_format, json.loads(given.extra))
        )
    )


def written(folder: Path, gib: float) -> Path:
    """A Llama of about that size in bf16, in shards, with an index."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "config.json").exists():
        return folder
    layers = max(1, round(gib * (1 << 30) / (2 * 12.6e6)))
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="256MB")
    return folder


def measured(model: str, load_format: str, extra: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    found: dict[str, Any] = {}
    theirs = DefaultModelLoader.load_weights  # headrace's loader has it from there

    def load_weights(self: Any, module: Any, model_config: Any) -> None:
        found.update(watched(lambda: theirs(self, module, model_config)))
        found["parameters_mib"] = sum(each.numel() * each.element_size() for each in module.parameters()) // MIB

    DefaultModelLoader.load_weights = load_weights
    LLM(
        model=model,
        load_format=load_format,
        model_loader_extra_config=extra,
        skip_tokenizer_init=True,
        max_model_len=128,
        enforce_eager=True,
    )
    return found


def watched(work: Callable[[], None]) -> dict[str, Any]:
    """Run it, with a thread that looks at this process's memory."""
    before, peak, done = memory(), memory(), threading.Event()

    def watch() -> None:
        while not done.wait(TICK_S):
            for name, nbytes in memory().items():
                peak[name] = max(peak[name], nbytes)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started, cpu = time.perf_counter(), cpu_seconds()
    work()
    seconds, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    after = memory()
    done.set()
    watcher.join()
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "anonymous_mib": (peak["RssAnon"] - before["RssAnon"]) // MIB,
        "mapped_mib": (peak["RssFile"] + peak["RssShmem"] - before["RssFile"] - before["RssShmem"]) // MIB,
        "kept_mib": (after["RssAnon"] - before["RssAnon"]) // MIB,
    }


def memory() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith("Rss"))
    return {name: int(rest.split()[0]) * 1024 for name, rest in pairs}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
