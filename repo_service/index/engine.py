"""Connections to SQLite and their transactions.

Writers take the lock when they begin, never by upgrading a read: that upgrade fails with
"database is locked" whatever the timeout, and the driver's own transaction handling loses updates.
Readers use connections of their own, which never take the lock.
"""

from __future__ import annotations

import os
import sqlite3
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event

from repo_service.domain.errors import MalformedUrl
from repo_service.index.errors import translated
from repo_service.index.line import Line

BUSY_SECONDS = 30
READERS = 16
_MEMORY = ":memory:"
_MODE = "kvgraft_mode"
_WAIT = "kvgraft_wait"

# NORMAL may lose the last transactions in a power loss, in order and whole; FULL may not.
_BEGIN = {
    "read": ("BEGIN",),
    "write": ("PRAGMA synchronous=NORMAL", "BEGIN IMMEDIATE"),
    "durable": ("PRAGMA synchronous=FULL", "BEGIN IMMEDIATE"),
}


class Database:
    """One SQLite database, opened for this process.

    One connection writes: threads wait for it in line instead of polling the file's lock. A database
    in memory has that connection only, readers included.

    Parameters
    ----------
    url
        ``sqlite:///<path>``, taken literally up to its end, or ``sqlite://`` for one in memory.

    Raises
    ------
    MalformedUrl, Unavailable, DocumentCorrupt
    """

    def __init__(self, url: str) -> None:
        path = _path(url)
        self._line = Line()
        self._writer = _engine(path, 1)
        self._reader = self._writer if path == _MEMORY else _engine(path, READERS)
        if path == _MEMORY:
            return
        event.listen(self._reader, "connect", _only_read)
        with translated():
            _use_wal(path)
        _forget_connections_after_fork(self)

    def read(self) -> AbstractContextManager[Connection]:
        """A snapshot that no writer changes, and that makes no writer wait."""
        return _transaction(self._reader, "read")

    def write(self) -> AbstractContextManager[Connection]:
        """The write lock, for bookkeeping that a power loss may undo."""
        return self._write("write")

    def write_soon(self, seconds: float) -> AbstractContextManager[Connection]:
        """As `write`, for what can be left undone: `Unavailable` if the lock is not free within ``seconds``."""
        return self._write("write", seconds)

    def write_durably(self) -> AbstractContextManager[Connection]:
        """The write lock; what is committed survives a power loss."""
        return self._write("durable")

    def close(self) -> None:
        self._writer.dispose()
        self._reader.dispose()

    def forget_connections(self) -> None:
        """Leave the connections, and whoever waits for them, to the process they were opened in."""
        self._line = Line()
        self._writer.dispose(close=False)
        self._reader.dispose(close=False)

    @contextmanager
    def _write(self, mode: str, seconds: float | None = None) -> Iterator[Connection]:
        wait = BUSY_SECONDS if seconds is None else seconds
        with self._line.turn(wait), _transaction(self._writer, mode, wait) as connection:
            yield connection


@contextmanager
def _transaction(engine: Engine, mode: str, seconds: float | None = None) -> Iterator[Connection]:
    options = {_MODE: mode, _WAIT: seconds}
    with translated(), engine.connect().execution_options(**options) as connection, connection.begin():
        yield connection


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
    event.listen(engine, "begin", _begin)
    return engine


def _configure(connection: sqlite3.Connection, _record: Any) -> None:
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA cache_size=-16384")
    connection.execute("PRAGMA journal_size_limit=67108864")


def _only_read(connection: sqlite3.Connection, _record: Any) -> None:
    connection.execute("PRAGMA query_only=ON")


def _begin(connection: Connection) -> None:
    driver: Any = connection.connection.driver_connection
    options = connection.get_execution_options()
    if options[_WAIT] is not None:
        driver.execute(f"PRAGMA busy_timeout={round(options[_WAIT] * 1000)}")
    for statement in _BEGIN[options[_MODE]]:
        driver.execute(statement)


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


def _forget_connections_after_fork(database: Database) -> None:
    reference = weakref.ref(database)

    def forget() -> None:
        if (alive := reference()) is not None:
            alive.forget_connections()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)
