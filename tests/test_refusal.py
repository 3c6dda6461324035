"""Wrong artifacts are refused, and the error names the field that differs (I1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import families
import pytest
import torch
from places import WAYS, Place
from serving import reached
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from engine_adapter import GraftSession
from repo_service.domain.errors import (
    ContextTooLong,
    FingerprintMismatch,
    InvalidInput,
    InvalidTokens,
    UnsupportedModel,
    WeightsChanged,
)
from repo_service.domain.repository import Repository

pytestmark = pytest.mark.everywhere

TOKENS = [5, 9, 200, 31, 7, 77, 12, 400] * 10


@pytest.fixture(params=WAYS)
def repository(request: pytest.FixtureRequest, root: Place) -> Iterator[Repository]:
    with reached(request.param, root.as_uri()) as opened:
        yield opened


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> PreTrainedModel:
    return families.build("llama", dtype, attention, seed)


def session_of(
    repository: Repository,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast | None = None,
    block_tokens: int = 16,
) -> GraftSession:
    return GraftSession(model, tokenizer, repository, block_tokens=block_tokens)


def flip_one_bit(model: PreTrainedModel) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight.view(torch.int32)[3, 5] ^= 1


def scale_rope(model: PreTrainedModel) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def changed(kind: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, int]:
    model, tokenizer, block_tokens = llama(), families.tiny_tokenizer(), 16
    if kind == "weights":
        flip_one_bit(model)
    elif kind == "rope":
        model = scale_rope(model)
    elif kind == "dtype":
        model = model.to(torch.bfloat16)
    elif kind == "attention":
        model.set_attn_implementation("eager")
    elif kind == "tokenizer":
        tokenizer.add_tokens(["<extra>"])
    elif kind == "chat template":
        tokenizer.chat_template = "{{ messages }}"
    elif kind == "block size":
        block_tokens = 32
    return model, tokenizer, block_tokens


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("weights", "model.weights"),
        ("rope", "positions.rope.rope_type"),
        ("dtype", "model.dtype"),
        ("attention", "numerics.attention"),
        ("tokenizer", "model.tokenizer"),
        ("chat template", "model.chat_template"),
        ("block size", "schedule.block_tokens"),
    ],
)
def test_an_artifact_of_another_kind_is_refused_naming_the_field(repository: Repository, kind: str, field: str) -> None:
    with session_of(repository, llama(), families.tiny_tokenizer()) as session:
        session.deposit(TOKENS, tag="stored")
    model, tokenizer, block_tokens = changed(kind)
    with session_of(repository, model, tokenizer, block_tokens) as session:
        with pytest.raises(FingerprintMismatch) as refusal:
            session.graft("stored")
        assert field in refusal.value.details["fields"]
        assert field in str(refusal.value)
        assert session.prefill(TOKENS).grafted_tokens == 0


def test_sglang_24758_the_same_path_with_other_weights_is_refused_and_another_path_with_the_same_is_not(
    repository: Repository, tmp_path: Path
) -> None:
    def load(path: Path) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()

    model = llama()
    model.save_pretrained(tmp_path / "model")
    with session_of(repository, load(tmp_path / "model")) as session:
        session.deposit(TOKENS, tag="stored")
        expected = session.prefill(TOKENS, graft=False).logits
    (tmp_path / "model").rename(tmp_path / "moved")
    with session_of(repository, load(tmp_path / "moved")) as session:
        run = session.prefill(TOKENS)
        assert run.grafted_tokens == 64
        assert torch.equal(run.logits, expected)
    flip_one_bit(model)
    model.save_pretrained(tmp_path / "model")
    with session_of(repository, load(tmp_path / "model")) as session:
        with pytest.raises(FingerprintMismatch, match=r"model\.weights"):
            session.graft("stored")
        assert session.prefill(TOKENS).grafted_tokens == 0


class Adapter(torch.nn.Module):
    """A low-rank adapter over a linear layer, as PEFT puts it in the layer's place."""

    def __init__(self, base: torch.nn.Linear, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base
        self.lora_A = torch.nn.ParameterDict({"default": torch.randn(4, base.in_features, generator=generator)})
        self.lora_B = torch.nn.ParameterDict({"default": torch.randn(base.out_features, 4, generator=generator)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + x @ self.lora_A["default"].T @ self.lora_B["default"].T * 0.1


def with_adapter(seed: int) -> PreTrainedModel:
    model = llama()
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapter(attention.q_proj, seed)
    return model


def test_vllm_44701_other_adapter_weights_under_the_same_adapter_name_are_refused(repository: Repository) -> None:
    with session_of(repository, with_adapter(1)) as session:
        session.deposit(TOKENS, tag="stored")
    with (
        session_of(repository, with_adapter(2)) as session,
        pytest.raises(FingerprintMismatch, match=r"model\.weights"),
    ):
        session.graft("stored")


@pytest.mark.parametrize("use", ["deposit", "graft", "prefill"])
def test_weights_changed_under_a_session_are_noticed_before_any_use(repository: Repository, use: str) -> None:
    model = llama()
    with session_of(repository, model) as session:
        session.deposit(TOKENS, tag="stored")
        flip_one_bit(model)
        uses: dict[str, Callable[[], object]] = {
            "deposit": lambda: session.deposit(TOKENS),
            "graft": lambda: session.graft("stored"),
            "prefill": lambda: session.prefill(TOKENS),
        }
        with pytest.raises(WeightsChanged):
            uses[use]()


def test_a_backend_changed_under_a_session_is_noticed(repository: Repository) -> None:
    model = llama()
    with session_of(repository, model) as session:
        session.deposit(TOKENS, tag="stored")
        model.set_attn_implementation("eager")
        with pytest.raises(FingerprintMismatch, match=r"numerics\.attention"):
            session.graft("stored")


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba2", "state-space"),
        ("jamba", "state-space"),
        ("qwen3_next", "state-space"),
        ("lfm2", "state-space"),
        ("t5", "encoder-decoder"),
        ("bert", "without a causal KV cache"),
    ],
)
def test_a_model_that_cannot_be_grafted_is_refused_by_name_before_any_work(
    repository: Repository, family: str, reason: str
) -> None:
    model = families.build(family, torch.float32, "eager")
    model.forward = _must_not_run
    with pytest.raises(UnsupportedModel, match=reason):
        session_of(repository, model)


def _must_not_run(*_: object, **__: object) -> None:
    raise AssertionError("the model was run")


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("num_beams", 4, "beam"),
        ("cache_implementation", "quantized", "quantized cache"),
    ],
)
def test_generation_that_cannot_be_exact_is_refused_by_name(
    repository: Repository, setting: str, value: object, reason: str
) -> None:
    model = llama()
    setattr(model.generation_config, setting, value)
    with pytest.raises(UnsupportedModel, match=reason):
        session_of(repository, model)


