"""A process forks while none of its other threads is inside a transaction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from beside import beside, forked
from index_support import empty_index
from sqlalchemy import text

from repo_service.index import forks
from repo_service.index.engine import Database
from repo_service.index.sqlite import SqliteDatabase


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = SqliteDatabase(empty_index(tmp_path))
    yield database
    database.close()


def count(database: Database) -> int:
    with database.write() as connection:
        return int(connection.execute(text("SELECT count(*) FROM meta")).scalar_one())


def child(work: Callable[[], object]) -> int:
    return forked(work, 60)


def test_a_fork_waits_for_the_transaction_of_another_thread(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "FORK_SECONDS", 60)
    with ThreadPoolExecutor(1) as threads:
        with database.read():
            born = threads.submit(child, lambda: count(database))
            assert not wait([born], 0.3).done, "it was born into this transaction"
            # A thread that is inside already goes on, or the fork would wait for it in vain.
            count(database)
        assert born.result() == 0


def test_a_transaction_that_begins_waits_for_a_fork_that_waits(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a process whose threads read all the time would not come to fork."""
    monkeypatch.setattr(forks, "FORK_SECONDS", 60)
    with ThreadPoolExecutor(2) as threads:
        with database.read():
            born = threads.submit(child, lambda: None)
            while not forks.FORKS._waiting:
                wait([born], 0.01)
            read = threads.submit(count, database)
            assert not wait([read, born], 0.3).done
        assert (born.result(), read.result()) == (0, 0)


def test_a_fork_inside_its_own_transaction_does_not_wait(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "FORK_SECONDS", 600)

    def read() -> None:
        with database.read() as connection:
            connection.execute(text("SELECT count(*) FROM meta"))

    with database.write():
        assert child(read) == 0
    count(database)


def test_a_transaction_that_never_ends_keeps_no_process_from_forking(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "FORK_SECONDS", 0.1)
    with ThreadPoolExecutor(1) as threads, database.read():
        assert threads.submit(child, lambda: None).result() == 0


def test_children_of_a_process_whose_threads_are_busy_in_sqlite_are_never_stuck(tmp_path: Path) -> None:
    """Such a child found a lock inside SQLite held by a thread that it did not have, and stood still for ever."""
    url = empty_index(tmp_path)

    def busy(stop: threading.Event) -> None:
        while not stop.is_set():
            mine = SqliteDatabase(url)
            with mine.read() as connection:
                connection.execute(text("SELECT count(*) FROM meta"))
            mine.close()

    with beside(busy, 4):
        assert [child(lambda: SqliteDatabase(url)) for _ in range(40)] == [0] * 40
