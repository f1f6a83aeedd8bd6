"""A vLLM in a few lines: the names that headrace's loaders use of it, where they are, doing as little as they can.

`fake_vllm` makes its modules importable for a test. A loader has the filters that vLLM's default one has, given by the test.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


@dataclasses.dataclass
class LoadConfig:
    load_format: str = "headrace"
    model_loader_extra_config: Any = dataclasses.field(default_factory=dict)
    device: str | None = None
    ignore_patterns: Any = dataclasses.field(default_factory=lambda: ["original/**/*"])
    safetensors_load_strategy: str | None = None


class ModelConfig:
    """A model's config. Making one mirrors what a url names, as vLLM does."""

    def __init__(self, model: str, *, model_weights: str = "", revision: str | None = None) -> None:
        self.model, self.model_weights, self.revision = model, model_weights, revision
        self.quantization: str | None = None


class BaseModelLoader:
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


class DefaultModelLoader(BaseModelLoader):
    @dataclasses.dataclass
    class Source:
        model_or_path: str
        revision: str | None
        subfolder: str | None = None
        prefix: str = ""
        fall_back_to_pt: bool = True
        allow_patterns_overrides: list[str] | None = None
        is_unused_weight: Callable[[str], bool] | None = None

    def _prepare_weights(
        self, model: str, subfolder: str | None, revision: str | None, fall_back_to_pt: bool, patterns: list[str] | None
    ) -> tuple[str, list[str], bool, str]:
        assert self.load_config.load_format == "safetensors"
        assert (subfolder, revision, fall_back_to_pt, patterns) == (None, None, False, None)
        cache = _hub_cache[model]
        return str(cache), sorted(map(str, cache.glob("*.safetensors"))), True, "model.safetensors.index.json"

    def _get_weights_iterator(self, source: Source) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.load_config.load_format == "auto"
        for pattern in source.allow_patterns_overrides or ():
            for name, tensor in torch.load(Path(source.model_or_path) / pattern, weights_only=True).items():
                yield source.prefix + name, tensor

    def _init_ep_weight_filter(self, model_config: Any) -> None:
        self.local_expert_ids = getattr(model_config, "expert_ids", None)

    def _init_mm_encoder_only_weight_filter(self, model: Any, model_config: Any) -> None:
        assert isinstance(model_config, ModelConfig)
        self._encoder_only_lm_prefixes = getattr(model, "language_prefixes", None)
        self._encoder_only_weights_mapper = getattr(model, "hf_to_vllm_mapper", None)

    def load_weights(self, model: Any, model_config: Any) -> None:
        self._init_ep_weight_filter(model_config)
        self._init_mm_encoder_only_weight_filter(model, model_config)
        loaded = model.load_weights(self.get_all_weights(model_config, model))  # type: ignore[attr-defined]
        self.track_weights_loading(model, loaded)

    def track_weights_loading(self, model: Any, loaded: set[str]) -> None:
        missing = {name for name, _ in model.named_parameters()} - loaded
        if missing:
            raise ValueError(f"not initialized from checkpoint: {missing}")


_hub_cache: dict[str, Path] = {}


class ShardedStateLoader(BaseModelLoader):
    @staticmethod
    def _filter_subtensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(tensors)

    @staticmethod
    def _render_default_pattern(pattern: str | None = None, *, part: Any) -> str:
        return (pattern or "model-rank-{rank}-part-{part}.safetensors").format(rank=0, tp_rank=0, pp_rank=0, part=part)

    @staticmethod
    def _get_default_pattern() -> str:
        return "model-rank-{rank}-part-{part}.safetensors"

    def _prepare_weights(self, model: str, revision: str | None) -> str:
        assert (self.load_config.load_format, revision) == ("sharded_state", None)
        return str(_hub_cache[model])


class VllmConfig:
    def __init__(self, load_config: Any, model_config: Any) -> None:
        self.load_config, self.model_config = load_config, model_config
        self.speculative_config: Any = None

    def try_verify_and_update_config(self) -> None:
        if "://" not in self.model_config.model_weights:
            return
        if self.load_config.load_format == "auto":
            self.load_config.load_format = "runai_streamer"
        elif self.load_config.load_format not in ("runai_streamer", "runai_streamer_sharded"):
            raise ValueError(f"load_format must not be {self.load_config.load_format}")


class EngineArgs:
    """Makes configs, and mirrors the config of a model that is in a store."""

    def __init__(self, model: str, load_format: str, mirror: Path) -> None:
        self.model, self.load_format, self._mirror = model, load_format, mirror

    def create_model_config(self) -> ModelConfig:
        from vllm.transformers_utils import runai_utils

        if not self.model.startswith(tuple(runai_utils.SUPPORTED_SCHEMES)):
            return ModelConfig(self.model)
        runai_utils.runai_pull_files(f"{self.model}/", str(self._mirror), ["*.json"], None)
        return ModelConfig(str(self._mirror), model_weights=self.model)

    def create_speculative_config(self) -> ModelConfig:
        return self.create_model_config()


