"""`DistributedStreamer`: `FileStreamer` for the ranks of a job, today for a job of one.

Every rank gets all ranges. Where one process is all there is, that is a plain read. Where ranks would have to share the work,
over NCCL, it is refused; over other backends Run:ai does not share by default either, and every rank reads for itself. No
collective is called, so ranks may load different things at different times.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Final

from typing_extensions import Self

from headrace.errors import OptionError
from headrace.integrations.runai.file_streamer.file_streamer import FileStreamer, host_or_device
from headrace.integrations.runai.file_streamer.requests_iterator import (
    RUNAI_STREAMER_MEMORY_LIMIT_ENV_VAR_NAME,
    FileChunks,
)
from headrace.integrations.runai.s3_utils.s3_utils import S3Credentials

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEFAULT_BROADCAST_TIMEOUT",
    "RUNAI_STREAMER_CUDA_ALIGNMENT_ENV_VAR",
    "RUNAI_STREAMER_MEMORY_LIMIT_ENV_VAR_NAME",
    "DistributedStreamer",
    "FileChunks",
    "FileStreamer",
    "S3Credentials",
    "host_or_device",
]

log = logging.getLogger("headrace")

RUNAI_STREAMER_CUDA_ALIGNMENT_ENV_VAR: Final = "RUNAI_STREAMER_CUDA_ALIGNMENT"
DEFAULT_BROADCAST_TIMEOUT: Final = timedelta(seconds=600)


def is_shared(asked: bool) -> bool:
    """Whether ranks share the reading; False today, or an error.

    Raises:
        OptionError: it was asked for, and there are several ranks that could.
    """
    if not asked:
        return False
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        log.info("distributed streaming was asked for without a process group: this process reads everything")
        return False
    ranks, backend = torch.distributed.get_world_size(), torch.distributed.get_backend()
    if ranks == 1:
        return False
    if backend != "nccl":
        log.warning("distributed streaming is not used with %s: each of the %d ranks reads everything", backend, ranks)
        return False
    raise OptionError(
        f"is_distributed: this version cannot share the reading among {ranks} ranks; with is_distributed=False every rank reads "
        "everything",
        option="is_distributed",
    )


class DistributedStreamer:
    """Streams byte ranges of files to every rank; a context manager. See `FileStreamer`.

    Attributes:
        file_streamer: what reads.
        is_distributed: whether ranks share the reading of the last request.
    """

    def __init__(self) -> None:
        self.file_streamer = FileStreamer()
        self.is_distributed = False

    def __enter__(self) -> Self:
        self.file_streamer.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.file_streamer.__exit__(exc_type, exc_value, traceback)

    def get_group_size(self) -> int:
        """Ranks of the default process group; 1 without one."""
        import torch.distributed

        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return 1
        return torch.distributed.get_world_size()

    def stream_files(
        self,
        file_stream_requests: Sequence[FileChunks],
        credentials: S3Credentials | None,
        device: str | torch.device | None,
        is_distributed: bool,
        owned: bool = True,
        discover_ranks: bool = True,
    ) -> None:
        """Open the files of a request, as `FileStreamer.stream_files`.

        Args:
            is_distributed: whether ranks share the reading.
            discover_ranks: accepted, and ignored: nothing has to be discovered.

        Raises:
            OptionError: ranks would have to share the reading.
            As `FileStreamer.stream_files`.
        """
        del discover_ranks
        self.is_distributed = is_shared(is_distributed)
        self.file_streamer.stream_files(file_stream_requests, credentials, device, owned=owned)

    def get_chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The ranges of the request. See `FileStreamer.get_chunks`."""
        return self.file_streamer.get_chunks()

    def ring_info(self) -> tuple[int, int, int] | None:
        """(rank, buffers, bytes of each) of the ring of the last request: None, since there is no ring."""
        return None
