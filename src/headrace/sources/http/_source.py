"""The source: ranges of one object, read into the caller's memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final

from headrace.errors import SourceError, TruncatedError
from headrace.sources.http._access import Access, Traffic
from headrace.sources.http._answers import Asked, Version
from headrace.sources.http._client import Client
from headrace.sources.http._failures import Failure, Headers
from headrace.sources.http._hedge import Landing, Patience, RangeWatch
from headrace.sources.http._retry import Tries
from headrace.sources.openings import endable

PREFIX_NBYTES: Final = 64 << 10  # what the reader of headers asks for first
INDEX_NBYTES: Final = 2 << 20  # an index is read as a whole: one of 20,000 tensors takes one round trip


class HttpSource:
    """An object on a server, readable at any offset from several threads. Made by `open_http`.

    Attributes:
        url: as it may be shown: without userinfo, and without the values of a query that signs it.
        nbytes: the size when it was opened.
        version: ETag, generation and the like when it was opened.
    """

    def __init__(self, client: Client, *, version: Version, prefix: bytes = b"") -> None:
        self.url = client.url
        self.nbytes = version.nbytes
        self.version = client.version = version
        self._client = client
        self._prefix = prefix

    @property
    def traffic(self) -> Traffic:
        """What was asked of the network so far, the opening included."""
        return self._client.traffic

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the bytes from `offset` on. See `ByteSource.read_into`.

        Raises:
            SourceChangedError: the object is no longer the one that was opened.
            SourceError: any other failure; the classes are those of `headrace.sources.http`.
        """
        self.read_into_each(offset, [buffer])

    def read_into_each(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all buffers, one after another, with the bytes from `offset` on, by one request. Raises as `read_into`."""
        landing = Landing(offset, buffers)
        nbytes = landing.nbytes
        if self._client.closed or offset < 0 or offset + nbytes > self.nbytes:
            raise self._refuse_range(offset, nbytes)
        if offset < len(self._prefix):
            landing.put(memoryview(self._prefix)[offset : offset + nbytes])
        if landing.done < nbytes:
            self._client.persist(
                lambda tries: self._try(landing, tries), doing="read", asked=(offset, nbytes), received=lambda: landing.done
            )

    def check_unchanged(self) -> None:
        """Do nothing: every answer was compared with the version that was opened."""
        if self._client.closed:
            raise self._refuse_range(None, None)

    def close(self) -> None:
        """End reads that are under way in other threads, with `SourceError`, and let go of connections. May be called twice."""
        self._client.close()

    def _try(self, landing: Landing, tries: Tries) -> bool | None:
        """Ask for what is missing and receive it. None where the server sent less than that, and said so."""
        client, first = self._client, landing.done
        watch = RangeWatch(client, tries, landing, client.pace)
        try:
            with client.ranged(Asked(landing.position, landing.end, self.version), watch, tries) as (answer, accepted):
                landing.receive(answer, accepted)
                watch.settle()
        except Failure:
            if not watch.won():
                raise
        finally:
            client.count(received_nbytes=landing.done - first)
            watch.finish()
        return True if landing.position == landing.end else None

    def _refuse_range(self, offset: int | None, nbytes: int | None) -> SourceError:
        kind: type[SourceError] = TruncatedError
        status: int | None = None
        why = f"it has {self.nbytes} bytes"
        if self._client.closed:
            kind, status, why = SourceError, errno.EBADF, "it was closed"
        elif offset is None or offset < 0:
            kind, status, why = SourceError, errno.EINVAL, "the offset is negative"
        message = f"cannot read {nbytes} bytes at {offset} of {self.url}: {why}"
        return kind(message, url=self.url, offset=offset, nbytes=nbytes, status=status)


def open_http(url: str, *, access: Access | None = None, prefix_nbytes: int = PREFIX_NBYTES) -> HttpSource:
    """Open an object with one GET of its first bytes, which also tells its size and version.

    Args:
        url: http:// or https://; name and password in it are sent as basic authorization, unless `access` authorizes.
        access: how it is reached.
        prefix_nbytes: bytes to fetch now and keep, so that reading the header of a checkpoint costs no second request.

    Returns:
        An open source; `close` it.

    Raises:
        SourceError: it cannot be reached, found or read, or its size is not told. The classes are those of this package.

    Example:
        >>> source = open_http("https://example.org/model.safetensors")  # doctest: +SKIP
        >>> source.nbytes  # doctest: +SKIP
        90868376
    """
    wanted = max(1, prefix_nbytes)  # a range has at least one byte

    def attempt(tries: Tries) -> tuple[Version, bytes]:
        prefix = bytearray(wanted)
        landing = Landing(0, [memoryview(prefix)])
        with client.ranged(Asked(0, wanted), Patience(client, tries), tries) as (answer, accepted):
            landing.receive(answer, accepted)
        client.count(received_nbytes=landing.done)
        return accepted.version, bytes(prefix[: landing.done])

    with _asking(url, access) as client:
        version, prefix = client.persist(attempt, doing="open")
    return HttpSource(client, version=version, prefix=prefix)


def fetch_head(url: str, *, access: Access | None = None) -> Headers:
    """Ask for the headers of an object and none of its bytes (HEAD), with the same patience and credentials.

    Raises:
        SourceError: it cannot be reached or found.
    """

    def attempt(tries: Tries) -> Headers:
        with client.asking(None, Patience(client, tries), tries) as answer:
            return answer.headers

    with _asking(url, access, method="HEAD") as client, closing(client):
        return client.persist(attempt, doing="look at")


def fetch(url: str, *, access: Access | None = None, limit_nbytes: int = 64 << 20) -> tuple[Headers, bytes]:
    """Get a whole small document, such as a page of a listing, with the same patience, checks and credentials.

    Args:
        url: http:// or https://.
        access: how it is reached.
        limit_nbytes: the longest document that is accepted.

    Returns:
        Its headers and bytes.

    Raises:
        SourceError: it cannot be reached, found or read, or is longer.
    """

    def attempt(tries: Tries) -> tuple[Headers, bytes]:
        with client.asking(None, Patience(client, tries), tries) as answer:
            if (answer.headers.get("content-encoding") or "identity").lower() != "identity":
                raise Failure("encoding", "the server sent it compressed", status=answer.status)
            body = answer.read(limit_nbytes + 1)
            if len(body) > limit_nbytes:
                raise Failure("status", f"it is longer than {limit_nbytes} bytes", status=answer.status)
            return answer.headers, body

    with _asking(url, access) as client, closing(client):
        return client.persist(attempt, doing="fetch")


@contextmanager
def _asking(url: str, access: Access | None, *, method: str = "GET") -> Iterator[Client]:
    """A client that other threads may end as one of their `Openings`; closed after an error."""
    client = Client(url, access if access is not None else Access(), method=method)
    try:
        with endable(client.close):
            yield client
    except BaseException:
        client.close()
        raise
