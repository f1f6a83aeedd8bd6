"""Who asks: what was given and what the environment says, and what makes each request theirs.

An account key never travels: it signs SAS tokens that may read one container for an hour, by azure-storage-blob's own function,
and the byte engine adds them to its urls. (Headers signed with the key itself would have to be made by hand: the library signs
inside of its own pipeline only.) SAS tokens that were given are used as they are. Bearer tokens come from azure-identity, or
from any object with its `get_token`; they are asked for again shortly before they expire, and when the service refuses them.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import math
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, cast
from urllib.parse import parse_qs

from headrace._environment import AzureSettings
from headrace.errors import OptionError
from headrace.sources.azure._address import PUBLIC_SUFFIX, Place, Service, account_of, normalise_sas
from headrace.sources.azure._connection_string import ConnectionString, parse_connection_string
from headrace.sources.azure._errors import CredentialsError

_SCOPE: Final = "https://storage.azure.com/.default"  # of all accounts, in all clouds
_SAS_LIFETIME_S: Final = 3600.0
_EARLY_S: Final = 300.0  # before the end a token is renewed
_AGAIN_S: Final = 30.0  # after a renewal failed and the old one still counts
_LOG_IN: Final = (
    "Log in (az login), use a managed or workload identity, or set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or "
    "AZURE_STORAGE_CONNECTION_STRING; for a public container ask anonymously (AZURE_SKIP_SIGNATURE=1)"
)
_MISSING: Final = "az:// needs {}, which is not installed: pip install 'headrace[azure]'"


class AccessToken(Protocol):
    """A bearer token, and when it ends (seconds since 1970)."""

    @property
    def token(self) -> str: ...
    @property
    def expires_on(self) -> int: ...


class TokenCredential(Protocol):
    """Whatever hands out bearer tokens as the credentials of azure-identity do. Called from one thread at a time."""

    def get_token(self, *scopes: str, **kwargs: Any) -> AccessToken:
        """A token for a scope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureCredentials:
    """Who asks, and where; the same for listing, reading and pulling. What is None comes from the environment.

    Without key, SAS token, connection string, token credential or `anonymous`, here or in the environment, it is
    azure-identity's DefaultAzureCredential: workload and managed identities, service principals, az login.

    Attributes:
        account_name: the storage account whose containers are meant where a url names none.
        account_key: signs SAS tokens for the containers that are read.
        sas_token: with or without '?'; it needs to allow r, and l for folders.
        connection_string: as the portal shows it; account, endpoint and key or SAS token in one.
        token_credential: an object with azure-identity's `get_token`.
        endpoint: http(s)://host[:port][/path] of the account's blob service, for emulators and private clouds.
        anonymous: sign nothing.

    Raises:
        OptionError: more than one way to ask, or a key or connection string that is none.
    """

    account_name: str | None = None
    account_key: str | None = field(default=None, repr=False)
    sas_token: str | None = field(default=None, repr=False)
    connection_string: str | None = field(default=None, repr=False)
    token_credential: TokenCredential | None = field(default=None, repr=False)
    endpoint: str | None = None
    anonymous: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        ways = {
            "account_key": self.account_key,
            "sas_token": self.sas_token,
            "connection_string": self.connection_string,
            "token_credential": self.token_credential,
            "anonymous": self.anonymous or None,
        }
        given = [name for name, value in ways.items() if value is not None]
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} are different ways to ask: give one", option="credentials")
        empty = [name for name in given if ways[name] == ""]
        if empty:
            raise OptionError(f"{empty[0]} is empty; leave it out to have it from the environment", option="credentials")
        if self.account_key is not None:
            _check_key(self.account_key)
        if self.sas_token is not None:
            _check_sas(self.sas_token)
        if self.connection_string is not None:
            parse_connection_string(self.connection_string)

    @property
    def says_who(self) -> bool:
        """Whether one of the ways to ask is given."""
        ways = (self.account_key, self.sas_token, self.connection_string, self.token_credential)
        return self.anonymous or any(way is not None for way in ways)


