"""What S3 answers to what: addresses, permissions, and the operations on objects and buckets. No sockets, no faults.

A request is routed first (which bucket and key, which operation, is it allowed), then performed. Errors come as `Refusal`.
Operations: GET, HEAD, PUT, DELETE of objects; LIST (ListObjectsV2); BUCKET for HeadBucket, GetBucketLocation and ListBuckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from urllib.parse import unquote

from headrace.testing.s3server import listing, payloads, signatures
from headrace.testing.s3server.answers import Answer, Span, content_range
from headrace.testing.s3server.buckets import Bucket, Buckets, Info, OpenObject
from headrace.testing.s3server.conditions import byte_range, check_conditions, range_applies
from headrace.testing.s3server.errors import XML_HEAD, Refusal, text
from headrace.testing.s3server.signatures import Claim, Credential
from headrace.testing.s3server.wire import Head

_XML = {"Content-Type": "application/xml"}


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request leads."""

    operation: str
    bucket: str
    key: str
    params: Mapping[str, str]
    head: Head

    @property
    def subject(self) -> str:
        """What the key patterns of rules are held against: the key, or a listing's prefix."""
        return self.params.get("prefix", "") if self.operation == "LIST" else self.key


@dataclass(frozen=True, slots=True)
class Found:
    """An object that is there, open, and the bytes of it that are asked for."""

    opened: OpenObject
    asked: tuple[int, int] | None

    @property
    def start(self) -> int:
        """First byte that is asked for."""
        return self.asked[0] if self.asked else 0

    @property
    def end(self) -> int:
        """End of what is asked for, exclusive."""
        return self.asked[1] if self.asked else self.opened.info.nbytes


def split_address(head: Head, domains: Sequence[str]) -> tuple[str, str]:
    """Return bucket and key: from Host and path where Host is a subdomain of one of `domains`, else both from the path."""
    path = unquote(head.path, errors="surrogateescape")[1:]
    host = head.host.rsplit(":", 1)[0].lower()
    for domain in domains if host not in domains else ():
        bucket = host.removesuffix("." + domain)
        if bucket and bucket != host:
            return bucket, path
    bucket, _, key = path.partition("/")
    return bucket, key


