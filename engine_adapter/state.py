"""A model's state as its cache layers hold it: measured groups, recorded blocks, restored layers.

Shapes: a layer's keys and values are ``[1, heads, tokens, dim]``; a group's block is
``[layers, heads, block_tokens, dim]`` on the host, tokens past a partial block's end zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from engine_adapter.cache import RoomyLayer, StateCache, room, take_memory
from engine_adapter.paged import PagedLayer
from repo_service.domain.errors import UnsupportedModel
from repo_service.domain.layout import DTYPE_BYTES, ArrayLayout, LayerGroup, Layout, chunk_split
from repo_service.domain.schedule import Step, append_step

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_ARRAY_NAMES = {"full": ("k", "v"), "sliding": ("k", "v"), "latent": ("compressed", "rope")}


def measure_groups(model: PreTrainedModel, block_tokens: int) -> tuple[LayerGroup, ...]:
    """Run one token and read the layer groups off the cache that came out.

    Raises
    ------
    UnsupportedModel
        If a layer's cache stays empty, or its dtype can't be stored.
    """
    cache = StateCache(model.config)
    with torch.no_grad():
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), cache=cache, use_cache=True, logits_to_keep=1)
    latent = getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None) is not None
    members: dict[tuple[Any, ...], list[int]] = {}
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        if layer.get_seq_length() != 1 or layer.keys.shape[0] != 1:
            raise UnsupportedModel(f"layer {index} of the model keeps no KV state", layer=index)
        members.setdefault(_shape_of(layer, latent), []).append(index)
    groups: list[LayerGroup] = []
    for (kind, window, *arrays), indices in members.items():
        number = sum(group.kind == kind for group in groups)
        groups.append(
            LayerGroup(
                f"{kind}-{number}" if number else kind,
                kind,
                tuple(indices),
                window,
                tuple(
                    _array(name, dtype, len(indices), heads, dim, block_tokens)
                    for name, (dtype, heads, dim) in zip(_ARRAY_NAMES[kind], arrays, strict=True)
                ),
            )
        )
    return tuple(groups)


def _shape_of(layer: Any, latent: bool) -> tuple[Any, ...]:
    sliding = isinstance(layer, DynamicSlidingWindowLayer)
    kind = "sliding" if sliding else "latent" if latent else "full"
    arrays = tuple((_dtype_name(t.dtype), t.shape[1], t.shape[3]) for t in (layer.keys, layer.values))
    return kind, layer.sliding_window if sliding else None, *arrays


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnsupportedModel(f"a KV state of {name} can't be stored", dtype=name)
    return name


def _array(name: str, dtype: str, layers: int, heads: int, dim: int, block_tokens: int) -> ArrayLayout:
    return ArrayLayout(
        name, dtype, layers, heads, dim, block_tokens, *chunk_split(layers, heads, block_tokens, dim, dtype)
    )


@dataclass
class BlockState:
    """One block's state on the host, with the span and the schedule that made it."""

    start: int
    stop: int
    steps: list[Step]
    arrays: dict[str, Tensor] = field(repr=False)


def empty_block(layout: Layout, start: int) -> BlockState:
    """A block of zeros, arrays shaped ``[layers, heads, block_tokens, dim]``."""
    arrays = {
        name: torch.zeros((a.layers, a.heads, a.block_tokens, a.dim), dtype=getattr(torch, a.dtype))
        for name, a in layout.arrays.items()
    }
    return BlockState(start, start, [], arrays)


