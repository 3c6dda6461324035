"""The attention of the joint way, ``kvgraft_joint``: cache layers that keep keys unrotated, and what runs over them.

The model is run with every position id 0, by which its own rotation changes nothing. This attention then rotates
queries and keys itself, by the model's own table, at positions that count up inside the window without a gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from engine_adapter.joint_select import Representatives
from repo_service.domain.errors import InvalidInput, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor
    from transformers import PreTrainedConfig

    from engine_adapter.joint_rotary import Rotary
    from engine_adapter.joint_settings import JointSettings
    from engine_adapter.pager import Pager
    from engine_adapter.pages import HostPages

JOINT_ATTENTION = "kvgraft_joint"

# What some families ask of attention beyond a scale and a window: capped scores, and sinks as weights.
_UNSUPPORTED_OPTIONS = ("softcap", "s_aux")


@dataclass
class Device:
    """What all runs of a session share: the pool of pages, the workspace, the rotary table.

    A page ``[2, block_tokens, dim]`` is one block of one layer and one key-value head.
    """

    settings: JointSettings
    pager: Pager
    pages: HostPages
    rotary: Rotary
    workspace: Tensor = field(repr=False)  # [2, kv_heads, window, dim]


class JointLayer(DynamicLayer):
    """A full layer: sinks and the newest tokens on the device, whole blocks on the host, representatives beside.

    Selection is for each key-value head apart, since heads look for different things.
    """

    def __init__(self, device: Device, run: Hashable, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shared = device
        self.run = run
        self.index = index
        self.tokens = 0
        self.near = 0  # The first token of the tail.
        self.representatives = Representatives(device.settings.per_block)

    def lazy_initialization(self, key_states: Tensor, _: Tensor) -> None:
        settings = self.shared.settings
        heads, dim = key_states.shape[1], key_states.shape[3]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.sinks = key_states.new_zeros(2, heads, settings.sinks, dim)
        self.tail = key_states.new_zeros(2, heads, settings.local + settings.chunk, dim)
        self.near = settings.sinks
        self.is_initialized = True

    @property
    def device_bytes(self) -> int:
        return self.sinks.nbytes + self.tail.nbytes if self.is_initialized else 0

    def get_seq_length(self) -> int:
        return self.tokens

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, stop = self.tokens, self.tokens + key_states.shape[2]
        self._move_tail(self.shared.settings.near(start))
        sinks = self.shared.settings.sinks
        for row, states in enumerate((key_states[0], value_states[0])):
            if start < sinks:
                self.sinks[row, :, start : min(stop, sinks)] = states[:, : sinks - start]
            if stop > sinks:
                first = max(start, sinks)
                self.tail[row, :, first - self.near : stop - self.near] = states[:, first - start :]
        self.tokens = stop
        self._store_whole_blocks(start)
        key_states.joint_layer = self  # type: ignore[attr-defined]
        return key_states, value_states

    def _move_tail(self, near: int) -> None:
        if near > self.near:
            kept = self.tokens - near
            self.tail[:, :, :kept] = self.tail[:, :, near - self.near : self.tokens - self.near].clone()
            self.near = near

    def _store_whole_blocks(self, before: int) -> None:
        size, sinks = self.shared.settings.block_tokens, self.shared.settings.sinks
        for block in range(max(before, sinks) // size, self.tokens // size):
            place = block * size - self.near
            states = self.tail[:, :, place : place + size]
            for head in range(states.shape[1]):
                self.shared.pages.write(self._key(head, block), states[:, head].unbind())
            self.representatives.append(states[0])

    def _key(self, head: int, block: int) -> Hashable:
        return (self.run, self.index, head, block)

    def attend(self, module: Any, query: Tensor, _: Tensor, __: Tensor, scaling: float) -> Tensor:
        """Attention of the newest tokens' queries, ``[1, heads, tokens, dim]``, over what is kept of all tokens."""
        settings, space = self.shared.settings, self.shared.workspace
        stop = min(settings.sinks, self.tokens)
        space[:, :, :stop] = self.sinks[:, :, :stop]
        candidates = (self.near - settings.sinks) // settings.block_tokens
        if candidates:
            grouped = query[0].unflatten(0, (self.tail.shape[1], -1)) * scaling
            stop += self._bring(self.representatives.select(grouped, candidates, settings.blocks), space[:, :, stop:])
        near = max(self.tokens - self.near, 0)
        space[:, :, stop : stop + near] = self.tail[:, :, :near]
        stop += near
        return attend(self.shared.rotary, module, query, space[:1, :, :stop], space[1:, :, :stop], scaling, None)

    def _bring(self, chosen: Tensor, space: Tensor) -> int:
        """Place each head's chosen blocks; returns how many tokens that are."""
        settings, pager = self.shared.settings, self.shared.pager
        size, first = settings.block_tokens, settings.sinks // settings.block_tokens
        wanted = [
            (self._key(head, first + block), head, place * size)
            for head, blocks in enumerate(chosen.tolist())
            for place, block in enumerate(blocks)
        ]
        for start in range(0, len(wanted), pager.pages):
            part = wanted[start : start + pager.pages]
            with pager.pinned([key for key, _, _ in part]) as pages:
                for (_, head, place), page in zip(part, pages, strict=True):
                    space[:, head, place : place + size] = page
        return chosen.shape[1] * size

    def rewind(self, tokens: int) -> None:
        """Go back to where the run had ``tokens`` tokens: what was near then comes back from the host."""
        settings = self.shared.settings
        if not self.is_initialized or tokens == self.tokens:
            return
        size, near = settings.block_tokens, settings.near(tokens)
        if near < self.near:
            tail = torch.zeros_like(self.tail)
            kept = max(tokens - self.near, 0)
            tail[:, :, self.near - near : self.near - near + kept] = self.tail[:, :, :kept]
            for block in range(near // size, min(self.near, tokens + size - 1) // size):
                place = block * size - near
                for head in range(tail.shape[1]):
                    with self.shared.pager.pinned([self._key(head, block)]) as (page,):
                        tail[:, head, place : place + size] = page
            self.tail, self.near = tail, near
        whole = max(tokens, settings.sinks) // size
        for block in range(whole, max(self.tokens, settings.sinks) // size):
            self._drop(block)
        self.representatives.truncate(whole - settings.sinks // size)
        self.tokens = tokens

    def close(self) -> None:
        """Give the blocks' memory on the host back."""
        if self.is_initialized:
            self.rewind(0)

    def _drop(self, block: int) -> None:
        for head in range(self.tail.shape[1]):
            self.shared.pages.free(self._key(head, block))
            self.shared.pager.forget(self._key(head, block))


class JointSlidingLayer(DynamicSlidingWindowLayer):
    """A sliding layer as the model has it, but for keys kept before rotation."""

    def __init__(self, sliding_window: int, rotary: Rotary) -> None:
        super().__init__(sliding_window)
        self.rotary = rotary

    @property
    def device_bytes(self) -> int:
        held = [tensor for tensor in (self.keys, self.values) if tensor is not None]
        return sum(tensor.untyped_storage().nbytes() for tensor in held)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        keys.joint_layer = self  # type: ignore[attr-defined]
        return keys, values

    def attend(self, module: Any, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention of the newest tokens' queries over the window."""
        return attend(self.rotary, module, query, keys, values, scaling, self.sliding_window)


class JointCache(DynamicCache):
    """A model's cache for the joint way."""

    def __init__(self, config: PreTrainedConfig, device: Device, run: Hashable) -> None:
        super().__init__(config=config)
        layers: Sequence[Any] = self.layers
        self.layers = [
            JointSlidingLayer(layer.sliding_window, device.rotary)
            if isinstance(layer, DynamicSlidingWindowLayer)
            else JointLayer(device, run, index)
            for index, layer in enumerate(layers)
        ]


def attend(
    rotary: Rotary, module: Any, query: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None
) -> Tensor:
    """Causal attention of the last tokens of ``keys``, rotated from position 0 on; ``[1, tokens, heads, dim]``."""
    new, total = query.shape[2], keys.shape[2]
    kind = getattr(module, "layer_type", None)
    query, keys = rotary.rotate(query, kind, total - new), rotary.rotate(keys, kind, 0)
    mask = None
    if new > 1 or (window is not None and total > window):
        behind = torch.arange(total - new, total, device=keys.device)[:, None] - torch.arange(total, device=keys.device)
        mask = (behind >= 0) & (behind < (total if window is None else window))
    out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)


def joint_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention, in the manner of its `AttentionInterface`."""
    layer = getattr(key, "joint_layer", None)
    if layer is None:
        raise InvalidInput(
            f"{JOINT_ATTENTION} runs over the cache of a joint run only: call the model by a JointSession"
        )
    for option in _UNSUPPORTED_OPTIONS:
        if options.get(option) is not None:
            raise UnsupportedModel(f"attention with {option} can't be run the joint way", option=option)
    return layer.attend(module, query, key, value, options["scaling"]), None


AttentionInterface.register(JOINT_ATTENTION, joint_attention)
