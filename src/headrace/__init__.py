"""headrace moves model weights from where they are stored to where they are used, at the speed of the hardware.

headrace.load(url)     -> {name: tensor}
headrace.stream(url)   -> (name, tensor) pairs, as soon as their bytes are in
headrace.open(url)     -> a mapping from names to TensorInfo, no tensor read
headrace.plan(url)     -> what a load would do, and why
headrace.safe_open, headrace.load_file: as in safetensors
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace._api import TensorStream, load, open, plan, stream
from headrace._checkpoint import Checkpoint
from headrace._header import TensorInfo
from headrace._options import Options
from headrace._plan import Plan
from headrace._progress import Snapshot
from headrace.errors import (
    DeviceError,
    DeviceMemoryError,
    FormatError,
    HeadraceError,
    IntegrityError,
    LoadError,
    OptionError,
    PeerError,
    PinningError,
    SourceChangedError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
    SourceTimeoutError,
    StreamError,
    TensorNotFoundError,
    TruncatedError,
)

if TYPE_CHECKING:
    load_file: Callable[..., dict[str, Any]]
    safe_open: type[Any]
else:

    def __getattr__(name: str) -> Any:
        # Drop-ins stand above the command line, which is on this package; imported here, they would be below it.
        if name in ("load_file", "safe_open"):
            return getattr(import_module("headrace.integrations.safetensors"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0.dev0"

__all__ = [
    "Checkpoint",
    "DeviceError",
    "DeviceMemoryError",
    "FormatError",
    "HeadraceError",
    "IntegrityError",
    "LoadError",
    "OptionError",
    "Options",
    "PeerError",
    "PinningError",
    "Plan",
    "Snapshot",
    "SourceChangedError",
    "SourceError",
    "SourceNotFoundError",
    "SourcePermissionError",
    "SourceTimeoutError",
    "StreamError",
    "TensorInfo",
    "TensorNotFoundError",
    "TensorStream",
    "TruncatedError",
    "load",
    "load_file",
    "open",
    "plan",
    "safe_open",
    "stream",
]
