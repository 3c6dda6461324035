"""Paged: the bits of a resident run, at every pool size, across graft and decode (I1, I3, I8)."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from exactness import fresh_logits, sha256
from places import WAYS, Place
from serving import reached
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, PreTrainedModel
from transformers.cache_utils import DynamicCache

from engine_adapter import GraftSession
from engine_adapter.demo_models import fetch
from engine_adapter.engine import Engine
from engine_adapter.paged import Paging
from engine_adapter.paged_attention import paged_attention, split_of
from engine_adapter.run import Run
from engine_adapter.state import measure_groups
from repo_service.domain.errors import FingerprintMismatch, InvalidInput, PageCorrupt, UnsupportedModel
from repo_service.domain.layout import Layout
from repo_service.domain.repository import Repository
from repo_service.domain.schedule import DECODE, Step, canonical_steps

BLOCK, SPLIT = 48, 32
PROMPT, DECODED = 200, 5
DTYPES = (torch.float32, torch.bfloat16)
KINDS = ("llama", "gemma3")  # Full layers alone, and full and sliding ones.


def build(family: str, dtype: torch.dtype = torch.float32, split: int = SPLIT) -> PreTrainedModel:
    return families.build(family, dtype, paged_attention(split))


def some_tokens(count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, families.VOCAB_SIZE) for _ in range(count)]


TOKENS = some_tokens(PROMPT + DECODED)


@contextmanager
def paged_engine(model: PreTrainedModel, pages: int | None = None, **options: Any) -> Iterator[tuple[Engine, Paging]]:
    engine = Engine(model, None, BLOCK)
    engine.paging = Paging(model, Layout(BLOCK, measure_groups(model, BLOCK)), pages=pages, **options)
    try:
        yield engine, engine.paging
    finally:
        engine.paging.close()


def digests(engine: Engine, run: Run | None = None) -> list[str]:
    """SHA-256 of the logits of every call over `TOKENS`: prefill in blocks, then single tokens."""
    run = run or engine.new_run(len(TOKENS))
    steps = [step.calls() for step in canonical_steps(len(run.tokens), PROMPT, BLOCK)]
    spans = [span for calls in steps for span in calls] + [(i, i + 1) for i in range(PROMPT, len(TOKENS))]
    return [sha256(engine.call(run, TOKENS[a:b], DECODE if a >= PROMPT else "prefill")) for a, b in spans]


@cache
def resident_digests(family: str, dtype: torch.dtype) -> list[str]:
    """The same out of transformers' own cache, under the same attention."""
    model, state, found = build(family, dtype), DynamicCache(config=families.FAMILIES[family]()), []
    ends = [*range(BLOCK, PROMPT, BLOCK), PROMPT, *range(PROMPT + 1, len(TOKENS) + 1)]
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        ids = torch.tensor([TOKENS[start:stop]])
        found.append(sha256(model(ids, cache=state, use_cache=True, logits_to_keep=1).logits[:, -1]))
    return found


@pytest.mark.parametrize(
    ("family", "dtype", "pages"),
    [*product(KINDS, DTYPES, (1, 2, 8, 100)), ("llama_mha", torch.float16, 2), ("qwen3", torch.bfloat16, 2)],
    ids=str,
)
def test_i1_a_paged_run_has_the_bits_of_a_resident_one(family: str, dtype: torch.dtype, pages: int) -> None:
    with paged_engine(build(family, dtype), pages) as (engine, paging):
        assert digests(engine) == resident_digests(family, dtype)
        counters = paging.pager.counters
        assert counters.peak_bytes == pages * paging.host.page_bytes
        assert counters.evictions == 0 if pages == 100 else counters.evictions > 0


@pytest.mark.parametrize("prefetch", [False, True])
def test_pages_in_a_file_and_reading_ahead_change_no_bit(tmp_path: Path, prefetch: bool) -> None:
    with paged_engine(build("gemma3"), 3, directory=tmp_path, prefetch=prefetch) as (engine, paging):
        assert digests(engine) == resident_digests("gemma3", torch.float32)
        counters = paging.pager.counters
        assert (counters.prefetched > 0) == prefetch
        assert counters.stall_s > 0


@pytest.mark.parametrize("family", [*KINDS, "deepseek_v2"])
def test_the_attention_is_that_of_sdpa_up_to_rounding(family: str) -> None:
    steps = [*canonical_steps(0, PROMPT, BLOCK), Step(DECODE, PROMPT, len(TOKENS))]
    ours = fresh_logits(build(family), TOKENS, steps)
    theirs = fresh_logits(families.build(family, torch.float32, "sdpa"), TOKENS, steps)
    assert float((ours - theirs).abs().max()) < 1e-4
    assert sha256(ours) != sha256(theirs)


