"""PURE: what Azure complains about, which error says so, and what to try.

The code stands in a header, and once more in the XML of the body. `parse_complaint` reads both, `store_error` tells the byte
engine what to do about it, and `translate` makes the engine's error one that names account, container and blob.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace.errors import SourceError
from headrace.sources.http import (
    Action,
    Headers,
    HttpError,
    HttpNotFoundError,
    HttpPermissionError,
    Kind,
    StoreError,
    UnknownHostError,
    parse_xml,
)
from headrace.sources.objects import about_object


class AzureBlobError(HttpError):
    """Azure refuses. Errors of reaching it at all, and of bytes that do not come, are those of `headrace.sources.http`.

    Attributes:
        account, container, key: of the blob; for listings the key is the prefix. All errors of an Azure source carry them.
    """

    account: str | None = None
    container: str = ""
    key: str = ""


class AccountNotFoundError(AzureBlobError, UnknownHostError):
    """There is no storage account of this name, or none that this machine can find."""


class ContainerNotFoundError(AzureBlobError, HttpNotFoundError):
    """There is no container of this name."""


class BlobNotFoundError(AzureBlobError, HttpNotFoundError):
    """There is no blob of this name, or none under this prefix."""


class AccessDeniedError(AzureBlobError, HttpPermissionError):
    """Whoever asks is known, or anonymous, and may not."""


class ArchivedBlobError(AzureBlobError, HttpPermissionError):
    """The blob is in the archive tier and has to be rehydrated first."""


class CredentialsError(AzureBlobError, HttpPermissionError):
    """The credentials are missing, or not right."""


class ExpiredCredentialsError(CredentialsError):
    """The credentials were right once, and there are no newer ones."""


class _Rule(NamedTuple):
    error: type[AzureBlobError] | None = None  # None: the engine's own class
    hint: str = ""
    kind: Kind | None = None  # None: what the status says
    renewable: bool = False  # whether newer credentials may help


_DENIED = _Rule(
    AccessDeniedError,
    "Check that the credentials may read the container, by the role Storage Blob Data Reader (Owner and Contributor do not read "
    "blobs) or a SAS token with r, and the account's firewall",
    "denied",
)
_NO_CONTAINER = _Rule(ContainerNotFoundError, "Check the container's name, and the account's", "missing")
_ANONYMOUS = _Rule(AccessDeniedError, "The account allows nobody to read anonymously: give credentials", "denied")
_ARCHIVED = _Rule(
    ArchivedBlobError, "Rehydrate it to an online tier first (az storage blob set-tier --tier Hot), which takes hours", "denied"
)
_BUSY = _Rule(kind="throttled")
_FAILING = _Rule(kind="unavailable")

# Codes of "Common REST API error codes" and "Blob service error codes", where status and the engine's own rule do not say enough.
_RULES: Final[dict[str, _Rule]] = {
    "ContainerNotFound": _NO_CONTAINER,
    "ContainerBeingDeleted": _NO_CONTAINER,
    "ContainerDisabled": _NO_CONTAINER,
    "BlobNotFound": _Rule(BlobNotFoundError, "Check the name, letter by letter, and that the upload has finished", "missing"),
    "ResourceNotFound": _Rule(
        BlobNotFoundError, "Check the name; a container that is not public answers so to those without credentials", "missing"
    ),
    "AuthorizationFailure": _DENIED,
    "AuthorizationPermissionMismatch": _DENIED,
    "AuthorizationProtocolMismatch": _DENIED,
    "AuthorizationResourceTypeMismatch": _DENIED,
    "AuthorizationServiceMismatch": _DENIED,
    "AuthorizationSourceIPMismatch": _DENIED,
    "InsufficientAccountPermissions": _DENIED,
    "AccountIsDisabled": _DENIED,
    "PublicAccessNotPermitted": _ANONYMOUS,
    "NoAuthenticationInformation": _Rule(CredentialsError, "Give credentials", "denied"),
    "KeyBasedAuthenticationNotPermitted": _Rule(
        CredentialsError, "The account takes no keys: use Microsoft Entra ID (az login, a managed or workload identity)", "denied"
    ),
    "AuthenticationFailed": _Rule(
        CredentialsError,
        "Check the key or SAS token, its expiry, that it belongs to this account, and this machine's clock",
        "denied",
        renewable=True,
    ),
    "InvalidAuthenticationInfo": _Rule(
        CredentialsError,
        "The token does not count: check that it is for https://storage.azure.com and for the account's tenant",
        "denied",
        renewable=True,
    ),
    "BlobArchived": _ARCHIVED,
    "BlobBeingRehydrated": _ARCHIVED,
    "BlobUsesCustomerSpecifiedEncryption": _Rule(hint="It was stored with a key of the customer's own, which is not supported"),
    "InvalidResourceName": _Rule(hint="Check the names of container and blob"),
    "ServerBusy": _BUSY,
    "InternalError": _FAILING,
    "OperationTimedOut": _FAILING,
}
_BY_CLASS: Final = (
    (HttpNotFoundError, _RULES["BlobNotFound"]),
    (HttpPermissionError, _DENIED),
)
_NO_ACCOUNT: Final = _Rule(
    AccountNotFoundError, "Check the account's name; one behind a private endpoint is found from inside its network only"
)
_RENEW: Final = "Give a newer one, or use credentials that renew themselves (a managed or workload identity, an account key)"
NO_RULE: Final = _Rule()


@dataclass(frozen=True, slots=True)
class Complaint:
    """An error as the service tells it; empty where it tells nothing."""

    code: str = ""
    message: str = ""
    request_id: str = ""


def parse_complaint(headers: Headers, body: bytes) -> Complaint:
    """Read headers and body of an answer that is no success; a body that is no XML of Azure counts for nothing.

    Of the message the first line: what follows repeats request id and time. AuthenticationErrorDetail is left alone but for the
    dates of a SAS token, since it may quote what was signed.
    """
    text = body.removeprefix(b"\xef\xbb\xbf").lstrip()  # the service begins with a byte order mark
    fields: dict[str, str] = {}
    try:
        root = parse_xml(text) if text.startswith(b"<") else None
    except ValueError:
        root = None
    if root is not None and root.tag == "Error":
        fields = {child.tag: (child.text or "").strip() for child in root}
    message = fields.get("Message", "").partition("\n")[0].strip()
    detail = fields.get("AuthenticationErrorDetail", "").partition("\n")[0]
    if detail.startswith(("Signature not valid in the specified time frame", "Signed expiry time")):
        message = f"{message} {detail}"
    return Complaint(
        code=headers.get("x-ms-error-code") or fields.get("Code", ""),
        message=message[:300],
        request_id=headers.get("x-ms-request-id") or "",
    )


def store_error(complaint: Complaint, *, renewable: bool) -> StoreError:
    """What the byte engine is told.

    Args:
        complaint: the service's.
        renewable: whether there may be newer credentials.
    """
    rule = _RULES.get(complaint.code, NO_RULE)
    kind, action = rule.kind, None
    if rule.renewable and renewable:
        renew: Action = "refresh"
        kind, action = "unauthorized", renew
    return StoreError(complaint.code or None, complaint.message or None, complaint.request_id or None, kind, action)


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What was asked for.

    Attributes:
        account, container, key, url: of the blob, or the prefix.
        base: the service's url on the wire; its host is shown beside the blob's own url.
        listing: whether a prefix was listed and no blob read.
        by_name: whether the host was made of the account's name.
        expired: whether the credentials are, by their own date.
    """

    account: str | None
    container: str
    key: str
    url: str
    base: str
    listing: bool = False
    by_name: bool = False
    expired: bool = False


