"""What vLLM has to be told so that a model may be a url, whatever the load format is.

vLLM mirrors config and tokenizer of s3://, gs:// and az:// models to a local folder, by Run:ai's package, and then takes load
formats that it knows by name only. So here: mirroring is `headrace.pull`'s, where a format is ours or Run:ai's package is not
there; hf:// is one more scheme; our formats pass for Run:ai's while that check runs; and whether a checkpoint ties its word
embeddings is looked up where the checkpoint is.

Each hook wraps a name of vLLM's once. Where a name is not as expected nothing is touched, and `install_hooks` says so.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

import headrace
from headrace._environment import switch
from headrace.integrations import runai
from headrace.integrations.vllm._settings import PLAIN, RUNAI, RUNAI_SHARDED, SHARDED, TAKEOVER, VllmSettings, read_settings
from headrace.integrations.vllm._streams import INDEX

_HUB: Final = "hf://"
_STAND_INS: Final = {PLAIN: RUNAI, SHARDED: RUNAI_SHARDED}
_MARK: Final = "__headrace__"

_configured_by: ContextVar[str] = ContextVar("_configured_by", default="")  # the load format, while vLLM makes its configs


class _Configured(NamedTuple):
    """The model that was configured last in this thread, with one of our formats."""

    model: str
    weights: str
    is_sharded: bool


_last: ContextVar[_Configured | None] = ContextVar("_last", default=None)


class _Hook(NamedTuple):
    """A name of vLLM's and what takes its place.

    Attributes:
        module, owner: where it is; owner is a class of the module, or "".
        name: of a function.
        parameters: that it has to have.
        wrap: makes the replacement from what is there.
    """

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...]
    wrap: Callable[[Any], Any]


def install_hooks() -> list[str]:
    """Put all hooks in place, once. What does not fit is returned, in words."""
    found = [_install(hook) for hook in _HOOKS]
    return [problem for problem in (_add_scheme(), _replace_pull(), *found) if problem]


def _install(hook: _Hook) -> str:
    place = f"{hook.module}.{hook.owner + '.' if hook.owner else ''}{hook.name}"
    try:
        holder: Any = importlib.import_module(hook.module)
        holder = getattr(holder, hook.owner) if hook.owner else holder
        original = getattr(holder, hook.name)
        parameters = inspect.signature(original).parameters
    except (ImportError, AttributeError, TypeError, ValueError) as exc:
        return f"it has no {place} ({exc})"
    if hasattr(original, _MARK):
        return ""
    if any(name not in parameters for name in hook.parameters):
        return f"{place} takes {', '.join(parameters)}, and {', '.join(hook.parameters)} were expected"
    wrapped = functools.wraps(original)(hook.wrap(original))
    setattr(wrapped, _MARK, True)
    setattr(holder, hook.name, wrapped)
    return ""


# -- schemes, and mirrors of configs -------------------------------------------------------------------------------------------


def _add_scheme() -> str:
    try:
        schemes = importlib.import_module("vllm.transformers_utils.runai_utils").SUPPORTED_SCHEMES
        if _HUB not in schemes:
            schemes.append(_HUB)
    except (ImportError, AttributeError) as exc:
        return f"its list of schemes is not where it was ({exc})"
    return ""


def _replace_pull() -> str:
    try:
        module: Any = importlib.import_module("vllm.transformers_utils.runai_utils")
        theirs = module.runai_pull_files
    except (ImportError, AttributeError) as exc:
        return f"its way to mirror configs is not where it was ({exc})"
    if not isinstance(theirs, _Pull):
        module.runai_pull_files = _Pull(theirs)
    return ""


class _Pull:
    """Mirrors the files of a model that fit the patterns to a folder: by headrace, or by Run:ai's package for its own formats."""

    def __init__(self, theirs: Callable[..., None]) -> None:
        self._theirs = theirs

    def __call__(
        self, model_path: str, dst: str, allow_pattern: list[str] | None = None, ignore_pattern: list[str] | None = None
    ) -> None:
        is_ours = _configured_by.get() in _our_formats() or model_path.lower().startswith(_HUB)
        if not is_ours and _runai_is_installed():
            self._theirs(model_path, dst, allow_pattern, ignore_pattern)
        else:
            runai.pull_files(model_path, dst, allow_pattern, ignore_pattern)


