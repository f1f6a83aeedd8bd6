"""The loader behind `--load-format headrace_sharded`: each rank reads files of its own straight into its parameters.

The files are those that vLLM's `save_sharded_state` writes: the state of one rank, under the names and in the shapes that the
rank has. Names and shapes are compared before a byte is read.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

import headrace
from headrace.errors import FormatError, OptionError
from headrace.integrations.vllm._loader import (
    is_first,
    is_readable,
    options_of,
    place_of,
    settings_of,
    target_device,
    with_revision,
)
from headrace.integrations.vllm._streams import summary

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vllm.headrace")

_state_of = ShardedStateLoader._filter_subtensors
_check_pattern = ShardedStateLoader._render_default_pattern
_default_pattern = ShardedStateLoader._get_default_pattern


class HeadraceShardedLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads what each rank has saved.

    Args:
        load_config: vLLM's.

    Raises:
        OptionError: the extra config has a key or value that cannot be used.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.settings = settings_of(load_config)

    def download_model(self, model_config: Any) -> None:
        """Fetch a model of the hub; what has a url is read where it is."""
        self._folder(model_config)

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill the state of a model.

        Raises:
            FormatError: names or shapes of the files are not those of the model.
        """
        state: dict[str, torch.Tensor] = _state_of(model.state_dict())
        with self._open(model_config) as checkpoint:
            _check_names(checkpoint, state)
            places = {name: _narrowed(checkpoint[name], state[name]) for name in checkpoint}
            for device, part in _by_device(places).items():  # with offloading, some are the host's
                _fill(checkpoint, part, device)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ARG002
        """The rank's state, to load again: it is not in the checkpoint's format, so with `is_checkpoint_format=False`."""
        with (
            self._open(model_config) as checkpoint,
            headrace.stream(checkpoint, device=target_device(self.load_config)) as tensors,
        ):
            yield from tensors

    def _open(self, model_config: Any) -> headrace.Checkpoint:
        rank, pattern = _rank_and_pattern(self.settings.pattern)
        folder = self._folder(model_config)
        options = options_of(self.settings)
        metadata = self.settings.metadata if is_first(model_config) else None
        if self.settings.verify in (None, False):
            return headrace.open_sharded(folder, rank=rank, pattern=pattern, metadata=metadata, options=options)
        with headrace.open_sharded(folder, rank=rank, pattern=pattern, options=options) as found:
            shards = list(found.shards)
        return headrace.open(shards, verify=self.settings.verify, options=options)

    def _folder(self, model_config: Any) -> str:
        """The folder or url of the files; a model of the hub is fetched, all ranks' files of it."""
        place = place_of(model_config, self.settings)
        if is_readable(place):
            return with_revision(place, model_config.revision)
        config = dataclasses.replace(self.load_config, load_format="sharded_state", model_loader_extra_config={})
        return str(ShardedStateLoader(config)._prepare_weights(place, model_config.revision))


def _rank_and_pattern(pattern: str | None) -> tuple[int, str]:
    """This rank's number, and the pattern of its files with {rank} and {part} in it.

    Raises:
        ValueError: vLLM's, for a pattern that does not tell apart the ranks there are.
    """
    from vllm.distributed import parallel_state

    _check_pattern(pattern, part=0)
    pattern = _default_pattern() if pattern is None else pattern
    stage = parallel_state.get_pp_group().rank_in_group
    pattern = pattern.replace("{pp_rank}", str(stage)).replace("{tp_rank}", "{rank}")
    if "{rank}" not in pattern:
        raise OptionError(
            f"pattern has to have {{rank}} in it, for the rank whose file it is, and not be {pattern!r}", option="pattern"
        )
    return parallel_state.get_tp_group().rank_in_group, pattern


def _check_names(checkpoint: headrace.Checkpoint, state: Mapping[str, torch.Tensor]) -> None:
    missing = [name for name in state if name not in checkpoint]
    unexpected = [name for name in checkpoint if name not in state]
    if missing or unexpected:
        parts = [
            f"{len(names)} {what}: {', '.join(names[:4])}"
            for what, names in (("missing", missing), ("unexpected", unexpected))
            if names
        ]
        raise FormatError(
            f"the files in {checkpoint.url} are not the state of this model on this rank ({'; '.join(parts)}); they have to be "
            "saved by the same vLLM with the same parallelism and quantization",
            url=checkpoint.url,
            tensor=(missing or unexpected)[0],
        )


def _by_device(places: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, place in places.items():
        found.setdefault(str(place.device), {})[name] = place
    return found


def _fill(checkpoint: headrace.Checkpoint, places: Mapping[str, torch.Tensor], device: str) -> None:
    names = None if len(places) == len(checkpoint) else lambda info: info.name in places
    with headrace.stream(checkpoint, names=names, into=places, device=device) as tensors:
        for _ in tensors:
            pass
    log.info("headrace: %s", summary(tensors.stats))


def _narrowed(info: headrace.TensorInfo, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that a tensor fills: with LoRA a parameter may be padded."""
    data = parameter.data
    fits = len(info.shape) == data.ndim and all(size <= room for size, room in zip(info.shape, data.shape, strict=True))
    if not fits:
        raise FormatError(
            f"{info.name!r} is of shape {tuple(info.shape)} in the file, and of {tuple(data.shape)} in the model on this rank",
            tensor=info.name,
        )
    for dimension, size in enumerate(info.shape):
        data = data.narrow(dimension, 0, size)
    return data
