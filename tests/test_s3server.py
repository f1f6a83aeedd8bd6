"""The S3 server that ships for tests refuses what S3 refuses, gives what S3 gives, and fails in exactly the way it is told."""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import hmac
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, unquote_plus, urlsplit

import pytest

from headrace.testing import s3server
from headrace.testing.s3server import Bucket, Rule, S3Server, checksums, conditions, faults, listing, payloads, signatures
from headrace.testing.s3server.errors import Refusal
from headrace.testing.sources import pattern

KEY, SECRET = "AKTEST", "SKTESTSECRET"
DATA = pattern(300_007)
EMPTY_HASH = hashlib.sha256(b"").hexdigest()
S3 = "{http://s3.amazonaws.com/doc/2006-03-01/}"


# A client of its own, so that server and test do not share a mistake.


@dataclass(frozen=True)
class Reply:
    """A response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def code(self) -> str | None:
        return self.xml.findtext("Code")

    @property
    def xml(self) -> ElementTree.Element:
        return ElementTree.fromstring(self.body)


def signature(
    method: str, path: str, query: str, headers: Mapping[str, str], payload: str, *, when: str, secret: str, scope: str
) -> str:
    names = sorted(headers)
    canonical = "\n".join(
        [method, path, query, *(f"{name}:{headers[name]}" for name in names), "", ";".join(names), payload],
    )
    to_sign = f"AWS4-HMAC-SHA256\n{when}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, to_sign.encode(), "sha256").hex()


def now(ahead_s: float) -> str:
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() + ahead_s))


@dataclass(frozen=True)
class Client:
    """Signs and sends requests, one connection each."""

    server: S3Server
    access_key: str = KEY
    secret: str = SECRET
    token: str | None = None
    region: str = "us-east-1"
    ahead_s: float = 0  # of its clock
    ca: Path | None = None
    host: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    def get(self, path: str, query: str = "", **headers: str) -> Reply:
        return self.send("GET", path, query, headers)

    def send(self, method: str, path: str, query: str = "", headers: Mapping[str, str] | None = None, body: bytes = b"") -> Reply:
        given = {name.replace("_", "-"): value for name, value in (headers or {}).items()}
        return self.exchange(method, path, query, self.signed(method, path, query, given, body), body)

    def signed(self, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes = b"") -> dict[str, str]:
        when = now(self.ahead_s)
        payload = headers.get("x-amz-content-sha256", hashlib.sha256(body).hexdigest())
        scope = f"{when[:8]}/{self.region}/s3/aws4_request"
        signs = {"host": self.authority, "x-amz-date": when, "x-amz-content-sha256": payload}
        signs |= {"x-amz-security-token": self.token} if self.token else {}
        signs |= {name: value for name, value in headers.items() if name.startswith("x-amz-")}
        canonical = quote(unquote(path), safe="/~")
        made = signature(method, canonical, query, signs, payload, when=when, secret=self.secret, scope=scope)
        names = ";".join(sorted(signs))
        authorization = f"AWS4-HMAC-SHA256 Credential={self.access_key}/{scope}, SignedHeaders={names}, Signature={made}"
        return {**headers, **signs, "authorization": authorization}

    def presigned(self, path: str, *, expires_s: int = 60, method: str = "GET") -> str:
        when = now(self.ahead_s)
        scope = f"{when[:8]}/{self.region}/s3/aws4_request"
        fields = {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{self.access_key}/{scope}",
            "X-Amz-Date": when,
            "X-Amz-Expires": str(expires_s),
            **({"X-Amz-Security-Token": self.token} if self.token else {}),
            "X-Amz-SignedHeaders": "host",
        }
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in fields.items())
        host = {"host": self.authority}
        made = signature(method, path, query, host, "UNSIGNED-PAYLOAD", when=when, secret=self.secret, scope=scope)
        return f"{query}&X-Amz-Signature={made}"

    @property
    def authority(self) -> str:
        return self.host or urlsplit(self.server.url).netloc

    def connect(self) -> http.client.HTTPConnection:
        if self.ca is None:
            return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        context = ssl.create_default_context(cafile=self.ca)
        return http.client.HTTPSConnection("127.0.0.1", self.server.port, timeout=10, context=context)

    def exchange(
        self, method: str, path: str, query: str = "", headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Reply:
        connection = self.connect()
        try:
            return exchange(connection, method, f"{path}?{query}" if query else path, headers or {}, body)
        finally:
            connection.close()


def exchange(
    connection: http.client.HTTPConnection, method: str, target: str, headers: Mapping[str, str], body: bytes = b""
) -> Reply:
    connection.request(method, target, body or None, dict(headers))
    response = connection.getresponse()
    return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server with a bucket of each kind."""
    content = {
        "models": {"a.bin": DATA, "empty": b"", "dir/": b"", "dir/b.bin": b"b", "größe #1%20+&.bin": b"odd"},
        "public": {"a.bin": DATA, "dir/c": b"c"},
        "far": {"a.bin": b"far"},
        "payers": {"a.bin": b"paid"},
        "closed": {"a.bin": b"closed"},
        "kept": {"a.bin": b"first"},
    }
    options = {
        "public": Bucket(public=True),
        "far": Bucket(region="eu-west-1"),
        "payers": Bucket(requester_pays=True, public=True),
        "closed": Bucket(listable=False),
        "kept": Bucket(versioned=True, checksum="sha256"),
        "nothing": Bucket(),
    }
    with S3Server(content, buckets=options) as server:
        yield server


@pytest.fixture
def many() -> Iterator[S3Server]:
    """A server with more keys than a page holds."""
    with S3Server({"many": {f"m/{index:05d}.bin": b"" for index in range(2500)} | {"m2/x": b"", "l": b""}}) as server:
        yield server


@pytest.fixture
def client(server: S3Server) -> Client:
    return Client(server)


def refusal(call: Any, *args: Any, **kwargs: Any) -> str:
    """The code of the refusal that a pure function raises, or none."""
    try:
        call(*args, **kwargs)
    except Refusal as raised:
        return raised.code
    return "none"


# Signatures.

AWS = {"AKIAIOSFODNN7EXAMPLE": signatures.Credential("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")}
AWS_NOW_S = 1369353600.0  # 20130524T000000Z
AWS_HEADERS = {"host": "examplebucket.s3.amazonaws.com", "x-amz-date": "20130524T000000Z", "x-amz-content-sha256": EMPTY_HASH}
AWS_CREDENTIAL = "AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"
USUAL = "host;x-amz-content-sha256;x-amz-date"
PUT_HEADERS = {
    "date": "Fri, 24 May 2013 00:00:00 GMT",
    "x-amz-storage-class": "REDUCED_REDUNDANCY",
    "x-amz-content-sha256": "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072",
}
PRESIGNED = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F20130524%2Fus-east-1%2Fs3%2Faws4_request"
    "&X-Amz-Date=20130524T000000Z&X-Amz-Expires=86400&X-Amz-SignedHeaders=host"
    "&X-Amz-Signature=aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
)


