"""transformers itself through headrace. Runs where it is installed: scripts/test --transformers makes such an environment."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import bytes_of

import headrace
from headrace.errors import SourceNotFoundError
from headrace.sources.s3 import S3Credentials
from headrace.testing.s3server import Reset, Rule, S3Server, Status

transformers = pytest.importorskip("transformers", reason="transformers is not installed here: scripts/test --transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings here are the libraries'

ROOT = Path(__file__).parents[1]
MINILM = next((path.parent for path in (ROOT / ".cache" / "demo" / "package").rglob("model.safetensors")), None)
TEXTS = ["Bytes move from storage to memory.", "Nothing is copied twice.", "A third sentence, of another length than the others."]
LLAMA = transformers.LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2,
    tie_word_embeddings=True, pad_token_id=0,
)  # fmt: skip
TENSORS = 12 * 9 + 2


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody is asked for anything that is not on this machine."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of random weights in several files, its embedding and head tied."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(LLAMA).save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.fixture
def server(sharded: Path) -> Iterator[S3Server]:
    content = {f"llama/{path.name}": path for path in sharded.iterdir()}
    if MINILM is not None:
        content |= {f"minilm/{path.relative_to(MINILM)}": path for path in MINILM.rglob("*") if path.is_file()}
    with S3Server({"models": content}) as serving:
        yield serving


def keys(server: S3Server) -> S3Credentials:
    return S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)


def same(one: Any, other: Any) -> bool:
    """Whether all parameters and buffers that are saved have the same dtypes and bits."""
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and bytes_of(ours[name]) == bytes_of(theirs[name]) for name in ours
    )


def load(name: Any, **arguments: Any) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(name, **arguments)


# ---- patch()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": "auto"},
        {"device_map": "cpu"},
        {"device_map": "auto", "dtype": torch.float16},
        {"device_map": {"": "cpu"}, "dtype": torch.float64},
        {"low_cpu_mem_usage": True, "use_safetensors": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["sharded", "single"])
def test_from_pretrained_gives_the_same_bits(sharded: Path, tmp_path: Path, kind: str, arguments: dict[str, Any]) -> None:
    folder = sharded
    if kind == "single":
        load(sharded).save_pretrained(tmp_path / "single")
        folder = tmp_path / "single"
    with headrace.patch() as patched:
        model = load(folder, **arguments)
    assert same(model, load(folder, **arguments))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert patched.report.tensors >= TENSORS
    assert patched.report.files == tuple(sorted(map(str, folder.glob("*.safetensors"))))


def test_layers_that_are_offloaded_to_disk_come_the_same_way(sharded: Path, tmp_path: Path) -> None:
    places = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i > 6 else "cpu" for i in range(12)}
    tokens = torch.arange(16)[None]
    with headrace.patch() as patched, torch.no_grad():
        model = load(sharded, device_map=places, offload_folder=tmp_path)
        before = patched.report.tensors
        inside = model(tokens).logits
        assert patched.report.tensors > before
    with torch.no_grad():
        assert torch.equal(inside, load(sharded)(tokens).logits)
        assert torch.equal(inside, model(tokens).logits)


def test_auto_classes_imported_inside_the_block_load_through_it_and_are_put_back(sharded: Path) -> None:
    with headrace.patch() as patched:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(sharded)
    assert patched.report.tensors >= TENSORS
    assert same(model, load(sharded))
    for kind in (AutoModelForCausalLM, transformers.AutoModel, transformers.LlamaForCausalLM):
        assert not kind.from_pretrained.__func__.__code__.co_filename.endswith("patching.py")


def test_loading_without_mmap_is_not_seen_and_said_to_be_so(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headrace"), headrace.patch() as patched:
        config = transformers.AutoConfig.from_pretrained(sharded)
        load(sharded, disable_mmap=True, config=config, dtype=torch.float32)
    assert patched.report.tensors == 0
    assert "nothing was loaded through headrace" in caplog.text


def test_a_model_in_s3_loads_as_from_a_folder(sharded: Path, server: S3Server) -> None:
    with headrace.patch(credentials=keys(server)) as patched:
        model = load("s3://models/llama")
    assert same(model, load(sharded))
    assert patched.report.tensors == TENSORS
    assert all(file.startswith("s3://models/llama/model-0") for file in patched.report.files)
    # The store was asked for each file a few times, not once for each tensor, and sent each byte once.
    weights = [request for request in server.requests if request.key.endswith(".safetensors")]
    assert len(weights) <= 3 * len(patched.report.files)
    assert sum(request.sent for request in weights) <= 1.01 * sum(path.stat().st_size for path in sharded.glob("*.safetensors"))


def test_a_model_in_s3_generates(sharded: Path, server: S3Server) -> None:
    tokens = torch.arange(1, 9)[None]
    with headrace.patch(credentials=keys(server)):
        model = transformers.AutoModelForCausalLM.from_pretrained("s3://models/llama", device_map="cpu", dtype=torch.float32)
    ours = model.generate(tokens, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours, load(sharded).generate(tokens, max_new_tokens=8, do_sample=False))


def test_faults_on_the_way_do_not_change_a_bit(sharded: Path, server: S3Server) -> None:
    server.fail(
        Rule(Status(503), key="*.safetensors", skip=3, times=3), Rule(Reset(after=9000), key="*.safetensors", skip=5, times=2)
    )
    with headrace.patch(credentials=keys(server)):
        assert same(load("s3://models/llama"), load(sharded))
    assert {503} <= {request.status for request in server.requests}


def test_a_model_that_is_not_in_the_store_is_a_typed_error(server: S3Server) -> None:
    with pytest.raises(SourceNotFoundError, match="s3://models/nothing"), headrace.patch(credentials=keys(server)):
        load("s3://models/nothing")


# ---- state_dict, local_view, load_into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lazy", [True, False])
def test_a_state_dict_is_taken_in_place_of_a_name(sharded: Path, lazy: bool, dtype: torch.dtype) -> None:
    with headrace.state_dict(sharded) as weights:
        state = weights.lazy() if lazy else weights
        model = load(None, config=LLAMA, state_dict=state, dtype=dtype)
    assert same(model, load(sharded, dtype=dtype))


def test_a_state_dict_of_s3_with_the_config_of_a_view(sharded: Path, server: S3Server) -> None:
    url = "s3://models/llama"
    config = transformers.AutoConfig.from_pretrained(headrace.local_view(url, credentials=keys(server)))
    with headrace.state_dict(url, credentials=keys(server)) as weights:
        model = load(None, config=config, state_dict=weights.lazy())
    assert same(model, load(sharded))
    assert len([request for request in server.requests if request.key.endswith(".safetensors")]) < TENSORS / 2


def test_load_into_fills_a_model_and_says_what_is_tied(sharded: Path) -> None:
    model = transformers.LlamaForCausalLM(LLAMA)
    report = headrace.load_into(model, sharded)
    assert same(model, load(sharded))
    assert report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert (report.missing, report.unexpected) == ((), ())


def test_load_into_fills_a_model_of_another_dtype_as_copying_does(sharded: Path) -> None:
    model = transformers.LlamaForCausalLM(LLAMA).to(torch.bfloat16)
    headrace.load_into(model, sharded)
    assert same(model, load(sharded, dtype=torch.bfloat16))


def test_load_into_gives_a_model_on_the_meta_device_its_tensors(sharded: Path) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(LLAMA)
    headrace.load_into(model, sharded, assign=True, dtype="bfloat16")
    assert same(model, load(sharded, dtype=torch.bfloat16))
    assert model.lm_head.weight is model.model.embed_tokens.weight


# ---- a real model


needs_minilm = pytest.mark.skipif(MINILM is None, reason="all-MiniLM-L6-v2 is not here: scripts/demo fetches it")


def embeddings(name: Any, **arguments: Any) -> torch.Tensor:
    """Sentence embeddings as the model's card makes them: the mean over tokens, of length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    model = transformers.AutoModel.from_pretrained(name, **arguments)
    tokens = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


