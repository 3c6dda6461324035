"""A bucket, asked through s3fs from any thread: connections, tries and deadlines."""

from __future__ import annotations

import asyncio
import atexit
import os
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from aiobotocore.session import AioSession
from botocore.exceptions import ClientError
from fsspec.asyn import get_loop
from s3fs import S3FileSystem

from repo_service.storage.s3_answers import Missing, Transient, Tries, check_media_type, refusal
from repo_service.storage.s3_reads import MODELS, Reader
from repo_service.storage.s3_ways import CONNECT_SECONDS, CONNECTIONS

SECONDS = 60.0

# Of an operation's time: the longest try. A write is given more than a read's silence, since one that was given up may
# still be done, later than what comes after it.
_TRY_SHARE = 1 / 3

T = TypeVar("T")


class Bucket:
    """A bucket, with the credentials and the endpoint that botocore finds.

    Connections are made at the first call, and again after a fork or `close`. Coroutines run in
    fsspec's loop; objects are read beside it.

    Parameters
    ----------
    name
        The bucket's.
    seconds
        Deadline of each operation.

    Attributes
    ----------
    reader
        Reads objects.
    """

    def __init__(self, name: str, seconds: float = SECONDS) -> None:
        self.name = name
        self.reader = Reader(name, seconds, self.call, self.run)
        self._seconds = seconds
        self._files: S3FileSystem | None = None
        self._unclosed: weakref.finalize[..., Any] | None = None
        _OPEN.add(self)

    @staticmethod
    def run(coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in fsspec's loop and wait for it; an interrupt here cancels it."""
        running = asyncio.run_coroutine_threadsafe(coroutine, get_loop())
        try:
            return running.result()
        finally:
            running.cancel()

    async def until_done(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Try until it is done, is refused for good, or the time is over."""
        tries = Tries(what, self.name, self._seconds)
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    try:
                        async with asyncio.timeout(self._seconds * _TRY_SHARE):
                            return await attempt()
                    except Exception as error:
                        pause = tries.after(error)
                    await asyncio.sleep(pause)
        except TimeoutError:
            raise tries.over() from None

    async def call(self, method: str, **arguments: Any) -> Any:
        """One request, tried once.

        Raises
        ------
        Missing, Refused
            For an answer that says no; others if there was none, or none of S3.
        """
        files = self._connection()
        try:
            answer = await files._call_s3(method, Bucket=self.name, **arguments)
        except RuntimeError as error:
            # Of credentials that were renewed and have expired, or of connections that another thread has closed.
            raise Transient(str(error)) from error
        except Exception as error:
            cause = error if isinstance(error, ClientError) else error.__cause__
            if not isinstance(cause, ClientError):
                raise
            refused = refusal(cause)
            if refused.is_expired:
                self._leave(files)
            raise Missing(refused) if refused.is_missing else refused from cause
        check_media_type(answer["ResponseMetadata"]["HTTPHeaders"])
        return answer

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self.reader.close()
        files, self._files = self._files, None
        if files is not None:
            if self._unclosed is not None:
                self._unclosed.detach()
            self.run(_close(files))

    def forget_connections(self) -> None:
        """Leave the connections to the process they were opened in."""
        self.reader.forget_connections()
        if self._unclosed is not None:
            self._unclosed.detach()
        _INHERITED.append(self._files)
        self._files = None

    def _leave(self, files: S3FileSystem) -> None:
        """Let the next call find other credentials; what is under way with these may end."""
        if self._files is files:
            self._files = None
            if self._unclosed is not None:
                self._unclosed.detach()
            loop = asyncio.get_running_loop()
            loop.call_later(self._seconds, _close_soon, loop, files)

    def _connection(self) -> S3FileSystem:
        """s3fs as this process uses it; called in the loop's thread only."""
        if self._files is None:
            config = {
                "connect_timeout": min(CONNECT_SECONDS, self._seconds),
                "read_timeout": self._seconds * _TRY_SHARE,
                "max_pool_connections": CONNECTIONS,
                # Tries are counted, and chunks hashed, here.
                "retries": {"total_max_attempts": 1},
                "response_checksum_validation": "when_required",
            }
            session = AioSession()
            session.register_component("data_loader", MODELS)
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
