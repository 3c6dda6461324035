"""Forks of a process whose threads use databases.

A child has one thread, and what the others held when it was born it holds for ever: the
transactions of their connections, and the locks inside SQLite. So a process forks while no other
thread is in a transaction, and its child opens connections of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakMethod

FORK_SECONDS = 5
"""How long a fork waits for the transactions of other threads."""


class Forks:
    """Transactions of this process, and forks, which wait for each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: dict[int, int] = {}
        self._waiting = 0
        self._told: list[WeakMethod[Callable[[], None]]] = []

    def tell(self, child: Callable[[], None]) -> None:
        """Have a method called in every child that is born while its object lives."""
        with self._changed:
            self._told = [*(known for known in self._told if known() is not None), WeakMethod(child)]

    @contextmanager
    def kept_out(self) -> Iterator[None]:
        """No fork of another thread inside the block, if it takes less than `FORK_SECONDS`."""
        thread = threading.get_ident()
        with self._changed:
            # A thread that is inside already goes on, or the fork would wait for it in vain.
            while self._waiting and thread not in self._inside:
                self._changed.wait()
            self._inside[thread] = self._inside.get(thread, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[thread] -= 1
                if not self._inside[thread]:
                    del self._inside[thread]
                if self._waiting:
                    self._changed.notify_all()

    def _before(self) -> None:
        thread = threading.get_ident()
        self._changed.acquire()
        self._waiting += 1
        self._changed.wait_for(lambda: self._inside.keys() <= {thread}, FORK_SECONDS)

    def _after_in_parent(self) -> None:
        self._waiting -= 1
        self._changed.notify_all()
        self._changed.release()

    def _after_in_child(self) -> None:
        self._changed = threading.Condition()
        self._inside = {thread: count for thread, count in self._inside.items() if thread == threading.get_ident()}
        self._waiting = 0
        for told in self._told:
            if (alive := told()) is not None:
                alive()


FORKS = Forks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=FORKS._before, after_in_parent=FORKS._after_in_parent, after_in_child=FORKS._after_in_child
    )
