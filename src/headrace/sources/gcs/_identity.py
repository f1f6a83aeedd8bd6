"""Who asks: a token from google-auth, or a signature with an HMAC key, on each request.

Tokens are asked for at every try, so that those that google-auth renews are always fresh; one that the store refuses is had anew,
files and environment included. Many threads find out at the same time, and one of them renews. No secret is kept anywhere but in
the credentials themselves.
"""

from __future__ import annotations

import importlib
import json
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from headrace._environment import GcsSettings
from headrace.errors import OptionError, SourceError
from headrace.sources.gcs._address import Place
from headrace.sources.gcs._errors import CredentialsError
from headrace.sources.gcs._transport import Transport, google
from headrace.sources.http import Access, Request

_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_only"
_PAUSE_S: Final = 15.0  # between tries to renew a token that still counts
_NONE: Final = (
    "no Google credentials were found. Give a file (GOOGLE_APPLICATION_CREDENTIALS), log in (gcloud auth application-default "
    "login) or attach a service account; for a public bucket ask anonymously (GcsCredentials(anonymous=True), or "
    "RUNAI_STREAMER_GCS_USE_ANONYMOUS_CREDENTIALS=1)"
)
# What answers of token services quote may be a token, or what it was asked for with.
_SECRET: Final = re.compile(r"[\w~+=-]{24,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsCredentials:
    """Who asks, and where; the same for listing, reading and pulling. None: as the environment and google-auth say.

    Attributes:
        credential_file: a JSON file of Google's: service_account, authorized_user, external_account (workload identity
            federation), impersonated_service_account.
        google_credentials: an object of google-auth.
        token: an access token, which nobody renews; a function that returns `GcsCredentials` may.
        access_key_id, secret_access_key: an HMAC key.
        anonymous: say nothing about who asks.
        impersonate: e-mail address of a service account that the credentials may impersonate.
        user_project: project that pays where who asks pays.
        endpoint: http(s)://host[:port] of an emulator, or a private or regional endpoint.

    Raises:
        OptionError: half an HMAC key, or two ways to say who asks.
    """

    credential_file: str | None = None
    google_credentials: Any = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    anonymous: bool = False
    impersonate: str | None = None
    user_project: str | None = None
    endpoint: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise OptionError("access_key_id and secret_access_key are given together", option="credentials")
        if len(self.ways) > 1:
            raise OptionError(f"{' and '.join(self.ways)} are two ways to say who asks; give one", option="credentials")
        if self.impersonate and self.ways and self.ways[0] in ("token", "access_key_id", "anonymous"):
            raise OptionError(f"{self.ways[0]} cannot impersonate another account", option="credentials")
        if self.google_credentials is not None and not hasattr(self.google_credentials, "before_request"):
            kind = type(self.google_credentials).__name__
            raise OptionError(f"google_credentials is an object of google-auth, not {kind}", option="credentials")
        if self.token and not re.fullmatch(r"[\x21-\x7e]+", self.token):
            raise OptionError("the token has characters that no token has (it is not shown)", option="credentials")

    @property
    def ways(self) -> list[str]:
        """The names of what says who asks."""
        given = {
            "credential_file": self.credential_file,
            "google_credentials": self.google_credentials is not None,
            "token": self.token,
            "access_key_id": self.access_key_id,
            "anonymous": self.anonymous,
        }
        return [name for name, value in given.items() if value]


GiveCredentials: TypeAlias = "Callable[[], GcsCredentials]"


class Identity:
    """Credentials that can be renewed.

    Args:
        given: what the caller wants; a function is asked again when what it gave has expired.
        settings: what the environment says.
        access: how those who give tokens are reached.

    Attributes:
        given: as it was at the beginning; everything but keys and tokens counts for good.
        anonymous: whether requests say nothing about who asks. At an emulator that is so unless someone is named: it shall not
            see the tokens of this machine.
        signs: whether they are signed with an HMAC key.
    """

    def __init__(self, given: GcsCredentials | GiveCredentials | None, settings: GcsSettings, access: Access) -> None:
        self._give = given if callable(given) else None
        self.given = _checked(given()) if callable(given) else given or GcsCredentials()
        self._settings, self._clock, self._transport = settings, access.timing.clock, Transport(access)
        named = bool(self.given.ways) or bool(self.given.impersonate)
        at_emulator = settings.endpoint is not None and self.given.endpoint is None and settings.credential_file is None
        self.anonymous = self.given.anonymous or (not named and (settings.anonymous or at_emulator))
        self.signs = bool(self.given.access_key_id)
        self._lock = threading.Lock()
        self._latest = self.given
        self._google: Any = None  # credentials of google-auth; None until they are needed
        self._generation = 0  # of credentials, in the order in which they were had
        self._quiet_until = 0.0
        self._used = threading.local()  # the generation that this thread has asked with last

    @property
    def renewable(self) -> bool:
        """Whether asking again may bring something newer."""
        return self._give is not None or not (self.anonymous or self.signs or self.given.token)

    @property
    def user_project(self) -> str | None:
        """The project that pays."""
        return self.given.user_project

    def place(self) -> Place:
        """Where buckets are."""
        usual = f"https://storage.{self._settings.universe}"
        return Place(self.given.endpoint or self._settings.endpoint or usual)

    def authorize(self, request: Request) -> dict[str, str]:
        """Headers that say who asks.

        Args:
            request: as it will be sent.

        Raises:
            CredentialsError: there is nobody, or no token can be had.
        """
        if self.anonymous:
            return {}
        with self._lock:
            if request.refused and getattr(self._used, "generation", -1) == self._generation:
                self._forget()
            self._used.generation = self._generation
            headers = {} if self.signs else self._bearer()
            latest = self._latest
        if self.signs:
            return _signature(request.method, request.url, latest)
        return headers | ({"x-goog-user-project": self.user_project} if self.user_project else {})

    # ---- tokens; all with the lock held

    def _forget(self) -> None:
        """Have newer credentials found: the store does not take these."""
        self._generation += 1
        self._google = None
        if self._give is not None:
            self._latest = _checked(self._give())
        elif self._latest.google_credentials is not None:  # there are no others, but they may have a newer token
            self._google = self._asked(self._find)
            self._asked(lambda: self._google.refresh(self._transport))

    def _bearer(self) -> dict[str, str]:
        if self._latest.token:
            return {"Authorization": f"Bearer {self._latest.token}"}
        if self._google is None:
            self._google = self._asked(self._find)
        self._refresh_if_due()
        headers: dict[str, str] = {}
        self._asked(lambda: self._google.apply(headers))  # x-goog-user-project too, where the credentials name a project
        names = {"authorization": "Authorization"}
        return {names.get(name, name): value for name, value in headers.items()}

    def _refresh_if_due(self) -> None:
        """Renew the token minutes before its end; if that fails, it is good enough until then, and tried again after a pause."""
        if self._google.valid or self._clock() < self._quiet_until:
            return
        try:
            self._asked(lambda: self._google.refresh(self._transport))
        except CredentialsError:
            if self._google.token_state.name != "STALE":
                raise
            self._quiet_until = self._clock() + _PAUSE_S

    def _find(self) -> Any:
        given, auth = self._latest, google("auth.credentials")
        file = given.credential_file or self._settings.credential_file or self._settings.default_file
        if given.google_credentials is not None:
            found = given.google_credentials
        elif file is not None:
            found = self._load(file)
        else:
            found = self._default()
        if given.impersonate:
            kind = google("auth.impersonated_credentials").Credentials
            return kind(source_credentials=found, target_principal=given.impersonate, target_scopes=[_SCOPE])
        return auth.with_scopes_if_required(found, [_SCOPE])

    def _default(self) -> Any:
        """Application default credentials that come from no file: those of the metadata server."""
        try:
            return google("auth").default(request=self._transport)[0]
        except google("auth.exceptions").DefaultCredentialsError as exc:
            raise CredentialsError(f"{_NONE} (google-auth says: {_shown(exc).partition('. ')[0]})") from None

    def _load(self, file: str) -> Any:
        """Credentials of a file of any kind. Without scopes, so that nothing is asked of the network yet."""
        with open(file, encoding="utf-8") as opened:
            info = json.load(opened)
        with warnings.catch_warnings():
            # It warns that whoever brings a file decides whom it asks for tokens; here that is the user.
            warnings.simplefilter("ignore", DeprecationWarning)
            found, _ = google("auth").load_credentials_from_dict(info, request=self._transport)
        return found

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """What google-auth answers; what it raises becomes ours here."""
        exceptions = google("auth.exceptions")
        try:
            return ask()
        except (SourceError, OptionError):
            raise
        except json.JSONDecodeError as exc:
            raise CredentialsError(f"cannot get Google credentials: the file is not JSON ({exc})") from None
        except (exceptions.GoogleAuthError, OSError, ValueError, KeyError) as exc:
            raise CredentialsError(f"cannot get Google credentials: {type(exc).__name__}: {_shown(exc)}") from None


def _shown(error: Exception) -> str:
    """What an exception says, an answer that it quotes as text included, without what may be a secret."""
    if isinstance(error, OSError):  # of a file
        return str(error)
    said = " ".join(part for part in error.args if isinstance(part, str))
    return _SECRET.sub("REDACTED", " ".join(said.split()))[:300]


# ---- HMAC keys


def _botocore(module: str) -> Any:
    try:
        return importlib.import_module(f"botocore.{module}")
    except ImportError as exc:
        raise OptionError("HMAC keys need botocore, which is not installed: pip install 'headrace[gcs]'", option="url") from exc


def _signature(method: str, url: str, keys: GcsCredentials) -> dict[str, str]:
    """Headers that sign a request for this url as S3 has it signed, which the XML API understands; the region may be any.

    With them come x-amz- headers, beside which x-goog- ones are not allowed.
    """
    pair = _botocore("credentials").Credentials(keys.access_key_id, keys.secret_access_key)
    request = _botocore("awsrequest").AWSRequest(method=method, url=url, headers={"Host": urlsplit(url).netloc})
    _botocore("auth").S3SigV4Auth(pair, "s3", "auto").add_auth(request)
    return {name: str(value) for name, value in request.headers.items() if name.lower() != "host"}


def _checked(given: object) -> GcsCredentials:
    """What the caller's function gave."""
    if not isinstance(given, GcsCredentials):
        raise OptionError(
            f"credentials are a function, which returned {type(given).__name__}, not GcsCredentials", option="credentials"
        )
    return given
