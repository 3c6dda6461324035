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
