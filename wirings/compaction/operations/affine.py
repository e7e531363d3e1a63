"""A scale and a shift of each channel; batch norms in evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wirings.compaction.aten import (
    Arguments,
    ProgramTensor,
    converts,
    converts_views,
    has_channels,
    view_of,
    viewed,
)
from wirings.compaction.builder import ProgramBuilder
from wirings.compaction.channel_constants import ChannelConstants
from wirings.compaction.operation import Operation, Shape, Tensors, by_channel, expect_size

if TYPE_CHECKING:
    from wirings.compaction.onnx import OnnxWriter
    from wirings.compaction.rewriter import ProgramRewriter


@dataclass(frozen=True, eq=False)
class ScaledChannels(Operation):
    """An operation that ends with each channel times ``scale`` plus ``shift``, both (channels,)."""

    weights = ("scale", "shift")
    scale: Tensor
    shift: Tensor

    def check(self, inputs: Sequence[Tensor]) -> None:
        expect_size(self.scale, (inputs[0].shape[1],))
        expect_size(self.shift, (inputs[0].shape[1],))

    def constant_channels(self, inputs: Sequence[ChannelConstants]) -> Tensor:
        return inputs[0].constant | (self.scale == 0)


@dataclass(frozen=True, eq=False)
class Affine(ScaledChannels):
    """Each channel times ``scale`` plus ``shift``, both (channels,)."""

    def compute(self, inputs: Sequence[Tensor], own: Tensors) -> Tensor:
        return inputs[0] * by_channel(own["scale"], inputs[0]) + by_channel(own["shift"], inputs[0])

    def is_identity(self, shapes: Mapping[str, Shape]) -> bool:
        return bool((self.scale == 1).all() and (self.shift == 0).all())

    def absorbs_scale(self, rewriter: ProgramRewriter) -> bool:
        return True

    def absorb_affine(self, rewriter: ProgramRewriter, affine: Affine) -> bool:
        shift = self.shift * affine.scale + affine.shift
        rewriter.replace(dataclasses.replace(self, scale=self.scale * affine.scale, shift=shift))
        rewriter.remove(affine.output, self.output)
        return True

    def scattered_weights(self, index: Tensor, channels: int) -> dict[str, Any] | None:
        return {name: scatter_rows(x, index, channels) for name, x in self.tensors().items()}

    def to_onnx(self, writer: OnnxWriter) -> None:
        scaled = bool((self.scale != 1).any())
        shifted = bool(self.shift.any()) or not scaled
        name = self.inputs[0]
        if scaled:
            product = f"{self.output}.scaled" if shifted else self.output
            name = writer.node("Mul", [name, writer.by_channel(self, self.scale, "scale")], product)
        if shifted:
            writer.node("Add", [name, writer.by_channel(self, self.shift, "shift")], self.output)


def scatter_rows(x: Tensor | None, index: Tensor, rows: int) -> Tensor | None:
    """A tensor whose rows are moved to ``index`` among ``rows``; the others are zero."""
    return None if x is None else x.new_zeros(rows, *x.shape[1:]).index_copy(0, index, x)


def scale_inputs(rewriter: ProgramRewriter, o: Operation, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Insert an affine operation, a pair of a scale and a shift, before each input of an operation."""
    inputs = []
    for name, (scale, shift) in zip(o.inputs, pairs, strict=True):
        new = rewriter.new_name(f"{name}.scaled")
        rewriter.insert(o.output, Affine(new, (name,), scale.clone(), shift.clone()))
        inputs.append(new)
    rewriter.replace(dataclasses.replace(rewriter.operations[o.output], inputs=tuple(inputs)))


def producer_absorbs_scale(rewriter: ProgramRewriter, name: str) -> bool:
    """Whether a scale of each channel of a tensor can be moved into the operation that computes it."""
    producer = rewriter.sole_producer(name)
    return producer is not None and producer.absorbs_scale(rewriter)


def norm_as_affine(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The scale and shift of a norm with fixed statistics."""
    scale = (var.double() + epsilon).rsqrt()
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale
    shift = shift if bias is None else shift + bias.double()
    return scale.to(mean.dtype), shift.to(mean.dtype)


def add_affine(builder: ProgramBuilder, hint: str, x: ProgramTensor, scale: Tensor, shift: Tensor) -> ProgramTensor:
    """Add an affine operation whose scale and shift are one number, or one per channel."""
    ones = builder.ones(x.name)
    return ProgramTensor(builder.add(Affine, (x.name,), hint, scale=ones * scale, shift=ones * shift))


def constant_operand(builder: ProgramBuilder, x: ProgramTensor, constant: Any) -> Tensor | None:
    """A constant operand of x: one number per channel or one map per channel; None if it is neither."""
    if not has_channels(builder, x) or not isinstance(constant, (int, float, Tensor)):
        return None
    value = builder.values[x.name]
    given = torch.as_tensor(constant, dtype=value.dtype)
    if isinstance(constant, Tensor) and not torch.can_cast(constant.dtype, value.dtype):
        return None
    if given.dim() > value.dim() or (given.dim() == value.dim() and given.shape[0] != 1):
        return None
    given = given.reshape(*[1] * (value.dim() - given.dim()), *given.shape)[0]
    if torch.broadcast_shapes(given.shape, value.shape[1:]) != value.shape[1:]:
        return None
    if all(size == 1 for size in given.shape[1:]):
        return given.reshape(-1).expand(value.shape[1]).clone()
    return given.expand(value.shape[1:]).clone()


@converts("_native_batch_norm_legit_no_training", "batch_norm")
def batch_norm(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    x: Any = a["input"]
    mean, var = a.get("running_mean"), a.get("running_var")
    fixed = all(p is None or isinstance(p, Tensor) for p in (a.get("weight"), a.get("bias")))
    if a.get("training") or not isinstance(mean, Tensor) or not isinstance(var, Tensor) or not fixed:
        return None
    if not has_channels(builder, x):
        return None
    scale, shift = norm_as_affine(mean, var, a.get("weight"), a.get("bias"), a["eps"])
    result = ProgramTensor(builder.add(Affine, (x.name,), hint, scale=scale, shift=shift))
    return result if "training" in a else (result, None, None)


@converts_views("_native_batch_norm_legit_no_training", "batch_norm")
def _batch_norm_of_view(builder: ProgramBuilder, hint: str, a: Arguments) -> Any:
    """A norm of the channels of all tokens, as of (batch · tokens, channels)."""
    x: Any = a["input"]
    axes = view_of(builder, x)
    if axes is None or not axes.is_channels(1):
        return None
    made = batch_norm(builder, hint, {**a, "input": ProgramTensor(x.name)})
    if made is None:
        return None
    result = viewed(builder, (made if "training" in a else made[0]).name, axes)
    return result if "training" in a else (result, None, None)
