"""The ways past the window that the ladder compares: each reads a haystack and answers questions about it.

All are asked the same question in the same words behind what they see, without a chat template.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.haystack import Haystack
from engine_adapter import GraftSession
from engine_adapter.passages import PassageIndex
from engine_adapter.routers import LexicalRouter

if TYPE_CHECKING:
    from benchmarks.needles import Needle
    from engine_adapter.joint import JointSession
    from engine_adapter.run import Run

RESERVE = 128
"""Tokens of the window that are left to a question and its answer."""

_MARKED_TOKENS = 2048
_TEXT_PARTS = 4


@dataclass(frozen=True)
class Reading:
    """What came of one question.

    Attributes
    ----------
    share
        Of the numbers that were asked for, those in the answer.
    answer
        As it was generated.
    found
        Whether what the way chose to show the model holds the whole needle; None where nothing is chosen.
    device_bytes
        The state that the model had on its device.
    same_bits
        Whether the answer's logits are those of a fresh run; None where that was not tried.
    """

    share: float
    answer: str
    found: bool | None
    seconds: float
    device_bytes: int
    same_bits: bool | None = None


class Way(Protocol):
    """Reads haystacks and answers."""

    def ask(self, hay: Haystack, needles: dict[int, Needle]) -> Iterator[Reading]:
        """Answers for needles by their numbers in the haystack, in order."""

    def close(self) -> None: ...


class Truncated:
    """The newest tokens that fit the window; the rest is not seen."""

    def __init__(self, session: GraftSession, window: int) -> None:
        self._session = session
        self._room = window - RESERVE

    def ask(self, hay: Haystack, needles: dict[int, Needle]) -> Iterator[Reading]:
        first, tokens = len(hay.opening), hay.tokens
        kept = tokens[:first] + tokens[max(first, len(tokens) - self._room + first) :]
        run = self._session.prefill(kept, graft=False)
        for needle in needles.values():
            yield _answered(self._session, run.fork(), needle)[0]

    def close(self) -> None:
        pass


class Plain:
    """All tokens at their own positions, far past those that the model was trained on; dense attention over all."""

    def __init__(self, session: GraftSession) -> None:
        self._session = session
        self._run: Run | None = None

    def ask(self, hay: Haystack, needles: dict[int, Needle]) -> Iterator[Reading]:
        native, self._session.window = self._session.window, None
        try:
            held = self._run.tokens if self._run is not None else []
            if self._run is None or hay.tokens[: len(held)] != held:
                self._run = self._session.new_run()
            self._session.extend(self._run, hay.tokens[len(self._run.tokens) :])
            for needle in needles.values():
                yield _answered(self._session, self._run.fork(), needle)[0]
        finally:
            self._session.window = native

    def close(self) -> None:
        self._run = None


class Library:
    """Artifacts that fill the window; the question is routed to one, which is grafted.

    An artifact is computed and deposited when a question is first routed to it: those that no question asks for
    would take hours and change nothing.

    Parameters
    ----------
    checked_tokens
        In texts of at most so many, compare the logits of each answer with those of a fresh run over the artifact's
        tokens and the question.
    """

    def __init__(self, session: GraftSession, window: int, *, checked_tokens: int) -> None:
        self._session = session
        self._room = window - RESERVE
        self._checked_tokens = checked_tokens
        self._index = PassageIndex(None)
        self._deposited: dict[str, str] = {}

    def ask(self, hay: Haystack, needles: dict[int, Needle]) -> Iterator[Reading]:
        parts = _indexed(self._index, hay, self._room)
        for number, needle in needles.items():
            began = time.perf_counter()
            name = LexicalRouter(self._index).route(needle.question, limit=1).routes[0].artifact_id
            routed = time.perf_counter() - began
            part = parts[name]
            if name not in self._deposited:
                self._deposited[name] = self._session.deposit(part.tokens, text=part.text).id
            began = time.perf_counter()
            run = self._session.graft(self._deposited[name])
            grafted = time.perf_counter() - began
            reading, digests = _answered(self._session, run, needle)
            same = None
            if len(hay.tokens) <= self._checked_tokens:
                fresh = self._session.prefill(part.tokens, graft=False)
                same = _answered(self._session, fresh, needle)[1] == digests
            found = sum(segment.needle == number for segment in part.segments) == len(needle.sentences)
            yield replace(reading, found=found, seconds=routed + grafted + reading.seconds, same_bits=same)

    def close(self) -> None:
        self._index.close()


class Text:
    """The passages that the same router finds best, given to the model as text and computed."""

    def __init__(self, session: GraftSession, window: int) -> None:
        self._session = session
        self._room = window - RESERVE
        self._index = PassageIndex(None)

    def ask(self, hay: Haystack, needles: dict[int, Needle]) -> Iterator[Reading]:
        assert self._session.tokenizer is not None
        parts = _indexed(self._index, hay, self._room)
        for needle in needles.values():
            began = time.perf_counter()
            routes = LexicalRouter(self._index).route(needle.question, limit=_TEXT_PARTS).routes
            text = "\n".join(parts[route.artifact_id].text[route.start : route.stop] for route in routes)
            ids = self._session.tokenizer.encode(text, add_special_tokens=False)
            run = self._session.prefill(hay.opening + ids[: self._room - len(hay.opening)], graft=False)
            reading, _ = _answered(self._session, run, needle)
            found = all(sentence.strip() in text for sentence in needle.sentences)
            yield replace(reading, found=found, seconds=time.perf_counter() - began)

    def close(self) -> None:
        self._index.close()


class Joint:
    """One context of all tokens, of which the question selects what it sees.

    A haystack that begins as the one before it is read on from there.

    Attributes
    ----------
    chunk_seconds
        What each chunk of the last haystack took, of those that were read for it.
    """

    def __init__(self, session: JointSession) -> None:
        self._session = session
        self._run = session.new_run()
        self._marks = [self._run.mark()]
        self.chunk_seconds: list[float] = []

    def ask(self, hay: Haystack, needles: dict[int, Needle]) -> Iterator[Reading]:
        self._read(hay.tokens)
        here = self._run.mark()
        for number, needle in needles.items():
            yield self._answered(hay.places(number), needle)
            self._run.rewind(here)

    def close(self) -> None:
        self._run.close()
        self._session.close()

    def _read(self, tokens: list[int]) -> None:
        run = self._run
        shared = next(
            (at for at, (ours, theirs) in enumerate(zip(run.tokens, tokens, strict=False)) if ours != theirs),
            len(run.tokens),
        )
        while self._marks[-1].tokens > shared:
            self._marks.pop()
        run.rewind(self._marks[-1])
        times = [time.perf_counter()]

        def mark(_: str, done: int, total: int) -> None:
            times.append(time.perf_counter())
            if done % _MARKED_TOKENS == 0:
                self._marks.append(run.mark())
            if done % (16 * _MARKED_TOKENS) == 0:
                rate = (done - start) / (times[-1] - times[0])
                print(f"joint: {done:,} of {total:,} tokens, {rate:.0f} a second", file=sys.stderr, flush=True)

        start = len(run.tokens)
        if start < len(tokens):
            self._session.extend(run, tokens[start:], progress=mark)
        self.chunk_seconds = [after - before for before, after in pairwise(times)]

    def _answered(self, places: list[range], needle: Needle) -> Reading:
        session, settings, run = self._session, self._session.settings, self._run
        began = time.perf_counter()
        session.extend(run, needle.question)
        selected = run.cache.view.selected
        near = settings.near(len(run.tokens))
        text = session.generate(run, needle.tokens).text or ""
        seen = [
            token < settings.sinks
            or token >= near
            or selected is None
            or (token - settings.sinks) // settings.block_tokens in selected
            for place in places
            for token in place
        ]
        return Reading(needle.share(text), text, all(seen), time.perf_counter() - began, session.device_bytes(run))


def _indexed(index: PassageIndex, hay: Haystack, room: int) -> dict[str, Haystack]:
    """The parts of a text by names that tell them apart, brought to an index."""
    parts = {hashlib.sha256(part.text.encode()).hexdigest(): part for part in hay.parts(room)}
    index.update({name: [] for name in parts}, lambda name: parts[name].text)
    return parts


def _answered(session: GraftSession, run: Run, needle: Needle) -> tuple[Reading, list[str]]:
    """An answer behind what a run holds, and the digests of its logits."""
    began = time.perf_counter()
    session.extend(run, needle.question)
    made = session.generate(run, needle.tokens)
    seconds = time.perf_counter() - began
    layers: Sequence[Any] = run.cache.layers
    held = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    text = made.text or ""
    return Reading(needle.share(text), text, None, seconds, held), made.logits_sha256
