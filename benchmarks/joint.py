"""Joint attention by length of the context: needles found and read, time per token, device memory."""

from __future__ import annotations

import statistics
import time
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.haystack import haystack, spread
from benchmarks.needles import Needle, kinds, multi_key
from engine_adapter.demo_models import resolve
from engine_adapter.joint import JointRun, JointSession
from engine_adapter.joint_settings import JointSettings

_ANSWER_TOKENS = 8


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
    with JointSession(model, tokenizer, settings) as session:
        for multiple in multiples:
            results[f"{multiple}x"] = {
                kind: _at(session, multiple * window, made)
                for kind, made in (("kinds", kinds(needles, multiple)), ("owners", multi_key(needles, multiple)))
            }
    return {"model": model_name, "dtype": dtype, "exact": False, "settings": dict(settings.to_json()), **results}


def _at(session: JointSession, length: int, needles: list[Needle]) -> dict[str, Any]:
    assert session.tokenizer is not None
    hay = haystack(session.tokenizer, length, spread(needles, length, length), length)
    times: list[float] = []
    began = time.perf_counter()

    def progress(*_: object) -> None:
        times.append(time.perf_counter())

    run = session.extend(session.new_run(), hay.tokens, progress=progress)
    mark = run.mark()
    answers = []
    for number, needle in enumerate(needles):
        answers.append(_ask(session, run, hay.places(number)[0], needle))
        run.rewind(mark)
    # The first chunks see less than a window; the last one is run twice, for it selects.
    steady = [later - before for before, later in zip([began, *times], times, strict=False)][8:-1]
    result = {
        "tokens": len(hay.tokens),
        "read_correctly": sum(answer["correct"] for answer in answers),
        "found": sum(answer["found"] for answer in answers),
        "asked": len(answers),
        "ms_per_token_read": round(statistics.median(steady) / session.settings.chunk * 1e3, 2) if steady else None,
        "s_per_question": round(statistics.median(answer["s"] for answer in answers), 2),
        "device_bytes": session.device_bytes(run),
        "host_bytes": session.device.pages.host_bytes,
    }
    run.close()
    return result


def _ask(session: JointSession, run: JointRun, place: range, needle: Needle) -> dict[str, Any]:
    assert session.tokenizer is not None
    settings = session.settings
    began = time.perf_counter()
    session.extend(run, session.tokenizer.encode(needle.question, add_special_tokens=False))
    selected = run.cache.view.selected
    text = session.generate(run, _ANSWER_TOKENS).text or ""
    blocks = range(
        (place.start - settings.sinks) // settings.block_tokens,
        (place.stop - 1 - settings.sinks) // settings.block_tokens + 1,
    )
    local = (settings.near(len(run.tokens)) - settings.sinks) // settings.block_tokens
    return {
        "s": time.perf_counter() - began,
        "correct": needle.share(text) == 1,
        "found": selected is None or all(block < 0 or block in selected or block >= local for block in blocks),
    }
