"""Adding constant maps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.constant_maps import uniform_values
from wirings.compaction.operation import Operation, Shape, Tensors, expect
from wirings.compaction.operations.affine import Affine, producer_absorbs_scale, scale_inputs, scatter_rows

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class AddMap(Operation):
    """Add a constant map to each channel. Maps express what constant nodes contribute, exactly, borders included."""

    weights = ("map",)
    map: Tensor
    """(channels, height, width)."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return inputs[0] + own["map"]

    @property
    def fixed_size(self) -> bool:
        return self.map.dim() > 1

    def check(self, inputs: Sequence[Tensor]) -> None:
        shape = inputs[0].shape[1:]
        expect(torch.broadcast_shapes(self.map.shape, shape) == shape, "a map of its input's size")

    def is_identity(self, shapes: Mapping[str, Shape]) -> bool:
        return not self.map.any()

    def simplify(self, rewriter: ProgramRewriter) -> bool:
        """Turn uniform maps into a shift, merge two maps, and add a preceding bias to the maps."""
        if (values := uniform_values(self.map)) is not None:
            rewriter.replace(Affine(self.output, self.inputs, torch.ones_like(values), values))
            return True
        before = rewriter.sole_producer(self.inputs[0])
        if isinstance(before, AddMap):
            rewriter.replace(dataclasses.replace(self, inputs=before.inputs, map=self.map + before.map))
            rewriter.remove(before.output, before.inputs[0])
            return True
        if before is not None and (split := before.split_bias()) is not None:
            without, bias = split
            rewriter.replace(without)
            rewriter.replace(dataclasses.replace(self, map=self.map + bias.view(-1, *[1] * (self.map.dim() - 1))))
            return True
        return False

    def absorbs_scale(self, rewriter: ProgramRewriter) -> bool:
        return producer_absorbs_scale(rewriter, self.inputs[0])

    def absorb_affine(self, rewriter: ProgramRewriter, affine: Affine) -> bool:
        only_shift = bool((affine.scale == 1).all())
        if not only_shift and not self.absorbs_scale(rewriter):
            return False
        scale, shift = (x.view(-1, *[1] * (self.map.dim() - 1)) for x in (affine.scale, affine.shift))
        rewriter.replace(dataclasses.replace(self, map=self.map * scale + shift))
        if not only_shift:
            scale_inputs(rewriter, self, [(affine.scale, torch.zeros_like(affine.shift))])
        rewriter.remove(affine.output, self.output)
        return True

    def scattered_weights(self, index: Tensor, channels: int) -> dict[str, Any] | None:
        return {"map": scatter_rows(self.map, index, channels)}

    def to_onnx(self, writer: OnnxWriter) -> None:
        writer.node("Add", [self.inputs[0], writer.tensor(self.map[None], f"{self.output}.map")], self.output)
