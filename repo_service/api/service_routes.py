"""The service itself: what it is, whether it lives, whether it can work."""

from __future__ import annotations

from functools import partial
from typing import Literal

from anyio import to_thread
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field

from repo_service.api.context import ContextOf
from repo_service.api.errors import error_answers
from repo_service.domain.errors import Unavailable
from repo_service.domain.views import GarbageReport, ReindexReport, RepositoryInfo, ScrubReport
from repo_service.services.garbage import GRACE_S

router = APIRouter(tags=["service"])


class Health(BaseModel):
    """The service answers."""

    status: Literal["ok"] = "ok"


@router.get("/healthz")
async def healthz() -> Health:
    """Alive; touches neither the store nor the index."""
    return Health()


@router.get("/readyz", responses=error_answers(Unavailable))
async def readyz(context: ContextOf) -> Health:
    """Able to work: store and index both answer within 2 s. ``details.down`` of a 503 names what does not."""
    await context.readiness.check()
    return Health()


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus text format.", "content": {"text/plain": {}}}},
)
async def get_metrics(context: ContextOf) -> Response:
    """Everything that is counted, for Prometheus; asks store and index as readyz does."""
    context.present.answers = await context.readiness.answers()
    context.present.threads = to_thread.current_default_thread_limiter()
    return Response(generate_latest(context.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.get("/v1/info")
def get_info(context: ContextOf) -> RepositoryInfo:
    """What is at this address."""
    return context.repository.info()


class Collection(BaseModel):
    """How to collect garbage."""

    grace_ms: int = Field(
        int(GRACE_S * 1000), ge=0, le=10**12, description="Objects that the index does not know go when they are older."
    )
    dry_run: bool = Field(False, description="Only say what would be done.")


@router.post("/v1/gc")
async def collect_garbage(context: ContextOf, how: Collection) -> GarbageReport:
    """Remove what no artifact and no push needs; the answer comes when that is done."""
    collect = partial(context.repository.collect_garbage, grace_s=how.grace_ms / 1000, dry_run=how.dry_run)
    return await to_thread.run_sync(collect, limiter=context.survey_threads)


@router.get("/v1/namespaces")
def get_namespaces(context: ContextOf) -> list[str]:
    """The namespaces that hold an artifact, a tag or a divergence, by name."""
    return context.repository.namespaces()


class Survey(BaseModel):
    """How to scrub."""

    bytes_per_s: int | None = Field(None, gt=0, le=10**12, description="Most bytes of chunks to read in a second.")


@router.post("/v1/scrub")
async def scrub(context: ContextOf, how: Survey) -> ScrubReport:
    """Read and verify everything that is stored; the answer comes when that is done."""
    survey = partial(context.repository.scrub, bytes_per_s=how.bytes_per_s)
    return await to_thread.run_sync(survey, limiter=context.survey_threads)


@router.post("/v1/reindex")
async def reindex(context: ContextOf) -> ReindexReport:
    """Rebuild the SQL index from the store; the answer comes when that is done."""
    return await to_thread.run_sync(context.repository.reindex, limiter=context.survey_threads)
