"""PURE: what S3 complains about, which error says so, and what to try.

A store's answer is XML with a code; the code says more than the status. `parse_complaint` reads it, `store_error` tells the byte
engine what to do about it, and `translate` makes the engine's error one that names bucket and key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace.errors import SourceError
from headrace.sources.http import Action, Headers, HttpError, HttpNotFoundError, HttpPermissionError, Kind, StoreError, parse_xml
from headrace.sources.objects import about_object


class S3Error(HttpError):
    """S3 refuses. Errors of reaching it at all, and of bytes that do not come, are those of `headrace.sources.http`.

    Attributes:
        bucket, key: of the object; for listings the key is the prefix. All errors of an S3 source carry them.
    """

    bucket: str = ""
    key: str = ""


class BucketNotFoundError(S3Error, HttpNotFoundError):
    """There is no bucket of this name."""


class ObjectNotFoundError(S3Error, HttpNotFoundError):
    """There is no object of this key, or none under this prefix."""


class AccessDeniedError(S3Error, HttpPermissionError):
    """Whoever asks is known, or anonymous, and may not."""


class ArchivedObjectError(S3Error, HttpPermissionError):
    """The object is in an archive and has to be restored first."""


class CredentialsError(S3Error, HttpPermissionError):
    """The credentials are missing, or not right."""


class ExpiredCredentialsError(CredentialsError):
    """The credentials were right once, and there are no newer ones."""


class _Rule(NamedTuple):
    error: type[S3Error] | None = None  # None: the engine's own class
    hint: str = ""
    kind: Kind | None = None  # None: what the status says
    action: Action | None = None  # None: what the kind says


_KEYS = "Check the access key and its secret, and that they are meant for this endpoint"
_RENEW = "Renew them (aws sso login, a new session token), or use a profile or role that renews them by itself"
_EXPIRED = _Rule(ExpiredCredentialsError, _RENEW, "unauthorized", "refresh")
_THROTTLED = _Rule(kind="throttled")
_DENIED = _Rule(
    AccessDeniedError,
    "Check that the credentials allow s3:GetObject; who may not list a bucket gets this for keys that do not exist, too",
    "denied",
)

# Codes of "Error responses" in the Amazon S3 API reference, where status and the engine's own rule do not say enough.
_RULES: Final[dict[str, _Rule]] = {
    "NoSuchBucket": _Rule(BucketNotFoundError, "Check the bucket's name, and the endpoint", "missing"),
    "NoSuchKey": _Rule(ObjectNotFoundError, "Check the key, letter by letter, and that the upload has finished", "missing"),
    "NoSuchVersion": _Rule(ObjectNotFoundError, "", "missing"),
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "AccountProblem": _DENIED,
    "InvalidObjectState": _Rule(ArchivedObjectError, "Restore it from the archive (aws s3api restore-object)", "denied"),
    "InvalidAccessKeyId": _Rule(CredentialsError, f"{_KEYS}; temporary ones need their session token", "denied"),
    "SignatureDoesNotMatch": _Rule(CredentialsError, _KEYS, "denied"),
    "InvalidToken": _Rule(CredentialsError, "Give the session token that belongs to the access key", "unauthorized", "refresh"),
    "RequestTimeTooSkewed": _Rule(CredentialsError, "Set this machine's clock", "denied"),
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestTimeout": _Rule(kind="stalled"),
    "InternalError": _Rule(kind="unavailable"),
    "SlowDown": _THROTTLED,
    "Throttling": _THROTTLED,
    "ThrottlingException": _THROTTLED,
    "RequestLimitExceeded": _THROTTLED,
    "TooManyRequests": _THROTTLED,
    "PermanentRedirect": _Rule(hint="The bucket is elsewhere: use the endpoint of its region", kind="redirect"),
    "AuthorizationHeaderMalformed": _Rule(CredentialsError, "Check the region", "denied"),
}
_BY_CLASS: Final = ((HttpNotFoundError, _RULES["NoSuchKey"]), (HttpPermissionError, _DENIED))
NO_RULE: Final = _Rule()


@dataclass(frozen=True, slots=True)
class Complaint:
    """An error as the store tells it; empty where it tells nothing."""

    code: str = ""
    message: str = ""
    request_id: str = ""
    region: str = ""


_REGION_OF_HOST: Final = re.compile(r"s3[.-](?:fips\.|dualstack\.)*([a-z]{2,4}(?:-[a-z]+)+-\d+)\.")


def parse_complaint(headers: Headers, body: bytes) -> Complaint:
    """Read headers and body of an answer that is no success; a body that is no XML of S3 counts for nothing."""
    fields: dict[str, str] = {}
    try:
        root = parse_xml(body) if body.lstrip().startswith(b"<") else None
    except ValueError:
        root = None
    if root is not None and _plain(root.tag) == "Error":
        fields = {_plain(child.tag): (child.text or "").strip() for child in root}
    told = _REGION_OF_HOST.search(fields.get("Endpoint", "") or headers.get("location") or "")
    return Complaint(
        code=fields.get("Code", ""),
        message=fields.get("Message", "")[:300],
        request_id=headers.get("x-amz-request-id") or fields.get("RequestId", ""),
        region=headers.get("x-amz-bucket-region") or fields.get("Region") or (told[1] if told else ""),
    )


def _plain(tag: str) -> str:
    return tag.rpartition("}")[2]


def store_error(complaint: Complaint, *, elsewhere: bool, renewable: bool) -> StoreError:
    """What the byte engine is told.

    Args:
        complaint: the store's.
        elsewhere: whether it tells the bucket's region, so that the next try goes there.
        renewable: whether there may be newer credentials.
    """
    rule = _RULES.get(complaint.code, NO_RULE)
    action: Action | None = "refresh" if elsewhere else rule.action
    if action == "refresh" and not elsewhere and not renewable:
        action = "fail"
    return StoreError(complaint.code or None, complaint.message or None, complaint.request_id or None, rule.kind, action)


def translate(error: SourceError, *, bucket: str, key: str, url: str, base: str, listing: bool = False) -> SourceError:
    """The engine's error as one about an object in a bucket.

    Args:
        error: the engine's.
        bucket, key, url: of what was asked for.
        base: the bucket's url on the wire; its host is shown beside the object's own url.
        listing: whether a prefix was listed and no object read.
    """
    rule = _rule_of(error)
    hint = rule.hint or getattr(error, "hint", "")
    if listing and rule is _DENIED:
        hint = "Listing needs s3:ListBucket; give the objects one by one if the credentials may only read"
    return about_object(error, kind=rule.error, hint=hint, url=url, base=base, listing=listing, bucket=bucket, key=key)


def _rule_of(error: SourceError) -> _Rule:
    if isinstance(error, S3Error):  # it comes from here
        return NO_RULE
    by_code = _RULES.get(getattr(error, "code", None) or "")
    return by_code or next((rule for kind, rule in _BY_CLASS if isinstance(error, kind)), NO_RULE)