def _our_formats() -> tuple[str, ...]:
    taken = ("auto", RUNAI, RUNAI_SHARDED) if switch(TAKEOVER) else ()
    return (PLAIN, SHARDED, *taken)


def _runai_is_installed() -> bool:
    try:
        return importlib.util.find_spec("runai_model_streamer") is not None
    except ValueError:  # it was put there by `headrace.integrations.runai.install`
        return False


def _wrap_is_cloud(original: Callable[[str], bool]) -> Callable[[str], bool]:
    def is_cloud_storage(model_or_path: str) -> bool:
        return original(model_or_path) or model_or_path.lower().startswith(_HUB)

    return is_cloud_storage


def _wrap_config_maker(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of the methods of `EngineArgs` that make configs of models, and mirror what they need for that."""

    def create(self: Any, *arguments: Any, **keywords: Any) -> Any:
        token = _configured_by.set(str(self.load_format).lower())
        try:
            return original(self, *arguments, **keywords)
        finally:
            _configured_by.reset(token)

    return create


# -- load formats for models from stores ---------------------------------------------------------------------------------------


def _wrap_verify(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Of the method of `VllmConfig` that takes known load formats only, for a model from a store."""

    def try_verify_and_update_config(self: Any) -> None:
        load, model = self.load_config, self.model_config
        weights = getattr(model, "model_weights", "") or ""
        if load.load_format == "auto" and weights.lower().startswith(_HUB):
            load.load_format = PLAIN
        if load.load_format in _our_formats():
            if load.load_format != "auto":
                read_settings(
                    load.model_loader_extra_config, load_format=load.load_format, environment=VllmSettings.from_environment()
                )
            if model is not None:
                _last.set(_Configured(model.model, weights, load.load_format in (SHARDED, RUNAI_SHARDED)))
        with _standing_in(load, needed="://" in weights):
            original(self)

    return try_verify_and_update_config


@contextmanager
def _standing_in(load: Any, *, needed: bool) -> Iterator[None]:
    """While this lasts, our load format has the name of the one it is like."""
    ours = load.load_format
    if not needed or ours not in _STAND_INS:
        yield
        return
    load.load_format = _STAND_INS[ours]
    try:
        yield
    finally:
        load.load_format = ours


def _wrap_lm_head(original: Callable[..., bool | None]) -> Callable[..., bool | None]:
    """Of the function that tells whether a checkpoint has an lm_head of its own, though its config ties it to the embeddings.

    Sharded files hold the state of a model, where what is tied is saved under one name: they do not tell. vLLM knows that of
    its own formats.
    """

    def checkpoint_has_lm_head(model: str, *, revision: str | None = None) -> bool | None:
        last = _last.get()
        if last is None or last.model != model:
            return original(model, revision=revision)
        if last.is_sharded:
            return None
        if "://" in last.weights:
            return any(name.endswith("lm_head.weight") for name in _names(model, last.weights))
        return original(model, revision=revision)

    return checkpoint_has_lm_head


def _names(mirror: str, url: str) -> list[str]:
    """Names of a checkpoint in a store: from the index that was mirrored with its config, or else from its headers."""
    index = os.path.join(mirror, INDEX)
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            return list(json.load(file).get("weight_map", {}))
    with headrace.open(f"{url.rstrip('/')}/") as checkpoint:
        return list(checkpoint)


_HOOKS: Final = (
    _Hook("vllm.engine.arg_utils", "", "is_cloud_storage", ("model_or_path",), _wrap_is_cloud),
    _Hook("vllm.engine.arg_utils", "EngineArgs", "create_model_config", ("self",), _wrap_config_maker),
    _Hook("vllm.engine.arg_utils", "EngineArgs", "create_speculative_config", ("self",), _wrap_config_maker),
    _Hook("vllm.config.vllm", "VllmConfig", "try_verify_and_update_config", ("self",), _wrap_verify),
    _Hook("vllm.config.model", "", "checkpoint_has_lm_head", ("model", "revision"), _wrap_lm_head),
)
