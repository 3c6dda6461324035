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

from engine_adapter.joint_select import Representatives, Vote
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

    A page ``[2, kv_heads, block_tokens, dim]`` is one block of one layer.
    """

    settings: JointSettings
    pager: Pager
    pages: HostPages
    rotary: Rotary
    workspace: Tensor = field(repr=False)  # [2, kv_heads, positions, dim]


@dataclass
class View:
    """What the full layers of a run see between sinks and local tokens; shared by them all.

    Attributes
    ----------
    selected
        Blocks, counted from the one after the sinks; None for the newest ones.
    vote
        Where the layers' queries say what they would rather see, if they are asked.
    """

    selected: list[int] | None = None
    vote: Vote | None = None


class JointLayer(DynamicLayer):
    """A full layer: sinks and the newest tokens on the device, whole blocks on the host, representatives beside."""

    def __init__(self, device: Device, view: View, run: Hashable, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shared = device
        self.view = view
        self.run = run
        self.index = index
        self.tokens = 0
        self.near = device.settings.sinks  # The first token of the tail.
        self.representatives = Representatives(device.settings.representatives)

    def lazy_initialization(self, key_states: Tensor, _: Tensor) -> None:
        settings = self.shared.settings
        heads, dim = key_states.shape[1], key_states.shape[3]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.sinks = key_states.new_zeros(2, heads, settings.sinks, dim)
        self.tail = key_states.new_zeros(2, heads, settings.local + settings.chunk, dim)
        self.is_initialized = True

    @property
    def device_bytes(self) -> int:
        return self.sinks.nbytes + self.tail.nbytes if self.is_initialized else 0

    @property
    def candidates(self) -> int:
        """Blocks between the sinks and the tail."""
        return (self.near - self.shared.settings.sinks) // self.shared.settings.block_tokens

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
            self.shared.pages.write(self._key(block), states.unbind())
            self.representatives.append(states[0])

    def _key(self, block: int) -> Hashable:
        return (self.run, self.index, block)

    def attend(self, module: Any, query: Tensor, _: Tensor, __: Tensor, scaling: float) -> Tensor:
        """Attention of the newest tokens' queries, ``[1, heads, tokens, dim]``, over what is seen of all tokens."""
        settings, space, count = self.shared.settings, self.shared.workspace, self.candidates
        stop = min(settings.sinks, self.tokens)
        space[:, :, :stop] = self.sinks[:, :, :stop]
        selected = self.view.selected
        if selected is None or count <= settings.blocks:
            selected = list(range(max(0, count - settings.blocks), count))
        first, size, pager = settings.sinks // settings.block_tokens, settings.block_tokens, self.shared.pager
        keys = [self._key(first + block) for block in selected]
        for begin in range(0, len(keys), pager.pages):
            with pager.pinned(keys[begin : begin + pager.pages]) as pages:
                for page in pages:
                    space[:, :, stop : stop + size] = page
                    stop += size
        near = max(self.tokens - self.near, 0)
        space[:, :, stop : stop + near] = self.tail[:, :, :near]
        stop += near
        turned = Turned.of(self.shared.rotary, module, query, space[:1, :, :stop], None)
        if self.view.vote is not None:
            far = self.shared.rotary.turn(query, turned.kind, settings.local, settings.local + settings.blocks * size)
            grouped = (far[0] * scaling).unflatten(0, (space.shape[1], -1))
            self.view.vote.add(self.representatives.shares(grouped, turned.log_total(scaling), count))
        return turned.attend(space[1:, :, :stop], scaling)

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
                with self.shared.pager.pinned([self._key(block)]) as (page,):
                    tail[:, :, place : place + size] = page
            self.tail, self.near = tail, near
        whole = max(tokens, settings.sinks) // size
        for block in range(whole, max(self.tokens, settings.sinks) // size):
            self.shared.pages.free(self._key(block))
            self.shared.pager.forget(self._key(block))
        self.representatives.truncate(whole - settings.sinks // size)
        self.tokens = tokens


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
        return Turned.of(self.rotary, module, query, keys, self.sliding_window).attend(values, scaling)


class JointCache(DynamicCache):
    """A model's cache for the joint way."""

    def __init__(self, config: PreTrainedConfig, device: Device, run: Hashable) -> None:
        super().__init__(config=config)
        self.view = View()
        layers: Sequence[Any] = self.layers
        self.layers = [
            JointSlidingLayer(layer.sliding_window, device.rotary)
            if isinstance(layer, DynamicSlidingWindowLayer)
            else JointLayer(device, self.view, run, index)
            for index, layer in enumerate(layers)
        ]


@dataclass
class Turned:
    """Queries, ``[1, heads, tokens, dim]``, and keys, ``[1, kv_heads, seen, dim]``, rotated from position 0 on.

    The queries are those of the last keys.
    """

    query: Tensor
    keys: Tensor
    mask: Tensor | None
    kind: str | None

    @classmethod
    def of(cls, rotary: Rotary, module: Any, query: Tensor, keys: Tensor, window: int | None) -> Turned:
        new, total = query.shape[2], keys.shape[2]
        kind = getattr(module, "layer_type", None)
        mask = None
        if new > 1 or (window is not None and total > window):
            positions = torch.arange(total, device=keys.device)
            behind = positions[total - new :, None] - positions
            mask = (behind >= 0) & (behind < (total if window is None else window))
        return cls(rotary.rotate(query, kind, total - new), rotary.rotate(keys, kind, 0), mask, kind)

    def attend(self, values: Tensor, scaling: float) -> Tensor:
        """What comes of it, ``[1, tokens, heads, dim]``."""
        out = scaled_dot_product_attention(
            self.query, self.keys, values, attn_mask=self.mask, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    def log_total(self, scaling: float) -> Tensor:
        """The logarithm of each query's summed exponentials, ``[kv_heads, group, tokens]``, float32."""
        grouped = self.query[0].float().unflatten(0, (self.keys.shape[1], -1))
        scores = torch.einsum("hgtd,hnd->hgtn", grouped * scaling, self.keys[0].float())
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -torch.inf)
        return scores.logsumexp(-1)


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
