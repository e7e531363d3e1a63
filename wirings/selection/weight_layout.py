"""What the dimensions of a weight are, so that its edges can be seen as matrices from inputs to outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class WeightLayout:
    """The shape of a weight, and which of its dimensions are outputs and inputs.

    A weight is a stack of matrices (several for experts and for the groups of a grouped convolution) of shape
    (outputs, inputs), with a number of places for each pair: those of a convolution's kernel, one in other layers. A
    vector, whose only dimension is ``"in"``, is the row of one output.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """A name for each dimension: ``"experts"``, ``"out"``, ``"in"`` or ``"kernel"``, as in `wirings.wire_`'s axes."""
    parts: int = 1
    """The number of groups of a convolution, over which dimension 0 is divided."""

    matrices: tuple[int, int, int] = field(init=False)
    """The number of matrices, of outputs and of inputs."""
    places: int = field(init=False)
    """The number of edges from one input to one output."""
    _inputs_first: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Stored, not computed when asked for: compilers trace what asks for them.
        sizes = dict(zip(self.axes[::-1], self.shape[::-1], strict=True))
        stack = sizes.get("experts", self.parts)
        if "experts" not in sizes:
            sizes[self.axes[0]] //= self.parts
        kernel = [size for size, axis in zip(self.shape, self.axes, strict=True) if axis == "kernel"]
        object.__setattr__(self, "matrices", (stack, sizes.get("out", 1), sizes["in"]))
        object.__setattr__(self, "places", math.prod(kernel))
        inputs_first = "out" in sizes and self.axes.index("in") < self.axes.index("out")
        object.__setattr__(self, "_inputs_first", inputs_first)

    def to_matrices(self, values: Tensor) -> Tensor:
        """See a tensor of the weight's shape as (matrices, outputs, inputs, places)."""
        values = values if "out" in self.axes else values.unsqueeze(0)
        stacked = values if "experts" in self.axes else values.unflatten(0, (self.parts, -1))
        stacked = stacked.flatten(3) if stacked.dim() > 3 else stacked.unsqueeze(-1)
        return stacked.transpose(1, 2) if self._inputs_first else stacked

    def from_matrices(self, stacked: Tensor) -> Tensor:
        """See (matrices, outputs, inputs, places) as a tensor of the weight's shape; one place stands for all."""
        stacked = stacked.transpose(1, 2) if self._inputs_first else stacked
        stacked = stacked.expand(*stacked.shape[:3], self.places)
        return stacked.reshape(self.shape).contiguous()
