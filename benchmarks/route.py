"""Routing and its confidence on real documents: the manuals of Django and SQLAlchemy, 60 questions to them and 60 to others.

Documents are packed as `kvgraft library add` packs them, with four characters for a token, so that no model is needed.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.haystack import manuals
from benchmarks.questions import ANSWERED, FOREIGN, NEAR
from engine_adapter.ask import DEFAULT_THRESHOLD
from engine_adapter.packing import Packed, Packer, Piece, heading
from engine_adapter.passages import PassageIndex
from engine_adapter.routers import LexicalRouter, Route, Router, Routing

_CHARACTERS_PER_TOKEN = 4


def run(rooms: Sequence[int], documents: int | None = None) -> dict[str, Any]:
    """Artifacts of at most so many tokens each; of the first ``documents`` documents only, for a try."""
    return {f"{room:,} tokens": _at(room, documents) for room in rooms}


def _at(room: int, documents: int | None) -> dict[str, Any]:
    packed = _packed(room, documents)
    index = PassageIndex(None)
    index.update(
        {name: [part.at - len(heading(part.name, part.start)) for part in one.parts] for name, one in packed.items()},
        lambda name: packed[name].text,
    )
    router = LexicalRouter(index)
    answered = [(router.route(question), right) for question, right in ANSWERED]
    seconds = []
    for question, _ in ANSWERED:
        began = time.perf_counter()
        router.route(question)
        seconds.append(time.perf_counter() - began)
    ranks = [_rank(routing, right, packed) for routing, right in answered]
    confidences = {
        "answered": [round(routing.confidence, 3) for routing, _ in answered],
        "near": _confidences(router, NEAR),
        "foreign": _confidences(router, FOREIGN),
    }
    found = {
        "artifacts": len(packed),
        "passages": len(index),
        "questions": len(ANSWERED),
        "right_document_first": sum(rank == 0 for rank in ranks),
        "right_document_among_five": sum(rank is not None for rank in ranks),
        "route_ms_p50": round(statistics.median(seconds) * 1e3, 2),
        "grafted": {
            kind: sum(confidence >= DEFAULT_THRESHOLD for confidence in some) for kind, some in confidences.items()
        },
        "grafted_and_right": sum(
            rank == 0 and routing.confidence >= DEFAULT_THRESHOLD
            for rank, (routing, _) in zip(ranks, answered, strict=True)
        ),
        "confidences": confidences,
    }
    index.close()
    return found


def _confidences(router: Router, questions: Sequence[str]) -> list[float]:
    return [round(router.route(question).confidence, 3) for question in questions]


def _rank(routing: Routing, right: Sequence[str], packed: dict[str, Packed]) -> int | None:
    """Where the first artifact is whose best passage lies in a right document."""
    return next((place for place, route in enumerate(routing.routes) if _document(route, packed) in right), None)


def _document(route: Route, packed: dict[str, Packed]) -> str:
    parts = packed[route.artifact_id].parts
    return max((part for part in parts if part.at <= route.start), default=parts[0], key=lambda part: part.at).name


def _packed(room: int, documents: int | None) -> dict[str, Packed]:
    pieces = [
        Piece(name, name, hashlib.sha256(text.encode()).hexdigest(), len(text), 0, text)
        for name, text in sorted(manuals().items())[:documents]
    ]
    packer = Packer(_tokens, lambda texts: [len(_tokens(text)) for text in texts], room)
    return {hashlib.sha256(one.text.encode()).hexdigest(): one for one in packer.pack(pieces)}


def _tokens(text: str) -> range:
    return range(-(-len(text) // _CHARACTERS_PER_TOKEN))
