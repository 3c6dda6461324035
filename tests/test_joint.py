"""The joint way: lossy and labelled so, the same as plain attention where everything is seen, constant in device memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engine_adapter.joint import JointGeneration, JointRun, JointSession
from engine_adapter.joint_select import Representatives, Vote
from engine_adapter.joint_settings import JointSettings
from repo_service.domain.errors import InvalidInput, InvalidTokens, PageCorrupt, UnsupportedModel

SETTINGS = JointSettings(window=512, sinks=16, local=32, blocks=5, block_tokens=16, chunk=32, representatives=4)
# Up to here the last chunk sees every token, however the blocks are chosen.
ALL_SEEN = SETTINGS.sinks + SETTINGS.blocks * SETTINGS.block_tokens + SETTINGS.local + SETTINGS.chunk
TOKENS = random.Random(1).choices(range(3, 500), k=700)
TEXTUAL = [name for name in families.FAMILIES if not name.startswith("deepseek")]


@pytest.fixture
def llama() -> PreTrainedModel:
    return families.build("llama", torch.float32, "sdpa")


@pytest.fixture
def session(llama: PreTrainedModel) -> Iterator[JointSession]:
    with JointSession(llama, None, SETTINGS) as opened:
        yield opened


def plain(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[:, -1]
    return logits


@pytest.mark.parametrize("family", TEXTUAL)
def test_where_everything_is_seen_it_is_plain_attention(family: str) -> None:
    model = families.build(family, torch.float32, "sdpa")
    with JointSession(model, None, SETTINGS) as session:
        for length in (1, SETTINGS.sinks, SETTINGS.sinks + 1, SETTINGS.chunk, ALL_SEEN):
            logits = session.prefill(TOKENS[:length]).logits
            assert float((logits - plain(model, TOKENS[:length])).abs().max()) < 1e-4, f"{length} tokens"


def test_in_bfloat16_it_is_near_plain_attention() -> None:
    model = families.build("gemma3", torch.bfloat16, "sdpa")
    with JointSession(model, None, SETTINGS) as session:
        difference = session.prefill(TOKENS[:ALL_SEEN]).logits - plain(model, TOKENS[:ALL_SEEN])
    assert float(difference.abs().max()) < 0.1


def test_the_model_runs_under_its_own_attention_afterwards(llama: PreTrainedModel, session: JointSession) -> None:
    before = plain(llama, TOKENS[:50])
    session.prefill(TOKENS[:50])
    assert llama.config._attn_implementation == "sdpa"
    assert torch.equal(plain(llama, TOKENS[:50]), before)


def test_a_result_says_that_it_is_not_exact_and_what_made_it(session: JointSession) -> None:
    result = session.generate(TOKENS[:300], 3)
    assert (result.exact, result.run.exact) == (False, False)
    said = result.to_json()
    assert said["exact"] is False
    assert said["way"] == "joint"
    assert said["settings"]["blocks"] == SETTINGS.blocks
    assert said["settings"]["window"] == 512


def test_a_run_and_its_repetition_are_equal(session: JointSession) -> None:
    first, second = (session.prefill(TOKENS) for _ in range(2))
    assert torch.equal(first.logits, second.logits)


@pytest.mark.parametrize("pages", [1, 3, 1000])
def test_the_pool_changes_no_bit(llama: PreTrainedModel, session: JointSession, pages: int) -> None:
    expected = session.generate(TOKENS, 4)
    with JointSession(llama, None, SETTINGS, device_pages=pages) as other:
        result = other.generate(TOKENS, 4)
        assert result.tokens == expected.tokens
        assert torch.equal(result.run.logits, expected.run.logits)


def test_a_text_behind_others_gets_no_beginning_of_its_own(llama: PreTrainedModel) -> None:
    with JointSession(llama, families.tiny_tokenizer(begins=True), SETTINGS) as session:
        run = session.extend(session.prefill("to be or not"), " to be")
        assert run.tokens[0] == 1
        assert run.tokens.count(1) == 1


def test_pages_in_a_file_change_no_bit(llama: PreTrainedModel, session: JointSession, tmp_path: Path) -> None:
    with JointSession(llama, None, SETTINGS, directory=tmp_path) as other:
        assert torch.equal(other.prefill(TOKENS).logits, session.prefill(TOKENS).logits)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_device_memory_is_constant(family: str) -> None:
    model = families.build(family, torch.float32, "sdpa")
    with JointSession(model, None, SETTINGS) as session:
        run = session.prefill(TOKENS[:200])
        taken = session.device_bytes(run)
        for start in range(200, 700, 100):
            session.extend(run, TOKENS[start : start + 100])
            assert session.device_bytes(run) <= taken


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [10, 40, 100, 333])
def test_what_follows_a_rewind_is_as_if_nothing_had_been(family: str, length: int) -> None:
    model = families.build(family, torch.float32, "sdpa")
    with JointSession(model, None, SETTINGS) as session:
        expected = answer(session, session.prefill(TOKENS[:length]))
        run = session.prefill(TOKENS[:length])
        mark = run.mark()
        for detour in (1, 20, 200):
            session.extend(run, TOKENS[-detour:])
            run.rewind(mark)
            assert run.tokens == TOKENS[:length]
            found = answer(session, run)
            assert found.tokens == expected.tokens
            assert torch.equal(found.run.logits, expected.run.logits)
            run.rewind(mark)


def answer(session: JointSession, run: JointRun) -> JointGeneration:
    return session.generate(session.extend(run, TOKENS[400:420]), 3)


def test_a_closed_run_gives_its_pages_back(session: JointSession) -> None:
    held = len(session.device.pages)
    run = session.prefill(TOKENS)
    assert len(session.device.pages) > held
    run.close()
    assert len(session.device.pages) == held


def test_i3_a_damaged_page_is_an_error(session: JointSession) -> None:
    run = session.prefill(TOKENS)
    for page in session.device.pages._pages.values():
        page.view(torch.uint8)[0, 0, 0, 0] ^= 1
    for key in session.device.pages._pages:
        session.device.pager.forget(key)
    with pytest.raises(PageCorrupt):
        session.extend(run, TOKENS[:40])


# What a chunk sees


def reckoned(model: PreTrainedModel, tokens: list[int], seen: Callable[[int, int], list[int]]) -> Tensor:
    """The last logits of a Llama over a state that is held whole, of which each chunk sees what it is told to."""
    config = model.config
    keys = [torch.empty(1, config.num_key_value_heads, 0, config.head_dim) for _ in model.model.layers]
    values = list(keys)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(512)[None])
    for start in range(0, len(tokens), SETTINGS.chunk):
        hidden = model.model.embed_tokens(torch.tensor([tokens[start : start + SETTINGS.chunk]]))
        count = hidden.shape[1]
        places = seen(start, start + count)
        mask = torch.ones(count, len(places), dtype=torch.bool).tril(len(places) - count)
        for index, layer in enumerate(model.model.layers):
            normed, attention = layer.input_layernorm(hidden), layer.self_attn
            query, key, value = (
                projection(normed).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            keys[index], values[index] = torch.cat([keys[index], key], 2), torch.cat([values[index], value], 2)
            k, v = keys[index][:, :, places], values[index][:, :, places]
            _, k = apply_rotary_pos_emb(k, k, cos[:, : len(places)], sin[:, : len(places)])
            last = slice(len(places) - count, len(places))
            query, _ = apply_rotary_pos_emb(query, query, cos[:, last], sin[:, last])
            out = scaled_dot_product_attention(query, k, v, attn_mask=mask, enable_gqa=True)
            hidden = hidden + attention.o_proj(out.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits: Tensor = model.lm_head(model.model.norm(hidden[:, -1]))
    return logits


def test_past_the_window_a_chunk_sees_sinks_blocks_and_what_is_near(
    llama: PreTrainedModel, session: JointSession
) -> None:
    run = session.prefill(TOKENS)
    size, far, chosen = SETTINGS.block_tokens, SETTINGS.blocks * SETTINGS.block_tokens, run.cache.view.selected
    assert chosen is not None
    assert len(chosen) == SETTINGS.blocks

    def seen(start: int, stop: int) -> list[int]:
        near = max(SETTINGS.sinks, -(-(start - SETTINGS.local) // size) * size)
        places = list(range(min(SETTINGS.sinks, stop)))
        if stop < len(TOKENS):
            return places + list(range(max(SETTINGS.sinks, near - far), stop))
        for block in chosen:
            places += range(SETTINGS.sinks + block * size, SETTINGS.sinks + (block + 1) * size)
        return places + list(range(near, stop))

    with torch.no_grad():
        expected = reckoned(llama, TOKENS, seen)
    assert float((run.logits - expected).abs().max()) < 1e-4
    assert float((plain(llama, TOKENS) - expected).abs().max()) > 1e-2


def test_a_question_selects_the_block_that_its_queries_look_for() -> None:
    generator = torch.Generator().manual_seed(0)
    kept = Representatives(4)
    keys = torch.randn(700, 2, 16, 8, generator=generator)
    keys[417, 1, 5] += 4.0
    for block in keys:
        kept.append(block)
    queries = torch.randn(2, 3, 20, 8, generator=generator)
    queries[1, 2, 7] = 3.0
    vote = Vote(700)
    vote.add(kept.shares(queries, torch.zeros(2, 3, 20), 700))
    assert vote.best(1) == [417]
    assert vote.best(3) == [416, 417, 418]
    assert len(vote.best(8)) == 8


def test_a_head_that_has_what_it_looks_for_nearby_votes_for_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    kept = Representatives(4)
    for block in torch.randn(20, 1, 16, 8, generator=generator):
        kept.append(block)
    queries = torch.randn(1, 1, 5, 8, generator=generator)
    content, idle = (float(kept.shares(queries, torch.full((1, 1, 5), near), 20).max()) for near in (100.0, 0.0))
    assert content < -50.0 < idle


def test_scores_do_not_depend_on_tiles() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(600, 1, 16, 8, generator=generator), torch.randn(1, 1, 5, 8, generator=generator)
    kept = Representatives(16)
    for block in keys:
        kept.append(block)
    scores = torch.einsum("hgtd,bhrd->hgtbr", queries, keys)
    expected = (scores.amax(-1) - scores.flatten(-2).logsumexp(-1, keepdim=True)).amax((0, 1, 2))
    shares = kept.shares(queries, torch.full((1, 1, 5), -torch.inf), 600)
    assert torch.allclose(shares, expected, atol=1e-5)
    kept.truncate(100)
    kept.append(keys[100])
    assert torch.allclose(kept.shares(queries, torch.zeros(1, 1, 5), 101).argmax(), shares[:101].argmax())


# Refused before any work


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"window": 140}, "need 160 positions, and the window has 140"),
        ({"window": 4096}, "native window of 2048"),
        ({"sinks": 20}, "multiple of block_tokens"),
        ({"local": 8}, "multiple of block_tokens"),
        ({"blocks": -1}, "blocks is -1"),
        ({"chunk": 0}, "chunk is 0"),
        ({"chunk": True}, "chunk is True"),
        ({"representatives": 17}, "representatives is 17"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    llama: PreTrainedModel, change: dict[str, int], said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        JointSession(llama, None, replace(SETTINGS, **change))


def test_a_pool_without_a_page_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(InvalidInput, match="pool of 0 pages"):
        JointSession(llama, None, SETTINGS, device_pages=0)


@pytest.mark.parametrize("family", ["deepseek_v2", "mamba2", "t5"])
def test_state_that_is_not_keys_and_values_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModel):
        JointSession(families.build(family, torch.float32, "eager"), None, SETTINGS)


def test_a_family_without_rotary_tables_is_refused_by_name() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=2048)).eval()
    with pytest.raises(UnsupportedModel, match="gpt2 has 0 rotary tables"):
        JointSession(model, None, SETTINGS)


def test_attention_that_is_more_than_a_softmax_is_refused() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "head_dim": 16,
    }
    config = Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    with pytest.raises(UnsupportedModel, match="softcap"):
        JointSession(Gemma2ForCausalLM(config).eval(), None, SETTINGS)


def test_a_rotation_of_part_of_a_head_is_refused() -> None:
    from transformers import PhiConfig, PhiForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = PhiForCausalLM(PhiConfig(**sizes, num_attention_heads=4, max_position_embeddings=2048)).eval()
    with pytest.raises(UnsupportedModel, match="does not take a head's 16 dimensions"):
        JointSession(model, None, SETTINGS)


def test_a_table_that_scales_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
    config = LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=yarn)
    with pytest.raises(UnsupportedModel, match="scales what it rotates"):
        JointSession(LlamaForCausalLM(config).eval(), None, SETTINGS)


def test_no_tokens_and_strange_ones_are_refused(session: JointSession) -> None:
    for tokens in ([], [512], "text without a tokenizer"):
        with pytest.raises(InvalidTokens):
            session.prefill(tokens)
    with pytest.raises(InvalidInput, match="no tokens yet"):
        session.generate(session.new_run())


def test_a_mark_lies_before_the_end(session: JointSession) -> None:
    run = session.prefill(TOKENS[:50])
    early, late = run.mark(), session.extend(run, TOKENS[50:60]).mark()
    run.rewind(early)
    with pytest.raises(InvalidInput, match="50 tokens, and the mark was made after 60"):
        run.rewind(late)


def test_the_attention_runs_by_a_session_only(llama: PreTrainedModel) -> None:
    llama.set_attn_implementation("kvgraft_joint")
    with pytest.raises(InvalidInput, match="JointSession"):
        plain(llama, TOKENS[:10])
