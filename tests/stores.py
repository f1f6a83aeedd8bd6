"""What the tests of S3, Google Cloud Storage and Azure have in common: bytes, patience, a quiet environment, folders.

A folder in a store is a prefix: `PrefixFolderTests` is the contract of folders for that, `PrefixTests` what a prefix is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import pytest

from headrace.errors import SourceNotFoundError
from headrace.sources.base import Folder
from headrace.sources.http import Access, Policy
from headrace.testing import FolderTests
from headrace.testing.sources import error_of, pattern, read

KIB = 1 << 10
DATA = pattern(300_007)
BRISK = Policy(attempts=4, backoff_s=0.0, stall_timeout_s=10.0, connect_timeout_s=10.0, hedge_after_s=None)
QUICK = Access(policy=BRISK)
OF_NETWORKS = (
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
    *(f"{scheme}_proxy" for scheme in ("http", "https", "all", "no")),
    *(f"{scheme}_PROXY" for scheme in ("HTTP", "HTTPS", "ALL", "NO")),
)
NESTED = {
    "m/": b"", "m/a.safetensors": b"a", "m/sub/": b"", "m/sub/b.bin": b"bb", "m/sub/deep/c": b"c", "m/old_$folder$": b"",
    "m/empty": b"", "m2/x": b"x", "m.json": b"{}", "mm": b"",
}  # fmt: skip


def forget(monkeypatch: pytest.MonkeyPatch, names: Iterable[str]) -> None:
    """No variable of a store's, and none about networks, counts in a test."""
    for name in (*names, *OF_NETWORKS):
        monkeypatch.delenv(name, raising=False)


class Served:
    """Tests whose servers end with each of them: `stack` keeps these."""

    @pytest.fixture(autouse=True)
    def servers(self) -> Iterator[None]:
        with contextlib.ExitStack() as self.stack:
            yield


class InAStore(Served):
    """Tests of a store that holds given objects."""

    scheme: ClassVar[str]

    def store(self, content: dict[str, bytes]) -> tuple[Any, str]:
        """(the store, the name of a bucket in it that holds these objects)."""
        raise NotImplementedError


class PrefixFolderTests(InAStore, FolderTests):
    """The contract of folders, below a prefix that has a marker."""

    prefix = "llama/8b"

    def make(self, files: dict[str, bytes]) -> Folder:
        start = f"{self.prefix}/" if self.prefix else ""
        marker = {start: b""} if start else {}
        store, bucket = self.store(marker | {start + name: data for name, data in files.items()})
        folder: Folder = store.folder(f"{self.scheme}://{bucket}/{self.prefix}")
        return folder

    def make_missing(self) -> Folder:
        folder: Folder = self.store({})[0].folder(f"{self.scheme}://absent/m")
        return folder


class PrefixTests(InAStore):
    """What a prefix is.

    Attributes:
        nested: NESTED, or the same files with markers as the store has them.
        missing: the error where nothing has the prefix.
        of_bucket: the field of errors that names the bucket.
    """

    nested: ClassVar[dict[str, bytes]] = NESTED
    missing: ClassVar[type[SourceNotFoundError]]
    of_bucket: ClassVar[str] = "bucket"

    @pytest.mark.parametrize("slash", ["", "/"])
    def test_folder_is_an_exact_prefix_without_markers(self, slash: str) -> None:
        store, bucket = self.store(self.nested)
        folder = store.folder(f"{self.scheme}://{bucket}/m{slash}")
        assert folder.url == f"{self.scheme}://{bucket}/m"
        assert folder.names() == ["a.safetensors", "empty"]
        assert folder.walk() == ["a.safetensors", "empty", "sub/b.bin", "sub/deep/c"]
        assert [(entry.name, entry.key) for entry in folder.list_keys() if entry.nbytes == 2] == [("sub/b.bin", "m/sub/b.bin")]
        with contextlib.closing(folder.open("sub/b.bin")) as source:
            assert source.url == f"{self.scheme}://{bucket}/m/sub/b.bin"
            assert read(source, 0, 2) == b"bb"

    def test_a_prefix_without_objects_is_not_found(self) -> None:
        store, bucket = self.store({"m/a.bin": b"a"})
        error = error_of(self.missing, store.folder(f"{self.scheme}://{bucket}/n").names)
        assert error.url == f"{self.scheme}://{bucket}/n"
        assert (getattr(error, self.of_bucket), getattr(error, "key")) == (bucket, "n")  # noqa: B009 - a field of each store's errors
        assert store.folder(f"{self.scheme}://{bucket}").names() == []
