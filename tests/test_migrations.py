"""Migrations: from nothing to the schema of the models, and never past what this version knows."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from index_support import entry, publish
from sqlalchemy import create_engine

import repo_service
from repo_service.cli.main import main
from repo_service.domain.errors import NewerFormat, RepositoryError
from repo_service.index import Index, migrate
from repo_service.index.models import Base, ChunkState


def schema(path: Path) -> dict[str, object]:
    """Columns, foreign keys and options of the tables that models describe, and their indexes."""
    with closing(sqlite3.connect(path)) as connection:
        described: dict[str, object] = {}
        for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master"):
            if kind == "index":
                described[name] = sql
            elif kind == "table" and not name.startswith(("artifact_search", "alembic_version")):
                described[name] = (
                    connection.execute(f"PRAGMA table_info({name})").fetchall(),
                    sorted(row[2:] for row in connection.execute(f"PRAGMA foreign_key_list({name})")),
                    sql.endswith("WITHOUT ROWID"),
                )
        described.pop("sqlite_autoindex_alembic_version_1", None)
        return described


def set_revision(path: Path, revision: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))


def test_an_empty_database_becomes_the_schema_of_the_models(tmp_path: Path) -> None:
    Index.open(f"sqlite:///{tmp_path / 'migrated.db'}").close()
    engine = create_engine(f"sqlite:///{tmp_path / 'models.db'}")
    Base.metadata.create_all(engine)
    engine.dispose()
    assert schema(tmp_path / "migrated.db") == schema(tmp_path / "models.db")


def test_the_newest_migration_is_the_one_the_index_asks_for() -> None:
    config = Config()
    config.set_main_option("script_location", str(migrate.migrations()))
    assert ScriptDirectory.from_config(config).get_heads() == [migrate.HEAD]


def test_an_index_opened_again_keeps_what_it_held(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'index.db'}"
    with Index.open(url) as index:
        info = publish(index, entry(range(20)))
    with Index.open(url) as index:
        assert index.artifact("default", info.id) == info


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    Index.open(f"sqlite:///{path}").close()
    set_revision(path, "9999")
    before = path.read_bytes()
    with pytest.raises(NewerFormat, match="9999"):
        Index.open(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE pushes (mine)")
    with pytest.raises(RepositoryError, match="pushes"):
        Index.open(f"sqlite:///{path}")
    assert list(schema(path)) == ["pushes"]


def test_migrations_are_found_inside_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert migrate.migrations() == Path(repo_service.__file__).parent.parent / "migrations"
    package = tmp_path / "repo_service"
    (package / "migrations").mkdir(parents=True)
    monkeypatch.setattr(repo_service, "__file__", str(package / "__init__.py"))
    assert migrate.migrations() == package / "migrations"


def test_states_of_chunks_are_told_apart_as_before(tmp_path: Path) -> None:
    path = tmp_path / "index.db"
    with Index.open(f"sqlite:///{path}") as index:
        publish(index, entry(range(20)))
        count = len(index.dump()["chunks"])
    with closing(sqlite3.connect(path)) as connection, connection:
        rows = [row for (row,) in connection.execute("SELECT id FROM chunks ORDER BY id")]
        assert len(rows) == count
        # One that is damaged, and one in each state that got another number.
        connection.execute("UPDATE chunks SET state = 0 WHERE id = ?", (rows[0],))
        for state in (3, 4, 5):
            connection.execute(
                "INSERT INTO chunks (namespace, digest, dtype, shape, size, state) VALUES ('other', ?, 'U8', '[1]', 1, ?)",
                (bytes(31) + bytes([state]), state),
            )
        connection.execute("DROP TABLE tokens")
    set_revision(path, "0002")
    with Index.open(f"sqlite:///{path}") as index:
        assert len(index.dump()["chunks"]) == count
    with closing(sqlite3.connect(path)) as connection:
        states = dict(connection.execute("SELECT id, state FROM chunks WHERE namespace != 'other'"))
        assert states == dict.fromkeys(rows, ChunkState.PUBLISHED) | {rows[0]: ChunkState.DAMAGED}
        moved = connection.execute("SELECT state FROM chunks WHERE namespace = 'other' ORDER BY digest").fetchall()
        assert moved == [(ChunkState.LOOSE,), (ChunkState.DOOMED,), (ChunkState.ABANDONED,)]


def test_the_command_says_what_it_did_and_refuses_what_is_newer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "index.db"

    def ask(*options: str) -> tuple[int, str]:
        code = main(["migrate", "--index", f"sqlite:///{database}", *options])
        return code, capsys.readouterr().out

    assert ask() == (0, f"made an index with schema {migrate.HEAD}\n")
    assert ask() == (0, f"the index has schema {migrate.HEAD}: nothing to do\n")
    code, out = ask("--json")
    assert (code, json.loads(out)) == (0, {"before": migrate.HEAD, "after": migrate.HEAD})
    shutil.copy(Path(__file__).parent / "fixtures" / "repository-1" / "index.sqlite", database)
    code, out = ask("--json")
    found = json.loads(out)
    assert code == 0
    assert found["before"] < found["after"] == migrate.HEAD
    set_revision(database, "9999")
    code, _ = ask()
    assert code not in (0, 1)
