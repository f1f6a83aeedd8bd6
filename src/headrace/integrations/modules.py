"""Weights loaded into a torch module where it stands.

Which tensor of the checkpoint goes to which parameter or buffer is decided first, from names and shapes, and refused as a whole
where it does not fit; only then are bytes read, straight into the module's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from typing_extensions import Unpack

import headrace
from headrace.errors import LoadError, OptionError

if TYPE_CHECKING:
    import torch

    from headrace._arguments import TransferArguments
    from headrace._location import Location
    from headrace._selection import DTypeRule, Names

Rename: TypeAlias = "Mapping[str, str] | Callable[[str], str] | None"

_SHOWN = 6  # names in a message; the error's fields have all of them


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_into` did.

    Attributes:
        loaded: names of the module's parameters and buffers that were filled, in the order of the module.
        missing: names of the module that the checkpoint has nothing for, and that share no memory with one that was filled.
        unexpected: names of the checkpoint that the module has no place for.
        tied: {name: the name that was filled}, for names of the module that are the same tensor as another one.
        nbytes: bytes of the module that were filled.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    tied: Mapping[str, str]
    nbytes: int

    def __str__(self) -> str:
        parts = [f"{len(self.loaded):,} tensors loaded ({self.nbytes:,} bytes)"]
        parts += (
            [f"{len(self.tied):,} tied: {_shown(f'{name} to {other}' for name, other in self.tied.items())}"] if self.tied else []
        )
        parts += [f"{len(self.missing):,} missing: {_shown(self.missing)}"] if self.missing else []
        parts += [f"{len(self.unexpected):,} unexpected: {_shown(self.unexpected)}"] if self.unexpected else []
        return "; ".join(parts)


class ModuleMismatchError(LoadError):
    """A checkpoint and a module do not fit; nothing was read and nothing was changed.

    Attributes:
        missing, unexpected: as of `LoadReport`.
        mismatched: {name of the module: (shape of the checkpoint, shape of the module)}.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing, self.unexpected, self.mismatched = missing, unexpected, dict(mismatched or {})


def load_into(
    module: torch.nn.Module,
    url: Location,
    *,
    strict: bool = True,
    assign: bool = False,
    names: Names = None,
    dtype: DTypeRule = None,
    rename: Rename = None,
    credentials: object = None,
    **arguments: Unpack[TransferArguments],
) -> LoadReport:
    """Load a checkpoint into a module: its parameters and buffers are filled where they are, without a second copy of them.

    Args:
        module: what to fill.
        url: as for `headrace.open`, or an open `Checkpoint`.
        strict: whether names that are missing or unexpected are an error. A shape that does not fit always is.
        assign: replace parameters and buffers by the tensors of the checkpoint, of its dtype, instead of filling them. For
            modules on the meta device. Tensors that were one before are one afterwards, too.
        names: which tensors of the checkpoint; as for `headrace.stream`.
        dtype: with `assign`, dtypes to convert to; as for `headrace.stream`. Without it, values take the module's dtypes.
        rename: from names of the checkpoint to names of the module: a mapping, or a callable. Names without an entry stay.
        credentials: as for `headrace.open`.
        **arguments: as for `headrace.stream`: `progress`, `verify`, `memory_limit`, ...; with `assign` also `device`.

    Returns:
        Which names were loaded, missing, unexpected and tied. Of tensors that are one in the module and several in the checkpoint
        the last one in the module's order is read.

    Raises:
        ModuleMismatchError: names or shapes do not fit; nothing has been changed.
        LoadError: reading failed half way; `filled` has the checkpoint's names that are complete. Its cause is the `SourceError`.
        As `headrace.stream`.

    Example:
        >>> report = headrace.load_into(model, "models/minilm", rename=lambda name: f"encoder.{name}", strict=False)
        >>> report.missing
        ('head.weight', 'head.bias')
    """
    if dtype is not None and not assign:
        raise OptionError("dtype goes with assign=True; without it values take the dtypes of the module", option="dtype")
    given: dict[str, Any] = {**arguments}
    checkpoint = (
        url if isinstance(url, headrace.Checkpoint) else headrace.open(url, credentials=credentials, **_of_opening(given))
    )
    try:
        fit = _fit(module, checkpoint, names, rename)
        _check(fit, module, checkpoint, strict=strict, assign=assign)
        if assign:
            nbytes = _assign(fit, module, checkpoint, dtype, given)
        else:
            nbytes = _fill(fit, checkpoint, given)
        return replace(fit.report, nbytes=nbytes)
    finally:
        if checkpoint is not url:
            checkpoint.close()


