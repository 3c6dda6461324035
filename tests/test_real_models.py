"""Real models: exact around every boundary that matters, across processes, through the service, and refused elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.resources import files

import pytest
import torch
from exactness import fresh_logits, sha256
from graft_process import run_process
from places import WAYS, Place
from serving import served
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine_adapter import GraftSession, open_repository
from engine_adapter.demo_models import fetch
from repo_service.domain.schedule import canonical_steps

pytestmark = pytest.mark.everywhere

TEXT = files("engine_adapter").joinpath("data/demo.txt").read_text()
OTHER_ARCHITECTURES = [
    ("float32", {"ATEN_CPU_CAPABILITY": "avx2"}),
    ("float32", {"MKL_CBWR": "COMPATIBLE"}),
    ("float32", {"MKL_CBWR": "AVX2"}),
    ("bfloat16", {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
]


@pytest.fixture(scope="module")
def smollm2() -> str:
    return str(fetch("smollm2"))


@pytest.fixture(scope="module")
def gemma3() -> str:
    return str(fetch("gemma3"))


@pytest.fixture(params=WAYS)
def url(request: pytest.FixtureRequest, root: Place) -> Iterator[str]:
    """Of a new repository, or of a service that serves one."""
    with served(root.as_uri()) if request.param == "service" else nullcontext(root.as_uri()) as reached:
        yield reached


def text_tokens(path: str, count: int) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(path).encode(TEXT)
    assert len(ids) >= count
    return ids[:count]


@contextmanager
def session_on(url: str, path: str, dtype: str, attention: str, block_tokens: int) -> Iterator[GraftSession]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention).eval()
    with (
        open_repository(url) as repository,
        GraftSession(model, None, repository, block_tokens=block_tokens) as session,
    ):
        yield session


def check_points(session: GraftSession, stored: list[int], lengths: list[int], matrix: list[str]) -> None:
    size = session.layout.block_tokens
    session.deposit(stored)
    for length in lengths:
        boundary = (length - 1) // size * size
        prompt = stored[:boundary] + stored[::-1][: length - boundary]
        run = session.prefill(prompt)
        assert (run.grafted_tokens, run.computed_tokens) == (boundary, length - boundary)
        fresh = fresh_logits(session.model, prompt, canonical_steps(0, length, size))
        assert sha256(run.logits) == sha256(fresh), f"length {length}, blocks of {size}"
        attention = session.model.config._attn_implementation
        matrix.append(f"{type(session.model).__name__} {session.model.dtype} {attention} {size} {length}")


@pytest.mark.parametrize(("dtype", "attention"), [("float32", "sdpa"), ("bfloat16", "sdpa"), ("float32", "eager")])
def test_smollm2_grafts_exactly(smollm2: str, url: str, dtype: str, attention: str, matrix: list[str]) -> None:
    with session_on(url, smollm2, dtype, attention, 256) as session:
        check_points(session, text_tokens(smollm2, 1024), [257, 512 + 37, 1024], matrix)


@pytest.mark.parametrize("block_tokens", [256, 1024])
def test_transformers_37574_gemma3_grafts_exactly_around_its_window(
    gemma3: str, url: str, block_tokens: int, matrix: list[str]
) -> None:
    with session_on(url, gemma3, "bfloat16", "sdpa", block_tokens) as session:
        window = session.model.config.sliding_window
        assert window == 512
        lengths = [n + 1 for n in (window - 1, window, window + 1, 2 * window)]
        check_points(session, text_tokens(gemma3, 2 * block_tokens if block_tokens > 512 else 1536), lengths, matrix)


def test_a_graft_is_exact_in_another_process_and_through_the_service(smollm2: str, root: Place) -> None:
    tokens = text_tokens(smollm2, 600)
    with served(root.as_uri()) as url:
        made = run_process(url, smollm2, "deposit", tokens)
        grafted = run_process(url, smollm2, "graft", tokens)
        again = run_process(url, smollm2, "prefill", tokens)
    assert grafted["sha256"] == again["sha256"] == made["sha256"]
    assert (grafted["grafted"], again["grafted"]) == (600, 512)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_architecture_on_the_same_machine_is_refused(smollm2: str, url: str, dtype: str) -> None:
    tokens = text_tokens(smollm2, 300)
    run_process(url, smollm2, "deposit", tokens, dtype=dtype)
    for env in (env for kind, env in OTHER_ARCHITECTURES if kind == dtype):
        other = run_process(url, smollm2, "graft", tokens, dtype=dtype, env=env)
        assert other["error"]["code"] == "fingerprint_mismatch", env
        assert any(field.startswith(("canary.", "numerics.")) for field in other["error"]["details"]["fields"])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_thread_counts_share_artifacts_only_where_they_give_equal_bits(smollm2: str, url: str, dtype: str) -> None:
    tokens = text_tokens(smollm2, 256 + 100)
    fingerprints, digests = [], []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with session_on(url, smollm2, dtype, "sdpa", 256) as session:
                fingerprints.append(session.fingerprint.id)
                prompts = [tokens[:n] for n in (5, 64, 100, 356)]
                steps = [canonical_steps(0, len(prompt), 256) for prompt in prompts]
                digests.append([sha256(fresh_logits(session.model, p, s)) for p, s in zip(prompts, steps, strict=True)])
    finally:
        torch.set_num_threads(before)
    equal_bits = digests[0] == digests[1]
    assert (fingerprints[0] == fingerprints[1]) == equal_bits
