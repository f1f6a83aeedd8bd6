"""Digests of whole files: which ones a source tells of itself, and what computes them here.

Nothing here knows blocks or manifests. A checksum that no installed library computes is as good as none, but for its name.
"""

from __future__ import annotations

import hashlib
import importlib
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from headrace.sources.base import ByteSource

_PIECE_NBYTES: Final = 256 << 10  # stays in cache while it is copied and read again


class Hasher(Protocol):
    """What hashlib's hashes have in common."""

    def update(self, data: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


class _Crc:
    """A checksum that goes on from the last value, in the manner of hashlib."""

    def __init__(self, go_on: Callable[[memoryview, int], int], digits: int) -> None:
        self._go_on, self._digits = go_on, digits
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = self._go_on(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:0{self._digits}x}"


def _of_crt(name: str) -> Callable[[memoryview, int], int]:
    """By the AWS runtime."""
    found: Callable[[memoryview, int], int] = getattr(importlib.import_module("awscrt.checksums"), name)
    return found


def _of_anycrc(name: str) -> Callable[[memoryview, int], int]:
    """By anycrc, what headrace[checksums] brings."""
    found: Callable[[memoryview, int], int] = importlib.import_module("anycrc").Model(name).calc
    return found


def _of_google() -> Callable[[memoryview, int], int]:
    """By google-crc32c, which comes with Google's own client. It takes immutable bytes only."""
    module = importlib.import_module("google_crc32c")
    if module.implementation != "c":
        raise ImportError("google-crc32c is there without its C library, and a hundred times slower so")

    def go_on(data: memoryview, value: int) -> int:
        for at in range(0, len(data), _PIECE_NBYTES):
            value = module.extend(value, bytes(data[at : at + _PIECE_NBYTES]))
        return value

    return go_on


def _first(digits: int, *makers: Callable[[], Callable[[memoryview, int], int]]) -> Hasher:
    """A checksum for which Python has nothing quick, by the first library that is installed. Raises ImportError without any."""
    for make in makers:
        with suppress(ImportError, AttributeError):
            return _Crc(make(), digits)
    raise ImportError("no library that computes it is installed")


# Best first.
HASHERS: Final[dict[str, Callable[[], Hasher]]] = {
    "sha256": hashlib.sha256,
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "crc64nvme": lambda: _first(16, lambda: _of_crt("crc64nvme"), lambda: _of_anycrc("CRC64-NVME")),
    "crc32c": lambda: _first(8, lambda: _of_crt("crc32c"), _of_google, lambda: _of_anycrc("CRC32C")),
    "crc32": lambda: _Crc(zlib.crc32, 8),
    "md5": lambda: hashlib.md5(usedforsecurity=False),
}


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of a whole file.

    Attributes:
        algorithm: a key of `HASHERS`.
        value: in hexadecimal, lower case.
        origin: who says so, in words.
    """

    algorithm: str
    value: str
    origin: str


def digest_of(source: ByteSource, *, ask: bool = True) -> Digest | None:
    """The whole-file digest that a source has by itself: `sha256` (the hub) or `checksums` ({algorithm: hexadecimal}).

    Args:
        source: the file.
        ask: whether to look at `checksums`, for which a store may have to be asked.
    """
    sha256: object = getattr(source, "sha256", None)
    if isinstance(sha256, str):
        return Digest("sha256", sha256.lower(), "the hub")
    checksums = (getattr(source, "checksums", None) if ask else None) or {}
    for algorithm in HASHERS:
        if isinstance(value := checksums.get(algorithm), str) and _is_available(algorithm):
            return Digest(algorithm, value.lower(), "the store")
    return None


def _is_available(algorithm: str) -> bool:
    try:
        HASHERS[algorithm]()
    except ImportError:
        return False
    return True


def uncomputed(source: ByteSource) -> tuple[str, ...]:
    """Checksums that a source's store tells and that no installed library computes."""
    return tuple(name for name in HASHERS if name in (getattr(source, "checksums", None) or {}) and not _is_available(name))