@needs_minilm
@pytest.mark.parametrize("arguments", [{}, {"dtype": torch.bfloat16, "device_map": "cpu"}], ids=str)
def test_a_real_model_gives_the_same_embeddings_from_a_folder_and_from_s3(server: S3Server, arguments: dict[str, Any]) -> None:
    expected = embeddings(MINILM, **arguments)
    with headrace.patch(credentials=keys(server)) as patched:
        assert torch.equal(embeddings(MINILM, **arguments), expected)
        assert torch.equal(embeddings("s3://models/minilm", **arguments), expected)
    assert patched.report.tensors >= 2 * 103


@needs_minilm
def test_a_real_model_gives_the_same_embeddings_in_a_pipeline(server: S3Server) -> None:
    expected = transformers.pipeline("feature-extraction", model=str(MINILM))(TEXTS[0])
    with headrace.patch(credentials=keys(server)) as patched:
        assert transformers.pipeline("feature-extraction", model="s3://models/minilm")(TEXTS[0]) == expected
    assert patched.report.tensors >= 103


@needs_minilm
def test_a_real_model_whose_config_names_no_dtype_is_made_from_a_lazy_state_dict() -> None:
    config = transformers.AutoConfig.from_pretrained(MINILM)
    assert config.dtype is None
    with headrace.state_dict(MINILM) as weights:
        model = transformers.BertModel.from_pretrained(None, config=config, state_dict=weights.lazy())
    assert same(model, transformers.AutoModel.from_pretrained(MINILM))


@needs_minilm
def test_a_real_model_is_filled_by_load_into() -> None:
    expected = transformers.AutoModel.from_pretrained(MINILM)
    model = transformers.BertModel(expected.config)
    report = headrace.load_into(model, MINILM, strict=False)
    assert same(model, expected)
    assert len(report.loaded) == 103
    assert (report.missing, report.unexpected) == ((), ("embeddings.position_ids",))  # which the model makes by itself
