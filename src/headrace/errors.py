"""Every error that headrace raises.

    HeadraceError
    ├── FormatError(ValueError)              .url .tensor          the bytes break a rule of the format
    ├── SourceError(OSError)                 .url .offset .nbytes .status .attempts
    │   ├── SourceNotFoundError(FileNotFoundError)
    │   ├── SourcePermissionError(PermissionError)
    │   ├── SourceTimeoutError(TimeoutError)
    │   ├── SourceChangedError               replaced, rewritten or vanished while it was read
    │   ├── TruncatedError                   it ends before the bytes that were promised
    │   └── IntegrityError                   .block .expected .found .tensors   the bytes are not those of the digest
    ├── DestinationError(OSError)            .url .status         a folder that is filled cannot be written to
    │   └── NoSpaceError                     .needed .free
    ├── DeviceError(RuntimeError)            .device
    │   ├── DeviceMemoryError                .requested .free
    │   └── PinningError
    ├── TensorNotFoundError(KeyError)        .name .close_matches
    ├── OptionError(ValueError)              .option
    ├── StreamError(RuntimeError)            a stream is used in a way that cannot be right
    ├── PeerError(RuntimeError)              .rank
    └── LoadError(RuntimeError)              .filled

Each is also the builtin in brackets, so code that knows nothing of headrace can catch it. Tests and callers look at classes and
fields, never at message text. Messages say what was being done, to which file and bytes, and what to try.
"""

from __future__ import annotations

from typing import Any


class HeadraceError(Exception):
    """Base of all errors raised by headrace.

    Attributes:
        others: errors of other readers of the same load, where several failed before the first one had stopped them.
    """

    others: tuple[BaseException, ...] = ()

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only fields do not survive Exception's own pickling; ranks and worker processes send errors to each other.
        return _restore, (type(self), self.args, dict(self.__dict__))


def _restore(cls: type[HeadraceError], args: tuple[Any, ...], fields: dict[str, Any]) -> HeadraceError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class FormatError(HeadraceError, ValueError):
    """A file, header or index breaks a rule of the format.

    Attributes:
        url: the file that breaks the rule.
        tensor: the tensor whose entry breaks it, or None where the rule is about the whole file.
    """

    def __init__(self, message: str, *, url: str | None = None, tensor: str | None = None) -> None:
        super().__init__(message)
        self.url = url
        self.tensor = tensor


class SourceError(HeadraceError, OSError):
    """Bytes could not be read from where they are stored.

    Attributes:
        url: the file or object.
        offset, nbytes: the range that was asked for, in bytes; None where the whole source is meant.
        status: the store's status code (HTTP), or errno for files; None where there is none.
        attempts: how often the range was tried.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        offset: int | None = None,
        nbytes: int | None = None,
        status: int | None = None,
        attempts: int = 1,
    ) -> None:
        super().__init__(message)
        self.url = url
        self.offset = offset
        self.nbytes = nbytes
        self.status = status
        self.attempts = attempts


class SourceNotFoundError(SourceError, FileNotFoundError):
    """The file, folder, bucket or key does not exist."""


class SourcePermissionError(SourceError, PermissionError):
    """The store or the filesystem refuses access."""


class SourceTimeoutError(SourceError, TimeoutError):
    """The source stopped answering."""


class SourceChangedError(SourceError):
    """The source was replaced, rewritten or truncated after it had been opened."""


class TruncatedError(SourceError):
    """The source ends before the bytes that its size or header promised."""


class IntegrityError(SourceError):
    """The bytes that were read do not have the expected digest.

    Attributes:
        block: the block of the manifest that they are; None where the whole file is meant.
        expected, found: digests in hexadecimal; None where something else is wrong, such as the size.
        tensors: names of the tensors that the block holds, as far as they are known.
    """

    block: int | None = None
    expected: str | None = None
    found: str | None = None
    tensors: tuple[str, ...] = ()


class DestinationError(HeadraceError, OSError):
    """The folder that is filled cannot be written to.

    Attributes:
        url: the path that was written.
        status: errno.
    """

    def __init__(self, message: str, *, url: str, status: int | None = None) -> None:
        super().__init__(message)
        self.url = url
        self.status = status


class NoSpaceError(DestinationError):
    """The destination has no room for the files.

    Attributes:
        needed, free: bytes; None where the filesystem filled up on the way.
    """

    def __init__(
        self, message: str, *, url: str, status: int | None = None, needed: int | None = None, free: int | None = None
    ) -> None:
        super().__init__(message, url=url, status=status)
        self.needed = needed
        self.free = free


class DeviceError(HeadraceError, RuntimeError):
    """A device cannot do what was asked of it.

    Attributes:
        device: the device, as torch writes it.
    """

    def __init__(self, message: str, *, device: str | None = None) -> None:
        super().__init__(message)
        self.device = device


class DeviceMemoryError(DeviceError):
    """Memory could not be allocated.

    Attributes:
        requested, free: bytes; `free` is None where it is unknown.
    """

    def __init__(self, message: str, *, device: str | None = None, requested: int | None = None, free: int | None = None) -> None:
        super().__init__(message, device=device)
        self.requested = requested
        self.free = free


class PinningError(DeviceError):
    """Memory could not be page-locked."""


class TensorNotFoundError(HeadraceError, KeyError):
    """The checkpoint has no tensor of this name.

    Attributes:
        name: the name or pattern that was asked for.
        close_matches: names of the checkpoint that are spelled alike.
    """

    def __init__(self, message: str, *, name: str, close_matches: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.close_matches = close_matches


class OptionError(HeadraceError, ValueError):
    """An option is unknown, or its value cannot be used.

    Attributes:
        option: the option's name.
    """

    def __init__(self, message: str, *, option: str) -> None:
        super().__init__(message)
        self.option = option


class StreamError(HeadraceError, RuntimeError):
    """A stream is iterated twice, used after close or in a forked child, or a borrowed tensor was kept."""


class PeerError(HeadraceError, RuntimeError):
    """Another rank failed.

    Attributes:
        rank: the rank that failed.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class LoadError(HeadraceError, RuntimeError):
    """A load into given tensors stopped half way; its cause is `__cause__`.

    Attributes:
        filled: names of the tensors that were completely written before the error.
    """

    def __init__(self, message: str, *, filled: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.filled = filled
