"""Request bodies: limits, strict JSON, deadlines, and what is refused before it is read."""

from __future__ import annotations

import http.client
import json
import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
from places import Place
from synthetic import artifact, fingerprint
from test_api import Made, Service, push_over_http, serving

from repo_service.api.bodies import MAX_JSON_BYTES
from repo_service.domain.layout import MAX_CHUNK_BYTES

pytestmark = pytest.mark.everywhere

JSON = {"Content_Type": "application/json"}


@pytest.fixture(scope="module")
def service(module_root: Place) -> Iterator[Service]:
    with serving(module_root) as running:
        yield running


@pytest.fixture
def made() -> Made:
    return artifact([1, 2, 3, 4])


@pytest.fixture
def push(service: Service, made: Made) -> str:
    """The path of a push that has offered the artifact ``made``."""
    manifest, records, _ = made
    started = service.json("POST", "/v1/pushes", {"fingerprint": manifest.fingerprint.sections}, 201)
    path = f"/v1/pushes/{started['id']}"
    service.json("POST", f"{path}/blocks", {"records": [json.loads(record.data) for record in records]})
    return path


def connect(service: Service) -> socket.socket:
    parts = urlsplit(service.url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)


def raw(service: Service, request: bytes) -> tuple[int, str]:
    """Send octets; status and code of the error that comes back."""
    with connect(service) as connection:
        connection.sendall(request)
        return received(connection)


def received(connection: socket.socket) -> tuple[int, str]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())["error"]["code"]


def head(service: Service, method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {urlsplit(service.url).netloc}", *lines, "", ""]).encode()


NESTED = [depth for exponent in range(2, 7) for depth in (10**exponent, 3 * 10**exponent)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", (400, "malformed_document")),
        (b"{", (400, "malformed_document")),
        (b"\xff", (400, "malformed_document")),
        (b'{"keys": [], "keys": []}', (400, "malformed_document")),
        (b'{"keys": [1.5]}', (400, "malformed_document")),
        (b'{"keys": [NaN]}', (400, "malformed_document")),
        (b'{"keys": [' + b"9" * 5000 + b"]}", (400, "malformed_document")),
        (b"[]", (422, "malformed_request")),
        (b"null", (422, "malformed_request")),
        (b'"keys"', (422, "malformed_request")),
        (b"{}", (422, "malformed_request")),
        (b'{"keys": [], "more": 1}', (422, "malformed_request")),
        (b'{"keys": ["\\ud800"]}', (400, "malformed_document")),
        (b'{"keys": "abc"}', (422, "malformed_request")),
        (b'{"keys": [null]}', (422, "malformed_request")),
        (b'{"keys": ["sha256:zz"]}', (400, "malformed_digest")),
    ],
)
def test_bad_json_is_refused(service: Service, body: bytes, expected: tuple[int, str]) -> None:
    assert service.error("POST", "/v1/match", body) == expected


