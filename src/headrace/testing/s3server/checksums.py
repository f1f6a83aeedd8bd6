"""Checksums of whole objects as x-amz-checksum-* gives them. Pure.

crc32 and the hashes run at the speed of C. The standard library has neither crc32c nor crc64nvme, so these go byte by byte, at
some 10 MB/s: meant for small objects. Parameters: "CRC-32C" and "CRC-64/NVME" in the catalogue of parametrised CRC algorithms.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable
from functools import lru_cache

ALGORITHMS = ("crc32", "crc32c", "crc64nvme", "sha1", "sha256")

_REFLECTED = {"crc32c": (0x82F63B78, 32), "crc64nvme": (0x9A6C9329AC4BC9B5, 64)}


def checksum(algorithm: str, chunks: Iterable[bytes]) -> str:
    """Return the checksum of some bytes in base64, big end first.

    Raises:
        ValueError: there is no such algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no checksum algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    if algorithm.startswith("sha"):
        digest = hashlib.new(algorithm, usedforsecurity=False)
        for chunk in chunks:
            digest.update(chunk)
        return base64.b64encode(digest.digest()).decode()
    if algorithm == "crc32":
        value = 0
        for chunk in chunks:
            value = zlib.crc32(chunk, value)
        return base64.b64encode(value.to_bytes(4, "big")).decode()
    polynomial, bits = _REFLECTED[algorithm]
    return base64.b64encode(_crc(polynomial, bits, chunks).to_bytes(bits // 8, "big")).decode()


def _crc(polynomial: int, bits: int, chunks: Iterable[bytes]) -> int:
    table, ones = _table(polynomial), (1 << bits) - 1
    value = ones
    for chunk in chunks:
        for byte in chunk:
            value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ ones


@lru_cache(maxsize=2)
def _table(polynomial: int) -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (polynomial if value & 1 else 0)
        table.append(value)
    return tuple(table)
