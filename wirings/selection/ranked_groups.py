"""Groups that are real or hallucinated as a whole, and ranked by their size. See `RankedGroups`."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from wirings.selection import functional
from wirings.selection.weight_groups import WeightGroups


class RankedGroups(WeightGroups):
    """Groups of edges of which each edge is in one: blocks, rows and columns.

    A group is ranked by the root mean square of its allowed weights, which for groups of one size is the order of their
    L2 norms; equal ones by position. It is computed in float32, in float64 for weights in float64.
    """

    unit = "groups of edges"
    shape: tuple[int, ...]
    """The shape of a tensor that has a number for every group."""

    @abstractmethod
    def spread(self, of_groups: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Give every edge the value of its group; a mask is limited to the allowed edges."""

    @abstractmethod
    def _sums(self, values: Tensor) -> Tensor:
        """Sums over the edges of each group, in the same order in every call."""

    @abstractmethod
    def _sizes(self, like: Tensor, allowed: Tensor | None) -> float | Tensor:
        """The number of allowed edges of each group, at least 1."""

    def scores(self, values: Tensor, allowed: Tensor | None) -> Tensor:
        """The root mean square of the allowed values of each group: a tensor of shape ``self.shape``.

        Summed in double precision, so that squares neither vanish nor overflow, and the order of sums hardly matters.
        """
        squares = values.detach().double().square()
        if allowed is not None:
            squares = torch.where(allowed, squares, 0.0)
        found = (self._sums(squares) / self._sizes(squares, allowed)).sqrt()
        return found.to(torch.promote_types(values.dtype, torch.float32))

    def choose(self, values: Tensor, k: int | Tensor, within: Tensor | None, allowed: Tensor | None) -> Tensor:
        return self.spread(functional.choose(self.scores(values, allowed), k, self.among(within)), allowed)

    def among(self, within: Tensor | None) -> Tensor | None:
        """The groups that have edges in a mask; None for all."""
        return None if within is None else self._touched(within)

    def count(self, mask: Tensor) -> Tensor:
        return self._touched(mask).sum()

    def complete(self, mask: Tensor, k: int | Tensor, allowed: Tensor | None) -> Tensor:
        return self.spread(self._touched(mask), allowed)

    def whole(self, mask: Tensor, allowed: Tensor | None) -> bool:
        return torch.equal(mask, self.spread(self._touched(mask), allowed))

    def next_magnitude(
        self, values: Tensor, real: Tensor, within: Tensor | None, allowed: Tensor | None, score: Tensor | None = None
    ) -> Tensor:
        scores = self.scores(values, allowed)
        if score is None:
            score = functional.next_magnitude(scores, self._touched(real), self.among(within))
        # An edge has the same part of its group's score as of the threshold's, so the group is shrunk as a whole.
        ratio = torch.where(scores > 0, score.to(scores.dtype) / scores, 0.0)
        return values.detach().abs().to(scores.dtype) * self.spread(ratio)

    def draw(self, generator: torch.Generator | None = None, device: torch.device | None = None) -> Tensor:
        return self.spread(torch.rand(self.shape, generator=generator, device=device))

    def _touched(self, mask: Tensor) -> Tensor:
        """The groups of which a mask has an edge."""
        return self._sums(mask.float()) > 0
