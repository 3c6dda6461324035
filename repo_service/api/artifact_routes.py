"""Artifacts and tags of one namespace."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response

from repo_service.api.access import needs
from repo_service.api.audit import note
from repo_service.api.bodies import DocumentRoute
from repo_service.api.context import ArtifactId, ContextOf, Namespace, Ref
from repo_service.api.errors import error_answers
from repo_service.api.models import MatchRequest, RecordDocument, TagRequest
from repo_service.api.octets import IMMUTABLE, REVALIDATED, document_answer, etag, gated_answer
from repo_service.domain.access import Scope
from repo_service.domain.digest import SHA256, parse_digest
from repo_service.domain.errors import (
    Ambiguous,
    ArtifactNotFound,
    DocumentCorrupt,
    MalformedDigest,
    MalformedName,
    MalformedRequest,
    TagNotFound,
    Unavailable,
)
from repo_service.domain.manifest import MAX_ANNOTATIONS
from repo_service.domain.names import check_namespace
from repo_service.domain.policy import Policy
from repo_service.domain.views import (
    ArtifactInfo,
    ArtifactPage,
    ArtifactQuery,
    DeleteReport,
    Divergence,
    Match,
    Stats,
    StorageReport,
    TagInfo,
)

MAX_PAGE_BLOCKS = 1000

# Records may have 4 MiB each, so a page also ends by size.
_PAGE_BYTES = 8 * 2**20

_LOOKUP = error_answers(ArtifactNotFound, TagNotFound, Ambiguous, MalformedName)

router = APIRouter(route_class=DocumentRoute)


@router.get("/artifacts/{ref}", tags=["artifacts"], responses=_LOOKUP)
@needs(Scope.READ)
def get_artifact(context: ContextOf, namespace: Namespace, ref: Ref) -> ArtifactInfo:
    """Look an artifact up."""
    return context.repository.artifact(ref, namespace)


@router.delete(
    "/artifacts/{artifact_id}", tags=["artifacts"], responses=error_answers(ArtifactNotFound, MalformedDigest)
)
@needs(Scope.ADMIN, act="delete")
def delete_artifact(context: ContextOf, namespace: Namespace, artifact_id: ArtifactId) -> DeleteReport:
    """Unpublish an artifact with its tags, and free what nothing else needs."""
    parse_digest(artifact_id, SHA256)
    return context.repository.delete(artifact_id, namespace)


@router.get(
    "/artifacts/{ref}/manifest",
    tags=["artifacts"],
    response_class=Response,
    responses={
        200: {
            "description": "The canonical document; its SHA-256 is the artifact's id.",
            "content": {"application/json": {}},
        },
        304: {"description": "The client's copy is current."},
        **_LOOKUP,
        **error_answers(DocumentCorrupt),
    },
)
@needs(Scope.READ, act="pull")
async def get_manifest(request: Request, context: ContextOf, namespace: Namespace, ref: Ref) -> Response:
    """The manifest's canonical bytes."""

    def make() -> Response:
        manifest = context.repository.manifest(ref, namespace)
        note(request, artifact_id=manifest.id)
        cache = IMMUTABLE if ref == manifest.id else REVALIDATED
        return document_answer(request, manifest.data, etag(manifest.id), cache)

    return await gated_answer(context.answers, make)


@router.get(
    "/artifacts/{ref}/blocks",
    tags=["artifacts"],
    response_model=list[RecordDocument],
    responses=_LOOKUP | error_answers(DocumentCorrupt),
)
@needs(Scope.READ)
async def get_blocks(
    context: ContextOf,
    namespace: Namespace,
    ref: Ref,
    start: Annotated[int, Query(ge=0, description="Index of the first block.")] = 0,
    count: Annotated[int, Query(ge=1, le=MAX_PAGE_BLOCKS, description="Number of blocks wanted.")] = MAX_PAGE_BLOCKS,
) -> Response:
    """Block records from ``start`` on: ``count`` or fewer, and none only beyond the last block."""

    def make() -> Response:
        manifest = context.repository.manifest(ref, namespace)
        page: list[bytes] = []
        room = _PAGE_BYTES
        for record in context.repository.record_page(manifest, namespace, start, count):
            room -= len(record.data)
            if page and room < 0:
                break
            page.append(record.data)
        return Response(b"[%b]" % b",".join(page), media_type="application/json")

    return await gated_answer(context.answers, make)


