"""Joint attention by length of the context: needles found and read, time per token, device memory."""

from __future__ import annotations

import statistics
from contextlib import closing
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.haystack import haystack, spread
from benchmarks.ladder_ways import Joint
from benchmarks.needles import Needle, kinds, multi_key
from engine_adapter.demo_models import resolve
from engine_adapter.joint import JointSession
from engine_adapter.joint_settings import JointSettings


def run(model_name: str, dtype: str, window: int, multiples: list[int], needles: int) -> dict[str, Any]:
    """Contexts of ``multiples`` of the window, each read once; each needle is then asked for from a rewound run.

    The needles of one context are of as many kinds (or, second, of as many owners), so that they are questions of
    one sample and not contexts of their own: the other needles are distractors that a single passkey has not.
    """
    path = resolve(model_name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    settings = JointSettings(window=window)
    results: dict[str, Any] = {}
    session = JointSession(model, tokenizer, settings)
    with closing(Joint(session)) as way:
        for multiple in multiples:
            results[f"{multiple}x"] = {
                kind: _at(way, session, multiple * window, made)
                for kind, made in (("kinds", kinds(needles, multiple)), ("owners", multi_key(needles, multiple)))
            }
    return {"model": model_name, "dtype": dtype, "exact": False, "settings": dict(settings.to_json()), **results}


def _at(way: Joint, session: JointSession, length: int, needles: list[Needle]) -> dict[str, Any]:
    assert session.tokenizer is not None
    hay = haystack(session.tokenizer, length, spread(needles, length, length), length)
    readings = list(way.ask(hay, dict(enumerate(needles))))
    # The first chunks see less than a window; the last one is run twice, for it selects.
    steady = way.chunk_seconds[8:-1]
    return {
        "tokens": len(hay.tokens),
        "read_correctly": sum(reading.share == 1 for reading in readings),
        "found": sum(bool(reading.found) for reading in readings),
        "asked": len(readings),
        "ms_per_token_read": round(statistics.median(steady) / session.settings.chunk * 1e3, 2) if steady else None,
        "s_per_question": round(statistics.median(reading.seconds for reading in readings), 2),
        "device_bytes": max(reading.device_bytes for reading in readings),
        "host_bytes": session.device.pages.host_bytes,
    }
