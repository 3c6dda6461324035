"""HTTPS with certificates of an authority of the test's own: the service, its client, and deadlines."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme
from pushing import push
from serving import served
from synthetic import artifact
from test_api import Service, error_of, serving
from test_api_serve import big_artifact
from test_http_client import push_all

from repo_service.api import serve
from repo_service.client import open_repository
from repo_service.domain.access import Scope
from repo_service.domain.errors import InvalidInput, Unavailable
from repo_service.settings import Settings

PLAIN = b"GET /v1/info HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of an authority, and of a certificate of 127.0.0.1 that comes from it."""
    folder = tmp_path_factory.mktemp("tls")
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    files = {name: str(folder / f"{name}.pem") for name in ("ca", "cert", "key", "locked")}
    ca.cert_pem.write_to_path(files["ca"])
    issued.private_key_pem.write_to_path(files["key"])
    for blob in issued.cert_chain_pems:
        blob.write_to_path(files["cert"], append=True)
    return files


@pytest.fixture
def trusted(authority: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files to serve with, which clients of this process trust."""
    monkeypatch.setenv("KVGRAFT_CA_FILE", authority["ca"])
    return {"tls_cert": authority["cert"], "tls_key": authority["key"]}


@contextmanager
def connected(service: Service, authority: dict[str, str], receive_buffer: int = 65536) -> Iterator[ssl.SSLSocket]:
    parts = urlsplit(service.url)
    context = ssl.create_default_context(cafile=authority["ca"])
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        plain.settimeout(30)
        plain.connect((parts.hostname or "", parts.port or 0))
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            yield connection


def test_an_artifact_is_pushed_and_pulled_over_https_with_a_token(tmp_path: Path, trusted: dict[str, str]) -> None:
    made = artifact(range(40))
    with serving(tmp_path / "repository", auth="tokens", **trusted) as service:
        token = service.repository.create_access_token(Scope.WRITE, ["team-a"]).token
        assert service.url.startswith("https://")
        with open_repository(service.url, token) as repository:
            push(repository, made, "team-a")
            for digest, data in made[2].items():
                spec = service.repository.chunk_spec(made[0].id, "team-a", digest)
                out = bytearray(spec.size)
                repository.read_chunk(made[0].id, "team-a", digest, spec, memoryview(out))
                assert out == data


def test_the_command_serves_https(tmp_path: Path, trusted: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in trusted.items():
        monkeypatch.setenv(f"KVGRAFT_{name.upper()}", value)
    with served(tmp_path / "repository") as url, open_repository(url) as repository:
        assert url.startswith("https://")
        assert repository.namespaces() == []


def test_a_certificate_that_is_not_trusted_is_refused_at_once(tmp_path: Path, authority: dict[str, str]) -> None:
    files = {"tls_cert": authority["cert"], "tls_key": authority["key"]}
    with serving(tmp_path / "repository", **files) as service, open_repository(service.url) as repository:
        began = time.monotonic()
        with pytest.raises(Unavailable, match="KVGRAFT_CA_FILE"):
            repository.info()
        assert time.monotonic() - began < 5


def test_a_certificate_of_another_host_is_refused(tmp_path: Path, trusted: dict[str, str]) -> None:
    with serving(tmp_path / "repository", **trusted) as service:
        elsewhere = service.url.replace("127.0.0.1", "localhost")
        with open_repository(elsewhere) as repository, pytest.raises(Unavailable, match="localhost"):
            repository.info()


def test_a_file_of_authorities_that_is_none_is_named(
    tmp_path: Path, authority: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in str(tmp_path / "absent.pem"), authority["key"], str(tmp_path):
        monkeypatch.setenv("KVGRAFT_CA_FILE", path)
        with pytest.raises(InvalidInput, match="KVGRAFT_CA_FILE"):
            open_repository("https://127.0.0.1:1")


def test_files_that_are_no_certificate_and_key_are_named(tmp_path: Path, authority: dict[str, str]) -> None:
    locked = tmp_path / "locked.pem"
    key = Path(authority["key"]).read_text()
    locked.write_text(
        key.replace(
            "-----\n", "-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-256-CBC,00112233445566778899AABBCCDDEEFF\n\n", 1
        )
    )
    cases: list[dict[str, str]] = [
        {"tls_cert": authority["cert"]},
        {"tls_key": authority["key"]},
        {"tls_cert": authority["cert"], "tls_key": str(tmp_path / "absent")},
        {"tls_cert": authority["key"], "tls_key": authority["cert"]},
        {"tls_cert": authority["ca"], "tls_key": authority["key"]},
        {"tls_cert": authority["cert"], "tls_key": str(locked)},
        {"tls_cert": str(tmp_path), "tls_key": str(tmp_path)},
    ]
    for files in cases:
        with pytest.raises(InvalidInput, match="certificate"):
            serve(Settings(repo="memory:", port=0, **files))  # type: ignore[arg-type]


def test_old_versions_of_tls_and_http_are_not_spoken(
    tmp_path: Path, authority: dict[str, str], trusted: dict[str, str]
) -> None:
    with serving(tmp_path / "repository", idle_seconds=1.0, **trusted) as service:
        parts = urlsplit(service.url)
        place = (parts.hostname or "", parts.port or 0)
        with socket.create_connection(place, timeout=30) as connection:
            connection.sendall(PLAIN)
            assert not connection.recv(65536).startswith(b"HTTP")
        with connected(service, authority) as secure:
            assert secure.version() in {"TLSv1.2", "TLSv1.3"}
        context = ssl.create_default_context(cafile=authority["ca"])
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection(place, timeout=30) as connection,
            context.wrap_socket(connection, server_hostname="127.0.0.1") as secure,
        ):
            cipher = secure.cipher()
            assert cipher is not None
            assert cipher[0].startswith("ECDHE")


def test_silent_peers_are_dropped_before_and_after_the_handshake(
    tmp_path: Path, authority: dict[str, str], trusted: dict[str, str]
) -> None:
    with serving(tmp_path / "repository", idle_seconds=1.0, **trusted) as service:
        parts = urlsplit(service.url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20) as silent:
            assert silent.recv(1) == b""
        with connected(service, authority) as secure:
            assert ended(secure)
        with connected(service, authority) as secure:
            secure.sendall(PLAIN[:20])
            assert ended(secure)


def ended(connection: ssl.SSLSocket) -> bool:
    try:
        return connection.recv(1) == b""
    except (ssl.SSLError, ConnectionError):
        return True


def ask(connection: ssl.SSLSocket, path: str) -> None:
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())


def chunk_path(made: Any) -> str:
    return f"/v1/artifacts/{made[0].id}/chunks/{made[1][0].chunks['full/k'][0]}"


def test_i8_a_reader_that_stalls_holds_a_turn_and_is_cut(
    tmp_path: Path, authority: dict[str, str], trusted: dict[str, str]
) -> None:
    made = big_artifact()
    settings: dict[str, Any] = {"chunk_transfers": 1, "queue": 0, "stall_seconds": 1.0, **trusted}
    # Left to itself, the system buffers up to 4 MiB.
    with (
        serving(tmp_path / "repository", send_buffer=2**20, **settings) as service,
        open_repository(service.url) as repository,
    ):
        push_all(repository, made, "default")
        path = chunk_path(made)
        with connected(service, authority) as stalled:
            ask(stalled, path)
            assert stalled.recv(12) == b"HTTP/1.1 200"
            with connected(service, authority) as other:
                ask(other, path)
                assert other.recv(12) == b"HTTP/1.1 503"
            # The next attempts find the turn given back.
            digest = made[1][0].chunks["full/k"][0]
            spec = made[0].layout.arrays["full/k"].chunk
            out = bytearray(spec.size)
            repository.read_chunk(made[0].id, "default", digest, spec, memoryview(out))
            assert out == made[2][digest]
            got = 0
            try:
                while piece := stalled.recv(2**20):
                    got += len(piece)
            except (ssl.SSLError, ConnectionError):
                pass
            assert got < spec.size // 2


def test_a_slow_reader_gets_its_chunk_in_longer_than_a_transfer_may_stall(
    tmp_path: Path, authority: dict[str, str], trusted: dict[str, str]
) -> None:
    made = big_artifact()
    settings: dict[str, Any] = {"idle_seconds": 1.5, "stall_seconds": 1.5, **trusted}
    with serving(tmp_path / "repository", **settings) as service:
        push_all(service.repository, made, "default")
        digest = made[1][0].chunks["full/k"][0]
        with connected(service, authority) as slow:
            ask(slow, chunk_path(made))
            got = bytearray()
            while len(got) < len(made[2][digest]) or b"\r\n\r\n" not in got:
                piece = slow.recv(65536)
                assert piece, f"cut after {len(got)} bytes"
                got += piece
                if len(got) < 6 * 2**20:
                    time.sleep(0.01)
        assert bytes(got).endswith(made[2][digest])


def test_addresses_in_the_audit_log_are_those_that_a_named_proxy_gives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = []
    for proxies in "", "127.0.0.1", "192.0.2.1":
        caplog.clear()
        with (
            caplog.at_level("INFO", "kvgraft.audit"),
            serving(tmp_path / "repository", forwarded_allow_ips=proxies) as service,
        ):
            answer = service.request("DELETE", "/v1/tags/none", X_Forwarded_For="198.51.100.9")
            assert error_of(answer) == (404, "tag_not_found")
        (line,) = [json.loads(r.getMessage()) for r in caplog.records if r.name == "kvgraft.audit"]
        addresses.append(line["who"]["address"])
    assert addresses == ["127.0.0.1", "198.51.100.9", "127.0.0.1"]
