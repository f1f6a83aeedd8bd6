"""AWS Signature Version 4 as S3 checks it, in the Authorization header and in presigned queries. Pure: no clock, no store.

A request is parsed into a `Claim` (who says to have signed what, when and for where) or None if it is anonymous; `check` then
makes the signature again from the request as it came over the wire. Rules: "Authenticating Requests: Using the Authorization
Header" and "Using Query Parameters" in the Amazon S3 API reference. S3's canonical path is escaped once and never normalised.

Not checked: the signatures of single chunks (STREAMING-AWS4-HMAC-SHA256-PAYLOAD), Signature Version 4A.
"""

from __future__ import annotations

import hashlib
import hmac
from calendar import timegm
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from time import strptime
from urllib.parse import parse_qsl, quote, unquote

from headrace.testing.s3server.errors import Refusal

MAX_SKEW_S = 15 * 60
MAX_EXPIRES_S = 7 * 24 * 3600
UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"

_ALGORITHM = "AWS4-HMAC-SHA256"
_SAFE = "-_.~"  # what is not escaped, beside letters and digits


@dataclass(frozen=True, slots=True)
class Credential:
    """A key that may sign.

    Attributes:
        secret_key: what it signs with.
        token: what requests must carry, if anything.
        expired: whether its time is over.
        spent_tokens: tokens whose time is over.
    """

    secret_key: str
    token: str | None = None
    expired: bool = False
    spent_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request says of its signature."""

    access_key: str
    day: str
    region: str
    signed_headers: tuple[str, ...]
    signature: str
    date: str
    payload: str
    token: str | None
    expires_s: int | None  # of a presigned URL

    @property
    def presigned(self) -> bool:
        """Whether the signature is in the query."""
        return self.expires_s is not None

    def malformed(self, message: str, **fields: str) -> Refusal:
        """S3's error for a claim that cannot be right, which has another name in a query."""
        if self.presigned:
            return Refusal(
                "AuthorizationQueryParametersError", f"Error parsing the X-Amz-Credential parameter; {message}", fields=fields
            )
        return Refusal("AuthorizationHeaderMalformed", f"The authorization header is malformed; {message}", fields=fields)


@lru_cache(maxsize=1024)  # asked for three times a request, and presigned URLs are used again and again
def query_pairs(query: str) -> tuple[tuple[str, str], ...]:
    """Return names and values of a query, unescaped, in their order."""
    return tuple(parse_qsl(query, keep_blank_values=True, errors="surrogateescape"))


def parse(headers: Mapping[str, str], query: str) -> Claim | None:
    """Return what the request says of its signature, None if it is anonymous.

    Args:
        headers: by lower-case name.
        query: as it came over the wire.

    Raises:
        Refusal: signed in two ways or in none that is known, or the claim is malformed.
    """
    params = dict(query_pairs(query))
    authorization = headers.get("authorization")
    in_query = (
        "X-Amz-Algorithm" in params or "X-Amz-Signature" in params or ("Signature" in params and "AWSAccessKeyId" in params)
    )
    if authorization is not None and in_query:
        raise Refusal("InvalidArgument", "Only one auth mechanism allowed")
    if authorization is not None:
        return _parse_header(authorization, headers)
    return _parse_query(params) if in_query else None


def _parse_header(authorization: str, headers: Mapping[str, str]) -> Claim:
    scheme, _, rest = authorization.partition(" ")
    if scheme == "AWS":
        raise Refusal(
            "InvalidRequest", f"The authorization mechanism you have provided is not supported. Please use {_ALGORITHM}."
        )
    if scheme != _ALGORITHM:
        raise Refusal("InvalidArgument", "Unsupported Authorization Type")
    payload = headers.get("x-amz-content-sha256")
    if payload is None:
        raise Refusal("InvalidRequest", "Missing required header for this request: x-amz-content-sha256")
    date = headers.get("x-amz-date")
    if date is None:
        raise Refusal("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header")
    try:
        fields = dict(field.strip().split("=", 1) for field in rest.split(","))
        access_key, day, region = _scope(fields["Credential"])
        signed, signature = fields["SignedHeaders"], fields["Signature"]
    except (KeyError, ValueError) as error:
        raise Refusal("AuthorizationHeaderMalformed") from error
    token = headers.get("x-amz-security-token")
    return Claim(access_key, day, region, tuple(signed.split(";")), signature, date, payload, token, None)


def _parse_query(params: Mapping[str, str]) -> Claim:
    if params.get("X-Amz-Algorithm") != _ALGORITHM:
        raise Refusal(
            "InvalidRequest", f"The authorization mechanism you have provided is not supported. Please use {_ALGORITHM}."
        )
    try:
        access_key, day, region = _scope(params["X-Amz-Credential"])
        signed, signature, date = params["X-Amz-SignedHeaders"], params["X-Amz-Signature"], params["X-Amz-Date"]
        expires_s = int(params["X-Amz-Expires"])
    except (KeyError, ValueError) as error:
        raise Refusal("AuthorizationQueryParametersError") from error
    if not 0 < expires_s <= MAX_EXPIRES_S:
        raise Refusal("AuthorizationQueryParametersError", "X-Amz-Expires must be positive and less than a week (in seconds)")
    payload = params.get("X-Amz-Content-Sha256", UNSIGNED_PAYLOAD)
    token = params.get("X-Amz-Security-Token")
    return Claim(access_key, day, region, tuple(signed.split(";")), signature, date, payload, token, expires_s)


