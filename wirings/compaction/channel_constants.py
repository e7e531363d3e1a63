"""Which channels of a program are constant: independent of the inputs, whatever these are.

A node that no input reaches is constant, and so is every node that only such nodes feed. The value of a constant
channel is a map rather than a number, since zero padding makes borders differ. Everything is computed in double
precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wirings.compaction.program import Program


@dataclass(eq=False)
class ChannelConstants:
    """Which channels of a tensor are constant, and their values."""

    constant: Tensor
    """(channels,), boolean."""
    maps: Tensor
    """(channels, …): the values of the constant channels; zero for all others."""

    @property
    def zero(self) -> Tensor:
        """Which channels are zero everywhere: (channels,), boolean."""
        return self.constant & (self.maps.reshape(len(self.maps), -1) == 0).all(1)


def all_varying(shape: tuple[int, ...]) -> ChannelConstants:
    """The constants of a tensor that has none."""
    # One number stands for all, so that tensors without constants take no memory.
    return ChannelConstants(torch.zeros(shape[0], dtype=torch.bool), torch.zeros(()).double().expand(shape))


def find_constants(program: Program) -> dict[str, ChannelConstants | None]:
    """Find the constant channels of every tensor of a program; None for tensors without channels."""
    shapes = program.shapes()
    found: dict[str, ChannelConstants | None] = {
        name: all_varying(shape) if shape else None for name, shape in program.inputs.items()
    }
    for operation in program.operations:
        shape = shapes.get(operation.output, ())
        inputs = [x for name in operation.inputs if (x := found[name]) is not None]
        if not shape:
            found[operation.output] = None
        elif operation.opaque or len(inputs) < len(operation.inputs):
            found[operation.output] = all_varying(shape)
        else:
            found[operation.output] = operation.constants(inputs, shape)
    return found
