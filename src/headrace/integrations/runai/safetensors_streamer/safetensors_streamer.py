"""`SafetensorsStreamer`, `ObjectStorageModel`, `list_safetensors` and `pull_files`, as programs written for Run:ai call them.

A request is one headrace stream over all of its files. Only where a name is in several of them, which headrace refuses and Run:ai
does not, the files are streamed one after the other.
"""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, Literal

from typing_extensions import Self

import headrace
from headrace.errors import FormatError, HeadraceError, OptionError
from headrace.integrations.runai._errors import StreamerStateError, as_value_errors, value_error
from headrace.integrations.runai._places import OBJECT_STORES, credentials_for, is_url, list_urls, pull
from headrace.integrations.runai.distributed_streamer.distributed_streamer import DistributedStreamer, sharing
from headrace.integrations.runai.file_streamer.file_streamer import check_kinds, host_or_device
from headrace.integrations.runai.file_streamer.requests_iterator import FileChunks
from headrace.integrations.runai.s3_utils.s3_utils import S3Credentials, is_azure_path, is_gs_path, is_s3_path
from headrace.integrations.runai.safetensors_streamer.safetensors_pytorch import TensorsOfFile

if TYPE_CHECKING:
    import torch

__all__ = [
    "SAFETENSORS_PATTERN",
    "DistributedStreamer",
    "FileChunks",
    "ObjectStorageModel",
    "S3Credentials",
    "SafetensorsStreamer",
    "is_azure_path",
    "is_gs_path",
    "is_s3_path",
    "list_safetensors",
    "pull_files",
]

log = logging.getLogger("headrace")

SAFETENSORS_PATTERN: Final = "*.safetensors"
_PULL_STATE: Final = ".headrace-pull"  # where headrace.pull keeps its records


def list_safetensors(path: str, s3_credentials: S3Credentials | None = None) -> list[str]:
    """The safetensors files directly in a folder, as paths or urls, sorted; none where nothing is there.

    Args:
        path: a local folder, or a url such as s3://bucket/prefix.
        s3_credentials: for S3; they count here as they do for streaming.

    Raises:
        ValueError: the store cannot be reached, or refuses; also SourcePermissionError and so on.
    """
    if is_url(path):
        return list_urls(path, [SAFETENSORS_PATTERN], s3_credentials)
    return sorted(glob.glob(os.path.join(glob.escape(path), SAFETENSORS_PATTERN)))


def pull_files(
    model_path: str,
    dst: str,
    allow_pattern: list[str] | None = None,
    ignore_pattern: list[str] | None = None,
    s3_credentials: S3Credentials | None = None,
) -> None:
    """Copy the files under a url, those in folders below included, to a local folder. Where none fits, nothing is done.

    Args:
        model_path: s3://bucket/prefix, or of another store.
        dst: the folder; it keeps records of what was copied in `.headrace-pull`.
        allow_pattern, ignore_pattern: fnmatch patterns about the whole key; None: everything, and nothing.
        s3_credentials: for S3.

    Raises:
        NotImplementedError: the path is a local one.
        ValueError: the store cannot be reached or refuses, or the folder cannot be written to; also SourceError and so on.
    """
    if not is_url(model_path):
        raise NotImplementedError(f"pulling is not implemented for file system paths, and {model_path} is one")
    pull(model_path, dst, allow_pattern, ignore_pattern, s3_credentials)


