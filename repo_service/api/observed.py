"""The outermost layer of the application: each request gets an id, is counted, and leaves one line in the log."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from repo_service.api.errors import OUTCOME
from repo_service.api.logs import REQUEST_ID, access
from repo_service.api.metrics import Metrics

HEADER = "X-Request-Id"

NO_ROUTE = "none"

_NAME = HEADER.lower().encode()
_WELL_FORMED = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_PATH_SHOWN = 500
_CLIENT_LEFT = "499"

# Asked every few seconds, and of interest only when they fail.
_PROBES = frozenset(("/healthz", "/readyz", "/metrics"))


class Observed:
    """ASGI middleware; buffers nothing."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        request_id = _request_id(scope)
        # It is left in place: the server logs what failed in the same context.
        REQUEST_ID.set(request_id)
        identified = _NAME, request_id.encode()
        status, received, sent = _CLIENT_LEFT, 0, 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def send_counted(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = str(message["status"])
                message = {**message, "headers": [*message.get("headers", ()), identified]}
            else:
                sent += len(message.get("body", b""))
            await send(message)

        self._metrics.running.inc()
        try:
            await self._app(scope, receive_counted, send_counted)
        finally:
            self._metrics.running.dec()
            seconds = time.perf_counter() - began
            route = route_of(scope)
            self._metrics.answered(scope["method"], route, status, seconds, received, sent)
            if OUTCOME in scope:
                self._metrics.error(scope[OUTCOME])
            level = logging.DEBUG if route in _PROBES and status == "200" else logging.INFO
            if access.isEnabledFor(level):
                _log(level, scope, route, status, seconds, received, sent)


def route_of(scope: Scope) -> str:
    """The template of a request's route, the same for the default namespace and for one that the path names."""
    path = getattr(scope.get("route"), "path", None)
    if path is None:
        return NO_ROUTE
    # Depending on FastAPI's version the prefix is a part of it or not.
    path = str(path).removeprefix("/v1/namespaces/{namespace}")
    if scope["path"].startswith("/v1/") and not path.startswith("/v1/"):
        return f"/v1{path}"
    return path


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(HEADER, "")
    return given if _WELL_FORMED.fullmatch(given) else uuid.uuid4().hex


def _log(level: int, scope: Scope, route: str, status: str, seconds: float, received: int, sent: int) -> None:
    # Without the query, and escaped as the client sent it.
    path = scope.get("raw_path", b"")[:_PATH_SHOWN].partition(b"?")[0].decode("ascii", "backslashreplace")
    client = scope.get("client")
    fields: dict[str, Any] = {
        "method": scope["method"],
        "route": route,
        "path": path,
        "status": int(status),
        "code": scope.get(OUTCOME),
        "received_bytes": received,
        "sent_bytes": sent,
        "seconds": round(seconds, 6),
        "remote": f"{client[0]}:{client[1]}" if client else None,
    }
    text = "%(method)s %(path)s %(status)s, %(received_bytes)s B in, %(sent_bytes)s B out, %(seconds)s s, %(remote)s"
    access.log(level, text, fields, extra={"fields": fields})
