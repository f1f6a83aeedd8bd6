"""The examples run as docs/distributed.md says, with a small model."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoints import random_entry, write

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
LAYERS, HIDDEN = 4, 256
FILE = "model-00002-of-00002.safetensors"

pytestmark = pytest.mark.slow  # processes of torch's own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the names of Llama, and tables: two shards."""
    folder = tmp_path_factory.mktemp("model")
    for part in range(2):
        contents = {}
        for layer in range(part * LAYERS // 2, (part + 1) * LAYERS // 2):
            prefix = f"model.layers.{layer}"
            for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
                contents[f"{prefix}.{name}.weight"] = random_entry("I16", (HIDDEN, HIDDEN), seed=len(contents))
            contents[f"{prefix}.input_layernorm.weight"] = random_entry("I16", (HIDDEN,), seed=len(contents))
            contents[f"{prefix}.engram.table"] = random_entry("I16", (1000, HIDDEN), seed=len(contents))
        write(folder / f"model-{part + 1:05}-of-00002.safetensors", contents)
    return folder


def commands() -> list[str]:
    """What docs/distributed.md says to type, one command a line."""
    text = (ROOT / "docs" / "distributed.md").read_text()
    blocks = [block.removeprefix("\n") for block in text.split("```")[1::2] if block.startswith("\n")]
    return [line.strip() for block in blocks for line in block.splitlines() if "examples/" in line]


def words(command: str, model: Path, folder: Path) -> list[str]:
    """A command of the page, with a model of the test's own and programs of this environment."""
    command = command.replace("models/llama", str(model)).replace("metadata/llama", str(folder / "metadata"))
    command = command.replace("/dev/shm/llama-tp2", str(folder / "sharded"))
    parts = shlex.split(command)
    return [str(BIN / part) if part in ("torchrun", "python") else part for part in parts]


def run_all(commands: Sequence[Sequence[str]]) -> str:
    """Run them side by side; what they print, when all have ended well."""
    started = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(printed)
    return "".join(printed)


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@pytest.fixture(autouse=True)
def _exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model was just written, and what is in memory ranks would take each for itself."""
    monkeypatch.setenv("HEADRACE_PARTITION", "chunks")


ON_ONE_NODE = [command for command in commands() if "--nnodes" not in command]
ON_SEVERAL = [command for command in commands() if "--nnodes" in command]


def test_the_page_has_commands_for_every_example() -> None:
    assert len(ON_SEVERAL) >= 1
    named = {word for command in commands() for word in command.split() if word.startswith("examples/")}
    assert named == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("command", ON_ONE_NODE)
def test_an_example_runs_on_one_node(command: str, model: Path, tmp_path: Path) -> None:
    printed = run_all([words(command, model, tmp_path)])
    world = re.search(r"--nproc-per-node (\d+)", command)
    for rank in range(int(world[1]) if world else 0):
        assert f"rank {rank} of" in printed
    if "group.py" in command:
        read = sum(int(nbytes.replace(",", "")) for nbytes in re.findall(r"([\d,]+) read here", printed))
        assert read == sum(path.stat().st_size for path in model.iterdir()) - header_nbytes(model)
        assert "over the shared memory of their node" in printed


@pytest.mark.parametrize("command", ON_SEVERAL)
def test_an_example_runs_on_two_nodes(command: str, model: Path, tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-pf", "--mount-proc", "true"], check=False).returncode:
        pytest.skip("a node of its own is a PID namespace here, and this user may not make one")
    command = command.replace("HOST", "localhost").replace("29500", str(free_port()))
    nodes = [command, command.replace("--node-rank 0", "--node-rank 1")]
    printed = run_all([["unshare", "-pf", "--kill-child", "--mount-proc", *words(node, model, tmp_path)] for node in nodes])
    for rank in range(4):
        assert f"rank {rank} of 4" in printed
    if "group.py" in command:
        assert "over Gloo" in printed


def header_nbytes(model: Path) -> int:
    """Bytes of the shards that are no tensor's."""
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in model.iterdir())
