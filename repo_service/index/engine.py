"""Connections to the index's database and their transactions, the same for every database.

One transaction writes at a time, in all processes that share the database. So what a transaction
reads stays true until it commits, and store and index have one order of events. Readers see a
snapshot, take no lock and make no writer wait.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Literal

from sqlalchemy import Connection, Engine

from repo_service.domain.errors import Unavailable
from repo_service.index.errors import translated
from repo_service.index.line import Line

BUSY_SECONDS = 30
"""How long a transaction waits for the write lock."""

FORK_SECONDS = 5
"""How long a fork waits for a transaction that writes."""

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
        self._forking = threading.local()
        _mind_forks(self)

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
        self._writer.dispose()
        self._reader.dispose()

    def before_fork(self) -> None:
        """Let no transaction of this process write while it forks: the child would inherit its lock, for good."""
        turn = self._line.turn(FORK_SECONDS)
        self._forking.turn = None
        with suppress(Unavailable):
            turn.__enter__()
            self._forking.turn = turn

    def after_fork(self, *, in_child: bool) -> None:
        turn, self._forking.turn = getattr(self._forking, "turn", None), None
        if in_child:
            # The connections, and whoever waits for them, stay with the process they were opened in.
            self._line = Line()
            self._writer.dispose(close=False)
            self._reader.dispose(close=False)
        elif turn is not None:
            turn.__exit__(None, None, None)

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
        with translated():
            try:
                connection = engine.connect()
            except BaseException:
                if engine is self._writer:
                    self._failed_at = time.monotonic()
                raise
            with connection, connection.begin():
                self._begin(connection, mode, wait)
                yield connection


def _mind_forks(database: Database) -> None:
    reference = weakref.ref(database)

    def tell(what: Callable[[Database], None]) -> None:
        if (alive := reference()) is not None:
            what(alive)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lambda: tell(Database.before_fork),
            after_in_parent=lambda: tell(lambda alive: alive.after_fork(in_child=False)),
            after_in_child=lambda: tell(lambda alive: alive.after_fork(in_child=True)),
        )
