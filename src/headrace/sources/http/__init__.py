"""Objects behind http:// and https://, and the engine that moves all network bytes: clouds only name, sign and list.

A range is one GET on a connection that its thread has to itself. The answer is checked before a byte of it is taken, the body is
received into the caller"s memory, and what failed half way goes on at the byte where it stopped. The version found at open is
demanded of every answer. Credentials are asked for anew for every try, and never follow to another host.

From the ground up: `_failures` names what goes wrong, `_answers` judges, `_retry` decides about patience, `_endpoint` says where,
`_connection` talks, `_pool` keeps what can talk again, `_client` makes tries, `_hedge` asks twice, `_source` reads;
`_xml` reads what stores say in XML.
"""

from headrace.sources.http._access import Access, AllowRedirect, Authorize, Request, Traffic
from headrace.sources.http._answers import Version
from headrace.sources.http._endpoint import proxy_for, tls_context
from headrace.sources.http._failures import (
    Action,
    Headers,
    HttpChangedError,
    HttpError,
    HttpNotFoundError,
    HttpPermissionError,
    HttpTimeoutError,
    HttpTruncatedError,
    Kind,
    ProxyError,
    RedirectError,
    RefusedError,
    StoreError,
    ThrottledError,
    TlsError,
    UnavailableError,
    UnknownHostError,
    UnreachableError,
    UnsatisfiableError,
    WrongAnswerError,
    WrongEncodingError,
    WrongRangeError,
    parse_error_headers,
    public_url,
)
from headrace.sources.http._retry import Policy, Timing
from headrace.sources.http._source import INDEX_NBYTES, PREFIX_NBYTES, HttpSource, fetch, fetch_head, open_http
from headrace.sources.http._xml import parse_size, parse_xml

__all__ = [
    "INDEX_NBYTES",
    "PREFIX_NBYTES",
    "Access",
    "Action",
    "AllowRedirect",
    "Authorize",
    "Headers",
    "HttpChangedError",
    "HttpError",
    "HttpNotFoundError",
    "HttpPermissionError",
    "HttpSource",
    "HttpTimeoutError",
    "HttpTruncatedError",
    "Kind",
    "Policy",
    "ProxyError",
    "RedirectError",
    "RefusedError",
    "Request",
    "StoreError",
    "ThrottledError",
    "Timing",
    "TlsError",
    "Traffic",
    "UnavailableError",
    "UnknownHostError",
    "UnreachableError",
    "UnsatisfiableError",
    "Version",
    "WrongAnswerError",
    "WrongEncodingError",
    "WrongRangeError",
    "fetch",
    "fetch_head",
    "open_http",
    "parse_error_headers",
    "parse_size",
    "parse_xml",
    "proxy_for",
    "public_url",
    "tls_context",
]
