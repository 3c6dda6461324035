"""Bodies that swell, or have no end: refused before they take memory (I8)."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from places import Place
from test_api import Service, serving
from test_api_bodies import JSON, connect, head, raw, received

from repo_service.api.bodies import MAX_JSON_VALUES, check_density
from repo_service.api.connection import MAX_HEADER_BYTES
from repo_service.domain.errors import TooLarge

pytestmark = pytest.mark.everywhere


@pytest.fixture(scope="module")
def service(module_root: Place) -> Iterator[Service]:
    with serving(module_root) as running:
        yield running


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "GZIP"])
def test_a_compressed_body_is_refused_unread(service: Service, coding: str) -> None:
    lines = "Content-Type: application/json", f"Content-Encoding: {coding}", "Content-Length: 1000000"
    chunk = f"/v1/pushes/{'0' * 32}/chunks/blake3:{'0' * 64}"
    for method, path in ("POST", "/v1/match"), ("POST", f"/v1/pushes/{'0' * 32}/commit"), ("PUT", chunk):
        assert raw(service, head(service, method, path, *lines)) == (415, "unsupported_media_type")


def test_a_body_may_say_that_it_is_not_compressed(service: Service) -> None:
    answer = service.request("POST", "/v1/match", b'{"keys": []}', Content_Encoding="identity", **JSON)
    assert answer.status == 200


@pytest.mark.parametrize("item", [b"[]", b'{"":0}', b"1", b'"a"'])
def test_a_body_of_very_many_values_is_refused(service: Service, item: bytes) -> None:
    body = b'{"keys": [%b]}' % b",".join([item] * (MAX_JSON_VALUES + 1))
    assert service.error("POST", "/v1/match", body) == (413, "too_large")


def test_what_stands_in_strings_is_no_value() -> None:
    text = b'{"text":"%b\\"[[[{{{,,,"}' % (b",[{" * 100)
    assert check_density(text, 1) == text
    with pytest.raises(TooLarge):
        check_density(b"[" + text + b"]", 1)
    with pytest.raises(TooLarge):
        check_density(b'"a"' + b",1" * 10, 9)


def test_a_chunked_document_has_a_lower_limit(service: Service) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"keys": ["'
        yield from [b"a" * 2**20] * 9

    answer = service.request("POST", "/v1/match", pieces(), **JSON)  # type: ignore[arg-type]
    assert answer.status == 413
    assert b"Content-Length" in answer.data


@pytest.mark.parametrize("between", [b"0\r\n", b"2;"], ids=["trailer", "extension"])
def test_nothing_between_or_after_the_octets_of_a_body_goes_on_for_ever(service: Service, between: bytes) -> None:
    with connect(service) as connection:
        lines = "Content-Type: application/json", "Transfer-Encoding: chunked"
        connection.sendall(head(service, "POST", "/v1/match", *lines) + b"2\r\n{}\r\n" + between)
        assert _taken(connection, b"X-Long: " + b"a" * 8000 + b"\r\n", 10_000) < 10_000
    assert service.request("GET", "/healthz").status == 200


def test_trailers_are_not_headers(service: Service) -> None:
    with connect(service) as connection:
        lines = "Content-Type: application/json", "Transfer-Encoding: chunked"
        body = b'c\r\n{"keys": []}\r\n0\r\nHost: example.org\r\nX-Long: %b\r\n\r\n' % (b"a" * (MAX_HEADER_BYTES // 2))
        connection.sendall(head(service, "POST", "/v1/match", *lines) + body)
        connection.settimeout(10)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
    assert raw(service, head(service, "GET", "/v2")) == (404, "not_found")


@pytest.mark.parametrize("body", [False, True])
def test_what_trickles_in_gets_no_more_time_than_what_stalls(root: Place, body: bool) -> None:
    with serving(root, stall_seconds=0.5) as service, connect(service) as connection:
        json_head = head(service, "POST", "/v1/match", "Content-Type: application/json", "Content-Length: 1000")
        connection.sendall(json_head if body else json_head[:-2] + b"X: ")
        began = time.monotonic()
        with suppress(ConnectionError):
            while not select.select([connection], [], [], 0.1)[0]:
                connection.sendall(b" ")
                assert time.monotonic() - began < 10
            if body:
                assert received(connection) == (408, "request_timeout")
            else:
                assert connection.recv(100) == b""


def test_a_slow_body_may_take_longer_than_a_stall(root: Place) -> None:
    body = b'{"keys": []}' + b" " * 100_000
    with serving(root, stall_seconds=0.5) as service, connect(service) as connection:
        length = f"Content-Length: {len(body)}"
        connection.sendall(head(service, "POST", "/v1/match", "Content-Type: application/json", length))
        for start in range(0, len(body), 12_000):
            connection.sendall(body[start : start + 12_000])
            time.sleep(0.15)
        connection.settimeout(10)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"


def _taken(connection: socket.socket, piece: bytes, count: int) -> int:
    """How many pieces are taken before the connection is closed."""
    for n in range(count):
        with suppress(OSError):
            connection.sendall(piece)
            continue
        return n
    return count
