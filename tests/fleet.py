"""A team's parts, as they run without containers: PostgreSQL, S3, replicas of the service, and a balancer before them."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import postgres
from servers import S3Server, free_ports

PROJECT = Path(__file__).parent.parent


@dataclass
class Replica:
    """A service in a process of its own, which may be killed and started again at the same address.

    Parameters
    ----------
    environment
        Where the repository and its index are, as variables.
    """

    port: int
    environment: dict[str, str]
    log: Path
    host: str = "127.0.0.1"
    process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Returns when connections are accepted."""
        command = [sys.executable, "-m", "repo_service.cli", "serve", "--json"]
        command += ["--host", self.host, "--port", str(self.port)]
        environment = {**os.environ, "PYTHONPATH": str(PROJECT), **self.environment}
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, self.log.read_text()[-4000:]
        assert json.loads(line)["url"] == self.url
        self.process = process

    def kill(self) -> None:
        """As by kill -9."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def failures(self) -> list[str]:
        """What the log tells of that should not happen."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if "Traceback" in line][:5]


@dataclass
class Team:
    """One repository in S3 and PostgreSQL, and the replicas that serve it."""

    environment: dict[str, str]
    replicas: list[Replica] = field(default_factory=list)


@contextmanager
def team(
    directory: Path, s3: S3Server, count: int = 2, *, host: str = "127.0.0.1", **settings: object
) -> Iterator[Team]:
    """Replicas of one repository, at ports of one address."""
    environment = {
        **s3.environment,
        "KVGRAFT_REPO": f"s3://{s3.bucket}/{s3.prefix()}",
        "KVGRAFT_INDEX": postgres.empty_index(),
        **{f"KVGRAFT_{name.upper()}": str(value) for name, value in settings.items()},
    }
    replicas = [
        Replica(port, environment, directory / f"replica-{n}.log", host) for n, port in enumerate(free_ports(count))
    ]
    try:
        for replica in replicas:
            replica.start()
        yield Team(environment, replicas)
    finally:
        for replica in replicas:
            replica.kill()


@contextmanager
def balancer(addresses: Sequence[tuple[str, int]]) -> Iterator[str]:
    """A URL behind which connections go to one address after the other, past those that refuse them."""
    turn = itertools.count()
    passing: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                passing.append(threading.Thread(target=_pass_on, args=(client, _first_up(addresses, next(turn)))))
                passing[-1].start()

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            # Closing alone does not wake who waits for a connection.
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()
            # Clients are gone by now, and so are both ends.
            for thread in passing:
                thread.join()


def _first_up(addresses: Sequence[tuple[str, int]], first: int) -> socket.socket | None:
    for n in range(len(addresses)):
        with suppress(OSError):
            return socket.create_connection(addresses[(first + n) % len(addresses)], timeout=5)
    return None


def _pass_on(client: socket.socket, upstream: socket.socket | None) -> None:
    """Pass on what both sides say until both have ended; a side that breaks breaks the other."""
    if upstream is None:
        client.close()
        return
    upstream.settimeout(None)
    with client, upstream:
        back = threading.Thread(target=_pump, args=(upstream, client))
        back.start()
        _pump(client, upstream)
        back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    buffer = memoryview(bytearray(256 * 1024))
    try:
        while count := source.recv_into(buffer):
            sink.sendall(buffer[:count])
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def as_json(output: str) -> Any:
    """The last line of a command's output."""
    return json.loads(output.splitlines()[-1])
