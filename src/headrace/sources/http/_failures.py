"""PURE: what can go wrong on a network, what to do about it, which error says so, and what an error may show.

Everything is a `Failure` of one `Kind` first; the table says for each kind whether another try can help, which class of error it
becomes in the end, and what to suggest. No secret leaves this module: urls lose what signs them, the store's messages what had
been sent to it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

from headrace.errors import (
    SourceChangedError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
    SourceTimeoutError,
    TruncatedError,
)


class Headers:
    """Fields of a head, by name in any case. A lookup in `http.client`'s own message walks over all of them."""

    __slots__ = ("_fields",)

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._fields: dict[str, list[str]] = {}
        for name, value in pairs:
            self._fields.setdefault(name.lower(), []).append(value.strip())

    def get(self, name: str) -> str | None:
        """The first field of this name."""
        found = self._fields.get(name.lower())
        return found[0] if found else None

    def get_all(self, name: str) -> list[str]:
        """All fields of this name, in their order."""
        return self._fields.get(name.lower(), [])


# ---- errors


class HttpError(SourceError):
    """A range, or a whole object, could not be had from a server.

    Attributes:
        code: the store's own code, such as 'NoSuchKey'; None where it gave none.
        request_id: what the store's operators find the request by.
        hint: what to try.
    """

    code: str | None = None
    request_id: str | None = None
    hint: str = ""


class UnreachableError(HttpError, ConnectionError):
    """No connection could be made, or it broke again and again."""


class RefusedError(UnreachableError, ConnectionRefusedError):
    """Nothing listens at the address."""


class UnknownHostError(UnreachableError):
    """The name of the host cannot be resolved."""


class TlsError(UnreachableError):
    """The two sides do not agree on encryption, or the certificate cannot be trusted."""


class ProxyError(UnreachableError):
    """The proxy refuses, or cannot reach the server."""


class HttpNotFoundError(HttpError, SourceNotFoundError):
    """There is no such object, container or host (404, 410)."""


class HttpPermissionError(HttpError, SourcePermissionError):
    """The credentials are missing, expired or not sufficient (401, 403)."""


class HttpTimeoutError(HttpError, SourceTimeoutError):
    """No byte came for too long, or the deadline has passed."""


class HttpChangedError(HttpError, SourceChangedError):
    """The object is another one than the one that was opened."""


class HttpTruncatedError(HttpError, TruncatedError):
    """Connections end before the bytes that were promised, each time."""


class ThrottledError(HttpError):
    """The store asks for fewer requests (429, 503), still after all tries."""


class UnavailableError(HttpError):
    """The store fails (500, 502, 504 and the like), still after all tries."""


class WrongAnswerError(HttpError):
    """The answer is none to what was asked."""


class WrongRangeError(WrongAnswerError):
    """Other bytes were sent than those asked for."""


class UnsatisfiableError(WrongRangeError):
    """The server says that the range lies outside of the object (416)."""


class WrongEncodingError(WrongAnswerError):
    """The bytes were sent compressed although they may not be."""


class RedirectError(WrongAnswerError):
    """The server sends us to a place we may not, or cannot, go."""


Action: TypeAlias = Literal["fail", "retry", "throttled", "refresh", "doubt"]
Kind: TypeAlias = Literal[
    "closed", "refused", "dns", "unreachable", "lost", "stalled", "deadline", "truncated", "tls", "certificate", "proxy",
    "denied", "unauthorized", "missing", "changed", "unsatisfiable", "throttled", "unavailable", "status",
    "range", "encoding", "redirect", "protocol",
]  # fmt: skip


class _Rule(NamedTuple):
    error: type[SourceError]
    action: Action
    hint: str


