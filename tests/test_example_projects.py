"""The projects under examples/ run as their READMEs say, each in a folder of its own, and print what is shown there.

A console block is one shell: lines with "$ " are typed, the others are what is printed. Times and tokens may differ.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PROJECTS = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
PYTHONS = {
    "vllm_s3": (ROOT / ".cache/vllm/venv/bin", "vllm", "--vllm"),
    "transformers_bucket": (ROOT / ".cache/transformers/bin", "transformers", "--transformers"),
}
RUN = [name for name in PROJECTS if "```console" in (EXAMPLES / name / "README.md").read_text()]
SURROUNDINGS = {
    "HF_HUB_OFFLINE": "1",
    "HEADRACE_CACHE": "{folder}/cache",
    "VLLM_ASSETS_CACHE": "{folder}/assets",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# What the shell begins with: no store's variables of whoever runs the tests, and what it starts ends with it.
FRESH = """
unset $(compgen -e | grep -E '^(AWS|RUNAI)_')
trap 'set +e; kill $(jobs -p) 2>/dev/null; wait' EXIT
set -e
"""
_MARK = "-- next --"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def steps(readme: str) -> list[tuple[str, str]]:
    """(command, what it prints), in order."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"^```console\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL):
        for typed in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = typed.partition("\n")
            found.append((command, printed))
    return found


def evened(printed: str) -> str:
    """Without what differs from run to run."""
    printed = re.sub(r"\b\d+(\.\d+)?( ?)(s|ms|GiB/s|GB/s)\b", r"#\2\3", printed)
    return re.sub(r"\[\d+(, \d+)*\]", "[#]", printed).strip()


@pytest.fixture
def ports() -> dict[str, str]:
    """Free ones in place of those of the READMEs."""
    with ExitStack() as stack:
        sockets = {port: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for port in ("9000", "8000")}
        return {port: str(listening.getsockname()[1]) for port, listening in sockets.items()}


def shell_of(name: str) -> Path:
    """Where the programs are that a project needs. Skips where they are not."""
    folder, package, flag = PYTHONS.get(name, (Path(sys.executable).parent, "torch", ""))
    python = folder / "python"
    if (
        not python.exists()
        or subprocess.run([python, "-c", f"import {package}, headrace"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"{package} is not installed here: scripts/test {flag} makes such an environment")
    return folder


@pytest.mark.parametrize("name", RUN)
def test_a_project_prints_what_its_readme_shows(
    name: str, tmp_path: Path, ports: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "simulated" in (EXAMPLES / name / "README.md").read_text() and shutil.which("cc") is None:
        pytest.skip("the simulated runtime needs a C compiler")
    programs, there = shell_of(name), tmp_path / name
    shutil.copytree(EXAMPLES / name, there, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    typed = steps((there / "README.md").read_text())
    lines = [FRESH]
    for command, _ in typed:
        for port, free in ports.items():
            command = command.replace(port, free)
        lines += [command, f"echo '{_MARK}'"]
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    for variable, value in SURROUNDINGS.items():
        monkeypatch.setenv(variable, value.format(folder=tmp_path))
    ran = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=there, capture_output=True, text=True, timeout=500, check=False)
    logs = "".join(path.read_text()[-3000:] for path in there.glob("*.log"))
    assert ran.returncode == 0, ran.stdout + ran.stderr + logs
    printed = [evened(part) for part in ran.stdout.split(f"{_MARK}\n")]
    assert printed[: len(typed)] == [evened(expected) for _, expected in typed]


def test_every_project_is_listed_and_has_a_readme() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert [name for name in PROJECTS if f"[{name}]({name})" not in listed] == []
    assert sorted(path.parent.name for path in EXAMPLES.glob("*/README.md")) == PROJECTS


def test_links_lead_somewhere() -> None:
    for page in EXAMPLES.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_other_output_than_what_is_shown_is_noticed() -> None:
    shown = steps("```console\n$ a\nround 1: 3.5 ms, [1, 2], equal\n$ b\n```\n")
    assert [command for command, _ in shown] == ["a", "b"]
    assert evened(shown[0][1]) == evened("round 1: 17 ms, [3], equal\n")
    assert evened(shown[0][1]) != evened("round 1: 17 ms, [3], DIFFERENT\n")
