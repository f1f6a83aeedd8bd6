"""What people install: the wheel, also made from the sdist, in an environment of its own, and the types that it brings."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "headrace"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    result = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(source: Path, folder: Path) -> Path:
    """The wheel of a folder or an sdist, without the network."""
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-index")
    run(*pip, "--no-build-isolation", "-w", folder, source)
    (wheel,) = folder.glob("headrace-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder)
    (path,) = folder.glob("headrace-*.tar.gz")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the wheel, and of this environment's packages all but its headrace."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("headrace/")}


def test_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    ours = {
        f"headrace/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*") if path.suffix in (".py", ".c", ".h", ".typed")
    }
    assert files_of(wheel) == ours
    assert {"headrace/py.typed", "headrace/testing/simulated/runtime.c", "headrace/_bench/_rivals.py"} <= ours


def test_sdist_makes_the_same_wheel_and_has_the_tests(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    assert files_of(build(sdist, tmp_path)) == files_of(wheel)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "tests/test_packaging.py", "docs/design.md", "scripts/demo", "pyproject.toml"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".cache", ".venv"))]


def test_metadata_names_versions_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    assert f"\nVersion: {headrace.__version__}\n" in metadata
    assert "\nRequires-Python: >=3.10\n" in metadata
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.MULTILINE))
    assert {"torch", "s3", "gcs", "azure", "fsspec", "progress", "bench"} <= extras
    page = (ROOT / "docs" / "install.md").read_text()
    assert [extra for extra in sorted(extras) if not re.search(rf"^\| .*`{extra}`", page, re.MULTILINE)] == [], (
        "not in docs/install.md"
    )


def test_installed_command_runs_from_the_wheel(python: Path, tmp_path: Path) -> None:
    assert run(python.with_name("headrace"), "--version", cwd=tmp_path) == f"headrace {headrace.__version__}\n"
    where = run(python, "-c", "import headrace; print(headrace.__file__)", cwd=tmp_path)
    assert where.startswith(str(python.parents[1]))


def test_every_module_can_be_imported(python: Path, tmp_path: Path) -> None:
    """But for those that stand in for another package's, which need it."""
    code = """
import importlib, pkgutil, headrace
failed = []
for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
    if module.name.rpartition(".")[2] == "__main__" or ".integrations." in module.name or "_rivals" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("headrace"):
            failed.append((module.name, str(error)))
print(failed)
"""
    assert run(python, "-c", code, cwd=tmp_path) == "[]\n"


def test_types_are_complete_for_a_program_that_uses_them(python: Path, tmp_path: Path) -> None:
    sample = ROOT / "tests" / "typing" / "sample.py"
    mypy = (sys.executable, "-m", "mypy", "--strict", "--config-file", "/dev/null", "--python-executable", python)
    assert run(*mypy, "--cache-dir", tmp_path, sample, cwd=tmp_path).startswith("Success")


def test_the_program_uses_every_public_name() -> None:
    sample = (ROOT / "tests" / "typing" / "sample.py").read_text()
    assert [name for name in headrace.__all__ if not re.search(rf"\b{name}\b", sample)] == []


def test_types_refuse_what_is_wrong(python: Path, tmp_path: Path) -> None:
    wrong = ROOT / "tests" / "typing" / "wrong.py"
    expected = re.findall(r"^(.*)  # ([a-z-]+)$", wrong.read_text(), re.MULTILINE)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--config-file", "/dev/null", "--python-executable", python)
    result = subprocess.run(
        [*map(str, mypy), "--cache-dir", str(tmp_path), str(wrong)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    lines = wrong.read_text().splitlines()
    found = re.findall(r"wrong\.py:(\d+): error: .*\[([a-z-]+)\]$", result.stdout, re.MULTILINE)
    assert [(lines[int(line) - 1].partition("  #")[0], code) for line, code in found] == expected, result.stdout
