"""PostgreSQL as the index's database.

A lock of the database server, which a transaction holds to its end, lets one transaction write at a
time in all processes. What it reads first it reads after it has the lock, and so knows all that was
committed before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

from sqlalchemy import URL, Connection, Engine, QueuePool, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError

from repo_service.domain.errors import InvalidInput, MalformedUrl
from repo_service.index.engine import Database, Mode
from repo_service.index.errors import translated

READERS = 16
REACH_SECONDS = 2
"""How long a server may take to answer a connection, or to acknowledge what it was sent."""

STATEMENT_SECONDS = 60
"""Longest statement of a reader; a writer's may take ten times as long."""

MISSED_SECONDS = 15
"""How long the server takes at most to find that a machine which held the write lock has vanished."""

# Both ends of a silent connection ask whether the other is there, and give it up after 11 s.
_KEEPALIVES = {"idle": 5, "interval": 2, "count": 3}

_WRITER = 0x6B766772
_JOB = 0x6B76676A
_ISOLATION = {"read": "ISOLATION LEVEL REPEATABLE READ READ ONLY", "write": "READ WRITE", "durable": "READ WRITE"}


class PostgresDatabase(Database):
    """One database of a PostgreSQL server, version 13 or later, for one repository.

    Parameters
    ----------
    url
        ``postgresql://user:password@host:port/database``; parameters of libpq may follow a ``?``.

    Raises
    ------
    MalformedUrl
    InvalidInput
        If the driver is not installed.
    """

    def __init__(self, url: str) -> None:
        parsed = _parsed(url)
        super().__init__(_engine(parsed, 1), _engine(parsed, READERS))

    def _begin(self, connection: Connection, mode: Mode, wait: float) -> None:
        longest = STATEMENT_SECONDS if mode == "read" else 10 * STATEMENT_SECONDS
        statements = [f"SET TRANSACTION {_ISOLATION[mode]}", f"SET LOCAL statement_timeout = '{longest}s'"]
        if mode != "read":
            statements += [
                # Zero would wait for ever.
                f"SET LOCAL lock_timeout = {max(1, round(wait * 1000))}",
                f"SET LOCAL synchronous_commit = {'on' if mode == 'durable' else 'off'}",
                f"SELECT pg_advisory_xact_lock({_WRITER})",
            ]
        # The server's own limits come first, where it still goes by them.
        _limit(connection.connection.driver_connection, longest + REACH_SECONDS)
        connection.exec_driver_sql("; ".join(statements))

    @contextmanager
    def alone(self, job: str) -> Iterator[bool]:
        with translated(), self._reader.connect() as connection:
            # Of the session: it is let go of when the connection ends, however that comes.
            keys = {"kind": _JOB, "job": crc32(job.encode()) - 2**31}
            taken = connection.execute(text("SELECT pg_try_advisory_lock(:kind, :job)"), keys).scalar_one()
            connection.commit()
            try:
                yield bool(taken)
            finally:
                if taken:
                    connection.execute(text("SELECT pg_advisory_unlock(:kind, :job)"), keys)
                    connection.commit()


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise MalformedUrl(
            "the URL of the index can't be read: postgresql://user:password@host:port/database, with special "
            "characters of the password written as %XX"
        ) from None
    if parsed.drivername not in {"postgresql", "postgres", "postgresql+psycopg"} or not parsed.database:
        shown = parsed.render_as_string(hide_password=True)
        raise MalformedUrl(f"{shown[:200]!r} names no database: postgresql://user:password@host:port/database")
    return parsed.set(drivername="postgresql+psycopg")


def _engine(url: URL, connections: int) -> Engine:
    try:
        engine = create_engine(
            url,
            poolclass=QueuePool,
            pool_size=connections,
            max_overflow=0,
            # Readers who find no connection in this time are told to come again.
            pool_timeout=REACH_SECONDS,
            # A connection that broke while it lay in the pool is replaced and not handed out.
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args={
                "application_name": "kvgraft",
                "connect_timeout": REACH_SECONDS,
                "tcp_user_timeout": 1000 * REACH_SECONDS,
                **{f"keepalives_{name}": number for name, number in _KEEPALIVES.items()},
                **url.query,
            },
        )
    except ModuleNotFoundError:
        raise InvalidInput("an index in PostgreSQL needs the driver psycopg: pip install 'kvgraft[postgres]'") from None
    event.listen(engine, "do_connect", _connect)
    event.listen(engine, "connect", _configure)
    # What comes back to the pool is rolled back, and asked whether it is alive before it is handed out again.
    event.listen(engine, "reset", lambda given, *_: _limit(given, REACH_SECONDS))
    return engine


def _connect(_dialect: object, _record: object, arguments: list[Any], named: dict[str, Any]) -> Any:
    # Only where PostgreSQL is used its driver needs to be installed.
    from repo_service.index.postgres_wait import BoundedConnection

    return BoundedConnection.connect(*arguments, **named)


def _limit(connection: Any, seconds: float) -> None:
    connection.limit_s = seconds


def _configure(connection: object, _record: object) -> None:
    with connection.cursor() as cursor:  # type: ignore[attr-defined]
        # Strings are UTF-8 whatever the server's settings are.
        cursor.execute("SET client_encoding = 'UTF8'")
        # A machine that vanishes lets go of its locks. Left to itself, the server would miss it after two hours only.
        for name, number in _KEEPALIVES.items():
            cursor.execute(f"SET tcp_keepalives_{name} = {number}")
        cursor.execute(f"SET tcp_user_timeout = '{MISSED_SECONDS}s'")
    connection.commit()  # type: ignore[attr-defined]