@pytest.mark.parametrize(
    ("method", "path", "query", "headers", "signed", "made"),
    [
        pytest.param(
            "GET",
            "/test.txt",
            "",
            {"range": "bytes=0-9"},
            "host;range;x-amz-content-sha256;x-amz-date",
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
            id="get-object",
        ),
        pytest.param(
            "PUT",
            "/test%24file.text",
            "",
            PUT_HEADERS,
            "date;host;x-amz-content-sha256;x-amz-date;x-amz-storage-class",
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
            id="put-object",
        ),
        pytest.param(
            "GET", "/", "lifecycle", {}, USUAL, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543", id="lifecycle"
        ),
        pytest.param(
            "GET",
            "/",
            "prefix=J&max-keys=2",
            {},
            USUAL,
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
            id="list",
        ),
        pytest.param("GET", "/test.txt", PRESIGNED, None, "host", "", id="presigned"),
    ],
)
def test_amazons_examples_are_right_and_wrong_after_any_change(
    method: str, path: str, query: str, headers: dict[str, str] | None, signed: str, made: str
) -> None:
    if headers is None:
        headers = {"host": AWS_HEADERS["host"]}
    else:
        authorization = f"AWS4-HMAC-SHA256 Credential={AWS_CREDENTIAL},SignedHeaders={signed},Signature={made}"
        headers = {**AWS_HEADERS, **headers, "authorization": authorization}

    def code(method: str = method, path: str = path, query: str = query, headers: dict[str, str] = headers) -> str:
        claim = signatures.parse(headers, query)
        assert claim is not None
        return refusal(
            signatures.check, claim, method=method, path=path, query=query, headers=headers, credentials=AWS, now_s=AWS_NOW_S
        )

    assert code() == "none"
    wrong = "SignatureDoesNotMatch"
    assert code(method="DELETE") == wrong
    assert code(path=path + "x") == wrong
    assert code(query=f"{query}&a=b" if query else "a=b") == wrong
    for name in signed.split(";"):
        if name != "x-amz-date":  # which then is not the day of the scope
            assert code(headers={**headers, name: headers[name] + "x"}) == wrong, name
    text = headers.get("authorization", query)
    for position in range(len(text) - 64, len(text)):
        changed = text[:position] + ("0" if text[position] != "0" else "1") + text[position + 1 :]
        found = code(headers={**headers, "authorization": changed}) if "authorization" in headers else code(query=changed)
        assert found == wrong, position


def test_a_signature_with_one_wrong_byte_is_refused(client: Client) -> None:
    right = client.signed("GET", "/models/a.bin", "", {})
    assert client.exchange("GET", "/models/a.bin", "", right).status == 200
    last = right["authorization"][-1]
    wrong = {**right, "authorization": right["authorization"][:-1] + ("0" if last != "0" else "1")}
    reply = client.exchange("GET", "/models/a.bin", "", wrong)
    assert (reply.status, reply.code) == (403, "SignatureDoesNotMatch")
    assert reply.xml.findtext("CanonicalRequest", "").startswith("GET\n/models/a.bin\n")
    query = client.presigned("/models/a.bin")
    assert client.exchange("GET", "/models/a.bin", query).body == DATA
    query = query[:-1] + ("0" if query[-1] != "0" else "1")
    assert client.exchange("GET", "/models/a.bin", query).code == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        pytest.param({"secret": "x"}, 403, "SignatureDoesNotMatch", id="wrong-secret"),
        pytest.param({"access_key": "AKOTHER"}, 403, "InvalidAccessKeyId", id="unknown-key"),
        pytest.param({"region": "eu-west-1"}, 400, "AuthorizationHeaderMalformed", id="wrong-region"),
        pytest.param({"ahead_s": -1200}, 403, "RequestTimeTooSkewed", id="old"),
        pytest.param({"ahead_s": 1200}, 403, "RequestTimeTooSkewed", id="in-future"),
        pytest.param({"token": "unknown"}, 400, "InvalidToken", id="token-where-none-is-due"),
    ],
)
def test_wrong_signers_are_refused(server: S3Server, change: dict[str, Any], status: int, code: str) -> None:
    reply = Client(server, **change).get("/models/a.bin")
    assert (reply.status, reply.code) == (status, code)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        pytest.param({}, 403, "AccessDenied", id="anonymous"),
        pytest.param({"authorization": "AWS AK:sig"}, 400, "InvalidRequest", id="version-2"),
        pytest.param({"authorization": "Bearer x"}, 400, "InvalidArgument", id="bearer"),
        pytest.param({"authorization": "AWS4-HMAC-SHA256 nonsense"}, 400, "InvalidRequest", id="no-content-sha256"),
        pytest.param(
            {"authorization": "AWS4-HMAC-SHA256 Credential=a/b", "x-amz-date": now(0), "x-amz-content-sha256": "x"},
            400,
            "AuthorizationHeaderMalformed",
            id="malformed",
        ),
    ],
)
def test_unsigned_and_malformed_requests_are_refused(client: Client, headers: dict[str, str], status: int, code: str) -> None:
    reply = client.exchange("GET", "/models/a.bin", "", headers)
    assert (reply.status, reply.code) == (status, code)


def test_amazons_headers_must_be_signed(client: Client) -> None:
    headers = {**client.signed("GET", "/models/a.bin", "", {}), "x-amz-checksum-mode": "ENABLED"}
    reply = client.exchange("GET", "/models/a.bin", "", headers)
    assert (reply.status, reply.code, reply.xml.findtext("HeadersNotSigned")) == (403, "AccessDenied", "x-amz-checksum-mode")
    assert client.get("/models/a.bin", x_amz_checksum_mode="ENABLED").status == 200


@pytest.mark.parametrize(
    ("change", "expires_s", "code"),
    [
        pytest.param({}, 60, None, id="right"),
        pytest.param({"ahead_s": -1200}, 3600, None, id="old-but-valid"),
        pytest.param({"ahead_s": -120}, 60, "AccessDenied", id="expired"),
        pytest.param({"ahead_s": 1200}, 60, "AccessDenied", id="not-yet-valid"),
        pytest.param({}, 8 * 86400, "AuthorizationQueryParametersError", id="more-than-a-week"),
        pytest.param({"region": "eu-west-1"}, 60, "AuthorizationQueryParametersError", id="wrong-region"),
        pytest.param({"secret": "x"}, 60, "SignatureDoesNotMatch", id="wrong-secret"),
    ],
)
def test_presigned_queries(server: S3Server, change: dict[str, Any], expires_s: int, code: str | None) -> None:
    client = Client(server, **change)
    reply = client.exchange("GET", "/models/a.bin", client.presigned("/models/a.bin", expires_s=expires_s))
    assert (reply.code if reply.status != 200 else None) == code
    assert reply.status != 200 or reply.body == DATA


def test_a_presigned_get_is_no_presigned_head_and_allows_a_range(client: Client) -> None:
    query = client.presigned("/models/a.bin")
    assert client.exchange("HEAD", "/models/a.bin", query).status == 403
    assert client.exchange("GET", "/models/a.bin", query, {"range": "bytes=4-7"}).body == DATA[4:8]
    both = {**client.signed("GET", "/models/a.bin", query, {})}
    assert client.exchange("GET", "/models/a.bin", query, both).code == "InvalidArgument"


def test_payload_hashes_are_compared(client: Client) -> None:
    assert client.get("/models/a.bin", x_amz_content_sha256="UNSIGNED-PAYLOAD").status == 200
    assert client.get("/models/a.bin", x_amz_content_sha256="0" * 64).code == "XAmzContentSHA256Mismatch"
    assert client.get("/models/a.bin", x_amz_content_sha256="nonsense").code == "InvalidArgument"


def test_session_tokens_are_required_rotated_and_expire() -> None:
    with S3Server({"models": {"a": b"a"}}, require_token="T1") as server:
        assert Client(server, token="T1").get("/models/a").status == 200
        query = Client(server, token="T1").presigned("/models/a")
        assert Client(server).exchange("GET", "/models/a", query).status == 200
        assert Client(server).get("/models/a").code == "InvalidAccessKeyId"
        assert Client(server, token="T2").get("/models/a").code == "InvalidToken"
        server.rotate(access_key=KEY, secret_key=SECRET, token="T2")
        assert Client(server, token="T2").get("/models/a").status == 200
        expired = Client(server, token="T1").get("/models/a")
        assert (expired.status, expired.code) == (400, "ExpiredToken")
        server.rotate(access_key="AKNEXT", secret_key="S3")
        assert Client(server, access_key="AKNEXT", secret="S3").get("/models/a").status == 200
        assert Client(server, token="T2").get("/models/a").code == "ExpiredToken"


