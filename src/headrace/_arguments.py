"""The keyword arguments of the public verbs, as types: what `**` may bring is checked and completed as what is written out.

Each is one step more than the one before; `OptionArguments` is the first. What they mean is said by `headrace.stream`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from headrace._location import Verify
from headrace._options import OptionArguments, Options
from headrace._progress import Snapshot
from headrace._request import Into, Order, Ownership, Rename
from headrace._selection import DTypeRule, Names
from headrace._slices import Index

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from headrace.devices.base import Device

Target: TypeAlias = "str | torch.device | Device"
Targets: TypeAlias = "Target | Mapping[str, Target] | Callable[[str], Target | None]"
Group: TypeAlias = "dist.ProcessGroup | Literal['node'] | bool | None"


class TuningArguments(OptionArguments, total=False):
    """Of whatever takes an `Options`, or its fields by name."""

    options: Options | None


class OpenArguments(TuningArguments, total=False):
    """Of `open`, but for the credentials."""

    verify: Verify
    metadata: str | os.PathLike[str] | None


class TransferArguments(OpenArguments, total=False):
    """Of `stream`, but for what is chosen, what becomes of it, and the credentials."""

    device: Targets
    ownership: Ownership
    order: Order
    group: Group
    progress: Callable[[Snapshot], None] | bool | None
    trace: str | os.PathLike[str] | None


class LoadArguments(TransferArguments, total=False):
    """All of `stream`."""

    names: Names
    slices: Mapping[str, Index] | None
    dtype: DTypeRule
    target_dtypes: DTypeRule
    into: Into | None
    rename: Rename | None
    credentials: object
