"""Engines of vLLM for tests, and what a model in one has. Also imported by programs that run in processes of their own."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PROMPT = "hello, world"
HERE = Path(__file__).parent

RANKS = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from engines import digests_of_model, engine, tokens

if __name__ == "__main__":
    found = []
    for model, load_format, extra, arguments, calls, is_asked in json.loads(sys.argv[2]):
        llm = engine(model, load_format, extra, tensor_parallel_size=2, **arguments)
        found.append([llm.apply_model(digests_of_model), tokens(llm) if is_asked else []])
        for name, keywords in calls:
            llm.collective_rpc(name, kwargs=keywords)
            found.append([llm.apply_model(digests_of_model), tokens(llm)])
        del llm
    print("FOUND", json.dumps(found))
"""


def engine(model: str | Path, load_format: str, extra: dict[str, Any] | None = None, **arguments: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model),
        load_format=load_format,
        model_loader_extra_config=extra or {},
        max_model_len=128,
        enforce_eager=True,
        **arguments,
    )


def digests(llm: Any) -> dict[str, str]:
    found: dict[str, str] = llm.apply_model(digests_of_model)[0]
    return found


def digests_of_model(model: Any) -> dict[str, str]:
    import torch

    return {
        name: hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


def spoil(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.zero_()


def tokens(llm: Any) -> list[int]:
    from vllm import SamplingParams

    return list(llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids)


def load(
    model: str | Path,
    load_format: str,
    extra: dict[str, Any] | None = None,
    *,
    calls: list[Any] | None = None,
    is_asked: bool = True,
    **arguments: Any,
) -> list[Any]:
    """A line for `on_two_ranks`.

    Args:
        calls: (name, keywords) of methods of workers; the parameters are looked at after each.
        is_asked: whether the model has to say something.
        arguments: of the engine.
    """
    return [str(model), load_format, extra or {}, arguments, calls or [], is_asked]


def on_two_ranks(*loads: list[Any], folder: Path) -> tuple[list[Any], str]:
    """[[digests of each rank], tokens] of each load and each call after it, and what was logged."""
    script = folder / "ranks.py"
    script.write_text(RANKS)
    arguments = [sys.executable, str(script), json.dumps([str(HERE), str(HERE.parent)]), json.dumps(loads)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=800, cwd=folder, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[0][6:]), done.stdout + done.stderr


def copy_config(model: Path, folder: Path) -> Path:
    """Config and tokenizer of a model, without its index and weights."""
    folder.mkdir(exist_ok=True)
    for file in model.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, folder)
    return folder
