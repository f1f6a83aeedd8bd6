"""What the environment says, under the names that other programs gave it: networks, stores, and folders of the user.

This module is the only reader of the environment, and nothing writes it. A variable that is empty is not set. Each `*Settings` is
what one package is told, as a value; everything below is handed values, and looks nowhere else.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.errors import OptionError

HUB_ENDPOINT = "https://huggingface.co"


def first_set(*variables: str) -> str | None:
    """The value of the first variable that is set, without blanks around it; one that is empty is not set."""
    return next(filter(None, (os.environ.get(variable, "").strip() for variable in variables)), None)


def set_variables(prefix: str) -> list[str]:
    """The names of variables that begin so and are set."""
    return [name for name in os.environ if name.startswith(prefix) and os.environ[name].strip()]


def switch(variable: str) -> bool | None:
    """Whether a variable says on or off; None where it is not set. Raises OptionError for anything else."""
    text = (first_set(variable) or "").lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    if text:
        raise OptionError(f"environment variable {variable}={text!r} is 1 or 0", option=variable)
    return None


def environment_with(variables: Mapping[str, str], *, python_path: str) -> dict[str, str]:
    """This process's environment for a child, with some variables set and a folder that its Python looks into first."""
    path = os.pathsep.join(filter(None, (python_path, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **variables, "PYTHONPATH": path}


def cache_folder() -> str:
    """Where copies of remote models' small files are kept: HEADRACE_CACHE, else headrace below XDG_CACHE_HOME or ~/.cache."""
    below = first_set("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.abspath(os.path.expanduser(first_set("HEADRACE_CACHE") or os.path.join(below, "headrace")))


# ---- networks, and the hub


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Proxies and trust, from the variables that curl, requests and the AWS tools read.

    Attributes:
        proxies: {"http": url, "https": url}, by the scheme of what is fetched.
        no_proxy: hosts that are reached without, separated by commas.
        ca_bundle: a PEM file of trusted CAs; None: the system's.
    """

    proxies: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    no_proxy: str = ""
    ca_bundle: str | None = None

    @classmethod
    def from_environment(cls, *, aws: bool = False) -> NetworkSettings:
        """Read HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY (lower case wins), REQUESTS_CA_BUNDLE and SSL_CERT_FILE.

        Args:
            aws: whether it is for S3: AWS_CA_BUNDLE is read too, and wins. It holds a private store's CA as a rule, which would
                break everything else.
        """
        found = {scheme: first_set(*_proxy_variables(scheme)) for scheme in ("http", "https")}
        bundles = [*(["AWS_CA_BUNDLE"] if aws else []), "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"]
        return cls(
            proxies={scheme: proxy for scheme, proxy in found.items() if proxy},
            no_proxy=first_set("no_proxy", "NO_PROXY") or "",
            ca_bundle=first_set(*bundles),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Where the Hugging Face hub is, and who asks, from the variables of its own client.

    Attributes:
        token: never shown; None: anonymous.
        endpoint: of the hub or a mirror of it.
    """

    token: str | None = dataclasses.field(default=None, repr=False)
    endpoint: str = HUB_ENDPOINT

    @classmethod
    def from_environment(cls) -> HubSettings:
        """Read HF_ENDPOINT and HF_TOKEN, or else the file at HF_TOKEN_PATH, by default HF_HOME/token.

        With HF_HUB_DISABLE_IMPLICIT_TOKEN there is no token but one given as an argument.
        """
        disabled = (first_set("HF_HUB_DISABLE_IMPLICIT_TOKEN") or "").lower() in ("1", "on", "yes", "true")
        token = None if disabled else first_set("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") or _read_token(_token_path())
        return cls(token=token, endpoint=(first_set("HF_ENDPOINT") or HUB_ENDPOINT).rstrip("/"))


def _proxy_variables(scheme: str) -> list[str]:
    """In a CGI program HTTP_PROXY is a header of the request that it answers (CVE-2016-5385)."""
    upper = [] if scheme == "http" and "REQUEST_METHOD" in os.environ else [f"{scheme}_proxy".upper()]
    return [f"{scheme}_proxy", *upper, "all_proxy", "ALL_PROXY"]


def _token_path() -> str:
    cache = first_set("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = first_set("HF_HOME") or os.path.join(cache, "huggingface")
    return os.path.expanduser(os.path.expandvars(first_set("HF_TOKEN_PATH") or os.path.join(home, "token")))


def _read_token(path: str) -> str | None:
    """A token file that is not there, or may not be read, is as good as none: most repositories need no token."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip() or None
    except (OSError, ValueError):
        return None


# ---- stores: what no library of theirs reads


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """What the environment says about S3 and botocore does not read, or not before it makes a client.

    Attributes:
        endpoint: AWS_ENDPOINT_URL_S3, RUNAI_STREAMER_S3_ENDPOINT or AWS_ENDPOINT_URL; the first that is set.
        region: AWS_REGION, which most AWS libraries read and botocore does not.
        virtual_hosted: RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING; None: as it suits.
        unsigned: RUNAI_STREAMER_S3_UNSIGNED.
    """

    endpoint: str | None = None
    region: str | None = None
    virtual_hosted: bool | None = None
    unsigned: bool = False

    @classmethod
    def from_environment(cls) -> S3Settings:
        """Read them now. Raises OptionError for a switch that is neither on nor off."""
        return cls(
            endpoint=first_set("AWS_ENDPOINT_URL_S3", "RUNAI_STREAMER_S3_ENDPOINT", "AWS_ENDPOINT_URL"),
            region=first_set("AWS_REGION"),
            virtual_hosted=switch("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING"),
            unsigned=bool(switch("RUNAI_STREAMER_S3_UNSIGNED")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsSettings:
    """What the environment says about Google Cloud Storage.

    Attributes:
        endpoint: STORAGE_EMULATOR_HOST; http:// where it is a bare host.
        credential_file: RUNAI_STREAMER_GCS_CREDENTIAL_FILE.
        default_file: GOOGLE_APPLICATION_CREDENTIALS, else what gcloud has left in CLOUDSDK_CONFIG. google-auth would find both,
            and start gcloud to ask for the name of a project that nobody needs here (3.7 s, 2026-11-29).
        anonymous: RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS.
        universe: GOOGLE_CLOUD_UNIVERSE_DOMAIN, the domain of a sovereign cloud's services.
    """

    endpoint: str | None = None
    credential_file: str | None = None
    default_file: str | None = None
    anonymous: bool = False
    universe: str = "googleapis.com"

    @classmethod
    def from_environment(cls) -> GcsSettings:
        """Read them now. Raises OptionError for a switch that is neither on nor off."""
        emulator = first_set("STORAGE_EMULATOR_HOST")
        return cls(
            endpoint=emulator if emulator is None or "://" in emulator else f"http://{emulator}",
            credential_file=first_set("RUNAI_STREAMER_GCS_CREDENTIAL_FILE"),
            default_file=first_set("GOOGLE_APPLICATION_CREDENTIALS") or _gcloud_file(),
            anonymous=bool(switch("RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS")),
            universe=first_set("GOOGLE_CLOUD_UNIVERSE_DOMAIN") or "googleapis.com",
        )


def _gcloud_file() -> str | None:
    folder = first_set("CLOUDSDK_CONFIG") or os.path.join(os.path.expanduser("~"), ".config", "gcloud")
    path = os.path.join(folder, "application_default_credentials.json")
    return path if os.path.isfile(path) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureSettings:
    """What the environment says about Azure Storage: names of Run:ai's streamer and, in brackets, of Azure's command and obstore.

    Attributes:
        account_name: AZURE_STORAGE_ACCOUNT_NAME [AZURE_STORAGE_ACCOUNT].
        account_key: AZURE_STORAGE_ACCOUNT_KEY [AZURE_STORAGE_KEY, AZURE_STORAGE_ACCESS_KEY]; never shown.
        sas_token: AZURE_STORAGE_SAS_TOKEN; never shown.
        connection_string: AZURE_STORAGE_CONNECTION_STRING; never shown.
        endpoint: AZURE_STORAGE_ENDPOINT [AZURE_STORAGE_SERVICE_ENDPOINT, AZURE_ENDPOINT], the url of the blob service.
        endpoint_suffix: AZURE_STORAGE_ENDPOINT_SUFFIX, of the blob service's host; one without "blob." is completed.
        anonymous: AZURE_SKIP_SIGNATURE.
    """

    account_name: str | None = None
    account_key: str | None = dataclasses.field(default=None, repr=False)
    sas_token: str | None = dataclasses.field(default=None, repr=False)
    connection_string: str | None = dataclasses.field(default=None, repr=False)
    endpoint: str | None = None
    endpoint_suffix: str | None = None
    anonymous: bool = False

    @classmethod
    def from_environment(cls) -> AzureSettings:
        """Read them now. Raises OptionError for a switch that is neither on nor off."""
        suffix = (first_set("AZURE_STORAGE_ENDPOINT_SUFFIX") or "").lstrip(".")
        return cls(
            account_name=first_set("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
            account_key=first_set("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCESS_KEY"),
            sas_token=first_set("AZURE_STORAGE_SAS_TOKEN"),
            connection_string=first_set("AZURE_STORAGE_CONNECTION_STRING"),
            endpoint=first_set("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_SERVICE_ENDPOINT", "AZURE_ENDPOINT"),
            endpoint_suffix=(f"blob.{suffix}" if suffix.startswith("core.") else suffix) or None,
            anonymous=bool(switch("AZURE_SKIP_SIGNATURE")),
        )
