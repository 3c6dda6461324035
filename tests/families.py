"""Tiny random-weight models of many architectures, through transformers' own classes.

The exactness matrix runs over `FAMILIES`; `REFUSED` are architectures whose state an adapter must
refuse by name. Nothing here downloads anything. Every model has a vocabulary of 512 and 2,048
positions, and weights drawn from a seed with a spread that makes logits depend on the input.
"""

from collections.abc import Callable
from itertools import islice, product
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    T5Config,
)

__all__ = ["FAMILIES", "REFUSED", "VOCAB_SIZE", "build", "tiny_tokenizer"]

VOCAB_SIZE = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    # 1/sqrt(hidden_size): activations keep their scale from layer to layer.
    "initializer_range": 0.125,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}


def _llama() -> PreTrainedConfig:
    return LlamaConfig(**_SIZES)


def _llama_mha() -> PreTrainedConfig:
    return LlamaConfig(**_SIZES | {"num_key_value_heads": 4})


def _llama_rope_scaled() -> PreTrainedConfig:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    return LlamaConfig(**_SIZES, rope_parameters=scaling)


def _mistral() -> PreTrainedConfig:
    return MistralConfig(**_SIZES, sliding_window=96)


def _qwen2() -> PreTrainedConfig:
    return Qwen2Config(**_SIZES)


def _qwen3() -> PreTrainedConfig:
    return Qwen3Config(**_SIZES, head_dim=32)


def _gemma3() -> PreTrainedConfig:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    sizes = _SIZES | {"num_hidden_layers": 6, "num_key_value_heads": 1}
    return Gemma3TextConfig(**sizes, head_dim=32, sliding_window=64, layer_types=kinds, query_pre_attn_scalar=32)


def _mixtral() -> PreTrainedConfig:
    return MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)


def _qwen3_moe() -> PreTrainedConfig:
    return Qwen3MoeConfig(**_SIZES, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)


def _olmoe() -> PreTrainedConfig:
    return OlmoeConfig(**_SIZES, num_experts=8, num_experts_per_tok=2)


def _deepseek_v2() -> PreTrainedConfig:
    return DeepseekV2Config(**_SIZES | _LATENT)


def _deepseek_v3() -> PreTrainedConfig:
    return DeepseekV3Config(**_SIZES | _LATENT, n_group=2, topk_group=1)


def _mamba2() -> PreTrainedConfig:
    return Mamba2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
        chunk_size=32,
    )


def _jamba() -> PreTrainedConfig:
    return JambaConfig(
        **_SIZES | {"num_hidden_layers": 4},
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
    )


def _qwen3_next() -> PreTrainedConfig:
    return Qwen3NextConfig(
        **_SIZES | {"num_hidden_layers": 4},
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )


def _lfm2() -> PreTrainedConfig:
    return Lfm2Config(**_SIZES, layer_types=["conv", "full_attention", "conv"])


def _t5() -> PreTrainedConfig:
    return T5Config(vocab_size=VOCAB_SIZE, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)


def _bert() -> PreTrainedConfig:
    return BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "llama_mha": _llama_mha,
    "llama_rope_scaled": _llama_rope_scaled,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}

REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "mamba2": _mamba2,
    "jamba": _jamba,
    "qwen3_next": _qwen3_next,
    "lfm2": _lfm2,
    "t5": _t5,
    "bert": _bert,
}


def build(name: str, dtype: torch.dtype, attn_implementation: str, seed: int = 0) -> PreTrainedModel:
    """Build a family of `FAMILIES` or `REFUSED` in evaluation mode; equal arguments, equal weights.

    Parameters
    ----------
    name : str
        A key of `FAMILIES` or `REFUSED`.
    dtype : torch.dtype
        The dtype the weights are drawn in.
    attn_implementation : str
        ``eager`` or ``sdpa``.
    seed : int
        Weights depend on it; the global random state does not change.
    """
    config = (FAMILIES | REFUSED)[name]()
    head = {"t5": AutoModelForSeq2SeqLM, "bert": AutoModelForMaskedLM}.get(name, AutoModelForCausalLM)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = head.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    model.requires_grad_(False)
    model.eval()
    return model


def tiny_tokenizer(*, begins: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 512 tokens; decoding gives any encoded text back.

    With ``begins`` it puts a token before each text, as Gemma's does.
    """
    special = ["<pad>", "<bos>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space_and_common_letters = "Ġetaoinshrdlucmf"
    letter_pairs = product(space_and_common_letters, space_and_common_letters)
    pairs = list(islice(letter_pairs, VOCAB_SIZE - len(special) - len(alphabet)))
    tokens = [*special, *alphabet, *(first + second for first, second in pairs)]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if begins:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