def test_buckets_elsewhere_say_where(server: S3Server) -> None:
    here, there = Client(server), Client(server, region="eu-west-1")
    assert there.get("/far/a.bin").body == b"far"
    moved = here.get("/far/a.bin")
    assert (moved.status, moved.code, moved.headers["x-amz-bucket-region"]) == (301, "PermanentRedirect", "eu-west-1")
    assert moved.xml.findtext("Endpoint") == "far.s3.eu-west-1.amazonaws.com"
    wrong = Client(server, region="ap-south-1").get("/far/a.bin")
    assert (wrong.status, wrong.code, wrong.xml.findtext("Region")) == (400, "AuthorizationHeaderMalformed", "eu-west-1")
    assert wrong.headers["x-amz-bucket-region"] == "eu-west-1"
    head = here.send("HEAD", "/far/a.bin")
    assert (head.status, head.body, head.headers["x-amz-bucket-region"]) == (301, b"", "eu-west-1")
    assert there.get("/far", "location=").xml.text == "eu-west-1"
    assert not here.get("/models", "location=").xml.text
    # How clients find a region without credentials.
    for path, status, region in (("/far", 301, "eu-west-1"), ("/models", 403, "us-east-1"), ("/public", 200, "us-east-1")):
        found = here.exchange("HEAD", path)
        assert (found.status, found.headers["x-amz-bucket-region"]) == (status, region)


def test_any_region_will_do_where_none_is_set() -> None:
    with S3Server({"models": {"a": b"a"}}, region=None) as server:
        assert Client(server, region="auto").get("/models/a").status == 200


# Permissions and addresses.


def test_public_buckets_are_open_to_read_and_others_are_not(client: Client) -> None:
    assert client.exchange("GET", "/public/a.bin").body == DATA
    assert client.exchange("GET", "/public", "list-type=2").status == 200
    assert client.exchange("PUT", "/public/new", body=b"x").code == "AccessDenied"
    assert client.exchange("DELETE", "/public/a.bin").code == "AccessDenied"
    for path, query in (("/models/a.bin", ""), ("/models", "list-type=2"), ("/", ""), ("/models/missing", "")):
        assert client.exchange("GET", path, query).code == "AccessDenied", path
    assert client.exchange("GET", "/public/missing").code == "NoSuchKey"


def test_who_does_not_pay_is_refused(client: Client) -> None:
    assert client.get("/payers/a.bin").code == "AccessDenied"
    assert client.exchange("GET", "/payers/a.bin", headers={"x-amz-request-payer": "requester"}).code == "AccessDenied"
    paid = client.get("/payers/a.bin", x_amz_request_payer="requester")
    assert (paid.body, paid.headers["x-amz-request-charged"]) == (b"paid", "requester")
    assert client.get("/payers", "list-type=2", x_amz_request_payer="requester").status == 200


def test_without_permission_to_list_objects_open_but_missing_ones_are_403(client: Client) -> None:
    assert client.get("/closed/a.bin").body == b"closed"
    assert client.get("/closed", "list-type=2").code == "AccessDenied"
    assert client.get("/closed/missing").code == "AccessDenied"
    assert client.send("HEAD", "/closed/missing").status == 403


@pytest.mark.parametrize("domain", ["localhost", "s3.localhost"])
def test_virtual_hosts_are_buckets(server: S3Server, domain: str) -> None:
    host = f"models.{domain}:{server.port}"
    client = Client(server, host=host)
    assert client.get("/a.bin").body == DATA
    assert client.get("/dir/b.bin").body == b"b"
    assert client.get("/", "list-type=2").xml.findtext(f"{S3}Name") == "models"
    assert client.exchange("GET", "/a.bin", client.presigned("/a.bin"), {"host": host}).body == DATA
    assert client.get("/models/a.bin").code == "NoSuchKey"
    assert Client(server, host=f"{domain}:{server.port}").get("/models/a.bin").body == DATA


def test_targets_in_absolute_form_are_taken_so_it_is_a_proxy_to_itself(server: S3Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        client = Client(server)
        headers = client.signed("GET", "/models/a.bin", "", {})
        assert exchange(connection, "GET", f"{server.url}/models/a.bin", headers).body == DATA
        client = Client(server, host="models.localhost")
        headers = client.signed("GET", "/a.bin", "", {})
        assert exchange(connection, "GET", "http://models.localhost/a.bin", headers).body == DATA
    finally:
        connection.close()


# Objects.


@pytest.mark.parametrize(
    ("header", "start", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-9", 5, 10),
        ("bytes=300000-", 300_000, 300_007),
        ("bytes=-7", 300_000, 300_007),
        ("bytes=-999999999", 0, 300_007),
        ("bytes=0-999999999", 0, 300_007),
        ("bytes=300006-300006", 300_006, 300_007),
    ],
)
def test_ranges_are_given(client: Client, header: str, start: int, end: int) -> None:
    reply = client.get("/models/a.bin", Range=header)
    assert (reply.status, reply.body) == (206, DATA[start:end])
    assert reply.headers["content-range"] == f"bytes {start}-{end - 1}/300007"
    assert reply.headers["content-length"] == str(end - start)
    head = client.send("HEAD", "/models/a.bin", "", {"Range": header})
    assert (head.status, head.body, head.headers["content-range"]) == (206, b"", reply.headers["content-range"])


@pytest.mark.parametrize("header", ["bytes=0-1,4-5", "bytes=9-5", "bytes=x-y", "bytes=-", "items=0-1", f"bytes=0-{'9' * 5000}"])
def test_ranges_that_are_none_are_ignored(client: Client, header: str) -> None:
    reply = client.get("/models/a.bin", Range=header)
    assert (reply.status, reply.body) == (200, DATA)
    assert "content-range" not in reply.headers


@pytest.mark.parametrize(
    ("path", "header"), [("/models/a.bin", "bytes=300007-"), ("/models/a.bin", "bytes=-0"), ("/models/empty", "bytes=0-")]
)
def test_ranges_past_the_end_are_416(client: Client, path: str, header: str) -> None:
    reply = client.get(path, Range=header)
    nbytes = "0" if path.endswith("empty") else "300007"
    assert (reply.status, reply.code, reply.xml.findtext("ActualObjectSize")) == (416, "InvalidRange", nbytes)
    assert reply.headers["content-range"] == f"bytes */{nbytes}"


def test_objects_say_what_they_are(client: Client) -> None:
    reply = client.get("/models/a.bin")
    assert reply.headers["etag"] == f'"{hashlib.md5(DATA).hexdigest()}"'
    assert reply.headers["accept-ranges"] == "bytes"
    assert reply.headers["last-modified"].endswith(" GMT")
    assert len(reply.headers["x-amz-request-id"]) == 16
    assert reply.headers["x-amz-id-2"]
    assert "x-amz-version-id" not in reply.headers
    head = client.send("HEAD", "/models/a.bin")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", "300007")
    assert client.get("/models/empty").body == b""


@pytest.mark.parametrize("key", ["größe #1%20+&.bin", "dir/", "dir/b.bin"])
def test_keys_of_all_kinds_are_found(client: Client, key: str) -> None:
    assert client.get(f"/models/{quote(key, safe='/')}").status == 200


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/models/missing", "NoSuchKey"),
        ("/models/dir", "NoSuchKey"),
        ("/missing/a.bin", "NoSuchBucket"),
        ("/models/a.bin/", "NoSuchKey"),
        ("/models/..%2Fpublic%2Fa.bin", "NoSuchKey"),
        ("/models/gr%C3%B6%C3%9Fe", "NoSuchKey"),
    ],
)
def test_what_is_missing_is_404(client: Client, path: str, code: str) -> None:
    reply = client.get(path)
    assert (reply.status, reply.code) == (404, code)
    assert reply.xml.findtext("RequestId") == reply.headers["x-amz-request-id"]
    assert reply.xml.findtext("HostId") == reply.headers["x-amz-id-2"]
    assert reply.xml.findtext("Message")
    assert client.send("HEAD", path).status == 404


