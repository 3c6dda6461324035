"""HTTP requests to a kvgraft service: pooled connections, retries, bounded answers and times, errors by code."""

from __future__ import annotations

import http.client
import io
import json
import os
import random
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import SplitResult

import urllib3
import urllib3.connection
from typing_extensions import Buffer

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

CA_VARIABLE = "KVGRAFT_CA_FILE"

# Bytes a second. A chunk of 8 MiB then has about the 10 minutes that a service gives to it.
_SLOWEST = 16 * 1024

_ATTEMPTS = 4
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 2.0

_BUSY = (408, 429, 503)

_MAX_ERROR_BYTES = 2**20

# A piece is hashed while it still lies in the core's cache.
_PIECE = 512 * 1024


class _TooSlow(Exception):
    """A transfer below the slowest pace; urllib3 lets it through and drops the connection."""


_UNSENT = (urllib3.exceptions.ConnectTimeoutError, urllib3.exceptions.NewConnectionError)
_LOST = (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, _TooSlow)

T = TypeVar("T")


class _Busy(Exception):
    """An answer that asks to come back later."""

    def __init__(self, error: KvgraftError, delay_s: float) -> None:
        super().__init__(error.message)
        self.error = error
        self.delay_s = delay_s


class _Pace:
    """How long a transfer may go on: ``READ_S``, and a second for each ``_SLOWEST`` bytes that moved."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.moved = 0

    def wait_s(self) -> float:
        """Longest wait for the next byte.

        Raises
        ------
        _TooSlow
        """
        rest = self._began + READ_S + self.moved / _SLOWEST - time.monotonic()
        if rest <= 0:
            raise self.too_slow()
        return min(READ_S, rest)

    def too_slow(self) -> _TooSlow:
        took = time.monotonic() - self._began
        return _TooSlow(
            f"{self.moved} bytes moved in {took:.0f} s; {READ_S:.0f} s are given, and 1 s more for each {_SLOWEST} bytes"
        )


class _PacedSource(io.RawIOBase):
    """What a socket receives, at no less than the slowest pace once the first byte is there."""

    def __init__(self, source: io.BufferedReader, sock: socket.socket) -> None:
        self._source = source.detach()
        self._socket = sock
        self._wait_s = sock.gettimeout()
        self._pace: _Pace | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        if self._pace is not None and (wait_s := self._pace.wait_s()) != self._wait_s:
            self._socket.settimeout(wait_s)
            self._wait_s = wait_s
        try:
            count = self._socket.recv_into(out)
        except TimeoutError:
            if self._pace is None:
                raise
            raise self._pace.too_slow() from None
        if self._pace is None:
            self._pace = _Pace()
        self._pace.moved += count
        return count

    def close(self) -> None:
        self._source.close()
        super().close()


class _PacedResponse(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_PacedSource(self.fp, sock))


class _PacedConnection(http.client.HTTPConnection):
    """Sends no slower than the pace; left to urllib3, a whole body would have the time for connecting."""

    response_class = _PacedResponse

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()
        octets = memoryview(data).cast("B")
        pace = _Pace()
        while pace.moved < len(octets):
            self.sock.settimeout(pace.wait_s())
            piece = octets[pace.moved : pace.moved + _PIECE]
            try:
                self.sock.sendall(piece)
            except TimeoutError:
                raise pace.too_slow() from None
            pace.moved += len(piece)


class _Connection(_PacedConnection, urllib3.connection.HTTPConnection):
    pass


class _SecureConnection(_PacedConnection, urllib3.connection.HTTPSConnection):
    pass


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
        self._headers = {"User-Agent": f"kvgraft/{__version__}"}
        if token is not None:
            if not token or not token.isascii() or not token.isprintable() or " " in token:
                raise InvalidInput("the token must be printable ASCII without spaces")
            self._headers["Authorization"] = f"Bearer {token}"
        secure = parts.scheme == "https"
        host = parts.hostname or ""
        self._pool = (
            urllib3.HTTPSConnectionPool(host, parts.port, maxsize=connections, ssl_context=_trust())
            if secure
            else urllib3.HTTPConnectionPool(host, parts.port, maxsize=connections)
        )
        self._pool.ConnectionCls = _SecureConnection if secure else _Connection

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
        self._send("GET", path, lambda answer: _read_chunk(answer, digest, spec, out))

    def close(self) -> None:
        self._pool.close()

    def _send(
        self,
        method: str,
        path: str,
        use: Callable[[urllib3.HTTPResponse], T],
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
            except _LOST as error:
                if (distrust := _distrust(error)) is not None:
                    raise self._untrusted(distrust) from None
                unsent = isinstance(error, _UNSENT)
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
        use: Callable[[urllib3.HTTPResponse], T],
        body: Buffer | None,
        headers: dict[str, str],
        read_s: float,
    ) -> T:
        answer = self._pool.urlopen(
            method,
            path,
            body=body,  # type: ignore[arg-type]
            headers={**self._headers, **headers},
            retries=False,
            redirect=False,
            timeout=urllib3.Timeout(connect=CONNECT_S, read=read_s),
            preload_content=False,
            decode_content=False,
        )
        assert isinstance(answer, urllib3.HTTPResponse)
        try:
            if not 200 <= answer.status < 300:
                raise _refusal(answer, f"{method} {self.url}{path}")
            return use(answer)
        finally:
            if not answer.closed:
                answer.close()
            answer.release_conn()

    def _untrusted(self, error: ssl.SSLCertVerificationError) -> Unavailable:
        return Unavailable(
            f"the certificate of {self.url} is not trusted ({error.verify_message}): check the address, or name the file of "
            f"the certificate's authority in {CA_VARIABLE}",
            url=self.url,
        )

    def _unanswered(self, method: str, error: Exception, unsent: bool) -> Unavailable:
        text = str(error).rpartition(": ")[2] or type(error).__name__
        what = "is too slow" if isinstance(error, _TooSlow) else "does not answer"
        doubt = "" if unsent or method == "GET" else f"; whether the {method} was carried out is unknown"
        return Unavailable(f"{self.url} {what} ({text[:200]}){doubt}", url=self.url)


def _distrust(error: Exception) -> ssl.SSLCertVerificationError | None:
    """What is wrong with the peer's certificate, which no further attempt would mend."""
    cause = error.args[0] if isinstance(error, urllib3.exceptions.SSLError) and error.args else None
    return cause if isinstance(cause, ssl.SSLCertVerificationError) else None