class BlockRecorder:
    """Collects new state block by block as the model computes it.

    Parameters
    ----------
    layout
        The model's layer groups.
    emit
        Called with each block when it is full, and with a partial one by `finish`.
    partial
        State of the block that the recording continues, if it begins inside one.
    """

    def __init__(self, layout: Layout, emit: Callable[[BlockState], None], partial: BlockState | None = None) -> None:
        self._layout = layout
        self._emit = emit
        self._block = partial
        self._offset = 0
        self._places = {
            layer: (row, tuple(f"{group.name}/{array.name}" for array in group.arrays))
            for group in layout.groups
            for row, layer in enumerate(group.layers)
        }

    def begin(self, start: int) -> None:
        """Announce a forward call from token ``start``."""
        if self._block is None:
            self._block = empty_block(self._layout, start)
        self._offset = start - self._block.start

    def record(self, layer: int, states: Iterable[Tensor]) -> None:
        """Take one layer's new state, ``[1, heads, tokens, dim]`` each."""
        if self._block is None:
            return
        row, names = self._places[layer]
        for name, new in zip(names, states, strict=True):
            self._block.arrays[name][row, :, self._offset : self._offset + new.shape[2]].copy_(new[0])

    def end(self, step: Step) -> None:
        """Close the forward call; a block that is full goes out."""
        if self._block is None:
            return
        append_step(self._block.steps, step)
        self._block.stop = step.stop
        if step.stop % self._layout.block_tokens == 0:
            self.finish()

    def snapshot(self) -> BlockState | None:
        """A copy of the partial block in hand, or None between blocks."""
        if self._block is None or self._block.stop == self._block.start:
            return None
        arrays = {name: tensor.clone() for name, tensor in self._block.arrays.items()}
        return replace(self._block, steps=list(self._block.steps), arrays=arrays)

    def finish(self) -> None:
        """Send out the block in hand, partial as it is."""
        if self._block is not None and self._block.stop > self._block.start:
            self._emit(self._block)
        self._block = None


class Restored:
    """Cache layers being filled from stored blocks up to token ``position``, with room for what the cache reserved.

    Full and latent layers get every token, sliding layers the last ``window - 1``.
    """

    def __init__(self, layout: Layout, position: int, cache: StateCache, device: torch.device) -> None:
        self._position = position
        self._memory: dict[str, Tensor] = {}
        self._pages: dict[str, tuple[int, list[PagedLayer]]] = {}
        self._first: dict[str, int] = {}
        for group in layout.groups:
            first = 0 if group.window is None else max(0, position - group.window + 1)
            kept = room(max(position, cache.reserved)) if group.window is None else position - first
            layers: list[Any] = [cache.layers[index] for index in group.layers]
            for row, array in enumerate(group.arrays):
                name = f"{group.name}/{array.name}"
                self._first[name] = first
                if isinstance(layers[0], PagedLayer):
                    self._pages[name] = row, layers
                    continue
                shape = (len(group.layers), 1, array.heads, kept, array.dim)
                self._memory[name] = take_memory(shape, getattr(torch, array.dtype), device)

    def needs(self, name: str, start: int, stop: int) -> bool:
        """True if array ``name`` needs tokens of the block ``[start, stop)``."""
        return start < self._position and stop > self._first[name]

    def place(self, name: str, start: int, stop: int, layer: int, head: int, chunk: Tensor) -> None:
        """Copy a chunk ``[layers, heads, block_tokens, dim]``, whose first layer and head are given, into place."""
        first = self._first[name]
        begin, end = max(start, first), min(stop, self._position)
        source = chunk[:, :, begin - start : end - start]
        layers, heads = chunk.shape[:2]
        if name in self._pages:
            row, paged = self._pages[name]
            for states, pages in zip(source, paged[layer : layer + layers], strict=True):
                pages.place(row, head, begin, states)
            return
        target = self._memory[name][layer : layer + layers, 0, head : head + heads, begin - first : end - first]
        target.copy_(source, non_blocking=True)

    def install(self, layout: Layout, cache: StateCache) -> None:
        """Hand the filled tensors to the cache's layers."""
        for group in layout.groups:
            names = [f"{group.name}/{array.name}" for array in group.arrays]
            for row, index in enumerate(group.layers):
                layer: Any = cache.layers[index]
                if isinstance(layer, PagedLayer):
                    layer.adopt(self._position)
                    continue
                states = [self._memory[name][row] for name in names]
                if isinstance(layer, RoomyLayer):
                    layer.adopt(states, self._position)
                    continue
                layer.lazy_initialization(*states)
                layer.keys, layer.values = states
                layer.cumulative_length = self._position
