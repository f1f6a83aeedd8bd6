"""diffusers itself through headrace, with pipelines of small random parts. See test_transformers.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import bytes_of

import headrace
from headrace.sources.s3 import S3Credentials
from headrace.testing.s3server import S3Server

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed here: scripts/test --transformers")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # warnings here are the libraries'

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
WORDS = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody is asked for anything that is not on this machine."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def make_unet() -> Any:
    return diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )  # fmt: skip


def make_pipeline(folder: Path) -> Any:
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(WORDS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = transformers.CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=3,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=1, projection_dim=32,
    )  # fmt: skip
    return diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(
            block_out_channels=[32, 64], in_channels=3, out_channels=3, down_block_types=["DownEncoderBlock2D"] * 2,
            up_block_types=["UpDecoderBlock2D"] * 2, latent_channels=4, norm_num_groups=8,
        ),
        text_encoder=transformers.CLIPTextModel(config),
        tokenizer=transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16),
        unet=make_unet(),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline, and its largest part once more in many files."""
    torch.manual_seed(11)
    folder = tmp_path_factory.mktemp("models")
    pipeline = make_pipeline(tmp_path_factory.mktemp("words"))
    pipeline.save_pretrained(folder / "pipe")
    pipeline.unet.save_pretrained(folder / "sharded" / "unet", max_shard_size="300KB")
    return folder


@pytest.fixture
def server(models: Path) -> Iterator[S3Server]:
    content = {str(path.relative_to(models)): path for path in models.rglob("*") if path.is_file()}
    with S3Server({"models": content}) as serving:
        yield serving


def keys(server: S3Server) -> S3Credentials:
    return S3Credentials(access_key_id="AKTEST", secret_access_key="SKTESTSECRET", endpoint=server.url)


def same(one: Any, other: Any) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(bytes_of(ours[name]) == bytes_of(theirs[name]) for name in ours)


def image(pipeline: Any) -> bytes:
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline("abc", num_inference_steps=2, generator=torch.manual_seed(1), output_type="np", height=32, width=32)
    found: bytes = made.images.tobytes()
    return found


def test_a_pipeline_makes_the_same_picture_from_a_folder_and_from_s3(models: Path, server: S3Server) -> None:
    expected = image(diffusers.DiffusionPipeline.from_pretrained(models / "pipe"))
    with headrace.patch(credentials=keys(server)) as patched:
        assert image(diffusers.DiffusionPipeline.from_pretrained(models / "pipe")) == expected
        assert len(patched.report.files) == 3
        assert image(diffusers.DiffusionPipeline.from_pretrained("s3://models/pipe")) == expected
        assert image(diffusers.StableDiffusionPipeline.from_pretrained("s3://models/pipe")) == expected
        assert image(diffusers.AutoPipelineForText2Image.from_pretrained("s3://models/pipe")) == expected
    stores = [file for file in patched.report.files if file.startswith("s3://")]
    assert len(stores) == 3
    assert {file.split("/")[4] for file in stores} == {"unet", "vae", "text_encoder"}


@pytest.mark.parametrize(
    "arguments", [{}, {"dtype": torch.float16}, {"low_cpu_mem_usage": False}, {"device_map": "cpu"}], ids=str
)
@pytest.mark.parametrize("place", ["pipe", "sharded"])
def test_a_part_of_a_pipeline_has_the_same_bits(models: Path, server: S3Server, place: str, arguments: dict[str, Any]) -> None:
    kind = diffusers.UNet2DConditionModel
    expected = kind.from_pretrained(models / place, subfolder="unet", **arguments)
    with headrace.patch(credentials=keys(server)) as patched:
        assert same(kind.from_pretrained(models / place, subfolder="unet", **arguments), expected)
        local = patched.report.tensors
        assert same(kind.from_pretrained(f"s3://models/{place}", subfolder="unet", **arguments), expected)
    assert patched.report.tensors == 2 * local > 0


def test_pipelines_load_their_parts_on_threads_as_well(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = diffusers.UNet2DConditionModel.from_pretrained(models / "sharded" / "unet")
    monkeypatch.setattr("diffusers.models.modeling_utils.HF_ENABLE_PARALLEL_LOADING", True)
    with headrace.patch() as patched:
        assert same(diffusers.UNet2DConditionModel.from_pretrained(models / "sharded" / "unet"), expected)
    assert len(patched.report.files) > 3


def test_without_a_patch_a_part_is_made_on_the_meta_device_and_given_its_tensors(models: Path, server: S3Server) -> None:
    url = "s3://models/pipe/unet"
    config = diffusers.UNet2DConditionModel.load_config(headrace.local_view(url, credentials=keys(server)))
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel.from_config(config)
    report = headrace.load_into(unet, url, credentials=keys(server), assign=True)
    assert same(unet, diffusers.UNet2DConditionModel.from_pretrained(models / "pipe", subfolder="unet"))
    assert (report.missing, report.unexpected) == ((), ())


def test_everything_is_put_back() -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    with headrace.patch() as patched:
        import diffusers.loaders.ip_adapter as imported_inside

        patched.record.add("file", tensors=1, nbytes=1)
    assert imported_inside.safe_open is safe_open
    assert load_file.__module__ == "safetensors.torch"
    code = diffusers.DiffusionPipeline.from_pretrained.__func__.__code__
    assert not code.co_filename.endswith("patching.py")
