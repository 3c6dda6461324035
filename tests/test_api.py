"""The HTTP service as a whole: a real server on loopback, its routes, and the shape of its errors."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import urllib3
from places import Place
from synthetic import artifact, fingerprint

from repo_service.api.app import create_app
from repo_service.api.errors import HTTP_CODES, STATUS
from repo_service.api.server import address, listen, make_server
from repo_service.domain.digest import sha256_digest
from repo_service.domain.errors import error_types
from repo_service.domain.manifest import Manifest
from repo_service.domain.record import BlockRecord
from repo_service.services.opening import open_local
from repo_service.services.repository import LocalRepository
from repo_service.settings import Settings

pytestmark = pytest.mark.everywhere

DOCUMENT = Path(__file__).parent.parent / "docs" / "http-api.md"

TOKENS = list(range(100, 140))


@dataclass
class Service:
    """A running service and the repository behind it."""

    url: str
    repository: LocalRepository
    root: Place

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> urllib3.BaseHTTPResponse:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return urllib3.request(
            method, self.url + path, body=body, headers=names, retries=False, redirect=False, timeout=60
        )

    def json(self, method: str, path: str, body: Any = None, status: int = 200) -> Any:
        data = None if body is None else json.dumps(body).encode()
        answer = self.request(method, path, data, Content_Type="application/json")
        assert answer.status == status, answer.data
        return json.loads(answer.data) if answer.data else None

    def error(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str]:
        """Status and code of an answer that must be an error of the one shape."""
        return error_of(self.request(method, path, body, **{"Content_Type": "application/json", **headers}))


def error_of(answer: urllib3.BaseHTTPResponse) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/json"
    value = json.loads(answer.data)
    assert set(value) == {"error"}
    assert set(value["error"]) == {"code", "message", "details"}
    assert value["error"]["message"]
    assert isinstance(value["error"]["details"], dict)
    assert value["error"]["code"] in {*STATUS, *HTTP_CODES.values()}
    assert "Traceback" not in answer.data.decode()
    return answer.status, value["error"]["code"]


@contextmanager
def serving(
    root: Place, tracer_provider: Any = None, *, send_buffer: int | None = None, **settings: Any
) -> Iterator[Service]:
    """A service in this process; its connections take the ``send_buffer`` of bytes from the socket that listens."""
    with open_local(root.as_uri()) as repository:
        configured = Settings(port=0, **settings)
        server = make_server(repository, configured, tracer_provider)
        with listen(configured) as listener:
            if send_buffer is not None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                while not server.started:
                    assert thread.is_alive()
                    time.sleep(0.01)
                yield Service(address(listener, "https" if configured.tls_cert else "http"), repository, root)
            finally:
                server.should_exit = True
                thread.join()


@pytest.fixture(scope="module")
def service(module_root: Place) -> Iterator[Service]:
    with serving(module_root) as running:
        yield running


Made = tuple[Manifest, list[BlockRecord], dict[str, bytes]]


def push_over_http(service: Service, made: Made, prefix: str = "/v1") -> dict[str, Any]:
    manifest, records, chunks = made
    push = service.json("POST", f"{prefix}/pushes", {"fingerprint": manifest.fingerprint.sections}, 201)["id"]
    tokens = None if manifest.tokens is None else {"count": manifest.token_count, "chunks": list(manifest.tokens)}
    offer = {"records": [json.loads(record.data) for record in records], "tokens": tokens}
    for digest in service.json("POST", f"{prefix}/pushes/{push}/blocks", offer)["missing"]:
        assert service.request("PUT", f"{prefix}/pushes/{push}/chunks/{digest}", chunks[digest]).status == 204
    answer = service.request("POST", f"{prefix}/pushes/{push}/commit", manifest.data)
    assert answer.status == 201, answer.data
    return dict(json.loads(answer.data))


@pytest.mark.everywhere(always=True)
@pytest.mark.parametrize(("prefix", "namespace"), [("/v1", "default"), ("/v1/namespaces/team-a", "team-a")])
def test_an_artifact_is_pushed_looked_up_read_and_deleted(service: Service, prefix: str, namespace: str) -> None:
    made = artifact(TOKENS, annotations={"author": "someone"}, text="a text to be found")
    manifest, records, chunks = made
    info = push_over_http(service, made, prefix)
    path = f"{prefix}/artifacts/{manifest.id}"
    assert info["id"] == manifest.id
    assert info["namespace"] == namespace
    assert service.json("GET", path) == info
    assert service.json("GET", f"{prefix}/artifacts/{manifest.id[:20]}") == info
    assert service.request("GET", f"{path}/manifest").data == manifest.data
    assert service.json("GET", f"{path}/blocks") == [json.loads(record.data) for record in records]
    assert service.json("GET", f"{path}/blocks?start=1&count=1") == [json.loads(records[1].data)]
    assert service.json("GET", f"{path}/blocks?start={len(records)}") == []
    for digest, data in chunks.items():
        assert service.request("GET", f"{path}/chunks/{digest}").data == data
    keys = [record.key for record in records]
    matched = service.json("POST", f"{prefix}/match", {"keys": keys})
    assert matched == {"artifact_id": manifest.id, "blocks": len(records), "tokens": len(TOKENS)}
    assert service.json("POST", f"{prefix}/match", {"keys": [sha256_digest(b"none")]}) is None
    page = service.json("POST", f"{prefix}/artifacts/query", {"annotations": {"author": "someone"}})
    assert page["items"] == [info | {"last_used_at": page["items"][0]["last_used_at"]}]
    tag = service.json("PUT", f"{prefix}/tags/latest", {"artifact_id": manifest.id})
    assert service.json("GET", f"{prefix}/tags") == [tag]
    assert service.json("GET", f"{prefix}/artifacts/latest")["tags"] == ["latest"]
    assert service.request("DELETE", f"{prefix}/tags/latest").status == 204
    report = service.json("POST", f"{path}/check")
    assert report == {
        "artifact_id": manifest.id,
        "chunks": len(chunks),
        "bytes": sum(map(len, chunks.values())),
        "corrupt": [],
    }
    assert service.json("GET", f"{prefix}/stats")["artifacts"] == 1
    assert service.json("GET", f"{prefix}/divergences") == []
    assert service.json("DELETE", path)["artifact_id"] == manifest.id
    assert service.error("GET", path) == (404, "artifact_not_found")


def test_the_service_says_what_it_is_and_that_it_can_work(service: Service) -> None:
    assert service.json("GET", "/v1/info") == service.repository.info().model_dump()
    assert service.json("GET", "/healthz") == service.json("GET", "/readyz") == {"status": "ok"}
    assert service.json("POST", "/v1/reindex")["corrupt"] == []


@pytest.mark.everywhere(but={"s3": "a bucket is not moved away; test_s3_faults has one that does not answer"})
def test_readiness_needs_the_store(root: Place) -> None:
    gone = root.with_name("gone")
    with serving(root) as service:
        root.rename(gone)
        assert service.request("GET", "/healthz").status == 200
        status, _ = service.error("GET", "/readyz")
        assert status >= 500
        gone.rename(root)


def test_equal_keys_with_other_bytes_are_a_conflict(service: Service) -> None:
    tokens = [7] * 16
    made = artifact(tokens)
    push_over_http(service, made, "/v1/namespaces/divergent")
    manifest, records, _ = artifact(tokens, seed=1)
    push = service.json("POST", "/v1/namespaces/divergent/pushes", {"fingerprint": manifest.fingerprint.sections}, 201)[
        "id"
    ]
    answer = service.json(
        "POST", f"/v1/namespaces/divergent/pushes/{push}/blocks", {"records": [json.loads(records[0].data)]}, 409
    )
    assert answer["error"]["code"] == "block_divergence"
    assert answer["error"]["details"]["block_key"] == records[0].key
    (divergence,) = service.json("GET", "/v1/namespaces/divergent/divergences")
    assert divergence["block_key"] == records[0].key


def test_a_commit_without_its_chunks_is_refused_and_an_aborted_push_is_gone(service: Service) -> None:
    manifest, records, _ = artifact([1, 2, 3], seed=5)
    push = service.json("POST", "/v1/pushes", {"fingerprint": manifest.fingerprint.sections}, 201)["id"]
    offer = {"records": [json.loads(record.data) for record in records], "tokens": None}
    missing = service.json("POST", f"/v1/pushes/{push}/blocks", offer)["missing"]
    answer = service.request("POST", f"/v1/pushes/{push}/commit", manifest.data)
    assert error_of(answer) == (409, "chunks_missing")
    assert set(missing) <= set(json.loads(answer.data)["error"]["details"]["missing"])
    assert service.request("DELETE", f"/v1/pushes/{push}").status == 204
    assert service.error("POST", f"/v1/pushes/{push}/commit", manifest.data) == (404, "push_not_found")


def test_every_error_code_has_a_status() -> None:
    assert set(STATUS) == set(error_types())
    assert all(400 <= status < 600 for status in STATUS.values())


def routes(service: Service) -> list[tuple[str, str]]:
    paths = service.json("GET", "/v1/openapi.json")["paths"]
    return [(method.upper(), path) for path, methods in paths.items() for method in methods]


NO_DIGEST = {"sha256": "sha256:" + "0" * 64, "blake3": "blake3:" + "0" * 64}


def test_every_route_answers_bad_input_with_the_one_error_shape(service: Service) -> None:
    for method, path in routes(service):
        if path in {"/healthz", "/readyz", "/metrics", "/v1/info", "/v1/reindex"} or method == "HEAD":
            continue
        for part in "%00", "a" * 3000, "..%2f..%2fetc", "sha256:xyz", "%F0%9F%92%A9":
            url = re.sub(r"\{[^}]*\}", part, path)
            if url != path and method != "DELETE":
                status, _ = service.error(method, url, b"{}" if method in {"POST", "PUT"} else None)
                assert status in {400, 404, 409, 410, 413, 422}, (method, url, status)


def test_every_route_answers_what_is_missing_with_the_one_error_shape(service: Service) -> None:
    made = artifact([1, 2, 3])
    bodies = {
        "/tags/{name}": {"artifact_id": made[0].id},
        "/pushes/{push_id}/blocks": {"records": []},
        "/pushes/{push_id}/commit": json.loads(made[0].data),
        "/pushes/{push_id}/uploads": {"digests": [NO_DIGEST["blake3"]]},
    }
    values = {"artifact_id": NO_DIGEST["sha256"], "digest": NO_DIGEST["blake3"], "ref": "absent", "name": "absent"}
    checked = 0
    for method, path in routes(service):
        if "{" not in path.replace("{namespace}", "") or method == "HEAD" or path.startswith("/v1/tokens"):
            continue
        url = path
        for name, value in {**values, "push_id": "0" * 32, "namespace": "nobody", "key": "zarr.json"}.items():
            url = url.replace(f"{{{name}}}", value)
        body = next((value for end, value in bodies.items() if path.endswith(end)), None)
        data = None if body is None else made[0].data if path.endswith("commit") else json.dumps(body).encode()
        if method == "DELETE" and path.endswith("/pushes/{push_id}"):
            assert service.request(method, url).status == 204
            continue
        status, code = service.error(method, url, b"" if method == "PUT" and data is None else data)
        # A Zarr reader would take 404 for the fill value.
        expected = 410 if "/zarr/" in path else 404
        assert (status, code.endswith("not_found")) == (expected, True), (method, path, status, code)
        checked += 1
    assert checked > 20


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/", (404, "not_found")),
        ("GET", "/v1/artifacts/", (404, "not_found")),
        ("GET", "/v2/info", (404, "not_found")),
        ("POST", "/v1/info", (405, "method_not_allowed")),
        ("PATCH", "/v1/tags/latest", (405, "method_not_allowed")),
        ("GET", "/v1/namespaces/Upper/tags", (400, "malformed_name")),
        ("DELETE", "/v1/namespaces/%00/pushes/0", (400, "malformed_name")),
        ("GET", "/v1/artifacts/x/blocks?start=-1", (422, "malformed_request")),
        ("GET", "/v1/artifacts/x/blocks?count=1001", (422, "malformed_request")),
        ("GET", f"/v1/artifacts/{NO_DIGEST['sha256']}/chunks/sha256:00", (400, "malformed_digest")),
        ("DELETE", "/v1/artifacts/latest", (400, "malformed_digest")),
    ],
)
def test_refusals_of_http_itself_have_the_one_error_shape(
    service: Service, method: str, path: str, expected: tuple[int, str]
) -> None:
    assert service.error(method, path) == expected


def test_an_unexpected_exception_is_logged_and_not_shown(
    root: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: LocalRepository) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(LocalRepository, "info", fail)
    with serving(root) as service:
        answer = service.request("GET", "/v1/info")
    assert error_of(answer) == (500, "internal_error")
    assert b"secret" not in answer.data
    assert "a secret" in caplog.text


def test_openapi_describes_every_route_with_bodies_and_errors(service: Service) -> None:
    document = service.json("GET", "/v1/openapi.json")
    text = json.dumps(document)
    assert "HTTPValidationError" not in text
    for reference in set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', text)):
        assert reference in document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name = f"{method} {path}"
            assert operation.get("summary"), name
            assert operation.get("description"), name
            described = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
            assert described == set(re.findall(r"\{(\w+)", path)), name
            assert "requestBody" in operation or method != "put", name
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]
            assert error == {"$ref": "#/components/schemas/ErrorAnswer"}, name


def test_the_document_names_exactly_the_routes_of_the_application(service: Service) -> None:
    documented = set(re.findall(r"^### `(\w+) (/\S*)`$", DOCUMENT.read_text(), re.MULTILINE))
    below = "/v1/namespaces/{namespace}"
    served = set(routes(service))
    assert documented == {(method, path) for method, path in served if not path.startswith(below)}
    in_namespaces = {(method, path.removeprefix(below)) for method, path in served if path.startswith(below)}
    section = DOCUMENT.read_text().split("## Namespaces")[1]
    assert in_namespaces == {
        (method, path.removeprefix("/v1"))
        for method, path in re.findall(r"^### `(\w+) (/\S*)`$", section, re.MULTILINE)
    }


def test_the_document_has_every_error_code_with_its_status() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", DOCUMENT.read_text(), re.MULTILINE)
    expected = {**STATUS, **{code: status for status, code in HTTP_CODES.items()}}
    assert {code: int(status) for code, status in rows} == expected


def test_create_app_leaves_the_repository_to_its_caller() -> None:
    with open_local("memory:") as repository:
        create_app(repository, Settings())
        repository.begin_push(fingerprint(), "default").abort()
