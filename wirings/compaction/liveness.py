"""Which channels of a program have to be computed: those that vary and that an output depends on."""

from __future__ import annotations

import torch
from torch import Tensor

from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.program import Program


def needed_channels(
    program: Program, constants: dict[str, ChannelConstants | None]
) -> tuple[dict[str, Tensor], set[str]]:
    """For every tensor with channels, which of them have to be computed: boolean vectors; and all tensors in use.

    All others are dead: they do not reach an output, or no input reaches them, so that they are constant.
    """
    found = NeededChannels(program, constants)
    return found.run(), found.used


class NeededChannels:
    """Walks a program from its outputs to its inputs and marks the channels that are needed."""

    def __init__(self, program: Program, constants: dict[str, ChannelConstants | None]) -> None:
        self.program, self.constants = program, constants
        self.needed = {name: torch.zeros_like(x.constant) for name, x in constants.items() if x is not None}
        self.used = set(program.outputs)
        """Tensors that something uses. Tensors without channels have nothing else to be marked."""

    def run(self) -> dict[str, Tensor]:
        for name in self.program.outputs:
            self.mark(name, None)
        for operation in reversed(self.program.operations):
            needed = self.needed.get(operation.output)
            if needed is not None and not operation.opaque:
                if needed.any():
                    self.used.update(operation.inputs)
                operation.mark_needed(self, needed)
            elif operation.output in self.used or (needed is not None and needed.any()):
                self.used.update(operation.inputs)
                for name in (*operation.inputs, operation.output):
                    self.mark(name, None)
        return self.needed

    def varies(self, name: str) -> Tensor:
        """Which channels of a tensor are not constant."""
        found = self.constants[name]
        assert found is not None
        return ~found.constant

    def mark(self, name: str, channels: Tensor | None) -> None:
        """Mark channels of a tensor, None for all of them, as needed; constant ones never are."""
        if name in self.needed:
            varies = self.varies(name)
            self.needed[name] |= varies if channels is None else channels & varies
