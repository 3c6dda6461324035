"""The service itself: what it is, whether it lives, whether it can work."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Literal

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field

from repo_service.api.access import GuardedRoute, Over, access_of, needs, needs_nothing
from repo_service.api.audit import note
from repo_service.api.context import Context, ContextOf
from repo_service.api.errors import error_answers
from repo_service.domain.access import Scope
from repo_service.domain.errors import Conflict, Unavailable
from repo_service.domain.views import GarbageReport, ReindexReport, RepositoryInfo, ScrubReport
from repo_service.services.garbage import GRACE_S

router = APIRouter(route_class=GuardedRoute, tags=["service"])

_LONGEST_SCRUB_S = 24 * 3600.0
_LOOK_S = 0.2


class Health(BaseModel):
    """The service answers."""

    status: Literal["ok"] = "ok"


@router.get("/healthz")
@needs_nothing
async def healthz() -> Health:
    """Alive; touches neither the store nor the index."""
    return Health()


@router.get("/readyz", responses=error_answers(Unavailable))
@needs_nothing
async def readyz(context: ContextOf) -> Health:
    """Able to work: store and index both answer within 2 s. ``details.down`` of a 503 names what does not."""
    await context.readiness.check()
    return Health()


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus text format.", "content": {"text/plain": {}}}},
)
@needs_nothing
async def get_metrics(context: ContextOf) -> Response:
    """Everything that is counted, for Prometheus; asks store and index as readyz does."""
    context.present.answers = await context.readiness.answers()
    context.present.threads = to_thread.current_default_thread_limiter()
    return Response(generate_latest(context.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


@router.get("/v1/info")
@needs(Scope.READ, Over.ANY)
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
@needs(Scope.ADMIN, Over.ALL, act="gc")
async def collect_garbage(request: Request, context: ContextOf, how: Collection) -> GarbageReport:
    """Remove what no artifact and no push needs; the answer comes when that is done."""
    note(request, **how.model_dump())
    collect = partial(context.repository.collect_garbage, grace_s=how.grace_ms / 1000, dry_run=how.dry_run)
    return await to_thread.run_sync(collect, limiter=context.survey_threads)


@router.get("/v1/namespaces")
@needs(Scope.READ, Over.ANY)
def get_namespaces(request: Request, context: ContextOf) -> list[str]:
    """The namespaces that hold an artifact, a tag or a divergence, by name; only those that the token is valid in."""
    return list(filter(access_of(request).reaches, context.repository.namespaces()))


class Survey(BaseModel):
    """How to scrub."""

    bytes_per_s: int | None = Field(None, gt=0, le=10**12, description="Most bytes to read in a second.")


@router.post("/v1/scrub", responses=error_answers(Conflict))
@needs(Scope.ADMIN, Over.ALL, act="scrub")
async def scrub(context: ContextOf, how: Survey) -> ScrubReport:
    """Read and verify everything that is stored; the answer comes when that is done.

    It ends, incomplete, after a day or when the service does; one runs at a time.
    """
    if context.scrub_threads.available_tokens < 1:
        raise Conflict("a scrub that was asked for is running; wait until it has ended")
    survey = partial(context.repository.scrub, bytes_per_s=how.bytes_per_s, ended=_ended(context))
    return await to_thread.run_sync(survey, limiter=context.scrub_threads)


def _ended(context: Context) -> Callable[[float], bool]:
    """Waits, and says whether a scrub is to stop."""
    deadline = time.monotonic() + _LONGEST_SCRUB_S

    def ended(seconds: float) -> bool:
        until = min(deadline, time.monotonic() + seconds)
        while not context.is_ending() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
        return context.is_ending() or time.monotonic() >= deadline

    return ended


@router.post("/v1/reindex")
@needs(Scope.ADMIN, Over.ALL, act="reindex")
async def reindex(context: ContextOf) -> ReindexReport:
    """Rebuild the SQL index from the store; the answer comes when that is done."""
    return await to_thread.run_sync(context.repository.reindex, limiter=context.survey_threads)
