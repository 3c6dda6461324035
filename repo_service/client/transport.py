"""HTTP requests to a kvgraft service: pooled connections, retries, bounded answers and times, errors by code."""

from __future__ import annotations

import json
import os
import random
import ssl
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from typing import TypeVar
from urllib.parse import SplitResult

from typing_extensions import Buffer

from repo_service.connections import Pool, Unconnected, receive
from repo_service.domain.digest import ChunkHasher
from repo_service.domain.errors import (
    ChunkCorrupt,
    InvalidInput,
    KvgraftError,
    RateLimited,
    ServiceError,
    Unavailable,
    error_types,
)
from repo_service.domain.layout import ChunkSpec
from repo_service.version import __version__

CONNECT_S = 5.0
READ_S = 60.0
RETRY_S = 30.0

USER_AGENT = f"kvgraft/{__version__}"

CA_VARIABLE = "KVGRAFT_CA_FILE"

# Bytes a second. A chunk of 8 MiB then has about the 10 minutes that a service gives to it.
_SLOWEST = 16 * 1024

_ATTEMPTS = 4
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 2.0

_BUSY = (408, 429, 503)

_MAX_ERROR_BYTES = 2**20


class TooSlow(Exception):
    """A transfer below the slowest pace."""


LOST = (HTTPException, OSError, TooSlow)

T = TypeVar("T")


class _Busy(Exception):
    """An answer that asks to come back later."""

    def __init__(self, error: KvgraftError, delay_s: float) -> None:
        super().__init__(error.message)
        self.error = error
        self.delay_s = delay_s


class Pace:
    """How long a transfer may go on: ``READ_S``, and a second for each ``_SLOWEST`` bytes that moved.

    Parameters
    ----------
    read_s
        Longest silence of the service before it answers.
    """

    def __init__(self, read_s: float) -> None:
        self._read_s = read_s
        self._is_awaited = False
        self._begin()

    def wait_s(self) -> float:
        if self._is_awaited:
            return self._read_s
        rest = self._began + READ_S + self._moved / _SLOWEST - time.monotonic()
        if rest <= 0:
            raise self.late()
        return min(READ_S, rest)

    def late(self) -> Exception:
        if self._is_awaited:
            return TimeoutError("timed out")
        took = time.monotonic() - self._began
        return TooSlow(
            f"{self._moved} bytes moved in {took:.0f} s; {READ_S:.0f} s are given, and 1 s more for each {_SLOWEST} bytes"
        )

    def moved(self, count: int) -> None:
        if self._is_awaited:
            self._is_awaited = False
            self._begin()
        self._moved += count

    def sent(self) -> None:
        self._is_awaited = True

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._moved = 0


