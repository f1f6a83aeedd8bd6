"""Buckets and objects: a folder of folders, or bytes and files given by name, and in memory what was written on top of either.

A folder that is served is never written to: what is put or deleted stays in memory and hides what lies in the folder. Objects are
opened once for an answer, so an answer's bytes, size and ETag are of one version even if a file is replaced meanwhile.

ETags of bytes are their MD5, as S3's are. Those of files are made of inode, mtime and size and look like an upload's in parts, so
no client takes them for an MD5, and large files need not be read.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TypeAlias

from headrace.testing.s3server.checksums import checksum
from headrace.testing.s3server.errors import Refusal

_CHUNK_NBYTES = 256 << 10
_XOR_55 = bytes(byte ^ 0x55 for byte in range(256))

Content: TypeAlias = "bytes | str | os.PathLike[str]"


@dataclass(frozen=True, slots=True)
class Bucket:
    """How a bucket behaves.

    Attributes:
        public: anyone may read and list it, unsigned.
        listable: it may be listed. If not, objects that are missing are 403 instead of 404, as S3 has it.
        requester_pays: requests must say x-amz-request-payer: requester, and be signed.
        versioned: writing an object keeps what was there, under its version id.
        region: where it is; None, where the server is.
        checksum: the algorithm of its objects' checksums; None, they have none.
    """

    public: bool = False
    listable: bool = True
    requester_pays: bool = False
    versioned: bool = False
    region: str | None = None
    checksum: str | None = "crc32"


@dataclass(frozen=True, slots=True)
class Version:
    """An object as it was written at one time; a delete marker where there is no content."""

    content: bytes | str | None
    version_id: str
    modified_s: float
    etag: str = ""  # of bytes; that of a file is made when it is opened


@dataclass(frozen=True, slots=True)
class Info:
    """What is known of an object without reading it."""

    nbytes: int
    etag: str
    modified_s: float
    version_id: str


@dataclass(frozen=True, slots=True)
class OpenObject:
    """One version of an object whose bytes can be read; closes its file."""

    info: Info
    data: bytes
    descriptor: int | None

    def __enter__(self) -> OpenObject:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes of a range."""
        return b"".join(self.chunks(start, end))

    def chunks(self, start: int, end: int) -> Iterator[bytes]:
        """Return the bytes of a range, some at a time; fewer, should the file have been cut."""
        if self.descriptor is None:
            yield self.data[start:end]
            return
        while start < end and (chunk := os.pread(self.descriptor, min(end - start, _CHUNK_NBYTES), start)):
            yield chunk
            start += len(chunk)


@dataclass(slots=True)
class _Written:
    """What was put into a bucket, on top of its folder."""

    options: Bucket
    objects: dict[str, list[Version]] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)


