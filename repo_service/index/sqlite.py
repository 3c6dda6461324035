"""SQLite as the index's database.

Writers take the lock when they begin, never by upgrading a read: that upgrade fails with
"database is locked" whatever the timeout, and the driver's own transaction handling loses updates.
Readers use connections of their own, which never take the lock.
"""

from __future__ import annotations

import fcntl
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event

from repo_service.domain.errors import MalformedUrl
from repo_service.index.engine import BUSY_SECONDS, Database, Mode
from repo_service.index.errors import translated
from repo_service.index.forks import FORKS

READERS = 16
_MEMORY = ":memory:"

# NORMAL may lose the last transactions in a power loss, in order and whole; FULL may not.
_BEGIN = {
    "read": ("BEGIN",),
    "write": ("PRAGMA synchronous=NORMAL", "BEGIN IMMEDIATE"),
    "durable": ("PRAGMA synchronous=FULL", "BEGIN IMMEDIATE"),
}


class SqliteDatabase(Database):
    """A database in a file, or in memory, where readers share the one connection.

    Parameters
    ----------
    url
        ``sqlite:///<path>``, taken literally up to its end, or ``sqlite://`` for one in memory.

    Raises
    ------
    MalformedUrl, Unavailable, DocumentCorrupt
    """

    def __init__(self, url: str) -> None:
        self._path = _path(url)
        self._jobs: set[str] = set()
        self._jobs_lock = threading.Lock()
        writer = _engine(self._path, 1)
        if self._path == _MEMORY:
            super().__init__(writer, writer)
            return
        reader = _engine(self._path, READERS)
        event.listen(reader, "connect", _only_read)
        with translated(), FORKS.kept_out():
            _use_wal(self._path)
        super().__init__(writer, reader)

    def _begin(self, connection: Connection, mode: Mode, wait: float) -> None:
        driver: Any = connection.connection.driver_connection
        if mode != "read":
            driver.execute(f"PRAGMA busy_timeout={round(wait * 1000)}")
        for statement in _BEGIN[mode]:
            driver.execute(statement)

    @contextmanager
    def alone(self, job: str) -> Iterator[bool]:
        # A lock on a file is a process's, or its descriptor's: threads of this process are told apart first.
        with self._jobs_lock:
            free = job not in self._jobs
            self._jobs.add(job)
        if not free:
            yield False
            return
        try:
            if self._path == _MEMORY:
                yield True
                return
            try:
                file = open(f"{self._path}-{job}", "ab")  # noqa: SIM115
            except OSError:
                # On a disk that takes no file the job may be what frees room.
                yield True
                return
            with file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    yield False
                    return
                yield True
        finally:
            with self._jobs_lock:
                self._jobs.discard(job)


def _path(url: str) -> str:
    if url in ("sqlite://", "sqlite:///:memory:"):
        return _MEMORY
    path = url.removeprefix("sqlite:///")
    if path == url or not path or "\0" in path:
        raise MalformedUrl(f"{url[:100]!r} is not the URL of an index: sqlite:///<path>", url=url[:100])
    return path


def _engine(path: str, connections: int) -> Engine:
    engine = create_engine(
        URL.create("sqlite", database=path),
        poolclass=QueuePool,
        pool_size=connections,
        max_overflow=0,
        pool_timeout=BUSY_SECONDS,
        hide_parameters=True,
        connect_args={"timeout": BUSY_SECONDS, "isolation_level": None, "check_same_thread": False},
    )
    event.listen(engine, "connect", _configure)
    return engine


def _configure(connection: sqlite3.Connection, _record: Any) -> None:
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA cache_size=-16384")
    connection.execute("PRAGMA journal_size_limit=67108864")


def _only_read(connection: sqlite3.Connection, _record: Any) -> None:
    connection.execute("PRAGMA query_only=ON")


def _use_wal(path: str) -> None:
    """Switch the file to write-ahead logging, once; SQLite does not wait for the lock this needs."""
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)
    finally:
        connection.close()
