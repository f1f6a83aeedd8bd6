"""A small Azure Blob Storage on loopback, for what the emulator cannot play, and what hands out its tokens.

`AzureServer` serves the containers it is given under one account. It checks SAS tokens by computing them anew from the published
rules ("Create a service SAS", Microsoft Learn), bearer tokens against a list, and lets nobody else into containers that are not
public. Listings have pages, prefixes and delimiters. Faults are those of `http_servers`. `TokenServer` plays the endpoints that
give tokens to managed and to workload identities. `Emulator` runs Microsoft's own emulator, where scripts/test has installed it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from http_servers import Certificates, Fault, Seen, Server, free_port

Reply = tuple[int, Mapping[str, str], bytes]

ACCOUNT = "acct"
KEY = base64.b64encode(b"0123456789abcdef-0123456789abcdef").decode()
MESSAGES = {
    "AuthenticationFailed": "Server failed to authenticate the request. Make sure the Authorization header is right.",
    "InvalidAuthenticationInfo": "Server failed to authenticate the request. Please refer to the www-authenticate header.",
}


class AzureServer(Server):
    """Serve containers of one account.

    Args:
        content: {container: {blob: bytes}}.
        account, key: of the account.
        tokens: bearer tokens that count.
        public: containers that anybody may read and list.
        listable: whether whoever may read may list as well.
        page: blobs on a page of a listing.
        metadata: {(container, blob): {name: value}}.
        tiers: {(container, blob): code of the error that a read gets}.
        clock: seconds since 1970.
        faults, tls: as for `Server`.

    Attributes:
        md5s: {(container, blob): the MD5 that is stored with it, in base64}.
        listings: (status, code) with which the next listings are answered instead.
        denied: (status, code) for those without credentials.
    """

    def __init__(
        self,
        content: Mapping[str, Mapping[str, bytes]],
        faults: Sequence[Fault] = (),
        *,
        account: str = ACCOUNT,
        key: str = KEY,
        tokens: Sequence[str] = (),
        public: Sequence[str] = (),
        listable: bool = True,
        page: int = 5000,
        metadata: Mapping[tuple[str, str], Mapping[str, str]] | None = None,
        tiers: Mapping[tuple[str, str], str] | None = None,
        clock: Callable[[], float] = time.time,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.content = {name: dict(blobs) for name, blobs in content.items()}
        self.account, self.key, self.tokens, self.public = account, key, set(tokens), set(public)
        self.listable, self.page, self.clock = listable, page, clock
        self.metadata, self.tiers = dict(metadata or {}), dict(tiers or {})
        self.md5s: dict[tuple[str, str], str] = {}
        self.listings: list[tuple[int, str]] = []
        self.denied = (401, "NoAuthenticationInformation")
        files = {
            f"/{account}/{name}/{quote(blob, safe='/-_.~')}": data
            for name, blobs in content.items()
            for blob, data in blobs.items()
        }
        super().__init__(files, faults, tls=tls, check=self._check_request)

    @property
    def endpoint(self) -> str:
        return self.url_of(f"/{self.account}")

    def path_of(self, container: str, blob: str) -> str:
        """Where a blob is on the wire."""
        return f"/{self.account}/{container}/{quote(blob, safe='/-_.~')}"

    def asked_for(self) -> list[str]:
        """What was asked for, without signatures: the blob, or 'LIST prefix'."""
        asked = []
        for seen in self.seen:
            query = parse_qs(urlsplit(seen.target).query)
            listing = f"LIST {query.get('prefix', [''])[0]}"
            asked.append(listing if "comp" in query else unquote(urlsplit(seen.target).path).split("/", 3)[3])
        return asked

    def _check_request(self, seen: Seen) -> Reply | None:
        parts = urlsplit(seen.target)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        container, _, key = unquote(parts.path).removeprefix(f"/{self.account}/").partition("/")
        is_listing = query.get("comp") == "list"
        refused = self._authenticate(seen, query, container, is_listing)
        if refused is not None:
            return refused
        if container not in self.content:
            return error(404, "ContainerNotFound")
        if is_listing:
            if self.listings:
                return error(*self.listings.pop(0))
            return self._list(container, query)
        if key not in self.content[container]:
            return error(404, "BlobNotFound")
        if (container, key) in self.tiers:
            return error(409, self.tiers[container, key])
        return None

    def _send_object(self, sock: Any, seen: Seen, data: bytes, do: str, options: dict[str, Any]) -> bool:
        container, _, key = unquote(urlsplit(seen.target).path).removeprefix(f"/{self.account}/").partition("/")
        # A range has the MD5 of its own bytes in this header, if any.
        told = {"Content-MD5": self.md5s.get((container, key), "")} if seen.method == "HEAD" else {}
        return super()._send_object(sock, seen, data, do, {**options, "headers": told | options.get("headers", {})})

    # ---- who asks

    def _authenticate(self, seen: Seen, query: dict[str, str], container: str, is_listing: bool) -> Reply | None:
        if seen.headers.get("x-ms-version", "") < "2020-04-08":
            return error(400, "InvalidHeaderValue")
        given = seen.headers.get("authorization", "")
        if "sig" in query:
            return self._check_sas(query, container, is_listing)
        if given.startswith("Bearer "):
            if given.removeprefix("Bearer ") not in self.tokens:
                return error(401, "InvalidAuthenticationInfo", f"Lifetime validation failed. The token is expired. {given}")
            return None if self.listable or not is_listing else error(403, "AuthorizationPermissionMismatch")
        if container in self.public:
            return None if self.listable or not is_listing else error(404, "ResourceNotFound")
        return error(*self.denied)

    def _check_sas(self, query: dict[str, str], container: str, is_listing: bool) -> Reply | None:
        signed = "\n".join(
            [
                *(query.get(name, "") for name in ("sp", "st", "se")),
                f"/blob/{self.account}/{container}",
                *(query.get(name, "") for name in ("si", "sip", "spr", "sv", "sr")),
                *("" for _ in range(7)),  # snapshot, encryption scope, and headers of the answer
            ]
        )
        digest = hmac.new(base64.b64decode(self.key), signed.encode(), hashlib.sha256).digest()
        if query["sig"] != base64.b64encode(digest).decode():
            detail = f"Signature did not match. String to sign used was {signed}, and the signature {query['sig']}"
            return error(403, "AuthenticationFailed", detail)
        ends = datetime.fromisoformat(query["se"].replace("Z", "+00:00"))
        now = datetime.fromtimestamp(self.clock(), timezone.utc)
        if ends <= now:
            detail = f"Signature not valid in the specified time frame: Start [] - Expiry [{ends}] - Current [{now}]"
            return error(403, "AuthenticationFailed", detail)
        if ("l" if is_listing else "r") not in query["sp"]:
            return error(403, "AuthorizationPermissionMismatch")
        return None

    # ---- listings

    def _list(self, container: str, query: dict[str, str]) -> Reply:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        rows: dict[str, str] = {}
        for key in sorted(self.content[container]):
            if not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if found:
                name = prefix + head + delimiter
                rows[name] = f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>"
            else:
                rows[key] = self._blob(container, key)
        start = int(base64.b64decode(query["marker"]).decode().partition(":")[2]) if "marker" in query else 0
        names = list(rows)
        page = "".join(rows[name] for name in names[start : start + self.page])
        following = base64.b64encode(f"2!:{start + self.page}".encode()).decode() if start + self.page < len(names) else ""
        body = f"<EnumerationResults><Blobs>{page}</Blobs><NextMarker>{following}</NextMarker></EnumerationResults>"
        return 200, {"Content-Type": "application/xml"}, b"\xef\xbb\xbf<?xml version='1.0' encoding='utf-8'?>" + body.encode()

    def _blob(self, container: str, key: str) -> str:
        data = self.content[container][key]
        given = self.metadata.get((container, key), {})
        resource = f"<ResourceType>{given['ResourceType']}</ResourceType>" if "ResourceType" in given else ""
        metadata = "".join(f"<{name}>{value}</{name}>" for name, value in given.items() if name != "ResourceType")
        name = f"<Name>{escape(key)}</Name>"
        if any(ord(letter) < 32 or ord(letter) in (0xFFFE, 0xFFFF) for letter in key):
            name = f'<Name Encoded="true">{quote(key)}</Name>'
        length = "" if resource else f"<Content-Length>{len(data)}</Content-Length>"
        properties = f"<Etag>0x{hashlib.md5(data).hexdigest()}</Etag>{length}{resource}"
        return f"<Blob>{name}<Properties>{properties}</Properties><Metadata>{metadata}</Metadata></Blob>"


def error(status: int, code: str, detail: str = "") -> Reply:
    """An answer in the service's words; the byte order mark and the second and third line of the message are its own, too."""
    message = f"{MESSAGES.get(code, f'This is {code}.')}\nRequestId:r-42\nTime:2026-01-01T00:00:00.0000000Z"
    told = f"<AuthenticationErrorDetail>{escape(detail)}</AuthenticationErrorDetail>" if detail else ""
    body = f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code><Message>{escape(message)}</Message>{told}</Error>'
    headers = {"x-ms-error-code": code, "x-ms-request-id": "r-42", "Content-Type": "application/xml"}
    return status, headers, b"\xef\xbb\xbf" + body.encode()


