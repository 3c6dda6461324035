"""Which artifact of a library a question is about: by words, by meaning, or by both."""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine_adapter.passages import Passage, PassageIndex
from repo_service.domain.errors import InvalidInput

PASSAGES_PER_ROUTE = 20
"""Passages to look at for each artifact wanted, since an artifact may have several of the best."""

ROUTERS = ("lexical", "dense", "both")

_MAX_WORDS = 64
_COMMON = 1000
_RANKED = 20
_RANK_OFFSET = 60
_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        a about all also am an and any are as at be been being by can could did do does doing done for from get give had
        has have having he her his how i if in into is it its just me my no not of on one or our out please say says she
        should so some tell than that the their them then there these they this those to us was we were what when where
        which while who whom whose why will with would you your
        """,
    )
)


@dataclass(frozen=True)
class Route:
    """An artifact that may hold the answer.

    Attributes
    ----------
    score
        Greater is better; comparable with others of one answer only.
    start, stop
        Its best passage, in characters of the artifact's text.
    """

    artifact_id: str
    score: float
    start: int
    stop: int


@dataclass(frozen=True)
class Routing:
    """Routes, best first, and how far the first is to be trusted, from 0 to 1."""

    routes: list[Route]
    confidence: float


class Router(Protocol):
    """Finds artifacts for a question."""

    def route(self, question: str, limit: int = 5) -> Routing:
        """At most ``limit`` artifacts."""


class LexicalRouter:
    """By the words of the question: BM25 over passages, stemmed; see `PassageIndex`.

    Only passages that hold most of the question, by the rarity of its words, are ranked: BM25 over all that hold any of
    its words takes seconds for a billion tokens.
    """

    def __init__(self, index: PassageIndex) -> None:
        self._index = index

    def route(self, question: str, limit: int = 5) -> Routing:
        total = len(self._index)
        counts = {word: self._index.passages_with(word) for word in content_words(question)}
        weights = {word: math.log((total + 1) / (count + 0.5)) for word, count in counts.items()}
        known = [word for word, count in counts.items() if count]
        # Words that many passages have tell next to nothing, and cost the most.
        telling = [word for word in known if counts[word] <= max(_COMMON, total // 4)] or known
        sought = {word: weights[word] for word in telling}
        found = self._index.ranked(self._candidates(sought, limit * PASSAGES_PER_ROUTE), sought)
        if not found:
            return Routing([], 0.0)
        held = sum(weight for word, weight in weights.items() if self._index.holds(found[0], word))
        return Routing(best_of_each(found, limit), held / sum(weights.values()))

    def _candidates(self, weights: Mapping[str, float], limit: int) -> list[int]:
        """The passages whose words weigh most together, of all that may hold half of the weight."""
        rarest: list[str] = []
        left = sum(weights.values()) / 2
        for word in sorted(weights, key=lambda word: -weights[word]):
            rarest.append(word)
            left -= weights[word]
            if left <= 0:
                break
        held: defaultdict[int, float] = defaultdict(float)
        for word, weight in weights.items():
            for number in self._index.numbers(word, [word] if word in rarest else rarest):
                held[number] += weight
        return heapq.nsmallest(limit, held, key=lambda number: (-held[number], number))


class CombinedRouter:
    """By the ranks that several routers give an artifact (reciprocal rank fusion, Cormack et al. 2009).

    Its confidence is the mean of theirs.
    """

    def __init__(self, routers: Sequence[Router]) -> None:
        self._routers = routers

    def route(self, question: str, limit: int = 5) -> Routing:
        routings = [router.route(question, max(limit, _RANKED)) for router in self._routers]
        scores: dict[str, float] = {}
        routes: dict[str, Route] = {}
        for routing in routings:
            for rank, route in enumerate(routing.routes, 1):
                scores[route.artifact_id] = scores.get(route.artifact_id, 0.0) + 1 / (_RANK_OFFSET + rank)
                routes.setdefault(route.artifact_id, route)
        best = sorted(scores, key=lambda artifact: -scores[artifact])[:limit]
        confidence = sum(routing.confidence for routing in routings) / len(routings)
        return Routing([replace(routes[artifact], score=scores[artifact]) for artifact in best], confidence)


def best_of_each(found: Sequence[Passage], limit: int) -> list[Route]:
    """Each artifact's best passage, from passages best first."""
    routes: dict[str, Route] = {}
    for passage in found:
        routes.setdefault(passage.artifact_id, Route(passage.artifact_id, passage.score, passage.start, passage.stop))
    return list(routes.values())[:limit]


def content_words(question: str) -> list[str]:
    """The distinct words of a question, without those that any question has."""
    words = list(dict.fromkeys(re.findall(r"\w+", question.lower())))[:_MAX_WORDS]
    return [word for word in words if word not in _STOP_WORDS] or words


def make_router(name: str, index: PassageIndex, progress: Callable[[str, int, int], None] | None = None) -> Router:
    """A router by its name: lexical, dense, or both.

    Parameters
    ----------
    progress
        Told how many passages are embedded, for dense.

    Raises
    ------
    InvalidInput
        If there is none of that name.
    ModelUnavailable
        If the encoder can't be had.
    """
    if name not in ROUTERS:
        raise InvalidInput(f"{name[:100]!r} is no router; the routers are: {', '.join(ROUTERS)}", router=name[:100])
    if name == "lexical":
        return LexicalRouter(index)
    from engine_adapter.dense import DenseRouter
    from engine_adapter.embeddings import Encoder, fetch_encoder

    dense = DenseRouter(index, Encoder(fetch_encoder()), progress)
    return dense if name == "dense" else CombinedRouter([LexicalRouter(index), dense])