@pytest.mark.parametrize("escaped", ["%00", "%01", "%FF", "%0D%0A"])
def test_odd_bytes_in_keys_do_no_harm(client: Client, escaped: str) -> None:
    query = client.presigned(f"/models/{escaped}")
    assert client.exchange("GET", f"/models/{escaped}", query).status == 404
    assert client.exchange("GET", f"/{escaped}/x").status == 404


def test_conditions_hold_or_are_412_and_304(client: Client) -> None:
    etag = client.send("HEAD", "/models/a.bin").headers["etag"]
    cases = [
        ({"If-Match": etag}, 200),
        ({"If-Match": etag.strip('"')}, 200),
        ({"If-Match": "*"}, 200),
        ({"If-Match": f'"other", {etag}'}, 200),
        ({"If-Match": '"other"'}, 412),
        ({"If-Match": '"other"', "Range": "bytes=0-1"}, 412),
        ({"If-None-Match": etag}, 304),
        ({"If-None-Match": '"other"'}, 200),
        ({"If-Modified-Since": "Sat, 01 Jan 2000 00:00:00 GMT"}, 200),
        ({"If-Modified-Since": "Fri, 01 Jan 2100 00:00:00 GMT"}, 304),
        ({"If-Unmodified-Since": "Sat, 01 Jan 2000 00:00:00 GMT"}, 412),
        ({"If-Unmodified-Since": "Sat, 01 Jan 2000 00:00:00 GMT", "If-Match": etag}, 200),
        ({"If-Unmodified-Since": "no date"}, 200),
        ({"If-Range": etag, "Range": "bytes=0-1"}, 206),
        ({"If-Range": '"other"', "Range": "bytes=0-1"}, 200),
    ]
    for headers, status in cases:
        reply = client.send("GET", "/models/a.bin", "", headers)
        assert reply.status == status, headers
        assert status != 304 or reply.body == b""
        assert status != 412 or reply.code == "PreconditionFailed"


def test_versions_are_kept(client: Client) -> None:
    first = client.get("/kept/a.bin").headers["x-amz-version-id"]
    put = client.send("PUT", "/kept/a.bin", body=b"second")
    second = put.headers["x-amz-version-id"]
    assert first != second
    assert client.get("/kept/a.bin").body == b"second"
    assert client.get("/kept/a.bin", f"versionId={first}").body == b"first"
    assert client.get("/kept/a.bin", f"versionId={second}", Range="bytes=1-2").body == b"ec"
    assert client.get("/kept/a.bin", "versionId=unknown").code == "NoSuchVersion"
    assert client.send("DELETE", "/kept/a.bin").status == 204
    gone = client.get("/kept/a.bin")
    assert (gone.status, gone.headers["x-amz-delete-marker"]) == (404, "true")
    assert client.get("/kept/a.bin", f"versionId={first}").body == b"first"
    assert client.get("/models/a.bin", "versionId=null").status == 200
    assert client.get("/models/a.bin", f"versionId={first}").code == "NoSuchVersion"


def test_checksums_are_given_for_whole_objects_when_asked_for(client: Client) -> None:
    expected = checksums.checksum("crc32", [DATA])
    for method in ("GET", "HEAD"):
        reply = client.send(method, "/models/a.bin", "", {"x-amz-checksum-mode": "ENABLED"})
        assert (reply.headers["x-amz-checksum-crc32"], reply.headers["x-amz-checksum-type"]) == (expected, "FULL_OBJECT")
    assert "x-amz-checksum-crc32" not in client.get("/models/a.bin").headers
    assert "x-amz-checksum-crc32" not in client.get("/models/a.bin", x_amz_checksum_mode="ENABLED", Range="bytes=0-1").headers
    client.send("PUT", "/kept/sum", body=b"x")
    reply = client.get("/kept/sum", x_amz_checksum_mode="ENABLED")
    assert reply.headers["x-amz-checksum-sha256"] == base64.b64encode(hashlib.sha256(b"x").digest()).decode()


@pytest.mark.parametrize(
    ("algorithm", "value"), [("crc32", 0xCBF43926), ("crc32c", 0xE3069283), ("crc64nvme", 0xAE8B14860A799888)]
)
def test_checksums_are_those_of_the_catalogue(algorithm: str, value: int) -> None:
    expected = value.to_bytes(8 if algorithm == "crc64nvme" else 4, "big")
    assert base64.b64decode(checksums.checksum(algorithm, [b"1234", b"56789"])) == expected
    with pytest.raises(ValueError, match="crc64nvme"):
        checksums.checksum("md4", [])


def test_objects_are_written_checked_and_deleted(client: Client) -> None:
    md5 = base64.b64encode(hashlib.md5(b"new").digest()).decode()
    crc = checksums.checksum("crc64nvme", [b"new"])
    put = client.send("PUT", "/models/new", "", {"content-md5": md5, "x-amz-checksum-crc64nvme": crc}, b"new")
    assert (put.status, put.headers["etag"]) == (200, f'"{hashlib.md5(b"new").hexdigest()}"')
    assert put.headers["x-amz-checksum-crc64nvme"] == crc
    assert client.get("/models/new").body == b"new"
    wrong = {"content-md5": md5}
    assert client.send("PUT", "/models/new", "", wrong, b"other").code == "BadDigest"
    assert client.send("PUT", "/models/new", "", {"x-amz-checksum-crc32": "AAAAAA=="}, b"other").code == "BadDigest"
    assert (
        client.send("PUT", "/models/new", "", {"x-amz-content-sha256": EMPTY_HASH}, b"other").code == "XAmzContentSHA256Mismatch"
    )
    assert client.get("/models/new").body == b"new"
    assert client.send("DELETE", "/models/new").status == 204
    assert client.get("/models/new").code == "NoSuchKey"
    assert client.send("DELETE", "/models/never").status == 204
    assert client.send("PUT", "/missing/new", body=b"x").code == "NoSuchBucket"
    assert client.send("POST", "/models/new", body=b"x").code == "MethodNotAllowed"


def test_bodies_in_chunks_and_after_a_question_are_read(client: Client) -> None:
    body = (
        b"3;chunk-signature=x\r\nabc\r\n2\r\nde\r\n0\r\nx-amz-checksum-crc32:" + checksums.checksum("crc32", [b"abcde"]).encode()
    )
    kind = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
    headers = {"x-amz-content-sha256": kind, "x-amz-decoded-content-length": "5", "Expect": "100-continue"}
    assert client.send("PUT", "/models/chunks", "", headers, body + b"\r\n\r\n").status == 200
    assert client.get("/models/chunks").body == b"abcde"
    signed = client.signed("PUT", "/models/chunks", "", {"x-amz-content-sha256": kind})
    connection = client.connect()
    connection.request("PUT", "/models/chunks", iter([body[:30], body[30:], b"\r\n\r\n"]), signed, encode_chunked=True)
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b"")
    connection.close()
    assert payloads.decode(headers, b"5\r\nabcde\r\n0\r\n\r\n") == (b"abcde", {})
    for broken in (b"5\r\nabcd", b"x\r\n", b"", b"4\r\nabcd\r\n0\r\n\r\n"):
        assert refusal(payloads.decode, headers, broken) == "InvalidRequest"


# Folders on disk.


