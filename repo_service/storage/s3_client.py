"""A bucket, asked through s3fs from any thread: connections, tries and deadlines."""

from __future__ import annotations

import asyncio
import atexit
import os
import random
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from queue import SimpleQueue
from typing import Any, TypeVar

from aiobotocore.session import AioSession
from botocore.exceptions import ClientError
from botocore.loaders import Loader
from fsspec.asyn import get_loop
from s3fs import S3FileSystem

from repo_service.domain.errors import Unavailable
from repo_service.storage.s3_answers import Missing, Refused, advice, refusal, transient

SECONDS = 60.0

CONNECTIONS = 64
_CONNECT_SECONDS = 5.0

# Of an operation's time: the longest silence in a read, and the longest try of anything else. A write is given more,
# since one that was given up may still be done, later than what comes after it.
_SILENCE_SHARE, _TRY_SHARE = 1 / 6, 1 / 3

# Between tries, at random up to twice as long each time.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0

T = TypeVar("T")


class Bucket:
    """A bucket, with the credentials and the endpoint that botocore finds.

    Connections are made at the first call, and again after a fork or `close`. Coroutines run in
    fsspec's loop.

    Parameters
    ----------
    name
        The bucket's.
    seconds
        Deadline of each operation.

    Attributes
    ----------
    silence_s
        How long a read waits for the next bytes before it is tried anew.
    """

    def __init__(self, name: str, seconds: float = SECONDS) -> None:
        self.name = name
        self.silence_s = seconds * _SILENCE_SHARE
        self._seconds = seconds
        self._files: S3FileSystem | None = None
        self._unclosed: weakref.finalize[..., Any] | None = None
        _OPEN.add(self)

    @staticmethod
    def run(
        make: Callable[[Callable[[int], None]], Coroutine[Any, Any, T]], seen: Callable[[int], object] = lambda _: None
    ) -> T:
        """Run a coroutine in fsspec's loop and wait until it has ended, whatever happens here.

        ``make`` is given a function; what is handed to it reaches ``seen`` in this thread, in order.
        """
        events: SimpleQueue[int | asyncio.Task[T]] = SimpleQueue()
        loop: asyncio.AbstractEventLoop = get_loop()
        begun: list[asyncio.Task[T]] = []

        def begin() -> None:
            begun.append(loop.create_task(make(events.put)))
            begun[0].add_done_callback(events.put)

        def cancel() -> None:
            begun[0].cancel()

        loop.call_soon_threadsafe(begin)
        ended: asyncio.Task[T] | None = None
        try:
            while ended is None:
                event = events.get()
                if isinstance(event, int):
                    seen(event)
                else:
                    ended = event
        finally:
            if ended is None:
                # The caller's error. Nothing may write to its memory once this has returned.
                loop.call_soon_threadsafe(cancel)
                while isinstance(events.get(), int):
                    pass
        return ended.result()

    async def until_done(self, what: str, attempt: Callable[[], Awaitable[T]], *, each: bool = True) -> T:
        """Try until it is done, is refused for good, or the time is over.

        Parameters
        ----------
        each
            Whether a single try has a deadline too.
        """
        limit = self._seconds * _TRY_SHARE if each else None
        pause, last = _FIRST_PAUSE, "S3 did not answer"
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    try:
                        async with asyncio.timeout(limit):
                            return await attempt()
                    except Refused as refused:
                        if not refused.may_pass:
                            raise advice(refused, what, self.name) from refused
                        last = str(refused)
                    except Exception as error:
                        last = transient(error, what)
                    await asyncio.sleep(random.uniform(0, pause))
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except TimeoutError:
            raise Unavailable(
                f"could not {what} within {self._seconds:g} s (at last: {last}): see that S3 answers, and try again. "
                f"What was to be changed may be changed all the same",
                bucket=self.name,
            ) from None

    async def call(self, method: str, **arguments: Any) -> Any:
        """One request, tried once.

        Raises
        ------
        Missing, Refused
            For an answer that says no; others if there was none.
        """
        try:
            return await self._connection()._call_s3(method, Bucket=self.name, **arguments)
        except Exception as error:
            cause = error if isinstance(error, ClientError) else error.__cause__
            if not isinstance(cause, ClientError):
                raise
            refused = refusal(cause)
            raise Missing(refused) if refused.is_missing else refused from cause

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        files, self._files = self._files, None
        if files is not None:
            if self._unclosed is not None:
                self._unclosed.detach()
            self.run(lambda _: _close(files))

    def forget_connections(self) -> None:
        """Leave the connections to the process they were opened in."""
        if self._unclosed is not None:
            self._unclosed.detach()
        _INHERITED.append(self._files)
        self._files = None

    def _connection(self) -> S3FileSystem:
        """s3fs as this process uses it; called in the loop's thread only."""
        if self._files is None:
            config = {
                "connect_timeout": min(_CONNECT_SECONDS, self._seconds),
                "read_timeout": self._seconds * _TRY_SHARE,
                "max_pool_connections": CONNECTIONS,
                # Tries are counted, and chunks hashed, here.
                "retries": {"total_max_attempts": 1},
                "response_checksum_validation": "when_required",
            }
            session = AioSession()
            session.register_component("data_loader", _MODELS)
            self._files = S3FileSystem(
                asynchronous=True,
                session=session,
                skip_instance_cache=True,
                use_listings_cache=False,
                config_kwargs=config,
            )
            self._files.retries = 1
            self._unclosed = weakref.finalize(self, _close_soon, asyncio.get_running_loop(), self._files)
            self._unclosed.atexit = False
        return self._files


async def _close(files: S3FileSystem) -> None:
    if files._s3 is not None:
        await files._s3creator.__aexit__(None, None, None)


def _close_soon(loop: asyncio.AbstractEventLoop, files: S3FileSystem) -> None:
    """Close what was left open; may be called in any thread, the loop's too."""
    if loop.is_running():
        asyncio.run_coroutine_threadsafe(_close(files), loop)


# What botocore knows about S3, read once in a process.
_MODELS = Loader()

_OPEN: weakref.WeakSet[Bucket] = weakref.WeakSet()

# Clients of the process that this one was forked from: kept, since closing them would speak on its connections.
_INHERITED: list[S3FileSystem | None] = []


def _close_all() -> None:
    for bucket in list(_OPEN):
        bucket.close()


def _forget_all() -> None:
    for bucket in list(_OPEN):
        bucket.forget_connections()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
