"""Deadlines of connections, where ASGI has no say: silent clients, stalled readers, too many of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from repo_service.api.errors import error_body
from repo_service.domain.errors import MalformedRequest, Unavailable
from repo_service.settings import Settings

MAX_HEADER_BYTES = 64 * 1024

_TLS_BUFFER = 64 * 1024


def connection_class(settings: Settings, refused: Callable[[int], None]) -> type[asyncio.Protocol]:
    """Uvicorn's HTTP connection with the limits of ``settings``; ``refused`` is told the status of each refusal."""
    return type("Connection", (BoundedConnection,), {"settings": settings, "refused": staticmethod(refused)})


class BoundedConnection(HttpToolsProtocol):
    """A connection that ends when its peer takes too long.

    A peer must send a whole request header within ``idle_seconds`` of connecting or of the last
    answer, and within ``stall_seconds`` of its first octet. It must take some of what is written to
    it in every ``stall_seconds``, and all of it within ``body_seconds``. Aborting, not closing: a
    closed connection would keep what a stalled reader has not taken. A header of more than 64 KiB is
    refused, and so is as much between two octets of a body or after the last: sizes of chunks, their
    extensions, trailers, which nobody reads.
    """

    settings: Settings
    refused: Callable[[int], None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._silence: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._unsent = 0
        self._in_header = True
        self._in_request = True
        self._header_bytes = 0
        self._body_moved = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if transport.get_extra_info("sslcontext") is not None:
            # As much as an unencrypted one holds; what lies behind it holds as much again.
            transport.set_write_buffer_limits(_TLS_BUFFER)
        limit = self.settings.connections
        if len(self.connections) > limit:
            self._refuse(503, Unavailable(f"{limit} connections are open, which is the limit: try again later"))
        else:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._silence)
        _cancel(self._stall)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._body_moved = False
        super().data_received(data)
        if self._in_request and not self._body_moved and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, MalformedRequest(f"the request header has more than {MAX_HEADER_BYTES} bytes"))

    def on_message_begin(self) -> None:
        self._in_header, self._in_request, self._header_bytes = True, True, 0
        super().on_message_begin()
        if self.cycle is None or self.cycle.response_complete:
            # A header that has begun trickles in no longer than a body may stall.
            _cancel(self._silence)
            wait = min(self.settings.idle_seconds, self.settings.stall_seconds)
            self._silence = self.loop.call_later(wait, self.transport.abort)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_header:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header, self._header_bytes = False, 0
        _cancel(self._silence)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_moved, self._header_bytes = True, 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_request = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadline = self.loop.time() + self.settings.body_seconds
        self._unsent = self.transport.get_write_buffer_size()
        self._watch_reader()

    def resume_writing(self) -> None:
        _cancel(self._stall)
        super().resume_writing()

    def _watch_reader(self) -> None:
        _cancel(self._stall)
        self._stall = self.loop.call_later(self.settings.stall_seconds, self._check_reader)

    def _check_reader(self) -> None:
        unsent, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if self._unsent < unsent and self.loop.time() < self._deadline:
            self._watch_reader()
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, MalformedRequest(f"{msg} It is not HTTP/1.1."))

    def _await_request(self) -> None:
        _cancel(self._silence)
        if not self.pipeline and not self.transport.is_closing():
            self._silence = self.loop.call_later(self.settings.idle_seconds, self.transport.abort)

    def _refuse(self, status: int, error: MalformedRequest | Unavailable) -> None:
        self.refused(status)
        body = json.dumps(error_body(error.code, error.message, error.details)).encode()
        self.transport.write(
            b"HTTP/1.1 %d \r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status, len(body), body)
        )
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
