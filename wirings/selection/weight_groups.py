"""The contract of groups of edges, which are real or hallucinated as a structure demands. See `WeightGroups`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor


class WeightGroups(ABC):
    """The groups that a structure (`wirings.selection.structure.Structure`) makes of the edges of one weight.

    Budgets and rules count in *units* instead of edges: a unit is what the structure adds or removes at once. For
    blocks, rows and columns that is one group. For N:M it is one edge in every group, so that a weight has M units, of
    which N are real.

    Tensors of edges have the weight's shape and are whole on this process.
    """

    unit: ClassVar[str]
    """What a unit is called in messages, in the plural."""
    possible: int
    """The number of units with an allowed edge."""
    edges: int
    """The number of allowed edges."""
    equal: bool = True
    """Whether all units have the same number of edges."""

    @abstractmethod
    def choose(self, values: Tensor, k: int | Tensor, within: Tensor | None, allowed: Tensor | None) -> Tensor:
        """A mask of the edges of the ``k`` units of largest magnitude.

        Args:
            values: weights, or any scores of edges.
            k: the number of units.
            within: the edges to choose among, whole units; None for all.
            allowed: the edges that may exist; None for all.
        """

    def choose_more(
        self, values: Tensor, k: Tensor, least: int, within: Tensor | None, allowed: Tensor | None
    ) -> Tensor:
        """`choose` ``least`` units, or k if that is more: a mask that contains the one of k."""
        return self.choose(values, k.clamp(min=least), within, allowed)

    @abstractmethod
    def count(self, mask: Tensor) -> Tensor:
        """The number of units of which a mask has edges."""

    @abstractmethod
    def complete(self, mask: Tensor, k: int | Tensor, allowed: Tensor | None) -> Tensor:
        """The smallest mask of whole units that contains ``mask``; where the structure asks for ``k``, at least k."""

    @abstractmethod
    def whole(self, mask: Tensor, allowed: Tensor | None) -> bool:
        """Whether a mask consists of whole units."""

    @abstractmethod
    def next_magnitude(
        self, values: Tensor, real: Tensor, within: Tensor | None, allowed: Tensor | None, score: Tensor | None = None
    ) -> Tensor:
        """For every edge, the magnitude at which its unit would rank equally with the strongest that is not real.

        Args:
            values: the weights.
            real: the wiring.
            within: the edges that may be chosen; None for all.
            allowed: the edges that may exist; None for all.
            score: what the strongest unit that is not real is ranked by, if it is that of another weight.
        """

    @abstractmethod
    def draw(self, generator: torch.Generator | None = None, device: torch.device | None = None) -> Tensor:
        """Uniform random numbers for the edges, the same for those that are chosen together. In float32."""

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
        """Replace a fraction of the real edges: see `wirings.selection.service.Selection.exchange`."""
        count = int(self.count(wiring))
        lost = min(int(rate * count + 1e-6), int(self.count(others)))
        scores = growth() if lost else None
        if scores is None:
            return wiring, wiring
        kept = self.choose(weight, count - lost, wiring, allowed)
        return kept, kept | self.choose(scores, lost, others, allowed)
