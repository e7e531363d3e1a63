"""Sums of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import Operation, Shape, Tensors, expect
from wirings.compaction.operations.add_map import AddMap
from wirings.compaction.operations.add_numbers import AddNumbers
from wirings.compaction.operations.affine import (
    Affine,
    add_affine,
    constant_operand,
    producer_absorbs_scale,
    scale_inputs,
)

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.prune import Pruner
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class Add(Operation):
    """The sum of one or more tensors of one shape."""

    input_count = None

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        total = inputs[0]
        for x in inputs[1:]:
            total = total + x
        return total

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(all(x.shape == inputs[0].shape for x in inputs), "tensors of one shape")

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        return torch.stack([x.constant for x in inputs]).all(0)

    def prune(self, pruner: Pruner, needed: Tensor) -> None:
        wanted = needed.nonzero().squeeze(1)
        parts, total = [], None
        for name in self.inputs:
            constants = pruner.constants_of(name)
            varies = ~constants.constant[wanted]
            if not varies.all():
                maps = constants.maps[wanted]
                total = maps if total is None else total + maps
            if varies.any():
                parts.append(pruner.scatter(name, varies, pruner.select(name, wanted[varies])))
        if len(parts) == 1:
            pruner.alias(self.output, parts[0], wanted)
        else:
            pruner.emit(self, tuple(parts), wanted)
        pruner.names[self.output] = pruner.add_maps(pruner.names[self.output], total)

    def is_identity(self, shapes: Mapping[str, Shape]) -> bool:
        return len(self.inputs) == 1

    def absorbs_scale(self, rewriter: ProgramRewriter) -> bool:
        return all(producer_absorbs_scale(rewriter, name) for name in self.inputs)

    def absorb_affine(self, rewriter: ProgramRewriter, affine: Affine) -> bool:
        able = [producer_absorbs_scale(rewriter, name) for name in self.inputs]
        only_shift = bool((affine.scale == 1).all())
        if not (all(able) or (only_shift and any(able))):
            return False
        first, zeros = able.index(True), torch.zeros_like(affine.shift)
        pairs = [(affine.scale, affine.shift if i == first else zeros) for i in range(len(able))]
        scale_inputs(rewriter, self, pairs)
        rewriter.remove(affine.output, self.output)
        return True

    def to_onnx(self, writer: OnnxWriter) -> None:
        writer.node("Add" if len(self.inputs) == 2 else "Sum", list(self.inputs), self.output)


@converts("add")
@converts("sub", sign=-1)
@converts("rsub", sign=-1, swapped=True)
def _sum(builder: ProgramBuilder, hint: str, a: Arguments, sign: int = 1, swapped: bool = False) -> Any:
    """The sum self + sign · other, or other + sign · self."""
    x, y, alpha = a["self"], a["other"], a.get("alpha", 1)
    if swapped:
        x, y = y, x
    if alpha != 1:
        return None
    if not isinstance(x, ProgramTensor):
        return _sum_with_constant(builder, hint, y, sign, x, 1)
    if not isinstance(y, ProgramTensor):
        return _sum_with_constant(builder, hint, x, 1, y, sign)
    if not has_channels(builder, x) or not has_channels(builder, y):
        return None
    one, two = builder.values[x.name].shape, builder.values[y.name].shape
    alike = one == two
    if not alike and not (len(one) == len(two) > 2 and one[:2] == two[:2] and {1} in (set(one[2:]), set(two[2:]))):
        return None
    other = y if sign == 1 else add_affine(builder, hint, y, torch.tensor(-1.0), torch.tensor(0.0))
    names = (x.name, other.name)
    if alike:
        return ProgramTensor(builder.add(Add, names, hint))
    return ProgramTensor(builder.add(AddNumbers, names if set(two[2:]) == {1} else names[::-1], hint))


def _sum_with_constant(
    builder: ProgramBuilder, hint: str, x: ProgramTensor, sign: int, constant: Any, factor: int
) -> Any:
    """The sum sign · x + factor · constant."""
    values = constant_operand(builder, x, constant)
    if values is None:
        return None
    scale, zero = torch.tensor(float(sign)), torch.tensor(0.0)
    if values.dim() == 1:
        return add_affine(builder, hint, x, scale, factor * values)
    signed = x if sign == 1 else add_affine(builder, hint, x, scale, zero)
    return ProgramTensor(builder.add(AddMap, (signed.name,), hint, map=factor * values))
