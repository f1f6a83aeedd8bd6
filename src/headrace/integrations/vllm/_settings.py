"""How a loader was told to load: by --model-loader-extra-config, checked key by key, and by variables of vLLM's own loaders.

A key that is not known is refused by name, and so is a value of the wrong kind. vLLM starts for half a minute before a loader
sees its config, so `_hooks` has it checked at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from headrace._environment import first_set, switch
from headrace._options import Options
from headrace.errors import OptionError

PLAIN: Final = "headrace"
SHARDED: Final = "headrace_sharded"
TAKEOVER: Final = "HEADRACE_VLLM_TAKEOVER"  # on: what vLLM calls by the next two names is ours as well
RUNAI: Final = "runai_streamer"
RUNAI_SHARDED: Final = "runai_streamer_sharded"

_KEYS: Final = (
    "concurrency",
    "direct_io",
    "distributed",
    "dtype",
    "gds",
    "in_place",
    "memory_limit",
    "metadata",
    "partition",
    "pattern",
    "pinned_staging",
    "source",
    "verify",
)
_DEMANDS: Final = {True: "auto", False: "off", "auto": "auto", "off": "off", "require": "require"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """What the environment says to the loaders for vLLM.

    Attributes:
        local_index: VLLM_RUNAI_USE_LOCAL_WEIGHT_INDEX: take the index from the model's local folder, the shards from the store.
        cpu_files: VLLM_RUNAI_CPU_WEIGHT_FILES: names of shards, separated by commas, that go to host memory.
        cpu_memory_limit: VLLM_RUNAI_CPU_MEMORY_LIMIT: the `memory_limit` of these.
        single_reader: VLLM_RUNAI_SINGLE_ENGRAM_READER: they go to memory that the ranks of a node have in common.
    """

    local_index: bool = False
    cpu_files: tuple[str, ...] = ()
    cpu_memory_limit: int | None = None
    single_reader: bool = False

    @classmethod
    def from_environment(cls) -> VllmSettings:
        """Read them now. VLLM_RUNAI_BORROWED_WEIGHTS asks for tensors that are not copied, as ours never are.

        Raises:
            OptionError: a value that cannot be used, or one for files in host memory where none are named.
        """
        limit, files = "VLLM_RUNAI_CPU_MEMORY_LIMIT", "VLLM_RUNAI_CPU_WEIGHT_FILES"
        single_reader, text = bool(switch("VLLM_RUNAI_SINGLE_ENGRAM_READER")), first_set(limit)
        names = tuple(name.strip() for name in (first_set(files) or "").split(",") if name.strip())
        if not names and (single_reader or text is not None):
            name = limit if text is not None else "VLLM_RUNAI_SINGLE_ENGRAM_READER"
            raise OptionError(
                f"environment variable {name} is about the files that {files} names, and it is not set", option=name
            )
        try:
            number = Options(memory_limit=text).memory_limit
        except OptionError as exc:
            raise OptionError(f"environment variable {limit}={text!r}: {exc}", option=limit) from None
        return cls(
            local_index=bool(switch("VLLM_RUNAI_USE_LOCAL_WEIGHT_INDEX")),
            cpu_files=names,
            cpu_memory_limit=number,
            single_reader=single_reader,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """How a loader was told to load.

    Attributes:
        distributed: whether tensor-parallel ranks share their reading; None: where they can.
        source: where the weights are, in place of the model's own path.
        pattern: names of sharded files; None: vLLM's.
        dtype: as of `headrace.stream`.
        verify, metadata: as of `headrace.open`.
        options: tuning.
        local_index: see `VllmSettings`.
        places: files that do not go where the others do, as keys of `headrace.stream`'s `device`.
    """

    distributed: bool | None = None
    source: str | None = None
    pattern: str | None = None
    dtype: Any = None
    verify: Any = None
    metadata: str | None = None
    options: Options = field(default_factory=Options)
    local_index: bool = False
    places: Mapping[str, str] = field(default_factory=dict)


def read_settings(extra: object, *, load_format: str, environment: VllmSettings) -> LoaderSettings:
    """Check and translate an extra config.

    Args:
        extra: the parsed JSON; None: empty.
        load_format: which loader it is for; it also counts what goes with which.
        environment: what else was asked for.

    Raises:
        OptionError: naming the key, or the variable, and what can be done.
    """
    given = _as_mapping(extra, load_format)
    is_sharded = load_format in (SHARDED, RUNAI_SHARDED)
    for key in given:
        _check_known(key, load_format)
    _check_places(given, load_format, is_sharded=is_sharded)
    if is_sharded and environment.cpu_files:
        name = "VLLM_RUNAI_CPU_WEIGHT_FILES"
        raise OptionError(f"environment variable {name}: sharded files go where the parameters are; unset it", option=name)
    on_cpu = "shared-cpu" if environment.single_reader else "cpu"
    return LoaderSettings(
        distributed=_flag(given, "distributed"),
        source=_text(given, "source"),
        pattern=_text(given, "pattern"),
        dtype=_dtype(given.get("dtype")),
        verify=_verify(given.get("verify")),
        metadata=_text(given, "metadata"),
        options=Options(
            concurrency=_count(given, "concurrency", least=1),
            memory_limit=_limit(given.get("memory_limit")),
            memory_limits=None if environment.cpu_memory_limit is None else {on_cpu: environment.cpu_memory_limit},
            pin=_demand(given, "pinned_staging"),
            gds=_demand(given, "gds"),
            in_place=_demand(given, "in_place"),
            direct_io=given.get("direct_io"),
            partition=given.get("partition"),
        ),
        local_index=environment.local_index,
        places={f"file:{name}": on_cpu for name in environment.cpu_files},
    )


def _as_mapping(extra: object, load_format: str) -> Mapping[str, Any]:
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        kind = type(extra).__name__
        raise OptionError(f"model_loader_extra_config for {load_format} is a JSON object, not {kind}", option="extra_config")
    return extra


def _check_known(key: str, load_format: str) -> None:
    if key not in _KEYS:
        near = get_close_matches(str(key), _KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"keys are {', '.join(_KEYS)}"
        raise OptionError(f"unexpected extra config key for load format {load_format}: {key!r}; {hint}", option=str(key))


def _check_places(given: Mapping[str, Any], load_format: str, *, is_sharded: bool) -> None:
    if not is_sharded and given.get("pattern") is not None:
        raise OptionError(
            f"pattern names the files of one rank, for --load-format {SHARDED}; this is {load_format}", option="pattern"
        )
    if is_sharded and given.get("distributed"):
        raise OptionError("distributed: each rank has files of its own, so there is nothing to share", option="distributed")
    if is_sharded and given.get("dtype") is not None:
        raise OptionError("dtype: sharded files hold what the parameters hold, and are loaded as they are", option="dtype")


def _flag(given: Mapping[str, Any], key: str) -> bool | None:
    value = given.get(key)
    if value is not None and not isinstance(value, bool):
        raise OptionError(f"{key} is true or false, not {value!r}", option=key)
    return value


def _text(given: Mapping[str, Any], key: str) -> str | None:
    value = given.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise OptionError(f"{key} is a text, not {value!r}", option=key)
    return value


def _count(given: Mapping[str, Any], key: str, *, least: int) -> int | None:
    value = given.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise OptionError(f"{key} is a whole number from {least} on, not {value!r}", option=key)
    return value


def _limit(value: Any) -> Any:
    """Bytes, or text such as "2GiB"; `Options` checks it, but for what JSON calls true."""
    if isinstance(value, bool):
        raise OptionError(f"memory_limit is a number of bytes, not {value!r}", option="memory_limit")
    return value


def _demand(given: Mapping[str, Any], key: str) -> Any:
    """true asks for what is not done by itself, and goes on with a warning where it cannot be done."""
    value = given.get(key)
    if value is None:
        return None
    if not isinstance(value, (bool, str)) or value not in _DEMANDS:
        raise OptionError(f"{key} is true, false, 'auto', 'off' or 'require', not {value!r}", option=key)
    return _DEMANDS[value]


def _dtype(value: object) -> Any:
    is_mapping = isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values())
    if value is not None and not isinstance(value, str) and not is_mapping:
        raise OptionError(f"dtype is a dtype's name, or an object of names or globs and dtypes, not {value!r}", option="dtype")
    return value


def _verify(value: object) -> Any:
    if value is not None and not isinstance(value, (bool, str)):
        raise OptionError(f"verify is true, false, 'auto', 'require' or the path of a manifest, not {value!r}", option="verify")
    return value
