"""The reference that grafts are held against: plain transformers, its own cache, the same schedule."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from repo_service.domain.schedule import Step


def fresh_logits(model: PreTrainedModel, tokens: Sequence[int], steps: Iterable[Step]) -> torch.Tensor:
    """Logits after the last token of a run that uses nothing of kvgraft's, ``[1, vocab]``."""
    cache = DynamicCache(config=model.config)
    logits = torch.empty(0)
    with torch.no_grad():
        for step in steps:
            for start, stop in step.calls():
                ids = torch.tensor([list(tokens[start:stop])])
                logits = model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    return logits


def sha256(logits: torch.Tensor) -> str:
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
