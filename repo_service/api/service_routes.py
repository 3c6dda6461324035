"""The service itself: what it is, whether it lives, whether it can work."""

from __future__ import annotations

from typing import Literal

from anyio import to_thread
from fastapi import APIRouter
from pydantic import BaseModel

from repo_service.api.context import ContextOf
from repo_service.api.errors import error_answers
from repo_service.domain.errors import Unavailable
from repo_service.domain.views import ReindexReport, RepositoryInfo

router = APIRouter(tags=["service"])


class Health(BaseModel):
    """The service answers."""

    status: Literal["ok"] = "ok"


@router.get("/healthz")
async def healthz() -> Health:
    """Alive; says nothing about the repository."""
    return Health()


@router.get("/readyz", responses=error_answers(Unavailable))
def readyz(context: ContextOf) -> Health:
    """Able to work: reads one object of the store and one row of the index."""
    context.repository.probe()
    return Health()


@router.get("/v1/info")
def get_info(context: ContextOf) -> RepositoryInfo:
    """What is at this address."""
    return context.repository.info()


@router.post("/v1/reindex")
async def reindex(context: ContextOf) -> ReindexReport:
    """Rebuild the SQL index from the store; the answer comes when that is done."""
    return await to_thread.run_sync(context.repository.reindex, limiter=context.survey_threads)
