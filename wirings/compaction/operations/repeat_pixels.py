"""Larger maps by repeating pixels: nearest-neighbour upsampling by whole factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import Operation, Shape, Tensors, expect

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter

MAX_FACTOR = 2**10
"""The most times that a file may repeat a pixel along one dimension."""


@dataclass(frozen=True, eq=False)
class RepeatPixels(Operation):
    """Every pixel repeated along each dimension of its map."""

    factors: tuple[int, ...] = ()
    """How many times, for each dimension."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        x = inputs[0]
        for dim, factor in enumerate(self.factors, 2):
            if factor > 1:
                x = x.unsqueeze(dim + 1).expand(*x.shape[: dim + 1], factor, *x.shape[dim + 1 :]).flatten(dim, dim + 1)
        return x

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(len(self.factors) == inputs[0].dim() - 2, "a factor for each dimension of the maps")
        expect(all(1 <= factor <= MAX_FACTOR for factor in self.factors), f"factors from 1 to {MAX_FACTOR}")

    def is_identity(self, shapes: Mapping[str, Shape]) -> bool:
        return set(self.factors) == {1}

    def affine_repeats(self, shape: Shape) -> int:
        return 1

    def to_onnx(self, writer: OnnxWriter) -> None:
        shape = writer.shapes[self.inputs[0]]
        split = [size for own in zip(shape[1:], [1] * len(self.factors), strict=True) for size in own]
        parts = writer.integers([0, shape[0], *split], f"{self.output}.split")
        x = writer.node("Reshape", [self.inputs[0], parts], f"{self.output}.parts")
        times = [size for factor in self.factors for size in (1, factor)]
        x = writer.node("Tile", [x, writer.integers([1, 1, *times], f"{self.output}.times")], f"{self.output}.tiled")
        sizes = [size * factor for size, factor in zip(shape[1:], self.factors, strict=True)]
        writer.node("Reshape", [x, writer.integers([0, shape[0], *sizes], f"{self.output}.to")], self.output)


@converts("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
          "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")  # fmt: skip
def _upsample(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x: Any = a.get("input", a.get("self"))
    shape = a["out"]  # the tracer provides the resulting shape
    if not has_channels(builder, x) or shape is None:
        return None
    before, after = tuple(builder.values[x.name].shape[2:]), tuple(shape[2:])
    if not math.prod(before) or any(large % small for large, small in zip(after, before, strict=True)):
        return None
    factors = tuple(large // small for large, small in zip(after, before, strict=True))
    given = a.get("scale_factors") or [a.get(f"scales{side}") for side in ("_d", "_h", "_w", "")]
    if not {float(n) for n in given if n is not None} <= {float(n) for n in factors}:
        return None  # a size that was rounded down
    return ProgramTensor(builder.add(RepeatPixels, (x.name,), hint, factors=factors))
