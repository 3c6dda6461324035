"""Attention over a context in pieces, with online softmax: equal bits wherever the context lies.

The keys and values of a full layer come in pieces that begin at multiples of ``split`` tokens, from a
tensor or from pages. Each piece is handed to the same products in the same shape and memory layout, and
they are summed up in the order of their positions. Method: Milakov and Gimelshein, "Online normalizer
calculation for softmax" (arXiv 1805.02867).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from repo_service.domain.errors import InvalidInput, UnsupportedModel

if TYPE_CHECKING:
    from torch import nn

PAGED_256 = "kvgraft_paged_256"
"""The attention's name with pieces of 256 tokens."""

_NAME = re.compile(r"kvgraft_paged_([1-9][0-9]{1,4})", re.ASCII)
# Keeps every piece as aligned in memory as the tensor it is cut from.
_SPLIT_STEP = 16
_LONGEST_SPLIT = 2**14
# What some models add to the scores; without it their attention is another one.
_ADDITIONS = ("softcap", "s_aux", "position_bias")

Piece = tuple[int, Tensor, Tensor]
"""Its first position, and keys and values ``[kv_heads, tokens, dim]``, contiguous."""


Pieces = Generator[Piece, None, None]


class PagedState(ABC):
    """A layer's keys and values that are no tensors: what a cache gives to the attention in their place."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """That of the keys, were they a tensor: ``[1, kv_heads, tokens, dim]``."""

    @abstractmethod
    def pieces(self) -> Pieces:
        """The pieces in order; each is there until the next one is asked for."""


def paged_attention(split: int = 256) -> str:
    """Make the attention with pieces of ``split`` tokens known to transformers; returns its name.

    ``model.set_attn_implementation(paged_attention())`` then makes it the model's, and its name with
    the split a part of the fingerprint.

    Raises
    ------
    InvalidInput
    """
    if not isinstance(split, int) or split % _SPLIT_STEP or not _SPLIT_STEP <= split <= _LONGEST_SPLIT:
        raise InvalidInput(
            f"a split of {split} tokens was asked for; it must be a multiple of {_SPLIT_STEP}, at most {_LONGEST_SPLIT}"
        )
    name = f"kvgraft_paged_{split}"
    AttentionInterface.register(name, partial(_forward, split))
    AttentionMaskInterface.register(name, _mask)
    return name


def split_of(attention: str | None) -> int | None:
    """The split in the name of an attention; None if it is not one of these."""
    match = _NAME.fullmatch(attention or "")
    return None if match is None else int(match[1])


def register_named(attention: str) -> None:
    """Make an attention of this name known to transformers, if it is one of these."""
    split = split_of(attention)
    if split is not None:
        paged_attention(split)


def _mask(
    *, mask_function: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **sizes: Any
) -> Tensor | None:
    """No mask for full layers, which are causal and masked piece by piece; transformers' for sliding ones."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedModel("padding can't be masked by this attention: run one sequence without padding")
    if local_size is not None:
        sizes["allow_is_causal_skip"] = False
        return sdpa_mask(mask_function=mask_function, local_size=local_size, **sizes)
    if mask_function is not causal_mask_function:
        raise UnsupportedModel("a mask other than the causal one can't be had with this attention")
    return None


def _forward(
    split: int,
    module: nn.Module,
    query: Tensor,
    key: Tensor | PagedState,
    value: Tensor | PagedState,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function; see transformers' ``sdpa_attention_forward`` for its arguments."""
    kind = type(module).__name__
    if added := [name for name in _ADDITIONS if kwargs.get(name) is not None]:
        raise UnsupportedModel(f"{kind} adds {added[0]} to its scores, which this attention does not")
    if isinstance(key, Tensor) and isinstance(value, Tensor) and attention_mask is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if not getattr(module, "is_causal", True) or query.shape[0] != 1 or dropout:
        raise UnsupportedModel(f"{kind} asks for attention that is not causal, batched or with dropout")
    length, dim = query.shape[2:]
    kv_heads, tokens = key.shape[1:3]
    scale = dim**-0.5 if scaling is None else scaling
    # The heads that share keys lie one after the other, as rows of one product.
    rows = (query[0] * scale).reshape(kv_heads, -1, dim)
    with closing(key.pieces() if isinstance(key, PagedState) else _cut((key, value), split)) as pieces:
        out = attend(rows, pieces, tokens - length, length)
    return out.reshape(query.shape[1], length, -1).transpose(0, 1)[None].contiguous(), None


def _cut(states: tuple[Tensor, Any], split: int) -> Pieces:
    for start in range(0, states[0].shape[2], split):
        keys, values = (tensor[0, :, start : start + split].contiguous() for tensor in states)
        yield start, keys, values


def attend(rows: Tensor, pieces: Iterable[Piece], first: int, length: int) -> Tensor:
    """Causal attention of scaled queries to pieces that begin with position 0.

    Products are made in the dtype of the state, softmax and sums in float32.

    Parameters
    ----------
    rows
        Queries ``[kv_heads, n * length, dim]``, one head after the other.
    first, length
        The first query's position, and how many there are.

    Returns
    -------
    Tensor
        ``[kv_heads, n * length, value_dim]``, in the dtype of the queries.
    """
    positions = torch.arange(first, first + length, device=rows.device)[:, None]
    peak = rows.new_full((*rows.shape[:2], 1), -torch.inf, dtype=torch.float32)
    total: Any = 0.0
    sums: Any = 0.0
    for start, keys, values in pieces:
        scores = torch.matmul(rows, keys.transpose(1, 2)).float()
        stop = start + keys.shape[1]
        if stop > first + 1:
            hidden = torch.arange(start, stop, device=rows.device) > positions
            scores.view(rows.shape[0], -1, length, stop - start).masked_fill_(hidden, -torch.inf)
        # Every query sees position 0, so that the new peak is never infinite.
        peak, before = torch.maximum(peak, scores.amax(-1, keepdim=True)), peak
        weights = torch.exp(scores.sub_(peak))
        shrink = torch.exp(before - peak)
        total = total * shrink + weights.sum(-1, keepdim=True)
        sums = sums * shrink + torch.matmul(weights.to(values.dtype), values)
    out: Tensor = (sums / total).to(rows.dtype)
    return out
