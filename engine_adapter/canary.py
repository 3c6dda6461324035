"""The canary: what the kernels of this machine, in this process, make of fixed numbers.

Two processes whose metadata are equal can give other bits, and some of them only in some shapes.
The probes are of two kinds.

- A *step* is one forward call of the model, on a cache filled with pseudo-random state. Its logits
  and the state it adds are digested.
- A *product* is a matrix product that the steps were seen to make, made again from operands that
  cancel: its exact value is zero, so there is nothing to see but rounding error, and another order
  of summation changes nearly every bit of it. In a model's own numbers rounding to 16 bits hides
  the order of summation almost everywhere, until a long run meets the number that shows it.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import DynamicCache

from engine_adapter.tensors import host_bytes
from repo_service.domain.digest import SHA256, format_digest, sha256_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUPED_ATTENTION = "TRANSFORMERS_SDPA_FORCE_GQA"
"""Environment variable: 1 lets transformers' sdpa read keys and values shared by several heads as they lie.

By default they are copied for every head first wherever there is a mask, as in most calls. Without the copy a CPU
is faster; some models' bits are then others, which the canary tells, and on a GPU another kernel may be chosen.
"""

# (position, tokens); None stands for a full block.
_STEPS = ((0, None), (700, None), (0, 37), (300, 100), (700, 17), (2047, 5), (0, 1), (700, 1), (2047, 1))
_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm)
_GROUPED: Any = torch._grouped_mm
_PRODUCTS = frozenset((F.linear, F.scaled_dot_product_attention, _GROUPED, *_MATMULS))
_FUNCTIONS = frozenset(
    "cos exp gelu layer_norm mean rms_norm rsqrt sigmoid silu sin softmax sum tanh".split()  # noqa: SIM905
)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_FUNCTION_TOKENS = 64
_LARGE_WEIGHTS = 2**24
_PERIOD = 65521
# Brings the rounding error of an attention score, about 2**-13, to where softmax shows it.
_SCORE_SCALE = 2.0**13


def watched_settings() -> tuple[object, ...]:
    """Settings that are no fields of a fingerprint, for they change bits in some shapes on some machines only.

    A canary measured under other ones says nothing any more.
    """
    return torch.get_num_threads(), os.environ.get(GROUPED_ATTENTION)


def measure(model: PreTrainedModel, block_tokens: int) -> dict[str, str]:
    """Digest what each probe gives on this machine, in this process.

    Runs the model at batch 1, in steps of the canonical schedule's shapes and inside its native
    window. Model, grad mode and random states are left as they are.

    Parameters
    ----------
    model
        A causal language model in eval mode whose cache layers are full, sliding or latent.
    block_tokens
        Tokens per block.

    Returns
    -------
    dict
        ``sha256:<hex>`` by name. For a step that adds ``n`` tokens at position ``p``:
        ``step <p>+<n> logits``, the logits ``[1, vocab]`` of its last token;
        ``step <p>+<n> state``, the keys and values it adds, layer by layer;
        ``step <p>+<n> attention``, its products of activations, from operands that cancel;
        ``step <p>+<n> functions`` for the short ones, what its norms and activations gave.
        ``weights <in>x<out> <dtype>``: products with weights of that shape, from operands that
        cancel, for numbers of rows from 1 to ``block_tokens``.
    """
    numbers = _Numbers()
    digests: dict[str, str] = {}
    projections: dict[str, dict[_Projection, set[int]]] = {}
    first: DynamicCache | None = None
    with torch.no_grad():
        for position, tokens in _steps(model, block_tokens):
            cache = DynamicCache(config=model.config)
            if first is None:
                first = cache
            elif position:
                _fill(cache, first, position, numbers)
            ids = numbers.token_ids(tokens, model)
            with _Recorder(functions=tokens <= _FUNCTION_TOKENS) as seen:
                logits = model(ids, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            name = f"step {position}+{tokens}"
            digests[f"{name} logits"] = _digest([logits])
            digests[f"{name} state"] = _digest(_added_state(cache, tokens))
            digests[f"{name} attention"] = _combined(_digest(product.redo(numbers)) for product in seen.products)
            if seen.functions is not None:
                digests[f"{name} functions"] = _combined(seen.functions)
            for projection, rows in seen.projections:
                # An output head only ever sees one row; a large one gives logits enough.
                if rows > 1 or math.prod(projection.weights.shape) <= _LARGE_WEIGHTS:
                    projections.setdefault(projection.name, {}).setdefault(projection, set()).add(rows)
        for name, alike in projections.items():
            digests[name] = _combined(
                _digest(projection.redo(_row_counts(rows, block_tokens), numbers)) for projection, rows in alike.items()
            )
    return digests


def _steps(model: PreTrainedModel, block_tokens: int) -> Iterator[tuple[int, int]]:
    """The steps to run, (position, tokens), each once and inside the native window."""
    window: int | None = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    block = min(block_tokens, window or block_tokens)
    steps: dict[tuple[int, int], None] = {}
    for position, tokens in _STEPS:
        count = min(tokens or block, block)
        steps[position if window is None else min(position, window - count), count] = None
    yield from steps


def _row_counts(seen: set[int], block_tokens: int) -> list[int]:
    """Numbers of rows to try: those seen, and up to a block's all to 32, then 16 to each doubling, in pairs."""
    limit = min(max(seen), block_tokens)
    counts = set(range(1, 33))
    count = 32
    while count < limit:
        count += 2 ** (count.bit_length() - 4)
        counts.update((count - 1, count))
    return sorted({count for count in counts if count < limit} | {limit} | seen)


