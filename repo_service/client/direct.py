"""Chunks fetched from S3 and put there by the node itself, where the service says at which URLs.

What is fetched is verified here (I3), what is put by the service before it counts. The service stays the one to ask:
whatever does not come, or does not go, passes through it.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from http.client import HTTPResponse
from urllib.parse import SplitResult, urlsplit

from pydantic import ValidationError

from repo_service.client import transport
from repo_service.client.transport import LOST, USER_AGENT, Pace, TooSlow, Transport, receive_chunk, trusted
from repo_service.connections import Pool, Unconnected, receive
from repo_service.domain.canonical import canonical_json
from repo_service.domain.errors import (
    ChunkCorrupt,
    ChunkNotFound,
    DigestMismatch,
    NotFound,
    ServiceError,
    SizeMismatch,
    Unavailable,
)
from repo_service.domain.frame import decode_chunk, longest_frame
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.views import ChunkUrls

_MAX_ANSWER_BYTES = 2**20
_MAX_S3_ANSWER_BYTES = 64 * 1024

# URLs asked for at once, and kept, each for one use.
_PAGE, _KEPT = 64, 1024

# Of the time that a URL is good: how long it is used.
_TRUSTED_SHARE = 0.8

# How long S3 is left alone after it could not be reached.
PAUSE_S = 60.0

_CONNECT_S = 2.0

# The longest wait for URLs, and how long a thread waits for those that another asks for, from when that asked.
_ASK_S = 10.0
_TURN_S = 1.0

# Requests in a row that may fail before S3 is left alone.
_MOST_FAILURES = 4

# The service's read of what was put at S3, and its write, each of which S3 may delay.
_TAKE_S = 2 * transport.READ_S

_log = logging.getLogger(__name__)

_warned: set[tuple[str, str]] = set()

_URL = re.compile(r"[!-~]+", re.ASCII)
_HOST = re.compile(r"[a-z0-9._:-]{1,253}", re.ASCII)


class _Unfit(Exception):
    """A URL at which nothing should be asked. Its text holds nothing of the URL, which is a secret."""


class Reach:
    """What this process reaches of S3: connections by server, and whether they are tried at all.

    Parameters
    ----------
    service
        Who gives the URLs.
    """

    def __init__(self, service: Transport) -> None:
        self.service = service
        self.off: set[type[_Direct]] = set()
        self._pools: dict[tuple[str, str], Pool] = {}
        self._paused_until = 0.0
        self._failures = 0
        self.renew()

    def renew(self) -> None:
        """Make new locks, for a child of a fork: those that it inherits may be held by threads that it has not."""
        self._lock = threading.Lock()
        _OPEN.add(self)

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def exchange(
        self, method: str, url: str, use: Callable[[HTTPResponse], object], body: memoryview | None = None
    ) -> int:
        """Send a request to S3 and ``use`` its answer, if that is 200; returns the status, 0 if there was no good answer."""
        host, status = "S3", 0
        try:
            parts = _parsed(url, self.service.url)
            host = parts.hostname or host
            status = self._ask(parts, method, use, body)
        except _Unfit as error:
            self.pause(host, str(error))
        except ValueError:
            # A name that no resolver takes. What the error says may hold the URL.
            self.pause(host, "its URL is malformed")
        except ChunkCorrupt:
            pass
        except LOST as error:
            # A connection that breaks is no sign that the next one will.
            if isinstance(error, (Unconnected, ssl.SSLCertVerificationError, TooSlow, TimeoutError)):
                self.pause(host, str(error))
        self._failures = 0 if status == 200 else self._failures + 1
        if self._failures >= _MOST_FAILURES:
            self._failures = 0
            answer = f"the last with status {status}" if status else "the last with no good answer"
            self.pause(host, f"{_MOST_FAILURES} requests in a row failed, {answer}")
        return status

    def pause(self, host: str, reason: str) -> None:
        """Let the service pass everything on for a while; whoever runs this process is told once."""
        self._paused_until = time.monotonic() + PAUSE_S
        if (self.service.url, host) not in _warned:
            _warned.add((self.service.url, host))
            _log.warning(
                "chunks can't be fetched from or put at %s (%s): they go through %s instead",
                host,
                reason,
                self.service.url,
            )

    def close(self) -> None:
        with self._lock:
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()

    def _ask(
        self, parts: SplitResult, method: str, use: Callable[[HTTPResponse], object], body: memoryview | None
    ) -> int:
        target, headers = f"{parts.path or '/'}?{parts.query}", {"User-Agent": USER_AGENT}
        pace = Pace(transport.READ_S)
        with self._pool(parts).ask(method, target, headers, pace, body=body, connect_s=_CONNECT_S) as answer:
            if answer.status != 200:
                answer.read(_MAX_S3_ANSWER_BYTES)
                return answer.status
            use(answer)
            return answer.status

    def _pool(self, parts: SplitResult) -> Pool:
        """Connections to the server of a URL."""
        place = parts.scheme, parts.netloc
        with self._lock:
            if place not in self._pools:
                context = trusted() if parts.scheme == "https" else None
                self._pools[place] = Pool(parts.hostname or "", parts.port, context)
            return self._pools[place]


def _parsed(url: str, service: str) -> SplitResult:
    """The parts of a URL that ``service`` gave.

    Raises
    ------
    _Unfit
    """
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in {"http", "https"} and _HOST.fullmatch(parts.hostname or "") and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or "@" in parts.netloc or not _URL.fullmatch(url):
        raise _Unfit("its URL is none of HTTP")
    if parts.scheme == "http" and service.startswith("https:"):
        raise _Unfit("its URL is not HTTPS, though the service's is")
    return parts


class _Direct(ABC):
    """Transfers by URLs that the service gives, page by page. Methods may be called from several threads.

    Whether it gives any is asked once, and not again if it does not.
    """

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._urls: dict[str, tuple[str, float]] = {}
        self._is_framed = False
        self.renew()

    def renew(self) -> None:
        """Make new locks, as `Reach.renew` does."""
        self._changed = threading.Condition()
        self._asked_at: float | None = None
        _OPEN.add(self)

    @abstractmethod
    def _ask(self, name: str) -> tuple[bytes, str]:
        """The service's answer for the chunk called ``name`` and some more; what to put before its digests for their names."""

    def _transfer(
        self, name: str, method: str, use: Callable[[HTTPResponse], object], body: memoryview | None = None
    ) -> bool:
        """True if it was done; False if the service is to do it."""
        for is_new in False, True:
            url = self._url(name)
            if url is None:
                return False
            status = self._reach.exchange(method, url, use, body)
            if status != 403:
                return status == 200
            if is_new:
                self._reach.pause(urlsplit(url).hostname or "S3", "it answers 403 to a new URL")
            # Its time is over; so is that of those that came with it.
            with self._changed:
                self._urls.clear()
        return False

    def _url(self, name: str) -> str | None:
        with self._changed:
            while True:
                if self._is_off():
                    return None
                url, good_until = self._urls.pop(name, ("", 0.0))
                if time.monotonic() < good_until:
                    return url
                if self._asked_at is None:
                    break
                # Another thread asks, most likely for the very page that is needed here; the service need not wait long for it.
                rest_s = self._asked_at + _TURN_S - time.monotonic()
                if rest_s <= 0 or not self._changed.wait(rest_s):
                    return None
            self._asked_at = asked_at = time.monotonic()
        page = None
        try:
            page = self._page(name)
        finally:
            with self._changed:
                self._asked_at = None
                self._changed.notify_all()
                if page is not None:
                    self._keep(*page, asked_at)
                found = self._urls.pop(name, None)
        return None if found is None else found[0]

    def _keep(self, answer: ChunkUrls, prefix: str, asked_at: float) -> None:
        self._is_framed = answer.framed
        if len(self._urls) > _KEPT:
            self._urls.clear()
        good_until = asked_at + answer.seconds * _TRUSTED_SHARE
        self._urls |= {f"{prefix}{digest}": (url, good_until) for digest, url in answer.urls.items()}

    def _page(self, name: str) -> tuple[ChunkUrls, str] | None:
        """URLs for the chunk called ``name`` and some more, and what to put before their digests; None if there are none now.

        Raises
        ------
        KvgraftError
            What the service says of the chunk or the push.
        """
        try:
            data, prefix = self._ask(name)
            answer = ChunkUrls.model_validate_json(data)
        except NotFound as error:
            # An older service has no such route.
            if type(error) is not NotFound:
                raise
            self._reach.off.add(type(self))
            return None
        except (ServiceError, Unavailable):
            self._reach.pause("S3", "the service can't say at which URLs")
            return None
        except ValidationError:
            self._reach.pause("S3", "the service answers nonsense when it is asked for URLs")
            return None
        if not answer.urls:
            self._reach.off.add(type(self))
            return None
        if name.removeprefix(prefix) not in answer.urls:
            self._reach.pause("S3", "the service says where other chunks are than the one that it is asked for")
            return None
        return answer, prefix

    def _is_off(self) -> bool:
        return type(self) in self._reach.off or self._reach.is_paused