GiveCredentials: TypeAlias = "Callable[[], AzureCredentials]"
Given: TypeAlias = "AzureCredentials | GiveCredentials | TokenCredential | None"
_Way: TypeAlias = Literal["anonymous", "key", "sas", "token", "default"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who asks, and where, once arguments and environment are put together."""

    way: _Way
    place: Place
    secret: str = field(default="", repr=False)
    token_credential: TokenCredential | None = field(default=None, repr=False)


def resolve(given: AzureCredentials, settings: AzureSettings) -> Asker:
    """Put together what was given and what the environment says.

    Arguments come first. Secrets of the environment belong to the account that it names, and count for no other. In the
    environment a connection string comes before a key, a key before a SAS token, as for Run:ai's streamer.

    Raises:
        OptionError: a value that cannot be used.
    """
    if given.connection_string is not None:
        return _by_connection(parse_connection_string(given.connection_string), given, settings)
    around = _surroundings(settings)
    named = given.account_name or (account_of(given.endpoint) if given.endpoint else None)
    if named is not None and around.place.owner not in (None, named):
        around = Asker(way="default", place=Place(suffix=around.place.suffix))
    place = replace(
        around.place,
        account=given.account_name or (None if named else around.place.account),
        endpoint=given.endpoint or around.place.endpoint,
    )
    if given.says_who:
        return _asker(place, given.account_key, given.sas_token, given.anonymous, given.token_credential)
    return replace(around, place=place)


def _surroundings(settings: AzureSettings) -> Asker:
    if settings.connection_string is not None and not settings.anonymous:
        return _by_connection(parse_connection_string(settings.connection_string), AzureCredentials(), settings)
    suffix = settings.endpoint_suffix or PUBLIC_SUFFIX
    place = Place(account=settings.account_name, endpoint=settings.endpoint, suffix=suffix)
    return _asker(place, settings.account_key, settings.sas_token, settings.anonymous, None)


def _by_connection(found: ConnectionString, given: AzureCredentials, settings: AzureSettings) -> Asker:
    place = Place(
        account=found.account_name or given.account_name,
        endpoint=given.endpoint or found.endpoint,
        suffix=settings.endpoint_suffix or PUBLIC_SUFFIX,
    )
    anonymous = found.account_key is None and found.sas_token is None
    return _asker(place, found.account_key, found.sas_token, anonymous, None)


def _asker(place: Place, key: str | None, sas: str | None, anonymous: bool, credential: TokenCredential | None) -> Asker:
    if anonymous:
        return Asker(way="anonymous", place=place)
    if key is not None:
        return Asker(way="key", place=place, secret=_check_key(key))
    if sas is not None:
        return Asker(way="sas", place=place, secret=_check_sas(sas))
    return Asker(way="default" if credential is None else "token", place=place, token_credential=credential)


def _check_sas(token: str) -> str:
    normal = normalise_sas(token)
    if not re.search(r"(^|&)sig=[^&]", normal):
        raise OptionError("the SAS token has no signature, sig=... (it is not shown)", option="sas_token")
    return normal


def _check_key(key: str) -> str:
    try:
        base64.b64decode(key, validate=True)
    except (binascii.Error, ValueError):
        raise OptionError("the account key is no base64", option="account_key") from None
    return key


def _credentials(given: object) -> AzureCredentials:
    if given is None:
        return AzureCredentials()
    if isinstance(given, AzureCredentials):
        return given
    if hasattr(given, "get_token"):
        return AzureCredentials(token_credential=cast(TokenCredential, given))
    message = f"credentials for az:// are AzureCredentials or an object with get_token, not {type(given).__name__}"
    raise OptionError(message, option="credentials")


class _Held(NamedTuple):
    """A token, or a SAS token that was made here: when it should be renewed, and when it ends."""

    text: str
    renew_at: float
    ends_at: float


class Identity:
    """Credentials that can be renewed, and an account that stays.

    Args:
        given: what the caller wants; a function is asked again when what it gave is refused.
        settings: what the environment says.
        now: seconds since 1970.

    Attributes:
        place: where accounts are.
    """

    def __init__(self, given: Given, settings: AzureSettings, now: Callable[[], float]) -> None:
        self._settings, self._now = settings, now
        is_function = callable(given) and not hasattr(given, "get_token")
        self._give: GiveCredentials | None = cast(GiveCredentials, given) if is_function else None
        self._asker = resolve(_credentials(self._give() if self._give is not None else given), settings)
        self._renew_at = self._end_of(self._asker)
        self.place = self._asker.place
        self._lock = threading.Lock()
        self._token: _Held | None = None
        self._made: dict[tuple[str, str], _Held] = {}  # SAS tokens by account and container
        self._generation = 0  # of credentials, in the order in which they were had
        self._spent = False
        self._used = threading.local()  # the generation that this thread has asked with last

    @property
    def renewable(self) -> bool:
        """Whether asking again may bring other credentials."""
        return self._give is not None or self._asker.way in ("token", "default")

    @property
    def expired(self) -> bool:
        """Whether what is used now has ended, by its own date."""
        with self._lock:
            if self._asker.way == "sas":
                return _sas_end(self._asker.secret) <= self._now()
            return self._token is not None and self._token.ends_at <= self._now()

    def prove(self, service: Service, container: str) -> tuple[str, dict[str, str]]:
        """What makes a request ours: (what to add to the query, headers).

        Raises:
            CredentialsError: there are no credentials, or they cannot be had.
            OptionError: they are for another account, or must not be sent there.
        """
        with self._lock:
            if self._spent or self._now() >= self._renew_at:
                self._renew()
            self._used.generation = self._generation
            asker = self._asker
            if asker.way == "anonymous":
                return "", {}
            if asker.way in ("key", "sas"):
                _check_account(asker, service)
                return (self._signed(asker, service, container) if asker.way == "key" else asker.secret), {}
            if not service.is_private:
                raise OptionError(f"a bearer token is not sent to {service.base} without TLS", option="endpoint")
            return "", {"Authorization": f"Bearer {self._bearer()}"}

    def note_refusal(self) -> None:
        """Have the next request made with newer credentials: the service does not take those that this thread has used last.

        Many threads find out at the same time, and only the first one asks for newer ones.
        """
        with self._lock:
            self._spent = self._spent or getattr(self._used, "generation", 0) == self._generation

    def _renew(self) -> None:
        self._spent, self._token = False, None
        self._generation += 1
        if self._give is not None:
            self._asker = replace(resolve(_credentials(self._give()), self._settings), place=self.place)
            self._renew_at = self._end_of(self._asker)
            self._made.clear()

    def _end_of(self, asker: Asker) -> float:
        """When a SAS token is to be asked for again, if somebody can be asked."""
        if self._give is None or asker.way != "sas":
            return math.inf
        return _renewal(_sas_end(asker.secret), self._now())

    # ---- account keys

    def _signed(self, asker: Asker, service: Service, container: str) -> str:
        """A SAS token for a container, made at most half an hour ago."""
        account = service.account or asker.place.account
        if account is None:
            raise OptionError("the account's name is needed beside its key (account_name=)", option="account_name")
        now = self._now()
        held = self._made.get((account, container))
        if held is None or now >= held.renew_at:
            text = _make_sas(account, container, asker.secret, now + _SAS_LIFETIME_S, tls=service.base.startswith("https:"))
            held = self._made[account, container] = _Held(text, now + _SAS_LIFETIME_S / 2, now + _SAS_LIFETIME_S)
        return held.text

    # ---- bearer tokens

    def _bearer(self) -> str:
        """A token that counts for some time yet. Where no newer one can be had, the old one does until its end."""
        now, held = self._now(), self._token
        if held is None or now >= held.renew_at:
            try:
                held = self._ask_for_token(now)
            except CredentialsError:
                if held is None or now >= held.ends_at:
                    raise
                held = held._replace(renew_at=now + _AGAIN_S)
            self._token = held
        return held.text

    def _ask_for_token(self, now: float) -> _Held:
        try:
            found = self._get_token()
        except OptionError:
            raise
        except _failures() as exc:
            error = CredentialsError(f"no token for Azure Storage could be had: {_words_of(exc)}. {_LOG_IN}")
            error.hint = _LOG_IN
            raise error from None
        return _Held(found.token, _renewal(float(found.expires_on), now), float(found.expires_on))

    def _get_token(self) -> AccessToken:
        if self._asker.token_credential is not None:
            return self._asker.token_credential.get_token(_SCOPE)
        # Made anew each time: it holds connections, and reads files and environment when it is made.
        with _import("azure.identity").DefaultAzureCredential() as credential:
            found: AccessToken = credential.get_token(_SCOPE)
            return found


def _renewal(ends_at: float, now: float) -> float:
    """When to renew what ends then: some minutes before, but not sooner than in the second half of its time."""
    return max(ends_at - _EARLY_S, (now + ends_at) / 2)


def _check_account(asker: Asker, service: Service) -> None:
    if asker.place.owner is not None and service.account is not None and asker.place.owner != service.account:
        raise OptionError(
            f"the key or SAS token belongs to account {asker.place.owner}, and not to {service.account}", option="credentials"
        )


def _make_sas(account: str, container: str, key: str, ends_at: float, *, tls: bool) -> str:
    made: str = _import("azure.storage.blob").generate_container_sas(
        account,
        container,
        account_key=key,
        permission="rl",
        expiry=datetime.fromtimestamp(ends_at, timezone.utc),
        protocol="https" if tls else None,
    )
    return normalise_sas(made)


def _sas_end(token: str) -> float:
    """When a SAS token ends, in seconds since 1970; never where it does not say it in a way that can be read."""
    text = parse_qs(token).get("se", [""])[0].replace("Z", "+00:00")
    try:
        end = datetime.fromisoformat(text)
    except ValueError:
        return math.inf
    return (end if end.tzinfo is not None else end.replace(tzinfo=timezone.utc)).timestamp()


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise OptionError(_MISSING.format(module.replace(".", "-")), option="url") from exc


def _failures() -> tuple[type[BaseException], ...]:
    """What getting a token may raise: azure's own errors where that is loaded."""
    errors = sys.modules.get("azure.core.exceptions")
    return (OSError, ValueError, *([errors.AzureError] if errors is not None else []))


def _words_of(exc: BaseException) -> str:
    """What went wrong: of each line the first sentence, since a chain of credentials tells of every one that it has tried."""
    sentences = (" ".join(line.split()).partition(". ")[0] for line in str(exc).splitlines())
    return f"{type(exc).__name__}: {'; '.join(text for text in sentences if text and 'aka.ms' not in text)[:900]}"