@dataclass(slots=True)
class Service:
    """S3 without a network.

    Attributes:
        buckets: what is served.
        credentials: who may sign, by access key.
        region: where the server is; None takes any region in a signature.
        domains: hosts whose subdomains are buckets.
        page: the most entries in one listing.
        clock: gives seconds since the epoch.
    """

    buckets: Buckets
    credentials: Mapping[str, Credential]
    region: str | None
    domains: Sequence[str]
    page: int
    clock: Callable[[], float]

    def route(self, head: Head, body: bytes) -> Route:
        """Find out what a request is, and whether it may be.

        Raises:
            Refusal: it may not, or it is nothing that this server does.
        """
        bucket, key = split_address(head, self.domains)
        claim = signatures.parse(head.headers, head.query)
        if claim is not None:
            self._check_claim(claim, head, body, bucket)
        params = dict(signatures.query_pairs(head.query))
        route = Route(_operation(head.method, bucket, key, params), bucket, key, params, head)
        self._check_permission(route, signed=claim is not None)
        return route

    def perform(self, route: Route, body: bytes) -> Answer:
        """Do anything but GET and HEAD of objects.

        Raises:
            Refusal: the answer is an error.
        """
        match route.operation:
            case "LIST":
                return self._list(route)
            case "PUT":
                return self._put(route, body)
            case "DELETE":
                self.buckets.delete(route.bucket, route.key)
                return Answer(204)
            case _:
                return self._about_bucket(route)

    def find(self, route: Route) -> Found:
        """Open the object that a GET or HEAD is for; whoever calls closes it.

        Raises:
            Refusal: there is none, it may not be known whether there is one, or the range is none of its.
        """
        bucket = self.buckets.bucket(route.bucket)
        try:
            opened = self.buckets.open(route.bucket, route.key, route.params.get("versionId"))
        except Refusal as refusal:
            # S3 tells who may list that an object is missing, and others nothing.
            raise refusal if bucket.listable or refusal.code != "NoSuchKey" else Refusal("AccessDenied") from None
        headers, info = route.head.headers, opened.info
        try:
            asked = byte_range(headers.get("range"), info.nbytes) if range_applies(headers, etag=info.etag) else None
        except Refusal:
            opened.__exit__(None, None, None)
            raise
        return Found(opened, asked)

    def give(self, route: Route, found: Found) -> Answer:
        """Answer a GET or HEAD of an object.

        Raises:
            Refusal: a condition does not hold.
        """
        bucket, info = self.buckets.bucket(route.bucket), found.opened.info
        check_conditions(route.head.headers, etag=info.etag, modified_s=info.modified_s)
        headers = {
            "Last-Modified": formatdate(info.modified_s, usegmt=True),
            "ETag": info.etag,
            "Accept-Ranges": "bytes",
            "Content-Type": "binary/octet-stream",
            **_about_version(info),
            **_about_payer(bucket),
        }
        if found.asked:
            headers["Content-Range"] = content_range(found.start, found.end, info.nbytes)
        elif bucket.checksum and route.head.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED":
            value = self.buckets.checksum(route.bucket, route.key, found.opened, bucket.checksum)
            headers |= {f"x-amz-checksum-{bucket.checksum}": value, "x-amz-checksum-type": "FULL_OBJECT"}
        return Answer(206 if found.asked else 200, headers, span=Span(found.opened, found.start, found.end))

    def region_of(self, bucket: str) -> str | None:
        """Return where a bucket is; None where any region will do."""
        try:
            return self.buckets.bucket(bucket).region or self.region
        except Refusal:
            return self.region

    def _check_claim(self, claim: Claim, head: Head, body: bytes, bucket: str) -> None:
        region = self.region_of(bucket)
        if region is not None and claim.region != region:
            if claim.region == self.region:  # signed for this server, but the bucket is elsewhere
                raise self._elsewhere(bucket, region)
            refusal = claim.malformed(f"the region '{claim.region}' is wrong; expecting '{region}'", Region=region)
            refusal.headers["x-amz-bucket-region"] = region
            raise refusal
        query, headers = head.query, head.headers
        signatures.check(
            claim,
            method=head.method,
            path=head.path,
            query=query,
            headers=headers,
            credentials=self.credentials,
            now_s=self.clock(),
        )
        payloads.check_hash(claim.payload, body)

    def _check_permission(self, route: Route, *, signed: bool) -> None:
        if not route.bucket:  # ListBuckets
            if not signed:
                raise Refusal("AccessDenied")
            return
        bucket = self.buckets.bucket(route.bucket)
        region = self.region_of(route.bucket)
        heads_bucket = route.operation == "BUCKET" and route.head.method == "HEAD"
        if heads_bucket and not signed and region != self.region:
            raise self._elsewhere(route.bucket, region or "")
        headers = {"x-amz-bucket-region": region} if heads_bucket and region else {}
        if not signed and (not bucket.public or bucket.requester_pays or route.operation in ("PUT", "DELETE")):
            raise Refusal("AccessDenied", headers=headers)
        payer = route.head.headers.get("x-amz-request-payer") or route.params.get("x-amz-request-payer")
        if bucket.requester_pays and payer != "requester":
            raise Refusal("AccessDenied", headers=headers)
        if route.operation == "LIST" and not bucket.listable:
            raise Refusal("AccessDenied")

    def _elsewhere(self, bucket: str, region: str) -> Refusal:
        fields = {"Endpoint": f"{bucket}.s3.{region}.amazonaws.com", "Bucket": bucket}
        return Refusal("PermanentRedirect", headers={"x-amz-bucket-region": region}, fields=fields)

    def _list(self, route: Route) -> Answer:
        query = listing.parse(route.params)
        page = listing.select(self.buckets.keys(route.bucket), query, page=self.page)
        body = listing.render(route.bucket, query, page, lambda key: self.buckets.info(route.bucket, key))
        return Answer(200, {**_XML, **_about_payer(self.buckets.bucket(route.bucket))}, body)

    def _put(self, route: Route, body: bytes) -> Answer:
        data, checksums = payloads.decode(route.head.headers, body)
        info = self.buckets.put(route.bucket, route.key, data)
        return Answer(200, {"ETag": info.etag, **_about_version(info), **checksums})

    def _about_bucket(self, route: Route) -> Answer:
        region = self.region_of(route.bucket)
        if not route.bucket:
            made = "<CreationDate>2006-03-14T00:00:00.000Z</CreationDate>"  # clients insist on one
            names = "".join(f"<Bucket><Name>{text(name)}</Name>{made}</Bucket>" for name in self.buckets.names())
            inner = f"<Buckets>{names}</Buckets>"
            body = f'{XML_HEAD}<ListAllMyBucketsResult xmlns="{listing.NAMESPACE}">{inner}</ListAllMyBucketsResult>'
            return Answer(200, _XML, body.encode())
        if route.head.method == "HEAD":
            return Answer(200, {**_XML, **({"x-amz-bucket-region": region} if region else {})})
        place = "" if region in (None, "us-east-1") else text(region or "")  # the oldest region goes without saying
        return Answer(
            200, _XML, f'{XML_HEAD}<LocationConstraint xmlns="{listing.NAMESPACE}">{place}</LocationConstraint>'.encode()
        )


def _operation(method: str, bucket: str, key: str, params: Mapping[str, str]) -> str:
    if key:
        if method in ("GET", "HEAD", "PUT", "DELETE"):
            return method
    elif method == "HEAD" and bucket:
        return "BUCKET"
    elif method == "GET":
        if not bucket or "location" in params:
            return "BUCKET"
        if params.get("list-type") == "2":
            return "LIST"
        raise Refusal("NotImplemented", "This server lists with list-type=2 only, and knows no subresources but location.")
    raise Refusal("MethodNotAllowed")


def _about_version(info: Info) -> dict[str, str]:
    return {} if info.version_id == "null" else {"x-amz-version-id": info.version_id}


def _about_payer(bucket: Bucket) -> dict[str, str]:
    return {"x-amz-request-charged": "requester"} if bucket.requester_pays else {}
