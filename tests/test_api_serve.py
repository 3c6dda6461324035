"""`serve` as a process of its own: where it listens, how it ends, and how much memory it takes (I8)."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import urllib3
from places import Place
from serving import served
from synthetic import artifact, fingerprint
from test_api import Made, Service, error_of, serving
from test_http_client import push_all
from test_metrics import scrape, value

from repo_service.api import serve
from repo_service.client import open_repository
from repo_service.domain.errors import (
    InvalidInput,
    KvgraftError,
    MalformedUrl,
    NotARepository,
    PortInUse,
    TooLarge,
)
from repo_service.domain.frame import NONE
from repo_service.domain.layout import MAX_CHUNK_BYTES
from repo_service.domain.manifest import Manifest
from repo_service.domain.views import ArtifactInfo, StorageReport
from repo_service.services.push import LocalPush
from repo_service.services.read import check_artifact
from repo_service.settings import Settings, load_settings

pytestmark = pytest.mark.everywhere

PROJECT = Path(__file__).parent.parent

PROGRAM = """
from repo_service.api import serve
from repo_service.settings import load_settings
serve(load_settings(), lambda url, guard: print(f"serving at {url} ({guard})", flush=True))
"""


@contextmanager
def process(root: Place, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A served repository: the process, its URL, and the line that it announced itself with."""
    names = {f"KVGRAFT_{name.upper()}": value for name, value in environment.items()}
    settings = {"KVGRAFT_REPO": root.as_uri(), "KVGRAFT_PORT": "0", "PYTHONPATH": str(PROJECT), **names}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        try:
            line = running.stdout.readline()
            yield running, next(word for word in line.split() if word.startswith("http")), line
        finally:
            running.terminate()
            running.wait(30)


@cache
def big_artifact() -> Made:
    """An artifact of two blocks whose every chunk has 8 MiB."""
    arrays = [
        {"name": "k", "dtype": "float32", "heads": 8, "dim": 256, "chunk_layers": 4, "chunk_heads": 8},
    ]
    state = {"groups": [{"name": "full", "kind": "full", "layers": list(range(8)), "window": None, "arrays": arrays}]}
    made = artifact(list(range(512)), fingerprint(state=state, schedule={"block_tokens": 256}))
    assert all(len(made[2][digest]) == MAX_CHUNK_BYTES for digest in made[1][0].chunks["full/k"])
    return made


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def start(url: str, request: bytes) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)
    connection.sendall(request)
    return connection


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_starlette_1012_16_parallel_transfers_take_bounded_memory(root: Place) -> None:
    manifest, records, chunks = big_artifact()
    # What docs/settings.md says that a transfer holds: its chunk, and where chunks are encoded up to three times that.
    with open_repository(root.as_uri()) as repository:
        held = MAX_CHUNK_BYTES * (1 if repository.info().codec == NONE else 3)
    with process(root) as (running, url, _), open_repository(url) as repository:
        push = repository.begin_push(manifest.fingerprint, "default")
        missing = push.offer(records)
        push.offer_tokens(manifest.token_count, manifest.tokens or ())
        before = peak_bytes(running.pid)

        host = f"Host: {urlsplit(url).netloc}\r\n"
        with ExitStack() as stack:
            uploads = []
            for i in range(16):
                digest = missing[i % len(missing)]
                line = f"PUT /v1/pushes/{push.id}/chunks/{digest} HTTP/1.1\r\n{host}"
                connection = start(url, f"{line}Content-Length: {MAX_CHUNK_BYTES}\r\n\r\n".encode())
                uploads.append((stack.enter_context(connection), memoryview(chunks[digest])))
            statuses: list[bytes] = []

            def finish(connection: socket.socket, data: memoryview) -> None:
                connection.sendall(data)
                statuses.append(connection.recv(65536)[:12])

            threads = [threading.Thread(target=finish, args=upload) for upload in uploads]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert statuses == [b"HTTP/1.1 204"] * 16

        for digest, data in chunks.items():
            push.put(digest, data)
        push.commit(manifest)
        with ExitStack() as stack:
            path = f"/v1/artifacts/{manifest.id}/chunks/{missing[0]}"
            request = f"GET {path} HTTP/1.1\r\n{host}Connection: close\r\n\r\n".encode()
            downloads = [stack.enter_context(start(url, request)) for _ in range(16)]
            time.sleep(0.5)
            for connection in downloads:
                size = 0
                while piece := connection.recv(2**20):
                    size += len(piece)
                assert size > MAX_CHUNK_BYTES
        assert peak_bytes(running.pid) - before < 16 * held


