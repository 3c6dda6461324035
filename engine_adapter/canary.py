"""The canary: what the kernels of this machine, in this process, make of fixed numbers.

Two processes whose metadata are equal can give other bits, and in some shapes only. The probes
are of two kinds.

- A *step* is one forward call of the model on a cache filled with pseudo-random state. Its logits
  and the state it adds are digested.
- A *product* is a matrix product that the steps were seen to make, made again from operands that
  cancel: the exact result is zero, so all there is to see is rounding error, and another order of
  summation changes nearly every bit of it. In a model's own numbers rounding to 16 bits hides the
  order of summation almost everywhere, until a long run meets the number that shows it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
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

# (tokens in the cache, tokens of the call); None is a full block.
_STEPS = ((0, None), (700, None), (0, 37), (300, 100), (700, 17), (2047, 5), (0, 1), (700, 1), (2047, 1))
_PERIOD = 65521
_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
# Brings the rounding error of a score, 2**-16 or so, to the scale on which softmax changes.
_SCORE_SCALE = 2.0**13


def measure(model: PreTrainedModel, block_tokens: int) -> dict[str, str]:
    """Digest what each probe gives on this machine, in this process.

    Runs the model at batch 1 in the shapes of the canonical schedule. The model, the grad mode and
    the random states are left as they are.

    Parameters
    ----------
    model
        A causal language model in eval mode with full, sliding or latent cache layers.
    block_tokens
        Tokens per prefill call.

    Returns
    -------
    dict
        ``sha256:<hex>`` by the name of the probe. Of the step that adds ``n`` tokens at position
        ``p``, ``step <p>+<n> logits`` covers the logits ``[1, vocab]`` of the last token,
        ``step <p>+<n> state`` the new keys and values of every layer, and ``step <p>+<n> products``
        its products of two activations. ``weights <in>x<out> …`` covers the product with weights
        of that shape at up to ``block_tokens`` rows.
    """
    numbers = _Numbers()
    digests: dict[str, str] = {}
    projections: dict[_Projection, set[int]] = {}
    filled_like: DynamicCache | None = None
    with torch.no_grad():
        for position, tokens in _steps(model, block_tokens):
            cache = _filled_cache(model, filled_like, position, numbers)
            ids = numbers.token_ids(tokens, model)
            with _Recorder() as seen:
                logits = model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            filled_like = filled_like or cache
            name = f"step {position}+{tokens}"
            digests[f"{name} logits"] = _digest([logits])
            digests[f"{name} state"] = _digest(_new_state(cache, tokens))
            digests[f"{name} products"] = _digest(out for product in seen.products for out in product.redo(numbers))
            for projection, rows in seen.projections:
                projections.setdefault(projection, set()).add(rows)
        for projection, seen_rows in projections.items():
            # The output head only ever sees one row, and its result, the logits, is digested whole.
            if max(seen_rows) > 1:
                rows = seen_rows | set(_row_counts(min(max(seen_rows), block_tokens)))
                digests[projection.name] = _digest(projection.redo(sorted(rows), numbers))
    return digests


def _steps(model: PreTrainedModel, block_tokens: int) -> Iterator[tuple[int, int]]:
    """The steps to run, (position, tokens), inside the model's native window."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "max_position_embeddings", None) or 2**62
    block = min(block_tokens, window)
    done = set()
    for position, tokens in _STEPS:
        count = min(tokens or block, block)
        step = (min(position, window - count), count)
        if step not in done:
            done.add(step)
            yield step


