"""Objects of a bucket, read by the calling thread straight into given memory."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from botocore.config import Config
from botocore.loaders import Loader
from botocore.session import Session

from repo_service.connections import Answer, in_thread, receive
from repo_service.domain.errors import Unavailable
from repo_service.storage.s3_answers import Missing, Refused, Transient, Tries, check_media_type, transient
from repo_service.storage.s3_ways import (
    CONNECT_SECONDS,
    CONNECTIONS,
    MAX_ERROR_BYTES,
    SILENCE_SHARE,
    ByBotocore,
    Call,
    Deadline,
    Headers,
    Overdue,
    Run,
    Signed,
    Way,
    signed_way,
)

# Encodings that leave an object as it is; some servers keep the second, which is that of a PUT.
_UNCHANGED = {"", "identity", "aws-chunked"}

# Of a length that can be true.
_MAX_DIGITS = 18

# How long botocore is asked, after an answer that the bucket is elsewhere.
_ELSEWHERE_SECONDS = 300.0

# What botocore knows about S3, read once in a process.
MODELS = Loader()

# Sessions and clients of the process that this one was forked from: kept, since threads that are not here may hold their locks.
_INHERITED: list[Any] = []


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
    call, run
        `Bucket.call` and `Bucket.run`, for what botocore sends.
    """

    def __init__(self, bucket: str, seconds: float, call: Call, run: Run) -> None:
        self._bucket = bucket
        self._seconds = seconds
        self._by_botocore = ByBotocore(call, run)
        self._way: Way | None = None
        self._way_until = math.inf
        self._finding: Future[Way] | None = None
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
        deadline = Deadline(self._seconds)
        tries = Tries(f"read {named}", self._bucket, self._seconds)
        try:
            while True:
                try:
                    return self._try(reading, deadline)
                except Overdue:
                    raise
                except Exception as error:
                    pause = tries.after(error)
                time.sleep(min(pause, deadline.rest_s()))
        except Overdue:
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
            client = self._session()[1]
            place = {"Bucket": self._bucket, "Key": key, **signed}
            url: str = client.generate_presigned_url(method, Params=place, ExpiresIn=seconds)
        except Exception as error:
            raise Unavailable(f"could not {what}: {transient(error, what)}", bucket=self._bucket) from error
        return url

    @property
    def is_plain(self) -> bool:
        """Whether requests go to the bucket's server with nothing in between, and need no more than a signature.

        Raises
        ------
        Unavailable
            If there are no credentials to sign with.
        """
        what = f"sign a URL of s3://{self._bucket}"
        try:
            return isinstance(self._found(self._seconds), Signed)
        except Exception as error:
            raise Unavailable(f"could not {what}: {transient(error, what)}", bucket=self._bucket) from error

    def put_at(self, url: str, body: bytes, headers: Mapping[str, str]) -> int:
        """The status of the answer to one PUT at a presigned URL, with headers that it does not sign; only if `is_plain`.

        Raises
        ------
        Unavailable
            If no answer came.
        """
        way, parts = self._found(self._seconds), urlsplit(url)
        target, deadline = f"{parts.path}?{parts.query}", Deadline(self._seconds)
        try:
            if not isinstance(way, Signed):
                raise ConnectionError
            with way.pool.ask("PUT", target, headers, deadline, body=body, connect_s=CONNECT_SECONDS) as answer:
                answer.read(MAX_ERROR_BYTES)
                return answer.status
        except (OSError, HTTPException, Overdue) as error:
            reason = type(error).__name__
            raise Unavailable(f"could not write to s3://{self._bucket}: {reason}", bucket=self._bucket) from None

    def close(self) -> None:
        """Close the connections; a later read opens new ones."""
        with self._lock:
            way, self._way, self._finding = self._way, None, None
        if way is not None:
            way.close()

    def forget_connections(self) -> None:
        """Leave the connections to the process they were opened in."""
        _INHERITED.append(self._known)
        self._way = self._known = None
        self._renew()

    def _renew(self) -> None:
        # A lock that another thread held when the process was forked would never be released.
        self._lock, self._session_lock = threading.Lock(), threading.Lock()
        self._finding = None
        self._slots = threading.BoundedSemaphore(CONNECTIONS)

    def _try(self, reading: _Reading, deadline: Deadline) -> int | None:
        slots = self._slots
        if not slots.acquire(timeout=deadline.rest_s()):
            raise Overdue
        try:
            way = self._found(deadline.wait_s())
            try:
                with way.open(reading.key, reading.conditions(), deadline) as (status, headers, body):
                    return reading.go_on(status, headers, body, deadline)
            except Missing:
                reading.missing()
                return None
            except Refused as refused:
                if isinstance(way, Signed) and (refused.is_elsewhere or refused.is_expired):
                    self._leave(way, elsewhere=refused.is_elsewhere)
                    if refused.is_elsewhere:
                        raise Transient(f"{refused}; asked again by botocore") from None
                reading.refused(refused)
                raise
        finally:
            slots.release()

    def _found(self, wait_s: float) -> Way:
        """The way to ask; botocore may look for credentials for any time, but not longer than ``wait_s`` for this."""
        with self._lock:
            if self._way is not None and time.monotonic() <= self._way_until:
                return self._way
            if self._finding is None or self._finding.done():
                self._finding = in_thread(self._find)
            finding = self._finding
        try:
            found = finding.result(wait_s)
        except TimeoutError:
            raise Transient("no credentials were found in time") from None
        with self._lock:
            if self._way is None or time.monotonic() > self._way_until:
                self._way, self._way_until = found, math.inf
            return self._way

    def _find(self) -> Way:
        session, client = self._session()
        # A directory bucket's sessions are botocore's affair, and asking for a URL would begin one.
        signed = None if self._bucket.endswith("--x-s3") else signed_way(session, client, self._bucket)
        return signed or self._by_botocore

    def _leave(self, way: Signed, *, elsewhere: bool) -> None:
        """Ask botocore for a while, or with credentials that are looked for again."""
        with self._lock:
            if self._way is way and elsewhere:
                self._way, self._way_until = self._by_botocore, time.monotonic() + _ELSEWHERE_SECONDS
            elif self._way is way:
                self._way = self._known = self._finding = None
        way.close()

    def _session(self) -> tuple[Session, Any]:
        """Botocore's session and client."""
        with self._session_lock:
            if self._known is None:
                self._known = self._begun()
            return self._known

    def _begun(self) -> tuple[Session, Any]:
        session = Session()
        session.register_component("data_loader", MODELS)
        config = Config(
            connect_timeout=min(CONNECT_SECONDS, self._seconds),
            read_timeout=self._seconds * SILENCE_SHARE,
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

    def go_on(self, status: int, headers: Headers, body: Answer, deadline: Deadline) -> int:
        check_media_type(headers)
        if (encoding := headers.get("content-encoding", "")).lower() not in _UNCHANGED:
            raise Transient(f"the answer is encoded: {encoding[:40]}")
        etag = headers.get("etag")
        if not self.position:
            length = str(headers.get("content-length"))
            if status != 200 or not length.isdecimal() or len(length) > _MAX_DIGITS or not etag:
                raise Transient(f"the answer is not the whole object: {status}, or without its length or its ETag")
            self.size, self.etag = int(length), etag
            self.out = self.room(self.size)
        else:
            part = f"bytes {self.position}-{len(self.out) - 1}/{self.size}"
            if status != 206 or etag != self.etag or headers.get("content-range") != part:
                raise Transient("the server did not go on with the same object where it was asked to")

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
