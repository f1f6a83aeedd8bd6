"""The loader behind `--load-format headrace`: vLLM's default loader, with headrace's reading in place of its own.

Inherited are the filters of expert parallelism and of models without their language part, secondary weights, overrides of
patterns, and the check that every parameter got its weights. What is replaced is where files are found and how tensors are read.
Tensors belong to the model: it may keep them, so none is copied. On a GPU they are the device's, and filled by headrace's ring.

Importing this imports vLLM and torch. Names of vLLM's that it stands on are looked up here, so that a vLLM without one of them
is found out when `register` imports this.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

import headrace
from headrace.errors import OptionError
from headrace.integrations.vllm._settings import LoaderSettings, VllmSettings, read_settings
from headrace.integrations.vllm._streams import INDEX, kept_names, open_weights, prefixed, stream_weights

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vllm.headrace")

_STANDS_ON: Final = (
    "_get_weights_iterator",
    "_init_ep_weight_filter",
    "_init_mm_encoder_only_weight_filter",
    "track_weights_loading",
    "Source",
)
_FIRST: Final = "headrace_first_model"  # set on a model's config: what `model` was when its weights were first loaded


class HeadraceModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads a checkpoint from wherever it is stored.

    Args:
        load_config: vLLM's.

    Raises:
        OptionError: the extra config has a key or value that cannot be used.
    """

    def __init__(self, load_config: Any) -> None:
        BaseModelLoader.__init__(self, load_config)
        self.settings = settings_of(load_config)
        self.counter_before_loading_weights = 0.0
        self.local_expert_ids: set[int] | None = None
        self.enable_weights_track: bool | None = None
        self._encoder_only_lm_prefixes: tuple[str, ...] | None = None
        self._encoder_only_weights_mapper: Any = None

    def download_model(self, model_config: Any) -> None:
        """Fetch a model of the hub; what has a url is read where it is."""
        place = place_of(model_config, self.settings)
        if not is_readable(place):
            _downloaded(self.load_config, place, None, model_config.revision, None)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight of the model, from its own checkpoint and from those that it names besides. Also used to load again."""
        place = place_of(model_config, self.settings)
        primary = self.Source(
            place,
            model_config.revision,
            prefix="",
            fall_back_to_pt=False,
            allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
            is_unused_weight=getattr(model, "is_unused_checkpoint_weight", None),
        )
        secondary = [_moved(source, model_config.model, place) for source in getattr(model, "secondary_weights", ())]
        index_from = self._index_from(model_config, place)
        if is_first(model_config):
            yield from self._read(primary, index_from=index_from, metadata=self.settings.metadata, places=self.settings.places)
        else:
            yield from self._read(primary, index_from=index_from)
        for source in secondary:
            yield from self._read(source)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self._read(source)

    def _read(
        self, source: Any, *, index_from: str | None = None, metadata: str | None = None, places: Mapping[str, str] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if self.load_config.safetensors_load_strategy == "torchao":
            raise OptionError(
                "checkpoints that torchao quantized are put together by vLLM's own loader; use it", option="load_format"
            )
        if not self.counter_before_loading_weights:
            self.counter_before_loading_weights = time.perf_counter()
        if _is_pickled(source):
            return self._read_pickled(source)
        checkpoint = self._open(source, index_from, metadata)
        names = kept_names(checkpoint, is_skipped=self._skips(source, checkpoint), is_unneeded=self._unneeded())
        if len(checkpoint) and not names:
            raise RuntimeError(f"none of the tensors of {checkpoint.url} is one that this model loads on this rank")
        pairs = stream_weights(
            checkpoint,
            names,
            own=[name for name in names if self._is_expert(name)],
            device=target_device(self.load_config),
            places=places or {},
            group=group_of_ranks(self.settings),
            is_demanded=self.settings.distributed is True,
            dtype=self.settings.dtype,
            log=log,
        )
        return prefixed(source.prefix, pairs) if source.prefix else pairs

    def _read_pickled(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights in files of pickle, as some models have for their small heads: by vLLM's own loader."""
        if "://" in source.model_or_path:
            raise OptionError(
                f"{', '.join(source.allow_patterns_overrides)} of {source.model_or_path} are no safetensors, and such files are "
                "loaded from folders only: fetch the model with `headrace pull`, and give the folder",
                option="model",
            )
        config = dataclasses.replace(self.load_config, load_format="auto", model_loader_extra_config={})
        pairs: Iterator[tuple[str, torch.Tensor]] = DefaultModelLoader(config)._get_weights_iterator(source)
        return pairs

    def _open(self, source: Any, index_from: str | None, metadata: str | None) -> headrace.Checkpoint:
        place: Any = str(source.model_or_path)
        patterns = source.allow_patterns_overrides
        if not is_readable(place):
            place, patterns = _downloaded(self.load_config, place, source.subfolder, source.revision, patterns), None
        else:
            place = with_revision(place, source.revision)
            place = f"{place.rstrip('/')}/{source.subfolder}" if source.subfolder else place
        ignored = self.load_config.ignore_patterns or []
        globs = [ignored] if isinstance(ignored, str) else ignored
        return open_weights(
            place,
            patterns=patterns,
            ignored=[glob for glob in globs if "/" not in glob],  # the others are about folders below, which are not looked into
            index_from=index_from,
            metadata=metadata,
            verify=self.settings.verify,
            options=options_of(self.settings),
        )

    def _index_from(self, model_config: Any, place: str) -> str | None:
        """The local folder that a model's config was mirrored to, where its index is to count for the store's."""
        mirror = str(model_config.model)
        is_there = place != mirror and os.path.isfile(os.path.join(mirror, INDEX))
        return mirror if self.settings.local_index and is_there else None

    def _skips(self, source: Any, checkpoint: headrace.Checkpoint) -> Callable[[str], bool]:
        """Tells of names that this rank does not read: experts of others, and what the model has no use for."""
        is_unused = source.is_unused_weight
        if is_unused is not None and all(map(is_unused, checkpoint)):
            is_unused = None
        local = self.local_expert_ids

        def is_skipped(name: str) -> bool:
            return bool(should_skip_weight(name, local)) or (is_unused is not None and is_unused(name))

        return is_skipped

    def _is_expert(self, name: str) -> bool:
        """Whether it is one that, with expert parallelism, other ranks do not read."""
        return self.local_expert_ids is not None and bool(should_skip_weight(name, set()))

    def _unneeded(self) -> Callable[[str], bool] | None:
        """Tells of names of the language model, where only the encoders of other media run."""
        prefixes, mapper = self._encoder_only_lm_prefixes, self._encoder_only_weights_mapper
        if prefixes is None:
            return None

        def is_language_model(name: str) -> bool:
            mapped = name if mapper is None else mapper.map_name(name)
            return mapped is not None and mapped.startswith(prefixes)

        return is_language_model


