"""A small Google Cloud Storage on loopback, and everything that gives tokens for it.

It has what emulators lack: tokens that are checked and expire, generations with conditions, who pays, objects stored compressed,
and the faults of `http_servers`. Token services: OAuth (service accounts and refresh tokens), STS (federation), IAM
(impersonation) and a metadata server. Bodies of requests are kept in `bodies`, for who was asked with what.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from google.auth import jwt
from http_servers import Fault, Seen, Server

Reply = tuple[int, Mapping[str, str], bytes]

ACCOUNT = "reader@project.iam.gserviceaccount.com"
_AUDIENCE = "https://oauth2.googleapis.com/token"  # for any token_uri
CLIENT_SECRET, REFRESH_TOKEN, SUBJECT_TOKEN = (
    "GOCSPX-client-secret-0123456789",
    "1//0refresh-token-0123456789",
    "subject-token-0123456789",
)


@dataclasses.dataclass
class Stored:
    """An object. `encoding` is its Content-Encoding, of which the bytes already are."""

    data: bytes
    generation: int
    encoding: str = ""


class GcsServer(Server):
    """Serve objects as {bucket: {key: bytes}}.

    Args:
        content: the objects.
        faults: of answers with objects.
        private: whether a token is demanded; `issue` makes one.
        payer: the project that has to pay; None: the buckets' owner pays.
        listable: whether whoever may read may list.
        checks_conditions: whether a generation that is demanded counts, which emulators ignore.
        lifetime_s: for which tokens are said to be good; what counts is `expire`.
        public_key: of the service account, as PEM.

    Attributes:
        issued: tokens, in the order in which they were issued.
        refuses_tokens: whether token services refuse everybody.
        hangups: how many of the next requests to them are not answered.
        hashes: {(bucket, key): {"crc32c" or "md5": in base64}} of what is stored, as it is told.
    """

    def __init__(
        self,
        content: Mapping[str, Mapping[str, bytes]],
        faults: Sequence[Fault] = (),
        *,
        private: bool = False,
        payer: str | None = None,
        listable: bool = True,
        checks_conditions: bool = True,
        lifetime_s: int = 3600,
        public_key: bytes = b"",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._numbers = itertools.count(1700000000000001)
        self.objects: dict[str, dict[str, Stored]] = {bucket: {} for bucket in content}
        self.issued: list[str] = []
        self.refuses_tokens = False
        self.hangups = 0
        self.hashes: dict[tuple[str, str], dict[str, str]] = {}
        self.bodies: dict[int, str] = {}
        self._valid: set[str] = set()
        self._private, self._payer, self._listable = private, payer, listable
        self._checks_conditions, self._lifetime_s, self._public_key = checks_conditions, lifetime_s, public_key
        super().__init__({}, faults, tls=tls, check=self._check_all)
        for bucket, objects in content.items():
            for key, data in objects.items():
                self.put(bucket, key, data)

    def put(self, bucket: str, key: str, data: bytes, *, encoding: str = "") -> None:
        """Store an object, in place of what there may be."""
        self.objects[bucket][key] = Stored(data, next(self._numbers), encoding)
        self.files[_path(f"/{bucket}/{key}")] = data

    def issue(self) -> str:
        """Make a token."""
        token = f"ya29.token-{len(self.issued)}-0123456789abcdefghij"
        self.issued.append(token)
        self._valid.add(token)
        return token

    def expire(self) -> None:
        """End all tokens issued so far."""
        self._valid.clear()

    @property
    def base(self) -> str:
        """Its endpoint."""
        return self.url_of("")

    def asked(self, begin: str) -> list[Seen]:
        """Requests whose target begins with this."""
        return [seen for seen in self.seen if seen.target.startswith(begin)]

    # ---- answers

    def _read_request(self, reader: Any, number: int) -> Seen | None:
        seen = super()._read_request(reader, number)
        if seen is not None:
            self.bodies[seen.index] = reader.read(int(seen.headers.get("content-length", "0"))).decode()
        return seen

    def answer(self, sock: Any, seen: Seen) -> bool:
        if seen.method == "POST" and self.hangups:
            self.hangups -= 1
            return False
        path, mark, query = seen.target.partition("?")
        return super().answer(sock, dataclasses.replace(seen, target=_path(unquote(path)) + mark + query))

    def _check_all(self, seen: Seen) -> Reply | None:
        path = unquote(seen.target.partition("?")[0])
        if seen.method == "POST" or path.startswith("/computeMetadata/") or path == "/":
            return self._give_token(path, seen)
        if path == "/subject":
            return 200, {}, SUBJECT_TOKEN.encode()
        listing = path.startswith("/storage/v1/b/")
        refused = self._refuse(seen, listing)
        if refused is not None:
            return _complain(listing, *refused)
        if listing:
            return self._list(path.removeprefix("/storage/v1/b/").removesuffix("/o"), seen)
        bucket, _, key = path[1:].partition("/")
        if bucket not in self.objects:
            return _complain(False, 404, "NoSuchBucket", "The specified bucket does not exist.")
        if key not in self.objects[bucket]:
            return _complain(False, 404, "NoSuchKey", "The specified key does not exist.")
        demanded = seen.headers.get("x-goog-if-generation-match")
        if self._checks_conditions and demanded not in (None, str(self.objects[bucket][key].generation)):
            return _complain(False, 412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")
        return None

    def _refuse(self, seen: Seen, listing: bool) -> tuple[int, str, str] | None:
        token = seen.headers.get("authorization", "").removeprefix("Bearer ")
        if self._private and not token:
            return 401 if listing else 403, "AccessDenied", "Anonymous caller does not have access."  # as the service does
        if token and token not in self._valid:
            return 401, "AuthenticationRequired", f"Authentication required, not {token}."
        payer = seen.headers.get("x-goog-user-project")
        if self._payer is not None and payer is None:
            return 400, "UserProjectMissing", "Bucket is a requester pays bucket but no user project provided."
        if self._payer is not None and payer != self._payer:
            return 403, "UserProjectAccessDenied", "Caller does not have serviceusage.services.use."
        if listing and not self._listable:
            return 403, "AccessDenied", f"{ACCOUNT} does not have storage.objects.list access."
        return None

    def _list(self, bucket: str, seen: Seen) -> Reply:
        if bucket not in self.objects:
            return _complain(True, 404, "NoSuchBucket", "The specified bucket does not exist.")
        query = {name: values[0] for name, values in parse_qs(urlsplit(seen.target).query).items()}
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found: dict[str, Stored | None] = {}
        for key, stored in sorted(self.objects[bucket].items()):
            rest = key[len(prefix) :]
            if key.startswith(prefix) and delimiter and delimiter in rest:
                found[prefix + rest.partition(delimiter)[0] + delimiter] = None
            elif key.startswith(prefix):
                found[key] = stored
        names = [name for name in found if name > query.get("pageToken", "")][: min(1000, int(query.get("maxResults", 1000)))]
        page: dict[str, Any] = {
            "items": [_item(name, stored) for name in names if (stored := found[name]) is not None],
            "prefixes": [name for name in names if found[name] is None],
        }
        if names and names[-1] != next(reversed(found)):
            page["nextPageToken"] = names[-1]
        return _json(200, {name: value for name, value in page.items() if value})

    def _send_object(self, sock: Any, seen: Seen, data: bytes, do: str, options: dict[str, Any]) -> bool:
        bucket, _, key = unquote(seen.target.partition("?")[0])[1:].partition("/")
        stored = self.objects[bucket][key]
        told = {
            "x-goog-generation": str(stored.generation),
            "x-goog-stored-content-encoding": stored.encoding or "identity",
            "x-goog-stored-content-length": str(len(data)),
            "x-guploader-uploadid": f"upload-{seen.index}",
            "x-goog-hash": ", ".join(f"{name}={value}" for name, value in self.hashes.get((bucket, key), {}).items()),
        }
        options = {"ignore_if_match": not self._checks_conditions, **options}
        if stored.encoding and seen.headers.get("accept-encoding") != "gzip":  # decompressed on the way
            return self.reply(sock, 200, {"Content-Length": "", "Transfer-Encoding": "chunked", **told}, b"2\r\n{}\r\n0\r\n\r\n")
        told |= {"Content-Encoding": stored.encoding} if stored.encoding else {}
        return super()._send_object(sock, seen, data, do, {**options, "headers": told | options.get("headers", {})})

    # ---- who gives tokens

    def _give_token(self, path: str, seen: Seen) -> Reply:
        if path == "/" or path.startswith("/computeMetadata/"):
            return self._metadata(path, seen)
        body = self.bodies[seen.index]
        if self.refuses_tokens:
            return _json(400, {"error": "invalid_grant", "error_description": f"no more of {body}"})
        if path == "/token":
            return self._oauth(body)
        if path == "/sts":
            if parse_qs(body)["subject_token"] != [SUBJECT_TOKEN]:
                return _json(400, {"error": "invalid_grant", "error_description": f"unknown {body}"})
            return _json(200, {"access_token": self.issue(), "expires_in": self._lifetime_s, "token_type": "Bearer"})
        account = path.rpartition("/")[2].partition(":")[0]
        if seen.headers.get("authorization", "").removeprefix("Bearer ") not in self._valid or account != ACCOUNT:
            return _json(403, {"error": {"code": 403, "message": "iam.serviceAccounts.getAccessToken denied"}})
        return _json(200, {"accessToken": self.issue(), "expireTime": "2099-01-01T00:00:00Z"})

    def _oauth(self, body: str) -> Reply:
        given = {name: values[0] for name, values in parse_qs(body).items()}
        if given["grant_type"] == "refresh_token":
            known = (given["refresh_token"], given["client_secret"]) == (REFRESH_TOKEN, CLIENT_SECRET)
        else:
            claims = jwt.decode(given["assertion"], certs=self._public_key, audience=_AUDIENCE)
            known = claims["iss"] == ACCOUNT
        if not known:
            return _json(401, {"error": "invalid_client", "error_description": f"unknown {body}"})
        return _json(200, {"access_token": self.issue(), "expires_in": self._lifetime_s, "token_type": "Bearer"})

    def _metadata(self, path: str, seen: Seen) -> Reply:
        flavor = {"Metadata-Flavor": "Google"}
        if seen.headers.get("metadata-flavor") != "Google":
            return 403, {}, b""
        if path == "/":
            return 200, flavor, b""
        rest = path.removeprefix("/computeMetadata/v1/")
        if rest == "project/project-id":
            return 200, {**flavor, "Content-Type": "text/plain"}, b"project"
        if rest == "instance/service-accounts/default/":
            return _json(200, {"email": ACCOUNT, "scopes": ["https://www.googleapis.com/auth/cloud-platform"]}, flavor)
        if rest.endswith("/token"):
            return _json(200, {"access_token": self.issue(), "expires_in": self._lifetime_s, "token_type": "Bearer"}, flavor)
        return 404, {**flavor, "Content-Type": "text/plain"}, b""


def _path(decoded: str) -> str:
    return quote(decoded, safe="/")


def _json(status: int, body: object, headers: Mapping[str, str] | None = None) -> Reply:
    return status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(body).encode()


def _complain(in_json: bool, status: int, code: str, message: str) -> Reply:
    headers = {"x-guploader-uploadid": "upload-refused"}
    if not in_json:
        return status, headers, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    reasons = {401: "authError", 403: "forbidden", 404: "notFound", 412: "conditionNotMet"}
    error = {"code": status, "message": message, "errors": [{"domain": "global", "reason": reasons.get(status, "required")}]}
    return _json(status, {"error": error}, headers)


def _item(name: str, stored: Stored) -> dict[str, str]:
    md5 = base64.b64encode(hashlib.md5(stored.data).digest()).decode()
    return {"name": name, "size": str(len(stored.data)), "generation": str(stored.generation), "md5Hash": md5}


# ---- files that say who asks


def write_service_account(path: Path, server: GcsServer, private_key: str) -> str:
    """The key file of a service account that gets its tokens from the server."""
    info = {"type": "service_account", "client_email": ACCOUNT, "private_key": private_key, "private_key_id": "k1"}
    path.write_text(json.dumps(info | {"token_uri": server.url_of("/token"), "project_id": "project"}))
    return str(path)


def write_user(path: Path) -> str:
    """What `gcloud auth application-default login` leaves; google-auth knows itself where to go with it."""
    info = {"type": "authorized_user", "client_id": "client", "client_secret": CLIENT_SECRET, "refresh_token": REFRESH_TOKEN}
    path.write_text(json.dumps(info))
    return str(path)


def write_federated(path: Path, server: GcsServer, *, impersonating: bool = False, by_url: bool = False) -> str:
    """Workload identity federation: a token in a file, or from a url, is exchanged at the server's STS."""
    token_file = path.with_suffix(".subject")
    token_file.write_text(SUBJECT_TOKEN)
    info: dict[str, Any] = {
        "type": "external_account",
        "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/pool/providers/provider",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": server.url_of("/sts"),
        "credential_source": {"url": server.url_of("/subject")} if by_url else {"file": str(token_file)},
    }
    if impersonating:
        info["service_account_impersonation_url"] = server.url_of(f"/iam/{ACCOUNT}:generateAccessToken")
    path.write_text(json.dumps(info))
    return str(path)
