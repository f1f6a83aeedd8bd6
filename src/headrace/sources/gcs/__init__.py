"""Objects in Google Cloud Storage: named, authorized and listed here, moved by `headrace.sources.http`.

A `GcsStore` is one set of credentials and all that is remembered with it. From the ground up: `_address` says where an object is,
`_errors` what the store complains about, `_listing` what is on a page, `_transport` how google-auth reaches whoever gives tokens,
`_identity` who asks, `_bucket` how a bucket is reached; `_store` is what callers see.

Bytes come from the XML API, which takes tokens and HMAC keys alike; listings come from the JSON API, which takes no HMAC keys,
and for those from the XML one. Tokens come from google-auth, as for every Google tool; it is imported when one is needed.
"""

from headrace.sources.gcs._errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CredentialsError,
    ExpiredCredentialsError,
    GcsError,
    ObjectNotFoundError,
)
from headrace.sources.gcs._identity import GcsCredentials
from headrace.sources.gcs._listing import Entry
from headrace.sources.gcs._store import GcsFolder, GcsSource, GcsStore, open_gcs

__all__ = [
    "AccessDeniedError",
    "BucketNotFoundError",
    "CredentialsError",
    "Entry",
    "ExpiredCredentialsError",
    "GcsCredentials",
    "GcsError",
    "GcsFolder",
    "GcsSource",
    "GcsStore",
    "ObjectNotFoundError",
    "open_gcs",
]
