"""SQL errors as the project's own: none leaves the index raw."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import SQLAlchemyError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from repo_service.domain.errors import DocumentCorrupt, KvgraftError, RepositoryError, StorageFull, Unavailable

_UNAVAILABLE = {
    sqlite3.SQLITE_BUSY: "another process holds its lock; try again",
    sqlite3.SQLITE_LOCKED: "another process holds its lock; try again",
    sqlite3.SQLITE_PROTOCOL: "another process holds its lock; try again",
    sqlite3.SQLITE_CANTOPEN: "it can't be opened; check that its directory exists and may be written to",
    sqlite3.SQLITE_PERM: "it may not be opened; check its permissions",
    sqlite3.SQLITE_READONLY: "it may not be written to; check its permissions",
    sqlite3.SQLITE_IOERR: "its file can't be read or written; check the disk",
}

# By the beginning of PostgreSQL's SQLSTATE.
_UNAVAILABLE_STATES = {
    "08": "its database can't be reached; check its URL and its server, or try again",
    "28": "its database refuses the user or the password; check the URL",
    "42501": "its database's user lacks a right; let it own the database",
    "25006": "its database only reads; connect to the primary server",
    "40": "another transaction was in the way; try again",
    "53": "its database has no resources left; try again",
    "55P03": "another process holds its lock; try again",
    "57": "its database ended the statement, or is starting or stopping; try again",
    "58": "its database server can't read or write its files; check its disk",
}
_FULL_STATE = "53100"
_CORRUPT_STATE = "XX00"


@contextmanager
def translated() -> Iterator[None]:
    """Raise SQL errors inside the block as the project's.

    Raises
    ------
    Unavailable, StorageFull, DocumentCorrupt, RepositoryError
    """
    try:
        yield
    except PoolTimeout:
        raise Unavailable("the index is busy: no connection came free within its time limit; try again") from None
    except StatementError as error:
        raise _translate(error.orig) from error
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise _translate(error) from error


def _translate(error: BaseException | None) -> KvgraftError:
    if error is not None and type(error).__module__.startswith("psycopg"):
        return _of_postgres(error)
    code = getattr(error, "sqlite_errorcode", None)
    # The low byte is the primary code; the rest says where inside SQLite it arose.
    primary = code & 0xFF if isinstance(code, int) else None
    if primary == sqlite3.SQLITE_FULL:
        return StorageFull("the index can't grow: its disk is full; free space and try again")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return DocumentCorrupt(
            f"the index is not a readable database ({error}); move it away and rebuild it from the store with a reindex"
        )
    if primary in _UNAVAILABLE:
        return Unavailable(f"the index is unavailable: {_UNAVAILABLE[primary]} ({error})")
    return RepositoryError(f"the index failed: {error}")


def _of_postgres(error: BaseException) -> KvgraftError:
    state = getattr(error, "sqlstate", None) or ""
    # The first line names the fault; those after it may quote the statement.
    said = str(error).partition("\n")[0]
    if state == _FULL_STATE:
        return StorageFull("the index can't grow: its database's disk is full; free space and try again")
    if state.startswith(_CORRUPT_STATE) and state != "XX000":
        return DocumentCorrupt(f"the index's database is damaged ({said}); rebuild it from the store with a reindex")
    for beginning, what in _UNAVAILABLE_STATES.items():
        if state.startswith(beginning):
            return Unavailable(f"the index is unavailable: {what} ({said})")
    if not state and any(kind.__name__ == "OperationalError" for kind in type(error).__mro__):
        # Connecting failed.
        return Unavailable(f"the index is unavailable: {_UNAVAILABLE_STATES['08']} ({said})")
    return RepositoryError(f"the index failed: {said}")
