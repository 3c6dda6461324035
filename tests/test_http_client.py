"""`HttpRepository` against a real service, and against one whose answers are altered, cut or lost on the way."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from places import Place
from synthetic import artifact, fingerprint
from test_api import Made, Service, serving

import repo_service.client.http
from repo_service.client import open_repository
from repo_service.client.http import HttpRepository
from repo_service.domain.digest import sha256_digest
from repo_service.domain.errors import (
    ArtifactNotFound,
    ChunkCorrupt,
    ChunkNotFound,
    ChunksMissing,
    DigestMismatch,
    Divergence,
    DocumentCorrupt,
    InvalidInput,
    KvgraftError,
    MalformedName,
    MalformedUrl,
    NotARepository,
    PushNotFound,
    ServiceError,
    SizeMismatch,
    TagNotFound,
    Unavailable,
)
from repo_service.domain.layout import ChunkSpec
from repo_service.domain.record import BlockRecord
from repo_service.domain.repository import Repository
from repo_service.domain.views import ArtifactInfo, ArtifactQuery
from repo_service.services.read import read_record
from repo_service.storage import Store

pytestmark = pytest.mark.everywhere

NS = "team-a"

TOKENS = list(range(200, 250))


@dataclass
class Answer:
    """What the service answered to one request, to be tampered with before the client sees it."""

    method: str
    path: str
    status: int
    headers: dict[str, str]
    body: bytes
    count: int


Fault = Callable[[Answer], Answer | None]


@contextmanager
def tampered(service: Service, fault: Fault) -> Iterator[HttpRepository]:
    """A client whose answers go through ``fault``; None cuts the connection instead of answering."""
    target = urlsplit(service.url).netloc
    seen: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            upstream = http.client.HTTPConnection(target)
            upstream.request(self.command, self.path, body, dict(self.headers) | {"Host": target})
            got = upstream.getresponse()
            seen.append(f"{self.command} {self.path}")
            headers = {k: v for k, v in got.getheaders() if k in {"content-type", "content-length", "retry-after"}}
            answer = fault(Answer(self.command, self.path, got.status, headers, got.read(), seen.count(seen[-1])))
            upstream.close()
            if answer is None:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.body)
            self.close_connection = int(answer.headers.get("content-length", 0)) != len(answer.body)

        def log_request(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with client(f"http://127.0.0.1:{proxy.server_address[1]}", retry_s=3) as repository:
                yield repository
        finally:
            proxy.shutdown()
            thread.join()


def client(url: str, retry_s: float = 30) -> HttpRepository:
    return HttpRepository(urlsplit(url), retry_s=retry_s)


@pytest.fixture(scope="module")
def service(module_root: Place) -> Iterator[Service]:
    with serving(module_root) as running:
        yield running


@pytest.fixture
def repository(service: Service) -> Iterator[Repository]:
    with open_repository(service.url) as opened:
        yield opened


@pytest.fixture(scope="module")
def pushed(service: Service) -> Made:
    made = artifact(TOKENS, seed=77)
    with client(service.url) as opened:
        push_all(opened, made)
    return made


def push_all(repository: Repository, made: Made, namespace: str = NS) -> ArtifactInfo:
    manifest, records, chunks = made
    with repository.begin_push(manifest.fingerprint, namespace) as push:
        missing = push.offer(records)
        if manifest.tokens is not None:
            missing += push.offer_tokens(manifest.token_count, manifest.tokens)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda digest: push.put(digest, chunks[digest]), missing))
        return push.commit(manifest)


def pull_all(repository: Repository, made: Made, namespace: str = NS) -> dict[str, bytes]:
    manifest = repository.manifest(made[0].id, namespace)
    held = manifest.stored_chunks(repository.records(manifest, namespace))

    def read(item: tuple[str, ChunkSpec]) -> tuple[str, bytes]:
        digest, spec = item
        out = bytearray(spec.size + 8)
        repository.read_chunk(manifest.id, namespace, digest, spec, memoryview(out))
        assert out[spec.size :] == bytes(8)
        return digest, bytes(out[: spec.size])

    with ThreadPoolExecutor(4) as pool:
        return dict(pool.map(read, held.items()))


def a_chunk(made: Made) -> tuple[str, ChunkSpec, bytes]:
    manifest, records, chunks = made
    digest = records[0].chunks["full/k"][0]
    return digest, manifest.layout.arrays["full/k"].chunk, chunks[digest]


def test_a_remote_repository_answers_as_an_embedded_one(service: Service, repository: Repository) -> None:
    made = artifact(list(range(40)), annotations={"k": "v"}, text="some words")
    manifest, records, chunks = made
    info = push_all(repository, made)
    local = service.repository
    assert info == local.artifact(manifest.id, NS)
    assert push_all(repository, made) == info
    assert pull_all(repository, made) == chunks
    assert repository.url == service.url
    assert repository.info() == local.info()
    used = local.artifact(manifest.id, NS)
    assert used.last_used_at is not None
    assert used.model_copy(update={"last_used_at": None}) == info
    assert repository.artifact(manifest.id[:20], NS) == used
    assert repository.manifest(manifest.id, NS) == manifest
    assert repository.records(manifest, NS) == records
    keys = [record.key for record in records]
    assert repository.match(NS, keys) == local.match(NS, keys)
    assert repository.match(NS, [sha256_digest(b"x")]) is None
    assert repository.match(NS, []) is None
    query = ArtifactQuery(namespace=NS, annotations={"k": "v"}, covers=(0, 16), created_after=info.created_at)
    assert repository.query(query.model_copy(update={"created_after": None})).items == [used]
    assert repository.query(query) == local.query(query)
    tag = repository.set_tag(NS, "latest", manifest.id)
    assert repository.tags(NS) == local.tags(NS) == [tag]
    assert repository.manifest("latest", NS) == manifest
    repository.delete_tag(NS, "latest")
    assert repository.check(manifest.id, NS) == local.check(manifest.id, NS)
    assert repository.stats(NS) == local.stats(NS)
    assert repository.divergences(NS) == []
    assert repository.reindex().corrupt == []
    assert repository.delete(manifest.id, NS).artifact_id == manifest.id
    with pytest.raises(ArtifactNotFound):
        repository.artifact(manifest.id, NS)


def test_errors_arrive_in_the_type_of_their_code_with_their_details(repository: Repository, pushed: Made) -> None:
    manifest, records, _ = pushed
    digest, spec, data = a_chunk(pushed)
    out = memoryview(bytearray(spec.size))
    with pytest.raises(TagNotFound):
        repository.artifact("absent", NS)
    with pytest.raises(MalformedName):
        repository.artifact("../../etc", NS)
    with pytest.raises(MalformedName):
        repository.tags("Bad/Namespace")
    with pytest.raises(ChunkNotFound):
        repository.read_chunk(manifest.id, NS, "blake3:" + "0" * 64, spec, out)
    with pytest.raises(ArtifactNotFound):
        repository.read_chunk(manifest.id, "elsewhere", digest, spec, out)
    other = artifact(TOKENS, seed=78)
    push = repository.begin_push(manifest.fingerprint, NS)
    with pytest.raises(Divergence) as caught:
        push.offer(other[1])
    assert caught.value.details["block_key"] == records[0].key
    fresh = artifact([1, 2, 3], seed=79)
    missing = push.offer(fresh[1])
    with pytest.raises(ChunksMissing) as missed:
        push.commit(fresh[0])
    assert set(missed.value.details["missing"]) >= set(missing)
    with pytest.raises(DigestMismatch):
        push.put(missing[0], bytes(len(fresh[2][missing[0]])))
    with pytest.raises(SizeMismatch):
        push.put(missing[0], b"")
    with pytest.raises(ChunkNotFound):
        push.put("blake3:" + "0" * 64, data)
    with pytest.raises(SizeMismatch):
        push.put(missing[0], bytes(8 * 2**20 + 1))
    push.abort()
    with pytest.raises(PushNotFound):
        push.commit(fresh[0])


def test_large_offers_and_pages_are_split(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    made = artifact(list(range(40)), fingerprint(block_tokens=1), seed=80)
    monkeypatch.setattr(repo_service.client.http, "_OFFER_RECORDS", 7)
    monkeypatch.setattr("repo_service.api.artifact_routes._PAGE_BYTES", 3 * len(made[1][0].data))
    push_all(repository, made)
    assert repository.records(made[0], NS) == made[1]


def test_i8_a_page_of_blocks_holds_no_more_records_than_it_answers_with(
    service: Service, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = artifact(list(range(200, 240)), fingerprint(block_tokens=1))
    push_all(repository, made)
    monkeypatch.setattr("repo_service.api.artifact_routes._PAGE_BYTES", 3 * len(made[1][0].data))
    read: list[str] = []

    def counted(store: Store, namespace: str, key: str, digest: str) -> BlockRecord:
        read.append(key)
        return read_record(store, namespace, key, digest)

    monkeypatch.setattr("repo_service.services.repository.read_record", counted)
    page = service.json("GET", f"/v1/namespaces/{NS}/artifacts/{made[0].id}/blocks")
    assert len(page) <= 3
    assert len(read) <= len(page) + 1 + service.repository._store.concurrency


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.parametrize("position", [0, 37, -1])
def test_huggingface_hub_3643_right_size_and_wrong_bytes_are_an_error_that_names_the_chunk(
    service: Service, pushed: Made, position: int
) -> None:
    digest, spec, _ = a_chunk(pushed)

    def fault(answer: Answer) -> Answer:
        answer.body = flipped(answer.body, position % len(answer.body))
        return answer

    with tampered(service, fault) as repository, pytest.raises(ChunkCorrupt, match=digest) as caught:
        repository.read_chunk(pushed[0].id, NS, digest, spec, memoryview(bytearray(spec.size)))
    assert caught.value.details["digest"] == digest


@pytest.mark.parametrize("change", [-1, 1])
def test_a_chunk_of_another_length_is_an_error_that_names_it(service: Service, pushed: Made, change: int) -> None:
    digest, spec, _ = a_chunk(pushed)

    def fault(answer: Answer) -> Answer:
        answer.body = answer.body[:change] if change < 0 else answer.body + b"\0"
        answer.headers["content-length"] = str(len(answer.body))
        return answer

    with tampered(service, fault) as repository, pytest.raises(ChunkCorrupt, match=digest):
        repository.read_chunk(pushed[0].id, NS, digest, spec, memoryview(bytearray(spec.size)))


def test_a_transfer_that_is_cut_is_taken_up_again(service: Service, pushed: Made) -> None:
    digest, spec, data = a_chunk(pushed)
    out = bytearray(spec.size)

    def cut_twice(answer: Answer) -> Answer | None:
        if answer.count == 1:
            answer.body = answer.body[:10]
        return None if answer.count == 2 else answer

    with tampered(service, cut_twice) as repository:
        repository.read_chunk(pushed[0].id, NS, digest, spec, memoryview(out))
    assert out == data

    def cut(answer: Answer) -> Answer:
        answer.body = answer.body[:10]
        return answer

    with tampered(service, cut) as repository, pytest.raises(Unavailable):
        repository.read_chunk(pushed[0].id, NS, digest, spec, memoryview(out))


def test_an_altered_manifest_or_record_is_an_error(service: Service, pushed: Made) -> None:
    manifest, records, _ = pushed

    def fault(answer: Answer) -> Answer:
        answer.body = answer.body.replace(records[1].chunks["full/v"][0].encode(), b"blake3:" + b"0" * 64)
        answer.body = answer.body.replace(b'"version":1', b'"version":2')
        return answer

    with tampered(service, fault) as repository:
        with pytest.raises(DocumentCorrupt, match=manifest.id):
            repository.manifest(manifest.id, NS)
        with pytest.raises(DocumentCorrupt, match=records[1].key):
            repository.records(manifest, NS)


def test_a_lost_acknowledgement_of_a_commit_is_resolved(service: Service) -> None:
    made = artifact([3, 1, 4, 1, 5], seed=81)

    def lose_first(answer: Answer) -> Answer | None:
        return None if answer.count == 1 and not answer.path.endswith("/pushes") else answer

    with tampered(service, lose_first) as repository:
        info = push_all(repository, made)
    assert info == service.repository.artifact(made[0].id, NS)


def test_what_must_not_be_done_twice_is_not_asked_twice(service: Service) -> None:
    made = artifact([2, 7, 1, 8], seed=82)
    with client(service.url) as repository:
        push_all(repository, made)
        repository.set_tag(NS, "once", made[0].id)
    asked: list[str] = []

    def lose(answer: Answer) -> None:
        asked.append(answer.method)

    with tampered(service, lose) as repository:
        with pytest.raises(Unavailable, match="unknown"):
            repository.delete_tag(NS, "once")
        with pytest.raises(Unavailable, match="unknown"):
            repository.delete(made[0].id, NS)
    assert asked == ["DELETE", "DELETE"]


def test_a_busy_service_is_asked_again(service: Service) -> None:
    def busy(answer: Answer) -> Answer:
        if answer.count <= 2:
            answer.status, answer.headers = 503, {"retry-after": "0", "content-length": "0"}
            answer.body = b""
        return answer

    with tampered(service, busy) as repository:
        assert repository.info() == service.repository.info()


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"id": 5}', b'{"error": "no"}', b"[" * 5000, b"\xff"])
@pytest.mark.parametrize("status", [200, 302, 404, 502])
def test_nonsense_is_a_service_error(service: Service, pushed: Made, body: bytes, status: int) -> None:
    def nonsense(answer: Answer) -> Answer:
        answer.status, answer.body = status, body
        answer.headers = {
            "content-type": "text/html",
            "content-length": str(len(body)),
            "location": "http://127.0.0.1:9/",
        }
        return answer

    with tampered(service, nonsense) as repository:
        calls: list[Callable[[], object]] = [
            repository.info,
            lambda: repository.tags(NS) if body != b"[]" or status != 200 else repository.info(),
            lambda: repository.match(NS, []),
            lambda: repository.query(ArtifactQuery()),
            lambda: repository.records(pushed[0], NS),
            lambda: repository.begin_push(pushed[0].fingerprint, NS),
        ]
        for call in calls:
            with pytest.raises(ServiceError):
                call()


def test_an_error_code_of_a_later_version_is_a_service_error(service: Service) -> None:
    def newer(answer: Answer) -> Answer:
        answer.status = 418
        answer.body = json.dumps({"error": {"code": "teapot", "message": "short", "details": {"message": 1}}}).encode()
        answer.headers["content-length"] = str(len(answer.body))
        return answer

    with tampered(service, newer) as repository, pytest.raises(ServiceError, match="teapot: short") as caught:
        repository.info()
    assert caught.value.details == {"message": 1}


def test_a_service_that_is_not_there_is_unavailable() -> None:
    began = time.monotonic()
    with client("http://127.0.0.1:9") as repository, pytest.raises(Unavailable, match=re.escape("127.0.0.1:9")):
        repository.info()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/tmp/repository",
        "ftp://example.org",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://host:80/v1",
        "http://host?x=1",
        "http://user:secret@host",
        "http://[::1",
        "file:",
        "file://host/path",
        "s3//bucket",
    ],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(MalformedUrl):
        open_repository(url)


def test_open_repository_opens_each_kind(tmp_path: Path) -> None:
    with open_repository(f"file://{tmp_path}/r") as local, open_repository("memory:") as memory:
        assert local.info().repository_id != memory.info().repository_id
    with open_repository("https://example.org:8443/") as remote:
        assert remote.url == "https://example.org:8443"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(NotARepository):
        open_repository(f"file://{tmp_path}/other")


def test_the_token_goes_out_as_a_bearer_header() -> None:
    seen: list[str | None] = []

    class Answerer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_error(403)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answerer) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        for token in "a.Token-1", None:
            with open_repository(url, token) as repository, pytest.raises(KvgraftError):
                repository.info()
        server.shutdown()
    assert seen == ["Bearer a.Token-1", None]
    for token in "", "two words", "line\r\nX-Other: 1", "é":
        with pytest.raises(InvalidInput):
            open_repository(url, token)


def test_an_artifact_other_than_the_one_asked_for_is_a_service_error(service: Service, pushed: Made) -> None:
    other = artifact([4, 5, 6], seed=91)
    with open_repository(service.url) as repository:
        push_all(repository, other)
        theirs = repository.artifact(other[0].id, NS).model_dump_json().encode()

    def swap(answer: Answer) -> Answer:
        headers = {"content-type": "application/json", "content-length": str(len(theirs))}
        return replace(answer, headers=headers, body=theirs)

    with tampered(service, swap) as repository, pytest.raises(ServiceError):
        repository.artifact(pushed[0].id, NS)