# Actions: 'fail' at once; 'retry' with backoff; 'throttled', with fewer requests at a time as well; 'refresh': once more, with
# new credentials; 'doubt': once more on another connection, since one cache or proxy of many may be broken.
RULES: Final[dict[Kind, _Rule]] = {
    "closed": _Rule(SourceError, "fail", ""),
    "refused": _Rule(RefusedError, "fail", "Check host and port, and that the server runs"),
    "dns": _Rule(UnknownHostError, "fail", "Check the spelling of the host, the region, and the DNS of this machine"),
    "unreachable": _Rule(UnreachableError, "fail", "Check the network, the firewall and the proxy settings"),
    "lost": _Rule(UnreachableError, "retry", "Check the network and the server's log"),
    "stalled": _Rule(HttpTimeoutError, "retry", "Check the network; a longer stall_timeout_s= waits longer"),
    "deadline": _Rule(HttpTimeoutError, "fail", "A longer deadline_s, or none, waits longer"),
    "truncated": _Rule(HttpTruncatedError, "retry", "Check the server's log, and proxies between"),
    "tls": _Rule(TlsError, "fail", "Check that the port speaks TLS, and which versions both sides allow"),
    "certificate": _Rule(
        TlsError,
        "fail",
        "Name the CA that signed it in REQUESTS_CA_BUNDLE or SSL_CERT_FILE, of which the first one that is set counts (for S3 "
        "AWS_CA_BUNDLE before both), and check the host's name",
    ),
    "proxy": _Rule(ProxyError, "fail", "Check the proxy's address and password, or except the host with no_proxy"),
    "denied": _Rule(
        HttpPermissionError, "fail", "Check credentials, their permissions for this object, and this machine's clock"
    ),
    "unauthorized": _Rule(HttpPermissionError, "refresh", "Give credentials, or renew them"),
    "missing": _Rule(HttpNotFoundError, "fail", "Check the url (bucket, key, revision), and that an upload has finished"),
    "changed": _Rule(HttpChangedError, "fail", "Load it again once nothing writes to it"),
    "unsatisfiable": _Rule(UnsatisfiableError, "doubt", "The object may have been replaced; load it again"),
    "throttled": _Rule(ThrottledError, "throttled", "Lower concurrency, or ask for a higher limit"),
    "unavailable": _Rule(UnavailableError, "retry", "Try again later; see the store's status page"),
    "status": _Rule(WrongAnswerError, "fail", "Check the url and the endpoint"),
    "range": _Rule(WrongRangeError, "doubt", "The server, or a proxy before it, does not honour Range; download the file first"),
    "encoding": _Rule(WrongEncodingError, "doubt", "Store the object without Content-Encoding, or switch off compression"),
    "redirect": _Rule(RedirectError, "fail", "Use the url, region or endpoint that it leads to"),
    "protocol": _Rule(WrongAnswerError, "doubt", "Check that the port speaks HTTP/1.1, and proxies between"),
}


@dataclass(frozen=True, slots=True)
class StoreError:
    """What a store says in its own words about a request that failed; adapters make it of status, headers and body.

    Attributes:
        code, message, request_id: shown, and kept in the error.
        kind: what it is, where the status misleads (S3's 400 RequestTimeout is 'stalled', 400 ExpiredToken 'unauthorized').
        action: what to do, where it is not what the kind's rule says.
    """

    code: str | None = None
    message: str | None = None
    request_id: str | None = None
    kind: Kind | None = None
    action: Action | None = None


ParseError: TypeAlias = "Callable[[int, Headers, bytes], StoreError]"

_REQUEST_IDS: Final = ("x-amz-request-id", "x-ms-request-id", "x-guploader-uploadid", "x-request-id", "x-amz-cf-id", "cf-ray")
_CODES: Final = ("x-ms-error-code", "x-error-code")


def parse_error_headers(_status: int, headers: Headers, _body: bytes) -> StoreError:
    """What any store may say in headers; the body is left alone, since only an adapter knows which parts may be shown."""
    return StoreError(code=next(filter(None, map(headers.get, _CODES)), None), request_id=_request_id(headers))


def _request_id(headers: Headers) -> str | None:
    return next(filter(None, map(headers.get, _REQUEST_IDS)), None)


