"""How much a namespace may ask for and transfer in a second, at this replica."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.types import Message, Receive, Send

from repo_service.domain.errors import RateLimited
from repo_service.settings import Settings

_NAMESPACES = 1024
_MIB = 2**20


class _Bucket:
    """Fills at a rate, up to one second's worth, and may be overdrawn by what is under way."""

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._most = max(1.0, rate)
        self._level = self._most
        self._at = now

    def wait_s(self, least: float, now: float) -> float:
        """Seconds until at least so much is there; 0 if it is."""
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, least - self._level) / self._rate

    def take(self, amount: float) -> None:
        self._level -= amount


class Rates:
    """Requests and bytes of each namespace; the least recently asking ones beyond 1,024 are forgotten.

    Belongs to one event loop. A limit of 0 is none.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = settings.namespace_requests_per_second
        self._bytes = settings.namespace_mib_per_second * _MIB
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[_Bucket | None, _Bucket | None]] = OrderedDict()

    @property
    def limited(self) -> bool:
        return bool(self._requests or self._bytes)

    def admit(self, namespace: str, receive: Receive, send: Send) -> tuple[Receive, Send]:
        """Count a request; gives what its bodies are to go through, to be counted too.

        A transfer that has begun is not slowed: what it takes beyond the limit, later requests wait for.

        Raises
        ------
        RateLimited
        """
        now = self._clock()
        requests, transfers = self._of(namespace, now)
        waits = (
            requests.wait_s(1, now) if requests else 0.0,
            # Any debt at all is waited for.
            transfers.wait_s(math.ulp(0.0), now) if transfers else 0.0,
        )
        if any(waits):
            seconds = max(1, math.ceil(max(waits)))
            limits = f"{self._requests:g} requests" if waits[0] >= waits[1] else f"{self._bytes / _MIB:g} MiB"
            raise RateLimited(
                f"the namespace {namespace[:100]} may have {limits} in a second here: ask again in {seconds} s",
                retry_after_s=seconds,
            )
        if requests:
            requests.take(1)
        return (_counted(receive, transfers), _counted_send(send, transfers)) if transfers else (receive, send)

    def _of(self, namespace: str, now: float) -> tuple[_Bucket | None, _Bucket | None]:
        buckets = self._buckets.pop(namespace, None)
        if buckets is None:
            buckets = (
                _Bucket(self._requests, now) if self._requests else None,
                _Bucket(self._bytes, now) if self._bytes else None,
            )
        self._buckets[namespace] = buckets
        if len(self._buckets) > _NAMESPACES:
            self._buckets.popitem(last=False)
        return buckets


def _counted(receive: Receive, bucket: _Bucket) -> Receive:
    async def counted() -> Message:
        message = await receive()
        bucket.take(len(message.get("body", b"")))
        return message

    return counted


def _counted_send(send: Send, bucket: _Bucket) -> Send:
    async def counted(message: Message) -> None:
        bucket.take(len(message.get("body", b"")))
        await send(message)

    return counted