class ObjectStorageModel:
    """A model's files in a local folder, fetched once by whichever process of this machine comes first. A context manager.

    The others wait for the lock next to the folder, DST.lock, and find that there is nothing left to do. When the block ends
    well, a mark in the folder says that it is complete. After an error there is none, and the next one completes what is there.

    Args:
        model_path: s3://, gs:// or az:// url of the files.
        dst: the folder to fill.
        s3_credentials: for S3.

    Attributes:
        dir: the folder.

    Raises:
        ValueError: the path is no url of an object store.

    Example:
        >>> with ObjectStorageModel("s3://models/minilm", "minilm") as model:  # doctest: +SKIP
        ...     model.pull_files(allow_pattern=["*.json"])
    """

    SENTINEL_NAME = ".runai_complete"

    def __init__(self, model_path: str, dst: str, s3_credentials: S3Credentials | None = None) -> None:
        self._lock_file: IO[str] | None = None
        if not model_path.startswith(OBJECT_STORES):
            raise OptionError(
                f"{model_path!r} is no url of an object store; those begin with {', '.join(OBJECT_STORES)}", option="model_path"
            )
        self.dir = dst.rstrip("/") or "/"
        self._model_path = model_path if model_path.endswith("/") else f"{model_path}/"
        self._s3_credentials = s3_credentials
        self._lock_path = f"{self.dir}.lock"
        self._sentinel = os.path.join(self.dir, self.SENTINEL_NAME)
        self._skip = False
        self._lock_file = open(self._lock_path, "a")  # noqa: SIM115  # held until the block ends
        try:
            self._skip = self._wait_for_turn(self._lock_file)
            os.makedirs(self.dir, exist_ok=True)
            self._found = set(os.listdir(self.dir))
        except BaseException:
            self._lock_file.close()
            raise

    def _wait_for_turn(self, lock: IO[str]) -> bool:
        """Whether the folder is complete; then the lock is shared, and else it is ours alone."""
        fcntl.flock(lock, fcntl.LOCK_SH)
        if os.path.exists(self._sentinel):
            return True
        # Given back first: two processes that both wanted to turn a shared lock into an exclusive one would wait for each other.
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(self._sentinel):
            return False
        fcntl.flock(lock, fcntl.LOCK_SH)
        return True

    def pull_files(self, allow_pattern: list[str] | None = None, ignore_pattern: list[str] | None = None) -> None:
        """Copy files into the folder, unless it is complete. See `pull_files`."""
        if not self._skip:
            pull_files(self._model_path, self.dir, allow_pattern, ignore_pattern, self._s3_credentials)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> Literal[False]:
        """Mark the folder as complete, unless there was an error, and give the lock back.

        Raises:
            RuntimeError: nothing was fetched, or the mark cannot be written.
        """
        try:
            if exc_type is None and not self._skip:
                self._mark_complete()
        finally:
            self._release()
        return False

    def _mark_complete(self) -> None:
        # What was there before counts only where it was fetched: then there are records of it.
        if set(os.listdir(self.dir)) <= self._found - {_PULL_STATE}:
            raise RuntimeError(f"nothing was fetched from {self._model_path} to {self.dir}; check the url and the patterns")
        try:
            with open(self._sentinel, "w"):
                pass
        except OSError as exc:
            raise RuntimeError(f"cannot write {self._sentinel}, which marks the folder as complete: {exc}") from exc

    def _release(self) -> None:
        if self._lock_file is not None:
            self._lock_file.close()  # and with it goes the lock

    def __del__(self) -> None:
        self._release()


