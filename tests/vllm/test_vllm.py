"""What vLLM has after it loaded through headrace is what its own loader gives, from folders and stores, once and again.

Engines run in this process, but for those with two ranks and for the server.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, Repo
from tiny_models import add_stray, write_llama

from headrace.errors import OptionError
from headrace.integrations.vllm import register
from headrace.testing.s3server import S3Server

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.leaky_ok(reason="vLLM keeps threads and descriptors"),
    pytest.mark.timeout(300),
]

PROMPT = "hello, world"


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_ASSETS_CACHE", str(tmp_path / "assets"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_llama(tmp_path_factory.mktemp("data") / "models" / "llama")
    add_stray(folder)
    return folder


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[str, str]:
    """Digests of what vLLM's own loader gives."""
    with_mp = pytest.MonkeyPatch()
    with_mp.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with_mp.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    try:
        return digests(engine(llama, "safetensors"))
    finally:
        with_mp.undo()


@pytest.fixture
def store(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server(llama.parent.parent, access_key="AK", secret_key="SK") as server:
        for name, value in environment_of(server).items():
            monkeypatch.setenv(name, value)
        yield server


def environment_of(server: S3Server) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": "AK",
        "AWS_SECRET_ACCESS_KEY": "SK",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": server.url,
    }


def engine(model: str | Path, load_format: str, extra: dict[str, Any] | None = None, **arguments: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model),
        load_format=load_format,
        model_loader_extra_config=extra or {},
        max_model_len=128,
        enforce_eager=True,
        **arguments,
    )


def digests(llm: Any) -> dict[str, str]:
    return llm.apply_model(digests_of_model)[0]


def digests_of_model(model: Any) -> dict[str, str]:
    import torch

    return {
        name: hashlib.sha256(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


def spoil(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.zero_()


def tokens(llm: Any) -> list[int]:
    from vllm import SamplingParams

    return list(llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].token_ids)


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
    folder = tmp_path / "config"
    folder.mkdir()
    for file in llama.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, folder)
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
    for file in model.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, saved)
    assert len(list(saved.glob("model-rank-0-part-*.safetensors"))) > 1
    assert digests(engine(saved, "headrace_sharded")) == wanted


@pytest.mark.usefixtures("store")
def test_sharded_files_load_from_a_store_and_with_a_pattern_of_ones_own(llama: Path, expected: dict[str, str]) -> None:
    saved = llama.parent / "saved"
    saved.mkdir()
    pattern = "part-{part}-of-rank-{rank}.safetensors"
    engine(llama, "headrace").collective_rpc("save_sharded_state", kwargs={"path": str(saved), "pattern": pattern})
    for file in llama.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, saved)
    assert digests(engine("s3://models/saved", "headrace_sharded", {"pattern": pattern})) == expected


def test_an_unknown_key_is_refused_before_the_engine_starts(llama: Path) -> None:
    with pytest.raises(Exception, match="concurency") as caught:
        engine(llama, "headrace", {"concurency": 4})
    assert isinstance(caught.value, (OptionError, ValueError))


@pytest.fixture
def separate_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


@pytest.fixture
def taken_over(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.model_executor import model_loader

    monkeypatch.setenv("HEADRACE_VLLM_TAKEOVER", "1")
    formats = dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER)
    register()
    yield
    model_loader._LOAD_FORMAT_TO_MODEL_LOADER.clear()
    model_loader._LOAD_FORMAT_TO_MODEL_LOADER.update(formats)


@pytest.mark.usefixtures("taken_over", "store")
def test_taken_over_a_store_is_loaded_without_a_load_format(expected: dict[str, str]) -> None:
    assert digests(engine("s3://models/llama", "auto", {"concurrency": 16, "memory_limit": 5368709120})) == expected


@pytest.mark.usefixtures("taken_over")
def test_taken_over_the_documented_config_of_sharded_files_works(llama: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    engine(llama, "headrace").collective_rpc("save_sharded_state", kwargs={"path": str(saved)})
    for file in llama.glob("*.json"):
        if "index" not in file.name:
            shutil.copy(file, saved)
    extra = {"concurrency": 16, "memory_limit": 5368709120, "pattern": "model-rank-{rank}-part-{part}.safetensors"}
    assert digests(engine(saved, "runai_streamer_sharded", extra)) == expected


# -- processes of vLLM's own -----------------------------------------------------------------------------------------------------


RANKS = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from test_vllm import digests_of_model, engine, tokens

if __name__ == "__main__":
    found = []
    for load_format, extra in json.loads(sys.argv[3]):
        llm = engine(sys.argv[2], load_format, extra, tensor_parallel_size=2)
        found.append([llm.apply_model(digests_of_model), tokens(llm)])
        if len(sys.argv) > 4:
            llm.collective_rpc("reload_weights")
            found.append([llm.apply_model(digests_of_model), tokens(llm)])
        del llm
    print("FOUND", json.dumps(found))
"""


def on_two_ranks(model: str, loads: list[Any], tmp_path: Path) -> tuple[list[Any], str]:
    """[[digests of each rank, tokens]] of each load, and what was logged."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    here = Path(__file__).parent
    arguments = [sys.executable, str(script), json.dumps([str(here), str(here.parent)]), model, json.dumps(loads), "reload"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(lines[0][6:]), done.stdout + done.stderr


@pytest.mark.usefixtures("separate_processes")
def test_two_ranks_read_each_byte_once_and_get_what_vllms_own_loader_gives(llama: Path, store: S3Server, tmp_path: Path) -> None:
    plain, _ = on_two_ranks(str(llama), [["safetensors", {}]], tmp_path)
    shared, log = on_two_ranks("s3://models/llama", [["headrace", {}]], tmp_path)
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
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] >= 1
        finally:
            server.terminate()
            server.wait(60)


def _await(is_running: Callable[[], bool], url: str, log: Path) -> None:
    """Until the server answers; it has no other way to say that it is ready."""
    from threading import Event

    pause = Event()
    for _ in range(240):
        assert is_running(), log.read_text()[-6000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            pause.wait(1)
    raise AssertionError(log.read_text()[-6000:])
