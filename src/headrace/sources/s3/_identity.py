"""Who asks: credentials and configuration, from what was given and from botocore, and the signature on each request.

Keys are asked for at every try, so that those that botocore renews are always fresh; keys that the store calls expired are
fetched anew, files and environment included. No secret is kept anywhere but in the credentials themselves.

Neither the range nor the version that is demanded is signed, so one signature is good for all ranges of an object while its keys
are the same and its date is recent: making one takes as long as all else that a request costs here.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from headrace._environment import S3Settings
from headrace.errors import OptionError, SourceError
from headrace.sources.s3._address import Place
from headrace.sources.s3._errors import CredentialsError

_OLDEST_REGION: Final = "us-east-1"  # who asks there for a bucket that is elsewhere is told where
_NO_KEYS: Final = (
    "no AWS credentials were found. Give an access key, a profile or a role, as for the aws command; "
    "for a public bucket ask anonymously (S3Credentials(anonymous=True), or RUNAI_STREAMER_S3_UNSIGNED=1)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Credentials:
    """Who asks, and where; the same for listing, reading and pulling. None: as the environment and ~/.aws say.

    Attributes:
        access_key_id, secret_access_key, session_token: keys; all from one place, so that one without the other is refused.
        region: of the buckets; found out where it is another.
        endpoint: http(s)://host[:port] of a store that is not Amazon's.
        profile: in ~/.aws/config.
        anonymous: sign nothing.
        requester_pays: agree to pay for reading others' buckets.
        virtual_hosted: bucket in the host's name (True) or in the path (False); None: as it suits.

    Raises:
        OptionError: half a pair of keys, or keys and anonymous at once.
    """

    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    region: str | None = None
    endpoint: str | None = None
    profile: str | None = None
    anonymous: bool = False
    requester_pays: bool = False
    virtual_hosted: bool | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise OptionError("access_key_id and secret_access_key are given together", option="credentials")
        if self.session_token and not self.access_key_id:
            raise OptionError("session_token is given with the access key that it belongs to", option="credentials")
        if self.anonymous and self.access_key_id:
            raise OptionError("who is anonymous has no access key", option="credentials")


_SIGNED_AGAIN_S: Final = 60.0  # stores take signatures for 15 minutes, clocks that are wrong included
_SIGNATURES: Final = 4096  # remembered ones: an object each


class _Signature(NamedTuple):
    """Headers that sign a request, the keys that they were made with, and when."""

    headers: Mapping[str, str]
    keys: Any
    made_at: float


GiveCredentials: TypeAlias = "Callable[[], S3Credentials]"


def _botocore(module: str) -> Any:
    try:
        return importlib.import_module(f"botocore.{module}")
    except ImportError as exc:
        raise OptionError("s3:// needs botocore, which is not installed: pip install 'headrace[s3]'", option="url") from exc


class _Unlogged(str):
    """What botocore hashes and must not log: at DEBUG it writes down all that it signs, session tokens included."""

    __slots__ = ()

    def __str__(self) -> str:
        return "REDACTED"


class _Discretion(logging.Filter):
    """Drops what botocore says at DEBUG about the secrets that it fetches for us, on the thread where it does."""

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Drop it here and now."""
        before = getattr(self._here, "is_on", False)
        self._here.is_on = True
        try:
            yield
        finally:
            self._here.is_on = before

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG or not getattr(self._here, "is_on", False)


_TALKATIVE: Final = ("auth", "endpoint", "hooks", "parsers", "retryhandler", "retries.standard")  # they log bodies and tokens
_discretion: Final = _Discretion()


