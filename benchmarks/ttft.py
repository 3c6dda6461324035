"""Time to first token, grafted against fresh, on the demo model."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_adapter import GraftSession, Run, open_repository
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
            fresh_s, fresh = _timed(session, prompt, graft=False)
            grafted = [_timed(session, prompt, graft=True) for _ in range(rounds)]
            grafted_s = statistics.median(seconds for seconds, _ in grafted)
            results[str(length)] = {
                "prompt_tokens": len(prompt),
                "grafted_tokens": grafted[0][1].grafted_tokens,
                "computed_tokens": grafted[0][1].computed_tokens,
                "fresh_s": round(fresh_s, 3),
                "grafted_s": round(grafted_s, 4),
                "speedup": round(fresh_s / grafted_s, 1),
                "exact": all(logits_sha256(run.logits) == logits_sha256(fresh.logits) for _, run in grafted),
            }
    return {
        "model": model_name,
        "dtype": dtype,
        "grouped_attention": grouped,
        "rounds_grafted": rounds,
        "page_cache": "warm",
        "tokens": results,
    }


def _timed(session: GraftSession, prompt: list[int], *, graft: bool) -> tuple[float, Run]:
    start = time.perf_counter()
    run = session.prefill(prompt, graft=graft)
    int(run.logits.argmax())
    return time.perf_counter() - start, run
