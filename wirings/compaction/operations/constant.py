"""Tensors that do not depend on the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import Operation, Shape, Tensors

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter


@dataclass(frozen=True, eq=False)
class Constant(Operation):
    """A constant map for each channel, repeated for each image of the input, whose values it ignores."""

    weights = ("map",)
    map: Tensor
    """(channels, height, width)."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return own["map"].expand(inputs[0].shape[0], *own["map"].shape)

    @property
    def fixed_size(self) -> bool:
        return self.map.dim() > 1

    def constants(self, inputs: Sequence[ChannelConstants], shape: Shape) -> ChannelConstants:
        maps = self.map.double()
        return ChannelConstants(torch.ones(len(maps), dtype=torch.bool), maps)

    def mark_needed(self, liveness: NeededChannels, needed: Tensor) -> None:
        """Only the batch size of the input matters."""

    def to_onnx(self, writer: OnnxWriter) -> None:
        batch = writer.node("Shape", list(self.inputs), f"{self.output}.batch", start=0, end=1)
        size = writer.integers(list(self.map.shape), f"{self.output}.size")
        shape = writer.node("Concat", [batch, size], f"{self.output}.shape", axis=0)
        writer.node("Expand", [writer.tensor(self.map[None], f"{self.output}.map"), shape], self.output)
