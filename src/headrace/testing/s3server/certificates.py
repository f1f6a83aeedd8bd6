"""Certificates for servers on loopback: an authority and a leaf that it signed, made by the `openssl` command.

Two, since rustls takes no self-signed leaf even where it is given as the root. Both say what RFC 5280 asks for (4.2.1.1 and
4.2.1.3): from 3.13 on Python trusts no authority that does not say that it signs, and no leaf that does not name its key.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files in PEM: what clients trust, and what a server shows (`tls=(cert, key)`)."""

    ca: Path
    cert: Path
    key: Path


def make_certificates(folder: Path, *, names: Sequence[str] = ("localhost", "*.localhost"), days: int = 2) -> Certificates:
    """Make certificates for 127.0.0.1 and some names.

    Raises:
        FileNotFoundError: there is no `openssl`.
        subprocess.CalledProcessError: it failed.
    """
    made = Certificates(folder / "ca.pem", folder / "leaf.pem", folder / "leaf.key")
    alternatives = ",".join([*(f"DNS:{name}" for name in names), "IP:127.0.0.1"])
    extensions = (f"subjectAltName={alternatives}", "basicConstraints=CA:FALSE", "authorityKeyIdentifier=keyid")
    (folder / "leaf.ext").write_text("\n".join(extensions) + "\n")
    itself = ("-subj", "/CN=headrace test CA", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
    _openssl(folder, "req", "-x509", *_KEY, "-days", str(days), *itself, "-keyout", "ca.key", "-out", "ca.pem")
    _openssl(folder, "req", *_KEY, "-subj", "/CN=localhost", "-keyout", "leaf.key", "-out", "leaf.csr")
    authority = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "leaf.ext")
    _openssl(folder, "x509", "-req", "-in", "leaf.csr", *authority, "-days", str(days), "-out", "leaf.pem")
    return made


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
