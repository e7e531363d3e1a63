"""Other shapes of maps: views, reshapes, squeezes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import MAX_DIMENSIONS, Operation, Shape, Tensors, expect
from wirings.compaction.operations.flatten import Flatten
from wirings.compaction.operations.mean import merge_into_mean

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class Reshape(Operation):
    """The pixels of each channel, in order, as a map of another ``shape``; () for one number per channel."""

    shape: tuple[int, ...] = ()

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return inputs[0].reshape(*inputs[0].shape[:2], *self.shape)

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(len(self.shape) < MAX_DIMENSIONS and all(n >= 0 for n in self.shape), "sizes of 0 or more")

    def is_identity(self, shapes: Mapping[str, Shape]) -> bool:
        return self.shape == shapes[self.inputs[0]][1:]

    def simplify(self, rewriter: ProgramRewriter) -> bool:
        return merge_into_mean(rewriter, self)

    def affine_repeats(self, shape: Shape) -> int:
        return 1

    def to_onnx(self, writer: OnnxWriter) -> None:
        shape = writer.integers([0, 0, *self.shape], f"{self.output}.to")
        writer.node("Reshape", [self.inputs[0], shape], self.output)


@converts("view", "reshape", "_unsafe_view", "flatten", "squeeze", "unsqueeze", "unflatten")
def _reshape(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x, shape = a["self"], a["out"]  # the tracer provides the resulting shape if dimension 0 is still the batch
    if not has_channels(builder, x) or shape is None or len(shape) < 2:
        return None
    channels, *maps = builder.values[x.name].shape[1:]
    if shape[1] == channels and list(shape[2:]) == maps:
        return x
    if shape[1] == channels and math.prod(shape[2:]) == math.prod(maps):
        return ProgramTensor(builder.add(Reshape, (x.name,), hint, shape=tuple(shape[2:])))
    if len(shape) == 2 and shape[1] == channels * math.prod(maps):
        return ProgramTensor(builder.add(Flatten, (x.name,), hint))
    return None
