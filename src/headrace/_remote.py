"""Which adapter a URL scheme takes. Imported when such a url is opened, and not before; adapters when their scheme is met.

The adapters name, sign and list; patience, proxies and trusted CAs are the same for all of them and come from the options and the
environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final, Protocol, cast
from urllib.parse import unquote, urlsplit

from headrace._environment import HubSettings, NetworkSettings
from headrace._options import Options
from headrace._shards import INDEX_SUFFIX
from headrace.errors import OptionError
from headrace.sources.base import ByteSource, Folder
from headrace.sources.http import Access, Policy, public_url


class Store(Protocol):
    """Where one scheme's urls lead, as one set of credentials sees it."""

    def open(self, url: str) -> ByteSource:
        """Open one file."""

    def folder(self, url: str) -> Folder:
        """The folder, prefix or repository that a url names."""


class Remote:
    """The stores of one load: what one of them has found out (keys, regions) serves all urls.

    Args:
        options: patience.
        credentials: who asks; None: as each store's own tools find it.
    """

    def __init__(self, options: Options, credentials: object) -> None:
        self._options, self._credentials = options, credentials
        self._stores: dict[Callable[[Options, Any], Store], Store] = {}

    def open(self, url: str) -> ByteSource:
        """Open one file. Raises OptionError for a scheme without a source, or credentials of another kind."""
        return self._store(url).open(url)

    def folder(self, url: str) -> Folder:
        """The folder, prefix or repository that a url names. Raises as `open`."""
        return self._store(url).folder(url)

    def place(self, url: str) -> tuple[Folder, str | None]:
        """The folder that a url names, and the file in it where it names one: the folder knows of that one only then."""
        folder_url, name = split_url(url)
        if not is_file_name(name):
            return self.folder(url), None
        return OneFile(self.folder(folder_url), name, lambda: self.open(url)), name

    def _store(self, url: str) -> Store:
        scheme = _scheme(url)
        make = _MAKERS.get(scheme) or _other_maker(url, scheme)
        if make not in self._stores:
            self._stores[make] = make(self._options, self._credentials)
        return self._stores[make]


class OneFile:
    """A folder as far as one file of it goes: nothing is listed, and so nobody needs the permission to list.

    Args:
        folder: where it lies; other files (a manifest) can be opened by name.
        name: of the file.
        opener: opens it, by its own url.
    """

    def __init__(self, folder: Folder, name: str, opener: Callable[[], ByteSource]) -> None:
        self.url = folder.url
        self._folder, self._name, self._opener = folder, name, opener

    def names(self) -> list[str]:
        """The file alone, whether or not it is there."""
        return [self._name]

    def open(self, name: str) -> ByteSource:
        """Open the file, or another one of the folder. Raises as the store does."""
        return self._opener() if name == self._name else self._folder.open(name)


def is_file_name(name: str) -> bool:
    """Whether the last part of a url is what files are called; anything else is a folder."""
    return name.endswith((".safetensors", INDEX_SUFFIX))


def split_url(url: str) -> tuple[str, str]:
    """All of a url but its last part, and that part: the folder and the name of a file.

    In the keys of a store '?', '#' and '%' stand for themselves. On the web a query, which may sign the whole folder, stays with
    the folder, and names are unescaped.

    >>> split_url("s3://models/what?/a b.safetensors")
    ('s3://models/what?', 'a b.safetensors')
    >>> split_url("https://host/m/a%20b.safetensors?sig=1")
    ('https://host/m?sig=1', 'a b.safetensors')
    """
    if _scheme(url) not in _MAKERS:
        from headrace.sources.fsspec import split_chain

        return split_chain(url)
    if _scheme(url) in _WEB:
        try:
            parts = urlsplit(url)
        except ValueError:
            raise OptionError(f"{public_url(url)} is no http:// or https:// url with a host", option="url") from None
        base, _, name = parts.path.rpartition("/")
        return parts._replace(path=base).geturl(), unquote(name)
    folder, _, name = url.rpartition("/")
    return folder, name


def shown_url(url: str) -> str:
    """The url as it may be shown. Those of stores hold no secrets, and their keys may hold '?' and '#'."""
    if _scheme(url) in _MAKERS:
        return public_url(url) if _scheme(url) in _WEB else url
    from headrace.sources.fsspec import shown_chain

    return shown_chain(url)