def _trust() -> ssl.SSLContext:
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


def _read(answer: urllib3.HTTPResponse, limit: int) -> bytes:
    data = answer.read(limit + 1, decode_content=False)
    if len(data) > limit:
        raise ServiceError(f"the service answered with more than {limit} bytes", limit=limit)
    announced = answer.headers.get("Content-Length", "")
    if announced.isascii() and announced.isdigit() and len(data) < int(announced):
        raise ConnectionError(f"the connection ended after {len(data)} of {announced} bytes")
    return data


def _read_chunk(answer: urllib3.HTTPResponse, digest: str, spec: ChunkSpec, out: memoryview) -> None:
    announced = answer.headers.get("Content-Length")
    if announced != str(spec.size):
        raise ChunkCorrupt(
            f"the chunk {digest} came with the length {announced}; it must have {spec.size} bytes", digest=digest
        )
    # urllib3's own readinto copies; http.client's reads from the socket straight into `out`.
    source = answer._original_response
    assert source is not None
    hasher = ChunkHasher(spec.dtype, spec.shape)
    position = 0
    while position < spec.size:
        piece = out[position : min(position + _PIECE, spec.size)]
        count = source.readinto(piece)
        if not count:
            raise ConnectionError(f"the connection ended after {position} of {spec.size} bytes")
        hasher.update(piece[:count])
        position += count
    found = hasher.digest()
    if found != digest:
        raise ChunkCorrupt(
            f"the chunk {digest} came as {found}: its bytes were altered on the way", digest=digest, found=found
        )


def _refusal(answer: urllib3.HTTPResponse, what: str) -> Exception:
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