def test_in_16_bits_the_attention_is_as_near_to_float32_as_that_of_eager() -> None:
    steps = [*canonical_steps(0, PROMPT, BLOCK)]
    exact = fresh_logits(families.build("llama", torch.float32, "sdpa"), TOKENS[:PROMPT], steps)
    model = families.build("llama", torch.float32, "sdpa").to(torch.bfloat16)
    errors = {}
    for attention in ("eager", paged_attention(SPLIT)):
        model.set_attn_implementation(attention)
        errors[attention] = float((fresh_logits(model, TOKENS[:PROMPT], steps).float() - exact).abs().mean())
    assert errors[paged_attention(SPLIT)] < 1.5 * errors["eager"]


def test_a_context_many_times_the_pool_takes_no_more_of_the_device() -> None:
    with paged_engine(build("llama"), 2) as (engine, paging):
        pool = {page.data_ptr() for page in paging.pager._memory.unbind()}  # type: ignore[union-attr]
        engine.extend(engine.new_run(), some_tokens(700))
        assert len(paging.host) == 3 * -(-700 // SPLIT)
        assert {slot.view.data_ptr() for slot in paging.pager._all} == pool
        assert paging.pager.counters.peak_bytes == 2 * paging.host.page_bytes


def test_a_fork_goes_its_own_way() -> None:
    with paged_engine(build("gemma3"), 2) as (engine, _):
        run = engine.extend(engine.new_run(), TOKENS[:PROMPT])
        fork = run.fork()
        for token in some_tokens(40, seed=5):
            engine.call(fork, [token], DECODE)
        tail = [sha256(engine.call(run, [token], DECODE)) for token in TOKENS[PROMPT:]]
        assert tail == resident_digests("gemma3", torch.float32)[-DECODED:]


def test_runs_take_turns_in_one_pool_and_leave_their_pages() -> None:
    with paged_engine(build("llama"), 4) as (engine, paging):
        runs = [engine.extend(engine.new_run(), TOKENS[:96]) for _ in range(3)]
        assert len({tuple(digests(engine, run)) for run in runs}) == 1
        taken = len(paging.host)
        del runs
        gc.collect()
        engine.extend(engine.new_run(), TOKENS[:96])
        assert len(paging.host) == 9 < taken


def test_i3_a_page_altered_on_the_host_ends_the_run() -> None:
    with paged_engine(build("llama"), 2) as (engine, paging):
        run = engine.extend(engine.new_run(), TOKENS[:PROMPT])
        page = paging.host._pages[next(key for key in run.cache._sequence.keys if key[1:] == (1, 2))]  # type: ignore[attr-defined]
        page.view(torch.uint8)[1, 1, 3, 8] ^= 16
        for _ in range(2):
            with pytest.raises(PageCorrupt, match="1, 2"):
                engine.call(run, [5], DECODE)
        assert digests(engine) == resident_digests("llama", torch.float32)


# Sessions


@pytest.fixture(params=WAYS)
def repository(request: pytest.FixtureRequest, root: Place) -> Iterator[Repository]:
    with reached(request.param, root.as_uri()) as opened:
        yield opened


Opens = Callable[..., GraftSession]


@pytest.fixture
def session_on(repository: Repository) -> Iterator[Opens]:
    sessions = []

    def make(model: PreTrainedModel, **options: Any) -> GraftSession:
        sessions.append(GraftSession(model, None, repository, block_tokens=BLOCK, **options))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def continued(session: GraftSession, ref: str) -> list[str]:
    """SHA-256 of the logits of a graft and of what follows it."""
    run = session.graft(ref)
    return [sha256(run.logits), *(sha256(session.call(run, [token], DECODE)) for token in TOKENS[PROMPT:])]


@pytest.mark.everywhere
def test_i1_artifacts_pass_between_resident_and_paged_runs(session_on: Opens, tmp_path: Path) -> None:
    model = build("gemma3", torch.bfloat16)
    expected = resident_digests("gemma3", torch.bfloat16)[-DECODED - 1 :]
    resident = session_on(model)
    paged = session_on(model, device_pages=3, page_directory=tmp_path)
    assert paged.fingerprint == resident.fingerprint
    made = resident.deposit(TOKENS[:PROMPT], "resident")
    assert paged.deposit(TOKENS[:PROMPT], graft=False).id == made.id
    assert continued(paged, "resident") == expected
    run = paged.prefill(some_tokens(70, seed=3), record=True)
    for token in some_tokens(60, seed=4):
        paged.call(run, [token], DECODE)
    paged.deposit(run, "paged")
    assert continued(resident, "paged") == continued(paged, "paged")
    report = paged.verify("paged", samples=3)
    assert report.exact
    assert (
        paged.generate(TOKENS[:150], 9).logits_sha256 == resident.generate(TOKENS[:150], 9, graft=False).logits_sha256
    )
    # There is no room for the samples after the end, so that an earlier boundary is taken and a run forked there.
    paged.window = PROMPT + 2
    assert paged.verify("resident", samples=4).exact


@pytest.mark.everywhere
def test_i1_what_another_attention_made_is_refused_by_name(session_on: Opens) -> None:
    model = families.build("llama", torch.float32, "sdpa")
    session = session_on(model)
    session.deposit(TOKENS[:PROMPT], "sdpa")
    model.set_attn_implementation(paged_attention(SPLIT))
    with pytest.raises(FingerprintMismatch, match=r"numerics\.attention"):
        session.graft("sdpa")
    paged = session_on(model, device_pages=2)
    with pytest.raises(FingerprintMismatch, match=r"numerics\.attention: here 'kvgraft_paged_32', there 'sdpa'"):
        paged.graft("sdpa")
    assert paged.prefill(TOKENS[:PROMPT]).grafted_tokens == 0
    other = session_on(build("llama", split=64), device_pages=2)
    probes = [one.fingerprint.sections["canary"] for one in (session, paged, other)]
    changed = {name for name in probes[1] if len({probe[name] for probe in probes}) == 3}
    assert any(name.endswith("attention") for name in changed)


def test_a_pool_without_room_for_a_page_is_refused(session_on: Opens) -> None:
    model = build("llama")
    page = 2 * 2 * SPLIT * 16 * 4
    for reason, options in {
        f"{page - 1} bytes is smaller than one page of this model, {page} bytes": {"size": page - 1},
        "a pool of 0 pages": {"pages": 0},
        "give one of them": {"pages": 1, "size": page},
    }.items():
        with pytest.raises(InvalidInput, match=reason), paged_engine(model, **options):
            pass
    session = session_on(model, device_bytes=3 * page - 1)
    assert session.paging is not None
    assert session.paging.pager.pages == 2
    model.set_attn_implementation("sdpa")
    with pytest.raises(InvalidInput, match="attention was changed to 'sdpa'"):
        session.prefill(TOKENS, graft=False)


@pytest.mark.parametrize(
    ("family", "attention", "reason"),
    [
        ("llama", "sdpa", "the model's attention is 'sdpa'"),
        ("mistral", "paged", "no full layers"),
        ("deepseek_v3", "paged", "latent layers can't be paged"),
    ],
)
def test_what_cannot_be_paged_is_refused_by_name(family: str, attention: str, reason: str) -> None:
    model = families.build(family, torch.float32, paged_attention(SPLIT) if attention == "paged" else attention)
    with pytest.raises((InvalidInput, UnsupportedModel), match=reason), paged_engine(model, 2):
        pass


def test_an_attention_with_more_in_it_is_refused() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 64}
    config = Gemma2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=paged_attention(SPLIT)).eval()
    with pytest.raises(UnsupportedModel, match="Gemma2Attention adds softcap"):
        model(torch.zeros((1, 4), dtype=torch.long))


