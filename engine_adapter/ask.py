"""A question to a library: the right artifact grafted, the question computed after it, an answer generated."""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_adapter.library import Held, Library
from engine_adapter.routers import Route, Router, Routing
from repo_service.domain.errors import ContextTooLong, InvalidInput

if TYPE_CHECKING:
    from engine_adapter.run import Generation, Run

DEFAULT_THRESHOLD = 0.5
DEFAULT_MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Source:
    """The document that holds a route's best passage; characters of the document."""

    source: str
    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Answer:
    """What a model answered.

    Attributes
    ----------
    text
        The answer, from what was generated.
    artifact_id
        What was grafted; None where the confidence was below the threshold, and the model answered by itself.
    source
        Where the best passage is; None with ``artifact_id``.
    routing
        What the router found, and its confidence.
    generation
        The tokens, and the SHA-256 of the logits that each was chosen from.
    route_s, graft_s, answer_s
        Seconds.
    """

    text: str
    artifact_id: str | None
    source: Source | None
    threshold: float
    routing: Routing
    grafted_tokens: int
    question_tokens: int
    generation: Generation = field(repr=False)
    route_s: float
    graft_s: float
    answer_s: float


def ask(
    library: Library,
    router: Router,
    question: str,
    *,
    threshold: float = DEFAULT_THRESHOLD,
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
) -> Answer:
    """Answer a question from a library, exactly: as a fresh run over the artifact's tokens and the question would.

    Parameters
    ----------
    threshold
        Below this confidence nothing is grafted.

    Raises
    ------
    LibraryEmpty, FingerprintMismatch
        If the router finds nothing, as `Library.artifacts`; and where an artifact's fingerprint is another.
    ContextTooLong
        If the question does not fit behind the artifact.
    InvalidInput
        If the question is empty or the threshold is none.
    """
    if not 0 <= threshold <= 1:
        raise InvalidInput(f"the threshold is {threshold}; it must be from 0 to 1", threshold=threshold)
    if not question.strip():
        raise InvalidInput("the question is empty")
    began = time.perf_counter()
    _require_room(library, len(library.prompt.after_document(question)), 0)
    routing = router.route(question)
    if not routing.routes:
        library.artifacts()
    # A router may know of an artifact that was deleted just now.
    candidates = (library.held(route.artifact_id) for route in routing.routes if routing.confidence >= threshold)
    held = next((held for held in candidates if held is not None), None)
    routed = time.perf_counter()
    session = library.session
    source: Source | None = None
    if held is None:
        ids = library.prompt.alone(question)
        run, grafted = session.new_run(), routed
    else:
        ids = library.prompt.after_document(question)
        _require_room(library, len(ids), held.info.token_count)
        source = source_of(held, next(route for route in routing.routes if route.artifact_id == held.info.id))
        run = session.graft(held.info.id)
        grafted = time.perf_counter()
    session.extend(run, ids)
    generation = _generate(library, run, max_new_tokens)
    return Answer(
        library.prompt.answer(generation.text or ""),
        None if held is None else held.info.id,
        source,
        threshold,
        routing,
        run.grafted_tokens,
        len(ids),
        generation,
        routed - began,
        grafted - routed,
        time.perf_counter() - grafted,
    )


def source_of(held: Held, route: Route) -> Source:
    """The document that a route's passage is of."""
    number = max(bisect_right(held.beginnings, route.start) - 1, 0)
    part = held.parts[number]
    start = part.start + max(route.start - part.at, 0)
    stop = min(part.start + max(route.stop - part.at, 0), part.stop)
    return Source(part.source, part.name, start, stop)


def _generate(library: Library, run: Run, max_new_tokens: int) -> Generation:
    return library.session.generate(run, min(max_new_tokens, library.window - len(run.tokens) + 1))


def _require_room(library: Library, question: int, before: int) -> None:
    """One token is left to the answer."""
    if before + question >= library.window:
        behind = f" behind the {before:,} tokens of its artifact" if before else ""
        raise ContextTooLong(
            f"the question has {question:,} tokens{behind}, and the window is {library.window:,}: ask a shorter one, or "
            "add the documents with a larger --reserve",
            tokens=question,
            artifact_tokens=before,
            window=library.window,
        )
