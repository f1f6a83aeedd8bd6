"""No secret is ever told: whatever a load, its errors, logs, traces, statistics, files and representations say is searched.

Each store is asked with credentials that nobody else has. What it answers is well, or wrong in some way, or, the worst of all, an
error that quotes all it was sent.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import logging
import pickle
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from azure_server import AzureServer
from checkpoints import KIB, random_contents, serialize
from gcs_server import GcsServer
from http_servers import Fault, Server, fault
from hub_server import Hub, Repo
from typer.testing import CliRunner

import headrace
from headrace.cli import app
from headrace.errors import HeadraceError
from headrace.sources.azure import AzureCredentials
from headrace.sources.gcs import GcsCredentials
from headrace.sources.huggingface import HubFolder
from headrace.sources.s3 import S3Credentials
from headrace.testing.s3server import Flip, Redirect, Replaced, Reset, Rule, S3Server, Short, Status

pytest.importorskip("botocore")
pytest.importorskip("google.auth")
pytest.importorskip("azure.storage.blob")

CANARY = "c4n4ryc4n4ryc4n4ry"
KEY = base64.b64encode(CANARY.encode() * 3).decode()
FILES = {
    "model-00001-of-00002.safetensors": serialize(random_contents(300 * KIB, 5)),
    "model-00002-of-00002.safetensors": serialize({"u": random_contents(200 * KIB)["t000"]}),
}
INDEX = {"weight_map": {"t000": "model-00001-of-00002.safetensors", "t001": "model-00001-of-00002.safetensors"}}
INDEX["weight_map"]["u"] = "model-00002-of-00002.safetensors"
FILES["model.safetensors.index.json"] = json.dumps(INDEX).encode()
HASTE = {"attempts": 2, "stall_timeout_s": 5.0}


class Asked(NamedTuple):
    """A checkpoint in a store, and how it is asked for."""

    url: Any
    credentials: Any = None


# ---- the stores, with a fault or at an endpoint of another's making

FAULTS: dict[str, list[Fault]] = {
    "well": [],
    "403": [fault("status", code=403)],
    "403 later": [fault("status", code=403, skip=4)],
    "404": [fault("status", code=404)],
    "500": [fault("status", code=500)],
    "redirect": [fault("redirect", to="http://127.0.0.1:9/x")],
    "short": [fault("short", after=100)],
    "gzip": [fault("gzip")],
}
S3_FAULTS: dict[str, list[Rule]] = {
    "well": [],
    "403": [Rule(Status(403, "SignatureDoesNotMatch"), method="*")],
    "403 later": [Rule(Status(403, "AccessDenied"), key="*.safetensors", skip=2)],
    "404": [Rule(Status(404, "NoSuchKey"), method="*")],
    "500": [Rule(Status(500, "InternalError"), method="*")],
    "redirect": [Rule(Redirect("http://127.0.0.1:9/x"))],
    "short": [Rule(Short(after=100), key="*.safetensors")],
    "gzip": [Rule(Reset(after=10), key="*.safetensors", skip=2), Rule(Flip(), key="*.safetensors"), Rule(Replaced(), skip=9)],
}


@contextlib.contextmanager
def s3(why: str, at: str | None) -> Iterator[Asked]:
    content = {"models": {f"m/{name}": data for name, data in FILES.items()}}
    secrets = {"access_key_id": "AKTEST", "secret_access_key": f"sk{CANARY}", "session_token": f"tk{CANARY}"}
    with S3Server(content, secret_key=f"sk{CANARY}", require_token=f"tk{CANARY}", faults=S3_FAULTS[why]) as server:
        yield Asked("s3://models/m", S3Credentials(**secrets, endpoint=at or server.url))


@contextlib.contextmanager
def gcs(why: str, at: str | None, **more: Any) -> Iterator[Asked]:
    with GcsServer({"models": {f"m/{name}": data for name, data in FILES.items()}}, FAULTS[why]) as server:
        server._valid.add(f"ya29.{CANARY}")
        yield Asked("gs://models/m", GcsCredentials(**(more or {"token": f"ya29.{CANARY}"}), endpoint=at or server.base))


@contextlib.contextmanager
def gcs_hmac(why: str, at: str | None) -> Iterator[Asked]:
    with gcs(why, at, access_key_id="GOOG1TEST", secret_access_key=f"hm{CANARY}") as asked:
        yield asked


@contextlib.contextmanager
def azure(why: str, at: str | None, **more: Any) -> Iterator[Asked]:
    blobs = {f"m/{name}": data for name, data in FILES.items()}
    with AzureServer({"models": blobs}, FAULTS[why], key=KEY) as server:
        endpoint = f"{at}/{server.account}" if at else server.endpoint
        given = more or {"account_key": KEY}
        yield Asked("az://models/m", AzureCredentials(account_name=server.account, endpoint=endpoint, **given))


@contextlib.contextmanager
def azure_sas(why: str, at: str | None) -> Iterator[Asked]:
    with azure(why, at, sas_token=f"sv=2024-01-01&sig={CANARY}%3D&se=2030-01-01") as asked:
        yield asked


@contextlib.contextmanager
def hub(why: str, at: str | None) -> Iterator[Asked]:
    token = f"hf_{CANARY}"
    with Hub({"org/repo": Repo(dict(FILES), access="gated")}, tokens={token: {"org/repo"}}, cdn_faults=FAULTS[why]) as server:
        yield Asked(HubFolder("hf://org/repo", token=token, endpoint=at or server.endpoint))


@contextlib.contextmanager
def web(why: str, at: str | None) -> Iterator[Asked]:
    with Server({f"/m/{name}": data for name, data in FILES.items()}, FAULTS[why]) as server:
        yield Asked(f"{at or server.url_of('')}/m/?sig={CANARY}", f"bearer{CANARY}")


@contextlib.contextmanager
def web_password(why: str, at: str | None) -> Iterator[Asked]:
    with Server({f"/m/{name}": data for name, data in FILES.items()}, FAULTS[why]) as server:
        yield Asked(f"{(at or server.url_of('')).replace('http://', f'http://me:{CANARY}@')}/m/")


STORES: dict[str, Callable[[str, str | None], contextlib.AbstractContextManager[Asked]]] = {
    "s3": s3, "gcs": gcs, "gcs hmac": gcs_hmac, "azure key": azure, "azure sas": azure_sas, "hub": hub, "web": web,
    "web password": web_password,
}  # fmt: skip


@contextlib.contextmanager
def quoting() -> Iterator[str]:
    """A server that answers everything with an error that quotes all it was sent, as text, in base64 and in XML."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), sock:
                sent = sock.recv(65536).decode("latin-1")
                body = f"<Error><Code>Denied</Code><Message>{escape(sent)}</Message><RequestId>1</RequestId></Error>".encode()
                head = f"HTTP/1.1 403 Denied\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
                sock.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)

    thread = threading.Thread(target=serve, name="test-quoting")
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


