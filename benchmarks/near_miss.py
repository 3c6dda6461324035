"""Near-miss harm: what a model answers from the wrong artifact, a sibling with the same question and another answer.

Siblings are two documents of real text about two series of one thing, each with its series' number. A question is asked with
the right one grafted, with its sibling grafted on purpose, without any, and of libraries that hold both or the sibling
alone, where the router decides and its confidence is the gate.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.haystack import Hidden, haystack
from benchmarks.needles import Needle, owned_numbers
from engine_adapter import GraftSession, open_repository
from engine_adapter.ask import DEFAULT_THRESHOLD, ask
from engine_adapter.demo_models import resolve
from engine_adapter.documents import read_documents
from engine_adapter.library import Library
from engine_adapter.passages import PassageIndex
from engine_adapter.routers import LexicalRouter, Route, Router, Routing

WINDOW = 2048
RESERVE = 256
_DOCUMENT_TOKENS = 1650
_ANSWER_TOKENS = 32
_SERIES = ("series 3", "series 7")


@dataclass(frozen=True)
class Sibling:
    """One of two documents, by its artifact."""

    artifact_id: str
    question: str
    number: str
    other_number: str
    other_id: str


class _Fixed:
    """A router that knows one way only."""

    def __init__(self, artifact_id: str | None) -> None:
        self._artifact_id = artifact_id

    def route(self, *_: object, **__: object) -> Routing:
        if self._artifact_id is None:
            return Routing([Route("", 0.0, 0, 0)], 0.0)
        return Routing([Route(self._artifact_id, 1.0, 0, 1)], 1.0)


def run(model_name: str, pairs: int) -> dict[str, Any]:
    """Ask about both documents of ``pairs`` pairs."""
    path = resolve(model_name)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    with (
        tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory,
        open_repository(f"file://{directory}/repository") as repository,
        GraftSession(model, tokenizer, repository) as session,
    ):
        library = Library(session, window=WINDOW, reserve=RESERVE)
        siblings = _add(library, Path(directory, "documents"), pairs)
        texts = {
            one.artifact_id: repository.manifest(one.artifact_id, session.namespace).text or "" for one in siblings
        }
        index = PassageIndex(None)
        router = LexicalRouter(index)
        ways: dict[str, Counter[str]] = {}
        first = 0
        ungated: dict[str, list[tuple[float, str]]] = {}

        def count(way: str, one: Sibling, by: Router, threshold: float) -> str:
            text = ask(library, by, one.question, threshold=threshold, max_new_tokens=_ANSWER_TOKENS).text
            kind = _kind(text, one)
            ways.setdefault(way, Counter())[kind] += 1
            return kind

        for one in siblings:
            count("right artifact grafted", one, _Fixed(one.artifact_id), 0)
            count("sibling grafted", one, _Fixed(one.other_id), 0)
            count("nothing grafted", one, _Fixed(None), 1)
            for way, absent in (("library with both", None), ("library without the right one", one.artifact_id)):
                index.update({name: [] for name in texts if name != absent}, texts.__getitem__)
                routing = router.route(one.question)
                first += absent is None and routing.routes[0].artifact_id == one.artifact_id
                kind = count(f"{way}, no gate", one, router, 0)
                ungated.setdefault(way, []).append((round(routing.confidence, 3), kind))
                count(f"{way}, gate at {DEFAULT_THRESHOLD}", one, router, DEFAULT_THRESHOLD)
        index.close()
    return {
        "model": model_name,
        "questions": len(siblings),
        "router_right_first": first,
        "answers": {way: dict(counted) for way, counted in ways.items()},
        "confidence_and_answer_without_a_gate": ungated,
    }


def _add(library: Library, directory: Path, pairs: int) -> list[Sibling]:
    directory.mkdir()
    made = []
    for pair, (what, owner, numbers) in enumerate(owned_numbers(pairs, len(_SERIES), seed=1)):
        for which, series in enumerate(_SERIES):
            name, number = f"{what} of the {owner} {series}", numbers[which]
            needle = Needle((f"\nThe {name} is {number}.\n",), f"What is the {name}?", (number,))
            seed = 2 * pair + which
            place = int((0.1 + 0.8 * ((seed * 7) % 10) / 10) * _DOCUMENT_TOKENS)
            hay = haystack(library.prompt.tokenizer, _DOCUMENT_TOKENS, [Hidden(needle, (place,))], seed)
            file = directory / f"{pair:03d}-{which}.txt"
            file.write_text(hay.text)
            made.append((str(file), needle, numbers[1 - which]))
    library.add(library.plan(read_documents([str(directory)]), whole=True))
    held = {part.source: each.info.id for each in library.artifacts() for part in each.parts}
    if len(set(held.values())) != len(made):
        raise RuntimeError(f"{len(made)} documents came to {len(set(held.values()))} artifacts, not one each")
    ids = [held[source] for source, *_ in made]
    return [
        Sibling(ids[at], needle.question, needle.answers[0], other, ids[at ^ 1])
        for at, (_, needle, other) in enumerate(made)
    ]


def _kind(text: str, one: Sibling) -> str:
    if one.number in text:
        return "right"
    if one.other_number in text:
        return "sibling's number"
    return "another number" if re.search(r"\d{3}", text) else "no number"
