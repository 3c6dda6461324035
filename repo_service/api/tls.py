"""TLS: the certificate, the time for handshakes, and bodies in pieces."""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from repo_service.domain.errors import InvalidInput
from repo_service.settings import Settings

PIECE = 128 * 1024

# Those of TLS 1.2 that are not broken; TLS 1.3 has no others.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


def tls_options(settings: Settings) -> dict[str, Any]:
    """What uvicorn is to be configured with; nothing without a certificate.

    Raises
    ------
    InvalidInput
        If the files are not a certificate and its key.
    """
    if not settings.tls_cert and not settings.tls_key:
        return {}
    if not settings.tls_cert or not settings.tls_key:
        raise InvalidInput("TLS needs both a certificate and its key: give --tls-cert and --tls-key")
    try:
        # A key behind a passphrase is an error, not a question on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, lambda: b"")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
        raise InvalidInput(
            f"{settings.tls_cert} and {settings.tls_key} can't be used for TLS ({reason}): give PEM files with the "
            "certificate's chain and its key, which has no passphrase"
        ) from None
    return {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key, "ssl_ciphers": _CIPHERS}


class TlsServer(uvicorn.Server):
    """A server whose peers have as long for a handshake as for a request header."""

    def __init__(self, config: uvicorn.Config, handshake_s: float) -> None:
        super().__init__(config)
        self._handshake_s = handshake_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.create_server = partial(loop.create_server, ssl_handshake_timeout=self._handshake_s)
        await super().startup(sockets)


class InPieces:
    """ASGI middleware that sends bodies in pieces.

    A TLS transport encrypts all that it is given and passes it on to one that takes all of it; how a
    reader gets on shows only where the next piece has to wait. Given whole, a chunk would be held twice,
    and a reader that is slow would be taken for one that stalls.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_pieces(message: Message) -> None:
            body = memoryview(message.get("body", b""))
            while len(body) > PIECE:
                await send({"type": "http.response.body", "body": body[:PIECE], "more_body": True})
                body = body[PIECE:]
            await send({**message, "body": body} if "body" in message else message)

        await self._app(scope, receive, send_pieces)
