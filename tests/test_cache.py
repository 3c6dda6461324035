"""The cache that keeps room: the same state as transformers' own, without copying it at every call."""

from __future__ import annotations

import copy

import families
import pytest
import torch
from transformers import DynamicCache

from engine_adapter.cache import RoomyLayer, StateCache, room


def _random(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn((1, 2, tokens, 8), generator=generator) for _ in range(2))
    return keys, values


def _caches() -> tuple[StateCache, DynamicCache]:
    config = families.build("llama", torch.float32, "eager", 0).config
    return StateCache(config), DynamicCache(config=config)


@pytest.mark.parametrize("reserved", [0, 10, 100, 5000])
def test_state_is_that_of_transformers_own_cache(reserved: int) -> None:
    ours, theirs = _caches()
    ours.reserve(reserved)
    for i, tokens in enumerate((16, 1, 1, 70, 1000, 1)):
        states = _random(tokens, i)
        for held, expected in zip(ours.update(*states, 0), theirs.update(*states, 0), strict=True):
            assert torch.equal(held, expected)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(3, 0) == theirs.get_mask_sizes(3, 0)


def test_a_call_copies_its_own_tokens_alone() -> None:
    ours, _ = _caches()
    ours.reserve(1000)
    places = set()
    for i in range(10):
        keys, values = ours.update(*_random(100, i), 0)
        places.add((keys.data_ptr(), values.data_ptr()))
    assert len(places) == 1
    assert keys.untyped_storage().nbytes() == 2 * room(1000) * 8 * 4, "no more memory than was asked for"


def test_growth_without_a_reserve_moves_seldom() -> None:
    ours, _ = _caches()
    places = {ours.update(*_random(1, i), 0)[0].data_ptr() for i in range(2000)}
    assert len(places) < 25


@pytest.mark.parametrize("change", ["crop", "reorder_cache", "batch_select_indices"])
def test_what_transformers_does_to_a_cache_holds(change: str) -> None:
    ours, theirs = _caches()
    for cache in (ours, theirs):
        cache.update(*_random(50, 1), 0)
        if change == "crop":
            cache.crop(-7)
        else:
            getattr(cache, change)(torch.tensor([0]))
        cache.update(*_random(5, 2), 0)
    mine, other = ours.layers[0], theirs.layers[0]
    assert torch.equal(mine.keys, other.keys)
    assert torch.equal(mine.values, other.values)
    ours.reset()
    assert ours.get_seq_length() == 0
    assert torch.equal(ours.update(*_random(3, 3), 0)[0], _random(3, 3)[0])


def test_a_copy_goes_its_own_way() -> None:
    ours, _ = _caches()
    ours.reserve(100)
    ours.update(*_random(10, 1), 0)
    other = copy.deepcopy(ours)
    other.update(*_random(10, 2), 0)
    keys, _ = ours.update(*_random(10, 3), 0)
    assert torch.equal(keys[:, :, 10:], _random(10, 3)[0])
    assert torch.equal(other.layers[0].keys[:, :, 10:], _random(10, 2)[0])


def test_only_full_layers_keep_room() -> None:
    ours, theirs = _caches()
    assert [type(layer) for layer in ours.layers] == [RoomyLayer] * len(theirs.layers)
