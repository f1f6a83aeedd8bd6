"""SGLang loads through headrace what it calls `runai_streamer`: models in stores, and folders with that load format.

    HEADRACE_SGLANG_TAKEOVER=1 sglang serve --model-path s3://models/llama

SGLang's load formats are a closed list, and a path of a store means `runai_streamer` there. So its iterator over that format's
files is replaced, through SGLang's own registry of hooks, and `import runai_model_streamer` gives headrace's interface to those
parts that list files and fetch configs. SGLang finds `register` by the entry point group `sglang.srt.plugins` and calls it in
every process, before it reads its arguments. Importing this imports neither SGLang nor torch.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import headrace
from headrace._environment import switch
from headrace.integrations import runai
from headrace.integrations.vllm._streams import open_weights, stream_weights

if TYPE_CHECKING:
    import torch

__all__ = ["register"]

log = logging.getLogger("headrace")

_ITERATOR: Final = "sglang.srt.model_loader.weight_utils.runai_safetensors_weights_iterator"


def register() -> None:
    """Put the hooks in place, if HEADRACE_SGLANG_TAKEOVER is on. Called by SGLang in each of its processes; may be called twice.

    Raises:
        OptionError: the switch is neither on nor off.
        ImportError: SGLang has no registry of hooks where it was, or Run:ai's package has been imported already. SGLang logs
            what its plugins raise, and goes on without them.
    """
    if not switch("HEADRACE_SGLANG_TAKEOVER"):
        return
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    try:
        hooks, replace = registry.HookRegistry, registry.HookType.REPLACE
        taken = [hook for _, hook, *_ in hooks._hooks.get(_ITERATOR, ())]
    except AttributeError as exc:
        raise ImportError(f"headrace does not fit this SGLang: {exc}; docs/sglang.md has the version it was written for") from exc
    runai.install()
    if iterate not in taken:
        hooks.register(_ITERATOR, iterate, replace)


def iterate(
    hf_weights_files: Sequence[str], is_distributed: bool = False, device: str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all files; in place of SGLang's function of these arguments.

    Tensors are the caller's, so none has the mark by which SGLang knows those that it has to copy.

    Args:
        hf_weights_files: paths or urls, that SGLang has chosen by the index.
        is_distributed: whether the tensor-parallel ranks share their reading, where they can. SGLang's default for urls.
        device: where weights go.
    """
    group = _group() if is_distributed else None
    options = headrace.Options(local_ranks=_ranks() if is_distributed else None)
    checkpoint = open_weights(
        list(hf_weights_files), patterns=None, ignored=(), index_from=None, metadata=None, verify=None, options=options
    )
    yield from stream_weights(
        checkpoint, set(checkpoint), own=(), device=device, places={}, group=group, is_demanded=False, dtype=None, log=log
    )


def _parallel() -> Any:
    try:
        found = importlib.import_module("sglang.srt.distributed.parallel_state")
        return found if found.model_parallel_is_initialized() else None
    except (ImportError, AttributeError) as exc:
        log.warning("ranks do not share their reading, each reads everything: SGLang's groups are not where they were (%s)", exc)
        return None


def _group() -> Any:
    """The tensor-parallel group of this rank, if there are others in it."""
    parallel = _parallel()
    group = parallel.get_tp_group() if parallel is not None else None
    return group.cpu_group if group is not None and group.world_size > 1 else None


def _ranks() -> int | None:
    parallel = _parallel()
    return int(parallel.get_tp_group().world_size) if parallel is not None else None
