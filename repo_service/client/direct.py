"""Chunks fetched from S3 itself, where the service says at which URLs, and verified all the same (I3).

The service stays the one to ask: whatever does not come, or does not come as it should, is asked of it.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from urllib.parse import SplitResult, urlsplit

from pydantic import ValidationError

from repo_service.client import transport
from repo_service.client.transport import LOST, USER_AGENT, Pace, TooSlow, Transport, receive_chunk, trusted
from repo_service.connections import Pool, Unconnected
from repo_service.domain.errors import ChunkCorrupt, NotFound, ServiceError
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.views import ChunkUrls

_MAX_ANSWER_BYTES = 2**20

# URLs kept, each for one read; a page of the service has 64.
_KEPT = 1024

# Of the time that a URL is good: how long it is used.
_TRUSTED_SHARE = 0.8

# How long S3 is left alone after it could not be reached.
PAUSE_S = 60.0

_CONNECT_S = 2.0

_log = logging.getLogger(__name__)

_warned: set[tuple[str, str]] = set()


class DirectReads:
    """Reads of one repository's chunks past its service. Methods may be called from several threads.

    Whether there is such a way is asked of the service at the first read, and not again if there is none.
    """

    def __init__(self, service: Transport) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._urls: dict[str, tuple[str, float]] = {}
        self._pools: dict[tuple[str, str], Pool] = {}
        self._paused_until = 0.0

    def read(self, path: str, digest: str, spec: ChunkSpec, out: memoryview) -> bool:
        """Fetch a chunk into ``out`` from S3; False if the service is to be asked for it.

        Parameters
        ----------
        path
            The chunk's, at the service.

        Raises
        ------
        KvgraftError
            What the service says when it is asked for URLs.
        """
        for is_new in False, True:
            url = self._url(path, digest)
            if url is None:
                return False
            status = self._fetch(url, digest, spec, out)
            if status != 403:
                return status == 200
            if is_new:
                self._pause(url, "it answers 403 to a new URL")
            # Its time is over; so is that of those that came with it.
            with self._lock:
                self._urls.clear()
        return False

    def close(self) -> None:
        with self._lock:
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.close()

    def _url(self, path: str, digest: str) -> str | None:
        if self._is_paused():
            return None
        # Who waits here needs most likely the very page that another thread asks for.
        with self._lock:
            if self._is_paused():
                return None
            url, good_until = self._urls.pop(path, ("", 0.0))
            if time.monotonic() < good_until:
                return url
            asked_at = time.monotonic()
            try:
                data = self._service.call("GET", f"{path}/urls", limit=_MAX_ANSWER_BYTES)
                answer = ChunkUrls.model_validate_json(data)
            except (NotFound, ServiceError, ValidationError) as error:
                if isinstance(error, NotFound) and type(error) is not NotFound:
                    raise
                # An older service, which has no such route.
                answer = ChunkUrls(seconds=0, urls={})
            if digest not in answer.urls:
                self._paused_until = float("inf")
                return None
            if len(self._urls) > _KEPT:
                self._urls.clear()
            chunks = path.removesuffix(digest)
            good_until = asked_at + answer.seconds * _TRUSTED_SHARE
            self._urls |= {f"{chunks}{name}": (url, good_until) for name, url in answer.urls.items()}
            return self._urls.pop(path)[0]

    def _is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _fetch(self, url: str, digest: str, spec: ChunkSpec, out: memoryview) -> int:
        """The status that S3 answered with; 0 for anything else than a chunk that is what its digest names."""
        parts = urlsplit(url)
        try:
            pool = self._pool(parts)
        except ValueError as error:
            self._pause(url, str(error))
            return 0
        target = f"{parts.path}?{parts.query}"
        pace = Pace(transport.READ_S)
        try:
            with pool.ask("GET", target, {"User-Agent": USER_AGENT}, pace, connect_s=_CONNECT_S) as answer:
                if answer.status == 200:
                    receive_chunk(answer, digest, spec, out)
                return answer.status
        except ChunkCorrupt:
            return 0
        except LOST as error:
            # A connection that breaks is no sign that the next one will.
            if isinstance(error, (Unconnected, ssl.SSLCertVerificationError, TooSlow, TimeoutError)):
                self._pause(url, str(error))
            return 0

    def _pool(self, parts: SplitResult) -> Pool:
        """Connections to the server of a URL.

        Raises
        ------
        ValueError
            If nothing should be asked there.
        """
        if parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
            raise ValueError("its URL is none of HTTP")
        if parts.scheme == "http" and self._service.url.startswith("https:"):
            raise ValueError("its URL is not HTTPS, though the service's is")
        place = parts.scheme, parts.netloc
        with self._lock:
            if place not in self._pools:
                context = trusted() if parts.scheme == "https" else None
                self._pools[place] = Pool(parts.hostname, parts.port, context)
            return self._pools[place]

    def _pause(self, url: str, reason: str) -> None:
        """Let the service send everything for a while; whoever runs this process is told once."""
        self._paused_until = time.monotonic() + PAUSE_S
        host = urlsplit(url).hostname or "a URL without a host"
        if (self._service.url, host) not in _warned:
            _warned.add((self._service.url, host))
            _log.warning(
                "chunks can't be fetched from %s (%s): they come through %s instead", host, reason, self._service.url
            )