class SafetensorsStreamer:
    """Streams the tensors of safetensors files; a context manager, for any number of requests one after the other.

    Tensors that were handed out are the caller's: they never change, and stay after the block.

    Args:
        pin_memory: page-lock staging memory, with one warning where that fails. None: as RUNAI_STREAMER_PIN_MEMORY, or headrace's
            own variable, says; else on for GPU targets.

    Attributes:
        files_to_tensors_metadata: per file of the request, by its number, the tensors that it gives.
        total_size: bytes of the request.
        file_streamer: for what programs ask it: `is_distributed`, `ring_info()`.

    Example:
        >>> with SafetensorsStreamer() as streamer:  # doctest: +SKIP
        ...     streamer.stream_files(list_safetensors("s3://models/minilm"))
        ...     for name, tensor in streamer.get_tensors():
        ...         print(name, tensor.shape)
    """

    def __init__(self, *, pin_memory: bool | None = None) -> None:
        self.file_streamer = DistributedStreamer()
        self.files_to_tensors_metadata: dict[int, Sequence[Any]] = {}
        self.total_size = 0
        self.device_str: Any = None
        self.start_time: float | None = None
        self.unaligned_copies = 0
        self._pin_memory = pin_memory
        self._request: _Request | None = None
        self._closed = False

    def __enter__(self) -> Self:
        self._closed = False
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        self._drop()

    def stream_file(
        self,
        path: str,
        s3_credentials: S3Credentials | None = None,
        device: str | torch.device | None = "cpu",
        is_distributed: bool = False,
        tensor_names: Collection[str] | None = None,
        owned: bool = True,
        *,
        pin_memory: bool | None = None,
    ) -> None:
        """Open one file. See `stream_files`."""
        self.stream_files(
            [path],
            s3_credentials=s3_credentials,
            device=device,
            is_distributed=is_distributed,
            tensor_names=tensor_names,
            owned=owned,
            pin_memory=pin_memory,
        )

    def stream_files(
        self,
        paths: Sequence[str],
        s3_credentials: S3Credentials | None = None,
        device: str | torch.device | None = "cpu",
        is_distributed: bool = False,
        tensor_names: Collection[str] | None = None,
        owned: bool = True,
        *,
        pin_memory: bool | None = None,
    ) -> None:
        """Open files and check their headers; the tensors come from `get_tensors`.

        Args:
            paths: local paths or urls, all of one kind of storage. A name may be in several files, and comes from each.
            s3_credentials: for S3.
            device: where the tensors go.
            is_distributed: whether ranks share the reading; see `distributed_streamer.sharing`.
            tensor_names: the tensors to read, each in one file only; None: all.
            owned: accepted, and ignored: what is handed out never changes.
            pin_memory: as for the class, for this request.

        Raises:
            ValueError: tensors of the request before have not been handed out; a name is in no file or in several; a file cannot
                be read or breaks a rule of the format; also FormatError, SourceNotFoundError and so on.
            RunaiStreamerInvalidInputException: several kinds of storage, or a device that torch does not know.
        """
        del owned
        self._check_idle()
        wanted = _checked_names(tensor_names)
        check_kinds(paths)
        target = host_or_device(device)
        shared = sharing(is_distributed)
        self.file_streamer.is_distributed = bool(shared)
        self.device_str, self.start_time = device, time.monotonic()
        pinned = self._pin_memory if pin_memory is None else pin_memory
        options = {} if pinned is None else {"pin": "auto" if pinned else "off"}
        with as_value_errors():
            request = _Request(_open_files(paths, s3_credentials, options), wanted, target, shared)
        self._request = request
        self.files_to_tensors_metadata = dict(enumerate(request.files))
        self.total_size = sum(file.nbytes for file in request.files)

    def get_tensors(self, target_dtypes: object = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the request, as they come in: (name, tensor). Runs once.

        Args:
            target_dtypes: convert while loading: {name or glob: dtype}, a dtype, or a callable; as `dtype` of `headrace.stream`.
                Names that the request does not have are passed over.

        Raises:
            ValueError: the `with` block is over, a dtype cannot be used, or a tensor cannot be read; also SourceError and so on.
        """
        if self._closed:
            raise StreamerStateError("the streamer is used after its `with` block")
        request = self._request
        if request is None or request.outstanding == 0:
            return
        try:
            if target_dtypes is not None:
                with as_value_errors():
                    request.convert(target_dtypes)
            while True:
                try:
                    yield request.take()
                except StopIteration:
                    break
            self._report()
        finally:
            if request is self._request:
                self._drop()

    def _report(self) -> None:
        seconds = time.monotonic() - self.start_time if self.start_time is not None else 0.0
        rate = self.total_size / seconds / 1e9 if seconds > 0 else 0.0
        log.info("streamed %d bytes to %s in %.2f s, %.2f GB/s", self.total_size, self.device_str, seconds, rate)

    def _check_idle(self) -> None:
        if self._closed:
            raise StreamerStateError("the streamer is used after its `with` block")
        if self._request is not None and self._request.outstanding:
            raise StreamerStateError(
                f"{self._request.outstanding} tensors of the request before are outstanding; take them, or close the iterator, "
                "first"
            )

    def _drop(self) -> None:
        if self._request is not None:
            self._request.close()
            self._request = None


class _Request:
    """Files that are open, and what is streamed from them: one stream, or one per file where names are in several.

    Attributes:
        files: what each of them gives.
        outstanding: tensors that have not been handed out.
    """

    def __init__(
        self, checkpoints: Sequence[headrace.Checkpoint], wanted: frozenset[str] | None, device: str, sharing: Mapping[str, Any]
    ) -> None:
        self._checkpoints, self._wanted, self._device, self._sharing = checkpoints, wanted, device, sharing
        self._streams: list[headrace.TensorStream] = []
        self._begun = False
        try:
            self.files = [file for checkpoint in checkpoints for file in _files_of(checkpoint, wanted)]
            if wanted is not None:
                _check_found(wanted, self.files)
            self.outstanding = sum(map(len, self.files))
            self._start(None)
        except BaseException:
            self.close()
            raise

    def convert(self, rule: object) -> None:
        """Plan again, with dtypes to convert to.

        Raises:
            OptionError: one that cannot be used.
            StreamError: tensors have been taken already.
        """
        if self._begun:
            raise StreamerStateError("target_dtypes are given before the first tensor is taken")
        if isinstance(rule, Mapping):
            rule = {
                name: dtype
                for name, dtype in rule.items()
                if any(char in name for char in "*?[") or any(name in checkpoint for checkpoint in self._checkpoints)
            }
        self._stop()
        self._streams = []
        self._start(rule)

    def _start(self, rule: object) -> None:
        for checkpoint in self._checkpoints:
            names = None if self._wanted is None else [name for name in checkpoint if name in self._wanted]
            if names == []:
                continue
            own = rule
            if isinstance(rule, Mapping) and len(self._checkpoints) > 1:
                own = {name: dtype for name, dtype in rule.items() if name in checkpoint or any(char in name for char in "*?[")}
            self._streams.append(headrace.stream(checkpoint, device=self._device, names=names, dtype=own, **self._sharing))

    def take(self) -> tuple[str, torch.Tensor]:
        """The next tensor. Raises StopIteration after the last one."""
        self._begun = True
        while self._streams:
            try:
                pair: tuple[str, torch.Tensor] = next(self._streams[0])
            except StopIteration:
                del self._streams[0]
            except HeadraceError as exc:
                if isinstance(exc, ValueError):
                    raise
                raise value_error(exc) from exc
            else:
                self.outstanding -= 1
                return pair
        raise StopIteration

    def close(self) -> None:
        """Stop reading and close the files. Taking more raises StreamError, unless there is nothing left."""
        self._stop()
        for checkpoint in self._checkpoints:
            checkpoint.close()

    def _stop(self) -> None:
        for stream in self._streams:
            stream.close()


def _checked_names(names: Collection[str] | None) -> frozenset[str] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise OptionError("tensor_names is a collection of names, and not one name; write [name]", option="tensor_names")
    if not names:
        raise OptionError("tensor_names is empty: there is nothing to load; None loads all", option="tensor_names")
    return frozenset(names)


def _open_files(paths: Sequence[str], credentials: S3Credentials | None, options: Mapping[str, Any]) -> list[headrace.Checkpoint]:
    """All files as one checkpoint; as one each where names are in several of them."""
    if not paths:
        return []
    given = credentials_for(paths[0], credentials)
    try:
        return [headrace.open(list(paths), credentials=given, **options)]
    except FormatError as exc:
        if exc.tensor is None or len(paths) == 1:
            raise
    opened: list[headrace.Checkpoint] = []
    try:
        # A file that breaks a rule raises here again; names in several files do not.
        opened.extend(headrace.open([path], credentials=given, **options) for path in paths)
    except BaseException:
        for checkpoint in opened:
            checkpoint.close()
        raise
    return opened


def _files_of(checkpoint: headrace.Checkpoint, wanted: frozenset[str] | None) -> Iterator[TensorsOfFile]:
    for shard, header in enumerate(checkpoint.headers):
        rows = None if wanted is None else [row for row, name in enumerate(header.names) if name in wanted]
        yield TensorsOfFile(checkpoint, shard, rows)


def _check_found(wanted: frozenset[str], files: Sequence[TensorsOfFile]) -> None:
    counts = Counter(tensor.name for file in files for tensor in file)
    if missing := sorted(wanted - counts.keys()):
        raise OptionError(f"tensor_names: no file has {', '.join(map(repr, missing[:10]))}", option="tensor_names")
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise OptionError(
            f"tensor_names: {', '.join(map(repr, repeated[:10]))} are in several files, and nothing says which one counts",
            option="tensor_names",
        )
