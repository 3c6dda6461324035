"""Tensors as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def host_bytes(tensor: Tensor) -> memoryview:
    """A tensor's contents in C order, as bytes on the host; a view where it is contiguous there already."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    array: Any = flat.numpy()
    return memoryview(array)
