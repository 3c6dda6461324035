"""Reading chunks: by digest, and by Zarr key."""

from __future__ import annotations

from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from repo_service.api.context import ArtifactId, Context, ContextOf, Namespace, Ref
from repo_service.api.errors import error_answers
from repo_service.api.octets import BINARY, IMMUTABLE, OCTETS, REVALIDATED, chunk_answer, document_answer, etag
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
    TagNotFound,
    Unavailable,
)
from repo_service.services.zarr_view import ChunkAddress, ZarrView

_OCTETS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The verified octets.", "content": {OCTETS: BINARY}},
    206: {"description": "The range asked for, of octets verified whole.", "content": {OCTETS: BINARY}},
    304: {"description": "The client's copy is current."},
    416: {"description": "range_not_satisfiable"},
}

router = APIRouter()


@router.get(
    "/artifacts/{artifact_id}/chunks/{digest}",
    tags=["chunks"],
    response_class=Response,
    responses=_OCTETS | error_answers(ArtifactNotFound, ChunkNotFound, ChunkCorrupt, MalformedDigest, Unavailable),
)
async def get_chunk(
    request: Request, context: ContextOf, namespace: Namespace, artifact_id: ArtifactId, digest: str
) -> Response:
    """The octets of one chunk that the artifact holds."""
    parse_digest(artifact_id, SHA256)
    parse_digest(digest, BLAKE3)
    repository = context.repository
    spec = await to_thread.run_sync(repository.chunk_spec, artifact_id, namespace, digest)
    read = partial(repository.read_chunk, artifact_id, namespace, digest, spec)
    return await chunk_answer(request, context, digest, spec.size, {"Cache-Control": IMMUTABLE}, read)


_ZARR_ERRORS = error_answers(
    ArtifactNotFound, TagNotFound, Ambiguous, MalformedName, ChunkCorrupt, DocumentCorrupt, Unavailable
)


@router.head("/artifacts/{ref}/zarr/{key:path}", tags=["zarr"], response_class=Response, responses=_ZARR_ERRORS)
@router.get(
    "/artifacts/{ref}/zarr/{key:path}", tags=["zarr"], response_class=Response, responses=_OCTETS | _ZARR_ERRORS
)
async def get_zarr_key(request: Request, context: ContextOf, namespace: Namespace, ref: Ref, key: str) -> Response:
    """The artifact as a read-only Zarr v3 hierarchy.

    404 only for a key outside the hierarchy: Zarr readers take it for zeros, so a chunk that was
    lost or altered is another error.
    """
    view, document, chunk, digest = await to_thread.run_sync(_look_up, context, ref, namespace, key)
    headers = {"Cache-Control": IMMUTABLE if ref == view.manifest.id else REVALIDATED}
    if document is not None:
        return document_answer(request, document, etag(digest), headers)
    if chunk is None:
        raise NotFound(f"the artifact has no Zarr key {key[:200]!r}", key=key[:200])
    return await chunk_answer(request, context, digest, chunk.spec.size, headers, partial(view.read, chunk))


def _look_up(
    context: Context, ref: str, namespace: str, key: str
) -> tuple[ZarrView, bytes | None, ChunkAddress | None, str]:
    """The view, what the key names in it (a document, a chunk, or nothing), and its digest."""
    view = context.zarr_view(ref, namespace)
    document = view.hierarchy.documents.get(key)
    if document is not None:
        return view, document, None, sha256_digest(document)
    chunk = view.hierarchy.chunk(key)
    return view, None, chunk, view.hierarchy.digest(chunk, view.records()) if chunk else ""
