"""PostgreSQL as the index's database: what its server does that a file does not."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import postgres
import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from index_support import EPOCH, begin, entry, publish, send
from sqlalchemy import create_engine, make_url, text

from repo_service.domain.errors import MalformedUrl, NewerFormat, Unavailable
from repo_service.domain.views import ArtifactQuery
from repo_service.index import Index, Objects
from repo_service.index.models import Base
from repo_service.index.postgres import MISSED_SECONDS, PostgresDatabase
from repo_service.index.reclaim import PART

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def url() -> str:
    return postgres.empty_index()


@pytest.fixture
def server() -> Iterator[postgres.Server]:
    """A server of the test's own."""
    server = postgres.Server()
    yield server
    server.end()


def increment(url: str, _: int) -> None:
    database = PostgresDatabase(url)

    def writer(_number: int) -> None:
        for i in range(20):
            with (database.write_durably if i % 10 == 0 else database.write)() as connection:
                value = connection.execute(text("SELECT value FROM meta WHERE name = 'counter'")).scalar_one()
                connection.execute(
                    text("UPDATE meta SET value = :v WHERE name = 'counter'"), {"v": str(int(value) + 1)}
                )

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(writer, range(5)))
    database.close()


def test_writers_of_several_processes_lose_no_update(url: str) -> None:
    with Index.open(url) as index:
        with index._database.write() as connection:
            connection.execute(text("INSERT INTO meta VALUES ('counter', '0')"))
        with SPAWN.Pool(3) as pool:
            pool.starmap(increment, [(url, n) for n in range(3)], chunksize=1)
        with index._database.read() as connection:
            assert connection.execute(text("SELECT value FROM meta WHERE name = 'counter'")).scalar_one() == "300"


def test_a_writer_that_waits_too_long_is_told_so_and_readers_go_on(url: str) -> None:
    with Index.open(url) as index, Index.open(url) as other, index._database.write():
        assert other.tags("default") == []
        with pytest.raises(Unavailable, match="lock"), other._database.write_soon(0.05):
            pytest.fail("two writers at once")


def test_a_reader_sees_one_moment(url: str) -> None:
    with Index.open(url) as index:
        with index._database.read() as connection:
            count = text("SELECT count(*) FROM artifacts")
            assert connection.execute(count).scalar_one() == 0
            publish(index, entry(range(20)))
            assert connection.execute(count).scalar_one() == 0
        with index._database.read() as connection, pytest.raises(Exception, match="read-only"):
            connection.execute(text("DELETE FROM artifacts"))


def test_a_job_is_done_by_one_at_a_time(index_kind: str, tmp_path: Path) -> None:
    url = postgres.empty_index() if index_kind == "postgres" else f"sqlite:///{tmp_path}/index.db"
    with Index.open(url) as index, Index.open(url) as other:
        with index.alone("gc") as first, other.alone("gc") as second, other.alone("scrub") as third:
            assert (first, second, third) == (True, False, True)
        with other.alone("gc") as again, index.alone("gc") as beside:
            assert (again, beside) == (True, False)


def test_text_with_a_nul_and_without_ascii_is_kept_and_found(url: str) -> None:
    notes = {"nul\0name": "a\0b\1c", "plain": "\1a"}
    with Index.open(url) as index:
        one = publish(index, entry(range(20), annotations=notes, text="Straße don't STOP\0hidden"))
        assert index.artifact("default", one.id).annotations == notes
        assert index.query(ArtifactQuery(annotations=notes)).count == 1
        assert index.query(ArtifactQuery(annotations={"plain": "\0"})).count == 0
        for words, found in [
            ("straße", 1),
            ("DON'T", 1),
            ("don stop", 1),
            ("t don", 1),
            ("hidden", 0),
            ("don_t", 1),
            ("%", 0),
        ]:
            assert index.query(ArtifactQuery(text=words)).count == found, words


def test_the_schema_is_that_of_the_models(url: str) -> None:
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)
    engine.dispose()
    assert [difference for difference in differences if "artifact_words" not in str(difference)] == []


