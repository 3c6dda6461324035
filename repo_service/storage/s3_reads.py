"""Objects of a bucket, read by the calling thread straight into given memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from ssl import create_default_context
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.httpsession import get_cert_path
from botocore.loaders import Loader
from botocore.parsers import create_parser
from botocore.session import Session
from botocore.utils import get_environ_proxies

from repo_service.connections import Answer, Pool, receive
from repo_service.domain.errors import Unavailable
from repo_service.storage.s3_answers import Missing, Refused, Transient, Tries, check_media_type, refusal, transient
from repo_service.storage.s3_signing import Signer

CONNECTIONS = 64
CONNECT_SECONDS = 5.0

# Of an operation's time: the longest silence.
_SILENCE_SHARE = 1 / 6

_MAX_ERROR_BYTES = 64 * 1024

# Answers to a request that botocore would send elsewhere, or sign for another region.
_ELSEWHERE = {301, 307, 400}

# What botocore knows about S3, read once in a process.
MODELS = Loader()

_ERRORS = create_parser("rest-xml")

# Sessions and clients of the process that this one was forked from: kept, since threads that are not here may hold their locks.
_INHERITED: list[Any] = []


class _Overdue(Exception):
    """The time of an operation is over."""


class _Deadline:
    """The time of one operation, in which no silence may be longer than a share of it."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._silence_s = seconds * _SILENCE_SHARE

    def rest_s(self) -> float:
        rest = self._end - time.monotonic()
        if rest <= 0:
            raise _Overdue
        return rest

    def wait_s(self) -> float:
        return min(self._silence_s, self.rest_s())

    def late(self) -> Exception:
        return TimeoutError("nothing came for too long")

    def moved(self, count: int) -> None:
        pass

    def sent(self) -> None:
        pass


class _Way(Protocol):
    """How an object is asked for."""

    def open(
        self, key: str, conditions: Mapping[str, str], deadline: _Deadline
    ) -> AbstractContextManager[tuple[Mapping[str, Any], Answer]]:
        """The answer's headers and what gives its body."""
        ...

    def close(self) -> None: ...


class Reader:
    """Reads objects of a bucket, with the credentials and the endpoint that botocore finds.

    Requests are signed here and sent over connections of this process, which the calling thread reads itself: no byte
    goes through an event loop. Where botocore is told of a proxy, or the bucket is elsewhere than it says, botocore sends them.

    Parameters
    ----------
    bucket
        The bucket's name.
    seconds
        Deadline of each read, within which what may pass is tried again, from where it broke off.
    """

    def __init__(self, bucket: str, seconds: float) -> None:
        self._bucket = bucket
        self._seconds = seconds
        self._way: _Way | None = None
        self._known: tuple[Session, Any] | None = None
        self._renew()

    def read(
        self, key: str, room: Callable[[int], memoryview], seen: Callable[[memoryview], object] = lambda _: None
    ) -> int | None:
        """Read an object into the memory that ``room`` gives for its size, handing each piece to ``seen`` in order.

        ``room`` may be asked again as long as ``seen`` was given nothing.

        Returns
        -------
        The object's size in bytes, or None if there is none.

        Raises
        ------
        Unavailable, StorageFull
        """
        named = f"s3://{self._bucket}/{key}"
        reading = _Reading(key, named, room, seen)
        deadline = _Deadline(self._seconds)
        tries = Tries(f"read {named}", self._bucket, self._seconds)
        try:
            while True:
                try:
                    return self._try(reading, deadline)
                except _Overdue:
                    raise
                except Exception as error:
                    pause = tries.after(error)
                time.sleep(min(pause, deadline.rest_s()))
        except _Overdue:
            raise tries.over() from None

    def url_of(self, key: str, seconds: int, method: str = "get_object", **signed: Any) -> str:
        """A URL for one object and ``method``, good for ``seconds``, or for as long as the credentials last if that is shorter.

        Raises
        ------
        Unavailable
            If there are no credentials to sign with.
        """
        what = f"sign a URL of s3://{self._bucket}/{key}"
        try:
            with self._lock:
                client = self._session()[1]
            place = {"Bucket": self._bucket, "Key": key, **signed}
            url: str = client.generate_presigned_url(method, Params=place, ExpiresIn=seconds)
        except Exception as error:
            raise Unavailable(f"could not {what}: {transient(error, what)}", bucket=self._bucket) from error
        return url

    def close(self) -> None:
        """Close the connections; a later read opens new ones."""
        with self._lock:
            way, self._way = self._way, None
        if way is not None:
            way.close()

    def forget_connections(self) -> None:
        """Leave the connections to the process they were opened in."""
        _INHERITED.append(self._known)
        self._way = self._known = None
        self._renew()

    def _renew(self) -> None:
        # A lock that another thread held when the process was forked would never be released.
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(CONNECTIONS)

    def _try(self, reading: _Reading, deadline: _Deadline) -> int | None:
        slots = self._slots
        if not slots.acquire(timeout=deadline.rest_s()):
            raise _Overdue
        try:
            way = self._found()
            try:
                with way.open(reading.key, reading.conditions(), deadline) as (headers, body):
                    return reading.go_on(headers, body, deadline)
            except Missing:
                reading.missing()
                return None
            except Refused as refused:
                if refused.status in _ELSEWHERE and not refused.may_pass and isinstance(way, _Signed):
                    with self._lock:
                        self._way = _ByBotocore(self._session()[1], self._bucket)
                    way.close()
                    raise Transient(f"{refused}; asked again by botocore") from None
                reading.refused(refused)
                raise
        finally:
            slots.release()

    def _found(self) -> _Way:
        with self._lock:
            if self._way is None:
                self._way = self._find()
            return self._way

    def _find(self) -> _Way:
        session, client = self._session()
        # A directory bucket's sessions are botocore's affair, and asking for a URL would begin one.
        signed = None if self._bucket.endswith("--x-s3") else _signed(session, client, self._bucket)
        return signed or _ByBotocore(client, self._bucket)

    def _session(self) -> tuple[Session, Any]:
        """Botocore's session and client; under the lock."""
        if self._known is None:
            self._known = self._begun()
        return self._known

    def _begun(self) -> tuple[Session, Any]:
        session = Session()
        session.register_component("data_loader", MODELS)
        config = Config(
            connect_timeout=min(CONNECT_SECONDS, self._seconds),
            read_timeout=self._seconds * _SILENCE_SHARE,
            max_pool_connections=CONNECTIONS,
            # Tries are counted, and chunks hashed, here.
            retries={"total_max_attempts": 1},
            response_checksum_validation="when_required",
            request_checksum_calculation="when_required",
            signature_version="s3v4",
        )
        return session, session.create_client("s3", config=config)


