"""Products of tensors, such as gates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import Operation, Tensors, expect
from wirings.compaction.operations.affine import add_affine, constant_operand

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner


@dataclass(frozen=True, eq=False)
class Multiply(Operation):
    """The product of two tensors with the same channels; maps of one pixel are broadcast."""

    input_count = 2

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return inputs[0] * inputs[1]

    def check(self, inputs: Sequence[Tensor]) -> None:
        one, two = inputs
        expect(one.dim() == two.dim() and one.shape[:2] == two.shape[:2], "tensors with the same channels")

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        both = torch.stack([x.constant for x in inputs]).all(0)
        return both | torch.stack([x.zero for x in inputs]).any(0)

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        wanted = needed.nonzero().squeeze(1)
        inputs = tuple(pruner.with_constants(name, wanted) for name in self.inputs)
        pruner.emit(self, inputs, wanted)

    def to_onnx(self, writer: OnnxWriter) -> None:
        writer.node("Mul", list(self.inputs), self.output)


@converts("mul", "neg")
@converts("div", divides=True)
def _product(builder: ProgramBuilder, hint: str, a: Arguments, divides: bool = False) -> Any:
    x, y = a["self"], a.get("other", -1)
    if a.get("rounding_mode") is not None:
        return None
    if isinstance(x, ProgramTensor) and isinstance(y, ProgramTensor):
        if divides or not has_channels(builder, x) or not has_channels(builder, y):
            return None
        one, two = builder.values[x.name].shape, builder.values[y.name].shape
        if len(one) != len(two) or one[:2] != two[:2]:
            return None
        ordered = (x.name, y.name) if one.numel() >= two.numel() else (y.name, x.name)  # maps before their gates
        return ProgramTensor(builder.add(Multiply, ordered, hint))
    if divides and not isinstance(x, ProgramTensor):
        return None
    x, y = (x, y) if isinstance(x, ProgramTensor) else (y, x)
    values = constant_operand(builder, x, y)
    if values is None or values.dim() > 1:
        return None
    return add_affine(builder, hint, x, 1 / values if divides else values, torch.tensor(0.0))
