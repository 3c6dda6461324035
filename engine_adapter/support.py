"""What can be grafted exactly, and the refusal, by name and before any work, of what can't."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from repo_service.domain.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUPPORTED_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)

_STATE_SPACE_TYPES = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}
_LAYER_NAMES = {
    "LinearAttentionLayer": "state-space or linear-attention layers",
    "LinearAttentionAndFullAttentionLayer": "hybrid state-space layers",
    "LinearAttentionAndSlidingWindowAttentionLayer": "hybrid state-space layers",
    "DynamicIndexedLayer": "sparse attention with an indexer",
    "DummyLayer": "layers that share another layer's cache or have none",
}
_UNSTABLE_ROPE = {"dynamic", "longrope"}


def require_supported(model: PreTrainedModel) -> None:
    """Refuse a model whose state this adapter can't save and restore exactly.

    Raises
    ------
    UnsupportedModel
        Names what is not supported.
    """
    config = model.config
    kind = getattr(config, "model_type", type(model).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(kind, "an encoder-decoder model")
    if kind in _STATE_SPACE_TYPES:
        raise _unsupported(kind, "state-space layers")
    if not model.can_generate():
        raise _unsupported(kind, "a model without a causal KV cache")
    if model.training:
        raise _unsupported(kind, "a model in training mode: call model.eval() first")
    _require_plain_generation(model, kind)
    try:
        cache = DynamicCache(config=config)
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        raise _unsupported(kind, f"a model without a KV cache that transformers can build ({error})") from None
    for layer in cache.layers:
        if type(layer) not in SUPPORTED_LAYERS:
            name = type(layer).__name__
            raise _unsupported(kind, _LAYER_NAMES.get(name, f"cache layers of the kind {name}"))
    text_config = config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(text_config, "layer_types", None) or ()):
        raise _unsupported(kind, "chunked attention")
    unstable = _UNSTABLE_ROPE & set(_rope_types(getattr(text_config, "rope_parameters", None)))
    if unstable:
        raise _unsupported(
            kind, f"RoPE of the type {unstable.pop()}, whose table changes with the length of the context"
        )


def _require_plain_generation(model: PreTrainedModel, kind: str) -> None:
    generation = getattr(model, "generation_config", None)
    if (getattr(generation, "num_beams", 1) or 1) > 1:
        raise _unsupported(kind, "beam search: set generation_config.num_beams to 1")
    if getattr(generation, "cache_implementation", None) == "quantized":
        raise _unsupported(kind, "a quantized cache: clear generation_config.cache_implementation")


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(p["rope_type"]) for p in (parameters, *nested) if "rope_type" in p}


def _unsupported(kind: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{kind}: {what} can't be grafted exactly, so it is refused", model_type=kind, reason=what)
