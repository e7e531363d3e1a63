"""Transposable N:M groups: of every m neighbouring inputs of a node n edges are real, and of every m outputs too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wirings.selection import functional
from wirings.selection.nm_groups import NMGroups
from wirings.selection.tile_patterns import choose_tiles, tile_thresholds

_STAYS = 64
"""The rank of an edge that stays, more than those of all others of a tile together."""


class TransposableGroups(NMGroups):
    """Tiles of ``m`` neighbouring outputs × inputs, of which every row and every column has as many real edges.

    A weight and its transpose are both N:M, at each place of a convolution's kernel. A unit is one edge in every row,
    and so in every column, of each tile: a weight has m of them. Each tile has the pattern of the largest sum of
    magnitudes, see `wirings.selection.tile_patterns`. Larger wirings do not contain smaller ones by themselves.

    Args:
        layout: the shape of the weight, and what its dimensions are; m divides the numbers of inputs and outputs.
        m: the side of a tile, at most `LARGEST_TILE`.
    """

    unit = "edges of every row and column of a tile"

    def choose(self, values: Tensor, k: int | Tensor, within: Tensor | None, allowed: Tensor | None) -> Tensor:
        real = self._best(values, k, within)
        return real if within is None else real & within

    def choose_more(
        self, values: Tensor, k: Tensor, least: int, within: Tensor | None, allowed: Tensor | None
    ) -> Tensor:
        real = self.choose(values, k, within, allowed)
        rank = real if within is None else _stays(real, within)
        return self._best(values, k.clamp(min=least), rank)

    def complete(self, mask: Tensor, k: int | Tensor, allowed: Tensor | None) -> Tensor:
        for n in range(int(k), self.m):
            now = self._best(mask.float(), n, mask)
            if not (mask & ~now).any():
                return now
        return torch.ones_like(mask)

    def whole(self, mask: Tensor, allowed: Tensor | None) -> bool:
        tiles = self._tiles(mask)
        counts = torch.cat([tiles.sum(1), tiles.sum(2)])
        return bool((counts == counts[0, 0]).all())

    def next_magnitude(
        self, values: Tensor, real: Tensor, within: Tensor | None, allowed: Tensor | None, score: Tensor | None = None
    ) -> Tensor:
        rank = None if within is None else self._tiles(within)
        return self._from_tiles(tile_thresholds(self._tiles(values.detach()), self.count(real), rank))

    def exchange(
        self,
        weight: Tensor,
        wiring: Tensor,
        others: Tensor,
        k: int | Tensor,
        rate: float,
        growth: Callable[[], Tensor | None],
        allowed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Remove the weakest units, at most one of each tile, in which another one grows.

        Single edges cannot go: only the lost edge itself has the row and the column in which one is missing. So a tile
        is left with its strongest pattern of one unit less, and the tiles that lose least by this are changed.
        """
        tiles = self.edges // self.m**2
        lost = min(int(rate * int(torch.count_nonzero(wiring)) / self.m + 1e-6), tiles)
        scores = growth() if lost else None
        if scores is None:
            return wiring, wiring
        fewer = self._best(weight, k - 1, wiring)
        units = self._tiles(weight.detach().double().abs().where(wiring & ~fewer, 0.0)).sum((1, 2))
        unchanged = functional.choose(units, tiles - lost)[:, None, None]
        kept = wiring & (fewer | self._from_tiles(unchanged.expand(-1, self.m, self.m)))
        now = self._best(scores, k, _stays(kept, others.to(torch.int8) * 2 + wiring))
        return now & wiring, now

    def _best(self, values: Tensor, k: int | Tensor, rank: Tensor | None) -> Tensor:
        """A mask of the best pattern of each tile: of the largest sum of ranks and then of magnitudes."""
        k = k if isinstance(k, Tensor) else torch.full((), k, dtype=torch.int64, device=values.device)
        ranks = None if rank is None else self._tiles(rank)
        return self._from_tiles(choose_tiles(self._tiles(values.detach()), k, ranks))

    def _tiles(self, values: Tensor) -> Tensor:
        """A tensor of the weight's shape as tiles: (tiles, m, m)."""
        matrices = self.layout.to_matrices(values).unflatten(2, (-1, self.m)).unflatten(1, (-1, self.m))
        return matrices.permute(0, 1, 3, 5, 2, 4).reshape(-1, self.m, self.m)

    def _from_tiles(self, tiles: Tensor) -> Tensor:
        stack, outputs, inputs = self.layout.matrices
        split = tiles.reshape(stack, outputs // self.m, inputs // self.m, self.layout.places, self.m, self.m)
        return self.layout.from_matrices(split.permute(0, 1, 4, 2, 5, 3).flatten(3, 4).flatten(1, 2))


def _stays(kept: Tensor, ranks: Tensor) -> Tensor:
    """Ranks of edges, 0 to 2, to which those of the ``kept`` ones are added, so that patterns have all of these."""
    return kept.to(torch.int8) * _STAYS + ranks
