"""Concatenation of channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import Operation, Shape, Tensors
from wirings.compaction.operations.affine import Affine, producer_absorbs_scale, scale_inputs

if TYPE_CHECKING:
    from wirings.compaction.liveness import NeededChannels
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class Concat(Operation):
    """The channels of one or more tensors, one tensor after the other."""

    input_count = None

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return torch.cat(list(inputs), 1)

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        return torch.cat([x.constant for x in inputs])

    def needed_channels(self, number: int, needed: Tensor, liveness: NeededChannels) -> Tensor:
        return needed.split([len(liveness.needed[name]) for name in self.inputs])[number]

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        """Keep whole inputs, or none of them: a sum has a zero weight for a channel that it does not need."""
        parts, kept, start = [], [], 0
        sizes = [len(pruner.needed[name]) for name in self.inputs]
        for name, own in zip(self.inputs, needed.split(sizes), strict=True):
            if own.any():
                parts.append(pruner.names[name])
                kept.append(start + pruner.kept[name])
            start += len(own)
        if len(parts) == 1:
            pruner.alias(self.output, parts[0], kept[0])
        else:
            pruner.emit(self, tuple(parts), torch.cat(kept))

    def is_identity(self, shapes: Mapping[str, Shape]) -> bool:
        return len(self.inputs) == 1

    def absorbs_scale(self, rewriter: ProgramRewriter) -> bool:
        return all(producer_absorbs_scale(rewriter, name) for name in self.inputs)

    def absorb_affine(self, rewriter: ProgramRewriter, affine: Affine) -> bool:
        if not any(producer_absorbs_scale(rewriter, name) for name in self.inputs):
            return False
        sizes = [rewriter.shapes[name][0] for name in self.inputs]
        pairs = list(zip(affine.scale.split(sizes), affine.shift.split(sizes), strict=True))
        scale_inputs(rewriter, self, pairs)
        rewriter.remove(affine.output, self.output)
        return True

    def to_onnx(self, writer: OnnxWriter) -> None:
        writer.node("Concat", list(self.inputs), self.output, axis=1)


@converts("cat")
def _cat(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    parts, dim = a["tensors"], a.get("dim", 0)
    if not all(has_channels(builder, part) for part in parts):
        return None
    if dim % builder.values[parts[0].name].dim() != 1:
        return None
    return ProgramTensor(builder.add(Concat, [part.name for part in parts], hint))