def _scope(credential: str) -> tuple[str, str, str]:
    access_key, day, region, service, terminator = credential.rsplit("/", 4)
    if (service, terminator) != ("s3", "aws4_request"):
        raise ValueError(credential)
    return access_key, day, region


def check(
    claim: Claim,
    *,
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    credentials: Mapping[str, Credential],
    now_s: float,
) -> None:
    """Check that a claim is true, timely and made by a known key.

    Args:
        claim: what `parse` returned.
        method: of the request, as are `path` and `query`, each as it came over the wire.
        path: see `method`.
        query: see `method`.
        headers: by lower-case name.
        credentials: who may sign, by access key.
        now_s: seconds since the epoch.

    Raises:
        Refusal: with the code that S3 gives.
    """
    credential = credentials.get(claim.access_key)
    if credential is None:
        raise Refusal("InvalidAccessKeyId", fields={"AWSAccessKeyId": claim.access_key})
    _check_time(claim, now_s)
    unsigned = sorted(name for name in headers if name.startswith("x-amz-") and name not in claim.signed_headers)
    if unsigned or "host" not in claim.signed_headers:
        message = "There were headers present in the request which were not signed"
        raise Refusal("AccessDenied", message, fields={"HeadersNotSigned": ", ".join(unsigned or ["host"])})
    canonical = canonical_request(claim, method=method, path=path, query=query, headers=headers)
    to_sign = string_to_sign(claim, canonical)
    if not hmac.compare_digest(sign(claim, credential.secret_key, to_sign), claim.signature.encode("utf-8", "replace")):
        shown = {"AWSAccessKeyId": claim.access_key, "StringToSign": to_sign, "SignatureProvided": claim.signature}
        raise Refusal("SignatureDoesNotMatch", fields={**shown, "CanonicalRequest": canonical})
    _check_token(claim, credential)


def _check_time(claim: Claim, now_s: float) -> None:
    try:
        age_s = now_s - timegm(strptime(claim.date, "%Y%m%dT%H%M%SZ"))
    except ValueError as error:
        raise Refusal("AccessDenied", "AWS authentication requires a valid Date or x-amz-date header") from error
    if not claim.date.startswith(claim.day):
        raise claim.malformed(f'Invalid credential date "{claim.day}". This date is not the same as X-Amz-Date: "{claim.date}".')
    if claim.expires_s is None and abs(age_s) > MAX_SKEW_S:
        limit = {"RequestTime": claim.date, "MaxAllowedSkewMilliseconds": str(MAX_SKEW_S * 1000)}
        raise Refusal("RequestTimeTooSkewed", fields=limit)
    if claim.expires_s is not None and age_s < -MAX_SKEW_S:
        raise Refusal("AccessDenied", "Request is not yet valid")
    if claim.expires_s is not None and age_s > claim.expires_s:
        raise Refusal("AccessDenied", "Request has expired", fields={"X-Amz-Expires": str(claim.expires_s)})


def _check_token(claim: Claim, credential: Credential) -> None:
    if credential.expired or claim.token in credential.spent_tokens:
        raise Refusal("ExpiredToken")
    if credential.token is not None and claim.token is None:  # a temporary key alone is no key
        raise Refusal("InvalidAccessKeyId", fields={"AWSAccessKeyId": claim.access_key})
    if claim.token != credential.token:
        raise Refusal("InvalidToken")


def canonical_request(claim: Claim, *, method: str, path: str, query: str, headers: Mapping[str, str]) -> str:
    """Return the text whose hash is signed."""
    pairs = [(_escape(name), _escape(value)) for name, value in query_pairs(query) if name != "X-Amz-Signature"]
    lines = [
        method,
        quote(unquote(path, errors="surrogateescape"), safe="/" + _SAFE, errors="surrogateescape") or "/",
        "&".join(f"{name}={value}" for name, value in sorted(pairs)),
        *(f"{name}:{' '.join(headers.get(name, '').split())}" for name in claim.signed_headers),
        "",
        ";".join(claim.signed_headers),
        claim.payload,
    ]
    return "\n".join(lines)


def string_to_sign(claim: Claim, canonical: str) -> str:
    """Return the text that is signed: algorithm, time, scope and the hash of the canonical request."""
    digest = hashlib.sha256(canonical.encode("latin-1", "replace")).hexdigest()  # header values came in as Latin-1
    return "\n".join([_ALGORITHM, claim.date, f"{claim.day}/{claim.region}/s3/aws4_request", digest])


def sign(claim: Claim, secret_key: str, to_sign: str) -> bytes:
    """Return the signature, hexadecimal."""
    key = _signing_key(secret_key, claim.day, claim.region)
    return hmac.new(key, to_sign.encode("utf-8", "replace"), hashlib.sha256).hexdigest().encode()


@lru_cache(maxsize=64)  # the same for a day, and four of the five HMACs
def _signing_key(secret_key: str, day: str, region: str) -> bytes:
    key = ("AWS4" + secret_key).encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode("utf-8", "replace"), hashlib.sha256).digest()
    return key


def _escape(value: str) -> str:
    return quote(value, safe=_SAFE, errors="surrogateescape")
