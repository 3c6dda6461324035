"""Reading chunks: by digest, and by Zarr key.

These routes take nothing from FastAPI's dependencies, which would cost as much time as hashing 1 MiB.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from repo_service.api.access import GuardedRoute, needs
from repo_service.api.context import ArtifactId, Ref, context_of, namespace_of
from repo_service.api.errors import OUTCOME, ErrorAnswer, error_answer, error_answers
from repo_service.api.octets import BINARY, IMMUTABLE, OCTETS, REVALIDATED, Chunk, chunk_answer, document_answer, etag
from repo_service.domain.access import Scope
from repo_service.domain.digest import BLAKE3, SHA256, parse_digest, sha256_digest
from repo_service.domain.errors import (
    Ambiguous,
    ArtifactNotFound,
    ChunkCorrupt,
    ChunkNotFound,
    DocumentCorrupt,
    MalformedDigest,
    MalformedName,
    NotFound,
    NotStored,
    TagNotFound,
    Unavailable,
)
from repo_service.domain.views import ChunkUrls

_OCTETS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The verified octets.", "content": {OCTETS: BINARY}},
    206: {"description": "The range asked for, of octets verified whole.", "content": {OCTETS: BINARY}},
    304: {"description": "The client's copy is current."},
    416: {"description": "range_not_satisfiable"},
}

router = APIRouter(route_class=GuardedRoute)


@router.get(
    "/artifacts/{artifact_id}/chunks/{digest}",
    tags=["chunks"],
    response_class=Response,
    responses=_OCTETS | error_answers(ArtifactNotFound, ChunkNotFound, ChunkCorrupt, MalformedDigest, Unavailable),
)
@needs(Scope.READ)
async def get_chunk(request: Request, artifact_id: ArtifactId, digest: str) -> Response:
    """The octets of one chunk that the artifact holds."""
    parse_digest(artifact_id, SHA256)
    parse_digest(digest, BLAKE3)
    context, namespace = context_of(request), namespace_of(request)
    repository = context.repository

    def find() -> Chunk:
        spec = repository.chunk_spec(artifact_id, namespace, digest)
        read = partial(repository.read_chunk, artifact_id, namespace, digest, spec)
        return Chunk(digest, spec.size, read, IMMUTABLE)

    return await chunk_answer(request, context, find)


@router.get(
    "/artifacts/{artifact_id}/chunks/{digest}/urls",
    tags=["chunks"],
    response_model=ChunkUrls,
    responses=error_answers(ArtifactNotFound, ChunkNotFound, MalformedDigest, Unavailable),
)
@needs(Scope.READ)
def get_chunk_urls(request: Request, response: Response, artifact_id: ArtifactId, digest: str) -> ChunkUrls:
    """Where a chunk, and those that follow it in the artifact, can be fetched without the service in between.

    What comes from there is not verified: whoever fetches it must hash it. The URLs are secrets.
    """
    parse_digest(artifact_id, SHA256)
    parse_digest(digest, BLAKE3)
    context, namespace = context_of(request), namespace_of(request)
    seconds = context.settings.direct_seconds
    response.headers["Cache-Control"] = "no-store"
    if not seconds:
        context.repository.chunk_spec(artifact_id, namespace, digest)
        return ChunkUrls(seconds=0, urls={})
    urls = context.repository.chunk_urls(artifact_id, namespace, digest, seconds)
    return ChunkUrls(seconds=seconds, urls=urls, framed=context.repository.is_framed)


GONE = 410
_ZARR_ERRORS = error_answers(NotFound, Ambiguous, MalformedName, ChunkCorrupt, DocumentCorrupt, Unavailable) | {
    GONE: {"model": ErrorAnswer, "description": f"{ArtifactNotFound.code}, {TagNotFound.code}, {NotStored.code}"}
}


@router.head("/artifacts/{ref}/zarr/{key:path}", tags=["zarr"], response_class=Response, responses=_ZARR_ERRORS)
@router.get(
    "/artifacts/{ref}/zarr/{key:path}", tags=["zarr"], response_class=Response, responses=_OCTETS | _ZARR_ERRORS
)
@needs(Scope.READ)
async def get_zarr_key(request: Request, ref: Ref, key: str) -> Response:
    """The artifact as a read-only Zarr v3 hierarchy.

    404 only for a key outside the hierarchy: Zarr readers take it for the fill value, so a chunk that
    was lost or altered is another error, and an absent artifact, or a chunk that it leaves out, is 410.
    """
    context, namespace = context_of(request), namespace_of(request)

    def find() -> Chunk | Response:
        try:
            view = context.zarr_view(ref, namespace)
        except (ArtifactNotFound, TagNotFound) as error:
            request.scope[OUTCOME] = error.code
            return error_answer(error, GONE)
        cache = IMMUTABLE if ref == view.manifest.id else REVALIDATED
        document = view.hierarchy.documents.get(key)
        if document is not None:
            return document_answer(request, document, etag(sha256_digest(document)), cache)
        place = view.hierarchy.chunk(key)
        if place is None:
            raise NotFound(f"the artifact has no Zarr key {key[:200]!r}", key=key[:200])
        digest = view.hierarchy.digest(place, view.records())
        return Chunk(digest, place.spec.size, partial(view.read, place), cache)

    return await chunk_answer(request, context, find)
