"""headrace moves model weights from where they are stored to where they are used, at the speed of the hardware.

headrace.load(url)     -> {name: tensor}
headrace.stream(url)   -> (name, tensor) pairs, as soon as their bytes are in
headrace.read(checkpoint, name) -> one tensor of an open checkpoint
headrace.hold(url)     -> a checkpoint kept in host memory, for loads again and again
headrace.open(url)     -> a mapping from names to TensorInfo, no tensor read
headrace.plan(url)     -> what a load would do, and why
headrace.pull(url, dst) copies files into a folder
headrace.verify(url)   -> whether every byte is what a manifest or the hub says; writes manifests
headrace.folder(url)   -> what lies in a folder or under a prefix, to list and to open
headrace.tensor_parallel(checkpoint, rank, world) -> the slices that one rank computes with
headrace.save_metadata(url, dst) -> headers and an index, for metadata=
headrace.open_sharded, headrace.save_sharded: checkpoints that are divided among ranks already
headrace.load_into(module, url) -> which of its parameters and buffers were filled
headrace.state_dict(url) -> a mapping from names to tensors that are read when they are looked up
headrace.safe_open, headrace.load_file: as in safetensors
headrace.patch()       -> transformers and diffusers load through headrace, inside a `with` block
headrace.local_view(url) -> a local folder with the config and tokenizer of a remote model
"""

from headrace._api import hold, load, open, open_sharded, plan, read, release_staging, stream
from headrace._checking import FileCheck, VerifyProgress
from headrace._checkpoint import Checkpoint
from headrace._copying import PullProgress
from headrace._files import folder, pull, save_metadata, verify
from headrace._header import TensorInfo
from headrace._held import Held
from headrace._options import Options
from headrace._partition import USUAL_RULES, Split, tensor_parallel
from headrace._plan import Plan
from headrace._progress import Snapshot
from headrace._pull import PullReport
from headrace._sharded import save_sharded
from headrace._slices import Parts
from headrace._stream import TensorStream
from headrace._verify import VerifyReport
from headrace.errors import (
    DestinationError,
    DeviceError,
    DeviceMemoryError,
    FormatError,
    HeadraceError,
    IntegrityError,
    LoadError,
    NoSpaceError,
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
from headrace.integrations.modules import LoadReport, ModuleMismatchError, load_into
from headrace.integrations.patching import patch
from headrace.integrations.safetensors import load_file, safe_open
from headrace.integrations.state_dict import StateDict, state_dict
from headrace.integrations.views import local_view

__version__ = "0.1.0.dev0"

__all__ = [
    "USUAL_RULES",
    "Checkpoint",
    "DestinationError",
    "DeviceError",
    "DeviceMemoryError",
    "FileCheck",
    "FormatError",
    "HeadraceError",
    "Held",
    "IntegrityError",
    "LoadError",
    "LoadReport",
    "ModuleMismatchError",
    "NoSpaceError",
    "OptionError",
    "Options",
    "Parts",
    "PeerError",
    "PinningError",
    "Plan",
    "PullProgress",
    "PullReport",
    "Snapshot",
    "SourceChangedError",
    "SourceError",
    "SourceNotFoundError",
    "SourcePermissionError",
    "SourceTimeoutError",
    "Split",
    "StateDict",
    "StreamError",
    "TensorInfo",
    "TensorNotFoundError",
    "TensorStream",
    "TruncatedError",
    "VerifyProgress",
    "VerifyReport",
    "folder",
    "hold",
    "load",
    "load_file",
    "load_into",
    "local_view",
    "open",
    "open_sharded",
    "patch",
    "plan",
    "pull",
    "read",
    "release_staging",
    "safe_open",
    "save_metadata",
    "save_sharded",
    "state_dict",
    "stream",
    "tensor_parallel",
    "verify",
]
