"""A model's own rotary table and rotation, taken out of its modeling module."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch

from repo_service.domain.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class Rotary:
    """Rotation by the model's table at positions inside a window.

    Parameters
    ----------
    model
        A causal language model of transformers.
    window
        Positions in the table.
    dim
        Of a head.

    Raises
    ------
    UnsupportedModel
        Without a rotary table, or with one that position 0 does not leave everything as it is.
    """

    def __init__(self, model: PreTrainedModel, window: int, dim: int) -> None:
        kind = model.config.model_type
        found = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
        if len(found) != 1:
            raise _unsupported(kind, f"{len(found)} rotary tables, where exactly one is needed,")
        embedding: Any = found[0]
        rotation = getattr(sys.modules[type(embedding).__module__], "apply_rotary_pos_emb", None)
        if rotation is None:
            raise _unsupported(kind, "no apply_rotary_pos_emb beside its rotary table")
        self._rotation = rotation
        config = model.config.get_text_config(decoder=True)
        kinds: list[str | None] = [None]
        if "layer_type" in inspect.signature(embedding.forward).parameters:
            kinds = sorted(set(config.layer_types))
        like = torch.zeros((), dtype=model.dtype, device=model.device)
        positions = torch.arange(window, device=model.device)[None]
        with torch.no_grad():
            self._tables: dict[str | None, tuple[Tensor, Tensor]] = {
                name: embedding(like, positions, *([] if name is None else [name])) for name in kinds
            }
        for cos, sin in self._tables.values():
            if not (bool((cos[:, 0] == 1).all()) and bool((sin[:, 0] == 0).all())):
                raise _unsupported(kind, "a rotary table that scales what it rotates")
        try:
            self.rotate(like.new_zeros(1, 1, 1, dim), kinds[0], 0)
        except RuntimeError:
            raise _unsupported(kind, f"a rotation that does not take a head's {dim} dimensions") from None

    @property
    def device_bytes(self) -> int:
        return sum(cos.nbytes + sin.nbytes for cos, sin in self._tables.values())

    def rotate(self, states: Tensor, kind: str | None, start: int) -> Tensor:
        """States ``[1, heads, tokens, dim]`` rotated at positions from ``start`` on.

        Parameters
        ----------
        kind
            The layer's type, where the model has a table for each.
        """
        cos, sin = self._table(kind)
        stop = start + states.shape[2]
        return self._apply(states, cos[:, start:stop], sin[:, start:stop])

    def turn(self, states: Tensor, kind: str | None, start: int, stop: int) -> Tensor:
        """States turned by the mean of the rotations at ``start`` to ``stop``: what stays the same over such distances.

        Dimensions that turn fast cancel out.
        """
        cos, sin = (part[:, start:stop].float().mean(1, keepdim=True).to(states.dtype) for part in self._table(kind))
        return self._apply(states, cos, sin)

    def _table(self, kind: str | None) -> tuple[Tensor, Tensor]:
        return self._tables[kind if kind in self._tables else None]

    def _apply(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated: Tensor = self._rotation(states, states[:, :0], cos, sin)[0]
        return rotated


def _unsupported(kind: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{kind} has {what}: joint attention rotates keys by the model's own table, so it is refused",
        model_type=kind,
        reason=what,
    )
