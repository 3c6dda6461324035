"""The client's deadlines, against a server that drips: each request ends, and its connection with it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest
from synthetic import artifact

from repo_service.client import transport
from repo_service.client.http import HttpPush, HttpRepository
from repo_service.domain.errors import Unavailable
from repo_service.domain.layout import ChunkSpec

READ_S = 0.5
DRIP_S = 0.02

MADE = artifact(range(40), seed=5)
DIGEST = MADE[1][0].chunks["full/k"][0]
SPEC: ChunkSpec = MADE[0].layout.arrays["full/k"].chunk
CHUNK = MADE[2][DIGEST]

OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
ENDLESS = b"x" * 1_000_000
INFO = b'{"repository_id": "r", "format_version": 1, "server_version": "1"}'


class Server:
    """A server that does the same with each of its connections, one after the other."""

    def __init__(self, listener: socket.socket, use: Callable[[socket.socket], None]) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.left = threading.Event()
        self._listener, self._use = listener, use

    def run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                try:
                    with connection:
                        self._use(connection)
                except OSError:
                    self.left.set()


@contextmanager
def serving(use: Callable[[socket.socket], None]) -> Iterator[Server]:
    """Serve connections by ``use``; `Server.left` is set when a client drops one."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = Server(listener, use)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(30)
            assert not thread.is_alive()


def dripping(at_once: bytes, drip: bytes) -> Callable[[socket.socket], None]:
    """Answers that begin with ``at_once`` and go on with ``drip``, byte by byte."""

    def use(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(at_once)
        for octet in drip:
            time.sleep(DRIP_S)
            connection.sendall(bytes([octet]))

    return use


def sipping(connection: socket.socket) -> None:
    """Take a body byte by byte, for a while."""
    until = time.monotonic() + 3 * READ_S
    while connection.recv(1) and time.monotonic() < until:
        time.sleep(DRIP_S)


def client(server: Server) -> HttpRepository:
    return HttpRepository(urlsplit(server.url), retry_s=0)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "READ_S", READ_S)


def read(repository: HttpRepository) -> None:
    repository.read_chunk(MADE[0].id, "default", DIGEST, SPEC, memoryview(bytearray(SPEC.size)))


def write(repository: HttpRepository) -> None:
    push = HttpPush(repository, repository._transport, "push", "default")
    push.put(DIGEST, bytes(8 * 2**20))


Call = Callable[[HttpRepository], object]

CASES: dict[str, tuple[Call, bytes, bytes]] = {
    "head": (HttpRepository.info, b"HTTP/1.1 200 OK\r\n", b"X-Filler: " + ENDLESS),
    "status line": (HttpRepository.info, b"", b"HTTP/1.1 200 " + ENDLESS),
    "interim heads": (HttpRepository.info, b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "json": (HttpRepository.info, OK % 10**6, ENDLESS),
    "json of unknown length": (HttpRepository.info, b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", ENDLESS),
    "json in pieces": (
        HttpRepository.info,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"1\r\nx\r\n" * 1000,
    ),
    "error": (HttpRepository.info, b"HTTP/1.1 500 No\r\nContent-Length: 1000000\r\n\r\n", ENDLESS),
    "chunk": (read, OK % SPEC.size, CHUNK),
}


@pytest.mark.parametrize("case", CASES)
def test_i8_an_answer_that_drips_is_given_up_and_its_connection_dropped(case: str) -> None:
    call, at_once, drip = CASES[case]
    with serving(dripping(at_once, drip)) as server, client(server) as repository:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"is too slow \(\d+ bytes moved in \d+ s; ") as caught:
            call(repository)
        assert READ_S * 0.9 < time.monotonic() - began < READ_S + 5
        assert caught.value.code == "unavailable"
        assert server.left.wait(10)


def test_i8_a_body_that_is_taken_drop_by_drop_is_given_up() -> None:
    with serving(sipping) as server, client(server) as repository:
        began = time.monotonic()
        with pytest.raises(Unavailable, match=r"is too slow .*; whether the PUT was carried out is unknown"):
            write(repository)
        assert time.monotonic() - began < READ_S + 5


def test_a_body_may_take_longer_than_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CONNECT_S", 0.2)
    monkeypatch.setattr(transport, "READ_S", 20.0)

    def busy(connection: socket.socket) -> None:
        time.sleep(0.6)
        rest = 8 * 2**20
        while rest > 0:
            rest -= len(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    with serving(busy) as server, client(server) as repository:
        write(repository)


def test_a_slow_answer_that_keeps_the_pace_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_SLOWEST", 10)
    with serving(dripping(OK % len(INFO), INFO)) as server, client(server) as repository:
        began = time.monotonic()
        assert repository.info().repository_id == "r"
        assert time.monotonic() - began > READ_S * 2


def test_an_answer_may_begin_later_than_any_transfer_ends() -> None:
    def late(connection: socket.socket) -> None:
        connection.recv(65536)
        time.sleep(READ_S * 3)
        connection.sendall(OK % len(INFO) + INFO)

    with serving(late) as server, client(server) as repository:
        assert repository.info().repository_id == "r"