def test_serve_announces_a_free_loopback_port_and_ends_cleanly_on_sigterm(root: Place) -> None:
    with process(root) as (running, url, line):
        assert urlsplit(url).hostname == "127.0.0.1"
        assert "loopback only" in line
        assert "no tokens" in line
        assert json.loads(urllib3.request("GET", f"{url}/healthz").data) == {"status": "ok"}
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            serve(Settings(repo="memory:", port=port))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", "127.0.0.1.example.org", ""])
def test_lmcache_2757_without_tokens_only_loopback_is_served(host: str) -> None:
    with pytest.raises(InvalidInput, match="loopback"):
        serve(Settings(repo="memory:", host=host, port=0))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, InvalidInput),
        ({"repo": "s3//x"}, MalformedUrl),
        ({"repo": "file:///proc/version"}, NotARepository),
        ({"repo": "memory:", "host": "192.0.2.1", "insecure_any_host": True}, InvalidInput),
    ],
)
def test_what_cannot_be_served_is_an_error(settings: dict[str, str | bool], kind: type[KvgraftError]) -> None:
    with pytest.raises(kind):
        serve(load_settings(port=0, **settings))


def test_lmcache_2757_pages_of_other_origins_are_refused(root: Place) -> None:
    with serving(root) as service:
        port = urlsplit(service.url).port
        for name, value in {
            "Host": f"rebound.example.org:{port}",
            "Origin": "https://example.org",
            "host": "",
            "origin": "null",
        }.items():
            assert error_of(service.request("POST", "/v1/reindex", **{name: value})) == (403, "access_denied")
        for name, value in {
            "Host": f"localhost:{port}",
            "host": f"[::1]:{port}",
            "Origin": "http://127.0.0.1:3000",
        }.items():
            assert service.request("GET", "/v1/info", **{name: value}).status == 200


def test_a_transfer_that_finds_no_turn_is_told_to_come_back(root: Place) -> None:
    made = big_artifact()
    settings = {"chunk_transfers": 1, "queue": 0, "stall_seconds": 1.0}
    with serving(root, **settings) as service, open_repository(service.url) as repository:
        push_all(repository, made, "default")
        digest = made[1][0].chunks["full/k"][0]
        path = f"/v1/artifacts/{made[0].id}/chunks/{digest}"
        with slow_reader(service, path) as stalled:
            assert stalled.recv(1024).startswith(b"HTTP/1.1 200")
            answer = service.request("GET", path)
            assert error_of(answer) == (503, "unavailable")
            assert answer.headers["retry-after"] == "1"
            spec = made[0].layout.arrays["full/k"].chunk
            out = bytearray(spec.size)
            repository.read_chunk(made[0].id, "default", digest, spec, memoryview(out))
        assert out == made[2][digest]