def translate(error: SourceError, about: About) -> SourceError:
    """The engine's error as one about a blob in a container."""
    rule = _rule_of(error, about)
    hint = rule.hint or getattr(error, "hint", "")
    if about.listing and rule is _DENIED:
        hint = "Listing needs the role Storage Blob Data Reader or a SAS token with l; give the blobs one by one if it has only r"
    return about_object(
        error,
        kind=rule.error,
        hint=hint,
        url=about.url,
        base=about.base,
        listing=about.listing,
        account=about.account,
        container=about.container,
        key=about.key,
    )


def _rule_of(error: SourceError, about: About) -> _Rule:
    if isinstance(error, AzureBlobError):  # it comes from here
        return NO_RULE
    if isinstance(error, UnknownHostError):
        return _NO_ACCOUNT if about.by_name else NO_RULE
    rule = _RULES.get(getattr(error, "code", None) or "")
    rule = rule or next((rule for kind, rule in _BY_CLASS if isinstance(error, kind)), NO_RULE)
    if rule.error in (CredentialsError, AccessDeniedError) and about.expired:
        return rule._replace(error=ExpiredCredentialsError, hint=_RENEW)
    if about.listing and rule.error is BlobNotFoundError:
        return rule._replace(error=ContainerNotFoundError)
    return rule
