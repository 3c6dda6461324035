"""The weights as loaded, by contents, dtypes and shapes, never paths or dates.

A digest is their identity; a checksum, several times as fast, tells a session that its own
weights are still those it began with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from blake3 import blake3
from xxhash import xxh3_128_digest

from engine_adapter.tensors import host_bytes
from repo_service.domain.canonical import frame
from repo_service.domain.digest import BLAKE3, format_digest

if TYPE_CHECKING:
    from torch import Tensor, nn

_HOST_ELEMENTS = 16 * 2**20
_PIECE_BYTES = 8 * 2**20


def digest_weights(model: nn.Module) -> str:
    """BLAKE3 over every parameter and buffer, non-persistent ones included.

    Tensors are hashed by several threads, each once however many names it has; the names are
    hashed with the tensors' own digests, so that swapping two tensors changes the result.

    Returns
    -------
    str
        ``blake3:<hex>``.
    """
    leaves = _leaves(model, lambda tensors: [_digest_tensor(tensor) for tensor in tensors])
    return format_digest(BLAKE3, blake3(frame(["kvgraft.weights.v1", leaves])).digest())


def checksum_weights(model: nn.Module) -> bytes:
    """128 bits that change with any parameter or buffer, unless someone in this process contrives that they don't.

    Covers what `digest_weights` does.
    """
    return xxh3_128_digest(frame(_leaves(model, _checksum_tensors)))


def _leaves(model: nn.Module, digest: Callable[[Sequence[Tensor]], Sequence[bytes]]) -> list[list[str | bytes]]:
    """Every name with the digest of its tensor."""
    named = [(name, (t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride()), t) for name, t in _tensors(model)]
    distinct = {place: tensor.detach() for _, place, tensor in named}
    digests = dict(zip(distinct, digest(list(distinct.values())), strict=True))
    return [[name, digests[place]] for name, place, _ in sorted(named, key=lambda item: item[0])]


def digest_tensor(tensor: Tensor) -> str:
    """BLAKE3 of one tensor's dtype, shape and contents, as ``blake3:<hex>``."""
    return format_digest(BLAKE3, _digest_tensor(tensor))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _digest_tensor(tensor: Tensor) -> bytes:
    hasher = blake3(_head(tensor), max_threads=blake3.AUTO)
    if tensor.numel():
        flat = tensor.detach().contiguous().reshape(-1)
        # Other devices' tensors come to the host piece by piece.
        step = flat.numel() if flat.device.type == "cpu" else _HOST_ELEMENTS
        for start in range(0, flat.numel(), step):
            hasher.update(host_bytes(flat[start : start + step]))
    return hasher.digest()


def _checksum_tensors(tensors: Sequence[Tensor]) -> list[bytes]:
    def checksum(piece: tuple[Tensor, int]) -> bytes:
        data, start = piece
        return xxh3_128_digest(host_bytes(data[start : start + _PIECE_BYTES]))

    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    pieces = [(data, start) for data in flat for start in range(0, data.numel(), _PIECE_BYTES)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        sums = iter(list(pool.map(checksum, pieces)))
    return [
        _head(tensor) + b"".join(next(sums) for _ in range(0, data.numel(), _PIECE_BYTES))
        for tensor, data in zip(tensors, flat, strict=True)
    ]


def _head(tensor: Tensor) -> bytes:
    return frame(["kvgraft.tensor.v1", str(tensor.dtype), list(tensor.shape)])
