"""The canary: equal where bits are equal, different where they are not, and without side effects."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine_adapter.canary import _Numbers, _Operand, measure

BLOCK = 64
MODELS = (
    ("llama", "float32", "sdpa"),
    ("llama", "float16", "sdpa"),
    ("gemma3", "float32", "eager"),
    ("gemma3", "bfloat16", "eager"),
    ("qwen3_moe", "bfloat16", "eager"),
    ("deepseek_v3", "float32", "eager"),
)
SETTINGS = {
    "plain": {"PYTHONHASHSEED": "1"},
    "again": {"PYTHONHASHSEED": "2"},
    "aten": {"ATEN_CPU_CAPABILITY": "avx2"},
    "mkl-compatible": {"MKL_CBWR": "COMPATIBLE"},
    "mkl-avx2": {"MKL_CBWR": "AVX2"},
    "onednn": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
}


def _build(family: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    # The processes under test load saved models and are spared the import of every architecture.
    import families

    return families.build(family, dtype, attention)


def _digest(*tensors: torch.Tensor) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return "sha256:" + hasher.hexdigest()


def _real_runs(model: PreTrainedModel) -> dict[str, str]:
    """Digests of logits and state after chunked runs of many lengths, by length."""
    ids = torch.arange(5 * BLOCK)[None] * 37 % model.config.vocab_size
    runs = {}
    for length in (1, 2, 3, 5, 8, 17, 37, 63, 64, 65, 100, 200, 303):
        cache = DynamicCache(config=model.config)
        for start in range(0, length, BLOCK):
            step = ids[:, start : min(start + BLOCK, length)]
            logits = model(step, cache=cache, use_cache=True, logits_to_keep=1).logits
        runs[str(length)] = _digest(logits, *(t for layer in cache.layers for t in (layer.keys, layer.values)))
    return runs


@torch.no_grad()
def _measure_saved_models(directory: Path) -> dict[str, dict[str, dict[str, str]]]:
    """What a process measures: the canary and real runs of every saved model."""
    measured = {}
    for family, dtype, attention in MODELS:
        path = directory / f"{family}-{dtype}"
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention).eval()
        measured[f"{family}-{dtype}"] = {"canary": measure(model, BLOCK), "runs": _real_runs(model)}
    return measured


if __name__ == "__main__":
    print(json.dumps(_measure_saved_models(Path(sys.argv[1]))))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What processes under each of `SETTINGS` measured on the same weights."""
    directory = tmp_path_factory.mktemp("models")
    for family, dtype, attention in MODELS:
        _build(family, getattr(torch, dtype), attention).save_pretrained(directory / f"{family}-{dtype}")
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

    def run(variables: dict[str, str]) -> Any:
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
        command = [sys.executable, __file__, str(directory)]
        return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(SETTINGS, pool.map(run, SETTINGS.values()), strict=True))


def test_two_processes_alike_measure_alike(processes: dict[str, dict[str, Any]]) -> None:
    assert processes["plain"] == processes["again"]


@pytest.mark.parametrize("setting", list(SETTINGS)[2:])
def test_a_process_whose_real_runs_differ_has_another_canary(
    processes: dict[str, dict[str, Any]], setting: str
) -> None:
    for model, plain in processes["plain"].items():
        other = processes[setting][model]
        if other["runs"] != plain["runs"]:
            assert other["canary"] != plain["canary"], model


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not torch.backends.mkl.is_available(), reason="the setting is for MKL on x86"
)
@pytest.mark.parametrize("model", ["llama-float32", "llama-float16", "gemma3-float32", "deepseek_v3-float32"])
def test_kernels_that_no_metadata_shows_are_seen(processes: dict[str, dict[str, Any]], model: str) -> None:
    plain, other = (processes[setting][model]["canary"] for setting in ("plain", "mkl-compatible"))
    assert plain.keys() == other.keys()
    assert plain != other


@pytest.mark.parametrize(("family", "attention"), [("gemma3", "sdpa"), ("deepseek_v2", "eager"), ("olmoe", "sdpa")])
def test_measures_alike_twice_whatever_the_global_state(family: str, attention: str) -> None:
    model = _build(family, torch.bfloat16, attention)
    first = measure(model, BLOCK)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(5)
            assert measure(model, BLOCK) == first
    finally:
        torch.set_default_dtype(torch.float32)


