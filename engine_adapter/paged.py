"""Paged: a context whose full layers lie in pages on the host, of which a fixed number are on the device.

Every token is written to its page on the host as it is computed; the attention brings pages in as it
goes over them (`engine_adapter.paged_attention`). Sliding layers stay on the device: they are bounded.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

from engine_adapter.cache import RoomyLayer, StateCache
from engine_adapter.paged_attention import PagedState, Pieces, split_of
from engine_adapter.pager import Pager
from engine_adapter.pages import HostPages, put
from repo_service.domain.errors import InvalidInput, UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from repo_service.domain.layout import Layout

# Pages asked for before they are needed.
_AHEAD = 4


class Paging:
    """What the paged runs of one session share: a pool of device pages, and the pages on the host.

    Parameters
    ----------
    model
        With an attention of `paged_attention`, whose split is a page's number of tokens.
    layout
        The model's layer groups.
    pages, size
        The pool, in pages or in bytes: one of them.
    directory
        Where to keep the host's pages in a file; None keeps them in memory.
    prefetch
        Read pages ahead.

    Raises
    ------
    InvalidInput
        If the pool is smaller than a page, or the attention is another one.
    UnsupportedModel
        If the model's full layers can't be paged.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout,
        *,
        pages: int | None = None,
        size: int | None = None,
        directory: Path | None = None,
        prefetch: bool = True,
    ) -> None:
        split = split_of(model.config._attn_implementation)
        if split is None:
            raise InvalidInput(
                f"the model's attention is {model.config._attn_implementation!r}, which needs the whole state on the "
                "device: call model.set_attn_implementation(paged_attention()) first, or set no device pages"
            )
        shape, dtype = _page(layout, split)
        self.split = split
        self.layers = sorted(layer for group in layout.groups if group.window is None for layer in group.layers)
        self.host = HostPages(shape, dtype, directory)
        count = self._count(pages, size)
        self.pager = Pager(count, shape, dtype, model.device, self.host, prefetch=prefetch)
        self._model_config = model.config
        self._sequences = 0
        self._active: _Pages | None = None
        self._dead: deque[set[Hashable]] = deque()

    def _count(self, pages: int | None, size: int | None) -> int:
        if size is None:
            return pages if pages is not None else 0
        if pages is not None:
            raise InvalidInput("the pool's size was given in pages and in bytes: give one of them")
        if size < self.host.page_bytes:
            raise InvalidInput(
                f"a pool of {size} bytes is smaller than one page of this model, {self.host.page_bytes} bytes",
                size=size,
                page_bytes=self.host.page_bytes,
            )
        return size // self.host.page_bytes

    def cache(self) -> PagedCache:
        """An empty cache whose full layers are paged. The pages of caches that are gone are used again.

        Raises
        ------
        InvalidInput
            If the model has another attention by now.
        """
        if split_of(self._model_config._attn_implementation) != self.split:
            raise InvalidInput(
                f"the model's attention was changed to {self._model_config._attn_implementation!r}: open a new session"
            )
        while self._dead:
            for key in self._dead.popleft():
                self.pager.forget(key)
                self.host.free(key)
        self._sequences += 1
        sequence = _Pages(self, self._sequences)
        cache = PagedCache(self._model_config, self, sequence)
        # It may happen in any thread and inside any call, so that nothing more is done then.
        weakref.finalize(cache, self._dead.append, sequence.keys).atexit = False
        return cache

    def try_on(self, model: PreTrainedModel) -> None:
        """Run one token.

        Raises
        ------
        UnsupportedModel
            If the model does more with its keys and values than hand them to the attention.
        """
        ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        try:
            with torch.no_grad():
                model(ids, cache=self.cache(), use_cache=True, logits_to_keep=1)
        except (TypeError, AttributeError) as error:
            kind = type(model).__name__
            raise UnsupportedModel(
                f"{kind} works on the keys and values in its cache, so that they can't be paged: {error}"
            ) from None

    def enter(self, sequence: _Pages) -> None:
        """Let go of another sequence's pages in the pool: in a scan, pages of this one would give way first."""
        if self._active is not None and self._active is not sequence:
            for key in self._active.keys:
                self.pager.forget(key)
        self._active = sequence

    def close(self) -> None:
        """Stop the pager and give all memory back."""
        self.pager.close()
        self.host.close()


