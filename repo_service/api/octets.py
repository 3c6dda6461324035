"""Answers of raw octets: conditional requests, single ranges, and chunks sent from reused memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from anyio import to_thread
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from repo_service.api.context import Context
from repo_service.api.gates import Gate, Loan

OCTETS = "application/octet-stream"

# By id or digest, the octets behind a URL never change; through a tag they may.
IMMUTABLE = "private, max-age=31536000, immutable"
REVALIDATED = "private, no-cache"

BINARY = {"schema": {"type": "string", "format": "binary"}}

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)

# Twice what the server's write buffer may hold when it lets a sender go on.
_TAIL = 128 * 1024


def etag(digest: str) -> str:
    return f'"{digest}"'


def is_fresh(request: Request, tag: str) -> bool:
    """True if the client's copy (``If-None-Match``) is current, so that 304 is the answer."""
    condition = request.headers.get("if-none-match")
    if condition is None:
        return False
    return condition.strip() == "*" or any(t.strip().removeprefix("W/") == tag for t in condition.split(","))


def select(request: Request, size: int, tag: str, headers: Mapping[str, str]) -> tuple[int, range, Mapping[str, str]]:
    """Status, part and headers of the answer: the single range that was asked for, otherwise the whole.

    Raises
    ------
    HTTPException
        416, if the range lies outside.
    """
    headers = {"Accept-Ranges": "bytes", **headers}
    match = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    part = None
    if match is not None and request.headers.get("if-range", tag) == tag:
        part = _part(match[1], match[2], size)
    if part is None:
        return 200, range(size), headers
    if not part:
        raise HTTPException(416, f"the range lies outside of {size} bytes", {"Content-Range": f"bytes */{size}"})
    return 206, part, {**headers, "Content-Range": f"bytes {part.start}-{part.stop - 1}/{size}"}


def _part(first: str, last: str, size: int) -> range | None:
    """The bytes named by ``first-last``, or None if that is no range."""
    if first:
        if last and int(last) < int(first):
            return None
        return range(int(first), min(size, int(last) + 1) if last else size)
    return range(max(0, size - int(last)), size) if last else None


@dataclass(frozen=True)
class Chunk:
    """A chunk that may be asked for.

    Parameters
    ----------
    digest, size
        What the client is to get; bytes.
    read
        Reads it, verified, into memory of that size.
    cache
        The answer's ``Cache-Control``.
    """

    digest: str
    size: int
    read: Callable[[memoryview], None]
    cache: str


class ChunkResponse(Response):
    """A chunk, or part of one, in lent memory that goes back once nothing refers to it."""

    media_type = OCTETS

    def __init__(self, data: memoryview, loan: Loan, status_code: int, headers: Mapping[str, str]) -> None:
        super().__init__(data, status_code, headers)
        self._data = data
        self._loan = loan

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        head = max(0, len(self._data) - _TAIL)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._data[:head], "more_body": True})
            # The server's write buffer may still refer to what was sent last, so that is a copy:
            # when the empty piece is through, nothing refers to the lent memory.
            await send({"type": "http.response.body", "body": bytes(self._data[head:]), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except BaseException:
            self._loan.discard()
            raise
        self._loan.give_back()


async def chunk_answer(request: Request, context: Context, find: Callable[[], Chunk | Response]) -> Response:
    """Answer with the chunk that ``find`` gives, read and verified whole before any byte goes out.

    All that may wait for a disk happens in one visit to a worker thread; ``find`` may also give
    another answer.
    """
    loan = await context.buffers.take()
    try:
        answer = await to_thread.run_sync(_chunk_answer, request, loan, find, limiter=context.chunk_threads)
    except BaseException:
        loan.give_back()
        raise
    if not isinstance(answer, ChunkResponse):
        loan.give_back()
    return answer


def _chunk_answer(request: Request, loan: Loan, find: Callable[[], Chunk | Response]) -> Response:
    chunk = find()
    if isinstance(chunk, Response):
        return chunk
    tag = etag(chunk.digest)
    headers: Mapping[str, str] = {"ETag": tag, "Cache-Control": chunk.cache}
    if is_fresh(request, tag):
        return Response(status_code=304, headers=headers)
    if request.method == "HEAD":
        return head_answer(chunk.size, OCTETS, headers)
    status, part, headers = select(request, chunk.size, tag, headers)
    chunk.read(loan.memory[: chunk.size])
    return ChunkResponse(loan.memory[part.start : part.stop], loan, status, headers)


class GatedResponse(Response):
    """Another response, which keeps its turn at a gate until it is sent: it holds memory for as long."""

    def __init__(self, response: Response, gate: Gate) -> None:
        self.raw_headers, self.status_code, self.background = response.raw_headers, response.status_code, None
        self.body = response.body
        self._response = response
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._gate.leave()


async def gated_answer(gate: Gate, make: Callable[[], Response]) -> Response:
    """What ``make``, called on a worker thread, gives, made and sent in turn."""
    await gate.enter()
    try:
        return GatedResponse(await to_thread.run_sync(make), gate)
    except BaseException:
        gate.leave()
        raise


def document_answer(
    request: Request, data: bytes, tag: str, cache: str, media_type: str = "application/json"
) -> Response:
    """Answer with a document held in memory."""
    headers: Mapping[str, str] = {"ETag": tag, "Cache-Control": cache}
    if is_fresh(request, tag):
        return Response(status_code=304, headers=headers)
    if request.method == "HEAD":
        return head_answer(len(data), media_type, headers)
    status, part, headers = select(request, len(data), tag, headers)
    return Response(data[part.start : part.stop], status, headers, media_type)


def head_answer(size: int, media_type: str, headers: Mapping[str, str]) -> Response:
    return Response(None, 200, {"Accept-Ranges": "bytes", "Content-Length": str(size), **headers}, media_type)
