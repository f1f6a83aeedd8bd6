"""The arguments that commands share, and how text becomes what the API takes. Values are checked there, not here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import typer

from headrace import OptionError

PATH_MEANS = (
    "PATH is a safetensors file, several of them, a folder of shards, or an index file; as a path or a URL: file://, s3://, "
    "gs://, az://, hf://, https://."
)

Paths: TypeAlias = Annotated[list[str], typer.Argument(metavar="PATH", hidden=True)]  # PATH_MEANS describes it, below the options
Names: TypeAlias = Annotated[
    list[str] | None, typer.Option("--names", metavar="GLOB", help="Only these tensors, a name or glob; may be repeated.")
]
DTypes: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="[GLOB=]DTYPE",
        help="Convert to bfloat16, F32, ...: all that are not quantized, or those a name or glob fits; may be repeated.",
    ),
]
Slices: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--slice", metavar="NAME=INDEX", help="Only a part of a tensor, as in numpy: 'w=0:128, :'; may be repeated."),
]
Concurrency: TypeAlias = Annotated[
    int | None, typer.Option("--concurrency", metavar="N", help="Reads in flight at once.  [default: from the CPUs]")
]
MemoryLimit: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Memory for reading ahead, such as 256MiB; 0 the least, -1 no limit.  [default: from the memory]",
    ),
]
DirectIO: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--direct-io", metavar="auto|on|off", help="Read past the page cache; auto: what is not cached.  [default: auto]"
    ),
]
Gds: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--gds", metavar="off|auto|require", help="Read files straight into a GPU's memory (cuFile, hipFile).  [default: off]"
    ),
]
Verify: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--verify",
        metavar="require|auto|PATH",
        help="Check what is read: by the manifest beside it or what its store says, or by the manifest at PATH.  [default: not]",
    ),
]
Device: TypeAlias = Annotated[
    str, typer.Option("--device", metavar="cpu|cuda[:N]", help="Where the tensors go; cuda is the current GPU.")
]
Trace: TypeAlias = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Write what every thread did when, for https://ui.perfetto.dev.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def as_url(paths: Sequence[str]) -> str | list[str]:
    """What the API takes as `url`: one path, or the files of one checkpoint."""
    return paths[0] if len(paths) == 1 else list(paths)


def request(
    paths: Paths,
    names: Names = None,
    dtypes: DTypes = None,
    slices: Slices = None,
    concurrency: Concurrency = None,
    memory_limit: MemoryLimit = None,
    direct_io: DirectIO = None,
    gds: Gds = None,
    verify: Verify = None,
    device: Device = "cpu",
) -> dict[str, Any]:
    """The arguments of `headrace.plan` and `headrace.stream`.

    Raises:
        OptionError: a --dtype or --slice that is not written as it should be.
    """
    return {
        "url": as_url(paths),
        "names": names or None,
        "dtype": parse_dtypes(dtypes or ()),
        "slices": dict(map(parse_slice, slices or ())) or None,
        "concurrency": concurrency,
        "memory_limit": memory_limit,
        "direct_io": direct_io,
        "gds": gds,
        "verify": verify,
        "device": device,
    }


def with_request(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the arguments of `request`, and pass it what they make as its first one."""
    shared, (_, *own) = _parameters(request), _parameters(command)

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        command(request(**{parameter.name: given.pop(parameter.name) for parameter in shared}), **given)

    # What typer reads.
    wrapped.__signature__ = inspect.Signature([*shared, *own])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in (*shared, *own)}
    return wrapped


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The parameters, with annotations that are no text any more: names in it are those of the function's own module.

    Not by `get_type_hints`, which before Python 3.11 wraps what has None for its default once more.
    """
    return list(inspect.signature(function, eval_str=True).parameters.values())


def parse_dtypes(texts: Sequence[str]) -> str | dict[str, str] | None:
    """The dtype rule of ['F16'], or of ['lm_head.*=F32', 'F16'], where what stands alone is for all the others."""
    rule: dict[str, str] = {}
    for text in texts:
        name, _, dtype = text.rpartition("=")
        if (name or "*") in rule:
            raise OptionError(f"--dtype {text!r}: {name or 'all tensors'} has two dtypes; give one of them", option="dtype")
        rule[name or "*"] = dtype
    others = rule.pop("*", None)
    if others is not None:
        rule["*"] = others  # the first that fits counts
    return others if rule.keys() == {"*"} else rule or None


def parse_slice(text: str) -> tuple[str, tuple[Any, ...]]:
    """(name, index) of 'NAME=0:128, ::2'."""
    name, equals, index = text.rpartition("=")
    if not equals or not index.strip():
        raise OptionError(
            f"--slice {text!r} names no tensor, or no index; write NAME=INDEX, such as 'w=0:128, :'", option="slices"
        )
    try:
        return name, tuple(_parse_axis(part.strip()) for part in index.strip().removeprefix("[").removesuffix("]").split(","))
    except ValueError:
        raise OptionError(
            f"--slice {text!r}: {index!r} is no index; write it as in numpy, from whole numbers, ':' and '...', as in '0:128, :'",
            option="slices",
        ) from None


def _parse_axis(text: str) -> Any:
    if text == "...":
        return ...
    parts = [int(part) if part.strip() else None for part in text.split(":")]
    if len(parts) == 1 and parts[0] is not None:
        return parts[0]
    if 2 <= len(parts) <= 3:
        return slice(*parts)
    raise ValueError(text)
