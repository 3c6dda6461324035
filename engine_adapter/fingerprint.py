"""The fingerprint of a loaded model on this machine: measured, not declared."""

from __future__ import annotations

import hashlib
import inspect
import json
from typing import TYPE_CHECKING, Any

import torch
import transformers

from engine_adapter.canary import measure as measure_canary
from engine_adapter.state import measure_groups
from engine_adapter.weights import digest_tensor, digest_weights
from repo_service.domain.canonical import frame
from repo_service.domain.digest import SHA256, format_digest
from repo_service.domain.fingerprint import Fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Settings that name or describe a model without deciding a bit of its state. The dtype and the
# attention backend are measured elsewhere; quantization has a field of its own.
_UNIDENTIFYING = {
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "quantization_config",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_TABLE_POSITIONS = 4096


def measure_fingerprint(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, block_tokens: int
) -> Fingerprint:
    """Measure everything that decides the bits of a model's state.

    Runs the model on one token and on the canary's probes, and hashes its weights.
    """
    groups = measure_groups(model, block_tokens)
    current = measure_current(model, digest_weights(model))
    current["model"] |= {
        "tokenizer": None if tokenizer is None else _tokenizer_digest(tokenizer),
        "chat_template": None if tokenizer is None else _digest(canonical(tokenizer.chat_template)),
    }
    return Fingerprint(
        {
            **current,
            "state": {"groups": [group.to_json() for group in groups]},
            "schedule": {
                "version": 1,
                "block_tokens": block_tokens,
                "batch": 1,
                "prefill": "one call up to each multiple of block_tokens",
                "decode": "one token a call",
                "logits_to_keep": 1,
            },
            "canary": dict(measure_canary(model, block_tokens)),
        }
    )


def measure_current(model: PreTrainedModel, weights: str) -> dict[str, dict[str, Any]]:
    """What may change a state's bits under a running session: model, positions and numerics.

    The tokenizer is left out: it decides which ids a text becomes, not what the ids become.

    Parameters
    ----------
    weights
        The weights' digest.
    """
    return {
        "model": _model_section(model, weights),
        "positions": _positions_section(model),
        "numerics": _numerics_section(model),
    }


def _model_section(model: PreTrainedModel, weights: str) -> dict[str, Any]:
    config = model.config.to_dict()
    modules = [[name, type(module).__qualname__] for name, module in model.named_modules()]
    return {
        "architecture": type(model).__name__,
        "config": canonical(_without(config, _UNIDENTIFYING)),
        "dtype": str(model.dtype),
        "weights": weights,
        "modules": _digest(modules),
        "quantization": canonical(config.get("quantization_config")),
        "adapters": _adapters(model),
    }


def _adapters(model: PreTrainedModel) -> Any:
    """Which adapters are loaded and active; their weights are among the model's own."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return None
    active = getattr(model, "active_adapter", None)
    return {
        "active": canonical(active() if callable(active) else active),
        "configs": {
            name: canonical(_without(config.to_dict(), {"base_model_name_or_path", "revision"}))
            for name, config in configs.items()
        },
    }


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # Padding and truncation are left behind by whoever called the tokenizer last.
        content = _without(json.loads(backend.to_str()), {"padding", "truncation"})
    else:
        content = {"vocabulary": tokenizer.get_vocab(), "class": type(tokenizer).__qualname__}
    return _digest([canonical(content), canonical(tokenizer.special_tokens_map)])


def _positions_section(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config.get_text_config(decoder=True)
    tables = {
        name: _rotary_digest(module, model)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("RotaryEmbedding")
    }
    return {
        "rope": canonical(getattr(config, "rope_parameters", None)),
        "max_position_embeddings": getattr(config, "max_position_embeddings", None),
        "tables": tables,
    }


def _rotary_digest(module: torch.nn.Module, model: PreTrainedModel) -> str:
    """Digest of the cos and sin table at the first positions and the last, as this machine computes it."""
    last = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or _TABLE_POSITIONS
    positions = torch.cat([torch.arange(min(last, _TABLE_POSITIONS)), torch.arange(max(0, last - 256), last)])
    positions = positions[None].to(model.device)
    like = torch.zeros((1, 1, 1), dtype=model.dtype, device=model.device)
    if "layer_type" in inspect.signature(module.forward).parameters:
        variants: list[dict[str, Any]] = [{"layer_type": kind} for kind in sorted(module.layer_types)]  # type: ignore[arg-type]
    else:
        variants = [{}]
    digests: list[str] = []
    with torch.no_grad():
        for variant in variants:
            table = module(like, positions, **variant)
            for tensor in table if isinstance(table, tuple) else (table,):
                digests.append(digest_tensor(torch.view_as_real(tensor) if tensor.is_complex() else tensor))
    return _digest(digests)


def _numerics_section(model: PreTrainedModel) -> dict[str, Any]:
    device = model.device
    section: dict[str, Any] = {
        "engine": "transformers",
        "engine_version": transformers.__version__,
        "attention": model.config._attn_implementation,
        "experts": getattr(model.config, "_experts_implementation", None),
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": device.type,
        "sdp": _sdp_flags(),
    }
    if device.type == "cpu":
        section["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        section["builds"] = _digest(torch.__config__.show().splitlines())
        section["mkldnn"] = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    else:
        section["device_name"] = torch.cuda.get_device_name(device)
        section["device_capability"] = list(torch.cuda.get_device_capability(device))
        section["cuda"] = torch.version.cuda
        section["cudnn"] = torch.backends.cudnn.version()
        section["cudnn_deterministic"] = torch.backends.cudnn.deterministic
        section["cudnn_benchmark"] = torch.backends.cudnn.benchmark
        section["tf32"] = [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]
        section["reduced_precision"] = [
            bool(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
            bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        ]
    return section


def _sdp_flags() -> dict[str, bool]:
    cuda = torch.backends.cuda
    return {
        "flash": cuda.flash_sdp_enabled(),
        "memory_efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }


def _without(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The fields without those named, at every level."""
    return {
        name: _without(value, names) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in names
    }


def canonical(value: Any) -> Any:
    """A value as it may stand in a fingerprint; floats become ``{"float": "<C99 hexadecimal>"}``."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, dict):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((canonical(item) for item in value), key=frame)
    return {type(value).__name__: str(value)}


def _digest(value: Any) -> str:
    return format_digest(SHA256, hashlib.sha256(frame(value)).digest())
