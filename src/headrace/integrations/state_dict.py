"""A checkpoint as a state dict: a mapping whose tensors are read when they are looked up, and streamed when all are wanted."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING

from typing_extensions import Self, Unpack

import headrace
from headrace.errors import SourceError
from headrace.integrations._reading import CountedFile, LazyTensor

if TYPE_CHECKING:
    import torch

    from headrace._arguments import OpenArguments
    from headrace._location import Location


def state_dict(url: Location, *, credentials: object = None, **arguments: Unpack[OpenArguments]) -> StateDict:
    """Open a checkpoint as a state dict: a mapping from names to tensors, each of which is read when it is looked up.

    Args:
        url: as for `headrace.open`.
        credentials: as for `headrace.open`.
        **arguments: as for `headrace.open`: `verify`, `memory_limit`, ...

    Returns:
        A mapping, and a context manager that closes the files.

    Raises:
        As `headrace.open`.

    Example:
        >>> weights = headrace.state_dict("models/minilm")
        >>> model.load_state_dict(weights)
        <All keys matched successfully>
    """
    return StateDict(headrace.open(url, credentials=credentials, **arguments))


class StateDict(Mapping[str, "torch.Tensor"]):
    """The tensors of a checkpoint by name, read when they are looked up; what is looked up twice is read twice. Thread-safe.

    `items()` and `values()` stream: all tensors in file order, reading ahead.

    Args:
        checkpoint: where they are; closed with this.
    """

    def __init__(self, checkpoint: headrace.Checkpoint) -> None:
        self._checkpoint: headrace.Checkpoint | None = checkpoint

    @property
    def checkpoint(self) -> headrace.Checkpoint:
        """Dtypes, shapes and places of the tensors. Raises SourceError after `close`."""
        if self._checkpoint is None:
            raise SourceError("the state dict is used after it was closed")
        return self._checkpoint

    def lazy(self) -> dict[str, LazyTensor]:
        """The same names with objects that read when they are indexed, know their dtypes and shapes, and hold no data.

        transformers takes them as `from_pretrained(None, config=..., state_dict=...)`, and reads each one where and when it
        places it, so that the weights are never in host memory all at once. From a store, whole tensors are read ahead in the
        order of their names, up to `memory_limit` bytes (512 MiB where there is none).
        """
        file = CountedFile(self.checkpoint, "pt", "cpu", ())
        return {name: file.get_slice(name) for name in self.checkpoint}

    def __getitem__(self, name: str) -> torch.Tensor:
        return headrace.read(self.checkpoint, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint)

    def __len__(self) -> int:
        return len(self.checkpoint)

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint

    def items(self) -> ItemsView[str, torch.Tensor]:
        """(name, tensor) pairs, streamed anew each time."""
        return _Items(self)

    def values(self) -> ValuesView[torch.Tensor]:
        """The tensors, streamed anew each time."""
        return _Values(self)

    def copy(self) -> dict[str, torch.Tensor]:
        """All tensors, loaded."""
        return headrace.load(self.checkpoint)

    def close(self) -> None:
        """Close the files, once nothing reads from them any more. May be called twice."""
        self._checkpoint = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StateDict of {self._checkpoint!r}>"


class _Items(ItemsView[str, "torch.Tensor"]):
    _mapping: StateDict

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with headrace.stream(self._mapping.checkpoint, order="file") as stream:
            yield from stream


class _Values(ValuesView["torch.Tensor"]):
    _mapping: StateDict

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(itemgetter(1), self._mapping.items())
