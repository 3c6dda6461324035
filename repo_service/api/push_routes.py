"""Pushes: begin, offer, send what is missing, commit."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Path, Request, Response
from starlette.exceptions import HTTPException

from repo_service.api.access import needs
from repo_service.api.audit import note
from repo_service.api.bodies import (
    MAX_MANIFEST_VALUES,
    DocumentRoute,
    check_density,
    content_length,
    read_document,
    read_exactly,
)
from repo_service.api.context import ContextOf, Namespace
from repo_service.api.errors import error_answers
from repo_service.api.models import OfferRequest, PushRequest, PushStarted, UploadRequest
from repo_service.api.octets import BINARY, OCTETS
from repo_service.domain.access import Scope
from repo_service.domain.digest import BLAKE3, parse_digest
from repo_service.domain.errors import (
    ChunkNotFound,
    ChunksMissing,
    DigestMismatch,
    Divergence,
    DocumentCorrupt,
    MalformedDigest,
    MalformedDocument,
    MalformedName,
    PushNotFound,
    QuotaExceeded,
    SizeMismatch,
    StorageFull,
    TooLarge,
    Unavailable,
)
from repo_service.domain.fingerprint import Fingerprint
from repo_service.domain.layout import MAX_CHUNK_BYTES
from repo_service.domain.manifest import MAX_MANIFEST_BYTES, Manifest
from repo_service.domain.record import BlockRecord
from repo_service.domain.views import ArtifactInfo, ChunkUrls, PushOffer

PushId = Annotated[str, Path(description="Id that beginning the push gave.")]

# Commits of more take turns: their block records are all in memory, some 400 bytes for each chunk.
_FEW_CHUNKS = 2**14

router = APIRouter(route_class=DocumentRoute, prefix="/pushes", tags=["push"])


@router.post("", status_code=201, responses=error_answers(MalformedName, MalformedDocument))
@needs(Scope.WRITE)
def begin_push(context: ContextOf, namespace: Namespace, body: PushRequest) -> PushStarted:
    """Begin a push. It expires an hour after it was last used."""
    return PushStarted(id=context.repository.begin_push(Fingerprint(body.fingerprint), namespace).id)


@router.post(
    "/{push_id}/blocks",
    responses=error_answers(
        PushNotFound, MalformedDocument, MalformedDigest, Divergence, QuotaExceeded, DocumentCorrupt
    ),
)
@needs(Scope.WRITE)
def offer_blocks(context: ContextOf, namespace: Namespace, push_id: PushId, body: OfferRequest) -> PushOffer:
    """Announce blocks and tokens; the answer lists the chunks to send."""
    push = context.repository.resume_push(push_id, namespace)
    missing = push.offer([BlockRecord.from_json(record) for record in body.records], body.resume_from)
    if body.tokens is not None:
        missing += push.offer_tokens(body.tokens.count, body.tokens.chunks)
    return PushOffer(missing=missing)


@router.put(
    "/{push_id}/chunks/{digest}",
    status_code=204,
    openapi_extra={"requestBody": {"required": True, "content": {OCTETS: BINARY}}},
    responses={
        411: {"description": "length_required"},
        **error_answers(
            PushNotFound,
            ChunkNotFound,
            DigestMismatch,
            SizeMismatch,
            MalformedDigest,
            TooLarge,
            StorageFull,
            Unavailable,
        ),
    },
)
@needs(Scope.WRITE)
async def put_chunk(
    request: Request, context: ContextOf, namespace: Namespace, push_id: PushId, digest: str
) -> Response:
    """Send one chunk's octets, at most 8 MiB, with a Content-Length."""
    parse_digest(digest, BLAKE3)
    length = content_length(request)
    if length is None:
        raise HTTPException(411, "a chunk is sent with its Content-Length")
    if length > MAX_CHUNK_BYTES:
        raise TooLarge(
            f"the body has {length} bytes; a chunk has at most {MAX_CHUNK_BYTES}", size=length, limit=MAX_CHUNK_BYTES
        )
    push = context.repository.resume_push(push_id, namespace)
    loan = await context.buffers.take()
    try:
        data = loan.memory[:length]
        await read_exactly(request, data, context.settings)
        await to_thread.run_sync(push.put, digest, data, limiter=context.chunk_threads)
    finally:
        loan.give_back()
    return Response(status_code=204)


@router.post(
    "/{push_id}/uploads",
    responses=error_answers(PushNotFound, ChunkNotFound, MalformedDigest, Unavailable),
)
@needs(Scope.WRITE)
def get_upload_urls(
    response: Response, context: ContextOf, namespace: Namespace, push_id: PushId, body: UploadRequest
) -> ChunkUrls:
    """Where chunks can be put without the service in between, each to be taken when it is there. The URLs are secrets."""
    response.headers["Cache-Control"] = "no-store"
    for digest in body.digests:
        parse_digest(digest, BLAKE3)
    seconds = context.settings.direct_seconds
    push = context.repository.resume_push(push_id, namespace)
    return ChunkUrls(seconds=seconds, urls=push.upload_urls(body.digests, seconds))


@router.post(
    "/{push_id}/uploads/{digest}",
    status_code=204,
    responses=error_answers(
        PushNotFound, ChunkNotFound, DigestMismatch, SizeMismatch, MalformedDigest, StorageFull, Unavailable
    ),
)
@needs(Scope.WRITE)
async def take_upload(context: ContextOf, namespace: Namespace, push_id: PushId, digest: str) -> Response:
    """Read back what was put at the chunk's URL, and store it if it is what the digest names."""
    parse_digest(digest, BLAKE3)
    push = context.repository.resume_push(push_id, namespace)
    loan = await context.buffers.take()
    try:
        await to_thread.run_sync(push.take, digest, loan.memory, limiter=context.chunk_threads)
    finally:
        loan.give_back()
    return Response(status_code=204)


@router.post(
    "/{push_id}/commit",
    status_code=201,
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}},
    responses=error_answers(PushNotFound, ChunksMissing, MalformedDocument, Divergence, TooLarge, StorageFull),
)
@needs(Scope.WRITE, act="push")
async def commit_push(request: Request, context: ContextOf, namespace: Namespace, push_id: PushId) -> ArtifactInfo:
    """Publish the manifest in the body, canonical JSON of at most 64 MiB; durable when the answer comes."""

    def parse(data: bytes) -> Manifest:
        return Manifest.parse(check_density(data, MAX_MANIFEST_VALUES))

    async def use(data: bytes) -> ArtifactInfo:
        manifest = await to_thread.run_sync(parse, data)
        note(request, artifact_id=manifest.id)
        push = context.repository.resume_push(push_id, namespace)
        async with AsyncExitStack() as stack:
            if manifest.chunk_count > _FEW_CHUNKS:
                await stack.enter_async_context(context.commits.passed())
            return await to_thread.run_sync(push.commit, manifest)

    info: ArtifactInfo = await read_document(request, context, MAX_MANIFEST_BYTES, use)
    return info


@router.delete("/{push_id}", status_code=204, responses=error_answers(Unavailable))
@needs(Scope.WRITE)
def abort_push(context: ContextOf, namespace: Namespace, push_id: PushId) -> Response:
    """Give the push up; harmless after a commit."""
    context.repository.resume_push(push_id, namespace).abort()
    return Response(status_code=204)