class Group:
    """A tensor-parallel group."""

    def __init__(self, world_size: int = 1, rank: int = 0, cpu_group: Any = None) -> None:
        self.world_size, self.rank_in_group, self.cpu_group = world_size, rank, cpu_group


class FakeVllm:
    """The modules, and what a test may change of them.

    Attributes:
        formats: {load format: loader}.
        current: the config that is current, or None.
        tp, pp: groups.
        pulled: calls of what stands for Run:ai's package.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.formats: dict[str, Any] = {"runai_streamer": BaseModelLoader, "runai_streamer_sharded": BaseModelLoader}
        self.current: Any = None
        self.tp, self.pp = Group(), Group()
        self.pulled: list[str] = []
        self.warned: list[str] = []
        self.has_lm_head: bool | None = True
        self._monkeypatch = monkeypatch
        self.modules = self._make()

    def module(self, name: str) -> Any:
        return self.modules[name]

    def _register(self, load_format: str) -> Callable[[Any], Any]:
        def add(loader: Any) -> Any:
            if load_format in self.formats:
                self.warned.append(load_format)
            assert issubclass(loader, BaseModelLoader)
            self.formats[load_format] = loader
            return loader

        return add

    def _make(self) -> dict[str, ModuleType]:
        def is_cloud_storage(model_or_path: str) -> bool:
            return model_or_path.startswith("s3://")

        def checkpoint_has_lm_head(model: str, *, revision: str | None = None) -> bool | None:
            del model, revision
            return self.has_lm_head

        def should_skip_weight(name: str, local: set[int] | None) -> bool:
            parts = name.split(".")
            if local is None or "experts" not in parts or not name.endswith(".weight"):
                return False
            return int(parts[parts.index("experts") + 1]) not in local

        loader = "vllm.model_executor.model_loader"
        contents: dict[str, dict[str, Any]] = {
            "vllm": {"__version__": "0.0.fake"},
            "vllm.model_executor": {},
            loader: {
                "_LOAD_FORMAT_TO_MODEL_LOADER": self.formats,
                "register_model_loader": self._register,
                "BaseModelLoader": BaseModelLoader,
            },
            f"{loader}.base_loader": {"BaseModelLoader": BaseModelLoader},
            f"{loader}.default_loader": {"DefaultModelLoader": DefaultModelLoader},
            f"{loader}.ep_weight_filter": {"should_skip_weight": should_skip_weight},
            f"{loader}.sharded_state_loader": {"ShardedStateLoader": ShardedStateLoader},
            "vllm.config": {"get_current_vllm_config_or_none": lambda: self.current},
            "vllm.config.vllm": {"VllmConfig": _copy_of(VllmConfig)},
            "vllm.config.model": {"checkpoint_has_lm_head": checkpoint_has_lm_head},
            "vllm.engine": {},
            "vllm.engine.arg_utils": {"EngineArgs": _copy_of(EngineArgs), "is_cloud_storage": is_cloud_storage},
            "vllm.platforms": {"current_platform": SimpleNamespace(is_cuda_alike=lambda: False)},
            "vllm.distributed": {},
            "vllm.distributed.parallel_state": {
                "model_parallel_is_initialized": lambda: True,
                "get_tp_group": lambda: self.tp,
                "get_pp_group": lambda: self.pp,
            },
            "vllm.transformers_utils": {},
            "vllm.transformers_utils.runai_utils": {
                "SUPPORTED_SCHEMES": ["s3://", "gs://", "az://"],
                "runai_pull_files": lambda path, *_: self.pulled.append(path),
            },
        }
        modules: dict[str, ModuleType] = {}
        for name, names in contents.items():
            module = modules[name] = ModuleType(name)
            module.__path__ = []  # a package
            vars(module).update(names)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, module)
            self._monkeypatch.setitem(sys.modules, name, module)
        return modules


def _copy_of(kind: type) -> type:
    """A class of its own, so that what is hooked in one test is not in the next."""
    return type(kind.__name__, (kind,), dict(vars(kind)))


@contextmanager
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    """While this lasts, `import vllm` gives the fake, and headrace's loaders stand on it."""
    ours = ("headrace.integrations.vllm._loader", "headrace.integrations.vllm._sharded")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    fake = FakeVllm(monkeypatch)
    try:
        yield fake
    finally:
        for name in ours:
            sys.modules.pop(name, None)
        _hub_cache.clear()


def cache_model(name: str, folder: Path) -> None:
    """Let a model of the hub be one that is in its cache."""
    _hub_cache[name] = folder


class Model(torch.nn.Module):
    """A model whose parameters have the names of the checkpoint, and that keeps what it is given as long as it likes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes = shapes
        self.seen: dict[str, torch.Tensor] = {}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[Any]:  # names with dots are none that torch takes
        yield from ((name, torch.nn.Parameter(torch.empty(shape))) for name, shape in self.shapes.items())

    def load_weights(self, weights: Any) -> set[str]:
        self.seen.update(weights)
        return set(self.seen)
