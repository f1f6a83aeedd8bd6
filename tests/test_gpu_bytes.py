"""The loads of scripts/gpu on the simulated runtime: every mode brings the bytes of the file, and rates stand beside a floor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_gpu import needs_compiler, simulated_gpu

from headrace.testing.acceptance import _loads, _rates
from headrace.testing.acceptance._bytes import load_bytes
from headrace.testing.acceptance._runtime import real

pytestmark = pytest.mark.slow
ABSENT = ("orjson", "obstore", "typer", "rich", "click", "botocore", "google", "azure", "fsspec", "safetensors", "pytest")


@needs_compiler
def test_every_mode_brings_the_bytes_of_the_file_where_only_torch_and_numpy_are_installed(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"for name in {ABSENT!r}: sys.modules[name] = None\n"
        "from headrace.testing.acceptance._probes import main; main()"
    )
    command = [sys.executable, "-c", code, "load bytes", "simulated", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert len(answers) >= 12
    assert set(answers.values()) == {"equal"}, answers


@needs_compiler
def test_rates_stand_beside_bare_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loads, "NBYTES", 8 << 20)
    monkeypatch.setattr(_rates, "_SOURCE_NBYTES", 4 << 20)
    monkeypatch.setattr(_rates, "_COPY_NBYTES", 1 << 20)
    with simulated_gpu() as gpu:
        found = _rates.measured(tmp_path, gpu.device, None)
    assert found.keys() == {
        "bare copies, page-locked",
        "bare copies, pageable",
        "headrace",
        "headrace, pin='off'",
        "headrace, to BF16 on the host",
        "headrace, to BF16 on the device",
    }
    assert str(found["bare copies, page-locked"]).endswith(", 1.00")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.leaky_ok("the driver opens its files once in a process")
def test_every_mode_brings_the_bytes_to_a_gpu(tmp_path: Path) -> None:
    answers = load_bytes(real(), tmp_path)
    assert set(answers.values()) == {"equal"}, answers
