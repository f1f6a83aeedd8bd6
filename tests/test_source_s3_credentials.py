"""Where the credentials of S3 come from: each service that hands them out is played on loopback, as botocore reaches it.

Each is asked by a checkpoint's load whose first keys expire half way, so that they are taken, renewed and never shown. None of
these was tried against Amazon's own services here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from headrace._environment import S3Settings
from headrace.errors import OptionError, SourcePermissionError
from headrace.sources.http import Access, Policy
from headrace.sources.s3 import CredentialsError, S3Credentials, S3Store
from headrace.testing.s3server import S3Server
from headrace.testing.sources import error_of, pattern, read

pytest.importorskip("botocore")

KIB = 1 << 10
DATA = pattern(300_007)
ACCESS_KEY, SECRET = "AKIATESTTESTTEST0001", "sEcReTsEcReTsEcReT0123456789abcdefABCDEF"
TOKENS = ("first-session-token-0123456789", "second-session-token-0123456789")
ROLE = "arn:aws:iam::123456789012:role/reader"
QUICK = Access(policy=Policy(attempts=4, backoff_s=0.0, stall_timeout_s=10.0, hedge_after_s=None))
URL = "s3://models/m/a.bin"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home, and no variable of AWS."""
    for line in Path("/proc/self/environ").read_text().split("\0"):
        name = line.partition("=")[0]
        if name.startswith(("AWS_", "RUNAI_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


# ---- who hands out credentials


@dataclass(frozen=True)
class Asked:
    """A request to a service."""

    method: str
    path: str
    headers: dict[str, str]
    body: str


Answer = Callable[[Asked], "tuple[int, str]"]


class Giver(ThreadingHTTPServer):
    """A service on loopback that answers as a function says, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.seen = answer, list[Asked]()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Giver

    def _go(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        asked = Asked(self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        self.server.seen.append(asked)
        status, text = self.server.answer(asked)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_PUT = do_POST = _go  # noqa: N815 - the base class's names

    def log_message(self, *_: object) -> None: ...


@dataclass
class Tokens:
    """The session tokens that are handed out, one after the other, the last one for good."""

    left: list[str] = field(default_factory=lambda: list(TOKENS))
    given: list[str] = field(default_factory=list)

    def take(self) -> str:
        self.given.append(self.left.pop(0) if len(self.left) > 1 else self.left[0])
        return self.given[-1]


def in_json(tokens: Tokens, **more: object) -> str:
    """As the metadata services of instances and containers answer."""
    keys = {"AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET, "Token": tokens.take(), "Expiration": later()}
    return json.dumps(keys | more)


def in_xml(tokens: Tokens, action: str) -> str:
    """As the security token service answers."""
    keys = f"<AccessKeyId>{ACCESS_KEY}</AccessKeyId><SecretAccessKey>{SECRET}</SecretAccessKey>"
    keys += f"<SessionToken>{tokens.take()}</SessionToken><Expiration>{later()}</Expiration>"
    return (
        f'<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{action}Result><Credentials>{keys}</Credentials>'
        f"</{action}Result></{action}Response>"
    )


def later() -> str:
    return (datetime.now(timezone.utc) + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ")


def load_while_keys_expire(tokens: Tokens, caplog: pytest.LogCaptureFixture, **given: Any) -> list[str | None]:
    """Read half an object, have the keys expire, and read the rest. Returns the errors that the store answered with."""
    caplog.set_level("DEBUG")
    with S3Server({"models": {"m/a.bin": DATA}}, access_key=ACCESS_KEY, secret_key=SECRET, require_token=TOKENS[0]) as server:
        store = S3Store(S3Credentials(endpoint=server.url, **given), access=QUICK)
        with contextlib.closing(store.open(URL, prefix_nbytes=KIB)) as source:
            assert read(source, 0, 100_000) == DATA[:100_000]
            server.rotate(access_key=ACCESS_KEY, secret_key=SECRET, token=TOKENS[1])
            assert read(source, 0, len(DATA)) == DATA
        assert store.folder("s3://models/m").names() == ["a.bin"]
        assert tokens.given[:2] == list(TOKENS)
        assert SECRET not in caplog.text
        return [request.error for request in server.requests if request.error]


# ---- roles of machines and containers


def imds(tokens: Tokens) -> Answer:
    """The metadata service of an instance, of which only version 2 is on: a session is begun with PUT."""

    def answer(asked: Asked) -> tuple[int, str]:
        if (asked.method, asked.path) == ("PUT", "/latest/api/token"):
            return 200, "a-session-with-the-metadata-service"
        if asked.headers.get("x-aws-ec2-metadata-token") != "a-session-with-the-metadata-service":
            return 401, ""
        if asked.path == "/latest/meta-data/iam/security-credentials/":
            return 200, "reader"
        if asked.path == "/latest/meta-data/iam/security-credentials/reader":
            return 200, in_json(tokens, Code="Success", Type="AWS-HMAC", LastUpdated="2026-01-01T00:00:00Z")
        return 404, ""

    return answer


def test_the_role_of_an_instance(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tokens = Tokens()
    with Giver(imds(tokens)) as giver:
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{giver.url}/")
        assert load_while_keys_expire(tokens, caplog) == ["ExpiredToken"]
        assert giver.seen[0].method == "PUT"


def test_the_metadata_service_is_not_asked_where_it_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    with Giver(imds(Tokens())) as giver, S3Server({}) as server:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{giver.url}/")
        error = error_of(CredentialsError, S3Store(S3Credentials(endpoint=server.url), access=QUICK).open, URL)
        assert "no AWS credentials were found" in str(error)
        assert not giver.seen
        assert not server.requests


def test_the_role_of_a_task(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tokens = Tokens()
    with Giver(lambda _: (200, in_json(tokens))) as giver:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{giver.url}/v2/credentials/some-id")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "Basic who-i-am")
        assert load_while_keys_expire(tokens, caplog) == ["ExpiredToken"]
        assert {(asked.path, asked.headers.get("authorization")) for asked in giver.seen} == {
            ("/v2/credentials/some-id", "Basic who-i-am")
        }


def test_the_identity_of_a_pod_whose_token_file_is_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, file = Tokens(), home / "pod-token"

    def answer(_: Asked) -> tuple[int, str]:
        file.write_text("newer-pod-token")
        return 200, in_json(tokens)

    file.write_text("first-pod-token")
    with Giver(answer) as giver:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{giver.url}/v1/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(file))
        assert load_while_keys_expire(tokens, caplog) == ["ExpiredToken"]
        assert [asked.headers["authorization"] for asked in giver.seen[:2]] == ["first-pod-token", "newer-pod-token"]


# ---- roles that are assumed


def sts(tokens: Tokens, **expected: str) -> Answer:
    """The security token service; refuses requests without the fields that are expected."""

    def answer(asked: Asked) -> tuple[int, str]:
        form = {name: values[0] for name, values in parse_qs(asked.body).items()}
        if not expected.items() <= form.items():
            return 403, _refusal("AccessDenied")
        return 200, in_xml(tokens, form["Action"])

    return answer


def _refusal(code: str) -> str:
    return f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>not for you</Message></Error></ErrorResponse>"


def test_a_web_identity(home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tokens = Tokens()
    (home / "identity").write_text("header.claims.signature-of-the-cluster")
    expected = {"Action": "AssumeRoleWithWebIdentity", "RoleArn": ROLE, "RoleSessionName": "loader"}
    with Giver(sts(tokens, **expected, WebIdentityToken="header.claims.signature-of-the-cluster")) as giver:
        monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
        monkeypatch.setenv("AWS_ROLE_SESSION_NAME", "loader")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(home / "identity"))
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", giver.url)
        assert load_while_keys_expire(tokens, caplog) == ["ExpiredToken"]
        assert "authorization" not in giver.seen[0].headers


@pytest.mark.parametrize("profile", ["argument", "variable"])
def test_a_profile_that_assumes_a_role(
    profile: str, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = Tokens()
    (home / "config").write_text(f"[profile reader]\nrole_arn={ROLE}\nsource_profile=base\nexternal_id=shared-with-them\n")
    (home / "credentials").write_text("[base]\naws_access_key_id=AKIABASE\naws_secret_access_key=base-secret\n")
    with Giver(sts(tokens, Action="AssumeRole", RoleArn=ROLE, ExternalId="shared-with-them")) as giver:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", giver.url)
        if profile == "variable":
            monkeypatch.setenv("AWS_PROFILE", "reader")
        given = {"profile": "reader"} if profile == "argument" else {}
        assert load_while_keys_expire(tokens, caplog, **given) == ["ExpiredToken"]
        assert "Credential=AKIABASE/" in giver.seen[0].headers["authorization"]


def test_a_role_on_top_of_that_of_an_instance(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, own = Tokens(), Tokens(["token-of-the-instance"])
    (home / "config").write_text(f"[default]\nrole_arn={ROLE}\ncredential_source=Ec2InstanceMetadata\n")
    with Giver(imds(own)) as metadata, Giver(sts(tokens, Action="AssumeRole")) as giver:
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{metadata.url}/")
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", giver.url)
        assert load_while_keys_expire(tokens, caplog) == ["ExpiredToken"]
        assert giver.seen[0].headers["x-amz-security-token"] == "token-of-the-instance"


READ = """
import sys
from headrace.errors import SourceError
from headrace.sources.s3 import S3Credentials, S3Store

try:
    source = S3Store(S3Credentials(endpoint=sys.argv[1], profile="work")).open("s3://models/m/a.bin")
    data = bytearray(source.nbytes)
    source.read_into(0, memoryview(data))
    source.close()
    sys.stdout.buffer.write(data)
except SourceError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
def test_a_single_sign_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = "https://d-0123456789.awsapps.com/start"
    (home / "config").write_text(
        f"[profile work]\nsso_start_url={start}\nsso_region=us-east-1\nsso_account_id=123456789012\nsso_role_name=reader\n"
    )
    cache = home / ".aws/sso/cache" / f"{hashlib.sha1(start.encode()).hexdigest()}.json"
    cache.parent.mkdir(parents=True)

    def sign_on(until: str) -> None:
        signed_on = {"startUrl": start, "region": "us-east-1", "accessToken": "signed-on-0123456789", "expiresAt": until}
        cache.write_text(json.dumps(signed_on))

    def answer(asked: Asked) -> tuple[int, str]:
        if asked.headers.get("x-amz-sso_bearer_token") != "signed-on-0123456789":
            return 401, "{}"
        keys = {"accessKeyId": ACCESS_KEY, "secretAccessKey": SECRET, "sessionToken": TOKENS[0], "expiration": 4102444800000}
        return 200, json.dumps({"roleCredentials": keys})

    content = {"models": {"m/a.bin": DATA}}
    with (
        Giver(answer) as giver,
        S3Server(content, access_key=ACCESS_KEY, secret_key=SECRET, require_token=TOKENS[0]) as server,
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL_SSO", giver.url)
        # In a process of its own: botocore finds the home, and the cache of tokens in it, when it is imported.
        command = [sys.executable, "-c", READ, server.url]
        sign_on(later())
        assert subprocess.run(command, capture_output=True, check=True, timeout=60).stdout == DATA
        assert giver.seen[0].path == "/federation/credentials?role_name=reader&account_id=123456789012"
        sign_on("2020-01-01T00:00:00Z")
        refused = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
        assert refused.returncode == 1
        assert "CredentialsError" in refused.stderr
        assert "SSO" in refused.stderr
        assert "signed-on" not in refused.stderr


def test_a_process(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    script, count = home / "keys.py", home / "count"
    script.write_text(
        f"import json, pathlib\n"
        f"count = pathlib.Path({str(count)!r})\n"
        f"calls = int(count.read_text()) if count.exists() else 0\n"
        f"count.write_text(str(calls + 1))\n"
        f"print(json.dumps({{'Version': 1, 'AccessKeyId': {ACCESS_KEY!r}, 'SecretAccessKey': {SECRET!r},"
        f" 'SessionToken': {TOKENS!r}[min(calls, 1)], 'Expiration': {later()!r}}}))\n"
    )
    (home / "config").write_text(f"[default]\ncredential_process={sys.executable} {script}\n")
    assert load_while_keys_expire(Tokens(given=list(TOKENS)), caplog) == ["ExpiredToken"]
    assert count.read_text() == "2"


def test_a_file_of_credentials(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = home / "elsewhere"
    elsewhere.write_text(f"[work]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(elsewhere))
    monkeypatch.setenv("AWS_PROFILE", "work")
    with S3Server({"models": {"m/a.bin": DATA}}, access_key=ACCESS_KEY, secret_key=SECRET) as server:
        S3Store(S3Credentials(endpoint=server.url), access=QUICK).open(URL).close()
        assert [request.status for request in server.requests] == [206]


# ---- keys that run out by the clock


def test_keys_are_renewed_before_their_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = Tokens()
    soon = (datetime.now(timezone.utc) + timedelta(minutes=5)).strftime("%Y-%m-%dT%H:%M:%SZ")

    def answer(_: Asked) -> tuple[int, str]:
        return 200, in_json(tokens, **({} if tokens.given else {"Expiration": soon}))

    with Giver(answer) as giver:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", giver.url)
        with S3Server({"models": {"m/a.bin": DATA}}, access_key=ACCESS_KEY, secret_key=SECRET, require_token=TOKENS[1]) as server:
            with contextlib.closing(S3Store(S3Credentials(endpoint=server.url), access=QUICK).open(URL)) as source:
                assert read(source, 0, len(DATA)) == DATA
            assert not [request for request in server.requests if request.error]


# ---- refusals


@contextlib.contextmanager
def refusing(monkeypatch: pytest.MonkeyPatch, home: Path, kind: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if kind == "role":
            giver = stack.enter_context(Giver(lambda _: (403, _refusal("AccessDenied"))))
            (home / "identity").write_text("who-i-am")
            monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(home / "identity"))
            monkeypatch.setenv("AWS_ENDPOINT_URL_STS", giver.url)
        elif kind == "no token file":
            monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
            monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(home / "absent"))
        elif kind == "elsewhere":
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://192.0.2.1/credentials")
        elif kind == "nonsense":
            (home / "config").write_text(f"[default]\ncredential_process={sys.executable} -c print('{SECRET}')\n")
        elif kind == "no such profile":
            monkeypatch.setenv("AWS_PROFILE", "absent")
        yield


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("role", "AccessDenied"),
        ("no token file", "absent"),
        ("elsewhere", "ValueError"),
        ("nonsense", "Error"),
        ("no such profile", "absent"),
    ],
)
def test_what_cannot_be_had_is_an_error_of_credentials(kind: str, told: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing(monkeypatch, home, kind), S3Server({}) as server:
        error = error_of(CredentialsError, lambda: S3Store(S3Credentials(endpoint=server.url), access=QUICK).open(URL))
        assert isinstance(error, SourcePermissionError)
        assert told in str(error)
        assert SECRET not in str(error)
        assert error.__cause__ is None or SECRET not in repr(error.__cause__)
        assert not server.requests


def test_half_a_pair_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    with S3Server({}) as server:
        error = error_of(CredentialsError, S3Store(S3Credentials(endpoint=server.url), access=QUICK).open, URL)
        assert "secret" in str(error).lower()


def test_switches_are_1_or_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAI_STREAMER_S3_UNSIGNED", "perhaps")
    with pytest.raises(OptionError, match="RUNAI_STREAMER_S3_UNSIGNED"):
        S3Settings.from_environment()
