"""SQL errors leave the index as the project's own, with what to do."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from index_support import begin, empty_index, entry, publish, send
from sqlalchemy import text

from repo_service.domain.errors import (
    DocumentCorrupt,
    MalformedUrl,
    RepositoryError,
    StorageFull,
    Unavailable,
)
from repo_service.index import Index


@pytest.mark.parametrize(
    "url", ["", "sqlite:///", "index.db", "sqlite:/index.db", "mysql://localhost/kvgraft", "sqlite:///a\0b"]
)
def test_only_a_url_of_an_index_is_opened(url: str) -> None:
    with pytest.raises(MalformedUrl, match="sqlite:///<path>"):
        Index.open(url)


@pytest.mark.parametrize("name", ["a b.db", "50%.db", "what?.db", "x#y.db", "ü.db", "%41.db"])
def test_a_path_is_taken_literally(tmp_path: Path, name: str) -> None:
    Index.open(f"sqlite:///{tmp_path / name}").close()
    assert (tmp_path / name).is_file()


def test_a_directory_that_does_not_exist_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="directory"):
        Index.open(f"sqlite:///{tmp_path / 'missing' / 'index.db'}")


def test_a_file_that_is_no_database_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    path.write_bytes(b"not a database at all" * 1000)
    with pytest.raises(DocumentCorrupt, match="reindex"):
        Index.open(f"sqlite:///{path}")


def test_a_damaged_database_is_corrupt(tmp_path: Path) -> None:
    url = empty_index(tmp_path)
    with Index.open(url) as index:
        publish(index, entry(range(2000)))
    path = tmp_path / "index.db"
    data = bytearray(path.read_bytes())
    data[8192:] = b"\xa5" * (len(data) - 8192)
    path.write_bytes(data)
    with pytest.raises(DocumentCorrupt, match="reindex"), Index.open(url) as index:
        index.dump()


def test_a_full_disk_is_told_and_recovers(tmp_path: Path) -> None:
    with Index.open(empty_index(tmp_path)) as index:
        with index._database.write() as connection:
            limit = connection.execute(text("PRAGMA page_count")).scalar_one()
            connection.execute(text(f"PRAGMA max_page_count = {limit + 8}"))
        what = entry(range(4000))
        before = index.dump()
        with pytest.raises(StorageFull, match="free space"):
            publish(index, what)
        assert index.dump() == before
        with index._database.write() as connection:
            connection.execute(text("PRAGMA max_page_count = 100000"))
        publish(index, what)


def test_an_unforeseen_error_shows_no_parameters(tmp_path: Path) -> None:
    with Index.open(empty_index(tmp_path)) as index:
        with closing(sqlite3.connect(tmp_path / "index.db")) as connection, connection:
            connection.execute("DROP TABLE push_blocks")
        with pytest.raises(RepositoryError, match="push_blocks") as raised:
            send(index, begin(index), entry(range(20)))
        assert "steps" not in str(raised.value)
        assert "steps" not in str(raised.value.__cause__)
