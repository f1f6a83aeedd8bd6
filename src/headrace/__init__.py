"""headrace moves model weights from where they are stored to where they are used, at the speed of the hardware.

headrace.load(url)     -> {name: tensor}
headrace.stream(url)   -> (name, tensor) pairs, as soon as their bytes are in
headrace.read(checkpoint, name) -> one tensor of an open checkpoint
headrace.open(url)     -> a mapping from names to TensorInfo, no tensor read
headrace.plan(url)     -> what a load would do, and why
headrace.safe_open, headrace.load_file: as in safetensors
"""

from headrace._api import TensorStream, load, open, plan, read, stream
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
from headrace.integrations.safetensors import load_file, safe_open

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
    "read",
    "safe_open",
    "stream",
]