def test_a_mask_that_is_not_causal_is_refused() -> None:
    model = build("llama")
    ids = torch.tensor([TOKENS[:6]])
    assert model(ids, attention_mask=torch.ones((1, 6))).logits.shape == (1, 6, families.VOCAB_SIZE)
    with pytest.raises(UnsupportedModel, match="padding"):
        model(ids, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    with pytest.raises(UnsupportedModel, match="batched"):
        model(ids.expand(2, -1))


def test_a_cache_of_pages_only_grows() -> None:
    with paged_engine(build("llama"), 2) as (engine, _):
        run = engine.extend(engine.new_run(), TOKENS[:50])
        with pytest.raises(UnsupportedModel, match="cropped"):
            run.cache.crop(-1)


@pytest.mark.parametrize("split", [0, -16, 15, 17, 2**15, "256", None])
def test_a_split_that_is_none_is_refused(split: Any) -> None:
    with pytest.raises(InvalidInput, match="multiple of 16"):
        paged_attention(split)


def test_the_name_of_an_attention_tells_its_split() -> None:
    names: Sequence[str | None] = [paged_attention(64), "sdpa", None, "kvgraft_paged_", "kvgraft_paged_064"]
    assert [split_of(name) for name in names] == [64, None, None, None, None]


# A real model


def test_smollm2_paged_has_the_bits_of_a_resident_run() -> None:
    path = fetch("smollm2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", attn_implementation=paged_attention()).eval()
    text = (Path(__file__).parent.parent / "docs" / "exactness.md").read_text()
    tokens = AutoTokenizer.from_pretrained(path).encode(text)[:400]
    found = []
    for pages in (None, 3):
        engine = Engine(model, None, 256)
        if pages:
            engine.paging = Paging(model, Layout(256, measure_groups(model, 256)), pages=pages)
        run = engine.extend(engine.new_run(), tokens)
        found.append([sha256(run.logits), *(sha256(engine.call(run, [token], DECODE)) for token in tokens[:3])])
        if engine.paging is not None:
            engine.paging.close()
    assert found[0] == found[1]
