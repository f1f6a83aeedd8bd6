"""docs/tuning.md: every option has its place there, and the table is what benchmarks/tuning.py prints, but for the figures."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import random_entry, write
from documentation import ROOT, read_page

import headrace

TEXT = read_page("docs/tuning.md")
PROGRAM = ROOT / "benchmarks" / "tuning.py"


@pytest.mark.parametrize("option", headrace.Options.__dataclass_fields__)
def test_every_option_has_a_place(option: str) -> None:
    assert re.search(rf"`{option}[`=]|\*\*{option}\*\*|^### .*\b{option}\b", TEXT, re.M)


def rows_of(printed: str) -> list[str]:
    """The options and ways of a table, without their figures."""
    return [re.split(r" {3,}|  (?=\d)", line.strip())[0] for line in printed.splitlines()[1:]]


def test_the_table_has_the_ways_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    ways = runpy.run_path(str(PROGRAM))["WAYS"]
    (shown,) = re.findall(r"```text\n(.*?)```", TEXT, re.S)
    assert rows_of(shown) == [row for option, each in ways.items() for row in (option, *(name for name, _, _ in each))]


@pytest.mark.slow
def test_the_benchmark_prints_such_a_table(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {f"w{i}": random_entry("BF16", (64, 64), seed=i) for i in range(8)})
    command = [sys.executable, str(PROGRAM), str(tmp_path), "mmap", "verify", "names, slices"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {"mmap='off'", "mmap='auto'", "verify=True", "rows"} <= {*rows_of(done.stdout)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors"]


def test_the_figures_of_a_gpu_are_in_one_place() -> None:
    assert TEXT.count("<!-- gpu figures -->") == TEXT.count("<!-- end of gpu figures -->") == 1
