"""Products with constant maps, such as rotary embeddings."""

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


@dataclass(frozen=True, eq=False)
class MultiplyMap(Operation):
    """Multiply each channel by a constant map."""

    weights = ("map",)
    map: Tensor
    """(channels, …)."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return inputs[0] * own["map"]

    @property
    def fixed_size(self) -> bool:
        return True

    def check(self, inputs: Sequence[Tensor]) -> None:
        shape = inputs[0].shape[1:]
        expect(torch.broadcast_shapes(self.map.shape, shape) == shape, "a map of its input's size")

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        return inputs[0].constant | (self.map.reshape(len(self.map), -1) == 0).all(1)

    def to_onnx(self, writer: OnnxWriter) -> None:
        writer.node("Mul", [self.inputs[0], writer.tensor(self.map[None], f"{self.output}.map")], self.output)
