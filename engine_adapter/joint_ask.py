"""Questions about documents that are one context, far beyond the window: lossy, as all of the joint way."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_adapter.packing import heading
from engine_adapter.prompt import Prompt
from repo_service.domain.errors import InvalidInput

if TYPE_CHECKING:
    from engine_adapter.documents import Document
    from engine_adapter.engine import Progress
    from engine_adapter.joint import JointGeneration, JointSession


@dataclass(frozen=True)
class JointAnswer:
    """What a question got.

    Attributes
    ----------
    sources
        Names of the documents that the selected blocks begin in, those with most blocks first; None where the model
        saw all there is.
    answer_s
        Seconds for the question and its answer.
    """

    question: str
    text: str
    sources: list[str] | None
    generation: JointGeneration
    answer_s: float


class JointReader:
    """Documents that are read once, as one context; questions about it leave no trace in it.

    Parameters
    ----------
    documents
        Read in order, each under its name.

    Raises
    ------
    InvalidInput
        If there is nothing to read.
    """

    def __init__(
        self, session: JointSession, documents: Sequence[Document], *, progress: Progress | None = None
    ) -> None:
        if session.tokenizer is None:
            raise InvalidInput("documents were given to a session without a tokenizer")
        if not documents:
            raise InvalidInput("there is nothing to read: no document was found")
        self.session = session
        self._prompt = Prompt.of(session.tokenizer)
        self._names = [document.name for document in documents]
        self._starts: list[int] = []
        tokens: list[int] = []
        for document in documents:
            self._starts.append(len(tokens))
            text = heading(document.name, 0) + document.text
            tokens += self._prompt.more(f"\n\n{text}") if tokens else self._prompt.document(text)
        self.run = session.prefill(tokens, progress=progress)
        self._end = self.run.mark()

    def ask(self, question: str, max_new_tokens: int = 64) -> JointAnswer:
        """Raises
        ------
        InvalidInput
            If the question is empty.
        """
        if not question.strip():
            raise InvalidInput("the question is empty")
        began = time.perf_counter()
        try:
            self.session.extend(self.run, self._prompt.after_document(question))
            sources = self._sources(self.run.cache.view.selected)
            generation = self.session.generate(self.run, max_new_tokens)
        finally:
            self.run.rewind(self._end)
        text = self._prompt.answer(generation.text or "")
        return JointAnswer(question, text, sources, generation, time.perf_counter() - began)

    def _sources(self, selected: list[int] | None) -> list[str] | None:
        if selected is None:
            return None
        settings = self.session.settings
        begins = (settings.sinks + block * settings.block_tokens for block in selected)
        counted = Counter(self._names[bisect_right(self._starts, begin) - 1] for begin in begins)
        return [name for name, _ in counted.most_common()]
