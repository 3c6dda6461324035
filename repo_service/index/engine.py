"""Connections to the index's database and their transactions, the same for every database.

One transaction writes at a time, in all processes that share the database. So what a transaction
reads stays true until it commits, and store and index have one order of events. Readers see a
snapshot, take no lock and make no writer wait.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from sqlalchemy import Connection, Engine

from repo_service.domain.errors import Unavailable
from repo_service.index.errors import translated
from repo_service.index.forks import FORKS
from repo_service.index.line import Line

BUSY_SECONDS = 30
"""How long a transaction waits for the write lock."""

Mode = Literal["read", "write", "durable"]


class Database(ABC):
    """One database, opened for this process.

    One connection writes: threads wait for it in line.

    Parameters
    ----------
    writer, reader
        Engines for the two kinds of transactions; they may be one.
    """

    def __init__(self, writer: Engine, reader: Engine) -> None:
        self._writer = writer
        self._reader = reader
        self._line = Line()
        self._failed_at = 0.0
        FORKS.tell(self._renew)

    @abstractmethod
    def _begin(self, connection: Connection, mode: Mode, wait: float) -> None:
        """Begin a transaction, and unless it only reads take the write lock, within ``wait`` seconds."""

    @abstractmethod
    def alone(self, job: str) -> AbstractContextManager[bool]:
        """True inside the block if nobody else who shares the database is inside one for the same job."""

    def read(self) -> AbstractContextManager[Connection]:
        """A snapshot that no writer changes, and that makes no writer wait."""
        return self._transaction(self._reader, "read", BUSY_SECONDS)

    def write(self) -> AbstractContextManager[Connection]:
        """The write lock, for bookkeeping that a power loss may undo."""
        return self._write("write", BUSY_SECONDS)

    def write_soon(self, seconds: float) -> AbstractContextManager[Connection]:
        """As `write`, for what can be left undone: `Unavailable` if the lock is not free within ``seconds``."""
        return self._write("write", seconds)

    def write_durably(self) -> AbstractContextManager[Connection]:
        """The write lock; what is committed survives a power loss."""
        return self._write("durable", BUSY_SECONDS)

    def close(self) -> None:
        with FORKS.kept_out():
            self._writer.dispose()
            self._reader.dispose()

    def _renew(self) -> None:
        """In a child: the connections, and whoever waits for them, stay with the process they were opened in."""
        self._line = Line()
        self._writer.dispose(close=False)
        self._reader.dispose(close=False)

    @contextmanager
    def _write(self, mode: Mode, wait: float) -> Iterator[Connection]:
        asked = time.monotonic()
        with self._line.turn(wait):
            if self._failed_at > asked:
                # Whoever waits in line for a database that is down is told at once.
                raise Unavailable("the index is unavailable: its database could not be reached; try again")
            left = max(0.0, asked + wait - time.monotonic())
            with self._transaction(self._writer, mode, left) as connection:
                yield connection

    @contextmanager
    def _transaction(self, engine: Engine, mode: Mode, wait: float) -> Iterator[Connection]:
        with translated(), FORKS.kept_out():
            try:
                connection = engine.connect()
            except BaseException:
                if engine is self._writer:
                    self._failed_at = time.monotonic()
                raise
            with connection, connection.begin():
                self._begin(connection, mode, wait)
                yield connection
