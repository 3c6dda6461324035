"""Connections to PostgreSQL that do not wait for ever.

The server's own limits, and TCP's, end nothing where the server stands still and its kernel goes on acknowledging.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import psycopg

from repo_service.index.postgres import REACH_SECONDS


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that is closed once the server has left a call unanswered for too long.

    Attributes
    ----------
    limit_s
        How long a call may wait from now on, in seconds.
    """

    limit_s: float = REACH_SECONDS

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        """Raises
        ------
        psycopg.OperationalError
            After `limit_s`.
        """
        return super().wait(self._bounded(gen), *args, **kwargs)

    def _bounded(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        end = time.monotonic() + self.limit_s
        try:
            wanted = next(gen)
            while True:
                # Nothing ten times a second, while nothing comes.
                ready = yield wanted
                if not ready and time.monotonic() > end:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"the server has not answered for {self.limit_s:g} s")
                wanted = gen.send(ready)
        except StopIteration as ended:
            return ended.value
