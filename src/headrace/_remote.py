"""Which adapter a URL scheme takes: http(s), hf and s3. Imported when such a url is opened, and not before.

The adapters name, sign and list; patience, proxies and trusted CAs are the same for all of them and come from the options and the
environment.
"""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import urlsplit

from headrace._options import HubSettings, NetworkSettings, Options
from headrace.errors import OptionError
from headrace.sources.base import ByteSource, Folder
from headrace.sources.http import Access, Policy
from headrace.sources.huggingface import HubFolder, open_hub
from headrace.sources.s3 import S3Credentials, S3Store
from headrace.sources.web import WebFolder, open_web


class Remote:
    """The stores of one load: what one of them has found out (keys, regions) serves all urls.

    Args:
        options: patience.
        credentials: who asks; None: as each store's own tools find it.
    """

    def __init__(self, options: Options, credentials: object) -> None:
        self._options, self._credentials = options, credentials
        self._s3: S3Store | None = None

    def open(self, url: str) -> ByteSource:
        """Open one file. Raises OptionError for a scheme without a source, or credentials of another kind."""
        scheme = urlsplit(url).scheme
        if scheme == "s3":
            return self._store().open(url)
        if scheme == "hf":
            hub = HubSettings.from_environment()
            token = _token(self._credentials) or hub.token
            return open_hub(url, token=token, endpoint=hub.endpoint, access=_access(self._options))
        if scheme in ("http", "https"):
            return open_web(url, access=_access(self._options, bearer=_token(self._credentials)))
        raise unknown_scheme(url, scheme)

    def folder(self, url: str) -> Folder:
        """The folder, prefix or repository that a url names. Raises as `open`."""
        scheme = urlsplit(url).scheme
        if scheme == "s3":
            return self._store().folder(url)
        if scheme == "hf":
            hub = HubSettings.from_environment()
            token = _token(self._credentials) or hub.token
            return HubFolder(url, token=token, endpoint=hub.endpoint, access=_access(self._options))
        if scheme in ("http", "https"):
            return WebFolder(url, access=_access(self._options, bearer=_token(self._credentials)))
        raise unknown_scheme(url, scheme)

    def place(self, url: str) -> tuple[Folder, str | None]:
        """The folder that a url names, and the file in it where it names one. Raises as `open`."""
        parts = urlsplit(url)
        base, _, name = parts.path.rpartition("/")
        if not name.endswith((".safetensors", ".safetensors.index.json")):
            return self.folder(url), None
        folder_url = parts._replace(path=base).geturl()
        if parts.scheme in ("http", "https"):
            return WebFolder(folder_url, [name], access=_access(self._options, bearer=_token(self._credentials))), name
        return self.folder(folder_url), name

    def _store(self) -> S3Store:
        given = self._credentials
        if given is not None and not isinstance(given, S3Credentials) and not callable(given):
            raise OptionError(f"credentials for s3:// are S3Credentials, not {type(given).__name__}", option="credentials")
        if self._s3 is None:
            self._s3 = S3Store(cast(Any, given), access=_access(self._options, aws=True))
        return self._s3


def unknown_scheme(url: str, scheme: str) -> OptionError:
    """The error for a scheme that no adapter takes."""
    return OptionError(f"{url}: there is no source for {scheme}:// yet; local paths, s3, hf, https and http work", option="url")


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
