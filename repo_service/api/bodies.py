"""Request bodies: read within a limit and a deadline, never by form (fastapi #2578)."""

from __future__ import annotations

import asyncio
import email.message
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from anyio import to_thread
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from repo_service.api.access import GuardedRoute
from repo_service.api.context import Context
from repo_service.domain.canonical import parse_loose_json
from repo_service.domain.errors import MalformedRequest, SizeMismatch, TooLarge
from repo_service.settings import Settings

MAX_JSON_BYTES = 20 * 2**20

# Larger documents take turns, since a parsed one needs several times its size.
_SMALL = 256 * 1024

# Lists, objects and their items, at most: parsed, each may need 100 bytes and more.
MAX_JSON_VALUES = 2**19
MAX_MANIFEST_VALUES = 2**21

# Bytes a second: a body that trickles in gets no more time than one that stalls.
_SLOWEST = 16 * 1024

# A document that comes without a length, in chunks, has at most this size.
_UNANNOUNCED = 8 * 2**20

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)


def content_length(request: Request) -> int | None:
    """The body's announced length, or None for a chunked body.

    Raises
    ------
    HTTPException
        415, if the body is compressed: what it would swell to, nobody knows before.
    """
    coding = request.headers.get("content-encoding", "")
    if coding.strip().lower() not in ("", "identity"):
        raise HTTPException(
            415,
            f"the body has the Content-Encoding {coding[:40]!r}; send it without one",
            {"Accept-Encoding": "identity"},
        )
    text = request.headers.get("content-length")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise MalformedRequest(f"Content-Length is {text[:40]!r}, which is no number of bytes")
    return int(text)


async def read_exactly(request: Request, out: memoryview, settings: Settings) -> None:
    """Fill ``out`` with a body of exactly its length.

    Raises
    ------
    SizeMismatch
    """
    position = 0
    async for piece in _pieces(request, settings):
        end = position + len(piece)
        if end > len(out):
            raise SizeMismatch(f"the body has more than the {len(out)} bytes announced")
        out[position:end] = piece
        position = end
    if position != len(out):
        raise SizeMismatch(f"the body has {position} bytes; {len(out)} were announced")


async def read_document(request: Request, context: Context, limit: int, use: Callable[[bytes], Awaitable[Any]]) -> Any:
    """Read a body of at most ``limit`` bytes and hand it to ``use``; large ones take turns for both.

    Raises
    ------
    TooLarge, Unavailable
    """
    length = content_length(request)
    if length is not None and length > limit:
        raise TooLarge(f"the body has {length} bytes; the limit is {limit}", size=length, limit=limit)
    if length is None:
        limit = min(limit, _UNANNOUNCED)
    if length is not None and length <= _SMALL:
        return await use(await _read(request, limit, context.settings))
    async with context.documents.passed():
        return await use(await _read(request, limit, context.settings))


class DocumentRoute(GuardedRoute):
    """A route whose JSON body is read within limits and parsed strictly: no duplicate keys, no deep nesting."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def limited(request: Request) -> Response:
            if self.body_field is None:
                return await handle(request)

            async def use(data: bytes) -> Response:
                return await handle(_ParsedRequest(request, data, await _parse(data)))

            _require_json(request)
            answer: Response = await read_document(request, request.app.state.context, MAX_JSON_BYTES, use)
            return answer

        return limited


class _ParsedRequest(Request):
    def __init__(self, request: Request, data: bytes, value: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._data, self._value = data, value

    async def body(self) -> bytes:
        return self._data

    async def json(self) -> Any:
        return self._value


def check_density(data: bytes, limit: int) -> bytes:
    """Return ``data`` if its JSON has at most ``limit`` lists, objects and further items of them.

    Raises
    ------
    TooLarge
    """
    if _signs(data) > limit:
        # Those inside of strings do not count.
        found = position = 0
        for string in _STRING.finditer(data):
            found += _signs(data[position : string.start()])
            position = string.end()
            if found > limit:
                break
        if found + _signs(data[position:]) > limit:
            raise TooLarge(f"the body has more than {limit} values, which is the limit", limit=limit)
    return data


def _signs(data: bytes) -> int:
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def _require_json(request: Request) -> None:
    """A page elsewhere can't send this type without asking first, so it guards services on loopback."""
    message = email.message.Message()
    message["content-type"] = request.headers.get("content-type", "")
    if message.get_content_type() != "application/json":
        raise HTTPException(415, "the body must be JSON, with Content-Type: application/json")


async def _parse(data: bytes) -> Any:
    def parse() -> Any:
        return parse_loose_json(check_density(data, MAX_JSON_VALUES), what="request body")

    return parse() if len(data) <= _SMALL else await to_thread.run_sync(parse)


async def _read(request: Request, limit: int, settings: Settings) -> bytes:
    data = bytearray()
    async for piece in _pieces(request, settings):
        if len(data) + len(piece) > limit:
            raise TooLarge(
                f"the body has more than {limit} bytes, which is the limit for it; a chunked body has at most "
                f"{_UNANNOUNCED}, so send a larger one with its Content-Length",
                limit=limit,
            )
        data += piece
    return bytes(data)


async def _pieces(request: Request, settings: Settings) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    began, moved = clock(), 0
    more = True
    while more:
        slowest = began + settings.stall_seconds + moved / _SLOWEST
        try:
            async with asyncio.timeout_at(
                min(clock() + settings.stall_seconds, slowest, began + settings.body_seconds)
            ):
                message = await request.receive()
        except TimeoutError:
            raise HTTPException(408, "the body did not arrive in time", {"Connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        piece: bytes = message.get("body", b"")
        moved += len(piece)
        yield piece
