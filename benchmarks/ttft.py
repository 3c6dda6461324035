"""Time to first token, grafted against fresh, on the demo model."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_adapter import GraftSession, open_repository
from engine_adapter.canary import GROUPED_ATTENTION
from engine_adapter.demo_models import resolve
from engine_adapter.run import logits_sha256

QUESTION_TOKENS = 24


def run(lengths: list[int], rounds: int, model_name: str, dtype: str, *, grouped: bool) -> dict[str, Any]:
    """Prompts of ``lengths`` tokens: a stored document and a question of 24 tokens after its last whole block.

    Grafted: match, manifest, records, verified read, placing, the question's forward call, including
    the check that the weights are unchanged. Fresh: the same prompt under the same schedule.

    ``grouped`` sets ``TRANSFORMERS_SDPA_FORCE_GQA``, for the fresh runs and the grafted ones.
    """
    os.environ[GROUPED_ATTENTION] = "1" if grouped else "0"
    path = resolve(model_name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    generator = torch.Generator().manual_seed(1)
    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory,
        open_repository(f"file://{directory}/repository") as repository,
        GraftSession(model, tokenizer, repository) as session,
    ):
        longest = torch.randint(100, session.vocabulary - 100, (max(lengths),), generator=generator).tolist()
        for length in sorted(lengths):
            document = longest[: (length - QUESTION_TOKENS) // 256 * 256]
            prompt = longest[: len(document)] + longest[-QUESTION_TOKENS:]
            session.deposit(document)
            before = _timed(session, prompt, graft=False)
            grafted = [_timed(session, prompt, graft=True) for _ in range(rounds)]
            fresh = [before, _timed(session, prompt, graft=False)]
            fresh_s, grafted_s = (statistics.median(one.seconds for one in way) for way in (fresh, grafted))
            results[str(length)] = {
                "prompt_tokens": len(prompt),
                "grafted_tokens": grafted[0].grafted_tokens,
                "computed_tokens": grafted[0].computed_tokens,
                "fresh_s": round(fresh_s, 3),
                "grafted_s": round(grafted_s, 4),
                "speedup": round(fresh_s / grafted_s, 1),
                "exact": len({one.logits for one in fresh + grafted}) == 1,
            }
    return {
        "model": model_name,
        "dtype": dtype,
        "grouped_attention": grouped,
        "rounds_grafted": rounds,
        "page_cache": "warm",
        "tokens": results,
    }


class _Timed(NamedTuple):
    seconds: float
    grafted_tokens: int
    computed_tokens: int
    logits: str


def _timed(session: GraftSession, prompt: list[int], *, graft: bool) -> _Timed:
    """One run, whose state is gone afterwards: the next one finds memory that was used before."""
    start = time.perf_counter()
    run = session.prefill(prompt, graft=graft)
    int(run.logits.argmax())
    seconds = time.perf_counter() - start
    return _Timed(seconds, run.grafted_tokens, run.computed_tokens, logits_sha256(run.logits))
