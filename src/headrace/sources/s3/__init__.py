"""Objects in S3 and in stores that speak its language: named, signed and listed here, moved by `headrace.sources.http`.

An `S3Store` is one set of credentials and all that is remembered with it: the botocore session, and the regions of buckets. From
the ground up: `_address` says where an object is, `_errors` what the store complains about, `_listing` what is on a page,
`_identity` who asks and signs, `_bucket` how a bucket is reached; `_store` is what callers see.

Credentials and configuration come from botocore, as for every AWS tool: keys, profiles, SSO, processes, roles of containers,
instances and web identities. It is imported when a store is first asked.
"""

from headrace.sources.s3._errors import (
    AccessDeniedError,
    ArchivedObjectError,
    BucketNotFoundError,
    CredentialsError,
    ExpiredCredentialsError,
    ObjectNotFoundError,
    S3Error,
)
from headrace.sources.s3._identity import S3Credentials
from headrace.sources.s3._listing import Entry
from headrace.sources.s3._store import S3Folder, S3Source, S3Store, open_s3

__all__ = [
    "AccessDeniedError",
    "ArchivedObjectError",
    "BucketNotFoundError",
    "CredentialsError",
    "Entry",
    "ExpiredCredentialsError",
    "ObjectNotFoundError",
    "S3Credentials",
    "S3Error",
    "S3Folder",
    "S3Source",
    "S3Store",
    "open_s3",
]
