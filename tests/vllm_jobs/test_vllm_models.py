"""Models that take more than a checkpoint in one place: experts, drafts, parts; and weights in stores other than S3.

Each is compared with what vLLM's own loader gives from a folder.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import torch
from azure_server import AzureServer
from engines import HERE, digests, digests_of_model, engine, load, on_two_ranks, spoil, tokens
from gcs_server import GcsServer
from tiny_models import write_bge_m3, write_in_parts, write_llama, write_mixtral

from headrace.testing.s3server import S3Server

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.leaky_ok(reason="vLLM keeps threads and descriptors"),
    pytest.mark.timeout(900),
]


# -- experts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("separate_processes")
def test_experts_of_other_ranks_are_not_read_and_the_rest_is_shared(llama: Path, store: S3Server, tmp_path: Path) -> None:
    folder = write_mixtral(llama.parent / "mixtral")
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    # No text is asked for: with expert parallelism this vLLM ends there on a CPU, whoever loaded the weights.
    experts: dict[str, Any] = {"enable_expert_parallel": True, "enable_ep_weight_filter": True, "is_asked": False}
    found, log = on_two_ranks(
        load(folder, "safetensors", **experts), load("s3://models/mixtral", "headrace", **experts), folder=tmp_path
    )
    assert found[1] == found[0]
    assert "by rank 0 of 2" in log
    assert nbytes_asked(store, "mixtral/") < 1.3 * nbytes, "each rank reads its own experts, and half of the rest"


def nbytes_asked(store: S3Server, prefix: str) -> int:
    """Of weights, without the first request of each file, which brings its header."""
    asked = [request.range for request in store.requests if prefix in request.key and request.key.endswith(".safetensors")]
    spans = [where.removeprefix("bytes=").split("-") for where in asked if where and not where.startswith("bytes=0-")]
    return sum(int(last) + 1 - int(first) for first, last in spans)


# -- drafts --------------------------------------------------------------------------------------------------------------------


def digests_of_draft(worker: Any) -> dict[str, str]:
    return digests_of_model(worker.model_runner.drafter.model)


def test_a_draft_is_loaded_from_a_store_as_its_target_is(llama: Path, store: S3Server, expected: dict[str, str]) -> None:
    draft = write_llama(llama.parent / "draft", seed=11)
    plain = engine(llama, "safetensors", speculative_config=drafted_by(str(draft)))
    wanted, said = plain.collective_rpc(digests_of_draft), tokens(plain)
    llm = engine("s3://models/llama", "headrace", speculative_config=drafted_by("s3://models/draft"))
    assert digests(llm) == expected
    assert llm.collective_rpc(digests_of_draft) == wanted
    assert wanted != [expected]
    assert tokens(llm) == said
    assert nbytes_asked(store, "draft/") or any("draft/" in request.key for request in store.requests)


def test_a_draft_from_a_folder_is_not_looked_for_where_source_is(llama: Path, expected: dict[str, str], tmp_path: Path) -> None:
    draft = write_llama(tmp_path / "draft", seed=11)
    llm = engine(llama, "headrace", {"source": str(llama)}, speculative_config=drafted_by(str(draft)))
    assert digests(llm) == expected
    assert llm.collective_rpc(digests_of_draft) != [expected]


def drafted_by(model: str) -> dict[str, Any]:
    return {"model": model, "method": "draft_model", "num_speculative_tokens": 2}


# -- weights in several places -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["folder", "store"])
def test_files_that_a_model_names_itself_and_secondary_weights_are_loaded(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import ModelRegistry

    ModelRegistry.register_model("LlamaInParts", "models_in_parts:LlamaInParts")
    folder, weights = write_in_parts(tmp_path / "data" / "models" / "parts")
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # vLLM looks at models in a process of its own
    with S3Server(tmp_path / "data", access_key="AK", secret_key="SK") as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SK")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        llm = engine(folder if place == "folder" else "s3://models/parts", "headrace")
        found = llm.apply_model(parameters_of)[0]
        llm.apply_model(spoil)
        llm.collective_rpc("reload_weights")
        again = llm.apply_model(parameters_of)[0]
    for parameters in (found, again):
        assert torch.equal(parameters["lm_head.weight"][:320], weights["lm_head.weight"])
        assert torch.equal(parameters["model.norm.weight"], weights["model.norm.weight"])
        mlp = [weights[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(parameters["model.layers.1.mlp.gate_up_proj.weight"], torch.cat(mlp))


def parameters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_heads_in_files_of_pickle_are_loaded_by_vllms_own_loader(tmp_path: Path) -> None:
    folder = write_bge_m3(tmp_path / "bge")
    wanted = digests(engine(folder, "auto", runner="pooling"))
    assert digests(engine(folder, "headrace", runner="pooling")) == wanted
    assert any(name.startswith("colbert_linear") for name in wanted)


# -- other stores --------------------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_from_google(llama: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with GcsServer({"models": objects_of(llama)}) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.base)
        llm = engine("gs://models/llama", "headrace")
        assert digests(llm) == expected
        llm.apply_model(spoil)
        llm.collective_rpc("reload_weights")
        assert digests(llm) == expected


@pytest.mark.usefixtures("taken_over")
def test_a_model_is_loaded_from_azure_and_no_format_need_be_given(
    llama: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with AzureServer({"models": objects_of(llama)}) as server:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", server.account)
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", token_for(server, "models"))
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.endpoint)
        assert digests(engine("az://models/llama", "auto")) == expected


def token_for(server: AzureServer, container: str) -> str:
    """A SAS token, as "Create a service SAS" has it, without the library that makes them."""
    told = {"sp": "rl", "se": "2099-01-01T00:00:00Z", "sv": "2020-12-06", "sr": "c"}
    place = f"/blob/{server.account}/{container}"
    signed = "\n".join([told["sp"], "", told["se"], place, "", "", "", told["sv"], told["sr"], *[""] * 7])
    digest = hmac.new(base64.b64decode(server.key), signed.encode(), hashlib.sha256).digest()
    return urlencode(told | {"sig": base64.b64encode(digest).decode()})


def objects_of(folder: Path) -> dict[str, bytes]:
    return {f"{folder.name}/{file.name}": file.read_bytes() for file in folder.iterdir()}


# -- files for host memory, and sharded files, on two ranks --------------------------------------------------------------------


@pytest.mark.usefixtures("store", "taken_over")
def test_with_the_variables_of_the_mixed_path_parameters_are_the_same(
    llama: Path, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = sorted(file.name for file in llama.glob("model-*.safetensors"))
    monkeypatch.setenv("VLLM_RUNAI_CPU_WEIGHT_FILES", ",".join(shards[:2]))
    monkeypatch.setenv("VLLM_RUNAI_CPU_MEMORY_LIMIT", "1048576")
    monkeypatch.setenv("VLLM_RUNAI_USE_LOCAL_WEIGHT_INDEX", "1")
    monkeypatch.setenv("VLLM_RUNAI_BORROWED_WEIGHTS", "1")
    monkeypatch.setenv("RUNAI_STREAMER_PARTITION_POLICY", "files")
    llm = engine("s3://models/llama", "runai_streamer", {"concurrency": 16, "distributed": False})
    assert digests(llm) == expected
    llm.apply_model(spoil)
    llm.collective_rpc("reload_weights")
    assert digests(llm) == expected


@pytest.mark.usefixtures("separate_processes", "store")
def test_two_ranks_share_one_reader_of_files_for_host_memory(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = sorted(file.name for file in llama.glob("model-*.safetensors"))
    monkeypatch.setenv("HEADRACE_VLLM_TAKEOVER", "1")
    monkeypatch.setenv("VLLM_RUNAI_CPU_WEIGHT_FILES", shards[0])
    monkeypatch.setenv("VLLM_RUNAI_SINGLE_ENGRAM_READER", "1")
    found, _ = on_two_ranks(
        load(llama, "safetensors"), load("s3://models/llama", "runai_streamer", {"distributed": True}), folder=tmp_path
    )
    assert found[1] == found[0]


@pytest.mark.usefixtures("separate_processes", "store")
def test_each_rank_loads_the_file_that_it_saved(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = llama.parent / "saved-by-two"
    for file in llama.glob("*.json"):
        if "index" not in file.name:
            saved.mkdir(exist_ok=True)
            (saved / file.name).write_text(file.read_text())
    monkeypatch.setenv("HEADRACE_VLLM_TAKEOVER", "1")
    documented = {"concurrency": 16, "memory_limit": 5368709120}
    found, _ = on_two_ranks(
        load(llama, "headrace", calls=[["save_sharded_state", {"path": str(saved)}]]),
        load(saved, "headrace_sharded"),
        load("s3://models/saved-by-two", "runai_streamer_sharded", documented),
        folder=tmp_path,
    )
    first, _, here, there = found
    assert here == there == first
    assert first[0][0] != first[0][1], "ranks have different parts"