@pytest.mark.parametrize("depth", NESTED)
def test_deep_nesting_is_refused_wherever_it_stands(service: Service, push: str, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth
    sections = json.dumps(fingerprint().sections).encode()
    bodies = {
        "/v1/match": b'{"keys": %b}' % deep,
        "/v1/pushes": b'{"fingerprint": %b}' % sections.replace(b'"adapters": []', b'"adapters": ' + deep),
        f"{push}/blocks": b'{"records": [{"key": %b}]}' % deep,
        f"{push}/commit": b'{"annotations":%b}' % deep,
    }
    for path, body in bodies.items():
        status, code = service.error("POST", path, body)
        expected = {(400, "malformed_document"), (413, "too_large"), (422, "malformed_request")}
        assert (status, code) in expected, (path, depth)


def test_integers_beyond_64_bits_are_refused(service: Service, push: str) -> None:
    for conditions in (
        {"min_tokens": 10**30},
        {"covers": [0, 2**64]},
        {"token_prefix": [2**70]},
        {"covers": [-(2**70), 1]},
    ):
        status, _ = service.error("POST", "/v1/artifacts/query", json.dumps(conditions).encode())
        assert status in {200, 400, 422}, conditions
    record = json.loads(artifact([9])[1][0].data) | {"stop": 2**70}
    assert service.error("POST", f"{push}/blocks", json.dumps({"records": [record]}).encode())[0] == 400


def test_a_body_of_another_type_is_refused(service: Service) -> None:
    for kind in "text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "":
        expected = (415, "unsupported_media_type")
        assert service.error("POST", "/v1/match", b'{"keys": []}', Content_Type=kind) == expected


def test_100_mb_of_json_are_refused_unread(service: Service) -> None:
    head_of_it = head(service, "POST", "/v1/match", "Content-Type: application/json", "Content-Length: 100000000")
    assert raw(service, head_of_it + b'{"keys": [') == (413, "too_large")


def test_a_chunked_body_over_the_limit_is_refused_while_it_comes(service: Service) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"keys": ["'
        for _ in range(MAX_JSON_BYTES // 2**20 + 1):
            yield b"a" * 2**20

    answer = service.request("POST", "/v1/match", pieces(), **JSON)  # type: ignore[arg-type]
    assert answer.status == 413


def test_a_chunk_over_8_mib_is_refused_unread(service: Service, push: str) -> None:
    path = f"{push}/chunks/blake3:{'0' * 64}"
    assert raw(service, head(service, "PUT", path, f"Content-Length: {MAX_CHUNK_BYTES + 1}")) == (413, "too_large")
    assert raw(service, head(service, "PUT", path, f"Content-Length: {10**19}")) == (422, "malformed_request")
    assert raw(service, head(service, "PUT", path, f"Content-Length: {10**30}")) == (400, "malformed_request")


def test_a_refused_body_is_drained_so_that_its_sender_sees_why(service: Service, push: str) -> None:
    path = f"{push}/chunks/blake3:{'0' * 64}"
    with connect(service) as connection:
        connection.sendall(head(service, "PUT", path, "Content-Length: 100000000"))
        for _ in range(100):
            connection.sendall(bytes(10**6))
        assert received(connection) == (413, "too_large")
        connection.sendall(head(service, "GET", "/v2"))
        assert received(connection) == (404, "not_found")


def test_a_chunk_needs_its_length(service: Service, push: str) -> None:
    answer = service.request("PUT", f"{push}/chunks/blake3:{'0' * 64}", iter([b"abc"]))  # type: ignore[arg-type]
    assert answer.status == 411
    assert json.loads(answer.data)["error"]["code"] == "length_required"


def test_a_chunk_that_is_not_the_one_named_is_refused(service: Service, push: str, made: Made) -> None:
    digest, data = next((d, data) for d, data in made[2].items() if d in made[1][0].chunks["full/k"])
    path = f"{push}/chunks/{digest}"
    altered = bytes([data[0] ^ 1]) + data[1:]
    assert service.error("PUT", path, altered) == (400, "digest_mismatch")
    assert service.error("PUT", path, data[:-1]) == (400, "size_mismatch")
    assert service.error("PUT", path, b"") == (400, "size_mismatch")
    assert service.error("PUT", f"{push}/chunks/blake3:{'0' * 64}", data) == (404, "chunk_not_found")
    assert service.error("PUT", f"{push}/chunks/sha256:{'0' * 64}", data) == (400, "malformed_digest")
    assert service.request("PUT", path, data).status == 204


def test_a_manifest_that_is_not_canonical_is_refused(service: Service, push: str, made: Made) -> None:
    data = made[0].data
    for altered in data + b" ", data.replace(b'"version":1', b'"version":2'), b"[]", b"", data[:-1]:
        assert service.error("POST", f"{push}/commit", altered) == (400, "malformed_document")


def test_octets_that_are_not_http_get_the_one_error_shape(service: Service) -> None:
    assert raw(service, b"EHLO example\r\n\r\n") == (400, "malformed_request")


def test_a_stalled_body_is_cut(root: Place) -> None:
    json_head = ("Content-Type: application/json", "Content-Length: 100")
    chunk = f"/v1/pushes/{'0' * 32}/chunks/blake3:{'0' * 64}"
    with serving(root, stall_seconds=0.3) as service:
        began = time.monotonic()
        assert raw(service, head(service, "POST", "/v1/match", *json_head) + b'{"keys') == (408, "request_timeout")
        assert raw(service, head(service, "PUT", chunk, "Content-Length: 100") + b"abc") == (408, "request_timeout")
        assert time.monotonic() - began < 5


def test_a_body_that_trickles_in_has_a_deadline(root: Place) -> None:
    json_head = ("Content-Type: application/json", "Content-Length: 100")
    with serving(root, body_seconds=0.5) as service, connect(service) as connection:
        connection.sendall(head(service, "POST", "/v1/match", *json_head))
        while not select.select([connection], [], [], 0.1)[0]:
            connection.sendall(b" ")
        assert received(connection) == (408, "request_timeout")


def test_a_silent_or_half_asked_connection_is_cut(root: Place) -> None:
    with serving(root, idle_seconds=0.3) as service:
        for request in b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", head(service, "GET", "/healthz"):
            began = time.monotonic()
            with connect(service) as connection, suppress(ConnectionResetError):
                connection.sendall(request)
                while connection.recv(65536):
                    pass
            assert 0.2 < time.monotonic() - began < 5


def test_a_reader_that_stalls_is_cut(root: Place) -> None:
    made = artifact(list(range(256 * 64)), fingerprint(block_tokens=256 * 64))
    with serving(root, stall_seconds=0.3) as service:
        push_over_http(service, made)
        digest = made[1][0].chunks["full/k"][0]
        asked = head(service, "GET", f"/v1/artifacts/{made[0].id}/chunks/{digest}")
        with connect(service) as connection:
            for _ in range(200):
                connection.sendall(asked)
            time.sleep(1.5)
            got = 0
            with suppress(ConnectionResetError):
                while piece := connection.recv(2**20):
                    got += len(piece)
        assert 0 < got < 200 * len(made[2][digest])


def test_more_connections_than_allowed_are_answered_503(root: Place) -> None:
    with serving(root, connections=2) as service, connect(service), connect(service):
        time.sleep(0.2)
        assert raw(service, b"") == (503, "unavailable")


def test_an_endless_header_is_refused(service: Service) -> None:
    with connect(service) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        answer = b""
        try:
            for _ in range(64):
                connection.sendall(b"X-Long: " + b"a" * 65536 + b"\r\n")
            answer = connection.recv(65536)
        except OSError:
            pass
        assert not answer or answer.startswith(b"HTTP/1.1 431")
    assert service.request("GET", "/healthz").status == 200