def test_a_newer_schema_is_refused(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(NewerFormat, match="9999"):
        Index.open(url)


def test_several_processes_may_migrate_at_once() -> None:
    url = postgres.empty_database()
    with ThreadPoolExecutor(4) as threads:
        for index in threads.map(lambda _: Index.open(url), range(4)):
            index.close()


@pytest.mark.parametrize(
    "url", ["postgresql://", "postgresql://host", "postgres:/x", "postgresql+asyncpg://h/d", "postgresql://h:port/d"]
)
def test_only_a_url_with_a_database_is_taken(url: str) -> None:
    with pytest.raises(MalformedUrl, match="postgresql://user:password@host:port/database"):
        Index.open(url)


def test_a_password_is_never_shown(url: str) -> None:
    secret = make_url(url).set(host="127.0.0.1", port=1, username="someone", password="hunter2", query={})
    with pytest.raises(Unavailable) as refused:
        Index.open(secret.render_as_string(hide_password=False))
    assert "hunter2" not in str(refused.value)
    with pytest.raises(MalformedUrl) as malformed:
        Index.open("postgresql+other://someone:hunter2@host/database")
    assert "hunter2" not in str(malformed.value)


def test_a_database_that_does_not_exist_is_said_so(url: str) -> None:
    with pytest.raises(Unavailable, match=r"check its URL.*does not exist"):
        Index.open(make_url(url).set(database="nothing_here").render_as_string(hide_password=False))


def test_an_index_goes_on_when_its_server_comes_back(server: postgres.Server) -> None:
    with Index.open(server.url) as index:
        kept = publish(index, entry(range(20)))
        server.stop()
        for call in (lambda: index.artifact("default", kept.id), lambda: index.set_tag("default", "t", kept.id, EPOCH)):
            began = time.monotonic()
            with pytest.raises(Unavailable):
                call()
            assert time.monotonic() - began < 2
        server.start()
        assert index.artifact("default", kept.id) == kept
        index.set_tag("default", "t", kept.id, EPOCH)


def test_whoever_waits_for_a_server_that_does_not_answer_is_told_soon() -> None:
    """A listening socket that never speaks: each of ten writers would wait its own two seconds in line."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        database = PostgresDatabase(f"postgresql://someone@127.0.0.1:{port}/database")
        began = time.monotonic()

        def write(_: int) -> str:
            try:
                with database.write():
                    return "written"
            except Unavailable:
                return "unavailable"

        with ThreadPoolExecutor(10) as threads:
            assert set(threads.map(write, range(10))) == {"unavailable"}
        assert time.monotonic() - began < 10
        database.close()


def test_a_server_that_stands_still_is_missed_within_seconds(server: postgres.Server) -> None:
    """Neither its own limits nor TCP's end a call that it never answers: its machine acknowledges what was sent."""
    with Index.open(server.url) as index:
        kept = publish(index, entry(range(20)))
        with server.standing_still():
            for call in (lambda: index.artifact("default", kept.id), lambda: begin(index)):
                began = time.monotonic()
                with pytest.raises(Unavailable):
                    call()
                assert time.monotonic() - began < 10
        assert index.artifact("default", kept.id) == kept
        begin(index)


def test_what_was_committed_durably_outlives_a_killed_server(server: postgres.Server) -> None:
    with Index.open(server.url) as index:
        kept = [publish(index, entry(range(n, n + 20))) for n in range(5)]
        server.stop("immediate")
        server.start()
        for one in kept:
            assert index.artifact("default", one.id) == one


@pytest.mark.parametrize("sweep", [False, True])
def test_i6_a_collector_that_has_lost_the_write_lock_removes_nothing_more(url: str, sweep: bool) -> None:
    """A server that restarts or fails over lets the lock go: what another replica is sent then must stay."""
    what = entry(range(160))
    removed: list[str] = []
    with Index.open(url) as index, Index.open(url) as other:

        def remove(chunks: Sequence[str]) -> None:
            removed.extend(chunks)
            with psycopg.connect(url, autocommit=True) as connection:
                ended = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
                connection.execute(ended)
            # Nobody holds the lock any more.
            assert send(other, begin(other), what) == list(what.specs())

        if sweep:
            with pytest.raises(Unavailable):
                index.sweep(Objects(chunks=list(what.specs())), lambda objects: remove(objects.chunks))
        else:
            publish(index, what)
            index.unpublish("default", what.manifest.id)
            with pytest.raises(Unavailable):
                index.reclaim(lambda _, chunks: remove(chunks))
        assert 0 < len(removed) <= PART < len(what.specs())


def test_a_machine_that_vanishes_with_the_write_lock_is_missed_within_seconds(url: str) -> None:
    """Its server would go on for two hours: nobody says that a network was cut or that a machine lost its power."""
    with Index.open(url) as index, index._database.write() as connection:
        asked = "SELECT name, setting::int FROM pg_settings WHERE name LIKE 'tcp\\_%'"
        seconds = {row.name: row.setting for row in connection.execute(text(asked))}
    idle, probes = seconds["tcp_keepalives_idle"], seconds["tcp_keepalives_interval"] * seconds["tcp_keepalives_count"]
    assert 0 < idle + probes <= MISSED_SECONDS
    assert seconds["tcp_user_timeout"] == 1000 * MISSED_SECONDS
