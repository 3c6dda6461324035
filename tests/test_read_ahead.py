"""Reading ahead, where it is given up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from repo_service.services.read import read_ahead

STORE: Any = SimpleNamespace(concurrency=2)


def test_reading_ahead_that_is_given_up_waits_for_no_read() -> None:
    """The garbage collector ended one inside the start of a thread, which held a lock that joining threads needs."""
    going_on, begun = threading.Event(), []

    def read(name: int) -> int:
        begun.append(name)
        going_on.wait(30)
        return name

    reading = read_ahead(STORE, read, range(100))
    next(iter(reading))
    ending = threading.Thread(target=reading.close)  # type: ignore[attr-defined]
    ending.start()
    ending.join(10)
    waited = ending.is_alive()
    going_on.set()
    ending.join()
    assert not waited
    assert len(begun) <= 2


def test_reading_ahead_gives_every_outcome_in_order() -> None:
    assert [(name, read()) for name, read in read_ahead(STORE, lambda name: name * 2, range(9))] == [
        (name, name * 2) for name in range(9)
    ]
