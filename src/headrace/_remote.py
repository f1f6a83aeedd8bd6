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


def open_remote(url: str, options: Options, credentials: object) -> ByteSource:
    """Open one remote file. Raises OptionError for a scheme without a source, or credentials of another kind."""
    scheme = urlsplit(url).scheme
    if scheme == "s3":
        return _store(options, credentials).open(url)
    if scheme == "hf":
        hub = HubSettings.from_environment()
        return open_hub(url, token=_token(credentials) or hub.token, endpoint=hub.endpoint, access=_access(options))
    if scheme in ("http", "https"):
        return open_web(url, access=_access(options, bearer=_token(credentials)))
    raise unknown_scheme(url, scheme)


def remote_folder(url: str, options: Options, credentials: object) -> Folder:
    """The folder, prefix or repository that a url names. Raises as `open_remote`."""
    scheme = urlsplit(url).scheme
    if scheme == "s3":
        return _store(options, credentials).folder(url)
    if scheme == "hf":
        hub = HubSettings.from_environment()
        return HubFolder(url, token=_token(credentials) or hub.token, endpoint=hub.endpoint, access=_access(options))
    if scheme in ("http", "https"):
        return WebFolder(url, access=_access(options, bearer=_token(credentials)))
    raise unknown_scheme(url, scheme)


def unknown_scheme(url: str, scheme: str) -> OptionError:
    """The error for a scheme that no adapter takes."""
    return OptionError(f"{url}: there is no source for {scheme}:// yet; local paths, s3, hf, https and http work", option="url")


def _store(options: Options, credentials: object) -> S3Store:
    if credentials is not None and not isinstance(credentials, S3Credentials) and not callable(credentials):
        raise OptionError(f"credentials for s3:// are S3Credentials, not {type(credentials).__name__}", option="credentials")
    return S3Store(cast(Any, credentials), access=_access(options, aws=True))


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