def _digest(tensors: Iterable[Tensor]) -> str:
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(host_bytes(tensor))
    return format_digest(SHA256, hasher.digest())


def _combined(digests: Iterable[str]) -> str:
    """One digest of many in any order, for a model may go through its kinds of layers as a set does."""
    return sha256_digest("".join(sorted(digests)).encode())


def _fill(cache: DynamicCache, like: DynamicCache, position: int, numbers: _Numbers) -> None:
    """Bring an empty cache to ``position`` with pseudo-random state, in layers shaped as those of ``like``."""
    layers: list[tuple[Any, Any]] = list(zip(cache.layers, like.layers, strict=True))
    for index, (layer, shaped) in enumerate(layers):
        window: int | None = getattr(layer, "sliding_window", None)
        kept = position if window is None else min(position, window - 1)
        keys, values = (
            numbers.plain(_Operand((*old.shape[:2], kept, old.shape[3]), None, old.dtype, old.device), seed)
            for seed, old in enumerate((shaped.keys, shaped.values), start=2 * index)
        )
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if window is not None:
            layer.cumulative_length = position


def _added_state(cache: DynamicCache, tokens: int) -> Iterator[Tensor]:
    """Keys and values of the last ``tokens`` tokens, as far as each layer keeps them."""
    layers: list[Any] = cache.layers
    for layer in layers:
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

    def empty(self) -> Tensor:
        """Memory for the contents, dimensions that repeat them at size 1; ``expand(shape)`` restores those."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        shape = [1 if step == 0 else size for size, step in zip(self.shape, self.stride, strict=True)]
        return torch.empty_strided(shape, self.stride, dtype=self.dtype, device=self.device)

    def filled(self, contents: Tensor) -> Tensor:
        """A tensor like this with ``contents``, repeated where they have size 1."""
        target = self.empty()
        return target.copy_(contents.expand(target.shape)).expand(self.shape)

    def one_head(self) -> _Operand:
        """Of ``[batch, heads, tokens, dim]``, contiguous."""
        return self._replace(shape=(self.shape[0], 1, *self.shape[2:]), stride=None)


class _Numbers:
    """Pseudo-random numbers, made with integers alone and exact in every dtype."""

    def __init__(self) -> None:
        bits = torch.arange(1, _PERIOD + 1, device="cpu")
        for factor, shift in ((2654435761, 15), (2246822519, 13), (3266489917, 16)):
            bits = bits * factor & 0xFFFFFFFF
            bits ^= bits >> shift
        self._bits = bits
        self._pools: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def token_ids(self, tokens: int, model: PreTrainedModel) -> Tensor:
        """Token ids ``[1, tokens]``."""
        vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
        return (self._bits.repeat(tokens // _PERIOD + 1)[:tokens] % vocabulary)[None].to(model.device)

    def plain(self, operand: _Operand, seed: int) -> Tensor:
        """Numbers around 1 of either sign."""
        target = operand.empty()
        target.copy_(self._take(target, seed)).mul_(0.25)
        return target.expand(operand.shape)

    def cancelling(self, operand: _Operand, dim: int, sign: int, seed: int) -> Tensor:
        """Numbers whose second half along ``dim`` is the first, mirrored, times ``sign``.

        The products of two such operands, of either sign, sum to zero along ``dim``.
        """
        target = operand.empty().zero_()
        lanes = target.movedim(dim, -1)
        length = lanes.shape[-1]
        half = self._take(lanes[..., : length // 2], seed)
        lanes[..., : length // 2] = half
        lanes[..., length - length // 2 :] = half.flip(-1) * sign
        return target.expand(operand.shape)

    def _take(self, like: Tensor, seed: int) -> Tensor:
        if (like.dtype, like.device) not in self._pools:
            self._pools[like.dtype, like.device] = self._pool(like.dtype).to(like.device)
        pool = self._pools[like.dtype, like.device]
        start = 7919 * seed % _PERIOD
        return pool.repeat((start + like.numel()) // _PERIOD + 1)[start : start + like.numel()].view(like.shape)

    def _pool(self, dtype: torch.dtype) -> Tensor:
        """Numbers of magnitude 2**-4 to 2**4 that use every bit of the mantissa, as far as 24 bits go."""
        mantissa_bits = min(23, round(-math.log2(torch.finfo(dtype).eps)))
        mantissa: Tensor = 1 + (self._bits % 2**mantissa_bits).to(torch.float32) / 2**mantissa_bits
        sign: Tensor = 1 - 2 * (self._bits >> 23 & 1)
        scale: Tensor = 1 << (self._bits >> 24 & 7)
        return (mantissa * sign * scale / 16).to(dtype)


class _Product(NamedTuple):
    """A product of activations: one of `_MATMULS`, or attention, whose options are given."""

    function: Any
    operands: tuple[_Operand, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def redo(self, numbers: _Numbers) -> Iterator[Tensor]:
        """The product of operands that cancel; for attention, its scores' product and then its values'."""
        if self.function in _MATMULS:
            left, right = self.operands
            yield self.function(numbers.cancelling(left, -1, 1, 1), numbers.cancelling(right, -2, -1, 2))
            return
        query, key, value, *masks = self.operands
        options = dict(self.options)
        for mask in masks:
            options["attn_mask"] = mask.empty().fill_(mask.dtype == torch.bool).expand(mask.shape)
        # Every head has the same keys and values, so that heads which share them give what copies would.
        one_key, one_value = key.one_head(), value.one_head()
        noisy_scores = (numbers.cancelling(query, -1, 1, 1), key.filled(numbers.cancelling(one_key, -1, -1, 2)))
        plain_values = value.filled(numbers.plain(one_value, 3))
        yield self.function(*noisy_scores, plain_values, **options | {"scale": _SCORE_SCALE})
        equal_scores = (query.empty().zero_().expand(query.shape), key.filled(numbers.plain(one_key, 2)))
        yield self.function(*equal_scores, value.filled(numbers.cancelling(one_value, -2, 1, 3)), **options)


class _Projection(NamedTuple):
    """A product with weights: ``[out, in]`` for `F.linear`, ``[1, in, out]``, one expert's, for a grouped one."""

    function: Any
    input_rank: int
    weights: _Operand
    bias: _Operand | None

    @property
    def name(self) -> str:
        *_, first, second = self.weights.shape
        size = f"{first}x{second}" if self.function is _GROUPED else f"{second}x{first}"
        kind = "grouped " if self.function is _GROUPED else ""
        biased = "" if self.bias is None else " bias"
        return f"weights {kind}{size} {str(self.weights.dtype).removeprefix('torch.')}{biased}"

    def redo(self, row_counts: list[int], numbers: _Numbers) -> Iterator[Tensor]:
        """The product of operands that cancel, at each number of rows."""
        contracted = -2 if self.function is _GROUPED else -1
        weights = numbers.cancelling(self.weights, contracted, -1, 2)
        shape = (*(1,) * (self.input_rank - 2), row_counts[-1], weights.shape[contracted])
        inputs = numbers.cancelling(self.weights._replace(shape=shape, stride=None), -1, 1, 1)
        for count in row_counts:
            rows = inputs[..., :count, :]
            if self.function is _GROUPED:
                yield _GROUPED(rows, weights, offs=torch.tensor([count], dtype=torch.int32, device=rows.device))
            else:
                yield F.linear(rows, weights, None if self.bias is None else self.bias.empty().zero_())


