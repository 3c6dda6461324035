"""When artifacts were last used, written down without making a reader wait."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

from sqlalchemy import Connection, bindparam, or_, update

from repo_service.domain.errors import KvgraftError
from repo_service.index import times
from repo_service.index.engine import Database
from repo_service.index.models import Artifact

RESOLUTION = timedelta(minutes=10)
"""A use is not written down if one was in this time before."""

_RESOLUTION = RESOLUTION // timedelta(microseconds=1)
_RETRY_S = 1.0
_PENDING = 100_000

_USE = (
    update(Artifact)
    .where(
        Artifact.namespace == bindparam("of"),
        Artifact.digest == bindparam("which"),
        # What another process knows is newer, unless its clock was ahead.
        or_(Artifact.last_used_at.is_(None), ~Artifact.last_used_at.between(bindparam("at"), bindparam("now"))),
    )
    .values(last_used_at=bindparam("at"))
)


class Uses:
    """Uses that are yet to be written down; safe to use from several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, bytes], int] = {}
        self._again = 0.0

    def note(self, namespace: str, digest: bytes, before: int | None) -> None:
        """An artifact, last used ``before`` by its row, is used; call it outside of transactions.

        It is written if nobody else is writing, and otherwise with a later use.
        """
        now = times.now()
        if before is not None and 0 <= now - before < _RESOLUTION:
            return
        with self._lock:
            if len(self._pending) < _PENDING:
                self._pending[namespace, digest] = now
            if time.monotonic() < self._again:
                return
            self._again = time.monotonic() + _RETRY_S
        if self.write(0):
            self._again = 0.0

    def write(self, seconds: float) -> bool:
        """Write down what is pending if the write lock comes free within ``seconds``; False if that failed."""
        with self._lock:
            taken = dict(self._pending)
            self._pending.clear()
        if not taken:
            return True
        try:
            with self._database.write_soon(seconds) as connection:
                _write(connection, taken)
        except KvgraftError:
            with self._lock:
                self._pending = taken | self._pending
            return False
        return True


def _write(connection: Connection, uses: dict[tuple[str, bytes], int]) -> None:
    now = times.now()
    connection.execute(_USE, [{"of": of, "which": which, "at": at, "now": now} for (of, which), at in uses.items()])
