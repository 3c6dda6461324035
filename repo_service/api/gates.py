"""Bounded concurrency: gates with short queues, and the memory that chunks pass through (I8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from mmap import mmap

from repo_service.domain.errors import Unavailable
from repo_service.domain.layout import MAX_CHUNK_BYTES


class Gate:
    """At most ``count`` requests inside, at most ``queue`` waiting, none of them longer than ``wait_s``.

    Attributes
    ----------
    running, waiting
        Requests inside, and those that wait.
    refused
        Requests that found no turn so far.
    """

    def __init__(self, count: int, queue: int, wait_s: float, what: str) -> None:
        self.count = count
        self._queue = queue
        self._wait_s = wait_s
        self._what = what
        self._inside = asyncio.Semaphore(count)
        self.running = 0
        self.waiting = 0
        self.refused = 0

    async def enter(self) -> None:
        """Raises
        ------
        Unavailable
            If the queue is full or the wait was too long.
        """
        if not self._inside.locked():
            await self._inside.acquire()
            self.running += 1
            return
        if self.waiting >= self._queue:
            self.refused += 1
            raise Unavailable(f"{self.count} {self._what} are running and {self.waiting} wait: try again later")
        self.waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await self._inside.acquire()
            self.running += 1
        except TimeoutError:
            self.refused += 1
            raise Unavailable(
                f"no turn among the {self._what} came within {self._wait_s:g} s: try again later"
            ) from None
        finally:
            self.waiting -= 1

    def leave(self) -> None:
        self.running -= 1
        self._inside.release()

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        await self.enter()
        try:
            yield
        finally:
            self.leave()


class Loan:
    """One buffer and the right to transfer a chunk, until one of the two methods is called.

    Attributes
    ----------
    memory
        Writable, ``MAX_CHUNK_BYTES`` long.
    """

    def __init__(self, memory: memoryview, free: list[memoryview], gate: Gate) -> None:
        self.memory = memory
        self._free = free
        self._gate = gate

    def give_back(self) -> None:
        self._free.append(self.memory)
        self._gate.leave()

    def discard(self) -> None:
        """End a transfer while something may still refer to the memory."""
        self._gate.leave()


class ChunkBuffers:
    """Reused buffers of the largest chunk's size, one to a transfer.

    Fresh buffers would cost more time than hashing what is read into them. They are mapped, so
    that a buffer takes only the memory its largest chunk has touched.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._free: list[memoryview] = []

    async def take(self) -> Loan:
        """Raises
        ------
        Unavailable
        """
        await self._gate.enter()
        memory = self._free.pop() if self._free else memoryview(mmap(-1, MAX_CHUNK_BYTES))
        return Loan(memory, self._free, self._gate)
