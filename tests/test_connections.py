"""Connections that are kept: every answer is that of its own request, whatever the server sends between them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import BinaryIO
from urllib.parse import urlsplit

import pytest
from rawhttp import Say, answer, raw_server

from repo_service.client.transport import Pace
from repo_service.connections import Pool, Unconnected


@contextmanager
def pooled(say: Say) -> Iterator[Pool]:
    with raw_server(say) as url:
        pool = Pool("127.0.0.1", urlsplit(url).port)
        yield pool
        pool.close()


def ask(pool: Pool, target: str, method: str = "GET") -> bytes:
    with pool.ask(method, target, {}, Pace(5), connect_s=2) as answer:
        return answer.read()


def test_a_name_that_is_looked_up_for_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: ended.wait(20))
    began = time.monotonic()
    with pytest.raises(Unconnected), Pool("name.invalid", 80).ask("GET", "/", {}, Pace(5), connect_s=0.2):
        pass
    assert time.monotonic() - began < 5
    ended.set()


@pytest.mark.parametrize("status", ["100 Continue", "102 Processing", "103 Early Hints"])
def test_an_announcement_is_not_taken_for_the_answer(status: str) -> None:
    later = threading.Event()

    def say(target: str, _: int, __: dict[str, str], out: BinaryIO) -> None:
        out.write(f"HTTP/1.1 {status}\r\nLink: </x>\r\n\r\n".encode() * 3)
        later.wait(0.05)
        out.write(answer(target.encode()))

    with pooled(say) as pool:
        assert [ask(pool, target) for target in ("/a", "/b", "/c")] == [b"/a", b"/b", b"/c"]
        assert len(pool._idle) == 1


def test_announcements_without_end_break_the_connection() -> None:
    with (
        pooled(lambda _, __, ___, out: out.write(b"HTTP/1.1 102 Processing\r\n\r\n" * 1000)) as pool,
        pytest.raises(HTTPException, match="no answer came"),
    ):
        ask(pool, "/a")


def test_another_protocol_breaks_the_connection() -> None:
    with (
        pooled(lambda _, __, ___, out: out.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")) as pool,
        pytest.raises(HTTPException, match="another protocol"),
    ):
        ask(pool, "/a")


@pytest.mark.parametrize(
    "first",
    [
        answer(b"/1") + answer(b"of another request"),
        answer(b"/1") + b"x",
        answer(b"abc", "204 No Content"),
        answer(b"abc", "304 Not Modified"),
        answer(b"", "204 No Content", Transfer_Encoding="chunked") + b"0\r\n\r\n",
        answer(b"2\r\n/1\r\n0\r\n\r\nHTTP", Transfer_Encoding="chunked"),
        answer(b"/1", Transfer_Encoding="gzip, chunked"),
    ],
)
def test_a_connection_with_bytes_of_no_answer_is_not_used_again(first: bytes) -> None:
    def say(target: str, number: int, _: dict[str, str], out: BinaryIO) -> None:
        out.write(first if number == 1 else answer(target.encode()))

    with pooled(say) as pool:
        assert ask(pool, "/1") in (b"/1", b"")
        assert pool._idle == []
        assert ask(pool, "/2") == b"/2"
        assert len(pool._idle) == 1


def test_bytes_that_come_while_a_connection_is_idle_end_it() -> None:
    later, said = threading.Event(), threading.Event()

    def say(target: str, number: int, _: dict[str, str], out: BinaryIO) -> None:
        out.write(answer(target.encode()))
        if number == 1:
            later.wait(5)
            out.write(answer(b"of another request"))
            said.set()

    with pooled(say) as pool:
        assert ask(pool, "/1") == b"/1"
        later.set()
        assert said.wait(5)
        assert ask(pool, "/2") == b"/2"


def test_the_answer_to_a_head_has_no_body_to_wait_for() -> None:
    with pooled(lambda _, __, ___, out: out.write(answer(b"abc")[:-3])) as pool:
        assert [ask(pool, "/1", "HEAD"), ask(pool, "/2", "HEAD")] == [b"", b""]
        assert len(pool._idle) == 1


@pytest.mark.parametrize("length", ["1_0", "+3", "-1", "3, 3", "0x3", "\u0663"])
def test_a_length_that_is_no_number_breaks_the_connection(length: str) -> None:
    def say(_: str, __: int, ___: dict[str, str], out: BinaryIO) -> None:
        out.write(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\nabc".encode())

    with pooled(say) as pool, pytest.raises(HTTPException, match="length"):
        ask(pool, "/a")


def test_two_lengths_break_the_connection() -> None:
    both = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"
    with pooled(lambda _, __, ___, out: out.write(both)) as pool, pytest.raises(HTTPException, match="3, 4"):
        ask(pool, "/a")


def test_a_fork_in_the_middle_of_an_answer_keeps_no_connection() -> None:
    with pooled(lambda target, _, __, out: out.write(answer(target.encode()))) as pool:
        ask(pool, "/kept")
        with pool.ask("GET", "/a", {}, Pace(5), connect_s=2) as open_answer:
            child = os.fork()
            said = open_answer.read() if child else b"/a"
            if not child:
                open_answer.length = 0
        if not child:
            os._exit(len(pool._idle))
        assert said == b"/a"
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_thread_of_a_fork_takes_no_connection_before_the_inherited_are_gone() -> None:
    """Another thread asks at every step of the first one's look for a connection."""
    with pooled(lambda target, _, __, out: out.write(answer(target.encode()))) as pool:
        ask(pool, "/parent")
        inherited = list(pool._idle)
        taken: list[object] = []

        class Watched(Pool):
            def __setattr__(self, name: str, value: object) -> None:
                object.__setattr__(self, name, value)
                if name == "_process" and value == os.getpid():
                    taken.extend(self._idle)

        pool.__class__ = Watched
        pool._process = -1
        assert ask(pool, "/child") == b"/child"
        assert inherited
        assert taken == []
