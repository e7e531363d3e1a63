"""Steps that are still open: operations that follow may be fused with them, until something reads their result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from wirings.engine.memory_layout import FeatureMaps

if TYPE_CHECKING:
    from wirings.engine.lowering import Lowering

INFINITY = math.inf


@dataclass(eq=False)
class FusedStep(ABC):
    """A step that is not emitted yet. Its results are clamped to low … high, such as by a ReLU."""

    name: str
    _: KW_ONLY
    low: float = -INFINITY
    high: float = INFINITY

    @property
    def open(self) -> bool:
        """Whether following operations may still be fused with it, since nothing is clamped yet."""
        return self.low == -INFINITY and self.high == INFINITY

    @property
    def activation(self) -> dict[str, float]:
        """Its range, as fields of a `wirings.engine.kernel_step.ClampRange`."""
        return {"low": self.low, "high": self.high}

    @abstractmethod
    def close(self, lowering: Lowering) -> FeatureMaps:
        """Add it to the steps of a lowering; returns where its result is."""
