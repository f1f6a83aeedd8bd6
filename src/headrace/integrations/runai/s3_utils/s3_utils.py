"""Urls of object stores, credentials for them, and listing and pulling by url and patterns.

All stores are listed and pulled in the same way here; the functions by store are there because programs import them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

S3_PROTOCOL_PREFIX: Final = "s3://"
GCS_PROTOCOL_PREFIX: Final = "gs://"
AZURE_PROTOCOL_PREFIX: Final = "az://"
DEFAULT_GCS_ENDPOINT_URL: Final = "https://storage.googleapis.com"
AWS_ENDPOINT_URL_ENV: Final = "AWS_ENDPOINT_URL"
AWS_EC2_METADATA_DISABLED_ENV: Final = "AWS_EC2_METADATA_DISABLED"
DEFAULT_AWS_EC2_METADATA_DISABLED: Final = "true"


class S3Credentials:
    """Who asks S3, and where; what is None is found as the aws command finds it.

    Args:
        access_key_id, secret_access_key, session_token: keys; the first two are given together.
        region_name: of the buckets.
        endpoint: http(s)://host[:port] of a store that is not Amazon's.
    """

    def __init__(
        self,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        session_token: str | None = None,
        region_name: str | None = None,
        endpoint: str | None = None,
    ) -> None:
        self.access_key_id = access_key_id
        self.secret_access_key = secret_access_key
        self.session_token = session_token
        self.region_name = region_name
        self.endpoint = endpoint

    def __repr__(self) -> str:
        return (
            f"S3Credentials(access_key_id={self.access_key_id!r}, region_name={self.region_name!r}, endpoint={self.endpoint!r})"
        )


def is_s3_path(path: str) -> bool:
    """Whether it is an s3:// url."""
    return path.startswith(S3_PROTOCOL_PREFIX)


def is_gs_path(path: str) -> bool:
    """Whether it is a gs:// url."""
    return path.startswith(GCS_PROTOCOL_PREFIX)


def is_azure_path(path: str) -> bool:
    """Whether it is an az:// url."""
    return path.startswith(AZURE_PROTOCOL_PREFIX)


def s3_glob(path: str, allow_pattern: list[str] | None = None, s3_credentials: S3Credentials | None = None) -> list[str]:
    """Urls of the objects directly under s3://bucket/prefix whose keys fit a pattern."""
    from headrace.integrations.runai._places import list_urls

    return list_urls(path, allow_pattern, s3_credentials)


def gcs_glob(path: str, allow_pattern: list[str] | None = None) -> list[str]:
    """As `s3_glob`, for gs://."""
    return s3_glob(path, allow_pattern)


def azure_glob(path: str, allow_pattern: list[str] | None = None) -> list[str]:
    """As `s3_glob`, for az://."""
    return s3_glob(path, allow_pattern)


def s3_pull_files(
    model_path: str,
    dst: str,
    allow_pattern: list[str] | None = None,
    ignore_pattern: list[str] | None = None,
    s3_credentials: S3Credentials | None = None,
) -> None:
    """Copy the objects under s3://bucket/prefix whose keys fit the patterns to a folder."""
    from headrace.integrations.runai._places import pull

    pull(model_path, dst, allow_pattern, ignore_pattern, s3_credentials)


def gcs_pull_files(
    model_path: str,
    dst: str,
    allow_pattern: list[str] | None = None,
    ignore_pattern: list[str] | None = None,
    s3_credentials: S3Credentials | None = None,
) -> None:
    """As `s3_pull_files`, for gs://."""
    s3_pull_files(model_path, dst, allow_pattern, ignore_pattern, s3_credentials)


def azure_pull_files(
    model_path: str, dst: str, allow_pattern: list[str] | None = None, ignore_pattern: list[str] | None = None
) -> None:
    """As `s3_pull_files`, for az://."""
    s3_pull_files(model_path, dst, allow_pattern, ignore_pattern)


def filter_allow(paths: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Paths that fit one of the patterns; `*` also matches `/`."""
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)]


def filter_ignore(paths: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Paths that fit none of the patterns."""
    return [path for path in paths if not any(fnmatchcase(path, pattern) for pattern in patterns)]


def removeprefix(s: str, prefix: str) -> str:
    """The text without the prefix, if it begins with it."""
    return s.removeprefix(prefix)
