"""Tests inside vLLM itself: `scripts/test --vllm` runs them, in an environment of their own. Elsewhere they are not collected."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from headrace.testing.s3server import S3Server

try:
    distribution("vllm")
    collect_ignore_glob: list[str] = []
except PackageNotFoundError:
    collect_ignore_glob = ["*.py"]

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines run in this process, and nothing is fetched from anywhere else."""
    for name, value in IN_PROCESS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_ASSETS_CACHE", str(tmp_path / "assets"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import add_stray, write_llama

    folder = write_llama(tmp_path_factory.mktemp("data") / "models" / "llama")
    add_stray(folder)
    return folder


@pytest.fixture(scope="session")
def expected(llama: Path) -> dict[str, str]:
    """Digests of what vLLM's own loader gives."""
    from engines import digests, engine

    with pytest.MonkeyPatch.context() as patch:
        for name, value in IN_PROCESS.items():
            patch.setenv(name, value)
        return digests(engine(llama, "safetensors"))


@pytest.fixture
def store(llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Has what is in the models' folder, as s3://models/."""
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


@pytest.fixture
def separate_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have processes of their own, and a core for each rank."""
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


@pytest.fixture
def taken_over(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run:ai's load formats are headrace's."""
    from vllm.model_executor import model_loader

    from headrace.integrations.vllm import register

    monkeypatch.setenv("HEADRACE_VLLM_TAKEOVER", "1")
    formats = dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER)
    register()
    yield
    model_loader._LOAD_FORMAT_TO_MODEL_LOADER.clear()
    model_loader._LOAD_FORMAT_TO_MODEL_LOADER.update(formats)
