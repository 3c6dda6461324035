"""Bring a database to the schema of this version, with the migrations of the top-level directory."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

import repo_service
from repo_service.domain.errors import NewerFormat
from repo_service.index.engine import Database

HEAD = "0006"
"""The newest revision in ``migrations``; written here so that opening a current database need not load Alembic."""


def upgrade(database: Database) -> str | None:
    """Upgrade to `HEAD`. Several processes may do so at once: the first one migrates, the others wait.

    Returns the revision that was found, None in a new database.

    Raises
    ------
    NewerFormat
        If the database is at a revision this version does not know.
    """
    with database.read() as connection:
        if _revision(connection) == HEAD:
            return HEAD
    with database.write_durably() as connection:
        revision = _revision(connection)
        if revision != HEAD:
            _run(connection, revision)
        return revision


def migrations() -> Path:
    """The migration scripts: inside the package in a wheel, beside it in a source tree."""
    package = Path(repo_service.__file__).parent
    packaged = package / "migrations"
    return packaged if packaged.is_dir() else package.parent / "migrations"


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _run(connection: Connection, revision: str | None) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    # The value is read with % as an escape.
    config.set_main_option("script_location", str(migrations()).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise NewerFormat(
            f"the index is at schema revision {revision}, which this version of kvgraft does not know: use the version "
            "that made it or a later one, or rebuild the index in a new database",
            revision=revision,
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
