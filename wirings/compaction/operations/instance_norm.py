"""Instance norms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wirings.compaction.aten import Arguments, ProgramTensor, converts, has_channels
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.operation import Tensors, expect
from wirings.compaction.operations.affine import Affine, ScaledChannels, batch_norm

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class InstanceNorm(ScaledChannels):
    """Normalize each channel of each image over its pixels, then multiply by ``scale`` and add ``shift``."""

    epsilon: float = 1e-5

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        if inputs[0].shape[0] == 0:
            return inputs[0]  # PyTorch's raises for an empty batch
        return F.instance_norm(inputs[0], weight=own["scale"], bias=own["shift"], eps=self.epsilon)

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect(inputs[0].dim() > 2, "maps")
        super().check(inputs)

    def simplify(self, rewriter: ProgramRewriter) -> bool:
        """Remove a shift right before the norm, which subtracts the mean anyway."""
        before = rewriter.sole_producer(self.inputs[0])
        if before is not None and (split := before.split_bias()) is not None:
            rewriter.replace(split[0])
            return True
        if isinstance(before, Affine) and bool(before.shift.any()):
            rewriter.replace(dataclasses.replace(before, shift=torch.zeros_like(before.shift)))
            return True
        return False

    def to_onnx(self, writer: OnnxWriter) -> None:
        own = [writer.tensor(self.scale, f"{self.output}.scale"), writer.tensor(self.shift, f"{self.output}.shift")]
        writer.node("InstanceNormalization", [self.inputs[0], *own], self.output, epsilon=self.epsilon)


@converts("instance_norm")
def _instance_norm(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x: Any = a["input"]
    if not has_channels(builder, x):
        return None
    if not a["use_input_stats"]:
        return batch_norm(builder, hint, {**a, "training": False})
    scale, shift = a.get("weight"), a.get("bias")
    if isinstance(scale, ProgramTensor) or isinstance(shift, ProgramTensor):
        return None
    scale = builder.ones(x.name) if scale is None else scale
    shift = torch.zeros_like(scale) if shift is None else shift
    return ProgramTensor(builder.add(InstanceNorm, (x.name,), hint, scale=scale, shift=shift, epsilon=a["eps"]))
