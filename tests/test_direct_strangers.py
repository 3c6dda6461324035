"""A service or an S3 that answers wrongly, slowly or not at all costs a reader a warning, never the chunk."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from repo_service.client import direct
from repo_service.client.http import HttpRepository
from repo_service.domain.digest import chunk_digest
from repo_service.domain.layout import ChunkSpec

SPEC = ChunkSpec("bfloat16", (1, 1, 2, 16, 4))
DATA = bytes(range(256)) * (SPEC.size // 256)
DIGEST = chunk_digest(DATA, SPEC.dtype, SPEC.shape)
ARTIFACT = f"sha256:{'a' * 64}"

Answer = Callable[[str], tuple[int, bytes]]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_warned", set())


@contextmanager
def answering(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """A server's URL, and the paths that it was asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            paths.append(self.path)
            status, body = answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", paths
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def located(url: str) -> bytes:
    return json.dumps({"seconds": 300, "urls": {DIGEST: url}, "framed": False}).encode()


@contextmanager
def reading(urls: Answer) -> Iterator[tuple[HttpRepository, list[str]]]:
    """A client of a service that has one chunk, and says by ``urls`` where else it is."""
    with (
        answering(lambda path: urls(path) if path.endswith("/urls") else (200, DATA)) as (url, paths),
        HttpRepository(urlsplit(url), retry_s=1) as repository,
    ):
        yield repository, paths


def read(repository: HttpRepository) -> None:
    out = bytearray(SPEC.size)
    repository.read_chunk(ARTIFACT, "default", DIGEST, SPEC, memoryview(out))
    assert out == DATA


def asked(paths: list[str]) -> int:
    return len([path for path in paths if path.endswith("/urls")])


def warning(caplog: pytest.LogCaptureFixture) -> str:
    [found] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return found


@pytest.mark.parametrize(
    "url",
    [
        "http://[bad/?X-Amz-Signature=secret",
        "http://127.0.0.1/\u00e9?X-Amz-Signature=secret",
        "http://127.0.0.1/a b?X-Amz-Signature=secret",
        "http://127.0.0.1/a\r\nHost:x?X-Amz-Signature=secret",
        f"http://{'a' * 64}.example/?X-Amz-Signature=secret",
        "http://a..b/?X-Amz-Signature=secret",
        "http://127.0.0.1:99999/?X-Amz-Signature=secret",
        "http://127.0.0.1:0/?X-Amz-Signature=secret",
        "http://\u0000/?X-Amz-Signature=secret",
        "http://secret\u2100/?X-Amz-Signature=secret",
        "http:///?X-Amz-Signature=secret",
        "file:///etc/passwd?X-Amz-Signature=secret",
        "",
    ],
)
def test_a_service_that_gives_a_url_that_is_none_is_read_through(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with reading(lambda _: (200, located(url))) as (repository, paths):
        for _ in range(5):
            read(repository)
        assert asked(paths) == 1
    warning(caplog)
    assert "secret" not in caplog.text
    assert "Signature" not in caplog.text


@pytest.mark.parametrize("status", [500, 502, 503, 504, 418])
def test_one_failure_to_say_where_chunks_are_does_not_end_direct_reads(
    status: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = [status]
    with answering(lambda _: (200, DATA)) as (s3, at_s3):

        def urls(_: str) -> tuple[int, bytes]:
            return (statuses.pop(), b"bad") if statuses else (200, located(f"{s3}/chunk?X-Amz-Signature=secret"))

        with reading(urls) as (repository, paths):
            for _ in range(3):
                read(repository)
            assert (asked(paths), at_s3) == (1, [])
            warning(caplog)
            # A minute later.
            monkeypatch.setattr(repository._reach, "_paused_until", 0.0)
            read(repository)
            assert (asked(paths), len(at_s3)) == (2, 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>",
        b'{"seconds": 300, "urls": {"blake3:other": "http://127.0.0.1/"}}',
        located("http://127.0.0.1/").replace(b"300", b"300" + b"0" * 400),
    ],
)
def test_a_service_that_answers_nonsense_for_urls_is_not_asked_at_each_read(answer: bytes) -> None:
    with reading(lambda _: (200, answer)) as (repository, paths):
        for _ in range(5):
            read(repository)
        assert asked(paths) == 1


@pytest.mark.parametrize("answer", [(200, b'{"seconds": 0, "urls": {}}'), (404, b"")])
def test_a_service_that_has_no_urls_is_asked_once(
    answer: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if answer[0] == 404:
        answer = 404, b'{"error": {"code": "not_found", "message": "no such route", "details": {}}}'
    with reading(lambda _: answer) as (repository, paths):
        for _ in range(3):
            read(repository)
            monkeypatch.setattr(repository._reach, "_paused_until", 0.0)
        assert asked(paths) == 1
    assert caplog.records == []


@pytest.mark.parametrize(
    "answer", [(500, b""), (503, b"busy"), (404, b"none"), (405, b""), (301, b""), (200, b"<html>sign in</html>")]
)
def test_an_s3_that_answers_wrongly_again_and_again_is_left_alone(
    answer: tuple[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        answering(lambda _: answer) as (s3, at_s3),
        reading(lambda _: (200, located(f"{s3}/chunk?X-Amz-Signature=secret"))) as (repository, _),
    ):
        for _ in range(20):
            read(repository)
        assert len(at_s3) == direct._MOST_FAILURES
    assert "127.0.0.1" in warning(caplog)
    assert "secret" not in caplog.text


def test_one_thread_waits_for_urls_and_the_others_read_through_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_TURN_S", 0.05)
    begun, slow = threading.Event(), threading.Event()

    def urls(_: str) -> tuple[int, bytes]:
        begun.set()
        assert slow.wait(60)
        return 503, b""

    with reading(urls) as (repository, paths), ThreadPoolExecutor(6) as pool:
        first = pool.submit(read, repository)
        assert begun.wait(60)
        for other in [pool.submit(read, repository) for _ in range(5)]:
            other.result(60)
        assert not first.done()
        slow.set()
        # That the service was busy does not fail the read.
        first.result(60)
        assert asked(paths) == 1


def test_a_child_reads_although_a_thread_of_its_parent_waited_for_urls_when_it_was_born() -> None:
    begun, slow = threading.Event(), threading.Event()

    def urls(_: str) -> tuple[int, bytes]:
        if not begun.is_set():
            begun.set()
            assert slow.wait(60)
        return 200, b'{"seconds": 0, "urls": {}}'

    with reading(urls) as (repository, paths), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read, repository)
        assert begun.wait(60)
        # Whatever the parent's threads hold, they hold for good in the child.
        repository._reads._changed.acquire()
        repository._reach._lock.acquire()
        child = os.fork()
        if child == 0:
            failed = 1
            try:
                threading.Timer(30, os._exit, (2,)).start()
                read(repository)
                failed = 0
            finally:
                os._exit(failed)
        repository._reads._changed.release()
        repository._reach._lock.release()
        try:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finally:
            slow.set()
        waiting.result(60)
        # The child asked for itself.
        assert asked(paths) == 2
