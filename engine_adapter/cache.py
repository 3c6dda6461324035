"""The engine's cache: transformers' own layers, of which the full ones keep room for what is yet to come."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedConfig

    from engine_adapter.state import BlockRecorder

_HUGE_PAGE = 2 * 2**20
# Keeps every head's first token aligned as that of a tensor of its own.
_ROOM_STEP = 64


class RoomyLayer(DynamicLayer):
    """A full layer whose keys and values, ``[1, heads, tokens, dim]``, lie in memory with room behind them.

    A forward call then copies its own tokens alone; transformers' layer copies the whole state each time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reserved = 0
        self._memory: list[Tensor | None] = [None, None]

    def adopt(self, memory: Sequence[Tensor], tokens: int) -> None:
        """Take keys and values as they lie in the first ``tokens`` of ``memory``."""
        self.lazy_initialization(memory[0], memory[1])
        self._memory = list(memory)
        self.keys, self.values = (tensor[:, :, :tokens] for tensor in memory)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append(0, self.keys, key_states)
        self.values = self._append(1, self.values, value_states)
        return self.keys, self.values

    def _append(self, which: int, held: Tensor | None, new: Tensor) -> Tensor:
        before = 0 if held is None or held.numel() == 0 else held.shape[2]
        after = before + new.shape[2]
        memory = self._memory[which]
        # Whoever set other keys or values, as reordering does, set what counts.
        elsewhere = before and (memory is None or held is None or held.data_ptr() != memory.data_ptr())
        if memory is None or elsewhere or memory.shape[2] < after:
            # Grown a second time, it may well grow a third.
            capacity = room(max(self.reserved, after + after // 4 if before else after))
            memory = take_memory((new.shape[0], new.shape[1], capacity, new.shape[3]), new.dtype, new.device)
            if before and held is not None:
                memory[:, :, :before] = held
            self._memory[which] = memory
        memory[:, :, before:after] = new
        return memory[:, :, :after]

    def reset(self) -> None:
        super().reset()
        self._memory = [None, None]


class StateCache(DynamicCache):
    """A model's cache, which also shows new state to a recorder."""

    def __init__(self, config: PreTrainedConfig, recorder: BlockRecorder | None = None) -> None:
        super().__init__(config=config)
        self.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]
        self.reserved = 0
        self.recorder = recorder

    def reserve(self, tokens: int) -> None:
        """Say how many tokens there will be, so that memory is taken once and no more of it; others may come."""
        self.reserved = tokens
        for layer in self.layers:
            if isinstance(layer, RoomyLayer):
                layer.reserved = tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.recorder is not None:
            self.recorder.record(layer_idx, (key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def room(tokens: int) -> int:
    """Tokens to take memory for, so that ``tokens`` fit."""
    return -(-tokens // _ROOM_STEP) * _ROOM_STEP


def take_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized memory; on a Linux host in huge pages, for small ones cost more than what they are filled with."""
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    if device.type != "cpu" or size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
