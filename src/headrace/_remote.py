"""Which adapter a URL scheme takes. Imported when such a url is opened, and not before; adapters when their scheme is met.

The adapters name, sign and list; patience, proxies and trusted CAs are the same for all of them and come from the options and the
environment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, cast
from urllib.parse import urlsplit

from headrace._options import HubSettings, NetworkSettings, Options
from headrace.errors import OptionError
from headrace.sources.base import ByteSource, Folder
from headrace.sources.http import Access, Policy


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
        """The folder that a url names, and the file in it where it names one. Raises as `open`."""
        parts = urlsplit(url)
        base, _, name = parts.path.rpartition("/")
        if not name.endswith((".safetensors", ".safetensors.index.json")):
            return self.folder(url), None
        store, folder_url = self._store(url), parts._replace(path=base).geturl()
        if isinstance(store, _Web):
            return store.folder(folder_url, [name]), name
        return store.folder(folder_url), name

    def _store(self, url: str) -> Store:
        scheme = urlsplit(url).scheme
        make = _MAKERS.get(scheme)
        if make is None:
            raise unknown_scheme(url, scheme)
        if make not in self._stores:
            self._stores[make] = make(self._options, self._credentials)
        return self._stores[make]


def unknown_scheme(url: str, scheme: str) -> OptionError:
    """The error for a scheme that no adapter takes."""
    return OptionError(f"{url}: there is no source for {scheme}://; local paths, {', '.join(_MAKERS)} work", option="url")


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

    def folder(self, url: str, names: list[str] | None = None) -> Folder:
        from headrace.sources.web import WebFolder

        return WebFolder(url, names, access=self._access)


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
