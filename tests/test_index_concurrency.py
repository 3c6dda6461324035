"""Several threads and processes on one index: no error, no lost update, no reader that waits."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from index_support import DAY, EPOCH, begin, empty_index, entry, keys, publish
from sqlalchemy import text

from repo_service.domain.errors import Unavailable
from repo_service.index import Index, engine
from repo_service.index.line import Line
from repo_service.index.sqlite import SqliteDatabase

PROCESSES, THREADS, TRANSACTIONS = 5, 10, 100
SPAWN = multiprocessing.get_context("spawn")


def in_processes(work: Callable[[str, int], None], url: str, count: int = PROCESSES) -> None:
    with SPAWN.Pool(count) as pool:
        pool.starmap(work, [(url, number) for number in range(count)], chunksize=1)


def increment(url: str, _: int) -> None:
    database = SqliteDatabase(url)

    def writer(_number: int) -> None:
        for i in range(TRANSACTIONS):
            with (database.write_durably if i % 50 == 0 else database.write)() as connection:
                value = connection.execute(text("SELECT value FROM meta WHERE name = 'counter'")).scalar_one()
                connection.execute(text("UPDATE meta SET value = :v WHERE name = 'counter'"), {"v": int(value) + 1})

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(writer, range(THREADS)))
    database.close()


def test_fifty_writers_lose_no_update_and_are_never_locked_out_jentic_one_529(tmp_path: Path) -> None:
    url = empty_index(tmp_path)
    database = SqliteDatabase(url)
    with database.write() as connection:
        connection.execute(text("INSERT INTO meta (name, value) VALUES ('counter', 0)"))
    in_processes(increment, url)
    with database.read() as connection:
        value = connection.execute(text("SELECT value FROM meta WHERE name = 'counter'")).scalar_one()
    assert int(value) == PROCESSES * THREADS * TRANSACTIONS
    database.close()


def push_and_publish(url: str, number: int) -> None:
    with Index.open(url) as index:
        for i in range(6):
            what = entry(range(i * 100, i * 100 + 40))
            push = f"{number}-{i}"
            index.begin_push(push, "default", what.manifest.fingerprint, datetime.now(UTC) + DAY)
            for digest in index.offer(push, what.records, what.specs()).missing:
                index.arrived(push, digest)
            index.publish(what)
            index.end_push(push)
            index.set_tag("default", "latest", what.manifest.id, EPOCH)


def test_processes_that_push_the_same_artifacts_leave_the_index_one_would_leave(tmp_path: Path) -> None:
    url = empty_index(tmp_path)
    in_processes(push_and_publish, url, 3)
    (tmp_path / "alone").mkdir()
    url_alone = empty_index(tmp_path / "alone")
    push_and_publish(url_alone, 0)
    with Index.open(url) as index, Index.open(url_alone) as alone:
        assert index.dump() == alone.dump()


def open_new(url: str, _: int) -> None:
    with Index.open(url) as index:
        index.claim("one")


def test_a_new_index_can_be_opened_by_several_processes_at_once(tmp_path: Path) -> None:
    in_processes(open_new, f"sqlite:///{tmp_path / 'new.db'}", 4)


def test_readers_neither_wait_for_a_writer_nor_make_it_wait(tmp_path: Path) -> None:
    with Index.open(empty_index(tmp_path)) as index:
        what = entry(range(40))
        info = publish(index, what)
        with index._database.read() as snapshot:
            count = text("SELECT count(*) FROM artifacts")
            assert snapshot.execute(count).scalar_one() == 1
            with index._database.write() as connection:
                connection.execute(text("DELETE FROM artifacts"))
                assert index.artifact("default", info.id) == info
                assert index.match("default", keys(what)) is not None
            assert snapshot.execute(count).scalar_one() == 1
        assert index.match("default", keys(what)) is None


def test_a_lock_held_too_long_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = empty_index(tmp_path)
    monkeypatch.setattr(engine, "BUSY_SECONDS", 0.05)
    with Index.open(url) as index, Index.open(url) as other:
        with index._database.write(), pytest.raises(Unavailable, match="try again"):
            begin(other)
        with index._database.write():
            outcome = in_thread(lambda: begin(index))
        assert isinstance(outcome, Unavailable)
        begin(index)
        begin(other)


def test_a_thread_that_writes_in_a_loop_does_not_overtake_those_in_line() -> None:
    line, order = Line(), []

    def wait(name: int) -> None:
        with line.turn(30):
            order.append(name)

    with ThreadPoolExecutor(3) as threads:
        with line.turn(30):
            for name in range(3):
                threads.submit(wait, name)
                while len(line._waiting) <= name:
                    time.sleep(0.001)
        wait(3)
    assert order == [0, 1, 2, 3]


def in_thread(work: Callable[[], object]) -> object:
    """What ``work`` returns or raises in another thread."""
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(work)
        return future.exception() or future.result()


def test_an_index_in_memory_serves_many_threads() -> None:
    with Index.open("sqlite://") as index:
        entries = [entry([*range(32), number]) for number in range(8)]
        with ThreadPoolExecutor(8) as threads:
            infos = list(threads.map(lambda what: publish(index, what), entries))
            found = list(threads.map(lambda what: index.match("default", keys(what)), entries))
        assert [match.artifact_id for match in found if match] == [info.id for info in infos]
        with Index.open("sqlite://") as other:
            assert other.stats("default").artifacts == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_and_its_parent_both_go_on(tmp_path: Path) -> None:
    with Index.open(empty_index(tmp_path)) as index:
        info = publish(index, entry(range(40)))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                index.set_tag("default", "child", index.artifact("default", info.id).id, EPOCH)
                status = 0
            finally:
                os._exit(status)
        index.set_tag("default", "parent", info.id, EPOCH)
        assert os.waitpid(child, 0)[1] == 0
        assert [tag.name for tag in index.tags("default")] == ["child", "parent"]
