"""Checkpoints that are divided already: each rank has files of its own, called model-rank-{rank}-part-{part}.safetensors.

The layout is that of vLLM's sharded_state: a rank's tensors as it holds them, in one or more parts numbered from 0.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from string import Formatter
from typing import IO, TYPE_CHECKING, Any, Final

from headrace._addresses import view_at
from headrace._dtypes import BY_TORCH_NAME
from headrace.errors import FormatError, OptionError, SourceNotFoundError

if TYPE_CHECKING:
    import torch

PATTERN: Final = "model-rank-{rank}-part-{part}.safetensors"
PART_NBYTES: Final = 5 << 30  # vLLM's, too


def files_of_rank(names: Sequence[str], *, rank: int, pattern: str, url: str) -> list[str]:
    """A rank's files, in the order of their parts.

    Args:
        names: the files of a folder.
        rank: whose.
        pattern: how they are called; has {rank} and {part}.
        url: the folder, for messages.

    Raises:
        OptionError: no such pattern.
        SourceNotFoundError: the rank has no files; the message names the ranks that have.
        FormatError: a part is missing, or there twice.
    """
    found: dict[int, dict[int, list[str]]] = {}
    regex = _regex(pattern)
    for name in names:
        if match := regex.fullmatch(name):
            found.setdefault(int(match["rank"]), {}).setdefault(int(match["part"]), []).append(name)
    parts = found.get(rank, {})
    if not parts:
        there = f"there are files of rank {_listed(sorted(found))}" if found else "no file there is called like that"
        raise SourceNotFoundError(f"rank {rank} has no files in {url} ({pattern}); {there}", url=url)
    missing = sorted(set(range(max(parts) + 1)) - parts.keys())
    if missing:
        names_missing = _listed([_name(pattern, rank, part) for part in missing])
        raise FormatError(f"{url} lacks parts of rank {rank}: {names_missing}; an incomplete copy? Fetch them again", url=url)
    twice = next((same for same in parts.values() if len(same) > 1), None)
    if twice:
        raise FormatError(f"{url} has one part of rank {rank} under several names: {_listed(twice)}; remove one", url=url)
    return [parts[part][0] for part in sorted(parts)]


def save_sharded(
    state: Mapping[str, torch.Tensor],
    dst: str | os.PathLike[str],
    *,
    rank: int,
    pattern: str = PATTERN,
    part_nbytes: int = PART_NBYTES,
    metadata: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write one rank's tensors to a folder, for `open_sharded` and vLLM's sharded loaders. Every rank calls it for itself.

    A part appears under its name when it is whole and on disk. Parts of the same rank from an earlier call are replaced, those
    beyond the last new one removed, after the new ones are there.

    Args:
        state: {name: tensor}, from any device. Tensors that share memory are written once each.
        dst: the folder; made where it does not exist.
        rank: whose tensors these are.
        pattern: how files are called; has {rank} and {part}.
        part_nbytes: bytes of data from which on a new part is begun; a larger tensor has a part of its own.
        metadata: texts for the header's __metadata__.

    Returns:
        The files, in the order of their parts.

    Raises:
        OptionError: no such pattern, or a tensor of a dtype that the format does not have.
        OSError: `dst` cannot be written to; the files there are then as they were.

    Example:
        >>> headrace.save_sharded(model.state_dict(), "models/llama-tp8", rank=torch.distributed.get_rank())
    """
    _regex(pattern)  # refuses what is none
    folder = Path(dst)
    folder.mkdir(parents=True, exist_ok=True)
    parts = _divided({name: _DenseTensor(name, tensor) for name, tensor in state.items()}, part_nbytes)
    targets = [folder / _name(pattern, rank, part) for part in range(len(parts))]
    written: list[Path] = []
    try:
        for part, target in zip(parts, targets, strict=True):
            written.append(target.with_name(f".{target.name}.{os.getpid()}.tmp"))
            with written[-1].open("wb") as file:
                _write(file, part, metadata)
        for temporary, target in zip(written, targets, strict=True):
            temporary.replace(target)
    finally:
        for temporary in written:
            temporary.unlink(missing_ok=True)
    _remove_others(folder, targets, rank, pattern)
    _sync_folder(folder)
    return targets


# ---- names


def _regex(pattern: str) -> re.Pattern[str]:
    try:
        pieces = list(Formatter().parse(pattern))
    except ValueError:
        pieces = []
    if sorted(field for _, field, _, _ in pieces if field is not None) != ["part", "rank"] or "/" in pattern:
        raise OptionError(f"pattern is a file name with {{rank}} and {{part}} in it, not {pattern!r}", option="pattern")
    regex = "".join(re.escape(text) + (rf"(?P<{field}>[0-9]+)" if field else "") for text, field, _, _ in pieces)
    return re.compile(regex)


def _name(pattern: str, rank: int, part: int) -> str:
    return pattern.format(rank=rank, part=part)


def _listed(items: Iterable[object]) -> str:
    shown = [str(item) for item in items]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


# ---- writing


class _DenseTensor:
    """A tensor as the format wants it: whole elements one after another, in host memory when its turn comes."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        dtype = BY_TORCH_NAME.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None:
            raise OptionError(f"{name!r} is of {tensor.dtype}, which safetensors files do not have", option="state")
        self.tensor, self.dtype, self.nbytes = tensor, dtype, tensor.numel() * tensor.element_size()
        self.shape = list(tensor.shape)
        if dtype.bits < 8:
            self.shape[-1] *= 8 * tensor.element_size() // dtype.bits

    def bytes(self) -> memoryview:
        dense = self.tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
        return view_at(dense.data_ptr(), self.nbytes, dense)


_Part = dict[str, _DenseTensor]


def _divided(tensors: _Part, part_nbytes: int) -> list[_Part]:
    parts: list[_Part] = [{}]
    nbytes = 0
    for name, tensor in tensors.items():
        if parts[-1] and nbytes + tensor.nbytes > part_nbytes:
            parts.append({})
            nbytes = 0
        parts[-1][name] = tensor
        nbytes += tensor.nbytes
    return parts


def _write(file: IO[bytes], part: _Part, metadata: Mapping[str, str] | None) -> None:
    # Widest elements first: then every tensor is aligned, as the data begins at a multiple of 8.
    ordered = sorted(part.items(), key=lambda item: -item[1].dtype.bits)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in ordered:
        header[name] = {"dtype": tensor.dtype.name, "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        file.write(tensor.bytes())
    file.flush()
    os.fsync(file.fileno())


def _remove_others(folder: Path, kept: Sequence[Path], rank: int, pattern: str) -> None:
    names, regex = {path.name for path in kept}, _regex(pattern)
    for entry in folder.iterdir():
        match = regex.fullmatch(entry.name)
        if match and int(match["rank"]) == rank and entry.name not in names:
            entry.unlink()


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems do not sync folders
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
