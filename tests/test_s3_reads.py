"""Reads of S3 as botocore is told to make them: over TLS, through a proxy, elsewhere; and reads that their caller ends."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme
from faulty import faulty
from servers import S3Server

from repo_service.domain.errors import Unavailable
from repo_service.storage import S3Store
from repo_service.storage.s3_ways import ByBotocore, Signed

DATA = os.urandom(3 * 2**20 + 5)


@contextmanager
def opened(s3: S3Server, prefix: str, seconds: float = 20) -> Iterator[S3Store]:
    store = S3Store(s3.bucket, prefix, seconds=seconds)
    try:
        yield store
    finally:
        store.close()


def read(store: S3Store) -> bytes:
    out = bytearray(len(DATA))
    pieces: list[bytes] = []
    assert store.read_into("key", memoryview(out), lambda piece: pieces.append(bytes(piece))) == len(DATA)
    assert b"".join(pieces) == out
    return bytes(out)


@pytest.fixture
def prefix(s3: S3Server) -> str:
    prefix = s3.prefix()
    s3.client().put_object(Bucket=s3.bucket, Key=f"{prefix}/key", Body=DATA)
    return prefix


def test_a_connection_is_used_again(s3: S3Server, prefix: str) -> None:
    with opened(s3, prefix) as store:
        assert read(store) == DATA
        way = store._bucket.reader._way
        assert isinstance(way, Signed)
        [connection] = way.pool._idle
        assert store.get("key") == DATA
        assert store.get("absent") is None
        assert way.pool._idle == [connection]


def test_a_read_that_its_caller_ends_leaves_nothing_behind(s3: S3Server, prefix: str) -> None:
    class Enough(Exception):
        pass

    def enough(_: memoryview) -> None:
        raise Enough

    with opened(s3, prefix) as store:
        for _ in range(70):
            with pytest.raises(Enough):
                store.read_into("key", memoryview(bytearray(len(DATA))), enough)
        assert read(store) == DATA


def test_an_object_larger_than_the_memory_given_fills_it(s3: S3Server, prefix: str) -> None:
    with opened(s3, prefix) as store:
        out = bytearray(10)
        assert store.read_into("key", memoryview(out), len) == len(DATA)
        assert out == DATA[:10]
        s3.client().put_object(Bucket=s3.bucket, Key=f"{prefix}/empty", Body=b"")
        assert store.get("empty") == b""
        assert store.read_into("empty", memoryview(bytearray(5)), len) == 0
        assert read(store) == DATA


@pytest.fixture
def tls(s3: S3Server, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """URL of the S3 server behind TLS, and the file of the authority that vouches for it."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    with faulty(s3.url, context) as faults:
        yield faults.url, str(tmp_path / "ca.pem")


def test_tls_is_checked_against_the_authorities_that_botocore_trusts(
    s3: S3Server, prefix: str, tls: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, authority = tls
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    with opened(s3, prefix) as store, pytest.raises(Unavailable, match="AWS_CA_BUNDLE names certificates to trust"):
        store.get("key")
    monkeypatch.setenv("AWS_CA_BUNDLE", authority)
    with opened(s3, prefix) as store:
        assert read(store) == DATA
        assert isinstance(store._bucket.reader._way, Signed)


def test_a_proxy_is_left_to_botocore(s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The server takes a request line with the whole URL, as a proxy does.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://s3.invalid")
    monkeypatch.setenv("HTTP_PROXY", s3.url)
    monkeypatch.setenv("NO_PROXY", "")
    with opened(s3, prefix) as store:
        assert read(store) == DATA
        assert isinstance(store._bucket.reader._way, ByBotocore)
        assert store.get("absent") is None
        store.put("other", b"x")
        assert store.get("other") == b"x"


def test_a_bucket_that_is_elsewhere_is_left_to_botocore(
    s3: S3Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = b"<Error><Code>PermanentRedirect</Code><Message>elsewhere</Message></Error>"
            self.send_response(301)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_request(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        with opened(s3, prefix) as store:
            # It goes nowhere from here, and that is what botocore says in the end.
            with pytest.raises(Unavailable, match=r"301.*AWS_ENDPOINT_URL"):
                store.get("key")
            assert isinstance(store._bucket.reader._way, ByBotocore)
        server.shutdown()
        thread.join()
    assert len(asked) >= 2