def _of_opening(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take what is for opening alone out of the arguments of a stream; with it what both need: patience with a store, for one."""
    alone = {name: arguments.pop(name) for name in ("verify", "metadata") if name in arguments}
    both = ("options", *headrace.Options.__dataclass_fields__)
    return alone | {name: value for name, value in arguments.items() if name in both}


@dataclass(frozen=True, slots=True)
class _Fit:
    """What goes where.

    Attributes:
        sources: {name of the module: name of the checkpoint}, one per tensor of the module.
        targets: {name of the module: tensor}, all of them.
        mismatched: as of `ModuleMismatchError`.
        report: what will be said of it.
    """

    sources: dict[str, str]
    targets: dict[str, torch.Tensor]
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    report: LoadReport


def _fit(module: torch.nn.Module, checkpoint: headrace.Checkpoint, names: Any, rename: Rename) -> _Fit:
    import torch

    targets = {name: each for name, each in module.state_dict(keep_vars=True).items() if isinstance(each, torch.Tensor)}
    chosen = list(checkpoint) if names is None else headrace.plan(checkpoint, names=names).tensors.names
    renamed = _renamed(chosen, rename)
    groups: dict[object, list[str]] = {}
    for name, target in targets.items():
        groups.setdefault(_identity(target), []).append(name)
    sources: dict[str, str] = {}
    tied: dict[str, str] = {}
    missing: list[str] = []
    for group in groups.values():
        found = next((name for name in reversed(group) if name in renamed), None)
        if found is None:
            missing += group
            continue
        sources[found] = renamed[found]
        tied.update((name, found) for name in group if name != found)
    order = {name: at for at, name in enumerate(targets)}
    unexpected = tuple(source for name, source in renamed.items() if name not in targets)
    report = LoadReport(
        tuple(sorted(sources, key=order.__getitem__)), tuple(sorted(missing, key=order.__getitem__)), unexpected, tied, 0
    )
    shapes = {name: _torch_shape(checkpoint[source]) for name, source in sources.items()}
    mismatched = {
        name: (shape, tuple(targets[name].shape)) for name, shape in shapes.items() if shape != tuple(targets[name].shape)
    }
    return _Fit(sources, targets, mismatched, report)


def _renamed(chosen: list[str], rename: Rename) -> dict[str, str]:
    """{name of the module: name of the checkpoint}."""
    change = rename if callable(rename) else (lambda name: (rename or {}).get(name, name))
    found: dict[str, str] = {}
    for source in chosen:
        name = change(source)
        if name in found:
            raise OptionError(f"rename: {found[name]!r} and {source!r} both become {name!r}", option="rename")
        found[name] = source
    return found


def _identity(tensor: torch.Tensor) -> object:
    """Equal for what is one tensor: the same object, or the same elements in the same memory."""
    if tensor.is_meta or not tensor.numel() or tensor.layout is not _strided():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _strided() -> torch.layout:
    import torch

    return torch.strided


def _torch_shape(info: headrace.TensorInfo) -> tuple[int, ...]:
    """The shape that torch has for it: two F4 elements are one of torch's."""
    halves = info.dtype == "F4" and bool(info.shape) and info.shape[-1] % 2 == 0
    return (*info.shape[:-1], info.shape[-1] // 2) if halves else info.shape


def _check(fit: _Fit, module: torch.nn.Module, checkpoint: headrace.Checkpoint, *, strict: bool, assign: bool) -> None:
    missing, unexpected = (fit.report.missing, fit.report.unexpected) if strict else ((), ())
    said = []
    if fit.mismatched:
        shapes = (
            f"{name} is {list(ours)} in the module and {list(theirs)} in the file"
            for name, (theirs, ours) in fit.mismatched.items()
        )
        said.append(f"{len(fit.mismatched)} shapes differ: {_shown(shapes)}")
    said += [f"{len(missing)} tensors of the module are not in the checkpoint: {_shown(missing)}"] if missing else []
    said += (
        [f"{len(unexpected)} tensors of the checkpoint have no place in the module: {_shown(unexpected)}"] if unexpected else []
    )
    if said:
        hint = "; rename= changes names, strict=False takes what fits" if missing or unexpected else ""
        raise ModuleMismatchError(
            f"{checkpoint.url} does not fit {type(module).__name__}: {'; '.join(said)}{hint}",
            missing=missing,
            unexpected=unexpected,
            mismatched=fit.mismatched,
        )
    if not assign and (meta := next((name for name in fit.sources if fit.targets[name].is_meta), None)) is not None:
        raise OptionError(f"{meta!r} is on the meta device and cannot be filled; load with assign=True", option="assign")


def _fill(fit: _Fit, checkpoint: headrace.Checkpoint, arguments: dict[str, Any]) -> int:
    """Fill the module's own memory, device by device."""
    if "device" in arguments:
        raise OptionError("device goes with assign=True; without it tensors are filled where they are", option="device")
    into = {source: fit.targets[name].detach() for name, source in fit.sources.items()}
    for device in dict.fromkeys(str(tensor.device) for tensor in into.values()):
        here = {source: tensor for source, tensor in into.items() if str(tensor.device) == device}
        with headrace.stream(checkpoint, device=device, names=list(here), into=here, **arguments) as stream:
            for _ in stream:
                pass
    return sum(tensor.nbytes for tensor in into.values())


def _assign(fit: _Fit, module: torch.nn.Module, checkpoint: headrace.Checkpoint, dtype: object, arguments: dict[str, Any]) -> int:
    """Give the module tensors of the checkpoint, as torch does it."""
    import torch

    loaded = headrace.load(checkpoint, names=list(fit.sources.values()), dtype=dtype, **arguments)
    state: dict[str, torch.Tensor] = {}
    for name, source in fit.sources.items():
        tensor, before = loaded[source], fit.targets[name]
        if isinstance(before, torch.nn.Parameter):
            learns = before.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
            tensor = torch.nn.Parameter(tensor, requires_grad=learns)
        state[name] = tensor
    # One object for all names of it: torch keeps a Parameter as it is, so what was tied stays tied.
    state.update((name, state[other]) for name, other in fit.report.tied.items())
    module.load_state_dict(state, strict=False, assign=True)
    return sum(tensor.nbytes for tensor in loaded.values())


def _shown(names: Any) -> str:
    found = list(names)
    return ", ".join(found[:_SHOWN]) + (f", and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else "")
