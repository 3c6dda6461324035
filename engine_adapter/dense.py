"""Routing by meaning: passages and question as vectors, compared by their cosine."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

import torch

from engine_adapter.embeddings import DIMENSIONS, Encoder
from engine_adapter.engine import Progress
from engine_adapter.passages import PassageIndex
from engine_adapter.routers import PASSAGES_PER_ROUTE, Routing, best_of_each
from engine_adapter.tensors import host_bytes

if TYPE_CHECKING:
    from torch import Tensor

# Memory of a search is bounded by what is compared at once: 24 MiB.
_COMPARED_AT_ONCE = 2**14
# What is embedded is kept after so many passages.
_EMBEDDED_AT_ONCE = 64
# Between the best cosines of questions that a library answers and of those it does not: docs/past-the-window.md.
_EVEN_COSINE = 0.34
_COSINE_WIDTH = 0.05


class DenseRouter:
    """By what question and passages mean, to an encoder.

    Embeddings of passages are kept in the index, so that only new ones are computed.

    Parameters
    ----------
    progress
        Told how many passages are embedded.
    """

    def __init__(self, index: PassageIndex, encoder: Encoder, progress: Progress | None = None) -> None:
        self._index = index
        self._encoder = encoder
        done, total = 0, index.bare_count()
        while bare := index.bare(_EMBEDDED_AT_ONCE):
            vectors = encoder.encode([text for _, text in bare]).half()
            index.embed(
                [(number, bytes(host_bytes(vector))) for (number, _), vector in zip(bare, vectors, strict=True)]
            )
            done += len(bare)
            if progress is not None:
                progress("passages", done, max(total, done))

    def route(self, question: str, limit: int = 5) -> Routing:
        cosines = self._nearest(self._encoder.encode([question])[0], limit * PASSAGES_PER_ROUTE)
        found = self._index.passages(cosines)
        if not found:
            return Routing([], 0.0)
        confidence = 1 / (1 + math.exp((_EVEN_COSINE - found[0].score) / _COSINE_WIDTH))
        return Routing(best_of_each(found, limit), confidence)

    def _nearest(self, wanted: Tensor, count: int) -> dict[int, float]:
        """Passages by number, with their cosines."""
        best: list[tuple[float, int]] = []
        for rows in self._index.embeddings(_COMPARED_AT_ONCE):
            data = bytearray(b"".join(embedding for _, embedding in rows))
            cosines = torch.frombuffer(data, dtype=torch.float16).view(-1, DIMENSIONS).float() @ wanted
            values, places = cosines.topk(min(count, len(rows)))
            pairs = ((value, rows[place][0]) for value, place in zip(values.tolist(), places.tolist(), strict=True))
            best = heapq.nlargest(count, [*best, *pairs])
        return {number: cosine for cosine, number in best}
