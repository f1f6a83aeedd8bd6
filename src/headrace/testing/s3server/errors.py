"""What S3 says when it says no: status, code and message in one table, and the XML that carries them. Pure.

A `Refusal` is raised wherever a request turns out not to be served as asked, 304 and redirects included, and is made an answer in
one place. Codes and messages are those of "Error responses" in the Amazon S3 API reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

XML_HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'

_ERRORS: dict[str, tuple[int, str]] = {
    "AccessDenied": (403, "Access Denied"),
    "AuthorizationHeaderMalformed": (400, "The authorization header is malformed."),
    "AuthorizationQueryParametersError": (400, "The authorization query parameters are malformed."),
    "BadDigest": (400, "The digest you specified did not match what we received."),
    "EntityTooLarge": (400, "Your proposed upload exceeds the maximum allowed object size."),
    "ExpiredToken": (400, "The provided token has expired."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "InvalidAccessKeyId": (403, "The AWS Access Key Id you provided does not exist in our records."),
    "InvalidArgument": (400, "Invalid Argument"),
    "InvalidRange": (416, "The requested range is not satisfiable"),
    "InvalidRequest": (400, "Invalid Request"),
    "InvalidToken": (400, "The provided token is malformed or otherwise invalid."),
    "MethodNotAllowed": (405, "The specified method is not allowed against this resource."),
    "MissingContentLength": (411, "You must provide the Content-Length HTTP header."),
    "NoSuchBucket": (404, "The specified bucket does not exist"),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchVersion": (404, "The specified version does not exist."),
    "NotImplemented": (501, "A header you provided implies functionality that is not implemented."),
    "NotModified": (304, "Not Modified"),
    "PermanentRedirect": (301, "The bucket you are attempting to access must be addressed using the specified endpoint."),
    "PreconditionFailed": (412, "At least one of the pre-conditions you specified did not hold"),
    "RequestTimeTooSkewed": (403, "The difference between the request time and the current time is too large."),
    "RequestTimeout": (400, "Your socket connection to the server was not read from or written to within the timeout period."),
    "ServiceUnavailable": (503, "Service is unable to handle request."),
    "SignatureDoesNotMatch": (
        403,
        "The request signature we calculated does not match the signature you provided. Check your key and signing method.",
    ),
    "SlowDown": (503, "Please reduce your request rate."),
    "TemporaryRedirect": (307, "Please re-send this request to the specified temporary endpoint."),
    "XAmzContentSHA256Mismatch": (400, "The provided 'x-amz-content-sha256' header does not match what was computed."),
}


class Refusal(Exception):  # noqa: N818 - a 304 and a redirect are no errors
    """A request is answered with an S3 error, or something else without the object.

    Args:
        code: S3's name for it.
        message: what S3 says; absent, the usual text for this code.
        status: HTTP status; absent, the usual one for this code.
        headers: more response headers.
        fields: more elements of the XML body, by name.
    """

    def __init__(
        self,
        code: str,
        message: str | None = None,
        *,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        usual_status, usual_message = _ERRORS.get(code, (400, code))
        self.code = code
        self.status = usual_status if status is None else status
        self.message = usual_message if message is None else message
        self.headers = dict(headers or {})
        self.fields = dict(fields or {})
        super().__init__(f"{self.status} {code}: {self.message}")

    def xml(self, *, request_id: str, host_id: str, resource: str) -> bytes:
        """Render the body."""
        fields = {"Code": self.code, "Message": self.message, "Resource": resource, **self.fields}
        fields |= {"RequestId": request_id, "HostId": host_id}
        inner = "".join(f"<{name}>{text(value)}</{name}>" for name, value in fields.items())
        return f"{XML_HEAD}<Error>{inner}</Error>".encode()


def text(value: str) -> str:
    """Escape for XML; control characters become references, as S3 writes them, although XML 1.0 has no room for most."""
    controls = {chr(code): f"&#{code};" for code in [*range(9), *range(11, 32), 127]}
    return escape(value.encode("utf-8", "replace").decode(), {'"': "&quot;", **controls})
