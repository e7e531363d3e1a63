"""N:M groups: of every m neighbouring inputs of a node, n edges are real."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wirings.selection import functional
from wirings.selection.cpu import keys_of
from wirings.selection.weight_groups import WeightGroups
from wirings.selection.weight_layout import WeightLayout

MOST_COMPARED = 32
"""The largest groups whose edges are all compared with each other, which takes as many times the memory of the weight.
Larger ones are sorted, and so are all on CPUs, where that is faster: ten times for 3:32."""


class NMGroups(WeightGroups):
    """Groups of ``m`` neighbouring inputs: m inputs of a linear layer, m channels at one place of a convolution.

    A unit is one edge in every group, so a weight has m units. Edges are ranked within their group by magnitude, equal
    ones by position.

    Args:
        layout: the shape of the weight, and what its dimensions are; m divides the number of inputs.
        m: the number of edges of a group.
    """

    unit = "edges of every group"

    def __init__(self, layout: WeightLayout, m: int) -> None:
        self.layout, self.m, self.possible = layout, m, m
        stack, outputs, inputs = layout.matrices
        self.edges = stack * outputs * inputs * layout.places

    def choose(self, values: Tensor, k: int | Tensor, within: Tensor | None, allowed: Tensor | None) -> Tensor:
        return self._first(keys_of(values.detach().contiguous(), None), k, within)

    def count(self, mask: Tensor) -> Tensor:
        return torch.count_nonzero(mask) // (self.edges // self.m)

    def complete(self, mask: Tensor, k: int | Tensor, allowed: Tensor | None) -> Tensor:
        return mask | self._first(mask.int(), k, None)

    def whole(self, mask: Tensor, allowed: Tensor | None) -> bool:
        counts = self._grouped(mask).sum(-1)
        return bool((counts == counts.flatten()[0]).all())

    def next_magnitude(
        self, values: Tensor, real: Tensor, within: Tensor | None, allowed: Tensor | None, score: Tensor | None = None
    ) -> Tensor:
        size = values.detach().abs().masked_fill(real, 0.0)
        size = size if within is None else size.masked_fill(~within, 0.0)
        most = self._grouped(size).amax(-1, keepdim=True)
        return self._ungrouped(most.expand(*most.shape[:-1], self.m))

    def draw(self, generator: torch.Generator | None = None, device: torch.device | None = None) -> Tensor:
        return torch.rand(self.layout.shape, generator=generator, device=device)

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
        """Remove the weakest edges of the whole weight. Every group grows as many as it has lost.

        An edge that was lost comes back only if its group has too few others.
        """
        count = int(torch.count_nonzero(wiring))
        lost = int(rate * count + 1e-6)
        scores = growth() if lost else None
        if scores is None:
            return wiring, wiring
        kept = functional.choose(weight, count - lost, wiring)
        first = keys_of(scores.detach().float().contiguous(), None).long()
        keys = torch.where(kept, 2 << 32, torch.where(others, first + (1 << 32), 0))
        now = self._first(keys, k, None)
        return now & wiring, now

    def _first(self, keys: Tensor, k: int | Tensor, within: Tensor | None) -> Tensor:
        """A mask of the ``k`` edges with the largest keys in every group, or of all those ``within`` if fewer."""
        grouped = self._grouped(keys if within is None else keys.masked_fill(~within, -1))
        places = torch.arange(self.m, device=keys.device)
        if keys.device.type == "cpu" or self.m > MOST_COMPARED:
            order = grouped.argsort(dim=-1, descending=True, stable=True)
            real = torch.zeros_like(grouped, dtype=torch.bool).scatter(-1, order, (places < k).expand_as(order))
        else:
            mine, other = grouped.unsqueeze(-1), grouped.unsqueeze(-2)
            ahead = (other > mine) | ((other == mine) & (places < places.unsqueeze(-1)))
            real = ahead.sum(-1) < k
        real = self._ungrouped(real)
        return real if within is None else real & within

    def _grouped(self, values: Tensor) -> Tensor:
        """See a tensor of the weight's shape as groups: the edges of a group are the last dimension."""
        return self.layout.to_matrices(values).movedim(2, -1).unflatten(-1, (-1, self.m))

    def _ungrouped(self, grouped: Tensor) -> Tensor:
        return self.layout.from_matrices(grouped.flatten(-2).movedim(-1, 2))


def strongest_of_groups(weight: Tensor, n: int, m: int, dim: int = 1) -> Tensor:
    """A mask of the ``n`` entries of largest magnitude among every ``m`` along ``dim``; ties go to the earlier.

    >>> strongest_of_groups(torch.tensor([[4.0, -1.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0]]), 2, 4)
    tensor([[ True, False,  True, False],
            [ True,  True, False, False]])
    """
    moved = weight.movedim(dim, 1)
    layout = WeightLayout(tuple(moved.shape), ("out", "in", *["kernel"] * (moved.dim() - 2)))
    return NMGroups(layout, m).choose(moved, n, None, None).movedim(1, dim)