class Transport:
    """Requests to one service. Methods may be called from several threads.

    Parameters
    ----------
    parts
        The service's URL.
    token
        Sent as a bearer token, if any.
    retry_s
        How long a busy or silent service is asked again.
    connections
        Connections kept open; more threads than that open and close their own.
    """

    def __init__(
        self, parts: SplitResult, token: str | None = None, *, retry_s: float = RETRY_S, connections: int = 64
    ) -> None:
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._retry_s = retry_s
        self._headers = {"User-Agent": USER_AGENT}
        if token is not None:
            if not token or not token.isascii() or not token.isprintable() or " " in token:
                raise InvalidInput("the token must be printable ASCII without spaces")
            self._headers["Authorization"] = f"Bearer {token}"
        trust = trusted() if parts.scheme == "https" else None
        self._pool = Pool(parts.hostname or "", parts.port, trust, keep=connections)

    def call(
        self,
        method: str,
        path: str,
        body: Buffer | None = None,
        *,
        limit: int,
        media_type: str = "application/json",
        again: bool = True,
        read_s: float = READ_S,
    ) -> bytes:
        """Send a request and return the body of its answer.

        Parameters
        ----------
        limit
            The most bytes the answer may have.
        again
            Whether the request may be sent again when its answer was lost.
        read_s
            Longest silence of the service before it answers.

        Raises
        ------
        KvgraftError
            The error that the service answered with, in the type of its code.
        Unavailable, ServiceError
        """
        headers = {} if body is None else {"Content-Type": media_type}
        return self._send(method, path, lambda answer: _read(answer, limit), body, headers, again, read_s)

    def fetch_chunk(self, path: str, digest: str, spec: ChunkSpec, out: memoryview) -> None:
        """Read a chunk into ``out``, hashing it on the way.

        Raises
        ------
        ChunkCorrupt
            If what came is not what the digest names.
        """
        self._send("GET", path, lambda answer: receive_chunk(answer, digest, spec, out))

    def close(self) -> None:
        self._pool.close()

    def _send(
        self,
        method: str,
        path: str,
        use: Callable[[HTTPResponse], T],
        body: Buffer | None = None,
        headers: dict[str, str] | None = None,
        again: bool = True,
        read_s: float = READ_S,
    ) -> T:
        deadline = time.monotonic() + self._retry_s
        tries = 0
        while True:
            tries += 1
            try:
                return self._try(method, path, use, body, headers or {}, read_s)
            except _Busy as busy:
                # Nothing was begun of what the rate did not admit.
                refused = isinstance(busy.error, RateLimited)
                reason, wait, last = busy.error, busy.delay_s, not (again or refused)
            except LOST as error:
                if isinstance(error, ssl.SSLCertVerificationError):
                    # No further attempt would mend it.
                    raise self._untrusted(error) from None
                unsent = isinstance(error, Unconnected)
                reason, wait, last = self._unanswered(method, error, unsent), 0.0, not (again or unsent)
                last = last or tries == _ATTEMPTS
            wait = max(wait, random.uniform(0, min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2**tries)))
            if last or time.monotonic() + wait > deadline:
                raise reason
            time.sleep(wait)

    def _try(
        self,
        method: str,
        path: str,
        use: Callable[[HTTPResponse], T],
        body: Buffer | None,
        headers: dict[str, str],
        read_s: float,
    ) -> T:
        everything = {**self._headers, **headers}
        with self._pool.ask(method, path, everything, Pace(read_s), body=body, connect_s=CONNECT_S) as answer:
            if not 200 <= answer.status < 300:
                raise _refusal(answer, f"{method} {self.url}{path}")
            return use(answer)

    def _untrusted(self, error: ssl.SSLCertVerificationError) -> Unavailable:
        return Unavailable(
            f"the certificate of {self.url} is not trusted ({error.verify_message}): check the address, or name the file of "
            f"the certificate's authority in {CA_VARIABLE}",
            url=self.url,
        )

    def _unanswered(self, method: str, error: Exception, unsent: bool) -> Unavailable:
        text = str(error).rpartition(": ")[2] or type(error).__name__
        what = "is too slow" if isinstance(error, TooSlow) else "does not answer"
        doubt = "" if unsent or method == "GET" else f"; whether the {method} was carried out is unknown"
        return Unavailable(f"{self.url} {what} ({text[:200]}){doubt}", url=self.url)


def trusted() -> ssl.SSLContext:
    """The system's authorities, and those in the file that `CA_VARIABLE` names.

    Raises
    ------
    InvalidInput
    """
    context = ssl.create_default_context()
    if path := os.environ.get(CA_VARIABLE):
        try:
            context.load_verify_locations(path)
        except OSError as error:
            reason = error.strerror or error
            raise InvalidInput(f"{CA_VARIABLE} names {path}, which holds no certificates in PEM ({reason})") from None
    return context


def _read(answer: HTTPResponse, limit: int) -> bytes:
    data = answer.read(limit + 1)
    if len(data) > limit:
        raise ServiceError(f"the service answered with more than {limit} bytes", limit=limit)
    announced = answer.headers.get("Content-Length", "")
    if announced.isascii() and announced.isdigit() and len(data) < int(announced):
        raise ConnectionError(f"the connection ended after {len(data)} of {announced} bytes")
    return data


def receive_chunk(answer: HTTPResponse, digest: str, spec: ChunkSpec, out: memoryview) -> None:
    """Read a chunk's decoded bytes out of an answer into ``out``, hashing them on the way.

    Raises
    ------
    ChunkCorrupt
        If what came is not what the digest names.
    """
    announced = answer.headers.get("Content-Length")
    if announced != str(spec.size):
        raise ChunkCorrupt(
            f"the chunk {digest} came with the length {announced}; it must have {spec.size} bytes", digest=digest
        )
    hasher = ChunkHasher(spec.dtype, spec.shape)
    receive(answer, out[: spec.size], hasher.update)
    found = hasher.digest()
    if found != digest:
        raise ChunkCorrupt(
            f"the chunk {digest} came as {found}: its bytes were altered on the way", digest=digest, found=found
        )


def _refusal(answer: HTTPResponse, what: str) -> Exception:
    """The error that the service answered with."""
    error = _parse_error(answer.status, _read(answer, _MAX_ERROR_BYTES), what)
    if answer.status in _BUSY:
        delay = answer.headers.get("Retry-After", "")
        return _Busy(error, float(delay) if delay.isascii() and delay.isdigit() else 0.0)
    return error


def _parse_error(status: int, data: bytes, what: str) -> KvgraftError:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    match value:
        case {"error": {"code": str(code), "message": str(message), "details": dict(details)}}:
            kind = error_types().get(code)
            error = kind(message) if kind else ServiceError(f"{what} was answered with {status} {code}: {message}")
            error.details = details
            return error
    kind = Unavailable if status in _BUSY else ServiceError
    return kind(
        f"{what} was answered with status {status} and no kvgraft error: is a kvgraft service there?", status=status
    )
