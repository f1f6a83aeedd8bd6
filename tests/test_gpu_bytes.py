"""The loads of scripts/gpu on the simulated runtime: every mode brings the bytes of the file."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from simulated_gpu import needs_compiler

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.mark.slow
@needs_compiler
def test_every_mode_brings_the_bytes_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    runtime = importlib.import_module("_gpu_runtime").simulated()
    answers = importlib.import_module("_gpu_bytes").load_bytes(runtime, tmp_path)
    assert len(answers) >= 12
    assert set(answers.values()) == {"equal"}, answers


@pytest.mark.gpu
@pytest.mark.leaky_ok("the driver opens its files once in a process")
def test_every_mode_brings_the_bytes_to_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    runtime = importlib.import_module("_gpu_runtime").real()
    answers = importlib.import_module("_gpu_bytes").load_bytes(runtime, tmp_path)
    assert set(answers.values()) == {"equal"}, answers