def test_a_folder_is_served_and_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "models" / "deep").mkdir(parents=True)
    (tmp_path / "models" / "a.bin").write_bytes(DATA)
    (tmp_path / "models" / "deep" / "b.bin").symlink_to(tmp_path / "models" / "a.bin")
    (tmp_path / "models" / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "models" / "fifo")
    (tmp_path / "beside").write_bytes(b"secret")
    with S3Server(tmp_path) as server:
        client = Client(server)
        assert client.get("/models/a.bin").body == DATA
        assert client.get("/models/deep/b.bin", Range="bytes=100000-").body == DATA[100_000:]
        etag = client.send("HEAD", "/models/a.bin").headers["etag"]
        assert client.get("/models/a.bin", If_Match=etag).status == 200
        for path in (
            "/models/fifo",
            "/models/dangling",
            "/models/deep",
            "/models/../beside",
            "/models/%2e%2e/beside",
            "/models//a.bin",
        ):
            assert client.get(path).status == 404, path
        assert client.get("/./a.bin").code == "NoSuchBucket"
        assert listed(client.get("/models", "list-type=2")) == ["a.bin", "deep/b.bin"]
        assert client.send("PUT", "/models/new", body=b"new").status == 200
        assert client.send("PUT", "/models/a.bin", body=b"other").status == 200
        assert client.send("DELETE", "/models/deep/b.bin").status == 204
        assert client.get("/models/a.bin", If_Match=etag).status == 412
        assert listed(client.get("/models", "list-type=2")) == ["a.bin", "new"]
        (tmp_path / "models" / "c.bin").write_bytes(b"c")
        before = client.get("/models/c.bin").headers["etag"]
        (tmp_path / "models" / "c.bin").write_bytes(b"cc")
        assert client.get("/models/c.bin", If_Match=before).status == 412
    assert (tmp_path / "models" / "a.bin").read_bytes() == DATA
    assert not (tmp_path / "models" / "new").exists()


