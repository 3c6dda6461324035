"""What the service counts: figures that follow what was done, and labels with few values."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pushing import push
from synthetic import artifact
from test_api import Service, serving

from repo_service.client import open_repository
from repo_service.domain.errors import ChunkCorrupt, Divergence
from repo_service.services.repository import LocalRepository

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(service: Service) -> Samples:
    answer = service.request("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.data.decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((f"kvgraft_{name}", tuple(sorted(labels.items()))), 0.0)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path / "repository") as running:
        yield running


def test_what_pushes_and_readers_do_is_counted(service: Service) -> None:
    made = artifact(range(40))
    manifest, records, contents = made
    with open_repository(service.url) as repository:
        _, sent = push(repository, made)
        assert push(repository, made)[1] == []
        digest = records[0].chunks["full/k"][0]
        spec = manifest.layout.arrays["full/k"].chunk
        out = memoryview(bytearray(spec.size))
        repository.read_chunk(manifest.id, "default", digest, spec, out)
        keys = [record.key for record in records]
        assert repository.match("default", keys)
        assert repository.match("default", ["sha256:" + "0" * 64]) is None
    found = scrape(service)
    assert value(found, "pushes_begun_total") == value(found, "pushes_committed_total") == 2
    assert value(found, "chunks_offered_total") == 2 * len(contents)
    assert value(found, "chunks_missing_total") == value(found, "chunks_stored_total") == len(sent)
    assert value(found, "chunk_stored_bytes_total") == sum(len(contents[name]) for name in sent)
    assert value(found, "chunks_read_total") == 1
    assert value(found, "chunk_read_bytes_total") == len(contents[digest])
    assert value(found, "matches_total", result="hit") == value(found, "matches_total", result="miss") == 1
    assert value(found, "match_blocks_asked_total") == len(keys) + 1
    assert value(found, "match_blocks_found_total") == len(keys)
    chunk = {"method": "GET", "route": "/v1/artifacts/{artifact_id}/chunks/{digest}"}
    assert value(found, "http_requests_total", **chunk, status="200") == 1
    assert value(found, "http_request_seconds_count", **chunk) == 1
    assert value(found, "http_sent_bytes_total", **chunk) == len(contents[digest])
    sending = {"method": "PUT", "route": "/v1/pushes/{push_id}/chunks/{digest}"}
    assert value(found, "http_received_bytes_total", **sending) == sum(len(contents[name]) for name in sent)
    assert value(found, "pushes_running") == 0
    assert value(found, "connections") >= 1


def test_labels_hold_no_word_of_a_client(service: Service) -> None:
    for path in "/v1/tags", "/v1/namespaces/team-a/tags":
        service.json("GET", path)
    assert service.request("GET", "/v1/tags", None, Host="secret.example").status == 403
    for path in "/v1/namespaces/secret-x/artifacts/secret-y", "/secret-z", "/v1/artifacts/secret/zarr/a/b/c":
        service.request("GET", path)
    service.request("PROPFIND", "/secret")
    service.request("POST", "/v1/info?secret")
    found = scrape(service)
    assert value(found, "http_requests_total", method="GET", route="/v1/tags", status="200") == 2
    assert value(found, "http_requests_total", method="GET", route="/v1/artifacts/{ref}", status="404") == 1
    assert value(found, "http_requests_total", method="GET", route="none", status="404") == 1
    assert value(found, "http_requests_total", method="other", route="none", status="404") == 1
    assert value(found, "http_requests_total", method="POST", route="/v1/info", status="405") == 1
    assert value(found, "errors_total", code="tag_not_found") == 2
    assert value(found, "errors_total", code="method_not_allowed") == 1
    assert value(found, "errors_total", code="access_denied") == 1
    assert not any("secret" in text or "team-a" in text for _, labels in found for _, text in labels)


def test_i3_damage_and_i2_divergences_are_counted_wherever_they_are_found(service: Service) -> None:
    made = artifact([7] * 40)
    manifest, records, _ = made
    with open_repository(service.url) as repository:
        push(repository, made)
        with pytest.raises(Divergence):
            push(repository, artifact([7] * 40, seed=1))
        digest = records[0].chunks["full/k"][0]
        name = digest.removeprefix("blake3:")
        path = service.root / "chunks" / name[:2] / name[2:]
        path.chmod(0o644)
        path.write_bytes(bytes(path.stat().st_size))
        spec = manifest.layout.arrays["full/k"].chunk
        with pytest.raises(ChunkCorrupt):
            repository.read_chunk(manifest.id, "default", digest, spec, memoryview(bytearray(spec.size)))
        assert repository.check(manifest.id, "default").corrupt == [digest]
        assert repository.scrub().damaged == 1
        orphan = service.root / "chunks" / "00" / ("0" * 62)
        orphan.parent.mkdir(exist_ok=True)
        orphan.write_bytes(b"abc")
        repository.collect_garbage(grace_s=0)
    found = scrape(service)
    assert value(found, "divergences_total") == 1
    assert value(found, "errors_total", code="block_divergence") == 1
    for found_by in "check", "scrub":
        assert value(found, "verification_failures_total", found_by=found_by) == 1
    # A client that may repeat a read does.
    assert value(found, "verification_failures_total", found_by="request") >= 1
    assert value(found, "scrub_damaged") == 1
    for job in "gc", "scrub":
        assert value(found, "job_runs_total", kind=job, outcome="ok") == 1
        assert value(found, "job_success_timestamp_seconds", kind=job) > 1.7e9
    assert value(found, "gc_removed_total", kind="chunks") == 1


def test_a_job_that_fails_is_counted(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repo_service.services.repository.scrub", lambda *_, **__: 1 // 0)
    headers = {"Content_Type": "application/json", "Connection": "close"}
    assert service.request("POST", "/v1/scrub", b"{}", **headers).status == 500
    found = scrape(service)
    assert value(found, "job_runs_total", kind="scrub", outcome="failed") == 1
    assert value(found, "job_runs_total", kind="scrub", outcome="ok") == 0


def test_queues_show_who_runs_waits_and_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest, records, contents = artifact(range(40))
    reading, go_on = threading.Event(), threading.Event()
    read = LocalRepository.read_chunk

    def read_later(*args: object) -> None:
        reading.set()
        assert go_on.wait(30)
        read(*args)  # type: ignore[arg-type]

    with serving(tmp_path / "repository", chunk_transfers=1, queue=0) as service:
        push(service.repository, (manifest, records, contents))
        monkeypatch.setattr(LocalRepository, "read_chunk", read_later)
        path = f"/v1/artifacts/{manifest.id}/chunks/{records[0].chunks['full/k'][0]}"
        thread = threading.Thread(target=service.request, args=("GET", path))
        thread.start()
        try:
            assert reading.wait(30)
            assert service.error("GET", path) == (503, "unavailable")
            during = scrape(service)
        finally:
            go_on.set()
            thread.join()
        after = scrape(service)
    assert value(during, "queue_limit", queue="chunks") == 1
    assert value(during, "queue_running", queue="chunks") == value(during, "queue_running", queue="chunk_threads") == 1
    assert value(during, "http_requests_running") == 2
    assert value(during, "queue_refused_total", queue="chunks") == 1
    assert value(after, "queue_running", queue="chunks") == 0
    assert value(after, "queue_limit", queue="threads") > 0


def test_connections_refused_are_counted(service: Service) -> None:
    import socket
    from urllib.parse import urlsplit

    parts = urlsplit(service.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30) as connection:
        connection.sendall(b"this is not HTTP\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert value(scrape(service), "connections_refused_total", status="400") == 1


def test_several_applications_of_a_process_count_for_themselves(service: Service, tmp_path: Path) -> None:
    service.json("GET", "/v1/info")
    with serving(tmp_path / "other") as other:
        assert value(scrape(other), "http_requests_total", method="GET", route="/v1/info", status="200") == 0
    assert value(scrape(service), "http_requests_total", method="GET", route="/v1/info", status="200") == 1


def test_up_says_which_part_answers(service: Service) -> None:
    found = scrape(service)
    assert value(found, "up", part="store") == value(found, "up", part="index") == 1
    assert json.loads(service.request("GET", "/readyz").data) == {"status": "ok"}
