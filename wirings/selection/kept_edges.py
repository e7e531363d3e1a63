"""What a forward pass takes of the edges: see `KeptEdges`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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

    @property
    def masked(self) -> bool:
        """Whether the gradient depends on which edges are ranked first."""
        return self.mask is None and (isinstance(self.reach, float) or (self.reach is None and self.factor != 1.0))

    @property
    def more(self) -> float | None:
        """The density of the larger set of edges that the gradient reaches, if that is ranked as well."""
        return self.reach if isinstance(self.reach, float) else None

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
