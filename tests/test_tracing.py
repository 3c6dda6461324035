"""Traces: a span for each request, sent where OpenTelemetry's own variables say, and nothing of it otherwise."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
import urllib3
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from test_api import Service, serving
from test_logs import served

from repo_service.api import serve
from repo_service.domain.errors import InvalidInput
from repo_service.services.repository import LocalRepository
from repo_service.settings import Settings


@contextmanager
def traced(root: Path) -> Iterator[tuple[Service, InMemorySpanExporter]]:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with serving(root, provider) as service:
        yield service, spans


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_a_request_is_a_span_below_its_callers(tmp_path: Path) -> None:
    with traced(tmp_path / "repository") as (service, spans):
        trace, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
        headers = {"traceparent": f"00-{trace}-{caller}-01", "X-Request-Id": "abc", "Authorization": "Bearer s3cret"}
        service.request("GET", "/v1/namespaces/team-a/artifacts/absent?token=s3cret&x=%ff", None, **headers)
        service.request("GET", "/nowhere")
    first, second = spans.get_finished_spans()
    assert (first.name, first.kind) == ("GET /v1/artifacts/{ref}", SpanKind.SERVER)
    assert first.parent is not None
    assert f"{first.context.trace_id:032x}" == trace
    assert f"{first.parent.span_id:016x}" == caller
    expected = {
        "http.request.method": "GET",
        "http.route": "/v1/artifacts/{ref}",
        "http.response.status_code": 404,
        "url.path": "/v1/namespaces/team-a/artifacts/absent",
        "client.address": "127.0.0.1",
        "kvgraft.request_id": "abc",
    }
    assert expected.items() <= attributes(first).items()
    assert first.status.status_code is StatusCode.UNSET
    assert "s3cret" not in first.to_json()
    assert (second.name, second.parent) == ("GET none", None)


def test_a_fault_marks_the_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalRepository, "info", lambda _: 1 // 0)
    with traced(tmp_path / "repository") as (service, spans):
        service.request("GET", "/v1/info", None, Connection="close")
    (span,) = spans.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "500"


class _Collector(BaseHTTPRequestHandler):
    bodies: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_standard_variable_sends_spans_to_a_collector(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), _Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{collector.server_port}"
            with served(tmp_path / "repository", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint) as (url, _):
                urllib3.request("GET", f"{url}/v1/info")
        finally:
            collector.shutdown()
            thread.join()
    # Sent at the latest when the service ends.
    ((path, body),) = _Collector.bodies
    assert path == "/v1/traces"
    assert b"GET /v1/info" in body
    assert b"kvgraft" in body


def test_traces_without_opentelemetry_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidInput, match=r"OTEL_EXPORTER_OTLP_ENDPOINT .* pip install 'kvgraft\[otel\]'"):
        serve(Settings(repo="memory:", port=0))


def test_another_protocol_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(InvalidInput, match="grpc"):
        serve(Settings(repo="memory:", port=0))
