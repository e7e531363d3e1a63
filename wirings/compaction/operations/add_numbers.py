"""Sums of maps and one number per channel, such as the embedding of a time step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import Operation, Tensors, expect

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner


@dataclass(frozen=True, eq=False)
class AddNumbers(Operation):
    """The sum of maps, and of maps of one pixel with the same channels."""

    input_count = 2

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return inputs[0] + inputs[1]

    def check(self, inputs: Sequence[Tensor]) -> None:
        one, two = inputs
        expect(one.dim() == two.dim() > 2 and one.shape[:2] == two.shape[:2], "tensors with the same channels")
        expect(set(two.shape[2:]) == {1}, "maps of one pixel")

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        return torch.stack([x.constant for x in inputs]).all(0)

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        wanted = needed.nonzero().squeeze(1)
        pruner.emit(self, tuple(pruner.with_constants(name, wanted) for name in self.inputs), wanted)

    def to_onnx(self, writer: OnnxWriter) -> None:
        writer.node("Add", list(self.inputs), self.output)
