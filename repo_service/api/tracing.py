"""Traces by OpenTelemetry, where its own environment variables ask for them: one span for each request.

The spans are made here, since the instrumentation for ASGI puts whole URLs into them and fails on a query that is
not UTF-8. OpenTelemetry is imported only where it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from repo_service.api.logs import REQUEST_ID
from repo_service.api.metrics import METHODS
from repo_service.api.observed import route_of
from repo_service.domain.errors import InvalidInput
from repo_service.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


@contextmanager
def exporting() -> Iterator[TracerProvider | None]:
    """A provider whose spans go where OpenTelemetry's variables say until the block ends; None if they name no place.

    Raises
    ------
    InvalidInput
        If OpenTelemetry is not installed, or another protocol than HTTP is asked for.
    """
    endpoint = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield None
        return
    protocol = next((value for name in _PROTOCOLS if (value := os.environ.get(name))), _PROTOCOL)
    if protocol != _PROTOCOL:
        raise InvalidInput(f"traces are sent by {_PROTOCOL}, not by {protocol[:40]!r}: set {_PROTOCOLS[1]}={_PROTOCOL}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidInput(
            f"{endpoint} asks for traces, and OpenTelemetry is not installed ({error}): "
            f"pip install 'kvgraft[otel]', or unset {endpoint}"
        ) from None
    own = Resource({"service.name": "kvgraft", "service.version": __version__})
    provider = TracerProvider(resource=Resource.create().merge(own).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    try:
        yield provider
    finally:
        provider.shutdown()


class Traced:
    """ASGI middleware that makes a span for each request, a child of the caller's if a ``traceparent`` came."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        self._app = app
        self._tracer = provider.get_tracer("kvgraft", __version__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        attributes = {
            "http.request.method": method,
            "url.scheme": scope["scheme"],
            "url.path": scope["path"],
            "client.address": (scope.get("client") or ("",))[0],
            "kvgraft.request_id": REQUEST_ID.get() or "",
        }
        parent = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope)))
        with self._tracer.start_as_current_span(
            method, parent, SpanKind.SERVER, attributes, set_status_on_exception=True
        ) as span:

            async def send_noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    route = route_of(scope)
                    span.update_name(f"{method} {route}")
                    span.set_attribute("http.route", route)
                    span.set_attribute("http.response.status_code", status)
                    if status >= 500:
                        span.set_attribute("error.type", str(status))
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            await self._app(scope, receive, send_noted)