class _Recorder(TorchFunctionMode):
    """Sees the calls made under it, and leaves them as they are.

    Attributes
    ----------
    products
        Products of activations, each once.
    projections
        Products with weights and their numbers of rows, each once.
    functions
        Digests of the results of `_FUNCTIONS`, if asked for.
    """

    def __init__(self, functions: bool) -> None:
        super().__init__()
        self.products: dict[_Product, None] = {}
        self.projections: dict[tuple[_Projection, int], None] = {}
        self.functions: list[str] | None = [] if functions else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _PRODUCTS and _are_plain(args[:3]):
            if func is F.linear:
                self._see_linear(*args, **kwargs)
            elif func is _GROUPED:
                self._see_grouped(*args[:2])
            elif func is F.scaled_dot_product_attention:
                self._see_attention(*args, **kwargs)
            elif len(args) == 2 and args[0].ndim >= 2 and args[1].ndim >= 2:
                self.products[_Product(func, tuple(map(_Operand.like, args)))] = None
        if self.functions is not None and getattr(func, "__name__", "") in _FUNCTIONS:
            self.functions.append(_digest([result]))
        return result

    def _see_linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        like_bias = None if bias is None else _Operand.like(bias)
        projection = _Projection(F.linear, rows.ndim, _Operand.like(weight), like_bias)
        self.projections[projection, math.prod(rows.shape[:-1])] = None

    def _see_grouped(self, rows: Tensor, weights: Tensor) -> None:
        # Which expert is given how many of the rows depends on the tokens: one may have them all.
        self.projections[_Projection(_GROUPED, 2, _Operand.like(weights[:1]), None), rows.shape[0]] = None

    def _see_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any
    ) -> None:
        operands = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
        product = _Product(
            F.scaled_dot_product_attention, tuple(map(_Operand.like, operands)), tuple(sorted(options.items()))
        )
        self.products[product] = None


def _are_plain(values: Iterable[Any]) -> bool:
    """True if there is nothing among the values but dense tensors of common floats, and None."""
    return all(value is None or (type(value) in (Tensor, nn.Parameter) and value.dtype in _FLOATS) for value in values)
