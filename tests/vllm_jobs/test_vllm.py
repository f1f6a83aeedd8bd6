"""What vLLM has after it loaded through headrace is what its own loader gives, from folders and stores, once and again.

Engines run in this process, but for those with two ranks and for the server.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from engines import PROMPT, copy_config, digests, engine, load, on_two_ranks, spoil, tokens
from hub_server import Hub, Repo
from tiny_models import write_llama

from headrace.errors import OptionError
from headrace.testing.s3server import S3Server

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.leaky_ok(reason="vLLM keeps threads and descriptors"),
    pytest.mark.timeout(900),
]


def test_parameters_from_a_folder_are_those_of_vllms_own_loader(llama: Path, expected: dict[str, str]) -> None:
    llm = engine(llama, "headrace", {"concurrency": 4, "memory_limit": 0})
    assert digests(llm) == expected
    assert len(tokens(llm)) == 8


def test_parameters_from_a_store_are_the_same(store: S3Server, expected: dict[str, str]) -> None:
    llm = engine("s3://models/llama", "headrace")
    assert digests(llm) == expected
    assert len(tokens(llm)) == 8
    asked = [request.key for request in store.requests if request.method == "GET" and request.key.endswith(".safetensors")]
    assert asked
    assert not any("consolidated" in key for key in asked)


@pytest.mark.usefixtures("store")
def test_a_config_in_a_folder_goes_with_weights_in_a_store(llama: Path, expected: dict[str, str], tmp_path: Path) -> None:
    folder = copy_config(llama, tmp_path / "config")
    assert digests(engine(folder, "headrace", {"source": "s3://models/llama"})) == expected


def test_a_model_of_the_hub_is_streamed(llama: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    files = {file.name: file.read_bytes() for file in llama.iterdir()}
    with Hub({"org/llama": Repo(files)}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert digests(engine("hf://org/llama", "auto")) == expected


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("place", ["folder", "store"])
def test_weights_are_loaded_again_into_a_live_model(place: str, llama: Path, expected: dict[str, str]) -> None:
    llm = engine(llama if place == "folder" else "s3://models/llama", "headrace")
    before = tokens(llm)
    llm.apply_model(spoil)
    assert digests(llm) != expected
    llm.collective_rpc("reload_weights")
    assert digests(llm) == expected
    llm.reset_prefix_cache()
    assert tokens(llm) == before


def test_weights_of_another_place_are_loaded_into_a_live_model(llama: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    other = write_llama(tmp_path / "other", seed=8)
    llm = engine(llama, "headrace", {"source": str(llama)})
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    assert digests(llm) == digests(engine(other, "safetensors"))
    assert digests(llm) != expected


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_files_that_vllm_saved_load(tied: bool, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", tied=tied)
    saved = tmp_path / "saved"
    saved.mkdir()
    llm = engine(model, "headrace")
    wanted = digests(llm)
    llm.collective_rpc("save_sharded_state", kwargs={"path": str(saved), "max_size": 300_000})
    copy_config(model, saved)
    assert len(list(saved.glob("model-rank-0-part-*.safetensors"))) > 1
    assert digests(engine(saved, "headrace_sharded")) == wanted


@pytest.mark.usefixtures("store")
def test_sharded_files_load_from_a_store_and_with_a_pattern_of_ones_own(llama: Path, expected: dict[str, str]) -> None:
    saved = llama.parent / "saved"
    saved.mkdir()
    pattern = "part-{part}-of-rank-{rank}.safetensors"
    engine(llama, "headrace").collective_rpc("save_sharded_state", kwargs={"path": str(saved), "pattern": pattern})
    copy_config(llama, saved)
    assert digests(engine("s3://models/saved", "headrace_sharded", {"pattern": pattern})) == expected


def test_an_unknown_key_is_refused_before_the_engine_starts(llama: Path) -> None:
    with pytest.raises(Exception, match="concurency") as caught:
        engine(llama, "headrace", {"concurency": 4})
    assert isinstance(caught.value, (OptionError, ValueError))


@pytest.mark.usefixtures("taken_over", "store")
def test_taken_over_a_store_is_loaded_without_a_load_format(expected: dict[str, str]) -> None:
    assert digests(engine("s3://models/llama", "auto", {"concurrency": 16, "memory_limit": 5368709120})) == expected


@pytest.mark.usefixtures("taken_over")
def test_taken_over_the_documented_config_of_sharded_files_works(llama: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    engine(llama, "headrace").collective_rpc("save_sharded_state", kwargs={"path": str(saved)})
    copy_config(llama, saved)
    extra = {"concurrency": 16, "memory_limit": 5368709120, "pattern": "model-rank-{rank}-part-{part}.safetensors"}
    assert digests(engine(saved, "runai_streamer_sharded", extra)) == expected


# -- processes of vLLM's own -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("separate_processes")
def test_two_ranks_read_each_byte_once_and_get_what_vllms_own_loader_gives(llama: Path, store: S3Server, tmp_path: Path) -> None:
    plain, _ = on_two_ranks(load(llama, "safetensors"), folder=tmp_path)
    shared, log = on_two_ranks(load("s3://models/llama", "headrace", calls=[["reload_weights", {}]]), folder=tmp_path)
    assert shared[0] == shared[1] == plain[0]
    assert "by rank 0 of 2" in log
    ranges = [
        (request.key, request.range) for request in store.requests if request.key.endswith(".safetensors") and request.range
    ]
    data = [(key, where) for key, where in ranges if not where.startswith("bytes=0-")]
    assert len(data) == 2 * len(set(data)) or not data, "loaded twice, by the start and the reload, each byte by one rank"


@pytest.mark.usefixtures("separate_processes", "store")
def test_vllm_serve_completes_from_a_store(tmp_path: Path) -> None:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", "s3://models/llama", "--load-format", "headrace"]
    command += [
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--max-model-len",
        "128",
        "--enforce-eager",
        "--served-model-name",
        "tiny",
    ]
    log = tmp_path / "serve.log"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=tmp_path)
        try:
            _await(lambda: server.poll() is None, f"http://127.0.0.1:{port}/health", log)
            body = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 4}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", data=body, headers={"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=180) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] >= 1
        finally:
            server.terminate()
            server.wait(120)


def _await(is_running: Callable[[], bool], url: str, log: Path) -> None:
    """Until the server answers; it has no other way to say that it is ready."""
    from threading import Event

    pause = Event()
    for _ in range(600):
        assert is_running(), log.read_text()[-6000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            pause.wait(1)
    raise AssertionError(log.read_text()[-6000:])