for _name in _STANDS_ON:
    getattr(DefaultModelLoader, _name)  # AttributeError: another vLLM than the ones that this was written for


# -- what both loaders ask of vLLM ---------------------------------------------------------------------------------------------


def settings_of(load_config: Any) -> LoaderSettings:
    """The checked extra config of a load config."""
    return read_settings(
        load_config.model_loader_extra_config, load_format=load_config.load_format, environment=VllmSettings.from_environment()
    )


def place_of(model_config: Any, settings: LoaderSettings) -> str:
    """Where the weights of a model are: a folder, a url, or the name of a model of the hub.

    A model from a store has the url in `model_weights`, and a folder with its config in `model`. `source` stands for the path
    of the main model, as it was when it was first loaded: not for that of a draft, nor for one that is given to reload from.
    """
    if settings.source is not None and is_first(model_config):
        return settings.source
    target = _target_config(model_config)
    if model_config.model_weights:
        return str(model_config.model_weights)
    if target is not model_config and model_config.model == target.model and target.model_weights:
        return str(target.model_weights)  # a draft within the target's checkpoint
    return str(model_config.model)


def is_first(model_config: Any) -> bool:
    """Whether it is about the path that the main model was first loaded from: no draft, and none that is given to reload from."""
    target = _target_config(model_config)
    return bool(model_config.model == vars(target).setdefault(_FIRST, target.model))


def _target_config(model_config: Any) -> Any:
    """The config of the model that a draft is for; that of the model itself where it is no draft."""
    from vllm.config import get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    speculative = getattr(current, "speculative_config", None)
    target = getattr(speculative, "target_model_config", None)
    return model_config if target is None else target


def target_device(load_config: Any) -> str:
    """Where weights go, as `headrace.stream` takes it."""
    from vllm.platforms import current_platform

    wanted = str(load_config.device or "cuda").partition(":")[0]
    if current_platform.is_cuda_alike() and wanted == "cuda":
        current = current_platform.current_device()
        return f"cuda:{current}" if isinstance(current, int) else str(current)
    return "cpu"


def group_of_ranks(settings: LoaderSettings) -> Any:
    """The tensor-parallel group of this rank, if it is to share its reading; said where it is not.

    Raises:
        OptionError: `distributed` was demanded, and there is no such group.
    """
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        if settings.distributed:
            raise OptionError("distributed: vLLM has not made its tensor-parallel group yet", option="distributed")
        return None
    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return None
    if settings.distributed is False:
        log.info("headrace: ranks do not share their reading, each reads everything: distributed is false")
        return None
    return group.cpu_group


def options_of(settings: LoaderSettings) -> headrace.Options:
    """The tuning, with the number of ranks that load on this node where nobody has said it."""
    from vllm.distributed import parallel_state

    options = settings.options
    if options.local_ranks is None and headrace.Options.from_environment(["local_ranks"]).local_ranks is None:
        ranks = parallel_state.get_tp_group().world_size if parallel_state.model_parallel_is_initialized() else 1
        options = dataclasses.replace(options, local_ranks=ranks)
    return options


def is_readable(place: str) -> bool:
    """Whether headrace reads it where it is; the rest are names of models of the hub."""
    return "://" in place or os.path.exists(place)


def _downloaded(
    load_config: Any, model: str, subfolder: str | None, revision: str | None, patterns: list[str] | None
) -> list[str]:
    """The files of a model of the hub, in its cache: as vLLM's own loader of safetensors finds them."""
    config = dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config={})
    files: list[str] = DefaultModelLoader(config)._prepare_weights(model, subfolder, revision, False, patterns)[1]
    return files


def with_revision(place: str, revision: str | None) -> str:
    """The url of a model of the hub with the revision that vLLM was given, unless it has one."""
    repository, slash, rest = place.removeprefix("hf://").partition("/")
    name, slash_2, path = rest.partition("/")
    if not place.startswith("hf://") or revision is None or not slash or "@" in name:
        return place
    return f"hf://{repository}/{name}@{revision}{slash_2}{path}"


def _is_pickled(source: Any) -> bool:
    """Whether the only files that count are named, and are none of safetensors."""
    patterns = source.allow_patterns_overrides
    return bool(patterns) and all(pattern.endswith((".pt", ".bin", ".pth")) for pattern in patterns)


def _moved(source: Any, folder: str, place: str) -> Any:
    """A secondary source, in the store where it is said to be in the local folder of the model's config."""
    return dataclasses.replace(source, model_or_path=place) if source.model_or_path == folder else source
