"""vLLM loads through headrace: load formats `headrace` and `headrace_sharded`, from folders, stores and the hub.

    vllm serve s3://models/llama --load-format headrace --model-loader-extra-config '{"concurrency": 16}'

vLLM finds `register` by the entry point group `vllm.general_plugins` and calls it in every process. `_settings` reads the extra
config; `_loader` and `_sharded` are the loaders; `_streams` decides which tensors are read, by whom; `_hooks` lets vLLM take
urls of models. Importing this imports neither vLLM nor torch. docs/vllm.md has the keys and the versions that it was tried with.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from headrace._environment import switch
from headrace.integrations.vllm._settings import PLAIN, RUNAI, RUNAI_SHARDED, SHARDED, TAKEOVER

__all__ = ["register"]

log = logging.getLogger("vllm.headrace")  # vLLM shows what is below its own name


def register() -> None:
    """Make vLLM know the load formats. Called by vLLM in each of its processes; may be called twice.

    With HEADRACE_VLLM_TAKEOVER=1 the formats `runai_streamer` and `runai_streamer_sharded` are headrace's as well.

    A vLLM that is not as expected is not harmed: what does not fit is logged, and using a format raises what is wrong.

    Raises:
        OptionError: HEADRACE_VLLM_TAKEOVER is neither on nor off.
    """
    takeover = switch(TAKEOVER)
    try:
        registry = importlib.import_module("vllm.model_executor.model_loader")
        known, add = registry._LOAD_FORMAT_TO_MODEL_LOADER, registry.register_model_loader
    except (ImportError, AttributeError) as exc:
        log.error("headrace cannot add its load formats to %s: %s", _version(), exc)
        return
    plain, sharded = _loaders(registry)
    _enter(known, add, plain, [PLAIN, *([RUNAI] if takeover else [])])
    _enter(known, add, sharded, [SHARDED, *([RUNAI_SHARDED] if takeover else [])])
    from headrace.integrations.vllm._hooks import install_hooks

    for missing in install_hooks():
        log.warning(
            "headrace does not fit %s: %s. Models from folders load; for one from a store give the folder of its config as the "
            'model, and --model-loader-extra-config \'{"source": "s3://..."}\'.',
            _version(),
            missing,
        )


def _loaders(registry: Any) -> tuple[Any, Any]:
    """The two loaders; where this vLLM lacks what they stand on, loaders that say so when they are used."""
    try:
        from headrace.integrations.vllm._loader import HeadraceModelLoader
        from headrace.integrations.vllm._sharded import HeadraceShardedLoader
    except (ImportError, AttributeError) as exc:
        return (_unfit(registry.BaseModelLoader, exc),) * 2
    return HeadraceModelLoader, HeadraceShardedLoader


def _unfit(base: Any, error: Exception) -> Any:
    message = f"headrace's loaders do not fit {_version()}: {error}; see docs/vllm.md for the versions that they were tried with"

    class UnfitLoader(base):  # type: ignore[misc]
        def __init__(self, load_config: Any) -> None:
            super().__init__(load_config)
            raise ImportError(message)

        download_model = load_weights = get_all_weights = None

    return UnfitLoader


def _enter(known: dict[str, Any], add: Any, loader: Any, formats: list[str]) -> None:
    for load_format in formats:
        if getattr(known.get(load_format), "__name__", "") != loader.__name__:
            known.pop(load_format, None)  # else vLLM warns that it is overwritten, which is what was asked for
            add(load_format)(loader)


def _version() -> str:
    try:
        return f"vLLM {importlib.import_module('vllm').__version__}"
    except (ImportError, AttributeError):
        return "this vLLM"
