"""Means over all pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import Operation, Shape, Tensors, expect

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class Mean(Operation):
    """The mean over all pixels: (batch, channels), or (batch, channels, 1, 1) with ``keep``."""

    keep: bool = False

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return inputs[0].mean(list(range(2, inputs[0].dim())), keepdim=self.keep)

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(inputs[0].dim() > 2, "maps")

    def affine_repeats(self, shape: Shape) -> int:
        return 1

    def to_onnx(self, writer: OnnxWriter) -> None:
        if self.keep:
            writer.node("GlobalAveragePool", list(self.inputs), self.output)
        else:
            dims = len(writer.shapes[self.inputs[0]]) - 1
            axes = list(range(2, 2 + dims))
            writer.node("ReduceMean", list(self.inputs), self.output, axes=axes, keepdims=0)


def merge_into_mean(rewriter: ProgramRewriter, o: Operation) -> bool:
    """Replace a mean with maps of one pixel, followed by ``o`` that makes them numbers, by a mean without maps."""
    before = rewriter.sole_producer(o.inputs[0])
    if len(rewriter.shapes[o.output]) != 1 or not isinstance(before, Mean) or not before.keep:
        return False
    rewriter.replace(Mean(o.output, before.inputs, keep=False))
    rewriter.remove(before.output, before.inputs[0])
    return True


@converts("mean")
def _mean(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x, dims = a["self"], a.get("dim")
    if not has_channels(builder, x) or not dims or a.get("dtype") is not None:
        return None
    count = builder.values[x.name].dim()
    if sorted(d % count for d in dims) != list(range(2, count)):
        return None
    return ProgramTensor(builder.add(Mean, (x.name,), hint, keep=bool(a.get("keepdim", False))))
