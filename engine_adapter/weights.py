"""Digest of the weights as loaded: contents, dtypes and shapes, never paths or dates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from blake3 import blake3

from engine_adapter.tensors import host_bytes
from repo_service.domain.canonical import frame
from repo_service.domain.digest import BLAKE3, format_digest

if TYPE_CHECKING:
    from torch import Tensor, nn

_HOST_ELEMENTS = 16 * 2**20


def digest_weights(model: nn.Module) -> str:
    """BLAKE3 over every parameter and buffer, non-persistent ones included.

    Tensors are hashed by several threads, each once however many names it has; the names are
    hashed with the tensors' own digests, so that swapping two tensors changes the result.

    Returns
    -------
    str
        ``blake3:<hex>``.
    """
    seen: dict[tuple[object, ...], bytes] = {}
    leaves: list[list[str | bytes]] = []
    for name, tensor in sorted(_tensors(model)):
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if place not in seen:
            seen[place] = _digest_tensor(tensor)
        leaves.append([name, seen[place]])
    return format_digest(BLAKE3, blake3(frame(["kvgraft.weights.v1", leaves])).digest())


def digest_tensor(tensor: Tensor) -> str:
    """BLAKE3 of one tensor's dtype, shape and contents, as ``blake3:<hex>``."""
    return format_digest(BLAKE3, _digest_tensor(tensor))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _digest_tensor(tensor: Tensor) -> bytes:
    tensor = tensor.detach()
    hasher = blake3(frame(["kvgraft.tensor.v1", str(tensor.dtype), list(tensor.shape)]), max_threads=blake3.AUTO)
    if tensor.numel():
        flat = tensor.contiguous().reshape(-1)
        # Other devices' tensors come to the host piece by piece.
        step = flat.numel() if flat.device.type == "cpu" else _HOST_ELEMENTS
        for start in range(0, flat.numel(), step):
            hasher.update(host_bytes(flat[start : start + step]))
    return hasher.digest()
