"""Which blocks the joint way looks at: representatives on the host, scored in tiles of a fixed size, and one vote.

A block's representatives are the keys that lie farthest from its mean, as the model made them, before rotation.
A score estimates the attention that a query would pay to a key at the distances where selected blocks are placed,
as a share of what it pays to everything else that it sees. Most heads look nearby and pay far blocks nothing; the
few that look for something are sure of it. So a block is worth the largest share that any query of any head in any
layer would pay to it, and all layers see the same blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# Representatives on the device at once, for each key-value head.
TILE = 1024


class Representatives:
    """What stands for each block of one layer, ``per_block`` keys of each key-value head, on the host."""

    def __init__(self, per_block: int) -> None:
        self.per_block = per_block
        self.blocks = 0
        self._blocks_per_tile = max(1, TILE // per_block)
        self._tiles: list[Tensor] = []

    def append(self, keys: Tensor) -> None:
        """Add a block by its keys, ``[kv_heads, block_tokens, dim]``."""
        states = keys.float()
        distance = (states - states.mean(1, keepdim=True)).norm(dim=-1)
        # A stable sort, for which of two equal keys is taken must not depend on the machine.
        farthest = distance.sort(dim=-1, descending=True, stable=True).indices[:, : self.per_block]
        chosen = keys.gather(1, farthest.sort(dim=-1).values[..., None].expand(-1, -1, keys.shape[-1]))
        tile, place = divmod(self.blocks, self._blocks_per_tile)
        if tile == len(self._tiles):
            shape = (keys.shape[0], self._blocks_per_tile, self.per_block, keys.shape[-1])
            self._tiles.append(torch.empty(shape, dtype=keys.dtype))
        self._tiles[tile][:, place] = chosen
        self.blocks += 1

    def truncate(self, blocks: int) -> None:
        """Forget all blocks but the first ``blocks``."""
        self.blocks = min(self.blocks, blocks)

    def shares(self, queries: Tensor, near: Tensor, candidates: int) -> Tensor:
        """The logarithm of the largest share of attention that each of the first ``candidates`` blocks would get.

        Parameters
        ----------
        queries
            ``[kv_heads, group, tokens, dim]``, scaled as attention scales them and turned as far as selected
            blocks are away.
        near
            ``[kv_heads, group, tokens]``, the logarithm of the summed exponentials of the scores of what is
            seen anyway.

        Returns
        -------
        Tensor
            ``[candidates]``, float32, on the host.
        """
        queries = queries.float()
        best, total = [], near.float()
        for start in range(0, candidates, self._blocks_per_tile):
            tile = self._tiles[start // self._blocks_per_tile][:, : candidates - start]
            scores = torch.einsum("hgtd,hbrd->hgtbr", queries, tile.to(queries.device, torch.float32))
            best.append(scores.amax(-1).cpu())
            total = torch.logaddexp(total, scores.flatten(-2).logsumexp(-1))
        return (torch.cat(best, -1) - total.cpu()[..., None]).amax((0, 1, 2))


class Vote:
    """What a chunk's queries, in all layers, would give for each block."""

    def __init__(self, candidates: int) -> None:
        self.shares = torch.full((candidates,), -torch.inf)

    def add(self, shares: Tensor) -> None:
        """Count a layer's `Representatives.shares`."""
        self.shares = torch.maximum(self.shares, shares)

    def best(self, count: int) -> list[int]:
        """``count`` blocks, ascending: the best with the ones after and before it, the next best with its, and so on.

        What is looked for may lie across two blocks, and what follows it is as a rule what is wanted.
        """
        order: list[int] = self.shares.sort(descending=True, stable=True).indices.tolist()
        chosen = dict.fromkeys(
            place for block in order for place in (block, block + 1, block - 1) if 0 <= place < len(order)
        )
        return sorted(list(chosen)[:count])