class Failure(Exception):  # noqa: N818 - not an error that anyone outside sees
    """One try went wrong. Never leaves the package: `explain` makes the error of it that callers see."""

    def __init__(
        self, kind: Kind, message: str, *, status: int | None = None, store: StoreError | None = None, wait_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.store = store if store is not None else StoreError()
        self.kind: Kind = self.store.kind or kind
        self.status = errno.EBADF if kind == "closed" else status
        self.wait_s = wait_s  # how long the server asks us to wait; None: it does not say
        self.action: Action = self.store.action or RULES[self.kind].action

    def note_answer(self, status: int, headers: Headers) -> None:
        """Remember of which answer it is, where the try did not end with that: operators find what broke by the request's id."""
        self.status = status if self.status is None else self.status
        if self.store.request_id is None:
            self.store = replace(self.store, request_id=_request_id(headers))


def explain(
    failure: Failure, *, doing: str, url: str, offset: int | None, nbytes: int | None, attempts: int, limits: str = ""
) -> SourceError:
    """The public error of the failure that ended a range.

    Args:
        failure: the last one.
        doing: the verb, such as 'read'.
        url: as it may be shown.
        offset, nbytes: the range that the caller asked for; None for the whole object.
        attempts: tries made.
        limits: the limit that ended it, in words.
    """
    rule, store = RULES[failure.kind], failure.store
    what = f"{nbytes} bytes at {offset} of {url}" if offset is not None else url
    said = " ".join(filter(None, [str(failure), store.code, f"({store.message})" if store.message else None]))
    parts = [f"cannot {doing} {what}: {said}"]
    parts += [f"request id {store.request_id}"] if store.request_id else []
    parts += [f"after {attempts} {'tries' if attempts > 1 else 'try'}{limits}"] if attempts > 1 or limits else []
    message = ", ".join(parts) + (f". {rule.hint}" if rule.hint else "")
    error = rule.error(message, url=url, offset=offset, nbytes=nbytes, status=failure.status, attempts=attempts)
    if isinstance(error, HttpError):
        error.code, error.request_id, error.hint = store.code, store.request_id, rule.hint
    return error


# ---- what may be shown

_PLAIN_QUERY: Final = frozenset({"alt", "generation", "partnumber", "revision", "snapshot", "versionid"})
HIDDEN: Final = "REDACTED"


def public_url(url: str) -> str:
    """The url without userinfo and fragment; of its query only what is known to be harmless keeps its value.

    >>> public_url("https://me:pw@host/key?versionId=7&X-Amz-Signature=abc")
    'https://host/key?versionId=7&X-Amz-Signature=REDACTED'
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return "a url that cannot be read"  # and so nobody knows where its secrets are
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    query = "&".join(_public_pair(name, value) for name, value in pairs)
    if parts.query and not pairs:
        query = HIDDEN
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, query, ""))


def _public_pair(name: str, value: str) -> str:
    """A name without a value may be the secret itself."""
    if name.lower() in _PLAIN_QUERY:
        return f"{quote(name)}={quote(value)}"
    return f"{quote(name)}={HIDDEN}" if value else HIDDEN


def scrub(store: StoreError, secrets: Iterable[str]) -> StoreError:
    """The store's words without anything that was sent to it as a secret: some quote the request back."""
    words = {word for secret in secrets for word in re.split(r"[\s,;&]+", secret) for word in (word, word.partition("=")[2])}
    words = {word for word in words if len(word) >= 8}

    def clean(text: str | None) -> str | None:
        for word in sorted(words, key=len, reverse=True) if text else ():
            text = text.replace(word, HIDDEN) if text else text
        return re.sub(r"\s+", " ", text)[:300] if text else text

    return StoreError(clean(store.code), clean(store.message), clean(store.request_id), store.kind, store.action)


SECRET_HEADERS: Final = frozenset({"authorization", "cookie", "proxy-authorization", "x-amz-security-token", "x-api-key"})


def secrets_of(headers: Mapping[str, str], url: str) -> list[str]:
    """Header values and query values that must not be shown."""
    query = [value or name for name, value in parse_qsl(urlsplit(url).query, keep_blank_values=True)]
    query += [pair.partition("=")[2] or pair for pair in urlsplit(url).query.split("&")]  # as they were sent
    return query + [value for name, value in headers.items() if name.lower() in SECRET_HEADERS or "key" in name.lower()]
