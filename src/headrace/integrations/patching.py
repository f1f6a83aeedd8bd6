"""transformers, diffusers and what they are built on, loading through headrace as long as a `with` block lasts.

Two things are replaced, wherever they have been imported to: safetensors' `safe_open` and `load_file`, by which all of them read
weights; and, so that a model in a store can be named, the class methods that take a model's name, which hand on a local folder
that stands for it. Modules of these libraries that are imported inside the block are treated as they come. When the last block is
left everything is put back, also in modules that were imported meanwhile.

Modules are the whole process's, so the replacement is too: what other threads load during a block comes through headrace as well,
with the settings of the block that was entered last, and every open block counts it.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import Self, Unpack

import headrace
from headrace.errors import OptionError
from headrace.integrations._importing import AdaptingFinder
from headrace.integrations._reading import PatchReport, Record, make_load_file, make_safe_open
from headrace.integrations.views import StandIn, check_url, is_store_url

if TYPE_CHECKING:
    from headrace._arguments import TuningArguments

log = logging.getLogger("headrace")

FAMILIES: Final = ("transformers", "diffusers", "accelerate", "peft", "sentence_transformers", "huggingface_hub")
_METHODS: Final = ("from_pretrained", "load_config", "get_config_dict")
_NAMES: Final = (
    "pretrained_model_name_or_path",
    "pretrained_model_or_path",
    "pretrained_model_path",
    "model_id",
    "config",
    "path",
)
_PIPELINE_NAMES: Final = ("model", "config", "tokenizer", "feature_extractor", "image_processor", "processor")
# Where the libraries read weights, by version tested: without it a patch would do nothing, and say so only at its end.
_SEAMS: Final = {
    "transformers.modeling_utils": ("safe_open", "transformers 5.19"),
    "diffusers.models.model_loading_utils": ("safetensors", "diffusers 0.42"),
    "accelerate.utils.modeling": ("safe_load_file", "accelerate 1.15"),
}
_ORIGINAL: Final = "__headrace_original__"  # of a wrapper: what it wraps; survives copies of the function


def patch(*, credentials: object = None, **options: Unpack[TuningArguments]) -> Patch:
    """Make transformers and diffusers load through headrace inside a `with` block.

    `from_pretrained` with its usual arguments then reads safetensors files by headrace, and takes `s3://`, `gs://`, `az://` and
    `hf://` urls of folders where it takes names: small files are mirrored as `local_view` does it, weights come from the store
    into memory. What is in other formats (.bin) is left to the libraries.

    Args:
        credentials: as for `headrace.open`.
        **options: tuning; see `Options`.

    Returns:
        A context manager; its `report` says what was loaded. At the end of the block the log has it as well, as a warning if it
        was nothing.

    Raises:
        OptionError: an option that there is not; safetensors or torch are not installed.

    Example:
        >>> with headrace.patch() as patched:
        ...     model = AutoModel.from_pretrained("s3://models/minilm", dtype="bfloat16")
        >>> print(patched.report)
        headrace loaded 103 tensors (90,852,864 bytes) from 1 file
    """
    return Patch(credentials, options)


class Patch:
    """What `patch` returns."""

    def __init__(self, credentials: object, options: TuningArguments) -> None:
        headrace.Options().merged(
            {name: value for name, value in options.items() if name != "options"}
        )  # refuses what is unknown
        self._credentials, self._options = credentials, options
        self._record = Record()
        self._stand_ins: dict[str, StandIn] = {}
        self._lock = threading.Lock()
        self._is_entered = False

    @property
    def report(self) -> PatchReport:
        """What has been loaded so far."""
        return self._record.report()

    @property
    def record(self) -> Record:
        """Where what is loaded is counted."""
        return self._record

    def open(self, filename: str | os.PathLike[str]) -> headrace.Checkpoint:
        """Open a file, or the one that it stands for."""
        path = os.fspath(filename)
        stand_in = self._stand_in(path)
        source = None if stand_in is None else stand_in.open(path)
        # Whatever the environment says of mmap: what is handed out must not alias the file.
        options: TuningArguments = {**self._options, "mmap": "off"}
        return headrace.open(path if source is None else source, credentials=self._credentials, **options)

    def stands_for(self, path: str) -> bool:
        """Whether a local path is one that this patch has made up."""
        return self._stand_in(path) is not None

    def _stand_in(self, path: str) -> StandIn | None:
        return next((each for each in tuple(self._stand_ins.values()) if path in each.weights), None)

    def local(self, url: str) -> str:
        """The folder that stands for a model in a store; the same one for as long as this patch lasts."""
        check_url(url)
        with self._lock:
            if url not in self._stand_ins:
                self._stand_ins[url] = StandIn(url, credentials=self._credentials, options=self._options)
            return self._stand_ins[url].path

    def __enter__(self) -> Self:
        with self._lock:
            if self._is_entered:
                raise OptionError("this patch was entered before; call headrace.patch() for each block", option="patch")
            self._is_entered = True
        _installation.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _installation.leave(self)
        self._stand_ins = {}  # and the connections that they hold
        if self.report.tensors:
            log.info("%s", self.report)
        elif kind is None:
            log.warning(
                "nothing was loaded through headrace inside this headrace.patch(): no safetensors file was read by %s; files in "
                "other formats, disable_mmap=True and worker processes are not seen here",
                ", ".join(name for name in FAMILIES if name in sys.modules) or "any library that it knows",
            )


# ---- what is replaced, while any patch is active


class _Installation:
    """The replacements of this process. The lock is reentrant, since an import that is adapted may happen while it is held."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._patches: list[Patch] = []
        self._swaps: list[tuple[Any, Any]] = []  # (what was there, what is there now)
        self._methods: list[tuple[type, str, Any, Any]] = []  # (class, name, what was there, what is there now)
        self._finder = AdaptingFinder(FAMILIES, self.adapt)

    # Openings, for what is replaced.

    def open(self, filename: str | os.PathLike[str]) -> headrace.Checkpoint:
        with self._lock:
            patches = self._patches[::-1]
        if not patches:  # kept by somebody from a block that is over
            return headrace.open(filename, mmap="off")
        path = os.fspath(filename)
        return next((each for each in patches if each.stands_for(path)), patches[0]).open(path)

    def records(self) -> list[Record]:
        with self._lock:
            return [each.record for each in self._patches]

    def local(self, name: Any) -> Any:
        """What to hand on to a library for a model's name."""
        if not is_store_url(name):
            return name
        with self._lock:
            patch = self._patches[-1] if self._patches else None
        return name if patch is None else patch.local(name)

    # Coming and going.

    def enter(self, patch: Patch) -> None:
        safetensors = _imported()  # before the lock: threads that import wait for it while they hold the locks of modules
        with self._lock:
            if not self._patches:
                try:
                    self._install(safetensors)
                except BaseException:
                    self._restore()
                    raise
            self._patches.append(patch)

    def leave(self, patch: Patch) -> None:
        with self._lock:
            self._patches.remove(patch)
            if not self._patches:
                self._restore()

    def _install(self, safetensors: Any) -> None:
        self._swaps = [
            (safetensors.safe_open, make_safe_open(self, safetensors.safe_open)),
            (safetensors.torch.load_file, make_load_file(self)),
        ]
        for module in _modules(("safetensors", *FAMILIES)):
            self.adapt(module)
        sys.meta_path.insert(0, self._finder)

    def _restore(self) -> None:
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for kind, name, before, now in reversed(self._methods):
            if kind.__dict__.get(name) is now:
                setattr(kind, name, before)
        back = [(now, before) for before, now in self._swaps]
        for module in (*_modules(("safetensors",)), *_modules(None)):  # the source of the names first
            _swap(module, back)
        self._methods, self._swaps = [], []

    def adapt(self, module: ModuleType) -> None:
        """Replace what a module has of safetensors, and wrap its classes' methods that take names of models."""
        with self._lock:
            if not self._swaps:  # imported while the last block was left
                return
            seam, tested = _SEAMS.get(module.__name__, (None, ""))
            if seam is not None and seam not in vars(module):
                log.warning(
                    "%s has no %s, by which headrace.patch() gives it weights (tested with %s); they may come without headrace",
                    module.__name__, seam, tested,
                )  # fmt: skip
            if module.__name__ == "transformers.pipelines" and isinstance(vars(module).get("pipeline"), FunctionType):
                self._swaps.append((module.pipeline, _wrapped(module.pipeline, _PIPELINE_NAMES, self.local)))
                for other in _modules(("transformers",)):  # those that have taken the name before
                    _swap(other, self._swaps[-1:])
            _swap(module, self._swaps)
            for kind in list(vars(module).values()):
                if (
                    isinstance(kind, type)
                    and kind.__module__ == module.__name__
                    and module.__name__.partition(".")[0] in FAMILIES
                ):
                    self._wrap_methods(kind)

    def _wrap_methods(self, kind: type) -> None:
        for name in _METHODS:
            before = kind.__dict__.get(name)
            if not isinstance(before, classmethod) or any(kind is each and name == what for each, what, _, _ in self._methods):
                continue
            function = before.__func__
            original = getattr(function, _ORIGINAL, None)
            # A library that copies methods from class to class may have copied one that was wrapped already.
            now = before if original is not None else classmethod(_wrapped(function, _NAMES, self.local))
            self._methods.append((kind, name, before if original is None else classmethod(original), now))
            setattr(kind, name, now)


def _imported() -> ModuleType:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as exc:
        raise OptionError(
            f"headrace.patch() needs safetensors and torch ({exc}); pip install safetensors torch", option="patch"
        ) from exc
    return safetensors


def _wrapped(function: Callable[..., Any], names: Sequence[str], local: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function, with urls of models among its arguments, positional or of these names, replaced by local folders."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: local(each) if name in names else each for name, each in kwargs.items()}
        return function(*map(local, args), **named)

    setattr(call, _ORIGINAL, function)
    return call


def _swap(module: ModuleType, swaps: Sequence[tuple[Any, Any]]) -> None:
    for name, value in list(vars(module).items()):
        for before, now in swaps:
            if value is before:
                setattr(module, name, now)


def _modules(families: Sequence[str] | None) -> Iterator[ModuleType]:
    """Modules that are loaded, of these packages; None: all."""
    for name, module in list(sys.modules.items()):
        if hasattr(module, "__dict__") and (families is None or name.partition(".")[0] in families):
            yield module


_installation = _Installation()
