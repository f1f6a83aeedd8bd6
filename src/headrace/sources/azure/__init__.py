"""Blobs in Azure Storage: named, signed and listed here, moved by `headrace.sources.http`.

An `AzureStore` is one set of credentials and all that is remembered with it: tokens, and what was signed with an account key.
From the ground up: `_address` says where a blob is, `_connection_string` reads what the portal hands out, `_errors` what the
service complains about, `_listing` what is on a page, `_identity` who asks, `_container` how a container is reached; `_store` is
what callers see.

Tokens come from azure-identity, and signatures of account keys from azure-storage-blob; each is imported when it is first needed,
and SAS tokens and public containers need neither.
"""

from headrace.sources.azure._errors import (
    AccessDeniedError,
    AccountNotFoundError,
    ArchivedBlobError,
    AzureBlobError,
    BlobNotFoundError,
    ContainerNotFoundError,
    CredentialsError,
    ExpiredCredentialsError,
)
from headrace.sources.azure._identity import AccessToken, AzureCredentials, TokenCredential
from headrace.sources.azure._listing import Entry
from headrace.sources.azure._store import AzureFolder, AzureSource, AzureStore, open_azure

__all__ = [
    "AccessDeniedError",
    "AccessToken",
    "AccountNotFoundError",
    "ArchivedBlobError",
    "AzureBlobError",
    "AzureCredentials",
    "AzureFolder",
    "AzureSource",
    "AzureStore",
    "BlobNotFoundError",
    "ContainerNotFoundError",
    "CredentialsError",
    "Entry",
    "ExpiredCredentialsError",
    "TokenCredential",
    "open_azure",
]