def _row_counts(limit: int) -> Iterator[int]:
    """Row counts from 1 to ``limit``: all up to 32, every sixteenth of the way from there on, powers of two."""
    rows = 1
    while rows < limit:
        yield rows
        rows += max(1, rows // 16)
    yield limit
    yield from (2**i for i in range(limit.bit_length()) if 2**i <= limit)


def _digest(tensors: Iterable[Tensor]) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(host_bytes(tensor))
    return format_digest(SHA256, hasher.digest())


def _filled_cache(model: PreTrainedModel, like: DynamicCache | None, position: int, numbers: _Numbers) -> DynamicCache:
    """A cache that stands at ``position`` with pseudo-random state, its layers shaped as those of ``like``."""
    cache = DynamicCache(config=model.config)
    if like is None or position == 0:
        return cache
    for index, (layer, shaped) in enumerate(zip(cache.layers, like.layers, strict=True)):
        window: int | None = getattr(layer, "sliding_window", None)
        kept = position if window is None else min(position, window - 1)
        states = [
            numbers.plain(_Operand.like(old)._replace(shape=(*old.shape[:2], kept, old.shape[3]), stride=None), seed)
            for seed, old in enumerate((shaped.keys, shaped.values), start=2 * index)
        ]
        layer.lazy_initialization(*states)
        layer.keys, layer.values = states
        if window is not None:
            layer.cumulative_length = position
    return cache


def _new_state(cache: DynamicCache, tokens: int) -> Iterator[Tensor]:
    """The last ``tokens`` tokens' keys and values, layer by layer, as far as the layer keeps them."""
    for layer in cache.layers:
        yield layer.keys[:, :, -tokens:]
        yield layer.values[:, :, -tokens:]


class _Operand(NamedTuple):
    """All of a tensor but its contents; a stride of None is the contiguous one."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: Tensor) -> _Operand:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def holding(self, values: Tensor) -> Tensor:
        """A tensor of this layout with the contents of ``values``, whose expanded dimensions count once."""
        if self.stride is None:
            return values
        placed = torch.empty_strided(values.shape, self.stride, dtype=self.dtype, device=self.device)
        return placed.copy_(values).expand(self.shape)

    @property
    def distinct_shape(self) -> tuple[int, ...]:
        """The shape with expanded dimensions at 1."""
        if self.stride is None:
            return self.shape
        return tuple(1 if step == 0 else size for size, step in zip(self.shape, self.stride, strict=True))


class _Numbers:
    """Pseudo-random numbers made with integers alone, each exact in the dtype asked for."""

    def __init__(self) -> None:
        bits = torch.arange(1, _PERIOD + 1)
        for factor, shift in ((2654435761, 15), (2246822519, 13), (3266489917, 16)):
            bits = bits * factor & 0xFFFFFFFF
            bits ^= bits >> shift
        self._bits = bits
        self._pools: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def token_ids(self, tokens: int, model: PreTrainedModel) -> Tensor:
        """Token ids ``[1, tokens]``."""
        vocabulary: Any = model.get_input_embeddings().num_embeddings
        return (self._bits[torch.arange(tokens) % _PERIOD] % vocabulary)[None].to(model.device)

    def plain(self, operand: _Operand, seed: int) -> Tensor:
        """Numbers around 1, of either sign."""
        shape = operand.distinct_shape
        return operand.holding((self._take(math.prod(shape), operand, seed) / 4).view(shape))

    def cancelling(self, operand: _Operand, dim: int, sign: int, seed: int) -> Tensor:
        """Numbers of a wide range whose second half along ``dim`` mirrors the first, times ``sign``.

        The products of two such operands, one of each sign, sum to zero along ``dim``.
        """
        shape = list(operand.distinct_shape)
        length = shape.pop(dim)
        half = self._take(math.prod(shape) * (length // 2), operand, seed).view(*shape, length // 2)
        middle = half.new_zeros(*shape, length % 2)
        return operand.holding(torch.cat([half, middle, half.flip(-1) * sign], -1).movedim(-1, dim))

    def _take(self, count: int, operand: _Operand, seed: int) -> Tensor:
        pool = self._pool(operand.dtype, operand.device).roll(-7919 * seed)
        return pool.repeat(count // _PERIOD + 1)[:count]

    def _pool(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Numbers of magnitude 2**-4 to 2**4 with every bit of the mantissa in use."""
        if (dtype, device) not in self._pools:
            mantissa = min(23, round(-math.log2(torch.finfo(dtype).eps)))
            fraction = (self._bits % 2**mantissa) / 2**mantissa
            sign = 1 - 2 * (self._bits >> 23 & 1)
            scale = (1 << (self._bits >> 24 & 7)) / 16
            self._pools[dtype, device] = ((1 + fraction) * sign * scale).to(device, dtype)
        return self._pools[dtype, device]


class _Product(NamedTuple):
    """A product of activations: one of `_MATMULS`, or attention, for which ``options`` are set."""

    function: Any
    operands: tuple[_Operand, ...]
    options: tuple[tuple[str, Any], ...] | None = None

    def redo(self, numbers: _Numbers) -> Iterator[Tensor]:
        """The product of operands that cancel."""
        if self.options is None:
            left, right = self.operands
            yield self.function(numbers.cancelling(left, -1, 1, 1), numbers.cancelling(right, -2, -1, 2))
            return
        query, key, value, *mask = self.operands
        options = dict(self.options)
        if mask:
            mask_dtype = mask[0].dtype
            options["attn_mask"] = torch.full(
                mask[0].shape, mask_dtype == torch.bool, dtype=mask_dtype, device=mask[0].device
            )
        yield self.function(
            numbers.cancelling(query, -1, 1, 1),
            numbers.cancelling(key, -1, -1, 2),
            numbers.plain(value, 3),
            **options | {"scale": _SCORE_SCALE},
        )
        yield self.function(
            torch.zeros_like(numbers.plain(query, 1)),
            numbers.plain(key, 2),
            numbers.cancelling(value, -2, 1, 3),
            **options,
        )


class _Projection(NamedTuple):
    """A product with weights, ``[out, in]`` for linear and ``[experts, in, out]`` for a grouped one."""

    function: Any
    rows_rank: int
    weights: _Operand
    bias: _Operand | None

    @property
    def name(self) -> str:
        *_, first, second = self.weights.shape
        if self.function is F.linear:
            first, second = second, first
        kind = str(self.weights.dtype).removeprefix("torch.")
        return f"weights {first}x{second} {kind}" + (" bias" if self.bias else "")

    def redo(self, row_counts: list[int], numbers: _Numbers) -> Iterator[Tensor]:
        """The product of operands that cancel, at each number of rows."""
        grouped = self.function is not F.linear
        weights = numbers.cancelling(self.weights, -2 if grouped else -1, -1, 2)
        length = weights.shape[-2 if grouped else -1]
        lead = (1,) * (self.rows_rank - 2)
        rows = _Operand((*lead, max(row_counts), length), None, self.weights.dtype, self.weights.device)
        inputs = numbers.cancelling(rows, -1, 1, 1)
        for count in row_counts:
            some = inputs[..., :count, :]
            if grouped:
                ends = torch.full((weights.shape[0],), count, dtype=torch.int32, device=weights.device)
                yield self.function(some, weights, offs=ends)
            else:
                bias = None if self.bias is None else weights.new_zeros(self.bias.shape)
                yield self.function(some, weights, bias)


class _Recorder(TorchFunctionMode):
    """Notes the products of the calls made under it, in order, each once; runs them as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[_Product, None] = {}
        self._projections: dict[tuple[_Projection, int], None] = {}

    @property
    def products(self) -> list[_Product]:
        return list(self._seen)

    @property
    def projections(self) -> list[tuple[_Projection, int]]:
        """With their numbers of rows."""
        return list(self._projections)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            self._note_linear(*args, **kwargs)
        elif func is torch._grouped_mm:
            self._note_grouped(*args, **kwargs)
        elif func is F.scaled_dot_product_attention:
            self._note_attention(*args, **kwargs)
        elif func in _MATMULS:
            self._seen[_Product(func, tuple(map(_Operand.like, args)))] = None
        return func(*args, **kwargs)

    def _note_linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        kept_bias = None if bias is None else _Operand.like(bias)
        projection = _Projection(F.linear, input.ndim, _Operand.like(weight), kept_bias)
        self._projections[projection, input.shape[-2]] = None

    def _note_grouped(self, mat_a: Tensor, mat_b: Tensor, **_: Any) -> None:
        one_group = _Operand.like(mat_b[:1])
        self._projections[_Projection(torch._grouped_mm, 2, one_group, None), mat_a.shape[0]] = None

    def _note_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> None:
        tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
        product = _Product(
            F.scaled_dot_product_attention, tuple(map(_Operand.like, tensors)), tuple(sorted(options.items()))
        )
        self._seen[product] = None
