"""`FileStreamer`: byte ranges of any files, streamed.

Every range comes as a uint8 tensor of shape (1, bytes), in the order in which the bytes come in. It is the caller's: it never
changes, whatever `owned` says. Reading begins with the first one that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

import headrace
from headrace.errors import OptionError
from headrace.integrations.runai._errors import StreamerStateError, as_value_errors
from headrace.integrations.runai._places import credentials_for, kind_of, list_sizes
from headrace.integrations.runai._ranges import Opener, RangeSource, parse_range_name
from headrace.integrations.runai.file_streamer.requests_iterator import FileChunks
from headrace.integrations.runai.s3_utils.s3_utils import S3Credentials, is_azure_path, is_gs_path, is_s3_path

if TYPE_CHECKING:
    import torch

__all__ = [
    "FileChunks",
    "FileStreamer",
    "RunaiStreamerInvalidInputException",
    "S3Credentials",
    "homogeneous_paths",
    "host_or_device",
    "is_azure_path",
    "is_gs_path",
    "is_s3_path",
]


class RunaiStreamerInvalidInputException(OptionError):  # noqa: N818  # Run:ai's name
    """A device that torch does not know, or paths of several kinds of storage in one request."""


def host_or_device(device: str | torch.device | None) -> str:
    """The device as text; "cpu" for every way to write it, None included.

    Raises:
        RunaiStreamerInvalidInputException: torch knows no such device.
    """
    if device is None or device == "cpu":
        return "cpu"
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise RunaiStreamerInvalidInputException(f"torch knows no device {device!r}: {exc}", option="device") from exc
    return "cpu" if found.type == "cpu" else str(found)


def homogeneous_paths(paths: Sequence[str]) -> bool:
    """Whether all paths are in one kind of storage."""
    return len({kind_of(path) for path in paths}) < 2


def check_kinds(paths: Sequence[str]) -> None:
    """Raise RunaiStreamerInvalidInputException where paths are in several kinds of storage."""
    if not homogeneous_paths(paths):
        kinds = ", ".join(sorted({kind_of(path) or "local files" for path in paths}))
        raise RunaiStreamerInvalidInputException(
            f"one request reads from one kind of storage, and this one names {kinds}; make one request for each", option="paths"
        )


class FileStreamer:
    """Streams byte ranges of files; a context manager.

    Attributes:
        outstanding: ranges of the current request that have not been handed out.

    Example:
        >>> with FileStreamer() as streamer:  # doctest: +SKIP
        ...     streamer.stream_files([FileChunks.contiguous(0, "weights.bin", 0, [1024, 1024])])
        ...     for file, index, data in streamer.get_chunks():
        ...         print(file, index, data.shape)
    """

    def __init__(self) -> None:
        self.outstanding = 0
        self.device_str: str | None = None
        self._closed = False
        self._requests: Sequence[FileChunks] = ()
        self._stream: headrace.TensorStream | None = None
        self._sources: list[RangeSource] = []

    @property
    def live_requests(self) -> dict[int, FileChunks]:
        """The files that are being read, by number; empty once every range has been handed out."""
        return dict(enumerate(self._requests)) if self.outstanding else {}

    def __enter__(self) -> Self:
        self._closed = False
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.drain_live_submissions()
        self._closed = True

    def list_files(
        self,
        prefix: str,
        is_recursive: bool = True,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
    ) -> list[tuple[str, int]]:
        """List a folder, or the objects under a prefix. No `with` block is needed.

        Returns:
            (path or url, bytes), sorted.

        Raises:
            ValueError: it cannot be listed; also SourceNotFoundError and so on.
        """
        return list_sizes(prefix, recursive=is_recursive, allow=allow_patterns, ignore=ignore_patterns)

    def stream_files(
        self,
        file_stream_requests: Sequence[FileChunks],
        credentials: S3Credentials | None = None,
        device: str | torch.device | None = "cpu",
        memory_limit: int | None = None,
        owned: bool = True,
        *,
        sharing: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Open the files of a request; its ranges come from `get_chunks`.

        Args:
            file_stream_requests: which ranges, all of one kind of storage.
            credentials: for S3.
            device: where the ranges go.
            memory_limit: bytes read ahead: -1 as many as are useful, 0 the least that works. None: as the environment says.
            owned: accepted, and ignored: what is handed out never changes.
            sharing: arguments of `headrace.stream` with which ranks share the reading.

        Raises:
            ValueError: ranges of the request before have not been handed out, a file cannot be opened, or an option cannot be
                used; also SourceNotFoundError and so on. RunaiStreamerInvalidInputException: several kinds of storage.
        """
        del owned
        self.check_idle()
        check_kinds([chunks.path for chunks in file_stream_requests])
        self.device_str = host_or_device(device)
        try:
            with as_value_errors():
                opener = Opener()
                for file, chunks in enumerate(file_stream_requests):
                    self._sources.append(opener.open(file, chunks, credentials_for(chunks.path, credentials)))
                if self._sources:
                    overrides = {**sharing} if memory_limit is None else {**sharing, "memory_limit": memory_limit}
                    self._stream = headrace.stream(self._sources, device=self.device_str, **overrides)
        except BaseException:
            self.drain_live_submissions()
            raise
        self._requests = file_stream_requests
        self.outstanding = sum(len(chunks.sizes) for chunks in file_stream_requests)

    def get_chunks(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The ranges of the request: (id of the `FileChunks`, index in it, uint8 tensor of shape (1, bytes)), as they come in.

        Raises:
            ValueError: the `with` block is over, or a range cannot be read; also SourceError and its kinds.
        """
        self.check_open()
        stream, requests = self._stream, self._requests
        try:
            while stream is not None:
                try:
                    yield self._next(stream, requests)
                except StopIteration:
                    break
        finally:
            if stream is self._stream:
                self.drain_live_submissions()

    def _next(self, stream: headrace.TensorStream, requests: Sequence[FileChunks]) -> tuple[int, int, torch.Tensor]:
        with as_value_errors():
            name, tensor = next(stream)
        self.outstanding -= 1
        file, index = parse_range_name(name)
        return requests[file].id, index, tensor

    def drain_live_submissions(self) -> None:
        """Drop what has not been handed out of the current request."""
        if self._stream is not None:
            self._stream.close()
        for source in self._sources:
            source.close()
        self._stream, self._sources, self._requests, self.outstanding = None, [], (), 0

    def check_idle(self) -> None:
        """Raise ValueError where another request cannot begin."""
        self.check_open()
        if self.outstanding:
            raise StreamerStateError(
                f"{self.outstanding} ranges of the request before are outstanding; take them, or close the iterator, first"
            )

    def check_open(self) -> None:
        """Raise ValueError where the `with` block is over."""
        if self._closed:
            raise StreamerStateError("the streamer is used after its `with` block")