@router.post("/artifacts/{ref}/check", tags=["artifacts"], responses=_LOOKUP | error_answers(Unavailable))
@needs(Scope.READ)
async def check_artifact(context: ContextOf, namespace: Namespace, ref: Ref) -> StorageReport:
    """Read and hash everything the artifact holds; the answer comes when that is done."""
    # Who gave up waiting leaves the line, and whoever keeps the service in order does not stand in it.
    async with context.checks.passed():
        return await to_thread.run_sync(context.repository.check, ref, namespace)


@router.post("/artifacts/query", tags=["artifacts"], responses=error_answers(MalformedName))
@needs(Scope.READ)
def query_artifacts(context: ContextOf, namespace: Namespace, query: ArtifactQuery) -> ArtifactPage:
    """Artifacts that meet conditions, page by page."""
    if "namespace" in query.model_fields_set and query.namespace != namespace:
        raise MalformedRequest(
            f"the query names the namespace {query.namespace[:100]!r} and the path {namespace[:100]!r}: leave it out of the query"
        )
    if len(query.annotations) > MAX_ANNOTATIONS:
        raise MalformedRequest(
            f"the query has {len(query.annotations)} annotations; an artifact has at most {MAX_ANNOTATIONS}"
        )
    return context.repository.query(query.model_copy(update={"namespace": check_namespace(namespace)}))


@router.post("/match", tags=["artifacts"], responses=error_answers(MalformedName, MalformedDigest))
@needs(Scope.READ)
def match_prefix(context: ContextOf, namespace: Namespace, body: MatchRequest) -> Match | None:
    """The longest stored prefix of a token sequence, or null."""
    return context.repository.match(namespace, body.keys)


@router.get("/tags", tags=["tags"], responses=error_answers(MalformedName))
@needs(Scope.READ)
def get_tags(context: ContextOf, namespace: Namespace) -> list[TagInfo]:
    """All tags of the namespace."""
    return context.repository.tags(namespace)


@router.put("/tags/{name}", tags=["tags"], responses=error_answers(MalformedName, ArtifactNotFound))
@needs(Scope.WRITE, act="tag")
def put_tag(request: Request, context: ContextOf, namespace: Namespace, name: str, body: TagRequest) -> TagInfo:
    """Make a tag, or move it."""
    note(request, artifact_id=body.artifact_id[:200])
    return context.repository.set_tag(namespace, name, body.artifact_id)


@router.delete("/tags/{name}", tags=["tags"], status_code=204, responses=error_answers(MalformedName, TagNotFound))
@needs(Scope.WRITE, act="untag")
def delete_tag(context: ContextOf, namespace: Namespace, name: str) -> Response:
    """Remove a tag; the artifact stays."""
    context.repository.delete_tag(namespace, name)
    return Response(status_code=204)


@router.get("/stats", tags=["namespaces"], responses=error_answers(MalformedName))
@needs(Scope.READ)
def get_stats(context: ContextOf, namespace: Namespace) -> Stats:
    """Counts and bytes of the namespace."""
    return context.repository.stats(namespace)


@router.get("/policy", tags=["namespaces"], responses=error_answers(MalformedName, DocumentCorrupt))
@needs(Scope.READ)
def get_policy(context: ContextOf, namespace: Namespace) -> Policy:
    """What the namespace keeps and how much it may hold."""
    return context.repository.policy(namespace)


@router.put("/policy", tags=["namespaces"], responses=error_answers(MalformedName))
@needs(Scope.ADMIN, act="set policy")
def put_policy(request: Request, context: ContextOf, namespace: Namespace, policy: Policy) -> Policy:
    """Give the namespace a policy, in place of the one it has."""
    note(request, policy=policy.model_dump(mode="json"))
    return context.repository.set_policy(namespace, policy)


@router.get("/divergences", tags=["namespaces"], responses=error_answers(MalformedName))
@needs(Scope.READ)
def get_divergences(context: ContextOf, namespace: Namespace) -> list[Divergence]:
    """Refused pushes of other bytes under an existing block key, newest first, at most 1,000."""
    return context.repository.divergences(namespace)
