"""Flattening maps into features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import Operation, Shape, Tensors
from wirings.compaction.operations.mean import merge_into_mean

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class Flatten(Operation):
    """(batch, channels, height, width) to (batch, channels · height · width), channel by channel."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return inputs[0].flatten(1)

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        return inputs[0].constant.repeat_interleave(inputs[0].maps[0].numel())

    def mark_needed(self, liveness: NeededChannels, needed: Tensor) -> None:
        """All pixels of a channel are kept or removed together."""
        source = liveness.needed[self.inputs[0]]
        source |= needed.view(len(source), -1).any(1)
        pixels = len(needed) // len(source)
        liveness.needed[self.output] = source.repeat_interleave(pixels) & liveness.varies(self.output)

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        source, wanted = self.inputs[0], needed.nonzero().squeeze(1)
        channels = needed.view(len(pruner.needed[source]), -1).any(1).nonzero().squeeze(1)
        pruner.emit(self, (pruner.select(source, channels),), wanted)

    def simplify(self, rewriter: ProgramRewriter) -> bool:
        return merge_into_mean(rewriter, self)

    def affine_repeats(self, shape: Shape) -> int:
        return torch.Size(shape[1:]).numel()

    def to_onnx(self, writer: OnnxWriter) -> None:
        writer.node("Flatten", list(self.inputs), self.output, axis=1)
