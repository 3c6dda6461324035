"""A lock that threads get in the order they asked for it.

A connection pool gives its connection to whichever thread runs first, so that one that writes in a
loop would keep the others waiting until they time out.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from repo_service.domain.errors import Unavailable


class Line:
    """Threads in line for one thing."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False

    @contextmanager
    def turn(self, seconds: float) -> Iterator[None]:
        """Wait for a turn, and have it inside the block.

        Raises
        ------
        Unavailable
            If the turn does not come within ``seconds``.
        """
        turn = threading.Event()
        with self._mutex:
            if self._taken:
                self._waiting.append(turn)
            else:
                self._taken = True
                turn.set()
        if not turn.wait(seconds):
            with self._mutex:
                if not turn.is_set():
                    self._waiting.remove(turn)
                    raise Unavailable("the index is busy: others have been writing for too long; try again")
        try:
            yield
        finally:
            with self._mutex:
                if self._waiting:
                    self._waiting.popleft().set()
                else:
                    self._taken = False
