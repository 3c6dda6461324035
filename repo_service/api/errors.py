"""Errors over HTTP: one JSON shape, and the status of each code."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from repo_service.api.logs import REQUEST_ID
from repo_service.domain.errors import KvgraftError, MalformedDocument, MalformedRequest, RateLimited

STATUS: Mapping[str, int] = {
    "internal_error": 500,
    "invalid_input": 400,
    "malformed_digest": 400,
    "malformed_name": 400,
    "malformed_document": 400,
    "malformed_request": 422,
    "malformed_url": 400,
    "invalid_tokens": 400,
    "context_too_long": 400,
    "digest_mismatch": 400,
    "size_mismatch": 400,
    "too_large": 413,
    "not_found": 404,
    "artifact_not_found": 404,
    "tag_not_found": 404,
    "push_not_found": 404,
    "chunk_not_found": 404,
    "token_not_found": 404,
    "conflict": 409,
    "block_divergence": 409,
    "chunks_missing": 409,
    "ambiguous_reference": 409,
    "corrupt": 500,
    "chunk_corrupt": 500,
    "document_corrupt": 500,
    "repository_error": 500,
    "not_a_repository": 500,
    "newer_format": 500,
    "storage_full": 507,
    "quota_exceeded": 507,
    "unavailable": 503,
    "rate_limited": 429,
    "service_error": 502,
    "access_denied": 403,
    "unauthenticated": 401,
    "port_in_use": 500,
    "inexact": 409,
    "fingerprint_mismatch": 409,
    "unsupported_model": 409,
    "weights_changed": 409,
    "inexact_replay": 409,
    "model_unavailable": 409,
    "page_corrupt": 500,
    "path_not_found": 404,
    "library_empty": 404,
    # Not 404, which Zarr readers take for the fill value.
    "not_stored": 410,
}

# Refusals of HTTP itself, which the library has no error for.
HTTP_CODES: Mapping[int, str] = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    411: "length_required",
    415: "unsupported_media_type",
    416: "range_not_satisfiable",
}

_HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},
    503: {"Retry-After": "1"},
}

_MAX_PROBLEMS = 20

OUTCOME = "kvgraft.outcome"
"""Where a request's ASGI scope says with which code it was refused."""

_log = logging.getLogger(__name__)


class ErrorDetail(BaseModel):
    """What went wrong."""

    code: str = Field(description="Stable and meant for programs; see the table of codes.")
    message: str = Field(description="What was wrong, with which values, and what to do.")
    details: dict[str, Any] = Field(description="The values, for programs.")


class ErrorAnswer(BaseModel):
    """The shape of every error."""

    error: ErrorDetail


def error_body(code: str, message: str, details: Mapping[str, Any]) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "details": dict(details)}}


def error_answers(*kinds: type[KvgraftError]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI descriptions of the errors a route may answer with, by status."""
    codes: dict[int, list[str]] = {}
    for kind in kinds:
        codes.setdefault(STATUS[kind.code], []).append(kind.code)
    return {status: {"model": ErrorAnswer, "description": ", ".join(names)} for status, names in codes.items()}


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(KvgraftError, _kvgraft_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RecursionError, _too_deep)
    app.add_exception_handler(ClientDisconnect, _disconnected)
    app.add_exception_handler(Exception, _unexpected)


async def _kvgraft_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, KvgraftError)
    request.scope[OUTCOME] = error.code
    return error_answer(error, STATUS[error.code])


def error_answer(error: KvgraftError, status: int) -> JSONResponse:
    """An error's JSON under a status of its own."""
    if status >= 500:
        _log.log(logging.INFO if status == 503 else logging.ERROR, "%s: %s", error.code, error.message)
    headers = _HEADERS.get(status)
    if isinstance(error, RateLimited):
        headers = {"Retry-After": str(error.details["retry_after_s"])}
    return JSONResponse({"error": error.to_json()}, status, headers)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = [{"at": ".".join(map(str, e["loc"])), "problem": str(e["msg"])} for e in error.errors()[:_MAX_PROBLEMS]]
    listed = "; ".join(f"{p['at']}: {p['problem']}" for p in problems)
    return await _kvgraft_error(request, MalformedRequest(f"the request is malformed: {listed}", problems=problems))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status, headers = error.status_code, error.headers or {}
    code = HTTP_CODES.get(status, "malformed_request" if status < 500 else KvgraftError.code)
    request.scope[OUTCOME] = code
    message = error.detail
    if status == 404:
        message = f"there is no route {request.url.path[:200]}: see /v1/openapi.json"
    elif status == 405:
        message = f"{request.url.path[:200]} does not answer {request.method}, only {headers.get('Allow')}"
    request.scope[OUTCOME] = code
    return JSONResponse(error_body(code, message, {}), status, headers)


async def _too_deep(request: Request, _: Exception) -> JSONResponse:
    """What the parser let through may still be too deep for what comes after it."""
    return await _kvgraft_error(request, MalformedDocument("the request body is nested too deeply"))


async def _disconnected(_: Request, __: Exception) -> JSONResponse:
    """Nobody is left to read this answer; having one keeps a lost client out of the error log."""
    return JSONResponse(error_body("request_timeout", "the client closed the connection", {}), 408)


async def _unexpected(request: Request, _: Exception) -> JSONResponse:
    """The server logs the exception with its traceback; the client gets none of it, but the id to find it by."""
    request.scope[OUTCOME] = KvgraftError.code
    message = "the service failed in a way that it should not; its log has the details"
    return JSONResponse(error_body(KvgraftError.code, message, {"request_id": REQUEST_ID.get()}), 500)