def test_a_model_in_training_mode_is_refused(repository: Repository) -> None:
    with pytest.raises(UnsupportedModel, match="eval"):
        session_of(repository, llama().train())


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([], InvalidTokens, "empty"),
        ([1, 512], InvalidTokens, "512"),
        ([-1], InvalidTokens, "-1"),
        ([1.5], InvalidTokens, "integer"),
        ([[1, 2], [3, 4]], InvalidTokens, "batch 1"),
        (torch.tensor([[1, 2], [3, 4]]), InvalidTokens, "batch of 2"),
        (torch.tensor([0.5]), InvalidTokens, "float"),
        ([3] * 2049, ContextTooLong, "2048"),
        ("a text", InvalidTokens, "without a tokenizer"),
    ],
)
def test_bad_prompts_are_refused(
    repository: Repository, tokens: object, error: type[InvalidInput], message: str
) -> None:
    with session_of(repository, llama()) as session:
        for use in (session.deposit, session.prefill, session.generate):
            with pytest.raises(error, match=message):
                use(tokens)
        assert repository.stats("default").artifacts == 0


def test_threads_share_artifacts_exactly_where_the_canary_gives_equal_bits(repository: Repository) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with session_of(repository, llama()) as session:
            one = session.fingerprint
            session.deposit(TOKENS)
        torch.set_num_threads(2)
        with session_of(repository, llama()) as session:
            # Equal or not is up to the processor.
            shared = one.sections["canary"] == session.fingerprint.sections["canary"]
            assert (one.id == session.fingerprint.id) == shared
            grafted = session.prefill(TOKENS)
            assert grafted.grafted_tokens == (64 if shared else 0)
            assert torch.equal(grafted.logits, session.prefill(TOKENS, graft=False).logits)
    finally:
        torch.set_num_threads(threads)