_OPEN: weakref.WeakSet[Reach | _Direct] = weakref.WeakSet()


def _renew_all() -> None:
    for opened in list(_OPEN):
        opened.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)


class DirectReads(_Direct):
    """Reads of one repository's chunks past its service."""

    def fetch(self, path: str, digest: str, spec: ChunkSpec, out: memoryview) -> bool:
        """Fetch a chunk into ``out`` from S3, hashing it on the way; False if the service is to be asked for it.

        Parameters
        ----------
        path
            The chunk's, at the service.

        Raises
        ------
        KvgraftError
            What the service says when it is asked for URLs.
        """

        def use(answer: HTTPResponse) -> None:
            (_receive_frame if self._is_framed else receive_chunk)(answer, digest, spec, out)

        return self._transfer(path, "GET", use)

    def _ask(self, name: str) -> tuple[bytes, str]:
        data = self._reach.service.call("GET", f"{name}/urls", limit=_MAX_ANSWER_BYTES, again=False, read_s=_ASK_S)
        return data, f"{name.rpartition('/')[0]}/"


def _receive_frame(answer: HTTPResponse, digest: str, spec: ChunkSpec, out: memoryview) -> None:
    """Read a chunk's frame out of an answer and decode it into ``out``, verified.

    Raises
    ------
    ChunkCorrupt
    """
    length = answer.length
    if length is None or length > longest_frame(spec):
        raise ChunkCorrupt(f"the frame of the chunk {digest} came with the length {length}", digest=digest)
    frame = memoryview(bytearray(length))
    receive(answer, frame, lambda _: None)
    decode_chunk(frame, digest, spec, out[: spec.size])


