"""Local folders for libraries that want a folder: the small files of a remote model, with its weights left where they are.

A view has the config, the tokenizer, the index: all but weights. It lies in the cache, is filled by `headrace.pull`, looked over
again by every call, and is its model's alone: what is no longer in the store is removed from it. A stand-in is a view for
libraries that look for weights as well and open them by a function that can be replaced: links to a view's files, and beside them
a file of the name of each weight file, whose text says what it stands for. No parser takes that text for safetensors.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typing_extensions import Unpack

import headrace
from headrace._environment import AzureSettings, GcsSettings, HubSettings, S3Settings, cache_folder
from headrace.errors import DestinationError, FormatError, OptionError
from headrace.sources.base import ByteSource, Folder

if TYPE_CHECKING:
    from headrace._arguments import TuningArguments

# What is not mirrored: weights, in every format that is met beside safetensors.
WEIGHTS: Final = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.onnx_data", "*.ot",
    "*.tflite", "*.tensors", "*.npz", "*.nemo", "*.pb",
)  # fmt: skip
_PULLS: Final = ".headrace-pull"  # where `pull` keeps its books
_READABLE: Final = 40  # characters of the url in a view's name


def local_view(url: str | os.PathLike[str], *, credentials: object = None, **options: Unpack[TuningArguments]) -> str:
    """Make a local folder with the small files of a remote model: config, tokenizer, index; all but its weights.

    For libraries that want a folder for these, while the weights come by `headrace.state_dict` or `headrace.load`. The folder
    lies in HEADRACE_CACHE, by default ~/.cache/headrace, and is kept: a later call copies only what has changed in the store, and
    removes what is no longer there. Processes that ask for the same url take turns. It may be removed at any time that nobody
    uses it.

    Args:
        url: a folder, as for `headrace.open`. A local one is returned as it is.
        credentials: as for `headrace.open`.
        **options: tuning; see `Options`.

    Returns:
        The folder's path.

    Raises:
        SourceNotFoundError, SourcePermissionError, SourceError: the store says so.
        DestinationError: the cache cannot be written to.
        OptionError: there is no source for such a url.

    Example:
        >>> config = AutoConfig.from_pretrained(headrace.local_view("s3://models/minilm"))
        >>> model = BertModel.from_pretrained(None, config=config, state_dict=headrace.state_dict("s3://models/minilm").lazy())
    """
    folder = headrace.folder(url, credentials=credentials, **options)
    if "://" not in folder.url:
        return folder.url
    return _fill_view(folder, _listed(folder), credentials, options)


class StandIn:
    """A local folder that looks like all of a remote model; where its weights are read from is for `source` to say.

    Args:
        url: a folder in a store.
        credentials, options: as for `headrace.open`.

    Attributes:
        path: the local folder.
        weights: {local path: name in the store} of its weight files.
    """

    def __init__(self, url: str, *, credentials: object, options: TuningArguments) -> None:
        self._folder = headrace.folder(url, credentials=credentials, **options)
        names = _listed(self._folder)
        view = _fill_view(self._folder, names, credentials, options)
        self.path = _place(self._folder, credentials, "stand-ins")
        self.weights = {os.path.join(self.path, name): name for name in names if name.endswith(".safetensors")}
        with _writing(self.path):
            for name in names:
                if not _is_weights(name):
                    _put(os.path.join(self.path, name), lambda at, name=name: os.symlink(os.path.join(view, name), at))  # type: ignore[misc]
            for path, name in self.weights.items():
                text = f"headrace: this stands for {self._folder.url}/{name}; load it inside headrace.patch()\n"
                _put(path, lambda at, text=text: Path(at).write_text(text))  # type: ignore[misc]
            _prune(self.path, {name for name in names if not _is_weights(name)} | set(self.weights.values()))

    def open(self, path: str) -> ByteSource:
        """Open the file that one of the local paths stands for."""
        return self._folder.open(self.weights[path])


def is_store_url(name: object) -> bool:
    """Whether it names a model in a store. Web addresses are left to the libraries, which have a meaning for some of them."""
    return isinstance(name, str) and re.match(r"(s3|gs|az|abfss?|hf)://", name) is not None


# ---- filling


class Chosen:
    """Some files of a folder, to pull these alone."""

    def __init__(self, folder: Folder, names: list[str]) -> None:
        self.url = folder.url
        self._folder, self._names = folder, names
        if hasattr(folder, "sha256"):
            self.sha256 = folder.sha256  # `pull` checks what the store has digests of

    def names(self) -> list[str]:
        return self._names

    def open(self, name: str) -> ByteSource:
        return self._folder.open(name)


def _listed(folder: Folder) -> list[str]:
    """All files of a model. Names that lead out of it are refused before anything is written."""
    walk: Callable[[], list[str]] = getattr(folder, "walk", folder.names)
    names = [name for name in walk() if not name.startswith(".")]
    for name in names:
        if os.path.isabs(name) or "\0" in name or not {"..", ".", "", _PULLS}.isdisjoint(name.split("/")):
            raise FormatError(f"{folder.url}: the name {name!r} leads out of the folder", url=folder.url)
    return names


def _is_weights(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in WEIGHTS)


def _fill_view(folder: Folder, names: Sequence[str], credentials: object, options: TuningArguments) -> str:
    small = [name for name in names if not _is_weights(name)]
    path = _place(folder, credentials, "views")
    with _writing(path):
        if small:
            # With a pattern, so that what another pull has begun is left in place.
            headrace.pull(Chosen(folder, small), path, include="*", **options)
        _prune(path, set(small))
    return path


def _place(folder: Folder, credentials: object, kind: str) -> str:
    """Where a model's folder lies. A bucket's name means one thing to each store that has it, so the endpoint counts."""
    digest = hashlib.sha256(f"{folder.url}\n{_endpoint(folder.url, credentials)}".encode()).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", folder.url.rstrip("/").rpartition("/")[2])[:_READABLE].strip("-.")
    return os.path.join(cache_folder(), kind, f"{readable}-{digest[:16]}".lstrip("-"))


def _endpoint(url: str, credentials: object) -> object:
    given = getattr(credentials, "endpoint", None)
    if given is not None:
        return given
    scheme = url.partition("://")[0]
    if scheme == "s3":
        return S3Settings.from_environment().endpoint
    if scheme == "gs":
        return GcsSettings.from_environment().endpoint
    if scheme == "hf":
        return HubSettings.from_environment().endpoint
    settings = AzureSettings.from_environment()
    return (settings.endpoint, settings.account_name)


@contextmanager
def _writing(path: str) -> Iterator[None]:
    """Take turns with whoever else writes to this folder, which is made where it does not exist."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise DestinationError(
            f"cannot write to {path}: {exc.strerror}; HEADRACE_CACHE names another place", url=path, status=exc.errno
        ) from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _put(path: str, make: Callable[[str], object]) -> None:
    """Make a link or a file under its name, at once: who opens the name meanwhile finds the old one or the new one."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    beside = f"{path}.{os.getpid()}.new"
    with suppress(FileNotFoundError):
        os.unlink(beside)
    make(beside)
    os.replace(beside, path)


def _prune(path: str, names: set[str]) -> None:
    """Remove what the model does not have any more."""
    for where, folders, files in os.walk(path):
        folders[:] = [name for name in folders if name != _PULLS]
        for name in files:
            if os.path.relpath(os.path.join(where, name), path) not in names:
                os.unlink(os.path.join(where, name))


def check_url(url: str) -> None:
    """Raise OptionError for a store's url that names a file: libraries want the folder that it lies in."""
    if url.endswith((".safetensors", ".safetensors.index.json")):
        raise OptionError(f"{url} is a file; name the folder that it lies in", option="url")