class Buckets:
    """All buckets of a server.

    Args:
        content: a folder that holds a folder for each bucket, or content by key by bucket. Paths are of files.
        options: how buckets behave, by name. Such a bucket exists even if it is empty.
    """

    def __init__(
        self, content: str | os.PathLike[str] | Mapping[str, Mapping[str, Content]], options: Mapping[str, Bucket]
    ) -> None:
        self._root = None if isinstance(content, Mapping) else os.path.abspath(content)
        self._folders: dict[str, str] = {}
        self._lock = threading.RLock()
        self._sums: dict[tuple[str, str, str, str], str] = {}
        self._count = 0
        self._written = {name: _Written(bucket) for name, bucket in options.items()}
        if isinstance(content, Mapping):
            for name, objects in content.items():
                bucket = self._written.setdefault(name, _Written(Bucket()))
                for key, value in objects.items():
                    bucket.objects[key] = [self._version(value)]

    def names(self) -> list[str]:
        """Return the names of all buckets, sorted."""
        folders = [entry.name for entry in os.scandir(self._root) if entry.is_dir()] if self._root else []
        return sorted({*folders, *self._written})

    def bucket(self, name: str) -> Bucket:
        """Return how a bucket behaves.

        Raises:
            Refusal: there is none of this name.
        """
        written = self._written.get(name)
        if written is not None:
            return written.options
        if self._folder(name) is None:
            raise Refusal("NoSuchBucket", fields={"BucketName": name})
        return Bucket()

    def keys(self, name: str) -> set[str]:
        """Return all keys of a bucket that has such objects now."""
        folder = self._folder(name)
        keys = {
            os.path.relpath(os.path.join(at, file), folder).replace(os.sep, "/")
            for at, _, files in (os.walk(folder, followlinks=True) if folder else ())
            for file in files
        }
        with self._lock:
            written = self._written.get(name)
            for key, versions in written.objects.items() if written else ():
                (keys.discard if versions[-1].content is None else keys.add)(key)
        return keys

    def info(self, name: str, key: str) -> Info | None:
        """Return what is known of an object; None if there is none."""
        try:
            with self.open(name, key) as opened:
                return opened.info
        except Refusal:
            return None

    def open(self, name: str, key: str, version_id: str | None = None) -> OpenObject:
        """Open an object, its current version unless an id is given.

        Raises:
            Refusal: there is no such object or version.
        """
        versions = self._versions(name, key)
        if not versions:
            raise Refusal("NoSuchKey", fields={"Key": key})
        if version_id is None:
            version = versions[-1]
        else:
            known = [version for version in versions if version_id in (version.version_id, self._shown(name, version))]
            if not known:
                raise Refusal("NoSuchVersion", fields={"Key": key, "VersionId": version_id})
            version = known[-1]
        return self._open(name, key, version)

    def put(self, name: str, key: str, content: Content) -> Info:
        """Write an object, and return what is known of it. The bucket is made if there is none."""
        with self._lock:
            written = self._written.setdefault(name, _Written(Bucket()))
            before = self._versions(name, key) if written.options.versioned else []
            written.objects[key] = [*before, self._version(content)]
        with self.open(name, key) as opened:
            return opened.info

    def delete(self, name: str, key: str) -> None:
        """Delete an object; a versioned bucket keeps what was there."""
        with self._lock:
            written = self._written.setdefault(name, _Written(Bucket()))
            before = self._versions(name, key) if written.options.versioned else []
            written.objects[key] = [*before, self._marker()]

    def replace(self, name: str, key: str) -> None:
        """Give an object other bytes, all xor 0x55, the first time this is called for it."""
        with self._lock:
            written = self._written.setdefault(name, _Written(Bucket()))
            if key in written.replaced:
                return
            with self.open(name, key) as opened:
                data = opened.read(0, opened.info.nbytes)
            self.put(name, key, data.translate(_XOR_55))
            written.replaced.add(key)

    def checksum(self, name: str, key: str, opened: OpenObject, algorithm: str) -> str:
        """Return an object's checksum, computed once for each version."""
        index = (name, key, opened.info.etag, algorithm)
        if index not in self._sums:
            self._sums[index] = checksum(algorithm, opened.chunks(0, opened.info.nbytes))
        return self._sums[index]

    def _open(self, name: str, key: str, version: Version) -> OpenObject:
        shown = self._shown(name, version)
        if version.content is None:
            headers = {"x-amz-delete-marker": "true", **({"x-amz-version-id": shown} if shown != "null" else {})}
            raise Refusal("NoSuchKey", headers=headers, fields={"Key": key})
        if isinstance(version.content, bytes):
            return OpenObject(Info(len(version.content), version.etag, version.modified_s, shown), version.content, None)
        try:
            descriptor = os.open(version.content, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO would block
        except (OSError, ValueError) as error:
            raise Refusal("NoSuchKey", fields={"Key": key}) from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise Refusal("NoSuchKey", fields={"Key": key})
        return OpenObject(Info(found.st_size, _tag_of(found), found.st_mtime, shown), b"", descriptor)

    def _versions(self, name: str, key: str) -> list[Version]:
        """All versions of an object, the current one last."""
        with self._lock:
            written = self._written.get(name)
            if written is not None and key in written.objects:
                return written.objects[key]
        folder = self._folder(name)
        if folder is None or any(part in ("", ".", "..") for part in key.split("/")):
            return []
        path = f"{folder}/{key}"
        if written is None or not written.options.versioned:
            return [Version(path, "null", 0.0)]  # whether it is there shows when it is opened
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            return []
        return [Version(path, "file" + _tag_of(found)[1:29], found.st_mtime)]

    def _shown(self, name: str, version: Version) -> str:
        """The version's id as clients see it: null where the bucket keeps no versions."""
        written = self._written.get(name)
        return version.version_id if written is not None and written.options.versioned else "null"

    def _folder(self, name: str) -> str | None:
        if self._root is None or not name or name.startswith(".") or "/" in name or "\0" in name:
            return None
        if name not in self._folders:
            folder = os.path.join(self._root, name)
            if not os.path.isdir(folder):
                return None
            self._folders[name] = folder  # it is asked for often; should it go, its objects are not found
        return self._folders[name]

    def _version(self, content: Content) -> Version:
        if not isinstance(content, bytes):
            return replace(self._marker(), content=os.path.abspath(content))
        tag = hashlib.md5(content, usedforsecurity=False).hexdigest()
        return replace(self._marker(), content=content, etag=f'"{tag}"')

    def _marker(self) -> Version:
        with self._lock:
            self._count += 1
            return Version(None, hashlib.sha256(f"version {self._count}".encode()).hexdigest()[:32], time.time())


def _tag_of(found: os.stat_result) -> str:
    name = f"{found.st_dev}/{found.st_ino}/{found.st_mtime_ns}/{found.st_size}"
    return f'"{hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()}-1"'