@contextmanager
def slow_reader(service: Service, path: str) -> Iterator[socket.socket]:
    """A client that has asked for a chunk, and whose kernel takes little of it."""
    parts = urlsplit(service.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        connection.connect((parts.hostname or "", parts.port or 0))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        yield connection


def test_slow_readers_get_their_own_chunks_although_memory_is_reused(root: Place) -> None:
    made = big_artifact()
    with serving(root, chunk_transfers=2) as service, open_repository(service.url) as repository:
        push_all(repository, made, "default")
        wanted = [digest for record in made[1] for digest in record.chunks["full/k"]]

        def take_slowly(digest: str) -> bool:
            got = bytearray()
            with slow_reader(service, f"/v1/artifacts/{made[0].id}/chunks/{digest}") as connection:
                while piece := connection.recv(random.randrange(1, 2**20)):
                    got += piece
                    time.sleep(random.choice([0, 0, 0, 0.005]))
            return got[-MAX_CHUNK_BYTES:] == made[2][digest]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(take_slowly, wanted * 4))


def test_settings_come_from_the_environment_and_bad_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGRAFT_PORT", "1234")
    assert load_settings().port == 1234
    assert load_settings(port=5).port == 5
    monkeypatch.setenv("KVGRAFT_PORT", "tcp://10.0.0.1:80")
    with pytest.raises(InvalidInput, match="KVGRAFT_PORT"):
        load_settings()
    with pytest.raises(InvalidInput, match="stall_seconds"):
        load_settings(port=1, stall_seconds=0)


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())


def test_a_signal_that_comes_as_soon_as_the_url_is_known_ends_the_service(root: Place) -> None:
    for _ in range(3):
        with served(root.as_uri()):
            pass


def test_i8_checks_whose_callers_have_left_keep_nobody_from_theirs(
    root: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, done = artifact(range(40)), threading.Event()

    def long(*arguments: Any) -> StorageReport:
        done.wait(60)
        return check_artifact(*arguments)

    monkeypatch.setattr("repo_service.services.repository.check_artifact", long)
    with serving(root, queue_seconds=0.5) as service:
        push_all(service.repository, made)
        path, server = f"/v1/namespaces/team-a/artifacts/{made[0].id}/check", urlsplit(service.url)
        for _ in range(10):
            with socket.create_connection((server.hostname, server.port)) as left:
                left.sendall(f"POST {path} HTTP/1.1\r\nHost: {server.netloc}\r\nContent-Length: 0\r\n\r\n".encode())
        assert service.error("POST", path) == (503, "unavailable")
        service.json("POST", "/v1/gc", {})
        done.set()
        # They end in their own time on a busy machine, which is not the half second that a caller waits for a turn.
        end = time.monotonic() + 60
        while value(scrape(service), "queue_running", queue="checks") and time.monotonic() < end:
            time.sleep(0.05)
        assert service.json("POST", path)["corrupt"] == []


def test_i8_commits_of_many_chunks_take_turns(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest of a few KiB may name block records of 4 MiB each, all of which a commit has in memory."""
    made, begun, done = artifact(range(40)), threading.Event(), threading.Event()
    commit = LocalPush.commit

    def long(push: LocalPush, manifest: Manifest) -> ArtifactInfo:
        begun.set()
        done.wait(60)
        return commit(push, manifest)

    monkeypatch.setattr(LocalPush, "commit", long)
    monkeypatch.setattr("repo_service.api.push_routes._FEW_CHUNKS", made[0].chunk_count - 1)
    with serving(root, document_transfers=1, queue_seconds=0.5) as service, ThreadPoolExecutor(1) as pool:
        path = f"/v1/pushes/{service.repository.begin_push(made[0].fingerprint, 'default').id}/commit"
        first = pool.submit(service.error, "POST", path, made[0].data)
        assert begun.wait(30)
        assert service.error("POST", path, made[0].data) == (503, "unavailable")
        done.set()
        assert first.result() == (400, "malformed_document"), "its blocks were not offered"


def test_i8_an_artifact_of_more_chunks_than_memory_is_meant_for_is_refused(
    root: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = artifact(range(40))
    monkeypatch.setattr("repo_service.services.push.MAX_ARTIFACT_CHUNKS", made[0].chunk_count - 1)
    with (
        open_repository(root.as_uri()) as repository,
        pytest.raises(TooLarge, match=f"name {made[0].chunk_count} chunks"),
    ):
        push_all(repository, made)
