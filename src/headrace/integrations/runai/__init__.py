"""The Python interface of Run:ai Model Streamer 0.17, on headrace's reading: programs written for it run as they are.

    import headrace.integrations.runai as runai

    runai.install()                        # from here on, `import runai_model_streamer` gives this package
    from runai_model_streamer import SafetensorsStreamer

The submodules have the names that programs import from. `python -m headrace.integrations.runai PROGRAM` installs it and runs a
program, without a change to it.

What differs, on purpose:

- A tensor that was handed out never changes, with `owned=False` as well, where Run:ai's are views of a buffer that is used again.
- Credentials given as an argument count for listing and pulling, and not for streaming alone. Nothing is signed with others.
- A tensor larger than the memory limit loads, in parts. `RunaiStreamerMemoryLimitException` is there, and never raised.
- Errors name file, range and cause. They are `ValueError`s, as Run:ai's are, and also what they mean: `FileNotFoundError`, ...
- `pull_files` copies in parallel, resumes, and never leaves half a file under a name. Of an unfinished folder nothing is removed.
- Reading begins when the first tensor is asked for, headers are read and checked in `stream_files`.
- No collective is called, ever: loads distributed over ranks are not there yet, and asking for one raises.

Importing it does not import torch.
"""

from headrace.integrations.runai._install import install, uninstall
from headrace.integrations.runai.distributed_streamer.distributed_streamer import DistributedStreamer
from headrace.integrations.runai.file_streamer.file_streamer import FileStreamer
from headrace.integrations.runai.file_streamer.requests_iterator import FileChunks
from headrace.integrations.runai.safetensors_streamer.safetensors_streamer import (
    ObjectStorageModel,
    SafetensorsStreamer,
    list_safetensors,
    pull_files,
)

__all__ = [
    "DistributedStreamer",
    "FileChunks",
    "FileStreamer",
    "ObjectStorageModel",
    "SafetensorsStreamer",
    "install",
    "list_safetensors",
    "pull_files",
    "uninstall",
]
