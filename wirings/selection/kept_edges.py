"""What a forward pass takes of the edges: see `KeptEdges`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wirings.errors import WiringError
from wirings.selection.gradient import GradientReach


@dataclass(frozen=True)
class KeptEdges:
    """Which edges a forward pass uses and how, and which of them its gradient reaches."""

    mask: str | None = None
    """The name under which the edges remember a mask of those to keep; None to rank them by magnitude."""
    power: float = math.inf
    """How kept edges are shrunk (`shrink.shrunk`); infinity leaves them unchanged. Only for ranked edges."""
    reach: float | str | None = None
    """The gradient reaches the strongest edges up to this density, or the edges in the mask remembered under this name;
    None for all allowed ones."""
    factor: float | str = 1.0
    """The factor of the gradient of edges that are not kept, or the name under which the edges remember it."""
    in_training: bool = False
    """Whether this holds in training alone, and `Rule.forward` is asked otherwise."""
    own: str | None = None
    """For rules that divide a shared budget among the layers: the name under which the edges remember their own number,
    with which each layer is ranked by itself. None if layers that share a budget are ranked together."""
    learned: str | None = None
    """The name of a parameter that all layers hold, a vector on which the logarithms of their thresholds depend; None
    if thresholds are not learned. Only for ``power=1`` and ``factor=0``."""
    pull: str = "pull"
    """The name under which the edges remember the derivatives of that logarithm by the entries of ``learned``."""

    def __post_init__(self) -> None:
        ranked = self.mask is None and self.reach is None
        if self.learned is not None and not (ranked and self.power == 1 and self.factor == 0 and self.own is not None):
            raise WiringError("KeptEdges: learned thresholds need power=1, factor=0.0 and own=, and no mask or reach.")

    @property
    def masked(self) -> bool:
        """Whether the gradient depends on which edges are ranked first."""
        return self.mask is None and (isinstance(self.reach, float) or (self.reach is None and self.factor != 1.0))

    @property
    def more(self) -> float | None:
        """The density of the larger set of edges that the gradient reaches, if that is ranked as well."""
        return self.reach if isinstance(self.reach, float) else None

    def together(self, shared: bool) -> bool:
        """Whether layers are ranked together, given whether they share a budget."""
        return shared and self.own is None

    def number(self, shared: bool) -> str:
        """The name under which the edges remember how many of them are kept, given whether layers share a budget."""
        return "k" if self.own is None or not shared else self.own

    def learning(self, edges: Sequence[Any]) -> tuple[Tensor, list[Tensor]]:
        """What is learned, and for several layers how the logarithms of their thresholds depend on it."""
        assert self.learned is not None
        return getattr(edges[0], self.learned), [one._buffers[self.pull] for one in edges]

    def gradient(self, edges: Any, mask: Tensor | None) -> GradientReach | None:
        """Where the gradient goes; None for everywhere.

        Args:
            edges: the edges of the weight.
            mask: what was chosen when the edges were ranked, if this is ``masked``.
        """
        buffers = edges._buffers  # in few operations: this is asked for every layer and pass
        if self.reach is not None:
            return GradientReach(buffers[self.reach] if isinstance(self.reach, str) else mask)
        allowed = buffers["allowed"]
        if self.factor == 1.0:
            return None if allowed is None else GradientReach(allowed=allowed)
        factor = buffers[self.factor] if isinstance(self.factor, str) else self.factor
        return GradientReach(mask if self.mask is None else buffers[self.mask], factor, allowed)