def test_leaves_no_trace() -> None:
    model = _build("llama", torch.float32, "sdpa").requires_grad_(True)
    before = _traces(model)
    measure(model, BLOCK)
    assert _traces(model) == before


def _traces(model: PreTrainedModel) -> dict[str, Any]:
    return {
        "random": _digest(torch.get_rng_state()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "default": torch.get_default_dtype(),
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "gradients": [(p.requires_grad, p.grad is None) for p in model.parameters()],
        "weights": _digest(*(p.detach() for p in model.parameters())),
        "config": model.config.to_json_string(),
    }


@contextmanager
def _calls_of(model: PreTrainedModel) -> Iterator[list[tuple[torch.Tensor, list[tuple[int, int]]]]]:
    """Ids of each forward call, with each cache layer's position and number of tokens kept before it."""
    calls: list[tuple[torch.Tensor, list[tuple[int, int]]]] = []

    def note(_: object, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        layers = [
            (layer.get_seq_length(), layer.keys.shape[2] if layer.is_initialized else 0)
            for layer in kwargs["cache"].layers
        ]
        calls.append((args[0], layers))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield calls
    handle.remove()


@pytest.mark.parametrize("block_tokens", [1, 16, 256, 65536])
def test_stays_inside_a_small_window_and_vocabulary(block_tokens: int) -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    with _calls_of(model) as calls:
        digests = measure(model, block_tokens)
    assert all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in digests.values())
    for ids, layers in calls:
        assert ids.shape[0] == 1
        assert ids.shape[1] <= block_tokens
        assert layers[0][0] + ids.shape[1] <= 256
        assert int(ids.min()) >= 0
        assert int(ids.max()) < 512


def test_sliding_layers_keep_a_window_and_know_their_position() -> None:
    model = _build("gemma3", torch.float32, "sdpa")
    with _calls_of(model) as calls:
        measure(model, BLOCK)
    window = model.config.sliding_window
    kinds = model.config.layer_types
    assert any(layers[0][0] > window for _, layers in calls)
    for _, layers in calls:
        position = layers[0][0]
        for kind, (layer_position, kept) in zip(kinds, layers, strict=True):
            assert layer_position == position
            assert kept == (min(position, window - 1) if kind == "sliding_attention" else position)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3"])
def test_a_step_gives_what_the_model_gives_unobserved(family: str) -> None:
    model = _build(family, torch.float32, "sdpa")
    with _calls_of(model) as calls:
        digests = measure(model, BLOCK)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(calls[0][0], cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    state = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert digests[f"step 0+{BLOCK} logits"] == _digest(logits)
    assert digests[f"step 0+{BLOCK} state"] == _digest(*state)


def test_covers_blocks_parts_decoding_and_every_kind_of_weights() -> None:
    names = set(measure(_build("qwen3_moe", torch.float32, "eager"), BLOCK))
    for step in ("0+64", "700+64", "0+37", "700+17", "0+1", "700+1", "2047+1"):
        assert {f"step {step} logits", f"step {step} state", f"step {step} attention"} <= names
    assert {"weights 64x32 float32", "weights grouped 64x64 float32", "weights 64x512 float32"} <= names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [64, 577])
def test_operands_cancel_and_leave_an_error_that_shows_the_order(dtype: torch.dtype, length: int) -> None:
    numbers = _Numbers()
    layout = _Operand((48, length), None, dtype, torch.device("cpu"))
    left, right = (numbers.cancelling(layout, -1, sign, seed) for seed, sign in enumerate((1, -1), start=1))
    exact = left.double()[:, None] * right.double()
    assert all(math.fsum(products) == 0 for products in exact.reshape(-1, length).tolist())
    shuffled = torch.arange(length) * 5 % length
    product, reordered = F.linear(left, right), F.linear(left[:, shuffled], right[:, shuffled])
    if dtype == torch.float16 and length == 64 and not product.any() and not reordered.any():
        # This processor sums so few of these products without rounding: no order can show, for there is none.
        return
    assert (product != reordered).float().mean() > 0.5
