"""docs/migrating.md: code of other loaders runs as it stands there, where the benchmarks have installed them; options exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from documentation import ROOT, Block, blocks_of, layers, read_page
from safetensors.torch import save_file

import headrace
from headrace._options import _RUNAI_NAMES

PAGE = "docs/migrating.md"
TEXT = read_page(PAGE)
PYTHON = ROOT / ".cache" / "bench-peers" / "bin" / "python"
OTHERS = [block for block in blocks_of(PAGE, TEXT) if block.reason == "needs another loader"]


def loader_of(block: Block) -> str:
    """The package that a block is about: what it imports last."""
    return re.findall(r"^from (\w+)", block.text, re.M)[-1]


def test_every_loader_that_runs_without_a_gpu_has_a_block() -> None:
    assert {loader_of(block) for block in OTHERS} == {"safetensors", "runai_model_streamer", "fastsafetensors", "tensorizer"}


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="scripts/bench has not installed the other loaders")
@pytest.mark.parametrize("block", OTHERS, ids=loader_of)
def test_code_of_another_loader_runs_as_it_is_shown(block: Block, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "minilm"
    folder.mkdir(parents=True)
    save_file(layers(), folder / "model.safetensors")
    ends = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"  # native clients hang or crash now and then at the end
    done = subprocess.run([str(PYTHON), "-c", block.text + ends], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_run_ai_variables_are_mapped_to_the_options_that_read_them() -> None:
    section = TEXT.partition("## From Run:ai")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| `(\w+)`", section, re.M)
    told = {f"RUNAI_STREAMER_{variable}": option for variable, option in rows}
    assert told.pop("RUNAI_STREAMER_FS_STRATEGY") == "direct_io"  # which is not read
    assert told == {variable: option for option, variable in _RUNAI_NAMES.items()}


def test_every_variable_of_ours_is_one_of_an_option() -> None:
    options = {f"HEADRACE_{name.upper()}" for name in headrace.Options.__dataclass_fields__}
    switches = {"HEADRACE_VLLM_TAKEOVER", "HEADRACE_SGLANG_TAKEOVER"}
    assert set(re.findall(r"\bHEADRACE_[A-Z_]+\b", TEXT)) <= options | switches


def test_every_function_of_ours_exists() -> None:
    named = set(re.findall(r"`headrace\.(\w+)\(", TEXT)) | set(re.findall(r"`headrace\.(\w+)`", TEXT))
    assert {name for name in named if not hasattr(headrace, name)} == set()
