"""Making `import runai_model_streamer` give this package, and no longer.

Python asks `sys.modules` first, so it is enough to enter our modules there under their other names. Modules that Run:ai has and
we do not are not found then, rather than loaded from the other package.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

_THEIRS: Final = "runai_model_streamer"
_OURS: Final = "headrace.integrations.runai"
_MODULES: Final = (
    "",
    ".distributed_streamer",
    ".distributed_streamer.distributed_streamer",
    ".file_streamer",
    ".file_streamer.file_streamer",
    ".file_streamer.requests_iterator",
    ".s3_utils",
    ".s3_utils.s3_utils",
    ".safetensors_streamer",
    ".safetensors_streamer.safetensors_pytorch",
    ".safetensors_streamer.safetensors_streamer",
    ".safetensors_streamer.streamer_mock",
)


def install() -> None:
    """Let `import runai_model_streamer`, and its submodules, give headrace's. May be called twice.

    Call it before anything imports runai_model_streamer; whether Run:ai's package is installed does not matter.

    Raises:
        ImportError: Run:ai's own package has been imported already, and parts of the program may hold objects of it.

    Example:
        >>> import headrace.integrations.runai
        >>> headrace.integrations.runai.install()
        >>> from runai_model_streamer import SafetensorsStreamer
        >>> SafetensorsStreamer.__module__.partition(".")[0]
        'headrace'
    """
    if (present := sys.modules.get(_THEIRS)) is not None and not _is_ours(_THEIRS):
        raise ImportError(
            f"{_THEIRS} has been imported already, from {getattr(present, '__file__', 'elsewhere')}; "
            f"call {_OURS}.install() before anything imports it",
            name=_THEIRS,
        )
    for module in _MODULES:
        sys.modules[_THEIRS + module] = importlib.import_module(_OURS + module)


def uninstall() -> None:
    """Undo `install`: the next `import runai_model_streamer` finds Run:ai's package, if it is installed. May be called twice."""
    for name in [name for name in sys.modules if name.partition(".")[0] == _THEIRS]:
        if _is_ours(name):
            del sys.modules[name]


def _is_ours(name: str) -> bool:
    return sys.modules[name].__name__.startswith(_OURS)