def unknown_scheme(url: str, scheme: str) -> OptionError:
    """The error for a scheme that no adapter takes."""
    from headrace.sources.fsspec import own_form

    own, near = own_form(url), get_close_matches(scheme, _MAKERS, n=1)
    hint = f"write {own}; " if own is not None else f"did you mean {near[0]}://? " if near else ""
    known = ", ".join(f"{each}://" for each in _MAKERS)
    return OptionError(
        f"{shown_url(url)}: there is no source for {scheme}://; {hint}local paths, {known} work, "
        "and what fsspec knows where headrace[fsspec] is installed",
        option="url",
    )


def _scheme(url: str) -> str:
    return url.partition("://")[0].partition("::")[0].lower()


# ---- one maker per store


def _open_s3(options: Options, given: object) -> Store:
    from headrace.sources.s3 import S3Credentials, S3Store

    if given is not None and not isinstance(given, S3Credentials) and not callable(given):
        raise OptionError(f"credentials for s3:// are S3Credentials, not {type(given).__name__}", option="credentials")
    return S3Store(cast(Any, given), access=_access(options, aws=True))


def _open_gcs(options: Options, given: object) -> Store:
    from headrace.sources.gcs import GcsCredentials, GcsStore

    if given is not None and not isinstance(given, GcsCredentials) and not callable(given):
        raise OptionError(f"credentials for gs:// are GcsCredentials, not {type(given).__name__}", option="credentials")
    return GcsStore(cast(Any, given), access=_access(options))


def _open_azure(options: Options, given: object) -> Store:
    from headrace.sources.azure import AzureStore

    return AzureStore(cast(Any, given), access=_access(options))


class _Hub:
    """The Hugging Face hub."""

    def __init__(self, options: Options, given: object) -> None:
        settings = HubSettings.from_environment()
        self._token, self._endpoint, self._access = _token(given) or settings.token, settings.endpoint, _access(options)

    def open(self, url: str) -> ByteSource:
        from headrace.sources.huggingface import open_hub

        return open_hub(url, token=self._token, endpoint=self._endpoint, access=self._access)

    def folder(self, url: str) -> Folder:
        from headrace.sources.huggingface import HubFolder

        return HubFolder(url, token=self._token, endpoint=self._endpoint, access=self._access)


class _Web:
    """Plain web servers."""

    def __init__(self, options: Options, given: object) -> None:
        self._access = _access(options, bearer=_token(given))

    def open(self, url: str) -> ByteSource:
        from headrace.sources.web import open_web

        return open_web(url, access=self._access)

    def folder(self, url: str) -> Folder:
        from headrace.sources.web import WebFolder

        return WebFolder(url, access=self._access)


class _Other:
    """Filesystems that fsspec knows."""

    def __init__(self, _options: Options, given: object) -> None:
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(
                f"credentials for what fsspec reads are a dict of its storage options, not {type(given).__name__}",
                option="credentials",
            )
        self._given = given

    def open(self, url: str) -> ByteSource:
        from headrace.sources.fsspec import open_fsspec

        return open_fsspec(url, options=self._given)

    def folder(self, url: str) -> Folder:
        from headrace.sources.fsspec import FsspecFolder

        return FsspecFolder(url, options=self._given)


def _other_maker(url: str, scheme: str) -> Callable[[Options, object], Store]:
    """For schemes that no adapter here takes. Raises OptionError where fsspec does not take it either, or is not there."""
    from headrace.sources.fsspec import knows_scheme

    if not knows_scheme(scheme):
        raise unknown_scheme(url, scheme)
    return _Other


_MAKERS: Final[dict[str, Callable[[Options, object], Store]]] = {
    "s3": _open_s3,
    "gs": _open_gcs,
    "az": _open_azure,
    "abfs": _open_azure,
    "abfss": _open_azure,
    "hf": _Hub,
    "https": _Web,
    "http": _Web,
}
_WEB: Final = frozenset({"https", "http"})


def _token(credentials: object) -> str | None:
    if credentials is not None and not isinstance(credentials, str):
        raise OptionError(f"credentials here are a token, a str, and not {type(credentials).__name__}", option="credentials")
    return credentials


def _access(options: Options, *, aws: bool = False, bearer: str | None = None) -> Access:
    network = NetworkSettings.from_environment(aws=aws)
    usual = Policy()
    policy = Policy(
        attempts=options.attempts if options.attempts is not None else usual.attempts,
        deadline_s=options.deadline_s,
        stall_timeout_s=options.stall_timeout_s if options.stall_timeout_s is not None else usual.stall_timeout_s,
    )
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    return Access(headers=headers, proxies=network.proxies, no_proxy=network.no_proxy, tls=network.ca_bundle, policy=policy)
