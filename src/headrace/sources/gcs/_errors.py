"""PURE: what Cloud Storage complains about, which error says so, and what to try.

Answers of the XML API carry a code, those of the JSON API a reason; either says more than the status. `parse_complaint` reads it,
`store_error` tells the byte engine what to do about it, and `translate` makes the engine's error one that names bucket and key.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from headrace.errors import SourceError
from headrace.sources.http import (
    Action,
    Headers,
    HttpError,
    HttpNotFoundError,
    HttpPermissionError,
    Kind,
    StoreError,
    WrongEncodingError,
    parse_error_headers,
    parse_xml,
)
from headrace.sources.objects import about_object


class GcsError(HttpError):
    """Cloud Storage refuses. Errors of reaching it at all, and of bytes that do not come, are those of `headrace.sources.http`.

    Attributes:
        bucket, key: of the object; for listings the key is the prefix. All errors of a GCS source carry them.
    """

    bucket: str = ""
    key: str = ""


class BucketNotFoundError(GcsError, HttpNotFoundError):
    """There is no bucket of this name."""


class ObjectNotFoundError(GcsError, HttpNotFoundError):
    """There is no object of this key, or none under this prefix."""


class AccessDeniedError(GcsError, HttpPermissionError):
    """Whoever asks is known, or anonymous, and may not."""


class CredentialsError(GcsError, HttpPermissionError):
    """The credentials are missing, cannot be had, or are not right."""


class ExpiredCredentialsError(CredentialsError):
    """The token is not, or no longer, taken, and there is no newer one."""


class _Rule(NamedTuple):
    error: type[GcsError] | None = None  # None: the engine's own class
    hint: str = ""
    kind: Kind | None = None  # None: what the status says
    action: Action | None = None  # None: what the kind says


_KEYS = "Check the HMAC key and its secret, and that they are meant for this endpoint"
_NO_KEY = _Rule(ObjectNotFoundError, "Check the key, letter by letter, and that the upload has finished", "missing")
_NO_BUCKET = _Rule(BucketNotFoundError, "Check the bucket's name, and the endpoint", "missing")
_DENIED = _Rule(
    AccessDeniedError,
    "Check that the account has storage.objects.get (Storage Object Viewer); who may not list a bucket gets this for keys that "
    "do not exist, too",
    "denied",
)
_SPENT = _Rule(
    ExpiredCredentialsError,
    "Renew it (gcloud auth application-default login), or use credentials that renew themselves: a service account, a federated "
    "or an attached one",
    "unauthorized",
    "refresh",
)
_UNKNOWN = _Rule(CredentialsError, _KEYS, "denied")
_PAYER = _Rule(
    AccessDeniedError, "Name a project in user_project that may be billed and used (serviceusage.services.use)", "denied"
)
_THROTTLED = _Rule(kind="throttled")
_UNAVAILABLE = _Rule(kind="unavailable")

# "HTTP status and error codes" for XML and for JSON, Cloud Storage documentation, where the status does not say enough.
_RULES: Final[dict[str, _Rule]] = {
    "NoSuchBucket": _NO_BUCKET,
    "NoSuchKey": _NO_KEY,
    "AccessDenied": _DENIED,
    "forbidden": _DENIED,
    "SecurityPolicyViolated": _Rule(AccessDeniedError, "VPC Service Controls forbid it from this network", "denied"),
    "AuthenticationRequired": _SPENT,
    "ExpiredToken": _SPENT,
    "authError": _SPENT,
    "InvalidAccessKeyId": _UNKNOWN,
    "InvalidSecurity": _UNKNOWN,
    "SignatureDoesNotMatch": _UNKNOWN,
    "RequestTimeTooSkewed": _Rule(CredentialsError, "Set this machine's clock", "denied"),
    "UserProjectMissing": _Rule(
        AccessDeniedError, "Who asks pays for this bucket: name a project in GcsCredentials(user_project=...)", "denied"
    ),
    "UserProjectAccessDenied": _PAYER,
    "UserProjectAccountProblem": _PAYER,
    "UserProjectInconsistent": _PAYER,
    "UserProjectInvalid": _PAYER,
    "SlowDown": _THROTTLED,
    "TooManyRequests": _THROTTLED,
    "rateLimitExceeded": _THROTTLED,
    "userRateLimitExceeded": _THROTTLED,
    "InternalError": _UNAVAILABLE,
    "backendError": _UNAVAILABLE,
}
_BY_CLASS: Final = (
    (HttpNotFoundError, _NO_KEY),
    (HttpPermissionError, _DENIED),
    (
        WrongEncodingError,
        _Rule(hint="It is stored with a Content-Encoding; upload it without one (gsutil cp without -z, no --gzip-in-flight)"),
    ),
)
NO_RULE: Final = _Rule()


@dataclass(frozen=True, slots=True)
class Complaint:
    """An error as the store tells it; empty where it tells nothing."""

    code: str = ""
    message: str = ""


def parse_complaint(body: bytes) -> Complaint:
    """Read the body of an answer that is no success; one that is neither XML nor JSON of the store counts for nothing."""
    text = body.lstrip()
    try:
        found = _from_xml(text) if text.startswith(b"<") else _from_json(text) if text.startswith(b"{") else Complaint()
    except (ValueError, RecursionError):
        return Complaint()
    if "requester pays" in found.message.lower() and found.code in ("required", "invalid", "InvalidArgument"):
        return Complaint("UserProjectMissing", found.message)  # the JSON API has no code of its own for it
    return found


def _from_xml(text: bytes) -> Complaint:
    root = parse_xml(text)
    if root.tag.rpartition("}")[2] != "Error":
        return Complaint()
    fields = {child.tag.rpartition("}")[2]: (child.text or "").strip() for child in root}
    message = " ".join(filter(None, (fields.get("Message"), fields.get("Details"))))
    return Complaint(fields.get("Code", ""), message[:300])


def _from_json(text: bytes) -> Complaint:
    answer = json.loads(text)
    error: Any = answer.get("error")
    if not isinstance(error, dict):
        return Complaint()
    errors = error.get("errors")
    first = errors[0] if isinstance(errors, list) and errors and isinstance(errors[0], dict) else {}
    return Complaint(str(first.get("reason") or ""), str(error.get("message") or "")[:300])


def store_error(status: int, headers: Headers, body: bytes, *, renewable: bool) -> StoreError:
    """What the byte engine is told.

    Args:
        status, headers, body: of the answer.
        renewable: whether there may be newer credentials.
    """
    complaint = parse_complaint(body)
    rule = _SPENT if status == 401 else _RULES.get(complaint.code, NO_RULE)
    action = "fail" if rule.action == "refresh" and not renewable else rule.action
    request_id = parse_error_headers(status, headers, body).request_id
    return StoreError(complaint.code or None, complaint.message or None, request_id, rule.kind, action)


def translate(
    error: SourceError, *, bucket: str, key: str, url: str, base: str, anonymous: bool, listing: bool = False
) -> SourceError:
    """The engine's error as one about an object in a bucket.

    Args:
        error: the engine's.
        bucket, key, url: of what was asked for.
        base: the service's url on the wire; its host is shown beside the object's own url.
        anonymous: whether nobody in particular asked.
        listing: whether a prefix was listed and no object read.
    """
    rule = _rule_of(error, listing, anonymous)
    hint = rule.hint or getattr(error, "hint", "")
    return about_object(error, kind=rule.error, hint=hint, url=url, base=base, listing=listing, bucket=bucket, key=key)


def _rule_of(error: SourceError, listing: bool, anonymous: bool) -> _Rule:
    if isinstance(error, GcsError):  # it comes from here
        return NO_RULE
    if listing and isinstance(error, HttpNotFoundError):
        return _NO_BUCKET
    by_code = _SPENT if error.status == 401 else _RULES.get(getattr(error, "code", None) or "")
    rule = by_code or next((rule for kind, rule in _BY_CLASS if isinstance(error, kind)), NO_RULE)
    if anonymous and rule in (_SPENT, _DENIED):
        who = "Whoever is anonymous may not; give credentials of an account that may"
        return _Rule(AccessDeniedError if rule is _DENIED else CredentialsError, who)
    if listing and rule is _DENIED:
        return _Rule(
            AccessDeniedError, "Listing needs storage.objects.list; give the objects one by one if the account may only read"
        )
    return rule
