"""Which blocks a query chunk of the joint way looks at: representatives on the host, scored in tiles of a fixed size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# Blocks whose representatives are on the device at once.
TILE_BLOCKS = 1024
# Queries of a chunk that are scored; longer chunks are pooled to as many, so that the cost stays small.
SCORED_QUERIES = 32


class Representatives:
    """What stands for each block of one layer, ``[kv_heads, blocks, per_block, dim]``, in float32 on the host.

    A block's keys, before rotation, are cut into ``per_block`` runs of neighbours, and each run's mean is kept.
    """

    def __init__(self, per_block: int) -> None:
        self.per_block = per_block
        self.blocks = 0
        self._tiles: list[Tensor] = []

    def append(self, keys: Tensor) -> None:
        """Add a block by its keys, ``[kv_heads, block_tokens, dim]``."""
        heads, tokens, dim = keys.shape
        means = keys.float().reshape(heads, self.per_block, tokens // self.per_block, dim).mean(2)
        place = self.blocks % TILE_BLOCKS
        if not place and self.blocks // TILE_BLOCKS == len(self._tiles):
            self._tiles.append(torch.empty(heads, TILE_BLOCKS, self.per_block, dim))
        self._tiles[self.blocks // TILE_BLOCKS][:, place] = means
        self.blocks += 1

    def truncate(self, blocks: int) -> None:
        """Forget all blocks but the first ``blocks``."""
        self.blocks = min(self.blocks, blocks)

    def select(self, queries: Tensor, candidates: int, count: int) -> Tensor:
        """The ``count`` best of the first ``candidates`` blocks for each head, ascending, ``[kv_heads, count]``.

        Parameters
        ----------
        queries
            ``[kv_heads, group, tokens, dim]``, before rotation and scaled as attention scales them.
        """
        if candidates <= count:
            return torch.arange(candidates).expand(queries.shape[0], -1)
        queries = pooled(queries).float()
        scores = torch.cat([self._score(queries, start, candidates) for start in range(0, candidates, TILE_BLOCKS)], -1)
        # A head's queries share one unit of attention each; a block is as good as the query that wants it most.
        wanted = scores.softmax(-1).amax(2).sum(1)
        best = wanted.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        return best.sort(dim=-1).values

    def _score(self, queries: Tensor, start: int, candidates: int) -> Tensor:
        tile = self._tiles[start // TILE_BLOCKS][:, : candidates - start].to(queries.device)
        return torch.einsum("hgtd,hbrd->hgtbr", queries, tile).amax(-1).cpu()


def pooled(queries: Tensor) -> Tensor:
    """At most `SCORED_QUERIES` queries of a chunk, neighbours pooled by their mean."""
    tokens = queries.shape[2]
    if tokens <= SCORED_QUERIES:
        return queries
    run = -(-tokens // SCORED_QUERIES)
    return torch.stack([part.mean(2) for part in queries.split(run, 2)], 2)