# ---- what is said


class Told:
    """Everything that was said, by whatever way."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, *values: object) -> None:
        for value in values:
            self.texts += [str(value), repr(value)]
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                self.texts.append(
                    str({field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.repr})
                )

    def add_error(self, error: BaseException) -> None:
        while error is not None:
            self.add(error, vars(error), *getattr(error, "others", ()))
            self.texts += traceback.format_exception(error)
            if isinstance(error, HeadraceError):
                self.texts.append(repr(pickle.dumps(error)))
                self.add(vars(pickle.loads(pickle.dumps(error))))
            error = error.__cause__ or error.__context__  # type: ignore[assignment]

    def add_files(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            self.texts.append(str(path))
            if path.is_file():
                self.texts.append(path.read_bytes().decode("latin-1"))

    def assert_clean(self) -> None:
        forms = [CANARY, quote(CANARY), base64.b64encode(CANARY.encode())[:20].decode(), KEY, quote(KEY, safe="")]
        forms += [base64.b64encode(f"me:{CANARY}".encode()).decode()[:20]]
        for text in self.texts:
            for form in forms:
                assert form not in text, text[max(0, text.find(form) - 200) : text.find(form) + 50]


def do_everything(asked: Asked, told: Told, tmp_path: Path) -> list[str]:
    """Each verb, and all that it says; returns the kinds of the errors."""
    given = {**HASTE} | ({"credentials": asked.credentials} if asked.credentials is not None else {})
    kinds: list[str] = []

    def attempt(verb: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            told.add(verb(asked.url, *arguments, **options, **given))
        except HeadraceError as exc:
            kinds.append(type(exc).__name__)
            told.add_error(exc)

    if not isinstance(asked.credentials, str):
        told.add(asked.credentials)
    attempt(headrace.open)
    attempt(lambda url, **options: str(headrace.plan(url, device="cpu", **options)))
    attempt(lambda url, **options: list(headrace.folder(url, **options).names()))
    attempt(stream, told, trace=tmp_path / "trace.json", progress=told.add)
    attempt(headrace.load, verify="auto")
    attempt(headrace.pull, tmp_path / "pulled", progress=told.add)
    attempt(headrace.verify, out=tmp_path / "manifest.json")
    attempt(headrace.save_metadata, tmp_path / "metadata")
    attempt(lambda url, **options: headrace.hold(url, **options).close())
    told.add_files(tmp_path)
    return kinds


def stream(url: Any, told: Told, **options: Any) -> object:
    with headrace.stream(url, **options) as tensors:
        told.add(tensors, tensors.plan, *tensors.plan.tensors.names)
        for name, _ in tensors:
            told.add(name, tensors.stats)
    return tensors.stats


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> Iterator[Told]:
    """Everything, with what was logged and printed, is searched when the test is over."""
    caplog.set_level(logging.DEBUG)
    found = Told()
    yield found
    found.texts += [caplog.text, *(repr(vars(record)) for record in caplog.records), *capsys.readouterr()]
    found.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("why", FAULTS)
@pytest.mark.parametrize("store", STORES)
def test_nothing_tells_a_secret(store: str, why: str, told: Told, tmp_path: Path) -> None:
    with STORES[store](why, None) as asked:
        kinds = do_everything(asked, told, tmp_path)
    works = why == "well" and store not in ("gcs hmac", "azure sas")  # whose signatures the servers of the tests refuse
    assert works == (not kinds) or (store, why) == ("hub", "404"), kinds


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_an_error_that_quotes_what_was_sent_tells_no_secret(store: str, told: Told, tmp_path: Path) -> None:
    with quoting() as url, STORES[store]("well", url) as asked:
        assert len(do_everything(asked, told, tmp_path)) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("command", ["inspect", "plan", "load", "pull", "verify"])
@pytest.mark.parametrize("why", ["well", "403", "short"])
def test_the_command_tells_no_secret(command: str, why: str, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3(why, None) as asked:
        monkeypatch.setenv("AWS_ENDPOINT_URL", asked.credentials.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKTEST")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"sk{CANARY}")
        monkeypatch.setenv("AWS_SESSION_TOKEN", f"tk{CANARY}")
        more = [str(tmp_path / "pulled")] if command == "pull" else []
        ended = CliRunner().invoke(app, [command, "s3://models/m", *more])
    told.texts += [ended.output, ended.stdout, ended.stderr]
    told.add_files(tmp_path)


def test_a_secret_that_is_told_is_seen() -> None:
    for said in (CANARY, f"?sig={CANARY}", base64.b64encode(CANARY.encode()).decode(), KEY):
        told = Told()
        told.add_error(HeadraceError(f"refused: {said}"))
        with pytest.raises(AssertionError):
            told.assert_clean()