def test_files_are_served_under_other_names_and_in_versions(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_bytes(b"on disk")
    with S3Server({"models": {"x/y": tmp_path / "kept" / "a", "gone": tmp_path / "gone"}}) as server:
        assert Client(server).get("/models/x/y").body == b"on disk"
        assert Client(server).get("/models/gone").code == "NoSuchKey"
    with S3Server(tmp_path, buckets={"kept": Bucket(versioned=True)}) as server:
        first = Client(server).get("/kept/a").headers["x-amz-version-id"]
        server.put("kept", "a", b"put")
        assert Client(server).get("/kept/a").body == b"put"
        assert Client(server).get("/kept/a", f"versionId={first}").body == b"on disk"


# Listings.


def listed(reply: Reply) -> list[str]:
    assert reply.status == 200
    return [key.text or "" for key in reply.xml.iter(f"{S3}Key")]


def prefixes(reply: Reply) -> list[str]:
    return [prefix.findtext(f"{S3}Prefix") or "" for prefix in reply.xml.iter(f"{S3}CommonPrefixes")]


def test_2500_keys_come_in_three_pages(many: S3Server) -> None:
    client = Client(many)
    keys: list[str] = []
    sizes, token = [], ""
    while True:
        reply = client.get("/many", f"{token}list-type=2&prefix=m%2F")
        sizes.append(int(reply.xml.findtext(f"{S3}KeyCount") or 0))
        keys += listed(reply)
        token = reply.xml.findtext(f"{S3}NextContinuationToken") or ""
        assert reply.xml.findtext(f"{S3}IsTruncated") == ("true" if token else "false")
        if not token:
            break
        token = f"continuation-token={quote(token, safe='')}&"
    assert sizes == [1000, 1000, 500]
    assert keys == [f"m/{index:05d}.bin" for index in range(2500)]


def test_listings_have_size_etag_and_markers(client: Client) -> None:
    reply = client.get("/models", "list-type=2&prefix=dir")
    assert listed(reply) == ["dir/", "dir/b.bin"]
    assert [size.text for size in reply.xml.iter(f"{S3}Size")] == ["0", "1"]
    assert reply.xml.findtext(f"{S3}Contents/{S3}ETag") == client.send("HEAD", "/models/dir/").headers["etag"]
    assert reply.xml.findtext(f"{S3}MaxKeys") == "1000"
    assert client.get("/nothing", "list-type=2").xml.findtext(f"{S3}KeyCount") == "0"
    assert client.get("/missing", "list-type=2").code == "NoSuchBucket"
    assert client.get("/models").code == "NotImplemented"
    assert client.get("/models", "list-type=2&max-keys=x").code == "InvalidArgument"
    assert client.get("/models", "continuation-token=x&list-type=2").code == "InvalidArgument"
    names = [name.text for name in client.get("/").xml.iter(f"{S3}Name")]
    assert names == ["closed", "far", "kept", "models", "nothing", "payers", "public"]


@pytest.mark.parametrize("name", ["<a>&\"'.bin", "a b+c%.bin", "größe", "tab\tline\nreturn\r", "]]>"])
def test_names_survive_xml_and_url_encoding(client: Client, name: str) -> None:
    client.server.put("nothing", name, b"")
    try:
        assert listed(client.get("/nothing", "list-type=2")) == [name]
        encoded = client.get("/nothing", "encoding-type=url&list-type=2")
        assert [unquote_plus(key) for key in listed(encoded)] == [name]
        assert encoded.xml.findtext(f"{S3}EncodingType") == "url"
    finally:
        client.server.delete("nothing", name)


def test_url_encoding_carries_what_xml_cannot() -> None:
    query = listing.ListQuery(url_encoded=True)
    page = listing.Page(("a\x01 b/c",), (), None)

    @dataclass(frozen=True)
    class Listed:
        nbytes: int = 1
        etag: str = '"e"'
        modified_s: float = 0.0

    tree = ElementTree.fromstring(listing.render("b", query, page, lambda _: Listed()))
    assert tree.findtext(f"{S3}Contents/{S3}Key") == "a%01+b/c"
    assert b"<Key>a&#1; b/c</Key>" in listing.render("b", listing.ListQuery(), page, lambda _: Listed())


KEYS = ["a", "b/", "b/1", "b/2", "b/c/1", "b/c/2", "b0", "d/1", "é"]


@pytest.mark.parametrize(
    ("query", "keys", "common"),
    [
        pytest.param({}, KEYS, [], id="all"),
        pytest.param({"prefix": "b"}, ["b/", "b/1", "b/2", "b/c/1", "b/c/2", "b0"], [], id="prefix-is-no-folder"),
        pytest.param({"delimiter": "/"}, ["a", "b0", "é"], ["b/", "d/"], id="delimiter"),
        pytest.param({"prefix": "b/", "delimiter": "/"}, ["b/", "b/1", "b/2"], ["b/c/"], id="folder"),
        pytest.param({"prefix": "b/c", "delimiter": "/"}, [], ["b/c/"], id="delimiter-behind-prefix"),
        pytest.param({"start-after": "b/2"}, ["b/c/1", "b/c/2", "b0", "d/1", "é"], [], id="start-after"),
        pytest.param({"prefix": "x"}, [], [], id="nothing"),
        pytest.param({"max-keys": "0"}, [], [], id="none-asked-for"),
        pytest.param({"delimiter": "c"}, ["a", "b/", "b/1", "b/2", "b0", "d/1", "é"], ["b/c"], id="other-delimiter"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_pages_together_are_the_listing(query: dict[str, str], keys: list[str], common: list[str], size: int) -> None:
    found_keys: list[str] = []
    found_prefixes: list[str] = []
    params = dict(query)
    while True:
        page = listing.select(reversed(KEYS), listing.parse(params), page=size)
        assert len(page.keys) + len(page.prefixes) <= size
        found_keys += page.keys
        found_prefixes += page.prefixes
        if page.next_token is None:
            break
        params = {**query, "continuation-token": page.next_token}
    assert (found_keys, found_prefixes) == (keys, common)


def test_the_server_may_give_fewer_than_asked() -> None:
    with S3Server({"models": {str(index): b"" for index in range(5)}}, page=2) as server:
        reply = Client(server).get("/models", "list-type=2&max-keys=4")
        assert listed(reply) == ["0", "1"]
        assert reply.xml.findtext(f"{S3}IsTruncated") == "true"


# Faults.


@pytest.fixture
def faulty() -> Iterator[S3Server]:
    with S3Server({"models": {"a.bin": DATA, "b.json": b"{}"}}, buckets={"models": Bucket(public=True)}) as server:
        yield server


def fetch(server: S3Server, header: str | None = "bytes=1000-1999", key: str = "a.bin") -> Reply:
    return Client(server).exchange("GET", f"/models/{key}", headers={"range": header} if header else {})


@pytest.mark.parametrize(
    ("action", "status", "start", "end", "body"),
    [
        pytest.param(faults.IgnoreRange(), 200, None, None, DATA, id="ignore_range"),
        pytest.param(faults.WrongRange(by=16), 206, 1016, 2016, DATA[1016:2016], id="wrong_range"),
        pytest.param(faults.WrongRange(by=-9999), 206, 0, 1000, DATA[:1000], id="wrong_range-to-begin"),
        pytest.param(faults.LyingRange(by=16), 206, 1000, 2000, DATA[1016:2016], id="lying_range"),
        pytest.param(faults.Fewer(10), 206, 1000, 1990, DATA[1000:1990], id="fewer"),
        pytest.param(faults.Fewer(5000), 206, 1000, 1001, DATA[1000:1001], id="fewer-but-one"),
        pytest.param(faults.Extra(10), 206, 1000, 2000, DATA[1000:2010], id="extra"),
        pytest.param(
            faults.Flip(at=1002), 206, 1000, 2000, DATA[1000:1002] + bytes([DATA[1002] ^ 1]) + DATA[1003:2000], id="flip"
        ),
        pytest.param(faults.Replaced(), 206, 1000, 2000, bytes(byte ^ 0x55 for byte in DATA[1000:2000]), id="replaced"),
        pytest.param(faults.SlowStart(0.001), 206, 1000, 2000, DATA[1000:2000], id="slow_start"),
        pytest.param(faults.Trickle(20_000.0), 206, 1000, 2000, DATA[1000:2000], id="trickle"),
    ],
)
def test_wrong_answers_are_wrong_as_told(
    faulty: S3Server, action: faults.Action, status: int, start: int | None, end: int | None, body: bytes
) -> None:
    faulty.fail(Rule(action, times=1))
    reply = fetch(faulty)
    said = None if start is None or end is None else f"bytes {start}-{end - 1}/300007"
    assert (reply.status, reply.headers.get("content-range")) == (status, said)
    assert reply.body == body
    assert reply.headers["content-length"] == str(len(body))
    assert faulty.requests[-1].action == faults.name_of(action)
    if not isinstance(action, faults.Replaced):
        assert fetch(faulty).body == DATA[1000:2000]
        assert faulty.requests[-1].action is None


def test_extra_bytes_behind_the_end_are_zeros(faulty: S3Server) -> None:
    faulty.fail(Rule(faults.Extra(4)))
    assert fetch(faulty, "bytes=-2").body == DATA[-2:] + bytes(4)


@pytest.mark.parametrize("header", [None, "bytes=5-9"])
def test_gzip_gives_the_whole_object_compressed(faulty: S3Server, header: str | None) -> None:
    faulty.fail(Rule(faults.Gzip()))
    reply = fetch(faulty, header)
    assert (reply.status, reply.headers["content-encoding"]) == (200, "gzip")
    assert gzip.decompress(reply.body) == DATA


def test_a_replaced_object_stays_replaced_and_fails_conditions(faulty: S3Server) -> None:
    etag = fetch(faulty).headers["etag"]
    faulty.fail(Rule(faults.Replaced(), min_start=1000))
    assert fetch(faulty, "bytes=0-9").body == DATA[:10]
    first = Client(faulty).exchange("GET", "/models/a.bin", headers={"range": "bytes=1000-", "if-match": etag})
    assert (first.status, first.code) == (412, "PreconditionFailed")
    again = fetch(faulty, "bytes=1000-")
    assert again.body == bytes(byte ^ 0x55 for byte in DATA[1000:])
    assert again.headers["etag"] != etag
    assert fetch(faulty, None).body == bytes(byte ^ 0x55 for byte in DATA)


@pytest.mark.parametrize(
    ("status", "code", "headers"),
    [
        (503, "SlowDown", {}),
        (429, "TooManyRequests", {"Retry-After": "1"}),
        (400, "RequestTimeout", {"Connection": "close"}),
        (400, "ExpiredToken", {}),
        (500, "InternalError", {}),
    ],
)
def test_errors_on_order(faulty: S3Server, status: int, code: str, headers: dict[str, str]) -> None:
    faulty.fail(Rule(faults.Status(status, code, headers), times=2))
    for _ in range(2):
        reply = fetch(faulty)
        assert (reply.status, reply.code) == (status, code)
        assert headers.items() <= {name.title(): value for name, value in reply.headers.items()}.items()
    assert fetch(faulty).status == 206
    assert [(request.status, request.error) for request in faulty.requests] == [(status, code)] * 2 + [(206, None)]


def test_redirects_on_order(faulty: S3Server) -> None:
    faulty.fail(Rule(faults.Redirect("http://other.example/x", code=302)))
    reply = fetch(faulty)
    assert (reply.status, reply.headers["location"]) == (302, "http://other.example/x")


def receive(server: S3Server, path: str = "/models/a.bin") -> tuple[bytes, bytes, type[BaseException] | None]:
    """Head and body of an answer until the server closes, and the error that ended it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        data, error = b"", None
        try:
            while chunk := sock.recv(65536):
                data += chunk
        except OSError as raised:
            error = type(raised)
    head, _, body = data.partition(b"\r\n\r\n")
    return head, body, error


@pytest.mark.parametrize(
    ("action", "nbytes"),
    [
        pytest.param(faults.Short(after=70_000), 70_000, id="short"),
        pytest.param(faults.Short(), len(DATA) // 2, id="short-by-half"),
        pytest.param(faults.Short(after=0), 0, id="short-nothing"),
        pytest.param(faults.Stall(after=70_000, wait_s=0.01), 70_000, id="stall"),
    ],
)
def test_bodies_that_end_early_promise_all_of_it(faulty: S3Server, action: faults.Action, nbytes: int) -> None:
    faulty.fail(Rule(action))
    head, body, error = receive(faulty)
    assert b"\r\nContent-Length: 300007" in head
    assert (body, error) == (DATA[:nbytes], None)
    assert faulty.requests[-1].sent == nbytes


@pytest.mark.parametrize("by", [7, -7])
def test_a_length_that_lies_is_told_and_the_body_is_as_it_was(faulty: S3Server, by: int) -> None:
    faulty.fail(Rule(faults.LyingLength(by)))
    head, body, error = receive(faulty)
    assert f"\r\nContent-Length: {len(DATA) + by}\r\n".encode() in head
    assert b"\r\nConnection: close" in head
    assert (body, error) == (DATA, None)


def test_reset_ends_with_a_reset(faulty: S3Server) -> None:
    faulty.fail(Rule(faults.Reset(after=1000)))
    head, body, error = receive(faulty)
    assert error is ConnectionResetError
    assert not head or (DATA.startswith(body) and len(body) <= 1000)


def test_hangup_says_nothing(faulty: S3Server) -> None:
    faulty.fail(Rule(faults.Hangup(), times=1))
    assert receive(faulty) == (b"", b"", None)
    assert (faulty.requests[-1].status, faulty.requests[-1].action) == (0, "hangup")


@pytest.mark.parametrize("action", [faults.Stall(after=10), faults.SlowStart(60), faults.Trickle(1.0)])
def test_a_client_that_leaves_ends_a_wait(faulty: S3Server, action: faults.Action) -> None:
    faulty.fail(Rule(action))
    with socket.create_connection(("127.0.0.1", faulty.port)) as sock:
        sock.sendall(b"GET /models/a.bin HTTP/1.1\r\nHost: x\r\n\r\n")
        assert faulty.wait_until(lambda: faulty.inflight == 1)
    assert faulty.wait_until(lambda: faulty.inflight == 0)
    assert faulty.requests[-1].left_early


@pytest.mark.parametrize("action", [faults.Stall(), faults.SlowStart(60), faults.Trickle(1.0), None])
def test_stop_ends_what_is_under_way(action: faults.Action | None) -> None:
    with S3Server({"models": {"a.bin": DATA}}, buckets={"models": Bucket(public=True)}, latency_s=0 if action else 60) as server:
        server.fail(*([Rule(action)] if action else []))
        with socket.create_connection(("127.0.0.1", server.port)) as sock, socket.create_connection(("127.0.0.1", server.port)):
            sock.sendall(b"GET /models/a.bin HTTP/1.1\r\nHost: x\r\n\r\n")
            assert server.wait_until(lambda: server.inflight == 1)
            began = time.monotonic()
            server.stop()
            assert time.monotonic() - began < 5
        server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_rules_choose_by_method_key_and_start(faulty: S3Server) -> None:
    slow = faults.Status()
    faulty.fail(
        Rule(slow, method="LIST", key="dir*", times=1),
        Rule(slow, method="HEAD"),
        Rule(slow, key="*.bin", min_start=5),
        Rule(slow, "PUT"),
    )
    client = Client(faulty)
    statuses = [
        client.get("/models", "list-type=2&prefix=a").status,
        client.get("/models", "list-type=2&prefix=dir").status,
        client.get("/models", "list-type=2&prefix=dir").status,
        client.send("HEAD", "/models/b.json").status,
        fetch(faulty, "bytes=4-").status,
        fetch(faulty, "bytes=5-").status,
        fetch(faulty, "bytes=-1").status,
        fetch(faulty, "bytes=1-", key="b.json").status,
        client.send("PUT", "/models/new", body=b"x").status,
        fetch(faulty, None, key="new").status,
    ]
    assert statuses == [200, 503, 200, 503, 206, 503, 503, 206, 503, 404]


@pytest.mark.parametrize(
    ("rule", "hits"),
    [
        pytest.param(Rule(faults.Hangup()), [1, 2, 3, 4, 5, 6], id="always"),
        pytest.param(Rule(faults.Hangup(), times=2), [1, 2], id="times"),
        pytest.param(Rule(faults.Hangup(), skip=2), [3, 4, 5, 6], id="skip"),
        pytest.param(Rule(faults.Hangup(), every=3), [3, 6], id="every"),
        pytest.param(Rule(faults.Hangup(), skip=1, every=2, times=2), [3, 5], id="all-three"),
        pytest.param(Rule(faults.Hangup(), method="*", times=0), [], id="never"),
    ],
)
def test_rules_count(rule: Rule, hits: list[int]) -> None:
    book = faults.RuleBook([rule])
    assert [number for number in range(1, 7) if book.match("GET", "a", 0)] == hits
    assert book.match("HEAD", "a", 0) is None or rule.method == "*"


def test_a_rule_that_is_used_up_lets_the_next_one_match() -> None:
    book = faults.RuleBook([Rule(faults.Hangup(), times=1), Rule(faults.Gzip(), times=1)])
    assert [book.match("GET", "a", 0) for _ in range(3)] == [faults.Hangup(), faults.Gzip(), None]


def test_rules_are_read_from_json() -> None:
    text = """[
        {"do": "status", "code": 429, "error": "SlowDown", "headers": {"Retry-After": "1"}, "key": "*.bin", "times": 3},
        {"do": "ignore_range"}, {"do": "wrong_range", "by": 4}, {"do": "lying_range", "by": 4, "method": "HEAD"},
        {"do": "fewer", "bytes": 5}, {"do": "extra", "bytes": 5, "skip": 1, "every": 2}, {"do": "short", "after": 9},
        {"do": "reset"}, {"do": "stall", "after": 1, "seconds": 2}, {"do": "trickle", "rate": 1000, "min_start": 7},
        {"do": "slow_start", "seconds": 1}, {"do": "hangup"}, {"do": "replaced"}, {"do": "flip", "at": 3}, {"do": "gzip"},
        {"do": "redirect", "to": "http://x", "code": 301}, {"do": "lying_length", "by": -1}
    ]"""
    rules = faults.parse_rules(json.loads(text))
    assert {faults.name_of(rule.do) for rule in rules} == set(faults.ACTIONS)
    assert rules[0] == Rule(faults.Status(429, "SlowDown", {"Retry-After": "1"}), key="*.bin", times=3)
    assert rules[3] == Rule(faults.LyingRange(4), method="HEAD")
    assert rules[5] == Rule(faults.Extra(5), skip=1, every=2)
    assert rules[8] == Rule(faults.Stall(after=1, wait_s=2))
    assert rules[9] == Rule(faults.Trickle(1000), min_start=7)
    for wrong in ({"do": "explode"}, {"do": "flip", "by": 1}, {"do": "fewer"}, {"do": "gzip", "every": 0}, {}):
        with pytest.raises(ValueError, match=r"do|knows no|missing|at least"):
            faults.parse_rules([wrong])


# What it counts, and how it runs.


def test_requests_and_bytes_are_recorded_before_the_client_can_look(server: S3Server) -> None:
    server.forget()
    client = Client(server)
    client.get("/models/a.bin", Range="bytes=0-999")
    client.send("HEAD", "/models/a.bin")
    client.get("/models/missing")
    first, second, third = server.requests
    assert (first.method, first.bucket, first.key, first.range) == ("GET", "models", "a.bin", "bytes=0-999")
    assert (first.start, first.end, first.status, first.sent, first.action) == (0, 1000, 206, 1000, None)
    assert (first.inflight, first.left_early, first.headers["host"]) == (1, False, client.authority)
    assert first.took_s is not None
    assert (second.method, second.status, second.sent) == ("HEAD", 200, 0)
    assert (third.status, third.error, third.start) == (404, "NoSuchKey", None)
    assert (server.bytes_asked, server.bytes_sent) == (1000, 1000 + third.sent)
    assert (server.connections, server.inflight, server.peak_inflight) == (3, 0, 1)
    assert len({request.connection for request in server.requests}) == 3


def test_connections_are_kept_and_requests_at_once_are_counted(server: S3Server) -> None:
    server.forget()

    def read(_: int) -> bool:
        connection = Client(server).connect()
        try:
            headers = [{"range": header} for header in ("bytes=0-99999", "bytes=100000-199999", "bytes=200000-")]
            return b"".join(exchange(connection, "GET", "/public/a.bin", header).body for header in headers) == DATA
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(4)))
    assert (server.connections, len(server.requests), server.bytes_sent) == (4, 12, 4 * len(DATA))
    assert 1 <= server.peak_inflight <= 4
    server.forget()
    assert (server.requests, server.bytes_asked, server.connections) == ([], 0, 0)


def test_connections_open_at_once_are_counted(server: S3Server) -> None:
    server.forget()
    sockets = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(3)]
    assert server.wait_until(lambda: server.open_connections == 3)
    for sock in sockets:
        sock.close()
    assert server.wait_until(lambda: server.open_connections == 0)
    Client(server).get("/public/a.bin")
    assert server.wait_until(lambda: server.open_connections == 0)
    assert (server.connections, server.peak_connections) == (4, 3)
    server.forget()
    assert server.peak_connections == 0


def test_requests_are_held_and_go_on_in_rounds(faulty: S3Server) -> None:
    def two_in_a_row() -> list[int]:
        return [fetch(faulty).status for _ in range(2)]

    assert (faulty.release(), faulty.let_go(), faulty.held) == (0, 0, 0)
    faulty.hold()
    faulty.hold()
    with ThreadPoolExecutor(3) as threads:
        done = [threads.submit(two_in_a_row) for _ in range(3)]
        assert faulty.wait_until(lambda: faulty.held == 3)
        assert [request.status for request in faulty.requests] == [0, 0, 0]
        assert faulty.release() == 3
        assert faulty.wait_until(lambda: faulty.held == 3)
        assert [request.status for request in faulty.requests] == [206] * 3 + [0] * 3
        assert faulty.let_go() == 3
        assert [future.result() for future in done] == [[206, 206]] * 3
    assert (faulty.rounds, faulty.held) == (2, 0)
    assert fetch(faulty).status == 206


def test_a_client_that_leaves_is_held_no_more_nor_one_of_a_server_that_stops(faulty: S3Server) -> None:
    faulty.hold()
    with socket.create_connection(("127.0.0.1", faulty.port), timeout=10) as sock:
        sock.sendall(b"GET /models/a.bin HTTP/1.1\r\nHost: x\r\n\r\n")
        assert faulty.wait_until(lambda: faulty.held == 1)
    assert faulty.wait_until(lambda: faulty.held == 0 and faulty.inflight == 0)
    assert faulty.requests[0].left_early
    with socket.create_connection(("127.0.0.1", faulty.port), timeout=10) as sock:
        sock.sendall(b"GET /models/a.bin HTTP/1.1\r\nHost: x\r\n\r\n")
        assert faulty.wait_until(lambda: faulty.held == 1)
        faulty.stop()


@pytest.mark.parametrize(
    "text",
    [
        b"nonsense\r\n\r\n",
        b"GET x HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
        b"x" * 70_000,
    ],
    ids=["one-word", "no-slash", "version", "header", "long"],
)
def test_what_is_no_request_is_400_and_closed(server: S3Server, text: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(text)
        data = sock.recv(4096)
    assert data.startswith(b"HTTP/1.1 400 ")
    assert b"Connection: close" in data


@pytest.mark.parametrize(
    "request_line", ["GET /public/dir/c HTTP/1.0\r\n", "GET /public/dir/c HTTP/1.1\r\nConnection: close\r\n"]
)
def test_connections_close_when_asked(server: S3Server, request_line: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(f"{request_line}\r\n".encode())
        data = b"".join(iter(lambda: sock.recv(4096), b""))
    assert data.endswith(b"\r\n\r\nc")


def test_latency_is_added_to_objects_and_listings() -> None:
    with S3Server({"models": {"a": b"a"}}, latency_s=0.05) as server:
        for path, query in (("/models/a", ""), ("/models", "list-type=2"), ("/models/missing", "")):
            began = time.monotonic()
            Client(server).get(path, query)
            assert time.monotonic() - began >= 0.05


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> s3server.Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    return s3server.make_certificates(tmp_path_factory.mktemp("tls"))


def test_tls_serves_bytes_and_files_with_signatures_and_faults(certificates: s3server.Certificates, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    content = {"models": {"a.bin": DATA, "file": tmp_path / "file"}}
    with S3Server(content, tls=(certificates.cert, certificates.key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        client = Client(server, ca=certificates.ca)
        assert client.get("/models/a.bin").body == DATA
        assert client.get("/models/file", Range="bytes=7-299999").body == DATA[7:300_000]
        server.fail(Rule(faults.Short(after=1000)))
        with pytest.raises((http.client.IncompleteRead, ssl.SSLError)):
            client.get("/models/file")
        server.fail(Rule(faults.Stall(after=1000)))
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")  # no handshake, no answer
            with contextlib.suppress(ConnectionResetError):
                while plain.recv(4096):
                    pass
        connection = client.connect()
        connection.request("GET", "/models/file", headers=client.signed("GET", "/models/file", "", {}))
        assert connection.getresponse().read(1000) == DATA[:1000]
        server.stop()
        connection.close()


def test_the_command_serves_logs_and_ends(tmp_path: Path) -> None:
    (tmp_path / "data" / "models").mkdir(parents=True)
    (tmp_path / "data" / "models" / "a").write_bytes(b"bytes")
    (tmp_path / "rules.json").write_text('[{"do": "status", "code": 503, "times": 1}]')
    options = ["--access-key", "AK", "--secret-key", "SK", "--public", "models", "--versioned", "models", "--latency-ms", "1"]
    files = ["--rules", tmp_path / "rules.json", "--log", tmp_path / "log"]
    command = [sys.executable, "-m", "headrace.testing.s3server", tmp_path / "data", *options, *files]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        assert exchange(connection, "GET", "/models/a", {}).status == 503
        reply = exchange(connection, "GET", "/models/a", {"range": "bytes=1-2"})
        assert (reply.status, reply.body) == (206, b"yt")
        assert reply.headers["x-amz-version-id"]
        connection.close()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        process.stdout.close()
    first, second = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert (first["status"], first["do"]) == (503, "status")
    assert (second["method"], second["path"], second["range"]) == ("GET", "/models/a", "bytes=1-2")
    assert (second["status"], second["sent"], second["inflight"], second["do"]) == (206, 2, 1, None)


@pytest.mark.parametrize("option", [["--rules", "missing.json"], ["--bucket-region", "models"]])
def test_the_command_refuses_what_it_cannot_use(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from headrace.testing.s3server.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(["data", *option])
    assert ended.value.code == 2
    assert option[1] in capsys.readouterr().err


def test_needs_only_the_standard_library() -> None:
    code = "import sys, headrace.testing.s3server; print('torch' in sys.modules, 'numpy' in sys.modules, 'pytest' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["False"] * 3
    )


def test_conditions_are_pure() -> None:
    assert conditions.byte_range(None, 10) is None
    assert conditions.byte_range("bytes=2-", 10) == (2, 10)
    assert refusal(conditions.byte_range, "bytes=10-", 10) == "InvalidRange"


# Clients of others, where they are installed.


def test_boto3_reads_writes_and_follows_regions(server: S3Server) -> None:
    boto3 = pytest.importorskip("boto3")
    config = pytest.importorskip("botocore.config").Config
    names = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=server.url, config=config(s3={"addressing_style": "path"}), **names)
    assert client.get_object(Bucket="models", Key="a.bin", Range="bytes=5-9")["Body"].read() == DATA[5:10]
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="models", PaginationConfig={"PageSize": 2})
    assert [entry["Key"] for page in pages for entry in page["Contents"]][:2] == ["a.bin", "dir/"]
    client.put_object(Bucket="models", Key="boto", Body=b"boto")
    assert client.get_object(Bucket="models", Key="boto")["Body"].read() == b"boto"
    client.delete_object(Bucket="models", Key="boto")
    assert client.get_object(Bucket="far", Key="a.bin")["Body"].read() == b"far"
    client.close()


@pytest.mark.leaky_ok("obstore keeps its runtime, whose descriptors stay open")
def test_obstore_reads_and_lists(many: S3Server) -> None:
    obstore = pytest.importorskip("obstore")
    store = pytest.importorskip("obstore.store").S3Store(
        "many",
        endpoint=many.url,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    assert sum(len(chunk) for chunk in obstore.list(store, prefix="m")) == 2500
    assert bytes(obstore.get(store, "l").bytes()) == b""