class Identity:
    """Credentials that can be renewed, and configuration that stays.

    Args:
        given: what the caller wants; a function is asked again when what it gave has expired.
        settings: what the environment says that botocore does not read.

    Attributes:
        given: as it was at the beginning; everything but keys counts for good.
    """

    def __init__(self, given: S3Credentials | GiveCredentials | None, settings: S3Settings) -> None:
        self._give = given if callable(given) else None
        self.given = _checked(given()) if callable(given) else given or S3Credentials()
        self._settings = settings
        self._lock = threading.Lock()
        self._session: Any = None
        self._keys: Any = None
        self._latest = self.given
        self._generation = 0  # of keys, in the order in which they were had
        self._spent = False
        self._signatures: dict[tuple[Any, ...], _Signature] = {}
        self._signed = threading.local()  # the generation that this thread has signed with last

    @property
    def anonymous(self) -> bool:
        """Whether nothing is signed."""
        return self.given.anonymous or (self._settings.unsigned and not self.given.access_key_id)

    @property
    def renewable(self) -> bool:
        """Whether asking again may bring other keys."""
        return not self.anonymous and (self._give is not None or not self.given.access_key_id)

    def region(self) -> str:
        """Where buckets are supposed to be."""
        return self.given.region or self._settings.region or self._configured("region") or _OLDEST_REGION

    def ca_bundle(self) -> str | None:
        """A file of CAs to trust, from AWS_CA_BUNDLE or the profile."""
        found: str | None = self._configured("ca_bundle")
        return found

    def place(self) -> Place:
        """Where buckets are: AWS_ENDPOINT_URL_S3 before AWS_ENDPOINT_URL before the profile's, as in botocore."""
        virtual = self.given.virtual_hosted
        if virtual is None:
            virtual = self._settings.virtual_hosted
        if virtual is None:
            style = (self._scoped().get("s3") or {}).get("addressing_style")
            virtual = {"path": False, "virtual": True}.get(str(style))
        fips, dualstack = (bool(self._configured(name)) for name in ("use_fips_endpoint", "use_dualstack_endpoint"))
        return Place(endpoint=self.given.endpoint or self._endpoint(), virtual=virtual, fips=fips, dualstack=dualstack)

    def sign(self, url: str, headers: Mapping[str, str], *, region: str, method: str = "GET") -> dict[str, str]:
        """Headers that sign a GET, or another request, of this url.

        Args:
            url: as it goes over the wire.
            headers: that will be sent; Host and those of x-amz- are signed.
            region: for which the signature counts.
            method: of the request.

        Raises:
            CredentialsError: there are no keys, or they cannot be had.
        """
        if self.anonymous:
            return {}
        keys = self._frozen()
        signed = {name: value for name, value in headers.items() if name.lower() == "host" or name.lower().startswith("x-amz-")}
        subject, now = (method, url, region, *signed.items()), time.monotonic()
        known = self._signatures.get(subject)
        if known is None or known.keys != keys or now - known.made_at > _SIGNED_AGAIN_S:
            if len(self._signatures) >= _SIGNATURES:
                self._signatures.clear()
            known = self._signatures[subject] = _Signature(
                self._signature(url, signed, keys, region=region, method=method), keys, now
            )
        return dict(known.headers)

    @staticmethod
    def _signature(url: str, signed: Mapping[str, str], keys: Any, *, region: str, method: str) -> dict[str, str]:
        request = _botocore("awsrequest").AWSRequest(method=method, url=url, headers=dict(signed))
        signer = _botocore("auth").S3SigV4Auth(keys, "s3", region)
        canonical_request = signer.canonical_request
        signer.canonical_request = lambda request: _Unlogged(canonical_request(request))
        signer.add_auth(request)
        return {name: str(value) for name, value in request.headers.items() if name.lower() != "host"}

    def note_refusal(self) -> None:
        """Have the next signature made with newer keys: the store does not take those that this thread has signed with.

        Many threads find out at the same time, and only the first one asks for newer ones.
        """
        with self._lock:
            self._spent = self._spent or getattr(self._signed, "generation", 0) == self._generation

    def _frozen(self) -> Any:
        with self._lock:
            if self._spent:
                self._forget_keys()
            if self._keys is None:
                self._keys = self._asked(self._find_keys)
            keys, self._signed.generation = self._keys, self._generation
        return self._asked(keys.get_frozen_credentials)  # botocore renews them when their time is nearly over

    def _forget_keys(self) -> None:
        self._keys, self._spent = None, False
        self._signatures.clear()
        self._generation += 1
        if self._give is not None:
            self._latest = _checked(self._give())
        else:
            self._session = None  # a new one reads files and environment again

    def _find_keys(self) -> Any:
        given = self._latest
        if given.access_key_id:
            return _botocore("credentials").Credentials(given.access_key_id, given.secret_access_key, given.session_token)
        # The environment comes first, unless a profile is asked for. Asking it alone takes no session with all that clients need,
        # nor the chain of all other places: 15 ms of CPU time (2026-11-30).
        keys = _botocore("credentials").EnvProvider().load() if self.given.profile is None else None
        if keys is None:
            keys = self._make_session(for_clients=True).get_credentials()
        if keys is None:
            raise CredentialsError(_NO_KEYS)
        return keys

    # ---- configuration

    def _open_session(self) -> Any:
        if self._session is None:
            self._session = self._make_session(for_clients=False)
        return self._session

    def _make_session(self, *, for_clients: bool) -> Any:
        """A session of botocore's; where it makes clients, which some kinds of keys are fetched with, with their handlers."""
        for name in _TALKATIVE:
            logging.getLogger(f"botocore.{name}").addFilter(_discretion)  # once, however often
        return _botocore("session").Session(profile=self.given.profile, include_builtin_handlers=for_clients)

    def _configured(self, name: str) -> Any:
        return self._asked(lambda: self._open_session().get_config_variable(name))

    def _scoped(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._asked(lambda: self._open_session().get_scoped_config())
        return found

    def _endpoint(self) -> str | None:
        if self._configured("ignore_configured_endpoint_urls"):
            return None
        if self._settings.endpoint:
            return self._settings.endpoint
        scoped = self._scoped()
        services = self._asked(lambda: self._open_session().full_config).get("services") or {}
        ours = (services.get(scoped.get("services")) or {}).get("s3") or {}
        return ours.get("endpoint_url") or scoped.get("endpoint_url") or None

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """What botocore answers; what it raises becomes ours here."""
        try:
            with _discretion.kept():
                return ask()
        except (SourceError, OptionError):
            raise
        except Exception as exc:  # noqa: BLE001 - of botocore, of what it reads and of whom it asks: there is no common class
            raise CredentialsError(f"cannot get AWS credentials: {type(exc).__name__}{_said(exc)}") from None


def _said(exc: Exception) -> str:
    """What an exception says, as far as it may be shown: what a process prints, and what cannot be parsed, may be a secret."""
    exceptions = _botocore("exceptions")
    if isinstance(exc, OSError):
        return f": {exc.strerror}: {exc.filename}" if exc.filename else f": {exc.strerror}"
    if not isinstance(exc, (exceptions.BotoCoreError, exceptions.ClientError)):
        return ""
    kwargs = getattr(exc, "kwargs", {})
    return f": {kwargs['provider']} failed" if "error_msg" in kwargs and "provider" in kwargs else f": {exc}"


def _checked(given: object) -> S3Credentials:
    """What the caller's function gave."""
    if not isinstance(given, S3Credentials):
        raise OptionError(
            f"credentials are a function, which returned {type(given).__name__}, not S3Credentials", option="credentials"
        )
    return given
