"""The canary: what the kernels of this machine, in this process, make of fixed numbers.

Two processes whose metadata are equal can give other bits, some of them only in some shapes. The
probes run here are of two kinds.

- A *step* is one forward call of the model on a cache filled with pseudo-random state; what counts
  are its logits and the state it adds.
- A *product* is a matrix product that the steps were seen to make, done again on operands whose
  exact product is zero. What it leaves is rounding error and nothing else, so another order of
  summation changes nearly every bit of it. In a model's own numbers that order is mostly hidden by
  the rounding to 16 bits, until a long run meets the one number in ten thousand that shows it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import DynamicCache

from engine_adapter.tensors import host_bytes
from repo_service.domain.digest import SHA256, format_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STEPS = (
    # (tokens already in the cache, tokens of the call); None stands for a full block.
    (0, None),
    (700, None),
    (0, 37),
    (300, 100),
    (700, 17),
    (2047, 5),
    (0, 1),
    (700, 1),
    (2047, 1),
)
_ROWS_RATIO = 17 / 16
_SCORE_SCALE = 2.0**13


def measure(model: PreTrainedModel, block_tokens: int) -> dict[str, str]:
    """Digest what each probe gives on this machine, in this process.

    Runs the model at batch 1, in the shapes of the canonical schedule. Leaves the model, its grad
    mode and all random states as they are.

    Parameters
    ----------
    model
        A causal language model in eval mode whose cache layers are full, sliding or latent.
    block_tokens
        Tokens per prefill call.

    Returns
    -------
    dict
        ``sha256:<hex>`` by the probe's name. ``step/<tokens>@<depth>/logits`` is of the logits
        ``[1, vocab]`` of the step's last token, ``.../state`` of the state it added layer by layer,
        ``.../products`` of its matrix products without weights. ``linear/...`` is of one shape of
        weights, times as many numbers of rows as a step may have.
    """
    digests: dict[str, str] = {}
    projections: dict[_Projection, set[int]] = {}
    numbers = _Numbers(model.device)
    template: DynamicCache | None = None
    with torch.no_grad():
        for depth, tokens in _steps(model, block_tokens):
            cache = _filled_cache(model, template, depth, numbers)
            with _Recorder() as recorder:
                logits = _forward(model, cache, tokens, numbers)
            template = template or cache
            name = f"step/{tokens}@{depth}"
            digests[f"{name}/logits"] = _digest([logits])
            digests[f"{name}/state"] = _digest(_new_state(cache, tokens))
            products = [product for product in recorder.seen if product.function not in _PROJECTIONS]
            digests[f"{name}/products"] = _digest(_replay(products, numbers))
            for product in recorder.seen:
                if product.function in _PROJECTIONS:
                    projections.setdefault(_Projection.of(product), set()).add(product.rows)
        for projection, rows in projections.items():
            if max(rows) > 1:
                lengths = sorted(rows | set(_lengths(min(max(rows), block_tokens))))
                digests[projection.name] = _digest(projection.replay(lengths, numbers))
    return digests