class DirectWrites(_Direct):
    """Chunks of one push, put at S3 and then taken by the service.

    Parameters
    ----------
    path
        The push's, at the service.
    """

    def __init__(self, reach: Reach, path: str) -> None:
        super().__init__(reach)
        self._path = path
        self._expected: dict[str, None] = {}

    def expect(self, digests: Sequence[str]) -> None:
        """Say what will be sent, in this order, so that URLs are asked for many at once."""
        with self._changed:
            self._expected.update(dict.fromkeys(digests))

    def send(self, digest: str, octets: memoryview) -> bool:
        """Put a chunk at S3 and let the service take it; False if it is to be sent to the service.

        Raises
        ------
        KvgraftError
            What the service says of the push.
        """
        if not self._transfer(digest, "PUT", lambda answer: answer.read(_MAX_S3_ANSWER_BYTES), octets):
            return False
        try:
            self._reach.service.call("POST", f"{self._path}/uploads/{digest}", limit=0, read_s=_TAKE_S)
        except (ChunkNotFound, SizeMismatch, DigestMismatch):
            # Nothing was stored. If it is the caller's fault the service says so again.
            return False
        return True

    def _ask(self, name: str) -> tuple[bytes, str]:
        with self._changed:
            self._expected.pop(name, None)
            more = list(self._expected)[: _PAGE - 1]
            for digest in more:
                del self._expected[digest]
        body = canonical_json({"digests": [name, *more]})
        path = f"{self._path}/uploads"
        return self._reach.service.call("POST", path, body, limit=_MAX_ANSWER_BYTES, again=False, read_s=_ASK_S), ""
