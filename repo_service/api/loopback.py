"""Without tokens, loopback only: the address to listen on, and the pages a browser may call from.

A web page elsewhere can reach a loopback service through the visitor's browser, by a form or by a
name of its own that resolves to 127.0.0.1; its Origin or Host header gives it away.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from repo_service.api.errors import OUTCOME, STATUS
from repo_service.domain.errors import AccessDenied, InvalidInput
from repo_service.settings import Settings


def check_host(settings: Settings) -> None:
    """Refuse to listen beyond loopback while nobody is authenticated.

    Raises
    ------
    InvalidInput
    """
    if settings.auth == "none" and not settings.insecure_any_host and not is_loopback(settings.host):
        raise InvalidInput(
            f"{settings.host!r} is not a loopback address, and no tokens are asked for, so anyone who reaches it could "
            "read, push and delete: use --auth tokens (KVGRAFT_AUTH) with tokens from kvgraft token create, or 127.0.0.1",
            host=settings.host,
        )


class LoopbackOnly:
    """ASGI middleware that refuses requests made through other names or by pages of other origins; buffers nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            for name, origin in ("Host", f"//{headers.get('host', '')}"), ("Origin", headers.get("origin")):
                if origin is not None and not is_loopback(_host(origin)):
                    error = AccessDenied(
                        f"the {name} header is {origin.removeprefix('//')[:200]!r}; without tokens this service answers "
                        "only to localhost and loopback addresses"
                    )
                    scope[OUTCOME] = error.code
                    await JSONResponse({"error": error.to_json()}, STATUS[error.code])(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _host(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and for loopback addresses."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
