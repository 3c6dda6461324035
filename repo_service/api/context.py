"""What every route works with: the repository, the settings, and the gates that bound the work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Path, Request

from repo_service.api.access import namespace_in
from repo_service.api.gates import ChunkBuffers, Gate
from repo_service.api.metrics import Metrics, Present
from repo_service.api.rates import Rates
from repo_service.api.readiness import Readiness
from repo_service.services.repository import LocalRepository
from repo_service.services.zarr_view import ZarrView
from repo_service.settings import Settings

# Checks and rebuilds read everything there is: a few at a time, so that they leave the disk to others.
_SURVEYS = 2

_VIEWS_KEPT = 8


class Context:
    """Made once per application.

    Attributes
    ----------
    buffers
        The memory, and the right, to transfer a chunk.
    documents
        The turn to handle a large document that comes.
    commits
        The turn to commit an artifact of many chunks.
    answers
        The turn to send a manifest or a page of block records.
    checks
        The turn to have an artifact checked, which readers may ask for.
    rates
        What each namespace may ask for in a second.
    chunk_threads, survey_threads, scrub_threads
        Limiters for the worker threads of chunk transfers, of collections and rebuilds, and of scrubs.
    is_ending
        Says whether the service is to end, for work that would go on for hours.
    readiness
        Whether store and index answer.
    metrics, present
        What is counted, and what is read off when somebody asks.
    """

    def __init__(self, repository: LocalRepository, settings: Settings) -> None:
        self.repository = repository
        self.settings = settings
        queue, wait = settings.queue, settings.queue_seconds
        chunks = Gate(settings.chunk_transfers, queue, wait, "chunk transfers")
        self.buffers = ChunkBuffers(chunks)
        self.documents = Gate(settings.document_transfers, queue, wait, "large documents")
        self.commits = Gate(settings.document_transfers, queue, wait, "large commits")
        self.answers = Gate(settings.chunk_transfers, queue, wait, "answers with documents")
        self.checks = Gate(_SURVEYS, queue, wait, "checks")
        self.rates = Rates(settings)
        self.chunk_threads = CapacityLimiter(settings.chunk_transfers)
        self.survey_threads = CapacityLimiter(_SURVEYS)
        self.scrub_threads = CapacityLimiter(1)
        self.is_ending: Callable[[], bool] = bool
        self.readiness = Readiness(repository)
        self.metrics = Metrics()
        self.present = Present(
            {
                "chunks": chunks,
                "documents": self.documents,
                "commits": self.commits,
                "answers": self.answers,
                "checks": self.checks,
            },
            {"chunk_threads": self.chunk_threads, "surveys": self.survey_threads},
        )
        self.metrics.registry.register(self.present)
        repository.observer = self.metrics
        self._viewing = threading.Lock()
        self._views: dict[tuple[str, str], ZarrView] = {}

    def zarr_view(self, ref: str, namespace: str) -> ZarrView:
        """The Zarr view of an artifact; that it is still published is asked every time.

        Raises
        ------
        ArtifactNotFound, TagNotFound, Ambiguous, MalformedName
        """
        artifact_id = self.repository.artifact(ref, namespace).id
        with self._viewing:
            view = self._views.get((namespace, artifact_id))
        view = view or ZarrView(self.repository, artifact_id, namespace)
        with self._viewing:
            self._views.pop((namespace, artifact_id), None)
            self._views[namespace, artifact_id] = view
            if len(self._views) > _VIEWS_KEPT:
                del self._views[next(iter(self._views))]
        return view


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def namespace_of(request: Request) -> str:
    """The namespace in the path, or the default one; the repository checks its grammar."""
    return namespace_in(request.scope)


async def _context(request: Request) -> Context:
    return context_of(request)


async def _namespace(request: Request) -> str:
    return namespace_of(request)


# The parameter that `namespace_of` reads, for OpenAPI.
NAMESPACE_PARAMETER = {
    "name": "namespace",
    "in": "path",
    "required": True,
    "description": "Namespace: 1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit.",
    "schema": {"type": "string"},
}

ContextOf = Annotated[Context, Depends(_context)]
Namespace = Annotated[str, Depends(_namespace)]
ArtifactId = Annotated[str, Path(description="Artifact id: sha256: and 64 hexadecimal digits.")]
Ref = Annotated[str, Path(description="Artifact id, shortened id (sha256: and at least 8 digits), or tag.")]
