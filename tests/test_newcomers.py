"""Mistakes that everybody makes once, on the command line: what is said then has the thing that is wrong, and what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from http_servers import Server, fault
from safetensors.torch import save_file
from typer.testing import CliRunner

from headrace.cli import app
from headrace.errors import SourceError
from headrace.sources.http import Policy
from headrace.testing.s3server import S3Server


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model, a part of it, an index without a shard, and what torch has saved."""
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "bins", "empty", "indexed"):
        Path(folder).mkdir()
    save_file({"layer.weight": torch.zeros(64, 64)}, "model/model.safetensors")
    Path("cut.safetensors").write_bytes(Path("model/model.safetensors").read_bytes()[:9000])
    torch.save({"weight": torch.zeros(3)}, "bins/pytorch_model.bin")
    Path("indexed/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-00001.safetensors"}}))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """s3://models/minilm, and whoever may read it."""
    with S3Server({"models": {"minilm/model.safetensors": tmp_path / "model" / "model.safetensors"}}) as server:
        variables = {"AWS_ACCESS_KEY_ID": "AKTEST", "AWS_SECRET_ACCESS_KEY": "SKTESTSECRET", "AWS_ENDPOINT_URL": server.url}
        for name, value in {**variables, "AWS_EC2_METADATA_DISABLED": "true"}.items():
            monkeypatch.setenv(name, value)
        yield


def said(*arguments: str, code: int) -> str:
    """The line on stderr of a command that fails."""
    result = CliRunner().invoke(app, [*arguments])
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()[-1:]
    return line


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        ("inspect nowhere", 1, ["nowhere", "No such file", "Check the path"]),
        ("inspect meta/llama-3", 1, ["meta/llama-3", "hf://meta/llama-3"]),
        ("inspect model/llama-3", 1, ["model/llama-3", "No such file"]),
        ("load cut.safetensors", 1, ["cut.safetensors", "9000", "incomplete download"]),
        ("inspect bins", 1, ["bins", "pytorch_model.bin", "convert it"]),
        ("inspect bins/pytorch_model.bin", 1, ["zip archive", "convert it"]),
        ("inspect empty", 1, ["empty", "no *.safetensors"]),
        ("inspect indexed", 1, ["model-00001.safetensors", "not there", "incomplete download"]),
        ("load model --concurrency 0", 2, ["concurrency", "from 1 on", "0"]),
        ("load model --direct-io yes", 2, ["--direct-io", "'auto', 'on', 'off'", "yes"]),
        ("load model --memory-limit 12Q", 2, ["--memory-limit", "256MiB", "12Q"]),
        ("load model --dtype bfloat17", 2, ["bfloat17", "bfloat16"]),
        ("load model --names layer.wieght", 1, ["layer.wieght", "did you mean 'layer.weight'"]),
        ("load model --device gpu", 2, ["'gpu'", "'cuda'"]),
        ("load model --concurency 4", 2, ["--concurency", "--concurrency"]),
        ("lod model", 2, ["'lod'", "'load'"]),
        ("load s3:/models/minilm", 2, ["s3://models/minilm"]),
        ("load hf:org/model", 2, ["hf://org/model"]),
        ("load htps://host/model", 2, ["htps://", "did you mean https://"]),
        ("load s3://x", 2, ["s3://bucket/key", "2 letters"]),
        ("pull model model/copy", 2, ["lies inside", "another destination"]),
        ("pull model s3://models/copy", 2, ["s3://models/copy", "local path"]),
        ("pull model cut.safetensors", 1, ["a file is in the way"]),
    ],
)
def test_a_mistake_is_named_with_what_to_do(arguments: str, code: int, parts: list[str]) -> None:
    line = said(*arguments.split(), code=code)
    assert [part for part in parts if part not in line] == []


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://modles/minilm", ["modles", "NoSuchBucket", "Check the bucket's name"]),
        ("s3://models/minlim", ["minlim", "Check the prefix"]),
        ("s3://models/minilm/modle.safetensors", ["modle.safetensors", "NoSuchKey", "letter by letter"]),
    ],
)
def test_a_typo_in_a_store_is_named(url: str, parts: list[str]) -> None:
    line = said("load", url, code=1)
    assert [part for part in parts if part not in line] == []


@pytest.mark.usefixtures("store")
def test_a_wrong_secret_is_told_from_a_wrong_name_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "NOTTHESECRET")
    line = said("load", "s3://models/minilm", code=1)
    assert "Check the access key and its secret" in line
    assert "NOTTHESECRET" not in line


def test_a_folder_that_is_called_like_a_url_is_opened(tmp_path: Path) -> None:
    os.rename(tmp_path / "model", tmp_path / "s3:")
    Path("s3:/model").mkdir()
    os.rename("s3:/model.safetensors", "s3:/model/model.safetensors")
    assert CliRunner().invoke(app, ["inspect", "s3:/model"]).exit_code == 0


def test_tries_that_brought_little_are_told_from_all_tries() -> None:
    """With attempts=2 five tries would puzzle."""
    data = Path("model/model.safetensors").read_bytes() + bytes(4 << 20)
    faults = [fault("short", after=1 << 20, min_start=1, times=2), fault("short", after=0, min_start=1)]
    with Server(data, faults) as server:
        from headrace.sources.http import Access, open_http

        source = open_http(server.url, access=Access(policy=Policy(attempts=2, backoff_s=0.001)))
        try:
            with pytest.raises(SourceError) as caught:
                source.read_into(len(data) - (3 << 20), memoryview(bytearray(3 << 20)))
        finally:
            source.close()
    assert caught.value.attempts > 2
    assert f"after {caught.value.attempts} tries, the last 2 with little progress, the limit of attempts=2" in str(caught.value)
