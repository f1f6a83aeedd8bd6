"""The rules of the house hold, and breaking one is caught: each check is also run on a copy of the source with a fault put in."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
CONTRACTS = ("floors", "sources", "devices", "seam", "no_torch")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package in a folder of its own, beside the project's configuration."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src" / "headrace", tmp_path / "src" / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "src" / "headrace"


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=100, check=False)


def lint_imports(package: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    selection = [argument for contract in contracts for argument in ("--contract", contract)]
    # The configuration is that of the current folder; the copy is checked, and not the installed package.
    command = ["env", f"PYTHONPATH={package.parent}", BIN / "lint-imports", "--no-cache", "--no-logo", *selection]
    return run(*command, cwd=package.parents[1])


def add_line(package: Path, module: str, line: str) -> None:
    """Add a line to a module of the copy, which may be a package; a module that does not exist yet is made."""
    path = package.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    path.touch()
    path.write_text(path.read_text() + f"\n{line}\n")


def test_contracts_hold() -> None:
    result = lint_imports(ROOT / "src" / "headrace", *CONTRACTS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(CONTRACTS)} kept, 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("contract", "module", "imported"),
    [
        pytest.param("no_torch", "sources.file", "torch", id="source-imports-torch"),
        pytest.param("no_torch", "_header", "numpy", id="header-imports-numpy"),
        pytest.param("no_torch", "_newly_written", "torch", id="new-module-imports-torch"),
        pytest.param("seam", "_engine", "headrace.sources.file", id="engine-imports-source"),
        pytest.param("seam", "_staging", "headrace.devices.cuda", id="staging-imports-device"),
        pytest.param("seam", "_checkpoint", "headrace.sources.newly_written", id="checkpoint-imports-new-source"),
        pytest.param("floors", "errors", "headrace._options", id="errors-imports-options"),
        pytest.param("floors", "_plan", "headrace._engine", id="plan-imports-engine"),
        pytest.param("floors", "_dtypes", "headrace._options", id="neighbours-on-one-floor"),
        pytest.param("floors", "sources.file", "headrace.devices.cpu", id="source-imports-device"),
        pytest.param("sources", "sources.base", "headrace.sources.file", id="base-imports-adapter"),
        pytest.param("devices", "devices.base", "headrace.devices.cuda", id="base-imports-device"),
    ],
)
@pytest.mark.slow
def test_forbidden_import_is_caught(copy: Path, contract: str, module: str, imported: str) -> None:
    if imported.startswith("headrace."):
        add_line(copy, imported.removeprefix("headrace."), "")
    add_line(copy, module, f"import {imported}")
    result = lint_imports(copy, contract)
    assert result.returncode == 1
    assert "0 kept, 1 broken" in result.stdout, result.stdout + result.stderr
    assert f"{contract}: " in result.stdout
    assert f"headrace.{module} -> {imported}" in " ".join(result.stdout.split())


def test_module_without_a_floor_is_caught(copy: Path) -> None:
    add_line(copy, "_newly_written", "")
    result = lint_imports(copy, "floors")
    assert result.returncode == 1
    assert "- headrace._newly_written" in result.stdout


@pytest.mark.parametrize(
    ("module", "code", "banned"),
    [
        pytest.param("_api", "import os\n\nHOME = os.environ\n", True, id="reads-environ"),
        pytest.param("_api", "from os import environ\n\nHOME = environ\n", True, id="imports-environ"),
        pytest.param("cli.load", 'import os\n\nHOME = os.getenv("HOME")\n', True, id="getenv"),
        pytest.param("sources.file", 'import os\n\nos.putenv("A", "b")\n', True, id="putenv"),
        pytest.param("_environment", "import os\n\nHOME = os.environ\n", False, id="environment-may-read-environ"),
        pytest.param("_engine", "import torch\n\nCOUNT = torch.cuda.device_count()\n", True, id="torch.cuda"),
        pytest.param(
            "devices.cuda._torch", "import torch\n\nCOUNT = torch.cuda.device_count()\n", False, id="cuda-may-name-torch.cuda"
        ),
        pytest.param("_engine", "import time\n\ntime.sleep(1)\n", True, id="sleep"),
    ],
)
def test_banned_name_is_caught(tmp_path: Path, module: str, code: str, banned: bool) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path.joinpath("src", "headrace", *module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    path.write_text(code)
    result = run(BIN / "ruff", "check", "--no-cache", "--output-format", "json", path.relative_to(tmp_path), cwd=tmp_path)
    assert {finding["code"] for finding in json.loads(result.stdout)} == ({"TID251"} if banned else set())


def test_import_needs_neither_torch_nor_the_command_lines_packages() -> None:
    code = "import headrace, sys, json; print(json.dumps(sorted(sys.modules)))"
    result = run(sys.executable, "-W", "error", "-c", code, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert {"torch", "numpy", "safetensors", "typer", "click", "rich", "matplotlib"}.isdisjoint(json.loads(result.stdout))


def test_version_is_exposed() -> None:
    assert headrace.__version__[0].isdigit()


def test_wheel_carries_types_and_licence_and_nothing_else(tmp_path: Path) -> None:
    result = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("headrace-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "headrace/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"headrace", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}


@pytest.mark.parametrize("name", ["demo", "test", "check", "bench", "gpu"])
def test_script_parses_and_is_executable(name: str) -> None:
    script = ROOT / "scripts" / name
    assert script.stat().st_mode & 0o111
    assert run("bash", "-n", script, cwd=ROOT).returncode == 0


LEAKY_TESTS = """
import gc, os, sys, threading
import conftest, pytest

conftest._JOIN_LIMIT_S = 0.05

def start(name):
    threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()

def test_other_thread_is_fine(): start("other")
def test_thread_that_ends_is_fine(): threading.Thread(target=int, name="headrace-ends").start()
@pytest.mark.leaky_ok("shown here")
def test_marked_is_fine(): os.open("/dev/null", os.O_RDONLY)
def test_abandoned_file_is_fine():
    cycle = [open("/dev/null")]
    cycle.append(cycle)
def test_descriptor(): os.open("/dev/null", os.O_RDONLY)
def test_thread(): start("headrace-reader")
def test_interval(): sys.setswitchinterval(0.001)
def test_collector(): gc.disable()
"""


@pytest.mark.slow
def test_what_a_test_leaves_behind_is_caught(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ["conftest.py", "budget.py"]:
        shutil.copy(ROOT / "tests" / name, tmp_path)
    (tmp_path / "test_leaky.py").write_text(LEAKY_TESTS)
    # The file that is abandoned on purpose warns when it is collected; here that is no error.
    result = run(sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "test_leaky.py", cwd=tmp_path)
    caught = {line.split()[1].split("::")[1] for line in result.stdout.splitlines() if line.startswith("ERROR ")}
    assert caught == {"test_descriptor", "test_thread", "test_interval", "test_collector"}, result.stdout
    assert "8 passed" in result.stdout  # the tests themselves; what they leave behind is an error of the fixture


def test_every_seeded_bug_has_its_place_in_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    mutants = importlib.import_module("_mutants").MUTANTS
    texts = {mutant: (ROOT / "src" / "headrace" / mutant.file).read_text() for mutant in mutants}
    assert not [mutant.name for mutant, text in texts.items() if text.count(mutant.old) != 1 or mutant.new == mutant.old]
