"""`DistributedStreamer`: `FileStreamer` for the ranks of a job, which share the reading: each byte is read by one of them.

Every rank gets all ranges. Where ranks do not share, every one reads for itself, and no rank waits for another.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import Self

from headrace._environment import first_set, switch
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


def sharing(asked: bool) -> dict[str, Any]:
    """Arguments of `headrace.stream` with which ranks share the reading, or none.

    As Run:ai does it: with NCCL, or where RUNAI_STREAMER_DIST=1, among the ranks of each node, or of all nodes with
    RUNAI_STREAMER_DIST_GLOBAL=1. All ranks then make the same requests, in the same order. RUNAI_STREAMER_DIST_TIMEOUT is
    how long they wait for each other, in seconds.

    Raises:
        OptionError: a switch that is neither on nor off, or no number of seconds.
    """
    if not asked:
        return {}
    import torch.distributed

    is_automatic = (first_set("RUNAI_STREAMER_DIST") or "auto").lower() == "auto"
    is_wanted = None if is_automatic else switch("RUNAI_STREAMER_DIST")
    group = True if switch("RUNAI_STREAMER_DIST_GLOBAL") else "node"
    timeout = _timeout()
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        log.info("distributed streaming was asked for without a process group: this process reads everything")
        return {}
    ranks, backend = torch.distributed.get_world_size(), torch.distributed.get_backend()
    if ranks == 1 or is_wanted is False:
        return {}
    if is_wanted is None and backend != "nccl":
        log.warning(
            "distributed streaming is not used with %s unless RUNAI_STREAMER_DIST=1: each of the %d ranks reads everything",
            backend,
            ranks,
        )
        return {}
    return {"group": group, **timeout}


def _timeout() -> dict[str, float]:
    text = first_set("RUNAI_STREAMER_DIST_TIMEOUT")
    try:
        return {} if text is None else {"peer_timeout_s": float(text)}
    except ValueError:
        message = f"environment variable RUNAI_STREAMER_DIST_TIMEOUT={text!r} is a number of seconds"
        raise OptionError(message, option="RUNAI_STREAMER_DIST_TIMEOUT") from None


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
            As `FileStreamer.stream_files`; PeerError: another rank failed, or requests something else.
        """
        del discover_ranks
        shared = sharing(is_distributed)
        self.is_distributed = bool(shared)
        self.file_streamer.stream_files(file_stream_requests, credentials, device, owned=owned, sharing=shared)

    def get_chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The ranges of the request. See `FileStreamer.get_chunks`."""
        return self.file_streamer.get_chunks()

    def ring_info(self) -> tuple[int, int, int] | None:
        """(rank, buffers, bytes of each) of the ring of the last request: None, since there is no ring."""
        return None
