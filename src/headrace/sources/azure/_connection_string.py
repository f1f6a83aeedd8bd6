"""PURE: a connection string of Azure Storage, as the portal hands it out, as plain data.

"Configure Azure Storage connection strings", Microsoft Learn: Name=value with semicolons between; names in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from headrace.errors import OptionError

# The emulator's account, the same on every machine and no secret.
_EMULATOR: Final = "devstoreaccount1"
_EMULATOR_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True, slots=True)
class ConnectionString:
    """Who asks, and where. Neither key nor SAS: anonymous."""

    account_name: str | None
    endpoint: str
    account_key: str | None = field(default=None, repr=False)
    sas_token: str | None = field(default=None, repr=False)


def parse_connection_string(text: str) -> ConnectionString:
    """Read a connection string.

    Raises:
        OptionError: it is none, or does not say where the blob service is. It is not quoted back.
    """
    fields: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise _wrong("it is a list of Name=value with semicolons between")
        fields[name.strip().lower()] = value.strip()
    if fields.get("usedevelopmentstorage", "").lower() == "true":
        proxy = fields.get("developmentstorageproxyuri", "http://127.0.0.1").rstrip("/")
        return ConnectionString(_EMULATOR, f"{proxy}:10000/{_EMULATOR}", account_key=_EMULATOR_KEY)
    account, key, sas = (fields.get(name) or None for name in ("accountname", "accountkey", "sharedaccesssignature"))
    return ConnectionString(account, _endpoint(fields, account), account_key=key, sas_token=None if key else sas)


def _endpoint(fields: dict[str, str], account: str | None) -> str:
    if fields.get("blobendpoint"):
        return fields["blobendpoint"]
    if account is None:
        raise _wrong("it names neither AccountName nor BlobEndpoint")
    protocol = fields.get("defaultendpointsprotocol") or "https"
    return f"{protocol}://{account}.blob.{fields.get('endpointsuffix') or 'core.windows.net'}"


def _wrong(why: str) -> OptionError:
    return OptionError(f"the connection string cannot be used: {why}", option="connection_string")
