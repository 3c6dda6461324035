"""Paged runs against resident ones: time per token, stalls and device memory by length of the context."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine_adapter.cache import RoomyLayer
from engine_adapter.demo_models import resolve
from engine_adapter.engine import Engine
from engine_adapter.paged import Paging
from engine_adapter.paged_attention import paged_attention
from engine_adapter.pager import PagerCounters
from engine_adapter.run import Run, logits_sha256
from engine_adapter.state import measure_groups
from repo_service.domain.layout import Layout
from repo_service.domain.schedule import DECODE, PREFILL

SPLIT = 256
PROMPT_TOKENS = 256


@dataclass
class _Way:
    """One engine at a length, and what its calls took."""

    engine: Engine
    run: Run
    attention: str
    seconds: list[float] = field(default_factory=list)
    prompt_s: float = 0.0
    logits: list[str] = field(default_factory=list)
    before: PagerCounters = field(default_factory=PagerCounters)


def run(lengths: list[int], tokens: int, model_name: str, dtype: str) -> dict[str, Any]:
    """``tokens`` single tokens and one block of 256 after contexts of ``lengths`` tokens of made-up state.

    Resident under sdpa and under the attention of paged runs; paged with pools of 2 and 16 pages, a quarter
    of all and all, with prefetch and without. The ways take turns at each token. What the first token brings into an
    empty pool is not counted.
    """
    attention = paged_attention(SPLIT)
    model = AutoModelForCausalLM.from_pretrained(resolve(model_name), dtype=dtype, attn_implementation=attention).eval()
    layout = Layout(SPLIT, measure_groups(model, SPLIT))
    return {
        "model": model_name,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "split": SPLIT,
        "tokens_timed": tokens,
        "lengths": {str(length): _at(model, layout, attention, length, tokens) for length in lengths},
    }


def _at(model: PreTrainedModel, layout: Layout, attention: str, length: int, tokens: int) -> dict[str, Any]:
    full = sum(len(group.layers) for group in layout.groups if group.window is None)
    every = full * -(-(length + tokens + 1 + PROMPT_TOKENS) // SPLIT)
    pools = {"2 pages": 2, "16 pages": 16, "a quarter": max(2, every // 4), "all pages": every}
    with ExitStack() as stack:
        ways = {
            "resident, sdpa": _way(model, "sdpa", length, None),
            "resident, paged attention": _way(model, attention, length, None),
        }
        for name, pages in pools.items():
            for prefetch in (True, False):
                paging = stack.enter_context(closing(Paging(model, layout, pages=pages, prefetch=prefetch)))
                ways[f"paged, {name}, {'prefetch' if prefetch else 'no prefetch'}"] = _way(
                    model, attention, length, paging
                )
        for number in range(tokens + 1):
            for way in ways.values():
                _call(model, way, [100 + number], DECODE, counts=number > 0)
        after = {name: way.engine.paging.pager.counters for name, way in ways.items() if way.engine.paging is not None}
        for way in ways.values():
            _call(model, way, list(range(100, 100 + PROMPT_TOKENS)), PREFILL, counts=False)
        return {name: _report(way, ways, after.get(name)) for name, way in ways.items()}


def _way(model: PreTrainedModel, attention: str, length: int, paging: Paging | None) -> _Way:
    engine = Engine(model, None, SPLIT)
    engine.paging = paging
    run = engine.new_run(length + 2 * PROMPT_TOKENS)
    generator = torch.Generator().manual_seed(1)
    # The same state in every way, as forward calls would have left it.
    first = engine.call(run, [1], PREFILL)
    layers: list[Any] = run.cache.layers
    config = model.config.get_text_config(decoder=True)
    heads, dim = config.num_key_value_heads, config.head_dim
    for layer in layers:
        for start in range(1, length, SPLIT):
            shape = (2, 1, heads, min(SPLIT, length - start), dim)
            layer.update(*torch.randn(shape, generator=generator).to(first.dtype))
    run.tokens.extend([1] * (length - 1))
    run.steps.clear()
    return _Way(engine, run, attention)


def _call(model: PreTrainedModel, way: _Way, ids: list[int], kind: str, *, counts: bool) -> None:
    model.set_attn_implementation(way.attention)
    start = time.perf_counter()
    logits = way.engine.call(way.run, ids, kind)
    way.logits.append(logits_sha256(logits))
    seconds = time.perf_counter() - start
    if counts:
        way.seconds.append(seconds)
    elif kind == PREFILL:
        way.prompt_s = seconds
    elif way.engine.paging is not None:
        way.before = way.engine.paging.pager.counters


def _report(way: _Way, ways: dict[str, _Way], after: PagerCounters | None) -> dict[str, Any]:
    baseline, same = ways["resident, sdpa"], ways["resident, paged attention"]
    found: dict[str, Any] = {
        "token_ms": round(1e3 * statistics.median(way.seconds), 2),
        "token_against_sdpa": round(
            statistics.median(a / b for a, b in zip(way.seconds, baseline.seconds, strict=True)), 2
        ),
        "block_s": round(way.prompt_s, 3),
        "block_against_sdpa": round(way.prompt_s / baseline.prompt_s, 2),
        "bits_of_resident_paged_attention": way.logits == same.logits,
        "device_state_bytes": _device_bytes(way),
    }
    if after is not None:
        done, count = after.since(way.before), len(way.seconds)
        found |= {
            "pages": way.engine.paging.pager.pages if way.engine.paging is not None else 0,
            "stall_ms_per_token": round(1e3 * done.stall_s / count, 3),
            "hit_rate": round(done.hits / (done.hits + done.misses), 3),
            "prefetched_per_token": round(done.prefetched / count, 1),
            "read_mib_per_token": round(done.bytes_read / count / 2**20, 2),
        }
    return found


def _device_bytes(way: _Way) -> int:
    """The state's bytes on the device: the pool, or full layers with their room; and sliding layers."""
    size = 0 if way.engine.paging is None else way.engine.paging.pager.counters.peak_bytes
    layers: list[Any] = way.run.cache.layers
    for layer in layers:
        if isinstance(layer, RoomyLayer):
            size += sum(memory.nbytes for memory in layer._memory if memory is not None)
        elif layer.is_sliding:
            size += layer.keys.nbytes + layer.values.nbytes
    return size
