"""Pages of the documentation, taken apart: blocks of code, why some are not run, links and headings; and a reader who runs them.

A block in a fence without a language, or in `sh`, is what one types into a shell; `python` is what it says. What should not be
run has a comment in front of it: `<!-- not run: needs a GPU -->`, with one of the reasons below.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import torch
from http_servers import free_port
from typer.testing import CliRunner

from headrace.cli import app

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

# Why a block is not run, and who runs it then.
REASONS = {
    "needs a GPU": "nobody; tests/test_simulated.py, test_pipeline.py and test_gds.py run the same calls on simulated devices",
    "needs vLLM": "tests/vllm_jobs, by scripts/test --vllm",
    "needs SGLang": "nobody; tests/test_sglang_plugin.py has its hooks",
    "needs transformers": "tests/test_transformers.py, by scripts/test --transformers",
    "needs diffusers": "tests/test_diffusers.py, by scripts/test --transformers",
    "needs an account at a store": "nobody; tests/test_source_*.py give the same credentials to servers on loopback",
    "needs the Azure emulator": "tests/test_source_azure.py, where it is installed",
    "needs another loader": "tests/test_migrating.py, where the benchmarks have installed it",
    "needs several ranks": "tests/test_examples.py runs the examples that hold these lines",
    "run by tests/test_examples.py": "tests/test_examples.py",
    "takes minutes": "people, and scripts in .ci",
    "installs packages": "people, and tests/test_packaging.py",
    "describes interfaces": "nobody; it is no program",
}

OTHER_LANGUAGES = frozenset({"text", "json", "toml", "yaml"})  # shown, and not run

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)
_REASON = re.compile(r"<!-- not run: (.*?) -->\s*\Z")
_LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)\)|!\[[^\]]*\]\((?P<image>[^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.M)


class Block(NamedTuple):
    """A block of code.

    Attributes:
        page: below the root of the project.
        line: of its first line of code.
        language: 'python', 'sh' or what the fence says.
        reason: why it is not run; None where it is.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def is_code(self) -> bool:
        return self.language in ("python", "sh")


def pages() -> list[str]:
    """All pages, as paths below the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


def read_page(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str, text: str) -> list[Block]:
    """The blocks of a page, in order."""
    found = []
    for fence in _FENCE.finditer(text):
        reason = _REASON.search(text[: fence.start()])
        line = text.count("\n", 0, fence.start("text")) + 1
        found.append(Block(page, line, fence["language"] or "sh", dedent(fence["text"]), reason and reason[1]))
    return found


def prose_of(text: str) -> str:
    """A page without its blocks, comments and code."""
    return re.sub(r"`[^`\n]+`", "`", re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.S))


def links_of(text: str) -> list[str]:
    """Targets of links and images that lead to files of the project, or to a heading."""
    targets = [found["target"] or found["image"] for found in _LINK.finditer(prose_of(text))]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors_of(text: str) -> set[str]:
    """What headings are called in links, as the site does it (Python-Markdown's toc)."""
    anchors: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = unicodedata.normalize("NFKD", re.sub(r"[`*]|\]\([^)]*\)", "", heading)).encode("ascii", "ignore").decode()
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        number = 1
        anchor = name
        while anchor in anchors:
            anchor, number = f"{name}_{number}", number + 1
        anchors.add(anchor)
    return anchors


# -- running -------------------------------------------------------------------------------------------------------------------


@dataclass
class Reader:
    """Somebody who types what a page says into a folder, line by line.

    What is exported counts from there on, for Python too; what is started in the background runs until the page has been read.
    `headrace ...` runs in this process, as a process of its own would import torch each time (seconds); all else in bash.

    Attributes:
        folder: where.
        environment: sets a variable of this process until the end of the test.
        stand_ins: {text of the page: what is put in its place}, for addresses and ports that belong to others here.
        names: what Python blocks find and leave.
    """

    folder: Path
    environment: Any
    stand_ins: dict[str, str]
    names: dict[str, Any]

    def __post_init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def run(self, block: Block) -> None:
        """Run a block, or raise what went wrong."""
        text = block.text
        for theirs, ours in sorted(self.stand_ins.items(), key=lambda pair: -len(pair[0])):
            text = text.replace(theirs, ours)
        if block.language == "python":
            # Blank lines in front, so that a traceback names the line of the page.
            exec(compile("\n" * (block.line - 1) + text, str(ROOT / block.page), "exec"), self.names)
            return
        for line in _lines(text):
            self._type(line, f"{block.page}:{block.line}")

    def _type(self, line: str, place: str) -> None:
        words = shlex.split(line, comments=True)
        if not words:
            return
        if words[-1] == "&":
            self._start(line)
        elif words[0] == "export":
            self._export(line)
        elif words[0] == "headrace" and not set("|>;&$") & set(line):
            result = CliRunner().invoke(app, words[1:], prog_name="headrace")
            assert result.exit_code == 0, f"{place}: {line}\n{result.output}"
        else:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", line], cwd=self.folder, env=self._variables(), capture_output=True, text=True
            )
            assert done.returncode == 0, f"{place}: {line}\n{done.stdout}{done.stderr}"

    def _export(self, line: str) -> None:
        """Set what the line sets in a shell, for all that follows."""
        command = ["bash", "-euc", f"{line}\nenv -0"]
        printed = subprocess.run(
            command, cwd=self.folder, env=self._variables(), capture_output=True, text=True, check=True
        ).stdout
        for variable in filter(None, printed.split("\0")):
            name, _, value = variable.partition("=")
            if f"{name}=" in line:
                self.environment.setenv(name, value)

    def _start(self, line: str) -> None:
        """Run a server until the end of the page, and wait until it listens."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {line.rpartition('&')[0]}"],
            cwd=self.folder,
            env=self._variables(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._started.append(process)
        for port in re.findall(r"(?:--?port|Port)[ =](\d+)", line):
            _wait_for(int(port), process)

    def _variables(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}  # noqa: TID251 - what a shell hands on

    def close(self) -> None:
        """End what was started, and forget what was made."""
        self.names.clear()
        for process in self._started:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self._started:
            process.wait(timeout=30)


def _lines(text: str) -> Iterator[str]:
    """Lines as a shell reads them: a backslash at the end goes on with the next one."""
    yield from text.replace("\\\n", " ").splitlines()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    tick = threading.Event()
    for _ in range(1500):
        assert process.poll() is None, "the server ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        tick.wait(0.02)
    raise TimeoutError(f"nobody listens on port {port}")


def ports_of(text: str) -> dict[str, str]:
    """A free port for each that a page names."""
    return {port: str(free_port()) for port in sorted(set(re.findall(r"\b(?:90\d\d|10000)\b", text)))}


# -- what pages call by name -----------------------------------------------------------------------------------------------------


def layers(hidden: int = 128, words: int = 8192, blocks: int = 2) -> dict[str, torch.Tensor]:
    """Tensors with the names of all-MiniLM-L6-v2, and a fortieth of its bytes."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (words, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
        "pooler.dense.weight": (hidden, hidden),
        "pooler.dense.bias": (hidden,),
    }
    for block in range(blocks):
        for part in (
            "attention.self.query",
            "attention.self.key",
            "attention.self.value",
            "attention.output.dense",
            "output.dense",
        ):
            shapes[f"encoder.layer.{block}.{part}.weight"] = (hidden, hidden)
            shapes[f"encoder.layer.{block}.{part}.bias"] = (hidden,)
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Model(torch.nn.Module):
    """A module with parameters of given names and shapes: {"encoder.layer.0.weight": (8, 8)}."""

    def __init__(self, config: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in config.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))