class TokenServer(ThreadingHTTPServer):
    """Plays the endpoints that give tokens: of a machine (IMDS) and of Microsoft Entra ID.

    Args:
        tokens: given one after the other, the last one for good.
        lifetime_s: for how long each counts, as the answer tells.
        tls: for Entra ID, whose clients refuse anything else.

    Attributes:
        seen: (path, headers, body) of each request.
    """

    def __init__(self, *tokens: str, lifetime_s: int = 86_400, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _TokenHandler)
        self.tokens, self.lifetime_s = list(tokens), lifetime_s
        self.seen: list[tuple[str, dict[str, str], str]] = []
        self.scheme = "https" if tls else "http"
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.thread.start()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_port}"

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


class _TokenHandler(BaseHTTPRequestHandler):
    server: TokenServer

    def do_GET(self) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        server = self.server
        server.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}, asked))
        token = server.tokens.pop(0) if len(server.tokens) > 1 else server.tokens[0]
        answer = {
            "access_token": token,
            "token_type": "Bearer",
            "expires_in": str(server.lifetime_s),
            "expires_on": str(int(time.time()) + server.lifetime_s),
            "resource": "https://storage.azure.com",
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - the base class's name

    def log_message(self, *_: object) -> None: ...


# ---- Microsoft's emulator

_AZURITE = Path(__file__).resolve().parent.parent / ".cache" / "azurite" / "node_modules" / ".bin" / "azurite-blob"


def why_no_emulator() -> str:
    """Why the emulator cannot be run here; empty where it can."""
    if not shutil.which("node"):
        return "Azure emulator: no node"
    return "" if _AZURITE.exists() else "Azure emulator: not installed (scripts/test does it, with npm)"


def web_token(**claims: object) -> str:
    """A token as Entra ID writes them, for Azure Storage and not signed."""
    now = int(time.time())
    usual = {
        "aud": "https://storage.azure.com",
        "iss": "https://sts.windows.net/t/",
        "iat": now,
        "nbf": now - 60,
        "exp": now + 3600,
    }
    parts = ({"alg": "RS256", "typ": "JWT"}, usual | claims, "unsigned")
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)


@contextlib.contextmanager
def emulator(folder: Path, *, key: str = KEY, tls: Certificates | None = None) -> Iterator[str]:
    """Run azurite-blob with one account; gives the endpoint. With TLS it takes bearer tokens, and reads what they claim."""
    port = free_port()
    places = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    command = [str(_AZURITE), *places, "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    if tls is not None:
        command += ["--cert", str(tls.leaf), "--key", str(tls.key), "--oauth", "basic"]
    path = f"PATH={os.defpath}:{Path(shutil.which('node') or '').parent}"
    clean = ["env", "-i", path, f"HOME={folder}", f"AZURITE_ACCOUNTS={ACCOUNT}:{key}"]
    with subprocess.Popen([*clean, *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if "successfully listens" in line:
                    break
            else:
                raise RuntimeError(f"the emulator ended: {''.join(said)}")
            yield f"{'https' if tls else 'http'}://127.0.0.1:{port}/{ACCOUNT}"
        finally:
            process.terminate()