def _page(layout: Layout, split: int) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a page: keys and values of one layer, ``[2, heads, split, dim]``."""
    arrays = [(group, array) for group in layout.groups if group.window is None for array in group.arrays]
    if not arrays:
        raise UnsupportedModel("the model has no full layers: its state is bounded, and nothing of it can be paged")
    if latent := [group.name for group, _ in arrays if group.kind != "full"]:
        raise UnsupportedModel(
            f"{latent[0]} layers can't be paged: their keys are made of the whole state in each call"
        )
    shapes = {(array.dtype, array.heads, array.dim) for _, array in arrays}
    if len(shapes) > 1:
        raise UnsupportedModel(f"full layers of several shapes can't share a pool of pages: {sorted(shapes)}")
    dtype, heads, dim = shapes.pop()
    return (2, heads, split, dim), getattr(torch, dtype)


class _Pages:
    """The pages of one sequence, layer by layer."""

    def __init__(self, paging: Paging, number: int) -> None:
        self.paging = paging
        self.number = number
        self.tokens = dict.fromkeys(paging.layers, 0)
        self.keys: set[Hashable] = set()

    def append(self, layer: int, states: Sequence[Tensor]) -> None:
        """Add tokens to a layer's keys and values, ``[1, heads, tokens, dim]`` each."""
        self.paging.enter(self)
        split, start = self.paging.split, self.tokens[layer]
        stop = start + states[0].shape[2]
        for block in range(start // split, -(-stop // split)):
            first, last = max(start, block * split), min(stop, (block + 1) * split)
            key = self._key(layer, block)
            new, offset = [s[0, :, first - start : last - start] for s in states], first - block * split
            self.paging.host.write(key, new, offset)
            self.paging.pager.amend(key, partial(put, states=new, start=offset))
        self.tokens[layer] = stop

    def place(self, layer: int, row: int, head: int, start: int, states: Tensor) -> None:
        """Put restored tokens from ``start`` on, ``[heads, tokens, dim]``, among the keys (row 0) or values (row 1)."""
        split, stop = self.paging.split, start + states.shape[1]
        for block in range(start // split, -(-stop // split)):
            first, last = max(start, block * split), min(stop, (block + 1) * split)
            page = self.paging.host.page(self._key(layer, block))
            target = page[row, head : head + states.shape[0], first - block * split : last - block * split]
            target.copy_(states[:, first - start : last - start])

    def adopt(self, layer: int, tokens: int) -> None:
        """Take what was placed as the layer's state."""
        for block in range(-(-tokens // self.paging.split)):
            self.paging.host.seal(self._key(layer, block))
        self.tokens[layer] = tokens

    def copy(self, other: _Pages) -> None:
        """Copy all pages to an empty sequence."""
        buffer = torch.empty(self.paging.host.shape, dtype=self.paging.host.dtype)
        for layer, tokens in self.tokens.items():
            for block in range(-(-tokens // self.paging.split)):
                self.paging.host.read(self._key(layer, block), buffer)
                self.paging.host.write(other._key(layer, block), buffer)
            other.tokens[layer] = tokens

    def pieces(self, layer: int) -> Pieces:
        """See `PagedState.pieces`."""
        split, tokens = self.paging.split, self.tokens[layer]
        for block in range(-(-tokens // split)):
            self.paging.pager.prefetch(self._ahead(layer, block))
            with self.paging.pager.pinned([self._key(layer, block)], scan=True) as (page,):
                count = min(split, tokens - block * split)
                yield block * split, page[0, :, :count].contiguous(), page[1, :, :count].contiguous()

    def _ahead(self, layer: int, block: int) -> list[Hashable]:
        """The next pages of this layer, and then the first ones of the next."""
        split, layers = self.paging.split, self.paging.layers
        depth = min(_AHEAD, self.paging.pager.pages - 1)
        last = min(block + depth, (self.tokens[layer] - 1) // split)
        ahead = [self._key(layer, number) for number in range(block + 1, last + 1)]
        following = layers[(layers.index(layer) + 1) % len(layers)]
        # Its last page is not full, so that it is about to be written to.
        count = min(depth - len(ahead), self.tokens[following] // split)
        return ahead + [self._key(following, number) for number in range(count)]

    def _key(self, layer: int, block: int) -> Hashable:
        key = (self.number, layer, block)
        self.keys.add(key)
        return key


class PagedLayer(DynamicLayer, PagedState):
    """A full layer whose keys and values lie in pages; it is what the attention gets in their place."""

    def __init__(self, index: int, sequence: _Pages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index = index
        self.sequence = sequence

    @property
    def shape(self) -> tuple[int, int, int, int]:
        _, heads, _, dim = self.sequence.paging.host.shape
        return 1, heads, self.get_seq_length(), dim

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        self.sequence.append(self.index, (key_states, value_states))
        return self, self

    def place(self, row: int, head: int, start: int, states: Tensor) -> None:
        """See `_Pages.place`; nothing of it counts before `adopt`."""
        self.sequence.place(self.index, row, head, start, states)

    def adopt(self, tokens: int) -> None:
        """Take what was placed, up to token ``tokens``."""
        self.sequence.adopt(self.index, tokens)

    def pieces(self) -> Pieces:
        return self.sequence.pieces(self.index)

    def get_seq_length(self) -> int:
        return self.sequence.tokens[self.index]

    def reset(self) -> None:
        self.sequence.tokens[self.index] = 0

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise UnsupportedModel(
            "a paged cache holds one sequence that grows; it can't be cropped, offloaded or reordered"
        )

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse


class PagedCache(StateCache):
    """A model's cache whose full layers are paged; from `Paging.cache`."""

    def __init__(self, config: PreTrainedConfig, paging: Paging, sequence: _Pages) -> None:
        super().__init__(config)
        self._paging = paging
        self._sequence = sequence
        self.layers = [
            PagedLayer(index, sequence) if isinstance(layer, RoomyLayer) else layer
            for index, layer in enumerate(self.layers)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        other = self._paging.cache()
        self._sequence.copy(other._sequence)
        other.layers = [
            theirs if isinstance(mine, PagedLayer) else copy.deepcopy(mine, memo)
            for mine, theirs in zip(self.layers, other.layers, strict=True)
        ]
        return other