@dataclass
class _Reading:
    """One object on its way, over several answers if need be."""

    key: str
    named: str
    room: Callable[[int], memoryview]
    seen: Callable[[memoryview], object]
    size: int = 0
    etag: str = ""
    position: int = 0
    out: memoryview = field(default_factory=lambda: memoryview(b""))

    def conditions(self) -> dict[str, str]:
        if not self.position:
            return {}
        return {"Range": f"bytes={self.position}-{len(self.out) - 1}", "If-Match": self.etag}

    def go_on(self, headers: Mapping[str, Any], body: Answer, deadline: _Deadline) -> int:
        check_media_type(headers)
        if not self.position:
            length, etag = str(headers.get("content-length")), headers.get("etag")
            if not length.isdecimal() or not etag:
                raise Transient("the answer lacks its length or its ETag")
            self.size, self.etag = int(length), etag
            self.out = self.room(self.size)
        elif not str(headers.get("content-range")).startswith(f"bytes {self.position}-"):
            raise Transient("the server did not go on where it was asked to")

        def show(piece: memoryview) -> None:
            self.seen(piece)
            self.position += len(piece)
            deadline.rest_s()

        if self.position < len(self.out):
            receive(body, self.out[self.position :], show)
        return self.size

    def missing(self) -> None:
        if self.position:
            raise Unavailable(f"{self.named} was removed while it was read", key=self.key)

    def refused(self, refused: Refused) -> None:
        if self.position and refused.status == 412:
            raise Unavailable(f"{self.named} was replaced while it was read: read it again") from None


@dataclass(frozen=True)
class _Signed:
    """Requests signed and sent from here; ``path`` is the part of the bucket's URL after the host."""

    pool: Pool
    path: str
    signer: Signer

    @contextmanager
    def open(
        self, key: str, conditions: Mapping[str, str], deadline: _Deadline
    ) -> Iterator[tuple[Mapping[str, Any], Answer]]:
        path = f"{self.path}/{key}"
        headers = {**self.signer.headers(path), **conditions}
        with self.pool.ask("GET", path, headers, deadline, connect_s=CONNECT_SECONDS) as answer:
            if answer.status // 100 != 2:
                raise _refusal(answer.status, dict(answer.headers), answer.read(_MAX_ERROR_BYTES))
            # It finds a header whatever its case.
            yield answer.headers, answer  # type: ignore[misc]

    def close(self) -> None:
        self.pool.close()


@dataclass(frozen=True)
class _ByBotocore:
    """Requests sent by botocore, which knows proxies, redirections and every kind of bucket."""

    client: Any
    bucket: str

    @contextmanager
    def open(
        self, key: str, conditions: Mapping[str, str], deadline: _Deadline
    ) -> Iterator[tuple[Mapping[str, Any], Answer]]:
        deadline.rest_s()
        named = {name.replace("-", ""): value for name, value in conditions.items()}
        try:
            answer = self.client.get_object(Bucket=self.bucket, Key=key, **named)
        except ClientError as error:
            raise _missing_or(refusal(error)) from error
        with answer["Body"] as body:
            yield answer["ResponseMetadata"]["HTTPHeaders"], body

    def close(self) -> None:
        self.client.close()


def _signed(session: Session, client: Any, bucket: str) -> _Signed | None:
    """What botocore would send to the bucket, or None if it is more than a signed request to its server."""
    url = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "key"}, ExpiresIn=60)
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    scope = query.get("X-Amz-Credential", [""])[0].split("/")[1:]
    plain = parts.path.endswith("/key") and all(name.startswith("X-Amz-") for name in query)
    if query.get("X-Amz-Algorithm") != ["AWS4-HMAC-SHA256"] or scope[2:] != ["s3", "aws4_request"] or not plain:
        return None
    if client.meta.config.proxies or get_environ_proxies(url):
        return None
    context = None
    if parts.scheme == "https":
        bundle = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE") or True
        context = create_default_context(cafile=get_cert_path(bundle))
    pool = Pool(parts.hostname or "", parts.port, context, keep=CONNECTIONS)
    return _Signed(pool, parts.path.removesuffix("/key"), Signer(parts.netloc, scope[1], session.get_credentials()))


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    parsed = _ERRORS.parse({"status_code": status, "headers": headers, "body": body}, None)
    return _missing_or(refusal(ClientError(parsed, "GetObject")))


def _missing_or(refused: Refused) -> Exception:
    return Missing(refused) if refused.is_missing else refused
